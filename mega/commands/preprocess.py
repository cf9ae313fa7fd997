"""`mega preprocess`: text in, token files out."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mega.core.config.sections import TokenizerConfig


def run(
    input: Annotated[list[Path], typer.Option("--input", help="JSON-lines files, plain or .gz, or .txt")],
    output_prefix: Annotated[str, typer.Option("--output-prefix", help="beginning of the output names")],
    tokenizer: TokenizerConfig,
    json_keys: Annotated[
        list[str] | None, typer.Option("--json-keys", help="keys of each line; text by default")
    ] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="end every document with its token")] = False,
    workers: Annotated[int, typer.Option("--workers", help="processes that tokenise")] = 1,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option("--on-error", help="at a line that is no document")
    ] = "stop",
) -> int:
    """Turn text into token files, PREFIX_KEY_document.bin and .idx, that training reads as --data-path.

    The files are Megatron-LM's, byte for byte, however many workers write them.
    """
    from mega.core.data.preprocess import preprocess
    from mega.core.data.progress import shown

    with shown(sum(path.stat().st_size for path in input if path.is_file())) as progress:
        report = preprocess(
            input,
            output_prefix,
            dataclasses.asdict(tokenizer),
            json_keys=json_keys or ["text"],
            append_eod=append_eod,
            workers=workers,
            on_error=on_error,
            progress=progress,
        )
    for reason in report.reasons:
        print(f"skipped {reason}", file=sys.stderr)
    print(f"{report.documents:,} documents, {report.tokens:,} tokens, {report.skipped:,} lines skipped")
    for name in report.outputs:
        print(f"{name}.bin {name}.idx")
    return 0
