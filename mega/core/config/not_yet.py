"""What the options can say and the house cannot do yet: one row each, gone when the feature is built."""

from __future__ import annotations

from collections.abc import Callable

from mega.core.config.run import RunConfig

NOT_YET: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "--sample-kind": (
        lambda run: run.masking.sample_kind != "gpt",
        "the models of BERT and T5 are not built yet; `mega data show-sample` shows their samples",
    ),
    "--grad-dtype of 16 bits": (
        lambda run: run.precision.dtype != "fp16" and run.precision.grad_dtype in ("fp16", "bf16"),
        "16-bit gradients are not built yet; valid --grad-dtype: fp32, fp64",
    ),
    "--optimizer sgd": (
        lambda run: run.optimizer.optimizer == "sgd",
        "sgd is not built yet; valid --optimizer: adam",
    ),
}
"""Option -> (does a resolved run ask for it, what to say)."""
