"""What lies at a path, by the names of files; no tensor is read."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

from mega.core.checkpoint.forms.form import FORMS, OWN, Form
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import store_at
from mega.core.files import url_of

MOST = 1000
"""Things in a folder that are looked at for what may be meant."""


def form_at(path: Path, *, inside: bool = True) -> Form:
    """What lies at `path`. inside: where it is nothing, name what lies in it.

    Errors: CheckpointError if none of them, or both ours and another's.
    """
    if url_of(path) is None and not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    foreign = foreign_form(path)
    steps = store_at(path).steps() if foreign is None or path.is_dir() else []
    if foreign is not None and steps:
        ours = f"checkpoints of ours (steps {', '.join(map(str, steps))})"
        raise CheckpointError(
            f"{path}: holds {foreign.words} and {ours}, and which is meant is open; give the step-NNNNNNN, or "
            "move one of the two elsewhere"
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
    """What to give instead of a folder that is none of them but has one in it; folders come before files."""
    with suppress(OSError):  # what cannot be read is not named
        for path in islice(sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)), MOST):
            with suppress(OSError, CheckpointError):
                if path.suffix != ".bin" or not path.with_suffix(".idx").exists():
                    return f"; if {path.name} in it is {form_at(path, inside=False).words}, give {path}"
    return ""


def check_place(save: Path, flag: str = "--save-dir") -> None:
    """See that checkpoints of ours at `save` will be recognised. Errors: ValueError where others' weights are there.

    Next to them it would be open which of the two models is meant, and the next conversion would take the other one.
    """
    foreign = foreign_form(save) if url_of(save) is None and save.exists() else None
    if foreign is not None:
        raise ValueError(f"{flag} {save}: holds {foreign.words}; must be a run's directory, or new")


def foreign_form(path: Path) -> Form | None:
    """What others have written at `path`; None where it is nothing that is known. Ours may lie there too."""
    return next((form for form in FORMS if form.recognise(path)), None)
