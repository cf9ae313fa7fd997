"""A training begins with others' weights where they lie, as it does with the checkpoint that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega.cli import main
from mega.core.checkpoint.forms.direct import files_digest

SHAPE = "--family llama --layers 1 --hidden 16 --heads 2 --ffn 32 --vocab 64".split()
RUN = (
    "--seq-length 8 --positions 8 --mock-data --micro-batch 1 --lr 1e-3 --lr-decay constant --eval-iters 0 "
    "--device cpu --no-progress --steps 2"
).split()


def _losses(metrics: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, metrics.read_text().splitlines()) if "lr" in row]


def test_a_hugging_face_folder_is_where_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["pretrain", *SHAPE, *RUN, "--save", str(ours), "--save-interval", "2"]) == 0
    assert main(["convert-llama", "--load-dir", str(ours), "--save-dir", str(theirs)]) == 0
    first, *others = (tmp_path / f"{number}.jsonl" for number in range(3))
    config = "--use-checkpoint-config"
    assert main(["pretrain", *RUN, config, "--load", str(ours), "--finetune", "--metrics", str(first)]) == 0
    for verb, metrics in zip(("pretrain", "finetune"), others, strict=True):
        more = [config] if verb == "pretrain" else []
        assert main([verb, *RUN, *more, "--load", str(theirs), "--metrics", str(metrics)]) == 0
        assert _losses(metrics) == _losses(first)
    assert f"weights from {theirs}; the optimizer and the steps begin afresh" in capsys.readouterr().out
    for place in (ours, theirs):  # rows beyond a tokenizer's are tokens too, as many as there are
        rows = [*SHAPE[:-1], "60", "--no-mask-padded-vocab", "--load", str(place), "--finetune"]
        assert main(["pretrain", *rows, *RUN, "--metrics", str(first)]) == 0
        assert "vocabulary 64; " in capsys.readouterr().out


def test_a_tree_of_megatron_names_what_continues_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its optimizer and steps are not read in place; where it is also where the run saves, the run does not begin."""
    ours, tree = tmp_path / "ours", tmp_path / "tree"
    assert main(["pretrain", *SHAPE, *RUN, "--save", str(ours), "--save-interval", "2"]) == 0
    assert main(["reshard", "--load-dir", str(ours), "--save-dir", str(tree), "--saver", "megatron-23.06"]) == 0
    assert "which loads it with --no-load-rng: " in capsys.readouterr().out
    line = ["pretrain", *RUN, "--use-checkpoint-config", "--metrics", str(tmp_path / "m"), "--load", str(tree)]
    advice = f"`mega reshard --load-dir {tree} --save-dir "
    assert main(line) == 0
    assert f"{advice}RUN` makes a checkpoint, which --load RUN continues" in capsys.readouterr().out
    assert main([*line, "--finetune"]) == 0
    assert advice not in capsys.readouterr().out, "weights alone are asked for"
    before = sorted(tree.rglob("*"))
    assert main([*line, "--save", str(tree), "--save-interval", "2"]) == 2
    said = capsys.readouterr()
    assert f"--save {tree}: holds a tree of Megatron-LM" in said.err and f"{advice}{tree}-mega`" in said.err
    assert "starting from the beginning" not in said.out and sorted(tree.rglob("*")) == before


def test_a_digest_tells_weights_of_equal_names_and_sizes_apart(tmp_path: Path) -> None:
    """As those of one model before and after a training that left its first tensors as they were."""
    weights = np.zeros(1 << 20, np.uint8)
    for name, change in (("a", slice(0)), ("same", slice(0)), ("b", slice(1 << 19, None))):
        (tmp_path / name).mkdir()
        changed = weights.copy()
        changed[change] = 1
        (tmp_path / name / "model.bin").write_bytes(changed.tobytes())
    first, same, other = (files_digest(tmp_path / name) for name in ("a", "same", "b"))
    assert first == same != other
