"""The example scripts of Megatron-LM 23.06 for BERT and T5, word for word: they check, and the model is theirs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.data import mapping, recipes
from mega.core.data.writer import IndexedWriter
from tests.support.shared import shared

SCRIPTS = [
    # (script, family, ranks, parameters of a rank of each stage, with the padded vocabulary)
    ("pretrain_bert.sh", "bert", 1, ["336,297,858"]),
    ("pretrain_bert_distributed_with_mp.sh", "bert", 8, ["91,869,184", "93,463,554"]),
    ("pretrain_t5.sh", "t5", 1, ["222,495,744"]),
    ("pretrain_t5_distributed_with_mp.sh", "t5", 8, ["111,"]),
]


def flags_of(script: str) -> list[str]:
    """As they were recorded from the script."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in shared("command_lines.jsonl").read_text().splitlines()]
    wanted = ("Megatron-LM 23.06", f"examples/{script}")
    return next(row["flags"] for row in rows if (row["system"], row["script"]) == wanted)


@pytest.mark.parametrize(("script", "family", "ranks", "sizes"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_it_checks(
    script: str,
    family: str,
    ranks: int,
    sizes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a vocabulary of Google's and a corpus where the script names them; its millions of samples are not drawn."""
    monkeypatch.chdir(tmp_path)
    Path("PLACEHOLDER").mkdir()
    shutil.copy(shared("bert/bert-base-uncased-vocab.txt"), f"PLACEHOLDER/{family}-vocab.txt")
    draw = random.Random(3)
    with IndexedWriter(tmp_path / "PLACEHOLDER_text_sentence", np.dtype(np.uint16)) as writer:
        for _ in range(60):
            writer.add([[draw.randrange(1000, 2000) for _ in range(8)] for _ in range(6)])

    def few(*arguments: Any, samples: int, **more: Any) -> Any:
        found = mapping.sentence_mapping(*arguments, samples=min(samples, 100), **more)
        return np.resize(found, (samples, 3)) if samples < 1000 else found

    monkeypatch.setattr(recipes, "sentence_mapping", few)
    assert main(["pretrain", "--family", family, *flags_of(script), "--dry-run", "--world", str(ranks)]) == 0
    printed = capsys.readouterr().out
    assert "everything checked, nothing trained" in printed and all(size in printed for size in sizes)
