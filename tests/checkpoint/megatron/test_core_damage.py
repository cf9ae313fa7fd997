"""Damage in Megatron-core's trees with an optimizer that nothing else would show is refused by name."""

from __future__ import annotations

import argparse
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.foreign import torch_file
from mega.core.checkpoint.forms.megatron.torch_dist import read_records
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from tests.checkpoint.megatron.test_state import LLAMA, own
from tests.support.core_forms import whole_tensors, write_whole

Content = dict[str, Any]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    run = own(folder / "run", LLAMA, torch.bfloat16)
    convert(run, folder / "mcore", "mcore", Layout(2, 1))
    convert(run, folder / "torch_dist", "torch_dist", Layout())
    return folder


def inner(content: Content) -> Content:
    found: Content = content["optimizer"]["optimizer"]
    return found


def below_zero(content: Content) -> None:
    inner(content)["state"][0]["exp_avg_sq"].view(-1)[0] = -1e-9


def not_finite(content: Content) -> None:
    inner(content)["state"][0]["exp_avg"].view(-1)[0] = float("nan")


def no_step(content: Content) -> None:
    del inner(content)["param_groups"][1]["step"]


def listed_step(content: Content) -> None:
    inner(content)["param_groups"][1]["step"] = [6]


def vast_step(content: Content) -> None:
    for group in inner(content)["param_groups"]:
        group["step"] = 10**400


def late_step(content: Content) -> None:
    for group in inner(content)["param_groups"]:
        group["step"] = 8


def other_betas(content: Content) -> None:
    inner(content)["param_groups"][1]["betas"] = (0.5, 0.9)


def two_experts(content: Content) -> None:
    inner(content)["param_groups"][1]["is_expert_parallel"] = torch.ones(2)


def taken_twice(content: Content) -> None:
    indices = inner(content)["param_groups"][1]["params"]
    indices[0] = indices[1]


def other_iteration(content: Content) -> None:
    content["iteration"] = 9


def vast_dropout(content: Content) -> None:
    content["args"].hidden_dropout = 10**400


def old_version(content: Content) -> None:
    content["checkpoint_version"] = 0


CHANGES: dict[Callable[[Content], None], str] = {
    below_zero: r"moment2/\S+: holds a number below zero",
    not_finite: r"moment1/\S+: holds a NaN",
    no_step: r"optimizer: step \['6', 'None'\]: must be one number",
    listed_step: r"optimizer: step \['6', 'list'\]",
    vast_step: "must be one number",
    late_step: "iteration 7, 8 updates of the optimizer|not at the step",
    other_betas: "betas and eps must be the same in all param_groups",
    two_experts: r"param_groups\[1\]: experts",
    taken_twice: "is missing in the optimizer's state",
    vast_dropout: r"args\.hidden_dropout 10{39}: must be a finite number",
    old_version: r"tree/iter_0000007: checkpoint_version 0: has no grouped heads",
    other_iteration: r"mp_rank_01: iteration 9: the first rank's is 7",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_tree(trees: Path, tmp_path: Path, change: Callable[[Content], None]) -> None:
    tree = Path(shutil.copytree(trees / "mcore", tmp_path / "tree"))
    for file in sorted(tree.rglob("*.pt"))[0 if change in (late_step, vast_dropout, old_version) else 1 :]:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, weights_only=True)
        change(content)
        torch.save(content, file)
    refused(tree, CHANGES[change])


FOLDERS = {
    ("mp_rank_01", "mp_rank_00"): "mp_rank_01: args.rank 0: is that of another mp_rank folder",
    ("mp_rank_00", "mp_rank_00"): "mp_rank_01: holds the same weights as the tensor rank before it",
}


@pytest.mark.parametrize("sources", FOLDERS)
def test_folders_of_a_tree(trees: Path, tmp_path: Path, sources: tuple[str, str]) -> None:
    """All of them have the right shapes, and would be read as each other's rows."""
    there, tree = next((trees / "mcore").glob("iter_*")), tmp_path / "tree"
    for rank, source in enumerate(sources):
        shutil.copytree(there / source, tree / f"mp_rank_{rank:02d}")
    refused(tree, FOLDERS[sources])


