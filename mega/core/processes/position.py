"""The current position of a rank in the code, and messages about ranks that keep other ranks waiting. This module does
not depend on the store.

A rank waits if its main thread is in an exchange, or waits for a device that may be in an exchange. Any other rank that
answers is still working, so the waiting ranks wait for that rank.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import mega
from mega.core.activity import ACTIVITY, PATIENT
from mega.core.processes.flight import CalledExchange, own_exchanges
from mega.core.processes.rendezvous import duration
from mega.core.words import name_ranks

_SOURCE = Path(mega.__file__).parent.parent

_WAITING = ("mega/core/parallel/", "mega/core/device.py", "mega/core/training/stop.py")
"""Modules in which the main thread waits for exchanges between ranks."""


@dataclass(frozen=True)
class Position:
    """The current position of one rank."""

    phase: str = ""
    doing: str = ""
    """The phase and its progress, for messages."""
    place: str = "elsewhere"
    """The innermost line of mega's source that the main thread executes (or the saving thread, if the main thread waits
    for it); "elsewhere" if the thread is not in mega's source."""
    waits: bool = True
    """Whether the rank waits for other ranks."""
    background: str = ""
    """The line that the background saving thread executes, or ""."""
    exchanges: tuple[CalledExchange, ...] = ()
    """The newest exchange of each group that this rank has called."""

    @property
    def patient(self) -> bool:
        return self.phase in PATIENT

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Position:
        values = json.loads(text)
        return cls(**{**values, "exchanges": tuple(CalledExchange(*each) for each in values["exchanges"])})


def own_position(failed_at: str | None = None) -> Position:
    """Return the position of this process. failed_at: the line at which an exchange on the main thread has failed."""
    frames, doing, phase = sys._current_frames(), str(ACTIVITY), ACTIVITY.phase
    main = _walk(frames.get(threading.main_thread().ident or 0))
    writer = _walk(frames.get(ACTIVITY.writer)) if ACTIVITY.writer is not None else None
    exchanges = own_exchanges()
    if failed_at is not None:
        return Position(phase, doing, failed_at, True, writer[0] if writer else "", exchanges)
    if writer is not None and phase == "saving":
        return Position(phase, doing, *writer, "", exchanges)
    return Position(phase, doing, *main, writer[0] if writer else "", exchanges)


def own_place(frame: FrameType) -> str | None:
    """Return the current line of a frame, such as `mega/core/data/batches.py:80 (take)`, or None outside of mega's
    source."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(_SOURCE / "mega"):
        return None
    return f"{path.relative_to(_SOURCE)}:{frame.f_lineno} ({frame.f_code.co_name})"


def _walk(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of mega's source in a stack, and whether the thread waits there for other ranks."""
    outside = 0
    while frame is not None:
        if (place := own_place(frame)) is not None:
            return place, place.startswith(_WAITING) and not outside
        outside += f"torch{os.sep}distributed" not in frame.f_code.co_filename
        frame = frame.f_back
    return "elsewhere", False


# -- messages


def silence(silent: list[int], minutes: float, hosts: Mapping[int, str] | None = None) -> str:
    """Return the message about ranks that do not answer. hosts: rank -> name of its host, if there are several hosts.

    >>> silence([1], 10)
    'rank 1 has not answered for 10 minutes (--timeout-minutes): it is stopped, or its host cannot be reached'
    >>> silence([2, 3], 1, {2: "b", 3: "b"})[:53]
    'ranks 2, 3 on host b have not answered for 1 minute ('
    """
    have, reason = "have", "they are stopped, or their hosts cannot be reached"
    if len(silent) == 1:
        have, reason = "has", "it is stopped, or its host cannot be reached"
    return f"{name_ranks(silent, hosts)} {have} not answered for {duration(minutes)} (--timeout-minutes): {reason}"


def store_silence(minutes: float) -> str:
    """Return the message about a launcher's store that does not answer."""
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return (
        f"the launcher's store at {address} has not answered for {duration(minutes)} (--timeout-minutes): its host is "
        "stopped, or cannot be reached"
    )


def standstill(positions: Mapping[int, Position], limit: str, hosts: Mapping[int, str] | None = None) -> str:
    """Return the message for the case in which all ranks answer, but some have waited longer than the limit.

    >>> waits, sync = Position("training", "training, step 3", "a.py:1 (f)"), Position("saving", "saving", "b.py:2 (g)")
    >>> standstill({0: waits, 1: waits}, "1 minute (--timeout-minutes)")
    'an exchange of ranks has not ended within 1 minute (--timeout-minutes), though all answer: \
ranks 0, 1: training, step 3, at a.py:1 (f)'
    >>> standstill({0: Position("saving", "saving", "b.py:2 (g)", False), 1: waits}, "60 minutes (...)", {0: "a"})
    'the other ranks have waited 60 minutes (...) for rank 0 on host a, which answers: saving, at b.py:2 (g)'
    """
    busy = {rank: each for rank, each in positions.items() if not each.waits}
    if not busy or len(busy) == len(positions):
        return f"an exchange of ranks has not ended within {limit}, though all answer: {_listed(positions, hosts)}"
    clause = "which answers: " if len(busy) == 1 else "which answer: "
    if len({_words(each) for each in busy.values()}) == 1:
        return f"the other ranks have waited {limit} for {name_ranks(sorted(busy), hosts)}, {clause}" + _words(
            next(iter(busy.values()))
        )
    return f"the other ranks have waited {limit} for ranks that answer: {_listed(busy, hosts)}"


def _listed(positions: Mapping[int, Position], hosts: Mapping[int, str] | None) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        ranks.setdefault(_words(position), []).append(rank)
    return "; ".join(f"{name_ranks(same, hosts)}: {words}" for words, same in ranks.items())


def _words(position: Position) -> str:
    saving = f", and saving in the background at {position.background}" if position.background else ""
    return f"{position.doing}, at {position.place}{saving}"
