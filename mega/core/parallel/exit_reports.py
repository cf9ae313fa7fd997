"""How a rank that fails says why, so that the user reads it once: whatever launcher started the ranks.

    1 every rank that fails hands its words in       through the store in which the ranks met, or would have met
    2 the first to do so waits for the others        until all have come, GRACE seconds are over, or SIGTERM says that
                                                     whoever started us knows of the end already
    3 it tells: what all say, once; what some say, with their numbers. A consequence of what another rank has met, such
      as that it is gone, is told only where no rank knows more, and nobody has ended us for it
    4 the others leave with the same exit code, rank 0, which may host the store, last; who comes later tells only
      what has not been told

None of this may hold a rank: it speaks for itself where the store is gone, or does not answer within LIMIT seconds.
MEGA_DEBUG=1 lets every rank show its own traceback at once. No torch for one rank alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from mega.core.config.world import MEETING_FILE, World, is_first_rank, point_to_first_host, world_from_env

GRACE = 2.0
"""Seconds in which ranks that meet the same fault are expected to say so."""

COMING = 5 * GRACE
"""Seconds in which ranks that have not met yet may come: each loads torch first, from a disk that all of them read."""

LIMIT = 10 * GRACE
"""Seconds for all of it: the store of a host that has stopped, or was cut off, never answers, nor closes."""

_PEER_IS_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError"),
    "Connection was likely closed",  # of the store, which went with its host
)
_NAMED = 8
"""Ranks that a line names before it counts the rest."""


@dataclass(frozen=True)
class Words:
    """What a rank says of its end, and the exit code. kind: "line", "trace", or "consequence" of another rank's end."""

    code: int
    text: str
    kind: str = "line"


def words_of(error: BaseException) -> Words:
    """A mistake of the user ends with 2, all else with 1. What is neither that nor the machine's shows its traceback.

    >>> words_of(ValueError("--lr -1: must be positive"))
    Words(code=2, text='--lr -1: must be positive', kind='line')
    """
    code = 2 if isinstance(error, ValueError) else 1
    if _debugging():
        return Words(code, _trace(error), "trace")
    if isinstance(error, ValueError | OSError | FloatingPointError | MemoryError):
        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else repr(error))
        return Words(code, text, "consequence" if getattr(error, "elsewhere", False) else "line")
    if type(error).__name__ == "OutOfMemoryError":  # torch's; its message goes on with figures of this very process
        text = ". ".join(str(error).split(". ")[:2])
        return Words(code, f"{text}; mega memory-estimate says what a run needs, and MEGA_DEBUG=1 shows where it was")
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_IS_GONE):
        text = f"lost another rank, which has ended or cannot be reached: {error}".splitlines()[0]
        return Words(code, text, "consequence")
    return Words(code, _trace(error), "trace")


def tell(words: Words) -> int:
    """Tell them on stderr, unless another rank does; the exit code to end with. To be called as a rank's last act."""
    try:
        world = world_from_env()
    except ValueError:  # the launcher's variables are no good, and every rank finds the same
        world = World(0, 1, 0, 1, "alone")
        if not is_first_rank():
            return words.code
    if world.size > 1 and not _debugging():
        code = _tell_in_time(words, world)
        if code is not None:
            return code
    _write(told({world.rank: words}, world.size))
    return words.code


