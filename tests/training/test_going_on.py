"""Resuming with other options, or where another run has been: nothing changes and nothing mixes unnoticed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.run import entries, options_with
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.parallel.gradients import GradBuffer
from mega.core.training import schedules
from mega.core.training.saves import place

RunCli = Callable[..., tuple[int, str]]

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --lr 1e-3 "
    "--lr-decay constant --eval-iters 0 --log-interval 1 --device cpu --save-interval 2"
).split()


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run the command line and give (exit code, all that it printed)."""
    monkeypatch.chdir(tmp_path)  # where metrics go that have no other place
    for variable in ("WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS", "MEGA_DEBUG"):
        monkeypatch.delenv(variable, raising=False)

    def run(*flags: str) -> tuple[int, str]:
        code = cli.main([*(RUN if "--save" in flags else RUN[: RUN.index("--save-interval")]), *flags])
        return code, "".join(capsys.readouterr())

    return run


def consumed(place: Path) -> dict[int, int]:
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["consumed"] for row in rows if "consumed" in row}


def test_another_history_is_not_mixed_in(tmp_path: Path, run_cli: RunCli) -> None:
    save = ["--save", str(tmp_path)]
    assert run_cli(*save, "--steps", "4")[0] == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for start, flags in ((0, []), (2, ["--resume", str(CheckpointStore(tmp_path).path(2))])):
        code, printed = run_cli(*save, "--steps", "6", "--seed", "7", *flags)
        assert code == 2
        assert (
            f"--save {tmp_path}: holds step 4, and this run starts at step {start}; to resume from step 4 give"
            in printed
        )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    code, printed = run_cli(*save, "--steps", "6", "--resume", "auto")
    assert code == 0 and "step 4" in printed


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "run.toml"])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path, run_cli: RunCli, name: str) -> None:
    save = ["--save", str(tmp_path), "--resume", "auto"]
    assert run_cli(*save, "--steps", "4")[0] == 0
    file = CheckpointStore(tmp_path).path(4) / name
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, printed = run_cli(*save, "--steps", "6")
    assert code == 0 and "step 4 is passed over" in printed and "at step 2" in printed
    assert [step for step in (4, 6) if CheckpointStore(tmp_path).open(step).verify() is None] == [4, 6]


def test_what_changes_the_numbers_is_reported(tmp_path: Path, run_cli: RunCli) -> None:
    save = ["--save", str(tmp_path), "--resume", "auto"]
    run_cli(*save, "--steps", "2", "--global-batch", "2")
    assert "not as in" not in run_cli(*save, "--steps", "4", "--global-batch", "2", "--zero", "1")[1]
    printed = run_cli(*save, "--steps", "8", "--global-batch", "4", "--seed", "7", "--hidden-dropout", "0")[1]
    assert (
        "not as in the checkpoint: --hidden-dropout 0.0 (was 0.1), --global-batch 4 (was 2), --seed 7 (was 1234)\n"
        in printed
    )


def test_data_that_would_end_before_the_run_are_reported_at_its_start(tmp_path: Path, run_cli: RunCli) -> None:
    save = ["--save", str(tmp_path), "--resume", "auto"]
    assert run_cli(*save, "--steps", "8", "--exit-interval", "4", "--global-batch", "4")[0] == 0
    code, printed = run_cli(*save, "--steps", "8", "--global-batch", "2")
    assert code == 2 and "step 5" not in printed
    assert (
        "--global-batch 2: the checkpoint has consumed 16 samples in 4 steps" in printed
        and "give --samples 24 instead of --steps" in printed
    )
    assert run_cli(*save, "--samples", "24", "--global-batch", "2")[0] == 0
    assert max(consumed(tmp_path).items()) == (8, 24)


def test_a_run_in_samples_ends_with_them_for_any_batches(tmp_path: Path, run_cli: RunCli) -> None:
    save = ["--save", str(tmp_path), "--resume", "auto", "--samples", "20"]
    assert run_cli(*save, "--exit-interval", "8", "--global-batch", "1")[0] == 0
    code, printed = run_cli(*save, "--global-batch", "4")
    assert code == 0 and "step 11/11 | samples 20" in printed
    assert "nothing is left to train: the run ends with step 11" in run_cli(*save, "--global-batch", "4")[1]


def test_a_schedule_of_another_style_is_reported_in_one_line(tmp_path: Path, run_cli: RunCli) -> None:
    run_cli("--save", str(tmp_path), "--steps", "2")
    code, printed = run_cli("--save", str(tmp_path), "--steps", "4", "--resume", "auto", "--lr-decay", "linear")
    assert code == 2 and printed.count("--use-checkpoint-schedule") == 1
    assert "--lr-decay linear: the checkpoint" in printed and "None" not in printed


