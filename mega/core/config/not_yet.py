"""What the options can say and the house cannot do yet: one row each, gone when the feature is built."""

from __future__ import annotations

from collections.abc import Callable

from mega.core.config.run import RunConfig

NOT_YET: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
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
    "--optimizer sgd": (
        lambda run: run.optimizer.optimizer == "sgd",
        "sgd is not built yet; valid --optimizer: adam",
    ),
}
"""Option -> (does a resolved run ask for it, what to say)."""
