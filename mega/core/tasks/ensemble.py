"""Combine several models' predictions by the mean of their probabilities (Megatron-LM: tasks/ensemble_classifier.py).

Predictions are read and written as JSON lines, in the format of `mega eval --task mnli|qqp|race`. This module does not
import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega.core.data.formats import format_of
from mega.core.files import whole_file
from mega.core.untrusted import parse_json

KEYS = ("task", "set", "uid", "label")
Row = dict[str, Any]


def ensemble(files: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Return the combined predictions, and the accuracy of each set and of all sets together: {"set", "correct",
    "total", "accuracy"}.

    Errors: ValueError if the files do not have the same questions in the same order.
    """
    every = [predictions(file) for file in files]
    for file, rows in zip(files[1:], every[1:], strict=True):
        if len(rows) != len(every[0]):
            raise ValueError(f"--ensemble {file}: has {len(rows)} rows, and {files[0]} has {len(every[0])}")
        for number, (one, other) in enumerate(zip(every[0], rows, strict=True), 1):
            if differing := [key for key in KEYS if one[key] != other[key]]:
                raise ValueError(
                    f"--ensemble {file}:{number}: its {differing[0]} is {other[differing[0]]}, and {files[0]} has "
                    f"{one[differing[0]]}; all must be of the same questions in the same order"
                )
    combined = [_mean(rows) for rows in zip(*every, strict=True)]
    return combined, accuracies(combined)


def _mean(rows: Sequence[Row]) -> Row:
    shares = [math.fsum(each) / len(rows) for each in zip(*(row["probabilities"] for row in rows), strict=True)]
    answer = max(range(len(shares)), key=shares.__getitem__)
    return {**rows[0], "answer": answer, "name": format_of(rows[0]["task"]).labels[answer], "probabilities": shares}


def predictions(file: str) -> list[Row]:
    """Read predictions. Errors: ValueError, naming file and line, if a line is not a prediction."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--ensemble {file}: there is no such file")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        row = parse_json(line, location := f"--ensemble {file}:{number}")
        if not isinstance(row, dict) or not {*KEYS, "probabilities"} <= set(row):
            raise ValueError(
                f"{location}: is not a prediction of mega eval: needs {', '.join((*KEYS, 'probabilities'))}"
            )
        shares = row["probabilities"]
        try:
            valid = len(shares) == len(format_of(row["task"]).labels) and all(0 <= share <= 1 for share in shares)
        except (KeyError, TypeError):
            valid = False
        if not valid:
            raise ValueError(f"{location}: must have a share of each class of its task, from 0 to 1")
        rows.append(row)
    if not rows:
        raise ValueError(f"--ensemble {file}: is empty")
    return rows


def accuracies(rows: Sequence[Row]) -> list[Row]:
    """Return the accuracy of each set and of all sets together, over the questions with a known label."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    scores = []
    for name in (*names, None):
        labelled = [row for row in rows if row["label"] is not None and name in (None, row["set"])]
        correct = sum(row["label"] == row["answer"] for row in labelled)
        share = correct / len(labelled) if labelled else None
        scores.append({"set": name or "all", "correct": correct, "total": len(labelled), "accuracy": share})
    return scores


def run(files: Sequence[str], out: str) -> int:
    """Combine the predictions, print accuracies, and write the result to `out`. Errors: those of `ensemble`."""
    rows, scores = ensemble(files)
    write(Path(out), rows)
    for score in scores:
        print(line(score))
    print(f"predictions of {len(files)} models together: {out}")
    return 0


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write predictions as JSON lines."""
    with whole_file(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def line(score: Mapping[str, Any]) -> str:
    """Return the line that reports an accuracy, in Megatron-LM's format.

    >>> line({"set": "dev", "correct": 3, "total": 4, "accuracy": 0.75})
    ' >> dev: correct / total = 3 / 4 = 75.0000 %'
    """
    share = "no labels" if score["accuracy"] is None else f"{100 * score['accuracy']:.4f} %"
    return f" >> {score['set']}: correct / total = {score['correct']} / {score['total']} = {share}"
