"""`mega data merge | verify | note | inspect | from-numpy | split | presplit | detokenize | encode | show-sample`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega.command_line.help import group
from mega.command_line.options import Command, command
from mega.core.config.sections import DataConfig, MaskingConfig, TokenizerConfig
from mega.core.data.options import (
    DetokenizeOptions,
    EncodeOptions,
    InspectOptions,
    MergeOptions,
    NumpyOptions,
    PresplitOptions,
    SampleOptions,
    SplitOptions,
)

if TYPE_CHECKING:
    from mega.core.text.tokenizer import Tokenizer

app = group("Merge, verify, inspect and split corpora.")

Prefixes = Annotated[list[str], typer.Argument(help="prefixes of .bin/.idx pairs")]


@app.command(cls=Command)
@command
def merge(
    files: MergeOptions,
    prefixes: Annotated[
        list[str] | None, typer.Argument(help="prefixes in the order of merging, or one folder")
    ] = None,
) -> None:
    """Merge pairs of token files into one pair by concatenating their documents. The pairs in a folder are sorted by
    name."""
    from mega.core.data.preprocessing.merge import merge as merged

    all_prefixes = [*(prefixes or []), *(files.input or [])]
    if len(all_prefixes) == 1 and Path(all_prefixes[0]).is_dir():
        all_prefixes = sorted(str(path)[: -len(".idx")] for path in Path(all_prefixes[0]).glob("*.idx"))
    report = merged(all_prefixes, files.output_prefix, overwrite=files.overwrite, mixed=files.allow_tokenizer_mismatch)
    for line in report.notes:
        print(line)
    print(f"{files.output_prefix}: {report.documents:,} documents, {report.tokens:,} tokens{_kept(report.kept)}")


@app.command(cls=Command)
def verify(prefixes: Prefixes) -> None:
    """Check a pair of token files: magic number, sizes, offsets, documents, and the checksums recorded when the pair
    was written."""
    from mega.core.data import inspect

    for prefix in prefixes:
        inspect.verify(prefix, typer.echo)


def _kept(kept: bool) -> str:
    return "; made before, of the same inputs and settings, and kept" if kept else ""


def _built(options: TokenizerConfig) -> Tokenizer | None:
    """Return the tokenizer; None if no tokenizer option is set. If --tokenizer is missing, `build` reports this."""
    from mega.core.text.build import build

    return build(**dataclasses.asdict(options)) if options != TokenizerConfig() else None


def _note(prefixes: Prefixes, tokenizer: TokenizerConfig) -> None:
    """Record information about pairs of token files that another program wrote: counts, range of ids, checksums and, if
    given, the tokenizer."""
    from mega.core.data import inspect

    chosen_tokenizer = _built(tokenizer)
    for prefix in prefixes:
        inspect.note(prefix, typer.echo, chosen_tokenizer)


app.command(name="note", cls=Command)(command(_note))


def _inspect(
    shown: InspectOptions,
    prefix: Annotated[str, typer.Argument(help="prefix of a .bin/.idx pair")],
    tokenizer: TokenizerConfig,
) -> None:
    """Show the number of documents and tokens, a histogram of lengths, and some sequences, decoded with the recorded
    tokenizer or with the one given."""
    from mega.core.data import inspect

    inspect.show(prefix, typer.echo, _built(tokenizer), shown.samples, as_json=shown.json)


app.command(name="inspect", cls=Command)(command(_inspect))


@app.command(name="from-numpy", cls=Command)
@command
def from_numpy(
    files: NumpyOptions,
) -> None:
    """Convert numpy arrays to token files. The input is an array of arrays, a table with one document per row, or one
    long array of ids."""
    from mega.core.data.preprocessing.numpy_files import convert

    report = convert(files.input, files.output_prefix, files.eod, overwrite=files.overwrite)
    print(f"{files.output_prefix}: {report.documents:,} documents, {report.tokens:,} tokens{_kept(report.kept)}")


@app.command(cls=Command)
@command
def split(
    documents: SplitOptions,
) -> None:
    """Split documents randomly into train.jsonl, valid.jsonl and test.jsonl, with given shares and a seed."""
    from mega.core.data.preprocessing.split import split as into_parts

    for name, count in into_parts(
        documents.input,
        documents.output_dir,
        documents.split,
        documents.seed,
        documents.json_key,
        overwrite=documents.overwrite,
    ).items():
        print(f"{documents.output_dir / name}.jsonl: {count:,} documents")


@app.command(cls=Command)
@command
def presplit(
    documents: PresplitOptions,
) -> None:
    """Split the text of each document into one sentence per line."""
    from mega.core.data.preprocessing.split import presplit as by_line

    count = by_line(
        documents.input,
        documents.output,
        documents.sentence_splitter,
        documents.lang,
        documents.json_key,
        overwrite=documents.overwrite,
    )
    print(f"{documents.output}: {count:,} documents")


@app.command(cls=Command)
@command
def detokenize(
    lines: DetokenizeOptions,
) -> None:
    """Detokenize the lines of a published test set, that is, remove the spaces around punctuation."""
    from mega.core.data.preprocessing.plain_lines import detokenize as by_line

    count = by_line(lines.input, lines.output, lines.detokenizer, overwrite=lines.overwrite)
    if lines.output is not None:
        print(f"{lines.output}: {count:,} lines")


def _encode(
    lines: EncodeOptions,
    tokenizer: TokenizerConfig,
) -> None:
    """Write the token ids of each line as text, in the format that fairseq-preprocess reads. See also: mega
    preprocess."""
    from mega.core.data.preprocessing.plain_lines import encode as by_line
    from mega.core.text.build import build

    chosen_tokenizer = build(**dataclasses.asdict(tokenizer))
    count, empty = by_line(
        lines.input, lines.output, chosen_tokenizer, keep_empty=lines.keep_empty, overwrite=lines.overwrite
    )
    print(f"{' '.join(map(str, lines.output))}: {count:,} lines, {empty:,} empty lines left out")


app.command(name="encode", cls=Command)(command(_encode))


def _sample(
    samples: SampleOptions,
    data: DataConfig,
    masking: MaskingConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Show training samples as the model receives them, with one line per token: text, id, and whether the token
    contributes to the loss."""
    from mega.core.data import show
    from mega.core.text.build import build

    chosen_tokenizer = build(**dataclasses.asdict(tokenizer))
    if samples.number < 0 or samples.count < 1:
        raise ValueError(f"--number {samples.number} --count {samples.count}: must be at least 0 and 1")
    if samples.seq_length < 1 or not 0 <= samples.seed < 2**32:
        raise ValueError(
            f"--seq-length {samples.seq_length} --seed {samples.seed}: must be at least 1 and 0 .. {2**32 - 1}"
        )
    if samples.input:
        template = "plain" if data.chat_template == "auto" else data.chat_template
        lines = show.conversations(samples.input, template, chosen_tokenizer, samples.number, samples.count)
    else:
        lines = show.samples(
            data,
            masking,
            chosen_tokenizer,
            samples.number,
            samples.count,
            seq_length=samples.seq_length,
            seed=samples.seed,
            pairs=samples.binary_head,
        )
    for line in lines:
        typer.echo(line)


app.command(name="show-sample", cls=Command)(command(_sample))
