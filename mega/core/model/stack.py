"""A pipeline stage, which consists of layers on one residual stream, an embedding before the first layer, and a head
after the last layer.

Each model family adds an embedding, a head and the context of a batch. This module implements the recomputation of
whole layers and the unsharding of units (ZeRO 3) for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import nn

from mega.core.architecture import Tensor, Unit, architecture, inventory
from mega.core.architecture.adapters import adapter_specs
from mega.core.architecture.model import Stack
from mega.core.batch import Batch, Term
from mega.core.config.sections import ModelConfig
from mega.core.model.auxiliary import AuxiliarySums, divisor
from mega.core.model.experts import GroupedExperts
from mega.core.model.forward import ForwardContext
from mega.core.model.layer import TransformerLayer
from mega.core.model.mixers import LayerPlace
from mega.core.model.residual import ResidualState
from mega.core.model.stage import StageOptions, UnshardHook
from mega.core.parallel.adapter import attach_adapters
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.recompute import groups, recomputed
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory


class Losses(NamedTuple):
    """The results of a head for a batch, in the order of the stage's `head_terms` and `metrics`."""

    terms: tuple[Term, ...]
    metrics: tuple[Term, ...] = ()


class TokenBatch(Batch, Protocol):
    """A batch with `tokens`, int64 [b, s], the input of the first stack."""

    @property
    def tokens(self) -> torch.Tensor: ...


B = TypeVar("B", bound=TokenBatch)


