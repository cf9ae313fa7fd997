"""Split documents into sentences with NLTK's punkt, as in Megatron-LM, or with Wikimedia's faster sentencex.

Token files must be identical to Megatron-LM's with any version of NLTK. This module therefore contains punkt's patterns
from NLTK 3.6.6 to 3.10.0. Later releases also treat curly quotes and guillemets as closing punctuation, and use a
different matching engine with a time limit. The procedure and its parameters come from the installed NLTK.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

SPLITTERS = ("punkt", "sentencex")

_MOST_CHARACTERS = 1_000_000  # number of characters; longer texts are split before punkt is applied, as in Megatron-LM

# Name of a language in punkt -> two-letter code in sentencex
_CODES = {
    "czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "italian": "it", "norwegian": "no", "polish": "pl", "portuguese": "pt",
    "russian": "ru", "slovene": "sl", "spanish": "es", "swedish": "sv", "turkish": "tr",
}  # fmt: skip


def splitter(kind: str, language: str = "english", keep_newlines: bool = False) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences.

    keep_newlines: whether the spaces and newlines after a sentence remain part of the sentence. sentencex always keeps
    spaces and newlines. Errors: ValueError if the library or its data is missing.
    """
    if kind == "sentencex":
        return _sentencex(language)
    if kind == "punkt":
        return _punkt(language, keep_newlines)
    raise ValueError(f"--sentence-splitter {kind}: must be one of {', '.join(SPLITTERS)}")


def _sentencex(language: str) -> Callable[[str], list[str]]:
    try:
        from sentencex import segment
    except ImportError:
        raise ValueError("--sentence-splitter sentencex: needs sentencex; pip install '.[data]' in a clone") from None
    code = _CODES.get(language, language)
    return lambda text: list(segment(code, text))


def _punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise ValueError("--sentence-splitter punkt: needs nltk; pip install '.[data]' in a clone") from None
    try:
        model: Any = punkt.PunktTokenizer(language)
    except (LookupError, OSError, ValueError):
        raise ValueError(
            f"--lang {language}: tokenizers/punkt_tab/{language} is not where NLTK looks; set NLTK_DATA to the "
            "folder that holds it, or take --sentence-splitter sentencex"
        ) from None
    model._lang_vars, model._Token = _variables(punkt, keep_newlines), _token(punkt)

    def split(text: str) -> list[str]:
        parts = range(0, len(text), _MOST_CHARACTERS)
        return [sentence for i in parts for sentence in model.tokenize(text[i : i + _MOST_CHARACTERS])]

    return split


_CLOSING = r"(?:[)\";}\]*:@'({\[?!])"
_SEVERAL = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_END = rf"(?:\s|$|{_CLOSING}|{_SEVERAL}|,(?=$|\s|{_CLOSING}|{_SEVERAL}))"
_WORD = re.compile(rf"({_SEVERAL}|(?=[^(\"`{{\[:;&#*@)}}\]\-,])\S+?(?={_END})|\S)")
"""Matches a word without punctuation except periods, a sequence of hyphens or periods, or any other single
character."""
_BOUNDARY = re.compile(rf"[.?!](?=(?P<after_tok>{_CLOSING}|\s+(?P<next_tok>\S+)))")
"""Matches a position where a sentence may end."""
_WITH_BLANKS = re.compile(rf"\S*[.?!]\s*(?=(?P<after_tok>{_CLOSING}|(?P<next_tok>\S+)))|\S+")
"""Matches either a word at a possible end of a sentence, including the white space after the word, or any other word.
The second alternative consumes whole words instead of trying a match at each character, which would take quadratic
time."""
_REALIGNED = re.compile(r"""["')\]}]+?(?:\s+|(?=--)|$)""", re.MULTILINE)
"""Matches closing quotes and brackets at the beginning of a sentence, which are moved to the previous sentence."""


class _Boundaries:
    """Finds possible ends of sentences, including the white space after them. Has the method `finditer` of a compiled
    pattern."""

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        return (match for match in _WITH_BLANKS.finditer(text) if match["after_tok"] is not None)


def _variables(punkt: Any, keep_newlines: bool) -> Any:
    """Return punkt's language variables with this module's patterns, which are the same for all languages."""

    class Variables(punkt.PunktLanguageVars):  # type: ignore[misc]
        sent_end_chars, internal_punctuation, re_boundary_realignment = (".", "?", "!"), ",:;", _REALIGNED

        def word_tokenize(self, text: str) -> list[str]:
            return _WORD.findall(text)

        def period_context_re(self) -> re.Pattern[str] | _Boundaries:
            return _Boundaries() if keep_newlines else _BOUNDARY

    return Variables()


def _token(punkt: Any) -> type:
    """Return punkt's token class with this module's patterns."""

    class Token(punkt.PunktToken):  # type: ignore[misc]
        _RE_ELLIPSIS, _RE_INITIAL, _RE_ALPHA = map(re.compile, (r"\.\.+$", r"[^\W\d]\.$", r"[^\W\d]+$"))
        _RE_NUMERIC = re.compile(r"-?[.,]?\d[\d,.-]*\.?$")

    return Token
