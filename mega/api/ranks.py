"""Run a function on several local ranks, and return its results or raise a rank's error. This module does not import
torch.

1 pickle the function by name, or by code if it is defined in a notebook, which other processes cannot import
2 start the ranks and watch them (processes/launch.py)
3 receive, on a thread, the function's result on each rank, or the error that ended the rank
4 raise the error that caused the other errors, if any; otherwise return the results, in the order of ranks
"""

from __future__ import annotations

import contextlib
import dis
import io
import marshal
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, TypeVar, TypeVarTuple, cast

from mega.core.processes.exit_reports import report_of
from mega.core.processes.world import world_from_env

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


def launch(function: Callable[[*Args], Result], *args: *Args, ranks: int = 2) -> list[Result]:
    """Call `function(*args)` on `ranks` new local ranks, and return its results in the order of ranks.

    On each rank the function runs as under torchrun, so `mega.Trainer(...)` in the function is one rank of the layout.
    Arguments and results are pickled. The function is imported by name, so a script must call `launch` below `if
    __name__ == "__main__":`. A function defined in a notebook is sent as code, together with the globals that it uses.
    `launch` must be called in the main thread.

    Errors: ValueError if ranks cannot be started here, or the function or its arguments cannot be pickled; the error
    that the function raised on the rank that caused the failure, with the rank's traceback as a note; RuntimeError if a
    rank was killed; KeyboardInterrupt.
    """
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks {ranks}: must be a whole number of at least 1")
    if world_from_env().source != "alone":
        raise ValueError("mega.launch: this process is a rank already, and ranks start none; call the function itself")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            'mega.launch: a script calls it below `if __name__ == "__main__":`, for ranks import the script'
        )
    from mega.core.processes.launch import INTERRUPTED, local_environments, run_attempt  # imports torch

    job = _pickled((_portable(function), args))
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(ranks)]
    inbox = _Inbox([reader for reader, _ in pipes])
    try:
        ending = run_attempt(local_environments(ranks), _call, (job, [writer for _, writer in pipes]))
    finally:
        for _, writer in pipes:
            writer.close()
    answers = inbox.close()
    assert ending is not None
    if ending.code == INTERRUPTED:
        raise KeyboardInterrupt
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, RankFailure)}
    if failures:
        _raise(failures)
    if ending.code or len(answers) < ranks:
        raise RuntimeError(ending.reason or f"a rank ended with exit code {ending.code}")
    return [cast(Result, answers[rank]) for rank in range(ranks)]


class RankFailure(NamedTuple):
    """The error that ended a rank. consequence: whether the error was caused by the end of another rank."""

    error: Exception
    trace: str
    consequence: bool


def _raise(failures: dict[int, RankFailure]) -> None:
    """Raise the error of the first rank whose error is not a consequence of another rank's error."""
    rank, failure = min(failures.items(), key=lambda each: (each[1].consequence, each[0]))
    failure.error.add_note(f"on rank {rank}:\n{failure.trace}".rstrip())
    raise failure.error


def _call(job: bytes, writers: Sequence[Connection[bytes, bytes]]) -> int:
    """Call the function on a rank, send its result or error to the parent process, and return the exit code."""
    writer, failed = writers[int(os.environ["RANK"])], True
    try:
        function, args = pickle.loads(job)  # noqa: S301 - written by the process that started this one
        answer = _pickled(function(*args))
        failed = False
    except Exception as error:
        answer = _pickled(_failure(error))
    writer.send_bytes(answer)
    return int(failed)


def _failure(error: Exception) -> RankFailure:
    consequence = report_of(error).kind == "consequence"
    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled on this line
        return RankFailure(error, trace, consequence)
    return RankFailure(RuntimeError(f"{type(error).__name__}: {error}"), trace, consequence)


class _Inbox:
    """A thread that receives the results of all ranks, because a rank waits until its result is read. readers: one
    connection per rank."""

    def __init__(self, readers: Sequence[Connection[bytes, bytes]]):
        self._ranks = {reader: rank for rank, reader in enumerate(readers)}
        self._answers: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._read, name="results-of-ranks", daemon=True)
        self._thread.start()

    def close(self) -> dict[int, object]:
        """Return rank -> result or error, for the ranks that sent one. Call this method only when all ranks have
        ended."""
        self._thread.join()
        return {rank: pickle.loads(answer) for rank, answer in self._answers.items()}  # noqa: S301 - of our own ranks

    def _read(self) -> None:
        open_readers = list(self._ranks)
        while open_readers:
            for reader in cast("list[Connection[bytes, bytes]]", wait(open_readers)):
                try:
                    self._answers[self._ranks[reader]] = reader.recv_bytes()
                except EOFError:
                    open_readers.remove(reader)
                    reader.close()


def _pickled(value: object) -> bytes:
    """Pickle a value. Errors: ValueError if the value cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"mega.launch: cannot send to or from a rank: {error}") from None


# Functions defined in a notebook


def _portable(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function itself, or, if it is defined in a notebook, a wrapper that can be pickled."""
    if not isinstance(function, types.FunctionType) or function.__module__ != "__main__":
        return function
    main = sys.modules["__main__"]
    importable = hasattr(main, "__file__") and getattr(main, function.__qualname__, None) is function
    return function if importable else NotebookFunction(function)


class NotebookFunction:
    """A function that other processes cannot import. It is pickled as code, together with the globals of the notebook
    that it uses: modules, plain values and other functions of the notebook. Classes defined in the notebook cannot be
    pickled."""

    def __init__(self, function: types.FunctionType):
        self._function = function

    def __call__(self, *args: object) -> object:
        return self._function(*args)

    def __reduce__(self) -> tuple[object, ...]:
        out = io.BytesIO()
        _CodePickler(out).dump(self._function)
        return _unpickled, (out.getvalue(),)


class _CodePickler(pickle.Pickler):
    """A pickler that writes functions of `__main__` as code, and modules as their names."""

    def reducer_override(self, value: object) -> object:  # type: ignore[override]
        if isinstance(value, types.ModuleType):
            return _module, (value.__name__,)
        if not isinstance(value, types.FunctionType) or value.__module__ != "__main__":
            return NotImplemented
        globals_named = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        parts = (marshal.dumps(value.__code__), value.__name__, len(cells))
        state = (globals_named, cells, value.__defaults__, value.__kwdefaults__)
        return _empty_function, parts, state, None, None, _fill_function


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that a function and its inner functions use, without names of attributes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _unpickled(data: bytes) -> object:
    return pickle.loads(data)  # noqa: S301 - a part of the job


def _module(name: str) -> types.ModuleType:
    __import__(name)
    return sys.modules[name]


def _empty_function(code: bytes, name: str, cells: int) -> types.FunctionType:
    """Create a function without globals and closure, which `_fill_function` adds because they may contain the function
    itself."""
    closure = tuple(types.CellType() for _ in range(cells))
    scope = {"__builtins__": __builtins__, "__name__": "__main__"}
    return types.FunctionType(marshal.loads(code), scope, name, None, closure)  # noqa: S302 - a part of the job


def _fill_function(
    function: types.FunctionType,
    state: tuple[dict[str, object], tuple[object, ...], tuple[object, ...] | None, dict[str, object] | None],
) -> None:
    names, contents, function.__defaults__, function.__kwdefaults__ = state
    function.__globals__.update(names)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
