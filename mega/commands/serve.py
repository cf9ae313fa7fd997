"""`mega serve`: serve a model over HTTP."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mega.command_line.options import local_place
from mega.core.files import check_source
from mega.core.hub.names import cached_name, hub_name
from mega.core.inference.options import DecodingLayout, EngineOptions, RetrievalOptions
from mega.core.inference.server.limits import ServerLimits
from mega.core.inference.server.options import ListenOptions, ServedModel, ServerOptions

STATED_BY = "the checkpoint says it, or each request does"
"""The reason why training options have no effect, for messages."""


def run(
    listen: ListenOptions,
    model: ServedModel,
    layout: DecodingLayout,
    engine: EngineOptions,
    answers: ServerOptions,
    limits: ServerLimits,
    retrieval: RetrievalOptions,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="a run's or a step's directory, weights in another format, a name on the Hub", show_default=False
        ),
    ] = None,
) -> int:
    """Serve a model over HTTP with OpenAI's API, Megatron-LM's PUT /api, and a web page for trying the model.

    The checkpoint provides the model, the tokenizer and the chat template, and can be served in any layout. After
    SIGTERM, the server answers all accepted requests, then ends with exit code 0.
    """
    _check_extra()
    from mega.core.inference.request import sampling_of

    model_name = answers.name or next(iter(answers.served_model_name), _own_name(checkpoint or model.load))
    path = _place(checkpoint, model.load)
    token = listen.token()
    engine.check(layout.device, model.adapter)
    # Report a mistake before heavy modules are imported.
    sampling_of(temperature=answers.temperature, top_k=answers.top_k, top_p=answers.top_p, seed=answers.seed)
    from mega.core.inference.loading.adapters import adapter_paths
    from mega.core.inference.server.start import ServePlan, check_host, check_plan, serve_rank
    from mega.core.processes.launch import run_ranks
    from mega.core.retro.retrieve import opener

    check_host(listen.host, token)
    adapters = adapter_paths(model.adapter)
    _check_names((model_name, *answers.served_model_name), adapters)
    engine.check_speculation(model.adapter)
    plan = ServePlan(
        path=str(path),
        listen=listen,
        model=model,
        layout=layout,
        engine=engine,
        options=dataclasses.replace(answers, name=model_name, adapters=tuple(adapters), token=token, limits=limits),
        adapters=adapters,
        retriever=opener(retrieval, engine, layout, model.adapter),
        retro=retrieval.retro,
    )
    return run_ranks(layout.tp * layout.pp, serve_rank, plan, first=partial(check_plan, plan))


def _check_names(names: Sequence[str], adapters: Mapping[str, Path]) -> None:
    """Check the names of adapters. Errors: ValueError if an adapter has the same name as the model."""
    for name in names:
        if name in adapters:
            raise ValueError(f"--adapter {name}={adapters[name]}: {name} is the model itself; give it another name")


def _check_extra() -> None:
    """Check that the required libraries are installed. Errors: ValueError naming the extra of mega to install."""
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"mega serve: needs {library}; pip install '.[serve]' in a clone")


def _place(checkpoint: Path | None, load: Path | None) -> Path:
    """Return the model's directory. Errors: ValueError unless the directory is given exactly once."""
    if checkpoint is not None and load is not None:
        raise ValueError(f"--load {load}: excludes the checkpoint {checkpoint}, which means the same")
    path = checkpoint or load
    if path is None:
        raise ValueError("CHECKPOINT is missing: give a run's directory, or one of others' weights")
    if checkpoint is not None:
        path = Path(local_place("CHECKPOINT", str(checkpoint)))
    check_source("CHECKPOINT" if load is None else "--load", path)
    return path


def _own_name(place: Path | None) -> str:
    """Return the default name of a model: its name on the Hub, or the name of its directory."""
    if place is None:
        return ""
    name = hub_name(place) or cached_name(place)
    return str(name) if name is not None else place.resolve().name
