"""Resuming from a checkpoint: which one a run starts from, and how its state is filled. saver.py writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega.core.architecture import architecture, inventory
from mega.core.architecture.adapters import with_adapters
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
from mega.core.config.run import RunConfig, flag_of, options_with, value_of
from mega.core.config.sections import LABELLED
from mega.core.data.build import Datasets
from mega.core.data.dataset import BlendedDataset
from mega.core.family import family
from mega.core.files import url_of
from mega.core.ops.counter import OLD_RULE, RULE
from mega.core.parallel.mesh import Mesh
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.state import Progress, TrainState
from mega.core.untrusted import Json, below, numbers_below


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts from. `weights_only` leaves optimizer and progress out.

    base: where the checkpoint holds adapters alone, the checkpoint that they were trained on.
    """

    checkpoint: StoredWeights
    weights_only: bool
    base: StoredWeights | None = None


def find_resume_point(
    run: RunConfig, report: Callable[[str], None], exchange: JsonExchange = alone
) -> ResumePoint | None:
    """Where this run starts from, as `_find` looks for it, and the base of a checkpoint of adapters.

    Errors: ValueError, on all ranks.
    """
    point = _find(run, report, exchange)
    if (save := run.checkpoint.save) is not None and (point is None or point.weights_only):
        together(partial(check_place, Path(save), "--save"), exchange)
    if point is None or named_base(point.checkpoint) is None:
        return point
    # If a run resumes, --load names the base, wherever it is now, or adapters of the same base.
    given = run.checkpoint.load if run.checkpoint.resume is not None else None
    return dataclasses.replace(point, base=open_base(point.checkpoint, given, report, exchange))


def _find(run: RunConfig, report: Callable[[str], None], exchange: JsonExchange) -> ResumePoint | None:
    """The checkpoint this run starts from: --resume, else --load, else none; the same one on every rank.

    Every rank looks, and what they found is compared before any weight is read: of a run's directory, the newest step
    is taken that all of them see, and see alike (`CheckpointStore.find`); which ranks could not trust a newer one, and
    why, is reported. A step that the user names is taken, or refused.
    Errors: ValueError, on all ranks, where a named checkpoint is absent or damaged for any of them, or none of several
    can be trusted by all.
    """
    options = run.checkpoint
    if options.resume == "auto" and options.save is not None:
        found = _store(options.save, exchange).find(verify=True, report=report, exchange=exchange)
        if found is not None:
            return ResumePoint(found, weights_only=False)
        report(f"--resume auto: no checkpoint under {options.save} yet")
    elif options.resume is not None:
        return ResumePoint(locate(options.resume, report, exchange), weights_only=False)
    if options.load is None:
        return None
    # The first start of a run that loads from where it saves; anywhere else a missing checkpoint is a mistake.
    if options.load == options.save and not options.require_load:
        together(partial(_check_own_place, options.load), exchange)
        found = _store(options.load, exchange).find(verify=False, report=report, exchange=exchange)
        if found is None:
            report(f"--load {options.load}: holds no checkpoint yet; starting from the beginning")
            return None
        return ResumePoint(found, weights_only=options.finetune)
    weights = open_weights(options.load, report, exchange)
    if weights.foreign and not options.finetune and form_at(weights.path).verb == "reshard":
        report(
            f"--load {options.load}: weights alone are read of {form_at(weights.path).words}; to continue its "
            f"optimizer and its steps, {_continuing(options.load, 'RUN')}"
        )
    return ResumePoint(weights, weights_only=options.finetune or weights.foreign)


def _continuing(tree: str, place: str) -> str:
    """How a tree of Megatron-LM's is continued."""
    return f"`mega reshard --load-dir {tree} --save-dir {place}` makes a checkpoint, which --load {place} continues"


def _check_own_place(place: str) -> None:
    """Errors: CheckpointError where others' weights are in the directory that a run loads from and saves to."""
    form = None if url_of(place) is not None else foreign_form(Path(place))
    if form is not None:
        other = f"{place.rstrip('/')}-mega"
        made = _continuing(place, other) if form.verb == "reshard" else "give --save another directory"
        raise CheckpointError(f"--save {place}: holds {form.words}, so that no run is saved there; {made}")


