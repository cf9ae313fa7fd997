"""Repair text and drop what is too short or in another language: the tasks of Megatron-LM's two clean-up scripts.

    ftfy_fix_text            mojibake, HTML entities, ligatures, curled quotes, line ends: by ftfy
    language                 drop what is not in the language
    min_tokens               drop what has fewer tokens than that, the end of the document included
    general_cleaning         runs of blanks, and line breaks inside a sentence, become one blank
    remove_512               drop what is shorter than 512 characters
    remove_256_javascript    drop what is shorter than 256 characters and speaks of JavaScript
    remove_512_non_english   drop what is shorter than 512 characters and not in the language

They are applied in the order in which they are asked for. Source: Megatron-LM 23.06, tools/openwebtext.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from mega.core.corpus.documents import CorpusDocument, Result, Work, dropped, each
from mega.core.corpus.language import LanguageLibrary, detector
from mega.core.text.build import build

CleanTask = Literal[
    "ftfy_fix_text",
    "language",
    "min_tokens",
    "general_cleaning",
    "remove_512",
    "remove_256_javascript",
    "remove_512_non_english",
]
DEFAULT_TASKS: tuple[CleanTask, ...] = ("ftfy_fix_text", "language", "min_tokens")
_FIX_TASKS = get_args(CleanTask)[3:]
_BYTES_A_TOKEN = 4
_CHARACTERS_A_TOKEN = 8
"""A text that has more characters than these for each token is not tokenised: it has enough."""

_UNTOUCHED = re.compile(r"[\t\n\x20-\x25\x27-\x7e]*")
"""ASCII without control characters, and without & of HTML's entities: ftfy changes nothing there."""
_BLANKS = re.compile(r"  +|\b\n+ |\b\n+")


Task = Callable[[str], "str | None"]
"""From a text to a text, or None where the document goes."""


def fixer() -> Callable[[str], str]:
    """ftfy's repair, of those lines alone in which it can have anything to do. Errors: ValueError."""
    try:
        import ftfy
    except ImportError:
        raise ValueError("--tasks ftfy_fix_text: needs ftfy; pip install '.[corpus]' in a clone") from None
    escaped = ftfy.TextFixerConfig()
    kept = ftfy.TextFixerConfig(unescape_html=False)
    untouched = _UNTOUCHED.fullmatch

    def fix(text: str) -> str:
        if untouched(text):
            return text
        lines, config = _lines(text), escaped
        for number, line in enumerate(lines):
            if "<" in line:  # from there on &lt; is taken to be meant
                config = kept
            if not untouched(line):
                lines[number] = ftfy.fix_text(line, config)
        return "".join(lines)

    return fix


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:]


@dataclass(frozen=True, kw_only=True)
class Clean:
    """tokenizer: names and values of the configuration's tokenizer section; without one a token is four bytes."""

    name: ClassVar[str] = "clean"
    key: str = "text"
    tasks: tuple[CleanTask, ...] = DEFAULT_TASKS
    language: str = "en"
    language_by: LanguageLibrary = "py3langid"
    language_model: str = ""
    min_tokens: int = 128
    tokenizer: tuple[tuple[str, Any], ...] = ()
    as_megatron: bool = False
    """After ftfy_fix_text the tasks of cleanup_fix_dataset.py are skipped, as that script does."""

    def load(self) -> Work:
        """Errors: ValueError where a task's library is not installed."""
        detect = None
        if {"language", "remove_512_non_english"} & set(self.tasks):
            detect = detector(self.language_by, self.language_model, language=self.language)
        tasks = [(task, self._task(task, detect)) for task in self._applied()]

        def clean(document: CorpusDocument) -> Result:
            text = document.text
            counts: dict[str, int] = {}
            measures: dict[str, str] = {"language": self.language} if "language" in self.tasks else {}
            for task, apply in tasks:
                found = apply(text)
                if found is None:
                    return dropped(self.reason(task), **counts)
                if found is not text and found != text:
                    counts[_CHANGED[task]] = 1
                    text = found
            line = document.with_text(text) if counts else document.line
            return Result((line,), counts=counts, measures=measures)

        return each(clean)

    def _applied(self) -> Sequence[CleanTask]:
        if not self.as_megatron or "ftfy_fix_text" not in self.tasks:
            return self.tasks
        at = self.tasks.index("ftfy_fix_text") + 1
        return [*self.tasks[:at], *(task for task in self.tasks[at:] if task not in _FIX_TASKS)]

    def _task(self, task: CleanTask, detect: Callable[[str], str] | None) -> Task:
        match task:
            case "ftfy_fix_text":
                return fixer()
            case "general_cleaning":
                return lambda text: _BLANKS.sub(" ", text)
            case "remove_512":
                return lambda text: None if len(text) < 512 else text
            case "remove_256_javascript":
                return lambda text: None if len(text) < 256 and "javascript" in text.lower() else text
            case "min_tokens":
                return self._long_enough()
        assert detect is not None
        found, language = detect, self.language
        if task == "language":
            return lambda text: text if found(text) == language else None
        return lambda text: None if len(text) < 512 and found(text) != language else text

    def _long_enough(self) -> Task:
        least = self.min_tokens
        if not self.tokenizer:
            return lambda text: None if len(text.encode()) < _BYTES_A_TOKEN * (least - 1) else text
        encode = build(**dict(self.tokenizer)).encode

        def task(text: str) -> str | None:
            short = len(text) < _CHARACTERS_A_TOKEN * least and len(encode(text)) + 1 < least
            return None if short else text

        return task

    def reason(self, task: CleanTask) -> str:
        """Why a task drops a document."""
        return {
            "language": f"not in {self.language}",
            "min_tokens": f"fewer than {self.min_tokens} tokens",
            "remove_512": "shorter than 512 characters",
            "remove_256_javascript": "JavaScript, shorter than 256 characters",
            "remove_512_non_english": f"not in {self.language}, shorter than 512 characters",
        }[task]


_CHANGED = {"ftfy_fix_text": "repaired", "general_cleaning": "with other blanks"}
