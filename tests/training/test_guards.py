"""Guards: what is not finite is found in its step and named; spikes; batches that are left out; rollbacks; profiles."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega import cli
from mega.core.activity import ACTIVITY
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import compose
from mega.core.config.resolve import records_graph, resolve
from mega.core.parallel.mesh import Mesh
from mega.core.processes.pool import Pool
from mega.core.training.guards.stragglers import REPEAT, WINDOW, Stragglers
from mega.core.training.loop import Training
from mega.core.training.policy import LASTING, GuardMemory, limits
from mega.core.training.routines import Routine
from tests.support.guarded import guarded, play, published

RunCli = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_INJECT", "1")


@pytest.mark.parametrize(
    ("fault", "layout", "words"),
    [
        ("nan:batch", {"tp": 2}, "the batch's loss_weights of microbatch"),
        ("inf:activation", {"pp": 2}, "the output of"),
        ("nan:activation", {"tp": 2, "sequence_parallel": True}, "the output of"),
        ("nan:gradient", {"zero": 1}, "the own gradient of"),
        ("inf:gradient", {"tp": 2, "zero": 2}, "the own gradient of"),
        ("nan:weight", {"zero": 3}, "weights/"),
        ("inf:moment", {"pp": 2, "zero": 1}, "moment"),
        ("nan:tied", {"pp": 2}, "copies of the gradient of model.embed_tokens.weight"),
        ("nan:gradient", {"loss_scale": 64.0}, "at --loss-scale 64: the own gradient of"),
    ],
)
def test_what_is_not_finite_is_named_in_its_step(
    tmp_path: Path, pool: Pool, fault: str, layout: dict[str, Any], words: str
) -> None:
    """On all ranks, before the update; and nothing of it is published."""
    options = guarded(tmp_path, inject=(f"{fault}@step=5,rank=3,seed=1",), global_batch=4, **layout)
    found = pool.run(play, options, 4, world=4)
    assert len({each["error"] for each in found}) == 1 and {each["step"] for each in found} == {5}, found
    error = found[0]["error"]
    assert error.startswith("step 5: ") and words in error, error
    assert "rank 3" in error or "ranks 1 and 3" in error, error
    assert published(tmp_path) == [2, 4]
    if fault != "nan:tied":
        assert [(each["step"], each["policy"]) for each in events(tmp_path) if each["event"] == "nan"] == [(5, "stop")]
    if "gradient" in fault or words.endswith("/"):
        assert found[3]["named"][0] in error, (found[3]["named"], error)


def events(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "m.events.jsonl").read_text().splitlines()]


def without_batch(first: int, count: int, training: Training) -> None:
    """The training set without samples first, first + 1, ..."""
    train = training.task.train
    assert train is not None
    take = train.take
    train.take = lambda consumed, n: take(consumed + (count if consumed >= first else 0), n)  # type: ignore[method-assign]


def drop_second(training: Training) -> None:
    without_batch(4, 4, training)


@pytest.mark.parametrize(
    ("fault", "values"),
    [
        ("nan:gradient@step=2,rank=1", {"on_nan": "skip", "zero": 1}),
        ("nan:activation@step=2,rank=0", {"on_nan": "skip", "dtype": "bf16", "hidden_dropout": 0.1}),
        ("nan:batch@step=2,rank=1", {"on_nan": "skip", "dtype": "fp16", "initial_loss_scale": 1024.0, "pp": 2}),
        ("nan:batch@step=2,rank=1", {"on_nan": "skip", "dtype": "fp16", "initial_loss_scale": 1024.0, "tp": 2}),
    ],
)
def test_a_skipped_batch_is_as_if_it_had_not_been_drawn(
    tmp_path: Path, pool: Pool, fault: str, values: dict[str, Any]
) -> None:
    """Weights, moments and loss scale after 5 steps, one of them skipped, are those of 4 steps on the other batches."""
    same = {"global_batch": 4, "lr_decay": "linear", "lr_decay_steps": 9, "hysteresis": 1, **values}
    skips = pool.run(play, guarded(tmp_path / "a", steps=5, inject=(fault,), **same), 2, world=2)
    reference = pool.run(play, guarded(tmp_path / "b", steps=5, exit_interval=4, **same), 2, drop_second, world=2)
    assert [each["digest"] for each in skips] == [each["digest"] for each in reference]
    scales = [CheckpointStore(tmp_path / name / "run").open(step).meta["scaler"] for name, step in (("a", 5), ("b", 4))]
    assert scales[0] == scales[1] and (scales[0] is None) == (values.get("dtype") != "fp16")
    assert skips[0]["left_out"] == [{"step": 2, "reason": "nan", "samples": [4, 8]}]
    rows = [json.loads(line) for line in (tmp_path / "a" / "m.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[1] == rates[2] and rates[2] > rates[3]
    assert [(each["step"], each["samples"]) for each in events(tmp_path / "a") if each["event"] == "nan"] == [
        (2, [4, 8])
    ]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_resume_over_what_was_left_out_is_the_same_run(tmp_path: Path, pool: Pool, policy: str) -> None:
    values = {"on_nan": policy, "inject": ("nan:gradient@step=3,rank=0",), "global_batch": 4, "zero": 1}
    straight = pool.run(play, guarded(tmp_path / "a", **values), 2, world=2)
    pool.run(play, guarded(tmp_path / "b", exit_interval=4, **values), 2, world=2)
    resumed = pool.run(play, guarded(tmp_path / "b", resume="auto", **values), 2, world=2)
    assert [each["digest"] for each in straight] == [each["digest"] for each in resumed]
    assert straight[0]["left_out"] == resumed[0]["left_out"] != []
    metas = [CheckpointStore(tmp_path / name / "run").open(6).meta["guard"] for name in "ab"]
    assert metas[0] == metas[1] and len(metas[0]["losses"]) == 5


@pytest.mark.parametrize("values", [{"tp": 2}, {"load_optim": False, "zero": 1}, {"save_interval": 1}])
def test_a_rollback_goes_on_with_the_next_batch(tmp_path: Path, pool: Pool, values: dict[str, Any]) -> None:
    """What the steps since the save have done is undone, also to a weight that is broken for good. A save that is
    damaged is passed over. Ranks that read are in a phase that others wait for."""
    values = {"global_batch": 4, **values}
    fault = ("nan:weight@step=4,rank=1",)
    found = pool.run(play, guarded(tmp_path / "a", on_nan="rollback", inject=fault, **values), 2, damage_third, world=2)
    reference = pool.run(play, guarded(tmp_path / "b", exit_interval=4, **values), 2, drop_third_and_fourth, world=2)
    assert [each["digest"] for each in found] == [each["digest"] for each in reference]
    assert found[0]["left_out"] == [{"step": 4, "reason": "nan", "samples": [8, 16], "to": 2}]
    lines = found[0]["lines"]
    assert "reading: loading" in lines and any("step 3 is passed over: " in line for line in lines) == (
        values.get("save_interval") == 1
    )


def damage_third(training: Training) -> None:
    """Of what is saved, a byte of step 3; and a line with the phase in which a step is read."""
    saver = training.saver
    assert saver is not None
    place, opened = Path(str(training.state.run.checkpoint.save)), saver.store.open

    def damage(step: int, seconds: float) -> None:
        if step == 3 and training.state.mesh.rank == 0:
            path = max(place.glob("step-0000003/*.safetensors"), key=lambda file: file.stat().st_size)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 255
            path.write_bytes(data)

    def watched(step: int) -> Checkpoint:
        training.judge.report(f"reading: {ACTIVITY.phase}")
        return opened(step)

    saver.on_saved, saver.store.open = damage, watched  # type: ignore[method-assign]


def drop_third_and_fourth(training: Training) -> None:
    without_batch(8, 8, training)


def test_rollbacks_are_bounded(tmp_path: Path, pool: Pool) -> None:
    values = {"on_nan": "rollback", "max_rollbacks": 2, "global_batch": 4}
    options = guarded(tmp_path, inject=("nan:batch@step=3,rank=0,steps=3",), **values)
    error = pool.run(play, options, 1, world=1)[0]["error"]
    assert error.startswith("step 5: ") and error.endswith("this would be rollback 3, and --max-rollbacks is 2"), error
    error = pool.run(play, guarded(tmp_path / "b", inject=("nan:batch@step=1",), **values), 1, world=1)[0]["error"]
    assert error.endswith("nothing was saved yet, so that there is no step to go back to"), error


def test_what_a_save_finds_broken_is_rolled_back_too(tmp_path: Path, pool: Pool) -> None:
    """An update may break a weight, which the save after it sees first."""
    values = {"global_batch": 4, "zero": 1}
    found = pool.run(play, guarded(tmp_path / "a", on_nan="rollback", **values), 2, break_fourth, world=2)
    reference = pool.run(play, guarded(tmp_path / "b", exit_interval=4, **values), 2, drop_third_and_fourth, world=2)
    assert [each["error"] for each in found] == ["", ""]
    assert [each["digest"] for each in found] == [each["digest"] for each in reference]
    assert found[0]["left_out"] == [{"step": 4, "reason": "nan", "samples": [8, 16], "to": 2}]
    assert published(tmp_path / "a") == [2, 4, 6]
    stopped = pool.run(play, guarded(tmp_path / "c", on_nan="skip", **values), 2, break_fourth, world=2)
    assert {each["error"].split(":")[0] for each in stopped} == {"step 4 is not saved"}


def break_fourth(training: Training) -> None:
    def damage() -> None:
        training.state.grads.wait_param_gather()  # a gather that ends later writes this rank's span once more
        next(training.state.flats())[0] = math.nan

    training.routines = (Routine(lambda step: step == 4, damage), *training.routines)


def test_steps_that_are_not_finite_end_a_run_whose_scale_could_become_less(tmp_path: Path, pool: Pool) -> None:
    """A loss scale does not follow a loss that is not finite, however large it is."""
    fault = "nan:batch@step=2,steps=50"
    options = guarded(tmp_path, steps=40, on_nan="skip", dtype="fp16", inject=(fault,), layers=1, global_batch=1)
    (found,) = pool.run(play, options, 1, world=1)
    assert found["error"].startswith("step 21: loss or gradients of 20 steps in a row are not finite: "), found


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_spike_of_a_run_is_found(tmp_path: Path, pool: Pool, policy: str) -> None:
    options = guarded(
        tmp_path,
        steps=45,
        save_interval=45,
        on_spike=policy,
        global_batch=2,
        layers=1,
        inject=("spike:gradient@step=40,rank=1,x=4000",),
    )
    found = pool.run(play, options, 2, world=2)[0]
    assert found["error"] == "" and sum("step 40: " in line for line in found["lines"]) == 1, found["lines"]
    assert [each["step"] for each in found["left_out"]] == ([40] if policy == "skip" else [])


def test_spikes_that_last_are_the_new_level(tmp_path: Path, pool: Pool) -> None:
    """The first ones are left out; then what is usual is learned again. A resume between them is the same run."""
    values = {"steps": 70, "save_interval": 70, "on_spike": "skip", "inject": ("spike:gradient@step=40,steps=99",)}
    values |= {"layers": 1, "global_batch": 2}
    (straight,) = pool.run(play, guarded(tmp_path / "a", **values), 1, world=1)
    assert straight["error"] == "" and [each["step"] for each in straight["left_out"]] == list(range(40, 40 + LASTING))
    assert sum("what is usual is learned again" in line for line in straight["lines"]) == 1
    pool.run(play, guarded(tmp_path / "b", **values, exit_interval=50), 1, world=1)
    (resumed,) = pool.run(play, guarded(tmp_path / "b", **values, resume="auto"), 1, world=1)
    assert resumed["digest"] == straight["digest"]
    metas = [CheckpointStore(tmp_path / name / "run").open(70).meta["guard"] for name in "ab"]
    assert metas[0] == metas[1] and len(metas[0]["losses"]) == 70 - 40 - LASTING + 1


@pytest.mark.parametrize(("batch", "known"), [(4, 6), (8, 2)])
def test_a_run_that_resumes_with_another_batch_learns_what_is_usual(
    tmp_path: Path, pool: Pool, batch: int, known: int
) -> None:
    pool.run(play, guarded(tmp_path, steps=4, global_batch=4), 1, world=1)
    pool.run(play, guarded(tmp_path, steps=6, global_batch=batch, resume="auto", override_schedule=True), 1, world=1)
    assert len(CheckpointStore(tmp_path / "run").open(6).meta["guard"]["norms"]) == known


def test_spikes_of_a_noisy_series() -> None:
    """A short form of the battery's."""
    dice, memory, found = random.Random(1), GuardMemory(), []
    for step in range(1, 1001):
        loss, norm = 2.0 + 3 * step**-0.3 + dice.gauss(0, 0.03), math.exp(dice.gauss(-0.5, 0.15))
        if step % 200 == 0:
            loss, norm = loss * 2.3, norm * 4000
        if limits(memory.losses, memory.norms, 10.0).exceeded(loss, norm):
            found.append(step)
        else:
            memory.add(loss, norm)
    assert found == [200, 400, 600, 800, 1000]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's figures of a thread")
