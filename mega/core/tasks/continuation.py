"""Generate continuations of prompts for lm-eval's tasks, in any layout. Prompts are distributed over data ranks.

Each replica of the model has an engine with a cache (inference/). The first rank of a replica schedules requests, and
the other ranks of the replica follow its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mega.core.device import Device
from mega.core.inference.options import EngineOptions
from mega.core.inference.relay import Relay
from mega.core.inference.request import Engine, Request, Sampling
from mega.core.inference.start import engine_on
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Mesh

Stop = Callable[[list[int]], bool]
AT_ONCE = 64
"""Maximum number of prompts that an engine continues at the same time."""


def continue_prompts(
    stage: object,
    mesh: Mesh,
    device: Device,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    how: Sequence[Sampling],
    *,
    ends: frozenset[int],
    stop: Stop,
    known: int,
    relay: Relay | None,
) -> list[list[int]]:
    """Generate up to `tokens` ids after each prompt, and return the ids, which are identical on every rank. All ranks
    must call this function. stage: this rank's stage, which must support decoding. how: the sampling options of each
    prompt. ends: ids that end an answer. stop: function that returns whether an answer with the given ids is complete.
    known: only ids below this bound are sampled. relay: connects the ranks of the model. Errors: ValueError if rows are
    split over context ranks; RequestError.
    """
    if mesh.cp.size > 1:
        raise ValueError(f"--cp {mesh.cp.size}: must be 1 where text is generated")
    numbers = range(mesh.dp.index, len(prompts), mesh.dp.size)
    options = EngineOptions(max_requests=max(1, min(AT_ONCE, -(-len(prompts) // mesh.dp.size))), vocab=known)
    engine, answers = engine_on(stage, mesh, device, options, relay=relay), dict[str, list[int]]()
    if engine is not None:  # only on a replica's first rank; on others, `engine_on` returns when the work is done
        try:
            requests = {
                number: Request(prompt=tuple(prompts[number]), tokens=tokens, sampling=how[number], stop_ids=ends)
                for number in numbers
            }
            answers = _answers(engine, requests, stop)
        finally:
            engine.close()
    parts: list[dict[str, list[int]]] = gather_json(answers, mesh.everyone, device.torch)
    all_answers = {int(number): ids for part in parts for number, ids in part.items()}
    return [all_answers[number] for number in range(len(prompts))]


def _answers(engine: Engine, requests: Mapping[int, Request], stop: Stop) -> dict[str, list[int]]:
    """Answer requests, and return a map from the index of each request, as a string, to the ids of its answer."""
    answers: dict[int, list[int]] = {engine.add(request): [] for request in requests.values()}
    while not engine.idle:
        for event in engine.step():
            if event.message:
                raise ValueError(f"--tasks: {event.message}")
            if event.token is None:
                continue
            answers[event.request].append(event.token)
            if event.finish is None and stop(answers[event.request]):
                engine.cancel(event.request)
    return {str(number): ids for number, ids in zip(requests, answers.values(), strict=True)}
