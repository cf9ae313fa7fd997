"""Start a server on every rank from a directory of weights. Rank 0 listens, and the other ranks run the steps of rank
0's engine.

This module depends on neither flags nor routes.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mega.core.activity import ACTIVITY
from mega.core.architecture.words import size_words
from mega.core.device import Device
from mega.core.inference.capacity import Capacity, even_layers, token_bytes, weight_bytes
from mega.core.inference.embedding import EmbeddingEngine
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.loading.adapters import OpenedAdapter, open_adapters
from mega.core.inference.loading.identity import adapter_template, check_adapter_tokenizer, chosen_template
from mega.core.inference.loading.load import OpenedModel, check_tokenizer, compute_dtype, declared_ends, open_model
from mega.core.inference.options import DecodingLayout, EngineOptions
from mega.core.inference.retrieval import OpenRetriever, check_retrieval
from mega.core.inference.server.embedding_start import (
    check_embedding,
    embedding_lines,
    gives_embeddings,
    start_embedding_engine,
)
from mega.core.inference.server.options import ListenOptions, ServedModel, ServerOptions
from mega.core.inference.server.run import HttpServer, bind, raise_file_limit
from mega.core.inference.server.service import Manner
from mega.core.inference.start import check_layout, decoding_mesh, guesses_itself, start_engine
from mega.core.parallel.mesh import Mesh
from mega.core.processes.connect import connect, end_together, keep_asking
from mega.core.processes.signals import STOPPING
from mega.core.processes.world import world_from_env
from mega.core.text.chat.format import ChatFormat, chat_format
from mega.core.text.tokenizer import Tokenizer

_RENDER_SECONDS = 1
"""Maximum processor time in seconds for rendering one conversation."""
_SWITCH_SECONDS = 0.001
"""Python's thread switch interval in seconds, chosen so that the engine's thread does not delay the event loop for
long."""


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """The model, layout and options of a server."""

    path: str
    """Directory of the model."""
    listen: ListenOptions = field(default_factory=ListenOptions)
    model: ServedModel = field(default_factory=ServedModel)
    layout: DecodingLayout = field(default_factory=DecodingLayout)
    engine: EngineOptions = field(default_factory=EngineOptions)
    options: ServerOptions
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Name of an adapter -> its directory."""
    retriever: OpenRetriever | None = None
    """Function that opens the retriever for the database `retro`."""
    retro: str | None = None


def check_host(host: str, token: str | None) -> None:
    """Check the address. Errors: ValueError if other machines could reach a server that has no token."""
    if token is not None or host == "localhost":
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"--host {host}: others can reach it, so it needs --token-file or MEGA_TOKEN "
            "(valid without: 127.0.0.1, ::1)"
        )


def check_plan(plan: ServePlan) -> None:
    """Check the port, the model, its adapters and the layout, before local ranks start. Errors: those of
    `serve_rank`."""
    bind(plan.listen.host, plan.listen.port).close()
    source = open_model(plan.path)
    open_adapters(plan.adapters, source)
    tokenizer = source.tokenizer()
    check_tokenizer(source, tokenizer)
    _check_model(plan, source, tokenizer)


def serve_rank(plan: ServePlan) -> int:
    """Run this rank until the server stops, and return exit code 0. Errors: any error raised during loading or by the
    engine."""
    began = time.monotonic()
    leads = world_from_env().rank == 0
    # Bind now, so that a port that is in use is reported before the model is loaded.
    listening = bind(plan.listen.host, plan.listen.port) if leads else None
    if not leads:
        for number in STOPPING:  # rank 0 ends the other ranks after the last request
            signal.signal(number, signal.SIG_IGN)
    source = open_model(plan.path)
    adapters = open_adapters(plan.adapters, source)
    tokenizer = source.tokenizer()
    check_tokenizer(source, tokenizer)
    stop_ids = source.stop_ids()
    for each in adapters:
        for line in check_adapter_tokenizer("serve", source, tokenizer, each) if leads else ():
            print(f"mega: {line}", file=sys.stderr)
    chat, no_chat = _chat(plan, source, tokenizer) if leads else (None, None)
    whole = Manner(chat=chat, no_chat=no_chat or plan.options.no_chat, stop_ids=stop_ids)
    vocab = source.architecture.input.vocab
    manners = {each.name: _manner(each, whole, tokenizer, vocab) for each in adapters if leads}
    _check_model(plan, source, tokenizer)
    world, device, groups = connect(plan.layout.device, timeout_minutes=plan.listen.timeout_minutes)
    keep_asking()
    ACTIVITY.phase = "serving"
    mesh = decoding_mesh(plan.layout, world.rank, groups)
    dtype = compute_dtype(source, device, plan.layout.dtype)
    engine = _engine(plan, source, mesh, device, tokenizer, dtype, adapters)
    if engine is None:
        return 0
    assert listening is not None
    loaded = time.monotonic()
    warm = f", warmed up in {engine.warm_up():.1f} s" if device.is_cuda else ""
    sys.setswitchinterval(_SWITCH_SECONDS)
    limits = replace(plan.options.limits, max_connections=raise_file_limit(plan.options.limits.max_connections))
    vectors = engine.vectors.width if isinstance(engine, EmbeddingEngine) else 0
    answers = replace(plan.options, limits=limits, stop_ids=stop_ids, no_chat=whole.no_chat, vector_width=vectors)
    server = HttpServer(engine, tokenizer, answers, chat, manners)
    keep_asking(lambda line: server.driver.lose(TimeoutError(line)))
    precision = str(dtype).removeprefix("torch.") + ", weights in fp8" * plan.engine.fp8_weights
    device_text = f"{precision} on {world.size} {device.torch.type} rank{'s' * (world.size > 1)}"
    device_text += f"; loaded in {loaded - began:.1f} s{warm}"
    notes = (*source.notes, *(note for each in adapters for note in each.notes))
    for line in (*notes, *_lines(plan, source, dtype, device_text, server)):
        print(line)
    server.run(listening, lambda: print(f"ready: {_address(listening)}", flush=True))
    print("every accepted request has been answered", flush=True)
    end_together(world.rank, plan.listen.timeout_minutes)
    return 0


