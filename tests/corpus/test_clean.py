"""Cleaning: every recorded decision of Megatron-LM's scripts, and ftfy's own results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega import cli
from mega.core.corpus.clean import Clean, CleanTask, fixer
from mega.core.corpus.documents import CorpusDocument
from mega.core.corpus.language import detector
from tests.support.shared import shared

LONG = "The boats came back to the harbour in the evening, and the children ran down to the quay to see them. " * 20


def cleaned(text: str, *tasks: CleanTask, **given: Any) -> tuple[str | None, str | None]:
    """The text that is left, and why it is dropped."""
    document = CorpusDocument(json.dumps({"text": text}).encode())
    (result,) = Clean(tasks=tasks, **given).load()([document])
    return (json.loads(result.lines[0])["text"] if result.lines else None), result.reason


def golden() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shared("golden/openwebtext/openwebtext.json").read_text())["cleanup_fix"][
        "rows"
    ]
    return found


def test_decisions_are_megatrons() -> None:
    pytest.importorskip("ftfy", reason="ftfy is not installed: pip install '.[corpus]' in a clone")
    rows = [row for row in golden() if "non_english" not in row["task"]]
    assert len(rows) == 66
    for row in rows:
        text, reason = cleaned(row["text"], *row["task"].split("+"), as_megatron=True)
        assert (text, reason is not None) == (row["out"], row["dropped"]), row


def test_short_text_in_other_languages_goes_as_in_megatrons_script() -> None:
    pytest.importorskip("langdetect", reason="langdetect is not installed: it has no wheel; pip install langdetect")
    rows = [row for row in golden() if "non_english" in row["task"]]
    assert len(rows) == 15
    for row in rows:
        text, reason = cleaned(row["text"], row["task"], language_by="langdetect", as_megatron=True)
        assert (text, reason is not None) == (row["out"], row["dropped"]), row


def test_ours_does_all_tasks_after_a_repair() -> None:
    pytest.importorskip("ftfy", reason="ftfy is not installed: pip install '.[corpus]' in a clone")
    tasks: tuple[CleanTask, ...] = ("ftfy_fix_text", "general_cleaning")
    text = "two  blanks in a schÃ¶n line\nof text"
    assert cleaned(text, *tasks) == ("two blanks in a schön line of text", None)
    assert cleaned(text, *tasks, as_megatron=True) == ("two  blanks in a schön line\nof text", None)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*"aé<&\r\n\t\x1b\x7f“ﬁ ", "&amp;", "&lt;", "Ã¶", "â€™", "word ", "\ud83d", "\u2028"])))
def test_a_repair_is_ftfys(pieces: list[str]) -> None:
    ftfy = pytest.importorskip("ftfy", reason="ftfy is not installed: pip install '.[corpus]' in a clone")
    text = "".join(pieces)
    assert fixer()(text) == ftfy.fix_text(text)


@pytest.mark.parametrize("library", ["py3langid", "langdetect"])
def test_languages(library: Any) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    detect = detector(library)
    assert detect(LONG) == "en"
    assert detect("Les bateaux rentraient au port le soir, et les enfants couraient sur le quai pour les voir.") == "fr"
    assert detect("Die Boote kamen am Abend in den Hafen zurück, und die Kinder liefen hinunter an den Kai.") == "de"
    assert detect("123 456 ... ---") == ""


def test_tokens_are_counted_by_the_tokenizer_or_guessed() -> None:
    vocab, merges = shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
    given = {"tokenizer": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    for words, kept in ((126, False), (127, True)):  # and the end of the document
        text = "word" + " word" * (words - 1)
        assert (cleaned(text, "min_tokens", tokenizer=tuple(given.items()))[1] is None) == kept
    for letters, kept in ((507, False), (508, True)):
        text, reason = cleaned("x" * letters, "min_tokens")
        assert (reason is None) == kept and reason in (None, "fewer than 128 tokens")


def test_the_command_counts_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for library in ("ftfy", "py3langid"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install '.[corpus]' in a clone")
    texts = [LONG, LONG[:100], "Le soir, les enfants couraient sur le quai pour les voir. " * 30, LONG + " schÃ¶n"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = ["corpus", "clean", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--show-dropped", "1", "--tasks", "ftfy_fix_text", "language", "min_tokens"]) == 0
    printed = capsys.readouterr().out
    assert "4 documents, 2 kept, 1 dropped: fewer than 128 tokens, 1 dropped: not in en, 1 repaired" in printed
    assert "in.jsonl:3  'Le soir" in printed
    assert (tmp_path / "out.jsonl").read_text().endswith('schön"}\n')
    assert cli.main([*line[:-1], str(tmp_path / "b.jsonl"), "--language-model", "none.ftz"]) == 2
    assert "--language-" in capsys.readouterr().err
