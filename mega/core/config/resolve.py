"""Derive the values of options that are not given. All other code reads these values from the resolved run.

`resolve` makes a run from options, a world size and a vocabulary size. `resolve` checks only that sizes are given;
`config/check.py` contains all other rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf, isqrt, lcm
from typing import Any

from mega.core.config.faults import fault
from mega.core.config.option import Section
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.run import AnyRun, Options, RunConfig, flag_of, updated
from mega.core.config.sections import (
    GATED,
    LABELLED,
    BatchConfig,
    BatchOptions,
    Dtype,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    ParallelOptions,
    PrecisionConfig,
    PrecisionOptions,
    ScheduleConfig,
    TokenizerConfig,
)
from mega.core.files import url_of
from mega.core.plan.layers import split_layers


def resolve(options: Options, world: int, vocab: int | None = None) -> RunConfig:
    """Return the run of `options` on `world` ranks. vocab: the tokenizer's vocabulary size, used if `options` has none.

    Errors: ValueError naming a size that is not given.

    >>> sizes = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 9, "seq_length": 16, "micro_batch": 3}
    >>> run = resolve(updated(Options(), sizes), world=4)
    >>> run.batch.global_batch, run.model.ffn
    (12, 32)
    """
    model, evaluation = model_alone(options, vocab), options.evaluation
    return RunConfig(
        model=model,
        precision=_precision(options.precision),
        parallel=_parallel(options.parallel, model),
        batch=_batch(options.batch, data_parallel(options, world)),
        optimizer=options.optimizer,
        schedule=_schedule(options),
        memory=options.memory,
        # api/training.py replaces auto with the template stored with the weights; without weights, auto means plain.
        data=replace(options.data, chat_template="plain") if options.data.chat_template == "auto" else options.data,
        masking=options.masking,
        finetuning=options.finetuning,
        tokenizer=implied_tokenizer(options.tokenizer, model.family),
        evaluation=replace(evaluation, eval_iters=max(0, evaluation.eval_iters)),
        checkpoint=options.checkpoint,
        log=LogConfig(**_unchanged_fields(options.log, LogConfig), metrics=metrics_file(options)),
        guards=options.guards,
        runtime=options.runtime,
        supervision=options.supervision,
    )


def profiled_steps(text: str) -> range | None:
    """Parse the value of --profile, and return the steps, or None if the text is invalid.

    >>> profiled_steps("10:12"), profiled_steps("7"), profiled_steps("3:1")
    (range(10, 13), range(7, 8), None)
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal()) or not 1 <= int(first) <= int(last or first):
        return None
    return range(int(first), int(last or first) + 1)


