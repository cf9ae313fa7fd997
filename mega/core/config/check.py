"""Check all rules for the options of a run, before any process starts.

`check` raises one ValueError with a line for each problem: the flag as the user typed it, the flag's value, the rule,
and the valid values. Ranges and most dependencies are properties of the option (config/option.py); every other rule is
written once, in a small generator in this module that yields the lines of the message. `config/resolve.py` derives
values, and config/check_files.py checks files. This module does not import torch; the ranks check the rules that depend
on the device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mega.core.config.check_files import files
from mega.core.config.check_mixture import expert_ranks, mixture
from mega.core.config.check_retriever import retriever
from mega.core.config.families import belongs, foreign_values
from mega.core.config.faults import Fault, fault
from mega.core.config.option import Range
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.resolve import (
    batch_sizes,
    column_unit,
    data_parallel,
    divisors,
    lengths,
    microbatches,
    overlap_exclusions,
    profiled_steps,
    resolve,
)
from mega.core.config.run import AnyRun, Options, RunConfig, entries, flag_of, is_set_to, run_schema, value_of
from mega.core.config.schema import Entry, Schema
from mega.core.config.sections import FP8_BLOCK, LABELLED, TASKS
from mega.core.environment import INJECT, is_on
from mega.core.files import url_of
from mega.core.plan.kinds import SCHEDULES, interleaving
from mega.core.plan.layers import split_layers

Problems = Iterator[str]

MOST_TOKENS = 2**26
"""Maximum number of tokens in a microbatch. The token ids of such a microbatch take half a gigabyte, which is allocated
even in a dry run."""
MOST_ACTS = 2**21
"""Maximum number of forward passes in a step's plan, over all stages and chunks. The number is limited because every
rank builds, checks and stores the plan."""

ANY_VOCABULARY = 1
"""Placeholder for the vocabulary size. No rule uses it, because the tokenizer is opened only after this check."""

PACKAGES = {"flash-attn": "flash_attn", "apex": "apex"}
"""Value of `--ops` -> the module to import."""


def check(options: Options, world: int) -> None:
    """Check the options of a run on `world` ranks. Rules about derived values are skipped if the model's sizes are
    unknown.

    Errors: ValueError with one line per problem.

    >>> from mega.core.config.compose import compose
    >>> typed = {"steps": 1, "lr": 1e-3, "mock_data": True, "vocab": 100, "micro_batch": 1, "tp": 3}
    >>> check(compose("tiny-gpt", flags=typed), world=3)
    Traceback (most recent call last):
    ...
    ValueError: --heads 4: must be divisible by --tp 3; valid --tp: 1, 2, 4
    --ffn 256: must be divisible by --tp 3; valid --tp: 1, 2, 4
    """
    unsized = [*_sizes(options), *_ranges(options)]
    problems = [*_names(options), *unsized, *_missing(options), *_needs(options), *_families(options)]
    problems += [*_pairs(options), *_guards(options, world), *files(options)]
    # resolve() needs these sizes, so rules about derived values are checked only if the sizes are valid.
    if not unsized and None not in (options.model.layers, options.model.hidden, options.model.heads):
        run = resolve(options, world, ANY_VOCABULARY)
        for rule in (_heads, _positions, _stages, _tensor, _columns, _overlap, _fp8, graph, _times, _ahead):
            problems += rule(run)
        line = partial(_line, run)
        problems += [*mixture(run, line), *retriever(run, line)]
        problems += (
            _world(run, world) if world % _cells(run) else [*_batch(run, world), *expert_ranks(run, world, line)]
        )
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def check_ranges(options: Options) -> None:
    """Check only the ranges of numbers, for a subcommand that uses a model without training. Errors: as in `check`."""
    if problems := list(_ranges(options)):
        raise ValueError("\n".join(problems))


def _line(run: AnyRun, name: str, rule: str) -> str:
    return _format(name, value_of(run, name), rule)


def _format(name: str, value: object, rule: str) -> str:
    """Return the line `--flag value: rule`. A switch that is off is shown in both spellings that the user may have
    typed.

    >>> _format("rampup", (1, 2), "must be three numbers"), _format("masters", False, "needs --dtype bf16")
    ('--rampup 1 2: must be three numbers', '--no-masters (--memory-efficient-fp16): needs --dtype bf16')
    """
    return _format_entry(entries()[name], value, rule)


def _format_entry(entry: Entry, value: object, rule: str) -> str:
    if value is True:
        return f"{entry.flag}: {rule}"
    if value is False:
        spelling = next((f" ({word})" for word, constant in entry.option.megatron.items() if constant is False), "")
        return f"{entry.off}{spelling}: {rule}"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{entry.flag} {text}: {rule}"


def _divisors(number: int) -> str:
    """Return the divisors of a number as text for a message, such as "1, 2, 4"."""
    return ", ".join(map(str, divisors(number)))


# Options given by the user: present, in range, and consistent with other flags
# -----------------------------------------


def _names(options: Options) -> Problems:
    """Refuse strings that are not UTF-8. Python decodes bytes that are not UTF-8 to surrogates, which no text file can
    contain."""
    for name in entries():
        value = value_of(options, name)
        words = [word for word in (value if isinstance(value, tuple) else (value,)) if isinstance(word, str)]
        if bad := next((word for word in words if not _is_text(word)), None):
            yield f"{flag_of(name)} {bad!a}: must be UTF-8; rename it, or give a link to it"


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ranges(options: Options) -> Problems:
    return out_of_range({name: value_of(options, name) for name in entries()})


def out_of_range(values: Mapping[str, Any], schema: Schema | None = None) -> Problems:
    """Yield an error message for each option with a number outside its range. values: option values by field name.
    schema: the schema of a subcommand's options; None for the schema of a run."""
    for name, value in values.items():
        entry = (schema or run_schema()).entries[name]
        within = entry.option.within
        if within is None or value is None:
            continue
        numbers = value if entry.many else (value,)
        if schema is not None:
            value = " ".join(map(_typed_number, numbers))
        if not all(within.holds(number) for number in numbers):
            yield _format_entry(entry, value, f"must be {within.rule}")
        elif any(isinstance(number, int) and number > entry.option.most for number in numbers):
            yield _format_entry(entry, value, f"must be at most {entry.option.most}")


