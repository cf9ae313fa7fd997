"""What a whole model is, as values: an input, stacks of layers one after the other, an output.

    Architecture(hidden=4096, input=Input(vocab=32000, ...), stacks=(Stack(layers=(Layer(...), ...)),), output=...)

Layers are numbered through all stacks. A unit is what one pipeline stage holds whole: a layer, by its number, or an end
of a stack by its name; with one stack "embedding", 0, 1, ..., "head". No torch, no ranks, no options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mega.core.architecture.layer import Activation, Attention, AuxiliaryLoss, Experts, Layer, LongScaling, Norm, Rope
from mega.core.architecture.tensor import Tensor, Unit, padded


@dataclass(frozen=True, kw_only=True)
class Input:
    """How ids become the residual stream: rows of tables, added up."""

    vocab: int
    """True rows of the table of tokens."""
    vocab_multiple: int
    """The table is padded to a multiple of this times the tensor ranks."""
    scale: float
    """What token rows are multiplied by."""
    rounds_scale: bool
    """Whether that is rounded to the dtype of the rows first."""
    learned_positions: int
    """Rows of a learned table of positions; 0 is none."""
    learned_from: int
    """The row of the first position."""
    sinusoid_from: int | None
    """Number of the first sinusoidal position; None without sinusoids."""
    types: int
    """Rows of a table for the parts of a row; 0 is none."""
    norm: Norm | None
    dropout: float

    def rows(self, tp: int) -> int:
        """Rows of the table of tokens, padding included, on all of `tp` tensor ranks together."""
        return padded(self.vocab, tp, self.vocab_multiple)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers on one residual stream."""

    name: str
    """What the names of its tensors begin with."""
    opens: str
    """The unit in front of its first layer, which embeds its tokens."""
    first: int
    """The number of its first layer."""
    layers: tuple[Layer, ...]
    norm: Norm | None
    """Of the stream after the last layer; it belongs to the unit that follows."""

    @property
    def numbers(self) -> range:
        """Of its layers, counted through all stacks."""
        return range(self.first, self.first + len(self.layers))

    def prefix(self, number: int) -> str:
        """What the names of layer `number`'s tensors begin with."""
        return f"{self.name}.layers.{number - self.first}."


