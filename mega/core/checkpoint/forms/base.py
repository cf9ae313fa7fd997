"""Where the weights lie that adapters were trained on: where they were, or in the same place relative to the adapters.

A checkpoint of adapters names them by path and digest (own/base.py). They may be ours or, in any form that is read,
others'. What is found is compared by its digest, so that adapters are never put on another model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mega.core.checkpoint.forms.direct import SAMPLED, Readable, weights_digest
from mega.core.checkpoint.forms.start import open_start
from mega.core.checkpoint.own.base import Joined, named_base
from mega.core.checkpoint.own.model import check_size, model_of
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.steps import STEP
from mega.core.checkpoint.own.store import Checkpoint
from mega.core.checkpoint.own.together import JsonExchange, alone, gathered
from mega.core.config.sections import ModelConfig
from mega.core.files import url_of

Report = Callable[[str], None]

ADVICE = "Put the base there, or in the same place relative to the adapters; a run that resumes takes it as --load"


def open_base(
    checkpoint: Checkpoint, given: str | None, report: Report = lambda line: None, exchange: JsonExchange = alone
) -> Checkpoint | None:
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
) -> tuple[Checkpoint | None, str]:
    """What lies at `place`, where it is the base that is named; else why it is not. chain: or adapters of that base."""
    try:
        base, _ = open_start(place, report, exchange)
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
    checkpoint: Checkpoint, named: Mapping[str, str], report: Report, exchange: JsonExchange
) -> tuple[Checkpoint | None, str]:
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


def whole_model(checkpoint: Checkpoint) -> tuple[Checkpoint, ModelConfig]:
    """A mega checkpoint with the weights of its base, and its model. Errors: CheckpointError."""
    model, whole = model_of(checkpoint.meta, str(checkpoint.path)), joined(checkpoint)
    check_size(model, whole.tensors, str(whole.path))
    return whole, model


def joined(checkpoint: Checkpoint, given: str | None = None) -> Checkpoint:
    """`checkpoint`, with the weights of its base where it holds adapters alone. Errors: as `open_base`."""
    base = open_base(checkpoint, given)
    return checkpoint if base is None else Joined(checkpoint, base)  # type: ignore[return-value]
