"""`mega download`: a model, a tokenizer or a data set of the Hub, into its cache."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from mega.core.files import check_folder
from mega.core.hub.names import hub_name
from mega.core.hub.options import DownloadOptions


def run(
    files: DownloadOptions,
    name: Annotated[str, typer.Argument(help="OWNER/NAME, also OWNER/NAME@REVISION, or :FILE.gguf after it")],
) -> int:
    """Fetch a repository's safetensors, tokenizer and JSON files, or a data set's rows; print where they are.

    Every verb that takes a directory takes such a name too, and fetches what is missing by itself. HF_TOKEN, HF_HOME,
    HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean to the Hub's own tools.
    """
    found = hub_name(name)
    if found is None:
        raise ValueError(
            f"NAME {name}: must be OWNER/NAME of the Hub, with @REVISION if wanted, and no path that exists"
        )
    if files.to is not None:
        check_folder("--to", files.to, files.to)
    from mega.core.hub.download import fetched

    place = fetched("NAME", found, files.kind, lambda line: print(f"mega: {line}", file=sys.stderr))
    if files.to is not None:
        if place.is_file():
            files.to.mkdir(parents=True, exist_ok=True)
            place = Path(shutil.copy(place, files.to))
        else:
            place = Path(shutil.copytree(place, files.to, dirs_exist_ok=True))
    print(place)
    return 0
