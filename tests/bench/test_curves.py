"""The curves that a calibration measures, and the estimate of a card that is described by them alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mega.core.bench import curves
from mega.core.bench.curves import Meter, Shapes
from mega.core.device import Device
from mega.core.estimate import fit
from mega.core.estimate.cost import GEMM_IN_STEP, AttentionWork, Card, ElementwiseWork, Gemm
from mega.core.estimate.curves import KERNELS, NUMBERS
from mega.core.estimate.hardware import hardware
from mega.core.estimate.operation_log import OperationLog
from mega.core.estimate.trace import Live
from mega.core.ops.observe import observing
from mega.core.ops.suite import choose

TINY = Shapes(
    matmuls=((16, 8, 24), (32, 16, 16)),
    attention=((1, 2, 16, 8), (2, 2, 32, 8)),
    elementwise=(1 << 8, 1 << 12),
    full_width=8,
    kernels=KERNELS[:2],
)


def test_every_curve_has_points_of_its_length() -> None:
    device = Device.choose("cpu")
    meter = Meter(device, choose(device.torch, torch.float32), torch.float32, seconds=1e-4)
    found = curves.collected(curves.points(meter, TINY))
    assert list(found) == [
        "elementwise",
        *(f"matmul {layout}" for layout in ("forward", "dgrad", "wgrad")),
        *(f"attention {kernel}" for kernel in KERNELS[:2]),
    ]
    for name, points in found.items():
        assert len(points) == 2 and all(len(point) == NUMBERS[name] and min(point) > 0 for point in points)
    assert [point[:3] for point in found["matmul dgrad"]] == [(16, 8, 24), (32, 16, 16)]
    assert [point[:3] for point in found["attention cudnn full"]] == [(2, 16, 8), (4, 32, 8)]
    assert [point[0] for point in found["elementwise"]] == [3 << 8, 3 << 12]


def test_a_cards_own_curves_replace_those_of_an_h100(tmp_path: Path) -> None:
    """Times of measured sizes are the measured times; curves that the file lacks are scaled from an H100."""
    points = {
        "matmul forward": [(64, 64, 64, 500.0), (1024, 64, 64, 4000.0)],
        "attention cudnn causal": [(4, 64, 16, 300.0, 900.0)],
        "elementwise": [(1024, 10.0), (65536, 100.0)],
    }
    path = tmp_path / "mine.toml"
    path.write_text(fit.as_toml({"launch": 1e-6, "bandwidth": 1.0}, {"bf16": 1.0}, "mine", points))
    mine = hardware(str(path))
    card, bare = Card(mine), Card(replace(mine, curves=None))
    assert card.seconds(Gemm(64, 64, 64, "forward", "bf16", 1)) == pytest.approx(500e-6 / GEMM_IN_STEP, rel=0.02)
    double = card.seconds(Gemm(64, 64, 64, "forward", "fp32", 1))
    assert double < card.seconds(Gemm(64, 64, 64, "forward", "bf16", 1)), "the base has 19.5 TFLOP/s in fp32"
    for backward, measured in ((False, 300e-6), (True, 900e-6)):
        work = AttentionWork("cudnn causal", backward, 4, 64, 64, 16, 0.5)
        assert card.seconds(work) == pytest.approx(measured / 0.912, rel=0.02)
    assert card.seconds(ElementwiseWork("add", 65536)) == pytest.approx(100e-6, rel=0.02)
    assert card.seconds(ElementwiseWork("add", 8)) == pytest.approx(10e-6), "no pass is shorter than the shortest"
    for work in (Gemm(64, 64, 64, "wgrad", "bf16", 1), AttentionWork("ours full", False, 4, 64, 64, 16, 1.0)):
        assert card.seconds(work) == bare.seconds(work)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("curves = 3", "curves must be a table of lists of points, by curve"),
        ("[curves]\nmatmul = [[1, 2, 3, 4]]", "unknown curve matmul; valid: matmul forward, matmul dgrad"),
        ('[curves]\n"matmul dgrad" = [[1, 2, 3]]', "curve matmul dgrad must be a list of points of 4 positive numbers"),
        ("[curves]\nelementwise = [[1, 0]]", "curve elementwise must be a list of points of 2 positive numbers"),
        ("[curves]\nelementwise = []", "curve elementwise must be a list of points of 2 positive numbers"),
        ("[curves]\nelementwise = [[1, nan]]", "curve elementwise must be a list of points of 2 positive numbers"),
    ],
)
def test_curves_that_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        hardware(str(path))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gpu_measures_the_kernels_that_are_named(kernel: str) -> None:
    """On the meta device, where a GPU's ops only report what they would run."""
    ops, log = choose(torch.device("cuda"), torch.bfloat16, shapes=True), OperationLog()
    q, k, v = (torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with Live(None, log), observing(log):
        ops.attention(q, k, v, curves.mask_of(kernel, 2, 64, torch.device("meta")))
    assert [one.kernel for one in log.take() if isinstance(one, AttentionWork)] == [kernel]
