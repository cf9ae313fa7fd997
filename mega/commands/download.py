"""`mega download`: download a model, tokenizer or data set from the Hub into the local Hub cache."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from mega.core.files import check_folder
from mega.core.hub.names import hub_name
from mega.core.hub.options import DownloadOptions
from mega.core.processes.world import note


def run(
    files: DownloadOptions,
    name: Annotated[str, typer.Argument(help="OWNER/NAME, optionally followed by @REVISION or :FILE.gguf")],
) -> int:
    """Download the safetensors, tokenizer and JSON files of a repository, or the rows of a data set, and print the
    path.

    A name on the Hub is accepted wherever another command takes a directory; the command then downloads missing files.
    HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT have the same meaning as in the Hub's tools.
    """
    repository = hub_name(name)
    if repository is None:
        raise ValueError(
            f"NAME {name}: must be OWNER/NAME of the Hub, with @REVISION if wanted, and no path that exists"
        )
    if files.to is not None:
        check_folder("--to", files.to, files.to)
    from mega.core.hub.download import fetched

    folder, paths = fetched("NAME", repository, files.kind, note)
    target = paths[0] if repository.part is not None and len(paths) == 1 else folder
    if files.to is not None:
        for path in paths:
            copy = files.to / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        target = files.to
    print(target)
    return 0
