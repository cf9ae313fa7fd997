"""Constrain answers to a JSON schema or a regular expression. The library llguidance computes the allowed next tokens.

The work per token is limited, so that one client's grammar cannot delay other clients. This module depends on neither
the engine nor the routes.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mega.core.inference.request import Allowed
from mega.core.inference.server.fields import BadField
from mega.core.inference.server.limits import GRAMMAR_BYTES
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_FIELD = "response_format"
_FORMS = (
    '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}} '
    'or {"type": "regex", "pattern": "..."}'
)


class Grammars:
    """Compiles the grammars of requests for one tokenizer. vocab: the model's vocabulary size, which may be larger than
    the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._library: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, wanted: Mapping[str, object], field: str = _FIELD) -> Grammar:
        """Return the grammar of a response_format. field: name of the request field, for use in messages. Errors:
        BadField naming `field`."""
        source = _source(wanted, field)

        def text(matcher: type[LLMatcher]) -> str:
            if isinstance(source, str):
                return matcher.grammar_from_regex(source)
            return matcher.grammar_from_json_schema(json.dumps(source), overrides={"whitespace_pattern": "[ ]?"})

        return self._made(field, text)

    def lark(self, wanted: str) -> Grammar:
        """Return the grammar of function calls (tools.py). Errors: BadField naming `tools`."""
        return self._made("tools", lambda matcher: matcher.grammar_from_lark(wanted))

    def _made(self, field: str, text: Callable[[type[LLMatcher]], str]) -> Grammar:
        if importlib.util.find_spec("llguidance") is None:
            rule = "this server cannot constrain answers; it needs llguidance, of the extra serve"
            raise BadField(field, f"{field}: {rule}")
        if self._tokenizer.eod is None:
            raise BadField(field, f"{field}: the model's tokenizer has no token that ends an answer")
        from llguidance import LLMatcher

        with self._lock:
            self._library = self._library or _library_tokenizer(self._tokenizer, self._vocab)
        try:
            return Grammar(self._library, text(LLMatcher), self._vocab, self._tokenizer.eod, field)
        except (ValueError, RecursionError) as error:
            raise BadField(field, f"{field}: {_one_line(error)}") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


class Grammar:
    """A compiled grammar. `start` begins one sequence. Errors: ValueError for an invalid grammar."""

    def __init__(self, library: LLTokenizer, text: str, vocab: int, end: int, field: str) -> None:
        from llguidance import LLMatcher

        self._first = LLMatcher(library, text, log_level=0, limits=_limits())
        if self._first.is_error():
            raise ValueError(self._first.get_error())
        trial = self._first.deep_copy()
        trial.compute_bitmask()  # fails for a schema that refers only to itself and therefore permits no token
        if trial.is_error():
            raise ValueError(f"no answer can begin by it ({_one_line(trial.get_error())})")
        self._vocab, self._end, self._field = vocab, end, field

    def start(self, ends: frozenset[int]) -> Allowed:
        """Return the mask function of one sequence. ends: tokens that end the sequence; they are allowed wherever the
        grammar allows the text to end."""
        matcher = self._first.deep_copy()
        consumed: list[int | None] = [None]
        only_end = torch.zeros(self._vocab, dtype=torch.bool)
        only_end[list(ends | {self._end})] = True

        def allowed(ids: Sequence[int]) -> torch.Tensor:
            before = len(ids) if consumed[0] is None else consumed[0]
            consumed[0] = len(ids)
            new = [token for token in ids[before:] if not only_end[token]]
            if new:
                matcher.consume_tokens(new)
            if matcher.is_error():
                raise ValueError(f"{self._field}: {_one_line(matcher.get_error())}")
            if matcher.is_stopped():
                return only_end
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: self._vocab].bool()
            if matcher.is_error():  # the step exceeded the limit on work
                raise ValueError(f"{self._field}: {_one_line(matcher.get_error())}")
            return mask | only_end if matcher.is_accepting() else mask & ~only_end

        return allowed


def _source(wanted: Mapping[str, object], field: str) -> str | dict[str, object]:
    """Return the regular expression or JSON schema of a response_format. Errors: BadField naming `field`."""
    kind = wanted.get("type")
    valid_keys = {"json_object": {"type"}, "json_schema": {"type", "json_schema"}, "regex": {"type", "pattern"}}
    if not isinstance(kind, str) or kind not in valid_keys or set(wanted) - valid_keys[kind]:
        raise BadField(field, f"{field}: must be {_FORMS}")
    described_schema = wanted.get("json_schema", {})
    source = {"json_object": {"type": "object"}, "regex": wanted.get("pattern")}.get(kind)
    if kind == "json_schema":
        if not isinstance(described_schema, dict) or set(described_schema) - {
            "name",
            "schema",
            "strict",
            "description",
        }:
            raise BadField(field, f"{field}: json_schema must hold a schema, and may hold name, strict, description")
        source = described_schema.get("schema")
    if not isinstance(source, str if kind == "regex" else dict):
        raise BadField(field, f"{field}: must be {_FORMS}")
    if len(json.dumps(source)) > GRAMMAR_BYTES:
        raise BadField(field, f"{field}: must be at most {GRAMMAR_BYTES} bytes")
    return source


def _limits() -> LLParserLimits:
    """Return limits on the work and memory of one grammar. With these limits, the most expensive step takes a few
    milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


_INSIDE = b"\x02"
"""Prefix that is added to a text to encode the text as the continuation of another text."""


class _Tokens:
    """Adapts a tokenizer to the interface that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        size = tokenizer.vocab_size
        self.eos_token_id, self.bos_token_id = tokenizer.eod, tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)] + [b""] * (vocab - size)
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = f"<|{token}|>".encode()
        self._encode = tokenizer.encode
        self._lead = len(tokenizer.encode(""))
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens whose bytes are `text`, encoded as the continuation of a longer text. llguidance calls this
        method to encode text that the grammar forces. Many tokenizers add a space before a text or its first word, so
        `text` is also encoded with the prefix `_INSIDE`."""
        data = text if isinstance(text, bytes) else text.encode()
        for before in (b"", _INSIDE):
            ids = self._encode((before + data).decode(errors="replace"))[self._lead :]
            if before:
                position = next((at for at, token in enumerate(ids) if self.tokens[token] == before), len(ids))
                ids = ids[position + 1 :]
            if b"".join(self.tokens[token] for token in ids) == data:
                return ids
        return self._by_length(data)

    def _by_length(self, data: bytes) -> list[int]:
        """Encode by repeatedly choosing the longest matching token, up to the first byte with which no token begins."""
        ids: list[int] = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def _library_tokenizer(tokenizer: Tokenizer, vocab: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocab)), n_vocab=vocab)
