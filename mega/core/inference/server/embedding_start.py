"""Start an engine that embeds texts with a BERT model, and check the flags of `mega serve` for such a server.

This module does not depend on routes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import cast

import torch

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.resolve import divisors
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.embedding import STEP_TOKENS, EmbeddingEngine, Pooling, TextVectors, follow
from mega.core.inference.loading.load import OpenedModel, load_stages
from mega.core.inference.loading.pooling import check_modules, declared_pooling
from mega.core.inference.loading.same import check_same_model
from mega.core.inference.options import DecodingLayout, EngineOptions
from mega.core.inference.relay import relay_of
from mega.core.inference.request import Limits
from mega.core.inference.server.options import ServedModel, ServerOptions
from mega.core.inference.start import rank_options
from mega.core.model.bert import BertStage
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.text.tokenizer import Tokenizer

_ENGINE = ("cache_tokens", "batch_invariant", "cuda_graph", "fp8_weights", "speculate")
_ANSWERS = ("max_tokens_to_oom", "temperature", "top_k", "top_p", "seed", "parse_special_tokens", "legacy_status")
_MODEL = ("adapter", "chat_template")
"""Text-generation options that are rejected because they have no effect on embeddings."""


def gives_embeddings(model: ModelConfig) -> bool:
    """Whether a server of the model provides /v1/embeddings, that is, whether the model is a BERT model."""
    return FAMILY_DEFAULTS[model.family].classifies


def check_embedding(
    opened: OpenedModel,
    tokenizer: Tokenizer,
    layout: DecodingLayout,
    model: ServedModel,
    engine: EngineOptions,
    answers: ServerOptions,
    retro: str | None,
) -> None:
    """Check flags. Errors: ValueError naming a flag that has no effect on embeddings, or an unsupported layout."""
    for section, names in ((engine, _ENGINE), (answers, _ANSWERS), (model, _MODEL)):
        defaults = {each.name: each.default for each in fields(section)}
        for name in names:
            if (value := getattr(section, name)) != defaults[name]:
                text = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"--{name.replace('_', '-')} {text}: does nothing for a BERT, which gives embeddings")
    if retro is not None:
        raise ValueError(f"--retro {retro}: does nothing for a BERT, which gives embeddings")
    for flag, ranks in (("pp", layout.pp), ("ep", layout.ep)):
        if ranks != 1:
            raise ValueError(f"--{flag} {ranks}: embeddings are computed by the ranks of --tp alone; must be 1")
    heads = opened.architecture.cached.kv_heads
    if heads % layout.tp:
        valid = ", ".join(map(str, divisors(heads)))
        raise ValueError(f"--tp {layout.tp}: must divide the model's {heads} heads (valid: {valid})")
    if tokenizer.roles is None:
        raise ValueError(f"{opened.path}: its tokenizer, {tokenizer.kind}, has no [CLS] and [SEP], which a BERT needs")


def start_embedding_engine(
    opened: OpenedModel,
    mesh: Mesh,
    device: Device,
    options: EngineOptions,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    pooling: Pooling | None,
) -> EmbeddingEngine | None:
    """Return the engine on rank 0. Other ranks run its steps until the engine closes, and then return None.

    pooling: pooling mode; default: the mode that the model's files specify, else mean. Errors: CheckpointError naming
    file or tensor; LostRank.
    """
    check_modules(opened.attachments)
    pooling = pooling or declared_pooling(opened.attachments) or "mean"
    check_same_model(opened, mesh, device, rank_options(mesh, options, dtype) | {"--pooling": pooling})
    ops = forward_only(choose(device.torch, dtype))
    (stage,) = load_stages(opened, mesh, device, dtype=dtype, ops=ops)
    assert tokenizer.roles is not None
    vectors = TextVectors(cast(BertStage, stage), tokenizer.roles.pad, device.torch)
    relay = relay_of(mesh)
    if relay is not None and not mesh.model.first:
        follow(vectors, relay, pooling)
        return None
    model = opened.architecture
    limits = Limits(model.positions, 0, options.max_requests, min(model.input.vocab, tokenizer.vocab_size))
    return EmbeddingEngine(vectors, limits, pooling, relay=relay, tokens=options.prefill_chunk or STEP_TOKENS)


_POOLED = {
    "mean": "the mean of all its states",
    "cls": "its first state, [CLS]",
    "inner": "the mean of its states without [CLS] and [SEP]",
}


def embedding_lines(engine: EmbeddingEngine) -> list[str]:
    """Return the information about embeddings that a server prints before it starts to listen."""
    limits = engine.limits
    return [
        f"embeddings of {engine.vectors.width} numbers: of each text {_POOLED[engine.pooling]}",
        f"texts of at most {limits.longest} tokens, {limits.requests} computed at a time",
    ]
