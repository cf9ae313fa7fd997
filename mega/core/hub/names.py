"""Recognise names on the Hub. This module imports no library, so that every command can import it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["model", "tokenizer", "dataset"]
"""What to fetch from a repository: a model including its tokenizer, only the tokenizer, or a data set's rows."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FILE = re.compile(
    r"step-\d{7}|.*\.(jsonl?|ndjson|txt|parquet|arrow|gz|zst|xz|bz2|bin|idx|model|toml|pt|pth|safetensors|gguf|npy|csv|tsv)"
)
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][\w./-]*))?(?::([^:]+))?")


class HubName(NamedTuple):
    """The name of a repository: OWNER/NAME; a branch, tag or commit; and a selection of files.

    part: for a model, the name of a .gguf file; for a data set, a split such as test, or a pattern of file names.
    """

    repository: str
    revision: str | None = None
    part: str | None = None

    def __str__(self) -> str:
        return (
            self.repository
            + ("" if self.revision is None else f"@{self.revision}")
            + ("" if self.part is None else f":{self.part}")
        )


def cached_name(place: str | Path) -> HubName | None:
    """Return the name of the repository if `place` is its folder in the cache of huggingface_hub; None for any other
    path.

    >>> str(cached_name("hub/models--meta-llama--Llama-3.2-1B/snapshots/0f1e2d"))
    'meta-llama/Llama-3.2-1B'
    """
    parts = Path(place).parts
    match = re.fullmatch(r"models--(.+?)--(.+)", parts[-3]) if len(parts) > 2 and parts[-2] == "snapshots" else None
    return None if match is None else HubName(f"{match[1]}/{match[2]}")


def hub_name(place: str | Path) -> HubName | None:
    """Parse `place` as a name on the Hub. Return None for a path, that is, if `place` or its first folder exists, or
    `place` has the suffix of a file.

    >>> hub_name("meta-llama/Llama-3.2-1B@main")
    HubName(repository='meta-llama/Llama-3.2-1B', revision='main', part=None)
    >>> hub_name("runs/first/step-0000010"), hub_name("./meta-llama/Llama-3.2-1B"), hub_name("s3://bucket/run")
    (None, None, None)
    """
    match = _NAME.fullmatch(str(place))
    if (
        match is None
        or _FILE.fullmatch(match[1].rpartition("/")[2])
        or os.path.lexists(place)
        or os.path.isdir(match[1].partition("/")[0])
    ):
        return None
    return HubName(match[1], match[2], match[3])
