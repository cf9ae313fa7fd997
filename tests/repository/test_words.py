"""Plain English: idioms in docstrings, comments and pages, and names of local variables that say nothing, are counted.

Both lists are here; add what stopped a reader. `python tests/repository/test_words.py [mega/core/room ...]` prints all
places.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

IDIOMS = [
    r"theirs", r"of ours", r"of others", r"others'", r"that of others",
    r"(?:is|are) none", r"lies?(?! (?:to|about))", r"on (?:its|their) way", r"told", r"(?:is|are|was|be) said",
    r"so many", r"so few", r"goes? by", r"goes? on", r"going on", r"meets?", r"whatever", r"whoever", r"whichever",
    r"nobody", r"besides", r"meanwhile", r"anew", r"beside", r"stands?(?! for)", r"(?:is|are) judged", r"dealt",
    r"is no (?!longer|more)", r"are no (?!longer|more)", r"behind (?:it|them|this|that|which)", r"thereof", r"thereby",
    r"(?:is|are) another", r"none the less", r"as it were", r"without a word", r"in vain", r"speaks?", r"foretold",
    r"(?:is|are) asked for", r"of which (?:it|they|there)", r"no such thing", r"by which (?:it|they)", r"to whom",
    r"save for", r"but for", r"all the same", r"of its own accord", r"comes? of", r"makes? do", r"at hand",
]  # fmt: skip
HEADLESS = (
    r"(?:What|Whose|Whatever|Those|That|One|Of) (?:a|an|the|is|are|was|one|it|they|that|of|which|each|both|others?|in)"
)
"""A sentence that begins with a clause in place of a noun: `What one who asks a run to stop is told`."""
IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.IGNORECASE)
CLAUSE = re.compile(rf"(?:^|[.;:]\s+){HEADLESS}\b")

VAGUE = set(
    "found held made kept given theirs ours mine others wanted asked said told there here where what which how who why"
    " of own known left seen taken shown chosen met came gone done has some several written opened added listed begun"
    " attached described meant noted called moved turned joined spelled counted drawn judged learned cited arrived"
    " coming leaving lost it them this that these those both mixed thought near apart together about more everywhere"
    " real right wide odd now named".split()
)
"""Names of local variables, where a noun would say what they hold."""

ROOMS = sorted({f"mega/core/{each.parent.name}" for each in (ROOT / "mega/core").glob("*/__init__.py")})
ROOMS = ["mega", *ROOMS, "docs"]
"""`mega` is all that is in no other room."""


class Words(NamedTuple):
    """One room's counts."""

    words: int  # in docstrings, comments and pages
    idioms: list[str]  # `file:line: idiom`
    names: int  # of local variables, once a function
    vague: list[str]  # `file:line: name`


def room_of(file: Path) -> str:
    """The longest room whose folder the file is in."""
    path = file.relative_to(ROOT).as_posix()
    inside = [room for room in ROOMS if path.startswith(room + "/")]
    return max(inside, key=len) if inside else "docs"


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of a module's docstrings and comments, or of a page outside its blocks of code."""
    text = file.read_text()
    if file.suffix == ".md":
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def idioms(file: Path) -> tuple[int, list[str]]:
    """(words, places) of a file; what is between backticks is a name, not English."""
    count, places = 0, []
    for number, line in prose(file):
        plain = re.sub(r"`[^`]*`", "`", line)
        count += len(re.findall(r"[A-Za-z']+", plain))
        for match in (*IDIOM.finditer(plain), *CLAUSE.finditer(plain.strip())):
            places.append(f"{file.relative_to(ROOT)}:{number}: {match[0].strip(' .;:')}: {line.strip()}")
    return count, places


def local_names(file: Path) -> tuple[int, list[str]]:
    """(names, places) of the local variables of a module's functions, each name once a function."""
    count, places = 0, []
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            names = {node.id: node.lineno for node in reversed(stored) if isinstance(node.ctx, ast.Store)}
            count += len(names)
            places += [f"{file.relative_to(ROOT)}:{line}: {name}" for name, line in names.items() if name in VAGUE]
    return count, places


def files_of(room: str) -> list[Path]:
    """The modules of a room, or the pages."""
    if room == "docs":
        return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [each for each in sorted((ROOT / room).rglob("*.py")) if room_of(each) == room]


def count(files: list[Path]) -> Words:
    """Count the words of some files."""
    words, names = 0, 0
    odd: list[str] = []
    vague: list[str] = []
    for file in files:
        more, places = idioms(file)
        words, odd = words + more, odd + places
        if file.suffix == ".py":
            more, places = local_names(file)
            names, vague = names + more, vague + places
    return Words(words, odd, names, vague)


IDIOMS_IN_10_000, VAGUE_IN_100 = 5, 1


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_reads_plainly(room: str) -> None:
    """At most 5 idioms in 10,000 words, and 1 % of the names of local variables; a small room may have one of each."""
    counted = count(files_of(room))
    assert len(counted.idioms) <= max(1, counted.words * IDIOMS_IN_10_000 / 10_000), counted.idioms
    assert len(counted.vague) <= max(1, counted.names * VAGUE_IN_100 / 100), counted.vague


def main(paths: list[str]) -> None:
    """Print the places of these rooms or files, or a table of all rooms."""
    if paths:
        files = [each for path in paths for each in ([ROOT / path] if (ROOT / path).is_file() else files_of(path))]
        counted = count(files)
        print("\n".join([*counted.idioms, *counted.vague]))
    for room in [] if paths else ROOMS:
        words, odd, names, vague = count(files_of(room))
        rate, share = 10_000 * len(odd) / max(words, 1), 100 * len(vague) / max(names, 1)
        print(
            f"{room:26} {words:7} words {len(odd):5} idioms {rate:6.1f}"
            f"  {names:6} names {len(vague):5} vague {share:5.1f} %"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
