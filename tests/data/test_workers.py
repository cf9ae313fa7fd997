"""Worker processes: forked or spawned, the same answers; none stays when its parent is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mega.core.data import sources, workers
from mega.core.data.preprocessing.preprocess import preprocess
from mega.core.data.workers import Buffer, Work, Workers
from mega.core.text.build import build
from tests.support.shared import REPOSITORY, shared


class Number(NamedTuple):
    value: int
    size: int = 1 << 20


def squared(number: Number, buffer: Buffer) -> int | None:
    """The square, in the buffer where it has memory."""
    if number.value < 0:
        raise ValueError(f"{number.value}: below 0")
    if number.value == 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    if not buffer:
        return number.value**2
    buffer[:8] = (number.value**2).to_bytes(8)
    return None


def made_squared() -> Work[Number, int | None]:
    return squared


def asked(values: list[int]) -> list[int]:
    with Workers(2, here=made_squared, there=made_squared) as pool:
        return [
            int.from_bytes(buffer[:8]) if found is None else found
            for _, found, buffer in pool.answers(map(Number, values))
        ]


def answers_come_in_order() -> None:
    assert asked(list(range(100))) == [i * i for i in range(100)]
    assert asked([]) == []


def an_error_is_reported() -> None:
    with pytest.raises(ValueError, match="-1: below 0"):
        asked([1, 2, -1, 4])


def a_kill_is_reported() -> None:
    with pytest.raises(ChildProcessError, match="a worker was killed"):
        asked([1, 2, 1000, *range(3, 50)])


def libraries_have_one_thread() -> None:
    """A library's own threads, one for each core in each worker, would stand in each other's way."""
    tokenizer = build(
        tokenizer="GPT2BPETokenizer",
        vocab_file=shared("gpt2/gpt2-vocab.json"),
        merge_file=shared("gpt2/gpt2-merges.txt"),
    )

    def threads(number: Number, buffer: Buffer) -> int:
        tokenizer.encode_batch(["many words"] * 1000)
        return len(os.listdir("/proc/self/task"))

    with Workers(1, here=lambda: threads, there=lambda: threads) as pool:
        found = [answer for _, answer, _ in pool.answers([Number(1)])]
    assert found[0] <= 3  # its own, the one that waits for the parent's end, and numpy's where it has one


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize(
    "check", [answers_come_in_order, an_error_is_reported, a_kill_is_reported, libraries_have_one_thread]
)
def test_forked(check: Callable[[], None]) -> None:
    """In a process of its own: threads of other tests may live in this one."""
    if check is libraries_have_one_thread:
        shared("gpt2/gpt2-vocab.json")
    program = f"from tests.data import test_workers as t; assert t.workers._can_fork(); t.{check.__name__}()"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=120)


@pytest.mark.parametrize("check", [answers_come_in_order, an_error_is_reported, a_kill_is_reported])
def test_spawned(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_can_fork", lambda: False)
    check()


@pytest.fixture
def novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50_000)
    path = tmp_path / "a.jsonl"
    text = shared("tinyshakespeare/input.txt").read_text()[:400_000]
    path.write_text("".join(json.dumps({"text": text[i : i + 2000]}) + "\n" for i in range(0, len(text), 2000)))
    return path


def bytes_of(novel: Path, count: int) -> bytes:
    tokenizer = {
        "tokenizer": "GPT2BPETokenizer",
        "vocab_file": shared("gpt2/gpt2-vocab.json"),
        "merge_file": shared("gpt2/gpt2-merges.txt"),
    }
    report = preprocess([novel], f"{novel.parent}/{count}", tokenizer, append_eod=True, workers=count)
    return b"".join(Path(f"{report.outputs[0]}.{end}").read_bytes() for end in ("bin", "idx"))


def test_the_bytes_do_not_depend_on_how_they_travel(novel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bytes_of(novel, 1)
    assert bytes_of(novel, 2) == expected, "forked, ids in shared memory"
    monkeypatch.setattr(workers, "BUFFER_BYTES", 20_000)
    assert bytes_of(novel, 2) == expected, "a buffer is too small for some blocks and large enough for others"
    stay = threading.Event()
    threading.Thread(target=stay.wait).start()
    try:
        assert bytes_of(novel, 2) == expected, "spawned, next to another thread"
    finally:
        stay.set()


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "mega", "preprocess", "--input", "-", "--output-prefix", tmp_path / "out",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--workers", "2",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        while len(group(process.pid)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    end = time.monotonic() + 300
    while group(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not group(process.pid)


def group(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found
