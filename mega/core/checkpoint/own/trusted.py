"""Find a step that a run may trust: the step must be intact, identical on every rank, and not suspect.

A step is published by one rename, so a published step is intact unless the disk damaged it later. A step is suspect if
the run diverged soon after it (verdicts.py). The exchange between ranks is a callable, because this package does not
depend on how ranks communicate.
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
    """The steps and verdicts that one rank read."""

    steps: list[int]  # published steps
    pointer: bool  # whether the pointer file exists
    suspects: dict[str, list[str]]  # suspect step -> (hash of its manifest, reason)
    fault: str  # why the verdicts could not be read, or ""


class TrustedSteps(StepFolder):
    """The steps under a directory, with methods by which all ranks find and open the same step."""

    def newest(self, *, verify: bool = True, report: Callable[[str], None] = lambda line: None) -> int | None:
        """The step number of the checkpoint that `find` returns on a single rank. Errors: as for `find`."""
        checkpoint = self.find(verify=verify, report=report)
        return None if checkpoint is None else checkpoint.step

    def find(
        self,
        *,
        verify: bool = True,
        report: Callable[[str], None] = lambda line: None,
        exchange: JsonExchange = alone,
    ) -> Checkpoint | None:
        """Find and open the newest published checkpoint that every rank trusts. All ranks open the same checkpoint.

            1 every rank lists the steps       and reads the verdicts
            2 newest first, every rank opens   its manifest, checks file sizes, and hashes attachments; with `verify`,
                                               the rank hashes every byte
            3 ranks compare what they opened   by the hash of the manifest, which covers plain state and tensors

        A step is skipped if any rank cannot open it, if ranks find different checkpoints, or if the step is suspect
        (verdicts.py).
        report: called with a message that names ranks and reasons for every skipped step, and with a message if the
        pointer file `latest` names a different step. The result is None only if no step was ever published.
        Errors: CheckpointError, on all ranks, if a rank cannot list the directory, or if there are checkpoints or a
        pointer file but no checkpoint can be trusted. A run therefore never silently restarts from scratch. The error
        is an UnreadableError if a later attempt may succeed.
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
                "remove it to start from scratch"
            )
        return None

    def _view(self) -> _View:
        """Return the steps and verdicts that are visible to this rank."""
        self._recover()
        verdicts, fault = attempt(self.verdicts)
        suspects = {str(step): [v.manifest, v.reason] for step, v in (verdicts or {}).items() if v.status == "suspect"}
        unread = "" if fault is None else reason_of(fault)
        steps = [*self.steps(), *self.linked()]
        return {"steps": steps, "pointer": self._pointer() is not None, "suspects": suspects, "fault": unread}

    def _look(self, step: int, verify: bool, suspect: Sequence[str] | None) -> tuple[Checkpoint | None, str, bool]:
        """Open a step, and return (checkpoint or None, why the step is skipped, whether a later attempt may succeed).
        suspect: the manifest's hash and the reason, from a verdict that the step is suspect.

        Errors: OSError if an object store cannot be reached, because the step itself may be intact.
        """
        try:
            checkpoint = self.open(step)
            if suspect is not None and suspect[0] == checkpoint.digest:
                return None, f"{suspect[1]} (it is taken where it is named, as {self.path(step).name})", False
            if verify:
                checkpoint.verify()
            else:
                checkpoint.check_attachments()
        except CheckpointError as error:
            return None, reason_of(error), isinstance(error, UnreadableError)
        return checkpoint, "", False

    def open_named(
        self, step: int, report: Callable[[str], None] = lambda line: None, exchange: JsonExchange = alone
    ) -> Checkpoint:
        """On all ranks, open the step that the user named. report: called with a message if the step is suspect.

        Errors: CheckpointError, on all ranks, if any rank cannot open the step or ranks find different checkpoints.
        """
        checkpoint = together(partial(self.open, step), exchange)
        if differ := disagreement(exchange(_identity(checkpoint))):
            raise CheckpointError(f"{self.path(step)}: {differ}")
        verdict = (attempt(self.verdicts)[0] or {}).get(step)
        if verdict is not None and (verdict.status, verdict.manifest) == ("suspect", checkpoint.digest):
            report(f"step {step} is taken as it is named, although {verdict.reason}")
        return checkpoint

    def verdicts(self) -> dict[int, StepVerdict]:
        """Return the verdicts on all steps. Errors: CheckpointError or OSError if the verdicts cannot be read."""
        data = self._note(VERDICTS)
        return {} if data is None else decode(data, self.directory / VERDICTS)

    def set_verdicts(self, verdicts: Mapping[int, StepVerdict]) -> None:
        """Replace the verdicts on all steps. Only one process may call this method. Errors: OSError,
        CheckpointError."""
        self._set_note(VERDICTS, encode(verdicts))


def _identity(checkpoint: Checkpoint | None) -> str:
    """Return a description of an opened checkpoint, for comparison between ranks; "" for None."""
    if checkpoint is None:
        return ""
    return f"manifest {checkpoint.digest[:16]}{' without optimizer state' if checkpoint.weights_only else ''}"