def refused(tree: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(tree, tree.with_name("back"), "mega", Layout())
    assert not tree.with_name("back").exists()


def test_checksums_are_compared_where_there_are_any(tmp_path: Path) -> None:
    """A digit of the pickle; a file that was written without checksums is read."""
    path = tmp_path / "file.pt"
    torch.save({"iteration": 1234567}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace((1234567).to_bytes(4, "little"), (1234569).to_bytes(4, "little"), 1))
    with pytest.raises(CheckpointError, match=r"file\.pt: it is damaged: data\.pkl is not what its checksum says"):
        torch_file(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"iteration": 1234567}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch_file(path) == {"iteration": 1234567}


@pytest.mark.parametrize("field", [26, 28])
def test_the_length_of_a_name_before_a_record(trees: Path, tmp_path: Path, field: int) -> None:
    """By which torch finds where the record begins: its numbers would be read from elsewhere. Or of extra fields."""
    tree = Path(shutil.copytree(trees / "mcore", tmp_path / "tree"))
    file = next(tree.rglob("mp_rank_01/*.pt"))
    with zipfile.ZipFile(file) as archive:
        at = next(item.header_offset for item in archive.infolist() if item.filename.endswith("/data/3"))
    data = bytearray(file.read_bytes())
    data[at + field] ^= 64
    file.write_bytes(data)
    refused(tree, r"mp_rank_01/model_optim_rng\.pt: it is damaged: the header of data/3 is not what")


@pytest.mark.parametrize("kind", ["", "optimizer.state.fp32_param."])
def test_a_distributed_weight_that_is_lost_and_a_master_of_other_dims(trees: Path, tmp_path: Path, kind: str) -> None:
    tree = Path(shutil.copytree(trees / "torch_dist", tmp_path / "tree"))
    tensors, others = whole_tensors(tree / "iter_0000007")
    tensor = tensors.pop(name := f"{kind}decoder.final_layernorm.weight")
    write_whole(tree / "iter_0000007", {**tensors, **({name: tensor[None]} if kind else {})}, others)
    refused(tree, rf"{tree}.*0\.0\.0/encoder\.final_norm\.weight: (has shape \(1, |is missing)")


def test_a_flipped_number_among_distributed_tensors(trees: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(trees / "torch_dist", tmp_path / "tree"))
    file = tree / "iter_0000007" / "__0_0.distcp"
    with torch.serialization.safe_globals([argparse.Namespace]):
        kept = torch.load(trees / "mcore/iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=True)
    numbers = kept["model"]["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"].view(torch.uint8)
    data = bytearray(file.read_bytes())
    data[data.index(bytes(numbers.tolist()))] ^= 1
    file.write_bytes(data)
    refused(tree, r"__0_0\.distcp: it is damaged: data/0 is not what its checksum says")


def test_metadata_of_another_kind(trees: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(trees / "torch_dist", tmp_path / "tree"))
    (tree / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(tree, r"metadata\.json: sharded_backend 'zarr'")


DOUBLED = b"K\x01\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
INDICES = {
    "a module that takes for ever to spell": DOUBLED + b"\x8c\x01R\x93",
    "a dict for every record": b"}\x94("
    + b"".join(b"\x8c\x04%04dK\x01" % n for n in range(2000))
    + b"u"
    + b"\x8c\x01m\x8c\x01R\x93)\x81h\x00b" * 2000,
}


@pytest.mark.parametrize("body", INDICES)
def test_an_index_that_costs_more_than_it_has(body: str) -> None:
    with pytest.raises(CheckpointError, match=r"not the index of a distributed checkpoint"):
        read_records(b"\x80\x04" + INDICES[body] + b".", Path(".metadata"))
