"""Start an engine for an opened model at any tp x pp, independent of the layout in which the model was saved.

    start_engine(opened, mesh, device, options)      rank 0: the engine; other ranks run its steps until it closes

This module depends on neither prompts nor flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from mega.core.architecture import Architecture, architecture
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.resolve import divisors
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.family import family
from mega.core.inference.ahead_drafts import AheadDrafts
from mega.core.inference.cache import Blocks
from mega.core.inference.capacity import (
    DraftSize,
    cache_blocks,
    draft_size,
    even_layers,
    fitting_blocks,
    token_bytes,
    wanted_tokens,
)
from mega.core.inference.draft_worker import AheadWorker
from mega.core.inference.drafts import ModelDrafts
from mega.core.inference.engine import BatchingEngine, follow
from mega.core.inference.graphs import MANY
from mega.core.inference.loading.adapters import AdapterChoice, OpenedAdapter, load_adapters
from mega.core.inference.loading.load import OpenedModel, load_stages, open_model
from mega.core.inference.loading.same import check_same_model
from mega.core.inference.options import MTP, NGRAM, DecodingLayout, EngineOptions
from mega.core.inference.relay import Relay, relay_of
from mega.core.inference.request import Limits
from mega.core.inference.retrieval import Retriever, device_bytes
from mega.core.inference.speculate import Drafter, NGrams
from mega.core.inference.worker import Worker
from mega.core.model.decode import use_decoding_layout
from mega.core.model.decode_neighbours import reading
from mega.core.model.decoder import DecoderStage
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups, Mesh

DEFAULT = EngineOptions()

DRAFT_CHUNK = 512
"""Maximum number of tokens in a step of a draft model."""


def start_engine(
    opened: OpenedModel,
    mesh: Mesh,
    device: Device,
    options: EngineOptions = DEFAULT,
    *,
    dtype: torch.dtype | None = None,
    adapters: Sequence[OpenedAdapter] = (),
    retriever: Retriever | None = None,
) -> BatchingEngine | None:
    """Return the engine on rank 0. Other ranks run its steps until the engine closes, and then return None.

    dtype: dtype of computation and cache; default: dtype of the weights. adapters: the adapters that requests may
    select. retriever: finds neighbours for a model with a retriever. Errors: ValueError if the model is not a
    text-generation model, if the layout does not divide the model, or if ranks differ in weights or options;
    CheckpointError naming file or tensor; LostRank.
    """
    model, torch_device = opened.model, device.torch
    dtype = dtype or opened.dtype
    check_layout(model, mesh.tp.size, mesh.pp.size, options, retrieves=retriever is not None)
    check_same_model(opened, mesh, device, rank_options(mesh, options, dtype), adapters)
    layers = even_layers(len(opened.architecture.layers), mesh.pp.size)
    ops = forward_only(choose(torch_device, dtype), fp8_weights=options.fp8_weights)
    (stage,) = load_stages(opened, mesh, device, dtype=dtype, ops=ops, stage_layers=layers)
    if torch_device.type == "cpu":
        use_decoding_layout(stage)
    choice = load_adapters(stage, adapters, mesh, torch_device, always=options.batch_invariant)
    return engine_on(stage, mesh, device, options, choice, retriever=retriever)


def rank_options(mesh: Mesh, options: EngineOptions, dtype: torch.dtype) -> dict[str, object]:
    """Return the options that must be identical on all ranks, by user-readable names."""
    values = asdict(options)
    layout = {"--tp": mesh.tp.size, "--pp": mesh.pp.size, "the dtype": str(dtype).removeprefix("torch.")}
    return {
        **layout,
        "the number of the tokenizer's tokens": values.pop("vocab"),
        **{f"--{name.replace('_', '-')}": value for name, value in values.items()},
    }


def engine_on(
    stage: Any,
    mesh: Mesh,
    device: Device,
    options: EngineOptions = DEFAULT,
    adapters: AdapterChoice | None = None,
    relay: Relay | None = None,
    retriever: Retriever | None = None,
) -> BatchingEngine | None:
    """Start an engine as `start_engine` does, but with this rank's stage of a model. Every replica of the model has a
    separate engine.

    adapters: adapters of the stage. relay: relay of an earlier engine to reuse; default: a new relay.
    """
    model, size = stage.architecture, options.block
    _check_graphs(options, model, device)
    vocab = min(model.input.vocab, options.vocab or model.input.vocab)
    draft = _draft(options, stage, device, vocab) if mesh.model.first else None  # load it before sizing the cache
    worker = _worker(stage, mesh, device, options, vocab, adapters, retriever, None if draft is None else draft.size)
    blocks = worker.blocks
    relay = relay or relay_of(mesh)
    if relay is not None and not mesh.model.first:
        follow(worker, relay)
        return None
    chunk = 1 if retriever is None else reading(stage).chunk
    limits = Limits(model.positions, (blocks - 1) * size, options.max_requests, vocab, model.long_from, chunk)
    ahead = device.is_cuda + mesh.pp.size - 1 if options.ahead is None else options.ahead
    drafter = drafter_of(options, worker, relay, device, draft)
    depth, groups = (1, 1) if options.batch_invariant or retriever is not None else (1 + ahead, mesh.pp.size)
    return BatchingEngine(
        worker,
        limits,
        Blocks(blocks, size),
        chunk=options.prefill_chunk,
        relay=relay,
        depth=depth,
        groups=groups,
        drafter=drafter,
        draft_bytes=drafter.device_bytes if isinstance(drafter, ModelDrafts) else (0, 0),
    )


def _worker(
    stage: DecoderStage,
    mesh: Mesh,
    device: Device,
    options: EngineOptions,
    vocab: int,
    adapters: AdapterChoice | None,
    retriever: Retriever | None,
    draft: DraftSize | None,
) -> Worker:
    """Return this rank's worker, with a cache in the remaining device memory. draft: the draft model on this rank."""
    taken = device_bytes(retriever, stage.architecture, stage.dtype, options.max_requests)
    worker = Worker(
        *(stage, mesh, device.torch),
        blocks=partial(_blocks, stage, mesh, device, options, taken, draft),
        block=options.block,
        requests=options.max_requests,
        tile=options.tile if options.batch_invariant else None,
        vocab=vocab,
        adapters=adapters,
        graphs=_records(options, device, retriever),
        most=options.prefill_chunk or MANY[-1],
        retriever=retriever,
    )
    if guesses_itself(options):
        worker.drafts = AheadWorker(worker, worker.blocks, options.block, graphs=worker.graphs is not None)
    return worker


