"""Repairs texts, and drops documents that are too short or in another language, as Megatron-LM's two clean-up scripts
do.

    ftfy_fix_text            repair mojibake, HTML entities, ligatures, curled quotes and line ends with ftfy
    language                 drop documents that are not in the language to keep
    min_tokens               drop documents with too few tokens, counting the end-of-document token
    general_cleaning         replace runs of spaces, and line breaks inside a sentence, with one space
    remove_512               drop documents shorter than 512 characters
    remove_256_javascript    drop documents shorter than 256 characters that mention JavaScript
    remove_512_non_english   drop documents shorter than 512 characters in other languages

The tasks are applied in the order of --tasks. Source: Megatron-LM 23.06, tools/openwebtext.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from mega.core.corpus.documents import CorpusDocument, Result, Work, drop_document, each
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
"""A text with more than this number of characters per required token is assumed to have enough tokens and is not
tokenized."""

_UNTOUCHED = re.compile(r"[\t\n\x20-\x25\x27-\x7e]*")
"""Matches text that ftfy does not change: ASCII without control characters and without `&`."""
_BLANKS = re.compile(r"  +|\b\n+ |\b\n+")


Task = Callable[[str], "str | None"]
"""Maps a text to a new text, or to None if the document must be dropped."""


def fixer() -> Callable[[str], str]:
    """Return a function that repairs texts with ftfy. Lines that ftfy cannot change are skipped. Errors: ValueError if
    ftfy is not installed."""
    try:
        import ftfy
    except ImportError:
        raise ValueError("--tasks ftfy_fix_text: needs ftfy; pip install '.[corpus]' in a clone") from None
    escaped = ftfy.TextFixerConfig()
    unescaped = ftfy.TextFixerConfig(unescape_html=False)
    untouched = _UNTOUCHED.fullmatch

    def fix(text: str) -> str:
        if untouched(text):
            return text
        lines, config = _lines(text), escaped
        for number, line in enumerate(lines):
            if "<" in line:  # after "<", ftfy keeps HTML entities, because the text may be HTML
                config = unescaped
            if not untouched(line):
                lines[number] = ftfy.fix_text(line, config)
        return "".join(lines)

    return fix


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:]


@dataclass(frozen=True, kw_only=True)
class Clean:
    """Applies clean-up tasks to each document."""

    name: ClassVar[str] = "clean"
    key: str = "text"
    """JSON key of the text."""
    tasks: tuple[CleanTask, ...] = DEFAULT_TASKS
    """Names of the clean-up tasks, in the order in which they are applied."""
    language: str = "en"
    """Language to keep, as an ISO 639-1 code."""
    language_by: LanguageLibrary = "py3langid"
    """Library that detects the language."""
    language_model: str = ""
    """Path of a fastText model."""
    min_tokens: int = 128
    """Minimum number of tokens in a document, including the end-of-document token."""
    tokenizer: tuple[tuple[str, Any], ...] = ()
    """Names and values of the options in the tokenizer section. If empty, the number of tokens is estimated as a
    quarter of the number of bytes."""
    as_megatron: bool = False
    """Whether to skip the tasks of cleanup_fix_dataset.py that follow ftfy_fix_text, as Megatron-LM's script does."""

    def load(self) -> Work:
        """Load the libraries of all tasks. Errors: ValueError if a library is not installed."""
        detect = None
        if {"language", "remove_512_non_english"} & set(self.tasks):
            detect = detector(self.language_by, self.language_model, language=self.language)
        tasks = [(task, self._task(task, detect)) for task in self._applied()]

        def clean(document: CorpusDocument) -> Result:
            text = document.text
            counts: dict[str, int] = {}
            measures: dict[str, str] = {"language": self.language} if "language" in self.tasks else {}
            for task, apply in tasks:
                new_text = apply(text)
                if new_text is None:
                    return drop_document(self.reason(task), **counts)
                if new_text is not text and new_text != text:
                    counts[_CHANGED[task]] = 1
                    text = new_text
            line = document.with_text(text) if counts else document.line
            return Result((line,), counts=counts, measures=measures)

        return each(clean)

    def _applied(self) -> Sequence[CleanTask]:
        if not self.as_megatron or "ftfy_fix_text" not in self.tasks:
            return self.tasks
        next_task = self.tasks.index("ftfy_fix_text") + 1
        return [*self.tasks[:next_task], *(task for task in self.tasks[next_task:] if task not in _FIX_TASKS)]

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
        detect_language, language = detect, self.language
        if task == "language":
            return lambda text: text if detect_language(text) == language else None
        return lambda text: None if len(text) < 512 and detect_language(text) != language else text

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
        """Return the reason that is recorded if a task drops a document."""
        return {
            "language": f"not in {self.language}",
            "min_tokens": f"fewer than {self.min_tokens} tokens",
            "remove_512": "shorter than 512 characters",
            "remove_256_javascript": "JavaScript, shorter than 256 characters",
            "remove_512_non_english": f"not in {self.language}, shorter than 512 characters",
        }[task]


_CHANGED = {"ftfy_fix_text": "repaired", "general_cleaning": "with other blanks"}
