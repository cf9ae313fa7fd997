"""Each step of `mega corpus` with each kind of bad input: what it has to say, and that nothing is lost.

A step reads three files of documents; the second one is damaged. `FAULTS` says how, and what the message must name.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mega.cli import main

LINES = 6
BAD = 3
"""The number of the damaged line in its file."""

STEPS: dict[str, tuple[str, ...]] = {
    "urls": (),
    "clean": ("--min-tokens", "2"),
    "near-duplicates": (),
    "decontaminate": ("--task-data", "squad={place}/squad.json"),
    "wikipedia": (),
    "merge": ("--json-key", "text"),
    "shuffle": (),
    "filter": ("--preset", "fineweb"),
    "exact-duplicates": (),
    "mask-pii": (),
    "annotate": ("--scorer", "words:{place}/words.txt"),
    "select": (),
    "remove-groups": ("--groups", "{place}/groups"),
}
"""Verbs and their flags; {place} is the folder of all files."""


class Outcome(NamedTuple):
    """What a command line ended with, and what it printed on stderr, without its progress."""

    code: int
    errors: list[str]


def call(words: Sequence[str]) -> Outcome:
    """Run `mega` with these words in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(list(words))
    return Outcome(code, [line for line in errors.getvalue().splitlines() if not line.endswith(" documents/s")])


def document(number: int) -> dict[str, Any]:
    text = f"The boats of harbour {number} came back in the evening, and the children ran down to see them unload."
    return {"url": f"http://a{number}.example/", "text": text, "score": {"toxicity": number / 100}}


def page(number: int) -> str:
    text = document(number)["text"]
    return (
        f"<page><title>T{number}</title><ns>0</ns><id>{number}</id>"
        f"<revision><id>{number}</id><text>{text}</text></revision></page>"
    )


class Case:
    """The files of a step in `place`. damage: what is done to the lines of the second file before it is written, or to
    its bytes after that; ending: of its name."""

    def __init__(self, step: str, place: Path) -> None:
        self.step, self.place = step, place
        (place / "in").mkdir(parents=True)
        (place / "squad.json").write_text(json.dumps({"question": "which of the ships did the old captain see first"}))
        (place / "words.txt").write_text("war\n")
        (place / "groups").write_text(json.dumps({"0": [document(0)["url"], document(1)["url"]]}) + "\n")
        self.form = "xml" if step == "wikipedia" else "jsonl"
        self.lines = [[self.line(LINES * file + number) for number in range(LINES)] for file in range(3)]
        self.damaged = self.place / "in" / f"b.{self.form}"

    def line(self, number: int) -> bytes:
        return (page(number) if self.form == "xml" else json.dumps(document(number))).encode()

    def write(self) -> None:
        """The files, of the lines as they are now."""
        for name, lines in zip("abc", self.lines, strict=True):
            (self.place / "in" / f"{name}.{self.form}").write_bytes(self._joined(lines))

    def _joined(self, lines: Sequence[bytes]) -> bytes:
        data = b"\n".join(lines) + b"\n"
        return b"<mediawiki>\n" + data + b"</mediawiki>\n" if self.form == "xml" else data

    def pack(self, suffix: str, pack: Callable[[bytes], bytes]) -> None:
        """Write the second file packed, and cut it short."""
        self.write()
        data = pack(self.damaged.read_bytes())
        self.damaged.unlink()
        self.damaged = self.damaged.with_name(self.damaged.name + suffix)
        self.damaged.write_bytes(data[: len(data) * 2 // 3])

    def words(self, *more: str, output: Path | None = None) -> list[str]:
        """The command line of the step."""
        flags = [word.replace("{place}", str(self.place)) for word in STEPS[self.step]]
        output = output or self.place / "out"
        return ["corpus", self.step, "--input", str(self.place / "in"), "--output", str(output), *flags, *more]

    def counts(self) -> dict[str, Any]:
        """What the step recorded."""
        found: dict[str, Any] = json.loads((self.place / "out" / ".corpus.json").read_bytes())["counts"]
        return found

    def inputs(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.place / "in").iterdir())}


class Fault(NamedTuple):
    """make: writes the input; named: what the message must contain, {bad} being the damaged file, or None where the
    step takes such a document as it is, and why; flags: of the call; skips: --on-error skip drops what is damaged."""

    make: Callable[[Case], None]
    named: Callable[[Case], str | None]
    flags: Callable[[Case], list[str]] = lambda case: []
    skips: bool = False


