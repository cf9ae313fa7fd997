"""An engine without a model: it answers with the letters of its answer, one a step, and can be told to fail."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from mega.core.inference.relay import LostRank
from mega.core.inference.request import LOGITS_NOT_FINITE, Beam, Event, Limits, Request, RequestError


class FakeEngine:
    """Every request is answered by `answer`, and then by the end of the document, one token a step."""

    def __init__(
        self,
        answer: Sequence[int],
        end: int,
        *,
        vocab: int = 512,
        longest: int = 256,
        rows: int = 8,
        seconds: float = 0,
    ) -> None:
        self.limits = Limits(longest=longest, cache=longest * rows, requests=rows, vocab=vocab)
        self.answer, self.end, self.seconds = [*answer, end], end, seconds
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.waiting: list[int] = []
        self.seen: list[Request] = []
        self.fails: str | None = None
        self.not_finite = False
        """Every request fails, as with weights that hold a NaN."""
        self.cancelled = 0
        self._next, self._cancelled = 0, list[int]()

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self._cancelled)

    def add(self, request: Request) -> int:
        if len(request.prompt) + request.tokens > self.limits.longest:
            raise RequestError("tokens", request.tokens, f"must fit into {self.limits.longest} with the prompt")
        self.seen.append(request)
        self._next += 1
        self.running[self._next] = (request, [])
        return self._next

    def cancel(self, number: int) -> None:
        if number in self.running:
            del self.running[number]
            self._cancelled.append(number)
            self.cancelled += 1

    def step(self) -> list[Event]:
        time.sleep(self.seconds)
        if self.fails:
            raise LostRank(self.fails)
        events = [Event(request=number, finish="cancelled") for number in self._cancelled]
        self._cancelled.clear()
        for number, (request, new) in list(self.running.items())[: self.limits.requests]:
            events += self._advance(number, request, new)
        return events

    def _advance(self, number: int, request: Request, new: list[int]) -> list[Event]:
        first: dict[str, object] = {}
        if self.not_finite:
            del self.running[number]
            return [Event(request=number, finish="failed", message=LOGITS_NOT_FINITE)]
        if request.prompt_logprobs and not new:
            first["prompt_logprobs"] = (None, *(-0.5 for _ in request.prompt[1:]))
            first["prompt_top"] = ((), *(((token, -0.5),) for token in request.prompt[1:]))
        if request.beams or not request.tokens:
            del self.running[number]
            beams = tuple(Beam((*self.answer[:-1],), -float(i)) for i in range(request.beams))
            return [Event(request=number, finish="length", beams=beams, **first)]  # type: ignore[arg-type]
        token = self.answer[len(new) % len(self.answer)]
        if request.allowed is not None and (mask := request.allowed([*request.prompt, *new])) is not None:
            token = token if mask[token] else int(mask.nonzero()[0])
        new.append(token)
        finish = "stop" if token in request.stop_ids else "length" if len(new) == request.tokens else None
        if finish:
            del self.running[number]
        scored = {} if request.logprobs is None else {"logprob": -math.log(2), "top": ((token, -math.log(2)),)}
        return [Event(request=number, token=token, finish=finish, **scored, **first)]  # type: ignore[arg-type]

    def close(self) -> None:
        pass
