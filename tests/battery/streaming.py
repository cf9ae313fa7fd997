"""A Llama of 7B's shape (13.5 GB in bf16) converted from Hugging Face's form, resharded, and exported again: peak
anonymous memory below 2 GB and the largest tensor, and at least half the speed of `cp` of the same bytes, both timed
until the bytes are on the disk and with nothing of the source in the page cache.

    python tests/battery/streaming.py                      needs 30 GB free under $TMPDIR; the files are removed
    STREAMING_LAYERS=2 python tests/battery/streaming.py   a small one, to try it
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.core.architecture import inventory
from mega.core.checkpoint.forms.families.decoders import config_from_model
from mega.core.checkpoint.own.container import write_container
from mega.core.checkpoint.own.layout import planned
from mega.core.checkpoint.own.pieces import Box, Piece
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.sections import ModelConfig
from tests.battery.data_ledger import ROOT, run

SHARD = 5 << 30
LARGEST = 32000 * 4096 * 2
LIMIT = (2 << 30) + LARGEST


def model() -> ModelConfig:
    run = resolve(compose("llama2-7b", flags={"micro_batch": 1}), 1)
    layers = int(os.environ.get("STREAMING_LAYERS", run.model.layers or 0))
    return dataclasses.replace(run.model, layers=layers)


def make(folder: Path) -> Path:
    """The source: random bytes that are finite bf16 numbers, as sharded safetensors."""
    folder.mkdir()
    seven = model()
    block = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        return block[: box.elements].view(box.size)

    shards: list[list[Piece]] = [[]]
    for tensor in inventory(seven):
        piece = planned(tensor.name, tensor.shape, (0,) * len(tensor.shape), tensor.shape, torch.bfloat16)
        if sum(each.bytes for each in shards[-1]) + piece.bytes > SHARD:
            shards.append([])
        shards[-1].append(piece)
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for name, pieces in zip(names, shards, strict=True):
        write_container(folder / name, pieces, None, fetch)
    index = {piece.key: name for name, pieces in zip(names, shards, strict=True) for piece in pieces}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config_from_model(seven, "bfloat16")))
    return folder


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copied(source: Path, target: Path) -> float:
    """Seconds of `cp -r` until the bytes are on the disk."""
    forget(source)
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    forget(target)  # which syncs
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def measured(command: Iterable[str], source: Path) -> tuple[float, int]:
    """Seconds of a verb, and the most anonymous memory that it had at any of its samples (50 a second)."""
    forget(source)
    peak, begin = 0, time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "mega", *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))])
        time.sleep(0.02)
    assert process.wait() == 0, process.returncode
    return time.perf_counter() - begin, peak


def step(source: Path, target: Path, command: list[str]) -> Any:
    def prove() -> dict[str, Any]:
        shutil.rmtree(target, ignore_errors=True)
        size = size_of(source)
        before = copied(source, target)
        seconds, peak = measured([*command, "--load-dir", str(source), "--save-dir", str(target)], source)
        found = {
            "GB": round(size / 1e9, 2),
            "GB/s": round(size / 1e9 / seconds, 3),
            "cp GB/s": round(size / 1e9 / before, 3),
            "of cp": round(before / seconds, 2),
            "peak anonymous MB": peak >> 20,
            "limit MB": LIMIT >> 20,
        }
        assert peak < LIMIT and seconds <= 2 * before, found
        shutil.rmtree(source)
        return found

    return prove


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mega-streaming-") as name:
        home = Path(name)
        hf = make(home / "hf")
        run(
            "streaming",
            [
                ("convert to tp 2, pp 2", step(hf, home / "run", ["convert-llama", "--tp", "2", "--pp", "2"])),
                ("reshard to tp 4, pp 1", step(home / "run", home / "cut", ["reshard", "--tp", "4"])),
                ("export to Hugging Face", step(home / "cut", home / "back", ["convert-llama", "--to", "hf"])),
            ],
        )
