"""Choose which files of a repository to fetch, based only on their names. Files that could run code when opened, such
as pickles, are never chosen."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from mega.core.hub.names import HubName, Kind

SMALL = (".json", ".model", ".txt", ".jinja")
"""Suffixes of the files that describe a model or its tokenizer."""

POOLING = "1_Pooling/config.json"
"""The file that contains the pooling settings of a sentence-transformers model."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The file that contains the chat template for conversations with functions."""

TOKENIZER = re.compile(r"(tokenizer.*|vocab.*|merges.*|special_tokens.*|added_tokens.*|chat_template.*|dict.*)")
ROWS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".txt")
PACKED = ("", ".gz", ".zst", ".xz", ".bz2")
DESCRIBES = ("dataset_info.json", "dataset_infos.json", "state.json", "requirements.txt", "license.txt")
"""JSON and text files in a data set's folder that do not contain rows."""

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words in a file's path by which the Hub recognises the split."""


def chosen(files: Collection[str], name: HubName, kind: Kind) -> list[str]:
    """Return the files to fetch. files: all files of the repository.

    Errors: ValueError if no file is suitable. The message continues a sentence that begins with the repository's name.
    """
    if kind == "dataset":
        return _rows(files, name.part)
    if name.part is not None:
        if name.part not in files or not name.part.endswith(".gguf"):
            valid = ", ".join(sorted(file for file in files if file.endswith(".gguf"))[:8])
            raise ValueError(f"has no file {name.part}; valid after the colon: {valid or 'nothing, it has no .gguf'}")
        return [name.part]
    top = sorted(file for file in files if "/" not in file)
    small = [*(file for file in top if file.endswith(SMALL)), *({TOOL_TEMPLATE} & set(files))]
    if kind == "tokenizer":
        tokenizer_files = [
            file for file in small if TOKENIZER.fullmatch(file) or file in ("config.json", TOOL_TEMPLATE)
        ]
        if not any(TOKENIZER.fullmatch(file) for file in tokenizer_files):
            raise ValueError("holds no tokenizer: no tokenizer.json, tokenizer.model, vocab.json or vocab.txt")
        return tokenizer_files
    weights = [file for file in top if file.endswith(".safetensors")]
    if any(file.startswith("model") for file in weights):  # consolidated.* contains the same weights in Meta's format
        weights = [file for file in weights if not file.startswith("consolidated")]
    if not weights:
        ggufs = [file for file in top if file.endswith(".gguf")]
        other = next((file for file in top if file.endswith((".bin", ".pth", ".pt", ".h5", ".msgpack"))), None)
        remedy = f"; it has {other}, which is not fetched: only safetensors are" if other is not None else ""
        remedy = f"; choose a file by a colon and its name: {', '.join(ggufs[:8])}" if ggufs else remedy
        raise ValueError(f"holds no .safetensors{remedy}")
    return [*small, *([POOLING] if POOLING in files else []), *weights]


def _rows(files: Collection[str], part: str | None) -> list[str]:
    """Return the files that contain a data set's rows. part: a split or a pattern of file names; default: the training
    split."""
    row_files = [file for file in sorted(files) if _holds_rows(file)]
    if not row_files:
        raise ValueError(f"holds no rows: no {', '.join(ROWS)}, alone or packed")
    by_split = {split: [file for file in row_files if _of_split(file, words)] for split, words in SPLITS.items()}
    if part is None:
        selected = (
            by_split["train"]
            or [file for file in row_files if not any(file in files_of_split for files_of_split in by_split.values())]
            or row_files
        )
    else:
        selected = by_split.get(part) or fnmatch.filter(row_files, part) or fnmatch.filter(row_files, f"{part}/*")
    if not selected:
        splits = [split for split, files_of_split in by_split.items() if files_of_split]
        raise ValueError(
            f"has no rows in {part}; valid after the colon: {', '.join((*splits, 'a pattern of its files'))}"
        )
    tables = [file for file in selected if file.endswith((".parquet", ".arrow"))]
    # If there is one folder per configuration (language, subset), the user must choose, because there is no default.
    folders = {file.partition("/")[0] for file in selected if "/" in file} - {"data"}
    if part is None and len(folders) > 1 and len(selected) == sum("/" in file for file in selected):
        raise ValueError(f"has several parts; choose one by a colon: {', '.join(sorted(folders)[:12])}")
    return tables or selected


def _holds_rows(file: str) -> bool:
    base = file.rpartition("/")[2].lower()
    return (
        base not in DESCRIBES and not base.startswith(".") and any(base.endswith(r + p) for r in ROWS for p in PACKED)
    )


def _of_split(file: str, words: Collection[str]) -> bool:
    """Whether a path contains one of the words, delimited by punctuation or by the path's ends, as in the Hub's rule.

    >>> _of_split("data/train-00000-of-00001.parquet", ("train",)), _of_split("constraint.jsonl", ("train",))
    (True, False)
    """
    return re.search(rf"(?:^|[^a-z0-9])(?:{'|'.join(words)})(?:$|[^a-z])", file.lower()) is not None
