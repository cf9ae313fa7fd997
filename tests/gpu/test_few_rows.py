"""What our kernels do for steps of few tokens, against the plain form in float64 and in the same dtype.

On a CUDA device as they are; without one where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from mega.core.architecture import units
from mega.core.architecture.layer import Rope
from mega.core.model.decoder import DecoderStage
from mega.core.ops import fp8_weights
from mega.core.ops.few_rows import PLAIN, FewRows, NormOf, trusted
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import NormForm
from mega.core.ops.paged_attention import PLAIN as PLAIN_ATTENTION
from mega.core.ops.rotary import rotary_table
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from tests.gpu.test_paged_attention import kernels as attention_kernels
from tests.inference.test_engine import FAMILIES, GREEDY, Request, answers, engine_of, prompts, tokens
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
WIDE = torch.float64


def kernels() -> FewRows:
    from mega.core.ops.kernels.few_rows import FEW_ROWS

    return FEW_ROWS


def drawn_dtype(rng: random.Random) -> torch.dtype:
    """The interpreter has no bf16 of its own."""
    return rng.choice([torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32])


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def widened(given: Any) -> Any:
    """The same in float64, where it is no weight of fp8."""
    if isinstance(given, tuple):
        return type(given)(*(widened(each) for each in given)) if hasattr(given, "_fields") else given
    return given.to(WIDE) if isinstance(given, torch.Tensor) else given


def check_linear(rng: random.Random, sizes: tuple[int, int] = (600, 1100)) -> dict[str, Any]:
    """A drawn product: within twice the error of the plain form."""
    dtype = drawn_dtype(rng)
    outs, ins = (rng.randint(1, size) for size in sizes)
    activation = rng.choice([None, "swiglu", "gelu", "gelu_tanh", "relu2"])
    narrow, bias, norm, add = (rng.random() < 0.5 for _ in range(4))
    weight = torch.randn(outs * (2 if activation == "swiglu" else 1), ins, device=DEVICE) / ins**0.5
    x = torch.randn(1, 2 * ins, device=DEVICE).to(dtype)[:, :ins]
    given_bias = torch.randn(len(weight), device=DEVICE).to(dtype) if bias else None
    given_norm = None
    if norm:
        shift = torch.randn(ins, device=DEVICE).to(dtype) if rng.random() < 0.5 else None
        form = NormForm(offset=rng.random() < 0.5)
        given_norm = NormOf(torch.randn(ins, device=DEVICE).to(dtype), shift, 1e-5, form)
        x = x + 0.5
    factor = Factor(weight.to(dtype), given_bias)
    if narrow:
        low, scale = fp8_weights.narrowed(weight)
        factor = Factor(low, given_bias, scale)
    stream = torch.randn(1, outs, device=DEVICE).to(rng.choice([dtype, torch.float32])) if add else None
    exact_factor = Factor(
        factor.weight if narrow else widened(factor.weight), widened(given_bias), widened(factor.scale)
    )
    exact = PLAIN.linear(widened(x), exact_factor, widened(given_norm), activation, widened(stream))
    plain, ours = (
        each.linear(x, factor, given_norm, activation, None if stream is None else stream.clone())
        for each in (PLAIN, kernels())
    )
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert error(ours, exact) <= 2 * error(plain, exact) + 1e-6, (error(ours, exact), error(plain, exact))
    return {"outs": outs, "ins": ins, "narrow": narrow, "norm": norm, "activation": activation}


def check_place(rng: random.Random) -> dict[str, Any]:
    """Drawn heads: queries turned where they lie, keys and values in the slots, all else left alone."""
    dtype, tokens_ = drawn_dtype(rng), rng.randint(1, 9)
    kv_heads, d = rng.randint(1, 3), rng.choice([8, 32, 40, 64, 128])
    heads, turned = kv_heads * rng.randint(1, 4), rng.choice([0, d, d // 2, d // 4 * 2])
    fused = torch.randn(tokens_, heads + 2 * kv_heads, d, device=DEVICE).to(dtype)
    cache = torch.randn(40, 2 * kv_heads, d, device=DEVICE).to(dtype)
    slots = torch.tensor(rng.sample(range(40), tokens_), device=DEVICE)
    positions = torch.arange(tokens_, device=DEVICE) + 3
    found = []
    for each, wide in ((PLAIN, WIDE), (PLAIN, dtype), (kernels(), dtype)):
        rotary = rotary_table(positions, Rope(base=10000.0, width=turned), wide) if turned else None
        given, rows = fused.to(wide), cache.to(wide)
        each.place(given, rotary, rows, slots, heads)
        found.append((given[:, :heads], rows))
    for exact, plain, ours in zip(*found, strict=True):
        assert error(ours, exact) <= 2 * error(plain, exact) + 1e-7
    assert torch.equal(found[1][1][:, kv_heads:], found[2][1][:, kv_heads:])
    return {"tokens": tokens_, "heads": heads, "kv_heads": kv_heads, "d": d, "turned": turned}


def check_tiled(rng: random.Random, sizes: tuple[int, int, int] = (150, 300, 700)) -> dict[str, Any]:
    """Weights in fp8 by any number of rows, in any number of shares of the inputs."""
    from mega.core.ops.kernels.fp8_weights import tiled

    rows, outs, ins = (rng.randint(1, size) for size in sizes)
    shares, dtype = rng.choice([None, 1, 2, 3]), torch.bfloat16 if CUDA else torch.float16
    narrow, scale = fp8_weights.narrowed(torch.randn(outs, ins, device=DEVICE))
    x = torch.randn(rows, 2 * ins, device=DEVICE).to(dtype)[:, :ins]
    exact = (x.double() @ narrow.double().t()) * scale.double()
    ours = tiled(x, narrow, scale, None, shares)
    assert ours.dtype == dtype and error(ours, exact) <= 2 * error(exact.to(dtype), exact) + 1e-7
    return {"rows": rows, "outs": outs, "ins": ins, "shares": shares}


@pytest.mark.parametrize("seed", range(24))
def test_linear(seed: int) -> None:
    torch.manual_seed(seed)
    check_linear(random.Random(seed), (12_000, 12_000) if CUDA else (90, 1100))


CHUNKS = [(70, 0, 1), (64, 0, 1), (1100, 0, 1), (1280, 0, 1), (70, 32, 1), (70, 32, 3), (96, 32, 3)]
FORMS = list(product([46, 48], [False, True], [False, True]))
"""Outputs, whether gated, whether centred."""


def few_of(number: int) -> list[tuple[int, bool, bool]]:
    """For the interpreter: two forms that differ in everything, others for the next chunk."""
    return [FORMS[number % 4], FORMS[7 - number % 4]]


@pytest.mark.parametrize("ins, chunk, stages, outs, gate, centred", [
    (*chunk, *form) for number, chunk in enumerate(CHUNKS) for form in (FORMS if CUDA else few_of(number))
])  # fmt: skip
def test_chunks_of_a_row(ins: int, chunk: int, stages: int, outs: int, gate: bool, centred: bool) -> None:
    """Inputs in one tile, two or many; tiles that end where the weight does, and others."""
    from mega.core.ops.kernels.few_rows import RowTile, linear

    torch.manual_seed(0)
    x, weight = 3 + torch.randn(1, ins, device=DEVICE), torch.randn(outs, ins, device=DEVICE) / ins**0.5
    norm = NormOf(torch.randn(ins, device=DEVICE), torch.randn(ins, device=DEVICE) if centred else None, 1e-5)
    given = x, Factor(weight), norm, "swiglu" if gate else None, None
    ours = linear(*given, RowTile(2, 4, chunk, stages))
    torch.testing.assert_close(ours, PLAIN.linear(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_place(seed: int) -> None:
    torch.manual_seed(seed)
    check_place(random.Random(seed))


@pytest.mark.parametrize("seed", range(6))
def test_tiled(seed: int) -> None:
    torch.manual_seed(seed)
    check_tiled(random.Random(seed), (600, 5000, 5000) if CUDA else (140, 140, 300))


def test_kernels_that_a_device_runs_wrongly_are_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    where = torch.device(DEVICE)
    assert trusted(None, torch.float32, where, [48]) is None
    assert trusted(kernels(), torch.float32, where, [48, 100]) is kernels() and not caplog.text

    def fails(*_: Any) -> Any:
        raise AssertionError("cannot be compiled\nhere")

    def wrong(*given: Any) -> torch.Tensor:
        return kernels().linear(*given) * 1.001

    def misplaced(fused: torch.Tensor, rotary: Any, rows: torch.Tensor, slots: torch.Tensor, heads: int) -> None:
        kernels().place(fused, rotary, rows, slots + 1, heads)

    for broken, why in (({"linear": wrong}, "off by 0.001"), ({"linear": fails}, "(cannot be compiled)"),
                        ({"place": misplaced}, "off by ")):  # fmt: skip
        caplog.clear()
        assert trusted(replace(kernels(), **broken), torch.float32, where, [48]) is None
        assert why in caplog.text


def test_fp8_weights_by_kernels_that_are_wrong_are_multiplied_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    from mega.core.ops.kernels.fp8_weights import multiply

    def wrong(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return multiply(x, *given) * (1.2 if len(x) > 100 else 1.0)

    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("cannot be compiled\nhere")

    where = torch.device(DEVICE)
    assert fp8_weights.trusted(multiply, torch.float16, where) is multiply and not caplog.text
    assert fp8_weights.trusted(wrong, torch.float16, where) is fp8_weights.multiply and "off by 0.2" in caplog.text
    assert fp8_weights.trusted(fails, torch.float16, where) is fp8_weights.multiply
    assert "(cannot be compiled)" in caplog.text


@pytest.mark.skipif(not CUDA, reason="the interpreter has no grid that overlaps")
def test_kernels_that_begin_early_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain in which each takes what the one before it wrote."""
    from mega.core.ops.kernels import language

    def chain(overlap: bool) -> torch.Tensor:
        monkeypatch.setattr(language, "OVERLAP", overlap)
        torch.manual_seed(0)
        factors = [Factor(torch.randn(4096, 4096, device=DEVICE).to(torch.bfloat16) / 64) for _ in range(8)]
        x = torch.randn(1, 4096, device=DEVICE).to(torch.bfloat16)
        for number in range(64):
            wide = kernels().linear(x, factors[number % 8], NormOf(factors[0].weight[0], None, 1e-5), None, None)
            x = kernels().linear(wide, factors[(number + 1) % 8], None, None, x)
        return x

    assert torch.equal(chain(True), chain(False))


