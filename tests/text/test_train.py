"""Training a vocabulary: SentencePiece's four kinds, from any input, the same file for any order of the texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.text.build import build
from mega.core.text.train import Model, train_sentencepiece, words

LINES = ["The cat sat on the mat.", "A dog and a cat, and a mat", "不要停下来吧", "words, words and other words"] * 20


@pytest.mark.parametrize(("model", "size"), [("unigram", 34), ("bpe", 60), ("char", 27), ("word", 19)])
def test_sentencepiece(tmp_path: Path, model: Model, size: int) -> None:
    path, vocab = train_sentencepiece(LINES, size, tmp_path / "one", model=model)
    again, _ = train_sentencepiece(reversed(LINES), size, tmp_path / "two", model=model)
    assert path.read_bytes() == again.read_bytes()
    tokenizer = build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (size, 1, 2)
    assert [line.split("\t")[0] for line in vocab.read_text().splitlines()[:3]] == ["<unk>", "<s>", "</s>"]
    assert all(tokenizer.decode(tokenizer.encode(line)) == line for line in LINES[:4])


def test_words_are_bounded() -> None:
    assert words(["a b\0b", "b a  c"]) == {"a": 2, "b": 3, "c": 1}
    assert words(["x" * 2500]) == {"x" * 1000: 2, "x" * 500: 1}
    many = words((f"common{i % 3} rare{i}" for i in range(1000)), most=50)
    assert len(many) <= 50 and {"common0", "common1", "common2"} <= set(many)


def test_wordpiece_is_the_same_every_time_and_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\n".join([*LINES, "Naïve, naïve cafés!"]))
    train = f"train-tokenizer --kind wordpiece --input {tmp_path}/a.txt --text-lines --output-dir {tmp_path}/"
    for name in ("one", "two"):
        assert main(f"{train}{name} --vocab-size 200".split()) == 0
    first, second = ((tmp_path / name / "vocab.txt").read_bytes() for name in ("one", "two"))
    pieces = first.decode().splitlines()
    assert first == second and len(set(pieces)) == len(pieces) <= 200 and pieces[:2] == ["[PAD]", "[UNK]"]
    tokenizer = build(tokenizer="BertWordPieceLowerCase", vocab_file=str(tmp_path / "one" / "vocab.txt"))
    known = [tokenizer.encode(line) for line in LINES]
    assert all(pieces.index("[UNK]") not in ids for ids in known)
    assert sum(map(len, known)) < sum(map(len, LINES)) / 2, "words are merged"
    assert tokenizer.decode(tokenizer.encode("Naïve cafés")) == "naive cafes"
    capsys.readouterr()
    assert main(f"{train}three --vocab-size 9".split()) == 2
    assert "--vocab-size 9: must be at least" in capsys.readouterr().err
    assert main(f"{train}three --vocab-size 200 --model-type bpe".split()) == 2
    assert "--model-type bpe: needs --kind sentencepiece" in capsys.readouterr().err


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps({"body": line}) + "\n" for line in LINES).encode()))
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    train = f"train-tokenizer --kind sentencepiece --vocab-size 34 --output-dir {tmp_path}/{{}} --input {{}}"
    assert main(train.format("one", f"{packed} --json-key body").split()) == 0
    assert main(train.format("two", f"{tmp_path}/a.txt --text-lines").split()) == 0
    first, second = (tmp_path / name / "tokenizer.model" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert (
        main(f"train-tokenizer --vocab-size 300 --output-dir {tmp_path}/bpe --input {packed} --json-key body".split())
        == 0
    )
    assert (tmp_path / "bpe" / "merges.txt").is_file()
    capsys.readouterr()
    by_line = train.format("three", f"{tmp_path}/a.txt --text-lines")
    for arguments, message in [
        (train.format("three", packed), f'{packed}:1: must be a JSON object with a text under "text"'),
        (train.format("three", f"{tmp_path}/no.jsonl"), "no such file"),
        (by_line.replace("size 34", "size 9000"), "--vocab-size 9000: SentencePiece"),
        (f"{by_line} --character-coverage 0.5", "--character-coverage 0.5: must"),
        (by_line.replace("--kind sentencepiece", "--kind bpe"), "--vocab-size 34: must be at least 257"),
        (f"{by_line} --vocab-size {10**20}", f"--vocab-size {10**20}: must be 1 .. "),
        (f"{by_line} --vocab-size {10**20}".replace("sentencepiece", "bpe"), f"--vocab-size {10**20}: must be at"),
    ]:
        assert main(arguments.split()) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "three").exists()
