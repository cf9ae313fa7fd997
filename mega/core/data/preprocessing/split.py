"""Split documents into training, development and test files, according to shares and a seed. The output files contain
text, not tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mega.core.config.sections import SPLITS
from mega.core.data.order import split_boundaries
from mega.core.data.preprocessing.provenance import check_absent
from mega.core.data.sources import STDIN, BadLine, find, lines, parsed
from mega.core.files import check_folder, check_not_input, whole_file


def split(
    inputs: Sequence[str | Path],
    directory: Path,
    shares: str,
    seed: int,
    key: str = "text",
    *,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write train.jsonl, valid.jsonl and test.jsonl into `directory`. Return the number of documents in each file.

    shares: a string in the format of --split, such as "98, 1, 1". The assignment of a document depends only on its
    index, the number of documents and the seed. Each file has its documents in input order. Blank lines are dropped.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed}: must be 0 .. {2**32 - 1}")
    check_folder("--output-dir", directory, directory)
    paths = find(inputs)
    if STDIN in paths:
        raise ValueError("--input -: standard input is gone once it is read, and a split reads twice; give a file")
    check_not_input("--output-dir", directory, paths, [directory / f"{name}.jsonl" for name in SPLITS])
    check_absent("--output-dir", directory, [directory / f"{name}.jsonl" for name in SPLITS], overwrite)
    total = sum(1 for _ in lines(inputs, [key]))
    if not total:
        raise ValueError(f"--input {' '.join(map(str, inputs))}: holds no document")
    bounds = split_boundaries(shares, total)
    owners = np.empty(total, np.int8)  # a permutation instead of independent draws makes the shares exact
    order = np.random.RandomState(seed).permutation(total)
    for part in range(3):
        owners[order[bounds[part] : bounds[part + 1]]] = part
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(whole_file(directory / f"{name}.jsonl")) for name in SPLITS]
        for owner, (_, line) in zip(owners.tolist(), lines(inputs, [key]), strict=True):
            files[owner].write(line.rstrip(b"\r") + b"\n")
    return dict(zip(SPLITS, np.bincount(owners, minlength=3).tolist(), strict=True))


def presplit(
    inputs: Sequence[str | Path],
    output: Path,
    kind: str,
    language: str,
    key: str = "text",
    *,
    overwrite: bool = False,
) -> int:
    """Split each document's text into one sentence per line, and keep the other keys. Return the number of
    documents."""
    from mega.core.text.sentences import splitter

    check_folder("--output", output, output.parent)
    if output.is_dir():
        raise ValueError(f"--output {output}: is a directory; must be a file")
    check_not_input("--output", output, find(inputs))
    check_absent("--output", output, [output], overwrite)
    cut, count = splitter(kind, language), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as file:
        for location, line in lines(inputs, [key]):
            try:
                parsed(line)  # raises ValueError for lines that `preprocess` could not read
                document = json.loads(line)  # `parsed` would round integers of more than 64 bits
                document[key] = "\n".join(s for part in document[key].split("\n") for s in cut(part) if s.strip())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadLine(f"{location}: not a JSON object with text under {key!r} ({error})") from None
            file.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            count += 1
    return count
