"""Predicts the time of an engine's step from counted bytes and operations, and from the rates of a card.

    step          the tokens that one step computes: new tokens of answers, chunks of prompts
    ServingTimes   the time of a step on each pipeline stage, by limiting factor

The weights that a step reads, its matmuls and its keys are counted from the architecture. The matmuls and the attention
of prompts are looked up in the curves of cost.py; everything else is limited by the memory bandwidth or by delays.
`bench/simulated.py` runs the engine's scheduler with these times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import NamedTuple

from mega.core.architecture import architecture
from mega.core.architecture.layer import Attention, Dense, Experts, Layer
from mega.core.config.sections import ModelConfig
from mega.core.estimate.cost import AttentionWork, Card, Gemm
from mega.core.estimate.hardware import Hardware
from mega.core.estimate.weights import BYTES
from mega.core.inference.capacity import even_layers
from mega.core.parallel.one_shot import limit_of

FP8_READ = 0.75
"""Speed of reading 8-bit weights, as a fraction of the speed of reading 16-bit weights. Measured with one token per
step."""

SUM = 4.3e-6
"""Delay of a sum over tensor ranks, in seconds per rank. Every rank waits for a signal from each other rank."""

MIXTURE = 22e-6
"""Seconds that an MoE layer spends neither reading weights nor computing: on routing, and at the start and the end of
kernels whose experts have different numbers of rows."""

GROUPED = 0.8
"""Speed of a grouped matmul over experts, as a fraction of the speed of one matmul with all their rows."""

SAMPLING = 12.0
"""Number of times that sampling reads or writes the fp32 logits."""

HOST_STEP, HOST_ROW = 0.12, 0.002
"""Host time of a step, and of each of its rows, as fractions of `Hardware.host`."""


@dataclass(frozen=True)
class Seconds:
    """The time of a step in seconds, by limiting factor."""

    bandwidth: float = 0.0  # Reading weights, keys and values, and other tensors
    compute: float = 0.0  # Matmuls and attention with many tokens
    exchange: float = 0.0  # Sums over tensor ranks, and activations for the next stage
    kernels: float = 0.0  # Gaps between kernels, and other delays on the device
    host: float = 0.0  # The device waits for the host

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Seconds:
        return Seconds(*(times * each for each in vars(self).values()))

    @property
    def all(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def limit(self) -> str:
        """The name of the field with the largest value."""
        return max(vars(self), key=lambda name: vars(self)[name])


class StepSize(NamedTuple):
    """The work of one step."""

    tokens: int  # Number of tokens, with the padding of a CUDA graph
    rows: int  # Number of rows of logits
    keys: tuple[int, ...]  # For each new token of an answer: length of its sequence
    prompts: tuple[tuple[int, int], ...]  # For each chunk of a prompt: (tokens, sequence length at its end)


class Matrix(NamedTuple):
    """The weights of a matmul on one rank. An MoE layer has `experts` such matrices, of which each token uses
    `chosen`."""

    ins: int
    outs: int
    experts: int = 1
    chosen: int = 1

    def read(self, tokens: int) -> float:
        """Return the expected number of matrices that `tokens` tokens use, if all are chosen equally often.

        >>> Matrix(1, 1).read(5), round(Matrix(1, 1, experts=8, chosen=2).read(4), 2)
        (1.0, 5.47)
        """
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens)


def matrices(layer: Layer, hidden: int, tp: int) -> Iterator[Matrix]:
    """Yield the matrices of a layer on one of `tp` tensor ranks. Matrices with the same input are merged into one."""
    for branch in layer.branches:
        mixer = branch.mixer
        if isinstance(mixer, Attention):
            yield Matrix(hidden, (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim // tp)
            yield Matrix(mixer.width // tp, hidden)
        elif isinstance(mixer, Dense):
            yield from _feed_forward(mixer, hidden, tp)
        elif isinstance(mixer, Experts):
            yield Matrix(hidden, mixer.count)
            for each in _feed_forward(mixer.expert, hidden, tp):
                yield each._replace(experts=mixer.count, chosen=mixer.chosen)
            if mixer.shared is not None:
                yield from _feed_forward(mixer.shared, hidden, tp)
        else:
            raise AssertionError(f"{type(mixer).__name__}: no rule says how long its steps take")


def _feed_forward(mixer: Dense, hidden: int, tp: int) -> tuple[Matrix, Matrix]:
    return Matrix(hidden, mixer.width * (1 + mixer.gated) // tp), Matrix(mixer.width // tp, hidden)


@dataclass(frozen=True)
class ServingTimes:
    """The times of a model's steps on tp x pp ranks of a device. dtype: dtype of the computation, such as "bf16"."""

    options: ModelConfig
    dtype: str
    device: Hardware
    tp: int = 1
    pp: int = 1
    fp8_weights: bool = False

    _dense: dict[tuple[Layer, int], Seconds] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Computed times of layers without attention, by layer and number of tokens."""

    @cached_property
    def stages(self) -> list[Counter[Layer]]:
        """For each stage, its distinct layers and their counts."""
        layers, begin, stages = architecture(self.options).layers, 0, []
        for count in even_layers(len(layers), self.pp):
            stages.append(Counter(layers[begin : begin + count]))
            begin += count
        return stages

    @property
    def card(self) -> Card:
        return Card(self.device)

    @property
    def rate(self) -> float:
        """Rate at which kernels read memory, in bytes per second."""
        return self.device.bandwidth * 1e12 * self.device.elementwise

    def weight_bytes(self, stage: int) -> float:
        """Bytes of the matrices that a one-token step would read on a stage if it used all experts."""
        hidden, size = architecture(self.options).hidden, 1 if self.fp8_weights else BYTES[self.dtype]
        layers = sum(
            count * each.experts * each.ins * each.outs * size
            for layer, count in self.stages[stage].items()
            for each in matrices(layer, hidden, self.tp)
        )
        return layers + (self._head.ins * self._head.outs * BYTES[self.dtype] if stage == self.pp - 1 else 0)

    def host(self, rows: int) -> float:
        """Seconds that the host takes to build and launch a step with `rows` rows."""
        return (HOST_STEP + HOST_ROW * rows) * self.device.host * 1e-6

    def step(self, size: StepSize) -> list[Seconds]:
        """Return the time of a step on each stage."""
        hidden = architecture(self.options).hidden
        passed = size.tokens * hidden * BYTES[self.dtype]
        stages = []
        for number, layers in enumerate(self.stages):
            seconds = Seconds()
            for layer, count in layers.items():
                seconds += (self._layer(layer, size.tokens) + self._attention(layer.attention, size)) * count
            if number == 0:
                seconds += self._moved(2 * passed)
            if number < self.pp - 1:
                seconds += Seconds(exchange=self.card.handed(passed / self.tp, self.pp, self.tp))
            else:
                vocab = architecture(self.options).input.vocab
                seconds += self._matmul(self._head, size.rows) + self._moved(SAMPLING * 4 * size.rows * vocab)
            stages.append(seconds)
        return stages

    @property
    def _head(self) -> Matrix:
        model = architecture(self.options)
        return Matrix(model.hidden, model.input.rows(self.tp) // self.tp)

    def _layer(self, layer: Layer, tokens: int) -> Seconds:
        """The time of a layer, without the attention to earlier tokens."""
        if (layer, tokens) not in self._dense:
            self._dense[layer, tokens] = self._computed(layer, tokens)
        return self._dense[layer, tokens]

    def _computed(self, layer: Layer, tokens: int) -> Seconds:
        model, attention, seconds = architecture(self.options), layer.attention, Seconds()
        stream = tokens * model.hidden * BYTES[self.dtype]
        for matrix in matrices(layer, model.hidden, self.tp):
            seconds += self._matmul(matrix, tokens, fp8=self.fp8_weights)
        # Queries and keys are rotated, and keys and values are stored.
        heads = (attention.heads + 2 * attention.kv_heads) // self.tp
        seconds += self._moved(2 * tokens * heads * attention.head_dim * BYTES[self.dtype])
        if tokens > 1:  # with one token, the matmul kernels also compute norms and activations
            for branch in layer.branches:
                seconds += self._moved(4 * stream) + self._activation(branch.mixer, tokens)
        if layer.experts is not None:
            seconds += Seconds(kernels=MIXTURE)
        return seconds + Seconds(exchange=len(layer.branches) * self._summed(stream))

    def _matmul(self, matrix: Matrix, tokens: int, *, fp8: bool = False) -> Seconds:
        """The larger of the times to read and to compute. A grouped matmul over experts computes at a lower rate."""
        ins, outs, experts, chosen = matrix
        size, rows = BYTES[self.dtype], tokens * chosen
        weights = matrix.read(tokens) * ins * outs * (1.0 / FP8_READ if fp8 else size)
        reading = (weights + rows * (ins + outs) * size) / self.rate
        gap = self.device.launch * 1e-6
        computing = self.card.seconds(Gemm(rows, ins, outs, "forward", self.dtype, 0)) - gap
        if experts > 1:
            computing /= GROUPED
        limited = Seconds(bandwidth=reading) if reading > computing else Seconds(compute=computing)
        return limited + Seconds(kernels=gap)

    def _attention(self, attention: Attention, size: StepSize) -> Seconds:
        """The time to read keys and values for new tokens, plus the time of attention for chunks of prompts."""
        token = 2 * attention.kv_heads // self.tp * attention.head_dim * BYTES[self.dtype]
        keys = sum(map(attention.most_keys, size.keys))
        seconds = Seconds(bandwidth=keys * token / self.rate, kernels=self.device.launch * 1e-6)
        for tokens, length in size.prompts:
            pairs = tokens * (length - tokens) + tokens * (tokens + 1) / 2
            share = min(pairs, tokens * attention.most_keys(length)) / (tokens * length)
            heads = attention.heads // self.tp
            work = AttentionWork("cudnn causal", False, heads, tokens, length, attention.head_dim, share)
            seconds += Seconds(compute=self.card.seconds(work))
        return seconds

    def _activation(self, mixer: object, tokens: int) -> Seconds:
        size = BYTES[self.dtype]
        if isinstance(mixer, Dense):
            return self._moved((2 + mixer.gated) * tokens * mixer.width // self.tp * size)
        if isinstance(mixer, Experts):
            rows, hidden = tokens * mixer.chosen, architecture(self.options).hidden
            # Rows are gathered by expert, and the results are added up for each token.
            return self._activation(mixer.expert, rows) + self._moved(2 * rows * hidden * size) * 2
        return Seconds()

    def _moved(self, size: float) -> Seconds:
        gap = self.device.launch * 1e-6
        return Seconds(bandwidth=self.card.elementwise(size) - gap, kernels=gap)

    def _summed(self, size: float) -> float:
        """Seconds of a sum of `size` bytes over the tensor ranks."""
        if self.tp == 1:
            return 0.0
        if size <= limit_of(self.tp) and self.tp <= self.device.node:
            return SUM * self.tp + (self.tp - 1) * size / (self.device.peer * 1e9)
        return self.card.collective("all-reduce", size, self.tp, 1)


def step_size(counts: Sequence[int], lengths: Sequence[int], tokens: int, rows: int) -> StepSize:
    """Return the size of a step. counts: number of tokens of each run (consecutive tokens of one sequence). lengths:
    length of each run's sequence at the end of the run. tokens: number of tokens of the step, with padding. rows:
    number of rows of logits."""
    runs = list(zip(counts, lengths, strict=True))
    keys = tuple(length for count, length in runs if count == 1)
    return StepSize(tokens, rows, keys, tuple(run for run in runs if run[0] > 1))