def _typed_number(number: float) -> str:
    """Format a number as a user would type it.

    >>> _typed_number(0.0), _typed_number(1.23456789), _typed_number(3)
    ('0', '1.23456789', '3')
    """
    short = f"{number:g}"
    return short if isinstance(number, float) and float(short) == number else str(number)


def _needs(options: Options) -> Problems:
    """Check the other options that an option requires if its value differs from the default (`Option.needs`)."""
    for name, entry in entries().items():
        if not entry.option.needs or (value := value_of(options, name)) == entry.default:
            continue
        if value is False and entry.default is None:  # a derived option may be set to off
            continue
        for other, valid in entry.option.needs.items():
            if is_set_to(options, other, valid):
                continue
            rule = valid.rule if isinstance(valid, Range) else " or ".join(valid)
            requirement = f"{flag_of(other)} {rule}, not {value_of(options, other)}" if rule else flag_of(other)
            yield _format(name, value, f"needs {requirement}")


def _families(options: Options) -> Problems:
    """Refuse options of other model families, and a sample format that the run's family does not use."""
    for name, value, rule in foreign_values(options):
        yield _format(name, value, rule)
    if not (options.model.tied or FAMILY_DEFAULTS[options.model.family].unties):
        yield _line(options, "tied", belongs([name for name, family in FAMILY_DEFAULTS.items() if family.unties]))
    if options.model.head == "none" and not options.runtime.dry_run:
        yield _line(options, "head", "has nothing to train; valid: lm, classification, choice")
    sample_kind = FAMILY_DEFAULTS[options.model.family].values.get("sample_kind", "gpt")
    if sample_kind != "gpt" and options.masking.sample_kind == "gpt" and options.finetuning.task not in LABELLED:
        yield _line(
            options, "sample_kind", f"--family {options.model.family} reads other samples; valid: {sample_kind}"
        )


def _sizes(options: Options) -> Problems:
    model = () if options.checkpoint.use_checkpoint_config else ("layers", "hidden", "heads")
    for name in (*model, "seq_length", "micro_batch"):
        if value_of(options, name) is None:
            preset = "" if name == "micro_batch" else ", or a preset with --model"
            yield f"{flag_of(name)} is missing: give a number of at least 1{preset}"


