"""Derives the values that a run leaves out, so that every room reads plain numbers and none derives them again.

`None` in a section means "derived". `resolve` replaces it by the value that follows from the other fields,
the world size and the vocabulary; resolving twice changes nothing. It checks nothing: config/check.py does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf, isqrt, lcm
from typing import Any

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.run import RunConfig, flag_of
from mega.core.config.sections import (
    GATED,
    LABELLED,
    BatchConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TokenizerConfig,
)
from mega.core.files import url_of
from mega.core.plan.layers import split_layers


def resolve(run: RunConfig, world: int, vocab: int | None = None) -> RunConfig:
    """`run` with every derived value filled in, for `world` ranks and the tokenizer's `vocab`.

    >>> from mega.core.config.run import updated
    >>> run = updated(RunConfig(), {"layers": 2, "hidden": 8, "heads": 2, "seq_length": 16, "micro_batch": 3})
    >>> resolve(run, world=4).batch.global_batch
    12
    >>> resolve(run, world=4).model.ffn
    32
    """
    model = _model(run, vocab)
    parallel = _parallel(run.parallel, model)
    return replace(
        run,
        model=model,
        precision=_precision(run.precision),
        parallel=parallel,
        batch=_batch(run.batch, data_parallel(run, world)),
        schedule=_schedule(run),
        data=replace(run.data, chat_template="plain") if run.data.chat_template == "auto" else run.data,
        tokenizer=implied_tokenizer(run),
        evaluation=replace(run.evaluation, eval_iters=max(0, run.evaluation.eval_iters)),
        log=replace(run.log, metrics=metrics_file(run)),
    )


def model_alone(run: RunConfig) -> ModelConfig:
    """The model of a run, whatever is said of its training. Errors: ValueError naming a size that is not given.

    >>> from mega.core.config.compose import compose
    >>> model_alone(compose("llama2-7b", flags={})).head_dim
    128
    """
    model = _model(run, None)
    for name in ("layers", "hidden", "heads", "vocab", "positions"):
        if getattr(model, name) is None:
            raise ValueError(f"{flag_of(name)} is missing: give the sizes of the model, or --model")
    return model


def microbatch_rows(run: RunConfig) -> int:
    """Rows of tokens in one microbatch: a pair of answers is two, a choice as many as it has."""
    assert run.batch.micro_batch is not None
    head, choices = LABELLED.get(run.finetuning.task, ("classification", 1))
    return run.batch.micro_batch * (2 if run.finetuning.task == "dpo" else choices if head == "choice" else 1)


def with_head(model: ModelConfig, task: str) -> ModelConfig:
    """A model with the head that a task of labels needs, if its family has one; any other as it is."""
    if task not in LABELLED or not FAMILY_DEFAULTS[model.family].classifies:
        return model
    head, classes = LABELLED[task]
    values: dict[str, Any] = {"head": head, "classes": classes}
    return replace(model, **values)


def epoch_steps(run: RunConfig) -> int | None:
    """Steps of one pass of a run that is measured in passes and resolved to steps; None of another."""
    steps, epochs = run.batch.steps, run.finetuning.epochs
    return None if steps is None or epochs is None else steps // epochs


def data_parallel(run: RunConfig, world: int) -> int:
    """Size of the dp axis: what the world size leaves over.

    >>> from mega.core.config.run import updated
    >>> data_parallel(updated(RunConfig(), {"tp": 2, "pp": 2}), world=8)
    2
    """
    return world // (run.parallel.tp * run.parallel.pp * run.parallel.cp)


def column_unit(parallel: ParallelConfig) -> int:
    """What the columns of a row must be a multiple of, so that ranks that share them hold equally many: whole chunks of
    context, whole shares of sequence.

    >>> column_unit(ParallelConfig(tp=2, cp=3, sequence_parallel=True))
    6
    """
    cp, tp = parallel.cp, parallel.tp if parallel.sequence_parallel else 1
    return lcm(2 * cp, tp * cp) if cp > 1 else tp


def text_lengths(run: RunConfig) -> tuple[int, ...]:
    """Tokens of a sample of a resolved run: of its only text, or of what its encoder reads and its decoder writes."""
    assert run.batch.seq_length is not None
    if len(run.model.stacks) == 1:
        return (run.batch.seq_length,)
    return run.batch.seq_length, run.masking.decoder_seq_length


def predicted_tokens(run: RunConfig) -> int:
    """Tokens of a sample of a resolved run that the model's vocabulary head is multiplied with: all of its text, or of
    its decoder's; of a masked sample as many as may be masked.

    >>> from mega.core.config.compose import compose
    >>> runs = (resolve(compose(preset, flags={"micro_batch": 1}), 1) for preset in ("gpt2-345m", "bert-345m"))
    >>> [predicted_tokens(run) for run in runs]
    [1024, 77]
    """
    *_, last = text_lengths(run)
    words_alone = run.masking.sample_kind in ("bert", "tfrecords")
    return max(1, ceil(run.masking.mask_prob * last)) if words_alone else last


def divisors(number: int) -> list[int]:
    """Ascending: how many ranks or stages so many heads or layers can be shared out over.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [part for part in range(1, isqrt(number) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def microbatches(run: RunConfig, world: int, global_batch: int | None = None) -> int:
    """Microbatches of one step on each rank, of a resolved run; `global_batch` replaces the run's own."""
    batch = global_batch if global_batch is not None else run.batch.global_batch
    assert batch is not None and run.batch.micro_batch is not None, "resolve the run first"
    return batch // (run.batch.micro_batch * data_parallel(run, world))


def eager_microbatches(shares: int, count: int) -> int:
    """How many of `count` microbatches run without a graph under --cuda-graph, with data shared over `shares` ranks.

    It is the last of several, whose backward pass overlaps with the reduction of gradients.

    >>> eager_microbatches(1, 4), eager_microbatches(2, 4), eager_microbatches(2, 1)
    (0, 1, 0)
    """
    return int(shares > 1 and count > 1)


SMALL_BLOCK = 1.5e12
"""Operations of a block's forward and backward pass that a GPU of today does in about 3 ms, the time in which its host
asks for a block's kernels (docs/performance.md)."""

SMALL_EXCHANGING_BLOCK = 3.5e12
"""The same where tensor ranks exchange, for which hosts take more than twice as long."""


def records_graph(run: RunConfig, world: int) -> bool:
    """Whether a resolved run asks a GPU for its microbatches as recorded graphs.

    Where it is left open: where that is known to work, and a block is so little work that the device would wait for the
    host.

    >>> from mega.core.config.compose import compose
    >>> runs = (compose("gpt2-345m", flags={"micro_batch": each, "vocab": 50304}) for each in (1, 64))
    >>> [records_graph(resolve(run, world=1), world=1) for run in runs]
    [True, False]
    """
    if run.runtime.cuda_graph is not None:
        return run.runtime.cuda_graph
    parallel, model, batch = run.parallel, run.model, run.batch
    if parallel.pp > 1 or parallel.zero > 1 or run.runtime.ops != "auto" or run.runtime.device == "cpu":
        return False
    shares = data_parallel(run, world) * parallel.cp
    if shares > 1 and microbatches(run, world) == 1:  # its reduction would wait for the whole backward pass
        return False
    assert model.hidden and model.heads and model.kv_heads and model.head_dim and model.ffn
    assert batch.micro_batch and batch.seq_length
    linears = 2 * (model.heads + model.kv_heads) * model.head_dim
    linears += (3 if model.activation in GATED else 2) * model.ffn
    scores = model.heads * model.head_dim * min(batch.seq_length, 2 * (model.window or batch.seq_length))
    tokens = batch.micro_batch * batch.seq_length / (parallel.tp * parallel.cp)
    work = tokens * (6 * model.hidden * linears + 6 * scores)
    return work < (SMALL_EXCHANGING_BLOCK if parallel.tp > 1 else SMALL_BLOCK)


def gated_ffn(hidden: int) -> int:
    """Megatron's feed-forward width of a gated MLP: 2/3 of 4 hidden, down to a multiple of 64.

    >>> gated_ffn(4096)
    10880
    """
    return 8 * hidden // 3 // 64 * 64


def global_batch_at(batch: BatchConfig, consumed: int) -> int:
    """Samples of the step that starts when `consumed` samples are done, under the ramp-up if there is one.

    >>> gpt3 = BatchConfig(global_batch=1536, rampup=(16, 16, 5859375))
    >>> [global_batch_at(gpt3, consumed) for consumed in (0, 61664, 61680, 123376, 5859376)]
    [16, 16, 32, 48, 1536]
    """
    assert batch.global_batch is not None, "resolve the run first"
    if not batch.rampup:
        return batch.global_batch
    start, increment, samples = batch.rampup
    rises = (batch.global_batch - start) // increment
    if consumed > samples or rises == 0:
        return batch.global_batch
    return start + int(consumed / (samples / rises)) * increment


def batch_sizes(batch: BatchConfig) -> Iterator[int]:
    """Every global batch size that the run passes through, in order."""
    assert batch.global_batch is not None, "resolve the run first"
    if batch.rampup:
        start, increment, _ = batch.rampup
        yield from range(start, batch.global_batch, increment)
    yield batch.global_batch


def rising_steps(batch: BatchConfig) -> Iterator[int]:
    """Samples of each step until the ramp-up's samples are consumed; nothing without one.

    >>> list(rising_steps(BatchConfig(global_batch=6, rampup=(2, 2, 8), samples=100)))
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
    """The run's length and its schedule's, all in samples, and the number of optimizer steps."""

    steps: int
    samples: int
    decay_samples: int
    warmup_samples: int
    anneal_samples: int = 0


def lengths(run: RunConfig) -> Lengths:
    """Lengths of a resolved run, whether it was given in steps or in samples.

    Iterations count as `global_batch` samples each. With a ramp-up, steps are counted one by one until the
    ramp's samples are consumed.

    >>> from mega.core.config.run import updated
    >>> gpt3 = {"global_batch": 1536, "rampup": (16, 16, 5859375), "samples": 146484375}
    >>> lengths(updated(RunConfig(), gpt3)).steps
    111354
    """
    batch, schedule = run.batch, run.schedule
    assert batch.global_batch is not None, "resolve the run first"
    if batch.samples is not None:
        steps, samples = _steps_of(batch), batch.samples
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
    """The step with which a resolved run ends that has come to `step` and `consumed` samples.

    A run measured in samples ends with the last whole batch of them, whatever its batches were before. --exit-tokens
    may end it before, with the step that reaches them.

    >>> from mega.core.config.run import updated
    >>> by_samples = updated(RunConfig(), {"global_batch": 8, "samples": 100})
    >>> last_step(by_samples), last_step(by_samples, step=10, consumed=40)
    (12, 17)
    >>> last_step(updated(RunConfig(), {"global_batch": 8, "steps": 100, "seq_length": 10, "exit_tokens": 250}))
    4
    """
    batch, tokens = run.batch, run.runtime.exit_tokens
    most = inf if tokens is None else ceil(tokens / (batch.seq_length or 1))
    if batch.samples is None:
        steps = batch.steps or 0
        if most < inf and batch.global_batch:
            steps = min(steps, step + max(0, ceil((most - consumed) / batch.global_batch)))
        return steps
    while consumed < most and (after := consumed + global_batch_at(batch, consumed)) <= batch.samples:
        step, consumed = step + 1, after
    return step


def _steps_of(batch: BatchConfig) -> int:
    assert batch.global_batch is not None and batch.samples is not None
    rising = list(rising_steps(batch))
    return len(rising) + max(0, batch.samples - sum(rising)) // batch.global_batch


def _model(run: RunConfig, vocab: int | None) -> ModelConfig:
    model = with_head(run.model, run.finetuning.task)
    longest, decoder_layers = run.batch.seq_length, model.decoder_layers
    if FAMILY_DEFAULTS[model.family].stacks > 1:
        decoder_layers = decoder_layers or model.layers
        longest = longest and max(longest, run.masking.decoder_seq_length)
    hidden, heads, ffn, head_dim = model.hidden, model.heads, model.ffn, model.head_dim
    if hidden is not None:
        ffn = ffn or (gated_ffn(hidden) if model.activation in GATED else 4 * hidden)
        if heads:
            head_dim = head_dim or hidden // heads
    return replace(
        model,
        decoder_layers=decoder_layers,
        kv_heads=model.kv_heads if model.kv_heads is not None else heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=model.vocab if model.vocab is not None else vocab,
        positions=model.positions if model.positions is not None else longest,
        qkv_bias=model.qkv_bias if model.qkv_bias is not None else model.bias,
    )


def _precision(precision: PrecisionConfig) -> PrecisionConfig:
    if precision.grad_dtype is not None:
        return precision
    return replace(precision, grad_dtype="fp32" if precision.dtype == "bf16" else precision.dtype)


def _parallel(parallel: ParallelConfig, model: ModelConfig) -> ParallelConfig:
    chunks, stage_layers = parallel.chunks, parallel.stage_layers
    if parallel.layers_per_chunk and model.layers:
        chunks = max(1, model.blocks // parallel.pp // parallel.layers_per_chunk)
    if parallel.split_rank and not stage_layers and model.layers and len(model.stacks) > 1:
        with suppress(ValueError):  # which config/check.py reports
            stage_layers = split_layers(model.stacks[0], model.stacks[1], parallel.pp, parallel.split_rank)
    return replace(
        parallel,
        chunks=chunks,
        stage_layers=stage_layers,
        schedule=parallel.schedule or ("interleaved" if chunks > 1 else "1f1b"),
        # One tensor rank has nothing to split; Megatron-LM too switches this off without a word.
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
    )


def _batch(batch: BatchConfig, dp: int) -> BatchConfig:
    if batch.global_batch is not None or batch.micro_batch is None:
        return batch
    return replace(batch, global_batch=batch.micro_batch * max(dp, 1) * (batch.accumulation or 1))


def _schedule(run: RunConfig) -> ScheduleConfig:
    schedule = run.schedule
    decay = run.optimizer.weight_decay
    return replace(
        schedule,
        lr_decay_steps=schedule.lr_decay_steps or run.batch.steps,
        lr_decay_samples=schedule.lr_decay_samples or run.batch.samples,
        start_weight_decay=decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_weight_decay=decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
    )


def implied_tokenizer(run: RunConfig) -> TokenizerConfig:
    """The kind that the given files imply, else the family's; none where only the vocabulary is given."""
    tokenizer, model = run.tokenizer, run.tokenizer.tokenizer_model
    if tokenizer.tokenizer is not None:
        return tokenizer
    if model is not None and (model.endswith(".json") or os.path.isdir(model)):
        return replace(tokenizer, tokenizer="HuggingFaceTokenizer")
    if model is not None:
        return replace(tokenizer, tokenizer=FAMILY_DEFAULTS[run.model.family].sentencepiece)
    if tokenizer.vocab_file is not None:
        merged = tokenizer.merge_file is not None
        kind = "GPT2BPETokenizer" if merged else FAMILY_DEFAULTS[run.model.family].vocabulary
        return replace(tokenizer, tokenizer=kind)
    return tokenizer


def metrics_file(run: RunConfig) -> str:
    """--metrics, or where the file is without it."""
    if run.log.metrics is not None:
        return run.log.metrics
    save = run.checkpoint.save
    return os.path.join(save if save and not url_of(save) else ".", "metrics.jsonl")
