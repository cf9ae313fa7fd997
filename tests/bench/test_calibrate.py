"""A machine measured on two ranks becomes a file that the estimator reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mega import cli
from mega.core.bench import calibrate
from mega.core.bench.curves import Meter, Shapes
from mega.core.estimate.cost import GEMM_IN_STEP, Card, Gemm
from mega.core.estimate.hardware import hardware


def test_a_file_that_the_estimator_reads(pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    (found, peaks, points, host), (other, *_) = pool.run(_measured, world=2)
    assert found["product"] == other["product"], "all ranks report the slowest"
    assert 0 < host < 1e7 and found["launch"] >= 1e-3
    assert found["node"] == 2 and found["inside"] > 0 and found["peer"] > 0
    path = tmp_path / "mine.toml"
    path.write_text(calibrate.as_toml(found, peaks, "two ranks", points))
    mine = hardware(str(path))
    assert mine.curves is not None and len(mine.curves.points) == 5
    m, k, n, time = points["matmul wgrad"][0]
    seconds = Card(replace(mine, launch=0.0)).seconds(Gemm(int(m), int(k), int(n), "wgrad", "fp32", 1))
    assert seconds == pytest.approx(1e-6 * time / GEMM_IN_STEP, rel=0.2)
    assert mine.name == "mine" and mine.node == 2
    assert mine.product == pytest.approx(found["product"], rel=1e-3)
    assert mine.host <= mine.launch, "ranks on CPUs are their own hosts"
    assert 0 < mine.product <= 1 and peaks["fp64"] == peaks["fp32"] / 2
    words = ["--model", "tiny-gpt", "--vocab", "100", "--micro-batch", "1", "--world", "2", "--gpu", str(path)]
    assert cli.main(["memory-estimate", *words]) == 0
    assert "mine:" in capsys.readouterr().out


def _measured(groups, rank: int):  # type: ignore[no-untyped-def]
    from mega.core.device import Device
    from mega.core.processes.world import World

    world = World(rank=rank, size=2, local_rank=rank, local_size=2, source="torchrun")
    machine = calibrate.Machine(world, Device.choose("cpu"), groups, repeats=1)
    machine.extent = calibrate.Extent(
        dtype="fp32",
        shapes=Shapes(
            matmuls=((32, 32, 32), (64, 64, 64), (128, 64, 32)),
            attention=((1, 2, 32, 16),),
            elementwise=(1 << 10, 1 << 14),
            full_width=0,
            kernels=("cudnn causal",),
        ),
        sizes=(1 << 12, 1 << 16),
        elements=(64, 64),
        blocks=(1, 2),
    )
    machine.meter = Meter(machine.device, machine.ops, machine.dtype, machine._slowest, seconds=1e-3)
    points = machine.curves()
    return *machine.measured(points), points, machine.host()


def test_the_file_must_be_toml_and_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("memory = 80.0")
    assert cli.main(["bench", "--calibrate", str(mine)]) == 2
    assert f"--calibrate {mine}: exists; name another file, or give --overwrite" in capsys.readouterr().err
    assert mine.read_text() == "memory = 80.0"
    assert cli.main(["bench", "w1", "--overwrite"]) == 2
    assert "--overwrite: is of --calibrate, which is not given" in capsys.readouterr().err
    assert cli.main(["bench", "--calibrate", "mine.txt"]) == 2
    assert "--calibrate mine.txt: must end in .toml" in capsys.readouterr().err
