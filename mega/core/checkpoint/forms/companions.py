"""Handle the small files that are stored with weights: tokenizers and configurations. This module does not depend on
tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mega.core.checkpoint.forms.foreign import inside
from mega.core.checkpoint.forms.form import COMPANIONS, FORMS, NESTED, POOLING, Form
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.checkpoint.own.store import Attachments
from mega.core.files import whole_file


def companions_of(form: Form, folder: Path) -> dict[str, Path]:
    """Return a dict: file name -> path, for the files in `folder` that are to be stored with the weights. Errors:
    CheckpointError naming a path that is not a regular file."""
    if (generated := form.attached(folder)) is not None:
        return generated
    if folder.is_file():
        return {}
    files = {name: inside(folder, name) for name in form.companions if (folder / name).exists()}
    for name, place in NESTED.items() if form.companions else ():
        if (folder / place).exists() and (name != POOLING or "modules.json" in form.companions):
            part, _, file = place.rpartition("/")
            files[name] = inside(folder, file, part=part)
    for path in files.values():
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
    return files


def copy_companions(checkpoint: StoredWeights, folder: Path, skip: Collection[str]) -> None:
    """Copy the files stored with a mega checkpoint into an exported `folder`. skip: names to leave out."""
    for name in (*COMPANIONS, *NESTED):
        if name in checkpoint.attachments and name not in skip:
            place = folder / NESTED.get(name, name)
            place.parent.mkdir(exist_ok=True)
            with whole_file(place) as file:
                file.write(checkpoint.attachments[name].read_bytes())


def unread_tokenizer(files: Attachments) -> str | None:
    """Explain why tokenizer files stored with weights are not supported; None if they are supported or absent."""
    return next((reason for form in FORMS if (reason := form.unread(files)) is not None), None)


def tokenizer_kind(files: Attachments) -> str | None:
    """Return the value of --tokenizer for the tokenizer stored with weights; None if no tokenizer is stored."""
    return next((kind for form in FORMS if (kind := form.tokenizer(files)) is not None), None)
