"""Determine which run wrote a metrics file. Every start of a run records its --save in the events file next to the
metrics file.

The recorded path is relative to the folder of the metrics file, so that both can be moved together.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from mega.core.files import POINTER, url_of
from mega.core.untrusted import read_limited

MOST_BYTES = 1 << 30
"""Maximum size, in bytes, of an events file."""


def events_file(metrics: str) -> Path:
    """Return the path of the events file, next to the metrics file.

    >>> str(events_file("runs/a/metrics.jsonl"))
    'runs/a/metrics.events.jsonl'
    """
    return Path(metrics).with_suffix(f".events{Path(metrics).suffix}")


def recorded_save(metrics: str, save: str) -> str:
    """Return the path of `save` relative to the folder of `metrics`, as the events file records it; a URL is unchanged.

    >>> recorded_save("runs/a.jsonl", "runs/a"), recorded_save("a.jsonl", "s3://runs/a")
    ('a', 's3://runs/a')
    """
    if url_of(save) is not None:
        return save
    return os.path.relpath(os.path.realpath(save), os.path.dirname(os.path.realpath(metrics)))


def metrics_owner(metrics: str) -> str | None:
    """Return the --save of the run that wrote an existing metrics file; None if the run had no --save or is unknown.

    Events files of earlier versions do not name the run. A metrics file next to checkpoints then belongs to the run
    that wrote the checkpoints.
    """
    metrics = os.path.realpath(metrics)
    folder, save = os.path.dirname(metrics), None
    with suppress(ValueError):  # the events file does not exist
        text = read_limited(events_file(metrics), MOST_BYTES, metrics).decode("utf-8", "replace")
        for line in text.splitlines():
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                save = event.get("save") if event["event"] == "begin" else save
    if isinstance(save, str):
        return save if url_of(save) is not None else os.path.realpath(os.path.join(folder, save))
    with suppress(OSError):
        if any(name == POINTER or re.fullmatch(r"step-\d+", name) for name in os.listdir(folder)):
            return folder
    return None
