"""BERT from files of sentences to a falling loss, stopped and resumed; from TFRecords; and what it refuses."""

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
from tests.support.shared import shared

CONTROLS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 40
MODEL = (
    "--family bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-multiple 4 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 1e-2 --lr-decay-style linear --lr-warmup-fraction .1 "
    "--log-interval 1 --eval-iters 1 --eval-interval 6 --save-interval 6 --bucket-size 5000 --device cpu"
).split()
LAYOUT = "--train-iters 12 --nproc 4 --tp 2 --pp 2 --sequence-parallel --resume auto".split()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*CONTROLS, *(f"word{number}" for number in range(WORDS))]))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of seven sentences, in which a few words are much more frequent than others."""
    prefix = tmp_path_factory.mktemp("corpus") / "words"
    draws = random.Random(5)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(120):
            ids = [len(CONTROLS) + draws.randrange(draws.choice([3, 3, 3, WORDS])) for _ in range(28)]
            writer.add([ids[at : at + 4] for at in range(0, 28, 4)])
    return str(prefix)


def command(corpus: str, vocabulary: Path, out: Path) -> list[str]:
    return ["pretrain", *MODEL, "--vocab-file", str(vocabulary), "--data-path", corpus, "--save", str(out)]


def rows(out: Path) -> dict[int, dict[str, float]]:
    """Step -> what was logged of it, but for times."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "lm", "pair", "pair_accuracy", "grad_norm")
    return {row["step"]: {name: row[name] for name in names} for row in found if "grad_norm" in row}


def test_stopped_and_resumed_on_falling_losses(corpus: str, vocabulary: Path, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main([*command(corpus, vocabulary, straight), *LAYOUT]) == 0
    found = rows(straight)
    assert sum(found[step]["lm"] for step in range(9, 13)) / 4 < 0.8 * found[1]["lm"]
    assert all(row["loss"] == pytest.approx(row["lm"] + row["pair"]) for row in found.values())

    assert main([*command(corpus, vocabulary, stopped), *LAYOUT, "--exit-interval", "6"]) == 0
    assert CheckpointStore(stopped).steps() == [6]
    assert main([*command(corpus, vocabulary, stopped), *LAYOUT]) == 0
    assert rows(stopped) == found
    first, second = CheckpointStore(straight).open(12), CheckpointStore(stopped).open(12)
    assert set(first.tensors) == set(second.tensors) and not list(diff(first, second))


def test_records_of_google_train(tmp_path: Path) -> None:
    """Version 1's line of flags, of which the records say how many words are masked."""
    records = shared("bert_tfrecord/tf_examples.tfrecord")
    line = (
        "pretrain --model tiny-bert --seq-length 128 --micro-batch 4 --steps 2 --lr 1e-3 --tokenizer-type "
        f"BertWordPieceLowerCase --vocab-file {shared('bert/bert-base-uncased-vocab.txt')} --use-tfrecords "
        f"--max-preds-per-seq 20 --train-data {records} --eval-iters 0 --log-interval 1 --device cpu "
        f"--metrics {tmp_path / 'metrics.jsonl'}"
    )
    assert main(line.split()) == 0
    found = rows(tmp_path)
    assert all(0.6 < row["pair"] < 0.8 and 10 < row["lm"] < 10.6 for row in found.values()) and len(found) == 2


def test_a_model_with_a_row_for_each_line_of_its_file(corpus: str, vocabulary: Path, tmp_path: Path) -> None:
    """As others' have: ours would add [BOS] and [EOS], which BERT neither reads nor puts in place of another word."""
    line = [*command(corpus, vocabulary, tmp_path), "--vocab", str(len(CONTROLS) + WORDS), "--train-iters", "2"]
    assert main([*line, "--num-layers", "1", "--eval-iters", "0"]) == 0
    assert len(rows(tmp_path)) == 2
    line[line.index("--vocab") + 1] = str(len(CONTROLS) + WORDS - 1)
    assert main(line) == 2


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--vocab-file", "{bare}"], "has no [MASK], which BertWordPieceLowerCase needs"),
        (["--tokenizer", "NullTokenizer", "--vocab-size", "50"], "has no CLS, SEP and MASK, which BERT and T5 need"),
        (["--data-path", "{documents}"], "no document has 2 or more sentences of at most 512 tokens"),
        (["--sample-kind", "gpt"], "--sample-kind gpt: --family bert reads other samples; valid: bert"),
        (["--chat-data", "{bare}"], "needs --family gpt or llama"),
        (["--no-tied"], "needs --family gpt or llama"),
        (["--reset-attention-mask"], "needs --family gpt or llama"),
        (["--head", "none"], "--head none: has nothing to train; valid: lm, classification"),
        (["--classes", "3"], "--classes 3: needs --head classification or choice, not lm"),
    ],
)
def test_what_bert_refuses(
    flags: list[str],
    line: str,
    corpus: str,
    vocabulary: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, before any rank starts."""
    bare, documents = tmp_path / "bare.txt", tmp_path / "documents"
    bare.write_text(vocabulary.read_text().replace("[MASK]", "[MASKED]"))
    with IndexedWriter(documents, np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add([list(range(5, 25))])
    asked = [flag.format(bare=bare, documents=documents) for flag in flags]
    given = {"--vocab-file": str(vocabulary), "--data-path": corpus}
    rest = [word for name, value in given.items() if name not in asked for word in (name, value)]
    rest = [] if "--chat-data" in asked else rest if "NullTokenizer" not in asked else rest[2:]
    assert (
        main(["pretrain", *MODEL, "--steps", "2", *rest, *asked, "--save", str(tmp_path / "run"), "--nproc", "2"]) == 2
    )
    said = [each for each in capsys.readouterr().err.splitlines() if line in each]
    assert len(said) == 1