def _engine(
    plan: ServePlan,
    opened: OpenedModel,
    mesh: Mesh,
    device: Device,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    adapters: Sequence[OpenedAdapter],
) -> BatchingEngine | EmbeddingEngine | None:
    """Return the engine on rank 0. Other ranks run its steps until the engine closes, and then return None."""
    options = replace(plan.engine, vocab=tokenizer.vocab_size)
    if gives_embeddings(opened.model):
        pooling = plan.model.pooling
        return start_embedding_engine(opened, mesh, device, options, tokenizer, dtype=dtype, pooling=pooling)
    retriever = None if plan.retriever is None else plan.retriever(opened.model, tokenizer, device.torch.type)
    return start_engine(opened, mesh, device, options, dtype=dtype, adapters=adapters, retriever=retriever)


def _check_model(plan: ServePlan, opened: OpenedModel, tokenizer: Tokenizer) -> None:
    """Check flags. Errors: ValueError naming a flag that does not fit the model."""
    layout = plan.layout
    if gives_embeddings(opened.model):
        check_embedding(opened, tokenizer, layout, plan.model, plan.engine, plan.options, plan.retro)
        return
    if plan.model.pooling is not None:
        raise ValueError(f"--pooling {plan.model.pooling}: needs a BERT, whose vectors it is about")
    check_retrieval(opened.model, plan.retro, plan.path)
    check_layout(*(opened.model, layout.tp, layout.pp, plan.engine, layout.ep), retrieves=plan.retriever is not None)


def _chat(plan: ServePlan, opened: OpenedModel, tokenizer: Tokenizer) -> tuple[ChatFormat | None, str | None]:
    """Return the chat format (of --chat-template, else of the model's template, else None) and, if the model's template
    is invalid, the reason. The reason is printed to stderr and sent to clients that request a chat."""
    if plan.model.chat_template is not None:
        for line in chosen_template("serve", opened, opened.path, plan.model.chat_template).notes:
            print(f"mega: {line}", file=sys.stderr)
        return chat_format(plan.model.chat_template, tokenizer, seconds=_RENDER_SECONDS), None
    try:
        template = opened.chat_template()
        return None if template is None else ChatFormat(
            template, tokenizer, "the chat template", seconds=_RENDER_SECONDS
        ), None
    except ValueError as error:
        print(f"mega: no chat: {error}", file=sys.stderr)
        return None, str(error)


def _manner(adapter: OpenedAdapter, whole: Manner, tokenizer: Tokenizer, vocab: int) -> Manner:
    """Return the chat template and end tokens of an adapter. Where the adapter's files contain no value, the model's
    value in `whole` is used. An invalid template is reported on stderr. Errors: CheckpointError."""
    ends = declared_ends(adapter.source.attachments, vocab)
    manner = whole if ends is None else replace(whole, stop_ids=ends)
    try:
        template, notes = adapter_template(adapter, None if whole.chat is None else whole.chat.source)
        if template is not None:
            manner = replace(
                manner,
                chat=ChatFormat(template, tokenizer, f"{adapter.flag}: its chat template", seconds=_RENDER_SECONDS),
            )
    except ValueError as error:
        notes, manner = (f"no chat: {error}",), replace(manner, chat=None, no_chat=str(error))
    for line in notes:
        print(f"mega: {line}", file=sys.stderr)
    return manner


def _lines(plan: ServePlan, opened: OpenedModel, dtype: torch.dtype, about: str, server: HttpServer) -> list[str]:
    """Return a description of the model and of the number of requests that fit, with the same figures as `mega
    memory-estimate --serve`."""
    model, service, limits = opened.architecture, server.service, server.engine.limits
    loaded = f"{opened.path}: {size_words(model)}, {service.tokenizer.kind} of {service.tokenizer.vocab_size}, {about}"
    waiting = f"{server.options.limits.max_waiting} more may wait"
    if isinstance(server.engine, EmbeddingEngine):
        return [loaded, *embedding_lines(server.engine), waiting]
    fp8, guesses = plan.engine.fp8_weights, guesses_itself(plan.engine)
    size, tp, pp = dtype.itemsize, plan.layout.tp, plan.layout.pp
    weights = max(weight_bytes(opened.model, size, tp=tp, pp=pp, fp8_weights=fp8))
    token = max(token_bytes(model, size, even_layers(len(model.layers), pp), tp=tp, guesses=guesses))
    cache = (limits.cache + plan.engine.block) * token
    assert isinstance(server.engine, BatchingEngine)
    capacity = Capacity(limits, weights, cache, server.engine.neighbour_bytes, guesses, *server.engine.draft_bytes)
    requested_length = plan.options.max_length or 0
    beyond = f"--max-length {requested_length}: the model has {limits.longest} positions, so that is the longest"
    template = "the model's template" if plan.model.chat_template is None else "--chat-template"
    chat = "no chat template" if service.chat is None else f"chat by {template}"
    adapters = server.options.adapters
    return [
        loaded,
        *([beyond] if requested_length > limits.longest else []),
        *capacity.lines(service.longest),
        f"{waiting}; {chat}",
        *([f"adapters, by name as the model: {', '.join(adapters)}"] if adapters else []),
    ]


def _address(listening: socket.socket) -> str:
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