def _missing(options: Options) -> Problems:
    trains = not options.runtime.dry_run and not options.evaluation.skip_train
    if trains and options.batch.steps is None and options.batch.samples is None and options.finetuning.epochs is None:
        passes = " or --epochs" if options.finetuning.task in LABELLED else ""
        yield f"--steps is missing: give the steps to train, or --samples{passes}"
    if trains and options.optimizer.lr is None:
        yield "--lr is missing: give the peak learning rate, such as 1e-4"


def _pairs(options: Options) -> Problems:
    """Check pairs of flags that exclude or require each other."""
    for name in TASKS.get(options.finetuning.task, ()):
        if not value_of(options, name):
            yield _line(options, "task", f"needs {flag_of(name)}")
    if options.finetuning.task in LABELLED and not FAMILY_DEFAULTS[options.model.family].classifies:
        valid = " or ".join(name for name, family in FAMILY_DEFAULTS.items() if family.classifies)
        yield _line(options, "task", f"needs a model of --family {valid}, not {options.model.family}")
    if options.finetuning.task in LABELLED and options.model.lora_rank:
        yield _line(
            options, "lora_rank", f"excludes --task {options.finetuning.task}, whose head is new and has to be trained"
        )
    yield from _steps_or_samples(options)
    yield from _recompute(options)
    yield from _run_and_checkpoint(options)
    if options.supervision.max_restarts and not options.checkpoint.save_optim:
        yield _line(options, "max_restarts", "excludes --no-save-optim, as ranks that start again resume the optimizer")
    schedule, decay = options.schedule, options.optimizer.weight_decay
    ends = (schedule.start_weight_decay, schedule.end_weight_decay)
    if schedule.weight_decay_style == "constant" and any(end not in (None, decay) for end in ends):
        yield _line(
            options, "weight_decay_style", "excludes --start-weight-decay and --end-weight-decay; valid: linear, cosine"
        )
    if schedule.weight_decay_style != "constant" and None in ends:
        yield _line(options, "weight_decay_style", "needs both --start-weight-decay and --end-weight-decay")
    if options.optimizer.lr is not None and 0 <= options.optimizer.lr < options.schedule.min_lr:
        yield _line(options, "min_lr", f"must be at most --lr {options.optimizer.lr}")
    if options.schedule.lr_decay == "wsd" and not (
        options.schedule.lr_wsd_decay_steps or options.schedule.lr_wsd_decay_samples
    ):
        yield _line(options, "lr_decay", "needs --lr-wsd-decay-steps, or --lr-wsd-decay-samples: the part that falls")
    if options.schedule.lr_decay == "range-exponential" and not options.schedule.min_lr:
        yield _line(options, "lr_decay", "needs --min-lr greater than 0, where it begins")
    yield from _precision(options)
    package = PACKAGES.get(options.runtime.ops)
    if package is not None and importlib.util.find_spec(package) is None:
        yield _line(options, "ops", f"the package {package} is absent here; valid: auto, reference")
    if options.runtime.backend == "nccl" and options.runtime.device == "cpu":
        yield _line(options, "backend", "needs --device cuda; valid with --device cpu: auto, gloo")


def _precision(options: Options) -> Problems:
    dtype, grad_dtype = options.precision.dtype, options.precision.grad_dtype
    if grad_dtype in ("fp16", "bf16") and grad_dtype != dtype:
        yield _line(options, "grad_dtype", f"needs --dtype {grad_dtype}, not {dtype}; valid: fp32, fp64, or as --dtype")
    if options.precision.loss_scale is not None:
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if value_of(options, name) != entries()[name].default:
                yield _line(options, name, "excludes --loss-scale, which is constant")
    if options.precision.residual_fp32 and (options.model.post_norm_residual or options.model.norm_placement == "post"):
        norms = "--post-norm-residual" if options.model.post_norm_residual else "--norm-placement post"
        yield _line(options, "residual_fp32", f"excludes {norms}, whose stream is the norms' 16-bit result")


def _steps_or_samples(options: Options) -> Problems:
    by_steps, by_samples = (
        [
            name
            for name in (unit, f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}")
            if value_of(options, name)
        ]
        for unit in ("steps", "samples")
    )
    if by_steps and by_samples:
        yield _line(
            options, by_samples[0], f"excludes {flag_of(by_steps[0])}; count the whole run in steps or in samples"
        )
    if options.schedule.lr_warmup_fraction is not None:
        for name in ("lr_warmup_steps", "lr_warmup_samples"):
            if value_of(options, name):
                yield _line(options, name, "excludes --lr-warmup-fraction; give one of them")
    if options.batch.rampup and by_steps:
        yield _line(options, "rampup", f"needs --samples and excludes {flag_of(by_steps[0])}")