def told(words: Mapping[int, Words], world: int) -> str:
    """What the user reads of the words of some ranks of `world`.

    >>> print(told({0: Words(2, "no such file"), 1: Words(2, "no such file")}, 2), end="")
    mega: no such file
    >>> print(told({3: Words(1, "disk full"), 2: Words(1, "lost", "consequence"), 1: Words(1, "disk full")}, 4), end="")
    mega: ranks 1, 3: disk full
    """
    causes = {rank: said for rank, said in words.items() if said.kind != "consequence"} or dict([min(words.items())])
    ranks: dict[Words, list[int]] = {}
    for rank, said in sorted(causes.items()):
        ranks.setdefault(said, []).append(rank)
    lines = []
    for said, who in ranks.items():
        name = "" if len(who) == world else _name(who) + ": "
        if said.kind == "trace":
            lines += [f"mega: {name}", *said.text.splitlines()] if name else said.text.splitlines()
        else:
            lines += [f"mega: {name}{line}" for line in said.text.splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _name(ranks: list[int]) -> str:
    """
    >>> _name([3]), _name(list(range(1, 11)))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more')
    """
    rest = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{rest}"


def _tell_in_time(words: Words, world: World) -> int | None:
    """The exit code of all; None where there is nowhere to meet, or no answer within LIMIT seconds."""
    stopped, codes = threading.Event(), list[int]()

    def talk() -> None:
        with contextlib.suppress(Exception):  # what is wrong with the store is not what we came to tell
            codes.append(_tell_together(words, world, stopped))

    # On a thread of its own: a call to a store that does not answer hears neither the clock nor a signal.
    talking = threading.Thread(target=talk, name="last-words", daemon=True)
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        talking.start()
        talking.join(LIMIT)
    finally:
        signal.signal(signal.SIGTERM, before)
    return codes[0] if codes else None


def _tell_together(words: Words, world: World, stopped: threading.Event) -> int:
    """Phases 1 to 4. stopped: whoever started us knows of the end. Errors: whatever keeps the ranks from meeting."""
    import torch.distributed as dist

    store = dist.PrefixStore("last-words", _store(world))
    # 1
    store.set(str(world.rank), json.dumps(asdict(words)))
    if store.add("count", 1) == 1:
        # 2
        _wait(lambda: stopped.is_set() or store.add("count", 0) >= world.size, GRACE)
        present = [rank for rank in range(world.size) if store.check([str(rank)])]
        found = {rank: Words(**json.loads(store.get(str(rank)))) for rank in present}
        causes = [said for said in found.values() if said.kind != "consequence"]
        # 3
        if causes or not stopped.is_set():
            _write(told(found, world.size))
        verdict = {"code": causes[0].code if causes else words.code, "texts": [said.text for said in causes]}
        store.set("told", json.dumps(verdict))
    else:
        store.wait(["told"], timedelta(seconds=GRACE + 1))
    # 4
    verdict = json.loads(store.get("told"))
    if words.kind != "consequence" and words.text not in verdict["texts"]:
        _write(told({world.rank: words}, world.size))
    store.add("left", 1)
    if _hosting(world):  # those that come now find nobody once we are gone
        _wait(lambda: stopped.is_set() or store.add("left", 0) >= world.size, COMING)
    elif world.rank == 0:
        _wait(lambda: store.add("left", 0) >= store.add("count", 0), GRACE)
    return int(verdict["code"])


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _store(world: World) -> Any:
    """The store of the process group; before there is one, that in which the ranks are about to meet."""
    import torch.distributed as dist

    if MEETING_FILE in os.environ:
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        return dist.FileStore(os.environ[MEETING_FILE], world.size)
    point_to_first_host(world)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if dist.is_initialized():
        _reach(address, port, 0.0)
        return dist.distributed_c10d._get_default_store()
    hosting = _hosting(world)
    if not hosting:
        _reach(address, port, COMING)
    store = dist.TCPStore(address, port, None, hosting, timedelta(seconds=COMING), wait_for_workers=False)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _hosting(world: World) -> bool:
    """Whether the store of ranks that have not met yet is this rank's, and goes with it."""
    import torch.distributed as dist

    elsewhere = MEETING_FILE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return world.rank == 0 and not elsewhere and not dist.is_initialized()


def _reach(address: str, port: int, seconds: float) -> None:
    """Wait until the store's host listens. Errors: OSError. Torch would tell of its own waiting, in frames of C++."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address, port), GRACE).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Until `done`, but not longer; whether it is."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _debugging() -> bool:
    return os.environ.get("MEGA_DEBUG") == "1"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
