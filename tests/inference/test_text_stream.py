"""Text that arrives token by token is the text of all tokens, also where a character consists of several tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mega.core.inference.text_stream import TextStream
from mega.core.text.build import build
from tests.support.chat_templates import SMALL

LETTERS = ("世界", "龍龘", "😀", "👩‍👩‍👧", "a", " ", "  ", "\n", "é", "hello ", "\u0301", "\ufffd", "<|im_end|>", "\t")


@pytest.mark.parametrize("kind", ["byte-level", "gpt2", "metaspace", "llama", "unigram"])
def test_characters_of_several_tokens(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tokenizers")
    SMALL[kind](tmp_path)
    tokenizer, chance = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path), random.Random(1)
    for _ in range(60):
        ids = tokenizer.parse("".join(chance.choices(LETTERS, k=chance.randint(1, 30)))).ids
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_bytes_that_are_not_utf8_leave_the_characters_before_them(tmp_path: Path) -> None:
    """transformers' library replaces all adjacent bytes, so that the beginning of a character destroys others."""
    pytest.importorskip("tokenizers")
    SMALL["metaspace"](tmp_path)
    tokenizer = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path)
    ids = tokenizer.parse("a世界b").ids
    names = [tokenizer.control(f"<0x{byte:02X}>") for byte in "世界".encode()]
    assert [token for token in ids if token in names] == names, "each byte is a token here"
    cut = ids[: ids.index(names[-1])]  # two bytes of three
    assert tokenizer.decode(ids) == "a世界b" and tokenizer.decode(cut) == "a世\ufffd\ufffd"
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, cut)) == "a世" and stream.finish() == "\ufffd\ufffd"
