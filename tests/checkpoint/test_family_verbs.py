"""One family through some verbs, from a folder as Hugging Face has it. All of both: tests/battery/family_verbs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.battery.family_verbs import Verbs


def test_a_family_goes_through_the_verbs(tmp_path: Path) -> None:
    for judge in ("transformers", "tokenizers", "peft"):
        pytest.importorskip(judge)
    verbs = Verbs("phi3", tmp_path)
    verbs.convert()
    verbs.finetune()
    verbs.adapters()
    verbs.generate()
