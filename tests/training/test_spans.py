"""T5 on sentences: spans are taken out of real text and foretold, over a split pipeline, and a stopped run goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mega.cli import main
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.text.build import build

PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] . the a old red cat dog bird fish sees likes near by river house tree ##s"
MODEL = (
    "--model tiny-t5 --hidden 32 --heads 4 --head-dim 8 --ffn 64 --seq-length 32 --decoder-seq-length 24 "
    "--vocab-extra-ids 12 --split 9,1,0 --steps 16 --save-interval 8 --lr 1e-2 --micro-batch 4 --global-batch 8 "
    "--nproc 2 --pp 2 --split-rank 1 --device cpu --log-interval 1 --eval-iters 1 --eval-interval 16"
).split()


@pytest.fixture
def sentences(tmp_path: Path) -> list[str]:
    """The flags of 60 documents of sentences of one grammar, made without sentinels as `mega preprocess` makes them."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(PIECES.split()) + "\n")
    tokenizer, draw = build(tokenizer="BertWordPieceLowerCase", vocab_file=str(vocab)), random.Random(3)

    def sentence() -> str:
        one, other = (f"{draw.choice(['the', 'a'])} {draw.choice(['old', 'red'])} " for _ in range(2))
        one, other = one + draw.choice(["cat", "dog"]), other + draw.choice(["bird", "fish"])
        return f"{one} {draw.choice(['sees', 'likes'])} {other} near the {draw.choice(['river', 'house', 'tree'])}."

    note = {"tokenizer": tokenizer.identity()._asdict()}
    with IndexedWriter(tmp_path / "text", np.dtype(np.uint16), noted=note) as writer:
        for _ in range(60):
            writer.add([tokenizer.encode(sentence()) for _ in range(draw.randint(1, 5))])
    return ["--data-path", str(tmp_path / "text"), "--vocab-file", str(vocab)]


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "grad_norm" in row}


def test_the_loss_falls_and_a_stopped_run_is_bitwise_the_straight_one(
    sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its checkpoint is cut again for other stages, and goes to Megatron-LM's tree and back with Adam's state."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main(["pretrain", *MODEL, *sentences, "--save", str(straight)]) == 0
    assert main(["pretrain", *MODEL, *sentences, "--save", str(stopped), "--exit-interval", "8"]) == 0
    assert CheckpointStore(stopped).steps() == [8]
    assert main(["pretrain", *MODEL, *sentences, "--save", str(stopped), "--resume", "auto"]) == 0
    found = losses(straight)
    capsys.readouterr()
    assert losses(stopped) == found and len(found) == 16
    assert sum(found[step] for step in range(12, 17)) / 5 < found[1] - 1.0
    first, second = CheckpointStore(straight).open(16), CheckpointStore(stopped).open(16)
    assert any(key == "moment2/model.decoder.layers.0.encoder_attn.k_proj.weight" for key in first.tensors)
    assert set(first.tensors) == set(second.tensors) and not list(diff(first, second))
    assert main(f"convert-llama --to hf --load-dir {straight} --save-dir {tmp_path / 'other'}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("T5" in line) and not (tmp_path / "other").exists()
    tree, back = tmp_path / "tree", tmp_path / "back"
    assert main(f"reshard --saver megatron --tp 2 --pp 2 --load-dir {straight} --save-dir {tree}".split()) == 0
    assert main(f"reshard --load-dir {tree} --save-dir {back}".split()) == 0
    assert not list(diff(first, CheckpointStore(back).open(16)))
    whole = tmp_path / "whole"
    assert main(["reshard", "--load-dir", str(straight), "--save-dir", str(whole), "--tp", "2", "--pp", "4"]) == 0
    assert not list(diff(first, CheckpointStore(whole).open(16)))


def test_a_vocabulary_without_sentinels_is_refused(
    sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = MODEL.index("--vocab-extra-ids")
    bare = [*MODEL[:at], *MODEL[at + 2 :], *sentences, "--save", str(tmp_path / "none")]
    assert main(["pretrain", *bare]) == 2
    assert "--vocab-extra-ids 0: must be greater than 0 for T5" in capsys.readouterr().err
