"""Store the state that all routes share: the model's names, tokenizer, chat template, grammars, limits and engine
driver.

This module also parses request bodies and converts texts to engine requests. It does not depend on routes or answer
formats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from mega.core.inference.loading.load import text_ends
from mega.core.inference.request import Allowed, Request, RequestError, Sampling
from mega.core.inference.server.constrain import Grammars
from mega.core.inference.server.driver import Driver, Ticket
from mega.core.inference.server.fields import BadField
from mega.core.inference.server.metrics import Metrics
from mega.core.inference.server.options import ServerOptions
from mega.core.inference.server.session import Continuation
from mega.core.text.chat.format import ChatFormat
from mega.core.text.special import Spelled
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json, parse_json

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest

_DISCARDED = 8
"""A body that exceeds the maximum size by more than this factor closes the connection. Up to this factor, the excess is
read and discarded."""
_SHORT = 1 << 10
"""Texts of at most this many characters are encoded on the event loop's thread."""
_LARGE = 1 << 16
"""JSON with more bytes than this is parsed on the text thread, not on the event loop's thread."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """The chat template and end tokens of a model or an adapter. chat: None if the model cannot chat; `no_chat` then
    contains the reason. stop_ids: end tokens in addition to the tokenizer's end token."""

    chat: ChatFormat | None = None
    no_chat: str = ServerOptions.no_chat
    stop_ids: frozenset[int] = frozenset()


Given = TypeVarTuple("Given")
Result = TypeVar("Result")