def test_steps_after_the_end_of_the_decay_are_reported(tmp_path: Path, run_cli: RunCli) -> None:
    """Before the first of them; where none would change the weights, nothing is trained."""
    to_zero, above = (["--save", str(tmp_path / name), "--lr-decay", "linear"] for name in ("to-zero", "above"))
    code, printed = run_cli(*to_zero, "--steps", "4", "--lr-decay-steps", "2", "--exit-interval", "3")
    assert code == 0 and printed.index(
        "--lr-decay-steps 2: the learning rate has decayed by sample 2, so steps 3 to 4 train at 0 (--min-lr)\n"
    ) < printed.index("step 1/4")
    for more in (["--steps", "9", "--use-checkpoint-schedule"], ["--steps", "4", "--lr-decay-steps", "2"]):
        code, printed = run_cli(*to_zero, *more, "--resume", "auto")
        line = "the learning rate has decayed to 0 by sample 2, and the run is at sample 3, so no step would change"
        assert code == 2 and f"mega: {more[-1] if len(more) == 3 else '--lr-decay-steps 2'}: {line}" in printed
    assert run_cli(*above, "--steps", "2", "--min-lr", "1e-5")[0] == 0
    code, printed = run_cli(*above, "--steps", "3", "--resume", "auto", "--use-checkpoint-schedule")
    line = "--use-checkpoint-schedule: the learning rate has decayed by sample 2, so step 3 trains at 1e-05 (--min-lr)"
    assert code == 0 and printed.count(line) == 1
    assert run_cli(*above, "--steps", "3", "--resume", "auto", "--use-checkpoint-schedule")[1].count(line) == 0


def test_samples_for_less_than_a_step_are_refused(run_cli: RunCli) -> None:
    assert run_cli("--samples", "3", "--global-batch", "4") == (
        2,
        "mega: --samples 3: must be at least 4, the samples of the first step\n",
    )


