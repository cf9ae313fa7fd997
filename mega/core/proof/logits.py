"""Compare the logits of a converted model with those of the original, with one forward pass of each. Both models run in
fp32, one block at a time, so only one block and the embeddings of each model are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mega.core.architecture import architecture, units
from mega.core.checkpoint.forms.convert import opened_own
from mega.core.checkpoint.forms.families.decoders import family_in
from mega.core.checkpoint.forms.families.mixtures import read_parameter
from mega.core.checkpoint.forms.foreign import read_json
from mega.core.checkpoint.forms.form import OWN
from mega.core.checkpoint.forms.huggingface import full_precision
from mega.core.checkpoint.forms.mapping import Source
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import Box, whole_box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import Checkpoint, locate
from mega.core.config.sections import ModelConfig
from mega.core.family import family
from mega.core.inference.loading.load import weight_pieces
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory

BOUND = 1e-4
"""Largest allowed difference of a logit in fp32, relative to the largest logit (or to 1 if that is larger)."""

TOKENS = (2, 64)
"""Shape [b, s] of the random tokens."""


@dataclass(frozen=True)
class LogitComparison:
    """The difference between the logits a and b of two models. largest: max |a - b|. scale: max |a|. same: fraction of
    positions at which both models predict the same most likely next token."""

    largest: float
    scale: float
    same: float

    @property
    def bound(self) -> float:
        """Upper limit for `largest`. The limit is proportional to the largest logit, like the rounding error of the
        sums."""
        return BOUND * max(1.0, self.scale)

    @property
    def holds(self) -> bool:
        return math.isfinite(self.largest) and self.largest <= self.bound


def check_transformers() -> None:
    """Check that transformers and its dependencies are installed. Errors: ValueError if a package is missing."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    except ImportError as error:
        needs = "needs transformers for a Hugging Face folder (pip install '.[hf]' in a clone)"
        raise ValueError(f"--verify: {needs}: {' '.join(str(error).split())}") from None


def continues_text(one: Path, other: Path) -> bool:
    """Whether logits can be compared, that is, whether the mega checkpoint among the two paths contains a
    text-generation model."""
    checkpoint = locate(one if form_at(one) is OWN else other)
    return family(model_of(checkpoint.meta, str(checkpoint.path))).prompt is not None


@torch.no_grad()
def compare_logits(one: Path, other: Path) -> LogitComparison:
    """Compare the logits of a Hugging Face folder and a mega checkpoint on random tokens in fp32. The paths may be in
    either order.

    Errors: ValueError if neither path is a Hugging Face folder, or transformers is not installed.
    """
    check_transformers()
    folder, load = (other, one) if form_at(one) is OWN else (one, other)
    if not (folder / "config.json").exists():
        raise ValueError(f"--verify: neither {one} nor {other} is a Hugging Face folder")
    converted = opened_own(load)  # adapters are merged and rounded as in an export
    model = architecture(converted.model)
    rows, columns = TOKENS
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.input.vocab, (rows, min(columns, model.positions)), generator=generator)
    expected, actual = their_logits(folder, ids), _logits(converted.model, converted.source, ids)
    same = (actual.argmax(-1) == expected.argmax(-1)).float().mean()
    return LogitComparison(float((actual - expected).abs().max()), float(expected.abs().max()), float(same))


def not_finite(one: Path, other: Path) -> str | None:
    """Return the name of the first weight with NaN or infinity in the mega checkpoint among the two paths; None if all
    weights are finite."""
    source = OwnSource(locate(one if form_at(one) is OWN else other))
    for name, (shape, dtype) in source.tensors.items():
        for box in blocks(whole_box(shape), dtype.itemsize):
            if not source.read(name, box).isfinite().all():
                return name.removeprefix("weights/")
    return None


@torch.no_grad()
def their_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, vocab] in fp32 that transformers computes for a Hugging Face folder. ids: token ids [b,
    s].

    The model is first built with one block of each kind of layer. Each actual block is built, filled with weights and
    called during the forward pass, and then freed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    names, source = family_in(read_json(folder / "config.json"), str(folder / "config.json")), full_precision(folder)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kinds, count = getattr(config, "layer_types", None), config.num_hidden_layers
        distinct_kinds = [None] if kinds is None else list(dict.fromkeys(kinds))
        config.num_hidden_layers = len(distinct_kinds)
        if kinds is not None:
            config.layer_types = distinct_kinds
        maker: Any = AutoModelForCausalLM
        model = maker.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except Exception as error:  # transformers raises exceptions of many kinds for values that it does not accept
        raise ValueError(f"--verify: transformers does not open {folder}: {' '.join(str(error).split())}") from None
    backbone = model.base_model
    stem = "h" if hasattr(backbone, "h") else "layers"
    block: Any = type(getattr(backbone, stem)[0])
    # Only the construction uses the reduced number of layers. The full config is restored, because blocks read the
    # layer count and kinds from it.
    config.num_hidden_layers = count
    if kinds is not None:
        config.layer_types = kinds
    prefix = _prefix(model, source.tensors)

    def fill(module: torch.nn.Module, stored: Callable[[str], str]) -> None:
        for name, tensor in module.named_parameters():
            tensor.copy_(read_parameter(source, names, stored(name)))

    class OneBlock(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.attention_type = number, None if kinds is None else kinds[number]

        def forward(self, *args: Any, **named: Any) -> Any:
            filled = block(config, self.number).to(torch.float32).eval()
            fill(filled, lambda name: f"{prefix}{stem}.{self.number}.{name}")
            return filled(*args, **named)

    setattr(backbone, stem, torch.nn.ModuleList(map(OneBlock, range(count))))
    base = f"{model.base_model_prefix}."
    fill(model, lambda name: _stored(prefix + name.removeprefix(base) if name.startswith(base) else name, source))
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def _prefix(model: Any, tensors: Collection[str]) -> str:
    """Return the prefix of the folder's tensor names; "" if the model was saved without a head."""
    prefix = f"{model.base_model_prefix}."
    return prefix if any(name.startswith(prefix) for name in tensors) else ""


def _stored(name: str, source: Source) -> str:
    """Return the name of a tensor in the folder. transformers stores the head of GPT-NeoX under an old name."""
    return "embed_out.weight" if name == "lm_head.weight" and "embed_out.weight" in source.tensors else name


@torch.no_grad()
def logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, vocab] in fp32 that mega computes for a checkpoint. ids: token ids [b, s]."""
    return _logits(model_of(checkpoint.meta, str(checkpoint.path)), OwnSource(checkpoint), ids)


def _logits(model: ModelConfig, source: Source, ids: torch.Tensor) -> torch.Tensor:
    prompt = family(model).prompt
    assert prompt is not None, "a family that continues text"
    batch = prompt(ids)
    cargo: tuple[torch.Tensor, ...] = ()
    for stage in _stages(model, source):
        out = stage(batch, *cargo, outputs=True)
        cargo = out.cargo
    assert out.outputs is not None, "the last stage has the head"
    return out.outputs[..., : architecture(model).input.vocab]


def _stages(model: ModelConfig, source: Source) -> Iterator[Any]:
    """Yield each unit of the model as a separate stage with weights loaded."""
    for unit in units(model):
        factory = ParameterFactory({}, torch.float32, torch.device("cpu"))
        stage = family(model).stage(model, [unit], factory, ALONE).eval()
        for piece in weight_pieces(stage):
            piece.tensor.copy_(source.read(piece.key, Box(piece.start, tuple(piece.tensor.shape))))
        yield stage
