"""Detects the language of a text as an ISO 639-1 code, or "" if the language is unclear.

`py3langid` detects 139 languages, and its model is included in the package. Only 1,000 characters of a text are passed
to `py3langid`, half of them from the middle, because more characters rarely change the result and take proportionally
more time. `langdetect`, which Megatron-LM's scripts use, is about fifty times slower and uses random numbers (with a
fixed seed here); up to 10,000 characters are passed to it. For `fasttext`, the user must provide a model file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

LanguageLibrary = Literal["py3langid", "langdetect", "fasttext"]
_WINDOW = 500


def sample_of(text: str) -> str:
    """Return the characters of a text that are passed to the detector."""
    if len(text) <= 2 * _WINDOW:
        return text
    middle = len(text) // 2
    return f"{text[:_WINDOW]} {text[middle : middle + _WINDOW]}"


Detector = tuple[Callable[[str], str], Collection[str]]
"""A pair: a function that detects the language of a text, and all languages that the function can return."""


def detector(library: LanguageLibrary, model: str = "", *, language: str = "en") -> Callable[[str], str]:
    """Build the function that detects languages. language: a language that the function must support.

    Errors: ValueError if the library is not installed, or its model cannot be read.
    """
    try:
        if library == "langdetect":
            detect, languages = _langdetect()
        else:
            detect, languages = _fasttext(model) if library == "fasttext" else _py3langid()
    except ImportError:
        package = {"fasttext": "fasttext-predict"}.get(library, library)
        raise ValueError(f"--language-by {library}: is not installed; pip install {package}") from None
    if language not in languages:
        raise ValueError(f"--language {language}: must be of {' '.join(sorted(languages))}")
    return detect


@functools.cache  # decompressing the model takes half a second
def _py3langid() -> Detector:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identify = identifier.classify
    return lambda text: str(identify(sample_of(text))[0]) if any(map(str.isalpha, text)) else "", identifier.labels


def _langdetect() -> Detector:
    import langdetect

    langdetect.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(langdetect.detect(text))
        except langdetect.LangDetectException:  # the text has no features, for example because it has only digits
            return ""

    detect("a word")  # load the language profiles
    return detect, langdetect.detector_factory._factory.langlist


def _fasttext(model: str) -> Detector:
    import fasttext

    if not Path(model).is_file():
        raise ValueError(f"--language-model {model}: no such file; must be a fastText model, such as lid.176.ftz")
    try:
        predict = fasttext.load_model(model).predict
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--language-model {model}: cannot be read ({error})") from None

    def detect(text: str) -> str:
        labels = predict(" ".join(sample_of(text).split()))[0]
        return _language(labels[0]) if len(labels) else ""

    # The threshold is negative, because fastText omits very unlikely languages if the threshold is 0.
    return detect, {_language(label) for label in predict("a word", k=1 << 16, threshold=-1.0)[0]}


def _language(label: object) -> str:
    """
    >>> _language("__label__zh_Hans")
    'zh'
    """
    return str(label).removeprefix("__label__").partition("_")[0]
