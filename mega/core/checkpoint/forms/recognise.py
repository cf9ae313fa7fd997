"""Determine the format of the checkpoint at a path from file names, without reading tensors."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

from mega.core.checkpoint.forms.form import FORMS, OWN, Form
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import store_at
from mega.core.files import url_of

MOST = 1000
"""Maximum number of a folder's entries that are examined for a suggestion."""


def form_at(path: Path, *, inside: bool = True) -> Form:
    """Return the format of the checkpoint at `path`. inside: whether the error for an unrecognised path suggests a
    checkpoint found inside the folder.

    Errors: CheckpointError if no format is recognised, or if the path contains both a mega checkpoint and another
    format.
    """
    if url_of(path) is None and not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    foreign = foreign_form(path)
    steps = store_at(path).steps() if foreign is None or path.is_dir() else []
    if foreign is not None and steps:
        own_steps = f"mega checkpoints (steps {', '.join(map(str, steps))})"
        raise CheckpointError(
            f"{path}: holds {foreign.words} and {own_steps}, and it is unclear which is meant; give the "
            "step-NNNNNNN, or move one of the two elsewhere"
        )
    if foreign is not None:
        return foreign
    if (path / "manifest.json").exists() or steps:
        return OWN
    signs = ", no ".join(form.sign for form in reversed(FORMS) if form.sign)
    files = " or ".join(form.alone for form in FORMS if form.alone)
    hint = _inside(path) if inside else ""
    raise CheckpointError(f"{path}: holds no {signs} and no step-NNNNNNN (mega), and is no {files}{hint}")


def _inside(folder: Path) -> str:
    """Return a suggestion if a folder is not a checkpoint but contains one. Folders are suggested before files."""
    with suppress(OSError):  # unreadable entries are skipped
        for path in islice(sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)), MOST):
            with suppress(OSError, CheckpointError):
                if path.suffix != ".bin" or not path.with_suffix(".idx").exists():
                    return f"; if {path.name} in it is {form_at(path, inside=False).words}, give {path}"
    return ""


def check_place(save: Path, flag: str = "--save-dir") -> None:
    """Check that mega checkpoints may be saved at `save`. Errors: ValueError if `save` contains weights of another
    format.

    With two formats in one folder, the next conversion might read the wrong model.
    """
    foreign = foreign_form(save) if url_of(save) is None and save.exists() else None
    if foreign is not None:
        raise ValueError(f"{flag} {save}: holds {foreign.words}; must be a run's directory, or new")


def foreign_form(path: Path) -> Form | None:
    """Return the format of another program's weights at `path`; None if there are no such weights. `path` may also
    contain mega checkpoints."""
    return next((form for form in FORMS if form.recognise(path)), None)