def _check_graphs(options: EngineOptions, model: Architecture, device: Device) -> None:
    """Check --cuda-graph. Errors: ValueError if steps of the model cannot be captured as graphs on the device."""
    if options.cuda_graph and model.cached.softcap is not None:
        raise ValueError("--cuda-graph: soft-capped attention is not recorded; valid here: --no-cuda-graph")
    if options.cuda_graph and not device.is_cuda:
        raise ValueError("--cuda-graph: needs a GPU; valid here: --no-cuda-graph")


def _records(options: EngineOptions, device: Device, retriever: Retriever | None) -> bool:
    """Return whether the model's steps are captured as CUDA graphs."""
    return device.is_cuda and options.cuda_graph is not False and retriever is None


def guesses_itself(options: EngineOptions) -> bool:
    """Return whether the model's own multi-token prediction layers guess tokens."""
    return options.speculate == MTP and not options.batch_invariant


class Draft(NamedTuple):
    """A draft model with its weights on the device."""

    stage: DecoderStage
    size: DraftSize


def _draft(options: EngineOptions, stage: DecoderStage, device: Device, vocab: int) -> Draft | None:
    """Load the draft model that the options select, or return None. Errors: ValueError if its vocabulary is too small;
    CheckpointError."""
    if options.speculate in (None, NGRAM, MTP) or options.batch_invariant:
        return None
    opened, model, dtype = open_model(str(options.speculate)), stage.architecture, stage.dtype
    check_draft(opened, str(options.speculate), vocab, model.input.vocab)
    ops = forward_only(choose(device.torch, dtype))
    (small,) = load_stages(opened, Mesh.at(0), device, dtype=dtype, ops=ops)
    return Draft(cast(DecoderStage, small), draft_size(opened.model, model, dtype.itemsize, options.max_requests))


def check_draft(draft: OpenedModel, place: str, vocab: int, whole: int) -> None:
    """Check a draft model. place: value of --speculate. vocab: number of ids that the model may choose. whole: the
    model's vocabulary size. Errors: ValueError if the draft model's vocabulary is too small."""
    if (ids := draft.architecture.input.vocab) < vocab:
        raise ValueError(
            f"--speculate {place}: has {ids} tokens, the model {whole}; must be a model of the same tokenizer"
        )


