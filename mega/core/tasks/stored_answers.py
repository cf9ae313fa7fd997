"""Store the answers to a harness's requests as they are computed, so that a resumed run computes only the missing
answers.

A digest of the content identifies a request, and a digest of the model and of the settings that affect all answers
identifies the file. All ranks hold all answers, and rank 0 writes the file. This module depends neither on the harness
nor on the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from mega.core.files import fingerprint, whole_file
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Mesh


def check_result(path: Path, digest: str, load: str, usual: str, report: Callable[[str], None]) -> None:
    """Check an existing result file, which the new result will replace. If the file contains another model's result, an
    error is raised for the default name `usual`, and only a message is printed for a name given by the user.

    Errors: ValueError if the file has the default name and contains another model's result.
    """
    try:
        settings = json.loads(path.read_bytes())
        model = settings.get("settings", settings.get("mega", {})).get("model", {})
        other, place = model.get("digest"), model.get("path")
    except (OSError, ValueError, AttributeError):
        return
    if other in (None, digest):
        return
    difference = f"--json {path}: is the result of another model, {place}"
    if path.name == usual:
        raise ValueError(f"{difference}, and not of {load}; give --json FILE, or move it")
    report(f"{difference}, which is replaced")


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class StoredAnswers:
    """The answers, keyed by request. path: a file of JSON lines, whose first line is the fingerprint of the settings
    `about`."""

    def __init__(self, path: Path, about: Mapping[str, object], mesh: Mesh, device: torch.device):
        self.path, self._writes = path, mesh.rank == 0
        self._first = json.dumps({"fingerprint": fingerprint(about)})
        stored = self._read() if self._writes else {}
        self._answers: dict[str, Any] = gather_json(stored, mesh.everyone, device)[0]
        if self._writes:
            lines = [self._first, *(json.dumps([key, answer]) for key, answer in stored.items())]
            with whole_file(self.path) as file:  # replaced atomically, so that a kill cannot lose earlier answers
                file.write("".join(f"{line}\n" for line in lines).encode())

    def _read(self) -> dict[str, object]:
        """Read the answers of an earlier process, except an incomplete last line, which remains if the process was
        killed."""
        try:
            first, *lines = self.path.read_text().split("\n")
        except (OSError, ValueError):
            return {}
        if first != self._first:
            print(f"{self.path}: is of another model or settings; starting from the beginning", file=sys.stderr)
            return {}
        answers = {}
        for line in lines:
            try:
                key, answer = json.loads(line)
            except (TypeError, ValueError):
                continue
            answers[str(key)] = answer
        if answers:
            print(f"{self.path}: resuming with {len(answers)} answers", file=sys.stderr)
        return answers

    def each(
        self,
        kind: str,
        requests: Sequence[Asked],
        answer: Callable[[list[Asked]], Sequence[Answer]],
        at_once: int,
        size: Callable[[Asked], int],
    ) -> list[Answer]:
        """Return the answer to each request, in order. `answer` computes missing answers, for up to `at_once` requests
        per call, the largest requests first. Answers are JSON values. All ranks must call this method with the same
        arguments."""
        keys = [hashlib.sha256(json.dumps([kind, each]).encode()).hexdigest() for each in requests]
        missing = {key: each for key, each in zip(keys, requests, strict=True) if key not in self._answers}
        order = sorted(missing, key=lambda key: -size(missing[key]))
        for first in range(0, len(order), at_once):
            part = order[first : first + at_once]
            answers = answer([missing[key] for key in part])
            new = dict(zip(part, answers, strict=True))
            self._answers |= new
            if self._writes:
                with self.path.open("a") as file:
                    file.write("".join(json.dumps([key, value]) + "\n" for key, value in new.items()))
        return [self._answers[key] for key in keys]

    def close(self) -> None:
        """Remove the file of answers. Call this method after the result has been written."""
        if self._writes:
            self.path.unlink(missing_ok=True)
