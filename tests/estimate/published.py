"""Published runs of Megatron-LM: what was trained, on what, and how fast. Sources beside each table.

They are another program's kernels, so they are no rows of ours: `megatron_seconds` prices the operations of this
trainer's blocks with what that program did otherwise, on an A100 whose shares were fitted to these rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mega.core.config.compose import compose
from mega.core.config.resolve import data_parallel, microbatches, resolve
from mega.core.config.run import RunConfig, updated
from mega.core.config.sections import ModelConfig
from mega.core.estimate.chunks import stage_chunks
from mega.core.estimate.cost import (
    AttentionWork,
    ChunkOperations,
    ElementwiseWork,
    Gemm,
    Operation,
    Units,
    chunk_pass,
)
from mega.core.estimate.hardware import Hardware, hardware
from mega.core.estimate.operations import operations
from mega.core.estimate.steptime import Times, pipeline_time
from mega.core.estimate.weights import stage_weights


class Utilisation(NamedTuple):
    """seconds and mfu of an iteration with selective recompute; full: seconds with full recompute."""

    preset: str
    tp: int
    pp: int
    chunks: int
    gpus: int
    batch: int
    micro: int
    full: float
    seconds: float
    mfu: float


# Korthikanti et al. 2022, arXiv 2205.05198, table 5: A100, sequence parallelism, vocabulary 51200
UTILISATION = [
    Utilisation("gpt-22b", 8, 1, 1, 8, 4, 4, 1.42, 1.10, 41.5),
    Utilisation("gpt-175b", 8, 8, 3, 64, 64, 1, 18.13, 13.75, 51.4),
    Utilisation("gpt-530b", 8, 35, 3, 280, 280, 1, 49.05, 37.83, 56.0),
    Utilisation("gpt-1t", 8, 64, 1, 512, 512, 1, 94.42, 71.49, 56.3),
]


class Scaling(NamedTuple):
    """tflops: per GPU, recomputation counted. chunks: model chunks of a rank."""

    preset: str
    tp: int
    pp: int
    chunks: int
    micro: int
    batch: int
    gpus: int
    tflops: int


# Narayanan et al. 2021, arXiv 2104.04473, table 1: A100, fp16, every block computed again
SCALING = [
    Scaling("gpt-1.7b", 1, 1, 1, 16, 512, 32, 137),
    Scaling("gpt-3.6b", 2, 1, 1, 16, 512, 64, 138),
    Scaling("gpt-7.5b", 4, 1, 1, 16, 512, 128, 142),
    Scaling("gpt-18b", 8, 1, 1, 8, 1024, 256, 135),
    Scaling("gpt-39b", 8, 2, 1, 4, 1536, 512, 138),
    Scaling("gpt-76b", 8, 4, 3, 2, 1792, 1024, 140),
    Scaling("gpt-145b", 8, 8, 2, 2, 2304, 1536, 148),
    Scaling("gpt-310b", 8, 16, 2, 1, 2160, 1920, 155),
    Scaling("gpt-530b", 8, 35, 3, 1, 2520, 2520, 163),
    Scaling("gpt-1t", 8, 64, 1, 1, 3072, 3072, 163),
]

FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}


def utilisation_run(row: Utilisation, full: bool) -> RunConfig:
    typed = {"tp": row.tp, "pp": row.pp, "chunks": row.chunks, "micro_batch": row.micro, "global_batch": row.batch}
    again = {**FULL, "sequence_parallel": False} if full else {"recompute": "selective", "sequence_parallel": True}
    again["tp_overlap"] = False
    return resolve(compose(row.preset, flags={**typed, **again, "dtype": "fp16"}), row.gpus)


def scaling_run(row: Scaling) -> RunConfig:
    typed = {"tp": row.tp, "pp": row.pp, "chunks": row.chunks, "micro_batch": row.micro, "global_batch": row.batch}
    return resolve(compose(row.preset, flags={**typed, **FULL, "dtype": "fp16"}), row.gpus)


def gpt3_run() -> RunConfig:
    """Megatron-LM's example script for 175 billion parameters on 1024 devices."""
    typed = {"tp": 8, "pp": 16, "micro_batch": 1, "global_batch": 1536, "vocab": 51200, "dtype": "fp16"}
    return resolve(compose("gpt3-175b", flags={**typed, **FULL}), 1024)


