"""What a name of the Hub is. It loads nothing, so that every verb may ask."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["model", "tokenizer", "dataset"]
"""What is fetched of a repository: the weights and all that belongs to them, the tokenizer alone, a data set's rows."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FILE = re.compile(
    r"step-\d{7}|.*\.(jsonl?|ndjson|txt|parquet|arrow|gz|zst|xz|bz2|bin|idx|model|toml|pt|pth|safetensors|gguf|npy|csv|tsv)"
)
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][\w./-]*))?(?::([^:]+))?")


class HubName(NamedTuple):
    """A repository: OWNER/NAME, a branch, tag or commit, and which files of it.

    part: of a model a .gguf file; of a data set a split, such as test, or a pattern of its files.
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
    """The repository whose cached folder, as huggingface_hub lays it out, `place` is.

    >>> str(cached_name("hub/models--meta-llama--Llama-3.2-1B/snapshots/0f1e2d"))
    'meta-llama/Llama-3.2-1B'
    """
    parts = Path(place).parts
    found = re.fullmatch(r"models--(.+?)--(.+)", parts[-3]) if len(parts) > 2 and parts[-2] == "snapshots" else None
    return None if found is None else HubName(f"{found[1]}/{found[2]}")


def hub_name(place: str | Path) -> HubName | None:
    """The name that `place` is; None for a path: one that exists, or whose first folder does, or that ends as files do.

    >>> hub_name("meta-llama/Llama-3.2-1B@main")
    HubName(repository='meta-llama/Llama-3.2-1B', revision='main', part=None)
    >>> hub_name("runs/first/step-0000010"), hub_name("./meta-llama/Llama-3.2-1B"), hub_name("s3://bucket/run")
    (None, None, None)
    """
    found = _NAME.fullmatch(str(place))
    if (
        found is None
        or _FILE.fullmatch(found[1].rpartition("/")[2])
        or os.path.lexists(place)
        or os.path.isdir(found[1].partition("/")[0])
    ):
        return None
    return HubName(found[1], found[2], found[3])
