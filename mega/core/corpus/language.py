"""Which language a text is in: a function from text to a code of ISO 639-1, or "" where nothing speaks for one.

`py3langid` (139 languages, its model in the wheel) reads 1,000 characters of a text, half of them from its middle: more
change its answer rarely and cost in proportion. `langdetect` is what Megatron-LM's scripts ask: about fifty times
slower, random (its seed is fixed here), and it reads up to 10,000 characters. A fastText model is given as a file.
"""

from __future__ import annotations

from collections.abc import Callable
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


def detector(library: LanguageLibrary, model: str = "") -> Callable[[str], str]:
    """Errors: ValueError where the library is not installed, or its model cannot be read."""
    try:
        if library == "langdetect":
            return _langdetect()
        return _fasttext(model) if library == "fasttext" else _py3langid()
    except ImportError:
        package = {"fasttext": "fasttext-predict"}.get(library, library)
        raise ValueError(f"--language-by {library}: is not installed; pip install {package}") from None


def _py3langid() -> Callable[[str], str]:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identify = LanguageIdentifier.from_model_file(MODEL_FILE).classify
    return lambda text: str(identify(sample_of(text))[0]) if any(map(str.isalpha, text)) else ""


def _langdetect() -> Callable[[str], str]:
    import langdetect

    langdetect.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(langdetect.detect(text))
        except langdetect.LangDetectException:  # no features
            return ""

    detect("a word")  # reads its profiles
    return detect


def _fasttext(model: str) -> Callable[[str], str]:
    import fasttext

    if not Path(model).is_file():
        raise ValueError(f"--language-model {model}: no such file; must be a fastText model, such as lid.176.ftz")
    try:
        predict = fasttext.load_model(model).predict
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--language-model {model}: cannot be read ({error})") from None

    def detect(text: str) -> str:
        labels = predict(" ".join(sample_of(text).split()))[0]
        return str(labels[0]).removeprefix("__label__").partition("_")[0] if len(labels) else ""

    return detect
