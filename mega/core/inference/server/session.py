"""Convert the events of one sequence to text up to a stop string, and cancel the sequence when the client disconnects.

This module depends on neither routes nor answer formats.
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
    """Raised if the client has closed the connection."""


class AnswerFailed(Exception):
    """Raised if a sequence has failed. The message may be shown to clients.

    by_request: whether the request's constraints caused the failure; if not, logits were not finite.
    """

    def __init__(self, reason: str, *, by_request: bool) -> None:
        super().__init__(reason)
        self.by_request = by_request


class TooLong(Exception):
    """Raised if the answer takes longer than --request-timeout."""


@dataclass(frozen=True)
class Scored:
    """A token, its log-probability, the most likely alternatives if requested, and the offset of the token's text.

    bare: those of the token and its alternatives whose first space is not in the text, because decoders of
    SentencePiece drop it at the beginning of a text.
    """

    id: int
    logprob: float | None
    top: Top
    offset: int
    bare: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Delta:
    """New text, the tokens that begin in the new text, and the finish reason if the sequence has ended."""

    text: str
    tokens: tuple[Scored, ...] = ()
    finish: Literal["stop", "length"] | None = None


class Continuation:
    """The text of one sequence in the engine.

    stops: strings that end the sequence; the text ends before such a string. end_ids: tokens that end the sequence and
    add no text. pair: a token that ends the sequence if it occurs twice in succession.
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
        self._held, self._given = "", 0  # possible beginning of a stop string; number of characters already returned
        self._waiting: list[Scored] = []

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield new text as it is generated; the last delta has a finish reason.

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
        """Wait until the sequence has ended, and return `self`. Errors: as for `deltas`."""
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
        """Add a token, and return the new text that further tokens cannot change."""
        assert event.token is not None
        self._count()
        self.ids.append(event.token)
        offset = self._given + len(self._held) + self._stream.begin(event.token)
        bare = self._stream.without_space((event.token, *(token for token, _ in event.top)))
        self._waiting.append(Scored(event.token, event.logprob, event.top, offset, bare))
        return "" if event.token in self._end_ids else self._stream.push(event.token)

    def _count(self) -> None:
        current_time = time.monotonic()
        self._metrics.new_tokens.inc()
        if self.ids:
            self._metrics.between.observe(current_time - self._last)
        else:
            self._metrics.first.observe(current_time - self._since)
        self._last = current_time

    def _cut(self, new: str, finish: Literal["stop", "length", ""]) -> Delta | None:
        """Return new text up to a stop string. Trailing text that may begin a stop string is withheld until more text
        arrives."""
        text = self._held + new
        stop_offsets = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if stop_offsets:
            text, finish = text[: min(stop_offsets)], "stop"
        held_back = 0 if finish else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held_back :] if held_back else ""
        released = text[: len(text) - held_back]
        self._given += len(released)
        self.text += released
        self.finish = finish
        ready = [each for each in self._waiting if each.offset < self._given or (finish and not stop_offsets)]
        self._waiting = [each for each in self._waiting if each not in ready] if not finish else []
        self.scored += ready
        return Delta(released, tuple(ready), finish or None) if released or ready or finish else None


async def all_whole(running: Sequence[Continuation]) -> None:
    """Wait until all sequences have ended. If one sequence fails, cancel all sequences. Errors: as for `deltas`."""
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
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`.

    >>> _overlap("to be or n", "not")
    1
    """
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


async def until_gone(work: Awaitable[T], gone: Callable[[], Awaitable[None]], seconds: float) -> T:
    """Return the result of `work`. `work` is cancelled when the client disconnects, or after `seconds` seconds.

    Errors: ClientGone, TooLong, and the errors of `work`.
    """
    working, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, disconnect}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone if disconnect.done() else TooLong(f"no whole answer within {seconds:g} s")
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)
