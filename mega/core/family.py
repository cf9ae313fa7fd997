"""A record for each model family, for all packages that build on model families. This is the only module that chooses
code by family. Other packages define their part of a family under the family's name: `config` the options,
`architecture` the tensors, `checkpoint` the names on disk. This module adds the stage and the batches.
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
    """A pipeline stage of a model.

    units: the units of the model that the stage holds. options: how the stage was built; a resumed run may replace the
        dropout rule.
    For ZeRO 3 a stage also has `with_full_params: UnshardHook | None`, which gathers the weights of a unit while that
    unit runs. A stage also has `split(batch, index, size)` if its layers need columns that belong to other context
    ranks and are missing from this rank's batch.
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
        """Build one stage from `units` of a model: an nn.Module that is a `ModelStage`."""


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
        """Return a batch that depends only on the sample indices."""


class Prompt(Protocol):
    def __call__(self, ids: torch.Tensor) -> Batch:
        """Return a batch of `ids`, int64 [b, s]: rows to continue or to score."""


class Collate(Protocol):
    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """Collate samples of a dataset. first: global index of the first sample."""


@dataclass(frozen=True)
class Family:
    """The code of one model family."""

    stage: BuildStage
    """Builds a stage."""
    synthetic: Synthetic
    """Makes synthetic batches, without reading data."""
    prompt: Prompt | None = None
    """Makes a batch of token ids; None if the family does not continue text."""
    collate: Collate | None = None
    """Collates rows of token ids, each int64 [seq_length + 1]; None if rows are read from left to right."""
    decodes: bool = False
    """Whether a sample has a second text for the decoder; `synthetic` and `collate` then take a `decoder_length`."""


DECODER = Family(DecoderStage, synthetic.decoder_batch, synthetic.decoder_prompt)
BERT = Family(BertStage, synthetic.masked_batch, collate=synthetic.masked_rows)
T5 = Family(EncoderDecoderStage, synthetic.encoder_decoder_batch, collate=synthetic.copied_rows, decodes=True)
RETRIEVER = Family(RetrieverStage, synthetic.neighbour_batch, collate=synthetic.neighbour_rows)

FAMILIES: dict[str, Family] = {"gpt": DECODER, "llama": DECODER, "bert": BERT, "t5": T5}
"""Family -> its record."""


def family(model: ModelConfig) -> Family:
    """The record of a model's family; models with a retriever share one record."""
    return RETRIEVER if model.retriever else FAMILIES[model.family]


def synthetic_batch(
    run: RunConfig, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> Batch:
    """Return a batch with the sizes of a resolved run; its content depends only on the sample indices. samples: int64
    [b]."""
    length, make = run.batch.seq_length, family(run.model).synthetic
    return make(run.model, length, samples, seed=seed, ragged=ragged, documents=documents, **_second_length(run))


def collate(run: RunConfig) -> Callable[[Sequence[Any], int], Batch] | None:
    """Return the function that collates a run's rows of token ids; None if rows are read from left to right."""
    collate_rows = family(run.model).collate
    arguments = {"model": run.model} if run.model.retriever else _second_length(run)
    return None if collate_rows is None else partial(collate_rows, **arguments)


def _second_length(run: RunConfig) -> dict[str, Any]:
    return {"decoder_length": run.masking.decoder_seq_length} if family(run.model).decodes else {}


def register(
    name: str, record: Family, build: Callable[[ModelConfig], Architecture], defaults: Mapping[str, Any]
) -> None:
    """Register a family: its record, the function that builds its architecture, the defaults that differ from GPT's."""
    FAMILIES[name], architecture.FAMILIES[name] = record, build
    register_family(name, defaults)
