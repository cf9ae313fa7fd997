"""Small checkpoints of Megatron-core's forms with an optimizer: what `mega reshard` writes, flat buffers by torch's own
writer, and the recorded ones where the shared data is there."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from mega.core.architecture import inventory
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron import torch_dist
from mega.core.checkpoint.forms.megatron.torch_dist_write import DistcpFile
from mega.core.checkpoint.forms.megatron.trees import TRACKER
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.sections import ModelConfig
from tests.checkpoint.megatron.test_core import MODELS, write_dist
from tests.checkpoint.megatron.test_core import own as weights_alone
from tests.checkpoint.megatron.test_state import GPT, LLAMA, NUMBERS, PROGRESS, SCHEDULE
from tests.support.shared import shared


def run_of(directory: Path, model: ModelConfig, dtype: torch.dtype, *, seed: int = 3, step: int = 7) -> Path:
    """A checkpoint as a run saves it, one step of which was skipped; moments that Adam can have come to."""
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for tensor in inventory(model):
        master = torch.randn(tensor.shape, generator=generator)
        kinds = {"weights": master.to(dtype), "master": master} if dtype != torch.float32 else {"weights": master}
        kinds["moment1"] = torch.randn(master.shape, generator=generator) * 1e-3
        kinds["moment2"] = torch.rand(master.shape, generator=generator) * 1e-6
        pieces += [
            Piece(f"{kind}/{tensor.name}", tuple(master.shape), (0,) * master.dim(), value)
            for kind, value in kinds.items()
        ]
    meta = {
        "config": {"model": dataclasses.asdict(model), "optimizer": {"optimizer": "adam", "lr": 3e-4, **NUMBERS}},
        "progress": {**PROGRESS, "step": step, "consumed": 4 * step},
        "updates": step - 1,
        "scaler": {"scale": 4096.0, "clean": 5, "patience": 1} if dtype == torch.float16 else None,
        "schedule": SCHEDULE,
    }
    CheckpointStore(directory).save(step, pieces, meta)
    return directory


@dataclass(frozen=True)
class CoreForm:
    """One form. `write` puts a tree, of another run for another seed, at another step, into a new folder."""

    write: Callable[[Path, int, int], None]
    verb: str = "reshard"
    path: str = "."
    options: tuple[str, ...] = ()

    def make(self, folder: Path, seed: int = 3, step: int = 7) -> Path:
        self.write(folder, seed, step)
        return folder


def resharded(saver: str, model: ModelConfig, dtype: torch.dtype, layout: tuple[int, int], flat: bool) -> CoreForm:
    def write(folder: Path, seed: int, step: int) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            run = run_of(Path(scratch) / "run", model, dtype, seed=seed, step=step)
            convert(run, folder, saver, Layout(*layout), distributed=flat)

    return CoreForm(write)


def flat_buffers(folder: Path, seed: int, step: int) -> None:
    """dp_reshardable, which only Megatron writes."""
    with tempfile.TemporaryDirectory() as scratch:
        model, dtype = MODELS["llama"], torch.bfloat16
        here = write_dist(Path(scratch), weights_alone(Path(scratch) / "run", model, dtype), model, 2, 2, dtype)
        shutil.copytree(here, folder / here.name)
    (folder / TRACKER).write_text("7")


CORE: dict[str, CoreForm] = {
    "mcore, fp32": resharded("mcore-local", GPT, torch.float32, (2, 1), False),
    "mcore, bf16": resharded("mcore", LLAMA, torch.bfloat16, (1, 2), False),
    "mcore, flat fp16": resharded("mcore-local", LLAMA, torch.float16, (2, 1), True),
    "torch_dist, fp32": resharded("torch_dist", GPT, torch.float32, (1, 1), False),
    "torch_dist, bf16": resharded("torch_dist", LLAMA, torch.bfloat16, (1, 1), False),
    "torch_dist, reshardable": resharded("torch_dist", LLAMA, torch.float16, (1, 1), True),
    "torch_dist, dp_reshardable": CoreForm(flat_buffers),
}
"""Written here."""


def trusted_index(folder: Path) -> Any:
    """The index of a folder that was written here, or recorded."""
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301


def whole_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """The tensors of a torch_dist folder, and the bytes of what else it holds. The folder is our own: it is trusted."""
    index = trusted_index(folder)
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, bytes] = {}
    for key, place in index.storage_data.items():
        data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        if key.offset is None:
            others[key.fqn] = data
            continue
        part = torch.load(BytesIO(data), weights_only=True)
        made = tensors.setdefault(key.fqn, torch.empty(index.state_dict_metadata[key.fqn].size, dtype=part.dtype))
        made[tuple(slice(a, a + n) for a, n in zip(key.offset, part.shape, strict=True))] = part
    return tensors, others


def write_whole(folder: Path, tensors: dict[str, torch.Tensor], others: dict[str, bytes]) -> None:
    for old in folder.glob("*.distcp"):
        old.unlink()
    with open(folder / "__0_0.distcp", "wb") as file:
        distcp = DistcpFile(file)
        for name, tensor in tensors.items():
            distcp.add(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for name, data in others.items():
            distcp.opaque(name, torch.load(BytesIO(data), weights_only=True)[0])
    (folder / ".metadata").write_bytes(distcp.index())


def read_equal_bytes_once() -> None:
    """From now on the same bytes of a `torch_dist` folder, its index or a tensor, are unpickled once in this process:
    copies of a tree that differ in one place then take a third of the time."""

    def once(read: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[tuple[Any, ...], Any] = {}

        def found(source: bytes | BytesIO, path: Path, *others: Any) -> Any:
            key = (source.getvalue() if isinstance(source, BytesIO) else source, *others)
            if key not in known:
                known[key] = read(source, path, *others)
            return known[key]

        return found

    torch_dist.unpickled = once(torch_dist.unpickled)
    torch_dist.read_records = once(torch_dist.read_records)


def recorded(name: str, form: str) -> CoreForm:
    def write(folder: Path, seed: int, step: int) -> None:
        with tempfile.TemporaryDirectory() as scratch, tarfile.open(shared(f"megatron_core/{name}.tar.xz")) as archive:
            archive.extractall(scratch, filter="data")
            shutil.copytree(Path(scratch) / name / form, folder)

    return CoreForm(write)


_FORMS = {
    "gpt_fp32_tp2pp1dp2_plain": ("torch", "torch_dist"),
    "llama_bf16_tp2pp2dp1_do": ("torch", "torch_dist", "torch_dist_full"),
    "te_llama_fp32_tp2pp1dp1_plain": ("torch", "torch_dist"),
}
RECORDED = {f"{name}, {form}": recorded(name, form) for name, forms in _FORMS.items() for form in forms}
"""What Megatron-core 0.18.2 wrote: the step and the seed are its own."""
