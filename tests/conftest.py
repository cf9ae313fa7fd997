"""What every test may use: one pool of local ranks, kept alive for the whole session."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import hypothesis
import pytest

import tests.support.threads  # first: torch asks when it is imported, below, how many threads it may have
import tests.support.triton  # Triton asks when it is imported, by any test, how kernels run
import tests.support.unsynced  # noqa: F401
from mega.core.processes.pool import Pool
from tests.support import order

hypothesis.settings.register_profile("suite", deadline=None)  # its bound on an example is of the clock
hypothesis.settings.load_profile("suite")


def pytest_configure() -> None:
    """Under nohup, or in the background, a process ignores signals; what tests start is to heed them by itself."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order.rank(item.path))


def pytest_collection_finish() -> None:
    """Millions of objects of modules and of what is collected stay to the end: no collection of garbage walks them."""
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """So do those that a file's tests have imported, of which there may be as many again."""
    global _file
    file = nodeid.partition("::")[0]
    if file != _file:
        _file = file
        _freeze()


_file = ""


def _freeze() -> None:
    gc.collect()
    gc.freeze()


RANKS_IMPORT = ["mega.core.training.start.rank", "mega.core.inference.server.start", "tests.support.unsynced"]
"""What ranks of the suite import. A worker has one fork server, which imports it once for all of them."""

_preload = forkserver.set_forkserver_preload


def _preload_more(modules_names: list[str]) -> None:
    _preload([*modules_names, *RANKS_IMPORT])


forkserver.set_forkserver_preload = _preload_more


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks; jobs are functions importable by name."""
    with Pool(8) as ranks:
        yield ranks
