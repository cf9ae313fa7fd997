"""GEMMs of cuBLASLt, with a stand-in for the library: what is described, what is run, and what is refused.

The stand-in knows the numbers of cublasLt.h. It sees tensors only by their addresses and layouts, which are those of
column-major matrices, and computes in plain torch. That cuBLASLt does so too is shown on a GPU (tests/gpu).
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega.core.ops import cublaslt, cublaslt_fp8, cublaslt_gelu
from mega.core.ops.operand import Operand
from tests.gpu import gemm_tiles

TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
TRANSPOSED_A, EPILOGUE, BIAS, AUX, AUX_STRIDE, SCALE_A, SCALE_B, MODE_A, MODE_B, FAST = (
    3,
    7,
    8,
    11,
    12,
    17,
    18,
    31,
    32,
    25,
)
GELU_AUX_BIAS, DGELU, VEC128 = 164, 192, 4
WORKSPACE = 48
CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def matrix(address: int, kind: int, rows: int, columns: int, stride: int) -> torch.Tensor:
    """The column-major matrix [rows, columns] at an address."""
    memory = (ctypes.c_char * (TYPES[kind].itemsize * stride * columns)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(TYPES[kind]).view(columns, stride)[:, :rows].t()


class Library:
    proposes = 2
    """Number of algorithms."""
    tiles: tuple[int, ...] = (209, 29, 201)
    """Their tiles."""
    fails = False

    def __init__(self) -> None:
        self.objects: list[Any] = [None]
        self.asked: list[int] = []
        """Number of algorithms that were asked for."""
        self.ran: list[tuple[int, ...]] = []
        """Size of the result of each GEMM."""
        self.algorithms: list[int] = []

    def create(self, to: Any, value: Any) -> int:
        to._obj.value = len(self.objects)
        self.objects.append(value)
        return 0

    def cublasLtCreate(self, to: Any) -> int:
        return self.create(to, "handle")

    def cublasLtMatmulDescCreate(self, to: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self.create(to, {})

    def cublasLtMatrixLayoutCreate(self, to: Any, kind: int, rows: Any, columns: Any, stride: Any) -> int:
        return self.create(to, (kind, rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, to: Any) -> int:
        return self.create(to, {})

    def set(self, of: Any, attribute: int, value: Any, size: Any) -> int:
        expected = 8 if attribute in (1, 8, 11, 12, 17, 18) else 1 if attribute == FAST else 4
        assert size.value == ctypes.sizeof(value._obj) == expected
        self.objects[of.value][attribute] = value._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = set

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        self.objects[preference.value] = None
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, of: Any, *rest: Any) -> int:
        *layouts, preference, most, proposals, proposed = rest
        description = self.objects[of.value]
        addresses = [description[key] for key in (BIAS, AUX, SCALE_A, SCALE_B) if key in description]
        assert self.objects[handle.value] == "handle" and len(layouts) == 4 and layouts[2] is layouts[3]
        assert self.objects[preference.value] == {1: 32 << 20} and set(addresses) <= {1 << 20}
        self.asked.append(most)
        proposed._obj.value = min(self.proposes, most)
        for number in range(proposed._obj.value):
            proposals[number].algorithm.data[0], proposals[number].workspace = 7 + number, WORKSPACE
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, to: Any, size: Any, _: Any) -> int:
        assert attribute == 1 and size.value == 4
        to._obj.value = self.tiles[algorithm._obj.data[0] - 7]
        return 0

    def cublasLtMatmul(self, handle: Any, of: Any, alpha: Any, *rest: Any) -> int:
        a_at, a_as, b_at, b_as, beta, c_at, _, to, to_as, algorithm, workspace, size, _ = rest
        if self.fails:
            return 13
        assert alpha._obj.value == 1 and size.value == WORKSPACE
        self.algorithms.append(algorithm._obj.data[0])
        ctypes.memset(workspace.value, 1, WORKSPACE)
        description, out_as = self.objects[of.value], self.objects[to_as.value]
        a, b = (matrix(at.value, *self.objects[layout.value]).float() for at, layout in ((a_at, a_as), (b_at, b_as)))
        for factor, scale, mode in ((a, SCALE_A, MODE_A), (b, SCALE_B, MODE_B)):
            if description.get(mode) == VEC128:
                k, columns = factor.shape
                scales = matrix(description[scale], 0, columns, k // 128, columns)
                factor *= scales.t().repeat_interleave(128, 0)
            elif scale in description:
                factor *= matrix(description[scale], 0, 1, 1, 1)
        product = (a.t() if description.get(TRANSPOSED_A) else a) @ b
        if beta._obj.value:
            product += beta._obj.value * matrix(c_at.value, *out_as)
        if EPILOGUE in description:
            product = self.last(description, product, out_as)
        matrix(to.value, *out_as).copy_(product)
        self.ran.append(tuple(product.shape))
        return 0

    def last(self, description: dict[int, int], product: torch.Tensor, out_as: tuple[int, ...]) -> torch.Tensor:
        kind, m, n, _ = out_as
        aux = matrix(description[AUX], kind, m, n, description[AUX_STRIDE])
        if description[EPILOGUE] == GELU_AUX_BIAS:
            product = product + matrix(description[BIAS], kind, m, 1, m).float()
            aux.copy_(product)
            return F.gelu(product, approximate="tanh")
        assert description[EPILOGUE] == DGELU
        return slope(aux.float(), product)


def slope(before: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    leaf = before.clone().requires_grad_()
    (grad_before,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad)
    return grad_before


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    plans = cublaslt_gelu._gemm_of, cublaslt_fp8._gemm_of
    caches = *plans, cublaslt._handle, cublaslt_gelu.trusted, cublaslt_fp8._trusted
    library = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt_fp8, "block_scaled_matmuls", lambda device: True)
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


def layer(rows: int) -> tuple[torch.Tensor, ...]:
    """x [rows, 16], weight [24, 16], bias, grad [rows, 16], weight [16, 24]"""
    torch.manual_seed(0)
    return tuple(torch.randn(shape).bfloat16() for shape in ((rows, 16), (24, 16), (24,), (rows, 16), (16, 24)))


def test_gelu_and_its_slope(library: Library) -> None:
    x, weight, bias, grad, next_weight = layer(rows=6)
    for _ in range(2):  # one plan each
        before, active = cublaslt_gelu.forward(x, weight, bias)  # type: ignore[misc]
        grad_before = cublaslt_gelu.slope_dgrad(grad, next_weight, before)
    exact = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(before, exact.bfloat16())
    torch.testing.assert_close(active, F.gelu(exact, approximate="tanh").bfloat16())
    torch.testing.assert_close(grad_before, slope(before.float(), grad.float() @ next_weight.float()).bfloat16())
    assert library.asked == [8, 8] and library.ran == [(24, 6)] * 4 and set(library.algorithms) == {7}


def test_a_shape_with_one_algorithm_is_computed_in_halves(library: Library) -> None:
    x, weight, bias, grad, next_weight = layer(rows=6)
    whole = cublaslt_gelu.forward(x, weight, bias)
    assert whole is not None
    whole += (cublaslt_gelu.slope_dgrad(grad, next_weight, whole[0]),)  # type: ignore[assignment]
    library.proposes = 1
    cublaslt_gelu._gemm_of.cache_clear()
    library.ran.clear()
    halves = cublaslt_gelu.forward(x, weight, bias)
    assert halves is not None
    halves += (cublaslt_gelu.slope_dgrad(grad, next_weight, halves[0]),)  # type: ignore[assignment]
    assert all(map(torch.equal, whole, halves)) and library.ran == [(24, 3)] * 4
    odd = layer(rows=5)
    library.ran.clear()
    assert cublaslt_gelu.forward(*odd[:3]) is not None and library.ran == [(24, 5)]


def aligned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns], from a multiple of 256 bytes"""
    size = rows * columns * dtype.itemsize
    memory = torch.zeros(size + 256, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:size].view(dtype).view(rows, columns)


