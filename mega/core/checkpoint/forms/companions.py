"""Small files that stay with weights from folder to folder: tokenizers, configurations. Knows no tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mega.core.checkpoint.forms.foreign import inside
from mega.core.checkpoint.forms.form import COMPANIONS, FORMS, Form
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.checkpoint.own.store import Attachments
from mega.core.files import whole_file


def companions_of(form: Form, folder: Path) -> dict[str, Path]:
    """The files that a form keeps with the weights in `folder`, by name. Errors: CheckpointError for odd ones."""
    if (attached := form.attached(folder)) is not None:
        return attached
    if folder.is_file():
        return {}
    found = {name: inside(folder, name) for name in form.companions if (folder / name).exists()}
    for path in found.values():
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
    return found


def copy_companions(checkpoint: StoredWeights, folder: Path, skip: Collection[str]) -> None:
    """Put the files that came with a checkpoint of ours into an exported `folder`. skip: those not wanted there."""
    for name in COMPANIONS:
        if name in checkpoint.attachments and name not in skip:
            with whole_file(folder / name) as file:
                file.write(checkpoint.attachments[name].read_bytes())


def unread_tokenizer(files: Attachments) -> str | None:
    """Why token files kept with weights are those of no tokenizer that is read; None where they are, or there are
    none."""
    return next((why for form in FORMS if (why := form.unread(files)) is not None), None)


def tokenizer_kind(files: Attachments) -> str | None:
    """The kind of tokenizer, as --tokenizer names it, that files kept with weights are; None for none."""
    return next((kind for form in FORMS if (kind := form.tokenizer(files)) is not None), None)
