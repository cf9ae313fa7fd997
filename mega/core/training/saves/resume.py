"""Resume from a checkpoint: find the checkpoint from which a run starts, and restore the run's state. `saver.py` writes
checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega.core.architecture import architecture, inventory
from mega.core.architecture.adapters import with_adapters
from mega.core.checkpoint.forms.companions import tokenizer_kind, unread_tokenizer
from mega.core.checkpoint.forms.direct import SAMPLED
from mega.core.checkpoint.forms.huggingface import scales_dynamically
from mega.core.checkpoint.forms.open import open_base, open_weights
from mega.core.checkpoint.forms.recognise import check_place, foreign_form, form_at
from mega.core.checkpoint.own.base import describe, named_base
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.checkpoint.own.store import CheckpointStore, locate, store_at
from mega.core.checkpoint.own.together import JsonExchange, alone, together
from mega.core.config.resolve import with_head
from mega.core.config.retriever import with_retriever
from mega.core.config.run import RunConfig, entries, flag_of, options_with, value_of
from mega.core.config.sections import LABELLED
from mega.core.config.unread import is_read
from mega.core.data.build import Datasets
from mega.core.data.dataset import is_blend
from mega.core.family import family
from mega.core.files import url_of
from mega.core.ops.counter import OLD_RULE, RULE
from mega.core.parallel.mesh import Mesh
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.saves.rounding import as_json, device_change, rounding_changes, shown
from mega.core.training.schedules import Schedules
from mega.core.training.state import Progress, TrainState
from mega.core.untrusted import Json, below, numbers_below


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run starts.

    weights_only: whether to restore only weights, without optimizer state and progress. base: for a checkpoint of
    adapters, the checkpoint with the frozen weights.
    """

    checkpoint: StoredWeights
    weights_only: bool
    base: StoredWeights | None = None


def find_resume_point(
    run: RunConfig, report: Callable[[str], None], exchange: JsonExchange = alone
) -> ResumePoint | None:
    """Find the checkpoint from which this run starts (`_find`) and, if it contains only adapters, their base.

    Errors: ValueError, on all ranks.
    """
    point = _find(run, report, exchange)
    if (save := run.checkpoint.save) is not None and (point is None or point.weights_only):
        together(partial(check_place, Path(save), "--save"), exchange)
    if point is None or named_base(point.checkpoint) is None:
        return point
    # In a run that resumes, --load names the base, which may have moved, or other adapters of the same base.
    named_base_path = run.checkpoint.load if run.checkpoint.resume is not None else None
    return dataclasses.replace(point, base=open_base(point.checkpoint, named_base_path, report, exchange))


def _find(run: RunConfig, report: Callable[[str], None], exchange: JsonExchange) -> ResumePoint | None:
    """Return the checkpoint from which this run starts: that of --resume, otherwise that of --load, or None if neither
    is given. The result is identical on all ranks.

    Every rank searches, and the results are compared before any weight is read. In the directory of a run, the newest
    step that all ranks trust and that is identical on all ranks is chosen (`CheckpointStore.find`). A message names the
    ranks that do not trust a newer step, with the reason. A step that the user names is either used or rejected with an
    error.
    Errors: ValueError on all ranks, if a named checkpoint is absent or damaged on any rank, or if there is no
    checkpoint that all ranks trust.
    """
    options = run.checkpoint
    if options.resume == "auto" and options.save is not None:
        checkpoint = _store(options.save, exchange).find(verify=True, report=report, exchange=exchange)
        if checkpoint is not None:
            return ResumePoint(checkpoint, weights_only=False)
        report(f"--resume auto: no checkpoint under {options.save} yet")
    elif options.resume is not None:
        return ResumePoint(locate(options.resume, report, exchange), weights_only=False)
    if options.load is None:
        return None
    # If --load and --save name the same directory, that directory is empty at the first start of the run.
    if options.load == options.save and not options.require_load:
        together(partial(_check_own_place, options.load), exchange)
        checkpoint = _store(options.load, exchange).find(verify=False, report=report, exchange=exchange)
        if checkpoint is None:
            report(f"--load {options.load}: holds no checkpoint yet; starting from the beginning")
            return None
        return ResumePoint(checkpoint, weights_only=options.finetune)
    if run.runtime.dry_run and url_of(options.load) is None and not Path(options.load).exists():
        report(f"--load {options.load}: does not exist here, so the run is not compared with it")  # on another machine
        return None
    weights = open_weights(options.load, report, exchange)
    if weights.foreign and not options.finetune and form_at(weights.path).verb == "reshard":
        report(
            f"--load {options.load}: weights alone are read of {form_at(weights.path).words}; to continue its "
            f"optimizer and its steps, {_continuing(options.load, 'RUN')}"
        )
    return ResumePoint(weights, weights_only=options.finetune or weights.foreign)


