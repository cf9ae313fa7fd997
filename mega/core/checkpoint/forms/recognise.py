"""What lies at a path, by the names of files; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from mega.core.checkpoint.forms.form import FORMS, OWN, Form
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import store_at
from mega.core.files import url_of


def form_at(path: Path) -> Form:
    """What lies at `path`. Errors: CheckpointError if none of them, or both ours and another's."""
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
    alone = " or ".join(form.alone for form in FORMS if form.alone)
    raise CheckpointError(f"{path}: holds no {signs} and no step-NNNNNNN (mega), and is no {alone}{_inside(path)}")


def _inside(folder: Path) -> str:
    """What to give instead of a folder that is none of them but has one in it."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        form = foreign_form(path)
        if form is not None:
            return f"; if {path.name} in it is {form.words}, give {path}"
    return ""


def check_place(save: Path) -> None:
    """See that checkpoints of ours at `save` will be recognised. Errors: ValueError where others' weights are there.

    Next to them it would be open which of the two models is meant, and the next conversion would take the other one.
    """
    foreign = foreign_form(save) if url_of(save) is None and save.exists() else None
    if foreign is not None:
        raise ValueError(f"--save-dir {save}: holds {foreign.words}; must be a run's directory, or new")


def foreign_form(path: Path) -> Form | None:
    """What others have written at `path`; None where it is nothing that is known. Ours may lie there too."""
    return next((form for form in FORMS if form.recognise(path)), None)
