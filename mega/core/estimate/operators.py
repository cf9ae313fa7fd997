"""The operators of a model as bytes: what autograd keeps of each until its backward, and what lives while it runs.

The rows describe the operators of core/model, core/parallel and core/ops as they are; tests hold them against autograd
itself, so a changed operator shows here. Knows no order but that of one block, and no pipeline.

Notation: T tokens of a microbatch, n the tokens of this rank between regions (T / tp under sequence parallelism);
e bytes of the dtype, w of max(fp32, dtype); widths (h, q, kv, f, v) are those of one tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mega.core.config.run import RunConfig
from mega.core.estimate.weights import BYTES, wide
from mega.core.inventory import padded
from mega.core.plan.pieces import together

HASH = 24
"""Bytes per element that a dropout mask takes while it is hashed: three int64 tensors (ops/counter.py)."""


class Blocks(NamedTuple):
    """What stays of the blocks of each exchange beside an op's products (--tp-overlap), besides what autograd keeps.

    forward: of a forward pass. passed: of one of which nothing is kept. backward: of a backward pass.
    """

    forward: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()


NO_BLOCKS = Blocks()


@dataclass(frozen=True)
class Op:
    """saved: bytes kept until its backward. forward, backward: bytes that live besides, while it runs.

    product: what the weight's gradient needs, where that is computed later (zero-bubble plans).
    """

    name: str
    saved: int
    forward: int
    backward: int
    product: int = 0
    blocks: Blocks = NO_BLOCKS


class Sizes:
    """The numbers of one tensor rank from which all rows follow. `run` is resolved."""

    def __init__(self, run: RunConfig) -> None:
        model, batch, parallel = run.model, run.batch, run.parallel
        assert model.hidden and model.heads and model.kv_heads and model.head_dim and model.ffn and model.vocab
        assert batch.seq_length and batch.micro_batch and run.precision.grad_dtype
        tp, self.model = parallel.tp, model
        self.tp, self.seq = tp, parallel.sequence_parallel and tp > 1
        self.rows, self.length, self.whole = batch.micro_batch, batch.seq_length // parallel.cp, batch.seq_length
        self.tokens = self.rows * self.length
        self.own = self.tokens // tp if self.seq else self.tokens
        self.hidden = model.hidden
        self.heads = model.heads // tp
        self.cp, kv_heads = parallel.cp, model.kv_heads // tp
        self.ring = self.cp > 1 and (parallel.cp_comm == "ring" or self.heads % self.cp > 0 or kv_heads % self.cp > 0)
        self.q = self.heads * model.head_dim
        self.kv = model.kv_heads // tp * model.head_dim
        self.ffn = model.ffn // tp
        whole = padded(model.vocab, tp, model.vocab_multiple)
        self.vocab, self.pads = whole // tp, whole != model.vocab
        self.e, self.w = BYTES[run.precision.dtype], wide(run.precision.dtype)
        self.beside = parallel.tp_overlap
        self.documents = run.data.reset_attention
        self.plain = bool(model.attention_dropout) or run.runtime.ops == "reference"
        self.kernels = run.runtime.device != "cpu" and run.runtime.ops == "auto" and run.precision.dtype != "fp64"
        self.fp8 = run.precision.fp8
        # A product goes straight into a bucket of its own dtype, or else through a matrix of the weights' dtype.
        straight = self.kernels or run.precision.grad_dtype == run.precision.dtype
        self.product = 0 if straight else self.e
        # A head that shares an fp32 table multiplies by a 16-bit copy of it.
        self.copied = self.e if run.precision.embedding_fp32 and model.tied else 0
        self.again = run.memory.recompute == "selective"
        self.cast = self.w if self.w != self.e else 0
        wide_stream = self.cast and run.precision.residual_fp32
        self.normed = self.e * self.own * self.hidden
        self.residual = self.w * self.own * self.hidden if wide_stream else self.normed
        # Norms keep the stream in the wide dtype: the stream itself, or a copy of it.
        self.widened = 0 if wide_stream else self.cast
        # While a block runs, its caller holds the stream before it; what the norms keep of that is counted there.
        self.stream = self.residual * (3 if self.widened and not self.kernels else 1)

    @property
    def turns_in_place(self) -> bool:
        """Kernels turn query and key inside the fused product, unless norms stand between."""
        return self.kernels and not self.model.qk_norm

    @property
    def moved(self) -> bool:
        """Whether query and key are no longer views of the fused product when attention takes them."""
        return (self.model.position == "rope" and not self.turns_in_place) or self.model.qk_norm

    @property
    def fused(self) -> int:
        """Query, key and value as one product makes them."""
        return self.e * self.tokens * (self.q + 2 * self.kv)

    @property
    def scores(self) -> int:
        """Weights of all queries and keys, of the heads that a context rank has while it has all columns."""
        return self.rows * self.heads // self.cp * self.whole**2

    @property
    def whole_input(self) -> int:
        """A region's gathered input under sequence parallelism; --tp-overlap has it in memory that all ranks map."""
        return self.e * self.tokens * self.hidden if self.seq and not self.beside else 0

    @property
    def pieces(self) -> int:
        """Into how many pieces a product is cut for its exchange.

        >>> from mega.core.config.compose import compose
        >>> from mega.core.config.resolve import resolve
        >>> flags = {"micro_batch": 4, "global_batch": 4, "sequence_parallel": True, "tp_overlap": True}
        >>> [Sizes(resolve(compose("gpt-22b", flags={**flags, "tp": tp}), tp)).pieces for tp in (2, 4, 8)]
        [2, 4, 2]
        """
        return self.tp // together(self.tp, self.own)

    @property
    def parts(self) -> int:
        """Blocks that a product makes to be summed over ranks; a piece that is ours alone is made in its place."""
        return self.e * (self.tokens - (self.own if self.pieces == self.tp else 0)) * self.hidden


