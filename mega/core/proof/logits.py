"""Does a checkpoint compute what the model it was converted from computes? One forward pass through both.

Both models run one block at a time in fp32, so of each only one block, and the tables of tokens, are ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mega.core.architecture import architecture, units
from mega.core.checkpoint.forms.form import OWN
from mega.core.checkpoint.forms.huggingface import weights_of
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import whole_box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import Checkpoint, locate
from mega.core.config.sections import ModelConfig
from mega.core.family import family
from mega.core.inference.loading.load import weight_pieces
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory

BOUND = 1e-4
"""Largest difference of a logit that conversion may cause, in fp32, as a part of the largest logit (1 at least)."""

TOKENS = (2, 64)
"""Rows and columns of the random tokens."""


@dataclass(frozen=True)
class LogitComparison:
    """largest: max |a - b| over all logits. scale: max |a|. same: share of tokens with one most likely successor."""

    largest: float
    scale: float
    same: float

    @property
    def bound(self) -> float:
        """What `largest` may be: the rounding of a sum grows with what is summed."""
        return BOUND * max(1.0, self.scale)

    @property
    def holds(self) -> bool:
        return math.isfinite(self.largest) and self.largest <= self.bound


def check_transformers() -> None:
    """Errors: ValueError where transformers is not installed, or what it needs is not."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    except ImportError as error:
        needs = "needs transformers for a Hugging Face folder (pip install 'mega[hf]')"
        raise ValueError(f"--verify: {needs}: {' '.join(str(error).split())}") from None


def continues_text(one: Path, other: Path) -> bool:
    """Whether the checkpoint, whichever of the two it is, holds a model whose logits of a text can be compared."""
    checkpoint = locate(one if form_at(one) is OWN else other)
    return family(model_of(checkpoint.meta, str(checkpoint.path))).prompt is not None


def compare_logits(one: Path, other: Path) -> LogitComparison:
    """Compare a Hugging Face folder and a checkpoint, in either order, on random tokens, both in fp32.

    Errors: ValueError where the Hugging Face folder is missing or transformers is not installed.
    """
    check_transformers()
    folder, load = (other, one) if form_at(one) is OWN else (one, other)
    if not (folder / "config.json").exists():
        raise ValueError(f"--verify: neither {one} nor {other} is a Hugging Face folder")
    checkpoint = locate(load)
    model = architecture(model_of(checkpoint.meta, str(checkpoint.path)))
    rows, columns = TOKENS
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.input.vocab, (rows, min(columns, model.positions)), generator=generator)
    theirs, ours = their_logits(folder, ids), logits(checkpoint, ids)
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return LogitComparison(float((ours - theirs).abs().max()), float(theirs.abs().max()), float(same))


def not_finite(one: Path, other: Path) -> str | None:
    """The first weight of the checkpoint, whichever of the two it is, with a NaN or an infinity; None without one."""
    source = OwnSource(locate(one if form_at(one) is OWN else other))
    for name, (shape, dtype) in source.tensors.items():
        for box in blocks(whole_box(shape), dtype.itemsize):
            if not source.read(name, box).isfinite().all():
                return name.removeprefix("weights/")
    return None


@torch.no_grad()
def their_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab] in fp32, computed by transformers from a Hugging Face folder for token ids [b, s].

    The model is made with one block, which then stands at every place and gets the weights of each when it is called.
    Where blocks are of two kinds it is of the first one's: ids end with the window, within which both see the same.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = weights_of(folder)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds, count = getattr(config, "layer_types", None), config.num_hidden_layers
    config.num_hidden_layers = 1
    if kinds is not None:
        config.layer_types = kinds[:1]
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    backbone = model.base_model
    stem = "h" if hasattr(backbone, "h") else "layers"
    (block,) = getattr(backbone, stem)
    config.num_hidden_layers = count
    if kinds is not None:
        config.layer_types = kinds[:1] * count  # the backbone makes masks only for the kinds that it was made with
    setattr(backbone, stem, torch.nn.ModuleList([block] * count))
    prefix = f"{model.base_model_prefix}."
    here = prefix if any(name.startswith(prefix) for name in source.tensors) else ""

    def fill(module: torch.nn.Module, names: Iterable[tuple[str, str]]) -> None:
        tensors = dict(module.named_parameters())
        for own, theirs in names:
            shape = source.tensors[theirs][0]
            tensors[own].copy_(source.read(theirs, whole_box(shape)))

    outside = [name for name, _ in model.named_parameters() if f".{stem}." not in name]
    fill(model, [(name, here + name.removeprefix(prefix) if name.startswith(prefix) else name) for name in outside])
    inside = [name for name, _ in block.named_parameters()]
    numbers = iter(range(count))

    def next_weights(module: torch.nn.Module, inputs: object) -> None:
        number = next(numbers)
        fill(module, [(name, f"{here}{stem}.{number}.{name}") for name in inside])

    block.register_forward_pre_hook(next_weights)
    found: torch.Tensor = model(ids, use_cache=False).logits
    assert next(numbers, None) is None, "every block was run"
    return found


@torch.no_grad()
def logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab] in fp32 for token ids [b, s]."""
    model = model_of(checkpoint.meta, str(checkpoint.path))
    prompt = family(model).prompt
    assert prompt is not None, "a family that continues text"
    batch = prompt(ids)
    cargo: tuple[torch.Tensor, ...] = ()
    for stage in _stages(checkpoint, model):
        out = stage(batch, *cargo, outputs=True)
        cargo = out.cargo
    assert out.outputs is not None, "the last stage has the head"
    return out.outputs[..., : architecture(model).input.vocab]


def _stages(checkpoint: Checkpoint, model: ModelConfig) -> Iterator[Any]:
    """Each unit as a stage of its own, filled when its turn comes."""
    for unit in units(model):
        factory = ParameterFactory({}, torch.float32, torch.device("cpu"))
        stage = family(model).stage(model, [unit], factory, ALONE).eval()
        checkpoint.read(weight_pieces(stage), cast=True)
        yield stage
