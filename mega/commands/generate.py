"""`mega generate`: a model's continuation of a text, of a file of texts, or of what is typed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from mega.core.files import check_file, check_source

STATED_BY = "the checkpoint says it, or nothing is trained"
"""Why options of a training that are given here change nothing."""


def run(
    load: Annotated[
        Path | None,
        typer.Option("--load", help="a run's directory (its newest step), one step in it, or others' weights"),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="HOST:PORT", help="ask a server's PUT /api instead, as of mega serve")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="the text to continue [at a terminal asked for, else a new document]")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", "--sample-input-file", help="prompts: JSON lines (.jsonl), else one a line"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--sample-output-file", "--genfile", help="JSON lines of the texts [shown]"),
    ] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", help="so many new documents, as JSON lines", min=0)] = 0,
    tokens: Annotated[int, typer.Option("--tokens", "--out-seq-length", help="most tokens to add", min=1)] = 100,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="as --temperature 0")] = False,
    top_k: Annotated[int, typer.Option("--top-k", "--top_k", help="draw from the k likeliest; 0 is off")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", "--top_p", help="draw from the likeliest that make up p; 1 or 0 is off")
    ] = 1.0,
    top_p_decay: Annotated[float, typer.Option("--top-p-decay", help="multiply top-p by this after each token")] = 0.0,
    top_p_bound: Annotated[float, typer.Option("--top-p-bound", help="where the decay of top-p ends")] = 0.0,
    min_p: Annotated[float, typer.Option("--min-p", help="least share of the likeliest token's probability")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="make tokens of the text less likely; 1 is off")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="the same seed gives the same text")] = 0,
    beams: Annotated[
        int, typer.Option("--beams", "--beam-width", help="beam search of this width; 0 draws", min=0, max=128)
    ] = 0,
    length_penalty: Annotated[
        float, typer.Option("--length-penalty", help="of beams: scores are divided by length ** this")
    ] = 1.0,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="NAME=DIR", help='adapter; rows of --input may choose by "adapter" [the first]'
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", help="tensor-parallel ranks", min=1)] = 1,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", help="pipeline stages", min=1)] = 1,
    nproc: Annotated[int | None, typer.Option("--nproc", help="local ranks to start [tp x pp]", min=1)] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option("--dtype", help="computed in [fp32 on a CPU, else the weights' own]"),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="a text does not depend, to the bit, on what is generated with it")
    ] = False,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="kind of tokenizer [the checkpoint's]")] = None,
    tokenizer_model: Annotated[str | None, typer.Option("--tokenizer-model", help="its model file")] = None,
    vocab_file: Annotated[str | None, typer.Option("--vocab-file", help="its vocabulary file")] = None,
    merge_file: Annotated[str | None, typer.Option("--merge-file", help="its BPE merges file")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="where tensors live")] = "auto",
) -> int:
    """Continue a text with a trained model, any checkpoint of any layout: one text, a file of them, or what is typed.

    With neither --prompt, --input nor --num-samples it asks for prompts at a terminal. Several ranks by --tp and --pp,
    alone or under a launcher.
    """
    if url is not None:
        others: dict[str, object] = {"--load": load, "--input": input_file, "--output": output}
        others |= {"--adapter": adapter[0] if adapter else None}
        others |= {"--num-samples": num_samples or None, "--min-p": min_p or None}
        others |= {"--repetition-penalty": None if repetition_penalty == 1 else repetition_penalty}
        fields = {"temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p}
        fields |= {"top_p_decay": top_p_decay, "top_p_bound": top_p_bound, "random_seed": seed}
        return _ask(url, prompt, tokens, others, fields, (beams, length_penalty))
    if load is None:
        raise ValueError("--load is missing: give a run's directory, or --url")
    check_source("--load", load)
    modes = {"--prompt": prompt is not None, "--input": input_file is not None, "--num-samples": num_samples > 0}
    given = [flag for flag, value in modes.items() if value]
    if len(given) > 1:
        raise ValueError(f"{given[0]}: excludes {given[1]}")
    if output is not None and (prompt is not None or not given):
        raise ValueError(f"--output {output}: needs --input or --num-samples")
    files = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    named = {name: value for name, value in files.items() if value is not None}
    _check_files(input_file, output, named, tokenizer)
    from mega.core.inference.request import sampling_of

    sampling = sampling_of(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p or 1.0,
        top_p_decay=top_p_decay,
        top_p_bound=top_p_bound,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    from mega.core.inference.adapters import adapter_places
    from mega.core.inference.opening import EngineOptions
    from mega.core.inference.speak import SpeechPlan

    plan = SpeechPlan(
        load=load,
        tokens=tokens,
        prompt=prompt,
        input=input_file,
        output=output,
        samples=num_samples,
        interactive=not given and sys.stdin.isatty() and sys.stdout.isatty(),
        sampling=sampling,
        beams=beams,
        length_penalty=length_penalty,
        adapters=adapter_places(adapter or ()),
        tokenizer={} if tokenizer is None else {"tokenizer": tokenizer, **named},
        engine=EngineOptions(
            requests=64 if input_file is not None or num_samples else max(1, beams), batch_invariant=batch_invariant
        ),
        tp=tp,
        pp=pp,
        dtype=dtype,
        device=device,
    )
    return _start(plan, nproc, tp * pp)


def _check_files(input_file: Path | None, output: Path | None, named: Mapping[str, str], tokenizer: str | None) -> None:
    """Errors: ValueError naming a file that is not there, or that cannot be one, before anything heavy is loaded."""
    if output is not None:
        check_file("--output", str(output))
    if input_file is not None and not input_file.is_file():
        raise ValueError(f"--input {input_file}: no such file")
    for name, value in named.items():
        if not Path(value).exists():
            raise ValueError(f"--{name.replace('_', '-')} {value}: no such file")
    if named and tokenizer is None:
        raise ValueError(f"--{next(iter(named)).replace('_', '-')}: needs --tokenizer, its kind")


def _start(plan: object, nproc: int | None, size: int) -> int:
    """The ranks that the layout takes: those of a launcher, or local ones."""
    from mega.core.config.world import ranks, world_from_env
    from mega.core.inference.speak import open_speech, speak

    world = world_from_env()
    found = ranks(world, size if nproc is None and world.source == "alone" else nproc)
    if found != size:
        raise ValueError(f"--tp x --pp = {size}: must be the number of ranks, {found}")
    if world.source == "alone" and size > 1:
        open_speech(plan)  # type: ignore[arg-type]  # a mistake in a file is reported once, before any rank starts
        from mega.core.parallel.launch import launch

        return launch(size, speak, plan)
    return speak(plan)  # type: ignore[arg-type]


def _ask(
    url: str,
    prompt: str | None,
    tokens: int,
    excluded: Mapping[str, object],
    sampling: Mapping[str, float],
    beams: tuple[int, float],
) -> int:
    """Have a server continue the prompt, or those that are typed. Errors: ValueError for what it cannot be asked."""
    from mega.core.inference.client import ask, converse, fields_of

    for flag, value in excluded.items():
        if value is not None:
            raise ValueError(f"{flag}: excludes --url {url}, which asks a server's PUT /api")
    fields = fields_of(sampling, *beams)
    if prompt is None:
        converse(url, fields)
    else:
        print(ask(url, prompt, tokens, **fields))
    return 0
