"""The change test of forms: one that the project does not know is one file and one row, through the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.companions import tokenizer_kind
from mega.core.checkpoint.forms.form import FORMS
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate
from tests.support.foreign_forms import FORMS as WRITTEN
from tests.support.foreign_forms import weights_of
from tests.support.toy_form import FORM

VERBS = ("mega.commands.convert_llama", "mega.commands.reshard")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The toy form in the list; commands, which take their choices from it, are loaded again, and afterwards too."""
    FORMS.append(FORM)
    for verb in VERBS:
        sys.modules.pop(verb, None)
    yield
    FORMS.remove(FORM)
    for verb in VERBS:
        sys.modules.pop(verb, None)


def run(line: str) -> None:
    assert main(line.split()) == 0, line


@pytest.mark.parametrize("kind", ["hf", "gpt2", "megatron", "fairseq"])
def test_there_and_back_is_the_same_bits(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    form = WRITTEN[kind]
    load, model, verify = form.make(tmp_path / "source"), form.model, "--verify"
    run(f"{form.verb} --load-dir {load} --save-dir {tmp_path}/run --tp 2 {' '.join(form.options)}")
    run(f"convert-llama --load-dir {tmp_path}/run --save-dir {tmp_path}/toy --to toy {verify}")
    assert "bit for bit" in capsys.readouterr().out and form_at(tmp_path / "toy") is FORM
    run(f"convert-llama --load-dir {tmp_path}/toy --save-dir {tmp_path}/back --tp 2 --pp 2 {verify}")
    assert "bit for bit" in capsys.readouterr().out
    first, last = (OwnSource(locate(tmp_path / name)) for name in ("run", "back"))
    assert first.tensors == last.tensors and locate(tmp_path / "back").world == 4
    assert not list(diff(locate(tmp_path / "run"), locate(tmp_path / "back")))
    # what lies in the arrays, without our table
    weights = weights_of(model)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        assert np.array_equal(np.load(tmp_path / "toy" / f"{name}.npy"), weights[name].numpy().T)
    block = "model.layers.0.self_attn."
    fused = torch.cat([weights[f"{block}{part}_proj.weight"] for part in "qkv"])
    assert np.array_equal(np.load(tmp_path / "toy" / f"{block}qkv.weight.npy"), fused.numpy().T)


def test_it_goes_straight_into_another_form_and_is_held_to_every_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"convert-llama --load-dir {WRITTEN['gpt2'].make(tmp_path / 'source')} --save-dir {tmp_path}/run")
    run(f"convert-llama --load-dir {tmp_path}/run --save-dir {tmp_path}/toy --to toy")
    (tmp_path / "toy" / "toy.txt").write_text("kept")
    run(f"reshard --load-dir {tmp_path}/toy --save-dir {tmp_path}/tree --saver megatron --tp 2")
    run(f"convert-llama --load-dir {tmp_path}/toy --save-dir {tmp_path}/own")
    kept = locate(tmp_path / "own").attachments
    assert kept["toy.txt"].read_text() == "kept" and tokenizer_kind(kept) == "NullTokenizer"
    for line, words in (
        (f"--load-dir {tmp_path}/toy --parts 2", "from a folder of arrays to a mega checkpoint"),
        (f"--load-dir {tmp_path}/toy --to hf", "is a folder of arrays; exactly one of the two must be mega"),
        (f"--load-dir {tmp_path}/run --to toy --tp 2", "means nothing from a mega checkpoint to a folder of arrays"),
        (f"--load-dir {tmp_path}/nothing --to other", "other"),
        (f"--load-dir {tmp_path}", "no model.json (toy)"),
    ):
        assert main(f"convert-llama --save-dir {tmp_path}/x {line}".split()) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "x").exists()
    (tmp_path / "toy" / "model.norm.weight.npy").unlink()
    assert main(f"convert-llama --load-dir {tmp_path}/toy --save-dir {tmp_path}/x".split()) == 2
    assert "model.norm.weight: is missing" in capsys.readouterr().err
