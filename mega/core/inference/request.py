"""What may be asked of an engine, and what it answers: ids in, ids out.

It knows neither text nor models: stop strings, templates and streamed characters are above, limits are the engine's.
No torch: what is out of range is refused at once.
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
"""The least and the greatest seed."""

TINY = 2.0**-126
"""The least normal number of fp32."""

MOST_LOGPROBS = 1000
"""Most alternatives that are reported with a token."""

MOST_BEAMS = 128

MOST_TOP_K = 1 << 31

MOST_LENGTH_PENALTY = 20.0
"""Either way: a length to this power is a number."""

MOST_TEMPERATURE = 1e30
"""fp32 holds it."""

REPETITION_PENALTIES = (1e-3, 1e3)
"""The least and the greatest: logits stay finite in fp32."""

MOST_PENALTY, MOST_BIAS = 2.0, 100.0
"""Either way, as OpenAI has them: of a token that is there, and of one that a request names."""

Top = tuple[tuple[int, float], ...]
"""The likeliest ids and their log-probabilities, likeliest first."""

Finish = Literal["stop", "length", "cancelled", "failed"]

Allowed = Callable[[Sequence[int]], "torch.Tensor | None"]
"""Ids so far, prompt included -> bool [vocab] on the CPU: which may follow; None: any. Called on rank 0 only."""


class RequestError(ValueError):
    """One bad field. field: its name, as below. rule: what holds for it. The text: `top_k -1: must be ...`."""

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
    """How a token is chosen: penalty, temperature, then the k best, then the p likeliest, then those near the best.

    temperature: 0 takes the likeliest. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off.
    top_p_decay, top_p_bound: 0 is off; else top_p is multiplied by the decay after every new token of the request, and
        does not fall below the bound.
    min_p: keeps tokens of at least this share of the likeliest one's probability.
    repetition_penalty: logits of ids in the prompt or the answer are divided by it where positive, else multiplied.
    presence_penalty, frequency_penalty: are taken from the logits of ids in the answer, the one once, the other as
        often as the id is there. logit_bias: (id, what is added to its logit), in the order of ids.
    seed: the same seed gives the same answer in any batch and layout; None: a new one for each request.

    Errors: RequestError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

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
        """Whether logits depend on the text so far, or on ids that the request names."""
        penalties = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.repetition_penalty != 1 or bool(penalties)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: below what fp32 distinguishes from 0 the likeliest has all."""
        return self.temperature < TINY or self.top_k == 1


def flag_line(error: RequestError) -> str:
    """The error of a field in the words of the command line."""
    return f"--{error.field.replace('_', '-')} {error.value}: {error.rule}"


def sampling_of(**fields: object) -> Sampling:
    """The sampling of flags of these names. Errors: ValueError naming the flag."""
    try:
        return Sampling(**fields)  # type: ignore[arg-type]
    except RequestError as error:
        raise ValueError(flag_line(error)) from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue, or to score.

    prompt: ids, at least one. tokens: most new ones; 0 scores the prompt only.
    stop_ids: after any of these, which is reported too, the answer ends with "stop"; else with "length".
    logprobs: None reports none; n: of every new token, and of the n likeliest in its place. They are those of the
        model, before penalty, temperature and filters.
    prompt_logprobs: those of the prompt's tokens too (with `logprobs` n: and of the n likeliest in their places).
    beams: 0 samples; else beam search of this width, greedy whatever `sampling` says; length_penalty: scores are the
        sum of log-probabilities / length ** this.
    adapter: LoRA adapter, by name. allowed: constrained decoding.

    Errors: RequestError naming the field.
    """

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    beams: int = 0
    length_penalty: float = 1.0
    adapter: str | None = None
    allowed: Allowed | None = None

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
    """ids: new tokens, with the stop token it ended in, if any. score: sum of log-probabilities / length ** penalty."""

    ids: tuple[int, ...]
    score: float


LOGITS_NOT_FINITE = (
    "the model's logits hold a NaN or an infinity: its weights do, or their products overflow in this dtype"
)
"""The `message` of an event that ends a request for this."""


class Citation(NamedTuple):
    """A neighbour that a model with a retriever has read. chunk: which of the text's found it. number: its own in the
    database. corpus, document: where it is from."""

    chunk: int
    number: int
    corpus: str
    document: int
    text: str


class Event(NamedTuple):
    """Something that happened to a request: a new token, its end, or both.

    request: its number. token: the new one, or None. logprob, top: of the token, where they were asked for.
    prompt_logprobs: with the request's first event where they were asked for: of every token of the prompt given those
        before, the first None; prompt_top: the likeliest in the place of each, the first ().
    finish: set on the request's last event. beams: best first, with the last event of a beam search, which reports no
        token before. message: why it failed. cited: what the model has read of a database since the event before.
    vector: of the prompt, float32 [hidden], from an engine that embeds.
    """

    request: int
    token: int | None = None
    logprob: float | None = None
    top: Top = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top: tuple[Top, ...] | None = None
    finish: Finish | None = None
    beams: tuple[Beam, ...] = ()
    message: str = ""
    cited: tuple[Citation, ...] = ()
    vector: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Limits:
    """What fits. longest: tokens of one sequence, prompt and answer; cache: tokens of all in flight; requests: rows of
    one decoding step (a beam search takes one for each beam); more wait. vocab: ids are below this. long_from: of more
    tokens than this a sequence has LongRoPE's long factors, so that keys of its first tokens are other ones."""

    longest: int
    cache: int
    requests: int
    vocab: int
    long_from: int | None = None


class Engine(Protocol):
    """Answers requests, many at a time. Not thread-safe: one thread calls it."""

    limits: Limits

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or waits."""

    def add(self, request: Request) -> int:
        """Queue a request; its number. Errors: RequestError where it can never fit or names what is not there."""

    def cancel(self, number: int) -> None:
        """End a request; its last event, "cancelled", comes with the next step. A finished one is left alone."""

    def step(self) -> list[Event]:
        """One iteration of the model for all in flight, and what came of it. Errors: RuntimeError naming a rank that
        has died: the engine is of no use any more."""

    def close(self) -> None:
        """Let other ranks go, and free the cache."""
