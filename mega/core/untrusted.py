"""Untrusted input, within limits: files of bounded size, JSON with finite numbers, and a separate process for code that
may crash (compiled libraries) or never end (templates, which are programs).

    with Confined("mega.core.text.probe", "--tokenizer-model a.json", seconds=10, memory=1 << 30) as child:
        child.ask({"path": "a.json"})      the module's `answer`, or a ValueError that begins with the second argument

This module does not depend on the meaning of files or questions.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value of JSON or TOML. Callers narrow such a value with `isinstance` or `below` before they use it."""

WAIT_SECONDS = 20.0
"""Seconds for which a reader waits for data from a pipe."""
START_SECONDS = 120.0
"""Wall-clock limit, in seconds, for the start of a child and for each answer; generous, for busy machines."""
MOST_DIGITS = 100
"""Maximum number of digits of an integer, because the conversion of a longer integer to float may overflow."""
RAW = "raw"
"""Key of an answer whose value is bytes; the bytes are sent unencoded after the JSON line."""
_BLOCK = 1 << 20


# --- files ----------------------------------------------------------------------------------------------------------


def read_limited(path: Path | str, limit: int, what: str) -> bytes:
    """Read a file or pipe of at most `limit` bytes. Reading stops one byte after the limit, so a device may be endless.

    what: flag and file, for messages. Errors: ValueError if the file cannot be read or is larger, or if a pipe delivers
    no data for WAIT_SECONDS.
    """
    data = bytearray()
    try:
        # O_NONBLOCK: open() itself would wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            while len(data) <= limit and (part := _next(descriptor, min(_BLOCK, limit + 1 - len(data)), regular)):
                data += part
        finally:
            os.close(descriptor)
    except TimeoutError:
        raise ValueError(f"{what}: a pipe out of which nothing came for {WAIT_SECONDS:g} s; give a file") from None
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ValueError(f"{what}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit} bytes"
        raise ValueError(f"{what}: holds more than the {size} that are read of such a file")
    return bytes(data)


def _next(descriptor: int, size: int, regular: bool) -> bytes:
    """Read up to `size` bytes, or return b"" at the end of the file. Errors: TimeoutError if no data arrives."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not regular:
        _wait(descriptor, deadline)
        with contextlib.suppress(BlockingIOError):
            return os.read(descriptor, size)
    return os.read(descriptor, size)


def _wait(descriptor: int, deadline: float) -> None:
    """Wait until there is data to read, or the other end is closed. Errors: TimeoutError if neither happens in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError


def parse_json(data: bytes | str, what: str, *, unique: bool = False) -> Json:
    """Parse untrusted JSON. NaN, infinite floats, integers of over MOST_DIGITS digits, lone surrogates and nesting that
    is too deep are refused; with `unique`, also a key that occurs twice in an object.

    what: flag and file, for messages. Errors: ValueError.

    >>> parse_json('{"a": 1e999}', "a.json")
    Traceback (most recent call last):
    ...
    ValueError: a.json: is not JSON that can be read: 1e999 is no finite number
    """
    pairs = _unique if unique else None
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole, object_pairs_hook=pairs)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeError (a ValueError) at a lone surrogate
        return value  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError(f"{what}: is not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what}: is not JSON that can be read: {error}") from None


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits, at most {MOST_DIGITS} are read")
    return int(text)


def below(value: object, *keys: str) -> dict[str, Json]:
    """Return the nested object under `keys`; an empty object if any of the keys is absent or its value is not an
    object.

    >>> below({"config": {"model": {"layers": 2}}}, "config", "model"), below({"config": None}, "config", "model")
    ({'layers': 2}, {})
    """
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def numbers_below(value: object, *keys: str) -> dict[str, float]:
    """Return the numbers in the nested object under `keys`."""
    return {name: value for name, value in below(value, *keys).items() if isinstance(value, int | float)}


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


# --- a separate process ---------------------------------------------------------------------------------------------


