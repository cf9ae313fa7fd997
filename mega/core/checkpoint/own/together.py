"""Run an action on several ranks so that it succeeds or fails on all ranks together. The exchange between ranks is a
callable, because this package does not depend on how ranks communicate.

Ranks on several hosts may see different files if a mount is stale, a disk fails, or two hosts have different folders
under one path. A failure on one rank therefore raises an error on every rank, so that no rank waits for a rank that has
ended. The error's message is the same on all ranks, and names the ranks and reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict, TypeVar

from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.words import name_ranks

Result = TypeVar("Result")


class JsonExchange(Protocol):
    """A collective function that takes this rank's plain JSON value and returns the values of all ranks, in the order
    of ranks."""

    def __call__(self, value: Result, /) -> list[Result]: ...


class _Fault(TypedDict):
    """One rank's error, as sent to the other ranks."""

    fault: str  # "" if the rank succeeded
    foreseen: bool  # True if there is no error, or if the user or the machine caused the error
    passing: bool  # True if there is no error, or if the machine caused the error


LIMIT = 2000
"""Maximum number of characters of an error that is sent to other ranks."""


def alone(value: Result) -> list[Result]:
    """The exchange for a single rank."""
    return [value]


def together(act: Callable[[], Result], exchange: JsonExchange) -> Result:
    """Call `act` on every rank, and return this rank's result if the call succeeded on all ranks.

    Errors: CheckpointError on all ranks if `act` failed on any rank, naming ranks and reasons. The error is an
    UnreadableError, which is also an OSError, if all errors were failures of the machine (OSError). A rank on which
    `act` raised an error other than ValueError or OSError raises this error unchanged. With the exchange `alone`, all
    errors of `act` are raised unchanged.
    """
    if exchange is alone:
        return act()
    result, fault = attempt(act)
    foreseen = fault is None or isinstance(fault, ValueError | OSError)
    passing = fault is None or isinstance(fault, OSError)
    faults = exchange(_Fault(fault="" if fault is None else reason_of(fault), foreseen=foreseen, passing=passing))
    if not any(each["fault"] for each in faults):
        return result  # type: ignore[return-value]
    if fault is not None and not foreseen:
        raise fault
    kind = UnreadableError if all(each["passing"] for each in faults) else CheckpointError
    failure = kind(describe([each["fault"] for each in faults]))
    failure.elsewhere = not all(each["foreseen"] for each in faults)
    raise failure from fault


def gathered(act: Callable[[], Result], exchange: JsonExchange) -> list[Result]:
    """Call `act` on every rank, and return the results of all ranks. Results must be plain JSON. Errors: as for
    `together`."""
    result = together(act, exchange)
    return exchange(result)


def attempt(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Call `act`, and return (result, None) or (None, error)."""
    try:
        return act(), None
    except Exception as error:  # catches errors of any class, because other ranks wait for this rank
        return None, error


def reason_of(error: Exception) -> str:
    """Return the error's message, including the name of the file that caused the error.

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
    """Join the errors of all ranks into one message. faults: one message per rank; "" means no error. An error common
    to all ranks is listed once, without rank numbers.

    >>> describe(["no such file", "no such file"])
    'no such file'
    >>> describe(["", "a: Input/output error", "b: is missing", "a: Input/output error"])
    'ranks 1, 3: a: Input/output error; rank 2: b: is missing'
    """
    ranks: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault:
            ranks.setdefault(fault, []).append(rank)
    if [len(numbers) for numbers in ranks.values()] == [len(faults)]:
        return next(iter(ranks))
    return "; ".join(f"{name_ranks(numbers)}: {fault}" for fault, numbers in ranks.items())


def disagreement(identities: Sequence[str]) -> str:
    """Describe how the values in `identities`, one per rank, differ; "" if all are equal.

    >>> disagreement(["1b", "1b", "7f"])
    'ranks see different ones: 1b on ranks 0, 1; 7f on rank 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    if len(ranks) < 2:
        return ""
    listing = "; ".join(f"{identity} on {name_ranks(numbers)}" for identity, numbers in ranks.items())
    return f"ranks see different ones: {listing}"
