"""Detokenize plain text, or encode it as token ids, one line at a time. In fairseq, this step precedes binarization.

Each input line produces one output line (unless empty lines are dropped), so that the output can be compared with
fairseq's. `mega preprocess` writes token files instead.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mega.core.data.preprocessing.provenance import check_absent
from mega.core.data.sources import STDIN, find
from mega.core.files import check_folder, whole_file
from mega.core.text.detokenize import DETOKENIZERS, fairseq
from mega.core.text.tokenizer import Tokenizer

_TOGETHER = 256
"""Number of lines per tokenizer call."""


def detokenize(inputs: Sequence[str], output: Path | None, name: str, *, overwrite: bool = False) -> int:
    """Detokenize every line, and write the lines to `output` or standard output. Return the number of lines.

    name: name of a detokenizer. Errors: ValueError naming the flag, or file and line.
    """
    change: Callable[[str], str] = fairseq if name == "fairseq" else DETOKENIZERS[name]
    paths = find(inputs)
    if output is not None:
        _check_output(output, paths, overwrite)
    return _write(output, (change(line) for path in paths for line in _lines(path)))


def encode(
    inputs: Sequence[str],
    outputs: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    keep_empty: bool = False,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Write the token ids of each line, separated by spaces, to one output file per input file. Return the number of
    lines and the number of empty lines.

    White space at the ends of a line is removed. Empty lines are dropped unless `keep_empty`.
    Errors: ValueError naming the flag, or file and line.
    """
    if len(inputs) != len(outputs):
        raise ValueError(f"--output: {len(outputs)} files for {len(inputs)} of --input; give one for each")
    paths = [find([word])[0] for word in inputs]
    for output in outputs:
        _check_output(output, paths, overwrite)
    written_lines, empty_lines = 0, 0
    for path, output in zip(paths, outputs, strict=True):
        counts = [0]
        written_lines += _write(output, _encoded(_lines(path), tokenizer, keep_empty, counts))
        empty_lines += counts[0]
    return written_lines, empty_lines


def _encoded(lines: Iterator[str], tokenizer: Tokenizer, keep_empty: bool, empty: list[int]) -> Iterator[str]:
    while block := [line.strip() for line in itertools.islice(lines, _TOGETHER)]:
        texts = block if keep_empty else [text for text in block if text]
        empty[0] += len(block) - len(texts)
        if texts:
            encoded = tokenizer.encode_batch(texts)
            bounds = itertools.pairwise(encoded.offsets.tolist())
            yield from (" ".join(map(str, encoded.ids[begin:end].tolist())) for begin, end in bounds)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Errors: ValueError naming file and line if a line is not UTF-8."""
    with sys.stdin.buffer if path == STDIN else open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 at byte {error.start} of the line") from None


def _check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    check_folder("--output", output, output.parent)
    if output.is_dir():
        raise ValueError(f"--output {output}: is a directory; must be a file")
    for path in inputs:
        if os.path.realpath(path) == os.path.realpath(output):
            raise ValueError(f"--output {output}: is the input {path}; name another file")
    check_absent("--output", output, [output], overwrite)


def _write(output: Path | None, lines: Iterator[str]) -> int:
    count = 0
    if output is None:
        for count, line in enumerate(lines, 1):  # noqa: B007 - counted
            sys.stdout.write(line + "\n")
        return count
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as file:
        for count, line in enumerate(lines, 1):  # noqa: B007 - counted
            file.write(line.encode() + b"\n")
    return count