def test_a_skipped_step_changes_nothing_by_when_it_is_noticed(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is not finite skips step 2, which is read at once, as the next rate depends on it."""
    finish = GradBuffer.finish

    def spoiled(grads: GradBuffer) -> None:
        finish(grads)
        nonlocal left
        left -= 1
        if left == 0:
            grads.buckets[0].own_grads[0] = math.inf

    monkeypatch.setattr(GradBuffer, "finish", spoiled)
    ways = {"straight": [["6"]], "saved": [["6", "--save-interval", "1"]], "resumed": [["2"], ["6"]]}
    found = {}
    for name, parts in ways.items():
        left = 2
        for steps, *more in parts:
            place = ["--save", str(tmp_path / name), "--save-interval", "6", "--resume", "auto", "--on-nan", "skip"]
            code, printed = run_cli(*place, "--lr-decay", "linear", "--lr-decay-steps", "6", "--steps", steps, *more)
            assert code == 0, printed
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [(row["step"], row["lr"], row["loss"], row["skipped"]) for row in rows if "lr" in row]
    assert found["straight"] == found["saved"] == found["resumed"]
    assert [skipped for *_, skipped in found["straight"]] == [0, 1, 1, 1, 1, 1]
    rates = [rate for _, rate, *_ in found["straight"]]
    assert rates[1] == rates[2] > rates[3], "the schedule has counted a skipped step"


def test_a_constant_loss_scale_is_the_runs(tmp_path: Path, run_cli: RunCli) -> None:
    """The one that a checkpoint holds would never move again."""
    save = ["--save", str(tmp_path), "--resume", "auto"]
    run_cli(*save, "--steps", "2", "--dtype", "fp16", "--initial-loss-scale", "4294967296")
    code, printed = run_cli(*save, "--steps", "6", "--dtype", "fp16", "--loss-scale", "64")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert code == 0 and "--loss-scale 64.0 (was None)" in printed
    assert [row["loss_scale"] for row in rows if row.get("step", 0) > 2 and "loss_scale" in row] == [64.0] * 4


def write(prefix: Path, seed: int) -> None:
    """Token files of 40 documents, whose lengths do not depend on the seed."""
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in range(20, 60):
            writer.add([generator.integers(0, 63, length).tolist()])


def test_other_tokens_under_the_same_prefix_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the note next to them is that of the old ones; a flag allows it, and a line says so."""
    words = ["--data-path", str(tmp_path / "corpus"), "--save", str(tmp_path / "run"), "--resume", "auto"]
    run = [*(word for word in RUN if word != "--mock-data"), *words]
    write(tmp_path / "corpus", 0)
    note = next(path for path in tmp_path.glob("corpus*") if path.suffix not in (".bin", ".idx"))
    before = note.read_bytes()
    assert cli.main([*run, "--steps", "2"]) == 0 and cli.main([*run, "--steps", "4"]) == 0
    capsys.readouterr()
    write(tmp_path / "corpus", 1)
    note.write_bytes(before)
    assert cli.main([*run, "--steps", "6"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'corpus'}: holds other tokens than when " in said and "give --allow-corpus-change" in said
    assert cli.main([*run, "--steps", "6", "--allow-corpus-change"]) == 0
    expected = f"not as in the checkpoint: {tmp_path / 'corpus'} holds other tokens than those"
    assert expected in capsys.readouterr().out


def test_a_step_is_validated_once(tmp_path: Path, run_cli: RunCli) -> None:
    """The run ends early where it has just been validated; the test set is for its end."""
    more = ["--eval-iters", "2", "--eval-interval", "3", "--exit-interval", "3"]
    for end in (3, 6):
        assert run_cli("--save", str(tmp_path), "--steps", "6", *more, "--resume", "auto")[0] == 0
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "valid_loss" in row] == list(range(3, end + 1, 3))
        assert any("test_loss" in row for row in rows) == (end == 6)


def test_a_finished_run_that_starts_again_adds_no_rows(tmp_path: Path, run_cli: RunCli) -> None:
    """What it measures again is in the file already; other results of the same step take the place of those."""
    run = ["--save", str(tmp_path), "--steps", "2", "--resume", "auto", "--eval-iters"]
    assert run_cli(*run, "2")[0] == 0
    before = (tmp_path / "metrics.jsonl").read_text()
    assert "valid at step 2" in run_cli(*run, "2")[1] and (tmp_path / "metrics.jsonl").read_text() == before
    assert run_cli(*run, "1")[0] == 0
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after != before and len(after.splitlines()) == len(before.splitlines())


def test_other_validations_read_what_there_is(tmp_path: Path, run_cli: RunCli) -> None:
    """The run before validated more often than this one has samples laid out for."""
    save = ["--save", str(tmp_path), "--resume", "auto", "--steps", "10", "--eval-iters", "2"]
    assert run_cli(*save, "--eval-interval", "1", "--exit-interval", "5")[0] == 0
    code, printed = run_cli(*save, "--eval-interval", "5")
    assert code == 0 and "valid at step 10" in printed


def test_a_place_is_one_runs_alone(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "LOCK_WAIT", 0.1)
    save = ["--save", str(tmp_path / "run"), "--steps", "2"]
    (tmp_path / "run").mkdir()
    with CheckpointStore(tmp_path / "run").locked():
        code, printed = run_cli(*save)
        assert code == 2 and f"--save {tmp_path / 'run'}: another process is writing there" in printed
    assert list((tmp_path / "run").iterdir()) == [] and run_cli(*save)[0] == 0
    with CheckpointStore(tmp_path / "run").locked():
        """The run gave it back."""


def test_a_lost_host_may_hold_the_place_for_a_while(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock ends with its lease at the server of files: a rank that was started again waits, and may try again."""
    monkeypatch.setattr(place, "LOCK_WAIT", 0.1)
    monkeypatch.setattr(place, "LEASE_WAIT", 0.5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    save = ["--save", str(tmp_path), "--steps", "2"]
    with CheckpointStore(tmp_path).locked():
        code, printed = run_cli(*save)
        assert code == 1 and "another process still writes there" in printed
    monkeypatch.setattr(place, "LEASE_WAIT", 60.0)
    with contextlib.ExitStack() as held:
        held.enter_context(CheckpointStore(tmp_path).locked())
        threading.Timer(0.5, held.pop_all().close).start()
        assert run_cli(*save)[0] == 0


@pytest.mark.parametrize("steps", [30, 70])
def test_data_that_are_assigned_again_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """40 documents of 1,580 tokens are 197 samples: 50 steps of 4 are more than one pass."""
    write(tmp_path / "corpus", 0)
    words = ["--data-path", str(tmp_path / "corpus"), "--split", "1", "--save", str(tmp_path / "run")]
    run = [*(word for word in RUN if word != "--mock-data"), *words, "--global-batch", "4", "--resume", "auto"]
    assert cli.main([*run, "--steps", "20", "--exit-interval", "2"]) == 0
    assert cli.main([*run, "--steps", str(steps), "--exit-interval", "4"]) == 0
    expected = f"not as in the checkpoint: --steps {steps} (was --steps 20): passes over the data are shuffled together"
    assert (expected in capsys.readouterr().out) == (steps == 70)
    assert cli.main([*run, "--steps", "20", "--exit-interval", "6"]) == 0
    expected = f"not as in the checkpoint: --steps 20 (was --steps {steps}): passes over the data are shuffled together"
    assert (expected in capsys.readouterr().out) == (steps == 70)


def test_cyclic_order_of_other_ranks_is_reported(tmp_path: Path, run_cli: RunCli) -> None:
    save = ["--save", str(tmp_path), "--resume", "auto", "--order", "cyclic", "--global-batch", "4"]
    run_cli(*save, "--steps", "2")
    printed = run_cli(*save, "--steps", "4", "--micro-batch", "2")[1]
    assert "1 data ranks of --micro-batch 2 (was 1 of 1): --order cyclic gives each" in printed


def test_options_that_count_along_with_the_checkpoints_model_are_reported(tmp_path: Path, run_cli: RunCli) -> None:
    run_cli("--save", str(tmp_path), "--steps", "2")
    more = ["--load", str(tmp_path), "--finetune", "--use-checkpoint-config", "--steps", "2", "--ffn", "16"]
    plain, dropped = (run_cli(*more, "--hidden-dropout", rate)[1] for rate in ("0.1", "0.9"))
    assert "--use-checkpoint-config: the checkpoint's model counts, and not --ffn 16\n" in dropped
    assert [line for line in plain.splitlines() if "loss" in line] != [
        line for line in dropped.splitlines() if "loss" in line
    ]


def test_a_file_that_holds_no_metrics_is_left_alone(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "notes").write_text("mine\n")
    code, printed = run_cli("--steps", "2", "--metrics", str(tmp_path / "notes"))
    assert code == 2 and f"--metrics {tmp_path / 'notes'}: holds something other than metrics" in printed
    assert (tmp_path / "notes").read_text() == "mine\n"
    (tmp_path / "notes").write_text('{"step": 1, "lo')  # cut by a kill
    assert run_cli("--steps", "2", "--metrics", str(tmp_path / "notes"))[0] == 0


def test_every_part_of_a_schedule_is_named_by_an_option_marked_so() -> None:
    """A flag in a message about the schedule is one that must match it, and every value of a schedule has a name."""
    flags = {entries()[name].flag for name in options_with(on_resume="schedule")}
    assert {label for label in schedules._LABELS.values() if label.startswith("--")} <= flags
    assert set(schedules._LABELS) == {
        f"{kind}.{field.name}"
        for kind, cls in (("lr", schedules.LearningRate), ("weight_decay", schedules.WeightDecay))
        for field in dataclasses.fields(cls)
    }


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_rerun_from_run_toml_leaves_the_first_run_alone(
    tmp_path: Path, run_cli: RunCli, earlier_version: bool
) -> None:
    code, printed = run_cli("--save", "first", "--steps", "4", "--exit-interval", "2")
    assert code == 0 and printed.endswith("\nstopped at step 2: a multiple of --exit-interval 2\n")
    stored = tmp_path / "first/step-0000002/run.toml"
    if earlier_version:  # these stored the path of the metrics as if it had been typed
        stored.write_text(stored.read_text().replace("[log]\n", '[log]\nmetrics = "first/metrics.jsonl"\n'))
    before = {path.name: path.read_bytes() for path in (tmp_path / "first").glob("metrics*")}
    assert cli.main(["pretrain", "--config", str(stored), "--save", "again"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "first").glob("metrics*")} == before
    assert max(consumed(tmp_path / "again")) == 4  # --exit-interval is not an option of the run


def test_the_metrics_of_another_run_are_not_overwritten(tmp_path: Path, run_cli: RunCli) -> None:
    assert run_cli("--save", "a", "--steps", "2", "--metrics", "rows")[0] == 0
    assert run_cli("--save", "b", "--steps", "2")[0] == 0
    for save, metrics, owner in (("b", "rows", "a"), ("a", "b/metrics.jsonl", "b"), ("c", "b/metrics.jsonl", "b")):
        before = (tmp_path / metrics).read_bytes()
        code, printed = run_cli("--save", save, "--steps", "4", "--resume", "auto", "--metrics", metrics)
        assert code == 2 and (tmp_path / metrics).read_bytes() == before
        line = f"mega: --metrics {metrics}: holds the metrics of the run that saves to {tmp_path / owner}; name another"
        assert printed == f"{line} file\n" and not (tmp_path / "c").exists()
    code, printed = run_cli("--steps", "4", "--metrics", "rows")  # without --save
    assert code == 2 and "holds the metrics of the run" in printed
    rows = (tmp_path / "rows").read_text()
    more = ("--steps", "4", "--metrics", "rows", "--override-schedule")
    assert run_cli("--load", "a", "--finetune", *more)[0] == 2 and (tmp_path / "rows").read_text() == rows
    assert run_cli("--load", "a", *more)[0] == 0 and (tmp_path / "rows").read_text().startswith(rows)  # continues a
    (tmp_path / "b/metrics.events.jsonl").unlink()  # as of a version that did not record the run
    assert run_cli("--save", "c", "--steps", "4", "--metrics", "b/metrics.jsonl")[0] == 2
    (tmp_path / "moved").mkdir()
    for name in ("a", "rows", "rows.events"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert run_cli("--save", "moved/a", "--steps", "4", "--resume", "auto", "--metrics", "moved/rows")[0] == 0
