"""A checkpoint of any layout as one whole model that answers: weights only, on one device, no optimizer.

It also finds the tokenizer that a checkpoint carries. It knows neither prompts nor training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mega.core.checkpoint.forms.companions import tokenizer_kind
from mega.core.checkpoint.forms.form import SpecialTokens
from mega.core.checkpoint.own.base import joined
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import Checkpoint, CheckpointError
from mega.core.config.toml import unfit
from mega.core.family import family
from mega.core.inventory import units
from mega.core.ops.suite import choose
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, weights
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer

FIELDS = {
    "vocab.json": "vocab_file",
    "vocab.txt": "vocab_file",
    "merges.txt": "merge_file",
    "tokenizer.model": "tokenizer_model",
}
"""Attached tokenizer file -> the option that names it."""

MODELS = {"HuggingFaceTokenizer": "tokenizer.json", "FairseqTokenizer": "dict.txt"}
"""Kind of tokenizer -> the attached file that is its model, where that is not tokenizer.model."""


def load_model(checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The whole model as one stage, for evaluation. Errors: CheckpointError naming file or tensor."""
    where, checkpoint = torch.device(device), joined(checkpoint)
    model = model_of(checkpoint.meta, str(checkpoint.path))
    factory = ParameterFactory({}, dtype, where, choose(where, dtype))
    stage: Any = family(model).stage(model, units(model), factory, ALONE)
    checkpoint.read(weight_pieces(stage), cast=True)
    return stage.eval()


def weight_pieces(stage: nn.Module) -> Iterator[Piece]:
    """Every weight of a stage as the rectangles that a checkpoint fills; padding becomes zero."""
    for weight in weights(stage):
        weight.data.zero_()
        for segment in weight.segments:
            yield Piece(
                f"weights/{segment.shard.name}", segment.shard.whole, segment.shard.start, segment.real(weight.data)
            )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the run trained with, or came with its weights, from the files that the checkpoint carries.

    Errors: ValueError where there is none.
    """
    options = tokenizer_options(checkpoint)
    kind = options.get("tokenizer") or tokenizer_kind(checkpoint.attachments)
    if kind is None:
        raise CheckpointError(f"{checkpoint.path}: carries no tokenizer")
    files = {FIELDS[name]: path for name, path in checkpoint.attachments.items() if name in FIELDS}
    if (model := MODELS.get(kind)) in checkpoint.attachments:
        files["tokenizer_model"] = checkpoint.attachments[str(model)]
    extra = options.get("vocab_extra_ids") or 0
    return build(tokenizer=kind, vocab_size=options.get("vocab_size"), vocab_extra_ids=extra, **files)


def special_tokens(checkpoint: Checkpoint) -> SpecialTokens:
    """What others must know of that tokenizer. Errors: ValueError where there is none."""
    tokenizer = load_tokenizer(checkpoint)
    return SpecialTokens(tokenizer.special_ids(), tokenizer.huggingface_files())


def tokenizer_options(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the run's tokenizer section was; empty where it is not told. Errors: CheckpointError naming an option."""
    options: Mapping[str, Any] = checkpoint.meta.get("config", {}).get("tokenizer", {})
    for name in ("tokenizer", "vocab_size", "vocab_extra_ids"):
        if options.get(name) is not None and (problem := unfit("tokenizer", name, options[name])) is not None:
            raise CheckpointError(f"{checkpoint.path}: config.tokenizer.{name}: {problem}")
    return options
