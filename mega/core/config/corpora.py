"""Resolve short names of corpora, which every data option accepts. A TOML table maps each name to a prefix or to a list
of weights and prefixes:

[corpora]
wikipedia = "/data/wikipedia_text_document"
mixture = [0.3, "/data/code_text_document", 0.7, "/data/books_text_document"]
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.config.toml import loads, read_text


def expand(words: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Replace names in `words` with their values in the table [corpora] of a TOML file. Other words are kept.

    Errors: ValueError if the file has no table [corpora].
    """
    if file is None or not words:
        return tuple(words)
    source = f"--corpora {file}"
    tables = loads(read_text(file, source), source)
    try:
        meanings = {
            name: [str(part) for part in ([value] if isinstance(value, str) else value)]
            for name, value in tables["corpora"].items()
        }
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"--corpora {file}: must hold a table [corpora] of names and prefixes ({error})") from None
    return tuple(part for word in words for part in meanings.get(word, [word]))


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
