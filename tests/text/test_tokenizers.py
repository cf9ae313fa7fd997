"""The other families, `build`, and training a vocabulary."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.text.build import build
from mega.core.text.gpt2 import GPT2Tokenizer
from mega.core.text.probes import PROBES
from mega.core.text.tokenizer import flatten
from mega.core.text.train import train_bpe
from tests.support.shared import shared
from tests.text.test_gpt2 import fuzz

PROSE = Path(__file__).read_text().splitlines()
LINES = ["the cat sat on the mat", "a dog </s> and a cat", "don't <MASK> me"] * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of our own with unk, bos, eos and no pad."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=29, minloglevel=2
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


def test_flatten() -> None:
    encoded = flatten([[5, 6], [], [7]])
    assert encoded.ids.tolist() == [5, 6, 7]
    assert encoded.offsets.tolist() == [0, 2, 2, 3]


def test_null() -> None:
    tokenizer = build(tokenizer="NullTokenizer", vocab_size=10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.encode(" 7 0\t12\n") == [7, 0, 12]
    assert tokenizer.decode([7, 0, 12]) == "7 0 12"
    for bad in ("x", "-1", "1.5", str(2**31)):
        with pytest.raises(ValueError):
            tokenizer.encode(bad)


def test_llama_puts_bos_in_front_and_gpt_does_not(model: Path) -> None:
    llama = build(tokenizer="Llama2Tokenizer", tokenizer_model=model)
    plain = build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=model)
    assert (llama.bos, llama.eod, llama.pad, llama.vocab_size) == (1, 2, None, 29)
    assert llama.encode("the cat") == [1, *plain.encode("the cat")]
    assert llama.encode("") == [1] and plain.encode("") == []
    assert llama.decode(llama.encode("the cat")) == "the cat"
    assert 2 not in plain.encode("a dog </s> and")
    texts = ["the cat", "", "a dog"]
    encoded = llama.encode_batch(texts)
    rows = [encoded.ids[a:b].tolist() for a, b in zip(encoded.offsets, encoded.offsets[1:], strict=False)]
    assert rows == [llama.encode(text) for text in texts]


def test_added_tokens_follow_the_pieces_in_order(model: Path) -> None:
    from mega.core.text.sentencepiece import ExtendedSentencePiece

    tokenizer = ExtendedSentencePiece(model, extra_ids=2)
    assert tokenizer.specials == {
        "<CLS>": 29, "<SEP>": 30, "<EOD>": 31, "<MASK>": 32, "<PAD>": 33, "<s>": 1, "</s>": 2,
        "<extra_id_0>": 34, "<extra_id_1>": 35,
    }  # fmt: skip
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (36, 31, 1, 33)
    assert not set(tokenizer.encode("don't <MASK> me")) & {32}
    assert tokenizer.decode([*tokenizer.encode("the cat"), 32, *tokenizer.encode("me")]) == "the cat <MASK> me"


def test_llama_ids_equal_sentencepiece() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = shared("llama2/tokenizer.model")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = build(tokenizer="Llama2Tokenizer", tokenizer_model=path)
    texts = [*PROBES, *fuzz(1000), *shared("tinyshakespeare/input.txt").read_text()[:200_000].split("\n\n")]
    encoded = tokenizer.encode_batch(texts)
    for i, text in enumerate(texts):
        ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert ids == [1, *oracle.encode_as_ids(text)], repr(text)
    assert (tokenizer.vocab_size, tokenizer.eod) == (32000, 2)


def test_hugging_face_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    library = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "<": 3, "end": 4, ">": 5}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    library.add_special_tokens(["<end>", "<start>"])
    library.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 7)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (8, 6)
    assert tokenizer.encode("a <end> b") == [
        7,
        1,
        3,
        4,
        5,
        2,
    ]  # the control token is split, the template applies
    assert tokenizer.encode_batch(["a", "b"]).ids.tolist() == [7, 1, 7, 2]
    assert set(tokenizer.files()) == {"tokenizer.json", "tokenizer_config.json"}


def test_fingerprint_follows_contents(tmp_path: Path) -> None:
    one = build(tokenizer="NullTokenizer", vocab_size=10)
    other = build(tokenizer="NullTokenizer", vocab_size=11)
    assert one.fingerprint() != other.fingerprint()
    first = GPT2Tokenizer(*train_bpe(PROSE, 300, tmp_path / "a"))
    again = GPT2Tokenizer(*train_bpe(PROSE, 300, tmp_path / "b"))
    different = GPT2Tokenizer(*train_bpe(PROSE, 299, tmp_path / "c"))
    assert first.fingerprint() == again.fingerprint() != different.fingerprint()
    vocab, merges = (tmp_path / "b" / name for name in ("vocab.json", "merges.txt"))
    merges.write_text("".join(merges.read_text().splitlines(keepends=True)[:-1]))  # as many ids, other merges
    assert GPT2Tokenizer(vocab, merges).fingerprint() != first.fingerprint()


def test_trained_vocabulary(tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer(*train_bpe(iter(PROSE * 3), 300, tmp_path))
    assert tokenizer.vocab_size == 300 and tokenizer.eod == 299
    assert tokenizer.engine == "fastokens"
    assert len(tokenizer.encode("tokenizer.encode")) < 12
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in PROBES)
    with pytest.raises(ValueError, match="at least 257"):
        train_bpe(LINES, 256, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": None}, "--tokenizer is missing: it must be one of GPT2BPETokenizer"),
        ({"tokenizer": "Bert"}, "--tokenizer Bert: must be one of"),
        ({"tokenizer": "GPT2BPETokenizer"}, "--vocab-file is missing"),
        (
            {"tokenizer": "GPT2BPETokenizer", "vocab_file": "/nowhere/v"},
            "--vocab-file /nowhere/v: no such file",
        ),
        ({"tokenizer": "Llama2Tokenizer"}, "--tokenizer-model is missing"),
        ({"tokenizer": "Llama2Tokenizer", "tokenizer_model": __file__}, "not a SentencePiece model"),
        ({"tokenizer": "HuggingFaceTokenizer", "tokenizer_model": __file__}, "not a tokenizer.json"),
        ({"tokenizer": "NullTokenizer"}, "--vocab-size None"),
        ({"tokenizer": "NullTokenizer", "vocab_size": 5, "vocab_extra_ids": 3}, "--vocab-extra-ids 3"),
    ],
)
def test_bad_arguments_name_the_flag(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)  # type: ignore[arg-type]


def test_what_is_asked_in_vain_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "ab ab"}\n')
    line = f"train-tokenizer --input {text} --vocab-size 900 --output-dir"
    assert main([*line.split(), str(tmp_path / "out")]) == 0
    assert "--vocab-size 900: the texts give 259 entries and no more" in capsys.readouterr().err
    for empty in ("", '{"text": ""}\n'):
        (tmp_path / "empty.jsonl").write_text(empty)
        words = f"train-tokenizer --input {tmp_path}/empty.jsonl --vocab-size 300 --output-dir {tmp_path}/other"
        assert main(words.split()) == 2
        assert "--input: holds no text to train on" in capsys.readouterr().err
    assert main([*line.split(), str(tmp_path / "other"), "--model-type", "word"]) == 2
    assert main([*line.split(), str(text)]) == 2
    printed = capsys.readouterr().err
    assert "--model-type word: needs --kind sentencepiece" in printed
    assert f"--output-dir {text}: {text} is not a directory" in printed and not (tmp_path / "other").exists()


def test_a_directory_without_a_tokenizer_json_names_what_reads_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; tokenizer\.model is read by --tokenizer Llama2"):
        build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path)
