"""`mega preprocess`: text in, token files out."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega.core.config.sections import TokenizerConfig

if TYPE_CHECKING:
    from mega.core.data.preprocess import Report


def run(
    input: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="JSON lines, also .gz .zst .xz .bz2; .txt; .parquet; a dataset or folder; a glob; - for stdin",
        ),
    ],
    output_prefix: Annotated[str, typer.Option("--output-prefix", help="beginning of the output names")],
    tokenizer: TokenizerConfig,
    json_keys: Annotated[
        list[str] | None, typer.Option("--json-keys", "--json-key", help="keys of each line; text by default")
    ] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="end every document with its token")] = False,
    parse_special_tokens: Annotated[
        bool, typer.Option("--parse-special-tokens", help="special tokens that a text spells are tokens, not text")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", help="processes that tokenise")] = 1,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option("--on-error", help="at a line that is not a document")
    ] = "stop",
    text_lines: Annotated[bool, typer.Option("--text-lines", help="each line of a text file is a document")] = False,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="cut documents into sentences, as BERT and T5 need")
    ] = False,
    sentence_splitter: Annotated[
        Literal["punkt", "sentencex"] | None,
        typer.Option("--sentence-splitter", help="punkt reads its data from NLTK_DATA; sentencex is faster [punkt]"),
    ] = None,
    lang: Annotated[str | None, typer.Option("--lang", help="language of the sentences [english]")] = None,
    keep_newlines: Annotated[
        bool, typer.Option("--keep-newlines", help="blanks after a sentence belong to it")
    ] = False,
    shard: Annotated[
        str, typer.Option("--shard", help="i/N, 1 <= i <= N: only this part; then `mega data merge` the parts")
    ] = "1/1",
    resume: Annotated[
        bool, typer.Option("--resume", help="note progress on the disk, and resume from what is noted")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace token files of other inputs or settings; equal ones are kept")
    ] = False,
) -> int:
    """Turn text into token files, PREFIX_KEY_document.bin and .idx, that training reads as --data-path.

    The files are Megatron-LM's, byte for byte, however many workers write them. See also: mega data.
    """
    from mega.core.data.preprocess import Sentences, preprocess
    from mega.core.data.progress import shown
    from mega.core.data.sources import STDIN, find

    index, count = _shard(shard)
    of_sentences = {"--sentence-splitter": sentence_splitter, "--lang": lang, "--keep-newlines": keep_newlines or None}
    for flag, value in of_sentences.items() if not split_sentences else ():
        if value is not None:
            raise ValueError(f"{flag}: sets how sentences are cut; give --split-sentences too, or leave it out")
    cut = Sentences(splitter=sentence_splitter or "punkt", language=lang or "english", keep_newlines=keep_newlines)
    with shown(sum(path.stat().st_size for path in find(input) if path != STDIN)) as progress:
        report = preprocess(
            input,
            output_prefix if count == 1 else f"{output_prefix}_{index + 1:05}-of-{count:05}",
            dataclasses.asdict(tokenizer),
            json_keys=json_keys or ["text"],
            append_eod=append_eod,
            parse_special_tokens=parse_special_tokens,
            workers=workers,
            on_error=on_error,
            text_lines=text_lines,
            sentences=cut if split_sentences else None,
            shard=(index, count),
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    _print(report, parse_special_tokens)
    return 0


def _print(report: Report, parsed: bool) -> None:
    for reason in report.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    print(f"{report.documents:,} documents, {report.tokens:,} tokens, {report.skipped:,} lines skipped")
    if report.spelled:
        how = "tokens, by --parse-special-tokens" if parsed else "text; --parse-special-tokens makes tokens of them"
        print(f"{report.spelled:,} documents spell special tokens such as {report.spells}, which are {how}")
    for line in report.notes:
        print(f"mega: {line}", file=sys.stderr)
    for name in report.outputs:
        print(f"{name}.bin {name}.idx")
    if report.kept:
        print("made before, of the same inputs and settings, and kept; --overwrite makes them again")


def _shard(text: str) -> tuple[int, int]:
    """2/8 -> (1, 8)"""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {text}: must be i/N with 1 <= i <= N, such as 2/8")
    return int(index) - 1, int(count)
