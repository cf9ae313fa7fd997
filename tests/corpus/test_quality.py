"""Filters of quality, held to datatrove's decisions; exact duplicates; masks."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mega import cli
from mega.core.corpus.exact import ExactDuplicates
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.personal import MaskPersonal, PersonalKind
from mega.core.corpus.quality import PRESETS, broken_rule
from mega.core.corpus.run import process
from tests.support.shared import shared


def split_tokenizer() -> Any:
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install '.[datatrove]' in a clone")
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Split(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    return Split()


def texts(count: int = 400) -> list[str]:
    """Pages of novels with what each rule looks for mixed in."""
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt") as file:
        pages = [json.loads(line)["text"] for _, line in zip(range(40), file, strict=False)]
    draw, found = random.Random(0), []
    for _ in range(count):
        lines = draw.choice(pages).split("\n")
        begin = draw.randrange(max(len(lines) - 5, 1))
        lines = lines[begin : begin + draw.choice([1, 3, 20, 60])]
        for _ in range(draw.choice([0, 0, 1, 2])):
            change = draw.choice(["- ", "# ", "...", "again", "short", "digits", "\n\n", "word"])
            part = draw.random()
            for i in range(len(lines)):
                if draw.random() < part:
                    lines[i] = {
                        "- ": f"- {lines[i]}",
                        "# ": f"# # # {lines[i][:40]}",
                        "...": f"{lines[i]} ...",
                        "again": lines[0],
                        "short": lines[i][:25],
                        "digits": "12 345 6",
                        "\n\n": f"{lines[i]}\n\n{lines[0]}",
                        "word": "internationalisation " * 4,
                    }[change]
        found.append("\n".join(lines))
    return found


def test_decisions_are_datatroves() -> None:
    words = split_tokenizer()
    from datatrove.data import Document
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    filters = {
        "gopher-quality": GopherQualityFilter(language=words),
        "gopher-repetition": GopherRepetitionFilter(language=words),
        "fineweb": FineWebQualityFilter(language=words),
    }
    reasons = set()
    for text in texts():
        for preset in PRESETS:
            theirs = filters[preset].filter(Document(text=text, id="")) is True
            ours = broken_rule(text, [preset])
            assert (ours is None) == theirs, (preset, ours, text)
            reasons.add(ours)
    assert len(reasons) > 12, reasons


def test_empty_texts_are_dropped() -> None:
    assert broken_rule("", ["gopher-repetition"]) == "gopher-repetition: empty"
    assert broken_rule(" \n", ["fineweb"]) == "fineweb: empty"
    assert broken_rule("", ["gopher-quality"]) == "gopher-quality: fewer than 50 words"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(50)))
    line = ["corpus", "filter", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--preset", "gopher-quality", "--show-dropped", "1"]) == 0
    assert "dropped: gopher-quality: fewer than 50 words" in capsys.readouterr().out
    assert cli.main([*line, "--preset", "goph", "--overwrite"]) == 2
    assert "--preset goph: must be of gopher-quality, gopher-repetition, fineweb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to jane.doe+x@mail.example.co.uk, please", "write to <EMAIL>, please"),
        ("at 8.8.8.8 and 192.168.0.1, version 1.2.3.4.5", "at <IP> and 192.168.0.1, version 1.2.3.4.5"),
        ("call +49 30 9018-2000 or (030) 555-0134 or 415-555-0132.", "call <PHONE> or <PHONE> or <PHONE>."),
        ("in 1914-1918 there were 12345 of 2024-01-02", "in 1914-1918 there were 12345 of 2024-01-02"),
        ("card 4111 1111 1111 1111, number 4111 1111 1111 1112", "card <CARD>, number 4111 1111 1111 1112"),
        ("a@b, @name, x@y.z", "a@b, @name, x@y.z"),
    ],
)
def test_masks(text: str, masked: str) -> None:
    kinds: tuple[PersonalKind, ...] = ("email", "ip", "phone", "card")
    counts: dict[str, int] = {}
    assert MaskPersonal(kinds=kinds).masked(text, counts) == masked
    assert sum(counts.values()) == masked.count("<")
    assert MaskPersonal(kinds=()).masked(text, {}) == text


def run(folder: Path, step: ExactDuplicates, documents: list[str], **given: Any) -> list[str]:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    process([folder / "in.jsonl"], step, RunOptions(output=folder / "out.jsonl", part_bytes=300, **given))
    return [json.loads(line)["text"] for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_duplicates(tmp_path: Path, workers: int) -> None:
    documents = [f"document {i % 7}" for i in range(40)]
    assert run(tmp_path, ExactDuplicates(), documents, workers=workers) == documents[:7]


def test_repeated_paragraphs(tmp_path: Path) -> None:
    banner = "Subscribe to our newsletter and never miss a story again, dear reader!"
    bodies = [f"This is the body of article {i}, which is long enough to be a paragraph of its own." for i in range(3)]
    documents = [f"{banner}\n{body}\nshort\n{banner}" for body in bodies] + [banner, "short", bodies[0]]
    found = run(tmp_path, ExactDuplicates(paragraphs=True), documents)
    assert found == [f"{banner}\n{bodies[0]}\nshort", f"{bodies[1]}\nshort", f"{bodies[2]}\nshort", "short"]


def test_a_step_in_datatroves_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install '.[datatrove]' in a clone")
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.writers import JsonlWriter

    from mega.core.corpus.datatrove_step import CorpusFilter

    documents = [Document(text=text, id=str(i), metadata={"n": i}) for i, text in enumerate(["write to a@b.org", "b"])]
    writer = JsonlWriter(str(tmp_path / "out"), compression=None)
    steps = [documents, CorpusFilter(MaskPersonal()), writer]
    LocalPipelineExecutor(steps, tasks=1, logging_dir=str(tmp_path / "log")).run()
    rows = [json.loads(line) for line in (tmp_path / "out" / "00000.jsonl").read_text().splitlines()]
    assert [(row["text"], row["metadata"]["n"]) for row in rows] == [("write to <EMAIL>", 0), ("b", 1)]
    stats = json.loads((tmp_path / "log" / "stats.json").read_text())
    (own,) = (step["stats"] for step in stats if "mega corpus" in step["name"])
    assert (own["kept"], own["email masked"]) == (2, 1)
