"""Where a rank is at a moment, and the lines about ranks that keep others waiting. It knows no store.

A rank waits where its main thread is in an exchange with others, or waits for its device, which may be in one; any
other rank that answers is at work, and it is the one that the others wait for.
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
"""Where exchanges are waited for."""


@dataclass(frozen=True)
class Position:
    """doing: the phase, and how far it has come. place: the innermost place of ours at which the main thread is, or the
    thread that saves where the main one waits for it; "elsewhere" outside of our source. waits: for other ranks."""

    phase: str = ""
    doing: str = ""
    place: str = "elsewhere"
    waits: bool = True
    background: str = ""
    """The place of a thread that saves while the main one trains."""
    exchanges: tuple[CalledExchange, ...] = ()
    """The newest that it has called, of each group."""

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
    """That of this process. failed_at: where an exchange of its main thread has failed."""
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
    """Such as `mega/core/data/batches.py:80 (take)`; None outside of our source."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(_SOURCE / "mega"):
        return None
    return f"{path.relative_to(_SOURCE)}:{frame.f_lineno} ({frame.f_code.co_name})"


def _walk(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost place of ours, and whether it waits there for other ranks."""
    outside = 0
    while frame is not None:
        if (place := own_place(frame)) is not None:
            return place, place.startswith(_WAITING) and not outside
        outside += f"torch{os.sep}distributed" not in frame.f_code.co_filename
        frame = frame.f_back
    return "elsewhere", False


# -- lines


def silence(silent: list[int], minutes: float, hosts: Mapping[int, str] | None = None) -> str:
    """The line about ranks that do not answer. hosts: their names, where there are several.

    >>> silence([1], 10)
    'rank 1 has not answered for 10 minutes (--timeout-minutes): it is stopped, or its host cannot be reached'
    >>> silence([2, 3], 1, {2: "b", 3: "b"})[:53]
    'ranks 2, 3 on host b have not answered for 1 minute ('
    """
    have, why = "have", "they are stopped, or their hosts cannot be reached"
    if len(silent) == 1:
        have, why = "has", "it is stopped, or its host cannot be reached"
    return f"{named(silent, hosts or {})} {have} not answered for {duration(minutes)} (--timeout-minutes): {why}"


def store_silence(minutes: float) -> str:
    """The line about a store that does not answer, of a launcher's agent."""
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return (
        f"the launcher's store at {place} has not answered for {duration(minutes)} (--timeout-minutes): its host is "
        "stopped, or cannot be reached"
    )


def standstill(positions: Mapping[int, Position], limit: str, hosts: Mapping[int, str] | None = None) -> str:
    """The line about ranks that all answer, while some have waited for longer than the limit.

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
    which = "which answers: " if len(busy) == 1 else "which answer: "
    if len({_words(each) for each in busy.values()}) == 1:
        return f"the other ranks have waited {limit} for {named(sorted(busy), hosts or {})}, {which}" + _words(
            next(iter(busy.values()))
        )
    return f"the other ranks have waited {limit} for ranks that answer: {_listed(busy, hosts)}"


def named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """
    >>> named([2, 5], {}), named([2, 5], {2: "b", 5: "c"}), named([2, 3], {2: "b", 3: "b"})
    ('ranks 2, 5', 'ranks 2, 5 on hosts b, c', 'ranks 2, 3 on host b')
    """
    names = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    where = f" on host{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    return name_ranks(ranks) + where


def _listed(positions: Mapping[int, Position], hosts: Mapping[int, str] | None) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        ranks.setdefault(_words(position), []).append(rank)
    return "; ".join(f"{named(who, hosts or {})}: {words}" for words, who in ranks.items())


def _words(position: Position) -> str:
    more = f", and saving in the background at {position.background}" if position.background else ""
    return f"{position.doing}, at {position.place}{more}"