def _recompute(options: Options) -> Problems:
    memory = options.memory
    if memory.recompute == "full" and memory.recompute_method is None:
        yield "--recompute full: needs --recompute-method; valid: uniform, block"
    if memory.recompute == "full" and memory.recompute_layers is None:
        yield "--recompute full: needs --recompute-layers, a number of blocks"
    if memory.distribute_saved and options.parallel.tp > 1:
        if memory.recompute != "full":
            yield _line(options, "distribute_saved", "needs --recompute full")
        if options.parallel.sequence_parallel:
            yield _line(options, "distribute_saved", "excludes --sequence-parallel, which cuts them already")


def _run_and_checkpoint(options: Options) -> Problems:
    checkpoint, runtime = options.checkpoint, options.runtime
    if checkpoint.pretrained_checkpoint is not None:
        yield _line(options, "pretrained_checkpoint", "belongs to mega finetune; here give --load with --finetune")
    if checkpoint.save_retry_minutes > runtime.phase_timeout_minutes:
        most = runtime.phase_timeout_minutes
        yield _line(options, "save_retry_minutes", f"must be at most --phase-timeout-minutes {most:g}")
    if checkpoint.resume == "auto" and checkpoint.save is None:
        yield "--resume auto: needs --save, under which it looks for checkpoints"
    if checkpoint.use_checkpoint_config and checkpoint.load is None and checkpoint.resume is None:
        yield "--use-checkpoint-config: needs --load, or --resume with --save"
    if checkpoint.finetune and checkpoint.resume not in (None, "auto"):
        yield _line(options, "resume", "excludes --finetune, which starts at step 0; valid with it: auto")
    if checkpoint.override_schedule and checkpoint.use_checkpoint_schedule:
        yield "--use-checkpoint-schedule: excludes --override-schedule, which keeps this run's"
    # Checkpoints are never removed from a remote store, so retention limits would have no effect.
    for name in ("keep_last", "keep_every", "keep_optimizer_last"):
        if value_of(options, name) is not None and checkpoint.save is not None and url_of(checkpoint.save):
            yield _line(
                options, name, f"needs --save to be a directory, not {checkpoint.save}: nothing is removed there"
            )
    if options.data.chat_template not in ("auto", "plain") and not (
        options.data.chat_data or options.finetuning.dpo_data
    ):
        yield _line(options, "chat_template", "needs --chat-data, or --dpo-data")
    if options.finetuning.task == "dpo" and options.parallel.cp > 1:
        yield _line(options, "cp", "excludes --task dpo, which judges whole rows; valid there: 1")
    for other in ("chat_data", "mock_data"):
        if options.data.fim_data and value_of(options, other):
            yield f"--fim-data: excludes {flag_of(other)}; it changes samples of token files"
    if options.data.eod_mask_loss and options.data.chat_data:
        yield "--eod-mask-loss: excludes --chat-data, whose template says which tokens are trained on"
    if runtime.world is not None and not runtime.dry_run:
        yield _line(options, "world", "needs --dry-run; a real run is started by --nproc, torchrun, mpirun or srun")


# Derived values: divisibility of sizes --------------------------------------------------------------------


def _heads(run: RunConfig) -> Problems:
    model = run.model
    # If head_dim was derived by rounding down, heads x head_dim is less than the hidden width.
    if model.hidden % model.heads and model.head_dim == model.hidden // model.heads:
        yield _line(
            run, "hidden", f"must be divisible by --heads {model.heads}; valid --heads: {_divisors(model.hidden)}"
        )
    if model.heads % model.kv_heads:
        yield _line(run, "kv_heads", f"must divide --heads {model.heads}; valid --kv-heads: {_divisors(model.heads)}")
    if model.position == "rope" and (rotating := int(model.head_dim * model.rope_fraction)) % 2:
        yield _line(
            run, "head_dim", f"{rotating} rotating dimensions must be even; choose --head-dim or --rope-fraction so"
        )
    if model.head_bias and (model.logit_divisor != 1.0 or model.logit_softcap is not None):
        other = "logit_softcap" if model.logit_divisor == 1.0 else "logit_divisor"
        yield _line(run, "head_bias", f"excludes {flag_of(other)}, which would change it too")
    if model.rope_scaling == "longrope":
        yield from _long_factors(run)
    if model.residual_multiplier != 1.0 and model.norm_placement != "pre":
        yield _line(run, "residual_multiplier", "needs --norm-placement pre: a norm after a branch would undo it")
    if model.rope_scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield _line(
            run, "rope_low_freq_factor", f"must be less than --rope-high-freq-factor {model.rope_high_freq_factor}"
        )
    if model.position == "sinusoidal" and (model.hidden % 2 or model.hidden < 4):
        yield _line(run, "hidden", "must be even and at least 4 for --position sinusoidal")


