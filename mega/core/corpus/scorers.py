"""Scores texts for attributes such as toxicity, from 0 to 1, with a server, a classifier, a word list, or a file of
scores.

    https://HOST/...   a server with Perspective's protocol (comments:analyze); an environment variable contains its key
    model:DIR          a Hugging Face sequence classifier; its labels are the attributes
    words:FILE         ten times the fraction of a text's words that are in the file, at most 1; for tests and recipes
    scores:FILE        JSON lines with "text" and "score", such as an earlier annotation

A scorer must be created in the process that uses it. Scores are returned in the order of the texts.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mega.core.config.option import VerbSection, option
from mega.core.untrusted import parse_json

ATTRIBUTES = ("toxicity", "severe_toxicity", "sexually_explicit", "threat", "profanity", "identity_attack")
"""Attributes whose scores are requested from Perspective."""
KINDS = "https://..., http://..., model:DIR, words:FILE or scores:FILE"
_PATH = "/v1alpha1/comments:analyze"
_WORD = re.compile(r"\w+")
_TOGETHER = 16
_MOST_ANSWER = 1 << 20

Scores = Mapping[str, float] | None
"""Attribute -> value, or None if a text has no score."""


class Scorer(Protocol):
    """Scores texts."""

    def score(self, texts: Sequence[str]) -> list[Scores]:
        """Return scores in the order of the texts; None for a text that cannot be scored.

        Errors: ValueError naming the scorer if it does not respond, or its response has an unexpected format.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ScorerOptions(VerbSection):
    """Options for the scorer and the connection to it."""

    title: ClassVar[str] = "Scorer"

    scorer: str = option("", "https://HOST, model:DIR, words:FILE or scores:FILE")
    key_variable: str = option("PERSPECTIVE_API_KEY", "environment variable that contains the server's API key")
    rate: float = option(0.0, "maximum number of requests per second; 0 disables the limit")
    connections: int = option(8, "maximum number of simultaneous requests to a server")
    tries: int = option(6, "maximum number of requests for one text, with increasing pauses between them")
    timeout: float = option(30.0, "timeout in seconds for a request to a server")

    def __post_init__(self) -> None:
        rules = {"rate": self.rate >= 0, "connections": self.connections >= 1, "tries": self.tries >= 1}
        rules["timeout"] = self.timeout > 0
        for name, is_valid in rules.items():
            if not is_valid:
                least = "at least 0" if name == "rate" else "greater than 0" if name == "timeout" else "at least 1"
                raise ValueError(f"--{name} {getattr(self, name)}: must be {least}")

    @property
    def is_server(self) -> bool:
        return self.scorer.startswith(("http://", "https://"))


def make_scorer(options: ScorerOptions) -> Scorer:
    """Create the scorer. Errors: ValueError naming flag and file."""
    kind, _, rest = options.scorer.partition(":")
    if options.is_server:
        return ServerScorer(options)
    if kind == "words" and rest:
        return WordScorer(Path(rest))
    if kind == "scores" and rest:
        return FileScorer(Path(rest))
    if kind == "model" and rest:
        return ClassifierScorer(Path(rest))
    raise ValueError(f"--scorer {options.scorer}: must be {KINDS}")


class WordScorer:
    """Scores the toxicity of a text as ten times the fraction of its words that are listed, at most 1."""

    def __init__(self, path: Path) -> None:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--scorer words:{path}: cannot be read ({error})") from None
        self._words = {line.strip().lower() for line in lines if line.strip()}
        if not self._words:
            raise ValueError(f"--scorer words:{path}: holds no word; must have one a line")

    def score(self, texts: Sequence[str]) -> list[Scores]:
        scores: list[Scores] = []
        for text in texts:
            words = _WORD.findall(text.lower())
            count = sum(word in self._words for word in words)
            scores.append({"toxicity": min(1.0, 10 * count / max(len(words), 1))})
        return scores


