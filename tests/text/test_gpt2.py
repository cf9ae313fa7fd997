"""GPT-2 BPE: the definition on a hand-checked vocabulary, every engine against it, and tiktoken."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from mega.core.text import gpt2
from mega.core.text.build import build
from mega.core.text.fast import ENGINES
from mega.core.text.probes import PROBES
from tests.support.shared import shared

LETTERS = gpt2.byte_letters()


def small(directory: Path, merges: list[str], drop: str = "") -> gpt2.GPT2Tokenizer:
    """A tokenizer of the 256 bytes, some merges and <|endoftext|>, with the piece `drop` left out."""
    pieces = [*sorted(LETTERS.values()), *(merge.replace(" ", "") for merge in merges), gpt2.END_OF_TEXT]
    kept = [piece for piece in pieces if piece != drop]
    (directory / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(kept)}))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return gpt2.GPT2Tokenizer(directory / "vocab.json", directory / "merges.txt")


def real() -> gpt2.GPT2Tokenizer:
    return gpt2.GPT2Tokenizer(shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt"))


def fuzz(count: int, seed: int = 0) -> list[str]:
    """Random strings of awkward characters, ordinary words and the text of control tokens."""
    rng = random.Random(seed)
    ranges = [
        (32, 127),
        (0, 32),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x4E00, 0x4F00),
        (0x1F300, 0x1F650),
        (0x2000, 0x2070),
    ]
    words = ["the", " and", "'s", "  ", "\n\n", "<|endoftext|>", "</s>", "<unk>", "123", " I've", "\r\n"]

    def piece() -> str:
        if rng.random() < 0.4:
            return rng.choice(words)
        low, high = rng.choice(ranges)
        return chr(rng.randrange(low, high))

    return ["".join(piece() for _ in range(rng.randrange(40))) for _ in range(count)]


def test_byte_letters() -> None:
    assert [LETTERS[b] for b in (33, 0, 32, 127, 160, 173)] == ["!", "Ā", "Ġ", "ġ", "ł", "Ń"]
    assert len(set(LETTERS.values())) == 256


def test_merges_go_by_rank_then_from_the_left(tmp_path: Path) -> None:
    tokenizer = small(tmp_path, ["l o", "l l", "h e", "he ll", "a a"])
    pieces = {token: piece for piece, token in gpt2.read_vocab(tmp_path / "vocab.json").items()}
    spelled = [[pieces[t] for t in tokenizer.encode(text)] for text in ("hello", "aaaaa", "hell")]
    assert spelled == [["he", "l", "lo"], ["aa", "aa", "a"], ["hell"]]


def test_end_of_text_in_a_text_is_text(tmp_path: Path) -> None:
    tokenizer = small(tmp_path, ["l o"])
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b é\n")) == "a<|endoftext|>b é\n"
    assert tokenizer.decode([tokenizer.eod or 0]) == "<|endoftext|>"


def test_piece_without_id_is_id_0_and_keeps_fast_engines_away(tmp_path: Path) -> None:
    tokenizer = small(tmp_path, ["l o"], drop="lo")
    assert tokenizer.engine == "python"
    assert tokenizer.encode("lo") == [0]


def test_engine_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small(tmp_path, ["l o"])
    wrong = gpt2.reference({piece: 0 for piece in tokenizer._vocab}, [])
    monkeypatch.setitem(ENGINES, "fastokens", lambda text: wrong)
    assert tokenizer.engine == "tokenizers"


@pytest.mark.parametrize("name", ["fastokens", "tokenizers"])
def test_engines_agree_with_the_definition(name: str) -> None:
    pytest.importorskip(name)
    tokenizer = real()
    merges = gpt2.read_merges(shared("gpt2/gpt2-merges.txt"))
    texts = [*PROBES, *fuzz(1500)]
    engine = ENGINES[name](gpt2.tokenizer_json(tokenizer._vocab, merges))(texts)
    definition = gpt2.reference(tokenizer._vocab, merges)(texts)
    assert engine.ids.tolist() == definition.ids.tolist()
    assert engine.offsets.tolist() == definition.offsets.tolist()


def test_ids_equal_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer = real()
    ranks = {
        bytes(tokenizer._bytes[letter][0] for letter in piece): token
        for piece, token in tokenizer._vocab.items()
        if piece != gpt2.END_OF_TEXT
    }
    oracle = tiktoken.Encoding(
        "gpt2", pat_str=gpt2._WORDS, mergeable_ranks=ranks, special_tokens={gpt2.END_OF_TEXT: 50256}
    )
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt") as file:
        novels = [json.loads(line)["text"] for _, line in zip(range(400), file, strict=False)]
    texts = [*novels, shared("tinyshakespeare/input.txt").read_text(), *fuzz(5000, seed=1), *PROBES]
    encoded = tokenizer.encode_batch(texts)
    for i, text in enumerate(texts):
        ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert ids == oracle.encode_ordinary(text), repr(text[:80])
    assert tokenizer.vocab_size == 50257 and tokenizer.eod == 50256
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts[:50]] == texts[:50]


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "#version: 0.2\n", "not JSON"),
        ('{"a": 1}', "#version: 0.2\n", "ids are 0"),
        ('["a"]', "#version: 0.2\n", "ids are 0"),
        ('{"a": 0}', "a b\n", "#version"),
        ('{"a": 0}', "#version: 0.2\na b", "newline"),
        ('{"a": 0}', "#version: 0.2\nab\n", "merges.txt:2"),
        ('{"a": 0}', "#version: 0.2\na b\r\n", "two symbols"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, vocab: str, merges: str, message: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_bytes(merges.encode())
    with pytest.raises(ValueError, match=message) as caught:
        build(
            tokenizer="GPT2BPETokenizer",
            vocab_file=tmp_path / "vocab.json",
            merge_file=tmp_path / "merges.txt",
        ).encode("a")
    assert str(tmp_path) in str(caught.value)


def test_two_files_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    """Pieces without an id are 0, as ever; of a pair that lacks most of them nothing would be left."""
    few = small(tmp_path, ["t h", "th e"], drop="the")
    assert few.encode("the") == [0]
    pairs = [f"{a} {b}" for a in "abcdefghijk" for b in "lmnopqrstuvw"]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))
    other = gpt2.GPT2Tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(ValueError, match=r"132 of its 132 merges make pieces that --vocab-file .* does not have"):
        other.encode("al")
