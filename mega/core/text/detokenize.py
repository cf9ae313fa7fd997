"""Convert published test sets back to normal text by removing spaces around punctuation and other traces of
tokenization.

    wiki      WikiText (Merity et al. 2016), with the rules of Megatron-LM's evaluation
    ptb       Penn Treebank as split by Mikolov et al. 2010, with the rules of Megatron-LM's evaluation
    fairseq   a line of WikiText, with the Moses rules of sacremoses, as in fairseq's Megatron-11b recipe

Each rule replaces one string with another, and the order of the rules affects the result. This module does not depend
on tokenizers.
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
    """Detokenize one line of wiki.test.raw. Errors: ValueError if sacremoses is not installed."""
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
    detokenize: Callable[[list[str]], str] = MosesDetokenizer(lang="en").detokenize
    return detokenize


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, new in rules:
        text = text.replace(old, new)
    return text


DETOKENIZERS: dict[str, Callable[[str], str]] = {"wiki": wiki, "ptb": ptb, "none": str}
"""Value of --detokenizer -> function that detokenizes a text."""


def detokenizer_for(path: str) -> str | None:
    """Choose a detokenizer by the path of a test set, as in Megatron-LM. Return None if no detokenizer matches the
    path.

    >>> [detokenizer_for(path) for path in ("wikitext-103/wiki.test.tokens", "data/ptb.wiki.txt", "a")]
    ['wiki', 'ptb', None]
    """
    return next((name for word, name in (("ptb", "ptb"), ("wiki", "wiki"), ("lambada", "none")) if word in path), None)
