"""A small byte-level BPE vocabulary from one's own texts, in the two files that gpt2.py reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mega.core.files import whole_file
from mega.core.text.gpt2 import END_OF_TEXT, byte_letters


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> tuple[Path, Path]:
    """Write vocab.json and merges.txt into `directory` and return their paths.

    Ids 0 .. 255 are the bytes, then come the merges in order of rank, and the last id is <|endoftext|>.
    Few texts may give fewer than `vocab_size` entries. Raises ValueError for a vocab_size below 257.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size}: must be at least 257, 256 bytes and {END_OF_TEXT}")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(byte_letters().values()), show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    model = json.loads(library.to_str())["model"]

    vocab = {**model["vocab"], END_OF_TEXT: len(model["vocab"])}
    merges = [" ".join(pair) for pair in model["merges"]]
    directory.mkdir(parents=True, exist_ok=True)
    vocab_file, merge_file = directory / "vocab.json", directory / "merges.txt"
    with whole_file(vocab_file) as file:
        file.write(json.dumps(vocab, ensure_ascii=False, indent=0).encode())
    with whole_file(merge_file) as file:
        file.write("".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode())
    return vocab_file, merge_file


def texts(paths: Sequence[Path], key: str = "text") -> Iterator[str]:
    """The text under `key` of every line of JSON-lines files. Raises ValueError naming the file and line at fault."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--input {path}: no such file")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _text(json.loads(line), key)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None


def _text(found: object, key: str) -> str:
    text = found.get(key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'must be a JSON object with a text under "{key}"')
    return text
