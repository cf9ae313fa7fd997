"""The change test of tokenizers: one that the project does not know is one file and one row, through the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.config.sections import TOKENIZERS
from mega.core.data.indexed import IndexedDataset
from mega.core.text.build import BUILDERS, build
from tests.support import toy_tokenizer

VERBS = ("mega.commands.preprocess", "mega.commands.data", "mega.commands.pretrain")
TEXTS = ["one text", "", "zwei, \u00fcber\u00e4ll <|end|>"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The toy tokenizer in the rows; commands, which take their choices from them, are loaded again, afterwards too."""
    toy_tokenizer.register()
    for verb in VERBS:
        sys.modules.pop(verb, None)
    yield
    del TOKENIZERS[toy_tokenizer.KIND], BUILDERS[toy_tokenizer.KIND]
    for verb in VERBS:
        sys.modules.pop(verb, None)


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.txt"
    path.write_text("<|end|>\n")
    return path


def test_it_fills_token_files_in_every_worker(tmp_path: Path, names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers have the row; those of a process that cannot fork import only what is built in."""
    monkeypatch.setattr("mega.core.data.workers._can_fork", lambda: True)
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    for workers in (1, 2):
        prefix = tmp_path / f"a{workers}"
        line = f"preprocess --input {text} --output-prefix {prefix} --tokenizer ToyTokenizer --vocab-file {names}"
        assert main(f"{line} --append-eod --workers {workers}".split()) == 0
        dataset = IndexedDataset(f"{prefix}_text_document")
        assert [list(dataset[number]) for number in range(len(dataset))] == [
            [*each.encode(), 256] for each in TEXTS if each
        ]


def test_a_run_trains_from_them(tmp_path: Path, names: Path) -> None:
    """Its vocabulary sizes the model, and the checkpoint keeps its file."""
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": "word " * 40}) + "\n" for _ in range(8)))
    tokenizer = f"--tokenizer ToyTokenizer --vocab-file {names}"
    assert main(f"preprocess --input {text} --output-prefix {tmp_path}/a --append-eod {tokenizer}".split()) == 0
    shape = "--layers 1 --hidden 16 --heads 2 --seq-length 32 --micro-batch 1 --global-batch 2 --steps 2 --lr 1e-3"
    run = f"--data-path {tmp_path}/a_text_document --split 1 --device cpu --save {tmp_path}/run --save-interval 2"
    assert main(f"pretrain {shape} {tokenizer} {run}".split()) == 0
    kept = tmp_path / "run" / "step-0000002"
    assert (kept / "vocab.txt").read_text() == names.read_text()
    assert json.loads((kept / "manifest.json").read_text())["meta"]["config"]["model"]["vocab"] == 258


def test_it_is_held_to_every_rule(names: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = build(tokenizer="ToyTokenizer", vocab_file=names)
    assert [made.decode(made.encode(text)) for text in TEXTS] == TEXTS
    assert made.control("<|end|>") == 257 and 257 not in made.encode("<|end|>")
    batch = made.encode_batch(TEXTS)
    assert batch.ids.tolist() == [token for text in TEXTS for token in made.encode(text)]
    for files, why in (({}, "--vocab-file is missing: ToyTokenizer"), ({"vocab_file": "/nowhere"}, "no such file")):
        with pytest.raises(ValueError, match=why):
            build(tokenizer="ToyTokenizer", **files)
    assert main("pretrain --tokenizer ToyTokenizer --layers 1 --hidden 8 --heads 1 --mock-data --dry-run".split()) == 2
    assert "--tokenizer ToyTokenizer: needs --vocab-file" in capsys.readouterr().err
