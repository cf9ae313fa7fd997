"""The weights that a training begins with, wherever they lie: a checkpoint of ours, or others' files read in place.

Others' weights come as a checkpoint without an optimizer and without progress. Nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path

from mega.core.checkpoint.forms.companions import companions_of, tokenizer_kind
from mega.core.checkpoint.forms.direct import SAMPLED, ForeignWeights, opened_foreign, weights_digest
from mega.core.checkpoint.forms.form import FORMS, Form, Given
from mega.core.checkpoint.forms.recognise import foreign_form, form_at
from mega.core.checkpoint.own.layout import ONE
from mega.core.checkpoint.own.pieces import CheckpointError, Piece, Tensors
from mega.core.checkpoint.own.steps import STEP
from mega.core.checkpoint.own.store import Checkpoint, locate
from mega.core.checkpoint.own.together import JsonExchange, alone, disagreement, gathered, together
from mega.core.files import url_of
from mega.core.untrusted import Json


class ForeignCheckpoint:
    """Foreign weights read in place, with what is read of a `Checkpoint` besides an optimizer and progress.

    model: its section. meta: the model, and the kind of tokenizer. attachments: the files that came along. notes: lines
    for the user.
    """

    step, world = 0, 1

    def __init__(self, place: Path, form: Form) -> None:
        opened = opened_foreign(form, place, Given(layout=ONE, optimizer=False))
        self.path, self.model, self.notes = place, opened.model, opened.notes
        self.attachments: Mapping[str, Path] = {} if place.is_file() else companions_of(form, place)
        self.meta: Mapping[str, Json] = {
            "config": {
                "model": dataclasses.asdict(opened.model),
                "tokenizer": {"tokenizer": tokenizer_kind(self.attachments)},
            }
        }
        self._weights = ForeignWeights(place, opened)
        self.tensors: Tensors = self._weights.tensors

    @cached_property
    def digest(self) -> str:
        return weights_digest(self._weights)

    def read(self, wanted: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """As of `Checkpoint`."""
        self._weights.read(wanted, cast=cast)


def _foreign_name(path: Path) -> str:
    """Of the form of others' weights; nothing where they are none. Errors: CheckpointError where nothing is there, or
    ours too."""
    if not path.exists() and not STEP.fullmatch(path.name):
        raise CheckpointError(f"{path}: no such file or directory")
    return "" if foreign_form(path) is None else form_at(path).name


def open_start(place: str, report: Callable[[str], None], exchange: JsonExchange = alone) -> tuple[Checkpoint, bool]:
    """What lies at `place`, and whether it is weights alone, of others. Errors: as `locate`, on all ranks."""
    names = [""] if url_of(place) is not None else gathered(partial(_foreign_name, Path(place)), exchange)
    if differ := disagreement([name or "none of others" for name in names]):
        raise CheckpointError(f"{place}: {differ}")
    if not names[0]:
        return locate(place, report, exchange), False
    form = next(form for form in FORMS if form.name == names[0])
    found = together(partial(ForeignCheckpoint, Path(place), form), exchange)
    if exchange is not alone:
        digests = gathered(partial(weights_digest, found), exchange)
        if differ := disagreement([digest.removeprefix(SAMPLED)[:12] for digest in digests]):
            raise CheckpointError(f"{place}: {differ}")
    for note in found.notes:
        report(note)
    return found, True  # type: ignore[return-value]  # it has all of a checkpoint that a start reads
