"""Megatron-core's trees as we write them: out and back bitwise, as Megatron-core 0.18 itself wrote its own, arguments
that pass its check, and what the user is told."""

from __future__ import annotations

import dataclasses
import json
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron.arguments import arguments_of, vocabulary
from mega.core.checkpoint.forms.megatron.state import DISTRIBUTED
from mega.core.checkpoint.forms.megatron.torch_dist import read_records
from mega.core.checkpoint.forms.megatron.trees_write import null_ids
from mega.core.checkpoint.forms.pickles import read_pickled
from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.run import Options, updated
from mega.core.training.start.inputs import resolve_run
from tests.checkpoint.megatron.test_state import GPT, LLAMA, NUMBERS, own
from tests.support.archives import unpack
from tests.support.foreign_forms import weights_of
from tests.support.shared import shared

OUT = {
    "fp32, tensor by tensor": (GPT, torch.float32, "mcore-local", (2, 1), False),
    "bf16, tied over two stages": (GPT, torch.bfloat16, "mcore", (2, 2), False),
    "fp16, flat": (LLAMA, torch.float16, "mcore-local", (1, 2), True),
    "fp32, flat, tied over two stages": (GPT, torch.float32, "mcore", (2, 2), True),
    "torch_dist fp32": (GPT, torch.float32, "torch_dist", (2, 1), False),
    "torch_dist bf16": (LLAMA, torch.bfloat16, "torch_dist", (1, 2), False),
    "torch_dist fp16, reshardable": (LLAMA, torch.float16, "torch_dist", (2, 2), True),
    "torch_dist fp32, reshardable": (LLAMA, torch.float32, "torch_dist", (1, 1), True),
}


@pytest.mark.parametrize("case", OUT)
def test_out_and_back_is_bitwise(tmp_path: Path, case: str) -> None:
    model, dtype, saver, layout, distributed = OUT[case]
    run = own(tmp_path / "run", model, dtype)
    written = convert(run, tmp_path / "tree", saver, Layout(*layout), distributed=distributed)
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(1, 2), vocab=53)
    before, after = locate(run), locate(tmp_path / "back")
    assert len(after.tensors) == len(before.tensors) and list(inspect.diff(before, after)) == []
    for key in ("progress", "updates", "scaler", "schedule"):
        assert after.meta[key] == before.meta[key], key
    assert after.meta["config"]["optimizer"] == {"optimizer": "adam", **NUMBERS}
    assert bool(list((tmp_path / "tree").rglob(DISTRIBUTED))) == (distributed and saver != "torch_dist")
    assert "padded from 53 to" in " ".join(written.notes)


# Against what Megatron-core 0.18 wrote

RECORDED = {
    "gpt_fp32_tp2pp1dp2_plain": ("mcore-local", Layout(2, 1), False),
    "llama_bf16_tp2pp2dp1_do": ("mcore-local", Layout(2, 2), True),
    "te_llama_fp32_tp2pp1dp1_plain": ("mcore", Layout(2, 1), False),
}
NOT_WRITTEN = {"rng_state", "rerun_state_machine", "num_floating_point_operations_so_far"}
"""Keys of Megatron's files that are left out: no other program's random state is anything to ours."""
NOT_LISTED = ("rng_state/", "rerun_state_machine_state/")
MORE = {"decoder.final_layernorm._extra_state/shard_0_1"}
"""Of Transformer Engine; a local model does not look for it."""


def described(content: Any, where: str = "") -> dict[str, Any]:
    """Names in their order -> dtype and shape of tensors, else the value or its type."""
    if isinstance(content, torch.Tensor):
        return {where: (content.dtype, tuple(content.shape))}
    if isinstance(content, Mapping):
        return {name: each for key in content for name, each in described(content[key], f"{where}/{key}").items()}
    if isinstance(content, list) and content and not isinstance(content[0], int):
        return {name: each for n, item in enumerate(content) for name, each in described(item, f"{where}/{n}").items()}
    return {where: type(content).__name__ if where.endswith("/lr") or "args" in where else content}


def indexed(folder: Path) -> dict[str, Any]:
    """Names of a torch_dist folder -> shape, dtype and layout of tensors, None for opaque bytes.

    The fourth property is a member of an enum, which each Python writes in its own way.
    """
    described = read_records((folder / ".metadata").read_bytes(), folder).state["state_dict_metadata"]
    return {
        name: None
        if "size" not in record.state
        else (tuple(record.state["size"].arguments[0]), str(record.state["properties"].state[""][:3]))
        for name, record in described.items()
    }