def _long_factors(run: RunConfig) -> Problems:
    """Check that LongRoPE has one factor per rotary frequency."""
    count = int(run.model.head_dim * run.model.rope_fraction) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        if len(value_of(run, name)) != count:
            yield _line(run, name, f"must be {count} numbers, one for each frequency of a head")


def _positions(run: RunConfig) -> Problems:
    model = run.model
    if len(model.stacks) > 1 and model.position != "learned":
        yield _line(run, "position", f"must be learned for --family {model.family}, whose decoder reads an encoder")
    for name in _texts(run):
        tokens = value_of(run, name) * run.batch.micro_batch
        if tokens > MOST_TOKENS:
            rule = f"makes {tokens} tokens of a microbatch of {run.batch.micro_batch}; must be at most {MOST_TOKENS}"
            yield _line(run, name, rule)
        if model.positions < value_of(run, name):
            yield _line(run, "positions", f"must be at least {flag_of(name)} {value_of(run, name)}")


def _texts(run: RunConfig) -> tuple[str, ...]:
    """Return the names of the options that set the lengths of a sample's texts."""
    return ("seq_length", "decoder_seq_length")[: len(run.model.stacks)]


def _stages(run: RunConfig) -> Problems:
    parallel, layers = run.parallel, run.model.blocks
    if parallel.zero >= 2 and parallel.pp > 1:
        # With ZeRO 2 or 3, every pipeline stage would reduce its gradients after every microbatch; Megatron-LM and
        # DeepSpeed also refuse this combination.
        yield _line(run, "zero", f"needs --pp 1, not {parallel.pp}; valid with pipelines: 0, 1")
    if parallel.split_rank is not None:
        yield from _split(run)
    elif parallel.stage_layers:
        pieces = parallel.pp * parallel.chunks
        if len(parallel.stage_layers) != pieces or sum(parallel.stage_layers) != layers:
            rule = f"must be {pieces} numbers (--pp x --chunks) whose sum is {_blocks(run)}"
            yield _line(run, "stage_layers", rule)
    elif layers % parallel.pp and len(run.model.stacks) > 1:
        yield f"{_blocks(run)}: must be divisible by --pp {parallel.pp}, or give --split-rank or --stage-layers"
    elif layers % parallel.pp:
        yield _line(run, "layers", f"must be divisible by --pp {parallel.pp}; valid --pp: {_divisors(layers)}")
    else:
        per_stage = layers // parallel.pp
        name = "layers_per_chunk" if parallel.layers_per_chunk else "chunks"
        if per_stage % (value_of(run, name) or 1):
            valid = f"valid {flag_of(name)}: {_divisors(per_stage)}"
            yield _line(run, name, f"must divide the {per_stage} layers of a stage; {valid}")
    interleaves = SCHEDULES[parallel.schedule].interleaves
    if parallel.chunks > 1 and (not interleaves or parallel.pp == 1):
        yield _line(run, "chunks", f"needs --schedule {interleaving()} and --pp of at least 2")
    if interleaves and parallel.chunks == 1:
        yield _line(run, "schedule", "needs --chunks of at least 2; with one chunk use 1f1b")


def _blocks(run: RunConfig) -> str:
    """Return, as text for a message, the options that set the number of blocks in a model."""
    return " + ".join(f"--{name} {count}" for name, count in zip(("layers", "decoder-layers"), run.model.stacks))


