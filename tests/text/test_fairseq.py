"""fairseq's numbering of GPT-2's pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.core.text.build import build
from mega.core.text.fairseq import FairseqTokenizer, read_dictionary
from mega.core.text.gpt2 import GPT2Tokenizer
from tests.support.shared import shared


def test_ids_follow_the_lines_of_the_dictionary(tmp_path: Path) -> None:
    """GPT-2 ids 5, 0, 3 stand at 4, 5, 6, and a made-up word after them."""
    (tmp_path / "dict.txt").write_text("5 100\n0 90\n3 80\nmadeup\u2028word\x85 0\n")
    letters = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = FairseqTokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt", tmp_path / "dict.txt")
    assert tokenizer.encode("fadb") == [4, 5, 6, 3]  # b is in no line: unknown
    batch = tokenizer.encode_batch(["fa", "", "db"])
    assert (batch.ids.tolist(), batch.offsets.tolist()) == ([4, 5, 6, 3], [0, 2, 2, 4])
    assert tokenizer.decode([0, 4, 5, 6, 3, 7, 2]) == "fad"
    assert (tokenizer.bos, tokenizer.pad, tokenizer.eod, tokenizer.vocab_size) == (0, 1, 2, 8)
    assert set(tokenizer.files()) == {"vocab.json", "merges.txt", "dict.txt"}


def test_the_numbering_of_real_gpt2_ids(tmp_path: Path) -> None:
    """A dictionary in an order of its own; ids go there and back for every text."""
    order = [(token * 7919) % 50257 for token in range(50257)]
    (tmp_path / "dict.txt").write_text("".join(f"{token} {len(order) - n}\n" for n, token in enumerate(order)))
    files = {"vocab_file": shared("gpt2/gpt2-vocab.json"), "merge_file": shared("gpt2/gpt2-merges.txt")}
    ours = build(tokenizer="FairseqTokenizer", tokenizer_model=tmp_path / "dict.txt", **files)
    theirs = GPT2Tokenizer(files["vocab_file"], files["merge_file"])
    text = "Kevin is here, isn't he?\n  \u00e9\u4e2d"
    assert [order[token - 4] for token in ours.encode(text)] == theirs.encode(text)
    assert ours.encode_batch([text]).ids.tolist() == ours.encode(text)
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("line", ["5", "5 x", "", "5 1 2", "6 1\n6 2", "<pad> 3"])
def test_lines_that_are_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "dict.txt").write_text(f"4 9\n{line}\n")
    with pytest.raises(ValueError, match=r"dict\.txt:[23]: "):
        read_dictionary(tmp_path / "dict.txt")


def test_a_symbol_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("4 9\n<pad> 1 #fairseq:overwrite\n")
    assert read_dictionary(tmp_path / "dict.txt")[4:] == ["4", "<pad>"]
