"""Published runs: what was trained, on what, and how fast. Sources beside each table."""

from __future__ import annotations

from typing import NamedTuple

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.estimate.hardware import hardware
from mega.core.estimate.steptime import step_time


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
    return resolve(compose(row.preset, flags={**typed, **again, "dtype": "fp16"}), row.gpus)


def scaling_run(row: Scaling) -> RunConfig:
    typed = {"tp": row.tp, "pp": row.pp, "chunks": row.chunks, "micro_batch": row.micro, "global_batch": row.batch}
    return resolve(compose(row.preset, flags={**typed, **FULL, "dtype": "fp16"}), row.gpus)


def gpt3_run() -> RunConfig:
    """Megatron-LM's example script for 175 billion parameters on 1024 devices."""
    typed = {"tp": 8, "pp": 16, "micro_batch": 1, "global_batch": 1536, "vocab": 51200, "dtype": "fp16"}
    return resolve(compose("gpt3-175b", flags={**typed, **FULL}), 1024)


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
        "| model | GPUs | recompute | theirs, s | ours, s | their MFU | our MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in UTILISATION:
        for full in (False, True):
            run = utilisation_run(row, full)
            seconds = row.full if full else row.seconds
            ours = step_time(run, row.gpus, on, overlap=False, core_again=True).seconds
            share = published_flops(run.model, row.batch, 2048) / row.gpus / 312e12
            lines.append(
                f"| {row.preset} | {row.gpus} | {'full' if full else 'selective'} | {seconds:.2f} | {ours:.2f} "
                f"| {share / seconds:.1%} | {share / ours:.1%} |"
            )
    lines += ["", "| model | GPUs | theirs, TFLOP/s per GPU | ours | difference |", "|---|---|---|---|---|"]
    for line in SCALING:
        run = scaling_run(line)
        seconds = step_time(run, line.gpus, on, overlap=False).seconds
        rate = recomputed_flops(run.model, line.batch, 2048) / seconds / line.gpus / 1e12
        lines.append(f"| {line.preset} | {line.gpus} | {line.tflops} | {rate:.0f} | {rate / line.tflops - 1:+.1%} |")
    seconds = step_time(gpt3_run(), 1024, on, overlap=False).seconds
    lines += [
        "",
        f"GPT-3 175B on 1024 A100 (tp 8, pp 16, batch 1536): about 32 s published, {seconds:.1f} s predicted.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
