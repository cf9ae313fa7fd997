"""SGD, LAMB, Adafactor and Muon against float64 references on whole tensors, and against torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mega.core.device import Device
from mega.core.optim.adafactor import Adafactor
from mega.core.optim.adam import AdamW
from mega.core.optim.choose import rule_of
from mega.core.optim.muon import COEFFICIENTS, Muon, orthogonal
from mega.core.optim.rule import FlatState, Ranks, ShardState, StepArgs
from mega.core.parallel.layout import Reduction
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import Weight, weights
from mega.core.proof.parity import synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_stages, build_state
from tests.support.ranks import CPU
from tests.support.runs import small_run
from tests.support.shared import shared

LR, DECAY = 1e-2, 0.1
STEPS = 4
ADAM = AdamW(0.9, 0.999, 1e-8)

Update = Callable[[str, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
"""(name, weight, gradient, step, decay) -> what is subtracted from a whole logical tensor."""


def lamb(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Update:
    """Algorithm 2 of You et al. 2020."""
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(name: str, weight: torch.Tensor, grad: torch.Tensor, step: int, decay: float) -> torch.Tensor:
        m, v = moments.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        moments[name] = m, v
        r = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)) ** 0.5 + eps) + decay * weight
        adapted = weight.dim() == 2 and weight.norm() > 0 and r.norm() > 0
        return LR * (weight.norm() / r.norm() if adapted else 1.0) * r

    return update


def adafactor(relative: bool) -> Update:
    """Algorithms 4 and 5 of Shazeer and Stern 2018, second moments written out as whole matrices."""
    means: dict[str, tuple[torch.Tensor, ...]] = {}

    def update(name: str, weight: torch.Tensor, grad: torch.Tensor, step: int, decay: float) -> torch.Tensor:
        beta, squares = 1 - step**-0.8, grad**2 + 1e-30
        now = (squares.mean(1), squares.mean(0)) if grad.dim() == 2 else (squares,)
        old = means.get(name, tuple(torch.zeros_like(one) for one in now))
        means[name] = kept = tuple(beta * a + (1 - beta) * b for a, b in zip(old, now, strict=True))
        second = torch.outer(kept[0], kept[1]) / kept[0].mean() if grad.dim() == 2 else kept[0]
        u = grad / second**0.5
        u = u / max(1.0, float((u**2).mean() ** 0.5))
        rate = max(1e-3, float((weight**2).mean() ** 0.5)) * min(LR, step**-0.5) if relative else LR
        return rate * u + LR * decay * weight

    return update


def muon(nesterov: bool, scale: Callable[[int, int], float]) -> Update:
    """By singular values: a polynomial of a matrix, as its steps are, changes these alone. AdamW for all others."""
    averages: dict[str, torch.Tensor] = {}
    adam: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(name: str, weight: torch.Tensor, grad: torch.Tensor, step: int, decay: float) -> torch.Tensor:
        if "layers." not in name or grad.dim() == 1:
            m, v = adam.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
            adam[name] = m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad * grad
            return LR * ((m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)) ** 0.5 + 1e-8) + decay * weight)
        averages[name] = m = 0.95 * averages.get(name, torch.zeros_like(grad)) + 0.05 * grad
        u, s, v = torch.linalg.svd(0.05 * grad + 0.95 * m if nesterov else m, full_matrices=False)
        s = s / s.norm()
        for a, b, c in COEFFICIENTS["quintic"]:
            s = a * s + b * s**3 + c * s**5
        return LR * (0.2 * scale(*grad.shape) * (u * s) @ v + decay * weight)

    return update


def sgd(momentum: float) -> Update:
    velocity: dict[str, torch.Tensor] = {}

    def update(name: str, weight: torch.Tensor, grad: torch.Tensor, step: int, decay: float) -> torch.Tensor:
        velocity[name] = momentum * velocity.get(name, torch.zeros_like(grad)) + grad + decay * weight
        return LR * velocity[name]

    return update


RULES: dict[str, tuple[dict[str, Any], Update]] = {
    "sgd": ({"optimizer": "sgd"}, sgd(0.9)),
    "sgd without momentum": ({"optimizer": "sgd", "sgd_momentum": 0.0}, sgd(0.0)),
    "lamb": ({"optimizer": "lamb"}, lamb()),
    "adafactor": ({"optimizer": "adafactor"}, adafactor(False)),
    "muon": ({"optimizer": "muon", "muon_factor": 0.2}, muon(False, lambda out, columns: max(out, columns) ** 0.5)),
    "muon, Nesterov": (
        {"optimizer": "muon", "muon_factor": 0.2, "muon_nesterov": True, "muon_scale": "unit_rms_norm"},
        muon(True, lambda out, columns: (out / columns) ** 0.5),
    ),
    "adafactor, relative": ({"optimizer": "adafactor", "adafactor_relative": True}, adafactor(True)),
}


def logical(stage: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Ranks logical tensors as views of the weights that hold them."""
    held: list[Weight] = list(weights(stage))
    return {segment.shard.name: segment.real(weight.detach()) for weight in held for segment in weight.segments}


