"""A resume reports `not as in the checkpoint` if and only if an option changes the bits of the run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mega import cli
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.checkpoint.own.tables import show_differences
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, entries, updated
from mega.core.data.build import Datasets
from mega.core.parallel.mesh import Mesh
from mega.core.training.saves.resume import ResumePoint, differences
from mega.core.training.saves.rounding import device_change, rounding_changes

Resumed = Callable[[str], tuple[Path, list[str]]]

RUN = (
    "pretrain --layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab 500 --mock-data --micro-batch 2 "
    "--global-batch 8 --lr 1e-3 --lr-decay constant --eval-iters 0 --device cpu --resume auto"
).split()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "run"
    assert cli.main([*RUN, "--steps", "2", "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def resumed(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Resumed:
    """Continue a copy of `begun` with more flags; give its directory and the lines about differences."""

    def run(flags: str) -> tuple[Path, list[str]]:
        folder = tmp_path / ("run" + flags.replace(" ", ""))
        shutil.copytree(begun, folder)
        capsys.readouterr()
        assert cli.main([*RUN, "--steps", "4", "--save", str(folder), *flags.split()]) == 0
        return folder, [line for line in capsys.readouterr().out.splitlines() if line.startswith("not as in")]

    return run


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--micro-batch 1", "--micro-batch 1 (was 2); results differ by rounding"),
        ("--micro-batch 4", "--micro-batch 4 (was 2); results differ by rounding"),
        ("--no-load-optim", "--no-load-optim, so the optimizer's state begins afresh"),
        ("--recompute selective", None),
        ("--recompute full --recompute-method uniform --recompute-layers 1", None),
        ("--zero 1 --bucket-size 1000 --no-overlap-grad-reduce", None),
        ("--deterministic --optimizer-offload --data-workers 0", None),
        ("--on-nan skip --on-spike skip --audit-interval 1", None),
        ("--vocab-multiple 1", "--vocab-multiple 1 (was 128); results differ by rounding"),
        ("--vocab-multiple 256 --sequence-parallel --cp-comm ring", None),
        ("--loss-scale-window 3", None),
    ],
)
def test_bits_differ_exactly_if_it_is_reported(resumed: Resumed, flags: str, line: str | None) -> None:
    (plain, nothing), (changed, lines) = resumed(""), resumed(flags)
    assert nothing == []
    assert show_differences(plain, changed) == (line is not None)
    assert lines == ([] if line is None else [f"not as in the checkpoint: {line}"])


def run_with(**values: object) -> RunConfig:
    flags = {"vocab": 64, "layers": 4, "micro_batch": 1, "global_batch": 24, "device": "cpu", **values}
    world = math.prod(int(str(values.get(name, 1))) for name in ("tp", "cp", "dp", "pp"))
    flags.pop("dp", None)
    return resolve(compose("tiny-gpt", flags=flags), world)


@pytest.mark.parametrize(
    ("layout", "option", "reported"),
    [
        ({"dp": 2}, ("zero", 0, 1), False),
        ({"dp": 2}, ("zero", 1, 2), True),
        ({"dp": 2}, ("zero", 2, 3), False),
        ({"dp": 3}, ("zero", 0, 1), False),
        ({"dp": 3}, ("zero", 1, 2), True),
        ({"dp": 3}, ("zero", 2, 3), True),
        ({"dp": 1}, ("zero", 0, 3), False),
        ({"dp": 2}, ("bucket_size", 1000, 2000), False),
        ({"dp": 3}, ("bucket_size", 1000, 2000), True),
        ({"tp": 2}, ("sequence_parallel", False, True), True),
        ({"dp": 2}, ("sequence_parallel", False, True), False),
        ({"cp": 2}, ("cp_comm", "auto", "ring"), True),
        ({"cp": 2}, ("cp_comm", "auto", "all-to-all"), False),
        ({"dp": 2}, ("cp_comm", "auto", "ring"), False),
        ({"dp": 3, "pp": 2}, ("stage_layers", [], (1, 3)), True),
        ({"dp": 3, "pp": 2}, ("stage_layers", [], (2, 2)), False),
        ({"dp": 1, "pp": 2}, ("stage_layers", [], (1, 3)), False),
        ({"dp": 4, "ep": 4, "experts_chosen": 3}, ("expert_dispatch", "auto", "all-gather"), True),
        ({"dp": 4, "ep": 4, "experts_chosen": 3}, ("expert_dispatch", "auto", "all-to-all"), False),
        ({"dp": 4, "ep": 4, "experts_chosen": 2}, ("expert_dispatch", "auto", "all-gather"), False),
        ({"dp": 2, "ep": 2, "experts_chosen": 3}, ("expert_dispatch", "auto", "all-to-all"), True),
        ({"dp": 2, "ep": 2, "experts_chosen": 2}, ("expert_dispatch", "auto", "all-to-all"), False),
        ({"dp": 3, "pp": 2}, ("chunks", 1, 2), True),
        ({"dp": 1, "pp": 2}, ("chunks", 1, 2), False),
    ],
)
def test_what_rounds_over_several_ranks(
    layout: dict[str, int], option: tuple[str, object, object], reported: bool
) -> None:
    """On CPUs, each was tried: gathered weights of the continued run against those without the change."""
    name, before, value = option
    experts = {"experts": 8, "family": "llama"} if "ep" in layout else {}
    run = run_with(**layout, **experts, **{name: value})
    mesh = Mesh.at(0, **{axis: size for axis, size in layout.items() if axis != "experts_chosen"})
    lines = list(rounding_changes(run, {name: before}, mesh, gpu=False))
    assert len(lines) == reported
    if reported and not isinstance(value, bool | tuple):
        assert lines == [f"{entries()[name].flag} {value} (was {before})"]


def test_what_rounds_on_gpus() -> None:
    run, stored = run_with(deterministic=True, dp=3), {"deterministic": False, "zero": 1}
    assert list(rounding_changes(run, stored, Mesh.at(0, dp=3), gpu=None)) == []
    lines = ["--zero 0 (was 1)", "--deterministic (was --no-deterministic)"]
    assert list(rounding_changes(run, stored, Mesh.at(0, dp=3), gpu=True)) == lines


def test_another_kind_of_device_is_reported(begun: Path) -> None:
    source = CheckpointStore(begun).open(2)
    options = {"micro_batch": 2, "seq_length": 64}
    run = resolve(updated(Options(model=model_of(source.meta, "the checkpoint")), options), 1)
    point, mesh = ResumePoint(source, weights_only=False), Mesh.at(0)

    def said(gpu: bool | None) -> str:
        return " ".join(differences(run, point, Datasets(), mesh, gpu=gpu))

    assert "GPUs (was CPUs); results differ by rounding" in said(gpu=True)
    assert "GPUs" not in said(gpu=False) and "GPUs" not in said(gpu=None)
    assert device_change({"threads": None}, gpu=False) == "CPUs (was GPUs)"
    assert device_change({}, gpu=False) is None
