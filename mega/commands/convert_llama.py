"""`mega convert-llama`: weights from Hugging Face, Meta, llama2.c or fairseq to checkpoints; back to the first two."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from mega.core.checkpoint.forms.options import ConvertOptions
from mega.core.checkpoint.own.options import Layout


def run(weights: ConvertOptions, layout: Layout) -> int:
    """Turn weights into a checkpoint for any layout, or a checkpoint into a folder that others open.

    Llama and its relatives, GPT-2, BERT, fairseq's Megatron-11b. A run's adapters are merged, unless --to is peft.
    What is read is recognised by its files. Nothing is executed, no tensor is lost or made up.
    """
    from mega.core.files import check_save_dir, check_source

    load_dir, save_dir = weights.load_dir, weights.save_dir
    check_source("--load-dir", load_dir)
    check_save_dir(save_dir)
    if save_dir.resolve() == load_dir.resolve():
        raise ValueError(f"--save-dir {save_dir}: must not be the directory that is read")
    from mega.core.checkpoint.forms.convert import check_pair, convert, default_target
    from mega.core.checkpoint.forms.form import OWN, check_flags, writer_of
    from mega.core.checkpoint.forms.recognise import form_at
    from mega.core.inference.loading.load import special_tokens

    source = form_at(load_dir)
    to = weights.to or default_target(source)
    check_pair(load_dir, source, to)
    check_flags(source, writer_of(to), {**layout.flags, "--base": weights.base, "--parts": weights.parts})
    runs_both = weights.verify and "hf" in (source.name, to)
    if runs_both:
        from mega.core.proof.logits import check_transformers, compare_logits, continues_text, not_finite

        check_transformers()
    base, parts = weights.base, weights.parts
    report = convert(load_dir, save_dir, to, layout, base=base, parts=parts, tokens=special_tokens)
    made = f"{report.path}: {report.tensors:,} tensors, {report.elements:,} elements, {report.bytes:,} bytes"
    print(made, *report.notes, sep="\n")
    _print_doubts(report.losses, report.path if source is not OWN and to != "peft" else None)
    if runs_both and continues_text(load_dir, save_dir):
        found = compare_logits(load_dir, save_dir)
        scale = f"largest logit {found.scale:.3g}, bound {found.bound:.3g}"
        print(f"largest difference of a logit {found.largest:.3g} ({scale})")
        if found.holds:
            return 0
        odd = None if math.isfinite(found.largest) else not_finite(load_dir, save_dir)
        why = "do not compute the same" if odd is None else f"cannot be compared: {odd} holds a NaN or an infinity"
        print(f"mega: --verify: {load_dir} and {save_dir} {why}; {save_dir} is kept", file=sys.stderr)
        return 1
    if weights.verify:
        from mega.core.checkpoint.forms.read_back import read_back

        print(read_back(load_dir, report.path))
    return 0


def _print_doubts(losses: tuple[str, ...], imported: Path | None) -> None:
    """What is lost, and what of imported weights cannot be used."""
    from mega.core.inference.loading.identity import doubts

    for line in (*losses, *(() if imported is None else doubts(imported))):
        print(f"mega: {line}", file=sys.stderr)
