"""Files of labelled questions: mnli.py and qqp.py (glue.py reads their files), race.py.

A format is a module with a `FORMAT` (data/labelled.py), called as --task names it; `LABELLED` in the config lists them
with the heads that they need. A format is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mega.core.config.sections import LABELLED

if TYPE_CHECKING:
    from mega.core.data.labelled import Format


def format_of(task: str) -> Format:
    """How the files of a task of labels are read. Errors: KeyError for another one."""
    if task not in LABELLED:
        raise KeyError(task)
    found: Format = importlib.import_module(f"{__name__}.{task}").FORMAT
    return found
