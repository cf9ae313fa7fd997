"""A transformer layer, made of branches on the residual stream. Training and decoding combine steps and branches with
the same code.

The steps of a branch are the norm before, the mixer, the mixer's last linear layer, and the norm after. Steps are
modules in training (`ResidualBranch`), and functions prepared from the modules in decoding (model/decode.py).
`branch_function` and `run_parallel` define the order of steps and sums, which depends on the position of the norms:

    before                              x + f(norm(x))
    before, added to the norm's output  n + f(n), n = norm(x)
    after the sum                       norm(x + f(x))
    before and after the branch         x + after(f(before(x)))
    after the branch                    x + after(f(x))
    parallel                            x + f(before_f(x)) + g(before_g(x))
    parallel, with one shared norm      x + f(n) + g(n), n = before(x)

A branch may also multiply its output by a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from mega.core.architecture.layer import Attention, Branch, Dense, Experts, Layer, Mixer, NeighbourAttention
from mega.core.model.experts import ExpertLayer
from mega.core.model.forward import ForwardContext
from mega.core.model.mixers import CrossAttention, FeedForward, LayerPlace, MixerModule, SelfAttention
from mega.core.model.neighbours import ChunkAttention, ReaderAttention
from mega.core.model.residual import ResidualState, Tensors, normalization
from mega.core.parallel.weight import ParameterFactory

Context = TypeVar("Context", contravariant=True)
"""The second argument of all steps: `ForwardContext` in training, `DecodeContext` in decoding."""


NormStep = Callable[[ResidualState], tuple[torch.Tensor, torch.Tensor]]
"""Function that returns the stream with the pending branch added, and the norm of this sum."""


class BranchSteps(Protocol[Context]):
    """The steps of a branch, as modules or functions."""

    @property
    def value(self) -> Branch:
        """The architecture of the branch."""

    @property
    def before(self) -> NormStep | None: ...
    @property
    def after(self) -> NormStep | None: ...
    @property
    def mix(self) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        """Function that takes x [tokens, h] and returns the input of the last linear layer."""

    @property
    def add(self) -> Callable[[torch.Tensor, torch.Tensor, Context], ResidualState]:
        """Function that takes the stream x and the input of the last linear layer, and returns x with the branch's
        output pending."""

    @property
    def alone(self) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        """Function that takes the input of the last linear layer and returns only the branch's output, with bias and
        dropout."""


def branch_function(steps: BranchSteps[Context]) -> Callable[[ResidualState, Context], ResidualState]:
    """Return a branch as a function of the stream. Attributes are looked up once, because decoding calls this function
    often."""
    before, mix, add, after, alone = steps.before, steps.mix, steps.add, steps.after, steps.alone
    onto_normed, of_sum = steps.value.onto == "normed", steps.value.after_of == "sum"
    multiplier = steps.value.multiplier

    def run(stream: ResidualState, context: Context) -> ResidualState:
        if before is None:
            assert stream.bias is None and stream.drop is None, "only a norm adds a branch with its bias and dropout"
            x = normed = stream.x if stream.branch is None else stream.x + stream.branch
        else:
            x, normed = before(stream)
        if onto_normed:
            x = normed
        mixer_output = mix(normed, context)
        if multiplier != 1.0:
            return ResidualState(x, alone(mixer_output, context) * multiplier)
        if after is None:
            return add(x, mixer_output, context)
        if of_sum:
            return ResidualState(after(add(x, mixer_output, context))[1])
        return ResidualState(x, after(ResidualState(alone(mixer_output, context)))[1])

    return run


def run_parallel(
    branches: Sequence[BranchSteps[Context]], before: NormStep | None, x: torch.Tensor, context: Context
) -> ResidualState:
    """Return the stream x with a pending sum of branches, all of which have the input x. before: the norm shared by all
    branches without a separate norm."""
    total, shared = None, x if before is None else before(ResidualState(x))[1]
    for steps in branches:
        normed = shared if steps.before is None else steps.before(ResidualState(x))[1]
        out = steps.alone(steps.mix(normed, context), context)
        out = out if steps.value.multiplier == 1.0 else out * steps.value.multiplier
        total = out if total is None else total + out
    return ResidualState(x, total)


ATTENTIONS: dict[str, type[SelfAttention]] = {
    "self": SelfAttention,
    "memory": CrossAttention,
    "reader": ReaderAttention,
}
"""Source of keys and values -> the attention module."""


def _attention(factory: ParameterFactory, value: Attention, tensors: Tensors, place: LayerPlace) -> SelfAttention:
    return ATTENTIONS[value.source](factory, value, tensors, place)


def _neighbours(
    factory: ParameterFactory, value: NeighbourAttention, tensors: Tensors, place: LayerPlace
) -> ChunkAttention:
    """Return the attention to neighbours. The layers of the neighbours' encoder have the indices -2, -3, ..., so that
    their dropout sites are unique."""

    def encoding(number: int, layer: Layer) -> TransformerLayer:
        prefix = f"{value.prefix}.layers.{number}."
        layer_tensors = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        return TransformerLayer(factory, layer, layer_tensors, place._replace(layer=-2 - number))

    encoder = nn.ModuleList(encoding(number, layer) for number, layer in enumerate(value.encoder))
    return ChunkAttention(factory, value, tensors, place, encoder)


MODULES: dict[type, Callable[..., MixerModule]] = {
    Attention: _attention,
    Dense: FeedForward,
    Experts: ExpertLayer,
    NeighbourAttention: _neighbours,
}
"""Type of mixer -> the function that creates the mixer's module."""


