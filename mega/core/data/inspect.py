"""Check a pair of token files, and report statistics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.config.sections import TokenizerConfig
from mega.core.data.indexed import IndexedDataset, bin_path, idx_path, note_path, noted_tokenizer, read_note
from mega.core.text.build import build, missing_file
from mega.core.text.identity import judge
from mega.core.text.tokenizer import Tokenizer, TokenizerIdentity
from mega.core.untrusted import Json

_BLOCK = 1 << 22

Print = Callable[[str], None]


def verify(prefix: str, report: Print) -> None:
    """Check header, sizes, offsets and documents and, if the pair has a note, the checksums.

    Raises ValueError naming the damaged file.
    """
    data = IndexedDataset(prefix)
    note = _note(prefix)
    sums = note.get("sha256")
    if sums is None:
        report(f"{prefix}: {_sizes(data)}; the structure is sound; no checksums were noted{_made_with(data)}")
        return
    if not isinstance(sums, dict):
        raise ValueError(f"{note_path(prefix)}: corrupt, its sha256 is not a table")
    if note.get("counts") != [len(data), data.documents, len(data.tokens)]:
        raise ValueError(f"{note_path(prefix)}: counts {note.get('counts')} are not those of the .idx")
    for path, name in ((bin_path(prefix), "bin"), (idx_path(prefix), "idx")):
        if _sha256(path) != sums.get(name):
            raise ValueError(f"{path}: corrupt, its sha256 is not the one in {note_path(prefix)}")
    report(f"{prefix}: {_sizes(data)}; structure and checksums are sound{_made_with(data)}")


def note(prefix: str, report: Print, tokenizer: Tokenizer | None = None) -> None:
    """Write the note of a pair that has none, such as a pair from Megatron-LM, so that later damage can be detected.

    tokenizer: the tokenizer that encoded the pair. It is recorded so that training with another tokenizer is rejected.
    A tokenizer that is already recorded is kept.
    Raises ValueError if the tokenizer lacks an id of the pair, or if another tokenizer is recorded.
    """
    data = IndexedDataset(prefix)
    smallest, largest = data.token_range()
    sums = {"bin": _sha256(bin_path(prefix)), "idx": _sha256(idx_path(prefix))}
    # entries of an old note are valid only for the bytes that the note describes
    old_note = {name: value for name, value in data.note.items() if data.note.get("sha256") == sums}
    identity = None if tokenizer is None else tokenizer.identity()
    recorded = TokenizerIdentity.read(old_note.get("tokenizer"))
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise ValueError(_foreign(prefix, largest, tokenizer))
    if tokenizer is not None and recorded is not None and not tokenizer.made(recorded):
        difference = f"{prefix}: was made with {recorded}, as {note_path(prefix)} says, and not with {identity}"
        judge("data note", "token files", difference)
    new_note = {
        **old_note,
        **({} if identity is None else {"tokenizer": identity._asdict()}),
        "counts": [len(data), data.documents, len(data.tokens)],
        "smallest": smallest,
        "largest": largest,
        "sha256": sums,
    }
    from mega.core.files import whole_file

    with whole_file(note_path(prefix)) as file:
        file.write(json.dumps(new_note).encode() + b"\n")
    report(f"{note_path(prefix)}: written")


def show(
    prefix: str, report: Print, tokenizer: Tokenizer | None = None, samples: int = 3, *, as_json: bool = False
) -> None:
    """Report sizes, the range of ids, a histogram of lengths, and the first tokens of some sequences.

    tokenizer: decodes the tokens. If None, the tokenizer recorded with the pair is used; if it cannot be opened, ids
    are reported instead.
    """
    if samples < 0:
        raise ValueError(f"--samples {samples}: must be at least 0")
    data = IndexedDataset(prefix)
    smallest, largest = data.token_range()
    if tokenizer is not None and len(data.tokens) and largest >= tokenizer.vocab_size:
        raise ValueError(_foreign(prefix, largest, tokenizer))
    message = None
    if tokenizer is None:
        tokenizer, message = _recorded_tokenizer(data)
    elif data.tokenizer is not None and not tokenizer.made(data.tokenizer):
        message = f"the texts below are decoded with another tokenizer, {tokenizer.identity()}"
    numbers = np.linspace(0, len(data) - 1, min(samples, len(data)), dtype=int).tolist()
    begins = {number: data.get(number, 0, min(64, int(data.lengths[number]))).tolist() for number in numbers}
    if as_json:
        report(json.dumps({**_summary(data, begins, tokenizer), "message": message}, indent=2))
        return
    report(f"{prefix}: {_sizes(data)}, {data.dtype}, ids {smallest} .. {largest}{_made_with(data)}")
    if message is not None:
        report(message)
    for line in histogram(data.lengths):
        report(line)
    for number, ids in begins.items():
        text = repr(tokenizer.decode(ids)) if tokenizer is not None else " ".join(map(str, ids))
        report(f"sequence {number}, {int(data.lengths[number])} tokens: {text}")


def _recorded_tokenizer(data: IndexedDataset) -> tuple[Tokenizer | None, str | None]:
    """Open the tokenizer recorded with a pair. Return (tokenizer, None), or (None, a message that says why the
    tokenizer cannot be opened); (None, None) if no tokenizer is recorded."""
    recorded_options = noted_tokenizer(data.prefix)
    defaults = dataclasses.asdict(TokenizerConfig())
    if data.tokenizer is None or not recorded_options or not recorded_options.keys() <= defaults.keys():
        return None, None
    advice = "ids are shown; to show texts, give --tokenizer and its files"
    if missing := missing_file(recorded_options):
        return None, f"{missing}, a file of the recorded tokenizer, does not exist; {advice}"
    try:
        tokenizer = build(**{**defaults, **recorded_options})
    except ValueError as error:
        return None, f"the recorded tokenizer cannot be opened ({error}); {advice}"
    if not tokenizer.made(data.tokenizer):
        return None, f"the files of the recorded tokenizer have changed, they are {tokenizer.identity()}; {advice}"
    return tokenizer, None


def _summary(data: IndexedDataset, begins: dict[int, list[int]], tokenizer: Tokenizer | None) -> dict[str, Json]:
    """Return the report of `show` as one JSON object. begins: the first ids of some sequences."""
    smallest, largest = data.token_range()
    counts = {f"{low}..{high}": count for low, high, count in _counts(data.lengths)}
    sample_rows: list[Json] = []
    for number, ids in begins.items():
        text = {} if tokenizer is None else {"text": tokenizer.decode(ids)}
        sample_rows.append({"sequence": number, "tokens": int(data.lengths[number]), "ids": list(ids), **text})
    return {
        "prefix": data.prefix,
        "documents": data.documents,
        "sequences": len(data),
        "tokens": len(data.tokens),
        "dtype": str(data.dtype),
        "smallest": int(smallest),
        "largest": int(largest),
        "tokenizer": None if data.tokenizer is None else dict(data.tokenizer._asdict()),
        "lengths": {name: count for name, count in counts.items()},
        "samples": sample_rows,
    }


def histogram(lengths: NDArray[np.integer]) -> list[str]:
    """Return lines with the number of sequences that have 1, 2 .. 3, 4 .. 7, ... tokens.

    >>> histogram(np.array([1, 2, 3, 3]))
    ['      1 ..       1 tokens            1  25.0 %', '      2 ..       3 tokens            3  75.0 %']
    """
    return [
        f"{low:7} .. {high:7} tokens {count:12,} {100 * count / len(lengths):5.1f} %"
        for low, high, count in _counts(lengths)
    ]


def _counts(lengths: NDArray[np.integer]) -> list[tuple[int, int, int]]:
    """Return (minimum length, maximum length, number of sequences) for each power-of-two range of lengths that
    occurs."""
    if not len(lengths):
        return []
    powers = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(powers).tolist()
    return [(1 << power, (2 << power) - 1, count) for power, count in enumerate(counts) if count]


def _foreign(prefix: str, largest: int, tokenizer: Tokenizer) -> str:
    return (
        f"{prefix}: holds ids up to {largest}, but those of {tokenizer.kind} end at {tokenizer.vocab_size - 1}: "
        "it was made with another tokenizer"
    )


def _made_with(data: IndexedDataset) -> str:
    return "" if data.tokenizer is None else f"; made with {data.tokenizer}"


def _sizes(data: IndexedDataset) -> str:
    return f"{data.documents:,} documents, {len(data):,} sequences, {len(data.tokens):,} tokens"


def _note(prefix: str) -> dict[str, Json]:
    try:
        content = read_note(prefix)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{note_path(prefix)}: corrupt ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{note_path(prefix)}: corrupt, not a JSON object")
    return content


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
