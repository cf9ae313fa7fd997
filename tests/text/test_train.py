"""Training a vocabulary: SentencePiece's four kinds, from any input, the same file for any order of the texts."""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.text.build import build
from mega.core.text.train import Model, spaced_words, train_sentencepiece, words

REPOSITORY = Path(__file__).resolve().parents[2]

LINES = ["The cat sat on the mat.", "A dog and a cat, and a mat", "不要停下来吧", "words, words and other words"] * 20


@pytest.mark.parametrize(("model", "size"), [("unigram", 290), ("bpe", 320), ("char", 283), ("word", 19)])
def test_sentencepiece(tmp_path: Path, model: Model, size: int) -> None:
    path, vocab = train_sentencepiece(LINES, size, tmp_path / "one", model=model)
    again, _ = train_sentencepiece(reversed(LINES), size, tmp_path / "two", model=model)
    assert path.read_bytes() == again.read_bytes()
    tokenizer = build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (size, 1, 2)
    assert [line.split("\t")[0] for line in vocab.read_text().splitlines()[:3]] == ["<unk>", "<s>", "</s>"]
    assert all(tokenizer.decode(tokenizer.encode(line)) == line for line in LINES[:4])


CODE = "def f(a):\n    if a:\n\treturn 12  # twelve\n\n\n        pass\r\n"
ALPHABET = [
    *"abcXYZ019.,()",
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\0",
    "\u00a0",
    "\u3000",
    "\u00e9",
    "e\u0301",
    "\ufb01",
]
ALPHABET += ["\U0001f44d", "\u4e0d", "\u2028", "\x85", "\x7f", "\u2003"]


@pytest.mark.parametrize(("model", "size"), [("unigram", 304), ("bpe", 340), ("char", 300)])
def test_sentencepiece_keeps_every_character_of_a_text(tmp_path: Path, model: Model, size: int) -> None:
    path, _ = train_sentencepiece([CODE, *LINES] * 20, size, tmp_path, model=model)
    draw = random.Random(0)
    texts = [CODE, "", " ", "\n", "  a", "a  ", *("".join(draw.choices(ALPHABET, k=30)) for _ in range(200))]
    for kind, lead in (("GPTSentencePieceTokenizer", 0), ("Llama2Tokenizer", 1)):
        tokenizer = build(tokenizer=kind, tokenizer_model=path)
        assert [tokenizer.decode(tokenizer.encode(text)[lead:]) for text in texts] == texts
    if model == "bpe":
        assert "\u2581" * 4 in pieces_of(path), "indentation is a piece"
        assert not any(len(piece) > 1 and piece[-1].isdigit() for piece in pieces_of(path)), "single digits"


def pieces_of(path: Path) -> list[str]:
    return [line.split("\t")[0] for line in path.with_suffix(".vocab").read_text().splitlines()]


def test_the_guide_gives_the_settings_that_keep_a_text(tmp_path: Path) -> None:
    import sentencepiece

    page = (REPOSITORY / "docs/guides/tokenizer.md").read_text()
    settings = {name: ast.literal_eval(value) for name, value in re.findall(r'`(\w+)=("\w+"|True|False)`', page)}
    assert len(settings) == 5
    with (tmp_path / "tokenizer.model").open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=writer, model_type="bpe", vocab_size=300, minloglevel=2,
            **settings,
        )  # fmt: skip
    tokenizer = build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=tmp_path / "tokenizer.model")
    assert tokenizer.decode(tokenizer.encode(CODE)) == CODE and tokenizer.text_loss() is None


def test_sentencepiece_with_the_normalization_of_t5(tmp_path: Path) -> None:
    path, _ = train_sentencepiece([CODE, *LINES], 45, tmp_path, normalization="nmt_nfkc")
    tokenizer = build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=path)
    assert tokenizer.decode(tokenizer.encode("\uff41  cat\n\ta dog ")) == "a cat a dog"
    with pytest.raises(ValueError, match="--normalization identity: a word model"):
        train_sentencepiece(LINES, 19, tmp_path / "word", model="word", normalization="identity")


def test_spaces_are_counted_with_the_word_after_them() -> None:
    assert spaced_words(["if a:\n    if  b:   \n"]) == {"if": 1, "a:": 1, "   if": 1, " b:": 1, "  ": 1}
    assert spaced_words(["a" + " " * 90 + "b"]) == {"a": 1, " " * 15 + "b": 1}
    assert spaced_words(["  " + "x" * 1500]) == {" " + "x" * 1000: 1, "x" * 500: 1}


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
    train = f"train-tokenizer --kind sentencepiece --vocab-size 290 --output-dir {tmp_path}/{{}} --input {{}}"
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
        (by_line.replace("size 290", "size 9000"), "--vocab-size 9000: SentencePiece"),
        (f"{by_line} --character-coverage 0.5", "--character-coverage 0.5: must"),
        (by_line.replace("--kind sentencepiece --vocab-size 290", "--vocab-size 34"), "34: must be at least 257"),
        (by_line.replace("--kind sentencepiece", "--normalization identity"), "identity: needs --kind sentencepiece"),
        (f"{by_line} --vocab-size {10**20}", f"--vocab-size {10**20}: must be 1 .. "),
        (f"{by_line} --vocab-size {10**20}".replace("sentencepiece", "bpe"), f"--vocab-size {10**20}: must be at"),
    ]:
        assert main(arguments.split()) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_preprocess_says_which_text_a_tokenizer_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, normalizers

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    line = f"preprocess --input {tmp_path}/a.jsonl --output-prefix {tmp_path}/{{}} --append-eod --tokenizer {{}} "
    line += "--tokenizer-model {}"
    collapsed = "white space, line breaks included, is collapsed to single spaces"
    for name, size, expected in [
        ("identity", 290, None),
        ("nmt_nfkc", 34, f"by its normalization nmt_nfkc: {collapsed}; compatibility characters are replaced"),
        ("nmt_nfkc_cf", 32, f"normalization nmt_nfkc_cf: {collapsed}; letters become lower-case; compat"),
    ]:
        folder = tmp_path / "sp" / name
        train = f"train-tokenizer --kind sentencepiece --input {tmp_path}/a.jsonl --vocab-size {size}"
        assert main(f"{train} --normalization {name} --output-dir {folder}".split()) == 0
        for kind in ("Llama2Tokenizer", "SentencePieceTokenizer"):
            capsys.readouterr()
            assert main(line.format(name + kind, kind, folder / "tokenizer.model").split()) == 0
            printed = capsys.readouterr().err
            assert expected in printed if expected else "changes texts" not in printed
    library = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.save(str(tmp_path / "tokenizer.json"))
    assert main(line.format("hf", "HuggingFaceTokenizer", tmp_path / "tokenizer.json").split()) == 0
    assert "by its normalizer: line breaks and tabs become spaces; letters become lower-case; accents are removed" in (
        capsys.readouterr().err
    )