def _split(run: RunConfig) -> Problems:
    """Check --split-rank, which divides the stages between encoder and decoder."""
    parallel, model = run.parallel, run.model
    if len(model.stacks) == 1 or parallel.split_rank is None:
        return
    if parallel.chunks > 1:
        yield _line(run, "split_rank", f"needs --chunks 1, not {parallel.chunks}")
        return
    try:
        layers = split_layers(model.stacks[0], model.stacks[1], parallel.pp, parallel.split_rank)
    except ValueError as error:
        yield str(error)
        return
    if parallel.stage_layers != layers:
        yield _line(run, "stage_layers", "excludes --split-rank, which says how many blocks a stage has")


def _tensor(run: RunConfig) -> Problems:
    """Check that sizes split over tensor ranks are divisible by the number of tensor ranks."""
    tp = run.parallel.tp
    if run.model.ffn == 0:
        yield _line(run, "hidden", "is too narrow for a gated layer of 8/3 hidden in steps of 64; give --ffn")
    sizes = {name: value_of(run, name) for name in ("heads", "kv_heads", "ffn")}
    valid = _divisors(math.gcd(*sizes.values()))
    for name, size in sizes.items():
        # If --kv-heads equals --heads, the message about --heads is enough.
        if size % tp and not (name == "kv_heads" and size == run.model.heads):
            yield _line(run, name, f"must be divisible by --tp {tp}; valid --tp: {valid}")


def _fp8(run: RunConfig) -> Problems:
    """Check that the dimensions of the fp8 GEMMs are multiples of 16 or, with --fp8-scaling block, of 128."""
    if not run.precision.fp8:
        return
    if run.precision.fp8_scaling == "block":
        yield from _fp8_blocks(run)
        return
    model, tp, batch = run.model, run.parallel.tp, run.batch
    lengths_of = {
        "hidden": model.hidden,
        "ffn": model.ffn // tp,
        "heads": model.heads * model.head_dim // tp,
        "kv_heads": model.kv_heads * model.head_dim // tp,
        "micro_batch": batch.micro_batch * batch.seq_length // run.parallel.cp,
    }
    if len(model.stacks) > 1:
        lengths_of["decoder_seq_length"] = batch.micro_batch * run.masking.decoder_seq_length
    for name, length in lengths_of.items():
        if length % 16:
            yield _line(run, name, f"makes GEMMs of {length} on a rank; under --fp8 it must be a multiple of 16")


def _fp8_blocks(run: RunConfig) -> Problems:
    """Check that every block of fp8 elements lies within one rank, one logical tensor and one text, so that results do
    not depend on the layout. With context parallelism, a rank has two chunks of each text."""
    model, tp, parts = run.model, run.parallel.tp, 2 * run.parallel.cp if run.parallel.cp > 1 else 1
    lengths_of = {
        "hidden": model.hidden,
        "ffn": model.ffn // tp,
        "heads": model.heads * model.head_dim // tp,
        "kv_heads": model.kv_heads * model.head_dim // tp,
        "seq_length": run.batch.seq_length // parts,
    }
    if len(model.stacks) > 1:
        lengths_of["decoder_seq_length"] = run.masking.decoder_seq_length
    for name, length in lengths_of.items():
        if length % FP8_BLOCK:
            rule = (
                f"a multiple of {FP8_BLOCK}, as --fp8-scaling block needs; --fp8-scaling tensor needs multiples of 16"
            )
            yield _line(run, name, f"makes GEMMs of {length} on a rank, which is not {rule}")


def _overlap(run: RunConfig) -> Problems:
    if not run.parallel.tp_overlap:
        return
    if run.parallel.tp == 1:
        yield _line(run, "tp_overlap", "needs --tp of at least 2")
    for flag in overlap_exclusions(run):
        yield _line(run, "tp_overlap", f"excludes {flag}")


def _ahead(run: RunConfig) -> Problems:
    """Check the options of multi-token prediction (--mtp-layers)."""
    model = run.model
    if not model.mtp_layers:
        return
    if model.mtp_layers >= run.batch.seq_length:
        yield _line(run, "mtp_layers", f"must be below --seq-length {run.batch.seq_length}")
    if model.position not in ("rope", "none"):
        yield _line(run, "mtp_layers", f"needs --position rope or none, not {model.position}")
    excluded = {"--retriever": model.retriever, "--task dpo": run.finetuning.task == "dpo"}
    for flag in (flag for flag, is_set in excluded.items() if is_set):
        yield _line(run, "mtp_layers", f"excludes {flag}")


