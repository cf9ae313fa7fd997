"""Going on from a checkpoint: which one a run starts from, and how its state is filled. saver.py writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, locate, store_at
from mega.core.config.run import RunConfig, flag_of, value_of
from mega.core.data.build import Datasets
from mega.core.data.dataset import BlendedDataset
from mega.core.files import url_of
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Mesh
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.state import Progress, TrainState

Tell = Callable[[str], None]

FREE_OPTIONS = {"hidden_dropout", "attention_dropout", "init_std", "vocab_multiple", "positions"}
"""Model options that may change between a checkpoint and the run that loads it."""

TOLD_OPTIONS = (
    *("seed", "data_path", "train_data", "chat_data", "split", "order", "seq_length", "global_batch", "dtype"),
    *("reset_positions", "reset_attention", "eod_mask_loss", "loss_normalizer", "hidden_dropout", "attention_dropout"),
    *("clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
    *("fp8", "grad_dtype", "masters", "residual_fp32", "embedding_fp32", "loss_scale", "ops"),
)
"""Options that may change as well, but not unnoticed: with another value the run computes something else."""


@dataclass(frozen=True)
class Origin:
    """Where a run starts from. `weights_only` leaves optimizer and progress behind."""

    checkpoint: Checkpoint
    weights_only: bool


def find_origin(run: RunConfig, tell: Tell) -> Origin | None:
    """The checkpoint this run starts from: --resume, else --load, else none.

    Errors: ValueError where a named checkpoint is absent or damaged, or none of several can be trusted.
    """
    options = run.checkpoint
    if options.resume == "auto":
        assert options.save is not None
        store = store_at(options.save)
        step = store.newest(verify=True, report=tell)
        if step is not None:
            return Origin(store.open(step), weights_only=False)
        tell(f"--resume auto: no checkpoint under {options.save} yet")
    elif options.resume is not None:
        return Origin(locate(options.resume, tell), weights_only=False)
    if options.load is None:
        return None
    # The first start of a run that loads from where it saves; anywhere else a missing checkpoint is a mistake.
    first = options.load == options.save and not options.require_load
    if first and store_at(options.load).newest(verify=False) is None:
        tell(f"--load {options.load}: holds no checkpoint yet; starting from the beginning")
        return None
    return Origin(locate(options.load, tell), weights_only=options.finetune)


def companions(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files that travel with the weights a run starts from: its tokenizer's, and what others' tools go by.

    run.toml is each run's own. Nothing where the run has another tokenizer: the files speak of the old one's ids.
    """
    found = {name: path.read_bytes() for name, path in checkpoint.attachments.items() if name != "run.toml"}
    own = {name: path.read_bytes() for name, path in (tokenizer.files() if tokenizer is not None else {}).items()}
    return found if own.items() <= found.items() else {}


def restore(state: TrainState, origin: Origin) -> None:
    """Fill `state` from a checkpoint of any layout.

    Errors: ValueError naming the option that differs, or the tensor that is missing or damaged.
    """
    checkpoint, run = origin.checkpoint, state.run
    _same_model(run, checkpoint)
    # Masters are the truth; weights of another dtype are rounded from them.
    checkpoint.read([_truest(piece, checkpoint) for piece in state.weight_pieces(mine=False)], cast=True)
    state.optimizer.masters_from_weights()
    held = list(state.optimizer_pieces(mine=False))
    masters = [piece for piece in held if piece.key.startswith("master/")]
    checkpoint.read([piece for piece in masters if piece.key in checkpoint.tensors], cast=True)
    if not origin.weights_only and run.checkpoint.load_optim:
        _same_rule(run, checkpoint)
        wanted = [piece for piece in held if not piece.key.startswith("master/")]
        missing = next((piece.key for piece in wanted if piece.key not in checkpoint.tensors), None)
        if missing is not None:
            raise CheckpointError(
                f"{checkpoint.path}: holds no optimizer state ({missing}); give --no-load-optim or --finetune"
            )
        checkpoint.read(wanted, cast=True)
        state.optimizer.updates = int(checkpoint.meta["updates"])
        if state.scaler is not None and checkpoint.meta.get("scaler"):
            state.scaler.restore(checkpoint.meta["scaler"])
    if not origin.weights_only:
        state.progress = Progress(**checkpoint.meta["progress"])


def differences(run: RunConfig, origin: Origin, data: Datasets, mesh: Mesh) -> Iterator[str]:
    """Lines of what this run does otherwise than the one it goes on with, and what its token files hold otherwise.

    The schedule is not of it: schedules.py refuses another one.
    """
    sections = origin.checkpoint.meta.get("config", {})
    stored = {name: value for section in sections.values() for name, value in section.items()}
    told = []
    for name in TOLD_OPTIONS:
        value = value_of(run, name)
        ours = list(value) if isinstance(value, tuple) else value
        if name in stored and stored[name] != ours:
            told.append(f"{flag_of(name)} {_words(ours)} (was {_words(stored[name])})")
    if told:
        yield f"not as in the checkpoint: {', '.join(told)}"
    if length := _dealt_anew(run, stored, data):
        yield f"not as in the checkpoint: {length}: passes over the data are dealt together, so all of it is dealt anew"
    if run.data.order == "cyclic":
        then = origin.checkpoint.meta.get("layout", {}).get("dp", mesh.dp.size), stored.get("micro_batch")
        if then != (mesh.dp.size, run.batch.micro_batch):
            yield (
                f"not as in the checkpoint: {mesh.dp.size} data ranks of --micro-batch {run.batch.micro_batch} (was "
                f"{then[0]} of {then[1]}): --order cyclic deals each of them samples of its own, so all are dealt anew"
            )
    for prefix, now in data.corpora.items():
        then = origin.checkpoint.meta.get("corpora", {}).get(prefix, now)
        if any(None not in (hashed, then.get(name)) and then[name] != hashed for name, hashed in now.items()):
            yield f"not as in the checkpoint: {prefix} holds other tokens than those that the run has been trained on"


