"""The load of experts, that is, the number of tokens per expert in the whole batch of a step, and the bias that
balances the load.

The tokens of all microbatches and ranks are counted, before tokens are dropped. The bias affects only which experts are
chosen. After each step the bias moves by a fixed amount towards an even load (Wang et al. 2024, arXiv 2408.15664), or
is set to the quantiles of the logits at which the load would have been even.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega.core.model.experts import ExpertLayer, ExpertLoad
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Mesh
from mega.core.training.state import TrainState


def expert_layers(state: TrainState) -> list[ExpertLayer]:
    """Return the layers with experts in this rank's stages."""
    return [module for stage in state.stages for module in stage.modules() if isinstance(module, ExpertLayer)]


def start_counting(state: TrainState) -> None:
    """Reset the load at the start of a step."""
    for layer in expert_layers(state):
        layer.router.start_step()


def finish_counting(state: TrainState) -> ExpertLoad | None:
    """Return the load of the step; None for a model without experts. This is a collective that all ranks must call."""
    mixtures, mesh, layers = state.options.mixtures, state.mesh, expert_layers(state)
    if not mixtures:
        return None
    numbers = list(mixtures)
    # [layers of the model, experts + 1]: the last column counts dropped tokens
    counts = torch.zeros(len(numbers), max(mixtures.values()) + 1, dtype=torch.float64, device=state.device.torch)
    for layer in layers:
        same = mesh.tp.size > 1 and not layer.sequence  # every tensor rank has counted all tokens
        if not same or mesh.tp.first:
            row = counts[numbers.index(layer.layer)]
            row[: layer.value.count] += layer.router.load[:-1]
            row[-1] += layer.router.load[-1]
    all_reduce(counts, mesh.everyone)
    return ExpertLoad(counts[:, :-1], counts[:, -1])


def balance(state: TrainState, finite: torch.Tensor) -> None:
    """Update the biases that balance the load, unless the weight update was skipped (`finite` is false)."""
    if state.load is None:
        return
    numbers = list(state.options.mixtures)
    layers = [layer for layer in expert_layers(state) if _counts(layer)]
    by_quantile = [layer for layer in layers if layer.value.router.choice == "quantile"]
    for layer in layers:
        if layer not in by_quantile:
            counts = state.load.counts[numbers.index(layer.layer), : layer.value.count]
            _balance(layer, counts, finite)
    if by_quantile:
        _set_thresholds(by_quantile, state.mesh, finite)


def _counts(layer: ExpertLayer) -> bool:
    bias = layer.router.balance
    return bias is not None and bias.segments[0].shard.tensor.trainable


def _set_thresholds(layers: Sequence[ExpertLayer], mesh: Mesh, finite: torch.Tensor) -> None:
    """Update the biases: b = ema b + (1 - ema) (mean of the quantiles over all microbatches), then b -= mean(b)."""
    sums = torch.stack([layer.router.quantiles for layer in layers])
    all_reduce(sums, mesh.tokens)
    with torch.no_grad():
        for layer, quantiles in zip(layers, sums[:, :-1] / sums[:, -1:], strict=True):
            ema, bias = layer.value.router.quantile_ema, layer.router.balance
            assert bias is not None
            average = ema * bias.double() + (1 - ema) * quantiles
            bias.copy_(torch.where(finite, (average - average.mean()).to(bias.dtype), bias))


def _balance(layer: ExpertLayer, counts: torch.Tensor, finite: torch.Tensor) -> None:
    """Update the bias of a layer: b += rate x sign(mean(counts) - counts)."""
    rate, bias = layer.value.router.balance_rate, layer.router.balance
    assert rate is not None and bias is not None
    with torch.no_grad():
        bias.add_((rate * (counts.mean() - counts).sign()).to(bias.dtype) * finite)
