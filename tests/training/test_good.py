"""A run that blows up: nothing that is not finite is published, and a resume finds a step from before."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mega import cli
from mega.core.checkpoint.own.directory import CheckpointError
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.retention import retain
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.checkpoint.own.verdicts import StepVerdict
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.training.saves.proving import Proving
from mega.core.training.saves.saver import Saver
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run

RunCli = Callable[..., tuple[int, str]]

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 "
    "--lr-decay constant --eval-iters 0 --save-interval 2 --log-interval 1 --device cpu"
).split()


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run the command line and give (exit code, all that it printed)."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> tuple[int, str]:
        code = cli.main([*RUN, *flags])
        return code, "".join(capsys.readouterr())

    return run


def test_what_is_not_finite_is_not_published(tmp_path: Path, run_cli: RunCli) -> None:
    """The loss of the step is finite: it is that of the weights before the update that breaks them."""
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    assert run_cli(*save, "--steps", "2")[0] == 0
    kept = CheckpointStore(tmp_path).open(2).digest
    code, printed = run_cli(*save, "--steps", "6", "--resume", "auto", "--lr", "1e39", "--override-schedule")
    assert code == 1 and "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("mega: step 3 is not saved: ") and "(rank 0)" in last, last
    store = CheckpointStore(tmp_path)
    assert (
        store.open(2).digest == kept
        and store.steps() == [1, 2]
        and (tmp_path / "latest").read_text() == f"step-{store.steps()[-1]:07d}\n"
    )
    for step in store.steps():
        assert not broken(store, step)


def broken(store: CheckpointStore, step: int) -> list[str]:
    """The tensors of a step that hold a number that is not finite."""
    checkpoint, found = store.open(step), []
    for key, (shape, dtype) in checkpoint.tensors.items():
        tensor = torch.zeros(shape, dtype=dtype)
        checkpoint.read([Piece(key, shape, (0,) * len(shape), tensor)])
        if not bool(torch.isfinite(tensor).all()):
            found.append(key)
    return found


def save_broken(groups: Groups, rank: int, run: RunConfig, broken_rank: int, kind: str) -> str:
    """Job: one rank's tensor of a kind is broken in one element; what `save` reports."""
    state = build_state(run, build_mesh(run, rank, 2, groups), Device.choose("cpu"))
    saver = Saver(state)
    state.progress.step = 7
    if rank == broken_rank:
        pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False))
        piece = next(piece for piece in pieces if piece.key.startswith(kind))
        piece.tensor.detach().reshape(-1)[0] = math.inf
    try:
        saver.save()
        saver.wait()
    except FloatingPointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("weights/", {"pp": 2}),
        ("moment2/", {"zero": 1}),
        ("master/", {"zero": 3, "dtype": "bf16", "async_save": True}),
        ("factors/", {"optimizer": "adafactor", "tp": 2, "dtype": "fp32"}),
    ],
)
def test_one_ranks_broken_tensor_is_everyones(tmp_path: Path, pool: Pool, kind: str, options: dict[str, str]) -> None:
    run = small_run(world=2, save=str(tmp_path / "run"), save_interval=1, **options)
    first, second = pool.run(save_broken, run, 1, kind, world=2)
    assert first == second and first.startswith(f"step 7 is not saved: {kind}"), first
    assert "(rank 1) holds numbers that are not finite" in first and not (tmp_path / "run").exists()
    assert pool.run(save_broken, run, -1, kind, world=2) == ["saved", "saved"]


def end_broken(groups: Groups, rank: int, run: RunConfig, kind: str, value: float) -> str:
    """Job: before the first step one element of a tensor of rank 1 is broken; what ends the run."""
    with contextlib.ExitStack() as held:
        training = start(open_inputs(resolve_run(run, 2)), rank, 2, Device.choose("cpu"), groups, held)
        state = training.state
        if rank == 1:
            pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False))
            next(piece for piece in pieces if piece.key.startswith(kind)).tensor.detach().reshape(-1)[0] = value
        try:
            training.play()
        except FloatingPointError as error:
            return str(error)
    return "ended"


@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        ("weights/model.layers", math.nan, {"pp": 2}),
        ("weights/model.layers", math.inf, {"tp": 2}),
        ("moment1/model.layers", math.nan, {"zero": 1}),
    ],
)
def test_a_loss_that_is_not_finite_names_the_tensor(
    tmp_path: Path, pool: Pool, kind: str, value: float, options: dict[str, str]
) -> None:
    """In its own step, before the update; a moment does not reach the loss."""
    data = {"mock_data": True, "steps": 3, "lr": 1e-3, "eval_iters": 0, "metrics": str(tmp_path / "m.jsonl")}
    run = small_run(world=2, **data, **options)
    first, second = pool.run(end_broken, run, kind, value, world=2)
    loss = "6." if kind.startswith("moment") else "nan"
    assert first == second and first.startswith(f"step 1: the loss is {loss}"), first
    assert f": {kind}" in first and "(rank 1)" in first and "memory was damaged, or training has diverged" in first


