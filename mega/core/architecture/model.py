"""The architecture of a whole model as frozen dataclasses. A model has an input, a sequence of stacks of layers, and an
output.

    Architecture(hidden=4096, input=Input(vocab=32000, ...), stacks=(Stack(layers=(Layer(...), ...)),), output=...)

Layers are numbered consecutively over all stacks. A unit is a part of the model that is never split between pipeline
stages: a layer, identified by a number, or an end of a stack, identified by a name. The units of a model with one stack
are "embedding", 0, 1, ..., "head". This module does not depend on torch, ranks or options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mega.core.architecture.layer import Activation, Attention, AuxiliaryLoss, Experts, Layer, LongScaling, Norm, Rope
from mega.core.architecture.tensor import Tensor, Unit, padded


@dataclass(frozen=True, kw_only=True)
class Input:
    """The embedding, which is a sum of rows of tables."""

    vocab: int
    """Number of rows of the token table, without padding."""
    vocab_multiple: int
    """The number of rows of the token table is padded to a multiple of this number times the tensor parallel size."""
    scale: float
    """Factor by which token rows are multiplied."""
    rounds_scale: bool
    """Whether `scale` is first rounded to the dtype of the rows."""
    learned_positions: int
    """Number of rows of a learned table of positions; 0 if the model has no such table."""
    learned_from: int
    """Index of the first position's row in the table of learned positions."""
    sinusoid_from: int | None
    """The first sinusoidal position; None if positions are not sinusoidal."""
    types: int
    """Number of rows of a table of token types (segments of a row); 0 if the model has no such table."""
    norm: Norm | None
    dropout: float

    def rows(self, tp: int) -> int:
        """Return the number of rows in the token table, with padding, over all `tp` tensor ranks."""
        return padded(self.vocab, tp, self.vocab_multiple)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack of layers on one residual stream."""

    name: str
    """The prefix of the names of the stack's tensors."""
    opens: str
    """The unit before the stack's first layer, which holds the stack's embedding."""
    first: int
    """The number of the stack's first layer."""
    layers: tuple[Layer, ...]
    norm: Norm | None
    """The norm after the last layer. This norm belongs to the unit that follows the stack."""

    @property
    def numbers(self) -> range:
        """The numbers of the stack's layers, counted over all stacks."""
        return range(self.first, self.first + len(self.layers))

    def prefix(self, number: int) -> str:
        """Return the prefix of the tensor names of layer `number`."""
        return f"{self.name}.layers.{number - self.first}."


