"""Answers to a harness's requests, kept as they come: what was killed continues with those that are missing.

A request is known by a digest of what it asks; the file, by one of the model and the settings that decide every answer.
All ranks hold all answers, rank 0 writes them. It knows no harness and no model.
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
    """What becomes of the file of a result that exists: of the same model it is replaced, and so it is, with a line,
    where the user named it. usual: its name where --json was not given.

    Errors: ValueError where another model's result has the name that is usual.
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


class KeptAnswers:
    """path: a file of JSON lines, the first one about what decides the answers."""

    def __init__(self, path: Path, about: Mapping[str, object], mesh: Mesh, device: torch.device):
        self.path, self._writes = path, mesh.rank == 0
        self._first = json.dumps({"fingerprint": fingerprint(about)})
        own = self._read() if self._writes else {}
        self._known: dict[str, Any] = gather_json(own, mesh.everyone, device)[0]
        if self._writes:
            lines = [self._first, *(json.dumps([key, answer]) for key, answer in own.items())]
            with whole_file(self.path) as file:  # killed now, it still holds what it held
                file.write("".join(f"{line}\n" for line in lines).encode())

    def _read(self) -> dict[str, object]:
        """What an earlier process kept; a line that it was killed in is left out."""
        try:
            first, *lines = self.path.read_text().split("\n")
        except (OSError, ValueError):
            return {}
        if first != self._first:
            print(f"{self.path}: is of another model or settings; starting from the beginning", file=sys.stderr)
            return {}
        found = {}
        for line in lines:
            try:
                key, answer = json.loads(line)
            except (TypeError, ValueError):
                continue
            found[str(key)] = answer
        if found:
            print(f"{self.path}: resuming with {len(found)} answers", file=sys.stderr)
        return found

    def each(
        self,
        kind: str,
        requests: Sequence[Asked],
        answer: Callable[[list[Asked]], Sequence[Answer]],
        at_once: int,
        size: Callable[[Asked], int],
    ) -> list[Answer]:
        """The answer to each request, in order; those that are missing are asked for, `at_once` of them, the largest
        first. Answers are values of JSON. All ranks call it alike."""
        keys = [hashlib.sha256(json.dumps([kind, each]).encode()).hexdigest() for each in requests]
        missing = {key: each for key, each in zip(keys, requests, strict=True) if key not in self._known}
        order = sorted(missing, key=lambda key: -size(missing[key]))
        for first in range(0, len(order), at_once):
            part = order[first : first + at_once]
            found = answer([missing[key] for key in part])
            new = dict(zip(part, found, strict=True))
            self._known |= new
            if self._writes:
                with self.path.open("a") as file:
                    file.write("".join(json.dumps([key, value]) + "\n" for key, value in new.items()))
        return [self._known[key] for key in keys]

    def close(self) -> None:
        """All is answered and reported."""
        if self._writes:
            self.path.unlink(missing_ok=True)
