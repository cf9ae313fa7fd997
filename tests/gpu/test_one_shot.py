"""Sums in one exchange, on ranks of their own: tests/gpu/one_shot.py. Two GPUs on NCCL; where there is one, two ranks
take turns on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mega.core.device import Device
from mega.core.parallel.mesh import Mesh
from mega.core.processes.launch import launch
from tests.gpu import one_shot

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu
needs_one = pytest.mark.skipif(COUNT < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices, each for a rank")


@needs_two
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_are_those_in_the_order_of_ranks(ranks: int) -> None:
    if ranks > COUNT:
        pytest.skip(f"needs {ranks} CUDA devices")
    assert launch(ranks, one_shot.check, False, 1000) == 0


@needs_one
def test_ranks_that_take_turns_on_a_device_find_the_same() -> None:
    assert launch(2, one_shot.check, True, 250) == 0


@needs_two
@pytest.mark.parametrize("graphs", [False, True], ids=["asked for", "played"])
def test_tensor_ranks_answer_as_a_cpu(graphs: bool, tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    assert launch(2, one_shot.answer, graphs, str(out)) == 0
    assert json.loads(out.read_text()) == one_shot.answers_of(Mesh.at(0), Device.choose("cpu"))