@pytest.mark.parametrize("name", RECORDED)
def test_files_are_as_megatron_wrote_them(tmp_path: Path, name: str) -> None:
    """Names, shapes, dtypes, the order of parameters and groups, keys and values; what differs is named above."""
    saver, layout, distributed = RECORDED[name]
    with tarfile.open(shared(f"megatron_core/{name}.tar.xz")) as archive:
        unpack(archive, tmp_path)
    theirs = tmp_path / name
    convert(theirs / "torch", tmp_path / "run")
    given: Any = {"distributed": distributed, "tokenizer_type": "NullTokenizer"}
    convert(tmp_path / "run", tmp_path / "torch", saver, layout, **given)
    convert(tmp_path / "run", tmp_path / "dist", "torch_dist", layout, **given)
    for file in sorted((theirs / "torch").rglob("*.pt")):
        ours, recorded = (read_pickled(each) for each in (tmp_path / file.relative_to(theirs), file))
        same_files(ours, recorded)
    folder = theirs / ("torch_dist_full" if distributed else "torch_dist") / "iter_0000003"
    made = tmp_path / "dist" / "iter_0000003"
    same_files(read_pickled(made / "common.pt"), read_pickled(folder / "common.pt"))
    ours_indexed, wanted = indexed(made), indexed(folder)
    assert {key for key in wanted if not key.startswith(NOT_LISTED)} | MORE == ours_indexed.keys() | MORE
    assert all(ours_indexed[key] == wanted[key] for key in ours_indexed.keys() - MORE)
    assert json.loads((made / "metadata.json").read_text()) == json.loads((folder / "metadata.json").read_text())
    for path in (theirs / "torch_dist", tmp_path / "torch", tmp_path / "dist"):  # and all of it is the same to us
        convert(path, tmp_path / "back" / path.parent.name / path.name)
        back = locate(tmp_path / "back" / path.parent.name / path.name)
        assert list(inspect.diff(locate(tmp_path / "run"), back)) == [], path


def same_files(ours: dict[str, Any], recorded: dict[str, Any]) -> None:
    said = {} if "args" not in recorded else recorded.pop("args").values
    written = {} if "args" not in ours else ours.pop("args").values
    odd = {key: (written[key], said[key]) for key in written.keys() & said.keys() if written[key] != said[key]}
    assert not odd.keys() - ARGUMENTS, odd
    wanted, made = described({k: v for k, v in recorded.items() if k not in NOT_WRITTEN}), described(ours)
    assert sorted(made) == sorted(wanted)
    assert {key: value for key, value in made.items() if value != wanted[key]} == {}
    tensors = [key for key, value in wanted.items() if key.startswith("/model")]
    assert [key for key in made if key in tensors] == tensors


ARGUMENTS = {
    "iteration",  # 0 there: that of the file counts
    "no_save_rng",
    "no_save_optim",  # None there
    "world_size",
    "data_parallel_size",
    "ckpt_format",
    "use_rotary_position_embeddings",  # the older flag of the same meaning
    "seq_length",
}
"""Arguments that may have other values than a recorded tree's. None of them is compared."""


# Arguments, and what is said


def own_weights(directory: Path, model: Any, tokenizer: str | None = None) -> Path:
    pieces = [
        Piece(f"weights/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for name, tensor in weights_of(model).items()
    ]
    meta = {"config": {"model": dataclasses.asdict(model), "tokenizer": {"tokenizer": tokenizer}}}
    CheckpointStore(directory).save(7, pieces, {**meta, "progress": {"step": 7}})
    return directory


@pytest.mark.parametrize(("position", "compared"), [("learned", True), ("rope", True), ("none", True)])
def test_arguments_pass_megatrons_check(position: Any, compared: bool) -> None:
    """`check_checkpoint_args` of 0.18.2, restated: each against what the printed flags make of Megatron's defaults."""
    model = dataclasses.replace(GPT, position=position)
    values = arguments_of(model, 2, 1, tokenizer="SentencePieceTokenizer", core=True)
    typed = {
        "num_layers": 4,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "add_position_embedding": compared,  # True unless --no-position-embedding is typed
        "max_position_embeddings": model.positions,
        "make_vocab_size_divisible_by": 8,
        "padded_vocab_size": 64,
        "tokenizer_type": "SentencePieceTokenizer",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
    }
    assert {key: values[key] for key in typed} == typed
    assert arguments_of(model, 2, 1)["tokenizer_type"] == "NullTokenizer"  # None would stop Megatron's converters


def test_what_must_be_typed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(run: Path, *line: str) -> str:
        assert main(["reshard", "--load-dir", str(run), "--save-dir", str(tmp_path / f"tree-{len(line)}"), *line]) == 0
        return capsys.readouterr().out

    run = own_weights(tmp_path / "run", LLAMA, "Llama2Tokenizer")
    out = said(run, "--saver", "mcore", "--tp", "2")
    assert "--ckpt-format torch --no-load-rng --no-load-optim --transformer-impl transformer_engine" in out
    assert "--padded-vocab-size 64 " in out  # Megatron pads for its own layout: it would cut rows, or stop
    assert "--position-embedding-type rope" in out and "--swiglu" in out and "Llama2Tokenizer" in out
    assert "for Megatron-LM of 2023" not in out
    assert "--saver megatron is for Megatron-LM of 2023" in said(run, "--saver", "megatron")
    out = said(run, "--saver", "torch_dist", "--tokenizer-type", "NullTokenizer", "--no-load-optim")
    assert "--ckpt-format torch_dist --tensor-model" in out and "--tokenizer-type NullTokenizer" in out
    assert "names none" not in out and "--vocab-size" not in said(run, "--saver", "mcore-local", "--no-load-optim")


@pytest.mark.parametrize("saver", ["torch_dist", "mcore", "megatron"])
def test_a_tree_names_no_tokenizer_that_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saver: str
) -> None:
    """A checkpoint of ids alone does not name GPT-2's tokenizer, unless --tokenizer-type does."""
    run = own_weights(tmp_path / "run", LLAMA)

    def written(folder: str, *line: str) -> tuple[Any, str]:
        tree = tmp_path / folder
        assert main(["reshard", "--load-dir", str(run), "--save-dir", str(tree), "--saver", saver, *line]) == 0
        (file,) = [*tree.glob("iter_*/common.pt"), *tree.glob("iter_*/mp_rank_00/model_optim_rng.pt")]
        return read_pickled(file)["args"].values, capsys.readouterr().out

    arguments, out = written("unknown")
    assert arguments["tokenizer_type"] == "NullTokenizer" and "GPT2BPETokenizer" not in out
    assert "tokenizer: the checkpoint names none" in out
    if saver != "megatron":
        assert f"--tokenizer-type NullTokenizer --vocab-size {LLAMA.vocab} " in out
    arguments, out = written("known", "--tokenizer-type", "GPT2BPETokenizer")
    assert arguments["tokenizer_type"] == "GPT2BPETokenizer" and "names none" not in out
    for folder, kind in (("unknown", None), ("known", "GPT2BPETokenizer")):  # and back
        line = ["reshard", "--load-dir", str(tmp_path / folder), "--save-dir", str(tmp_path / f"{folder}-back")]
        assert main(line) == 0
        assert ("trained with --tokenizer-type GPT2BPETokenizer; give these" in capsys.readouterr().out) == bool(kind)
        run = tmp_path / f"{folder}-back"
        assert written(f"{folder}-again")[0]["tokenizer_type"] == (kind or "NullTokenizer")


