"""Prompts continued at any layout, data ranks sharing them: what lm-eval's generation tasks need.

Each replica of the model has an engine with a cache (inference/): its first rank schedules, the others follow.
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
"""Prompts that an engine continues together."""


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
    layers: int,
    relay: Relay | None,
) -> list[list[int]]:
    """Up to `tokens` ids that follow each prompt, the same on every rank; all ranks call it.

    stage: this rank's, able to decode. how: of each prompt. ends: ids after any of which an answer ends. stop: whether
    the ids of an answer end it there. known: ids are drawn below this. layers: most blocks of any stage. relay: of
    the ranks that hold the model. Errors: ValueError where context ranks share rows; RequestError.
    """
    if mesh.cp.size > 1:
        raise ValueError(f"--cp {mesh.cp.size}: must be 1 where text is generated")
    own = range(mesh.dp.index, len(prompts), mesh.dp.size)
    options = EngineOptions(max_requests=max(1, min(AT_ONCE, -(-len(prompts) // mesh.dp.size))), vocab=known)
    engine, found = engine_on(stage, mesh, device, options, layers, relay=relay), dict[str, list[int]]()
    if engine is not None:  # the first rank of a replica; the others have followed it to its end
        try:
            asked = {
                number: Request(prompt=tuple(prompts[number]), tokens=tokens, sampling=how[number], stop_ids=ends)
                for number in own
            }
            found = _answers(engine, asked, stop)
        finally:
            engine.close()
    parts: list[dict[str, list[int]]] = gather_json(found, mesh.everyone, device.torch)
    together = {int(number): ids for part in parts for number, ids in part.items()}
    return [together[number] for number in range(len(prompts))]


def _answers(engine: Engine, asked: Mapping[int, Request], stop: Stop) -> dict[str, list[int]]:
    """Number of each request, as text -> its answer."""
    made: dict[int, list[int]] = {engine.add(request): [] for request in asked.values()}
    while not engine.idle:
        for event in engine.step():
            if event.message:
                raise ValueError(f"--tasks: {event.message}")
            if event.token is None:
                continue
            made[event.request].append(event.token)
            if event.finish is None and stop(made[event.request]):
                engine.cancel(event.request)
    return {str(number): ids for number, ids in zip(asked, made.values(), strict=True)}
