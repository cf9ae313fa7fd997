"""Decoding by recorded graphs on a CUDA device: the answers of the same engine without, and of a CPU.

On the device steps are launched before the results of the one before are read; on the CPU they are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.architecture import units
from mega.core.device import Device
from mega.core.inference.options import MTP, EngineOptions
from mega.core.inference.speculate import Confidence
from mega.core.inference.start import engine_on
from mega.core.model.decoder import DecoderStage
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from tests.inference.test_engine import FAMILIES, GREEDY, Request, Sampling, answers, guessing_requests, prompts, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(family: str, kind: str, graphs: bool, depths: int = 0) -> Any:
    """depths: number of layers of multi-token prediction, which then guess tokens."""
    model, device = replace(FAMILIES[family], mtp_layers=depths), Device.choose(kind)
    ops = forward_only(choose(device.torch, torch.float32))
    stage: Any = DecoderStage(model, units(model), ParameterFactory({}, torch.float32, device.torch, ops), ALONE)
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
    options = EngineOptions(max_requests=16, cuda_graph=graphs, speculate=MTP if depths else None)
    return engine_on(stage.eval(), Mesh.at(0), device, options)


@pytest.mark.parametrize("family", [name for name, model in FAMILIES.items() if model.attention_softcap is None])
def test_graphs_change_nothing(family: str, caplog: pytest.LogCaptureFixture) -> None:
    hows = [Sampling(seed=at) if at % 2 else GREEDY for at in range(9)]
    asked = [Request(prompt=prompt, tokens=3 + 2 * at, sampling=hows[at]) for at, prompt in enumerate(prompts(9))]
    played, plain, host = (
        [tokens(events) for events in answers(engine(family, kind, graphs), asked)]
        for kind, graphs in (("cuda", True), ("cuda", False), ("cpu", False))
    )
    assert played == plain == host and not caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphs_of_layers_that_guess_change_nothing(family: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = guessing_requests(9)
    cases = (("cuda", True, 2), ("cuda", False, 2), ("cuda", True, 0), ("cpu", False, 2))
    with mock.patch.object(Confidence, "checked"):  # guesses do not stop when they are often wrong
        first, *others = ([tokens(events) for events in answers(engine(family, *case), asked)] for case in cases)
    assert all(other == first for other in others) and not caplog.text
