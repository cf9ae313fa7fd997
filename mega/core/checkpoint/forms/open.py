"""Open weights in any format, for every command that starts from, continues or converts a model.

    open_weights(place)      a mega checkpoint, or files of another format, which are read in place
    open_base(checkpoint)    the base weights on which a checkpoint's adapters were trained
    whole_model(weights)     a complete model, including the base's weights for a checkpoint of adapters

All three functions return `StoredWeights`, and none of them writes anything. A checkpoint of adapters records the path
and digest of its base (own/base.py). The base may be a mega checkpoint or weights of any readable format. The base is
searched for at its recorded path, then at the same path relative to the adapters. The digest is compared, so that
adapters are never applied to a different model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path

from mega.core.checkpoint.forms.companions import companions_of, tokenizer_kind
from mega.core.checkpoint.forms.direct import SAMPLED, ForeignWeights, opened_foreign, weights_digest
from mega.core.checkpoint.forms.form import FORMS, Form, FormOptions
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
    """Weights of another program's format, read in place. The interface is that of `Checkpoint`, without optimizer
    state and progress.

    model: the resolved model section. meta: the model section as plain values, and the kind of tokenizer. attachments:
    files stored with the weights. notes: messages for the user.
    """

    step, world, foreign = 0, 1, True

    def __init__(self, place: Path, form: Form) -> None:
        weights = opened_foreign(form, place, FormOptions(layout=ONE, optimizer=False))
        self.path, self.model, self.notes = place, weights.model, weights.notes
        self.attachments: Mapping[str, Path] = companions_of(form, place)
        self.meta: Mapping[str, Json] = {
            "config": {
                "model": dataclasses.asdict(weights.model),
                "tokenizer": {"tokenizer": tokenizer_kind(self.attachments)},
            }
        }
        self._weights = ForeignWeights(place, weights)
        self.tensors: Tensors = self._weights.tensors

    @cached_property
    def digest(self) -> str:
        return weights_digest(self._weights)

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `pieces`, as `Checkpoint.read` does. verify: has no effect."""
        self._weights.read(pieces, cast=cast)


def _foreign_name(path: Path) -> str:
    """The name of the format of the weights at `path`; "" for a mega checkpoint. Errors: CheckpointError if the path
    does not exist, or contains both a mega checkpoint and weights of another format."""
    if not path.exists() and not STEP.fullmatch(path.name):
        raise CheckpointError(f"{path}: no such file or directory")
    return "" if foreign_form(path) is None else form_at(path).name


def open_weights(place: str, report: Report = lambda line: None, exchange: JsonExchange = alone) -> StoredWeights:
    """Open the weights at `place`, which is a path or URL. Errors: CheckpointError, on all ranks."""
    names = [""] if url_of(place) is not None else gathered(partial(_foreign_name, Path(place)), exchange)
    if differ := disagreement([name or "no foreign weights" for name in names]):
        raise CheckpointError(f"{place}: {differ}")
    if not names[0]:
        return locate(place, report, exchange)
    form = next(form for form in FORMS if form.name == names[0])
    weights = together(partial(ForeignCheckpoint, Path(place), form), exchange)
    if exchange is not alone:
        digests = gathered(partial(weights_digest, weights), exchange)
        if differ := disagreement([digest.removeprefix(SAMPLED)[:12] for digest in digests]):
            raise CheckpointError(f"{place}: {differ}")
    for note in weights.notes:
        report(note)
    return weights


def open_base(
    checkpoint: StoredWeights, base_path: str | None, report: Report = lambda line: None, exchange: JsonExchange = alone
) -> StoredWeights | None:
    """Open the base of a checkpoint of adapters. Return None if the checkpoint is complete without a base. If
    `base_path` is given, it must contain the base. Otherwise the base is searched for at its recorded path, then at the
    same path relative to the adapters.

    `base_path` may also contain other adapters of the same base, such as the previous model in a chain of finetuning
    runs. Errors: CheckpointError, on all ranks, if the base is not found or is not the recorded base.
    """
    record = named_base(checkpoint)
    if record is None:
        return None
    intro = f"{checkpoint.path}: holds adapters of {record['path']}; "
    if base_path is not None:
        base, fault = _try_base(record, base_path, report, exchange, chain=True)
        if base is None:
            advice = "" if base_path == record["path"] else f"; give {record['path']}"
            raise CheckpointError(f"{intro}--load {fault}{advice}")
        return base if named_base(base) is None else open_base(base, None, report, exchange)
    base, fault = _try_base(record, record["path"], report, exchange)
    if base is None:
        base, nearby = _find_moved(checkpoint, record, report, exchange)
        fault += nearby
    if base is None:
        raise CheckpointError(f"{intro}{fault}. {ADVICE}")
    return base


