"""Own checkpoint -> own checkpoint, cut for another layout: weights, masters, moments and the rest.

Any layout loads into any other without this; it serves those who want files that fit their ranks. A few
blocks are in memory at a time, and a ledger proves that nothing was lost or doubled.
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
"""Called with bytes done and bytes in all."""


def reshard(
    load_dir: Path, save_dir: Path, layout: Layout, progress: Progress = lambda done, total: None
) -> ConversionReport:
    """Write the checkpoint at `load_dir` (a run's directory: its newest; or a step's) into `save_dir`.

    Errors: ValueError naming the flag, file or tensor; then `save_dir` has no new checkpoint.
    """
    source = locate(load_dir)
    if source.path.parent.resolve() == save_dir.resolve():
        raise ValueError(f"--save-dir {save_dir}: must not be the directory that is read")
    files = plan_files(source.tensors, model_of(source.meta, str(source.path)), layout)
    ledger = Ledger({key: prod(shape) for key, (shape, _) in source.tensors.items()})
    total = sum(piece.bytes for pieces in files for piece in pieces)
    done, counting = 0, threading.Lock()

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        nonlocal done
        tensor = read_part(source, piece.key, box)
        ledger.moved(piece.key, box.elements, bool(torch.isfinite(tensor).all()))
        with counting:
            done += tensor.numel() * tensor.element_size()
            progress(done, total)
        return tensor

    store = store_at(save_dir)
    store.save_all(
        source.step,
        files,
        _with_layout(source, layout),
        fetch=fetch,
        check=ledger.close,
        attachments=source.attachments,
    )
    elements = sum(ledger.expected.values())
    where = save_dir / store.path(source.step).name
    return ConversionReport(len(source.tensors), elements, total, where, ledger.notes)


def _with_layout(source: Checkpoint, layout: Layout) -> dict[str, Json]:
    """The source's plain state, its parallel section saying the layout of the new files."""
    config = below(source.meta, "config")
    if isinstance(parallel := config.get("parallel"), dict):
        config = {**config, "parallel": {**parallel, **layout.section}}
    return {**source.meta, "config": config}