def graph(run: RunConfig) -> Problems:
    """Check --cuda-graph. A graph has memory for only one microbatch in flight, and requires gradient buckets at fixed
    addresses."""
    if not run.runtime.cuda_graph:
        return
    parallel = run.parallel
    if parallel.pp > 1:
        yield _line(run, "cuda_graph", f"needs --pp 1, not {parallel.pp}; valid there: --no-cuda-graph")
    if parallel.zero > 1:
        yield _line(run, "cuda_graph", f"needs --zero 0 or 1, not {parallel.zero}; valid there: --no-cuda-graph")
    model = run.model
    parts = {"--experts": model.experts, "--mtp-layers": model.mtp_layers}
    for flag in (flag for flag, is_set in parts.items() if is_set):
        yield _line(run, "cuda_graph", f"excludes {flag}; valid there: --no-cuda-graph")


def _columns(run: RunConfig) -> Problems:
    """Check that a row's columns can be split evenly over ranks, into whole context chunks and whole sequence
    shards."""
    cp, tp = run.parallel.cp, run.parallel.tp if run.parallel.sequence_parallel else 1
    kv_heads, unit = run.model.kv_heads, column_unit(run.parallel)
    if cp > 1 and len(run.model.stacks) > 1:
        yield _line(run, "cp", f"must be 1 for --family {run.model.family}, whose decoder reads an encoder")
        return
    for name in _texts(run):
        if value_of(run, name) % unit:
            reasons = [f"twice --cp {cp}"] * (cp > 1) + [f"--tp {tp} under --sequence-parallel"] * (tp > 1)
            yield _line(run, name, f"must be divisible by {unit}, for {' and '.join(reasons)}")
    head_ranks = run.parallel.tp * cp
    if cp > 1 and run.log.sample_interval:
        yield _line(run, "sample_interval", f"excludes --cp {cp}, over which a text that grows cannot be cut")
    if cp > 1 and run.parallel.cp_comm == "all-to-all" and kv_heads % head_ranks:
        rule = f"--kv-heads {kv_heads} must be divisible by {head_ranks}, --tp {run.parallel.tp} x --cp {cp}"
        yield _line(run, "cp_comm", f"{rule}; valid: auto, ring")
    if cp > 1 and run.runtime.ops == "flash-attn" and (run.parallel.cp_comm == "ring" or kv_heads % head_ranks):
        yield _line(run, "ops", "cannot be used in a ring of context ranks; valid there: auto, reference")


def _cells(run: RunConfig) -> int:
    """Return the number of ranks in one model replica."""
    return run.parallel.tp * run.parallel.pp * run.parallel.cp


def _world(run: RunConfig, world: int) -> Problems:
    cells, parallel = _cells(run), run.parallel
    axes = f"--tp {parallel.tp} x --pp {parallel.pp}" + (f" x --cp {parallel.cp}" if parallel.cp > 1 else "")
    yield (
        f"{axes}: {world} rank{'s' * (world != 1)} given, but a model takes {cells}; "
        f"valid --nproc (or torchrun --nproc-per-node): multiples of {cells}"
    )


def _batch(run: RunConfig, world: int) -> Problems:
    batch, dp = run.batch, data_parallel(run, world)
    if batch.rampup:
        problem = _rampup(run)
        if problem:
            yield _line(run, "rampup", problem)
            return
    unit = batch.micro_batch * dp
    # Every batch size of the ramp-up must be divisible over the data ranks; report only the first invalid size.
    for size in batch_sizes(batch):
        if size % unit:
            rule = f"be a multiple of {unit}, --micro-batch {batch.micro_batch} x {dp} data-parallel ranks"
            if size == batch.global_batch:
                yield _line(run, "global_batch", f"must {rule}; valid: {unit}, {2 * unit}, {3 * unit}, ...")
            else:
                yield _line(run, "rampup", f"passes through a batch of {size}, which must {rule}")
            return
    if batch.samples is not None and batch.samples < next(batch_sizes(batch)):
        yield _line(run, "samples", f"must be at least {next(batch_sizes(batch))}, the samples of the first step")
    if batch.accumulation and batch.global_batch != unit * batch.accumulation:
        product = f"--micro-batch {batch.micro_batch} x {dp} data-parallel ranks x this"
        yield _line(run, "accumulation", f"{product} must be --global-batch {batch.global_batch}; give one of the two")
    count, pp = microbatches(run, world), run.parallel.pp
    if pp > 1 and count * pp * run.parallel.chunks > MOST_ACTS:
        pieces = pp * run.parallel.chunks
        rule = f"makes {count} microbatches, each on {pieces} stages (--pp x --chunks)"
        yield _line(run, "global_batch", f"{rule}; must be at most {MOST_ACTS // pieces} microbatches")
    if SCHEDULES[run.parallel.schedule].interleaves and count % pp:
        yield _line(run, "global_batch", f"makes {count} microbatches, which must be a multiple of --pp {pp}")


