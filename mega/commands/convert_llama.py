"""`mega convert-llama`: convert weights of Hugging Face, Meta, llama.cpp, llama2.c and fairseq to mega checkpoints, and
back."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mega.api.conversion import converted
from mega.core.checkpoint.forms.options import ConvertOptions
from mega.core.checkpoint.own.options import Layout

if TYPE_CHECKING:
    from mega.core.proof.logits import LogitComparison


def run(weights: ConvertOptions, layout: Layout) -> int:
    """Convert weights to a mega checkpoint for any layout, or a mega checkpoint to another format.

    Supports Llama and similar models, GPT-2, BERT and fairseq's Megatron-11b. Adapters of a run are merged unless --to
    is peft. The format to read is recognised by the file names. No code in the files is executed, and the conversion
    checks that every element is converted exactly once.
    """
    load_dir, save_dir = weights.load_dir, weights.save_dir
    report, runs_both, imported = converted(weights, layout)
    summary = f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, {report.bytes:,} bytes"
    print(summary, *report.notes, sep="\n")
    _print_doubts(report.losses, imported)
    if runs_both and (comparison := _compared(load_dir, save_dir)) is not None:
        scale = f"largest logit {comparison.scale:.3g}, bound {comparison.bound:.3g}"
        print(f"largest difference of a logit {comparison.largest:.3g} ({scale})")
        if comparison.holds:
            return 0
        from mega.core.proof.logits import not_finite

        not_finite_model = None if math.isfinite(comparison.largest) else not_finite(load_dir, save_dir)
        reason = (
            "do not compute the same"
            if not_finite_model is None
            else f"cannot be compared: {not_finite_model} holds a NaN or an infinity"
        )
        print(f"mega: --verify: {load_dir} and {save_dir} {reason}; {save_dir} is kept", file=sys.stderr)
        return 1
    if weights.verify:
        from mega.core.checkpoint.forms.read_back import read_back

        print(read_back(load_dir, report.path))
    return 0


def _compared(one: Path, other: Path) -> LogitComparison | None:
    """Compare the logits of two models; None if the models cannot generate text."""
    from mega.core.proof.logits import compare_logits, continues_text

    return compare_logits(one, other) if continues_text(one, other) else None


def _print_doubts(losses: tuple[str, ...], imported: Path | None) -> None:
    """Print the settings that were lost in the conversion, and features of imported weights that cannot be used."""
    from mega.core.inference.loading.identity import doubts

    for line in (*losses, *(() if imported is None else doubts(imported))):
        print(f"mega: {line}", file=sys.stderr)