def _dealt_anew(run: RunConfig, stored: Mapping[str, Any], data: Datasets) -> str:
    """How the length that the data are dealt for differs, where that deals other samples; else nothing.

    One pass is one shuffle, however much of it is read. Several are dealt for the whole length, as Megatron-LM deals.
    """
    (now, count), (then, before) = _asked(dataclasses.asdict(run.batch)), _asked(stored)
    if data.train is None or not (run.data.data_path or run.data.train_data) or count == before:
        return ""
    # What is shorter now may have been several passes before.
    several = data.repeats or (before > len(data.train) and not isinstance(data.train, BlendedDataset))
    return f"{now} (was {then})" if several else ""


def _asked(values: Mapping[str, Any]) -> tuple[str, int]:
    """How long a run was asked to be, and in samples."""
    samples, steps, batch = (values.get(name) for name in ("samples", "steps", "global_batch"))
    return (
        (f"--samples {samples}", samples) if samples is not None else (f"--steps {steps}", (steps or 0) * (batch or 0))
    )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def alone_in(run: RunConfig, start: int) -> None:
    """See that --save holds no checkpoint behind step `start`, where this run starts.

    Else a later --resume auto would take that one, of another history. That option itself starts from the newest that
    can be trusted, and what is behind it will be replaced. Errors: ValueError.
    """
    place = run.checkpoint.save
    if place is None or run.checkpoint.resume == "auto":
        return
    newest = store_at(place).newest(verify=False)
    if newest is not None and newest > start:
        raise ValueError(
            f"--save {place}: holds step {newest}, and this run starts at step {start}; to go on from there give "
            "--resume auto, else another directory, or move the later checkpoints away"
        )


PATIENCE = 10.0
"""Seconds for which a run waits for another that still holds its directory: one that was stopped may be on its way
out."""


def claim(until: contextlib.ExitStack, place: str | None, mesh: Mesh, device: torch.device) -> None:
    """Hold --save for this run alone, so that no other one replaces its checkpoints, nor `checkpoint clean` what it is
    writing. All ranks call this together. Errors: ValueError on all where another process has it."""
    free = torch.ones((), device=device)
    if place is not None and url_of(place) is None and mesh.rank == 0:
        store, deadline = store_at(place), time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):  # a place that cannot be written to is the saver's to tell
            if not store.directory.exists():
                store.directory.mkdir(parents=True)
                until.callback(_leave, store.directory)
            while not _hold(until, store):
                if time.monotonic() > deadline:
                    free.zero_()
                    break
                time.sleep(0.2)
    all_reduce(free, mesh.everyone, "min")
    if not free:
        raise ValueError(
            f"--save {place}: another process is writing there; wait for its end, or give another directory"
        )


def _hold(until: contextlib.ExitStack, store: CheckpointStore) -> bool:
    try:
        until.enter_context(store.held())
    except CheckpointError:
        return False
    return True


def _leave(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()  # only if nothing is in it


def _truest(weight: Piece, checkpoint: Checkpoint) -> Piece:
    """A weight read from its master, where the checkpoint holds one."""
    master = weight.key.replace("weights/", "master/", 1)
    return dataclasses.replace(weight, key=master) if master in checkpoint.tensors else weight


def _same_rule(run: RunConfig, checkpoint: Checkpoint) -> None:
    """One rule's moments are not another's, though they may bear the same name."""
    ours, stored = run.optimizer.optimizer, checkpoint.meta.get("config", {}).get("optimizer", {}).get("optimizer")
    if stored not in (None, ours):
        raise CheckpointError(
            f"--optimizer {ours}: {checkpoint.path} holds the state of {stored}; give --optimizer {stored}, or "
            "--no-load-optim to start with none"
        )


def _same_model(run: RunConfig, checkpoint: Checkpoint) -> None:
    """The model's mathematics must be the checkpoint's; else the weights mean something else."""
    stored: dict[str, Any] = dataclasses.asdict(model_of(checkpoint.meta, str(checkpoint.path)))
    ours = dataclasses.asdict(run.model)
    differ = [name for name in ours if name not in FREE_OPTIONS and ours[name] != stored[name]]
    if run.model.position == "learned" and stored["positions"] != ours["positions"]:
        differ.append("positions")
    if differ:
        lines = [
            f"{flag_of(name)} {_words(ours[name])}: the checkpoint {checkpoint.path} has {_words(stored[name])}; "
            "must be the same (or give --use-checkpoint-config)"
            for name in differ
        ]
        raise CheckpointError("\n".join(lines))


def same_everywhere(mesh: Mesh, fingerprint: str, device: torch.device) -> None:
    """Every rank must run the same config, tokenizer and version. Errors: ValueError on every rank."""
    own = torch.tensor(
        [int(fingerprint[at : at + 8], 16) for at in range(0, 64, 8)], dtype=torch.float64, device=device
    )
    least, most = own.clone(), own.clone()
    all_reduce(least, mesh.everyone, "min")
    all_reduce(most, mesh.everyone, "max")
    if not torch.equal(least, most):
        raise ValueError(
            "configuration or tokenizer are not those of every other rank "
            f"(fingerprint {fingerprint[:16]}); start every rank with the same flags and files"
        )
