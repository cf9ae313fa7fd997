"""The cache of orders: whole or absent, computed once, and never in the way."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mega.core.data.cache import Arrays, cached

KEY = {"kind": "test", "n": 5}


class Compute:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"a": np.arange(5), "b": np.ones((2, 3), np.int16)}


def entry(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def test_computed_once_then_mapped(tmp_path: Path) -> None:
    compute = Compute()
    for _ in range(3):
        found = cached(tmp_path / "cache", KEY, ("a", "b"), compute)
        assert found["a"].tolist() == list(range(5)) and found["b"].shape == (2, 3)
    assert compute.times == 1
    cached(tmp_path / "cache", {**KEY, "n": 6}, ("a", "b"), compute)
    assert compute.times == 2
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".safetensors", ".lock"}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[:-8],
    "header cut": lambda whole: whole[:20],
    "no header": lambda whole: b"\xff" * len(whole),
    "a list": lambda whole: (2).to_bytes(8, "little") + b"[]",
    "shape": lambda whole: whole.replace(b"[5]", b"[4]"),
    "negative": lambda whole: whole.replace(b"[5]", b"-55"),
    "object": lambda whole: whole.replace(b'"I64"', b'"OBJ"'),
    "another key": lambda whole: whole.replace(b"5}", b"6}"),
    "pickle": lambda whole: pickle.dumps([1, 2, 3]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_computed_again_and_replaced(tmp_path: Path, damage: str) -> None:
    compute = Compute()
    cached(tmp_path, KEY, ("a", "b"), compute)
    path = entry(tmp_path)
    whole = path.read_bytes()
    assert DAMAGES[damage](whole) != whole
    path.write_bytes(DAMAGES[damage](whole))
    path.with_name(f"{path.name}.0.tmp").write_bytes(whole[:9])  # and what a killed process left
    for _ in range(2):
        assert cached(tmp_path, KEY, ("a", "b"), compute)["a"].tolist() == list(range(5))
    assert compute.times == 2 and path.read_bytes() == whole and not list(tmp_path.glob("*.tmp"))


def test_any_reader_of_safetensors_opens_an_entry(tmp_path: Path) -> None:
    """Wide arrays lie first, so that each is aligned."""
    arrays = {"a": np.arange(3, dtype=np.int16), "b": np.arange(4, dtype=np.int64), "c": np.array([True, False])}
    cached(tmp_path, KEY, tuple(arrays), lambda: arrays)
    found = load_file(entry(tmp_path))
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }
    mapped = cached(tmp_path, KEY, tuple(arrays), Compute())
    assert all(array.flags.aligned and not array.flags.writeable for array in mapped.values())


def test_where_nothing_can_be_written_memory_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compute = Compute()
    assert cached(tmp_path / "file" / "cache", KEY, ("a",), compute)["a"].tolist() == list(range(5))
    assert cached(None, KEY, ("a",), compute)["a"].tolist() == list(range(5))
    assert compute.times == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    compute = Compute()
    cached(tmp_path, KEY, ("a", "b"), compute)
    tmp_path.chmod(0o500)
    try:
        cached(tmp_path, KEY, ("a", "b"), compute)
        assert compute.times == 1
        cached(tmp_path, {**KEY, "n": 6}, ("a", "b"), compute)
        assert compute.times == 2
    finally:
        tmp_path.chmod(0o700)


def test_one_of_many_processes_computes(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib, numpy as np\nfrom mega.core.data.cache import cached\n"
        "def compute():\n    print('computed', flush=True)\n    time.sleep(0.5)\n"
        "    return {'a': np.arange(9)}\n"
        "found = cached(pathlib.Path(sys.argv[1]), {'k': 1}, ('a',), compute)\n"
        "assert found['a'].tolist() == list(range(9))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(outputs) == ["", "", "computed\n"]
