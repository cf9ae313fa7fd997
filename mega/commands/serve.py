"""`mega serve`: a model that answers over HTTP."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from mega.commands.generate import (
    ComputeDtype,
    DeviceKind,
    Fp8Weights,
    Graphs,
    PipelineStages,
    Speculate,
    TensorRanks,
    check_graphs,
    checked_speculation,
)
from mega.core.files import check_source

BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="an answer does not depend, to the bit, on what else is in flight")
]
PrefillChunk = Annotated[
    int | None, typer.Option("--prefill-chunk", help="most prompt tokens of a step [by the device]", min=1)
]

TimeoutMinutes = Annotated[
    float,
    typer.Option(
        "--timeout-minutes",
        "--distributed-timeout-minutes",
        help="give up on a rank that has not answered for so long",
        min=0.05,
        max=35_000,
    ),
]

STATED_BY = "the checkpoint says it, or each request does"
"""Why options of a training that are given here change nothing."""


def run(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="a run's directory, one step in it, or others' weights", show_default=False)
    ] = None,
    load: Annotated[Path | None, typer.Option("--load", help="the same, by Megatron-LM's name")] = None,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="port to listen on; 0 takes a free one", min=0, max=65535)] = 5000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="file of the token that clients must send [MEGA_TOKEN]")
    ] = None,
    tp: TensorRanks = 1,
    pp: PipelineStages = 1,
    dtype: ComputeDtype = None,
    device: DeviceKind = "auto",
    name: Annotated[str | None, typer.Option("--name", help="the model's name for clients [its directory's]")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=DIR", help="run with --lora-rank, or peft's; clients name it as model"),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="llama2, llama3, chatml, plain or a Jinja file [the model's]")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", help="sequences at once; more wait", min=1)] = 64,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="sequences that wait; more get 429", min=0)] = 256,
    cache_tokens: Annotated[
        int | None, typer.Option("--cache-tokens", help="of all in flight [what fits]", min=1)
    ] = None,
    chunk: PrefillChunk = None,
    batch_invariant: BatchInvariant = False,
    cuda_graph: Graphs = None,
    fp8_weights: Fp8Weights = False,
    speculate: Speculate = None,
    longest: Annotated[
        int | None, typer.Option("--max-length", "--out-seq-length", help="prompt and answer [the model's]", min=1)
    ] = None,
    oom: Annotated[int, typer.Option("--max-tokens-to-oom", help="tokens of one PUT /api, padded", min=1)] = 12000,
    max_body: Annotated[int, typer.Option("--max-body", help="bytes of a request", min=1024)] = 8 << 20,
    max_connections: Annotated[int, typer.Option("--max-connections", help="clients at a time", min=1)] = 1024,
    timeout: Annotated[float, typer.Option("--request-timeout", help="seconds until a whole answer", min=0.1)] = 600.0,
    timeout_minutes: TimeoutMinutes = 10.0,
    drain: Annotated[float, typer.Option("--drain-seconds", help="for answers in flight, after SIGTERM", min=0)] = 30.0,
    temperature: Annotated[float, typer.Option("--temperature", help="where a request gives none")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="where a request gives none; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="where a request gives none; 1 is off")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="where a request gives none [another each time]")] = None,
    parse_special_tokens: Annotated[
        bool,
        typer.Option("--parse-special-tokens", help="of a completion's prompt: what it spells are tokens, not text"),
    ] = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="print each request, with its prompt")] = False,
    legacy_status: Annotated[
        bool, typer.Option("--legacy-status", help="PUT /api answers most mistakes with 200, as Megatron-LM does")
    ] = False,
) -> int:
    """Answer prompts over HTTP: OpenAI's API, Megatron-LM's PUT /api, and a page to try.

    The model, its tokenizer and its chat template are the checkpoint's; any layout may serve it. SIGTERM ends the
    server when every accepted request is answered: exit code 0.
    """
    _check_extra()
    from mega.core.inference.request import sampling_of

    path = _place(checkpoint, load)
    token = _token(token_file)
    check_graphs(cuda_graph, device, batch_invariant, adapter)
    # A mistake is named before anything heavy is loaded.
    sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    from mega.core.inference.adapters import adapter_paths
    from mega.core.inference.opening import EngineOptions
    from mega.core.inference.server.limits import ServerLimits
    from mega.core.inference.server.service import ServerOptions
    from mega.core.inference.server.start import ServePlan, check_host, serve_rank
    from mega.core.processes.launch import run_ranks

    check_host(host, token)
    limits = ServerLimits(
        body=max_body, waiting=max_waiting, connections=max_connections, request_seconds=timeout, drain_seconds=drain
    )
    called, adapters = name or path.resolve().name, adapter_paths(adapter or ())
    if called in adapters:
        raise ValueError(f"--adapter {called}={adapters[called]}: {called} is the model itself; give it another name")
    options = ServerOptions(
        name=called,
        adapters=tuple(adapters),
        token=token,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        longest=longest,
        tokens_at_once=oom,
        parse_special_tokens=parse_special_tokens,
        log_prompts=log_prompts,
        legacy_status=legacy_status,
        limits=limits,
    )
    engine = EngineOptions(
        requests=max_requests,
        chunk=chunk,
        cache_tokens=cache_tokens,
        batch_invariant=batch_invariant,
        graphs=cuda_graph,
        fp8_weights=fp8_weights,
        speculate=checked_speculation(speculate, batch_invariant),
    )
    plan = ServePlan(
        path=str(path),
        options=options,
        engine=engine,
        host=host,
        port=port,
        tp=tp,
        pp=pp,
        dtype=dtype,
        device=device,
        timeout_minutes=timeout_minutes,
        template=chat_template,
        adapters=adapters,
    )
    return run_ranks(tp * pp, serve_rank, plan)


def _check_extra() -> None:
    """Errors: ValueError naming the extra."""
    for library in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"mega serve: needs {library}; pip install 'mega[serve]'")


def _place(checkpoint: Path | None, load: Path | None) -> Path:
    """The model's directory. Errors: ValueError where it is not named once."""
    if checkpoint is not None and load is not None:
        raise ValueError(f"--load {load}: excludes the checkpoint {checkpoint}, which means the same")
    found = checkpoint or load
    if found is None:
        raise ValueError("CHECKPOINT is missing: give a run's directory, or one of others' weights")
    check_source("CHECKPOINT" if load is None else "--load", found)
    return found


def _token(file: Path | None) -> str | None:
    """The token of --token-file, or of MEGA_TOKEN. Errors: ValueError for one that is short or cannot be sent."""
    from mega.core.untrusted import read_limited

    what = f"--token-file {file}" if file is not None else "MEGA_TOKEN"
    text = os.environ.get("MEGA_TOKEN")
    if file is not None:
        text = read_limited(file, 4096, what).decode("latin-1").strip()
    if text is None:
        return None
    if not 16 <= len(text) <= 1024 or not all("!" <= letter <= "~" for letter in text):
        raise ValueError(f"{what}: must be 16 to 1024 letters, digits or signs, without blanks")
    return text
