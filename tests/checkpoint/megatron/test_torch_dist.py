"""Reading Megatron-core's distributed checkpoints: every tensor accounted for, nothing of the pickle run."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron import torch_dist, torch_dist_write
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.store import locate
from tests.support.shared import shared


def folder(tmp_path: Path) -> Path:
    source = shared("megatron_dist_ckpt_tp2/.metadata").parent
    return Path(shutil.copytree(source, tmp_path / "iter_0000010"))


def test_a_real_checkpoint_with_its_17_tensors(tmp_path: Path) -> None:
    """Hidden 12, 2 layers, vocabulary 100, 64 positions, tensor parallel 2; every byte against torch's own reader."""
    source = folder(tmp_path)
    report = convert(source, tmp_path / "run", "mega", Layout(2, 2), heads=4)
    found = locate(tmp_path / "run")
    assert found.step == 10
    model = found.meta["config"]["model"]
    sizes = {key: model[key] for key in ("layers", "hidden", "heads", "kv_heads", "vocab", "positions", "ffn")}
    assert sizes == {
        "layers": 2,
        "hidden": 12,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 100,
        "positions": 64,
        "ffn": 48,
    }
    assert (model["norm"], model["tied"], model["bias"], model["activation"]) == ("layernorm", False, True, "gelu_tanh")

    whole = reference(source)
    assert len(whole) == 17 and report.elements == sum(tensor.numel() for tensor in whole.values())
    fused = whole["decoder.layers.self_attention.linear_qkv.weight"][1].view(4, 3, 3, 12)
    for number, part in enumerate("qkv"):
        key = f"weights/model.layers.1.self_attn.{part}_proj.weight"
        ours = torch.zeros(12, 12)
        found.read([Piece(key, (12, 12), (0, 0), ours)])
        assert torch.equal(ours, fused[:, number].reshape(12, 12))
    ours = torch.zeros(12, 48)
    found.read([Piece("weights/model.layers.0.mlp.down_proj.weight", (12, 48), (0, 0), ours)])
    assert torch.equal(ours, whole["decoder.layers.mlp.linear_fc2.weight"][0])


def reference(source: Path) -> dict[str, torch.Tensor]:
    """torch's own reader, as a second opinion; the folder is trusted here."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(source)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: torch.empty(entry.size) for name, entry in stored.items() if hasattr(entry, "size")}
    load(state, storage_reader=reader, no_dist=True)
    return state


def test_arguments_must_come_from_somewhere(tmp_path: Path) -> None:
    source = folder(tmp_path)
    with pytest.raises(CheckpointError, match="give --num-attention-heads"):
        convert(source, tmp_path / "run", "mega", Layout())
    with pytest.raises(CheckpointError, match="--num-attention-heads 5: must divide 12"):
        convert(source, tmp_path / "run", "mega", Layout(), heads=5)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_index_runs_nothing(tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = folder(tmp_path)
    (source / ".metadata").write_bytes(pickle.dumps({"a": Bomb()}, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        convert(source, tmp_path / "run", "mega", Layout(), heads=4)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04.", b"\x80\x04h\x05.", b"\x80\x04)R.", b"garbage", b"(" * 99]
)
def test_broken_pickles(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="index"):
        torch_dist.read_records(data, Path("index"))


@pytest.mark.parametrize("change", ["missing file", "truncated", "exchanged"])
def test_damaged_data_files(tmp_path: Path, change: str) -> None:
    source = folder(tmp_path)
    if change == "missing file":
        (source / "__1_0.distcp").unlink()
    elif change == "truncated":
        os.truncate(source / "__0_0.distcp", 20_000)
    else:
        shutil.copy(source / "__0_0.distcp", source / "__1_1.distcp")
    with pytest.raises(ValueError, match="distcp"):
        convert(source, tmp_path / "run", "mega", Layout(), heads=4)
    assert not (tmp_path / "run").exists()


def test_what_is_stored_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order, and also a tensor that is a part of another, which torch keeps whole."""
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(10.0)[4:], "c": torch.tensor(7, dtype=torch.int16)}
    with (tmp_path / torch_dist_write.FILE).open("wb") as file:
        made = torch_dist_write.DistcpFile(file)
        for name, tensor in tensors.items():
            made.add(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    (tmp_path / ".metadata").write_bytes(made.index())
    read, taken = torch_dist.DistributedSource._bytes, list[int]()

    def counted(own: Any, name: str, file: str, offset: int, length: int) -> bytearray:
        taken.append(offset)
        return read(own, name, file, offset, length)

    monkeypatch.setattr(torch_dist.DistributedSource, "_bytes", counted)
    source = torch_dist.DistributedSource(tmp_path)
    for _ in range(2):
        for name, tensor in tensors.items():
            assert torch.equal(source.read(f"0.0.0/{name}", Box((0,) * tensor.dim(), tuple(tensor.shape))), tensor)
    assert torch.equal(source.read("0.0.0/a", Box((1, 2), (2, 1))), tensors["a"][1:, 2:3])
    assert len(taken) == len(set(taken)) == 3


def test_paths_in_the_index_stay_in_the_folder(tmp_path: Path) -> None:
    source = folder(tmp_path)
    data = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(data.replace(b"__1_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        found = torch_dist.DistributedSource(source)
        for name, (shape, _) in found.tensors.items():
            found.read(name, Box((0,) * len(shape), shape))