def _continuing(tree: str, place: str) -> str:
    """Return the advice on how to continue from a checkpoint of Megatron-LM."""
    return f"`mega reshard --load-dir {tree} --save-dir {place}` makes a checkpoint, which --load {place} continues"


def _check_own_place(place: str) -> None:
    """Check that a directory used for both --load and --save contains no weights in another program's format. Errors:
    CheckpointError."""
    form = None if url_of(place) is not None else foreign_form(Path(place))
    if form is not None:
        other = f"{place.rstrip('/')}-mega"
        advice = _continuing(place, other) if form.verb == "reshard" else "give --save another directory"
        raise CheckpointError(f"--save {place}: holds {form.words}, so that no run is saved there; {advice}")


def _store(place: str, exchange: JsonExchange) -> CheckpointStore:
    return together(lambda: store_at(place), exchange)


def sidecar_files(checkpoint: StoredWeights, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the small files of the checkpoint to copy into new checkpoints: the tokenizer's files, and files for other
    tools. `run.toml` is not copied, because each run writes its own run.toml. The result is empty if the run has a
    different tokenizer, because the files refer to token ids of the old tokenizer.
    """
    stored_files = {name: path.read_bytes() for name, path in checkpoint.attachments.items() if name != "run.toml"}
    recorded = below(checkpoint.meta, "config", "tokenizer").get("tokenizer")
    attachments = checkpoint.attachments
    if recorded is None and tokenizer_kind(attachments) is None and unread_tokenizer(attachments) is None:
        return stored_files
    tokenizer_files = {
        name: path.read_bytes() for name, path in (tokenizer.files() if tokenizer is not None else {}).items()
    }
    return stored_files if tokenizer_files.items() <= stored_files.items() else {}


def restore(state: TrainState, point: ResumePoint, *, whole: bool = False) -> None:
    """Restore `state` from a checkpoint of any layout. whole: whether to restore the optimizer even with
    --no-load-optim.

    Errors: ValueError naming the option that differs, or the tensor that is missing or damaged.
    """
    checkpoint, run = point.checkpoint, state.run
    check_resumable(run, point, whole=whole)
    new_keys = {f"{kind}/{name}" for kind in ("weights", "master") for name in new_tensors(run, point)}
    adapters = architecture(run.model).adapters
    if adapters is not None:
        base = checkpoint if point.base is None else point.base
        base_record = named_base(checkpoint)
        digest = base.digest if base_record is None else base_record["digest"]
        # If the base's digest covers the weights' values, read the weights rather than the master weights.
        as_named = digest.startswith(SAMPLED)
        base.read([piece if as_named else _truest(piece, base) for piece in state.frozen_pieces()], cast=True)
        state.base = describe(base, digest)
    if adapters is not None and point.base is None:
        return  # the adapters are new
    # Weights of a different dtype are rounded from the master weights, which have a higher precision.
    stored_weights = [piece for piece in state.weight_pieces(mine=False) if piece.key not in new_keys]
    checkpoint.read([_truest(piece, checkpoint) for piece in stored_weights], cast=True)
    state.optimizer.masters_from_weights()
    optimizer_pieces = list(state.optimizer_pieces(mine=False))
    masters = [piece for piece in optimizer_pieces if piece.key.startswith("master/") and piece.key not in new_keys]
    checkpoint.read([piece for piece in masters if piece.key in checkpoint.tensors], cast=True)
    if not point.weights_only and (whole or run.checkpoint.load_optim):
        moments = [piece for piece in optimizer_pieces if not piece.key.startswith("master/")]
        missing = next((piece.key for piece in moments if piece.key not in checkpoint.tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{checkpoint.path}: holds no optimizer state ({missing}); give --no-load-optim or --finetune"
            )
        checkpoint.read(moments, cast=True)
        state.optimizer.updates = int(numbers_below({"updates": _stated(checkpoint, "updates")})["updates"])
        if state.scaler is not None and (scaler := numbers_below(checkpoint.meta, "scaler")):
            state.scaler.restore(scaler)
    if not point.weights_only:
        state.progress = progress_of(point)
        state.guard.restore(checkpoint.meta.get("guard"))
        state.dropout_rule = _dropout_rule(point)


def check_resumable(run: RunConfig, point: ResumePoint, *, whole: bool = False) -> None:
    """Check, without reading tensors, that the run may start from a checkpoint. whole: as in `restore`.

    Errors: CheckpointError naming the option that differs.
    """
    checkpoint = point.checkpoint
    _check_beginning(run, point)
    _same_model(run, point)
    if point.weights_only:
        return
    _same_task(run, checkpoint)
    if whole or run.checkpoint.load_optim:
        _same_rule(run, checkpoint)
        _check_state(run, checkpoint)
        _stated(checkpoint, "updates")
    _stated(checkpoint, "progress")


def progress_of(point: ResumePoint | None) -> Progress:
    """Return the progress with which a run starts. Errors: CheckpointError if the checkpoint does not contain the
    progress."""
    if point is None or point.weights_only:
        return Progress()
    return Progress.from_meta(numbers_below(_stated(point.checkpoint, "progress")))


def _check_beginning(run: RunConfig, point: ResumePoint) -> None:
    """Check that new adapters start a new run at step 0; otherwise the run's checkpoints would replace the checkpoints
    of the adapters' base.

    Errors: CheckpointError.
    """
    adapters = architecture(run.model).adapters
    if adapters is not None and point.base is None and not point.weights_only:
        raise CheckpointError(
            f"--lora-rank {adapters.rank}: {point.checkpoint.path} holds a whole model; adapters begin a new "
            "run: give --load with --finetune, and another --save"
        )


def new_tensors(run: RunConfig, point: ResumePoint) -> list[str]:
    """Return the names of tensors that are not in the checkpoint and start at their initial values. They belong to a
    new head, to a head with a different number of classes, or to a new retriever.

    The result is empty for a run that resumes, because such a run must find all tensors.
    """
    if not point.weights_only:
        return []
    stored = model_of(point.checkpoint.meta, str(point.checkpoint.path))
    if architecture(stored).output == architecture(run.model).output and stored.retriever >= run.model.retriever:
        return []
    stored_shapes = {tensor.name: tensor.shape for tensor in inventory(stored)}
    return [tensor.name for tensor in inventory(run.model) if stored_shapes.get(tensor.name) != tensor.shape]


def _stated(checkpoint: StoredWeights, name: str) -> Json:
    """Return a metadata value that is required for a resume. Errors: CheckpointError if the value is missing."""
    if name not in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path}: its manifest says no meta.{name}; give --finetune to load weights alone"
        )
    return checkpoint.meta[name]


def _dropout_rule(point: ResumePoint) -> int:
    """Return the dropout rule of the run: the oldest rule if a mega checkpoint does not record the rule, the newest
    rule for imported weights."""
    meta = point.checkpoint.meta
    rule = meta.get("dropout_rule", OLD_RULE if "fingerprint" in meta else RULE)
    assert isinstance(rule, int)  # plain_state.py has checked the type
    return rule


def overlapped_before(run: RunConfig, point: ResumePoint | None) -> bool | None:
    """Return whether tensor-parallel exchanges overlapped GEMMs (--tp-overlap) in the run that `run` resumes. Return
    None if `run` starts at step 0, or if a different tensor-parallel layout changes the rounding anyway.

    Checkpoints from versions without this record contain the option itself, which was off by default.
    """
    if point is None or point.weights_only or "fingerprint" not in (meta := point.checkpoint.meta):
        return None
    before, parallel = below(meta, "config", "parallel"), run.parallel
    tp = numbers_below(meta, "layout").get("tp", before.get("tp"))
    if (tp, before.get("sequence_parallel")) != (parallel.tp, parallel.sequence_parallel):
        return None
    return bool(meta.get("tp_overlap", before.get("tp_overlap")))


def overlap_difference(run: RunConfig, point: ResumePoint, overlaps: bool) -> str | None:
    """Return a message if the overlap of exchanges and GEMMs differs from that of the checkpoint. overlaps:
    `TrainState.overlaps`."""
    overlapped = overlapped_before(run, point)
    if overlapped in (None, overlaps):
        return None
    current, before = ("--tp-overlap" if each else "--no-tp-overlap" for each in (overlaps, overlapped))
    return f"not as in the checkpoint: {current} (was {before}); results differ by rounding"


def _noted_changes(run: RunConfig, stored: Mapping[str, Json]) -> Iterator[str]:
    """Yield each option whose change is reported, with its values in this run and in the checkpoint. stored: the
    checkpoint's options by name."""
    for name in options_with(on_resume="noted"):
        if not is_read(run, entries()[name]):
            continue
        value = as_json(value_of(run, name))
        if name in stored and stored[name] != value:
            yield f"{flag_of(name)} {shown(value)} (was {shown(stored[name])})"


def _schedule_changes(run: RunConfig, point: ResumePoint) -> Iterator[str]:
    """Yield the changes made by --override-schedule. A stored schedule that this version cannot read is ignored,
    because it is not used."""
    state = point.checkpoint.meta.get("schedule")
    if not run.checkpoint.override_schedule or state is None:
        return
    try:
        stored = Schedules.from_state_dict(state, str(point.checkpoint.path))
    except CheckpointError:
        return
    for flag, value, stored_value in Schedules.of(run).differences(stored):
        yield f"{flag} {value} (was {stored_value})"


def _order_changes(
    run: RunConfig,
    meta: Mapping[str, Json],
    stored: Mapping[str, Json],
    mesh: Mesh,
    threads: int | None,
    gpu: bool | None,
) -> Iterator[str]:
    """Yield messages about what changes the order of sums: the layout or, if the layout is unchanged, the number of
    threads; then options and the kind of device. meta: the checkpoint's metadata. stored: its options by name."""
    sizes = {name: size for name, size in mesh.sizes.items() if size > 1}
    stored_sizes = numbers_below(meta, "layout") or sizes
    layout = {name: size for name, size in stored_sizes.items() if size > 1}
    for name in ("ep", "etp") if run.model.experts else ():
        current, before = value_of(run, name), stored.get(name)
        sizes |= {name: current} if current > 1 else {}
        layout |= {name: before} if isinstance(before, int) and before > 1 else {}
    if layout != sizes:
        yield f"{_layout(sizes)} (was {_layout(layout)})"
    elif None not in (threads, before := meta.get("threads")) and threads != before:
        yield f"{threads} CPU threads a rank (was {before})"
    if changes := [*rounding_changes(run, stored, mesh, gpu), *filter(None, [device_change(meta, gpu)])]:
        yield ", ".join(changes)


def differences(
    run: RunConfig,
    point: ResumePoint,
    data: Datasets,
    mesh: Mesh,
    threads: int | None = None,
    gpu: bool | None = None,
) -> Iterator[str]:
    """Yield messages about differences from the checkpoint: options, layout, and the content of token files.

    threads: the value of `Device.threads`. gpu: whether ranks have GPUs; None if this is unknown. The schedule is
    compared only with --override-schedule, because otherwise schedules.py rejects a different schedule.
    """
    sections = below(point.checkpoint.meta, "config")
    stored = {name: value for section in sections for name, value in below(sections, section).items()}
    for change in _order_changes(run, point.checkpoint.meta, stored, mesh, threads, gpu):
        yield f"not as in the checkpoint: {change}; results differ by rounding"
    if not run.checkpoint.load_optim:
        yield "not as in the checkpoint: --no-load-optim, so the optimizer's state begins afresh"
    changes = [*_noted_changes(run, stored), *_schedule_changes(run, point)]
    if changes:
        yield f"not as in the checkpoint: {', '.join(changes)}"
    if architecture(run.model).drops and _dropout_rule(point) == OLD_RULE:
        yield (
            "dropout: decided as by the version that began this run, which no fused kernel does, so slowly on a GPU; "
            "--finetune starts a new run from the same weights"
        )
    if length := _reshuffled(run, stored, data):
        yield (
            f"not as in the checkpoint: {length}: passes over the data are shuffled together, so all of it is shuffled "
            "again"
        )
    if run.data.order == "cyclic":
        prior = below(point.checkpoint.meta, "layout").get("dp", mesh.dp.size), stored.get("micro_batch")
        if prior != (mesh.dp.size, run.batch.micro_batch):
            yield (
                f"not as in the checkpoint: {mesh.dp.size} data ranks of --micro-batch {run.batch.micro_batch} (was "
                f"{prior[0]} of {prior[1]}): --order cyclic gives each of them samples of its own, so all are assigned "
                "again"
            )
    for prefix in other_corpora(point, data):
        yield f"not as in the checkpoint: {prefix} holds other tokens than those that the run has been trained on"


def other_corpora(point: ResumePoint, data: Datasets) -> list[str]:
    """Return the token files whose content has changed since the checkpoint was written."""
    stored = below(point.checkpoint.meta, "corpora")
    return [
        prefix
        for prefix, content in data.corpora.items()
        for stored_content in (below(stored, prefix),)
        if any(
            None not in (hashed, stored_content.get(name)) and stored_content[name] != hashed
            for name, hashed in content.items()
        )
    ]


def check_corpora(run: RunConfig, point: ResumePoint, data: Datasets) -> None:
    """Check that the token files of a run that resumes have not changed; otherwise the run would continue at the old
    position in different data. Errors: CheckpointError naming the files."""
    if not point.weights_only and not run.data.allow_corpus_change and (changed := other_corpora(point, data)):
        raise CheckpointError(
            f"{', '.join(changed)}: holds other tokens than when {point.checkpoint.path} was written; put the old ones "
            "back, give --allow-corpus-change to go on with these from the same place of the order, or --finetune to "
            "begin a new run from the weights"
        )


def _layout(sizes: Mapping[str, float]) -> str:
    """Format the numbers of ranks in a layout for a message.

    >>> _layout({"tp": 2, "dp": 4}), _layout({})
    ('--tp 2 x 4 data ranks', '1 rank')
    """
    words = [f"{size} data ranks" if name == "dp" else f"--{name} {size}" for name, size in sizes.items()]
    return " x ".join(words) or "1 rank"


def _reshuffled(run: RunConfig, stored: Mapping[str, object], data: Datasets) -> str:
    """Return a description of the change of the run's length if this change affects the order of samples; otherwise "".

    A single pass has one shuffle, independent of the length. Several passes are shuffled together for the whole length,
    as in Megatron-LM.
    """
    (length, count), (stored_length, stored_count) = _length(dataclasses.asdict(run.batch)), _length(stored)
    tokens = run.finetuning.task not in LABELLED and (run.data.data_path or run.data.train_data)
    if data.train is None or not tokens or count == stored_count:
        return ""
    # Before its length was reduced, a run may have had several passes.
    several_passes = data.repeats or (stored_count > len(data.train) and not is_blend(data.train))
    return f"{length} (was {stored_length})" if several_passes else ""


def _length(values: Mapping[str, object]) -> tuple[str, int]:
    """Return the length of a run, as a flag and as a number of samples."""
    integers = {name: value for name, value in values.items() if isinstance(value, int)}
    samples, steps = integers.get("samples"), integers.get("steps")
    if samples is not None:
        return f"--samples {samples}", samples
    return f"--steps {steps}", (steps or 0) * integers.get("global_batch", 0)


def _truest(weight: Piece, checkpoint: StoredWeights) -> Piece:
    """Return the rectangle `weight`, taken from the master weight if the checkpoint contains it, otherwise from the
    weight."""
    master = weight.key.replace("weights/", "master/", 1)
    return dataclasses.replace(weight, key=master) if master in checkpoint.tensors else weight


def _same_rule(run: RunConfig, checkpoint: StoredWeights) -> None:
    """Check that the run and the checkpoint have the same update rule, because moments of different rules may have the
    same names."""
    optimizer, stored = run.optimizer.optimizer, below(checkpoint.meta, "config", "optimizer").get("optimizer")
    if stored not in (None, optimizer):
        raise CheckpointError(
            f"--optimizer {optimizer}: {checkpoint.path} holds the state of {stored}; give --optimizer {stored}, or "
            "--no-load-optim to start with none"
        )


def _check_state(run: RunConfig, checkpoint: StoredWeights) -> None:
    """Check that the checkpoint has the optimizer state that the optimizer needs. Errors: CheckpointError if it has
    none."""
    stateless = run.optimizer.optimizer == "sgd" and not run.optimizer.sgd_momentum
    kinds = {key.partition("/")[0] for key in checkpoint.tensors}
    if not stateless and not kinds - {"weights", "master"}:
        raise CheckpointError(f"{checkpoint.path}: holds no optimizer state; give --no-load-optim or --finetune")


def _same_task(run: RunConfig, checkpoint: StoredWeights) -> None:
    """Check that the run and the checkpoint have the same --task. Errors: CheckpointError if the tasks differ."""
    task = run.finetuning.task
    stored = below(checkpoint.meta, "config", "finetuning").get("task", "lm")
    if stored != task:
        raise CheckpointError(
            f"--task {task}: {checkpoint.path} is of a run with --task {stored}; give that one, or --finetune to start "
            "a new run from its weights"
        )


def _same_model(run: RunConfig, point: ResumePoint) -> None:
    """Check that the model's options equal those of the checkpoint, except for the head of a task, a new retriever and
    new adapters. Errors: CheckpointError naming each option that differs."""
    checkpoint = point.checkpoint
    model = model_of(checkpoint.meta, str(checkpoint.path))
    if point.weights_only:
        model = with_head(model, run.finetuning.task)
        if run.model.retriever and not model.retriever:  # the retriever is new
            model = with_retriever(model, run.model)
    if named_base(checkpoint) is None:  # the adapters are new
        model = with_adapters(model, run.model)
    stored, requested = dataclasses.asdict(model), dataclasses.asdict(run.model)
    if (
        family(model).stage is family(run.model).stage
    ):  # families with the same stage differ only in options, which are compared below
        stored["family"] = requested["family"]
    for each in (stored, requested):
        if each["experts"]:  # None means the width of `ffn`
            each["expert_ffn"] = each["expert_ffn"] or each["ffn"]
    differ = [
        name for name in options_with(on_resume="must match") if name in requested and requested[name] != stored[name]
    ]
    longer = requested["positions"] > stored["positions"] and scales_dynamically(checkpoint.attachments)
    if longer or (architecture(run.model).input.learned_positions and stored["positions"] != requested["positions"]):
        differ.append("positions")
    if differ:
        advice = "" if run.checkpoint.use_checkpoint_config else " (or give --use-checkpoint-config)"
        lines = [
            f"{flag_of(name)} {shown(requested[name])}: the checkpoint {checkpoint.path} has {shown(stored[name])}; "
            f"must be the same{advice}"
            for name in differ
        ]
        raise CheckpointError("\n".join(lines))
