"""Saving in the background: the same bytes as at once, of the moment asked for; errors are reported soon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.own import directory as store_module
from mega.core.checkpoint.own import retention
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore, SaveError
from mega.core.config.run import RunConfig, updated
from mega.core.device import Device, HostCopy
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.text.chat.templates import TEMPLATES
from mega.core.training.saves import saver as saver_module
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import Progress, TrainState
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run


def state_of(run: RunConfig, rank: int, world: int, groups: Groups | None) -> TrainState:
    mesh = build_mesh(run, rank, world, groups)
    return build_state(run, mesh, Device.choose("cpu"))


def change(state: TrainState, by: float) -> None:
    """Every number that a checkpoint keeps."""
    for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)):
        piece.tensor.detach().add_(by)


def save_both_ways(groups: Groups, rank: int, run: RunConfig, world: int, sync: str, later: str) -> list[str]:
    """Job: three saves at once and three in the background, the state changing right after each is asked for."""
    printed: list[str] = []
    for directory, background in ((sync, False), (later, True)):
        options = replace(run.checkpoint, save=directory, async_save=background)
        state = state_of(replace(run, checkpoint=options), rank, world, groups)
        saver = Saver(state, report=printed.append)
        for step in (1, 2, 3):
            state.progress.step = step
            saver.save()
            change(state, 0.5)
            saver.look()
        saver.wait()
    return printed


def files_of(directory: Path) -> dict[str, bytes]:
    """Name -> content of everything but the manifest, which names the directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(("man", "run"))}


def test_the_same_bytes_as_at_once(tmp_path: Path, pool: Pool) -> None:
    run = small_run(world=4, tp=2, zero=1, dtype="bf16", save_interval=1)
    printed = pool.run(save_both_ways, run, 4, str(tmp_path / "sync"), str(tmp_path / "async"), world=4)
    assert [line.split(" in ")[0] for line in printed[0]] == ["saved step 1", "saved step 2", "saved step 3"] * 2
    assert "in the background" in printed[0][-1]
    sync, later = CheckpointStore(tmp_path / "sync"), CheckpointStore(tmp_path / "async")
    for step in (1, 2, 3):
        later.open(step).verify()
        assert files_of(sync.path(step)) == files_of(later.path(step))
    assert any(True for _ in diff(sync.open(1), sync.open(2)))


def test_the_jinja_file_of_the_run_goes_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "my.jinja").write_text("ours")
    chat = {"chat_data": ("talks.jsonl",), "chat_template": str(tmp_path / "my.jinja"), "mock_data": False}
    run = small_run(save=str(tmp_path), save_interval=1)
    for data, expected in ((chat, b"ours"), ({**chat, "chat_template": "chatml"}, TEMPLATES["chatml"].encode())):
        state = state_of(run, 0, 1, None)
        state.run = updated(run, data)
        Saver(state, sidecar_files={"chat_template.jinja": b"its base's"}).save()
        found = CheckpointStore(tmp_path).open(0).attachments.get("chat_template.jinja")
        assert (found and found.read_bytes()) == expected


def alone(directory: Path, **values: Any) -> tuple[TrainState, Saver]:
    run = small_run(save=str(directory), save_interval=1, async_save=True, **values)
    state = state_of(run, 0, 1, None)
    return state, Saver(state)


def full(*_: Any, **__: Any) -> None:
    """In the place of `write_container`."""
    raise OSError(28, "No space left on device")


def until_raised(saver: Saver) -> SaveError:
    """What `look` raises, soon."""
    deadline = time.monotonic() + 300  # it ends as soon as it is reported
    while time.monotonic() < deadline:
        try:
            saver.look()
        except SaveError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("the writer's fault was never reported")


def test_a_writer_that_fails_is_reported_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, saver = alone(tmp_path)
    state.progress.step = 1
    saver.save()
    saver.wait()

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_container", full)
        state.progress.step = 2
        saver.save()
        error = until_raised(saver)
    assert "step 2 was not saved: " in str(error) and "whole: steps 1" in str(error)
    assert CheckpointStore(tmp_path).newest() == 1
    state.progress.step = 3
    saver.save()
    saver.wait()
    assert CheckpointStore(tmp_path).newest() == 3