def fp8_factors(dtype: torch.dtype, blocks: bool) -> tuple[list[Operand], list[torch.Tensor], torch.Tensor]:
    """Operands a [32, 256] and b [48, 256], what they stand for, and a tensor to add to."""
    torch.manual_seed(1)
    operands, exact = [], []
    for rows, kind in ((32, dtype), (48, E4M3)):
        narrow = aligned(rows, 256, kind).copy_(torch.randn(rows, 256))
        scales = torch.rand(2, rows) if blocks else torch.rand(())
        operands.append(Operand(narrow, scales.t() if blocks else scales))
        exact.append(narrow.float() * (scales.t().repeat_interleave(128, 1) if blocks else scales))
    return operands, exact, aligned(32, 48, torch.float32)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_writes_and_adds(library: Library, dtype: torch.dtype, blocks: bool) -> None:
    (a, b), (exact_a, exact_b), total = fp8_factors(dtype, blocks)
    plain = exact_a @ exact_b.t()
    assert cublaslt_fp8.accumulate(total.fill_(torch.nan), a, b, overwrite=True)
    torch.testing.assert_close(total, plain)
    start = torch.randn(32, 48)
    assert cublaslt_fp8.accumulate(total.copy_(start), a, b, overwrite=False)
    torch.testing.assert_close(total, start + plain)
    trial = [7] * 2 if blocks or dtype == E5M2 else [7] * 2 + [8]
    assert library.algorithms == [*trial, 7, 7] and library.asked == [1, *[8] * len(trial[2:]), 1]