class Service:
    """A served model. draining: whether new requests are rejected. busy: number of requests in progress. manners: name
    of an adapter with a separate template or end tokens -> the adapter's `Manner`."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        options: ServerOptions,
        chat: ChatFormat | None = None,
        manners: Mapping[str, Manner] | None = None,
    ) -> None:
        self.driver, self.tokenizer, self.options, self.chat = driver, tokenizer, options, chat
        self.manners = dict(manners or {})
        limits = driver.engine.limits
        self.longest = min(limits.longest, options.max_length or limits.longest)
        self.known = min(limits.vocab, tokenizer.vocab_size)
        self.metrics, self.grammars = Metrics(), Grammars(tokenizer, limits.vocab)
        self.started = time.time()
        self.draining, self.busy, self.body_bytes = False, 0, 0
        self.characters = self.longest * max(len(tokenizer.piece(token)) for token in range(tokenizer.vocab_size))
        self.special = Spelled(tokenizer.special_tokens())
        self._text = ThreadPoolExecutor(1, "text")
        waiting = "Sequences that the engine runs or that wait for it"
        self.metrics.gauge("mega_sequences_in_flight", waiting, lambda: self.driver.in_flight)
        self.metrics.gauge("mega_requests_in_progress", "Requests that are not answered yet", lambda: self.busy)

    @property
    def ready(self) -> bool:
        return self.driver.failure is None and not self.draining

    async def off_loop(self, work: Callable[[*Given], Result], *given: *Given) -> Result:
        """Run `work(*given)` on the text thread, so that the event loop stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._text, work, *given)

    # --- bodies ---------------------------------------------------------------------------------------------------

    async def body(self, request: HttpRequest) -> Json:
        """Read and parse the body of a request, within limits of size and time. Errors: BadField with the HTTP
        status."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise BadField(None, "Content-Type: must be application/json", 415)
        data = bytearray()
        try:
            async with asyncio.timeout(self.options.limits.body_seconds):
                size = 0
                async for part in request.stream():
                    size += len(part)
                    if size <= self.options.limits.max_body:
                        data += part
                        self.body_bytes += len(part)
                    # The excess is read and discarded, because a client that is still writing does not read the error
                    # response.
                    elif size > _DISCARDED * self.options.limits.max_body:
                        break
                    self._check_bodies()
            if size > self.options.limits.max_body:
                raise BadField(None, f"the body: must be at most {self.options.limits.max_body} bytes", 413)
            if len(data) > _LARGE:
                return await self.off_loop(parse_json, bytes(data), "the body")
            return parse_json(bytes(data), "the body")
        except TimeoutError:
            raise BadField(None, f"the body took longer than {self.options.limits.body_seconds:g} s", 408) from None
        except BadField:
            raise
        except ValueError as error:
            raise BadField(None, " ".join(str(error).split())[:200]) from None
        finally:
            self.body_bytes -= len(data)

    def _check_bodies(self) -> None:
        if self.body_bytes > self.options.limits.bodies:
            raise BadField(None, "too many large requests at a time; try later", 429)

    # --- prompts --------------------------------------------------------------------------------------------------

    def check_queue(self, count: int) -> None:
        """Reject a request before any work if the queue is full. Errors: QueueFull, EngineLost."""
        if count <= self.driver.most:  # a count above `most` can never fit, and `add` rejects it
            self.driver.check_room(count)

    async def encode(self, name: str, text: str, special: bool = False) -> tuple[int, ...]:
        """Return the ids of a prompt. An empty prompt becomes the token that begins a document. special: whether names
        of special tokens in the text are parsed as these tokens. Errors: BadField."""
        return await self.ids_of(name, text, special) or (self.start(name),)

    async def ids_of(self, name: str, text: str, special: bool = False) -> tuple[int, ...]:
        """Return the ids of a text; an empty text may have no ids. special: as for `encode`. Errors: BadField."""
        if len(text) > self.characters:
            raise BadField(name, f"{name}: {self.context_message()} A text is of at most {self.characters} characters.")
        try:
            # Switching to another thread takes longer than encoding a short text.
            short = len(text) <= _SHORT
            encode = self.tokenizer.encode_special if special else self.tokenizer.encode
            ids = encode(text) if short else await self.off_loop(encode, text)
        except ValueError as error:
            raise BadField(name, f"{name}: {' '.join(str(error).split())[:200]}") from None
        return self.checked(name, ids)

    def framed(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a text as the model reads them. For a BERT model, [CLS] and [SEP] enclose the text."""
        roles = self.tokenizer.roles if self.options.vector_width else None
        return tuple(ids) if roles is None else (roles.cls, *ids, roles.sep)

    def checked(self, name: str, ids: Iterable[object]) -> tuple[int, ...]:
        """Check a prompt's ids from a client or from the tokenizer. Errors: BadField."""
        token_ids: list[int] = []
        for token in ids:
            if isinstance(token, float) and token.is_integer():  # JSON Schema counts 1.0 as an integer
                token = int(token)
            if type(token) is not int or not 0 <= token < self.known:
                raise BadField(
                    name, f"{name}: token {repr(token)[:40]}: must be a whole number from 0 to {self.known - 1}"
                )
            token_ids.append(token)
        return tuple(token_ids)

    def start(self, name: str) -> int:
        """Return the token that begins a document. Errors: BadField if the tokenizer has no such token."""
        start = self.tokenizer.start
        if start is None:
            raise BadField(name, f"{name}: must not be empty: this tokenizer has no token that begins a text")
        return start

    def token_bytes(self, token: int, bare: Container[int] = ()) -> bytes:
        """Return the bytes that a token adds to a text. bare: tokens whose first space the decoder drops."""
        data = self.tokenizer.token_bytes(token)
        return data.removeprefix(b" ") if token in bare else data

    def token_text(self, token: int, bare: Container[int] = ()) -> str:
        """Return the text of a token in OpenAI's notation: `bytes:...` for an incomplete character, and the name for a
        token that has no text. bare: as for `token_bytes`."""
        data = self.token_bytes(token, bare)
        try:
            return data.decode() if data or token in bare else self.tokenizer.piece(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def context_message(self) -> str:
        return f"This model's maximum context length is {self.longest} tokens."

    def check_room(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Check that the prompt and the answer together fit into the context length. Errors: BadField."""
        if len(prompt) + tokens > self.longest:
            raise BadField(
                name,
                f"{self.context_message()} Asked for were {len(prompt)} in the prompt and {tokens} for the answer.",
            )

    # --- requests of the engine -----------------------------------------------------------------------------------

    def sampling(self, given: Mapping[str, Any], index: int = 0) -> Sampling:
        """Return the sampling options for sequence `index` of a request; each sequence uses a different seed. Errors:
        BadField."""
        defaults = {name: getattr(self.options, name) for name in ("temperature", "top_k", "top_p", "seed")}
        overrides = {name: given[name] for name in Sampling.__dataclass_fields__ if given.get(name) is not None}
        merged = defaults | overrides
        if merged["top_k"] == -1:
            merged["top_k"] = 0
        if merged["seed"] is not None and index:
            merged["seed"] = (merged["seed"] + index) % 2**64
        try:
            return Sampling(**merged)
        except RequestError as error:
            raise BadField(error.field, str(error)) from None

    def adapter(self, model: str | None) -> str | None:
        """Return the name of the adapter that `model` selects; None for the model itself. Errors: BadField if no such
        model is served."""
        if model is None or model == self.options.name or model in self.options.served_model_name:
            return None
        if model in self.options.adapters:
            return model
        names = ", ".join(self.names)
        raise BadField("model", f"model {model[:60]!r}: is not served here; valid: {names}", 404)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases, then the names of its adapters."""
        options = self.options
        return tuple(dict.fromkeys((options.name, *options.served_model_name, *options.adapters)))

    def manner(self, adapter: str | None) -> Manner:
        """Return the `Manner` of an adapter, or the model's `Manner` if the adapter has no separate one."""
        options = self.options
        whole = Manner(chat=self.chat, no_chat=options.no_chat, stop_ids=options.stop_ids)
        return whole if adapter is None else self.manners.get(adapter, whole)

    async def add(self, requests: Sequence[Request]) -> list[Ticket]:
        """Add either all requests or none, and return their tickets. Errors: BadField, QueueFull, EngineLost."""
        if len(requests) > self.driver.most:
            raise BadField("n", f"{len(requests)} sequences: at most {self.driver.most} are accepted at a time")
        try:
            tickets = await self.driver.add(requests)
        except RequestError as error:
            raise BadField(error.field, str(error)) from None
        self.metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))
        return tickets

    async def continuations(self, requests: Sequence[Request], **how: Any) -> list[Continuation]:
        """Add requests, and return a `Continuation` with the text of each request. how: arguments of `Continuation`.
        Errors: as for `add`."""
        tickets = await self.add(requests)
        return [
            Continuation(ticket, self.tokenizer, request.prompt, self.metrics, **how)
            for ticket, request in zip(tickets, requests, strict=True)
        ]

    def ends(self, ignore: bool = False, adapter: str | None = None) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return frozenset() if ignore else text_ends(self.tokenizer, self.manner(adapter).stop_ids, self.known)

    async def allowed(
        self, wanted: Mapping[str, object] | None, ends: frozenset[int], count: int, field: str
    ) -> list[Allowed | None]:
        """Return mask functions for `count` sequences under a response_format; None for unconstrained sequences.
        Errors: BadField."""
        if wanted is None or wanted.get("type") == "text":
            return [None] * count
        grammar = await self.off_loop(self.grammars.compile, wanted, field)
        return [grammar.start(ends) for _ in range(count)]

    async def calling(self, wanted: str, ends: frozenset[int], count: int) -> list[Allowed | None]:
        """Return mask functions for `count` sequences under a grammar of tools.py. Errors: BadField."""
        grammar = await self.off_loop(self.grammars.lark, wanted)
        return [grammar.start(ends) for _ in range(count)]