@pytest.mark.parametrize(("last", "ids"), [(True, 257), (False, 258)])
def test_ids_of_null_tokenizer_are_those_of_megatron(last: bool, ids: int) -> None:
    recorded = {"tokenizer": "NullTokenizer", "vocab_size": 257, "null_eod_last": last}
    assert null_ids({"config": {"tokenizer": recorded}}) == ids
    assert null_ids({"config": {"tokenizer": {**recorded, "tokenizer": "GPT2BPETokenizer"}}}) is None


def test_a_schedule_that_megatron_has_not_is_overridden(tmp_path: Path) -> None:
    run = own(tmp_path / "run", GPT, torch.float32)
    checkpoint = locate(run)
    meta = dict(checkpoint.meta)
    pieces = [
        Piece(key, shape, (0,) * len(shape), torch.zeros(shape, dtype=dtype))
        for key, (shape, dtype) in checkpoint.tensors.items()
    ]
    meta["schedule"] = {**meta["schedule"], "lr": {**meta["schedule"]["lr"], "style": "polynomial"}}
    CheckpointStore(tmp_path / "other").save(7, pieces, meta)
    notes = " ".join(convert(tmp_path / "other", tmp_path / "tree", "mcore-local", Layout()).notes)
    assert "--override-opt_param-scheduler" in notes
    content = read_pickled(tmp_path / "tree/iter_0000007/mp_rank_00/model_optim_rng.pt")
    assert content["opt_param_scheduler"]["num_steps"] == 24


def test_what_padding_means_is_said() -> None:
    tokens, notes = vocabulary({"true_vocab_size": 257}, 512, None, Path("tree"))
    assert tokens == 257 and "255 of padding are left out: Megatron-LM's softmax counted them" in notes[0]
    tokens, notes = vocabulary({}, 512, None, Path("tree"))
    assert tokens == 512 and "--no-mask-padded-vocab" in notes[0]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_padding_that_was_kept_stays_in_the_softmax(tmp_path: Path, tp: int) -> None:
    """A run that loads it with --no-mask-padded-vocab has as many tokens in any layout; one that trains anew pads."""
    model = dataclasses.replace(GPT, vocab=96, heads=8, kv_heads=8)
    run = own_weights(tmp_path / "run", model)
    line = {"tokenizer": "NullTokenizer", "vocab_size": 52, "mask_padded_vocab": False, "vocab_multiple": 8, "tp": tp}
    line |= {"layers": 2, "hidden": 32, "heads": 8, "seq_length": 8, "mock_data": True, "lr": 1e-3, "steps": 2}
    line |= {"micro_batch": 1, "global_batch": 1}
    assert resolve_run(updated(Options(), line), tp).run.model.vocab == 8 * tp * math.ceil(53 / (8 * tp))
    loading = updated(Options(), {**line, "load": str(run)})
    assert resolve_run(loading, tp).run.model.vocab == 96
    as_stored = updated(loading, {"use_checkpoint_config": True, "finetune": True, "vocab_multiple": 128})
    assert resolve_run(as_stored, tp).run.model.vocab == 96