def test_a_core_that_other_work_has_makes_no_rank_slow() -> None:
    """Own work is counted without the time in which the thread could run and had no core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:  # on the same core
            began, worked, used = time.monotonic(), ACTIVITY.worked(), time.thread_time()
            while time.monotonic() < began + 1.0:
                pass
            took, worked, used = time.monotonic() - began, ACTIVITY.worked() - worked, time.thread_time() - used
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert worked < 0.8 * took and worked == pytest.approx(used, abs=0.1 * took)


def test_a_slow_rank_is_named_once_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages of three ranks, of which the second has more work; rank 4 is slow by 30 % from step 100 on."""
    noise, stragglers = np.random.default_rng(0), Stragglers(Mesh.at(0, dp=3, pp=2), 1.25)
    named = []
    for step in range(1, 1101):
        seconds = np.array([0.1] * 3 + [0.2] * 3) * noise.normal(1, 0.05, 6)
        seconds[4] *= 1.35 if 100 <= step < 140 else 1.0
        named += [(step, rank) for rank, _, _ in stragglers.observe(step, seconds)]
    assert len(named) == 1 and named[0][1] == 4 and 100 < named[0][0] < 100 + 2 * WINDOW < 100 + REPEAT


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    monkeypatch.chdir(tmp_path)
    flags = (
        "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 "
        "--eval-iters 0 --steps 4 --device cpu"
    ).split()

    def run(*more: str) -> tuple[int, str]:
        code = cli.main([*flags, *more])
        return code, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--inject nan:moon@step=1", "--inject nan:moon@step=1: nan:moon; valid: nan:batch, nan:activation"),
        ("--inject nan:batch@step=1,rank=2", "there are ranks 0 to 0"),
        ("--inject nan", "says no step"),
        ("--inject nan@step=2,step=3", "step is given twice"),
        ("--inject sleep@step=1,steps=0", "steps=0: nothing would happen"),
        ("--inject kill@step=1,x=3", "x does nothing to kill:step; valid: step, rank, steps"),
        ("--inject nan:batch@step=5", "--inject nan:batch@step=5: the last step is 4"),
        ("--inject fail:save@step=1", "--inject fail:save@step=1: needs --save"),
        ("--inject nan:tied@step=1", "--inject nan:tied@step=1: needs --pp of at least 2"),
        ("--inject ulp:moment@step=1 --optimizer sgd --sgd-momentum 0", "--optimizer sgd has no moments"),
        ("--inject nan:activation@step=1 --cuda-graph", "excludes --cuda-graph"),
        ("--on-nan rollback", "--on-nan rollback: needs --save and --save-interval"),
        ("--on-nan rollback --save a --save-interval 1 --no-save-optim", "--on-nan rollback: excludes --no-save-optim"),
        ("--profile 9:3", "--profile 9:3: must be the first and the last step"),
        ("--slow-rank 0.9", "--slow-rank 0.9: must be greater than 1"),
    ],
)
def test_mistakes_are_named_before_anything_starts(run_cli: RunCli, flags: str, words: str) -> None:
    code, printed = run_cli(*flags.split())
    assert code == 2 and words in printed, printed


