"""Documents cut into sentences: NLTK's punkt as Megatron-LM takes it, or Wikimedia's sentencex, which is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SPLITTERS = ("punkt", "sentencex")

_MOST_CHARACTERS = 1_000_000  # punkt gets a longer text in parts, as in Megatron-LM

# The two-letter code of sentencex for the names that punkt uses.
_CODES = {
    "czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "italian": "it", "norwegian": "no", "polish": "pl", "portuguese": "pt",
    "russian": "ru", "slovene": "sl", "spanish": "es", "swedish": "sv", "turkish": "tr",
}  # fmt: skip


def splitter(kind: str, language: str = "english", keep_newlines: bool = False) -> Callable[[str], list[str]]:
    """A function from a text to its sentences.

    keep_newlines: blanks and newlines after a sentence belong to it (punkt only; sentencex keeps them always).
    Raises ValueError where the library or its data is missing.
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
        raise ValueError("--sentence-splitter sentencex: needs sentencex; pip install 'mega[data]'") from None
    code = _CODES.get(language, language)
    return lambda text: list(segment(code, text))


def _punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise ValueError("--sentence-splitter punkt: needs nltk; pip install 'mega[data]'") from None
    try:
        model: Any = punkt.PunktTokenizer(language)
    except (LookupError, OSError, ValueError):
        raise ValueError(
            f"--lang {language}: tokenizers/punkt_tab/{language} is not where NLTK looks; set NLTK_DATA to the "
            "folder that holds it, or take --sentence-splitter sentencex"
        ) from None
    if keep_newlines:
        model._lang_vars = _keeping(punkt)()

    def split(text: str) -> list[str]:
        parts = range(0, len(text), _MOST_CHARACTERS)
        return [sentence for i in parts for sentence in model.tokenize(text[i : i + _MOST_CHARACTERS])]

    return split


def _keeping(punkt: Any) -> type:
    """punkt's rules, but the blanks after a sentence's end are part of the match and there may be none."""

    class Keeping(punkt.PunktLanguageVars):  # type: ignore[misc]
        _period_context_fmt = r"%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"

    return Keeping
