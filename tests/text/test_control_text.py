"""Text that spells control tokens stays text, in every family; and the families that no library implements."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from mega.core.text.yuan import is_chinese
from tests.support.shared import shared
from tests.text.test_gpt2 import fuzz

# Options of each family, and names of tokens that must not come out of text.
FAMILIES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "GPT2BPETokenizer": (
        {"vocab_file": "gpt2/gpt2-vocab.json", "merge_file": "gpt2/gpt2-merges.txt"},
        ("<|endoftext|>",),
    ),
    "BertWordPieceLowerCase": (
        {"vocab_file": "bert/bert-base-uncased-vocab.txt"},
        ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[BOS]", "[EOS]"),
    ),
    "BertWordPieceCase": (
        {"vocab_file": "bert/bert-base-cased-vocab.txt"},
        ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[BOS]", "[EOS]"),
    ),
    "SentencePieceTokenizer": (
        {"tokenizer_model": "llama2/tokenizer.model"},
        ("<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>"),
    ),
    "GPTSentencePieceTokenizer": ({"tokenizer_model": "stories260K/tok512.model"}, ("<s>", "</s>")),
    "Llama2Tokenizer": ({"tokenizer_model": "llama2/tokenizer.model"}, ("<s>", "</s>")),
    "Llama3Tokenizer": (
        {"tokenizer_model": "llama3/tokenizer.model"},
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "EncDecTokenizer": ({"vocab_file": "yuan/vocab.txt"}, ("<eod>", "<pad>", "<s>", "</s>", "<sep>", "<mask>")),
}


def made(kind: str) -> tuple[Tokenizer, set[int]]:
    """A tokenizer and the ids of its control tokens."""
    if kind == "EncDecTokenizer":
        pytest.importorskip("jieba")
    files, names = FAMILIES[kind]
    tokenizer = build(tokenizer=kind, **{name: shared(path) for name, path in files.items()})
    ids = {tokenizer.eod if name == "<|endoftext|>" else tokenizer.control(name) for name in names}
    assert None not in ids and len(ids) == len(names)
    return tokenizer, {token for token in ids if token is not None}


@pytest.mark.parametrize("kind", FAMILIES)
def test_text_never_becomes_a_control_token(kind: str) -> None:
    tokenizer, controls = made(kind)
    names = [*FAMILIES[kind][1], "<extra_id_0>", "<|reserved_special_token_3|>"]
    rng = random.Random(5)
    glue = ("", " ", "\n", "a", "\u2581", "\u4e2d", "##", "[", "<")
    texts = [*names, *("".join(rng.choice(names) + rng.choice(glue) for _ in range(9)) for _ in range(60))]
    found = tokenizer.encode_batch(texts)
    leads = len(tokenizer.encode(""))
    for text, first, last in zip(texts, found.offsets, found.offsets[1:], strict=False):
        ids = found.ids[first:last].tolist()
        assert not controls & set(ids[leads:]), repr(text)
        assert ids == tokenizer.encode(text), repr(text)


def cut_by_definition(word: str, vocab: dict[str, int]) -> list[int]:
    """CPM-2's rule for one word: the longest piece from the left, ## before what continues a western word."""
    if len(word) > 200:
        return [vocab["<unk>"]]
    found, rest = [], word
    while rest:
        parts = [rest[:size] for size in range(len(rest), 0, -1)]
        known = [part for part in parts if ("##" if rest != word and not is_chinese(part) else "") + part in vocab]
        if not known:
            found.append(vocab["<unk>"])
            rest = rest[1:]
            continue
        mark = "##" if rest != word and not is_chinese(known[0]) else ""
        found.append(vocab[mark + known[0]])
        rest = rest[len(known[0]) :]
    return found


def test_yuan_is_its_definition() -> None:
    assert yuan_texts(500, 40) == 540


def yuan_texts(strings: int, documents: int) -> int:
    """Random strings and Chinese documents of which every id is the definition's."""
    jieba = pytest.importorskip("jieba")
    jieba.setLogLevel("WARNING")
    path = shared("yuan/vocab.txt")
    tokenizer = build(tokenizer="EncDecTokenizer", vocab_file=path)
    lines = path.read_text().split("\n")
    vocab = {piece: number for number, piece in enumerate(lines)}
    chinese = shared("chinese/cmrc2018_trial_contexts.jsonl").read_text().splitlines()
    mixed, rng = "".join(json.loads(line)["text"] for line in chinese), random.Random(4)
    words = [
        "love",
        "New  York",
        "\u94d9\u94b9",
        "T\u6064",
        "\r\n",
        "\n",
        " ",
        "  ",
        "2020",
        "x" * 201,
        "\ud7ff\u9fffa",
    ]
    texts = [*fuzz(strings // 2, 21), *(json.loads(line)["text"] for line in chinese[:documents])]
    for _ in range(strings - len(texts) + documents):
        begins = [rng.randrange(len(mixed) - 9) for _ in range(6)]
        texts.append("".join(mixed[i : i + rng.randrange(9)] + rng.choice(words) for i in begins))
    western = [not is_chinese(piece) and piece != "\u2582" for piece in lines]
    for text in texts:
        cut = [word.replace(" ", "\u2582").replace("\n", "\u2583") for word in jieba.cut(text)]
        whole = [token for word in cut for token in cut_by_definition(word, vocab)]
        expected = [
            token
            for i, token in enumerate(whole)
            if not (
                token == vocab["\u2582"] and 0 < i < len(whole) - 1 and western[whole[i - 1]] and western[whole[i + 1]]
            )
        ]
        assert tokenizer.encode(text) == expected, repr(text)
    return len(texts)


def test_extended_sentencepiece_is_its_library() -> None:
    assert extended_texts(500, 50_000) > 500


def extended_texts(strings: int, characters: int) -> int:
    """Random strings and lines of English of which every id is the library's."""
    import sentencepiece

    texts = [*fuzz(strings, 22), *shared("wikitext/wiki.valid.raw").read_text()[:characters].split("\n")]
    model = shared("llama2/tokenizer.model")
    plain = sentencepiece.SentencePieceProcessor(model_file=str(model))
    same(build(tokenizer="SentencePieceTokenizer", tokenizer_model=model), texts, plain.encode(texts))
    return len(texts)


def test_hugging_face_is_its_library(tmp_path: Path) -> None:
    assert hugging_face_texts(500, 50_000, tmp_path) > 500


def hugging_face_texts(strings: int, characters: int, tmp_path: Path) -> int:
    """The same of a tokenizer.json that is trained here."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    texts = [*fuzz(strings, 23), *shared("wikitext/wiki.valid.raw").read_text()[:characters].split("\n")]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(texts[-500:], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    ids = [found.ids for found in library.encode_batch(texts)]
    same(build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path), texts, ids)
    return len(texts)


def same(tokenizer: Tokenizer, texts: list[str], expected: Any) -> None:
    found = tokenizer.encode_batch(texts)
    for text, first, last, ids in zip(texts, found.offsets, found.offsets[1:], expected, strict=False):
        assert found.ids[first:last].tolist() == ids, repr(text)
