"""`mega generate`: continue a text, the texts in a file, or prompts from the terminal with a model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from mega.command_line.options import without
from mega.core.config.option import changed
from mega.core.files import check_file, check_not_input, check_source
from mega.core.inference.options import (
    DecodingLayout,
    EngineOptions,
    GenerateOptions,
    OtherTokenizer,
    RetrievalOptions,
    SamplingOptions,
)

STATED_BY = "the checkpoint says it, or nothing is trained"
"""The reason why training options have no effect, for messages."""

ASKED = {"url", "prompt", "tokens", "beams", "length_penalty", "chat_template"}
"""Options of `GenerateOptions` that may be combined with --url."""


def run(
    texts: GenerateOptions,
    sampling: SamplingOptions,
    layout: DecodingLayout,
    engine: Annotated[EngineOptions, without("max_requests", "prefill_chunk", "cache_tokens")],
    tokenizer: OtherTokenizer,
    retrieval: RetrievalOptions,
) -> int:
    """Continue text with a trained model from any checkpoint: one text, the texts in a file, or prompts from the
    terminal.

    Without --prompt, --input and --num-samples, prompts are read from the terminal. With --tp and --pp, several ranks
    are used, which this command or a launcher starts.
    """
    given_sampling = sampling.given()
    _check_search([*(["greedy"] if sampling.greedy else []), *changed(sampling)], texts)
    if texts.url is not None:
        other_options = [*changed(layout), *changed(engine), *changed(tokenizer), *changed(retrieval)]
        _check_asked(texts, given_sampling, other_options, recorded=engine.cuda_graph is not False)
        return _ask(texts.url, texts, given_sampling)
    engine.check(layout.device, texts.adapter)
    _check_template(texts.chat_template, texts.load)
    if texts.load is None:
        raise ValueError("--load is missing: give a run's directory, or --url")
    check_source("--load", texts.load)
    reads_prompts = _check_texts(texts)
    tokenizer_options = tokenizer.described()
    from mega.core.inference.request import sampling_of

    sampling_options = sampling_of(**{"seed": 0, **given_sampling, "top_p": sampling.top_p or 1.0})
    from mega.core.inference.generation.prompts import GenerationPlan, open_inputs, write_texts
    from mega.core.inference.loading.adapters import adapter_paths
    from mega.core.processes.launch import run_ranks
    from mega.core.retro.retrieve import opener

    engine.check_speculation(texts.adapter)
    retriever = opener(retrieval, engine, layout, texts.adapter, texts.beams)
    many_texts = texts.input is not None or texts.num_samples > 0
    plan = GenerationPlan(
        texts=texts,
        layout=layout,
        engine=dataclasses.replace(engine, max_requests=max(engine.max_requests if many_texts else 1, texts.beams)),
        interactive=reads_prompts and sys.stdin.isatty() and sys.stdout.isatty(),
        retriever=retriever,
        retro=retrieval.retro,
        sampling=sampling_options,
        tokenizer=tokenizer_options,
        adapters=adapter_paths(texts.adapter),
    )
    return run_ranks(layout.tp * layout.pp, write_texts, plan, nproc=texts.nproc, first=partial(open_inputs, plan))


def _check_asked(texts: GenerateOptions, given: dict[str, float], others: Sequence[str], *, recorded: bool) -> None:
    """Check the flags given with --url. given: the sampling options, from which options that a server lacks are
    removed. others: names of other given options. recorded: False if --no-cuda-graph is given.
    Errors: ValueError naming a flag that --url excludes."""
    excluded = [name for name in changed(texts) if name not in ASKED]
    excluded += ["min_p"] * bool(given.pop("min_p", 0))
    excluded += ["repetition_penalty"] * (given.pop("repetition_penalty", 1) != 1)
    excluded += others
    if excluded:
        flag = "no-cuda-graph" if not recorded and excluded[0] == "cuda_graph" else excluded[0]
        raise ValueError(f"--{flag.replace('_', '-')}: excludes --url {texts.url}, which asks a server's PUT /api")


def _check_texts(texts: GenerateOptions) -> bool:
    """Check the sources of prompts, and return whether to read prompts from the terminal. Errors: ValueError if there
    are two sources, or a file does not exist."""
    prompt, source, output = texts.prompt, texts.input, texts.output
    if prompt is not None and any("\ud800" <= sign <= "\udfff" for sign in prompt):
        raise ValueError("--prompt: is not UTF-8")
    modes = {"--prompt": prompt is not None, "--input": source is not None, "--num-samples": texts.num_samples > 0}
    sources = [flag for flag, value in modes.items() if value]
    if len(sources) > 1:
        raise ValueError(f"{sources[0]}: excludes {sources[1]}")
    if output is not None and (prompt is not None or not sources):
        raise ValueError(f"--output {output}: needs --input or --num-samples")
    if output is not None:
        check_file("--output", str(output))
    if source is not None and not source.is_file():
        pipe = str(source) == "-" or source.exists()
        raise ValueError(f"--input {source}: {'must be a file, no pipe or folder' if pipe else 'no such file'}")
    if output is not None and source is not None:
        check_not_input("--output", output, [source])
    if texts.unconditional and not texts.num_samples:
        raise ValueError("--unconditional: needs --num-samples, the number of texts")
    return not sources


def _check_template(chat_template: str | None, load: Path | None) -> None:
    """Check that no chat template is given, because this command does not use one. Errors: ValueError if one is
    given."""
    from mega.core.text.identity import judge

    if chat_template is not None:
        difference = f"--chat-template {chat_template}: mega generate continues text as it is, without a template"
        advice = f"leave it out, or give it to mega serve {load or 'CHECKPOINT'}, which answers conversations"
        judge("generate", "template", difference, advice=advice)


def _check_search(sampled: Sequence[str], texts: GenerateOptions) -> None:
    """Check the flags for beam search. Errors: ValueError for a flag without effect, that is, a sampling flag with
    --beams, or --length-penalty without --beams."""
    if texts.beams and sampled:
        flag = sampled[0].replace("_", "-")
        raise ValueError(
            f"--{flag}: has no effect with --beams {texts.beams}, which draws nothing; leave one of them out"
        )
    if texts.length_penalty is not None and not texts.beams:
        raise ValueError(f"--length-penalty {texts.length_penalty}: needs --beams")


def _ask(url: str, texts: GenerateOptions, sampling: Mapping[str, float]) -> int:
    """Request continuations of the prompt, or of prompts from the terminal, from a server. Errors: ValueError for
    options that the server's API lacks."""
    from mega.core.inference.server.client import ask, converse, fields_of

    fields = fields_of(sampling, texts.beams, texts.length_penalty)
    if texts.prompt is None:
        converse(url, fields)
    else:
        print(ask(url, texts.prompt, texts.tokens, **fields))
    return 0
