"""Save the state of a run, either immediately or in the background. `resume.py` reads saved states.

A state that is not finite is not saved (guards/finite.py); later steps show whether a save is good (proving.py).

A save with --async-save:

    1 wait for the previous save               one save runs at a time
    2 copy every piece to host memory          allocated and page-locked before the first step, and reused; on a GPU a
                                               separate thread and stream copy during the next forward and backward
                                               pass; the update waits until all tensors are read (HostCopy.settle)
    3 a thread publishes the copy              with the same `CheckpointStore.save`, so the bytes are equal; ranks agree
                                               through gloo communicators that nothing else uses
    4 every step polls the thread              a failed save ends the run; the exit waits for the last save
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import torch

from mega import __version__
from mega.core.activity import ACTIVITY
from mega.core.architecture import architecture
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.retention import retain
from mega.core.checkpoint.own.store import Attachments, SaveError, SaveReport, store_at
from mega.core.config import toml
from mega.core.config.run import RunConfig
from mega.core.device import HostCopy
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Axis
from mega.core.processes.exit_reports import write_error
from mega.core.text.chat.templates import STORED_TOOL_TEMPLATE, source_of
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.guards.finite import check_finite
from mega.core.training.saves.proving import Proving
from mega.core.training.schedules import Schedules
from mega.core.training.state import TrainState
from mega.core.untrusted import Json, numbers_below

RETRY_PAUSES = (1.0, 30.0)
"""Seconds between two attempts to save: the first pause, and the longest pause."""


class Saver:
    """Publishes the checkpoints of one run. All methods are collectives that all ranks must call."""

    def __init__(
        self,
        state: TrainState,
        tokenizer: Tokenizer | None = None,
        fingerprint: str = "",
        schedules: Schedules | None = None,
        report: Callable[[str], None] = lambda line: None,
        sidecar_files: Attachments = MappingProxyType({}),
        corpora: Mapping[str, Mapping[str, str | None]] = MappingProxyType({}),
        blends: Sequence[Mapping[str, Json]] = (),
        saved: int | None = None,
    ) -> None:
        """
        sidecar_files: small files to store in every checkpoint; rank 0's files are used.
        corpora: digests of the token files of the run.
        blends: earlier blends of the training set (data/phases.py).
        saved: the step of the newest checkpoint, if the run has resumed from a later step in memory.
        """
        self.state, self.options, self._report = state, state.run.checkpoint, report
        self.on_saved: Callable[[int, float], None] = lambda step, seconds: None
        """Function that is called with each saved step and the seconds for which the save stalled the run."""
        assert self.options.save is not None
        self.store = store_at(self.options.save)
        self._fixed = {
            "mega": __version__,
            "config": dataclasses.asdict(state.run),
            "layout": state.mesh.sizes,
            "threads": state.device.threads,
            "tp_overlap": state.overlaps,
            "schedule": (schedules or Schedules.of(state.run)).state_dict(),
            "tokenizer": tokenizer.fingerprint() if tokenizer is not None else None,
            "fingerprint": fingerprint,
            **({"blends": list(blends)} if blends else {}),
            "corpora": {prefix: dict(content) for prefix, content in corpora.items()},
        }
        self._attachments = {**_own_template(state.run, sidecar_files), "run.toml": toml.run_toml(state.run).encode()}
        if tokenizer is not None:
            self._attachments |= tokenizer.files()
        self._proving = self._first_proving() if state.mesh.rank == 0 else None
        self._running: Future[tuple[int, float]] | None = None
        self._saved_step = state.progress.step if saved is None else saved
        self.saved_step = self._saved_step
        """The newest step that is complete on disk, or the step at which the run started."""
        self._stalled = 0.0
        """Seconds for which the run was stalled by the current save."""
        self._writers: Axis | None = None
        if self.options.async_save:
            room = HostCopy.room([piece.tensor for piece in self._kept()])
            state.copy = HostCopy(state.device, room)
            self._writers = state.mesh.own_group("writers")

    @ACTIVITY.during("saving")
    def save(self) -> None:
        """Publish a checkpoint of the current state, or with --async-save start publishing it.

        Errors, on every rank: FloatingPointError if the state of any rank is not finite; SaveError if any rank failed.
        Earlier checkpoints stay complete.
        """
        state, began = self.state, time.monotonic()
        check_finite(state)
        self._saved_step = state.progress.step
        if self._writers is None or state.copy is None:
            agree = _all_agree(state.mesh.everyone, state.device.torch)
            spared = self._try()
            self._reported(self._publish(self._kept(), self._meta(), agree, spared), "")
            return
        # 1 wait for the previous save
        self.wait()
        spared = self._try()
        # 2 copy to host memory
        pieces, copy = list(self._kept()), state.copy
        copies = copy.take([piece.tensor for piece in pieces])
        staged = [
            dataclasses.replace(piece, tensor=host_tensor) for piece, host_tensor in zip(pieces, copies, strict=True)
        ]
        # 3 publish on a thread
        meta, agree = self._meta(), _all_agree(self._writers, torch.device("cpu"))

        def work() -> tuple[int, float]:
            copy.wait()
            return self._publish(staged, meta, agree, spared)

        self._running = _in_background(work)
        self._stalled = time.monotonic() - began

    @property
    def busy(self) -> bool:
        """Whether a save is running in the background."""
        return self._running is not None and not self._running.done()

    def look(self) -> None:
        """Report a save that has ended, or raise its error. Must be called at every step."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Errors: those of `save`."""
        if self._running is not None:
            running, self._running = self._running, None
            with ACTIVITY.during("saving"):
                running.exception()
            self._reported(running.result(), f" in the background, stalling the run for {self._stalled:.2f} s")

    def finish(self, *, clean: bool = False, saves: bool = True) -> None:
        """Save the state at the end of training, unless this step is already saved, and wait for the save. clean:
        whether the run has reached its last step, so that its saves are good. saves: whether to save. Errors: those of
        `save`.
        """
        if saves and self._saved_step != self.state.progress.step:
            self.save()
        self.wait()
        if self._proving is not None:
            self._proving.finished(clean=clean)

    def observe(self, step: int, loss: float | None, applied: bool) -> None:
        """Record the finite loss of a step, and whether its update was applied. Must be called for every step, in
        order, before a save of that step. loss: the step's loss; None if it is not comparable with that of a random
        guess."""
        if self._proving is not None:
            self._proving.observe(step, loss, applied)

    def record_validation(self, step: int, loss: float) -> None:
        """Record the validation loss after a step; retention keeps the saved step with the lowest validation loss."""
        if self._proving is not None:
            self._proving.record_validation(step, loss)

    def diverged(self, reason: str) -> None:
        """Mark the newest saves as suspect, so that a resume ignores them. Called when the run ends because it
        diverged."""
        with contextlib.suppress(SaveError):
            self.wait()
        if self._proving is not None:
            self._proving.diverged(reason)

    def _first_proving(self) -> Proving:
        state = self.state
        return Proving(
            self.store,
            good_after=self.options.good_after,
            vocab=architecture(state.run.model).input.vocab,
            start=state.progress.step,
            report=self._report,
        )

    def _try(self) -> frozenset[int]:
        """Record the current step as saved but not yet judged (`proving.py`), and return the steps that retention must
        keep."""
        if self._proving is None:
            return frozenset()
        self._proving.saves(self.state.progress.step)
        return frozenset({self._proving.on_trial} - {None})  # type: ignore[arg-type]

    def _reported(self, result: tuple[int, float], suffix: str) -> None:
        step, seconds = result
        self.saved_step, ACTIVITY.saved = step, (step, seconds, time.monotonic())
        if self._proving is not None:
            self._proving.published(step)
        self.on_saved(step, self._stalled if suffix else seconds)
        self._report(f"saved step {step} in {seconds:.1f} s{suffix} to {self.options.save}")

    def _publish(
        self, pieces: Iterable[Piece], meta: dict[str, Json], agree: Callable[[bool], bool], spared: frozenset[int]
    ) -> tuple[int, float]:
        """Publish a checkpoint, apply retention, and return the step and the duration in seconds. spared: older
        steps to keep regardless of the retention limits."""
        mesh, step = self.state.mesh, int(numbers_below(meta, "progress")["step"])
        piece_list = list(pieces)

        def written() -> Iterator[Piece]:
            if self.state.injector is not None:
                self.state.injector.before_save(step)
            yield from piece_list

        def save() -> SaveReport:
            return self.store.save(
                step, written(), meta, rank=mesh.rank, world=mesh.world, agree=agree, attachments=self._attachments
            )

        saved = _in_time(save, self.options.save_retry_minutes, agree, mesh.rank, self._report)
        if mesh.rank == 0:
            try:
                limits = self.options.keep_last, self.options.keep_every, self.options.keep_optimizer_last
                retain(self.store, *limits, spared=spared)
            except OSError as error:  # the new checkpoint is complete, so the run continues
                self._report(f"older checkpoints stay for now: {error}")
        return step, saved.seconds

    def _kept(self) -> Iterable[Piece]:
        yield from self.state.weight_pieces(mine=True)
        if self.options.save_optim:
            yield from self.state.optimizer_pieces(mine=True)

    def _meta(self) -> dict[str, Json]:
        """Return the metadata of a checkpoint of the current state."""
        state = self.state
        return {
            **self._fixed,
            **({"base": dict(state.base)} if state.base is not None else {}),
            **({"reference": state.reference} if state.reference is not None else {}),
            "progress": dataclasses.asdict(state.progress),
            "guard": state.guard.as_json(),
            "updates": state.optimizer.updates,
            "dropout_rule": state.dropout_rule,
            "scaler": None if state.scaler is None else state.scaler.state(),
        }


