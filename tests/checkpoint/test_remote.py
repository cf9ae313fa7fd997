"""Checkpoints under a URL, by fsspec's file system in memory: any order of loss leaves an older one, or none."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, Piece, SaveError, locate, store_at
from mega.core.config.check import check
from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.wire import build_state
from tests.support.runs import small_run

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def pieces_of(rank: int, step: int) -> list[Piece]:
    half = torch.full((2, 3), float(step))
    return [Piece(f"{kind}/w", (4, 3), (2 * rank, 0), half) for kind in ("weights", "moment1")]


def save(where: str | Path, step: int) -> None:
    files = {"run.toml": b"steps = 9\n"}
    store_at(where).save_all(step, [pieces_of(0, step), pieces_of(1, step)], {"step": step}, attachments=files)


def exact(checkpoint: Checkpoint) -> bool:
    checkpoint.verify()
    found = torch.zeros(4, 3)
    for kind in ("weights", "moment1"):
        checkpoint.read([Piece(f"{kind}/w", (4, 3), (0, 0), found)])
        assert torch.equal(found, torch.full((4, 3), float(checkpoint.step)))
    return checkpoint.meta == {"step": checkpoint.step}


def test_the_same_files_as_in_a_directory(url: str, tmp_path: Path) -> None:
    save(url, 1)
    save(tmp_path, 1)
    files, root = fsspec.core.url_to_fs(url)
    there = {path.rsplit("/", 1)[-1]: files.cat_file(path) for path in files.ls(f"{root}/step-0000001", detail=False)}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "step-0000001").iterdir()}
    assert files.cat_file(f"{root}/latest") == b"step-0000001\n"


def test_newest_and_verify(url: str) -> None:
    assert store_at(url).newest() is None
    for step in (1, 2):
        save(url, step)
    assert store_at(url).newest() == 2 and exact(locate(url)) and exact(locate(Path(url) / "step-0000001"))
    told: list[str] = []
    inspect.verify(Path(url), told.append)
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2"]
    opened = locate(url)  # its local files go with it
    assert opened.attachments["run.toml"].read_bytes() == b"steps = 9\n"


def test_published_by_the_seal_and_by_nothing_before(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ends before any of its calls leaves the step before; one that ends behind the seal is there."""
    save(url, 1)
    files, _ = fsspec.core.url_to_fs(url)
    step = 2
    for calls in range(99):
        left = [calls]

        def counted(real: Any, left: list[int] = left) -> Any:
            def act(*args: Any, **more: Any) -> Any:
                if not left[0]:
                    raise OSError(5, "the connection is gone")
                left[0] -= 1
                return real(*args, **more)

            return act

        with monkeypatch.context() as patch:
            for name in ("put_file", "get_file", "pipe_file", "rm_file"):
                patch.setattr(type(files), name, counted(getattr(type(files), name)))
            try:
                save(url, step)
                break
            except SaveError as error:
                assert f"step {step} was not saved" in str(error) and "connection is gone" in str(error)
        newest = store_at(url).newest()
        assert newest in (step - 1, step) and exact(locate(url))
        step = newest + 1
    assert calls > 9 and store_at(url).newest() == step


def test_a_flipped_byte_and_a_missing_file_are_named(url: str) -> None:
    save(url, 1)
    files, root = fsspec.core.url_to_fs(url)
    name = f"{root}/step-0000001/rank-00001.safetensors"
    whole = files.cat_file(name)
    files.pipe_file(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank-00001.*weights/w"):
        locate(url).verify()
    files.rm_file(name)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: is missing"):
        locate(url)


def test_what_cannot_be_is_refused(url: str) -> None:
    save(url, 1)
    with pytest.raises((SaveError, CheckpointError), match="is there already"):
        save(url, 1)
    with pytest.raises(ValueError, match="nothing is removed"):
        inspect.clean(Path(url), 1, None, None, False, print)
    with pytest.raises(ValueError, match="--keep-last 2: needs --save to be a directory"):
        check(small_run(save=url, save_interval=1, keep_last=2, steps=1, mock_data=True), 1)
    with pytest.raises(ValueError, match="cannot be reached"):
        store_at("nosuch://bucket/run")


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_saves_there_and_goes_on(url: str, behind: bool) -> None:
    run = small_run(save=url, save_interval=1, async_save=behind, dtype="bf16", layers=1)
    state = build_state(run, Mesh(0), Device.choose("cpu"))
    state.progress.step = 3
    saver = Saver(state)
    saver.save()
    saver.wait()
    again = build_state(run, Mesh(0), Device.choose("cpu"))
    for piece in again.weight_pieces(mine=False):
        piece.tensor.detach().zero_()
    restore(again, ResumePoint(locate(url), weights_only=False))
    assert again.progress.step == 3
    for ours, theirs in zip(state.weight_pieces(mine=False), again.weight_pieces(mine=False), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)


def test_a_directory_stays_a_directory(tmp_path: Path) -> None:
    assert type(store_at(tmp_path)) is CheckpointStore


class EndpointLost(Exception):
    """As of botocore, whose errors are none of the system's."""


def test_an_endpoint_that_is_lost_is_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run begins, and when it saves."""
    save(url, 1)

    def lost(*args: Any, **kwargs: Any) -> None:
        raise EndpointLost("Could not connect to\nthe endpoint")

    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "put_file", lost)
    line = f"{url}: cannot be reached (put_file): Could not connect to the endpoint"
    with pytest.raises(SaveError, match=re.escape(line)):
        save(url, 2)
    monkeypatch.setattr(memory, "exists", lost)
    with pytest.raises(OSError, match=re.escape(line.replace("put_file", "exists"))):
        store_at(url).newest()


def test_a_package_that_is_missing_is_ours_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match=re.escape("s3://b/run: needs s3fs; pip install '.[remote]' in a clone")):
        store_at("s3://b/run")
