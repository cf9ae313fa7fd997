"""The work between steps, in order: audit, validate, sample, copy to peers, save. The same routines are due on all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mega.core.config.resolve import epoch_steps
from mega.core.training.evaluation import Evaluation
from mega.core.training.guards.audit import audit
from mega.core.training.sampling import Sampler
from mega.core.training.saves.memory import PeerCopies
from mega.core.training.saves.saver import Saver
from mega.core.training.state import TrainState


@dataclass(frozen=True)
class Routine:
    """Work that is due after some steps. due: function that takes the index of a step and returns whether the routine
    is due after this step. needs_numbers: whether the results of all steps so far must be read before the routine
    runs."""

    due: Callable[[int], bool]
    run: Callable[[], None]
    needs_numbers: bool = True


def routines(
    state: TrainState,
    evaluation: Evaluation | None,
    sampler: Sampler | None,
    saver: Saver | None,
    copies: PeerCopies | None = None,
    *,
    steps: int,
) -> Iterator[Routine]:
    """Yield the routines of a run. The last step is validated after training, not by a routine. evaluation: the
    evaluation of the held-out sets; None if there are none. If the length of a run is given in epochs, each epoch ends
    with a validation and a save."""
    run, epoch = state.run, epoch_steps(state.run)
    yield Routine(every(run.runtime.audit_interval), lambda: audit(state), needs_numbers=False)
    if evaluation is not None:
        interval = run.evaluation.eval_interval
        yield Routine(lambda step: step < steps and due(step, interval, epoch), evaluation.validate)
    if sampler is not None:
        yield Routine(every(run.log.sample_interval), sampler.sample)
    if copies is not None:
        yield Routine(every(run.supervision.peer_copy_interval), copies.take)
    if saver is not None:
        yield Routine(lambda step: True, saver.look, needs_numbers=False)
        yield Routine(lambda step: due(step, run.checkpoint.save_interval, epoch), saver.save)


def due(step: int, *intervals: int | None) -> bool:
    """Whether a step is a multiple of any of `intervals`.

    >>> [step for step in range(1, 8) if due(step, 3, None, 5)]
    [3, 5, 6]
    """
    return any(every(interval)(step) for interval in intervals)


def every(interval: int | None) -> Callable[[int], bool]:
    """Return a predicate that is true for steps that are multiples of `interval`. It is never true for the intervals
    None and 0.

    >>> [step for step in range(1, 7) if every(3)(step)]
    [3, 6]
    """
    return lambda step: bool(interval) and step % (interval or 1) == 0
