"""`mega data merge | verify | note | inspect | from-numpy | split | presplit | detokenize | encode | show-sample`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega.core.config.sections import DataConfig, MaskingConfig, TokenizerConfig
from mega.options import Command, command

if TYPE_CHECKING:
    from mega.core.text.tokenizer import Tokenizer

app = typer.Typer(help="Merge, verify, inspect and split corpora.", no_args_is_help=True, add_completion=False)

Prefixes = Annotated[list[str], typer.Argument(help="prefixes of .bin/.idx pairs")]
Input = Annotated[list[str], typer.Option("--input", help="JSON lines, plain or packed; folders; globs")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an output that exists")]
Key = Annotated[str, typer.Option("--json-key", help="key of the text")]


@app.command(cls=Command)
def merge(
    output_prefix: Annotated[str, typer.Option("--output-prefix", help="prefix of the pair to write")],
    prefixes: Annotated[list[str] | None, typer.Argument(help="prefixes in order, or one folder")] = None,
    input: Annotated[
        list[str] | None, typer.Option("--input", help="the same, as Megatron-LM's merge_datasets.py has it")
    ] = None,
    overwrite: Overwrite = False,
    allow_tokenizer_mismatch: Annotated[
        bool, typer.Option("--allow-tokenizer-mismatch", help="merge pairs that different tokenizers made")
    ] = False,
) -> None:
    """One pair from many: their documents, concatenated. Those of a folder are sorted by name."""
    from mega.core.data.merge import merge as merged

    given = [*(prefixes or []), *(input or [])]
    if len(given) == 1 and Path(given[0]).is_dir():
        given = sorted(str(path)[: -len(".idx")] for path in Path(given[0]).glob("*.idx"))
    report = merged(given, output_prefix, overwrite=overwrite, mixed=allow_tokenizer_mismatch)
    for line in report.notes:
        print(line)
    print(f"{output_prefix}: {report.documents:,} documents, {report.tokens:,} tokens{_kept(report.kept)}")


@app.command()
def verify(prefixes: Prefixes) -> None:
    """Check magic, sizes, offsets and documents, and the checksums noted when the pair was written."""
    from mega.core.data import inspect

    for prefix in prefixes:
        inspect.verify(prefix, typer.echo)


def _kept(kept: bool) -> str:
    return "; made before, of the same inputs and settings, and kept" if kept else ""


def _built(options: TokenizerConfig) -> Tokenizer | None:
    """Anything said of a tokenizer asks for one: without its kind the ids would stay bare, and its files unread."""
    from mega.core.text.build import build

    return build(**dataclasses.asdict(options)) if options != TokenizerConfig() else None


def _note(prefixes: Prefixes, tokenizer: TokenizerConfig) -> None:
    """Note counts, range of ids, checksums and, if one is given, the tokenizer of pairs that another program wrote."""
    from mega.core.data import inspect

    made = _built(tokenizer)
    for prefix in prefixes:
        inspect.note(prefix, typer.echo, made)


app.command(name="note", cls=Command)(command(_note))


def _inspect(
    prefix: Annotated[str, typer.Argument(help="prefix of a .bin/.idx pair")],
    tokenizer: TokenizerConfig,
    samples: Annotated[int, typer.Option("--samples", help="sequences to show")] = 3,
) -> None:
    """Documents, tokens, a histogram of lengths and some sequences, decoded if a tokenizer is given."""
    from mega.core.data import inspect

    inspect.show(prefix, typer.echo, _built(tokenizer), samples)


app.command(name="inspect", cls=Command)(command(_inspect))


@app.command(name="from-numpy", cls=Command)
def from_numpy(
    input: Annotated[list[str], typer.Option("--input", help=".npy files of ids, folders, globs")],
    output_prefix: Annotated[str, typer.Option("--output-prefix", help="prefix of the pair to write")],
    eod: Annotated[int | None, typer.Option("--eod", help="a run of ids ends a document after this one")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Token files from numpy arrays: an array of arrays, a table with a document a row, or one run of ids."""
    from mega.core.data.numpy_files import convert

    report = convert(input, output_prefix, eod, overwrite=overwrite)
    print(f"{output_prefix}: {report.documents:,} documents, {report.tokens:,} tokens{_kept(report.kept)}")