def variant(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy of `run` with other `values` for some options. Values derived from these options are kept; a value
    of None derives an option again.

    >>> from mega.core.config.compose import compose
    >>> fp16 = resolve(compose("tiny-gpt", flags={"vocab": 9, "micro_batch": 1, "dtype": "fp16"}), 1)
    >>> variant(fp16, {"dtype": "bf16", "grad_dtype": None}).precision.grad_dtype
    'fp32'
    """
    return resolve(
        updated(Options(**vars(run)), values), world=1
    )  # only the batch depends on the world size, and the batch is already resolved


def model_alone(options: Options, vocab: int | None = None) -> ModelConfig:
    """Resolve only the model section of a run. vocab: the vocabulary size, used if `options` has none.

    Errors: ValueError naming a size that is not given.

    >>> from mega.core.config.compose import compose
    >>> model_alone(compose("llama2-7b", flags={})).head_dim
    128
    """
    model, longest = options.model, options.batch.seq_length
    layers, hidden, heads = (_required(getattr(model, name), name) for name in ("layers", "hidden", "heads"))
    decoder_layers = model.decoder_layers
    if FAMILY_DEFAULTS[model.family].stacks > 1:
        decoder_layers = decoder_layers or layers
        # Encoder and decoder share the position embeddings, whose number must cover the longer text.
        longest = longest and max(longest, options.masking.decoder_seq_length)
    unchanged = {**_unchanged_fields(model, ModelConfig), "decoder_layers": decoder_layers}
    resolved = ModelConfig(
        **unchanged,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if model.kv_heads is None else model.kv_heads,
        head_dim=model.head_dim or hidden // heads,
        ffn=model.ffn or (gated_ffn(hidden) if model.activation in GATED else 4 * hidden),
        vocab=_required(vocab if model.vocab is None else model.vocab, "vocab"),
        positions=_required(longest if model.positions is None else model.positions, "positions"),
        qkv_bias=model.bias if model.qkv_bias is None else model.qkv_bias,
    )
    return with_head(resolved, options.finetuning.task)


def microbatch_rows(run: RunConfig) -> int:
    """Return the number of token rows in one microbatch: one row per sample, two per pair of answers, or one per
    choice."""
    head, choices = LABELLED.get(run.finetuning.task, ("classification", 1))
    return run.batch.micro_batch * (2 if run.finetuning.task == "dpo" else choices if head == "choice" else 1)


def with_head(model: ModelConfig, task: str) -> ModelConfig:
    """Return the model with the head that a labelled task needs; the same model if `task` has no labels or the model's
    family has no head for labels."""
    if task not in LABELLED or not FAMILY_DEFAULTS[model.family].classifies:
        return model
    head, classes = LABELLED[task]
    return replace(model, head=head, classes=classes)


def epoch_steps(run: RunConfig) -> int | None:
    """Return the number of steps in one epoch; None unless the run's length is given in epochs and the number of steps
    is resolved."""
    steps, epochs = run.batch.steps, run.finetuning.epochs
    return None if steps is None or epochs is None else steps // epochs


def data_parallel(run: AnyRun, world: int) -> int:
    """Return the size of the dp axis: the world size divided by tp x pp x cp.

    >>> data_parallel(updated(Options(), {"tp": 2, "pp": 2}), world=8)
    2
    """
    return world // (run.parallel.tp * run.parallel.pp * run.parallel.cp)


def gathers_experts(run: RunConfig) -> bool:
    """Return whether all tokens are gathered on the ranks that share experts. Otherwise the ranks exchange rows, which
    moves less data if there are more ranks than experts per token."""
    return gathers_by(run, run.parallel.expert_dispatch)


def gathers_by(run: RunConfig, dispatch: str) -> bool:
    """Return the result of `gathers_experts` for another value of --expert-dispatch."""
    return run.parallel.ep <= run.model.experts_chosen if dispatch == "auto" else dispatch == "all-gather"


def column_unit(parallel: ParallelOptions) -> int:
    """Return the number by which a row's number of columns must be divisible. The columns can then be split evenly over
    ranks, into whole context chunks and whole sequence shards.

    >>> column_unit(ParallelOptions(tp=2, cp=3, sequence_parallel=True))
    6
    """
    cp, tp = parallel.cp, parallel.tp if parallel.sequence_parallel else 1
    return lcm(2 * cp, tp * cp) if cp > 1 else tp


def text_lengths(run: RunConfig) -> tuple[int, ...]:
    """Return the number of tokens in each text of a sample: one text, or the encoder's and the decoder's text."""
    if len(run.model.stacks) == 1:
        return (run.batch.seq_length,)
    return run.batch.seq_length, run.masking.decoder_seq_length


def predicted_tokens(run: RunConfig) -> int:
    """Return the number of tokens per sample for which the head computes logits: all tokens of the text, or of the
    decoder's text; for samples with masked words, the maximum number of masked tokens.

    >>> from mega.core.config.compose import compose
    >>> runs = (resolve(compose(preset, flags={"micro_batch": 1}), 1, 9) for preset in ("gpt2-345m", "bert-345m"))
    >>> [predicted_tokens(run) for run in runs]
    [1024, 77]
    """
    *_, last = text_lengths(run)
    words_alone = run.masking.sample_kind in ("bert", "tfrecords")
    return max(1, ceil(run.masking.mask_prob * last)) if words_alone else last


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [part for part in range(1, isqrt(number) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def microbatches(run: RunConfig, world: int, global_batch: int | None = None) -> int:
    """Return the number of microbatches per step on each rank of a resolved run. global_batch: replaces the run's
    global batch."""
    batch = global_batch if global_batch is not None else run.batch.global_batch
    return batch // (run.batch.micro_batch * data_parallel(run, world))


def shares_casts(run: RunConfig) -> bool:
    """Return whether the forward and backward passes of a step share fp8 casts of the weights, which need 2 bytes per
    element.

    With ZeRO 3, weights are freed during a step. A run that recomputes activations has no memory for casts.

    >>> from mega.core.config.compose import compose
    >>> flags = {"micro_batch": 1, "dtype": "bf16", "fp8": True}
    >>> runs = [resolve(compose("llama2-7b", flags={**flags, "zero": zero}), world=1) for zero in (1, 3)]
    >>> [shares_casts(run) for run in runs]
    [True, False]
    """
    return run.precision.fp8 and run.parallel.zero < 3 and run.memory.recompute == "none"


def eager_microbatches(shares: int, count: int) -> int:
    """Return how many of `count` microbatches run without a graph under --cuda-graph. shares: number of ranks that
    reduce gradients together.

    If several ranks reduce gradients, the last of several microbatches runs without a graph, because the backward pass
    of the last microbatch overlaps with the reduction.

    >>> eager_microbatches(1, 4), eager_microbatches(2, 4), eager_microbatches(2, 1)
    (0, 1, 0)
    """
    return int(shares > 1 and count > 1)


SMALL_BLOCK = 1.5e12
"""Number of floating-point operations that a current GPU performs in about 3 ms, the time in which the host launches
the kernels of a block's forward and backward pass (docs/performance.md)."""

SMALL_EXCHANGING_BLOCK = 3.5e12
"""Like SMALL_BLOCK, but for a block with exchanges between tensor ranks, which takes more than twice as long to
launch."""

MEASURED_TFLOPS = 989.0
"""The bf16 peak, in TFLOP/s, of the H100 and the H200, on which SMALL_BLOCK and SMALL_EXCHANGING_BLOCK were
measured."""


def records_graph(run: RunConfig, world: int) -> bool:
    """Return whether a resolved run captures microbatches as CUDA graphs.

    Without --cuda-graph and --no-cuda-graph, the run captures graphs if graphs support its options and a block is so
    small that the device would wait for the host. A model with experts is not captured, because the host computes the
    row counts of experts and the means over microbatches, and a graph does not replay work of the host. A run whose
    --inject damages the output of a layer is not captured either, because the damage is done by the host.

    >>> from mega.core.config.compose import compose
    >>> runs = (compose("gpt2-345m", flags={"micro_batch": each, "vocab": 50304}) for each in (1, 64))
    >>> [records_graph(resolve(run, world=1), world=1) for run in runs]
    [True, False]
    """
    if any(fault(text).target == "activation" for text in run.guards.inject):
        return False
    if run.runtime.cuda_graph is not None:
        return run.runtime.cuda_graph
    parallel, model = run.parallel, run.model
    if parallel.pp > 1 or parallel.zero > 1 or run.runtime.ops != "auto" or run.runtime.device == "cpu":
        return False
    if model.experts or model.mtp_layers:
        return False
    shares = data_parallel(run, world) * parallel.cp
    if shares > 1 and microbatches(run, world) == 1:  # a graph would reduce gradients only after the backward pass
        return False
    return _block_work(run) < (SMALL_EXCHANGING_BLOCK if parallel.tp > 1 else SMALL_BLOCK)


def _block_work(run: RunConfig) -> float:
    """Return the number of floating-point operations in the forward and backward pass of a block, for a microbatch on
    one rank."""
    parallel, model, batch = run.parallel, run.model, run.batch
    linears = 2 * (model.heads + model.kv_heads) * model.head_dim
    linears += (3 if model.activation in GATED else 2) * model.ffn
    scores = model.heads * model.head_dim * min(batch.seq_length, 2 * (model.window or batch.seq_length))
    tokens = batch.micro_batch * batch.seq_length / (parallel.tp * parallel.cp)
    return tokens * (6 * model.hidden * linears + 6 * scores)


def overlap_exclusions(run: RunConfig) -> list[str]:
    """Return the flags of a run that exclude --tp-overlap."""
    model = run.model
    parts = {
        "--fp8": run.precision.fp8,
        "--lora-rank": model.lora_rank,
        "--experts": model.experts,
        "--retriever": model.retriever,
    }
    return [flag for flag, is_set in parts.items() if is_set]


def overlap_resumes(run: RunConfig, overlapped: bool | None) -> bool:
    """Return whether a run without --tp-overlap and --no-tp-overlap keeps the overlap of the run that it resumes.
    overlapped: whether exchanges of the resumed run overlapped GEMMs; None if the run resumes none.

    >>> from mega.core.config.compose import compose
    >>> runs = [resolve(compose("gpt-22b", flags={"tp": 4, "micro_batch": 1, "fp8": fp8}), 4) for fp8 in (False, True)]
    >>> [overlap_resumes(run, overlapped) for run in runs for overlapped in (True, False, None)]
    [True, False, False, False, False, False]
    """
    return bool(overlapped) and not overlap_exclusions(run)


def no_overlap_reason(run: RunConfig, tflops: float = MEASURED_TFLOPS) -> str | None:
    """Return the reason why the tensor ranks of a resolved run do not overlap their exchanges with GEMMs; None if they
    do. The result is valid for devices that can map each other's memory, if neither --tp-overlap nor --no-tp-overlap is
    given. tflops: peak of a device in 16-bit floats.

    Launching a GEMM in pieces takes the host longer, so overlap is faster only if a block takes the device longer than
    the host (SMALL_EXCHANGING_BLOCK, in proportion to `tflops`). Measured steps of such blocks were shorter with
    overlap: by 11 % for GPT 22B on 4 H200s (docs/performance.md), and by 4 % for 16 of its blocks on 2 H200s. For such
    blocks of other models and layouts, the cost model (estimate/cost.py) predicts steps that are 4 to 20 % shorter on
    H100s and H200s, up to 15 % on A100s and 3 to 18 % on B200s. For smaller blocks the cost model predicts steps up to
    1.8 times as long, unless a CUDA graph replays the blocks. Whether exchanges overlap does not depend on the number
    of data ranks, nor on --cuda-graph, which must not change results.

    T5 and --task dpo are excluded: overlap was not measured with T5, and would pad the pairs of dpo to equal lengths.
    """
    refusals = {
        "as --sequence-parallel is off": not run.parallel.sequence_parallel,
        **{f"which {flag} excludes": True for flag in overlap_exclusions(run)},
        "as ranks have no GPUs": run.runtime.device == "cpu",
        "as --ops reference is given": run.runtime.ops == "reference",
        "as the model has two stacks": len(run.model.stacks) > 1,
        "as rows have different lengths": run.finetuning.task == "dpo",
        "as blocks are small": _block_work(run) < SMALL_EXCHANGING_BLOCK * tflops / MEASURED_TFLOPS,
    }
    return next((words for words, holds in refusals.items() if holds), None)


def overlaps_exchanges(run: RunConfig, tflops: float = MEASURED_TFLOPS) -> bool:
    """Return whether the tensor ranks of a resolved run exchange tokens while they compute GEMMs, on devices that can
    map each other's memory. If neither --tp-overlap nor --no-tp-overlap is given, `no_overlap_reason` decides. tflops:
    as in `no_overlap_reason`.

    >>> from mega.core.config.compose import compose
    >>> runs = (compose("gpt-22b", flags={"tp": 4, "sequence_parallel": True, "micro_batch": each}) for each in (1, 4))
    >>> [overlaps_exchanges(resolve(run, world=4)) for run in runs]
    [False, True]
    """
    asked = run.parallel.tp_overlap
    return no_overlap_reason(run, tflops) is None if asked is None else asked


def gated_ffn(hidden: int) -> int:
    """Return Megatron-LM's feed-forward width of a gated MLP: 2/3 x 4 x hidden, rounded down to a multiple of 64.

    >>> gated_ffn(4096)
    10880
    """
    return 8 * hidden // 3 // 64 * 64


def global_batch_at(batch: BatchConfig, consumed: int) -> int:
    """Return the global batch size of the step that starts after `consumed` samples, which depends on the batch
    ramp-up.

    >>> gpt3 = BatchConfig(seq_length=1, micro_batch=1, global_batch=1536, rampup=(16, 16, 5859375))
    >>> [global_batch_at(gpt3, consumed) for consumed in (0, 61664, 61680, 123376, 5859376)]
    [16, 16, 32, 48, 1536]
    """
    if not batch.rampup:
        return batch.global_batch
    start, increment, samples = batch.rampup
    rises = (batch.global_batch - start) // increment
    if consumed > samples or rises == 0:
        return batch.global_batch
    return start + int(consumed / (samples / rises)) * increment


def batch_sizes(batch: BatchConfig) -> Iterator[int]:
    """Return all global batch sizes of the run, in order."""
    if batch.rampup:
        start, increment, _ = batch.rampup
        yield from range(start, batch.global_batch, increment)
    yield batch.global_batch


def rising_steps(batch: BatchConfig) -> Iterator[int]:
    """Yield the number of samples in each step of the ramp-up; yield nothing if there is no ramp-up.

    >>> list(rising_steps(BatchConfig(seq_length=1, micro_batch=1, global_batch=6, rampup=(2, 2, 8), samples=100)))
    [2, 2, 4, 6]
    """
    if not batch.rampup or batch.samples is None:
        return
    consumed, ramp = 0, min(batch.rampup[2], batch.samples)
    while consumed <= ramp:
        size = global_batch_at(batch, consumed)
        consumed += size
        yield size


@dataclass(frozen=True)
class Lengths:
    """Lengths of a run and of its learning rate schedule."""

    steps: int
    """Number of optimizer steps in the run. All other lengths are numbers of samples."""
    samples: int
    decay_samples: int
    """Number of samples after which the learning rate is final."""
    warmup_samples: int
    anneal_samples: int = 0
    """Number of samples at the end of `decay_samples` in which the learning rate of wsd decreases."""


def lengths(run: RunConfig) -> Lengths:
    """Return the lengths of a run, which may be given in steps or in samples.

    Each step counts as `global_batch` samples. With a ramp-up, steps are counted one by one until the
    samples of the ramp-up are consumed.

    >>> from mega.core.config.compose import compose
    >>> gpt3 = {"micro_batch": 1, "global_batch": 1536, "rampup": (16, 16, 5859375), "samples": 146484375}
    >>> lengths(resolve(compose("gpt3-175b", flags=gpt3), 1)).steps
    111354
    """
    batch, schedule = run.batch, run.schedule
    if batch.samples is not None:
        # The schedule counts samples, so that the learning rate does not depend on the batch sizes of a ramp-up.
        steps, samples = _steps_of(batch, batch.samples), batch.samples
        decay = schedule.lr_decay_samples or samples
        warmup = schedule.lr_warmup_samples
        anneal = schedule.lr_wsd_decay_samples or 0
    else:
        steps = batch.steps or 0
        samples = steps * batch.global_batch
        decay = (schedule.lr_decay_steps or steps) * batch.global_batch
        warmup = schedule.lr_warmup_steps * batch.global_batch
        anneal = (schedule.lr_wsd_decay_steps or 0) * batch.global_batch
    if schedule.lr_warmup_fraction is not None:
        warmup = int(schedule.lr_warmup_fraction * decay)
    return Lengths(steps, samples, decay_samples=decay, warmup_samples=warmup, anneal_samples=anneal)


def last_step(run: RunConfig, step: int = 0, consumed: int = 0) -> int:
    """Return the index of the last step of a resolved run that has completed `step` steps and consumed `consumed`
    samples.

    A run whose length is given in samples ends with the last whole batch, which depends on earlier batch sizes.
    --exit-tokens may end the run earlier, with the step that reaches this number of tokens.

    >>> from mega.core.config.compose import compose
    >>> lengths_of = ({"samples": 100}, {"steps": 100, "seq_length": 10, "exit_tokens": 250})
    >>> typed = [{"vocab": 9, "micro_batch": 1, "global_batch": 8, **each} for each in lengths_of]
    >>> by_samples, by_tokens = (resolve(compose("tiny-gpt", flags=each), 1) for each in typed)
    >>> last_step(by_samples), last_step(by_samples, step=10, consumed=40), last_step(by_tokens)
    (12, 17, 4)
    """
    batch, tokens = run.batch, run.runtime.exit_tokens
    most = inf if tokens is None else ceil(tokens / batch.seq_length)
    if batch.samples is None:
        steps = batch.steps or 0
        if most < inf:
            steps = min(steps, step + max(0, ceil((most - consumed) / batch.global_batch)))
        return steps
    while consumed < most and (after := consumed + global_batch_at(batch, consumed)) <= batch.samples:
        step, consumed = step + 1, after
    return step


def _steps_of(batch: BatchConfig, samples: int) -> int:
    rising = list(rising_steps(batch))
    return len(rising) + max(0, samples - sum(rising)) // batch.global_batch


def _unchanged_fields(options: Section, resolved: type[Section]) -> dict[str, Any]:
    """Return the values that a resolved section copies from `options`: all fields that `resolved` does not
    redeclare."""
    return {name: value for name, value in vars(options).items() if name not in resolved.__annotations__}


def _required(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{flag_of(name)} is missing: give the sizes of the model, or --model")
    return value


def _precision(options: PrecisionOptions) -> PrecisionConfig:
    derived: Dtype = "fp32" if options.dtype == "bf16" else options.dtype
    return PrecisionConfig(**_unchanged_fields(options, PrecisionConfig), grad_dtype=options.grad_dtype or derived)


def _parallel(options: ParallelOptions, model: ModelConfig) -> ParallelConfig:
    chunks, stage_layers = options.chunks, options.stage_layers
    if options.layers_per_chunk:
        chunks = max(1, model.blocks // options.pp // options.layers_per_chunk)
    if options.split_rank and not stage_layers and len(model.stacks) > 1:
        with suppress(ValueError):  # config/check.py reports this mistake
            stage_layers = split_layers(model.stacks[0], model.stacks[1], options.pp, options.split_rank)
    schedule = options.schedule or ("interleaved" if chunks > 1 else "1f1b")
    etp = options.tp if options.etp is None else options.etp
    resolved = ParallelConfig(**_unchanged_fields(options, ParallelConfig), schedule=schedule, etp=etp)
    # A single tensor rank has nothing to split. Megatron-LM also disables sequence parallelism in this case, without a
    # message.
    split = options.sequence_parallel and options.tp > 1
    return replace(resolved, chunks=chunks, stage_layers=stage_layers, sequence_parallel=split)


def _batch(options: BatchOptions, dp: int) -> BatchConfig:
    seq_length, micro_batch = (_required(getattr(options, name), name) for name in ("seq_length", "micro_batch"))
    derived = micro_batch * max(dp, 1) * (options.accumulation or 1)
    return BatchConfig(
        **_unchanged_fields(options, BatchConfig),
        seq_length=seq_length,
        micro_batch=micro_batch,
        global_batch=derived if options.global_batch is None else options.global_batch,
    )


def _schedule(options: Options) -> ScheduleConfig:
    schedule, decay = options.schedule, options.optimizer.weight_decay
    resolved = ScheduleConfig(
        **_unchanged_fields(schedule, ScheduleConfig),
        start_weight_decay=decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_weight_decay=decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
    )
    return replace(
        resolved,
        lr_decay_steps=schedule.lr_decay_steps or options.batch.steps,
        lr_decay_samples=schedule.lr_decay_samples or options.batch.samples,
    )


def with_named_step(options: Options) -> Options:
    """Return `options` with the path of the step that --resume names. A step name alone, such as step-0001000, refers
    to a step in --save; if --save has no such step, --resume is unchanged."""
    save, resume = options.checkpoint.save, (options.checkpoint.resume or "").rstrip("/")
    if save is None or not resume.startswith("step-") or "/" in resume:
        return options
    place = f"{save.rstrip('/')}/{resume}"
    exists = os.path.isdir(place) if url_of(save) is None else not os.path.isdir(resume)
    return updated(options, {"resume": place}) if exists else options


def implied_tokenizer(options: TokenizerConfig, family: str) -> TokenizerConfig:
    """Return `options` with the type of tokenizer that the given files imply. The type remains unset if only the
    vocabulary size is given."""
    model = options.tokenizer_model
    if options.tokenizer is not None:
        return options
    if model is not None and (model.endswith(".json") or os.path.isdir(model)):
        return replace(options, tokenizer="HuggingFaceTokenizer")
    if model is not None:
        return replace(options, tokenizer=FAMILY_DEFAULTS[family].sentencepiece)
    if options.vocab_file is not None:
        merged = options.merge_file is not None
        return replace(options, tokenizer="GPT2BPETokenizer" if merged else FAMILY_DEFAULTS[family].vocabulary)
    return options


def metrics_file(run: AnyRun) -> str:
    """Return the path of the metrics file: --metrics, or its default."""
    return run.log.metrics if run.log.metrics is not None else default_metrics(run.checkpoint.save)


def default_metrics(save: str | None) -> str:
    """Return the path of the metrics file of a run without --metrics.

    >>> default_metrics("runs/first")
    'runs/first/metrics.jsonl'
    """
    return os.path.join(save if save and not url_of(save) else ".", "metrics.jsonl")
