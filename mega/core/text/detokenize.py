"""Texts of published test sets as people write them: blanks around punctuation, and other marks of word lists, gone.

    wiki      WikiText (Merity et al. 2016), as Megatron-LM's evaluation turns it back
    ptb       Penn Treebank as Mikolov et al. 2010 cut it, likewise
    fairseq   a line of WikiText as fairseq's Megatron-11b recipe does, by the Moses rules of sacremoses

Rules replace whole strings one after another, and their order is part of them. It knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

_JOINED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"))
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_LINES = ((" \n", "\n"), ("\n ", "\n"))
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"))


def wiki(text: str) -> str:
    r"""
    >>> wiki('= Robert <unk> = \n In 2006 , he earned 1 @,@ 000 ( one ) " pound " . \n')
    '= Robert <unk> =\nIn 2006, he earned 1,000 (one) "pound".\n'
    """
    text = _replaced(text.replace("s '", "s'"), _JOINED)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, lambda found, a=opening, b=closing: f"{a}{found[1]}{b}", text)  # type: ignore[misc]
    return _replaced(text, (*_HEADINGS, *_LINES, (" N ", " 1 "), (" 's", "'s")))


def ptb(text: str) -> str:
    r"""
    >>> ptb("the company 's $ N million does n't \n count")
    "the company's $1 million doesn't\ncount"
    """
    return _replaced(text, ((" '", "'"), *_LINES, (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")))


def fairseq(line: str) -> str:
    """One line of wiki.test.raw. Errors: ValueError where sacremoses is not installed."""
    words = line.strip().split()
    text: str = _moses()(words)
    return _replaced(text, ((" @", ""), ("@ ", ""), (" =", "="), ("= ", "="), (" \N{EN DASH} ", "\N{EN DASH}")))


@cache
def _moses() -> Callable[[list[str]], str]:
    try:
        from sacremoses import MosesDetokenizer
    except ImportError:
        raise ValueError(
            "--detokenizer fairseq: needs the package sacremoses (pip install sacremoses); valid without it: wiki, "
            "ptb, none"
        ) from None
    made: Callable[[list[str]], str] = MosesDetokenizer(lang="en").detokenize
    return made


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, new in rules:
        text = text.replace(old, new)
    return text


DETOKENIZERS: dict[str, Callable[[str], str]] = {"wiki": wiki, "ptb": ptb, "none": str}
"""What turns a whole text back, by the name that --detokenizer gives it."""


def detokenizer_for(path: str) -> str | None:
    """The name of the one that a file's path calls for, as Megatron-LM chooses it; None where it names none.

    >>> [detokenizer_for(path) for path in ("wikitext-103/wiki.test.tokens", "data/ptb.wiki.txt", "a")]
    ['wiki', 'ptb', None]
    """
    return next((name for word, name in (("ptb", "ptb"), ("wiki", "wiki"), ("lambada", "none")) if word in path), None)
