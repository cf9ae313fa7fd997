"""Blocks on one residual stream as a pipeline stage, with what comes before the first block and after the last.

What a family adds is its embedding, its head and what its batch means to the blocks. Whole blocks are recomputed, and
units run with their whole weights (ZeRO 3), here, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from mega.core.batch import Term
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, Unit, inventory
from mega.core.inventory.adapters import adapter_specs
from mega.core.model.block import Block, ResidualState
from mega.core.model.forward import ForwardContext
from mega.core.model.stage import StageOptions, UnshardHook
from mega.core.parallel.adapter import attach_adapters
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.recompute import groups, recomputed
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory


class Losses(NamedTuple):
    """What a head makes of a batch, in the order of the stage's `terms` and `metrics`."""

    terms: tuple[Term, ...]
    metrics: tuple[Term, ...] = ()


class StackStage(nn.Module):
    """The units of a model that one stage holds: "embedding", blocks by number, "head", in this order.

        stage(batch, *cargo) -> cargo             [tokens, h], our tokens under sequence parallelism
        last(batch, *cargo)  -> terms, metrics    or logits, where outputs are asked for

    A family sets `terms` and `metrics` and writes the four methods that raise here. Its head is called with a
    `ResidualState`, a batch and the scales of its terms, which it may use, and gives `Losses`; without a batch, logits
    [tokens, ids of this rank].
    with_full_params: runs a unit with its whole weights on this rank only meanwhile; None where they stay.
    """

    terms: tuple[str, ...] = ()
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
        self.dtype, self.residual = factory.dtype, options.residual or factory.dtype
        self.ops = factory.ops
        self.with_full_params: UnshardHook | None = None
        if options.objective is not None:
            self.terms, self.metrics = options.objective.terms, options.objective.metrics
        own = tensors_by_unit(model)
        self.embedding = self.build_embedding(factory.exact, own["embedding"]) if "embedding" in units else None
        self.build_blocks(factory, own)
        self.head = self.build_head(factory.exact, own["head"]) if "head" in units else None
        attach_adapters(self, adapter_specs(model, inventory(model)), factory)

    # -- what a family writes

    def build_blocks(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]]) -> None:
        """Set what lies between embedding and head. own: the model's tensors by unit."""
        self.blocks = nn.ModuleList(
            Block(factory, self.model, relative(own[unit], f"model.layers.{unit}."), unit, self.region)
            for unit in self.units
            if isinstance(unit, int)
        )

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """What is in front of the first block."""
        raise NotImplementedError

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> nn.Module:
        """What is after the last block."""
        raise NotImplementedError

    def context(self, batch: Any) -> ForwardContext:
        """What `batch` means to the blocks."""
        raise NotImplementedError

    def embed(self, embedding: nn.Module, batch: Any, context: ForwardContext) -> torch.Tensor:
        """What `embedding` makes of `batch`: [tokens, h], our tokens under sequence parallelism."""
        raise NotImplementedError

    # -- the stage

    @property
    def dropout_seed(self) -> int | None:
        """None where nothing is dropped."""
        return self.options.dropout_seed if self.training else None

    def cargo(self, batch: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what this stage is given for `batch`."""
        assert self.model.hidden
        tokens = batch.tokens.numel() // (self.region.size if self.region.sequence else 1)
        return [((tokens, self.model.hidden), self.residual)]

    def forward(
        self, batch: Any, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """outputs: the last stage gives what `outputs` says instead of the losses."""
        stream, *passed = self.stream(batch, *cargo)
        if self.head is None:
            return StageOutput(cargo=(stream.sum(self.ops), *passed))
        if outputs:
            return StageOutput(outputs=self.outputs(stream, batch))
        found = self._losses(stream, batch, scales)
        return StageOutput(
            terms=dict(zip(self.terms, found.terms, strict=True)),
            metrics=dict(zip(self.metrics, found.metrics, strict=True)),
        )

    def stream(self, batch: Any, *cargo: torch.Tensor) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        """The residual stream after our blocks, and what goes to the next stage beside it."""
        context = self.context(batch)
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        if torch.is_grad_enabled() and not begun.requires_grad:
            begun.requires_grad_()  # of an embedding that is not trained; what is recomputed goes by its input
        return (self.through(self.blocks, ResidualState(begun), context),)

    def through(self, stack: nn.ModuleList, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """A stack of blocks, some of which are recomputed."""
        for which, recompute in groups(len(stack), *self.options.full_recompute):
            blocks = [stack[number] for number in which]
            if recompute and torch.is_grad_enabled():
                run = partial(self._from_sum, blocks, context)
                stream = ResidualState(recomputed(run, stream.sum(self.ops), self._share))
            else:
                stream = self._through(blocks, stream, context)
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
        self, blocks: Iterable[nn.Module], stream: ResidualState, context: ForwardContext, unshard: bool = True
    ) -> ResidualState:
        for block in blocks:
            if self.with_full_params is None or not unshard:
                stream = block(stream, context)
            else:
                run = partial(self._from_sum, [block], context, unshard=False)
                stream = ResidualState(self.with_full_params(block, run, stream.sum(self.ops)))
        return stream

    def _from_sum(
        self, blocks: Sequence[nn.Module], context: ForwardContext, x: torch.Tensor, unshard: bool = True
    ) -> torch.Tensor:
        """Blocks as a function of one tensor, for callers that run them as a unit."""
        return self._through(blocks, ResidualState(x), context, unshard).sum(self.ops)

    def outputs(self, stream: ResidualState, batch: Any) -> torch.Tensor:
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

    def _losses(self, stream: ResidualState, batch: Any, scales: torch.Tensor | None) -> Losses:
        head = self.head
        assert head is not None
        if self.with_full_params is None:
            return head(stream, batch, scales)
        made: list[Losses] = []  # without scales: the backward pass of a unit begins at what `run` gives

        def run(stream: ResidualState) -> torch.Tensor:
            made.append(head(stream, batch))
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
