"""Does a checkpoint compute what the model it was converted from computes? One forward pass through both.

Our model runs one block at a time in fp32, so only one block of it is ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mega.core.batch import DecoderBatch
from mega.core.checkpoint.layout import model_of
from mega.core.checkpoint.pieces import Piece
from mega.core.checkpoint.store import Checkpoint, locate
from mega.core.config.sections import ModelConfig
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import Maker, weights

BOUND = 1e-4
"""Largest difference of a logit that conversion may cause, in fp32."""

TOKENS = (2, 64)
"""Rows and columns of the random tokens."""


@dataclass(frozen=True)
class Agreement:
    """largest: max |a - b| over all logits. scale: max |a|. same: share of tokens with one most likely successor."""

    largest: float
    scale: float
    same: float


def agreement(one: Path, other: Path) -> Agreement:
    """Compare a Hugging Face folder and a checkpoint, in either order, on random tokens, both in fp32.

    Errors: ValueError where there is no Hugging Face folder or transformers is not installed.
    """
    folder, load = (one, other) if (one / "config.json").exists() else (other, one)
    if not (folder / "config.json").exists():
        raise ValueError(f"--verify: neither {one} nor {other} is a Hugging Face folder")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("--verify: needs transformers (pip install 'mega[hf]')") from None
    checkpoint = locate(load)
    model = model_of(checkpoint.meta, str(checkpoint.path))
    assert model.vocab is not None and model.positions is not None
    rows, columns = TOKENS
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab, (rows, min(columns, model.positions)), generator=generator)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    ours = logits(checkpoint, ids)
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Agreement(float((ours - theirs).abs().max()), float(theirs.abs().max()), float(same))


@torch.no_grad()
def logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab] in fp32 for token ids [b, s]."""
    model = model_of(checkpoint.meta, str(checkpoint.path))
    assert model.layers is not None and model.vocab is not None
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    batch = DecoderBatch(ids, ids, torch.ones(ids.shape), positions, torch.arange(len(ids)))
    cargo: tuple[torch.Tensor, ...] = ()
    for stage in _stages(checkpoint, model):
        if stage.head is not None:
            return stage.logits(batch, *cargo)[..., : model.vocab]
        cargo = stage(batch, *cargo)
    raise AssertionError("the last stage has the head")


def _stages(checkpoint: Checkpoint, model: ModelConfig) -> Iterator[DecoderStage]:
    """The embedding, each block and the head as stages of their own, filled when their turn comes."""
    assert model.layers is not None
    parts: list[tuple[Sequence[int], bool, bool]] = [((), True, False)]
    parts += [((layer,), False, False) for layer in range(model.layers)]
    parts.append(((), False, True))
    for layers, first, last in parts:
        make = Maker({}, torch.float32, torch.device("cpu"))
        stage = DecoderStage(model, layers, make, Mesh(0).tp, first=first, last=last).eval()
        checkpoint.read(_pieces(stage), cast=True)
        yield stage


def _pieces(stage: DecoderStage) -> Iterator[Piece]:
    for weight in weights(stage):
        weight.data.zero_()  # padding of the vocabulary
        for slot in weight.slots:
            yield Piece(f"weights/{slot.shard.name}", slot.shard.whole, slot.shard.start, slot.real(weight.data))