@pytest.mark.parametrize("tiles, chosen", [((209, 29, 201), 8), ((209, 248, 201), 9), ((209, 248, 23), 7)])
def test_large_forward_gemms(
    library: Library, monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, ...], chosen: int
) -> None:
    """They take the first algorithm with a tile of less power; a small one is torch's."""
    (a, b), (exact_a, exact_b), _ = fp8_factors(E4M3, blocks=False)
    library.proposes, library.tiles = 3, tiles
    assert cublaslt_fp8.multiply(a, b, torch.bfloat16) is None and not library.ran
    monkeypatch.setattr(cublaslt_fp8, "LARGE", 32 * 48 * 256)
    out = cublaslt_fp8.multiply(a, b, torch.bfloat16)
    assert out is not None and library.algorithms[-1] == chosen and library.asked[-1] == 8
    torch.testing.assert_close(out, (exact_a @ exact_b.t()).bfloat16())
    odd = Operand(a.narrow[:, 16:], a.inverse)
    assert cublaslt_fp8.multiply(odd, b, torch.bfloat16) is None


def test_what_fp8_refuses(library: Library) -> None:
    (a, b), _, total = fp8_factors(E4M3, blocks=False)
    for wrong in (total[:, 1:], total.view(-1)[48:].view(31, 48), total.t(), aligned(32, 48, torch.float64)):
        assert not cublaslt_fp8.accumulate(wrong, a, b, overwrite=True)
    assert not library.ran


def test_the_trials(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    """They pass; without an algorithm, or if a call fails, they say so once."""
    with caplog.at_level(logging.WARNING):
        assert all(cublaslt_gelu.trusted(CPU, dtype) for dtype in (torch.bfloat16, torch.float16))
        assert cublaslt_fp8._trusted(CPU, E5M2, True) and not caplog.records
        library.fails = True
        assert not cublaslt_gelu.trusted.__wrapped__(CPU, torch.bfloat16)
        library.proposes = 0
        cublaslt_fp8._gemm_of.cache_clear()
        assert not cublaslt_fp8._trusted(CPU, E4M3, False)
    assert [record.message for record in caplog.records] == [
        "GELU and its slope take separate passes: cuBLASLt's GEMMs fail on this device (cuBLASLt returned status 13)",
        "GEMMs in fp8 are torch's, and wgrad is added separately: cuBLASLt's GEMMs fail on this device"
        " (cuBLASLt proposes no algorithm)",
    ]


def test_without_an_algorithm_the_caller_makes_a_pass(library: Library) -> None:
    library.proposes = 0
    x, weight, bias, grad, next_weight = layer(rows=6)
    assert cublaslt_gelu.forward(x, weight, bias) is None
    assert cublaslt_gelu.slope_dgrad(grad, next_weight, x.new_zeros(6, 24)) is None
    assert not library.ran


def test_tiles_by_turns(library: Library, tmp_path: Path) -> None:
    """The script that measures the algorithms of a GEMM runs each of them."""
    library.proposes = 3
    assert gemm_tiles.main(["--out", str(tmp_path / "rows.jsonl"), "--device", "cpu", "--small"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["dtype"] for row in rows] == ["fp8", "bf16"]
    assert all(row["tiles"] == [209, 29, 201] and row["same bits"] and min(row["microseconds"]) > 0 for row in rows)
    assert {7, 8, 9} == set(library.algorithms)
