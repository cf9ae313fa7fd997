"""Every Triton kernel, compiled for a Hopper GPU with the shapes of real models. No GPU is needed.

    python tests/battery/compiled.py ["attention 64 dropout" ...] [--share 1/2] [--out FILE] [--summary]

Triton's interpreter, which runs the kernels in the suite, accepts programs that the compiler refuses. Each item
launches the kernels of one op on CPU tensors, compiles them, and fails if a kernel is refused, or uses more registers
or shared memory than the device has. A row lists the variants: registers and spilled bytes of a thread, bytes of shared
memory, and instructions of the longest loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.compiled import REGISTERS, SHARED, compiling  # first: turns the interpreter off

# isort: split
import numpy as np
import torch

from mega.core.architecture.layer import Rope, Router
from mega.core.ops import fp8
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout, Dropout
from mega.core.ops.few_experts import ExpertRule, ExpertWeights
from mega.core.ops.few_rows import NormOf
from mega.core.ops.kernels import (
    activation,
    adamw,
    attention,
    cross_entropy,
    dropout,
    few_experts,
    few_rows,
    fp8_blocks,
    fp8_weights,
    heads,
    mapped_sum,
    norm,
    paged_attention,
    rows,
    sums,
    total,
)
from mega.core.ops.kernels import fp8 as fp8_kernels
from mega.core.ops.mask import AttentionMask
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import NormForm
from mega.core.ops.rotary import rotary_table
from mega.core.parallel.weight import Weight
from tests.battery.data_ledger import Item, run

BF16 = torch.bfloat16
TOKENS = 512


def empty(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    """A tensor whose memory is never touched, as kernels are compiled and not run."""
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def keys_of(batch: int, length: int) -> torch.Tensor:
    return token_keys(1, torch.arange(batch), torch.arange(length))


def attend(width: int, kind: str, length: int = TOKENS, group: int = 1) -> None:
    """Forward and backward pass of attention."""
    documents = torch.zeros(2, length, dtype=torch.int64)
    mask = {
        "plain": AttentionMask(),
        "full": AttentionMask(kind="full"),
        "window": AttentionMask(window=100),
        "documents": AttentionMask(q_documents=documents, k_documents=documents),
    }.get(kind.split()[0], AttentionMask())
    if "dropout" in kind:
        drop = AttentionDropout(keys_of(2, length), site_key(1, "attention"), 0, (range(length),), 0.1)
        mask = AttentionMask(mask.kind, mask.window, mask.q_documents, mask.k_documents, dropout=drop)
    q, grad, out = (empty(2, length, 4 * group, width) for _ in range(3))
    k, v = (empty(2, length, 4, width) for _ in range(2))
    attention.forward(q, k, v, mask)
    attention.backward(grad, q, k, v, out, empty(2, 4 * group, length, dtype=torch.float32), mask)


def paged(heads_: int, kv_heads: int, width: int, sequences: int, window: int | None = None) -> None:
    """A decoding step that stores new keys, and a step with a prompt."""
    pool = empty(1 + 64 * sequences, 16, 2, kv_heads, width)
    tables = np.arange(64 * sequences).reshape(sequences, 64)
    fused = empty(sequences, heads_ + 2 * kv_heads, width)
    lengths = np.full(sequences, 600)
    rotary = rotary_table(torch.arange(sequences), Rope(base=1e4, width=width), BF16)
    pages = paged_attention.PAGED.pages(np.ones(sequences, np.int64), lengths, tables, pool, heads_ // kv_heads, window)
    assert paged_attention.PAGED.attend_new is not None
    paged_attention.PAGED.attend_new(fused, rotary, pool.flatten(1), pages)
    counts = np.array([1] * (sequences - 1) + [80])
    pages = paged_attention.PAGED.pages(counts, lengths, tables, pool, heads_ // kv_heads, window)
    paged_attention.PAGED.attend(empty(int(counts.sum()), heads_, width), pool.flatten(1), pages)
    slots = torch.arange(sequences)
    few_rows.place(fused, rotary, empty(9, 2 * kv_heads, width), slots, heads_)
    few_rows.norm_heads(fused, NormOf(empty(width), None, 1e-6), NormOf(empty(width), None, 1e-6), heads_)


def decode(hidden: int, qkv: int, ffn: int, gate: bool, narrow: bool) -> None:
    """The linear layers of a decoding step of one token."""

    def factor(outs: int, ins: int) -> Factor:
        if narrow:
            return Factor(empty(outs, ins, dtype=torch.float8_e4m3fn), None, empty(outs, dtype=torch.float32))
        return Factor(empty(outs, ins), None if gate else empty(outs))

    x, scale = empty(1, hidden), NormOf(empty(hidden), None if gate else empty(hidden), 1e-5)
    few_rows.linear(x, factor(qkv, hidden), scale)
    few_rows.linear(x, factor(hidden, hidden), None, None, x)
    few_rows.linear(x, factor(ffn * (1 + gate), hidden), scale, "swiglu" if gate else "gelu_tanh")
    few_rows.linear(empty(1, ffn), factor(hidden, ffn), None, None, x)
    if narrow:
        for tokens in (8, 64, 300):
            fp8_weights.tiled(empty(tokens, hidden), factor(qkv, hidden).weight, empty(qkv, dtype=torch.float32))


def mixture(count: int, chosen: int, hidden: int, width: int, tokens: int) -> None:
    router = Router(
        score="softmax", normalize=True, scale=1.0, choice="largest", groups=None, bias=False, balance_rate=None,
        quantile_ema=0.0, dtype=None, jitter=0.0, losses=(),
    )  # fmt: skip
    weights = ExpertWeights(
        empty(count, hidden), empty(count * 2 * width, hidden), empty(count * hidden, width), range(count)
    )
    x = empty(tokens, hidden)
    assert few_experts.takes(tokens, weights, ExpertRule(router, chosen, "swiglu"))
    few_experts.run(x, weights, ExpertRule(router, chosen, "swiglu"), NormOf(empty(hidden), None, 1e-6), x)


def trained(function: Callable[..., Any], *inputs: torch.Tensor | None) -> None:
    """Forward and backward pass of an op."""
    out = function(*inputs)
    outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each.requires_grad]
    torch.autograd.backward(outs, [torch.empty_like(each) for each in outs])


def norms(width: int, centred: bool) -> None:
    drop = Dropout(keys_of(1, TOKENS).flatten(), site_key(1, "x"), 0.1)
    bias = empty(width, grad=True) if centred else None
    for branch, given in ((None, None), (empty(TOKENS, width, grad=True), drop)):
        trained(
            lambda x, y, weight, own, given=given: norm.add_norm(x, y, None, given, weight, own, 1e-5, NormForm()),
            *(empty(TOKENS, width, grad=True) * 1, branch, empty(width, grad=True), bias),
        )
    trained(
        lambda x, y, own: dropout.added(x, y, own, drop),
        *(empty(TOKENS, width, grad=True), empty(TOKENS, width, grad=True), empty(width, grad=True)),
    )


def activations(kind: str, width: int) -> None:
    gated = kind in ("swiglu", "geglu", "geglu_tanh", "reglu2")
    bias = None if gated else empty(width, grad=True)
    trained(lambda x, own: activation.activate(x, own, kind), empty(TOKENS, width, grad=True), bias)
    if gated:
        trained(
            lambda x, y: activation.activate_weighted(x, y, kind), *(empty(TOKENS, n, grad=True) for n in (width,)),
            empty(TOKENS, grad=True),
        )  # fmt: skip


def turned(heads_: int, kv_heads: int, width: int) -> None:
    table = rotary_table(torch.arange(TOKENS), Rope(base=1e4, width=width), BF16)
    for rotary in (None, table):
        fused = empty(TOKENS, (heads_ + 2 * kv_heads) * width, grad=True)
        trained(lambda x, rotary=rotary: heads.split_heads(x * 1, None, heads_, kv_heads, rotary), fused)


def losses(vocab: int) -> None:
    x, labels = empty(TOKENS, vocab), torch.zeros(TOKENS, dtype=torch.int64)
    scale = empty(TOKENS, dtype=torch.float32)
    cross_entropy.softmax_parts(x, labels, vocab)
    cross_entropy.softmax_gradient(x, labels, scale, scale, vocab)
    cross_entropy.nll_and_gradient(x, labels, scale, vocab)


def update(dtype: torch.dtype) -> None:
    wide = [empty(1 << 16, dtype=torch.float32) for _ in range(3)]
    weights = empty(1 << 16)
    masters = (wide[0], weights) if dtype == torch.float32 else (weights, None)
    adamw.adamw(
        masters[0], empty(1 << 16, dtype=torch.float32), wide[1], wide[2], masters[1],
        empty(4, dtype=torch.float32), decay_end=100, lr=1e-3, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8,
    )  # fmt: skip


def blocks() -> None:
    """Casts to fp8 with scales of blocks, and the GEMMs of devices for which cuBLAS has none."""
    x, weight = empty(TOKENS, 4096), empty(11008, 4096)
    for rows_too, columns_too in ((True, False), (False, True), (True, True)):
        fp8_blocks.cast_rows(x, rows=rows_too, columns=columns_too)
        fp8_blocks.cast_blocks(weight, rows=rows_too, columns=columns_too)
    a = fp8_blocks.cast_rows(x, rows=True).rows
    for each in (fp8_blocks.cast_blocks(weight, rows=True).rows, fp8_blocks.cast_rows(weight, rows=True).rows):
        assert a is not None and each is not None
        for dtype in (BF16, torch.float32):
            fp8_blocks.multiply(a, each, dtype, blocks=len(each.inverse) < len(weight))


def small() -> None:
    """Sums, casts and gathers."""
    total.total(empty(4, TOKENS, 4096))
    total.accumulate(empty(4096, 4096, dtype=torch.float32), empty(4096, 4096))
    for whole in (True, False):
        rows.sum_rows(empty(2 * TOKENS, 4096), torch.zeros(TOKENS, 2, dtype=torch.int64), whole)
    weight = Weight(empty(4096), ())
    weight.main_grad = empty(4096, dtype=torch.float32)
    sums.deliver_sums((weight,), sums.column_sums(empty(TOKENS, 4096)))
    for dtype in fp8.LIMITS:
        fp8_kernels.cast(empty(TOKENS, 4096), dtype, rows=True, columns=True)
    memories, counts = torch.zeros(2, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    for into in (None, empty(1, 4096)):
        mapped_sum.mapped_sum(empty(1, 4096), into, memories, counts, 0, 1 << 20)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"attention {width} {kind}": partial(attend, width, kind)
        for width in (64, 128)
        for kind in ("plain", "causal dropout", "full dropout", "window", "documents", "documents dropout")
    },
    "attention 80 causal dropout": partial(attend, 80, "causal dropout"),
    "attention 96 causal dropout": partial(attend, 96, "causal dropout"),
    "attention 256 causal dropout": partial(attend, 256, "causal dropout"),
    "attention of groups": partial(attend, 128, "causal dropout", group=8),
    "paged gpt2": partial(paged, 16, 16, 64, 3),
    "paged llama2-7b": partial(paged, 32, 32, 128, 64),
    "paged llama3-8b": partial(paged, 32, 8, 128, 2),
    "paged qwen3-30b-a3b": partial(paged, 32, 4, 128, 2),
    "paged falcon-7b": partial(paged, 71, 1, 64, 2),
    "paged window": partial(paged, 32, 8, 128, 2, 4096),
    "decode gpt2": partial(decode, 1024, 3072, 4096, False, False),
    "decode llama2-7b": partial(decode, 4096, 12288, 11008, True, False),
    "decode llama2-7b fp8": partial(decode, 4096, 12288, 11008, True, True),
    "decode llama2-70b": partial(decode, 8192, 10240, 28672, True, False),
    **{
        f"mixture {name} {tokens}": partial(mixture, *sizes, tokens)
        for name, sizes in {
            "mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768), "olmoe": (64, 8, 2048, 1024)
        }.items()
        for tokens in (1, 4, 64, 128)
    },
    **{f"norm {width}": partial(norms, width, width < 2048) for width in (768, 1024, 4096, 8192)},
    **{f"activation {kind}": partial(activations, kind, 8192) for kind in ("gelu_tanh", "gelu", "relu2", "swiglu")},
    "heads 64": partial(turned, 16, 16, 64),
    "heads 128": partial(turned, 32, 8, 128),
    **{f"loss {vocab}": partial(losses, vocab) for vocab in (32000, 50257, 151936)},
    "adamw": partial(update, torch.float32),
    "adamw without masters": partial(update, BF16),
    "fp8 blocks": blocks,
    "small": small,
}  # fmt: skip


def check(launches: Callable[[], None]) -> dict[str, Any]:
    with compiling() as variants:
        launches()
    assert variants
    for each in variants:
        assert each.registers * each.warps * 32 <= REGISTERS and each.shared <= SHARED, each
    return {"variants": [each._asdict() for each in variants]}


def items() -> Iterator[Item]:
    yield from ((name, partial(check, launches)) for name, launches in CASES.items())


if __name__ == "__main__":
    run("compiled", items())