class FileScorer:
    """Looks up the scores of a text in a file of earlier scores."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores: dict[str, Scores] = {}
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    self._read(line, f"--scorer scores:{path}:{number}")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--scorer scores:{path}: cannot be read ({error})") from None

    def _read(self, line: str, location: str) -> None:
        row = parse_json(line, location) if line.strip() else {"text": "", "score": None}
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or "score" not in row:
            raise ValueError(f'{location}: must be an object with "text" and "score"')
        self._scores[cleaned(row["text"])] = checked(row["score"], location)

    def score(self, texts: Sequence[str]) -> list[Scores]:
        for text in texts:
            if text not in self._scores:
                raise ValueError(f"--scorer scores:{self._path}: has no score of the text {text[:60]!r}")
        return [self._scores[text] for text in texts]


class ClassifierScorer:
    """Scores texts with a Hugging Face sequence classifier. Attributes are the names of the classifier's labels in
    lower case."""

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ValueError(f"--scorer model:{path}: has no config.json; must be a folder of Hugging Face's form")
        try:
            import transformers
        except ImportError:
            raise ValueError(f"--scorer model:{path}: needs transformers (pip install transformers)") from None
        try:
            self._classify = transformers.pipeline("text-classification", model=str(path), top_k=None, truncation=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"--scorer model:{path}: {' '.join(str(error).split())[:200]}") from None

    def score(self, texts: Sequence[str]) -> list[Scores]:
        answers: Any = self._classify(list(texts), batch_size=_TOGETHER) if texts else []
        return [{each["label"].lower(): float(each["score"]) for each in row} for row in answers]


class ServerScorer:
    """Requests scores from a server with Perspective's protocol. Requests are concurrent but limited to a given rate.
    Failed requests are retried with increasing pauses."""

    def __init__(self, options: ScorerOptions) -> None:
        self._options = options
        self._where = f"--scorer {options.scorer}"
        url = options.scorer if options.scorer.rstrip("/").endswith(":analyze") else options.scorer.rstrip("/") + _PATH
        key = os.environ.get(options.key_variable, "")
        self._url = f"{url}?key={key}" if key else url
        self._threads = ThreadPoolExecutor(options.connections, "scorer")
        self._lock, self._next = threading.Lock(), 0.0
        self._failed = threading.Event()

    def score(self, texts: Sequence[str]) -> list[Scores]:
        try:
            return list(self._threads.map(self._one, texts))
        except ValueError:
            self._failed.set()  # requests that are still waiting are not sent
            raise

    def _one(self, text: str) -> Scores:
        body = {
            "comment": {"text": text},
            "requestedAttributes": {name.upper(): {} for name in ATTRIBUTES},
            "spanAnnotations": False,
            "languages": ["en"],
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        reason = ""
        for number in range(self._options.tries):
            if self._failed.is_set():
                return None
            self._wait()
            try:
                with urllib.request.urlopen(request, timeout=self._options.timeout) as answer:
                    return self._read(answer.read(_MOST_ANSWER))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code == 400:  # the server cannot score the text, for example because of its language
                    return None
                if error.code in (401, 403, 404):
                    hint = f"; its key is read from ${self._options.key_variable}" if error.code != 404 else ""
                    raise ValueError(f"{self._where}: answers {reason}{hint}") from None
            except (OSError, TimeoutError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if number + 1 < self._options.tries:
                time.sleep(min(2.0**number, 60.0) * random.uniform(0.5, 1.0) * min(1.0, self._options.timeout))
        raise ValueError(f"{self._where}: no answer in {self._options.tries} tries ({reason}); what is done stays done")

    def _wait(self) -> None:
        """Sleep until the rate limit allows another request."""
        if not self._options.rate:
            return
        with self._lock:
            current_time = time.monotonic()
            send_time = max(current_time, self._next)
            self._next = send_time + 1 / self._options.rate
        time.sleep(send_time - current_time)

    def _read(self, answer: bytes) -> Scores:
        try:
            attributes = json.loads(answer)["attributeScores"]
            scores = {name.lower(): each["summaryScore"]["value"] for name, each in attributes.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{self._where}: answers {answer[:60]!r}; must be attributeScores.NAME.summaryScore.value"
            ) from None
        return checked(scores, self._where)


def checked(scores: object, location: str) -> Scores:
    """Check that all scores are numbers from 0 to 1. Errors: ValueError if a score is outside this range."""
    if scores is None:
        return None
    if not isinstance(scores, Mapping):
        raise ValueError(f"{location}: score: must be an object of numbers, or null")
    for name, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{location}: {name} {value!r}: must be a number of 0 to 1")
    return {str(name): float(value) for name, value in scores.items()}


def cleaned(text: str, most_bytes: int | None = None) -> str:
    """Prepare a text for scoring: remove end-of-document marks, and cut the text to `most_bytes` at a character
    boundary.

    >>> cleaned("a<|endoftext|>"), cleaned("aü", 2)
    ('a', 'a')
    """
    text = text.replace("<|endoftext|>", "")
    return text if most_bytes is None else text.encode("utf-8", "replace")[:most_bytes].decode(errors="ignore")


def scored(scorer: Scorer, raw_texts: Sequence[str], most_bytes: int | None = None) -> list[Scores]:
    """Return the scores of texts. A blank text is not passed to the scorer and gets None."""
    texts = [cleaned(text, most_bytes) for text in raw_texts]
    scores: Iterator[Scores] = iter(scorer.score([text for text in texts if text.strip()]))
    return [next(scores) if text.strip() else None for text in texts]
