"""A model family as one record: what everything above asks of it, and the only module that chooses code by family.

Every room holds its own part under the family's name: options in config, tensors in architecture, names on disk in
checkpoint. The stage and the batches are added here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from mega.core import architecture
from mega.core.architecture import Architecture, Unit
from mega.core.batch import Batch
from mega.core.config.presets import register_family
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.data import synthetic
from mega.core.model.bert import BertStage
from mega.core.model.decoder import DecoderStage
from mega.core.model.encoder_decoder import EncoderDecoderStage
from mega.core.model.retriever import RetrieverStage
from mega.core.model.stage import StageOptions
from mega.core.parallel.pipeline import Stage
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory


class ModelStage(Stage, Protocol):
    """A stage as its owner holds it.

    units: what it holds of the model. options: what it was built with, besides its model; a resumed run may replace its
    dropout rule. One that can leave its weights with their owners while it computes something else
    (ZeRO 3) has `with_full_params: UnshardHook | None` too, which runs a unit with its whole weights here meanwhile.
    One whose layers need more of other context ranks' columns than a batch gives has `split(batch, index, size)`.
    """

    units: tuple[Unit, ...]
    region: Region
    options: StageOptions


class BuildStage(Protocol):
    def __call__(
        self,
        model: ModelConfig,
        units: Sequence[Unit],
        factory: ParameterFactory,
        region: Region,
        options: StageOptions = ...,
    ) -> Any:
        """The `units` of a model as one stage, an nn.Module that is a `ModelStage`."""


class Synthetic(Protocol):
    def __call__(
        self,
        model: ModelConfig,
        length: int,
        samples: torch.Tensor,
        *,
        seed: int,
        ragged: bool = True,
        documents: bool = False,
    ) -> Batch:
        """A batch that is a function of sample numbers alone."""


class Prompt(Protocol):
    def __call__(self, ids: torch.Tensor) -> Batch:
        """ids int64 [b, s] as rows to be continued or judged."""


class Collate(Protocol):
    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """A dataset's samples as a batch. first: the first one's global number."""


@dataclass(frozen=True)
class Family:
    """stage: builds one. synthetic: batches without data. prompt: ids as a batch, where the family continues text.
    collate: rows of token ids, int64 [seq_length + 1] each, as a batch; None: they are read from left to right.
    decodes: a sample has a second text, the decoder's: `synthetic` and `collate` are given its `decoder_length` too.
    """

    stage: BuildStage
    synthetic: Synthetic
    prompt: Prompt | None = None
    collate: Collate | None = None
    decodes: bool = False


DECODER = Family(DecoderStage, synthetic.decoder_batch, synthetic.decoder_prompt)
BERT = Family(BertStage, synthetic.masked_batch, collate=synthetic.masked_rows)
T5 = Family(EncoderDecoderStage, synthetic.encoder_decoder_batch, collate=synthetic.copied_rows, decodes=True)
RETRIEVER = Family(RetrieverStage, synthetic.neighbour_batch, collate=synthetic.neighbour_rows)

FAMILIES: dict[str, Family] = {"gpt": DECODER, "llama": DECODER, "bert": BERT, "t5": T5}
"""Family -> its record."""


def family(model: ModelConfig) -> Family:
    """The record of a model's family, or of those with a retriever."""
    return RETRIEVER if model.retriever else FAMILIES[model.family]


def synthetic_batch(
    run: RunConfig, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> Batch:
    """A batch of the sizes of a resolved run that is a function of sample numbers alone. samples: int64 [b]."""
    length, make = run.batch.seq_length, family(run.model).synthetic
    return make(run.model, length, samples, seed=seed, ragged=ragged, documents=documents, **_second_length(run))


def collate(run: RunConfig) -> Callable[[Sequence[Any], int], Batch] | None:
    """How rows of token ids become a run's batches; None: they are read from left to right."""
    found = family(run.model).collate
    more = {"model": run.model} if run.model.retriever else _second_length(run)
    return None if found is None else partial(found, **more)


def _second_length(run: RunConfig) -> dict[str, Any]:
    return {"decoder_length": run.masking.decoder_seq_length} if family(run.model).decodes else {}


def register(
    name: str, record: Family, build: Callable[[ModelConfig], Architecture], defaults: Mapping[str, Any]
) -> None:
    """Make a family known: its record, the architecture of its options, the defaults that differ from GPT's."""
    FAMILIES[name], architecture.FAMILIES[name] = record, build
    register_family(name, defaults)
