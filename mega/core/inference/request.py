"""Requests to an engine, and the events that the engine returns. Both contain token ids, not text.

This module does not depend on the model, and does not import torch. Callers handle stop strings, chat templates and the
decoding of text. A request's constructor checks the ranges of its fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

SEEDS = (-(2**63), 2**64 - 1)
"""The smallest and the largest seed."""

TINY = 2.0**-126
"""The smallest normal number of fp32."""

MOST_LOGPROBS = 1000
"""Maximum number of most likely ids that can be reported with a token."""

MOST_BEAMS = 128

MOST_TOP_K = 1 << 31

MOST_LENGTH_PENALTY = 20.0
"""Maximum absolute value of `length_penalty`; a length raised to this power is still finite."""

MOST_TEMPERATURE = 1e30
"""Maximum temperature; representable in fp32."""

REPETITION_PENALTIES = (1e-3, 1e3)
"""Minimum and maximum repetition penalty. Within these bounds, logits stay finite in fp32."""

MOST_PENALTY, MOST_BIAS = 2.0, 100.0
"""Maximum absolute values of presence and frequency penalties and of logit biases, as in OpenAI's API."""

Top = tuple[tuple[int, float], ...]
"""The most likely ids with their log-probabilities, in decreasing order."""

Finish = Literal["stop", "length", "cancelled", "failed"]

Allowed = Callable[[Sequence[int]], "torch.Tensor | None"]
"""A function that is given all ids so far, including the prompt, and returns a mask of the ids that may follow, bool
[vocab] on the CPU; None if all ids may follow. The function is called only on rank 0."""


class RequestError(ValueError):
    """Raised for an invalid field. field: name of the field. rule: the violated rule. Message: `top_k -1: must be
    ...`."""

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(f"{field} {value}: {rule}")
        self.field, self.value, self.rule = field, value, rule


