"""Makes the golden checkpoints: one tiny one of every kind, kept for ever so that every later version must read them.

    python tests/golden/make.py

Only kinds that have no folder yet are made, and `expected.json` gains the sha256 over all weights that must come out.
Never make one again because a test fails: what was written once must stay readable.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.support.foreign_forms import FORMS, weights_of

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names and bytes, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def make() -> None:
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for kind, form in FORMS.items():
        folder = HERE / kind.replace(" ", "-")
        if folder.exists():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load = form.make(folder)
        where = str(load.relative_to(HERE))
        expected[kind] = {"load": where, "verb": form.verb, "weights": digest(weights_of(form.model))}
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make()
