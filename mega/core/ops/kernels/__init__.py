"""Triton kernels, and attention for Hopper GPUs in CUDA C++ (`hopper`). Most kernels have the name, signature and
shapes of a reference in ops/. `adamw` is called from optim. `mapped_sum`, which sums tensors through mapped memory of
other GPUs, is called from parallel. The module `language` contains code that all kernels share.

The kernels compute in fp32 for tensors of any dtype. For the backward pass, they store only the tensors that it needs.
Every sum has a fixed order, so identical inputs produce bitwise identical results; with deterministic algorithms this
is also true of `add_rows`, which otherwise adds in no fixed order. This package is imported only on CUDA.
"""

from __future__ import annotations

from typing import Any


def table() -> dict[str, Any]:
    """Return a dict: name of the op -> implementation, for `suite.Ops`."""
    from mega.core.ops.kernels import (
        activation,
        adamw,
        attention,
        cross_entropy,
        dropout,
        heads,
        norm,
        paged_attention,
        rows,
        sums,
        total,
    )

    return {
        "add_norm": norm.add_norm,
        "added": dropout.added,
        "attention": attention.attention,
        "partial_attention": attention.PARTIAL,
        "paged_attention": paged_attention.PAGED,
        "activate": activation.activate,
        "bias_gradient": sums.bias_gradient,
        "activate_weighted": activation.activate_weighted,
        "sum_rows": rows.sum_rows,
        "add_rows": rows.add_rows,
        "split_heads": heads.split_heads,
        "softmax_parts": cross_entropy.softmax_parts,
        "softmax_gradient": cross_entropy.softmax_gradient,
        "nll_and_gradient": cross_entropy.nll_and_gradient,
        "total": total.total,
        "accumulate": total.accumulate,
        "adamw": adamw.adamw,
    }
