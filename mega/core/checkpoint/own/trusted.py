"""Which step a run may trust: whole on every rank, the same on all of them, and not suspect.

A step is published by one rename, so it is whole unless the disk damaged it since; verdicts.py has what became known of
steps after they were saved. How ranks exchange what they see is a callable, since this room knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.checkpoint.own.steps import StepFolder
from mega.core.checkpoint.own.together import (
    JsonExchange,
    alone,
    attempt,
    describe,
    disagreement,
    gathered,
    reason_of,
    together,
)
from mega.core.checkpoint.own.verdicts import VERDICTS, StepVerdict, decode, encode
from mega.core.files import POINTER


class _View(TypedDict):
    """What a rank sees: published steps, whether there is a pointer, the suspects' manifest and reason by step, and why
    verdicts could not be read."""

    steps: list[int]
    pointer: bool
    suspects: dict[str, list[str]]
    fault: str


class TrustedSteps(StepFolder):
    """The steps under a directory, of which all ranks choose the same."""

    def newest(self, *, verify: bool = True, report: Callable[[str], None] = lambda line: None) -> int | None:
        """The step of what `find` finds for one rank alone. Errors: as of `find`."""
        found = self.find(verify=verify, report=report)
        return None if found is None else found.step

    def find(
        self,
        *,
        verify: bool = True,
        report: Callable[[str], None] = lambda line: None,
        exchange: JsonExchange = alone,
    ) -> Checkpoint | None:
        """The newest published checkpoint that every rank trusts, opened, and the same one on all of them.

            1 every rank lists what it sees    and reads the verdicts
            2 newest first, every rank opens   its manifest, and all sizes; with `verify` every byte is hashed
            3 ranks compare what they opened   by the manifest's hash, which stands for run, plain state and tensors

        A step is passed over where any rank cannot open it or sees another one, and where it is suspect (verdicts.py).
        report: is given a line for every one that is passed over, with the ranks and their reasons, and one for a
        pointer that names another one. None only where nothing was ever published.
        Errors: CheckpointError, on all ranks, if there are checkpoints or a pointer, but none can be trusted: a run is
        never silently started again from nothing. Likewise if a rank cannot list the directory. Of these, where one
        could not be read for now, an UnreadableError.
        """
        # 1
        views = gathered(self._view, exchange)
        steps, first, kind = sorted({step for view in views for step in view["steps"]}), "", CheckpointError
        suspects = {step: verdict for view in views for step, verdict in view["suspects"].items()}
        if any(view["fault"] for view in views):
            report(f"a step may be suspect without being passed over: {describe([view['fault'] for view in views])}")
        for step in reversed(steps):
            # 2
            checkpoint, fault, passing = together(partial(self._look, step, verify, suspects.get(str(step))), exchange)
            # 3
            faults, identities, unread = zip(*exchange([fault, _identity(checkpoint), passing]), strict=True)
            differ = describe(faults) if any(faults) else disagreement(identities)
            if checkpoint is not None and not differ:
                if (pointer := self._pointer()) != self.path(step).name:
                    says = "is missing" if pointer is None else f"says {pointer!r}"
                    report(f"{self.place}/{POINTER} {says}; the newest one to trust is step {step}")
                return checkpoint
            report(f"step {step} is passed over: {differ}")
            first, kind = first or differ, UnreadableError if any(unread) else kind
        if steps:
            raise kind(f"{self.place}: none of the checkpoints {steps} can be trusted: {first}")
        if any(view["pointer"] for view in views):
            raise CheckpointError(
                f"{self.place}/{POINTER} says {self._pointer()!r}, but no checkpoint is there; "
                "remove it to start afresh"
            )
        return None

    def _view(self) -> _View:
        """What this rank sees."""
        self._recover()
        verdicts, fault = attempt(self.verdicts)
        suspects = {str(step): [v.manifest, v.reason] for step, v in (verdicts or {}).items() if v.status == "suspect"}
        unread = "" if fault is None else reason_of(fault)
        steps = [*self.steps(), *self._linked()]
        return {"steps": steps, "pointer": self._pointer() is not None, "suspects": suspects, "fault": unread}

    def _look(self, step: int, verify: bool, suspect: Sequence[str] | None) -> tuple[Checkpoint | None, str, bool]:
        """A step, opened, or why it is passed over, and whether it may be read later. suspect: the manifest and the
        reason of a verdict.

        Errors: OSError where an object store cannot be reached, which says nothing of the step.
        """
        try:
            checkpoint = self.open(step)
            if suspect is not None and suspect[0] == checkpoint.digest:
                return None, f"{suspect[1]} (it is taken where it is named, as {self.path(step).name})", False
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            return None, reason_of(error), isinstance(error, UnreadableError)
        return checkpoint, "", False

    def open_named(
        self, step: int, report: Callable[[str], None] = lambda line: None, exchange: JsonExchange = alone
    ) -> Checkpoint:
        """The step that the user names, the same on all ranks. report: is given a line where it is suspect.

        Errors: CheckpointError on all ranks, where any of them cannot open it or sees another one.
        """
        checkpoint = together(partial(self.open, step), exchange)
        if differ := disagreement(exchange(_identity(checkpoint))):
            raise CheckpointError(f"{self.path(step)}: {differ}")
        verdict = (attempt(self.verdicts)[0] or {}).get(step)
        if verdict is not None and (verdict.status, verdict.manifest) == ("suspect", checkpoint.digest):
            report(f"step {step} is taken as it is named, although {verdict.reason}")
        return checkpoint

    def verdicts(self) -> dict[int, StepVerdict]:
        """What became known of the steps. Errors: CheckpointError, OSError where that cannot be read."""
        data = self._note(VERDICTS)
        return {} if data is None else decode(data, self.directory / VERDICTS)

    def set_verdicts(self, verdicts: Mapping[int, StepVerdict]) -> None:
        """Replace all that is known of the steps, at once; by one process. Errors: OSError, CheckpointError."""
        self._set_note(VERDICTS, encode(verdicts))


def _identity(checkpoint: Checkpoint | None) -> str:
    """What ranks compare of a checkpoint that each has opened."""
    if checkpoint is None:
        return ""
    return f"manifest {checkpoint.digest[:16]}{' without optimizer state' if checkpoint.weights_only else ''}"
