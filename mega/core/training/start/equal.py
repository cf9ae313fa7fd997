"""The values that must be identical on all ranks and hosts of a run, with user-readable names: code, flags, tokenizer,
data. This module does not import torch.

Ranks compare these values before the first step (consistency.py); hosts compare them when they join a run
(processes/leader.py).
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import mega
from mega.core.config.run import Options, RunConfig, entries, flag_of, value_of
from mega.core.files import sampled_digest
from mega.core.training.start.inputs import Inputs


def code() -> dict[str, str]:
    return {"the version of mega": f"{mega.__version__} ({_source()[:8]})"}


@cache
def _source() -> str:
    """Return a hash of all source files of the package, with their paths."""
    root, digest = Path(mega.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def flags(run: RunConfig | Options) -> dict[str, str]:
    return {flag_of(name): str(value_of(run, name)) for name in entries()}


def alike(options: Options, inputs: Inputs) -> dict[str, str]:
    """Return the values by which a host that joins a run is compared with other hosts. The flags are compared as given
    on the command line, because their resolved values may depend on the checkpoints of the run."""
    return {**code(), **flags(options), **contents(inputs)}


def contents(inputs: Inputs) -> dict[str, str]:
    """Return digests of the tokenizer and of all data files of the run."""
    digests = {"the tokenizer": inputs.tokenizer.fingerprint()} if inputs.tokenizer is not None else {}
    for prefix, content in inputs.datasets.corpora.items():
        digests[f"the content of {prefix}"] = hashlib.sha256(json.dumps(dict(content)).encode()).hexdigest()
    words = [value_of(inputs.run, name) for name, entry in entries().items() if entry.section == "data"]
    for word in (each for value in words for each in (value if isinstance(value, tuple) else (value,))):
        if isinstance(word, str) and word not in inputs.datasets.corpora and Path(word).is_file():
            digests[f"the content of {word}"] = sampled_digest(Path(word))
    return {name: digest[:12] for name, digest in digests.items()}