def _try_base(
    record: Mapping[str, str], place: str, report: Report, exchange: JsonExchange, *, chain: bool = False
) -> tuple[StoredWeights | None, str]:
    """Return (weights at `place`, "") if they are the recorded base, otherwise (None, the reason). chain:
    whether to accept adapters of the recorded base too."""
    try:
        base = open_weights(place, report, exchange)
        base_record = named_base(base)
        if base_record is not None and not chain:
            return None, f"{place}: holds adapters itself"
        digests = gathered(
            lambda: comparable_digest(record["digest"], base) if base_record is None else base_record["digest"],
            exchange,
        )
    except (CheckpointError, OSError) as error:
        return None, str(error)
    different = next((digest for digest in digests if digest != record["digest"]), None)
    if different is None:
        return base, ""
    return None, f"{place}: is not it ({digest_difference(record['digest'], different)})"


def comparable_digest(reference: str, weights: Readable) -> str:
    """Return the digest of `weights`, computed by the method that computed `reference`; "" if `weights` do not support
    this method."""
    digest = str(getattr(weights, "digest", ""))
    if reference.startswith(SAMPLED) == digest.startswith(SAMPLED):
        return digest
    return weights_digest(weights) if reference.startswith(SAMPLED) else ""


def digest_difference(reference: str, other: str) -> str:
    """Describe, for a message, how the digest of other weights differs from the recorded digest of the base."""
    label = "digest of its numbers" if reference.startswith(SAMPLED) else "sha256 of its manifest"
    actual = other.removeprefix(SAMPLED)[:12] or "none, these are foreign weights"
    return f"{label}: {actual}; must be {reference.removeprefix(SAMPLED)[:12]}"


def _find_moved(
    checkpoint: StoredWeights, record: Mapping[str, str], report: Report, exchange: JsonExchange
) -> tuple[StoredWeights | None, str]:
    """Find a base that was moved together with the adapters. Return (the base or None, why a folder with the base's
    name is not the base)."""
    if url_of(checkpoint.path) or url_of(record["path"]):
        return None, ""
    faults = ""
    candidates = exchange(list(map(str, _base_candidates(checkpoint.path, record["path"]))))
    for place in candidates[0]:
        if all(place in each for each in candidates):
            base, fault = _try_base(record, place, lambda line: None, exchange)
            if base is not None:
                report(f"{checkpoint.path}: holds adapters of {record['path']}, taken from {place}: the same weights")
                return base, ""
            if not faults and Path(place).name == Path(record["path"]).name and not STEP.fullmatch(Path(place).name):
                faults = f"; {fault}"
    return None, faults


def _base_candidates(adapters: Path, base: str) -> list[Path]:
    """Return candidate paths for a moved base: each parent folder of the adapters, alone and joined with each suffix of
    the base's recorded path.

    Parent folders are listed both with symbolic links resolved and unresolved. Only existing paths are returned.
    """
    names = Path(base).parts[1:]
    above = dict.fromkeys((*Path(os.path.abspath(adapters)).parents, *Path(os.path.realpath(adapters)).parents))
    ends = [Path(*names[first:]) for first in range(len(names))]
    paths = [*(folder / end for folder in above for end in ends), *above]
    return [path for path in paths if path != Path(base) and os.path.exists(path)]


def whole_model(checkpoint: StoredWeights) -> tuple[StoredWeights, ModelConfig]:
    """Return a pair: the whole model, which is `checkpoint` combined with the weights of its base, and the model
    section. Errors: as for `open_base`; CheckpointError if the model section is invalid, or describes a much larger
    model than the files contain."""
    model, complete = model_of(checkpoint.meta, str(checkpoint.path)), joined(checkpoint)
    check_size(model, complete.tensors, str(complete.path))
    return complete, model


def joined(checkpoint: StoredWeights, base_path: str | None = None) -> StoredWeights:
    """Return `checkpoint`, combined with the weights of its base if it contains only adapters. Errors: as for
    `open_base`."""
    base = open_base(checkpoint, base_path)
    return checkpoint if base is None else Joined(checkpoint, base)
