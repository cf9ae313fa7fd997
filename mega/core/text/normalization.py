"""Describe the information that a tokenizer's normalization loses, by trying short samples."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable


def losses_of(normalize: Callable[[str], str]) -> list[str]:
    """Describe how `normalize` changes texts, apart from replacing characters with canonically equivalent ones.

    >>> losses_of(str.lower)
    ['letters become lower-case']
    """
    breaks = not {"\n", "\t"} & set(normalize("a\n\tb"))
    runs = "  " not in normalize("a    b")
    found = {
        "white space, line breaks included, is collapsed to single spaces": breaks and runs,
        "line breaks and tabs become spaces": breaks and not runs,
        "runs of spaces are collapsed to one": runs and not breaks,
        "letters become lower-case": "A" not in normalize("bAb"),
        "accents are removed": "\u0301" not in unicodedata.normalize("NFD", normalize("a\u00e9a")),
        "compatibility characters are replaced": "\ufb01" not in normalize("a\ufb01a"),
    }
    return [text for text, applies in found.items() if applies]
