"""The values that must be identical on all ranks and hosts of a run, with user-readable names: code, flags, tokenizer,
data. This module does not import torch.

Ranks compare these values before the first step (consistency.py); hosts compare them when they join a run
(processes/leader.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mega.core.config.run import Options, RunConfig, entries, flag_of, value_of
from mega.core.files import sampled_digest
from mega.core.processes.code import code
from mega.core.training.start.inputs import Inputs


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
