"""Read files of labelled questions: MNLI and QQP (both with glue.py), and RACE.

Each format is a module named after its --task, which defines `FORMAT` (a `Format` of data/labelled.py) and is imported
when first used. `LABELLED` in the config lists the head that each format needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mega.core.config.sections import LABELLED

if TYPE_CHECKING:
    from mega.core.data.labelled import Format


def format_of(task: str) -> Format:
    """Return the file format of a task. Errors: KeyError if the task has no labels."""
    if task not in LABELLED:
        raise KeyError(task)
    labelled_format: Format = importlib.import_module(f"{__name__}.{task}").FORMAT
    return labelled_format
