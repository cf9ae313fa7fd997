"""Initial values: their scale, and that every layout starts from the same whole tensors."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.support.ranks import CPU
from tests.support.runs import small_run


@pytest.mark.parametrize("layers", [2, 8])
def test_scale(layers: int) -> None:
    """N(0, 0.02) but for the way out of a branch: 0.02 / sqrt(2 layers); norms are one, biases zero."""
    run = small_run(layers=layers, hidden=64, init_std=0.02)
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    for weight in weights(stage):
        for segment in weight.segments:
            name, values = segment.shard.name, segment.real(weight).detach()
            if values.dim() == 1:
                assert torch.equal(values, torch.full_like(values, float("norm.weight" in name))), name
                continue
            out = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * layers) if out else 0.02
            error = 6 * std / math.sqrt(2 * values.numel())
            assert float(values.std()) == pytest.approx(std, abs=error), name


def test_cut_weights_are_parts_of_the_whole() -> None:
    """Every rank of tp 2 x pp 2 holds its rectangles of what one rank would hold."""
    (alone,) = build_stages(small_run("llama"), Mesh.at(0), CPU)
    whole = {
        segment.shard.name: segment.real(weight).detach() for weight in weights(alone) for segment in weight.segments
    }
    for rank in range(4):
        run = small_run("llama", 4, tp=2, pp=2)
        for stage in build_stages(run, Mesh.at(rank, tp=2, pp=2), CPU):
            for weight in weights(stage):
                for segment in weight.segments:
                    expected = whole[segment.shard.name]
                    for dim, (start, size) in enumerate(zip(segment.shard.start, segment.shard.size, strict=True)):
                        expected = expected.narrow(dim, start, size)
                    assert torch.equal(segment.real(weight), expected), segment.shard.name
