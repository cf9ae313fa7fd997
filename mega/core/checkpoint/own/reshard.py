"""Convert a mega checkpoint to a different layout: weights, masters, moments and all other tensors.

A checkpoint of any layout can be loaded in any other layout without this conversion. The conversion is for users who
want one file per rank of the new layout. Only a few blocks are in memory at a time, and a ledger checks that no element
was lost or duplicated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch

from mega.core.checkpoint.own.layout import Layout, plan_files
from mega.core.checkpoint.own.ledger import ConversionReport, Ledger
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import Box, Piece
from mega.core.checkpoint.own.source import read_part
from mega.core.checkpoint.own.store import Checkpoint, locate, store_at
from mega.core.untrusted import Json, below

Progress = Callable[[int, int], None]
"""Function that is called with the number of bytes written so far and the total number of bytes."""


def reshard(
    load_dir: Path, save_dir: Path, layout: Layout, progress: Progress = lambda done, total: None
) -> ConversionReport:
    """Write the checkpoint at `load_dir` into `save_dir`. load_dir: a step's directory, or a run's directory for the
    run's newest step.

    Errors: ValueError naming the flag, file or tensor. After an error, `save_dir` has no new checkpoint.
    """
    source = locate(load_dir)
    if source.path.parent.resolve() == save_dir.resolve():
        raise ValueError(f"--save-dir {save_dir}: must not be the directory that is read")
    files = plan_files(source.tensors, model_of(source.meta, str(source.path)), layout)
    ledger = Ledger({key: prod(shape) for key, (shape, _) in source.tensors.items()})
    total = sum(piece.bytes for pieces in files for piece in pieces)
    bytes_done, counting = 0, threading.Lock()

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        nonlocal bytes_done
        tensor = read_part(source, piece.key, box)
        ledger.moved(piece.key, box.elements, bool(torch.isfinite(tensor).all()))
        with counting:
            bytes_done += tensor.numel() * tensor.element_size()
            progress(bytes_done, total)
        return tensor

    store = store_at(save_dir)
    store.save_all(
        source.step,
        files,
        _with_layout(source, layout),
        fetch=fetch,
        check=ledger.close,  # called before the checkpoint is published
        attachments=source.attachments,
    )
    elements = sum(ledger.expected.values())
    path = save_dir / store.path(source.step).name
    return ConversionReport(len(source.tensors), elements, total, path, ledger.notes)


def _with_layout(source: Checkpoint, layout: Layout) -> dict[str, Json]:
    """Return the source's plain state, with the new layout in the parallel section."""
    config = below(source.meta, "config")
    if isinstance(parallel := config.get("parallel"), dict):
        config = {**config, "parallel": {**parallel, **layout.section}}
    return {**source.meta, "config": config}
