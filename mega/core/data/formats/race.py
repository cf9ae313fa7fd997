"""Read RACE (Lai et al. 2017), in which one of four options answers a question about an article.

The input is a folder, or the .tar.gz of the distribution. Every .txt file in the input has one JSON object per line,
with the keys article, questions, options (four per question) and answers (letters from A to D). An option replaces the
question's underscore, or follows the question if it has no underscore.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mega.core.data.labelled import Format, Note, Question, clean
from mega.core.untrusted import parse_json, read_limited

LABELS = ("A", "B", "C", "D")
FILE_BYTES = 1 << 26


def read(flag: str, path: Path, note: Note) -> Iterator[Question]:
    """Read the questions of RACE. Errors: ValueError naming file and line of a question that does not have exactly four
    options."""
    uid = 0
    for location, line in _lines(flag, path):
        passage = parse_json(line, location)
        article = clean(_text(location, passage, "article"))
        questions, options, answers = (_list(location, passage, name) for name in ("questions", "options", "answers"))
        if not len(questions) == len(options) == len(answers):
            raise ValueError(
                f"{location}: has {len(questions)} questions, {len(options)} lists of options and {len(answers)} "
                "answers; must be equally many"
            )
        for question, choices, answer in zip(questions, options, answers, strict=True):
            if not isinstance(choices, list) or len(choices) != len(LABELS):
                raise ValueError(f"{location}: a question has not exactly {len(LABELS)} options")
            if not isinstance(question, str) or not all(isinstance(each, str) for each in choices):
                raise ValueError(f"{location}: a question or an option is not a string")
            if answer not in LABELS:
                raise ValueError(f"{location}: the answer is {answer!r}; valid: {', '.join(LABELS)}")
            yield Question(
                uid, tuple(completed_question(question, each) for each in choices), article, LABELS.index(answer)
            )
            uid += 1


def completed_question(question: str, option: str) -> str:
    """Return the question with its underscore replaced with the option. If it has no underscore, append the option.

    >>> completed_question("Light is _ by things . ", "taken in"), completed_question("Why?", "It is . ")
    ('Light is taken in by things.', 'Why? It is.')
    """
    return clean(question.replace("_", option) if "_" in question else f"{question} {option}")


def _text(location: str, passage: object, name: str) -> str:
    if not isinstance(passage, Mapping) or not isinstance(passage.get(name), str):
        raise ValueError(f'{location}: has no "{name}"; a passage is {{"article", "questions", "options", "answers"}}')
    return str(passage[name])


def _list(location: str, passage: Any, name: str) -> list[Any]:
    if not isinstance(passage.get(name), list):
        raise ValueError(f'{location}: has no list "{name}"')
    return list(passage[name])


def _lines(flag: str, path: Path) -> Iterator[tuple[str, bytes]]:
    for name, data in _files(flag, path):
        for line_number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                yield f"{flag} {path}: {name}:{line_number}", line


def _files(flag: str, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every .txt file, sorted by name."""
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            yield str(file.relative_to(path)), read_limited(file, FILE_BYTES, f"{flag} {file}")
        return
    try:
        with tarfile.open(path) as archive:
            contents = {}
            for member in archive:  # in file order, because seeking back would decompress the archive again
                if not member.isfile() or not member.name.endswith(".txt"):
                    continue
                content = archive.extractfile(member)
                if member.size > FILE_BYTES or content is None:
                    raise ValueError(f"{flag} {path}: {member.name} has {member.size} bytes; at most {FILE_BYTES}")
                contents[member.name] = content.read()
            yield from sorted(contents.items())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{flag} {path}: is neither a folder nor a complete .tar.gz of RACE: {message}") from None


FORMAT = Format("race", LABELS, read, choices=4, most_first=128)
