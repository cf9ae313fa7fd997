"""Checkpoints of adapters alone, and the checkpoint of the weights that they were trained on.

One of adapters says in its plain state what its base is:

    "base": {"path": the step's directory, "digest": sha256 of its manifest}

The digest vouches for every byte of the base, wherever it is now. `Joined` is both as one checkpoint of the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mega.core.checkpoint.own.pieces import CheckpointError, Piece, Tensors
from mega.core.checkpoint.own.store import Checkpoint, locate
from mega.core.checkpoint.own.together import Exchange, alone
from mega.core.files import url_of

Report = Callable[[str], None]


def describe(base: Checkpoint) -> dict[str, str]:
    """What a checkpoint of adapters says of its base."""
    path = str(base.path)
    return {"path": path if url_of(path) else os.path.abspath(path), "digest": base.digest}


def named_base(checkpoint: Checkpoint) -> Mapping[str, str] | None:
    """What a checkpoint says of its base; None where it is whole. Errors: CheckpointError."""
    named = checkpoint.meta.get("base")
    if named is None:
        return None
    if not isinstance(named, dict) or not all(isinstance(named.get(key), str) for key in ("path", "digest")):
        raise CheckpointError(f"{checkpoint.path}: meta.base must hold a path and a digest")
    return named


def open_base(
    checkpoint: Checkpoint, given: str | None, report: Report = lambda line: None, exchange: Exchange = alone
) -> Checkpoint | None:
    """The base of a checkpoint of adapters: at `given`, else where it was; None where the checkpoint is whole.

    Errors: CheckpointError, on all ranks, where it is not there any more, or is another one.
    """
    named = named_base(checkpoint)
    if named is None:
        return None
    place = given or named["path"]
    try:
        base = locate(place, report, exchange)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: holds adapters of {place}; {error}; give --load BASE") from None
    if base.digest != named["digest"]:
        raise CheckpointError(
            f"--load {place}: is not what {checkpoint.path} holds adapters of (sha256 of its manifest "
            f"{base.digest[:12]}, must be {named['digest'][:12]}); give {named['path']}"
        )
    return base


class Joined:
    """A checkpoint of adapters and its base, read as one: weights of both, all else of the adapters' run."""

    def __init__(self, adapters: Checkpoint, base: Checkpoint) -> None:
        self.adapters, self.base = adapters, base
        own = {key: value for key, value in base.tensors.items() if key.startswith("weights/")}
        self.tensors: Tensors = {**own, **adapters.tensors}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapters, name)

    def read(self, wanted: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """As of `Checkpoint`."""
        held = list(wanted)
        for source, ours in ((self.adapters, True), (self.base, False)):
            source.read([p for p in held if (p.key in self.adapters.tensors) == ours], cast=cast, verify=verify)


def joined(checkpoint: Checkpoint, given: str | None = None) -> Checkpoint:
    """`checkpoint`, with the weights of its base where it holds adapters alone. Errors: as `open_base`."""
    base = open_base(checkpoint, given)
    return checkpoint if base is None else Joined(checkpoint, base)  # type: ignore[return-value]