def embedding_ops(z: Sizes) -> Iterator[Op]:
    whole = z.e * z.tokens * z.hidden
    # 9: the id within this rank's rows, and whether it is ours
    kept = 9 * z.tokens if z.tp > 1 else 0
    yield Op("embedding", kept, 2 * whole, z.residual + whole + z.w * whole // z.e)
    if z.model.embedding_scale:
        yield Op("embedding scale", 0, 2 * z.residual, 2 * z.residual)
    if z.model.position in ("learned", "sinusoidal"):
        yield Op("positions", 0, 2 * z.residual, z.residual + z.w * z.residual // z.e)
    if z.model.hidden_dropout:
        yield _dropped("embedding dropout", z)


def block_ops(z: Sizes) -> Iterator[Op]:
    """One block. A branch is added to the residual stream by the norm behind it."""
    model = z.model
    assert model.head_dim
    yield _norm("attention norm", z, z.own, z.hidden, z.again, z.widened)
    yield _column("qkv", z, z.q + 2 * z.kv, z.again)
    if model.qk_norm:
        yield _norm("q and k norm", z, z.tokens * (z.q + z.kv) // model.head_dim, model.head_dim, z.again, z.cast)
    if model.position == "rope" and not z.turns_in_place:
        turned = z.w * z.tokens * z.q
        yield Op("rotary", 0, z.stream + 2 * turned, 3 * turned)
    yield from _attention(z)
    yield _row("attention out", z, z.q)
    if model.hidden_dropout:
        yield _dropped("attention dropout", z)
    yield _norm("feed-forward norm", z, z.own, z.hidden, z.again, z.widened)
    yield _column("up", z, z.ffn * (2 if model.activation == "swiglu" else 1), z.again)
    yield _activation(z)
    yield _row("down", z, z.ffn, again=z.again, besides=0 if z.again else _unbiased(z))
    if model.hidden_dropout:
        yield _dropped("feed-forward dropout", z)


def head_ops(z: Sizes) -> Iterator[Op]:
    scores = z.tokens * z.vocab
    yield _norm("final norm", z, z.own, z.hidden, z.again, z.widened)
    grad = z.e * scores + 2 * z.whole_input + z.normed + max(z.product, z.copied) * z.vocab * z.hidden
    logits = Op(
        "logits",
        0 if z.again else z.normed,
        z.stream + z.e * scores + z.whole_input + z.copied * z.vocab * z.hidden,
        grad + z.e * z.tokens * z.hidden,
        z.e * (z.tokens * z.hidden + scores),
        _column_blocks(z),
    )
    yield logits
    # the logits, each token's label and log-sum-exp, its loss (and its weight, where that is widened)
    kept = z.e * scores + (8 + 2 * z.w + (z.w if z.w > 4 else 0)) * z.tokens
    if z.kernels:
        yield Op("loss", kept, z.stream, 0)
    else:
        copies = 3 if z.cast or z.pads else 2
        yield Op("loss", kept, z.stream + copies * z.w * scores, (2 * z.w + (z.cast and z.e)) * scores)


def rotary_table(z: Sizes) -> Op:
    width = int((z.model.head_dim or 0) * z.model.rope_fraction)
    return Op("rotary table", z.w * z.tokens * width, 12 * z.tokens * width, 0)


def _norm(name: str, z: Sizes, tokens: int, width: int, again: bool, widened: int) -> Op:
    """Keeps its input in the wide dtype (`widened` where it has another), and statistics; RMSNorm also its result
    before the weight.

    Kernels keep the input as it is. The output is the next op's to keep; to compute it `again`, the input is kept.
    """
    n = tokens * width
    high, low = z.w * n, z.e * n
    rms = z.model.norm == "rmsnorm"
    if z.kernels:
        kept = low if widened or not z.cast else high
        return Op(name, kept + 2 * z.w * tokens, z.stream + 2 * z.residual, z.residual + 2 * low)
    original = low if again and widened else 0
    if rms:
        return Op(name, original + high + low + z.w * tokens, z.stream + high, z.residual + low + 4 * high)
    weights = 2 * width * z.w if z.cast else width * z.w * z.model.norm_offset
    return Op(name, original + high + 2 * z.w * tokens + weights, z.stream + high, z.residual + low + 2 * high)


def _column(name: str, z: Sizes, outs: int, again: bool) -> Op:
    """Keeps its input, as one rank has it between regions, unless that is computed again."""
    y = z.e * z.tokens * outs
    forward, backward = _products(z, z.hidden, outs)
    inner = z.whole_input + z.e * z.tokens * z.hidden + (z.normed if z.seq else 0)
    kept = 0 if again else z.normed
    again_input = z.normed - kept
    return Op(
        name,
        kept,
        again_input + z.stream + z.whole_input + y + forward,
        again_input + z.residual + y + inner + backward,
        z.e * z.tokens * z.hidden + y,
        _column_blocks(z),
    )


def _column_blocks(z: Sizes) -> Blocks:
    """A gathering forward, one and a sum backward."""
    if not z.beside:
        return NO_BLOCKS
    return Blocks((z.normed if z.again else 0,), (z.normed,), (z.normed, z.parts))


def _row(name: str, z: Sizes, ins: int, again: bool = False, besides: int = 0) -> Op:
    """Keeps its input, unless that is computed again. besides: what else lives in its forward."""
    x, y = z.e * z.tokens * ins, z.e * z.tokens * z.hidden
    product, products = _products(z, ins, z.hidden)
    outs = y * (2 if z.tp > 1 and not z.seq else 1) + (z.normed if z.seq else 0)
    forward = z.stream + outs + besides + product
    # In 8 bits the gathered gradient is let go.
    backward = z.residual + (0 if z.fp8 else z.whole_input) + x + products
    blocks = Blocks((z.parts,), (z.parts,), (z.normed,)) if z.beside else NO_BLOCKS
    if again:
        return Op(name, 0, forward + x, backward + x, x + y, blocks)
    return Op(name, x, forward, backward, x + y, blocks)


def _products(z: Sizes, ins: int, outs: int) -> tuple[int, int]:
    """What a linear layer's products take forward and backward, besides its input, output and their gradients.

    A matrix for a weight's gradient that does not go straight into its bucket. Under --fp8 (ops/fp8.py) forward both
    factors; backward the output's gradient as it lies and turned, then the input, and the weight's gradient in fp32.
    Nothing in 8 bits is kept from one to the other. Where fp8 is emulated casts and products are made in fp32.
    """
    x, w, y = z.tokens * ins, ins * outs, z.tokens * outs
    if not z.fp8:
        return 0, z.product * w
    if z.kernels:
        return x + w, 2 * y + x + 4 * w

    def product(a: int, b: int, out: int) -> int:
        return a + b + max(4 * (a + b + out), 8 * out)

    forward = max(8 * x, x + 8 * w, product(x, w, y)) - z.e * y
    towards_input = max(8 * y, 2 * y + 8 * w, y + product(y, w, x)) - z.e * x
    return forward, max(towards_input, 2 * y + 8 * x, y + product(y, x, w))


def _dropped(name: str, z: Sizes) -> Op:
    """Keeps one byte per element."""
    n = z.own * z.hidden
    return Op(name, n, HASH * n + z.stream + z.normed, z.residual + 2 * z.normed)


def _activation(z: Sizes) -> Op:
    """Keeps what it reads; the output is the next op's to keep."""
    n = z.e * z.tokens * z.ffn
    gated = z.model.activation == "swiglu"
    reads = (2 if gated else 1) * n
    if z.kernels:
        return Op(z.model.activation, reads, z.stream + n, z.residual + reads + n)
    kept, forward, backward = {"swiglu": (3, 1, 5), "relu2": (1, 2, 3)}.get(z.model.activation, (1, 1, 2))
    biased = _unbiased(z)
    # What it is computed from once more; without a bias relu2 alone keeps something else for itself.
    read = n if z.model.activation == "relu2" and not z.model.bias else biased
    original = read if z.again else 0
    return Op(
        z.model.activation,
        kept * n + original,
        z.stream + forward * n + biased - original,
        z.residual + backward * n,
    )


def _unbiased(z: Sizes) -> int:
    """The up product before its bias, which lives on while the feed-forward part runs."""
    gated = z.model.activation == "swiglu"
    return 0 if z.kernels or not z.model.bias else z.e * z.tokens * z.ffn * (2 if gated else 1)


def _attention(z: Sizes) -> Iterator[Op]:
    """Keeps query, key, value, the result (which the next product keeps too), and what its backward needs."""
    if z.ring:
        yield _ring(z)
        return
    if z.cp == 1:
        yield from _whole_attention(z, z.moved)
        return
    # All columns of a share of the heads, dealt out anew: as many bytes, in one piece, and what they were made of.
    made = 2 * z.fused + (z.e * z.tokens * (z.q + z.kv) if z.moved else 0)
    for op in _whole_attention(z, moved=False):
        mixed = 0 if z.plain else z.e * z.tokens * z.q  # a kernel keeps its result, which the way back copies
        dealing = z.stream + (5 if z.rows > 1 else 4) * z.fused - op.saved
        undoing = z.residual + 2 * mixed + 4 * z.fused
        yield Op(op.name, op.saved + mixed, max(made + op.forward, dealing), max(op.backward, undoing))


def _whole_attention(z: Sizes, moved: bool) -> Iterator[Op]:
    """Of all columns; moved: query and key are no longer views of the fused product."""
    model = z.model
    e, tokens, groups = z.e, z.tokens, z.q // z.kv
    fused, mixed = z.fused, e * tokens * z.q
    if not z.plain:
        # value is a view of the fused product, which lives as long; query and key are too, unless they moved on
        copies = e * tokens * (z.q + z.kv) if moved else 0
        wide_query = 4 * tokens * z.q if z.kernels else 0
        sums = z.w * tokens * z.heads
        # Kernels take the documents' mask as numbers to add; as truth values it is there beside them.
        mask = z.rows * z.whole**2 if z.documents else 0
        saved, backward = fused + copies + sums + e * mask, z.residual + 2 * mixed + fused + wide_query
        yield Op("attention", saved, z.stream + mask, backward)
        return
    if groups > 1:
        alone = z.rows > 1 or moved
        kept = mixed * 2 + (mixed if alone else fused)
    elif z.rows > 1:
        kept = fused
    else:
        kept = fused + (e * tokens * (z.q + z.kv) if moved else 0)
    scores = z.scores
    drops = bool(model.attention_dropout)
    rounded = (e if z.cast else 0) * scores
    weights = z.w * scores + z.whole**2 * (z.rows if z.documents else 1)
    weights += (1 + e) * scores if drops else rounded
    # The gradient of the softmax beside what it is of; the weights that met the values are gone by then.
    backward = z.residual + 2 * mixed + (2 * z.w - (e if drops or z.cast else 0)) * scores
    if z.again:
        yield _attention_again(z, fused, moved, weights, backward)
        return
    yield Op("query, key, value", kept, z.stream + fused, z.residual + 2 * fused)
    forward = max((HASH + e) * scores if drops else 0, (z.w + 2 * e) * scores)
    yield Op("attention weights", weights, z.stream + forward, backward)


def _attention_again(z: Sizes, fused: int, moved: bool, weights: int, backward: int) -> Op:
    """The plain form as frugal as a fused kernel: keeps query, key and value, and what says which weights are dropped.

    weights, backward: what the weights take, and what lives beside them in their backward; both live while it runs.
    """
    e, mixed = z.e, z.e * z.tokens * z.q
    scores, mask = z.scores, z.whole**2
    repeated = 2 * mixed if z.q > z.kv else 0
    copies = repeated + mixed if repeated else fused
    copies = copies if z.rows > 1 else repeated
    rounded = z.cast and e
    forward, again = (2 * z.w + rounded) * scores + mixed + mask, weights + backward
    saved = fused + (e * z.tokens * (z.q + z.kv) if moved else 0)
    if z.model.attention_dropout:
        saved += 8 * (z.tokens * z.cp + z.heads // z.cp + z.whole)
        forward = max(forward, (HASH + z.w + e) * scores)
        again = max(again, (HASH + 2 * z.w + (rounded or 1)) * scores + mask)
    return Op("attention", saved, z.stream + repeated + mask + forward, copies + again)


def _ring(z: Sizes) -> Op:
    """Parts by the keys of one rank after the other (parallel/context.py): keeps query, key, value, the result and its
    log-sum-exp, and of a dropout what says which weights are dropped."""
    e, w, tokens = z.e, z.w, z.tokens
    mixed, sums = e * tokens * z.q, w * tokens * z.heads
    travelling = 2 * e * tokens * 2 * z.kv
    saved = z.fused + sums + (e * tokens * (z.q + z.kv) if z.moved else 0)
    if z.model.attention_dropout:
        saved += 8 * (tokens * z.cp + z.heads + z.whole)
    forward = z.stream + travelling + 2 * w * tokens * z.q
    backward = z.residual + travelling + w * tokens * (z.q + 4 * z.kv) + 2 * mixed + z.fused
    if z.kernels and not z.plain and not z.documents:
        return Op("attention", saved, forward, backward)
    # The plain form; its result lies by heads, so that the next product keeps a copy.
    scores = z.rows * z.heads * z.length**2
    each = HASH + e - 2 * w if z.model.attention_dropout else 0
    rounded = e if z.cast and not each else 0
    forward, backward = forward + (3 * w + each) * scores, backward + (4 * w + each + rounded) * scores
    return Op("attention", saved + mixed, forward, backward)