def _rampup(run: RunConfig) -> str | None:
    batch = run.batch
    if len(batch.rampup) != 3:
        return "must be three numbers: start, increment, samples"
    start, increment, _ = batch.rampup
    if start > batch.global_batch or (batch.global_batch - start) % increment:
        return f"must reach --global-batch {batch.global_batch} from {start} in whole increments of {increment}"
    return None


def _guards(options: Options, world: int) -> Problems:
    """Check --inject, --profile and the options of rollbacks, so that mistakes are reported before any rank starts."""
    for name in ("on_nan", "on_spike"):
        if value_of(options, name) != "rollback":
            continue
        if not (options.checkpoint.save and options.checkpoint.save_interval):
            yield _line(options, name, "needs --save and --save-interval: it goes back to the newest checkpoint")
        if not options.checkpoint.save_optim:
            yield _line(options, name, "excludes --no-save-optim, as a rollback reads the optimizer's state")
    if options.guards.inject and not is_on(INJECT):
        yield _line(options, "inject", f"damages the run; where that is wanted, set {INJECT}=1 in the environment too")
    for text in options.guards.inject:
        try:
            yield from (f"--inject {text}: {problem}" for problem in _without_effect(options, fault(text), world))
        except ValueError as error:
            yield f"--inject {text}: {error}"
    if options.log.profile is not None and profiled_steps(options.log.profile) is None:
        yield _line(options, "profile", "must be the first and the last step; valid: for example 10:12")
    if options.log.profile is not None and max(options.log.profile_ranks, default=0) >= world:
        yield _line(options, "profile_ranks", f"there are ranks 0 to {world - 1}")


def _without_effect(options: Options, asked: Fault, world: int) -> Problems:
    """Yield the reasons why a fault would have no effect in this run."""
    steps, optimizer, task = options.batch.steps, options.optimizer, options.finetuning.task
    if asked.rank >= world:
        yield f"there are ranks 0 to {world - 1}"
    if steps is not None and asked.step > steps:
        yield f"the last step is {steps}"
    if asked.target == "save" and options.checkpoint.save is None:
        yield "needs --save"
    if asked.target == "moment" and optimizer.optimizer == "sgd" and not optimizer.sgd_momentum:
        yield "--optimizer sgd has no moments without --sgd-momentum"
    if asked.target == "tied" and options.parallel.pp == 1:
        yield "needs --pp of at least 2: copies of a tied tensor on several stages"
    if asked.target == "batch" and task in LABELLED:
        yield f"--task {task} has labels of whole rows, which nothing damages"
    if asked.target == "activation" and options.runtime.cuda_graph:
        yield "excludes --cuda-graph, as a graph runs no Python"


def _times(run: RunConfig) -> Problems:
    """Check that the warm-up ends before the decay ends."""
    if (run.batch.steps is None and run.batch.samples is None) or len(run.batch.rampup) not in (0, 3):
        return
    if run.schedule.lr_decay == "constant":
        return
    length = lengths(run)
    if length.anneal_samples + length.warmup_samples > length.decay_samples > length.warmup_samples:
        name = "lr_wsd_decay_samples" if run.schedule.lr_wsd_decay_samples else "lr_wsd_decay_steps"
        yield _line(run, name, "must be at most what the warm-up leaves of the decay")
    if length.warmup_samples < length.decay_samples:
        return
    if run.schedule.lr_warmup_samples:
        yield _line(run, "lr_warmup_samples", f"must be less than --lr-decay-samples {length.decay_samples}")
    else:
        steps = length.decay_samples // run.batch.global_batch
        yield _line(run, "lr_warmup_steps", f"must be less than --lr-decay-steps {steps}")
