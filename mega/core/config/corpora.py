"""Short names for corpora: a TOML table, name -> prefix or list of weights and prefixes, usable in every data option.

[corpora]
wikipedia = "/data/wikipedia_text_document"
mixture = [0.3, "/data/code_text_document", 0.7, "/data/books_text_document"]
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.config.toml import loads, read_text


def expand(words: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Replace each name in `words` that the table [corpora] of the TOML file defines with its value.

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
