"""What a rank says where the store of the ranks, which rank 0 hosts, has gone or is silent."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from mega.core.processes import roll_call
from mega.core.processes.exit_reports import ExitReport
from mega.core.processes.roll_call import RollCall


class Broken:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


class Silent:
    """A store whose host was stopped: no call ever returns."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: threading.Event().wait()


def test_a_store_that_breaks_names_rank_0() -> None:
    error = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:21903: Connection reset by peer")
    assert RollCall(Broken(), 1, 2, 1.0).explain_loss(error) == "lost rank 0, which has ended or cannot be reached"
    with pytest.raises(RuntimeError):  # a launcher's store says nothing about rank 0
        RollCall(Broken(), 1, 2, 1.0, hosted=False).explain_loss(error)


def test_the_first_host_is_named_when_its_store_is_silent() -> None:
    store = dist.HashStore()
    store.set("host/0", '["a", []]')
    call = RollCall(store, 1, 2, 1.0, host=("b", []))
    call._answer()
    assert call._silent_store().startswith("rank 0 on host a has not answered for 1 minute")


def test_the_first_host_is_named_even_if_it_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is asked for long before the first regular look."""
    monkeypatch.setattr(roll_call, "LOOK", 600.0)
    store, told = dist.HashStore(), "rank 0 on host a has not answered"
    calls = [RollCall(store, rank, 2, 600.0, host=(name, [])).start() for rank, name in enumerate("ab")]
    deadline = time.monotonic() + 60
    while not calls[1]._silent_store().startswith(told) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert calls[1]._silent_store().startswith(told)
    for call in calls:
        call.close()


def test_a_silent_store_is_reported_without_asking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: queue.Queue[tuple[ExitReport, bool]] = queue.Queue()

    def report_exit(report: ExitReport, *, together: bool = True) -> int:
        reports.put((report, together))
        return 1

    monkeypatch.setattr(roll_call, "SILENT", 0.2)
    monkeypatch.setattr(roll_call, "report_exit", report_exit)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    RollCall(Silent(), 1, 2, 0.01).start()
    report, together = reports.get(timeout=60)
    assert report.text.startswith("rank 0 has not answered for 0.6 seconds (--timeout-minutes)") and not together
