"""Every kernel against float64: within twice the error of the plain torch op in the same dtype.

On a CUDA device as they are; without one where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from mega.core.architecture.layer import Rope
from mega.core.device import block_scaled_matmuls
from mega.core.ops import activation, cross_entropy, fp8, fp8_blocks, fp8_weights, heads, matmuls, norm, rows, suite
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import Dropout
from mega.core.ops.rotary import rotary_table
from mega.core.optim.adam import AdamW
from mega.core.optim.rule import StepArgs
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
DTYPE = torch.bfloat16 if CUDA else torch.float16  # the interpreter truncates to bf16
TOKENS = 300 if CUDA else 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype or DTYPE)


def some_dropout(tokens: int) -> Dropout:
    keys = token_keys(3, torch.arange(1, device=DEVICE), torch.arange(tokens, device=DEVICE)).flatten()
    return Dropout(keys, site_key(1, "x"), 0.3)


def kernels() -> dict[str, Any]:
    from mega.core.ops import kernels

    return kernels.table()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def compare(
    fast: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[torch.Tensor | None], slack: float = 2.0
) -> None:
    """Outputs and gradients of `fast`, within `slack` times the error of `plain`, both against `plain` in float64."""
    results = []
    upstream: list[torch.Tensor] = []
    for function, dtype in ((plain, torch.float64), (plain, None), (fast, None)):
        leaves = [None if x is None else x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs]
        # Ops may overwrite what they are given: they get a copy, never the leaf.
        outs = function(*(None if leaf is None else leaf * 1 for leaf in leaves))
        outs = outs if isinstance(outs, tuple) else (outs,)
        if not upstream:
            upstream = [torch.randn_like(out).to(DTYPE) for out in outs]
        torch.autograd.backward(outs, [grad.to(out.dtype) for grad, out in zip(upstream, outs, strict=True)])
        grads = [leaf.grad for leaf in leaves if leaf is not None]
        assert all(grad is not None for grad in grads)
        results.append([*(out.detach() for out in outs), *grads])
    exact, simple, ours = results
    for number, (truth, a, b) in enumerate(zip(exact, simple, ours, strict=True)):
        assert b.shape == truth.shape
        bound = slack * error(a, truth) + 1e-7
        assert error(b, truth) <= bound, f"output {number}: {error(b, truth):.3g} against {error(a, truth):.3g}"


@pytest.mark.parametrize("width", [96, 1024])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "branch, branch_bias, dropped",
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True), (True, True, True)],
)
def test_add_norm(width: int, centred: bool, branch: bool, branch_bias: bool, dropped: bool) -> None:
    drop = some_dropout(TOKENS) if dropped else None
    inputs = [
        random(TOKENS, width),
        random(TOKENS, width) if branch else None,
        random(width) if branch_bias else None,
        1 + 0.1 * random(width),
        random(width) if centred else None,
    ]
    fast = kernels()["add_norm"]

    def run(op: Callable[..., Any]) -> Callable[..., Any]:
        form = norm.NormForm(offset=width == 96, rounds_last=True)
        return lambda *given: op(*given[:3], drop, *given[3:], 1e-5, form)

    compare(run(fast), run(norm.add_norm), inputs)


@pytest.mark.parametrize("parts, width", [(1, 7), (130, 48), (5, 100)])
def test_deliver_sums(parts: int, width: int) -> None:
    from mega.core.ops.kernels.sums import deliver_sums
    from mega.core.parallel.weight import Weight

    tables = random(3, parts, width, dtype=torch.float32)
    kept, frozen, loose = (Weight(random(width), ()) for _ in range(3))
    frozen.requires_grad_(False)
    ready: list[Weight] = []
    for weight in (kept, frozen):
        weight.main_grad, weight.on_grad_ready = random(width, dtype=torch.float32), ready.append
    before = [weight.main_grad.double() for weight in (kept, frozen) if weight.main_grad is not None]
    assert deliver_sums((frozen, None, kept), tables) == [None] * 3
    assert [weight is kept for weight in ready] == [True]
    assert kept.main_grad is not None and frozen.main_grad is not None
    torch.testing.assert_close(
        kept.main_grad.double(), before[0] + tables[2].double().sum(0), rtol=0, atol=1e-5 * parts
    )
    assert torch.equal(frozen.main_grad.double(), before[1])
    (found,) = deliver_sums((loose,), tables)
    assert found is not None
    torch.testing.assert_close(found, tables[0].sum(0).to(loose.dtype))


@pytest.mark.parametrize("rows, width, stride", [(1, 7, 7), (256, 128, 128), (600, 300, 320), (257, 40, 1000)])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_column_sums(rows: int, width: int, stride: int, dtype: torch.dtype) -> None:
    from mega.core.ops.kernels.sums import column_sums, deliver_sums
    from mega.core.parallel.weight import Weight

    whole = random(rows, stride, dtype=dtype)
    whole[:, width:] = math.nan  # not read
    x = whole[:, :width]
    sums, exact = column_sums(x), x.double().sum(0)
    assert sums.dtype == torch.float32 and sums.shape == (1, -(-rows // 256), width)
    torch.testing.assert_close(sums[0].double().sum(0), exact, rtol=0, atol=2e-6 * rows)
    turned = x.t().contiguous().t()
    assert torch.equal(column_sums(x), sums) and torch.equal(column_sums(turned), column_sums(x.contiguous()))
    assert column_sums(x.to("meta")).shape == sums.shape
    weight = Weight(random(width), ())
    weight.main_grad = torch.zeros(width, device=DEVICE)
    assert deliver_sums((weight,), sums) == [None]
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=0, atol=2e-6 * rows)


@pytest.mark.parametrize("width", [96, 1030])
@pytest.mark.parametrize("residual, bias", [(False, False), (True, False), (True, True)])
def test_added(width: int, residual: bool, bias: bool) -> None:
    drop, fast = some_dropout(TOKENS), kernels()["added"]
    inputs = [random(TOKENS, width) if residual else None, random(TOKENS, width), random(width) if bias else None]
    compare(lambda *given: fast(*given, drop), lambda x, branch, own: norm.added(x, branch, own, drop), inputs)
    ones = torch.ones(TOKENS, width, device=DEVICE, dtype=DTYPE)
    assert torch.equal(fast(None, ones, None, drop) == 0, norm.added(None, ones, None, drop) == 0)


@pytest.mark.parametrize(
    "kind", ["gelu_tanh", "gelu", "relu", "relu2", "silu", "swiglu", "geglu_tanh", "geglu", "reglu2"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_activate(kind: str, bias: bool, width: int = 600 if CUDA else 200) -> None:
    inputs = [random(TOKENS, width), random(width) if bias else None]
    fast = kernels()["activate"]
    compare(lambda *a: fast(*a, kind), partial(activation.activate, kind=kind), inputs)


@pytest.mark.skipif(not CUDA, reason="131,078 programs, one after the other")
def test_more_tokens_than_a_second_dimension_of_a_grid_holds() -> None:
    """65,536 of them: 16 sequences of 4,096."""
    fast = kernels()["activate"]
    compare(lambda x: fast(x, None, "swiglu"), lambda x: activation.activate(x, None, "swiglu"), [random(65_539, 32)])


@pytest.mark.parametrize(
    "heads_, kv_heads, width, turned",
    [(4, 4, 64, 0), (4, 2, 64, 64), (2, 2, 96, 96), (2, 1, 96, 24), (24, 8, 32, 32), (6, 2, 32, 32)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_split_heads(
    heads_: int, kv_heads: int, width: int, turned: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mega.core.ops.kernels import heads as fast_heads

    monkeypatch.setattr(fast_heads, "PROGRAMS", 1)  # many heads a program, as with many tokens
    tokens = TOKENS + 32  # more than one program's
    positions = torch.arange(tokens, device=DEVICE)
    fast = kernels()["split_heads"]

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        def one(fused: torch.Tensor, bias: torch.Tensor | None) -> Any:
            rotary = rotary_table(positions, Rope(base=10000.0, width=turned), fused.dtype) if turned else None
            return function(fused, bias, heads_, kv_heads, rotary)

        return one

    columns = (heads_ + 2 * kv_heads) * width
    bias_ = random(columns) if bias else None
    compare(run(fast), run(heads.split_heads), [random(tokens, columns), bias_])


@pytest.mark.parametrize("heads_, kv_heads", [(4, 4), (6, 2), (2, 1)])
@pytest.mark.parametrize("turned", [0, 32])
def test_adjacent_gradients_of_heads_are_not_copied(heads_: int, kv_heads: int, turned: int) -> None:
    """They are the projection's gradient, unless they have to be rotated. All others are copied, to the same bits."""
    tokens, width, parts = TOKENS + 32, 32, [heads_, kv_heads, kv_heads]
    columns = sum(parts) * width
    rope = Rope(base=10000.0, width=turned)
    rotary = rotary_table(torch.arange(tokens, device=DEVICE), rope, DTYPE) if turned else None
    fused, bias, wide = random(tokens, columns), random(columns).requires_grad_(), random(tokens, columns + width)
    buffer = wide[:, :columns].contiguous()
    q, k, v = buffer.unflatten(1, (-1, width)).split(parts, 1)
    q_, v_, k_ = torch.cat([q, v, k], 1).split(parts, 1)
    of_others = buffer.clone().unflatten(1, (-1, width)).split(parts, 1)
    q_wide, k_wide, v_wide, _ = wide.unflatten(1, (-1, width)).split([*parts, 1], 1)

    def gradients(*grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = fused.clone().requires_grad_() * 1  # rotated in place
        outs = kernels()["split_heads"](x, bias, heads_, kv_heads, rotary)
        return torch.autograd.grad(outs, (x, bias), grads)

    found, of_bias = gradients(q, k, v)
    assert (found.data_ptr() == buffer.data_ptr()) is (not turned)
    assert torch.equal(buffer, wide[:, :columns]), "somebody else may read the gradients of the heads"
    copies = q.clone(), k.clone(), v.clone()
    for grads in (copies, (q, of_others[1], v), (q, k, of_others[2]), (q_, k_, v_), (q_wide, k_wide, v_wide)):
        copied, same = gradients(*grads)
        assert torch.equal(copied, found) and copied.data_ptr() != grads[0].data_ptr()
        torch.testing.assert_close(same, of_bias)


@pytest.mark.parametrize("real", [5000, 4999, 17])
def test_cross_entropy(real: int, width: int = 5000) -> None:
    table = kernels()
    x = 3 * random(TOKENS, width)
    labels = torch.randint(-5, real + 5, (TOKENS,), device=DEVICE)  # some are another rank's
    scale = torch.rand(TOKENS, device=DEVICE)
    exact = cross_entropy.softmax_parts(x.double(), labels, real)
    for ours, truth in zip(table["softmax_parts"](x, labels, real), exact, strict=True):
        assert error(ours, truth) < 1e-5
    log_total = exact[1].log() + exact[0]
    truth = cross_entropy.softmax_gradient(x.double(), labels, log_total, scale.double(), real)
    plain = cross_entropy.softmax_gradient(x, labels, log_total.float(), scale, real)
    ours = table["softmax_gradient"](x.clone(), labels, log_total.float(), scale, real)
    assert error(ours, truth) <= 2 * error(plain, truth)
    assert not ours[:, real:].any()


@pytest.mark.parametrize(("real", "width"), [(5000, 5000), (17, 5000), (19_999, 20_000), (8000, 20_000), (4096, 4096)])
@pytest.mark.parametrize("leap", [0.0, 200.0])
def test_cross_entropy_in_one(real: int, width: int, leap: float) -> None:
    """Both halves in one pass. leap: the last column is so much larger than all before it."""
    table, x = kernels(), 3 * random(TOKENS, width)
    x[:, real - 1] += leap
    x[1, :real] -= 200.0
    labels = torch.randint(-5, real + 5, (TOKENS,), device=DEVICE)
    scale = torch.rand(TOKENS, device=DEVICE)
    truth = cross_entropy.nll_and_gradient(x.double(), labels, scale.double(), real)
    plain = cross_entropy.nll_and_gradient(x.clone(), labels, scale, real)
    overwritten = x.clone()
    ours = table["nll_and_gradient"](overwritten, labels, scale, real)
    assert ours[1].data_ptr() == overwritten.data_ptr() and not ours[1][:, real:].any()
    assert error(ours[0], truth[0]) < 1e-5
    assert error(ours[1], truth[1]) <= 2 * error(plain[1], truth[1])


@pytest.mark.parametrize("column", [0, 4999])
def test_a_loss_of_what_is_not_finite_is_not(column: int) -> None:
    x = 3 * random(3, 5000)
    x[0, column], x[1, column] = math.nan, math.inf
    nll, grad = kernels()["nll_and_gradient"](
        x, torch.tensor([7, 7, 7], device=DEVICE), torch.ones(3, device=DEVICE), 5000
    )
    assert nll.isnan().tolist() == grad[:, 1].isnan().tolist() == [True, True, False]


def test_a_rank_that_holds_only_padding_adds_nothing() -> None:
    x, labels = random(4, 64), torch.tensor([-1, 3, 70, 0], device=DEVICE)
    for table in (kernels(), vars(suite.REFERENCE)):
        largest, total, target = table["softmax_parts"](x, labels, 0)
        assert not target.any() and not (total * (largest - 1.0).exp()).any()


@pytest.mark.parametrize("finite", [1.0, 0.0])
def test_adamw(finite: float, size: int = 5000, border: int = 3008) -> None:
    step, factor = 3, 0.25
    rule = AdamW(0.9, 0.999, 1e-8)
    master, grad = random(size, dtype=torch.float32), random(size, dtype=torch.float32)
    first, second = random(size, dtype=torch.float32), random(size, dtype=torch.float32).square()
    weights = master.to(DTYPE)
    exact = [t.double().clone() for t in (master, grad * factor, first, second)]
    for part, decay in ((slice(0, border), 0.1), (slice(border, size), 0.0)):
        rule.reference(*(t[part] for t in exact), args=StepArgs(step, 1e-2, decay))
    scalars = torch.tensor([finite, factor, 1 - 0.9**step, 1 - 0.999**step], device=DEVICE)
    before = weights.clone()
    kernels()["adamw"](
        master, grad, first, second, weights, scalars,
        decay_end=border, lr=1e-2, decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8,
    )  # fmt: skip
    if not finite:
        assert torch.equal(weights, before)
        return
    for ours, truth in zip((master, first, second), (exact[0], exact[2], exact[3]), strict=True):
        assert error(ours, truth) < 1e-6
    assert torch.equal(weights, master.to(DTYPE))


def test_adamw_without_masters() -> None:
    """The pass begins and ends with 16-bit weights, computes in fp32 between, and rounds once."""
    weights, grad = random(5000), random(5000)
    first, second = random(5000, dtype=torch.float32), random(5000, dtype=torch.float32).square()
    exact = [t.double().clone() for t in (weights, grad, first, second)]
    AdamW(0.9, 0.999, 1e-8).reference(*exact, args=StepArgs(3, 1e-2, 0.1))
    scalars = torch.tensor([1.0, 1.0, 1 - 0.9**3, 1 - 0.999**3], device=DEVICE)
    kernels()["adamw"](
        weights, grad, first, second, None, scalars,
        decay_end=5000, lr=1e-2, decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8,
    )  # fmt: skip
    assert error(first, exact[2]) < 1e-6
    assert float((weights.double() - exact[0]).abs().max() / exact[0].abs().max()) < 2**-8


@pytest.mark.parametrize("shape", [(2, 5, 7), (4, 2048 if CUDA else 3, 6144), (8, 4097)])
def test_total(shape: tuple[int, ...]) -> None:
    blocks = random(*shape)
    exact = blocks.double().sum(0)
    torch.testing.assert_close(kernels()["total"](blocks), exact.to(DTYPE), rtol=2**-8, atol=1e-5)


def test_accumulate() -> None:
    main, x = random(3, 1700, dtype=torch.float32), random(3, 1700)
    exact = main + x.float()
    kernels()["accumulate"](main, x)
    assert torch.equal(main, exact)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("width, k", [(40, 1), (1100, 2), (64, 8)])
def test_sum_rows(width: int, k: int, whole: bool) -> None:
    given, draw = random(TOKENS * k, width), torch.Generator().manual_seed(1)
    numbers = torch.randperm(TOKENS * k, generator=draw).view(TOKENS, k).to(DEVICE)
    if not whole:
        numbers[0] = len(given)
    plain = rows.sum_rows(given, numbers, whole)
    assert torch.equal(kernels()["sum_rows"](given, numbers, whole), plain)
    flat = kernels()["sum_rows"](given[:, 0].contiguous(), numbers, whole)
    assert torch.equal(flat, plain[:, 0])


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("size", [1, 2, 700])
def test_add_rows(size: int, drawn: bool) -> None:
    """Of rows with random numbers, and of runs of equal numbers that end within a program's rows and at their end."""
    table, given = random(size, 550, dtype=torch.float32), random(TOKENS + 64, 550)
    numbers = torch.arange(len(given), device=DEVICE) // 16 % size
    if drawn:
        numbers = torch.randint(size, (len(given),), device=DEVICE)
    exact = table.double().index_add_(0, numbers, given.double())
    kernels()["add_rows"](table, numbers, given)
    assert error(table, exact) < 1e-6


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh", "reglu2", "relu2"])
def test_activate_weighted(kind: str) -> None:
    inputs = [random(TOKENS, 2 * 1100), random(TOKENS)]
    fast, plain = kernels()["activate_weighted"], activation.activate_weighted
    compare(lambda x, weights: fast(x, weights, kind), lambda x, weights: plain(x, weights, kind), inputs)
    with torch.no_grad():
        assert torch.equal(fast(*inputs, kind), fast(*(x.requires_grad_() for x in inputs), kind).detach())


@pytest.mark.skipif(not CUDA, reason="cuBLAS only")
def test_wide_products() -> None:
    main_grad, grad, x = random(256, 128, dtype=torch.float32), random(512, 256), random(512, 128)
    exact = main_grad.double() + grad.double().t() @ x.double()
    matmuls.WideMatmuls().accumulate_wgrad(main_grad, grad, x)
    assert error(main_grad, exact) < 1e-6


@pytest.mark.parametrize("dtype", list(fp8.LIMITS))
@pytest.mark.parametrize("shape", [(TOKENS, 200), (16, 16), (1, 4500)])
def test_fp8_cast(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The same bytes as the plain cast, but where a product lies between two numbers and is rounded by one bit."""
    from mega.core.ops.kernels import fp8 as fast

    x = random(*shape)
    ours, plain = fast.cast(x, dtype, rows=True, columns=True), fp8.cast(x, dtype, rows=True, columns=True)
    assert ours.rows is not None and ours.columns is not None and plain.rows is not None
    torch.testing.assert_close(ours.inverse, plain.inverse, rtol=1e-6, atol=0)
    assert torch.equal(ours.rows.float().t(), ours.columns.float())
    if CUDA:  # the interpreter rounds otherwise
        assert float((ours.rows.float() != plain.rows.float()).double().mean()) < 1e-3
    assert error(ours.rows.float(), plain.rows.double()) < 0.2
    assert fast.cast(x, dtype, rows=True).columns is None


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_fp8_cast_of_a_weight_overwrites_the_earlier_cast(kind: str) -> None:
    """A captured graph reads the same addresses. What is overwritten is what a cast of its own would hold."""
    ops = suite.choose(torch.device("cuda"), torch.bfloat16, fp8=kind, shapes=True)  # type: ignore[arg-type]
    gemms = ops.matmuls
    assert isinstance(gemms, fp8.NarrowMatmuls)
    first, second = random(200, 144), 3 * random(200, 144)
    into = gemms.cast_weight(first, rows=True, columns=True)
    addresses = [each.data_ptr() for each in flat(into)]
    assert gemms.cast_weight(second, rows=True, columns=True, into=into) is into
    assert [each.data_ptr() for each in flat(into)] == addresses
    for forms in ({"rows": True, "columns": True}, {"rows": True}, {"columns": True}):
        alone = gemms.cast_weight(second, **forms)
        for form, one, other in zip(("rows", "columns"), into, alone, strict=False):
            if form in forms:
                assert all(torch.equal(a.float(), b.float()) for a, b in zip(flat(one), flat(other), strict=True))
        if kind == "tensor":
            assert torch.equal(into.inverse, alone.inverse)


def flat(cast: Any) -> list[torch.Tensor]:
    """The tensors of a cast."""
    if isinstance(cast, torch.Tensor):
        return [cast]
    return [tensor for each in cast for tensor in flat(each)]


@pytest.mark.skipif(not CUDA, reason="the interpreter knows no NaN of fp8")
@pytest.mark.parametrize("dtype", list(fp8.LIMITS))
def test_fp8_cast_of_zeros_and_of_what_is_not_finite(dtype: torch.dtype) -> None:
    from mega.core.ops.kernels import fp8 as fast

    x = torch.zeros(32, 32, dtype=DTYPE, device=DEVICE)
    rows = fast.cast(x, dtype, rows=True).rows
    assert rows is not None and not rows.float().any()
    for wrong in (float("nan"), float("inf")):
        x[3, 5] = wrong
        rows = fast.cast(x, dtype, rows=True).rows
        assert rows is not None and rows.float()[3, 5].isnan()


@pytest.mark.skipif(not CUDA, reason="cuBLAS only")
def test_fp8_multiply() -> None:
    from mega.core.ops.kernels import fp8 as fast

    a, b, bias = random(64, 128), random(48, 128), random(48)
    one, two = fp8.cast(a, fp8.BACKWARD, rows=True), fp8.cast(b, fp8.FORWARD, rows=True)
    assert one.rows is not None and two.rows is not None
    # The tensor cores keep 14 bits of a sum between the parts that fp32 adds up.
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 5e-3)):
        given = (one.rows, two.rows, one.inverse, two.inverse, dtype, bias if dtype == torch.bfloat16 else None)
        exact = fp8.multiply(*given[:4], torch.float64, given[5])
        assert error(fast.multiply(*given), exact) < bound
        assert error(fast.multiply(*given, fast=True), exact) < bound


@pytest.mark.parametrize("kind", ["cast_rows", "cast_blocks"])
@pytest.mark.parametrize("shape", [(TOKENS, 200), (130, 16), (1, 300)])
def test_fp8_block_casts(shape: tuple[int, int], kind: str) -> None:
    """The same scales bit for bit, and the same bytes; both directions in one pass are those alone."""
    from mega.core.ops.kernels import fp8_blocks as fast

    x = random(*shape)
    ours, plain = (getattr(each, kind)(x, rows=True, columns=True) for each in (fast, fp8_blocks))
    for name, one, other in zip(("rows", "columns"), ours, plain, strict=True):
        assert torch.equal(one.inverse, other.inverse)
        if CUDA:  # the interpreter rounds otherwise
            assert torch.equal(one.narrow.float(), other.narrow.float())
        assert error(one.narrow.float(), other.narrow.double()) < 0.2
        alone = getattr(fast, kind)(x, **{name: True})
        assert torch.equal(getattr(alone, name).narrow.float(), one.narrow.float())
        assert sum(each is not None for each in alone) == 1


@pytest.mark.parametrize("how", ["cublas", "kernel"])
@pytest.mark.parametrize("blocks", [True, False])
def test_fp8_block_multiply(blocks: bool, how: str) -> None:
    """Sizes that cuBLAS takes and that tiles do not divide: 2 steps of 128, of which one is not full."""
    from mega.core.ops.kernels import fp8_blocks as fast

    if how == "cublas" and not block_scaled_matmuls(torch.device(DEVICE)):
        pytest.skip("cuBLAS on Hopper only")
    ins = 256 if how == "cublas" else 208
    x, weight = random(144, ins), random(160, ins)
    a, b = fast.cast_rows(x, rows=True).rows, (fast.cast_blocks if blocks else fast.cast_rows)(weight, rows=True).rows
    assert a is not None and b is not None
    exact = fp8_blocks.multiply(a, b, torch.float64, blocks=blocks)
    for dtype, bound in ((torch.float32, 1e-3), (DTYPE, 5e-3)):
        found = getattr(fast, f"_by_{how}")(a, b, dtype, blocks)
        assert found.dtype == dtype and error(found, exact) < bound


@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 48, 256), (16, 33, 300), (5, 100, 77)])
def test_fp8_weights(rows: int, outs: int, ins: int) -> None:
    """Against the same narrow weights in float64: only rounding of the output is lost, and in fp32 that of the sums."""
    from mega.core.ops.kernels.fp8_weights import multiply

    narrow, scale = fp8_weights.narrowed(random(outs, ins))
    x = random(rows, 2 * ins)[:, :ins]
    exact = (x.double() @ narrow.double().t()) * scale.double()
    slack = 1e-7 if DTYPE.itemsize == 2 else 1e-6
    assert error(multiply(x, narrow, scale), exact) <= 2 * error(exact.to(DTYPE), exact) + slack
