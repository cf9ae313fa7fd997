"""A family that the project does not know: a bidirectional encoder with two losses. All that adding one takes.

Rows of two parts are read in both directions. "mlm" predicts masked tokens and divides by their number; "pair" says of
a row whether its parts belong together, and divides by the rows that have a label. How often "pair" is right is
reported too. The blocks and the tables of the decoder are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mega.core import architecture, family
from mega.core.architecture import Architecture, Cut, Init, Tensor, Unit
from mega.core.architecture.families.decoder import decoder
from mega.core.architecture.layer import Layer
from mega.core.batch import MaskedBatch, Term
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.sections import ModelConfig
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, forward_context, padding_documents
from mega.core.model.layer import TransformerLayer
from mega.core.model.mixers import LayerPlace
from mega.core.model.residual import Normalization, ResidualState
from mega.core.model.stage import StageOptions
from mega.core.ops.counter import key, mix
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import cross_entropy, logits
from mega.core.parallel.weight import ParameterFactory

NAME = "toy-encoder"
MASK = 0
"""The token that stands where another is to be predicted."""

# The architecture ---------------------------------------------------------------------------------------------


def build(options: ModelConfig) -> Architecture:
    """The decoder's, and what distinguishes the parts of a row and judges them."""
    plain = decoder(options)
    stacks = tuple(replace(stack, layers=tuple(map(_both_ways, stack.layers))) for stack in plain.stacks)
    return replace(plain, input=replace(plain.input, types=2), stacks=stacks, extra=tuple(_judges(plain)))


def _both_ways(layer: Layer) -> Layer:
    first, *rest = layer.branches
    return Layer(branches=(replace(first, mixer=replace(layer.attention, causal=False)), *rest))


def _judges(model: Architecture) -> Iterator[Tensor]:
    normal, hidden = Init(std=model.init_std), model.hidden
    yield Tensor("pair.dense.weight", (hidden, hidden), ("head",), normal, (Cut(0, "tp", hidden),))
    yield Tensor("pair.dense.bias", (hidden,), ("head",), Init(), (Cut(0, "tp", hidden),))
    yield Tensor("pair.out.weight", (2, hidden), ("head",), normal, (Cut(1, "tp", hidden),))
    yield Tensor("pair.out.bias", (2,), ("head",), Init())


# The batch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairBatch(MaskedBatch):
    """row_weights: float32 [b], 0 where it is not known whether the parts belong together."""

    row_weights: torch.Tensor

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"mlm": self.loss_weights, "pair": self.row_weights}

    def split(self, index: int, size: int) -> PairBatch:
        if size > 1:
            raise ValueError(f"--cp {size}: must be 1 for --family {NAME}")
        return self


def synthetic(
    model: ModelConfig,
    length: int,
    samples: torch.Tensor,
    *,
    seed: int,
    ragged: bool = True,
    documents: bool = False,
) -> PairBatch:
    """Rows of random tokens as a function of sample numbers. Ragged: padded, and every third row without a label."""
    assert model.vocab
    bits = random_bits(samples, length, seed)
    lengths = length // 2 + (samples * 7919) % (length // 2 + 1) if ragged else torch.full_like(samples, length)
    known = samples % 3 != 0 if ragged else torch.ones_like(samples)
    return masked_rows(1 + (bits & 0x7FFFFFFF) % (model.vocab - 1), lengths, samples, known, bits)


def collate(rows: Sequence[Any], first: int) -> PairBatch:
    """Rows of a token file, of which it is not known whether their parts belong together."""
    labels = torch.stack([torch.from_numpy(row[:-1]) for row in rows])
    samples = torch.arange(first, first + len(rows))
    lengths = torch.full_like(samples, labels.shape[1])
    return masked_rows(labels, lengths, samples, torch.zeros_like(samples), random_bits(samples, labels.shape[1], 0))


