"""Disks that are full or fail while a file is written: one line with the file and the reason, nothing half written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega import cli
from mega.core import files
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore, SaveError
from mega.core.files import whole_file, write_together
from mega.core.retro.stages import write_array
from mega.core.text import train
from tests.support.disk import files_of_at_most


def texts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"word {n} and word {n * n}"}) + "\n" for n in range(3000)))
    return path


def trained(folder: Path) -> Path:
    """A run of a small Llama."""
    shape = "--model tiny-llama --seq-length 8 --mock-data --tokenizer NullTokenizer --vocab-size 64 --vocab 70".split()
    steps = "--micro-batch 1 --lr 1e-3 --steps 1 --eval-iters 0 --device cpu".split()
    assert cli.main(["pretrain", *shape, *steps, "--save", str(folder)]) == 0
    return folder


def test_token_files_on_a_full_disk_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, as of all failures of a machine, and not 2, which means a mistake in flags."""
    source, words = texts(tmp_path), ["--tokenizer", "NullTokenizer", "--vocab-size", "99"]
    source.write_text('{"text": "' + "1 2 3 4 " * 40000 + '"}\n')
    with files_of_at_most(100_000):
        code = cli.main(["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "t"), *words])
    assert code == 1
    assert f"mega: {tmp_path}/t_text_document: cannot be written (File too large)\n" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["texts.jsonl"]


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")
def test_a_gguf_export_says_why_it_was_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = trained(tmp_path / "run"), tmp_path / "out"
    with files_of_at_most(90_000):
        code = cli.main(["convert-llama", "--load-dir", str(source), "--save-dir", str(out), "--to", "gguf"])
    said = capsys.readouterr().err
    assert code == 1 and f"{out}: was not written: File too large (" in said, said
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")
def test_a_gguf_export_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    source, out = trained(tmp_path / "run"), tmp_path / "out"
    assert cli.main(["convert-llama", "--load-dir", str(source), "--save-dir", str(out), "--to", "gguf"]) == 0
    assert (out / "model.gguf").stat().st_ino in synced


def test_an_array_says_why_it_was_not_written(tmp_path: Path) -> None:
    array = np.arange(10_000)
    with files_of_at_most(5000), pytest.raises(OSError) as caught:
        write_array(tmp_path / "a.npy", array)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a.npy"))
    write_array(tmp_path / "a.npy", array)
    assert np.array_equal(np.load(tmp_path / "a.npy"), array) and os.listdir(tmp_path) == ["a.npy"]


def test_files_that_belong_together_are_replaced_together(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_together({first: b"old", second: b"old"})
    with files_of_at_most(5000), pytest.raises(OSError, match=r"File too large: '.*second'"):
        write_together({first: b"new", second: bytes(10_000)})
    assert first.read_bytes() == second.read_bytes() == b"old" and len(os.listdir(tmp_path)) == 2


def test_a_vocabulary_keeps_its_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new vocabulary with old merges would cut texts in other ways, without an error."""
    line = ["train-tokenizer", "--input", str(texts(tmp_path)), "--output-dir", str(tmp_path / "t"), "--vocab-size"]
    assert cli.main([*line, "300"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextlib.contextmanager
    def open_whole(path: Path) -> Iterator[Any]:
        with whole_file(path) as file:
            yield Full() if path.name == "merges.txt" else file

    for module in (files, train):
        monkeypatch.setattr(module, "whole_file", open_whole)
    assert cli.main([*line, "320", "--overwrite"]) == 1
    assert f"mega: {tmp_path}/t/merges.txt: No space left on device\n" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before


def test_a_save_names_the_file_and_the_room_at_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is written last: the message is about it, and about the room beside the save's other files."""
    store, real, rooms = CheckpointStore(tmp_path), os.pwrite, list[bool]()

    def write(descriptor: int, data: bytes, offset: int) -> int:
        if bytes(data).startswith(b'{"format":"mega checkpoint"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    def where(step: int) -> tuple[str, int | None]:
        rooms.append((tmp_path / "step-0000003.tmp").exists())
        return str(tmp_path), 5

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(store, "_where", where)
    with pytest.raises(SaveError, match=r"step-0000003.tmp/manifest.json: No space left on device; 5 bytes are free"):
        store.save(3, [Piece("w", (4,), (0,), torch.ones(4))], {})
    assert rooms[0], "measured after the files had been removed"
