"""Which language a text is in: a function from text to a code of ISO 639-1, or "" where nothing speaks for one.

`py3langid` (139 languages, its model in the wheel) reads 1,000 characters of a text, half of them from its middle: more
change its answer rarely and cost in proportion. `langdetect` is what Megatron-LM's scripts ask: about fifty times
slower, random (its seed is fixed here), and it reads up to 10,000 characters. A fastText model is given as a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

LanguageLibrary = Literal["py3langid", "langdetect", "fasttext"]
_WINDOW = 500


def sample_of(text: str) -> str:
    """The characters by which the language of a text is judged."""
    if len(text) <= 2 * _WINDOW:
        return text
    middle = len(text) // 2
    return f"{text[:_WINDOW]} {text[middle : middle + _WINDOW]}"


Detector = tuple[Callable[[str], str], Collection[str]]
"""The function, and all languages that it knows."""


def detector(library: LanguageLibrary, model: str = "", *, language: str = "en") -> Callable[[str], str]:
    """language: one that it must know.

    Errors: ValueError where the library is not installed, or its model cannot be read.
    """
    try:
        if library == "langdetect":
            detect, known = _langdetect()
        else:
            detect, known = _fasttext(model) if library == "fasttext" else _py3langid()
    except ImportError:
        package = {"fasttext": "fasttext-predict"}.get(library, library)
        raise ValueError(f"--language-by {library}: is not installed; pip install {package}") from None
    if language not in known:
        raise ValueError(f"--language {language}: must be of {' '.join(sorted(known))}")
    return detect


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
        except langdetect.LangDetectException:  # no features
            return ""

    detect("a word")  # reads its profiles
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

    # Below any probability: at 0 those that are very unlikely are left out.
    return detect, {_language(label) for label in predict("a word", k=1 << 16, threshold=-1.0)[0]}


def _language(label: object) -> str:
    """
    >>> _language("__label__zh_Hans")
    'zh'
    """
    return str(label).removeprefix("__label__").partition("_")[0]
