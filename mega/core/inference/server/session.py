"""Text above the engine: one sequence as pieces of text and tokens, up to a stop string; and when its client leaves.

It knows neither routes nor forms of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from mega.core.inference.request import LOGITS_NOT_FINITE, Beam, Citation, Event, Top
from mega.core.inference.server.driver import EngineLost, Ticket
from mega.core.inference.server.metrics import Metrics
from mega.core.inference.text_stream import TextStream
from mega.core.text.tokenizer import Tokenizer

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection: no one reads an answer."""


class AnswerFailed(Exception):
    """The engine gives up on one sequence; the text is fit for a client.

    by_request: because of what the request itself lets follow, and not of the model's numbers.
    """

    def __init__(self, reason: str, *, by_request: bool) -> None:
        super().__init__(reason)
        self.by_request = by_request


class TooLong(Exception):
    """The answer was not there in time."""


@dataclass(frozen=True)
class Scored:
    """A token, its log-probability and the likeliest in its place, where they were asked for; where its text starts."""

    id: int
    logprob: float | None
    top: Top
    offset: int


@dataclass(frozen=True)
class Delta:
    """What is new: text, the tokens that began in it, and how the sequence ended if it has."""

    text: str
    tokens: tuple[Scored, ...] = ()
    finish: Literal["stop", "length"] | None = None


class Continuation:
    """One sequence that the engine continues, as text.

    stops: strings that end it; neither they nor what follows are part of the text. end_ids: tokens that end it and
    have no text. pair: a token that ends it where it comes twice in a row.
    """

    def __init__(
        self,
        ticket: Ticket,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        metrics: Metrics,
        *,
        stops: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        pair: int | None = None,
    ) -> None:
        self.ticket, self.prompt = ticket, tuple(prompt)
        self.ids: list[int] = []
        self.text, self.finish = "", ""
        self.scored: list[Scored] = []
        self.prompt_logprobs: tuple[float | None, ...] = ()
        self.prompt_top: tuple[Top, ...] = ()
        self.beams: tuple[Beam, ...] = ()
        self.cited: tuple[Citation, ...] = ()
        self._stream = TextStream(tokenizer, prompt)
        self._metrics, self._since, self._last = metrics, time.monotonic(), 0.0
        self._stops, self._end_ids, self._pair = tuple(stops), end_ids, pair
        self._held, self._given = "", 0  # text that may begin a stop string; characters that were given out
        self._waiting: list[Scored] = []

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes; the last one has a finish.

        Errors: EngineLost; AnswerFailed.
        """
        try:
            while not self.finish:
                event = await self.ticket.events.get()
                if isinstance(event, EngineLost):
                    raise event
                if (delta := self._take(event)) is not None:
                    yield delta
        finally:
            self.ticket.cancel()

    async def whole(self) -> Continuation:
        """This, when it has ended. Errors: as of `deltas`."""
        async for _ in self.deltas():
            pass
        return self

    def _take(self, event: Event) -> Delta | None:
        if event.prompt_logprobs is not None:
            self.prompt_logprobs, self.prompt_top = event.prompt_logprobs, event.prompt_top or ()
        self.beams, self.cited = event.beams or self.beams, self.cited + event.cited
        if event.finish == "failed":
            reason = event.message or "the model gave no answer"
            raise AnswerFailed(reason, by_request=reason != LOGITS_NOT_FINITE)
        new = self._push(event) if event.token is not None else ""
        twice = self._pair is not None and (self.prompt + tuple(self.ids))[-2:] == (self._pair, self._pair)
        if event.finish is None and not (twice and event.token is not None):
            return self._cut(new, "")
        return self._cut(new + self._stream.finish(), "length" if event.finish == "length" and not twice else "stop")

    def _push(self, event: Event) -> str:
        """The text that is certain with a new token."""
        assert event.token is not None
        self._count()
        self.ids.append(event.token)
        offset = self._given + len(self._held)
        self._waiting.append(Scored(event.token, event.logprob, event.top, offset))
        return "" if event.token in self._end_ids else self._stream.push(event.token)

    def _count(self) -> None:
        now = time.monotonic()
        self._metrics.new_tokens.inc()
        if self.ids:
            self._metrics.between.observe(now - self._last)
        else:
            self._metrics.first.observe(now - self._since)
        self._last = now

    def _cut(self, new: str, finish: Literal["stop", "length", ""]) -> Delta | None:
        """What may be given out of the text so far: all but what may begin a stop string, and nothing from one on."""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            text, finish = text[: min(found)], "stop"
        kept = 0 if finish else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :] if kept else ""
        out = text[: len(text) - kept]
        self._given += len(out)
        self.text += out
        self.finish = finish
        ready = [each for each in self._waiting if each.offset < self._given or (finish and not found)]
        self._waiting = [each for each in self._waiting if each not in ready] if not finish else []
        self.scored += ready
        return Delta(out, tuple(ready), finish or None) if out or ready or finish else None


async def all_whole(running: Sequence[Continuation]) -> None:
    """Read several sequences to their ends; where one fails, the engine leaves all. Errors: as of `deltas`."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in running:
                group.create_task(each.whole())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for each in running:
            each.ticket.cancel()


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`, but are not all of it.

    >>> _overlap("to be or n", "not")
    1
    """
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


async def until_gone(work: Awaitable[T], gone: Callable[[], Awaitable[None]], seconds: float) -> T:
    """The result of `work`, which is cancelled when the client has gone, or after `seconds`.

    Errors: ClientGone, TooLong, and those of `work`.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone if leaving.done() else TooLong(f"no whole answer within {seconds:g} s")
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
