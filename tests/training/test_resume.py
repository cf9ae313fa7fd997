"""A run that is killed and resumes is the run that was never killed; and it resumes in any other layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.data.build import Datasets
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.device import Device
from mega.core.ops.counter import OLD_RULE, RULE
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.training.saves.resume import ResumePoint, differences, overlap_difference, overlapped_before, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import TrainState
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run

MODEL = (
    "--layers 4 --hidden 32 --heads 4 --seq-length 32 --tokenizer NullTokenizer --vocab-size 508 --vocab-multiple 4 "
    "--micro-batch 1 --global-batch 4 --lr 1e-2 --lr-decay cosine --lr-warmup-steps 3 --steps 8 --save-interval 4 "
    "--log-interval 1 --eval-iters 1 --eval-interval 3 --bucket-size 5000 --device cpu"
).split()
LAYOUT = "--nproc 8 --tp 2 --pp 2 --sequence-parallel".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 documents of random ids, ended by the NullTokenizer's 508."""
    prefix = tmp_path_factory.mktemp("corpus") / "random"
    random = np.random.default_rng(5)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(200):
            ids = random.integers(0, 508, size=random.integers(20, 90))
            writer.add([[*ids.tolist(), 508]])
    return str(prefix)


def start(corpus: str, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mega", "pretrain", *MODEL, "--data-path", corpus, "--save", str(out), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run_here(corpus: str, out: Path, *flags: str) -> int:
    """The exit code of the command line in this process, whose ranks need not import torch again."""
    return main(["pretrain", *MODEL, "--data-path", corpus, "--save", str(out), *flags])


def losses(out: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm), from the metrics file."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row}


@pytest.fixture(scope="module")
def straight(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 steps without a stop, at tp 2, pp 2, dp 2 with dropout."""
    out = tmp_path_factory.mktemp("straight")
    assert run_here(corpus, out, *LAYOUT) == 0
    return out


def test_killed_and_resumed_is_bitwise_the_straight_run(corpus: str, straight: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path, *LAYOUT)
    deadline = time.monotonic() + 800  # four ranks on a busy machine
    while not (tmp_path / "step-0000004").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert CheckpointStore(tmp_path).steps() == [4], "killed too late or too early"
    before = losses(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert run_here(corpus, tmp_path, *LAYOUT, "--resume", "auto") == 0
    assert min(losses(tmp_path)) == 5, "it started afresh"
    assert before | losses(tmp_path) == losses(straight)
    first, second = CheckpointStore(straight).open(8), CheckpointStore(tmp_path).open(8)
    assert set(first.tensors) == set(second.tensors) and any(key.startswith("moment2/") for key in first.tensors)
    assert not list(diff(first, second))


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_fp8_resumes_bit_for_bit(corpus: str, tmp_path: Path, scaling: str) -> None:
    """The microbatches of a step share casts of weights, which no checkpoint holds."""
    sizes = ["--hidden", "128", "--heads", "1", "--seq-length", "128"] if scaling == "block" else []
    flags = ["--bf16", "--fp8", "--fp8-scaling", scaling, *sizes, "--layers", "2"]
    straight, again = tmp_path / "straight", tmp_path / "again"
    assert run_here(corpus, straight, *flags) == 0
    assert run_here(corpus, again, *flags, "--load", str(CheckpointStore(straight).path(4))) == 0
    assert min(losses(again)) == 5 and losses(again).items() <= losses(straight).items()
    assert not list(diff(CheckpointStore(straight).open(8), CheckpointStore(again).open(8)))


@pytest.mark.parametrize(
    "layout",
    ["--nproc 4 --tp 4", "--nproc 4 --pp 4 --schedule gpipe", "--nproc 4 --zero 1", "--nproc 1"],
)
def test_goes_on_in_another_layout(corpus: str, straight: Path, tmp_path: Path, layout: str) -> None:
    """Restored bytes are equal, and the next steps agree within the fp32 bound."""
    source = str(CheckpointStore(straight).path(4))
    flags = ["--load", source, "--exit-interval", "1", "--steps", "8"]
    assert run_here(corpus, tmp_path, *layout.split(), *flags) == 0
    ours, theirs = losses(tmp_path)[5], losses(straight)[5]
    assert ours[0] == pytest.approx(theirs[0], rel=2e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert 1 not in losses(tmp_path), "it started afresh"


def test_another_schedule_is_refused_or_chosen(
    corpus: str, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's learning rate at step 5 is on a cosine of 8 steps that starts at 1e-2."""
    source = ["--load", str(CheckpointStore(straight).path(4)), "--exit-interval", "1", "--lr", "2e-2"]
    assert run_here(corpus, tmp_path, *source) == 2
    said = capsys.readouterr().err
    assert "--lr 0.02: the checkpoint" in said and "has 0.01" in said and "Traceback" not in said
    rates = {}
    for choice in ("--override-schedule", "--use-checkpoint-schedule"):
        assert run_here(corpus, tmp_path / choice, *source, choice) == 0
        rows = [json.loads(line) for line in (tmp_path / choice / "metrics.jsonl").read_text().splitlines()]
        rates[choice] = next(row["lr"] for row in rows if row.get("step") == 5)
        changed = "not as in the checkpoint: --lr 0.02 (was 0.01)" in capsys.readouterr().out.replace("\n", " ")
        assert changed == (choice == "--override-schedule")
    assert rates["--override-schedule"] == pytest.approx(2 * rates["--use-checkpoint-schedule"])


def resave(groups: Groups, rank: int, run: RunConfig, world: int, source: str) -> None:
    """Job: restore a checkpoint in this run's layout and save it again."""
    mesh = build_mesh(run, rank, world, groups)
    state = build_state(run, mesh, Device.choose("cpu"))
    restore(state, ResumePoint(locate(Path(source)), weights_only=False))
    Saver(state).save()


@pytest.mark.parametrize("layout", [{"tp": 4}, {"pp": 4}, {"zero": 1}, {"zero": 3}, {"tp": 2, "zero": 2}, {}])
def test_restored_and_saved_again_is_the_same_bytes(
    straight: Path, tmp_path: Path, pool: Pool, layout: dict[str, int]
) -> None:
    """tp 2, pp 2, dp 2 -> any layout -> disk: every tensor, moments included, unchanged."""
    source = CheckpointStore(straight).open(8)
    model = model_of(source.meta, "the checkpoint")
    world = 4 if layout else 1
    options = {"micro_batch": 1, "seq_length": 32, "bucket_size": 3000, "save": str(tmp_path), **layout}
    run = resolve(updated(Options(model=model), options), world)
    pool.run(resave, run, world, str(source.path), world=world)
    assert not list(diff(source, CheckpointStore(tmp_path).open(8)))


def test_what_changes_samples_sums_or_updates_is_reported(straight: Path) -> None:
    source = CheckpointStore(straight).open(8)
    source.meta["layout"] = {}
    options = {
        "micro_batch": 1,
        "seq_length": 32,
        "mask_prob": 0.3,
        "rampup": (2, 2, 8),
        "adam_beta2": 0.95,
        "chat_template": "llama2",
    }
    run = resolve(updated(Options(model=model_of(source.meta, "the checkpoint")), options), 1)
    point = ResumePoint(source, weights_only=False)
    said = " ".join(differences(run, point, Datasets(), build_mesh(run, 0, 1), source.meta["threads"] + 1))
    for part in (
        "--rampup 2 2 8 (was none)",
        "--adam-beta2 0.95 (was 0.999)",
        "--chat-template llama2 (was plain)",
        "--mask-prob 0.3 (was 0.15)",
        f"{source.meta['threads'] + 1} CPU threads a rank (was {source.meta['threads']}); results differ by rounding",
    ):
        assert part in said, said


def test_experts_that_ranks_share_otherwise_are_reported(straight: Path) -> None:
    source = CheckpointStore(straight).open(8)
    source.meta["layout"], source.meta["config"]["parallel"] = {"dp": 2}, {"ep": 1, "etp": 1}
    values = {"micro_batch": 1, "seq_length": 32, "experts": 4, "ep": 2}
    run = resolve(updated(Options(model=model_of(source.meta, "the checkpoint")), values), 2)
    said = list(differences(run, ResumePoint(source, weights_only=False), Datasets(), Mesh.at(0, dp=2, ep=2)))
    assert any("ep 2" in line and "results differ by rounding" in line for line in said), said


def test_a_run_that_began_under_the_old_dropout_resumes_under_it(straight: Path, tmp_path: Path) -> None:
    """It says so, and its next checkpoint says so too; weights alone, and a foreign checkpoint, begin under the new."""
    source = CheckpointStore(straight).open(8)
    assert source.meta.pop("dropout_rule") == RULE
    options = {"micro_batch": 1, "seq_length": 32, "save": str(tmp_path)}
    run = resolve(updated(Options(model=model_of(source.meta, "the checkpoint")), options), 1)
    mesh = build_mesh(run, 0, 1)

    def resumed(weights_only: bool) -> TrainState:
        state = build_state(run, mesh, Device.choose("cpu"))
        restore(state, ResumePoint(source, weights_only))
        return state

    assert resumed(weights_only=True).dropout_rule == RULE
    state = resumed(weights_only=False)
    assert state.dropout_rule == state.stages[0].options.dropout_rule == OLD_RULE
    said = " ".join(differences(run, ResumePoint(source, weights_only=False), Datasets(), mesh))
    assert "decided as by the version that began this run" in said
    Saver(state).save()
    assert CheckpointStore(tmp_path).open(8).meta["dropout_rule"] == OLD_RULE
    source.meta.pop("fingerprint")  # as of an imported checkpoint
    assert resumed(weights_only=False).dropout_rule == RULE


TENSOR = "--nproc 2 --tp 2 --sequence-parallel --layers 2".split()


def test_a_run_keeps_the_overlap_of_its_checkpoint(corpus: str, tmp_path: Path) -> None:
    """Bit for bit, as if it had not stopped, though a CPU overlaps nothing by default; a typed option counts more."""
    whole, second = tmp_path / "whole", tmp_path / "second"
    assert run_here(corpus, whole, *TENSOR, "--tp-overlap") == 0
    source = CheckpointStore(whole).path(4)
    assert run_here(corpus, second, *TENSOR, "--load", str(source)) == 0
    resumed, straight = (CheckpointStore(place).open(8) for place in (second, whole))
    assert losses(second).items() <= losses(whole).items() and not list(diff(straight, resumed))
    assert resumed.meta["tp_overlap"] and resumed.meta["config"]["parallel"]["tp_overlap"] is None
    line = [*TENSOR, "--no-tp-overlap", "--load", str(source), "--exit-interval", "5"]
    assert run_here(corpus, tmp_path / "third", *line) == 0
    assert CheckpointStore(tmp_path / "third").open(5).meta["tp_overlap"] is False


@pytest.mark.parametrize(
    ("meta", "option", "flags", "expected"),
    [
        ({"tp_overlap": True}, None, {}, True),
        ({"tp_overlap": False}, None, {}, False),
        ({}, True, {}, True),  # of an earlier version, in which the option was off unless it was given
        ({}, False, {}, False),
        ({"tp_overlap": True}, None, {"pp": 1}, True),
        ({"tp_overlap": True}, None, {"tp": 4}, None),
        ({"tp_overlap": True}, None, {"sequence_parallel": False}, None),
    ],
)
def test_the_overlap_that_a_checkpoint_records(
    straight: Path, meta: dict[str, bool], option: bool | None, flags: dict[str, Any], expected: bool | None
) -> None:
    source = CheckpointStore(straight).open(8)
    assert source.meta.pop("tp_overlap") is False
    source.meta.update(meta)
    source.meta["config"]["parallel"]["tp_overlap"] = option
    values = {"micro_batch": 1, "seq_length": 32, "tp": 2, "pp": 2, "sequence_parallel": True, **flags}
    run = resolve(updated(Options(model=model_of(source.meta, "the checkpoint")), values), 8)
    point = ResumePoint(source, weights_only=False)
    assert overlapped_before(run, point) is expected
    words = {True: "--no-tp-overlap (was --tp-overlap)", False: "--tp-overlap (was --no-tp-overlap)"}
    other = None if expected is None else f"not as in the checkpoint: {words[expected]}; results differ by rounding"
    for overlaps in (True, False):
        assert overlap_difference(run, point, overlaps) == (None if overlaps == expected else other)
    assert overlapped_before(run, ResumePoint(source, weights_only=True)) is None
    source.meta.pop("fingerprint")  # as of an imported checkpoint
    assert overlapped_before(run, ResumePoint(source, weights_only=False)) is None


@pytest.mark.parametrize(
    ("typed", "before", "excluded", "expected"),
    [
        (None, None, {}, False),
        (None, True, {}, True),
        (None, False, {}, False),
        (True, False, {}, True),
        (False, True, {}, False),
        (None, True, {"lora_rank": 2}, False),
    ],
)
def test_which_runs_overlap_on_a_cpu(
    pool: Pool, typed: bool | None, before: bool | None, excluded: dict[str, Any], expected: bool
) -> None:
    run = small_run("llama", 2, tp=2, sequence_parallel=True, tp_overlap=typed, **excluded)
    assert pool.run(overlaps, run, before, world=2) == [expected] * 2


def overlaps(groups: Groups, rank: int, run: RunConfig, before: bool | None) -> bool:
    return build_state(run, build_mesh(run, rank, 2, groups), Device.choose("cpu"), before).overlaps
