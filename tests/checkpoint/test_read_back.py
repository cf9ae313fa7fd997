"""`--verify` of forms that are not Hugging Face's, and sources of two dtypes: what is kept, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.form import FormOptions
from mega.core.checkpoint.forms.meta import open_form
from mega.core.checkpoint.forms.read_back import read_back
from mega.core.checkpoint.own.layout import ONE, Layout
from mega.core.checkpoint.own.pieces import Box, CheckpointError
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate
from tests.checkpoint.megatron.test_state import GPT, own
from tests.support.foreign_forms import FORMS, Files, weights_of

OTHERS = [kind for kind in FORMS if not kind.startswith(("hf", "gpt2", "mega"))] + ["megatron", "megatron released"]


@pytest.mark.parametrize("kind", dict.fromkeys(OTHERS))
def test_verify_reads_every_form_back(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    form = FORMS[kind]
    load = form.make(tmp_path / "source")
    command = [form.verb, "--load-dir", str(load), "--save-dir", str(tmp_path / "run"), "--tp", "2", "--verify"]
    assert main([*command, *form.options]) == 0
    count = len(weights_of(form.model))
    assert f"read back: all {count} tensors" in capsys.readouterr().out


def test_a_difference_is_named(tmp_path: Path) -> None:
    """One element of one part of the source is another than it was."""
    convert(FORMS["meta"].make(tmp_path / "source"), tmp_path / "run")

    def change(files: Files) -> None:
        files["consolidated.01.pth"]["layers.1.attention.wq.weight"][3, 5] += 1

    shutil.rmtree(tmp_path / "source")
    load = FORMS["meta"].make(tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=r"weights/model\.layers\.1\.self_attn\.q_proj\.weight: is not what"):
        read_back(load, tmp_path / "run")


def test_a_form_without_predictors_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that predict tokens after the next are left out of it."""
    run = ["pretrain", "--model", "tiny-llama", "--vocab", "97", "--mtp-layers", "1", "--mock-data", "--device", "cpu"]
    train = ["--steps", "1", "--lr", "1e-3", "--micro-batch", "1", "--eval-iters", "0", "--save-interval", "1"]
    assert main([*run, *train, "--save", str(tmp_path / "run")]) == 0
    line = ["convert-llama", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "meta"), "--to", "meta"]
    assert main([*line, "--verify"]) == 0
    printed = capsys.readouterr()
    assert "read back: all 21 tensors" in printed.out and "mtp_layers 1: a Meta folder has none" in printed.err


def test_what_is_written_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(FORMS["meta"].make(tmp_path / "source"), tmp_path / "run", layout=Layout(2, 1))
    command = [
        "convert-llama",
        "--load-dir",
        str(tmp_path / "run"),
        "--save-dir",
        str(tmp_path / "meta"),
        "--to",
        "meta",
    ]
    assert main([*command, "--parts", "2", "--verify"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    run = own(tmp_path / "trained", GPT, torch.bfloat16)
    command = [
        "reshard",
        "--load-dir",
        str(run),
        "--save-dir",
        str(tmp_path / "tree"),
        "--saver",
        "megatron",
        "--verify",
    ]
    assert main([*command, "--tp", "2", "--pp", "2"]) == 0
    assert f"all {4 * len(weights_of(GPT))} tensors" in capsys.readouterr().out
    command = ["reshard", "--load-dir", str(run), "--save-dir", str(tmp_path / "again"), "--verify"]
    assert main(command) == 2 and "checkpoint diff" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("positions", [12, 4096])
def test_positions_that_a_meta_folder_cannot_say_are_told(
    tmp_path: Path, positions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reader takes Llama 2's number. Meta's loader would not open a params.json with another key in it."""
    source = FORMS["hf"].make(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    convert(source, tmp_path / "run")
    places = ["--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "m")]
    assert main(["convert-llama", *places, "--to", "meta"]) == 0
    told = capsys.readouterr().err
    assert ("mega: positions 12: params.json has no place for them" in told) == (positions == 12)
    assert "max_seq_len" not in json.loads((tmp_path / "m" / "params.json").read_text())
    assert open_form(tmp_path / "m", FormOptions(layout=ONE)).model.positions == 4096


def narrowed(files: Files, keep: str) -> None:
    """bf16, but for tensors with `keep` in their names."""
    for state in files.values():
        state.update(
            {name: t if keep in name or not t.is_floating_point() else t.bfloat16() for name, t in state.items()}
        )


@pytest.mark.parametrize(
    ("kind", "norms"), [("hf", "norm"), ("meta", "norm"), ("megatron", "norm"), ("mcore", "norm"), ("fairseq", "norm")]
)
def test_fp32_norms_of_a_16_bit_model_are_kept(
    tmp_path: Path, kind: str, norms: str, capsys: pytest.CaptureFixture[str]
) -> None:
    form = FORMS[kind]
    load = form.make(tmp_path / "source", lambda files: narrowed(files, norms))
    assert main([form.verb, "--load-dir", str(load), "--save-dir", str(tmp_path / "run"), "--pp", "2"]) == 0
    assert "are fp32 among torch.bfloat16" in capsys.readouterr().out
    source = OwnSource(locate(tmp_path / "run"))
    for name, tensor in weights_of(form.model).items():
        shape, dtype = source.tensors[f"weights/{name}"]
        assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
        assert torch.equal(source.read(f"weights/{name}", Box((0,) * len(shape), shape)), tensor.to(dtype)), name


def test_mixed_dtypes_there_and_back_are_the_same_bytes(tmp_path: Path) -> None:
    load = FORMS["hf"].make(tmp_path / "source", lambda files: narrowed(files, "norm"))
    convert(load, tmp_path / "run", layout=Layout(2, 2))
    convert(tmp_path / "run", tmp_path / "back")
    convert(tmp_path / "run", tmp_path / "tree", "megatron", Layout(2, 1))
    convert(tmp_path / "tree", tmp_path / "own", "mega", Layout(), vocab=56)
    convert(tmp_path / "own", tmp_path / "through")
    from safetensors.torch import load_file

    first, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back", "through"))
    for other in others:
        assert first.keys() == other.keys()
        assert all(first[name].dtype == other[name].dtype and torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_one_odd_tensor_is_damage(tmp_path: Path, dtype: torch.dtype) -> None:
    """A single block's norm of another dtype than the other blocks' is no mixture that anybody made on purpose."""
    odd = "model.layers.1.input_layernorm.weight"

    def change(files: Files) -> None:
        narrowed(files, "nothing")
        (state,) = files.values()
        state[odd] = state[odd].to(dtype)

    load = FORMS["hf"].make(tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=rf"layers\.[01]\.input_layernorm\.weight: is {dtype}"):
        convert(load, tmp_path / "run")
    assert not (tmp_path / "run").exists()