def random_bits(samples: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """int64 [b, length], a function of sample numbers and columns."""
    return mix(mix(samples + key(seed, NAME))[:, None] + torch.arange(length, device=samples.device))


def masked_rows(
    labels: torch.Tensor, lengths: torch.Tensor, samples: torch.Tensor, known: torch.Tensor, bits: torch.Tensor
) -> PairBatch:
    """Rows of which a quarter is to be predicted, and their parts where it is `known` whether they belong together."""
    columns = torch.arange(labels.shape[1], device=samples.device)
    here = columns < lengths[:, None]
    masked = here & ((bits >> 32) % 4 == 0)
    return PairBatch(
        tokens=labels.masked_fill(masked, MASK) * here,
        labels=labels * masked,
        loss_weights=masked.float(),
        types=(columns >= lengths[:, None] // 2).long(),
        lengths=lengths,
        pairs=(bits[:, 0] >> 40) & 1,
        samples=samples,
        row_weights=known.float(),
    )


# The stage ----------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """The final norm; after it the vocabulary for masked tokens, and two classes from the first token of a row."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, own: dict[str, Tensor], region: Region):
        super().__init__()
        self.region = region
        norm = build(model).stacks[0].norm
        assert norm is not None
        self.norm = Normalization(factory, norm, own)
        self.vocabulary = factory(own["model.embed_tokens.weight" if model.tied else "lm_head.weight"])
        self.dense = ColumnLinear(factory, [own["pair.dense.weight"]], [own["pair.dense.bias"]], region)
        whole = Region(region.axis)  # rows are not shared out over tensor ranks
        self.out = RowLinear(factory, own["pair.out.weight"], own["pair.out.bias"], whole)

    def forward(self, stream: ResidualState, batch: PairBatch, outputs: bool) -> StageOutput:
        normed, shape = self.norm(stream)[1], tuple(batch.tokens.shape)
        if outputs:
            return StageOutput(outputs=logits(normed, self.vocabulary, self.region).unflatten(0, shape))
        nll = cross_entropy(normed, batch.labels.flatten(), self.vocabulary, self.region)
        classes = self.out(self.dense(normed).unflatten(0, shape)[:, 0].tanh())
        losses = F.cross_entropy(classes, batch.pairs, reduction="none")
        right = (classes.detach().argmax(-1) == batch.pairs).to(losses.dtype)
        tokens, rows = batch.loss_weights.flatten().to(nll.dtype), batch.row_weights.to(losses.dtype)
        terms = {"mlm": Term((nll * tokens).sum(), tokens.sum()), "pair": Term((losses * rows).sum(), rows.sum())}
        return StageOutput(terms=terms, metrics={"pair_accuracy": Term((right * rows).sum(), rows.sum())})


class EncoderStage(nn.Module):
    """The units of the encoder that one stage holds: "embedding", blocks by number, "head", in this order."""

    terms: Mapping[str, float] = MappingProxyType({"mlm": 1.0, "pair": 1.0})
    metrics = ("pair_accuracy",)

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
        self.architecture = build(model)
        self.dtype, self.ops = factory.dtype, factory.ops
        self.embedding = self.heads = None
        if "embedding" in units:
            self.embedding = Embedding(
                factory.exact, self.architecture.input, _of_unit(model, "embedding"), region, self.dtype
            )
        layers = self.architecture.layers
        self.layers = nn.ModuleList(
            TransformerLayer(
                factory, layers[unit], _of_unit(model, unit, f"model.layers.{unit}."), LayerPlace(unit, region, 0.0)
            )
            for unit in units
            if isinstance(unit, int)
        )
        if "head" in units:
            self.heads = Heads(factory.exact, model, _of_unit(model, "head"), region)

    def weights(self, batch: PairBatch) -> Mapping[str, torch.Tensor]:
        return batch.weights

    def cargo(self, batch: PairBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        assert self.model.hidden
        tokens = batch.tokens.numel() // (self.region.size if self.region.sequence else 1)
        return [((tokens, self.model.hidden), self.dtype)]

    def forward(
        self, batch: PairBatch, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """outputs: the last stage gives logits [b, s, ids of this rank] instead of the losses."""
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        context = forward_context(
            self.architecture,
            batch.samples,
            columns,
            self.region.axis,
            documents=padding_documents(batch.lengths, columns.shape[1]),
            sequence=self.region.sequence,
            dropout_seed=self.options.dropout_seed if self.training else None,
            dtype=self.dtype,
        )
        stream = ResidualState(cargo[0] if self.embedding is None else self._embedded(batch, columns, context))
        for layer in self.layers:
            stream = layer(stream, context)
        if self.heads is None:
            return StageOutput(cargo=(stream.sum(self.ops),))
        return self.heads(stream, batch, outputs)

    def _embedded(self, batch: PairBatch, columns: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        assert self.embedding is not None
        found: torch.Tensor = self.embedding(batch.tokens, columns, context, batch.types)
        return found


def _of_unit(model: ModelConfig, unit: Unit, prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor in architecture.inventory(model):
        if unit in tensor.units:
            found[tensor.name.removeprefix(prefix)] = tensor
    return found


# The registration ---------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def register() -> None:
    """Make the family known to this process."""
    family.register(NAME, family.Family(EncoderStage, synthetic, collate=collate), build, DEFAULTS)


def unregister() -> None:
    for known in (family.FAMILIES, architecture.FAMILIES, FAMILY_DEFAULTS):
        known.pop(NAME, None)
