"""Weights with a NaN: the tensor is named before anything is written or answered; logits with one fail a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.device import Device
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.loading.load import load_model, open_model
from mega.core.inference.request import Request, Sampling
from mega.core.inference.start import engine_on
from mega.core.parallel.mesh import Mesh
from tests.support.shared import shared

NAME = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(params=[float("nan"), float("inf")])
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    from safetensors.torch import load_file, save_file

    source, place = shared("stories260K_hf/config.json").parent, tmp_path / "theirs"
    place.mkdir()
    for name in ("config.json", "tokenizer.model"):
        (place / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[NAME][3, 5] = request.param
    save_file(tensors, place / "model.safetensors")
    return place


def test_the_tensor_is_named(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    lines = (
        ["convert-llama", "--load-dir", str(damaged), "--save-dir", str(tmp_path / "own")],
        ["generate", "--load", str(damaged), "--prompt", "Once", "--device", "cpu"],
        ["eval", "--task", "ppl", "--valid-data", str(text), "--load", str(damaged), "--device", "cpu"],
    )
    before = sorted(tmp_path.iterdir())
    for line in lines:
        assert main([*line, *(["--json", str(tmp_path / "x.json")] if line[0] == "eval" else [])]) == 2, line
        said = capsys.readouterr()
        assert f"{NAME}: holds a NaN or an infinity" in said.err and str(damaged) in said.err, said.err
        assert not said.out.strip()
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(
    "how", [Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(top_k=5, top_p=0.9)], ids=str
)
def test_logits_that_are_not_finite_fail_the_request(how: Sampling, logprobs: int | None) -> None:
    """With a reason, whatever it draws by, instead of the id that is said to be the greatest."""
    opened = open_model(shared("stories260K_hf/config.json").parent)
    stage: Any = load_model(opened)
    with torch.no_grad():
        stage.embedding.tokens.weight[300] = float("nan")
    engine = engine_on(stage, Mesh(0), Device.choose("cpu"))
    assert isinstance(engine, BatchingEngine)
    numbers = [engine.add(Request(prompt=ids, tokens=3, sampling=how, logprobs=logprobs)) for ids in ((1, 300),)]
    ends: dict[int, tuple[str, str]] = {}
    while not engine.idle:
        for event in engine.step():
            if event.finish is not None:
                ends[event.request] = event.finish, event.message
    assert ends[numbers[0]][0] == "failed" and "the model's logits hold a NaN or an infinity" in ends[numbers[0]][1]
    engine.close()
