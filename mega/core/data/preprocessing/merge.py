"""Concatenate pairs of token files into one pair, for `mega data merge`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mega.core.data.indexed import IndexedDataset, bin_path, idx_path
from mega.core.data.preprocessing.preprocess import Report, existing_report
from mega.core.data.preprocessing.provenance import existing_pairs, work_of
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.files import check_folder
from mega.core.text.identity import ALLOW, judge
from mega.core.text.tokenizer import TokenizerIdentity


def merge(prefixes: Sequence[str], output_prefix: str, *, overwrite: bool = False, mixed: bool = False) -> Report:
    """Concatenate the pairs `prefixes` into the pair `output_prefix`. Documents keep their order.

    overwrite: as in `preprocess`. mixed: whether to accept pairs made with different tokenizers.
    Raises ValueError naming a pair that is damaged, or whose dtype or tokenizer differs from the first pair's.
    """
    if not prefixes:
        raise ValueError("--input: must be at least one prefix of a .bin/.idx pair")
    check_folder("--output-prefix", output_prefix, Path(output_prefix).parent)
    for prefix in prefixes:
        if os.path.realpath(bin_path(prefix)) == os.path.realpath(bin_path(output_prefix)):
            raise ValueError(
                f"--output-prefix {output_prefix}: is the input {prefix}, which would be lost; name another"
            )
    first = IndexedDataset(prefixes[0])
    report = Report(outputs=[output_prefix])
    tokenizer = _common_tokenizer(prefixes, mixed, report.notes)
    provenance: dict[str, object] = {} if tokenizer is None else {"tokenizer": tokenizer._asdict()}
    work = work_of(["merge", provenance], [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)])
    if kept_output := existing_pairs(output_prefix, [output_prefix], work, overwrite):
        return existing_report(report, kept_output)
    if tokenizer is not None and (tokenizer_options := first.note.get("tokenizer_options")) is not None:
        provenance["tokenizer_options"] = tokenizer_options
    with IndexedWriter(output_prefix, first.dtype, noted={**provenance, "work": work}) as writer:
        for prefix in prefixes:
            writer.append(IndexedDataset(prefix))
    report.documents, report.tokens = writer.documents, writer.tokens
    return report


def _common_tokenizer(prefixes: Sequence[str], mixed: bool, notes: list[str]) -> TokenizerIdentity | None:
    """Return the tokenizer that encoded all pairs. If the tokenizer of a pair is not recorded, return None and add a
    note.

    mixed: whether to accept different tokenizers.
    """
    tokenizers = {prefix: IndexedDataset(prefix).tokenizer for prefix in prefixes}
    recorded = {prefix: tokenizer for prefix, tokenizer in tokenizers.items() if tokenizer is not None}
    if not recorded:
        return None
    first, *later_prefixes = recorded
    other = next(
        (prefix for prefix in later_prefixes if recorded[prefix].fingerprint != recorded[first].fingerprint), None
    )
    if other is not None:
        difference = f"--input {other}: was made with {recorded[other]}, but {first} with {recorded[first]}"
        advice = f"merge pairs of one tokenizer, or give {ALLOW} where an id means the same in both"
        judge("data merge", "token files", difference, advice=advice, allowed=mixed)
    if other is None and len(recorded) == len(tokenizers):
        return recorded[first]
    unknown = next((prefix for prefix, tokenizer in tokenizers.items() if tokenizer is None), None)
    reason = f"{first} and {other} have different ones" if unknown is None else f"{unknown} notes none"
    notes.append(f"no tokenizer is noted for the result: {reason}")
    return None
