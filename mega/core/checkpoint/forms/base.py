"""Where the weights lie that adapters were trained on: where they were, or as near to the adapters as they were then.

A checkpoint of adapters names them by path and digest (own/base.py). They may be ours or, in any form that is read,
others'. What is found is compared by its digest, so that adapters are never put on another model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mega.core.checkpoint.forms.direct import SAMPLED, Readable, weights_digest
from mega.core.checkpoint.forms.start import open_start
from mega.core.checkpoint.own.base import Joined, named_base
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import Checkpoint
from mega.core.checkpoint.own.together import Exchange, alone, gathered
from mega.core.files import url_of

Report = Callable[[str], None]


def open_base(
    checkpoint: Checkpoint, given: str | None, report: Report = lambda line: None, exchange: Exchange = alone
) -> Checkpoint | None:
    """The base of a checkpoint of adapters: at `given`, else where it was or has been moved along with them; None where
    the checkpoint is whole.

    What is given may itself hold adapters of that base, as the one before in a chain of finetunings does.
    Errors: CheckpointError, on all ranks, where it is not there any more, or is another one.
    """
    named = named_base(checkpoint)
    if named is None:
        return None
    place = given or named["path"]
    try:
        base, _ = open_start(place, report, exchange)
    except CheckpointError as error:
        moved = None if given else _moved_along(checkpoint, named, report, exchange)
        if moved is not None:
            return moved
        raise CheckpointError(
            f"{checkpoint.path}: holds adapters of {place}; {error}; put the base or a link to it there, or as near to "
            "the adapters as it was; a run that resumes takes it as --load"
        ) from None
    theirs = named_base(base)
    if theirs is not None and theirs["digest"] == named["digest"]:
        return open_base(base, None, report, exchange)
    digests = gathered(lambda: digest_like(named["digest"], base), exchange)
    if set(digests) != {named["digest"]}:
        raise CheckpointError(
            f"--load {place}: is not what {checkpoint.path} holds adapters of ({of_what(named['digest'])} "
            f"{shown(digests[0])}, must be {shown(named['digest'])}); give {named['path']}"
        )
    return base


def digest_like(named: str, weights: Readable) -> str:
    """Of these weights, by the rule that `named` was made by."""
    return weights_digest(weights) if named.startswith(SAMPLED) else getattr(weights, "digest", "")


def of_what(digest: str) -> str:
    return "digest of its numbers" if digest.startswith(SAMPLED) else "sha256 of its manifest"


def shown(digest: str) -> str:
    return digest.removeprefix(SAMPLED)[:12]


def _moved_along(
    checkpoint: Checkpoint, named: Mapping[str, str], report: Report, exchange: Exchange
) -> Checkpoint | None:
    """The base that lies to the adapters as it did when both are elsewhere now; None where none of its digest does."""
    if url_of(checkpoint.path) or url_of(named["path"]):
        return None
    seen = gathered(lambda: [str(path) for path in _nearby(checkpoint.path, named["path"])], exchange)
    for place in seen[0]:
        if all(place in each for each in seen):
            try:
                base, _ = open_start(place, report, exchange)
            except CheckpointError:
                continue
            if set(gathered(partial(digest_like, named["digest"], base), exchange)) == {named["digest"]}:
                report(
                    f"{checkpoint.path}: what it holds adapters of is not at {named['path']} any more; {place} is it"
                )
                return base
    return None


def _nearby(adapters: Path, base: str) -> list[Path]:
    """What the last names of `base` lead to, two of them at least, from one of the folders above the adapters."""
    names = Path(base).parts[1:]
    above = Path(os.path.abspath(adapters)).parents
    ends = [Path(*names[first:]) for first in range(len(names) - 1)]
    return [path for folder in above for end in ends if (path := folder / end).exists()]


def joined(checkpoint: Checkpoint, given: str | None = None) -> Checkpoint:
    """`checkpoint`, with the weights of its base where it holds adapters alone. Errors: as `open_base`."""
    base = open_base(checkpoint, given)
    return checkpoint if base is None else Joined(checkpoint, base)  # type: ignore[return-value]
