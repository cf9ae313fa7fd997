"""`mega generate`: a model's continuation of a text, of a file of texts, or of what is typed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mega.core.files import check_file, check_source

TensorRanks = Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", help="tensor-parallel ranks", min=1)]
PipelineStages = Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", help="pipeline stages", min=1)]
ComputeDtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option("--dtype", help="computed in [fp32 on a CPU, else the weights' own]"),
]
DeviceKind = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="where tensors live")]
Graphs = Annotated[
    bool | None,
    typer.Option("--cuda-graph/--no-cuda-graph", help="a GPU computes by recorded graphs [on]"),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=DIR", help='adapter; rows of --input may choose by "adapter" [the first]'),
]
NullEnd = Annotated[
    bool, typer.Option("--null-eod-last", help="the last of those ids ends a document; else one more does")
]
NoTemplate = Annotated[
    str | None, typer.Option("--chat-template", help="refused: mega serve answers by a chat template")
]
Fp8Weights = Annotated[
    bool, typer.Option("--fp8-weights", help="linear layers keep their weights in 8 bits, a scale an output")
]

BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="a text does not depend, to the bit, on what is generated with it")
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate", metavar="ngram|DIR", help="guess tokens ahead from the text itself or by a small model [off]"
    ),
]

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
    unconditional: Annotated[
        bool,
        typer.Option("--unconditional", help="of --num-samples: rows also have all_text and id, as Megatron-LM's"),
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", "--out-seq-length", help="most tokens to add", min=1)] = 100,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 takes the likeliest token [1]")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="as --temperature 0")] = False,
    top_k: Annotated[int | None, typer.Option("--top-k", "--top_k", help="draw from the k likeliest [0: off]")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", "--top_p", help="draw from the likeliest that make up p [1: off]")
    ] = None,
    top_p_decay: Annotated[float | None, typer.Option("--top-p-decay", help="of top-p by each token [0: off]")] = None,
    top_p_bound: Annotated[float | None, typer.Option("--top-p-bound", help="where that decay ends [0]")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="least share of the likeliest's chance [0]")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="make tokens of the text less likely; 1 is off [1]")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="the same seed gives the same text [0]")] = None,
    beams: Annotated[
        int, typer.Option("--beams", "--beam-width", help="beam search of this width; 0 draws", min=0, max=128)
    ] = 0,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="of beams: scores are divided by length ** this [1]")
    ] = None,
    adapter: Adapters = None,
    tp: TensorRanks = 1,
    pp: PipelineStages = 1,
    nproc: Annotated[int | None, typer.Option("--nproc", help="local ranks to start [tp x pp]", min=1)] = None,
    dtype: ComputeDtype = None,
    batch_invariant: BatchInvariant = False,
    cuda_graph: Graphs = None,
    fp8_weights: Fp8Weights = False,
    speculate: Speculate = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="kind of tokenizer [the checkpoint's]")] = None,
    tokenizer_model: Annotated[str | None, typer.Option("--tokenizer-model", help="its model file")] = None,
    vocab_file: Annotated[str | None, typer.Option("--vocab-file", help="its vocabulary file")] = None,
    merge_file: Annotated[str | None, typer.Option("--merge-file", help="its BPE merges file")] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", help="of NullTokenizer, its ids", min=1)] = None,
    null_eod_last: NullEnd = False,
    chat_template: NoTemplate = None,
    device: DeviceKind = "auto",
) -> int:
    """Continue a text with a trained model, any checkpoint of any layout: one text, a file of them, or what is typed.

    With neither --prompt, --input nor --num-samples it asks for prompts at a terminal. Several ranks by --tp and --pp,
    alone or under a launcher.
    """
    drawn = (temperature, top_k, top_p, top_p_decay, top_p_bound, min_p, repetition_penalty, seed)
    typed = {name: value for name, value in zip(_DRAWN, drawn, strict=True) if value is not None}
    _check_search([*(["greedy"] if greedy else []), *typed], beams, length_penalty)
    typed |= {"temperature": 0.0} if greedy else {}
    files = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    if url is not None:
        others: dict[str, object] = {"load": load, "input": input_file, "output": output, "adapter": adapter}
        others |= {"num_samples": num_samples, "unconditional": unconditional, "min_p": typed.pop("min_p", 0)}
        others |= {"repetition_penalty": typed.pop("repetition_penalty", 1) != 1}
        others |= {"tp": tp > 1, "pp": pp > 1, "nproc": nproc, "dtype": dtype, "batch_invariant": batch_invariant}
        others |= {"fp8_weights": fp8_weights, "speculate": speculate}
        others |= {"cuda_graph" if cuda_graph else "no_cuda_graph": cuda_graph is not None}
        others |= {"tokenizer": tokenizer, **files, "device": device != "auto"}
        return _ask(url, prompt, tokens, others, typed, (beams, length_penalty))
    check_graphs(cuda_graph, device, batch_invariant, adapter)
    _check_template(chat_template, load)
    if load is None:
        raise ValueError("--load is missing: give a run's directory, or --url")
    check_source("--load", load)
    asks = _check_texts(prompt, input_file, num_samples, output)
    if unconditional and not num_samples:
        raise ValueError("--unconditional: needs --num-samples, the number of texts")
    named = _tokenizer_options(tokenizer, files, vocab_size, null_eod_last)
    from mega.core.inference.request import sampling_of

    sampling = sampling_of(**{"seed": 0, **typed, "top_p": top_p or 1.0})
    from mega.core.inference.adapters import adapter_paths
    from mega.core.inference.opening import EngineOptions
    from mega.core.inference.speak import SpeechPlan, open_speech, speak
    from mega.core.processes.launch import run_ranks

    plan = SpeechPlan(
        load=load,
        tokens=tokens,
        prompt=prompt,
        input=input_file,
        output=output,
        samples=num_samples,
        unconditional=unconditional,
        interactive=asks and sys.stdin.isatty() and sys.stdout.isatty(),
        sampling=sampling,
        beams=beams,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        adapters=adapter_paths(adapter or ()),
        tokenizer=named,
        engine=EngineOptions(
            requests=max(64 if input_file is not None or num_samples else 1, beams),
            batch_invariant=batch_invariant,
            graphs=cuda_graph,
            fp8_weights=fp8_weights,
            speculate=checked_speculation(speculate, batch_invariant),
        ),
        tp=tp,
        pp=pp,
        dtype=dtype,
        device=device,
    )
    return run_ranks(tp * pp, speak, plan, nproc=nproc, first=partial(open_speech, plan))


_DRAWN = ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "min_p", "repetition_penalty", "seed")
"""Fields of sampling that are flags."""


def check_graphs(cuda_graph: bool | None, device: str, batch_invariant: bool, adapter: Sequence[str] | None) -> None:
    """Errors: ValueError naming the flags that exclude each other."""
    others = {"--batch-invariant": batch_invariant, "--adapter": adapter, "--device cpu": device == "cpu"}
    for flag, given in others.items():
        if cuda_graph and given:
            raise ValueError(f"--cuda-graph: excludes {flag}")


def checked_speculation(speculate: str | None, batch_invariant: bool) -> str | None:
    """Errors: ValueError where there is no such model, or steps of one size are asked for."""
    if speculate is not None and batch_invariant:
        raise ValueError(f"--speculate {speculate}: excludes --batch-invariant")
    if speculate is not None and speculate != "ngram" and not Path(speculate).exists():
        raise ValueError(f"--speculate {speculate}: no such model; valid: ngram, or a model's directory")
    return speculate


def _check_texts(prompt: str | None, input_file: Path | None, num_samples: int, output: Path | None) -> bool:
    """Whether prompts are to be asked for. Errors: ValueError where they come from two places, or no file is there."""
    if prompt is not None and any("\ud800" <= sign <= "\udfff" for sign in prompt):
        raise ValueError("--prompt: is not UTF-8")
    modes = {"--prompt": prompt is not None, "--input": input_file is not None, "--num-samples": num_samples > 0}
    given = [flag for flag, value in modes.items() if value]
    if len(given) > 1:
        raise ValueError(f"{given[0]}: excludes {given[1]}")
    if output is not None and (prompt is not None or not given):
        raise ValueError(f"--output {output}: needs --input or --num-samples")
    if output is not None:
        check_file("--output", str(output))
    if input_file is not None and not input_file.is_file():
        pipe = str(input_file) == "-" or input_file.exists()
        raise ValueError(f"--input {input_file}: {'must be a file, no pipe or folder' if pipe else 'no such file'}")
    return not given


def _tokenizer_options(
    kind: str | None, files: Mapping[str, str | None], vocab_size: int | None, null_eod_last: bool
) -> dict[str, Any]:
    """Those that were given; none: the model's own tokenizer. Errors: ValueError where a file is not there, or the kind
    is missing or another."""
    named = {name: value for name, value in files.items() if value is not None}
    if named and kind is None:
        raise ValueError(f"--{next(iter(named)).replace('_', '-')}: needs --tokenizer, its kind")
    for name, value in named.items():
        if not Path(value).exists():
            raise ValueError(f"--{name.replace('_', '-')} {value}: no such file")
    if kind != "NullTokenizer" and (vocab_size is not None or null_eod_last):
        flag = "--null-eod-last" if vocab_size is None else "--vocab-size"
        raise ValueError(f"{flag}: needs --tokenizer NullTokenizer")
    of_null = {"vocab_size": vocab_size, "null_eod_last": null_eod_last}
    return {} if kind is None else {"tokenizer": kind, **named, **of_null}


def _check_template(chat_template: str | None, load: Path | None) -> None:
    """Errors: ValueError where one is given, by which nothing here goes."""
    from mega.core.text.identity import judge

    if chat_template is not None:
        difference = f"--chat-template {chat_template}: mega generate continues text as it is, without a template"
        advice = f"leave it out, or give it to mega serve {load or 'CHECKPOINT'}, which answers conversations"
        judge("generate", "template", difference, advice=advice)


def _check_search(sampled: Sequence[str], beams: int, length_penalty: float | None) -> None:
    """Errors: ValueError for a flag that was given and has no effect: of drawing with beams, of beams without them."""
    if beams and sampled:
        flag = sampled[0].replace("_", "-")
        raise ValueError(f"--{flag}: has no effect with --beams {beams}, which draws nothing; leave one of them out")
    if length_penalty is not None and not beams:
        raise ValueError(f"--length-penalty {length_penalty}: needs --beams")


def _ask(
    url: str,
    prompt: str | None,
    tokens: int,
    excluded: Mapping[str, object],
    sampling: Mapping[str, float],
    beams: tuple[int, float | None],
) -> int:
    """Have a server continue the prompt, or those that are typed. excluded: name of a flag -> whether it was given.
    Errors: ValueError for what it cannot be asked."""
    from mega.core.inference.client import ask, converse, fields_of

    for name, value in excluded.items():
        if value:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: excludes --url {url}, which asks a server's PUT /api")
    fields = fields_of(sampling, *beams)
    if prompt is None:
        converse(url, fields)
    else:
        print(ask(url, prompt, tokens, **fields))
    return 0