def test_a_fault_must_be_said_twice(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGA_INJECT")
    code, printed = run_cli("--inject", "nan:batch@step=1")
    assert code == 2 and "set MEGA_INJECT=1 in the environment too" in printed, printed


def test_a_profile_is_a_trace_and_ten_lines(tmp_path: Path, run_cli: RunCli) -> None:
    code, printed = run_cli("--profile", "2:3", "--metrics", str(tmp_path / "m.jsonl"))
    trace, table = (tmp_path / f"profile-steps-2-3-rank-0.{end}" for end in ("json.gz", "txt"))
    assert code == 0 and trace.stat().st_size > 1000 and len(table.read_text().splitlines()) == 10
    assert f"profile of steps 2 to 3 of rank 0: {trace}" in printed and table.read_text().splitlines()[0] in printed


@pytest.mark.parametrize(
    ("flags", "done", "words"),
    [
        ("--profile 3:9", "3-4", "--profile 3:9: the run has steps 1 to 4, so that steps 3 to 4 are profiled"),
        ("--profile 2:3 --exit-interval 2", "2-2", "profile of steps 2 to 2 of rank 0"),
        ("--profile 7:9", "", "--profile 7:9: the run has steps 1 to 4, so that none is profiled"),
    ],
)
def test_a_profile_that_a_run_does_not_finish_is_written(
    tmp_path: Path, run_cli: RunCli, flags: str, done: str, words: str
) -> None:
    code, printed = run_cli(*flags.split(), "--metrics", str(tmp_path / "m.jsonl"))
    traces = [path.name for path in tmp_path.glob("*.json.gz")]
    assert code == 0 and words in printed and traces == ([f"profile-steps-{done}-rank-0.json.gz"] if done else [])


@pytest.mark.parametrize("values", [{}, {"async_save": True}])
def test_a_disk_that_is_full_on_one_rank_ends_all(tmp_path: Path, pool: Pool, values: dict[str, Any]) -> None:
    """In the write, where ranks agree on what has failed, and where it is tried again."""
    options = guarded(tmp_path, global_batch=4, inject=("fail:save@step=4,rank=1",), **values)
    first, second = (each["error"] for each in pool.run(play, options, 2, world=2))
    assert "step 4 was not saved: another rank failed" in first and "no space left on device (--inject)" in second
    assert published(tmp_path) == [2]


def test_no_graph_is_recorded_where_an_output_is_damaged() -> None:
    run = compose("gpt2-345m", flags={"micro_batch": 1, "vocab": 50304, "inject": ("nan:activation@step=1",)})
    assert not records_graph(resolve(run, world=1), world=1)


def test_a_save_that_fails_on_purpose_is_named(tmp_path: Path, run_cli: RunCli) -> None:
    code, printed = run_cli("--save", str(tmp_path / "run"), "--save-interval", "2", "--inject", "fail:save@step=4")
    assert code == 1 and "no space left on device (--inject)" in printed and published(tmp_path) == [2], printed


def test_a_kernel_that_fails_on_purpose_is_named_and_not_repeated(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that --max-restarts has started again meets the step of the fault once more, and passes it."""
    words = ["--save", str(tmp_path / "run"), "--save-interval", "2", "--inject", "fail:device@step=4"]
    code, printed = run_cli(*words)
    assert code == 1 and "index 1048576 is out of bounds" in printed and published(tmp_path) == [2], printed
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, printed = run_cli(*words, "--load", str(tmp_path / "run"))
    assert code == 0 and published(tmp_path) == [2, 4], printed