def test_after_a_finite_blow_up_a_good_step_is_resumed(tmp_path: Path, run_cli: RunCli) -> None:
    """As in life: some good steps, a rate that is too high, checkpoints of it, and then a loss that is NaN."""
    place = ["--save", str(tmp_path), "--resume", "auto", "--good-after", "3", "--keep-last", "1"]
    assert run_cli(*place, "--steps", "6")[0] == 0
    code, printed = run_cli(*place, "--steps", "40", "--lr", "1e4", "--override-schedule", "--clip-grad", "0")
    store, verdicts = CheckpointStore(tmp_path), CheckpointStore(tmp_path).verdicts()
    assert verdicts[6].status == "good" and 6 in store.steps(), "evicted"
    assert [step for step, verdict in verdicts.items() if verdict.status == "suspect"] == store.steps()[1:]
    if code == 0:  # no number became infinite: but the loss is far above what guessing costs
        assert store.steps()[-1] == 40
    last = store.steps()[-1]
    code, printed = run_cli(*place, "--steps", "48", "--override-schedule")
    assert code == 0, printed
    assert f"step {last} is passed over: it was saved while the loss was" in printed
    assert f"resuming from {store.path(6)} at step 6" in printed
    assert CheckpointStore(tmp_path).verdicts()[48].status == "good"
    losses = [json.loads(line).get("loss") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(loss for loss in losses if loss is not None) < 2 * math.log(64)


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype fp16 --steps 4",
        "--dtype fp16 --steps 60 --initial-loss-scale 1e30 --min-loss-scale 1e30",
        "--dtype fp16 --steps 9 --loss-scale 1e30",
        "--dtype fp16 --steps 60 --loss-scale 1e30 --on-nan skip",
    ],
)
def test_a_run_that_trains_nothing_is_no_success(tmp_path: Path, run_cli: RunCli, flags: str) -> None:
    """The first scale is too large for four steps; the least one stays so. A constant one follows no overflow."""
    code, printed = run_cli("--save", str(tmp_path), "--save-interval", "99", *flags.split())
    said = printed.splitlines()[-1]
    assert code == 1 and "Traceback" not in printed
    if "60" in flags:
        assert said.startswith(
            "mega: step 20: loss or gradients of 20 steps in a row are not finite at a loss scale of 1e+30"
        )
    elif "9" in flags:
        assert said.startswith("mega: step 1: the loss is ") and " at --loss-scale 1e+30: " in said
    else:
        assert (
            said.startswith("mega: step 4: nothing was trained: every step was skipped") and "loss scale is now" in said
        )


class Record:
    """A store with some steps, and what is on trial there."""

    def __init__(self, directory: Path, good_after: int = 3, start: int = 0):
        self.store, self.printed = CheckpointStore(directory), list[str]()
        report = self.printed.append
        self.proving = Proving(self.store, good_after=good_after, vocab=64, start=start, report=report)

    def save(self, step: int, published: bool = True) -> None:
        self.proving.saves(step)
        self.store.save(step, [Piece("w", (1,), (0,), torch.full((1,), float(step)))], {})
        if published:
            self.proving.published(step)

    def status(self) -> dict[int, str]:
        return {step: verdict.status for step, verdict in self.store.verdicts().items()}