def drafter_of(
    options: EngineOptions, worker: Worker, relay: Relay | None, device: Device, draft: Draft | None
) -> Drafter | None:
    """Return the drafter that the options select, or None. draft: the loaded draft model of --speculate DIR."""
    if options.speculate is None or options.batch_invariant:
        return None
    if options.speculate == NGRAM:
        return NGrams()
    if isinstance(worker.drafts, AheadWorker):
        return AheadDrafts(worker.drafts, relay, options.block, worker.vocab)
    assert draft is not None
    blocks = draft.size.blocks((worker.blocks - 1) * options.block, options.block)
    draft_worker = Worker(
        *(draft.stage, Mesh.at(0), device.torch),
        blocks=blocks,
        block=options.block,
        requests=options.max_requests,
        tile=None,
        vocab=worker.vocab,
        graphs=_records(options, device, None),
        most=DRAFT_CHUNK,
    )
    return ModelDrafts(draft_worker, Blocks(blocks, options.block), DRAFT_CHUNK)


def decoding_mesh(layout: DecodingLayout, rank: int, groups: Groups) -> Mesh:
    """Return the mesh of the ranks that decode. Experts, or shards of experts, are divided among the ranks of --tp."""
    return Mesh(rank, tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.tp // layout.ep, groups=groups)


def check_layout(
    options: ModelConfig, tp: int, pp: int, engine: EngineOptions = DEFAULT, ep: int = 1, *, retrieves: bool = False
) -> None:
    """Check a layout. retrieves: whether a retriever is available. Errors: ValueError naming the flag."""
    model = architecture(options)
    if ep > 1 and not options.experts:
        raise ValueError(f"--ep {ep}: needs a model with experts")
    if tp % ep or (options.experts or ep) % ep:
        raise ValueError(f"--ep {ep}: must divide --tp {tp}, whose ranks have the same tokens, and {options.experts}")
    for name in ("fp8_weights", "batch_invariant"):
        if model.mixtures and getattr(engine, name):
            raise ValueError(f"--{name.replace('_', '-')}: does nothing for experts, of which the model has some")
    if family(options).prompt is None and not (options.retriever and retrieves):
        kind = "with --retriever" if options.retriever else f"of --family {model.family}"
        advice = "is continued by mega generate and mega serve, with --retro" if options.retriever else ""
        hint = "; mega serve gives its embeddings" if FAMILY_DEFAULTS[model.family].classifies else ""
        raise ValueError(f"--load: a model {kind} {advice or 'does not continue text'}{hint}")
    if engine.speculate == MTP and not model.output.ahead:
        raise ValueError("--speculate mtp: the model has no layers that predict further tokens (--mtp-layers)")
    kv_heads, layers = model.cached.kv_heads, len(model.layers)
    if kv_heads % tp:
        valid = ", ".join(map(str, divisors(kv_heads)))
        raise ValueError(f"--tp {tp}: must divide the model's {kv_heads} key/value heads (valid: {valid})")
    if pp > layers:
        raise ValueError(f"--pp {pp}: must be at most the model's {layers} blocks")


def _blocks(
    stage: DecoderStage, mesh: Mesh, device: Device, options: EngineOptions, taken: int, draft: DraftSize | None
) -> int:
    """Return the number of blocks in the cache, which is identical on all ranks. taken: bytes to reserve for later
    allocations. draft: the draft model on this rank. Errors: ValueError if not even one sequence fits."""
    size, model = options.block, stage.architecture
    device.release()  # free the memory that the weights occupied in a wider format
    layers = sum(isinstance(unit, int) for unit in stage.units)
    guesses = mesh.pp.last and guesses_itself(options)
    free_bytes = device.room() - taken - (device.resident() if device.is_cuda else 0)
    (token,) = token_bytes(model, stage.dtype.itemsize, [layers], tp=mesh.tp.size, guesses=guesses)
    fits = fitting_blocks(free_bytes, device.torch.type, token, size, draft)
    least = torch.tensor(fits // (1 if device.is_cuda else mesh.world), device=device.torch)
    all_reduce(least, mesh.everyone, "min")
    tokens = wanted_tokens(model, options.max_requests, options.cache_tokens)
    return cache_blocks(tokens, int(least), size, asked=options.cache_tokens is not None)