def _in_background(work: Callable[[], tuple[int, float]]) -> Future[tuple[int, float]]:
    """Run `work` on a daemon thread, because the threads of an executor would keep the process alive."""
    future: Future[tuple[int, float]] = Future()

    def run() -> None:
        ACTIVITY.writer = threading.get_ident()
        try:
            result = work()
        except BaseException as error:
            ACTIVITY.writer = None
            future.set_exception(error)
        else:
            ACTIVITY.writer = None
            future.set_result(result)

    threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    return future


def _in_time(
    save: Callable[[], SaveReport],
    minutes: float,
    agree: Callable[[bool], bool],
    rank: int,
    report: Callable[[str], None],
) -> SaveReport:
    """Save; after a failure, try again until the time limit expires on any rank. Errors: the last SaveError."""
    until, pause = time.monotonic() + 60 * minutes, RETRY_PAUSES[0]
    while True:
        try:
            return save()
        except SaveError as error:
            if not agree(time.monotonic() + pause < until):
                raise
            line = f"{error}; trying again for {(until - time.monotonic()) / 60:.1f} minutes"
            if rank and not error.elsewhere:
                write_error(f"mega: rank {rank}: {line}\n")
            report(line)
        time.sleep(pause)
        pause = min(2 * pause, RETRY_PAUSES[1])


def _own_template(run: RunConfig, sidecar_files: Attachments) -> Attachments:
    """Return the sidecar files, with the chat template of the run instead of those of the initial weights."""
    template = run.data.chat_template
    if not (run.data.chat_data or run.finetuning.dpo_data):
        return sidecar_files
    others = {name: content for name, content in sidecar_files.items() if name != STORED_TOOL_TEMPLATE}
    return {**others, "chat_template.jinja": source_of(template).encode()}


def _all_agree(axis: Axis, device: torch.device) -> Callable[[bool], bool]:
    """Return a function that reports to all ranks of an axis whether this rank succeeded, and returns whether all ranks
    succeeded."""

    def agree(ok: bool) -> bool:
        verdict = torch.tensor(float(ok), device=device)
        all_reduce(verdict, axis, "min")
        return bool(verdict)

    return agree