def plain_attention(work: AttentionWork) -> list[Operation]:
    """Attention that writes its matrices out: scores, softmax, dropout and values, each in passes of its own."""
    _, backward, rows, s, t, width, _ = work
    scores = 2 * rows * s * t
    product = Gemm(s, width, t, "forward", "fp16", 2 * rows * (s * width + width * t) + scores, rows)
    if backward:
        return [product] * 4 + [ElementwiseWork("softmax", 3 * scores), ElementwiseWork("dropout", 2 * scores)]
    return [product] * 2 + [ElementwiseWork("softmax", 2 * scores), ElementwiseWork("dropout", 2 * scores)]


def _plain(units: Units) -> Units:
    return tuple(
        tuple(one for work in unit for one in (plain_attention(work) if isinstance(work, AttentionWork) else [work]))
        for unit in units
    )


def megatron_seconds(run: RunConfig, world: int, on: Hardware) -> float:
    """A step of Megatron-LM of 2021.

    Its attention is plain, and selective recomputation repeats it. A rank computes nothing during an exchange between
    stages, or while gradients are summed.
    """
    parallel, dp = run.parallel, data_parallel(run, world)
    selective = run.memory.recompute == "selective"
    traced = updated(run, {"recompute": "none"}) if selective else run
    stages, times = stage_chunks(run), Times(run, on, recorded=True)
    hop = times.hop(parallel.tp * parallel.cp * dp)
    passes = {}
    for chunk in {chunk for stage in stages for chunk in stage}:
        found = operations(traced, chunk)
        cores = tuple(tuple(work for work in unit if isinstance(work, AttentionWork)) for unit in found.forward)
        again = cores if selective else ()
        backward = _plain(found.backward) + _plain(again)
        made = ChunkOperations(_plain(found.forward), backward, (), found.cargo)
        taken = chunk_pass(made, on, recorded=True)
        passes[chunk] = replace(taken, forward=taken.forward + hop, backward=taken.backward + hop)
    chunks = [passes[stage[number]] for number in range(parallel.chunks) for stage in stages]
    pipeline, _ = pipeline_time(run, chunks, microbatches(run, world), 0.0)
    held = [stage_weights(run, dp, stage) for stage in stages]
    reduction = max(times.reduction(dp, one) for one in held)
    return pipeline + reduction + max(times.update(dp, one, 0.0) for one in held)


def published_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """Operations of one step of `batch` samples: 72 B L s h^2 (1 + s/6h + V/12hL); Korthikanti et al. 2022.

    For a GPT whose feed-forward layer is 4 h wide; the numerator of the published model utilisations.
    """
    layers, hidden, vocab = _shape(model)
    return 72.0 * batch * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))


def recomputed_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """The same with every block's forward run twice: 96 B s L h^2 (1 + s/6h + V/16Lh); Narayanan et al. 2021."""
    layers, hidden, vocab = _shape(model)
    return 96.0 * batch * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * hidden * layers))


def _shape(model: ModelConfig) -> tuple[int, int, int]:
    assert model.layers and model.hidden and model.vocab, "resolve the model first"
    return model.layers, model.hidden, model.vocab


def tables() -> str:
    """The tables of docs/planning.md, as Markdown."""
    on = hardware("a100")
    lines = [
        "| model | GPUs | recompute | published, s | predicted, s | published MFU | predicted MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in UTILISATION:
        for full in (False, True):
            run = utilisation_run(row, full)
            seconds = row.full if full else row.seconds
            ours = megatron_seconds(run, row.gpus, on)
            share = published_flops(run.model, row.batch, 2048) / row.gpus / 312e12
            lines.append(
                f"| {row.preset} | {row.gpus} | {'full' if full else 'selective'} | {seconds:.2f} | {ours:.2f} "
                f"| {share / seconds:.1%} | {share / ours:.1%} |"
            )
    lines += ["", "| model | GPUs | published, TFLOP/s per GPU | predicted | difference |", "|---|---|---|---|---|"]
    for line in SCALING:
        run = scaling_run(line)
        seconds = megatron_seconds(run, line.gpus, on)
        rate = recomputed_flops(run.model, line.batch, 2048) / seconds / line.gpus / 1e12
        lines.append(f"| {line.preset} | {line.gpus} | {line.tflops} | {rate:.0f} | {rate / line.tflops - 1:+.1%} |")
    seconds = megatron_seconds(gpt3_run(), 1024, on)
    lines += [
        "",
        f"GPT-3 175B on 1024 A100 (tp 8, pp 16, batch 1536): about 32 s published, {seconds:.1f} s predicted.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
