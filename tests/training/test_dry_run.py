"""A dry run compares with the checkpoint from which the run would start: it refuses and reports what the run does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.support.rank_output import printing_to

RunCli = Callable[..., tuple[int, list[str]]]

RUN = (
    "--layers 2 --hidden 8 --heads 2 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 4 "
    "--lr 1e-3 --lr-decay constant --eval-iters 0 --log-interval 1 --device cpu --steps 4"
).split()


@pytest.fixture
def run_cli(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RunCli:
    """Run the command line and give (exit code, the lines that it and its ranks printed)."""
    monkeypatch.chdir(tmp_path)
    for variable in ("WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS", "MEGA_DEBUG"):
        monkeypatch.delenv(variable, raising=False)

    def run(line: str) -> tuple[int, list[str]]:
        verb, *flags = line.split()
        words = [verb, *(RUN if verb == "pretrain" else RUN[6:]), *flags]
        capsys.readouterr()
        by_ranks = tmp_path_factory.mktemp("ranks") / "printed"
        with printing_to(by_ranks):
            code = cli.main(words)
        printed = "".join(capsys.readouterr()) + (by_ranks.read_text() if by_ranks.exists() else "")
        return code, printed.splitlines()

    return run


@pytest.fixture
def checkpoint(run_cli: RunCli) -> None:
    """A run of 4 steps in `r`, with saves at steps 2 and 4."""
    assert run_cli("pretrain --save r --save-interval 2")[0] == 0


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    "line",
    [
        "pretrain --save r --resume auto --lr 5e-4",
        "pretrain --save r --resume auto --hidden 16",
        "pretrain --save r --resume auto --optimizer sgd",
        "pretrain --save r --resume step-0000002 --steps 6",
        "pretrain --save r --steps 6",
        "pretrain --load r --lr 5e-4",
        "pretrain --load r --hidden 16",
        "pretrain --load r --finetune --hidden 16",
        "pretrain --load r --lora-rank 2",
        "pretrain --save r --resume auto --global-batch 2 --steps 12",
        "pretrain --save r --resume auto --lr-decay linear --lr-decay-steps 2 --steps 8 --override-schedule",
        "finetune --load r/step-0000002 --save r",
        "finetune --load r --save r --lr 5e-4",
    ],
)
def test_the_dry_run_refuses_what_the_run_refuses(tmp_path: Path, run_cli: RunCli, line: str) -> None:
    before = contents(tmp_path)
    planned, trained = run_cli(f"{line} --dry-run"), run_cli(line)
    refused = [each for each in trained[1] if each.startswith("mega: --") or "the checkpoint" in each]
    assert trained[0] == 2 and refused
    assert planned[0] == 2 and set(refused) <= set(planned[1])
    assert not any("everything checked" in each for each in planned[1])
    assert contents(tmp_path) == before


DIFFERENCES = "resuming from", "not as in", "weights from", "nothing is left", "step 4 is passed over", "--resume auto:"


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pretrain --save r --resume auto --steps 6 --seed 7", ["resuming from", "not as in"]),
        ("pretrain --save r --resume auto --steps 6 --nproc 2 --tp 2", ["resuming from", "not as in"]),
        ("pretrain --save r --resume auto", ["resuming from", "nothing is left"]),
        ("pretrain --save other --resume auto", ["--resume auto:"]),
        ("pretrain --load r --finetune --seed 7", ["weights from"]),
        ("finetune --load r --save tuned --lr 5e-4", ["weights from"]),
    ],
)
def test_the_dry_run_reports_what_the_run_reports(
    tmp_path: Path, run_cli: RunCli, line: str, expected: list[str]
) -> None:
    before = contents(tmp_path)
    planned = run_cli(f"{line} --dry-run")
    assert contents(tmp_path) == before
    trained = run_cli(line)
    assert planned[0] == trained[0] == 0
    lines = [[each for each in printed if each.startswith(DIFFERENCES)] for _, printed in (planned, trained)]
    assert lines[0] == lines[1]
    assert [next(start for start in DIFFERENCES if each.startswith(start)) for each in lines[0]] == expected


def test_the_dry_run_lays_out_no_samples(tmp_path: Path, run_cli: RunCli) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add([list(range(9))])
    before = contents(tmp_path)
    code, printed = run_cli("pretrain --no-mock-data --data-path tokens --split 1,0,0 --steps 99 --dry-run")
    assert code == 0 and any("396 samples of 8 take 18 epochs" in each for each in printed), printed
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("checkpoint")
def test_another_layout_is_compared_without_its_ranks(run_cli: RunCli) -> None:
    line = "pretrain --save r --resume auto --steps 6 --heads 2 --tp 2 --world 8"
    code, printed = run_cli(f"{line} --dry-run")
    assert code == 0 and "everything checked, nothing trained" in printed
    assert "not as in the checkpoint: --tp 2 x 4 data ranks (was 1 rank); results differ by rounding" in printed
    assert run_cli(f"{line} --lr 5e-4 --dry-run")[0] == 2


@pytest.mark.usefixtures("checkpoint")
def test_a_damaged_checkpoint_is_passed_over_in_the_plan(tmp_path: Path, run_cli: RunCli) -> None:
    weights = tmp_path / "r/step-0000004/rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, printed = run_cli("pretrain --save r --resume auto --dry-run")
    assert code == 0 and any(each.startswith("step 4 is passed over") for each in printed)
    assert f"resuming from {tmp_path}/r/step-0000002 at step 2" in printed


@pytest.mark.usefixtures("checkpoint")
def test_what_is_on_another_machine_is_not_compared(run_cli: RunCli) -> None:
    code, printed = run_cli("pretrain --load elsewhere --dry-run")
    assert code == 0 and "--load elsewhere: does not exist here, so the run is not compared with it" in printed


@pytest.mark.usefixtures("checkpoint")
def test_a_plan_without_length_and_rate_is_compared_by_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = [*RUN[: RUN.index("--lr")], "--device", "cpu"]
    line = ["pretrain", *sizes, "--save", "r", "--resume", "auto", "--dry-run"]
    with contextlib.chdir(tmp_path):
        capsys.readouterr()
        assert cli.main(line) == 0
        assert cli.main([*line, "--hidden", "16"]) == 2
    assert "--hidden 16: the checkpoint" in capsys.readouterr().err


def test_a_plan_of_adapters_says_that_training_needs_weights(run_cli: RunCli) -> None:
    code, printed = run_cli("pretrain --lora-rank 2 --dry-run")
    assert code == 0 and any("--lora-rank 2: training also needs --load" in each for each in printed), printed