@app.command(cls=Command)
def split(
    input: Input,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="where the three files go")],
    shares: Annotated[str, typer.Option("--split", help="shares of train, valid and test")] = "98, 1, 1",
    seed: Annotated[int, typer.Option("--seed", help="seed of the choice")] = 1234,
    json_key: Key = "text",
    overwrite: Overwrite = False,
) -> None:
    """Documents into train.jsonl, valid.jsonl and test.jsonl, by share and seed."""
    from mega.core.data.split import split as into_parts

    for name, count in into_parts(input, output_dir, shares, seed, json_key, overwrite=overwrite).items():
        print(f"{output_dir / name}.jsonl: {count:,} documents")


@app.command(cls=Command)
def presplit(
    input: Input,
    output: Annotated[Path, typer.Option("--output", help="the JSON-lines file to write")],
    sentence_splitter: Annotated[Literal["punkt", "sentencex"], typer.Option("--sentence-splitter")] = "punkt",
    lang: Annotated[str, typer.Option("--lang", help="language of the text")] = "english",
    json_key: Key = "text",
    overwrite: Overwrite = False,
) -> None:
    """Each document's text as one sentence a line."""
    from mega.core.data.split import presplit as by_line

    count = by_line(input, output, sentence_splitter, lang, json_key, overwrite=overwrite)
    print(f"{output}: {count:,} documents")


@app.command(cls=Command)
def detokenize(
    input: Annotated[list[str], typer.Option("--input", help="plain text; folders; globs; - for stdin")],
    output: Annotated[Path | None, typer.Option("--output", help="the file to write [standard output]")] = None,
    detokenizer: Annotated[
        Literal["wiki", "ptb", "fairseq"], typer.Option("--detokenizer", help="whose rules")
    ] = "fairseq",
    overwrite: Overwrite = False,
) -> None:
    """Each line of a published test set as people write it: without the blanks around punctuation."""
    from mega.core.data.plain_lines import detokenize as by_line

    count = by_line(input, output, detokenizer, overwrite=overwrite)
    if output is not None:
        print(f"{output}: {count:,} lines")


def _encode(
    input: Annotated[list[str], typer.Option("--input", help="plain text, encoded line by line")],
    output: Annotated[list[Path], typer.Option("--output", help="the files to write, one for each input")],
    tokenizer: TokenizerConfig,
    keep_empty: Annotated[bool, typer.Option("--keep-empty", help="an empty line stays one; else left out")] = False,
    overwrite: Overwrite = False,
) -> None:
    """The ids of each line's tokens as a line of text, as fairseq-preprocess reads them. See also: mega preprocess."""
    from mega.core.data.plain_lines import encode as by_line
    from mega.core.text.build import build

    made = build(**dataclasses.asdict(tokenizer))
    count, empty = by_line(input, output, made, keep_empty=keep_empty, overwrite=overwrite)
    print(f"{' '.join(map(str, output))}: {count:,} lines, {empty:,} empty lines left out")


app.command(name="encode", cls=Command)(command(_encode))


def _sample(
    data: DataConfig,
    masking: MaskingConfig,
    tokenizer: TokenizerConfig,
    input: Annotated[
        list[str] | None, typer.Option("--input", help="show one conversation of these files on its own")
    ] = None,
    number: Annotated[int, typer.Option("--number", help="which conversation or training sample, from 0")] = 0,
    count: Annotated[int, typer.Option("--count", help="how many, one after another")] = 1,
    seq_length: Annotated[int, typer.Option("--seq-length", help="tokens of a training sample")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="seed of the samples' order")] = 1234,
    binary_head: Annotated[
        bool,
        typer.Option("--binary-head/--no-binary-head", " /--bert-no-binary-head", help="a BERT sample has two parts"),
    ] = True,
) -> None:
    """Training samples, a line a token, as a model gets them: its text, its id, whether it is trained on."""
    from mega.core.data import show
    from mega.core.text.build import build

    made = build(**dataclasses.asdict(tokenizer))
    if number < 0 or count < 1:
        raise ValueError(f"--number {number} --count {count}: must be at least 0 and 1")
    if seq_length < 1 or not 0 <= seed < 2**32:
        raise ValueError(f"--seq-length {seq_length} --seed {seed}: must be at least 1 and 0 .. {2**32 - 1}")
    if input:
        template = "plain" if data.chat_template == "auto" else data.chat_template
        lines = show.conversations(input, template, made, number, count)
    else:
        lines = show.samples(data, masking, made, number, count, seq_length=seq_length, seed=seed, pairs=binary_head)
    for line in lines:
        typer.echo(line)


app.command(name="show-sample", cls=Command)(command(_sample))
