"""What the options can say and the house cannot do yet: one row each, gone when the feature is built."""

from __future__ import annotations

from collections.abc import Callable

from mega.core.config.run import RunConfig

NOT_YET: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "--sample-kind": (
        lambda run: run.masking.sample_kind != "gpt",
        "the models of BERT and T5 are not built yet; `mega data show-sample` shows their samples",
    ),
}
"""Option -> (does a resolved run ask for it, what to say)."""