@dataclass(frozen=True, kw_only=True)
class Words:
    """Logits of the vocabulary."""

    tied: bool
    """Whether the output matrix is the input's table."""
    bias: bool
    transform: Transform | None
    divisor: float = 1.0
    """What logits are divided by."""
    softcap: float | None = None
    """Logits l, after the division, become softcap x tanh(l / softcap) (Gemma 2)."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A dense layer, an activation and a norm before the output matrix, as BERT has them."""

    activation: Activation
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is computed of each row as a whole, from its pooled first token."""

    name: str
    classes: int
    """Outputs of a row."""
    choices: int
    """Rows of which one is chosen by its only output; 1: each row is classified by itself."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What predicts one token further: a layer that reads the stream so far and the embedding of the token before that
    one, each normed, joined by a linear (DeepSeek-V3, section 2.2)."""

    name: str
    """What its tensors' names begin with."""
    token_norm: Norm
    stream_norm: Norm
    layer: Layer
    norm: Norm
    loss: str
    """What the log calls its loss."""
    coefficient: float
    """What the loss is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is made of the last stack's stream."""

    words: Words | None
    ahead: tuple[Ahead, ...] = ()
    """For tokens after the next one, each on the stream of the one before."""
    pooler: bool
    """Whether the first token of a row passes a dense layer and tanh."""
    rows: Rows | None


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters (Hu et al. 2021) of a model's linears."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of the linears that have one; () is all."""
    dropout: float
    """Of their inputs."""

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model: everything that decides its tensors and its mathematics."""

    family: str
    """Named in messages and on disk. Code that depends on it belongs in core/family.py."""
    hidden: int
    """Width of the residual stream."""
    positions: int
    """Longest sequence."""
    input: Input
    stacks: tuple[Stack, ...]
    output: Output
    init_std: float
    """Standard deviation of the initial values of matrices and tables."""
    out_std: float
    """The same of the linears that end a branch."""
    adapters: Adapters | None
    extra: tuple[Tensor, ...] = ()
    """Tensors that a family adds to those of the parts above."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Of all stacks."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @property
    def block(self) -> Layer:
        """Its first layer: where all are alike, as in most models, what each of them is."""
        return self.layers[0]

    @property
    def units(self) -> tuple[Unit, ...]:
        """In the order of the forward pass."""
        opened: Iterator[Unit] = (unit for stack in self.stacks for unit in (stack.opens, *stack.numbers))
        return *opened, "head"

    @property
    def attentions(self) -> Iterator[Attention]:
        """Of all layers that differ, in order."""
        return (attention for layer in dict.fromkeys(self.layers) for attention in layer.attentions)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The kinds of rotary positions of its layers."""
        layers = dict.fromkeys((*self.layers, *self.encoder))
        ropes = (attention.rope for layer in layers for attention in layer.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @cached_property
    def reading(self) -> tuple[int, ...]:
        """Numbers of the layers that read neighbours."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.neighbours is not None)

    @cached_property
    def encoder(self) -> tuple[Layer, ...]:
        """The layers that read neighbours of the text; () where none do."""
        first = self.layers[self.reading[0]].neighbours if self.reading else None
        return () if first is None else first.encoder

    @property
    def long_from(self) -> int | None:
        """Tokens beyond which a text has LongRoPE's long factors; None where no text has them, or no others."""
        scalings = [rope.scaling for rope in self.ropes if isinstance(rope.scaling, LongScaling)]
        return scalings[0].original if scalings and scalings[0].original < self.positions else None

    @cached_property
    def auxiliary_losses(self) -> dict[AuxiliaryLoss, tuple[int, ...]]:
        """The losses of its layers -> how many mixers of each stack compute it.

        Errors: ValueError where two that differ share a name.
        """
        by_stack = [[loss for layer in stack.layers for loss in layer.auxiliary_losses] for stack in self.stacks]
        by_stack[-1] += [loss for each in self.output.ahead for loss in each.layer.auxiliary_losses]
        found = {loss: tuple(losses.count(loss) for losses in by_stack) for losses in by_stack for loss in losses}
        names = [loss.name for loss in found]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--family {self.family}: layers have different losses of the name {repeated[0]}")
        return found

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        """The mixtures of experts of all layers that differ, in order."""
        return tuple(layer.experts for layer in dict.fromkeys(self.layers) if layer.experts is not None)

    @property
    def training_losses(self) -> tuple[str, ...]:
        """Names of the losses that only training computes."""
        return *(loss.name for loss in self.auxiliary_losses), *(each.loss for each in self.output.ahead)

    @cached_property
    def drops(self) -> bool:
        """Whether anything is random in training."""
        rates = [self.input.dropout, 0.0 if self.adapters is None else self.adapters.dropout]
        layers = dict.fromkeys((*self.layers, *self.encoder))
        rates += [branch.dropout for layer in layers for branch in layer.branches]
        rates += [experts.router.jitter for experts in self.mixtures]
        rates += [layer.neighbours.attention.dropout for layer in layers if layer.neighbours is not None]
        return any((*rates, *(attention.dropout for layer in layers for attention in layer.attentions)))

    @property
    def cached(self) -> Attention:
        """The attention of any layer of a model that continues text: all keep keys and values of one shape, and have
        one soft cap.

        Errors: ValueError where they do not.
        """
        shapes = {(each.heads, each.kv_heads, each.head_dim, each.softcap): each for each in self.attentions}
        if len(shapes) != 1:
            raise ValueError(
                f"a model of --family {self.family}: its layers keep keys and values of several shapes or soft caps"
            )
        return next(iter(shapes.values()))

    @property
    def tied(self) -> bool:
        """Whether the table of tokens is the output matrix too."""
        return self.output.words is not None and self.output.words.tied

    def ends(self, stack: Stack) -> str:
        """The unit after a stack's last layer."""
        following = self.stacks.index(stack) + 1
        return self.stacks[following].opens if following < len(self.stacks) else "head"