def _line(damage: Callable[[Case, bytes], bytes]) -> Callable[[Case], None]:
    def make(case: Case) -> None:
        case.lines[1][BAD - 1] = damage(case, case.lines[1][BAD - 1])
        case.write()

    return make


def _at_line(case: Case) -> str:
    return f"{case.damaged}: page {BAD}: " if case.form == "xml" else f"{case.damaged}:{BAD}: "


def _without_key(case: Case, line: bytes) -> bytes:
    if case.form == "xml":
        return line.replace(b"<id>", b"<number>").replace(b"</id>", b"</number>")
    key = "url" if case.step in ("urls", "remove-groups") else "text"
    return line.replace(f'"{key}"'.encode(), b'"other"')


def _wrong_type(case: Case, line: bytes) -> bytes:
    if case.form == "xml":
        return line.replace(b"<ns>0", b"<ns>zero")
    found = json.loads(line)
    found["url" if case.step in ("urls", "remove-groups") else "text"] = 3
    return json.dumps(found | {"score": {"toxicity": "high"}}).encode()


TAKES_ANY_OBJECT = ("shuffle", "select")
"""Steps that need no text. A page of Wikipedia with another `ns` than 0 is not an article, and dropped as that."""


def _parquet(case: Case) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([document(LINES + number) for number in range(LINES)])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    case.write()
    case.damaged.unlink()
    case.damaged = case.damaged.with_suffix(".parquet")
    case.damaged.write_bytes(sink.getvalue()[: len(sink.getvalue()) * 2 // 3])


def _zstandard(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


FAULTS: dict[str, Fault] = {
    "broken line": Fault(_line(lambda case, line: line[: len(line) // 2]), _at_line, skips=True),
    "not UTF-8": Fault(_line(lambda case, line: line.replace(b"boats", b"bo\xe4ts")), _at_line, skips=True),
    "field missing": Fault(
        _line(_without_key), lambda case: None if case.step in TAKES_ANY_OBJECT else _at_line(case), skips=True
    ),
    "field of another type": Fault(
        _line(_wrong_type), lambda case: None if case.step in ("shuffle", "wikipedia") else _at_line(case), skips=True
    ),
    "cut .gz": Fault(lambda case: case.pack(".gz", gzip.compress), lambda case: f"{case.damaged}: cannot be read"),
    "cut .bz2": Fault(lambda case: case.pack(".bz2", bz2.compress), lambda case: f"{case.damaged}: cannot be read"),
    "cut .zst": Fault(lambda case: case.pack(".zst", _zstandard), lambda case: f"{case.damaged}: cannot be read"),
    "cut .parquet": Fault(_parquet, lambda case: f"{case.damaged}: "),
    "output = input": Fault(
        Case.write, lambda case: f"--output {case.place / 'in'}: ", lambda case: ["--output", str(case.place / "in")]
    ),
}


def walk(step: str, fault: str, place: Path) -> str:
    """Run a step on a fault; what it said.

    Errors: AssertionError where that is not one line with all that it must name, an input was changed, or counts do not
    add up.
    """
    case, how = Case(step, place), FAULTS[fault]
    how.make(case)
    before, expected = case.inputs(), how.named(case)
    found = call(case.words(*how.flags(case)))
    assert case.inputs() == before, "an input was changed"
    if expected is None:
        assert found.code == 0, found
        _adds_up(case, dropped_too=0)
        return "taken as it is"
    assert found.code in (1, 2), f"ended with {found.code}"
    assert len(found.errors) == 1, found.errors
    assert expected in found.errors[0], found.errors[0]
    assert not (place / "out" / ".corpus.json").exists()
    if how.skips:
        found_too = call(case.words("--on-error", "skip", "--overwrite"))
        assert found_too.code == 0, found_too.errors
        _adds_up(case, dropped_too=1)
    return found.errors[0].replace(str(place), "")


def _adds_up(case: Case, dropped_too: int) -> None:
    counts = case.counts()
    assert counts["documents"] == 3 * LINES == counts["kept"] + sum(counts["dropped"].values()), counts
    assert counts["dropped"].get("not a document", 0) == dropped_too, counts["dropped"]