class Confined:
    """A child process that answers questions. It runs `module`, which calls `serve(answer)`.

    what: flag and file, as the beginning of error messages. seconds: limit of processor time per answer. memory: limit
    of address space in bytes. answer_bytes: limit of an answer's size. The child starts with the first question and
    ends with `close`, with this object, or with the parent process. A process forked from the parent starts its own
    child.
    """

    def __init__(
        self, module: str, what: str, *, seconds: int, memory: int, answer_bytes: int = 1 << 20, about: str = ""
    ) -> None:
        self._command = [sys.executable, "-m", module, str(seconds), str(memory)]
        self._what, self._about, self._most = what, about, answer_bytes
        self._rule = f"at most {seconds} s of processor time, {memory >> 20} MiB of memory"
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child and wait for its end."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        child.wait()

    def ask(self, question: object, what: str = "") -> Any:
        """Ask a question and return the answer. what: replaces the beginning of error messages.

        Errors: ValueError with the message of `answer`, or with the reason why the child ended.
        """
        self._what = what or self._what
        try:
            child = self._started()
            assert child.stdin is not None
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            reply = self._line(child)
        except TimeoutError:
            self.close()
            raise ValueError(f"{self._what}: {self._about}gave no answer within {START_SECONDS:g} s") from None
        except OSError as error:
            raise self._lost(error) from None
        if "error" in reply:
            raise ValueError(f"{self._what}: {reply['error']}")
        return reply["answer"]

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the child; start a child if this process has none."""
        if self._child is None or self._owner != os.getpid():
            root = str(Path(__file__).resolve().parents[2])
            paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}
            environment.pop("MEGA_DEBUG", None)
            self._owner = os.getpid()
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # signals to the process group of the run must not reach the child
            )
            self._line(self._child)  # the first line reports that the child has started
        return self._child

    def _line(self, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Read the next reply: a JSON line, then the bytes that it announces under RAW.

        Errors: OSError if the child has ended or its reply is too long; TimeoutError.
        """
        assert child.stdout is not None
        deadline, data, end, size = time.monotonic() + START_SECONDS, bytearray(), -1, 0
        reply: dict[str, Any] = {}
        while end < 0 or len(data) < size:
            _wait(child.stdout.fileno(), deadline)
            part = os.read(child.stdout.fileno(), _BLOCK)
            begin = len(data)
            data += part
            if not part or len(data) > self._most:
                raise OSError("has ended" if not part else f"answers more than {self._most} bytes")
            if end < 0 and (end := data.find(b"\n", begin)) >= 0:
                reply = json.loads(data[:end])
                size = end + 1 + reply.get(RAW, 0)
        if RAW in reply:
            reply["answer"][RAW] = bytes(data[end + 1 :])
        return reply

    def _lost(self, error: OSError) -> ValueError:
        """Close the child and return the reason why there is no answer."""
        child, reason = self._child, str(error)
        if child is not None and reason in ("has ended", "[Errno 32] Broken pipe"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(START_SECONDS)
            code = child.returncode or 0
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            reason = "takes too long" if name == "SIGXCPU" else f"makes what reads it fail ({name})"
        self.close()
        return ValueError(f"{self._what}: {self._about}{reason}; {self._rule}")


_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MALLOC_ARENA_MAX"), "1"
) | {"TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1"}
"""Tokenizers use no threads in a child, because the address space that each thread reserves counts towards the
limit."""


def serve(answer: Callable[[Any], object]) -> None:
    """Answer the questions on standard input until the input ends. This is the main function of a child of `Confined`.
    Errors of `answer` become messages to the user, including the panic of a Rust library, which is a BaseException.
    """
    import resource

    seconds, memory = map(int, sys.argv[1:3])
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with answers
    output.write(b"{}\n")
    output.flush()
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with contextlib.suppress(ValueError, OSError):
            most = int(used.ru_utime + used.ru_stime) + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        reply = _reply(answer, line)
        output.write(reply)
        output.flush()


def _reply(answer: Callable[[Any], object], line: bytes) -> bytes:
    try:
        result = answer(json.loads(line))
        if not isinstance(result, dict) or not isinstance(result.get(RAW), bytes):
            return json.dumps({"answer": result}).encode() + b"\n"
        raw: bytes = result.pop(RAW)
        return json.dumps({"answer": result, RAW: len(raw)}).encode() + b"\n" + raw
    except MemoryError:
        text = "takes too much memory"
    except BaseException as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": " ".join(text.split())[:300]}).encode() + b"\n"