def mixer(factory: ParameterFactory, value: Mixer, tensors: Tensors, place: LayerPlace) -> MixerModule:
    """Create the module of a mixer."""
    return MODULES[type(value)](factory, value, tensors, place)


class ResidualBranch(nn.Module):
    """A branch in training, whose steps are modules."""

    def __init__(self, factory: ParameterFactory, value: Branch, tensors: Tensors, place: LayerPlace):
        super().__init__()
        self.value, self.layer, self.ops = value, place.layer, factory.ops
        # Norms are registered before the mixer, because the order of weights determines offsets in buckets and
        # checkpoints.
        self.before = normalization(factory, value.before, tensors)
        self.after = normalization(factory, value.after, tensors)
        self.mixer = mixer(factory, value.mixer, tensors, place)

    def mix(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        output: torch.Tensor = self.mixer(x, context)
        return output

    def add(self, x: torch.Tensor, mixed: torch.Tensor, context: ForwardContext) -> ResidualState:
        reads = context.read_by(self.layer)
        if reads is not None:  # `mixed` has only the tokens that the head reads
            x, context = reads.of(x), reads.context
        drop = context.dropout(self.value.dropout, self.layer, self.value.site)
        return ResidualState(x, self.mixer.finish(mixed, context), self.mixer.bias, drop)

    def alone(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        drop = context.dropout(self.value.dropout, self.layer, self.value.site)
        return self.ops.added(None, self.mixer.finish(mixed, context), self.mixer.bias, drop)


class TransformerLayer(nn.Module):
    """One layer of a model in training. tensors: the layer's tensors, by name relative to the layer.

    Branches that attend to a memory are registered last, regardless of the order in which branches run, because the
    order of weights determines the offsets in buckets and checkpoints.
    """

    def __init__(self, factory: ParameterFactory, value: Layer, tensors: Tensors, place: LayerPlace):
        super().__init__()
        self.value, self.ops, self.layer = value, factory.ops, place.layer
        self.before = normalization(factory, value.before, tensors)
        later = [isinstance(each.mixer, Attention) and each.mixer.source != "self" for each in value.branches]
        order = sorted(range(len(later)), key=later.__getitem__)
        self.registered = nn.ModuleList(
            ResidualBranch(factory, value.branches[position], tensors, place) for position in order
        )
        self._running = [order.index(position) for position in range(len(order))]

    @property
    def encodes(self) -> bool:
        """Whether the layer holds the encoder of the text's neighbours."""
        return self.value.neighbours is not None and bool(self.value.neighbours.encoder)

    @property
    def branches(self) -> list[Any]:
        """The branches in the order in which they run."""
        return [self.registered[position] for position in self._running]

    def forward(self, stream: ResidualState, context: ForwardContext) -> ResidualState:
        if self.value.parallel:
            return run_parallel(self.branches, self.before, stream.sum(self.ops), context)
        reads = context.read_by(self.layer)
        assert reads is None or self.value.queries_alone, self.value
        for branch in self.branches:
            stream = branch_function(branch)(stream, context)
            if reads is not None:  # attention, the first branch, returns only the tokens that the head reads
                context = reads.context
        return stream