def _whole(name: str, value: object, least: int, most: float, rule: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(name, value, rule)


def _real(name: str, value: object, holds: Callable[[float], bool], rule: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not holds(value):
        raise RequestError(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request. Order of operations: penalties, temperature, top-k, top-p, min-p, random draw.

    Errors: RequestError naming the field.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 chooses the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 disables the filter."""
    top_p: float = 1.0
    """Keep the most likely tokens until the sum of their probabilities reaches this value; 1 disables the filter."""
    top_p_decay: float = 0.0
    """Factor by which top_p is multiplied after every new token of the request; 0 disables the decay."""
    top_p_bound: float = 0.0
    """Lower limit of the decayed top_p."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability; 0 disables the filter."""
    repetition_penalty: float = 1.0
    """Factor by which positive logits are divided and negative logits multiplied, for ids in the prompt or the answer;
    1 disables the penalty."""
    presence_penalty: float = 0.0
    """Value to subtract from the logits of ids in the answer."""
    frequency_penalty: float = 0.0
    """Value to subtract from the logit of an id for each occurrence of the id in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (id, value to add to the id's logit), sorted by id."""
    seed: int | None = None
    """The same seed produces the same answer in any batch and layout. None: a random seed for each request."""

    def __post_init__(self) -> None:
        rule = f"must be a number from 0 (takes the likeliest) to {MOST_TEMPERATURE:g}"
        _real("temperature", self.temperature, lambda x: 0 <= x <= MOST_TEMPERATURE, rule)
        _whole("top_k", self.top_k, 0, MOST_TOP_K, f"must be a whole number from 0 (off) to {MOST_TOP_K}")
        _real("top_p", self.top_p, lambda x: 0 < x <= 1, "must be above 0 and at most 1 (1 is off)")
        _real("top_p_decay", self.top_p_decay, lambda x: 0 <= x <= 1, "must be from 0 to 1 (0 is off)")
        rule = f"must be from 0 (off) to top_p, {self.top_p}"
        _real("top_p_bound", self.top_p_bound, lambda x: 0 <= x <= self.top_p, rule)
        _real("min_p", self.min_p, lambda x: 0 <= x <= 1, "must be from 0 to 1 (0 is off)")
        least, most = REPETITION_PENALTIES
        rule = f"must be from {least:g} to {most:g} (1 is off)"
        _real("repetition_penalty", self.repetition_penalty, lambda x: least <= x <= most, rule)
        for name in ("presence_penalty", "frequency_penalty"):
            rule = f"must be from {-MOST_PENALTY:g} to {MOST_PENALTY:g} (0 is off)"
            _real(name, getattr(self, name), lambda x: abs(x) <= MOST_PENALTY, rule)
        for _, bias in self.logit_bias:
            _real("logit_bias", bias, lambda x: abs(x) <= MOST_BIAS, f"must be from {-MOST_BIAS:g} to {MOST_BIAS:g}")
        if self.seed is not None:
            _whole("seed", self.seed, *SEEDS, f"must be a whole number from {SEEDS[0]} to {SEEDS[1]}")

    @property
    def penalised(self) -> bool:
        """Whether any penalty or bias changes the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.repetition_penalty != 1 or bool(penalties)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen. This includes temperatures below fp32's smallest normal
        number, at which the most likely token has probability 1."""
        return self.temperature < TINY or self.top_k == 1


def flag_line(error: RequestError) -> str:
    """Format an error about a field as an error about the flag with the same name."""
    return f"--{error.field.replace('_', '-')} {error.value}: {error.rule}"


def sampling_of(**fields: object) -> Sampling:
    """Construct a `Sampling` from the values of flags. Errors: ValueError naming the flag."""
    try:
        return Sampling(**fields)  # type: ignore[arg-type]
    except RequestError as error:
        raise ValueError(flag_line(error)) from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue or to score.

    Errors: RequestError naming the field.
    """

    prompt: tuple[int, ...]
    """Ids of the prompt's tokens, at least one."""
    tokens: int
    """Maximum number of new tokens; 0 to only score the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the answer. Such an id is reported as the last token, and `finish` is "stop" instead of "length"."""
    logprobs: int | None = None
    """Number of most likely ids whose log-probabilities are reported with the log-probability of each new token; None
    to report no log-probabilities. Log-probabilities are computed before penalties, temperature and filters."""
    prompt_logprobs: bool = False
    """Whether to also report log-probabilities for the prompt's tokens."""
    beams: int = 0
    """Width of a beam search, which ignores `sampling`; 0 to sample instead."""
    length_penalty: float = 1.0
    """Exponent in the score of a beam, sum(log-probabilities) / length ** length_penalty."""
    adapter: str | None = None
    """Name of a LoRA adapter."""
    allowed: Allowed | None = None
    """Function that restricts the next token; None to allow all ids."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("prompt", "", "must hold at least one token")
        _whole("tokens", self.tokens, 0, math.inf, "must be a whole number of at least 0 (0 scores the prompt)")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS, f"must be a whole number from 0 to {MOST_LOGPROBS}")
        _whole("beams", self.beams, 0, MOST_BEAMS, f"must be a whole number from 0 to {MOST_BEAMS} (0 is off)")
        rule = f"must be a number from {-MOST_LENGTH_PENALTY:g} to {MOST_LENGTH_PENALTY:g}"
        _real("length_penalty", self.length_penalty, lambda x: abs(x) <= MOST_LENGTH_PENALTY, rule)
        if self.beams and not self.tokens:
            raise RequestError("beams", self.beams, "beam search needs tokens of at least 1")


@dataclass(frozen=True)
class Beam:
    """A finished beam. ids: new tokens, including the stop token that ended the beam. score: sum(log-probabilities) /
    length ** length_penalty.
    """

    ids: tuple[int, ...]
    score: float


LOGITS_NOT_FINITE = (
    "the model's logits hold a NaN or an infinity: its weights do, or their products overflow in this dtype"
)
"""Value of `Event.message` if a request has failed because its logits are not finite."""


class Citation(NamedTuple):
    """A neighbour that a model with a retriever has read."""

    chunk: int  # index of the chunk, within the text, for which the neighbour was retrieved
    number: int  # index of the neighbour in the database
    corpus: str  # corpus that contains the neighbour
    document: int
    text: str


class Event(NamedTuple):
    """A new token of a request, the end of a request, or both."""

    request: int
    """The request's number."""
    token: int | None = None
    logprob: float | None = None
    """The token's log-probability, if requested."""
    top: Top = ()
    """The most likely ids at the token's position, if requested."""
    prompt_logprobs: tuple[float | None, ...] | None = None
    """In the request's first event, if requested: the log-probability of each token of the prompt, given the tokens
    before it; None for the first token."""
    prompt_top: tuple[Top, ...] | None = None
    """The most likely ids at the position of each token of the prompt; () for the first token."""
    finish: Finish | None = None
    """Reason for the end of the request; None except in the request's last event."""
    beams: tuple[Beam, ...] = ()
    """In the last event of a beam search: the beams, best first. Earlier events of a beam search report no tokens."""
    message: str = ""
    """Reason for the failure of the request."""
    cited: tuple[Citation, ...] = ()
    """Neighbours that the model has read since the request's previous event."""
    vector: NDArray[np.float32] | None = None
    """The prompt's embedding, float32 [hidden], from an embedding engine."""


@dataclass(frozen=True)
class Limits:
    """The limits of an engine."""

    longest: int
    """Maximum number of tokens in one sequence, including prompt and answer."""
    cache: int
    """Maximum total number of tokens in all requests in flight."""
    requests: int
    """Maximum number of rows in a decoding step. A beam search uses one row per beam; requests that exceed the limit
    wait."""
    vocab: int
    """Vocabulary size; all ids are smaller."""
    long_from: int | None = None
    """Maximum length of sequences that use LongRoPE's short factors. Longer sequences use the long factors, which
    change the keys of all tokens."""
    chunk: int = 1
    """Number of tokens in a chunk for which a model with a retriever reads neighbours; 1 for other models."""


class Engine(Protocol):
    """An engine that answers many requests concurrently. An engine is not thread-safe."""

    limits: Limits

    @property
    def idle(self) -> bool:
        """Whether no request is in flight or waiting."""

    def add(self, request: Request) -> int:
        """Queue a request, and return its number. Errors: RequestError if the request exceeds the limits or names an
        unknown adapter."""

    def cancel(self, number: int) -> None:
        """End a request; the next step returns its last event, "cancelled". Has no effect on a finished request."""

    def step(self) -> list[Event]:
        """Run one iteration of the model for all requests in flight, and return the events. Errors: RuntimeError naming
        a rank that has died, after which the engine cannot be used."""

    def close(self) -> None:
        """End the engine on all ranks, and free the cache."""
