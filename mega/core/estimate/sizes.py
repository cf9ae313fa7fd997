"""The numbers of one tensor rank from which a step's time follows: tokens, widths, and how they are shared out.

Notation: T tokens of a microbatch, n the tokens of this rank between regions (T / tp under sequence parallelism);
e bytes of the dtype, w of max(fp32, dtype); widths (h, q, kv, f, v) are those of one tensor rank.
"""

from __future__ import annotations

from mega.core.architecture import padded
from mega.core.config.resolve import microbatch_rows
from mega.core.config.run import RunConfig
from mega.core.estimate.weights import BYTES, wide
from mega.core.plan.pieces import together


class Sizes:
    """Of a resolved run.

    plain: attention writes its weights out. overlapped: exchanges overlap the products that they feed.
    """

    def __init__(self, run: RunConfig) -> None:
        model, batch, parallel = run.model, run.batch, run.parallel
        assert model.hidden and model.heads and model.kv_heads and model.head_dim and model.ffn and model.vocab
        assert batch.seq_length
        tp, self.model = parallel.tp, model
        self.tp, self.seq = tp, parallel.sequence_parallel and tp > 1
        self.rows, self.length, self.whole = microbatch_rows(run), batch.seq_length // parallel.cp, batch.seq_length
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
        self.vocab = whole // tp
        self.e, self.w = BYTES[run.precision.dtype], wide(run.precision.dtype)
        self.overlapped = parallel.tp_overlap
        self.plain = run.runtime.ops == "reference"
        self.kernels = not self.plain and run.runtime.device != "cpu" and self.e == 2
        self.fp8 = run.precision.fp8
        wide_stream = self.w != self.e and run.precision.residual_fp32
        self.residual = (self.w if wide_stream else self.e) * self.own * self.hidden

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