MORE = {
    "post": replace(FAMILIES["llama"], norm_placement="post"),
    "grouped": replace(FAMILIES["llama"], kv_heads=1),
    "offset": replace(FAMILIES["llama"], norm_offset=True),
}


KINDS = FAMILIES | MORE if CUDA else dict.fromkeys(("gpt", "qwen3", "grouped", "post"))
"""Interpreted, those between them have all that lies around the kernels."""


@pytest.mark.parametrize("family, fp8", [*((name, False) for name in KINDS), ("llama", True)])
def test_an_engine_says_the_same(family: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to five sequences at once (interpreted two), so steps with and without the kernels follow each other."""
    model, where = (FAMILIES | MORE)[family], torch.device(DEVICE)
    texts = enumerate(prompts(5 if CUDA else 2))
    asked = [Request(prompt=prompt, tokens=2 + at, sampling=GREEDY) for at, prompt in texts]
    taken: list[int] = []

    def linear(x: torch.Tensor, *given: Any) -> torch.Tensor:
        taken.append(len(x))
        return kernels().linear(x, *given)

    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", 528 if CUDA else 8)
    said = []
    for few, attention in ((None, PLAIN_ATTENTION), (replace(kernels(), linear=linear), attention_kernels())):
        ops = forward_only(choose(where, torch.float32), fp8_weights=fp8)
        ops = replace(ops, few_rows=few, paged_attention=attention, spread=False)
        stage: Any = DecoderStage(model, units(model), ParameterFactory({}, torch.float32, where, ops), ALONE)
        initialise(stage, 5)
        with torch.no_grad():
            for weight in stage.parameters():
                if weight.dim() > 1:
                    weight.mul_(6.0)
        engine = engine_of(stage.eval(), device=where)
        taken.clear()
        said.append([tokens(events) for events in answers(engine, asked)])
    assert said[0] == said[1]
    fused = model.norm_placement == "pre" and model.parallel_branches == "no"
    assert bool(taken) == fused, "a block took none of the kernels"
