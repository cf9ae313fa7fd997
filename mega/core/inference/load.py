"""A checkpoint of any layout as one whole model that answers: weights only, on one device, no optimizer.

It also finds the tokenizer that a checkpoint carries. It knows neither prompts nor training.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mega.core.checkpoint.forms.convert import tokenizer_kind
from mega.core.checkpoint.own.layout import model_of
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import Checkpoint, CheckpointError
from mega.core.model.decoder import DecoderStage
from mega.core.ops.suite import choose
from mega.core.parallel.mesh import SINGLE
from mega.core.parallel.weight import Maker, weights
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
"""Kind of tokenizer -> the attached file that is its model, where that is no tokenizer.model."""


def load_decoder(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> DecoderStage:
    """All blocks with embedding and head, for evaluation. Errors: CheckpointError naming file or tensor."""
    where = torch.device(device)
    model = model_of(checkpoint.meta, str(checkpoint.path))
    assert model.layers is not None
    make = Maker({}, dtype, where, choose(where, dtype))
    stage = DecoderStage(model, range(model.layers), make, SINGLE)
    checkpoint.read(weight_pieces(stage), cast=True)
    return stage.eval()


def weight_pieces(stage: DecoderStage) -> Iterator[Piece]:
    """Every weight of a stage as the rectangles that a checkpoint fills; padding becomes zero."""
    for weight in weights(stage):
        weight.data.zero_()
        for slot in weight.slots:
            yield Piece(f"weights/{slot.shard.name}", slot.shard.whole, slot.shard.start, slot.real(weight.data))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the run trained with, or came with its weights, from the files that the checkpoint carries.

    Errors: ValueError where there is none.
    """
    options = checkpoint.meta.get("config", {}).get("tokenizer", {})
    kind = options.get("tokenizer") or tokenizer_kind(checkpoint.attachments)
    if kind is None:
        raise CheckpointError(f"{checkpoint.path}: carries no tokenizer")
    files = {FIELDS[name]: path for name, path in checkpoint.attachments.items() if name in FIELDS}
    if (model := MODELS.get(kind)) in checkpoint.attachments:
        files["tokenizer_model"] = checkpoint.attachments[str(model)]
    extra = options.get("vocab_extra_ids", 0)
    return build(tokenizer=kind, vocab_size=options.get("vocab_size"), vocab_extra_ids=extra, **files)
