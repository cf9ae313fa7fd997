"""`mega train-tokenizer`: a vocabulary from one's own texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    input: Annotated[list[Path], typer.Option("--input", help="JSON-lines files")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="entries, 257 or more")],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="where vocab.json and merges.txt go")],
    json_key: Annotated[str, typer.Option("--json-key", help="key of each line that holds the text")] = "text",
) -> int:
    """Train a byte-level BPE tokenizer, in the two files that --tokenizer GPT2BPETokenizer reads."""
    from mega.core.text.train import texts, train_bpe

    for path in train_bpe(texts(input, json_key), vocab_size, output_dir):
        print(path)
    return 0
