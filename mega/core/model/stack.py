"""Layers on one residual stream as a pipeline stage, with what comes before the first layer and after the last.

What a family adds is its embedding, its head and what its batch means to the layers. Whole layers are recomputed, and
units run with their whole weights (ZeRO 3), here, for all of them.
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
    """What a head makes of a batch, in the order of the stage's `head_terms` and `metrics`."""

    terms: tuple[Term, ...]
    metrics: tuple[Term, ...] = ()


class TokenBatch(Batch, Protocol):
    """One whose first stack reads `tokens`, int64 [b, s]."""

    @property
    def tokens(self) -> torch.Tensor: ...


B = TypeVar("B", bound=TokenBatch)


class StackStage(nn.Module, Generic[B]):
    """The units of a model that one stage holds: "embedding", layers by number, "head", in this order.

        stage(batch, *cargo) -> cargo             [tokens, h], our tokens under sequence parallelism
        last(batch, *cargo)  -> terms, metrics    or logits, where outputs are asked for

    A family sets `head_terms` and `metrics` and writes the four methods that raise here. Its head is called with a
    `ResidualState`, a batch and the scales of its terms, which it may use, and gives `Losses`; without a batch, logits
    [tokens, ids of this rank].
    head_terms: name of each loss of the head -> its coefficient; the losses of layers follow from the architecture.
    with_full_params: runs a unit with its whole weights on this rank only meanwhile; None where they stay.
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
        own = tensors_by_unit(model)
        self.embedding = self.build_embedding(factory.exact, own["embedding"]) if "embedding" in units else None
        self.build_layers(factory, own)
        self.head = self.build_head(factory.exact, own["head"]) if "head" in units else None
        self._attach_adapters(factory)

    def _attach_adapters(self, factory: ParameterFactory) -> None:
        """Where the model has any."""
        specs = adapter_specs(self.architecture.adapters, inventory(self.model))
        attach_adapters(self, specs, factory)
        for experts in [each for each in self.modules() if isinstance(each, GroupedExperts)]:
            experts.adapt(specs)

    # -- what a family writes

    def build_layers(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]]) -> None:
        """Set what lies between embedding and head. own: the model's tensors by unit."""
        self.layers = self.stack(factory, own, self.architecture.stacks[0])

    def stack(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]], stack: Stack) -> nn.ModuleList:
        """The layers of a stack that this stage holds."""
        adapters, at = self.architecture.adapters, self.options
        dropped = 0.0 if adapters is None else adapters.dropout

        def layer(number: int) -> TransformerLayer:
            value, tensors = stack.layers[number - stack.first], relative(own[number], stack.prefix(number))
            place = LayerPlace(number, self.region, dropped, at.cp, at.experts, at.gathers_experts)
            return TransformerLayer(factory, value, tensors, place)

        return nn.ModuleList(layer(number) for number in stack.numbers if number in self.units)

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """What is in front of the first layer."""
        raise NotImplementedError

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """What is after the last layer."""
        raise NotImplementedError

    def context(self, batch: B) -> ForwardContext:
        """What `batch` means to the layers."""
        raise NotImplementedError

    def embed(self, embedding: nn.Module, batch: Any, context: ForwardContext) -> torch.Tensor:
        """What `embedding` makes of `batch`: [tokens, h], our tokens under sequence parallelism."""
        raise NotImplementedError

    def stack_tokens(self, batch: B) -> tuple[torch.Tensor, ...]:
        """The tokens [b, s] that each stack of the architecture reads of `batch`."""
        return (batch.tokens,)

    # -- the stage

    @cached_property
    def terms(self) -> dict[str, float]:
        """Name of each loss, of the head or of layers -> what its mean is multiplied by in the loss."""
        losses = self.architecture.auxiliary_losses
        return {**self.head_terms, **{loss.name: loss.coefficient * sum(layers) for loss, layers in losses.items()}}

    def split(self, batch: B, index: int, size: int) -> B:
        """The columns of a batch that rank `index` of a context axis of `size` ranks holds, with what layers need of
        others."""
        return batch.split(index, size)

    def weights(self, batch: B) -> Mapping[str, torch.Tensor]:
        """As of `Stage`."""
        losses = self.architecture.auxiliary_losses
        if not losses:
            return batch.weights
        tokens, shards, found = self.stack_tokens(batch), self.ops.row_shards, dict(batch.weights)
        for loss, layers in losses.items():
            pairs = zip(layers, tokens, strict=True)
            weight = sum(count * divisor(loss, *ids.shape, shards=shards) for count, ids in pairs)
            found[loss.name] = torch.full((), weight, dtype=torch.float64, device=batch.samples.device)
        return found

    @property
    def dropout_seed(self) -> int | None:
        """None where nothing is dropped."""
        return self.options.dropout_seed if self.training else None

    def cargo(self, batch: B) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what this stage is given for `batch`."""
        tokens = batch.tokens.numel() // (self.region.size if self.region.sequence else 1)
        return [((tokens, self.architecture.hidden), self.residual)]

    def forward(
        self, batch: B, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """outputs: the last stage gives what `outputs` says instead of the losses."""
        sums = None if outputs else self._auxiliary_sums(scales)
        stream, *passed = self.stream(batch, sums, *cargo)
        if self.head is None:
            auxiliary = {} if sums is None else sums.terms()
            return StageOutput(cargo=(stream.sum(self.ops), *passed), auxiliary=auxiliary)
        if outputs:
            return StageOutput(outputs=self.outputs(stream, batch))
        found = self._losses(stream, batch, scales, sums)
        return StageOutput(
            terms=dict(zip(self.head_terms, found.terms, strict=self.training)),
            metrics=dict(zip(self.metrics, found.metrics, strict=True)),
            auxiliary={} if sums is None else sums.terms(),
        )

    def _auxiliary_sums(self, scales: torch.Tensor | None) -> AuxiliarySums | None:
        """What takes the losses of our layers, and counts, where the model has any."""
        if not self.architecture.auxiliary_losses and not self.architecture.mixtures:
            return None
        assert scales is not None or not torch.is_grad_enabled(), "losses of layers are scaled in the backward pass"
        by_name = None if scales is None else dict(zip(self.terms, scales, strict=True))
        return AuxiliarySums(by_name, self.region.axis, self.ops.row_shards)

    def stream(
        self, batch: B, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        """The residual stream after our layers, and what goes to the next stage along with it."""
        context = self.context(batch)
        if auxiliary is not None:
            context = replace(context, auxiliary=auxiliary)
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        if torch.is_grad_enabled() and not begun.requires_grad:
            begun.requires_grad_()  # of an embedding that is not trained; what is recomputed goes by its input
        return (self.through(self.layers, ResidualState(begun), context),)

    def through(self, stack: nn.ModuleList, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """A stack of layers, some of which are recomputed."""
        for which, recompute in groups(len(stack), *self.options.full_recompute):
            layers = [stack[number] for number in which]
            if recompute and torch.is_grad_enabled():
                run = partial(self._from_sum, layers, context)
                stream = ResidualState(recomputed(run, stream.sum(self.ops), self._share))
            else:
                stream = self._through(layers, stream, context)
        return stream

    @property
    def _share(self) -> Axis | None:
        """Over which ranks what recompute keeps is shared out."""
        return self.region.axis if self.options.distribute_saved and not self.region.sequence else None

    def embedded(self, embedding: nn.Module, batch: Any, context: ForwardContext) -> torch.Tensor:
        """As `embed`, with the whole weights here meanwhile."""
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
        """A layer, with its whole weights here meanwhile."""
        assert self.with_full_params is not None
        run = partial(self._from_sum, [layer], context, unshard=False)
        return ResidualState(self.with_full_params(layer, run, stream.sum(self.ops)))

    def _from_sum(
        self, layers: Sequence[nn.Module], context: ForwardContext, x: torch.Tensor, unshard: bool = True
    ) -> torch.Tensor:
        """Layers as a function of one tensor, for callers that run them as a unit."""
        return self._through(layers, ResidualState(x), context, unshard).sum(self.ops)

    def outputs(self, stream: ResidualState, batch: B) -> torch.Tensor:
        """What the last stage computes of `batch` instead of losses: logits [b, s, ids of this rank]."""
        return self.headed(stream, self._logits).unflatten(0, tuple(batch.tokens.shape))

    def _logits(self, stream: ResidualState) -> torch.Tensor:
        assert self.head is not None
        return cast(torch.Tensor, self.head(stream))

    def headed(self, stream: ResidualState, run: Callable[[ResidualState], torch.Tensor]) -> torch.Tensor:
        """`run`, which the head computes, with its whole weights here."""
        assert self.head is not None
        if self.with_full_params is None:
            return run(stream)
        return self.with_full_params(self.head, lambda x: run(ResidualState(x)), stream.sum(self.ops))

    def judged(
        self, stream: ResidualState, batch: B, scales: torch.Tensor | None, auxiliary: AuxiliarySums | None
    ) -> Losses:
        """What the head makes of the stream. auxiliary: takes the losses of layers in the head."""
        assert self.head is not None
        return cast(Losses, self.head(stream, batch, scales))

    def _losses(
        self, stream: ResidualState, batch: B, scales: torch.Tensor | None, auxiliary: AuxiliarySums | None
    ) -> Losses:
        if self.with_full_params is None:
            return self.judged(stream, batch, scales, auxiliary)
        made: list[Losses] = []  # without scales: the backward pass of a unit begins at what `run` gives

        def run(stream: ResidualState) -> torch.Tensor:
            made.append(self.judged(stream, batch, None, auxiliary))
            return torch.stack([term.total for term in made[0].terms])

        totals = self.headed(stream, run).unbind()
        terms = (Term(total, term.weight) for total, term in zip(totals, made[0].terms, strict=True))
        return Losses(tuple(terms), made[0].metrics)


def tensors_by_unit(model: ModelConfig) -> dict[Unit, dict[str, Tensor]]:
    """The model's inventory by unit and name; a tied tensor is of each of its units."""
    found: dict[Unit, dict[str, Tensor]] = {}
    for tensor in inventory(model):
        for unit in tensor.units:
            found.setdefault(unit, {})[tensor.name] = tensor
    return found


def relative(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same by names without `prefix`."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
