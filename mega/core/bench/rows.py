"""The named rows (benchmark runs) of `mega bench`, and result files. This module does not import torch, so that an
invalid row is reported without delay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from mega.core.config.compose import compose
from mega.core.config.run import Options
from mega.core.untrusted import Json


def _w1(world: int) -> Mapping[str, object]:
    return {"vocab": 50304, "micro_batch": max(1, min(64, 512 // world)), "global_batch": 512}


def _w2(world: int) -> Mapping[str, object]:
    """Options of w2. A single rank has too little memory and recomputes cheap activations; several ranks shard master
    weights and moments."""
    if world == 1:
        return {"micro_batch": 2, "global_batch": 16, "recompute": "selective"}
    return {"micro_batch": 2, "global_batch": 4 * world, "zero": 1}


def _w2_fp8(world: int) -> Mapping[str, object]:
    return {**_w2(world), "fp8": True}


def _w3(world: int) -> Mapping[str, object]:
    """Options of w3. 18 bytes per parameter are 50 GB per rank on 8 ranks, and 99 GB on 4. The device computes a block
    faster than the host can launch the block's kernels, so the row uses a CUDA graph."""
    tensor = {"tp": 4 if world == 4 else 8, "sequence_parallel": True, "tp_overlap": True, "cuda_graph": True}
    return {"micro_batch": 4, "global_batch": 4, **tensor}


def _window(world: int) -> Mapping[str, object]:
    """Options of the row `window`: 8 blocks, and samples four times as long as the attention window."""
    return {"layers": 8, "seq_length": 16384, "micro_batch": 1, "global_batch": 4 * world}


_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def _bert(world: int) -> Mapping[str, object]:
    """Options of the row `bert`, with the dropout of BERT's training."""
    return {"micro_batch": max(1, min(128, 256 // world)), "global_batch": 256, **_DROPOUT}


def _t5(world: int) -> Mapping[str, object]:
    """Options of the row `t5`: 512 tokens in the encoder and 128 in the decoder, with dropout."""
    return {"micro_batch": max(1, min(64, 512 // world)), "global_batch": 512, **_DROPOUT}


ROWS: Mapping[str, tuple[str, Callable[[int], Mapping[str, object]]]] = {
    "w1": ("gpt2-345m", _w1),
    "w2": ("llama2-7b", _w2),
    "w2-fp8": ("llama2-7b", _w2_fp8),
    "w3": ("gpt-22b", _w3),
    "window": ("mistral-7b", _window),
    "bert": ("bert-345m", _bert),
    "t5": ("t5-220m", _t5),
}
"""Row -> preset, and a function of the number of ranks that returns additional options."""

LR = 1e-4
"""Learning rate of a row, and of a measured run that has no learning rate."""

_EVERY_ROW = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "lr": LR, "dtype": "bf16"}


def row(name: str, flags: Mapping[str, object], world: int) -> Options:
    """Return the run of a named row on `world` ranks. flags: the user's flags, which override the row.

    Errors: ValueError for an unknown row.

    >>> row("w2", {"recompute": "none"}, 1).memory.recompute, row("w2", {}, 8).batch.global_batch
    ('none', 32)
    """
    if name not in ROWS:
        raise ValueError(f"row {name}: is not known; valid: {', '.join(ROWS)}")
    preset, values = ROWS[name]
    return compose(preset, {**_EVERY_ROW, **values(world)}, flags)


def read_rows(flag: str, path: str) -> list[Mapping[str, Json]]:
    """Read a file written by --json. Errors: ValueError, naming the flag, if the file has different content."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        if all(isinstance(row["name"], str) and float(row["tokens_per_second"]) > 0 for row in rows):
            return rows
        error: Exception | str = "names must be words, speeds greater than 0"
    except (OSError, ValueError, KeyError, TypeError) as problem:
        error = problem
    raise ValueError(f"{flag} {path}: is not a file written by mega bench --json ({error})")