def _store(place: str, exchange: JsonExchange) -> CheckpointStore:
    return together(lambda: store_at(place), exchange)


def sidecar_files(checkpoint: StoredWeights, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files that travel with the weights a run starts from: its tokenizer's, and what others' tools go by.

    run.toml is each run's own. Nothing where the run has another tokenizer: the files speak of the old one's ids.
    """
    found = {name: path.read_bytes() for name, path in checkpoint.attachments.items() if name != "run.toml"}
    own = {name: path.read_bytes() for name, path in (tokenizer.files() if tokenizer is not None else {}).items()}
    return found if own.items() <= found.items() else {}


def restore(state: TrainState, point: ResumePoint, *, whole: bool = False) -> None:
    """Fill `state` from a checkpoint of any layout. whole: with the optimizer, also where --no-load-optim begins
    without it.

    Errors: ValueError naming the option that differs, or the tensor that is missing or damaged.
    """
    checkpoint, run = point.checkpoint, state.run
    _check_beginning(run, point)
    _same_model(run, point)
    new = {f"{kind}/{name}" for kind in ("weights", "master") for name in new_tensors(run, point)}
    adapters = architecture(run.model).adapters
    if adapters is not None:
        base = checkpoint if point.base is None else point.base
        named = named_base(checkpoint)
        digest = base.digest if named is None else named["digest"]
        # A base that is known by its numbers is that of these numbers, whatever masters lie next to them.
        as_named = digest.startswith(SAMPLED)
        base.read([piece if as_named else _truest(piece, base) for piece in state.frozen_pieces()], cast=True)
        state.base = describe(base, digest)
    if not point.weights_only:
        _same_task(run, checkpoint)
    if adapters is not None and point.base is None:
        return  # the adapters are new
    # Masters are the truth; weights of another dtype are rounded from them.
    known = [piece for piece in state.weight_pieces(mine=False) if piece.key not in new]
    checkpoint.read([_truest(piece, checkpoint) for piece in known], cast=True)
    state.optimizer.masters_from_weights()
    held = list(state.optimizer_pieces(mine=False))
    masters = [piece for piece in held if piece.key.startswith("master/") and piece.key not in new]
    checkpoint.read([piece for piece in masters if piece.key in checkpoint.tensors], cast=True)
    if not point.weights_only and (whole or run.checkpoint.load_optim):
        _same_rule(run, checkpoint)
        wanted = [piece for piece in held if not piece.key.startswith("master/")]
        missing = next((piece.key for piece in wanted if piece.key not in checkpoint.tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{checkpoint.path}: holds no optimizer state ({missing}); give --no-load-optim or --finetune"
            )
        checkpoint.read(wanted, cast=True)
        state.optimizer.updates = int(numbers_below({"updates": _stated(checkpoint, "updates")})["updates"])
        if state.scaler is not None and (scaler := numbers_below(checkpoint.meta, "scaler")):
            state.scaler.restore(scaler)
    if not point.weights_only:
        state.progress = Progress.from_meta(numbers_below(_stated(checkpoint, "progress")))
        state.guard.restore(checkpoint.meta.get("guard"))
        state.dropout_rule = _dropout_rule(point)


def _check_beginning(run: RunConfig, point: ResumePoint) -> None:
    """Adapters begin at step 0 of a run of their own: anywhere else they would take the place of their base.

    Errors: CheckpointError.
    """
    adapters = architecture(run.model).adapters
    if adapters is not None and point.base is None and not point.weights_only:
        raise CheckpointError(
            f"--lora-rank {adapters.rank}: {point.checkpoint.path} holds a whole model; adapters begin a new "
            "run: give --load with --finetune, and another --save"
        )


def new_tensors(run: RunConfig, point: ResumePoint) -> list[str]:
    """Those of a head that the checkpoint has none of, or one for other classes, and of a retriever that it is without:
    they begin at their initial values.

    Only where weights alone are loaded; a run that resumes must find everything.
    """
    if not point.weights_only:
        return []
    stored = model_of(point.checkpoint.meta, str(point.checkpoint.path))
    if architecture(stored).output == architecture(run.model).output and stored.retriever >= run.model.retriever:
        return []
    known = {tensor.name: tensor.shape for tensor in inventory(stored)}
    return [tensor.name for tensor in inventory(run.model) if known.get(tensor.name) != tensor.shape]


def _stated(checkpoint: StoredWeights, name: str) -> Json:
    """A value of the plain state that a run cannot resume without."""
    if name not in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path}: its manifest says no meta.{name}; give --finetune to load weights alone"
        )
    return checkpoint.meta[name]


def _dropout_rule(point: ResumePoint) -> int:
    """How the run decides dropout. One of ours that says nothing is older than the choice; an imported one is new."""
    meta = point.checkpoint.meta
    rule = meta.get("dropout_rule", OLD_RULE if "fingerprint" in meta else RULE)
    assert isinstance(rule, int)  # plain_state.py has checked it
    return rule


def differences(
    run: RunConfig, point: ResumePoint, data: Datasets, mesh: Mesh, threads: int | None = None
) -> Iterator[str]:
    """Lines of what this run does otherwise than the one it resumes, and what its token files hold otherwise.

    threads: of `Device`. The schedule is not of it: schedules.py refuses another one.
    """
    sections = below(point.checkpoint.meta, "config")
    stored = {name: value for section in sections for name, value in below(sections, section).items()}
    sizes = {name: size for name, size in mesh.sizes.items() if size > 1}
    there = numbers_below(point.checkpoint.meta, "layout") or sizes
    layout = {name: size for name, size in there.items() if size > 1}
    for name in ("ep", "etp") if run.model.experts else ():
        now, before = value_of(run, name), stored.get(name)
        sizes |= {name: now} if now > 1 else {}
        layout |= {name: before} if isinstance(before, int) and before > 1 else {}
    if layout != sizes:
        yield f"not as in the checkpoint: {_layout(sizes)} (was {_layout(layout)}); results differ by rounding"
    elif None not in (threads, before := point.checkpoint.meta.get("threads")) and threads != before:
        yield f"not as in the checkpoint: {threads} CPU threads a rank (was {before}); results differ by rounding"
    noted = []
    for name in options_with(on_resume="noted"):
        value = value_of(run, name)
        ours = list(value) if isinstance(value, tuple) else value
        if name in stored and stored[name] != ours:
            noted.append(f"{flag_of(name)} {_shown(ours)} (was {_shown(stored[name])})")
    if noted:
        yield f"not as in the checkpoint: {', '.join(noted)}"
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
        then = below(point.checkpoint.meta, "layout").get("dp", mesh.dp.size), stored.get("micro_batch")
        if then != (mesh.dp.size, run.batch.micro_batch):
            yield (
                f"not as in the checkpoint: {mesh.dp.size} data ranks of --micro-batch {run.batch.micro_batch} (was "
                f"{then[0]} of {then[1]}): --order cyclic gives each of them samples of its own, so all are assigned "
                "again"
            )
    for prefix in other_corpora(point, data):
        yield f"not as in the checkpoint: {prefix} holds other tokens than those that the run has been trained on"


def other_corpora(point: ResumePoint, data: Datasets) -> list[str]:
    """Token files of today's that hold other tokens than under the same name when the checkpoint was written."""
    stored = below(point.checkpoint.meta, "corpora")
    return [
        prefix
        for prefix, now in data.corpora.items()
        for then in (below(stored, prefix),)
        if any(None not in (hashed, then.get(name)) and then[name] != hashed for name, hashed in now.items())
    ]


def check_corpora(run: RunConfig, point: ResumePoint, data: Datasets) -> None:
    """A run is continued on the tokens that it began with: after other ones its samples are neither those that are left
    nor new. Errors: CheckpointError naming the files."""
    if not point.weights_only and not run.data.allow_corpus_change and (others := other_corpora(point, data)):
        raise CheckpointError(
            f"{', '.join(others)}: holds other tokens than when {point.checkpoint.path} was written; put the old ones "
            "back, give --allow-corpus-change to go on with these from the same place of the order, or --finetune to "
            "begin a new run from the weights"
        )


def _layout(sizes: Mapping[str, float]) -> str:
    """
    >>> _layout({"tp": 2, "dp": 4}), _layout({})
    ('--tp 2 x 4 data ranks', '1 rank')
    """
    words = [f"{size} data ranks" if name == "dp" else f"--{name} {size}" for name, size in sizes.items()]
    return " x ".join(words) or "1 rank"


def _reshuffled(run: RunConfig, stored: Mapping[str, object], data: Datasets) -> str:
    """How the length that the data are shuffled for differs, where that gives other samples; else nothing.

    One pass is one shuffle, however much of it is read. Several are shuffled for the whole length, as Megatron-LM does.
    """
    (now, count), (then, before) = _length(dataclasses.asdict(run.batch)), _length(stored)
    tokens = run.finetuning.task not in LABELLED and (run.data.data_path or run.data.train_data)
    if data.train is None or not tokens or count == before:
        return ""
    # What is shorter now may have been several passes before.
    several = data.repeats or (before > len(data.train) and not isinstance(data.train, BlendedDataset))
    return f"{now} (was {then})" if several else ""


def _length(values: Mapping[str, object]) -> tuple[str, int]:
    """How long a run was asked to be, and in samples."""
    found = {name: value for name, value in values.items() if isinstance(value, int)}
    samples, steps = found.get("samples"), found.get("steps")
    if samples is not None:
        return f"--samples {samples}", samples
    return f"--steps {steps}", (steps or 0) * found.get("global_batch", 0)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _truest(weight: Piece, checkpoint: StoredWeights) -> Piece:
    """A weight read from its master, where the checkpoint holds one."""
    master = weight.key.replace("weights/", "master/", 1)
    return dataclasses.replace(weight, key=master) if master in checkpoint.tensors else weight


def _same_rule(run: RunConfig, checkpoint: StoredWeights) -> None:
    """One rule's moments are not another's, though they may bear the same name."""
    ours, stored = run.optimizer.optimizer, below(checkpoint.meta, "config", "optimizer").get("optimizer")
    if stored not in (None, ours):
        raise CheckpointError(
            f"--optimizer {ours}: {checkpoint.path} holds the state of {stored}; give --optimizer {stored}, or "
            "--no-load-optim to start with none"
        )


def _same_task(run: RunConfig, checkpoint: StoredWeights) -> None:
    """A run is continued towards what it was trained for."""
    ours = run.finetuning.task
    stored = below(checkpoint.meta, "config", "finetuning").get("task", "lm")
    if stored != ours:
        raise CheckpointError(
            f"--task {ours}: {checkpoint.path} is of a run with --task {stored}; give that one, or --finetune to start "
            "a new run from its weights"
        )


def _same_model(run: RunConfig, point: ResumePoint) -> None:
    """The model's mathematics must be the checkpoint's; else the weights mean something else. A task brings its own
    head."""
    checkpoint = point.checkpoint
    model = model_of(checkpoint.meta, str(checkpoint.path))
    if point.weights_only:
        model = with_head(model, run.finetuning.task)
        if run.model.retriever and not model.retriever:  # what reads neighbours begins here
            model = with_retriever(model, run.model)
    if named_base(checkpoint) is None:  # adapters of these weights begin here
        model = with_adapters(model, run.model)
    stored, ours = dataclasses.asdict(model), dataclasses.asdict(run.model)
    if family(model).stage is family(run.model).stage:  # one kind of model, whose values are compared below
        stored["family"] = ours["family"]
    for each in (stored, ours):
        if each["experts"]:  # one may name the width that the other leaves open
            each["expert_ffn"] = each["expert_ffn"] or each["ffn"]
    differ = [name for name in options_with(on_resume="must match") if name in ours and ours[name] != stored[name]]
    longer = ours["positions"] > stored["positions"] and scales_dynamically(checkpoint.attachments)
    if longer or (architecture(run.model).input.learned_positions and stored["positions"] != ours["positions"]):
        differ.append("positions")
    if differ:
        advice = "" if run.checkpoint.use_checkpoint_config else " (or give --use-checkpoint-config)"
        lines = [
            f"{flag_of(name)} {_shown(ours[name])}: the checkpoint {checkpoint.path} has {_shown(stored[name])}; "
            f"must be the same{advice}"
            for name in differ
        ]
        raise CheckpointError("\n".join(lines))