@pytest.mark.parametrize("background", [False, True])
def test_an_old_checkpoint_that_cannot_go_ends_no_run(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(save=str(tmp_path), save_interval=1, keep_last=1, async_save=background)
    state, printed = state_of(run, 0, 1, None), list[str]()
    saver = Saver(state, report=printed.append)

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    for step in (1, 2, 3, 4):
        state.progress.step = step
        with monkeypatch.context() as patch:
            if step == 3:
                patch.setattr(retention, "_remove", busy)
            saver.save()
            saver.wait()
    words = "older checkpoints stay for now: [Errno 16] Device or resource busy: "
    assert printed[2].startswith(words)
    assert [line[:12] for line in (*printed[:2], *printed[3:])] == [f"saved step {step}" for step in (1, 2, 3, 4)]
    assert CheckpointStore(tmp_path).steps() == [1, 4], "the next to be good stays"


def test_one_save_is_on_its_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, saver = alone(tmp_path)
    events: list[str] = []
    real = CheckpointStore.save

    def slow(self: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Any:
        events.append(f"begins {step}")
        time.sleep(0.2)
        report = real(self, step, *args, **kwargs)
        events.append(f"ends {step}")
        return report

    monkeypatch.setattr(CheckpointStore, "save", slow)
    for step in (1, 2):
        state.progress.step = step
        saver.save()
    saver.wait()
    assert events == ["begins 1", "ends 1", "begins 2", "ends 2"]


def fail_on(groups: Groups, rank: int, run: RunConfig, world: int, broken: int) -> str:
    """Job: an asynchronous save in which one rank's disk is full; what this rank reports."""
    saver = Saver(state_of(run, rank, world, groups))
    with pytest.MonkeyPatch.context() as patch:
        if rank == broken:
            patch.setattr(store_module, "write_container", full)
        saver.save()
        try:
            saver.wait()
        except SaveError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize("broken", [0, 1])
def test_one_ranks_fault_is_everyones(tmp_path: Path, pool: Pool, broken: int) -> None:
    run = small_run(world=2, tp=2, save=str(tmp_path / "a"), save_interval=1, async_save=True)
    reported: Sequence[str] = pool.run(fail_on, run, 2, broken, world=2)
    assert f"rank-{broken:05}" in reported[broken] and "No space left" in reported[broken]
    assert "another rank failed" in reported[1 - broken]
    assert CheckpointStore(tmp_path / "a").newest() is None


def full_for_a_while(groups: Groups, rank: int, run: RunConfig, world: int, times: int) -> tuple[str, list[str]]:
    """Job: a save on whose last rank the disk is full, so many times; its error, and what rank 0 printed."""
    printed: list[str] = []
    saver, real, left = (
        Saver(state_of(run, rank, world, groups), report=printed.append),
        store_module.write_container,
        times,
    )

    def write(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        return real(*args, **kwargs) if left < 0 or rank < world - 1 else full()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "write_container", write)
        patch.setattr(saver_module, "RETRY_PAUSES", (0.05, 0.05))
        try:
            saver.save()
            saver.wait()
        except SaveError as error:
            return str(error), printed
    return "", printed


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("minutes", "times", "saved"), [(1.0, 2, True), (0.0, 1, False)])
def test_a_save_is_tried_again_for_a_while(
    tmp_path: Path, pool: Pool, background: bool, minutes: float, times: int, saved: bool
) -> None:
    where = {"save": str(tmp_path), "save_interval": 1, "async_save": background, "save_retry_minutes": minutes}
    run = small_run(world=2, tp=2, **where)
    (error, printed), (other, _) = pool.run(full_for_a_while, run, 2, times, world=2)
    assert (not error, not other) == (saved, saved)
    assert CheckpointStore(tmp_path).newest() == (0 if saved else None)
    assert sum("trying again for 1.0 minutes" in line for line in printed) == (times if saved else 0)


def test_the_copy_is_of_the_moment(tmp_path: Path) -> None:
    state, saver = alone(tmp_path)
    before = {piece.key: piece.tensor.detach().clone() for piece in state.weight_pieces(mine=True)}
    state.progress.step = 1
    saver.save()
    change(state, 7.0)
    saver.wait()
    assert before
    again = state_of(state.run, 0, 1, None)
    CheckpointStore(tmp_path).open(1).read(again.weight_pieces(mine=False))
    for piece in again.weight_pieces(mine=True):
        assert torch.equal(piece.tensor, before[piece.key])


def test_a_copy_of_neighbours_and_of_others() -> None:
    flat, other = torch.arange(700.0), torch.arange(64).to(torch.bfloat16)
    tensors = [flat[:10].view(2, 5), flat[10:10], flat[10:110], flat[200:400].view(20, 10)]
    tensors += [flat[400:].view(30, 10).narrow(1, 0, 9), other[:3], other[3:], torch.tensor(5.0)]
    copy = HostCopy(Device.choose("cpu"), HostCopy.room(tensors))
    for _ in range(2):
        places = copy.take(tensors)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(places, tensors, strict=True))


def test_a_checkpoint_that_names_skipped_samples_as_before_resumes(tmp_path: Path) -> None:
    run = small_run(save=str(tmp_path), save_interval=1)
    state = state_of(run, 0, 1, None)
    state.progress = Progress(step=3, consumed=12, skipped=1, skipped_samples=4)
    Saver(state).save()
    checkpoint = CheckpointStore(tmp_path).open(3)
    progress = checkpoint.meta["progress"]
    progress["unscheduled"] = progress.pop("skipped_samples")
    resumed = state_of(run, 0, 1, None)
    restore(resumed, ResumePoint(checkpoint, weights_only=False))
    assert resumed.progress == state.progress
