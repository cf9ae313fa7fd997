"""Messages before the first step: the model, layout, device, length and outputs of a run and, after a resume, the
differences from the checkpoint. Lines have at most 120 columns, except with a long path. This module only reports; it
does not make decisions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from mega.core.architecture import architecture, inventory
from mega.core.architecture.layer import Attention
from mega.core.architecture.words import parameter_words, shape_words
from mega.core.config.resolve import (
    data_parallel,
    lengths,
    microbatches,
    no_overlap_reason,
    overlap_resumes,
    records_graph,
    text_lengths,
)
from mega.core.config.retriever import retriever_words
from mega.core.config.run import RunConfig
from mega.core.data.build import Datasets
from mega.core.device import DTYPES, Device
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask, Kind
from mega.core.ops.suite import Ops, attention_advice, attention_words
from mega.core.processes.connect import threads
from mega.core.training.saves.resume import ResumePoint, overlapped_before
from mega.core.training.start.continuation import differing, nothing_left
from mega.core.training.start.inputs import Inputs
from mega.core.training.state import Progress, TrainState
from mega.core.training.wire import chosen_ops, tflops16
from mega.core.words import count_words


def introduce(
    inputs: Inputs,
    point: ResumePoint | None,
    state: TrainState,
    steps: int,
    report: Callable[[str], None],
    saved: int | None = None,
) -> None:
    """Print the messages before the first step. steps: index of the last step. report: function that prints a message.
    saved: the step of the checkpoint, if the run has resumed from a later step in memory."""
    run = inputs.run
    for note in (*inputs.notes, *inputs.datasets.example):
        report(note)
    for line in device_notes(run, state.device, state.mesh.world):
        report(line)
    if run.parallel.tp > 1 and (state.device.is_cuda or state.overlaps):
        refusal = no_overlap_reason(run, tflops16(state.device.torch))
        report(overlap_note(run, state.overlaps, overlapped_before(run, point), refusal))
    for line in summary(run, state.device, chosen_ops(run, state.device.torch), state.mesh.world):
        report(line)
    if not run.evaluation.skip_train:
        report(_length(run, inputs.datasets, state.progress, steps))
        report(_outputs(run))
    if point is None:
        return
    step = state.progress.step if saved is None else saved
    device = state.device
    for line in differing(inputs, point, state.mesh, device.threads, device.is_cuda, state.overlaps, step):
        report(line)
    if state.progress.step >= steps:
        report(nothing_left(steps))


def expert_axes(run: RunConfig) -> list[str]:
    """Return the sizes of the expert-parallel axes. These axes reuse the ranks of other axes, so they add no ranks."""
    sizes = {"ep": run.parallel.ep, "etp": run.parallel.etp}
    return [f"{name} {size}" for name, size in sizes.items() if size > 1 and run.model.experts]


def summary(run: RunConfig, device: Device, ops: Ops, world: int) -> Iterator[str]:
    """Yield messages about the model, the layout, the device, the operators and the batch."""
    yield f"model: {shape_words(architecture(run.model))}; {parameter_words(run.model)}"
    if (adapters := architecture(run.model).adapters) is not None:
        trained, all_of = (
            sum(tensor.elements for tensor in inventory(run.model) if tensor.trainable or not alone)
            for alone in (True, False)
        )
        share = f"{count_words(trained)} of {count_words(all_of)} parameters, {trained / all_of:.2%}"
        yield f"trained: adapters of rank {adapters.rank} alone: {share}"
    if run.model.retriever:
        yield f"neighbours: {retriever_words(run.model)}"
    parallel, dp = run.parallel, data_parallel(run, world)
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "dp": dp, "pp": parallel.pp}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    extras = ["sequence parallel"] if parallel.sequence_parallel else []
    extras += [f"schedule {parallel.schedule}"] if parallel.pp > 1 else []
    extras += [f"ZeRO {parallel.zero}"] if parallel.zero else []
    extras += expert_axes(run)
    yield f"layout: {'; '.join([f'{world} ranks: {layout}' if world > 1 else '1 rank', *extras])}"
    precision = run.precision
    dtype = precision.dtype + (f", matmuls in fp8, one scale per {precision.fp8_scaling}" if precision.fp8 else "")
    device_words = device.name if device.is_cuda else f"CPU, {_counted(threads(world), 'thread')} a rank"
    backend = f", {device.backend}" if world > 1 else ""
    yield f"device: {device_words}{backend}; dtype {dtype}"
    length, attention = text_lengths(run)[0], architecture(run.model).block.attention
    rows = ops, _mask(run, attention, length), DTYPES[precision.dtype], length, attention.head_dim
    yield f"operators: {ops.name} ({ops.reason}); attention: {attention_words(*rows)}; matmuls: {ops.matmuls.words}"
    if advice := attention_advice(*rows):
        yield advice
    batch = run.batch
    tokens = batch.global_batch * sum(text_lengths(run))
    yield (
        f"batch: {batch.global_batch:,} x {sum(text_lengths(run)):,} = {tokens:,} tokens a step; micro batch "
        f"{batch.micro_batch}, {_counted(microbatches(run, world), 'microbatch')} a rank"
    )


def _mask(run: RunConfig, attention: Attention, length: int) -> AttentionMask:
    """Return the attention mask for training. Encoders use document indices to separate tokens from padding."""
    numbers = torch.empty(1, length, dtype=torch.int64, device="meta")
    documents = numbers if run.data.reset_attention or not attention.causal else None
    dropout = None
    if attention.dropout:
        dropout = AttentionDropout(numbers, 0, 0, (range(length),), attention.dropout)
    kind: Kind = "causal" if attention.causal else "full"
    return AttentionMask(
        kind,
        attention.window,
        q_documents=documents,
        k_documents=documents,
        dropout=dropout,
        softcap=attention.softcap,
    )


def _length(run: RunConfig, data: Datasets, progress: Progress, steps: int) -> str:
    """Return the message about the length of the run: steps, tokens, and epochs if the size of the training set is
    known."""
    samples, tokens = lengths(run).samples, run.runtime.exit_tokens
    if tokens is not None:
        samples = min(samples, -(-tokens // run.batch.seq_length))
    words = f"length: {_counted(steps, 'step')}, {count_words(samples * sum(text_lengths(run)))} tokens"
    if data.one_pass:
        words += f", {samples / data.one_pass:.3g} epochs of the training data"
    return words if not progress.step else f"{words}; {progress.step:,} steps are done"


def _outputs(run: RunConfig) -> str:
    """Return the message about checkpoints and metrics."""
    checkpoint, log = run.checkpoint, run.log
    answers = f", and at port {log.metrics_port} (/metrics, /health)" if log.metrics_port else ""
    board = f", TensorBoard in {log.tensorboard_dir}" if log.tensorboard_dir else ""
    metrics_words = f"metrics in {log.metrics}{answers}{board}"
    if checkpoint.save is None:
        return f"saves: nothing; {metrics_words}"
    often = f" every {_counted(checkpoint.save_interval, 'step')}, and at the end" if checkpoint.save_interval else ""
    metrics = os.path.join(checkpoint.save, "metrics.jsonl")
    return (
        f"saves: in {checkpoint.save}{often or ' at the end'}; {metrics_words.replace(metrics, 'metrics.jsonl there')}"
    )


def device_notes(run: RunConfig, device: Device, world: int) -> Iterator[str]:
    """Yield messages about settings that are slow on a GPU, and about CUDA graphs."""
    if not device.is_cuda:
        return
    if run.precision.dtype == "fp32":
        yield (
            "precision: fp32, which no tensor core multiplies; --dtype bf16 is several times faster and halves the "
            "activations (mega memory-estimate --gpu NAME shows both)"
        )
    recorded, cuda_graph = records_graph(run, world), run.runtime.cuda_graph
    reason = "as asked" if cuda_graph is not None else "as blocks are small" if recorded else "as it would not help"
    if cuda_graph is None and not recorded and (run.parallel.pp > 1 or run.parallel.zero > 1):
        reason = "which --pp and --zero 2 and 3 exclude"
    yield f"micro batches: {'replayed from a recorded graph' if recorded else 'launched kernel by kernel'}, {reason}"


def overlap_note(run: RunConfig, overlaps: bool, overlapped: bool | None, refusal: str | None) -> str:
    """Return the message about the exchanges between tensor ranks (--tp-overlap). overlaps: whether the exchanges
    overlap GEMMs. overlapped: result of `overlapped_before`. refusal: result of `no_overlap_reason`."""
    if run.parallel.tp_overlap is not None:
        reason = "as asked"
    elif overlapped == overlaps and (overlaps or refusal is None):
        reason = "as in the checkpoint"
    elif overlaps:
        reason = "as this is faster on GPUs that can map each other's memory"
    elif refusal is None or overlap_resumes(run, overlapped):
        reason = "as ranks cannot map each other's memory"
    else:
        reason = refusal
    return f"exchanges of tensor ranks: {'overlap' if overlaps else 'do not overlap'} GEMMs, {reason}"


def _counted(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> _counted(1, "step"), _counted(2000, "microbatch")
    ('1 step', '2,000 microbatches')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
