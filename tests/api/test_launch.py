"""A function on local ranks: results in the order of ranks; the error of the first that failed; a notebook's code."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import pytest
import torch

import mega
from mega.api.ranks import NotebookFunction

NOTEBOOK = """
import math
FACTOR = 3
name = (each for each in ())
def scaled(x):
    return x * FACTOR + math.floor(1.5)
def job(x, *, more=1):
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)
    if x is None:
        return x.name
    return scaled(x) + factorial(4) + more, job.__name__
"""


def task(number: int, large: torch.Tensor) -> tuple[str, torch.Tensor]:
    if number and os.environ["RANK"] == str(number):
        raise ValueError(f"--lr -{number}: must be positive")
    return os.environ["RANK"], large * 2


def test_results_come_in_the_order_of_ranks() -> None:
    large = torch.arange(100_000)  # more than a pipe holds
    found = mega.launch(task, 0, large, ranks=2)
    assert [rank for rank, _ in found] == ["0", "1"] and all(torch.equal(each, large * 2) for _, each in found)


def test_the_error_of_a_rank_is_raised_here(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--lr -1") as raised:
        mega.launch(task, 1, torch.zeros(1), ranks=2)
    assert str(raised.value) == "--lr -1: must be positive"
    assert raised.value.__notes__[0].startswith("on rank 1:\nTraceback")
    assert capfd.readouterr() == ("", "")


def test_a_function_of_a_notebook_is_its_code() -> None:
    """With the globals that it reads: the generator `name` cannot be sent, and `x.name` is another one."""
    space: dict[str, object] = {"__name__": "__main__"}
    exec(NOTEBOOK, space)
    sent = pickle.dumps(NotebookFunction(space["job"]))  # type: ignore[arg-type]
    space.clear()
    assert pickle.loads(sent)(5) == (16 + 24 + 1, "job")  # noqa: S301


def test_what_cannot_be_sent_or_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot send to or from a rank"):
        mega.launch(task, lambda: 1, ranks=2)
    with pytest.raises(ValueError, match=r"^ranks 0: "):
        mega.launch(task, 1, ranks=0)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ValueError, match="__main__"):
        mega.launch(task, 1, ranks=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="is a rank already"):
        mega.launch(task, 1, ranks=2)