class StackStage(nn.Module, Generic[B]):
    """The units of a model that one stage holds: "embedding", layers by number, "head", in this order.

        stage(batch, *cargo) -> cargo             [tokens, h], this rank's tokens under sequence parallelism
        last(batch, *cargo)  -> terms, metrics    or logits, if outputs are requested

    A subclass for a model family sets `head_terms` and `metrics` and implements the four methods that raise
    NotImplementedError. The head is called with a `ResidualState`, a batch and the scales of the head's terms, which
    the head may ignore, and returns `Losses`. If no batch is given, the head returns logits [tokens, ids of this rank].
    head_terms: name of each loss of the head -> its coefficient; the losses of layers are determined by the
    architecture. with_full_params: hook that runs a unit with unsharded weights (ZeRO 3); None if weights are never
    sharded.
    """

    head_terms: Mapping[str, float] = MappingProxyType({})
    metrics: tuple[str, ...] = ()

    def __init__(
        self,
        model: ModelConfig,
        units: Sequence[Unit],
        factory: ParameterFactory,
        region: Region,
        options: StageOptions = StageOptions(),  # noqa: B008 - frozen
    ):
        super().__init__()
        self.model, self.units, self.region, self.options = model, tuple(units), region, options
        self.architecture = architecture(model)
        self.dtype, self.residual = factory.dtype, options.residual or factory.dtype
        self.ops = factory.ops
        self.with_full_params: UnshardHook | None = None
        if options.objective is not None:
            self.head_terms = dict.fromkeys(options.objective.terms, 1.0)
            self.metrics = options.objective.metrics
        elif ahead := self.architecture.output.ahead:
            self.head_terms = {**self.head_terms, **{each.loss: each.coefficient for each in ahead}}
        tensors = tensors_by_unit(model)
        self.embedding = self.build_embedding(factory.exact, tensors["embedding"]) if "embedding" in units else None
        self.build_layers(factory, tensors)
        self.head = self.build_head(factory.exact, tensors["head"]) if "head" in units else None
        self._attach_adapters(factory)

    def _attach_adapters(self, factory: ParameterFactory) -> None:
        """Attach the model's adapters, if there are any."""
        specs = adapter_specs(self.architecture.adapters, inventory(self.model))
        attach_adapters(self, specs, factory)
        for experts in [each for each in self.modules() if isinstance(each, GroupedExperts)]:
            experts.adapt(specs)

    # -- methods that the subclass for a model family implements or overrides

    def build_layers(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]]) -> None:
        """Create the layers between embedding and head. own: the model's tensors by unit."""
        self.layers = self.stack(factory, own, self.architecture.stacks[0])

    def stack(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]], stack: Stack) -> nn.ModuleList:
        """Create the layers of a stack that this stage holds."""
        adapters, options = self.architecture.adapters, self.options
        adapter_dropout = 0.0 if adapters is None else adapters.dropout

        def layer(number: int) -> TransformerLayer:
            value, tensors = stack.layers[number - stack.first], relative(own[number], stack.prefix(number))
            place = LayerPlace(
                number, self.region, adapter_dropout, options.cp, options.experts, options.gathers_experts
            )
            return TransformerLayer(factory, value, tensors, place)

        return nn.ModuleList(layer(number) for number in stack.numbers if number in self.units)

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """Create the embedding before the first layer."""
        raise NotImplementedError

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """Create the head after the last layer."""
        raise NotImplementedError

    def context(self, batch: B) -> ForwardContext:
        """Return the context of `batch` for the layers."""
        raise NotImplementedError

    def embed(self, embedding: nn.Module, batch: Any, context: ForwardContext) -> torch.Tensor:
        """Apply `embedding` to `batch`, and return [tokens, h], this rank's tokens under sequence parallelism."""
        raise NotImplementedError

    def stack_tokens(self, batch: B) -> tuple[torch.Tensor, ...]:
        """Return the input tokens [b, s] of each stack of the architecture."""
        return (batch.tokens,)

    # -- methods of every stage

    @cached_property
    def terms(self) -> dict[str, float]:
        """Name of each loss (of the head or of layers) -> coefficient of the mean loss in the step's total loss."""
        losses = self.architecture.auxiliary_losses
        return {**self.head_terms, **{loss.name: loss.coefficient * sum(layers) for loss, layers in losses.items()}}

    def split(self, batch: B, index: int, size: int) -> B:
        """Return the columns of a batch for rank `index` of a context axis of `size` ranks, together with data that
        layers need from other columns."""
        return batch.split(index, size)

    def weights(self, batch: B) -> Mapping[str, torch.Tensor]:
        """Return the weight of each loss for `batch`, as in `Stage`."""
        losses = self.architecture.auxiliary_losses
        if not losses:
            return batch.weights
        tokens, shards, weights = self.stack_tokens(batch), self.ops.row_shards, dict(batch.weights)
        padding = getattr(batch, "padding", None) if self.architecture.mixtures else None
        valid = None if padding is None else (~padding).sum().double()
        for loss, layers in losses.items():
            pairs = zip(layers, tokens, strict=True)
            weight = sum(count * divisor(loss, *ids.shape, shards=shards, tokens=valid) for count, ids in pairs)
            weights[loss.name] = torch.as_tensor(weight, dtype=torch.float64, device=batch.samples.device)
        return weights

    @property
    def dropout_seed(self) -> int | None:
        """The seed of dropout; None if dropout is off."""
        return self.options.dropout_seed if self.training else None

    def cargo(self, batch: B) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the tensors that this stage receives from the previous stage for `batch`."""
        tokens = batch.tokens.numel() // (self.region.size if self.region.sequence else 1)
        return [((tokens, self.architecture.hidden), self.residual)]

    def forward(
        self, batch: B, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """Run the stage. outputs: whether the last stage returns the result of `self.outputs` instead of losses."""
        sums = None if outputs else self._auxiliary_sums(scales)
        stream, *passed = self.stream(batch, sums, *cargo)
        if self.head is None:
            auxiliary = {} if sums is None else sums.terms()
            return StageOutput(cargo=(stream.sum(self.ops), *passed), auxiliary=auxiliary)
        if outputs:
            return StageOutput(outputs=self.outputs(stream, batch))
        losses = self._losses(stream, batch, scales, sums)
        return StageOutput(
            terms=dict(zip(self.head_terms, losses.terms, strict=self.training)),
            metrics=dict(zip(self.metrics, losses.metrics, strict=True)),
            auxiliary={} if sums is None else sums.terms(),
        )

    def _auxiliary_sums(self, scales: torch.Tensor | None) -> AuxiliarySums | None:
        """Return a collector of this stage's layer losses and load counts, or None if the model has neither."""
        if not self.architecture.auxiliary_losses and not self.architecture.mixtures:
            return None
        assert scales is not None or not torch.is_grad_enabled(), "losses of layers are scaled in the backward pass"
        by_name = None if scales is None else dict(zip(self.terms, scales, strict=True))
        return AuxiliarySums(by_name, self.region.axis, self.ops.row_shards)

    def stream(
        self, batch: B, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        """Return the residual stream after this stage's layers, and other tensors for the next stage."""
        context = self.context(batch)
        if auxiliary is not None:
            context = replace(context, auxiliary=auxiliary)
        embedded = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            # The embedding is not trained, but recomputation needs an input that requires a gradient.
            embedded.requires_grad_()
        return (self.through(self.layers, ResidualState(embedded), context),)

    def through(self, stack: nn.ModuleList, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """Run a stack of layers, with recomputation as configured."""
        for numbers, recompute in groups(len(stack), *self.options.full_recompute):
            layers = [stack[number] for number in numbers]
            if recompute and torch.is_grad_enabled():
                run = partial(self._from_sum, layers, context)
                stream = ResidualState(recomputed(run, stream.sum(self.ops), self._share))
            else:
                stream = self._through(layers, stream, context)
        return stream

    @property
    def _share(self) -> Axis | None:
        """The axis over which the saved inputs of recomputed layers are distributed, or None if they are not
        distributed."""
        return self.region.axis if self.options.distribute_saved and not self.region.sequence else None

    def embedded(self, embedding: nn.Module, batch: Any, context: ForwardContext) -> torch.Tensor:
        """Apply `embedding` to `batch` with unsharded weights."""
        if self.with_full_params is None:
            return self.embed(embedding, batch, context)
        return self.with_full_params(embedding, lambda _: self.embed(embedding, batch, context), batch.tokens)

    def _through(
        self, layers: Iterable[nn.Module], stream: ResidualState, context: ForwardContext, unshard: bool = True
    ) -> ResidualState:
        for layer in layers:
            whole = self.with_full_params is None or not unshard
            stream = layer(stream, context) if whole else self.unit(layer, stream, context)
        return stream

    def unit(self, layer: nn.Module, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """Run a layer with unsharded weights."""
        assert self.with_full_params is not None
        run = partial(self._from_sum, [layer], context, unshard=False)
        return ResidualState(self.with_full_params(layer, run, stream.sum(self.ops)))

    def _from_sum(
        self, layers: Sequence[nn.Module], context: ForwardContext, x: torch.Tensor, unshard: bool = True
    ) -> torch.Tensor:
        """Run layers as a function from one tensor to another, as recomputation and unsharding require."""
        return self._through(layers, ResidualState(x), context, unshard).sum(self.ops)

    def outputs(self, stream: ResidualState, batch: B) -> torch.Tensor:
        """Return the outputs of the last stage for `batch`: logits [b, s, ids of this rank]."""
        return self.run_head(stream, self._logits).unflatten(0, tuple(batch.tokens.shape))

    def _logits(self, stream: ResidualState) -> torch.Tensor:
        assert self.head is not None
        return cast(torch.Tensor, self.head(stream))

    def run_head(self, stream: ResidualState, run: Callable[[ResidualState], torch.Tensor]) -> torch.Tensor:
        """Unshard the head's weights, and call `run`, which uses the head."""
        assert self.head is not None
        if self.with_full_params is None:
            return run(stream)
        return self.with_full_params(self.head, lambda x: run(ResidualState(x)), stream.sum(self.ops))

    def head_losses(
        self, stream: ResidualState, batch: B, scales: torch.Tensor | None, auxiliary: AuxiliarySums | None
    ) -> Losses:
        """Return the losses of the head. auxiliary: collector of the losses of layers inside the head."""
        assert self.head is not None
        return cast(Losses, self.head(stream, batch, scales))

    def _losses(
        self, stream: ResidualState, batch: B, scales: torch.Tensor | None, auxiliary: AuxiliarySums | None
    ) -> Losses:
        if self.with_full_params is None:
            return self.head_losses(stream, batch, scales, auxiliary)
        head_losses: list[Losses] = []  # without scales, because backward must begin at the output of `run`

        def run(stream: ResidualState) -> torch.Tensor:
            head_losses.append(self.head_losses(stream, batch, None, auxiliary))
            return torch.stack([term.total for term in head_losses[0].terms])

        totals = self.run_head(stream, run).unbind()
        terms = (Term(total, term.weight) for total, term in zip(totals, head_losses[0].terms, strict=True))
        return Losses(tuple(terms), head_losses[0].metrics)


def tensors_by_unit(model: ModelConfig) -> dict[Unit, dict[str, Tensor]]:
    """Return the model's tensors by unit and name. A tied tensor is listed in each unit that uses the tensor."""
    by_unit: dict[Unit, dict[str, Tensor]] = {}
    for tensor in inventory(model):
        for unit in tensor.units:
            by_unit.setdefault(unit, {})[tensor.name] = tensor
    return by_unit


def relative(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return `tensors` with `prefix` removed from their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
