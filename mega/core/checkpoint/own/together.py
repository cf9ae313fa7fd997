"""What several ranks found at one place, made known to all of them. How they exchange it is a callable: this room knows
no ranks, and one process is a rank alone.

Ranks of several hosts need not see the same: a mount is stale, a disk fails, a folder is another one. What one of them
cannot do is therefore every rank's error, in one text that names who and why; none is left waiting for one that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict, TypeVar

from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.words import name_ranks

Result = TypeVar("Result")


class JsonExchange(Protocol):
    """Given this rank's plain JSON value, returns every rank's, in the order of ranks, on all of them together."""

    def __call__(self, value: Result, /) -> list[Result]: ...


class _Fault(TypedDict):
    """What a rank tells the others of its error, "" without one. foreseen: it is the user's or the machine's. passing:
    it is the machine's."""

    fault: str
    foreseen: bool
    passing: bool


LIMIT = 2000
"""Characters of a fault that other ranks are given."""


def alone(value: Result) -> list[Result]:
    """The exchange of a rank that has no others."""
    return [value]


def together(act: Callable[[], Result], exchange: JsonExchange) -> Result:
    """What `act` gives here, where it succeeded on every rank.

    Errors: CheckpointError on all where it failed on any, naming ranks and reasons; where all faults are the machine's,
    an UnreadableError, which is an OSError too; what is neither the user's mistake nor the machine's is raised as it is
    on the rank that met it. Alone, whatever `act` raises.
    """
    if exchange is alone:
        return act()
    result, fault = attempt(act)
    foreseen = fault is None or isinstance(fault, ValueError | OSError)
    passing = fault is None or isinstance(fault, OSError)
    met = exchange(_Fault(fault="" if fault is None else reason_of(fault), foreseen=foreseen, passing=passing))
    if not any(each["fault"] for each in met):
        return result  # type: ignore[return-value]
    if fault is not None and not foreseen:
        raise fault
    kind = UnreadableError if all(each["passing"] for each in met) else CheckpointError
    failure = kind(describe([each["fault"] for each in met]))
    failure.elsewhere = not all(each["foreseen"] for each in met)
    raise failure from fault


def gathered(act: Callable[[], Result], exchange: JsonExchange) -> list[Result]:
    """What `act`, whose result is plain JSON, gives on every rank. Errors: as of `together`."""
    own = together(act, exchange)
    return exchange(own)


def attempt(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of `act`, or its error."""
    try:
        return act(), None
    except Exception as error:  # whatever it is, the other ranks wait for this one
        return None, error


def reason_of(error: Exception) -> str:
    """An error in words, with the file that it is about.

    >>> reason_of(OSError(116, "Stale file handle", "runs/a"))
    'runs/a: Stale file handle'
    >>> reason_of(OSError("the disk is full"))
    'the disk is full'
    """
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) if isinstance(error, ValueError | OSError) and str(error) else repr(error)
    return text if len(text) <= LIMIT else f"{text[:LIMIT]} ..."


def describe(faults: Sequence[str]) -> str:
    """The faults of all ranks in one text; "" is none. What all of them met is given once, without their numbers.

    >>> describe(["no such file", "no such file"])
    'no such file'
    >>> describe(["", "a: Input/output error", "b: is missing", "a: Input/output error"])
    'ranks 1, 3: a: Input/output error; rank 2: b: is missing'
    """
    ranks: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault:
            ranks.setdefault(fault, []).append(rank)
    if [len(who) for who in ranks.values()] == [len(faults)]:
        return next(iter(ranks))
    return "; ".join(f"{name_ranks(who)}: {fault}" for fault, who in ranks.items())


def disagreement(identities: Sequence[str]) -> str:
    """How ranks that each opened something differ in what it is; nothing where they do not.

    >>> disagreement(["1b", "1b", "7f"])
    'ranks see different ones: 1b on ranks 0, 1; 7f on rank 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    if len(ranks) < 2:
        return ""
    seen = "; ".join(f"{identity} on {name_ranks(who)}" for identity, who in ranks.items())
    return f"ranks see different ones: {seen}"