@dataclass(frozen=True, kw_only=True)
class Words:
    """The output for tokens: logits over the vocabulary."""

    tied: bool
    """Whether the output matrix is the embedding table."""
    bias: bool
    transform: Transform | None
    divisor: float = 1.0
    """Divisor of logits."""
    softcap: float | None = None
    """Bound of logits. After the division, logits are replaced with softcap x tanh(logits / softcap) (Gemma 2)."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A dense layer, an activation and a norm before the output matrix, as in BERT."""

    activation: Activation
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The output for whole rows, computed from the pooled first token."""

    name: str
    classes: int
    """Number of outputs per row."""
    choices: int
    """Number of rows from which one is chosen (multiple choice), with a single output per row; 1 if rows are classified
    separately."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A layer of multi-token prediction, which predicts the token after the previous prediction (DeepSeek-V3, section
    2.2).

    A linear layer computes the input from the previous prediction's stream and the previous token's embedding, both
    normalized.
    """

    name: str
    """The prefix of the names of the layer's tensors."""
    token_norm: Norm
    """The norm of the previous token's embedding."""
    stream_norm: Norm
    """The norm of the previous prediction's stream."""
    layer: Layer
    norm: Norm
    """The norm of the output."""
    loss: str
    """The name of the layer's loss in the log."""
    coefficient: float
    """Factor of the layer's loss in the total loss."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The outputs computed from the stream of the last stack."""

    words: Words | None
    ahead: tuple[Ahead, ...] = ()
    """Layers that predict tokens after the next token. Each layer's input includes the stream of the previous layer."""
    pooler: bool
    """Whether a dense layer and tanh are applied to the first token of a row."""
    rows: Rows | None


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters (Hu et al. 2021) of a model's linear layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of the linear layers that have an adapter; () for all linear layers."""
    dropout: float
    """Dropout probability for the inputs of adapters."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The architecture of a model. It determines all tensors and the whole computation."""

    family: str
    """Name of the model family in messages and on disk. Code that depends on the family belongs in core/family.py."""
    hidden: int
    """Width of the residual stream."""
    positions: int
    """Maximum sequence length."""
    input: Input
    stacks: tuple[Stack, ...]
    output: Output
    init_std: float
    """Standard deviation of the initial values of matrices and tables."""
    out_std: float
    """Standard deviation of the initial values in each branch's last linear layer."""
    adapters: Adapters | None
    extra: tuple[Tensor, ...] = ()
    """Additional tensors of the model family, which the other fields do not imply."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all stacks."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @property
    def block(self) -> Layer:
        """The first layer, which represents all layers in models whose layers are equal."""
        return self.layers[0]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The model's units in the order of the forward pass."""
        stack_units: Iterator[Unit] = (unit for stack in self.stacks for unit in (stack.opens, *stack.numbers))
        return *stack_units, "head"

    @property
    def attentions(self) -> Iterator[Attention]:
        """The attentions of all distinct layers, in order."""
        return (attention for layer in dict.fromkeys(self.layers) for attention in layer.attentions)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct types of rotary positions in the model's layers."""
        layers = dict.fromkeys((*self.layers, *self.encoder))
        ropes = (attention.rope for layer in layers for attention in layer.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @cached_property
    def reading(self) -> tuple[int, ...]:
        """Numbers of the layers that attend to neighbours."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.neighbours is not None)

    @cached_property
    def encoder(self) -> tuple[Layer, ...]:
        """The layers of the neighbours' encoder; () if the model has no such encoder."""
        first = self.layers[self.reading[0]].neighbours if self.reading else None
        return () if first is None else first.encoder

    @property
    def long_from(self) -> int | None:
        """The number of tokens above which LongRoPE's long factors apply; None if factors do not depend on the
        length."""
        scalings = [rope.scaling for rope in self.ropes if isinstance(rope.scaling, LongScaling)]
        return scalings[0].original if scalings and scalings[0].original < self.positions else None

    @cached_property
    def auxiliary_losses(self) -> dict[AuxiliaryLoss, tuple[int, ...]]:
        """Each loss of the model's layers -> the number of mixers in each stack that compute this loss.

        Errors: ValueError if two different losses have the same name.
        """
        by_stack = [[loss for layer in stack.layers for loss in layer.auxiliary_losses] for stack in self.stacks]
        by_stack[-1] += [loss for each in self.output.ahead for loss in each.layer.auxiliary_losses]
        counts = {loss: tuple(losses.count(loss) for losses in by_stack) for losses in by_stack for loss in losses}
        names = [loss.name for loss in counts]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--family {self.family}: layers have different losses of the name {repeated[0]}")
        return counts

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        """The mixtures of experts of all distinct layers, in order."""
        return tuple(layer.experts for layer in dict.fromkeys(self.layers) if layer.experts is not None)

    @property
    def training_losses(self) -> tuple[str, ...]:
        """The names of the losses that are computed in training only."""
        return *(loss.name for loss in self.auxiliary_losses), *(each.loss for each in self.output.ahead)

    @cached_property
    def drops(self) -> bool:
        """Whether training uses random numbers (dropout or jitter)."""
        rates = [self.input.dropout, 0.0 if self.adapters is None else self.adapters.dropout]
        layers = dict.fromkeys((*self.layers, *self.encoder))
        rates += [branch.dropout for layer in layers for branch in layer.branches]
        rates += [experts.router.jitter for experts in self.mixtures]
        rates += [layer.neighbours.attention.dropout for layer in layers if layer.neighbours is not None]
        return any((*rates, *(attention.dropout for layer in layers for attention in layer.attentions)))

    @property
    def cached(self) -> Attention:
        """An attention whose key/value cache shape and soft cap are those of all layers.

        Errors: ValueError if layers differ in these properties.
        """
        shapes = {(each.heads, each.kv_heads, each.head_dim, each.softcap): each for each in self.attentions}
        if len(shapes) != 1:
            raise ValueError(
                f"a model of --family {self.family}: its layers keep keys and values of several shapes or soft caps"
            )
        return next(iter(shapes.values()))

    @property
    def tied(self) -> bool:
        """Whether the token table is also the output matrix."""
        return self.output.words is not None and self.output.words.tied

    def ends(self, stack: Stack) -> str:
        """Return the unit after a stack's last layer."""
        following = self.stacks.index(stack) + 1
        return self.stacks[following].opens if following < len(self.stacks) else "head"
