"""Files of another kind of tokenizer, and ids that are no tokens, are named; a short form of two batteries."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega.cli import main
from mega.core.text.build import build
from mega.core.text.train import train_bpe
from tests.support.shared import shared


@pytest.mark.parametrize(
    ("kind", "vocabulary", "said"),
    [
        ("BertWordPieceLowerCase", "cased", "have capital letters, which no text has"),
        ("BertWordPieceCase", "uncased", "has a capital letter: such words become [UNK]"),
        ("BertWordPieceCase", "cased", None),
        ("BertWordPieceLowerCase", "uncased", None),
    ],
)
def test_a_vocabulary_of_the_other_case(kind: str, vocabulary: str, said: str | None) -> None:
    doubt = build(tokenizer=kind, vocab_file=shared(f"bert/bert-base-{vocabulary}-vocab.txt")).doubt()
    assert doubt is None if said is None else said in str(doubt)


def test_merges_of_a_smaller_vocabulary_are_refused(tmp_path: Path) -> None:
    _, merges = train_bpe(["a text of a few words, a text"], 270, tmp_path)
    made = build(tokenizer="GPT2BPETokenizer", vocab_file=shared("gpt2/gpt2-vocab.json"), merge_file=merges)
    with pytest.raises(ValueError, match=r"longer pieces of --vocab-file .* give the two files of one tokenizer"):
        made.encode("a")


def test_ids_that_are_no_tokens_and_a_size_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": "7 8 9"}\n')
    line = ["preprocess", "--input", str(tmp_path / "n.jsonl"), "--output-prefix", str(tmp_path / "n"), "--vocab-size"]
    assert main([*line, "5", "--tokenizer", "NullTokenizer"]) == 0
    assert "ids go up to 9, NullTokenizer has 6" in capsys.readouterr().err
    model = ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(shared("stories260K/tok512.model"))]
    assert main([*line, "5", *model, "--overwrite"]) == 0
    assert "--vocab-size 5: changes nothing, Llama2Tokenizer has 512 tokens" in capsys.readouterr().err
