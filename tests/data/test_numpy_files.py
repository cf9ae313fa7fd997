"""Ids in numpy's files, arrays of arrays among them, which nothing unpickles."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.data.indexed import IndexedDataset
from mega.core.data.preprocessing.numpy_files import documents

SHARD = [[1, 2, 50256], [5, 50256], [7, 8, 9, 50256]]


def shard(path: Path, protocol: int | None = None, value: Any = None) -> Path:
    """A file as make_gpt2_dataset.py wrote it, or one with another pickle inside."""
    rows = np.empty(len(SHARD), object)
    rows[:] = [np.array(row, np.uint16) for row in SHARD]
    if protocol is None and value is None:
        np.save(path, rows, allow_pickle=True)
        return path
    with path.open("wb") as file:
        shape = {"descr": "|O", "fortran_order": False, "shape": (len(SHARD),)}
        np.lib.format.write_array_header_1_0(file, shape)
        pickle.dump(rows if value is None else value, file, protocol=protocol)
    return path


@pytest.mark.parametrize("protocol", [None, 1, 2, 3, 4])
def test_arrays_of_arrays(tmp_path: Path, protocol: int | None) -> None:
    found = list(documents(shard(tmp_path / "a.npy", protocol), eod=None))
    assert [row.tolist() for row in found] == SHARD and {row.dtype for row in found} == {np.dtype(np.uint16)}


def test_runs_and_tables(tmp_path: Path) -> None:
    np.save(tmp_path / "run.npy", np.array([7, 8, 0, 9, 0, 4]))
    assert [row.tolist() for row in documents(tmp_path / "run.npy", eod=0)] == [[7, 8, 0], [9, 0], [4]]
    assert [row.tolist() for row in documents(tmp_path / "run.npy", eod=None)] == [[7, 8, 0, 9, 0, 4]]
    np.save(tmp_path / "table.npy", np.array([[1, 2], [3, 4]], np.uint16))
    assert [row.tolist() for row in documents(tmp_path / "table.npy", eod=None)] == [[1, 2], [3, 4]]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "made"
    for value in (Bomb(trap), [Bomb(trap)] * 3, np.array([Bomb(trap)] * 3, object)):
        with pytest.raises(ValueError, match=r"a\.npy: not an array of token ids"):
            list(documents(shard(tmp_path / "a.npy", 4, value), eod=None))
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore:Data type alias")
def test_damage_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.npy", 4)
    data = path.read_bytes()
    whole = [row.tolist() for row in documents(path, eod=None)]
    for at in range(len(data)):
        path.write_bytes(data[:at])
        with pytest.raises(ValueError, match=r"a\.npy: not an array"):
            list(documents(path, eod=None))
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x14]) + data[at + 1 :])
        try:
            assert len([row.tolist() for row in documents(path, eod=None)]) <= len(whole)
        except ValueError as error:
            assert "a.npy" in str(error)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(tmp_path / "shard_0000.npy")
    np.save(tmp_path / "shard_0001.npy", np.array([3, 50256, 4, 50256], np.uint16))
    convert = f"data from-numpy --input {tmp_path} --output-prefix {tmp_path}/tokens --eod 50256"
    assert main(convert.split()) == 0
    assert "5 documents, 13 tokens" in capsys.readouterr().out
    made = IndexedDataset(tmp_path / "tokens")
    assert [made[i].tolist() for i in range(5)] == [*SHARD, [3, 50256], [4, 50256]]
    assert made.dtype == np.uint16
    np.save(tmp_path / "shard_0002.npy", np.array([1.5]))
    assert main([*convert.split(), "--overwrite"]) == 2
    assert "shard_0002.npy: holds float64 of 1 dimensions" in capsys.readouterr().err
    for ids, message in (([3, -1], "holds -1 to 3; ids must be 0 to 2147483647"), ([2**31], "holds 2147483648 to")):
        np.save(tmp_path / "shard_0002.npy", np.array(ids))
        assert main([*convert.split(), "--overwrite"]) == 2
        assert message in capsys.readouterr().err
    assert main(f"data from-numpy --input {tmp_path}/tokens.idx --output-prefix {tmp_path}/b".split()) == 2
