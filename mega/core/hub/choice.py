"""Which files of a repository are fetched, by their names alone: nothing that could be executed when it is opened."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from mega.core.hub.names import HubName, Kind

SMALL = (".json", ".model", ".txt", ".jinja")
"""Endings of files that describe a model or its tokenizer."""

TOKENIZER = re.compile(r"(tokenizer.*|vocab.*|merges.*|special_tokens.*|added_tokens.*|chat_template.*|dict.*)")
ROWS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".txt")
PACKED = ("", ".gz", ".zst", ".xz", ".bz2")
DESCRIBES = ("dataset_info.json", "dataset_infos.json", "state.json", "requirements.txt", "license.txt")
"""JSON and text of a data set's folder that holds no rows."""

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""A split -> the words by which the Hub recognises it in the path of a file."""


def chosen(files: Collection[str], name: HubName, kind: Kind) -> list[str]:
    """Of the paths in a repository those that are fetched. Errors: ValueError, without the name, where nothing is."""
    if kind == "dataset":
        return _rows(files, name.part)
    if name.part is not None:
        if name.part not in files or not name.part.endswith(".gguf"):
            valid = ", ".join(sorted(file for file in files if file.endswith(".gguf"))[:8])
            raise ValueError(f"has no file {name.part}; valid after the colon: {valid or 'nothing, it has no .gguf'}")
        return [name.part]
    top = sorted(file for file in files if "/" not in file)
    small = [file for file in top if file.endswith(SMALL)]
    if kind == "tokenizer":
        found = [file for file in small if TOKENIZER.fullmatch(file) or file == "config.json"]
        if not any(file != "config.json" for file in found):
            raise ValueError("holds no tokenizer: no tokenizer.json, tokenizer.model, vocab.json or vocab.txt")
        return found
    weights = [file for file in top if file.endswith(".safetensors")]
    if any(file.startswith("model") for file in weights):  # the same in another form
        weights = [file for file in weights if not file.startswith("consolidated")]
    if not weights:
        ggufs = [file for file in top if file.endswith(".gguf")]
        other = next((file for file in top if file.endswith((".bin", ".pth", ".pt", ".h5", ".msgpack"))), None)
        why = f"; it has {other}, which is not fetched: only safetensors are" if other is not None else ""
        why = f"; choose a file by a colon and its name: {', '.join(ggufs[:8])}" if ggufs else why
        raise ValueError(f"holds no .safetensors{why}")
    return [*small, *weights]


def _rows(files: Collection[str], part: str | None) -> list[str]:
    found = [file for file in sorted(files) if _holds_rows(file)]
    if not found:
        raise ValueError(f"holds no rows: no {', '.join(ROWS)}, alone or packed")
    by_split = {split: [file for file in found if _of_split(file, words)] for split, words in SPLITS.items()}
    if part is None:
        kept = by_split["train"] or [file for file in found if not any(file in of for of in by_split.values())] or found
    else:
        kept = by_split.get(part) or fnmatch.filter(found, part) or fnmatch.filter(found, f"{part}/*")
    if not kept:
        splits = [split for split, of in by_split.items() if of]
        raise ValueError(
            f"has no rows in {part}; valid after the colon: {', '.join((*splits, 'a pattern of its files'))}"
        )
    tables = [file for file in kept if file.endswith((".parquet", ".arrow"))]
    folders = {file.partition("/")[0] for file in kept if "/" in file} - {"data"}
    if part is None and len(folders) > 1 and len(kept) == sum("/" in file for file in kept):
        raise ValueError(f"has several parts; choose one by a colon: {', '.join(sorted(folders)[:12])}")
    return tables or kept


def _holds_rows(file: str) -> bool:
    base = file.rpartition("/")[2].lower()
    return (
        base not in DESCRIBES and not base.startswith(".") and any(base.endswith(r + p) for r in ROWS for p in PACKED)
    )


def _of_split(file: str, words: Collection[str]) -> bool:
    """Whether a word stands in a path between signs, as the Hub looks for it.

    >>> _of_split("data/train-00000-of-00001.parquet", ("train",)), _of_split("constraint.jsonl", ("train",))
    (True, False)
    """
    return re.search(rf"(?:^|[^a-z0-9])(?:{'|'.join(words)})(?:$|[^a-z])", file.lower()) is not None
