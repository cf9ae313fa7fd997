"""Weights, wherever they are: one answer for every verb that begins with a model, continues one or converts one.

    open_weights(place)      what a user points at: a mega checkpoint, or foreign files, read in place
    open_base(checkpoint)    the weights that adapters were trained on
    whole_model(weights)     a model with all its weights: those of its base where it holds adapters alone

All three are read alike (`StoredWeights`), and nothing is written. A checkpoint of adapters names its base by path and
digest (own/base.py). The base may be a mega checkpoint or, in any form that is read, foreign. It is looked for where it
was, then in the same place relative to the adapters, and compared by its digest, so that adapters are never put on
another model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path

from mega.core.checkpoint.forms.companions import companions_of, tokenizer_kind
from mega.core.checkpoint.forms.direct import SAMPLED, ForeignWeights, opened_foreign, weights_digest
from mega.core.checkpoint.forms.form import FORMS, Form, Given
from mega.core.checkpoint.forms.recognise import foreign_form, form_at
from mega.core.checkpoint.own.base import Joined, named_base
from mega.core.checkpoint.own.layout import ONE
from mega.core.checkpoint.own.model import check_size, model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece, Tensors
from mega.core.checkpoint.own.source import Readable, StoredWeights
from mega.core.checkpoint.own.steps import STEP
from mega.core.checkpoint.own.store import locate
from mega.core.checkpoint.own.together import JsonExchange, alone, disagreement, gathered, together
from mega.core.config.sections import ModelConfig
from mega.core.files import url_of
from mega.core.untrusted import Json

Report = Callable[[str], None]

ADVICE = "Put the base there, or in the same place relative to the adapters; a run that resumes takes it as --load"


class ForeignCheckpoint:
    """Foreign weights read in place, with what is read of a `Checkpoint` besides an optimizer and progress.

    model: its section. meta: the model, and the kind of tokenizer. attachments: the files that came along. notes: lines
    for the user.
    """

    step, world, foreign = 0, 1, True

    def __init__(self, place: Path, form: Form) -> None:
        opened = opened_foreign(form, place, Given(layout=ONE, optimizer=False))
        self.path, self.model, self.notes = place, opened.model, opened.notes
        self.attachments: Mapping[str, Path] = companions_of(form, place)
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


def open_weights(place: str, report: Report = lambda line: None, exchange: JsonExchange = alone) -> StoredWeights:
    """The weights at `place`. Errors: CheckpointError, on all ranks."""
    names = [""] if url_of(place) is not None else gathered(partial(_foreign_name, Path(place)), exchange)
    if differ := disagreement([name or "none of others" for name in names]):
        raise CheckpointError(f"{place}: {differ}")
    if not names[0]:
        return locate(place, report, exchange)
    form = next(form for form in FORMS if form.name == names[0])
    found = together(partial(ForeignCheckpoint, Path(place), form), exchange)
    if exchange is not alone:
        digests = gathered(partial(weights_digest, found), exchange)
        if differ := disagreement([digest.removeprefix(SAMPLED)[:12] for digest in digests]):
            raise CheckpointError(f"{place}: {differ}")
    for note in found.notes:
        report(note)
    return found


def open_base(
    checkpoint: StoredWeights, given: str | None, report: Report = lambda line: None, exchange: JsonExchange = alone
) -> StoredWeights | None:
    """The base of a checkpoint of adapters: at `given`, else where it was or has been moved along with them; None where
    the checkpoint is whole.

    What is given may itself hold adapters of that base, as the one before in a chain of finetunings does.
    Errors: CheckpointError, on all ranks, where it is not there any more, or is another one.
    """
    named = named_base(checkpoint)
    if named is None:
        return None
    said = f"{checkpoint.path}: holds adapters of {named['path']}; "
    if given is not None:
        found, fault = _tried(named, given, report, exchange, chain=True)
        if found is None:
            back = "" if given == named["path"] else f"; give {named['path']}"
            raise CheckpointError(f"{said}--load {fault}{back}")
        return found if named_base(found) is None else open_base(found, None, report, exchange)
    found, fault = _tried(named, named["path"], report, exchange)
    if found is None:
        found, nearby = _moved_along(checkpoint, named, report, exchange)
        fault += nearby
    if found is None:
        raise CheckpointError(f"{said}{fault}. {ADVICE}")
    return found


def _tried(
    named: Mapping[str, str], place: str, report: Report, exchange: JsonExchange, *, chain: bool = False
) -> tuple[StoredWeights | None, str]:
    """What lies at `place`, where it is the base that is named; else why it is not. chain: or adapters of that base."""
    try:
        base = open_weights(place, report, exchange)
        theirs = named_base(base)
        if theirs is not None and not chain:
            return None, f"{place}: holds adapters itself"
        found = gathered(lambda: digest_like(named["digest"], base) if theirs is None else theirs["digest"], exchange)
    except (CheckpointError, OSError) as error:
        return None, str(error)
    other = next((digest for digest in found if digest != named["digest"]), None)
    return (base, "") if other is None else (None, f"{place}: is not it ({unlike(named['digest'], other)})")


def digest_like(named: str, weights: Readable) -> str:
    """Of these weights, by the rule that `named` was made by; nothing where that is not to be had of them."""
    own = str(getattr(weights, "digest", ""))
    if named.startswith(SAMPLED) == own.startswith(SAMPLED):
        return own
    return weights_digest(weights) if named.startswith(SAMPLED) else ""


def unlike(named: str, found: str) -> str:
    """How the digest of what was found is another one than that of the base."""
    what = "digest of its numbers" if named.startswith(SAMPLED) else "sha256 of its manifest"
    has = found.removeprefix(SAMPLED)[:12] or "none, these are weights of others"
    return f"{what}: {has}; must be {named.removeprefix(SAMPLED)[:12]}"


def _moved_along(
    checkpoint: StoredWeights, named: Mapping[str, str], report: Report, exchange: JsonExchange
) -> tuple[StoredWeights | None, str]:
    """The base in the same place relative to the adapters, both being moved; or why what bears its name is not it."""
    if url_of(checkpoint.path) or url_of(named["path"]):
        return None, ""
    faults = ""
    seen = exchange(list(map(str, _nearby(checkpoint.path, named["path"]))))
    for place in seen[0]:
        if all(place in each for each in seen):
            base, fault = _tried(named, place, lambda line: None, exchange)
            if base is not None:
                report(f"{checkpoint.path}: holds adapters of {named['path']}, taken from {place}: the same weights")
                return base, ""
            if not faults and Path(place).name == Path(named["path"]).name and not STEP.fullmatch(Path(place).name):
                faults = f"; {fault}"
    return None, faults


def _nearby(adapters: Path, base: str) -> list[Path]:
    """What the last names of `base` lead to from the folders above the adapters, links followed or not; and those."""
    names = Path(base).parts[1:]
    above = dict.fromkeys((*Path(os.path.abspath(adapters)).parents, *Path(os.path.realpath(adapters)).parents))
    ends = [Path(*names[first:]) for first in range(len(names))]
    found = [*(folder / end for folder in above for end in ends), *above]
    return [path for path in found if path != Path(base) and os.path.exists(path)]


def whole_model(checkpoint: StoredWeights) -> tuple[StoredWeights, ModelConfig]:
    """A mega checkpoint with the weights of its base, and its model. Errors: CheckpointError."""
    model, whole = model_of(checkpoint.meta, str(checkpoint.path)), joined(checkpoint)
    check_size(model, whole.tensors, str(whole.path))
    return whole, model


def joined(checkpoint: StoredWeights, given: str | None = None) -> StoredWeights:
    """`checkpoint`, with the weights of its base where it holds adapters alone. Errors: as `open_base`."""
    base = open_base(checkpoint, given)
    return checkpoint if base is None else Joined(checkpoint, base)
