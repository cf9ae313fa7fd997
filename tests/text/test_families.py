"""Llama-3, BERT and Yuan: each against its reference library or its written rules; fast paths against slow ones."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mega.core.text import llama3, protobuf
from mega.core.text.build import build
from mega.core.text.probes import PROBES
from mega.core.text.tokenizer import Encoded
from tests.support.shared import shared
from tests.text.test_gpt2 import fuzz

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "a", "##ff", "!", "'", "中", "don", "t"]


def rows(encoded: Encoded) -> list[list[int]]:
    return [part.tolist() for part in (encoded.ids[a:b] for a, b in zip(encoded.offsets, encoded.offsets[1:]))]


def bert(directory: Path, lines: list[str] = BERT, kind: str = "BertWordPieceLowerCase", extra: int = 0):  # type: ignore[no-untyped-def]
    path = directory / "vocab.txt"
    path.write_text("\n".join(lines) + "\n")
    return build(tokenizer=kind, vocab_file=path, vocab_extra_ids=extra)


def test_wordpiece_rules(tmp_path: Path) -> None:
    tokenizer = bert(tmp_path)

    def pieces(text: str) -> list[str]:
        return [tokenizer._pieces[token] for token in tokenizer.encode(text)]

    assert pieces("Unaffable!") == ["un", "##aff", "##able", "!"]
    assert pieces("unaffx") == ["[UNK]"]
    assert pieces("don't") == ["don", "'", "t"]
    assert pieces("a中a") == ["a", "中", "a"]
    assert pieces("\u00e0") == ["a"], "accents fall"
    assert pieces("u\x0bn\x00\ufffd") == ["un"], "control characters fall and join what is around them"
    assert pieces("a" * 201) == ["[UNK]"] and pieces("") == [] and pieces(" \n") == []
    assert tokenizer.encode("[MASK]") != [4] and 4 not in tokenizer.encode("a [MASK] a")
    assert tokenizer.decode(tokenizer.encode("unaffable a")) == "unaffable a"
    assert [tokenizer.continues(token) for token in (5, 6)] == [False, True]
    cased = bert(tmp_path, kind="BertWordPieceCase")
    assert cased.encode("Un") == [1] and cased.encode("un") == [5]


def test_wordpiece_ids_of_added_tokens(tmp_path: Path) -> None:
    tokenizer = bert(tmp_path, extra=2)
    assert tokenizer.vocab_size == len(BERT) + 4 and tokenizer.eod is None
    roles = tokenizer.roles
    assert roles is not None and roles[:6] == (2, 3, 4, 0, 15, 16) and roles.sentinels == (17, 18)
    assert bert(tmp_path, [*BERT, "[EOS]"]).roles[4:6] == (16, 15)


@pytest.mark.parametrize(("lines", "message"), [(BERT[1:], r"has no \[PAD\]"), ([*BERT, "a"], ":16: 'a' stands on")])
def test_broken_wordpiece_files_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bert(tmp_path, lines)


@pytest.mark.parametrize(("case", "size"), [("uncased", 30524), ("cased", 28998)])
def test_wordpiece_ids_equal_the_tokenizers_library(case: str, size: int) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    path, lower = shared(f"bert/bert-base-{case}-vocab.txt"), case == "uncased"
    vocab = {line: i for i, line in enumerate(path.read_text().splitlines())}
    library = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=200))
    library.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = build(tokenizer=f"BertWordPiece{'LowerCase' if lower else 'Case'}", vocab_file=path)
    assert tokenizer.vocab_size == size
    chinese = shared("chinese/cmrc2018_trial_contexts.jsonl").read_text().splitlines()[:100]
    english = shared("wikitext/wiki.valid.raw").read_text()[:300_000].split("\n")
    texts = [*PROBES, *fuzz(1000, 3), *(json.loads(line)["text"] for line in chinese), *english]
    expected = [found.ids for found in library.encode_batch_fast(texts)]
    for text, ours, theirs in zip(texts, rows(tokenizer.encode_batch(texts)), expected, strict=True):
        assert ours == theirs, repr(text)


def test_ranks_join_lowest_first_then_from_the_left() -> None:
    ranks = {b"a": 0, b"b": 1, b"ab": 2, b"aba": 3}
    assert llama3.spell(b"abab", ranks) == [2, 2]
    assert llama3.spell(b"aba", ranks) == [3], "a whole piece is a token as it stands"
    assert llama3.spell(b"baba", ranks) == [1, 3]


def test_llama3_ids_equal_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer = build(tokenizer="Llama3Tokenizer", tokenizer_model=shared("llama3/tokenizer.model"))
    assert tokenizer.engine == "fastokens"
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (128256, 128000, 128001)
    assert tokenizer.control("<|eot_id|>") == 128009 and tokenizer.control("<|end_header_id|>") == 128007
    assert tokenizer.control("<|reserved_special_token_5|>") == 128010
    oracle = tiktoken.Encoding("llama3", pat_str=llama3._WORDS, mergeable_ranks=tokenizer._ranks, special_tokens={})
    chinese = shared("chinese/cmrc2018_trial_contexts.jsonl").read_text().splitlines()[:100]
    english = shared("tinyshakespeare/input.txt").read_text()[:300_000].split("\n\n")
    texts = [*PROBES, *fuzz(1500, 5), *chinese, *english, "<|eot_id|><|end_of_text|>"]
    definition = rows(llama3.reference(tokenizer._ranks)(texts[:700]))
    found = rows(tokenizer.encode_batch(texts))
    for i, (text, ids) in enumerate(zip(texts, found, strict=True)):
        assert ids == [128000, *oracle.encode_ordinary(text)], repr(text)
        assert i >= 700 or ids[1:] == definition[i], repr(text)
        assert tokenizer.decode(ids) == "<|begin_of_text|>" + text


def test_megatron_made_llama3_file_comes_back_to_the_byte(tmp_path: Path) -> None:
    """Its documents decoded, and encoded again, are the same ids."""
    from mega.core.data.indexed import IndexedDataset

    prefix = str(shared("megatron_indexed/fim_text_document.bin")).removesuffix(".bin")
    tokenizer = build(tokenizer="Llama3Tokenizer", tokenizer_model=shared("llama3/tokenizer.model"))
    data = IndexedDataset(prefix)
    for i in range(len(data)):
        ids = data[i].tolist()
        assert ids[0] == tokenizer.bos and ids[-1] == tokenizer.eod
        assert tokenizer.encode(tokenizer.decode(ids[1:-1])) == ids[:-1]


@pytest.mark.parametrize(
    ("text", "message"), [("", "lacks"), ("YQ==", "line 1"), ("YQ== 1", "rank 1 where 0"), ("!! 0", "line 1")]
)
def test_broken_tiktoken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokenizer.model").write_text(text)
    with pytest.raises(ValueError, match=message):
        build(tokenizer="Llama3Tokenizer", tokenizer_model=tmp_path / "tokenizer.model")


def test_small_tiktoken_file(tmp_path: Path) -> None:
    pieces = [bytes([byte]) for byte in range(256)] + [b"lo", b"hel"]
    text = "".join(f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(pieces))
    (tmp_path / "tokenizer.model").write_text(text)
    tokenizer = build(tokenizer="Llama3Tokenizer", tokenizer_model=tmp_path / "tokenizer.model")
    assert tokenizer.encode("hello") == [258, *b"hel", 256] and tokenizer.vocab_size == 258 + 256


def test_llama2_is_rewritten_for_fastokens_and_equal() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from mega.core.text.sentencepiece_bpe import faster
    from mega.core.text.tokenizer import flatten

    library = sentencepiece.SentencePieceProcessor(model_file=str(shared("llama2/tokenizer.model")))

    def reference(texts):  # type: ignore[no-untyped-def]
        return flatten(library.encode(list(texts)))

    encode = faster(library, reference)
    assert encode is not None
    code = Path(__file__).read_text()
    texts = [*fuzz(3000, 9), code, *code.split("\n"), "<unk></s><s>" * 3, "\u2581\u2581 a"]
    assert rows(encode(texts)) == rows(reference(texts))
    assert faster(library, lambda texts: flatten([[0]] * len(texts))) is None, "other ids are refused"


def test_yuan(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    tokenizer = build(tokenizer="EncDecTokenizer", vocab_file=shared("yuan/vocab.txt"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (53228, 7, 5)
    text = "我 love New York 2020年\n你好"
    pieces = [tokenizer._pieces[token] for token in tokenizer.encode(text)]
    assert pieces == ["我", "▂", "love", "New", "York", "2020", "年", "▃", "你好"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod not in tokenizer.encode("<eod>")
    # of the code that Yuan-1.0 was trained with
    assert tokenizer.encode("a  b") == [1007, 10, 10, 1466] and tokenizer.encode("a b") == [1007, 1466]
    assert tokenizer.encode("\u94d9\u94b9") == [0, 0] and tokenizer.encode("\u6211\u94d9\u94b9") == [
        *tokenizer.encode("\u6211"),
        0,
        0,
    ]
    assert tokenizer.decode(tokenizer.encode("a  b c")) == "a  b c"


def test_protobuf_fields() -> None:
    assert protobuf.fields(bytes([8, 150, 1, 18, 2]) + b"hi") == {1: [150], 2: [b"hi"]}
    assert protobuf.packed_integers([bytes([1, 150, 1]), 7, 2**64 - 1]) == [1, 150, 7, -1]
    assert protobuf.packed_floats([b"\0\0\x80\x3f\0\0\0\x40"]) == [1.0, 2.0]
    for broken in (bytes([18, 5]) + b"hi", bytes([8]), bytes([11]), bytes([128] * 11)):
        with pytest.raises(ValueError, match="no protocol buffer"):
            protobuf.fields(broken)
    for broken in (bytes([1, 150]), bytes([128] * 10 + [1])):
        with pytest.raises(ValueError, match="a number without an end"):
            protobuf.packed_integers([broken])
    assert protobuf.packed_integers([bytes([255] * 9 + [1]), bytes([172, 2, 127])]) == [-1, 300, 127]
