"""Launches of what Triton compiled before: taken for arguments of the same kinds, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.ops import norm
from mega.core.ops.kernels import language
from tests.support.triton import DEVICE, needs_kernels


class Compiled:
    packed_metadata = ()

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    arg_names = ("x_at", "bias_at", "rows", "scale", "BLOCK", "KIND")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return run


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_compiled", {})


def test_a_second_launch_takes_what_was_compiled() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    for rows, scale in ((2, 0.5), (3, 0.25)):
        language.launch(kernel, (rows,), x, None, rows, scale, KIND=1, BLOCK=8, num_warps=4)
    (compiled,) = kernel.made
    assert compiled.launches == [((3, 1, 1), (x, None, 3, 0.25, 8, 1))]


@pytest.mark.parametrize("kind", ["bias", "dtype", "odd", "one", "sixteen", "constant", "warps", "large", "kernel"])
def test_other_kinds_are_compiled_anew(kind: str) -> None:
    kernel, x, bias, rows = Kernel(), torch.zeros(64), None, 2
    options = {"KIND": 1, "BLOCK": 8, "num_warps": 4}
    language.launch(kernel, (1,), x, bias, rows, 0.5, **options)
    first, made = kernel, kernel.made
    given = {
        "bias": (kernel, x, x, rows, options),
        "dtype": (kernel, x.half(), bias, rows, options),
        "odd": (kernel, x[1:], bias, rows, options),
        "one": (kernel, x, bias, 1, options),
        "sixteen": (kernel, x, bias, 32, options),
        "constant": (kernel, x, bias, rows, {**options, "KIND": 2}),
        "warps": (kernel, x, bias, rows, {**options, "num_warps": 8}),
        "large": (kernel, x, bias, 1 << 40, options),
        "kernel": (Kernel(), x, bias, rows, options),
    }[kind]
    language.launch(given[0], (1,), given[1], given[2], given[3], 0.5, **given[4])
    assert len(made) == (2 if given[0] is first else 1) and not made[0].launches


@needs_kernels
def test_rows_that_lie_anywhere_are_normed_alike() -> None:
    from mega.core.ops.kernels import norm as kernels

    memory = torch.randn(17 * 48 + 3, device=DEVICE)
    weight = torch.rand(48, device=DEVICE)
    with torch.no_grad():
        for rows in (1, 2, 16, 17):
            for offset in (0, 1, 0, 3):
                x = memory[offset : offset + rows * 48].view(rows, 48)
                for found, expected in zip(
                    kernels.add_norm(x, x, None, None, weight, None, 1e-5),
                    norm.add_norm(x, x, None, None, weight, None, 1e-5),
                    strict=True,
                ):
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
