"""Convert checkpoints and weights between formats, as `mega convert-llama` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from mega.core.checkpoint.forms.options import ConvertOptions
from mega.core.checkpoint.own.options import Layout
from mega.core.hub.folders import local_place

if TYPE_CHECKING:
    from mega.core.checkpoint.own.ledger import ConversionReport


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    base: str | Path | None = None,
    parts: int = 1,
    outtype: Literal["f32", "f16", "bf16", "q8_0", "fp8"] | None = None,
    **layout: int,
) -> ConversionReport:
    """Convert weights to a mega checkpoint, or a mega checkpoint to another format, in a new directory. The directory
    is written completely or not at all. The returned report counts tensors, elements and bytes, and lists settings that
    are lost.

    source: directory of a run or of a step, or weights in the format of Hugging Face, Meta, llama2.c or fairseq; the
    format is recognised by the files. to: format to write, "mega", "hf", "meta", "peft" or "gguf"; default "hf" for a
    mega checkpoint, otherwise "mega". base: base weights of a peft adapter. parts: number of files of a Meta folder.
    outtype: type of matrices in a GGUF file, or "fp8" in a Hugging Face folder. layout: tp, pp and chunks for which the
    files of a mega checkpoint are split.

    Errors: ValueError naming the option, file or tensor. After an error, `target` is unchanged.
    """
    from mega.api.config import checked_keywords
    from mega.core.config.schema import schema_of

    layout_schema = schema_of({"layout": Layout})
    checked = checked_keywords({"to": to, "outtype": outtype}, schema_of({"weights": ConvertOptions}))
    target_layout = layout_schema.value("layout", checked_keywords(layout, layout_schema))
    assert isinstance(target_layout, Layout)
    kind = None if checked["to"] is None else str(checked["to"])
    weights = ConvertOptions(
        load_dir=Path(local_place("source", os.fspath(source))),
        save_dir=Path(target),
        to=kind,
        base=None if base is None else Path(base),
        parts=parts,
        outtype=outtype,
    )
    return converted(weights, target_layout).report


class Converted(NamedTuple):
    """The result of a conversion, for the command's report."""

    report: ConversionReport
    runs_both: bool
    """Whether --verify compares the outputs of both models, because transformers can run one of them."""
    imported: Path | None
    """The mega checkpoint that was written from weights of another format, or None."""


def converted(weights: ConvertOptions, layout: Layout) -> Converted:
    """Check the options and convert the weights. Errors: ValueError naming the flag, file or tensor."""
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
    target_form = weights.to or default_target(source)
    check_pair(load_dir, source, target_form)
    flags = {"--base": weights.base, "--parts": weights.parts, "--outtype": weights.outtype}
    check_flags(source, writer_of(target_form), {**layout.flags, **flags})
    # Comparing logits needs transformers, which can open only Hugging Face's format. Weights that are rounded to fp8
    # are compared with a bound for each element instead.
    runs_both = weights.verify and "hf" in (source.name, target_form) and weights.outtype is None
    if runs_both:
        from mega.core.proof.logits import check_transformers

        check_transformers()
    base, parts = weights.base, weights.parts
    report = convert(
        load_dir, save_dir, target_form, layout, base=base, parts=parts, outtype=weights.outtype, tokens=special_tokens
    )
    return Converted(report, runs_both, report.path if source is not OWN and target_form != "peft" else None)