@pytest.mark.parametrize("name", RULES)
def test_against_whole_tensors(name: str) -> None:
    """Query, key and value lie in one parameter and weights share buckets, but every logical tensor is its own."""
    options, update = RULES[name]
    run = small_run("llama", layers=2, micro_batch=8, clip_grad=0.0, **options)
    state = build_state(run, Mesh.at(0), Device(CPU, "gloo"))
    (alone,) = build_stages(run, Mesh.at(0), CPU)
    for step in range(1, STEPS + 1):
        batch = synthetic_batch(run, torch.arange(8 * step, 8 * step + 8))
        train_step(state, [batch], LR, DECAY)
        alone.zero_grad()
        loss = alone(batch).terms["lm"]
        (loss.total / loss.weight).backward()
        with torch.no_grad():
            for weight in weights(alone):
                for segment in weight.segments:
                    mine, grad = segment.real(weight), segment.real(weight.grad)
                    decay = DECAY if mine.dim() == 2 else 0.0
                    mine.sub_(update(segment.shard.name, mine, grad, step, decay))
    found, expected = logical(state.stages[0]), logical(alone)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)


def test_sgd_is_torchs() -> None:
    rule = rule_of(small_run(optimizer="sgd").optimizer)
    ours, theirs = torch.arange(1.0, 9.0), torch.nn.Parameter(torch.arange(1.0, 9.0))
    torchs, velocity = torch.optim.SGD([theirs], LR, momentum=0.9, weight_decay=DECAY), torch.zeros(8)
    for step in range(1, 4):
        theirs.grad = torch.linspace(-1, 1, 8) * step
        rule.update(ours, theirs.grad.clone(), velocity, args=StepArgs(step, LR, DECAY))  # type: ignore[attr-defined]
        torchs.step()
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("relative", [False, True])
def test_the_reference_of_adafactor_is_the_librarys(relative: bool) -> None:
    """Relative steps as torch.optim.Adafactor has them; a fixed rate as transformers has it."""
    update, weight = adafactor(relative), torch.nn.Parameter(torch.linspace(-1, 2, 12).double().view(3, 4))
    ours = weight.detach().clone()
    if relative:
        theirs: Any = torch.optim.Adafactor([weight], lr=LR, eps=(1e-30, 1e-3), weight_decay=DECAY)
    else:
        optimization = pytest.importorskip("transformers.optimization")
        theirs = optimization.Adafactor([weight], lr=LR, scale_parameter=False, relative_step=False, weight_decay=DECAY)
    for step in range(1, 5):
        weight.grad = torch.sin(torch.arange(12.0).double() * step).view(3, 4)
        ours -= update("w", ours, weight.grad, step, DECAY)
        theirs.step()
    # The library rounds its root mean squares and decays before or after the step.
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-4, atol=1e-5)


def test_adafactor_keeps_rows_and_columns() -> None:
    """n + m values for a matrix of n x m, n for a vector."""
    state = build_state(small_run(layers=2, optimizer="adafactor"), Mesh.at(0), Device(CPU, "gloo"))
    assert isinstance(state.optimizer.rule, Adafactor)
    kept = {piece.key: piece.whole for piece in state.optimizer_pieces(mine=True)}
    assert kept["factors/rows/model.embed_tokens.weight"] == (509,)
    assert kept["factors/columns/model.embed_tokens.weight"] == (32,)
    assert kept["moment2/model.norm.bias"] == (32,)
    assert "moment2/model.embed_tokens.weight" not in kept


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ["16x6", "6x16", "8x8"])
def test_orthogonal_is_the_originals(shape: str, dtype: str) -> None:
    golden = load_file(shared("golden/optim/muon.safetensors"))
    for coefficients in COEFFICIENTS:
        rule = Muon(ADAM, coefficients=coefficients, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        found = orthogonal(golden[f"ns.{shape}.in"], rule.polynomials(), rule.dtype)
        expected = golden[f"ns.{shape}.{coefficients}.{dtype}"]
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6 if dtype == "fp32" else 0)


@pytest.mark.parametrize("name", ["plain", "nesterov"])
def test_three_steps_of_muon_are_the_originals(name: str) -> None:
    golden = load_file(shared("golden/optim/muon.safetensors"))
    rule = Muon(ADAM, nesterov=name == "nesterov", factor=0.2, dtype=torch.float32)
    weight, momentum = golden[f"step.{name}.w0"].flatten(), torch.zeros(96)
    bucket = mock.Mock(reduction=Reduction(whole=True))
    owned = ShardState(bucket, None, {"momentum": FlatState(0, momentum)})
    alone = Ranks(mock.Mock(), lambda _, flat, function: function(flat.view(12, 8)).flatten())
    for step in (1, 2, 3):
        rule.step(owned, weight, golden[f"step.{name}.g{step}"].flatten(), alone, StepArgs(step, 1e-2, 0.1))
        for found, key in ((weight, "w"), (momentum, "m")):
            torch.testing.assert_close(found.view(12, 8), golden[f"step.{name}.{key}{step}"], rtol=0, atol=1e-6)
