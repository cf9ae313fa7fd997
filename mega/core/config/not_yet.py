"""What the options can say and the house cannot do yet: one row each, gone when the feature is built."""

from __future__ import annotations

from collections.abc import Callable

from mega.core.config.run import RunConfig

NOT_YET: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "--cp above 1": (lambda run: run.parallel.cp > 1, "context parallelism is not built yet; valid --cp: 1"),
    "--schedule zb-h1": (
        lambda run: run.parallel.schedule == "zb-h1",
        "the zero-bubble pipeline is not built yet; valid --schedule: 1f1b, gpipe, interleaved",
    ),
    "--zero above 1": (
        lambda run: run.parallel.zero > 1,
        "sharing gradients and parameters over dp is not built yet; valid --zero: 0, 1",
    ),
    "--dtype fp16": (
        lambda run: run.precision.dtype == "fp16",
        "fp16 and its loss scale are not built yet; valid --dtype: fp32, bf16, fp64",
    ),
    "--grad-dtype of 16 bits": (
        lambda run: run.precision.dtype != "fp16" and run.precision.grad_dtype in ("fp16", "bf16"),
        "16-bit gradients are not built yet; valid --grad-dtype: fp32, fp64",
    ),
    "--residual-fp32": (
        lambda run: run.precision.residual_fp32,
        "the fp32 residual stream is not built yet; leave the flag out",
    ),
    "--embedding-fp32": (
        lambda run: run.precision.embedding_fp32,
        "fp32 embeddings are not built yet; leave the flag out",
    ),
    "--recompute": (
        lambda run: run.memory.recompute == "full",
        "recomputing whole blocks is not built yet; valid --recompute: none, selective",
    ),
    "--optimizer sgd": (
        lambda run: run.optimizer.optimizer == "sgd",
        "sgd is not built yet; valid --optimizer: adam",
    ),
}
"""Option -> (does a resolved run ask for it, what to say)."""