def test_a_step_is_good_after_sound_ones_or_the_last(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for step in range(1, 7):
        record.proving.observe(step, 4.0, applied=step != 3)  # a skipped one says nothing
        if step in (1, 4):
            record.save(step)
        assert record.status() == ({1: "unproven"} if step < 4 else {1: ["unproven", "good"][step > 4], 4: "unproven"})
    record.proving.finished(clean=False)
    assert record.status() == {1: "good", 4: "unproven"} and record.store.verdicts()[4].sound_steps == 2
    again = Record(tmp_path, start=4)  # the count goes on
    again.proving.observe(5, 4.0, applied=True)
    assert again.status() == {1: "good", 4: "good"}
    last = Record(tmp_path, start=4)
    last.save(8)
    last.proving.finished(clean=True)
    assert last.status() == {1: "good", 4: "good", 8: "good"}


def test_a_blow_up_that_passes_is_forgiven(tmp_path: Path) -> None:
    """Steps on trial are suspect from the blow-up on, as a kill may come any time, until enough sound ones follow."""
    record = Record(tmp_path)
    record.proving.observe(1, 4.0, applied=True)
    record.save(1)
    record.proving.observe(2, 9.0, applied=True)
    record.save(2)
    assert record.status() == {1: "suspect", 2: "suspect"}
    with pytest.raises(CheckpointError, match=r"none of the checkpoints \[1, 2\] can be trusted: it was saved while"):
        record.store.find()
    for step in range(3, 6):
        record.proving.observe(step, 4.0, applied=True)
        if step == 3:
            record.save(3)
            assert record.store.newest() == 3, "saved by a sound run, and no reason to pass it over"
    assert record.status() == {1: "good", 2: "good", 3: "unproven"}


def test_a_verdict_is_of_one_checkpoint(tmp_path: Path) -> None:
    """A step that is replaced is on trial afresh; without the file, or with a damaged one, no step is suspect."""
    record = Record(tmp_path)
    for step in (1, 2):
        record.proving.observe(step, 4.0, applied=True)
        record.save(step)
    record.proving.diverged("step 3: the loss is nan")
    printed: list[str] = []
    lonely = Path(record.store.path(2))
    assert locate(lonely, printed.append).step == 2 and "is taken as it is named" in printed[0]
    record.store.save(2, [Piece("w", (1,), (0,), torch.zeros(1))], {})
    assert record.store.newest() == 2
    for content in ("{", "[]", '{"format_version": 1, "steps": {"1": {}}}'):
        (tmp_path / "verdicts.json").write_text(content)
        printed.clear()
        assert record.store.newest(report=printed.append) == 2 and "without being passed over" in printed[0]
    os.unlink(tmp_path / "verdicts.json")
    assert record.store.newest() == 2


def test_a_suspect_step_is_resumed_where_it_is_named(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a step alone is looked up in --save. No other step can be trusted there, which hinders nothing."""
    monkeypatch.setenv("MEGA_INJECT", "1")
    save = ["--save", "run", "--steps", "6"]
    code, printed = run_cli(*save, "--inject", "nan:gradient@step=5")
    assert code == 1 and CheckpointStore(Path("run")).steps() == [2, 4], printed
    code, printed = run_cli(*save, "--resume", "auto")
    assert code == 2 and "(it is taken where it is named, as step-0000004)" in printed
    code, printed = run_cli(*save, "--resume", "step-0000003")
    assert code == 2 and "--resume step-0000003: there is no such directory, and no such step in --save" in printed
    code, printed = run_cli(*save)
    assert code == 2 and "none of the checkpoints [2, 4] can be trusted" in printed, "it would begin anew there"
    shutil.copytree("run", "diverged")
    for place in ("--resume step-0000004", "--resume run/step-0000002", "--load run/step-0000004"):
        shutil.rmtree("run")
        shutil.copytree("diverged", "run")
        code, printed = run_cli(*save, *place.split())
        step = int(place[-1])
        assert code == 0 and f"step {step} is taken as it is named, although" in printed, printed
        assert f"step-000000{step} at step {step}" in printed and CheckpointStore(Path("run")).steps()[-1] == 6


def test_a_kill_right_after_a_save_loses_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.proving.observe(1, 4.0, applied=True)
    record.save(1)
    record.proving.observe(2, 4.0, applied=True)
    record.save(2, published=False)  # killed before anything is known of it
    assert record.status() == {1: "unproven"} and record.store.newest() == 2


def test_retention_leaves_the_best_by_validation_loss(tmp_path: Path) -> None:
    """Of the steps that were validated when they were saved, before or after the save; none that is suspect."""
    record = Record(tmp_path)
    for step, loss in ((1, 2.0), (2, 1.5), (3, 0.5), (4, 3.0)):
        record.proving.record_validation(step, loss)
        record.save(step)
    record.proving.record_validation(5, float("nan"))
    record.save(5)
    verdicts = record.store.verdicts()
    assert [verdicts[step].valid_loss for step in range(1, 6)] == [2.0, 1.5, 0.5, 3.0, None]
    record.store.set_verdicts({**verdicts, 3: replace(verdicts[3], status="suspect")})
    assert retain(record.store, keep_last=1).removed == [1, 3, 4] and record.store.steps() == [2, 5]
    again = Proving(record.store, good_after=9, vocab=64, start=5, report=print)  # a resumed run knows of it
    again.record_validation(5, 1.0)
    assert retain(record.store, keep_last=1).removed == [2]


def test_retention_leaves_the_newest_good_one(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for step in range(1, 10):
        record.save(step)
    verdicts = {step: StepVerdict(record.store.digest(step), "good") for step in (3, 5)}
    record.store.set_verdicts(verdicts)
    assert retain(record.store, keep_last=2, spared=frozenset({6})).removed == [1, 2, 3, 4, 7]
    assert record.store.steps() == [5, 6, 8, 9]
    record.store.set_verdicts({**verdicts, 9: StepVerdict("of the one that was replaced", "good")})
    assert retain(record.store, keep_last=1).removed == [6, 8] and record.store.steps() == [5, 9]
