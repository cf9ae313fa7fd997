"""Read files of labelled questions: MNLI and QQP (whose files glue.py reads), and RACE.

A format is a module named after its --task, with a `FORMAT` (data/labelled.py). `LABELLED` in the config lists each
format with the head that it needs. A format is imported when it is first used.
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
