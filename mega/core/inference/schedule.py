"""Choose the tokens that the next step computes, and convert the results of finished steps to events.

The scheduler implements continuous batching: requests join and leave between steps. Prompts are computed in chunks, in
the same steps as the new tokens of running answers, and cached prefixes of earlier prompts are reused. A request is
admitted when blocks for its longest possible answer can be reserved, so no request in flight waits for memory.

A step can be built before the results of earlier steps are known. In place of each unknown token, the step contains the
index of the token's request. If a result ends a request, the tokens that later steps in flight compute for the request
are dropped. Only requests whose next step depends on the host, such as constrained requests, wait for results. This
module runs only on the host, and depends on neither the model nor ranks.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.inference.beam import BeamSearch
from mega.core.inference.cache import ROOT, Blocks
from mega.core.inference.request import LOGITS_NOT_FINITE, Allowed, Event, Finish, Limits, Request, RequestError, Top
from mega.core.inference.sampling import top_p_after, uniform
from mega.core.inference.speculate import SURE, TOKENS, Confidence, Drafter, Guessed
from mega.core.inference.step import BEAM, CHOOSE, NOT_FINITE, NUMBERS, Step, from_request
from mega.core.ops.paged_attention import Integers

NEUTRAL = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
"""The values of `NUMBERS` for rows without a random draw."""


@dataclass(eq=False)
class CachedSequence:
    """The tokens of a sequence and their blocks in the cache.

    ids       t0 t1 t2 t3 t4 t5          known tokens
    awaited                     ?? ??    tokens that steps in flight will choose
    computed  ^^^^^^^^^^^                keys and values are in the cache, or will be written by steps in flight
    """

    ids: list[int]
    blocks: list[int]
    computed: int = 0
    """Number of tokens whose keys and values are in the cache, or will be written by steps in flight."""
    prefix: int = ROOT
    """Identifier of the sequence of registered blocks, as returned by `Blocks.register`."""
    registered: int = 0
    """Number of leading blocks that other requests can reuse."""
    awaited: int = 0
    """Number of tokens after `ids` that steps in flight will choose."""
    number: int = field(default_factory=count().__next__)
    """Unique number."""

    @property
    def length(self) -> int:
        return len(self.ids) + self.awaited

    @property
    def pending(self) -> int:
        return len(self.ids) + self.awaited - self.computed


@dataclass(eq=False)
class InFlight:
    """A request that is running or waiting for admission."""

    number: int
    request: Request
    seed: int
    adapter: int = 0
    """Index of the request's adapter, counted from 1; 0 for the base model."""
    sequences: list[CachedSequence] = field(default_factory=list)
    """One sequence, or one sequence per beam."""
    search: BeamSearch | None = None
    promised: int = 0
    """Number of blocks that are reserved for the request but not allocated yet."""
    index: int = -1
    """The request's row in the device's tables of last tokens and seen ids; -1 before admission."""
    group: int = 0
    """Index of the request's group; steps serve the groups in round-robin order."""
    new: int = 0
    """Number of new tokens whose ids are known."""
    asked: int = 0
    """Number of new tokens, including tokens that steps in flight will choose."""
    unresolved: int = 0
    """Number of rows of logits for this request in steps whose results are still pending."""
    confidence: Confidence | None = None
    ended: bool = False
    """Whether the request has ended. Further results for the request are then dropped."""
    long: bool = False
    """Whether the request's keys use LongRoPE's long factors."""
    short_until: int | None = None
    """Number of tokens above which the sequence is recomputed with the long factors; None if the sequence is never
    recomputed."""
    failure: str = ""
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    prompt_top: list[Top] = field(default_factory=lambda: [()])

    @property
    def rows(self) -> int:
        return max(1, self.request.beams)

    @cached_property
    def penalised(self) -> bool:
        return self.request.sampling.penalised and not self.request.beams

    @cached_property
    def tops(self) -> int:
        """Number of most likely ids to report with each chosen token; -1 to report no log-probabilities at all."""
        return -1 if self.request.logprobs is None else self.request.logprobs

    @property
    def guessed(self) -> bool:
        """Whether the drafter guesses the request's next tokens."""
        return self.confidence is not None and self.confidence.active

    @property
    def waits(self) -> bool:
        """Whether the request's next step must wait for results, because the host needs them to build the step."""
        depends = self.search is not None or self.request.allowed is not None or self.guessed or self.outgrown
        return self.unresolved > 0 and depends

    @property
    def outgrown(self) -> bool:
        """Whether the request's sequence is too long for LongRoPE's short factors."""
        return self.short_until is not None and self.sequences[0].length > self.short_until


NO_GUESS = -1
"""Value of `WantedRow.guess` for the last row of a run with guesses. No guess follows this row."""
_NONE = (None,)


class WantedRow(NamedTuple):
    """A row of logits that a step returns, and its purpose.

    number: index of the new token that is chosen from the row. guess: the guessed token in the next row of the same
    run; NO_GUESS for the last row of a run with guesses, None in a run without guesses.
    """

    answer: InFlight
    target: int
    allowed: NDArray[np.bool_] | None = None
    number: int = 0
    guess: int | None = None

    @property
    def penalised(self) -> bool:
        return self.target == CHOOSE and self.answer.penalised

    @property
    def followed(self) -> bool:
        """Whether a later step may use the row's token before the token is known on the host."""
        return self.target == CHOOSE and self.guess is None


class Choice(NamedTuple):
    """The result for one row of logits. logprob: log-probability of `token`; NaN if not requested."""

    token: int
    logprob: float = math.nan
    top: Top = ()


@dataclass
class _Work:
    """The runs and rows of a step that is being built."""

    sequences: list[tuple[CachedSequence, int, int, Sequence[int]]] = field(default_factory=list)
    """For each run: (sequence, number of tokens, `InFlight.index` for an awaited id, guesses)."""
    adapters: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    rows: list[WantedRow] = field(default_factory=list)
    tokens: int = 0
    """Number of tokens added so far."""


@dataclass
class _Check:
    """Compares the guesses of a run with the chosen tokens, in order, and rejects rows after a wrong guess."""

    answer: InFlight
    guessed: int = 0
    right: int = 0
    failed: bool = False

    def take(self, guess: int, token: int) -> bool:
        """Record the token chosen for a row, and return whether the row is accepted. guess: the guessed token in the
        next row."""
        counts = not self.failed
        self.guessed += guess != NO_GUESS
        self.right += counts and token == guess
        self.failed = self.failed or token != guess
        return counts

    def close(self) -> None:
        if self.answer.confidence is not None:
            self.answer.confidence.checked(self.guessed, self.right)


class Scheduler:
    """Converts requests to steps, and the results of steps to events.

    chunk: function that returns the maximum number of prompt tokens in a step, given the number of running sequences.
    in_order: whether a run that shares a block must follow the run that computes the block, as is required if steps are
    split into tiles. adapters: names of the adapters; the first adapter has index 1. groups: number of groups of
    requests; a step computes new tokens of one group only, so that `groups` pipeline stages can compute at the same
    time. ahead: whether a step may be built before the results of earlier steps are known. drafter: guesses tokens for
    speculative decoding. shares: whether requests reuse cached blocks of common prefixes.
    """

    def __init__(
        self,
        blocks: Blocks,
        limits: Limits,
        chunk: Callable[[int], int],
        *,
        in_order: bool = False,
        adapters: Sequence[str] = (),
        groups: int = 1,
        ahead: bool = False,
        drafter: Drafter | None = None,
        shares: bool = True,
    ):
        self._shares = shares
        self.blocks, self.limits, self.chunk, self.in_order = blocks, limits, chunk, in_order
        self._groups, self._turn, self._ahead, self._drafter = groups, 0, ahead, drafter
        self._group = 0
        self._adapters: dict[str | None, int] = {None: 0, **{name: at for at, name in enumerate(adapters, start=1)}}
        self._waiting: deque[InFlight] = deque()
        self._running: list[InFlight] = []
        self._ended: list[Event] = []
        self._copies: list[tuple[int, int]] = []
        self._biases: list[tuple[int, int, float]] = []
        self._indices = list(range(limits.requests))
        self._rows: deque[list[WantedRow]] = deque()
        self._numbers = 0

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._ended)

    def sequences(self) -> dict[int, int]:
        """Return a map from the number of each running request to the number of its first sequence."""
        return {answer.number: answer.sequences[0].number for answer in self._running}

    def add(self, request: Request) -> int:
        """See `Engine.add`."""
        self._check(request)
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        answer = InFlight(self._numbers, request, seed, self._adapters[request.adapter])
        if (short_limit := self.limits.long_from) is not None:
            longest = len(request.prompt) + request.tokens
            # Beams could exceed the limit at different steps, so a beam search uses the long factors from the start.
            answer.long = (longest if request.beams else len(request.prompt)) > short_limit
            answer.short_until = short_limit if not answer.long and longest > short_limit else None
        self._numbers += 1
        if request.tokens or (request.prompt_logprobs and len(request.prompt) > 1):
            self._waiting.append(answer)
        else:  # nothing to compute: the first token of a prompt has no log-probability
            self._ended.append(self._first_event(answer, "length"))
        return answer.number

    def _check(self, request: Request) -> None:
        limits, longest = self.limits, len(request.prompt) + request.tokens
        bad = next((token for token in request.prompt if not 0 <= token < limits.vocab), None)
        if bad is not None:
            raise RequestError("prompt", f"token {bad}", f"ids of this model are from 0 to {limits.vocab - 1}")
        unknown_ids = [token for token, _ in request.sampling.logit_bias if not 0 <= token < limits.vocab]
        if unknown_ids:
            raise RequestError("logit_bias", unknown_ids[0], f"ids of this model are from 0 to {limits.vocab - 1}")
        if longest > limits.longest:
            raise RequestError(
                "tokens", request.tokens, f"with the prompt's {len(request.prompt)} at most {limits.longest} fit"
            )
        if request.beams and not self._shares:
            raise RequestError("beams", request.beams, "a model with a retriever has none; it looks for neighbours")
        if request.beams > limits.requests:
            raise RequestError("beams", request.beams, f"must be at most {limits.requests}, the requests at once")
        if self._need(request) > self.blocks.count - 1:
            raise RequestError(
                "tokens", request.tokens, f"the cache holds {limits.cache} tokens; fewer, or fewer beams"
            )
        if request.adapter not in self._adapters:
            names = ", ".join(name for name in self._adapters if name is not None) or "none"
            raise RequestError("adapter", request.adapter, f"is not loaded; valid: {names}")

    def _need(self, request: Request) -> int:
        longest = len(request.prompt) + request.tokens
        return max(1, request.beams) * -(-longest // self.blocks.size)

    def cancel(self, number: int) -> None:
        """See `Engine.cancel`."""
        for answer in (*self._waiting, *self._running):
            if answer.number == number:
                self._end(answer)
                self._ended.append(Event(request=number, finish="cancelled"))

    def ended(self) -> list[Event]:
        """Return the events of requests that have ended outside a step since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- building steps

    def next_step(self) -> Step | None:
        """Return the next step; None if no work is left, or if all requests wait for results."""
        for _ in range(self._groups):
            turn, self._turn = self._turn, (self._turn + 1) % self._groups
            step = self._step_of(turn)
            if step is not None:
                return step
        return None

    def _step_of(self, group: int) -> Step | None:
        """Return a step with new tokens of one group and prompt tokens of all groups; None if such a step is empty."""
        work, marks, self._group = _Work(), list[tuple[int, int]](), group
        late: list[tuple[InFlight, CachedSequence]] = []
        single, guesses = 0, self._guesses(group)
        for answer in self._running:
            if answer.asked == answer.request.tokens > 0 or answer.waits:
                continue
            if answer.outgrown:
                self._begin_again(answer)
            for sequence in answer.sequences:
                pending = sequence.pending
                if pending > 1:
                    late.append((answer, sequence))
                    continue
                single += 1
                if pending and answer.group == group:
                    self._schedule(work, answer, sequence, 1, guesses.get(answer.number, ()))
        prompts, remaining = [], self.chunk(single)
        while remaining > 0 and (late or self._admit(late, marks)):
            answer, sequence = late.pop(0)
            take = min(sequence.pending, remaining)
            remaining -= take
            self._reserve(sequence, answer, take)
            prompts.append((answer, sequence, take))
        if not self.in_order:
            prompts.sort(key=lambda each: each[2])  # attention pads adjacent runs to the same length
        for answer, sequence, take in prompts:
            self._schedule(work, answer, sequence, take)
        if not work.tokens:
            return None
        copies, self._copies = self._copies, []
        step = self._step(work, copies, marks)
        self._rows.append(work.rows)
        return step

    def _group_of_next(self) -> int:
        """Return the group of a request whose first token is chosen in this step. This is the step's group, whose next
        step starts after the token is known, or the smallest group if that group is much smaller."""
        if self._groups == 1:
            return 0
        sizes = [0] * self._groups
        for answer in self._running:
            sizes[answer.group] += answer.asked > 0
        least = min(sizes)
        return self._group if sizes[self._group] <= least + max(2, sum(sizes) // 8) else sizes.index(least)

    def _guesses(self, group: int) -> dict[int, list[int]]:
        """Return the guessed next tokens of each request that has guesses, as a map request number -> ids."""
        if self._drafter is None:
            return {}
        room = TOKENS - sum(len(answer.sequences) for answer in self._running)
        ready: list[InFlight] = []
        to_guess: list[Guessed] = []
        for answer in self._running:
            if answer.group != group or not answer.guessed or answer.unresolved or answer.sequences[0].pending != 1:
                continue
            assert answer.confidence is not None
            count = min(answer.confidence.reach, answer.request.tokens - answer.new - 1, room)
            if count > 0:
                room -= count
                ready.append(answer)
                to_guess.append(self._guessed(answer, count))
        proposals = self._drafter.propose(to_guess) if to_guess else []
        for answer, guesses in zip(ready, proposals, strict=True):
            if not guesses and answer.confidence is not None:
                answer.confidence.checked(1, 0)
        return {answer.number: guesses for answer, guesses in zip(ready, proposals, strict=True)}

    def _guessed(self, answer: InFlight, count: int) -> Guessed:
        (sequence,), request = answer.sequences, answer.request
        numbers = [_numbers(WantedRow(answer, CHOOSE, None, answer.new + offset)) for offset in range(count)]
        longest, offset = len(request.prompt) + request.tokens, self._offset(answer)
        return Guessed(sequence.number, answer.index, sequence.ids, longest, numbers, sequence.blocks, offset)

    def _offset(self, answer: InFlight) -> int:
        """Return the offset of the request's rows in the rotary tables."""
        return self.limits.longest * answer.long

    def _begin_again(self, answer: InFlight) -> None:
        """Discard the request's keys, so that all its tokens are recomputed with the long factors."""
        (sequence,) = answer.sequences
        self._release(answer, sequence)
        answer.long, answer.short_until = True, None
        answer.sequences = [CachedSequence(sequence.ids, [], prefix=self._root(answer))]

    def _root(self, answer: InFlight) -> int:
        """Return the id of the empty prefix from which a request's cached blocks start. The id depends on the adapter
        and on LongRoPE's factors, because the cached keys depend on both."""
        return ROOT - answer.adapter - answer.long * len(self._adapters)

    def _admit(self, late: list[tuple[InFlight, CachedSequence]], marks: list[tuple[int, int]]) -> bool:
        """Admit the next waiting request if it fits. Return whether a request was admitted."""
        if not self._waiting:
            return False
        answer = self._waiting[0]
        request, size = answer.request, self.blocks.size
        if sum(each.rows for each in self._running) + answer.rows > self.limits.requests:
            return False
        # The last token is always computed, because its logits are needed. prompt_logprobs needs the logits of all
        # tokens.
        most_shared = 0 if request.prompt_logprobs or not self._shares else (len(request.prompt) - 1) // size
        shared, prefix = self.blocks.find(request.prompt, most_shared, self._root(answer))
        need = self._need(request) - (len(shared) if answer.short_until is None else 0)
        admitted = self.blocks.admit(shared, need)
        if not admitted and answer.short_until is not None and shared:
            # The request needs blocks for all its tokens, because all of them will be recomputed. Together with the
            # shared blocks, this may exceed the number of available blocks.
            shared, prefix = [], self._root(answer)
            admitted = self.blocks.admit(shared, need)
        if not admitted:
            return False
        self._waiting.popleft()
        sequence = CachedSequence(list(request.prompt), shared, len(shared) * size, prefix, len(shared))
        answer.sequences, answer.promised = [sequence], need
        if request.beams:
            answer.search = BeamSearch(request.beams, request.tokens, request.stop_ids, request.length_penalty)
        answer.index = self._indices.pop()
        if answer.penalised:
            marks.append((answer.index, -1))
            marks.extend((answer.index, token) for token in sorted(set(request.prompt)))
            self._biases.extend((answer.index, *each) for each in request.sampling.logit_bias)
        plain = not (request.beams or request.allowed or answer.penalised or answer.short_until is not None)
        if self._drafter is not None and plain:
            answer.confidence = Confidence.begin(self._drafter.eager)
        self._running.append(answer)
        late.append((answer, sequence))
        return True

    def _reserve(self, sequence: CachedSequence, answer: InFlight, take: int) -> None:
        """Allocate blocks for the next `take` tokens, and register full blocks so that other requests can reuse
        them."""
        size, end = self.blocks.size, sequence.computed + take
        while len(sequence.blocks) * size < end:
            sequence.blocks.append(self.blocks.take())
            answer.promised -= 1
        if (sequence.registered + 1) * size <= end:
            self._register(sequence, end)

    def _register(self, sequence: CachedSequence, end: int) -> None:
        """Register the full blocks among the first `end` tokens whose ids are known, so that other requests can reuse
        them."""
        size, end = self.blocks.size, min(end, len(sequence.ids))
        while (sequence.registered + 1) * size <= end:
            number = sequence.registered
            ids = sequence.ids[number * size : (number + 1) * size]
            sequence.prefix = self.blocks.register(sequence.prefix, ids, sequence.blocks[number])
            sequence.registered += 1

    def _schedule(
        self, work: _Work, answer: InFlight, sequence: CachedSequence, take: int, guesses: Sequence[int] = ()
    ) -> None:
        self._reserve(sequence, answer, take + len(guesses))
        request, first, end = answer.request, sequence.computed, sequence.computed + take
        if request.prompt_logprobs and first + 1 < len(request.prompt) and not answer.new:
            for position in range(first, min(end, len(request.prompt) - 1)):
                work.wanted.append(work.tokens + position - first)
                work.rows.append(WantedRow(answer, request.prompt[position + 1]))
        if end == sequence.length and request.tokens:
            if not answer.asked:
                answer.group = self._group_of_next()
            try:
                allowed = None if request.allowed is None else self._allowed_after(request.allowed, sequence.ids)
            except Exception as error:  # fail only this request; its blocks are already in the step's tables
                answer.failure = answer.failure or str(error) or repr(error)
            else:
                self._want(work, answer, work.tokens + take - 1, allowed, guesses)
        work.sequences.append((sequence, take + len(guesses), answer.index, guesses))
        work.adapters.append(answer.adapter)
        work.offsets.append(self._offset(answer))
        work.tokens += take + len(guesses)

    @staticmethod
    def _want(
        work: _Work, answer: InFlight, last: int, allowed: NDArray[np.bool_] | None, guesses: Sequence[int]
    ) -> None:
        """Request the logits of a sequence's last token, and the logits of the guesses after this token."""
        (sequence, *_), chooses = answer.sequences, answer.search is None
        ends: Sequence[int | None] = (*guesses, NO_GUESS) if guesses else _NONE
        work.wanted += range(last, last + len(ends))
        for guess in ends:
            work.rows.append(WantedRow(answer, CHOOSE if chooses else BEAM, allowed, answer.asked, guess))
            if chooses:
                answer.asked += 1
        answer.unresolved += len(ends)
        if chooses:
            sequence.awaited += len(ends)

    def _step(self, work: _Work, copies: Sequence[tuple[int, int]], marks: Sequence[tuple[int, int]]) -> Step:
        biases, self._biases = self._biases, []
        size, tokens, positions = self.blocks.size, list[int](), list[int]()
        addresses, lengths = list[int](), list[int]()
        for sequence, take, index, guesses in work.sequences:
            position, blocks = sequence.computed, sequence.blocks
            end = sequence.computed = position + take
            tokens += sequence.ids[position:end] or (from_request(index),)
            tokens += guesses
            positions += range(position, end)
            lengths.append(end)
            while position < end:
                # Tokens in the same block have consecutive addresses.
                begin, run = (
                    blocks[position // size] * size + position % size,
                    min(size - position % size, end - position),
                )
                addresses += range(begin, begin + run)
                position += run
        width = -(-max(lengths) // size)
        tables = [sequence.blocks[:width] + [0] * (width - len(sequence.blocks)) for sequence, *_ in work.sequences]
        return Step(
            tokens=np.array(tokens, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            slots=np.array(addresses, dtype=np.int64),
            counts=np.array([take for _, take, *_ in work.sequences], dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            tables=np.array(tables, dtype=np.int64),
            sequences=np.array([sequence.number for sequence, *_ in work.sequences], dtype=np.int64),
            adapters=np.array(work.adapters, dtype=np.int64),
            offsets=np.array(work.offsets, dtype=np.int64),
            copies=_pairs(copies),
            wanted=np.array(work.wanted, dtype=np.int64),
            targets=np.array([row.target for row in work.rows], dtype=np.int64),
            tops=np.array([_tops(row) for row in work.rows], dtype=np.int64),
            seen=np.array([row.answer.index if row.penalised else -1 for row in work.rows], dtype=np.int64),
            requests=np.array(
                [row.answer.index if self._ahead and row.followed else -1 for row in work.rows], dtype=np.int64
            ),
            marks=_pairs(marks),
            biases=np.array(biases, dtype=np.float64).reshape(-1, 3),
            numbers=np.array([_numbers(row) for row in work.rows], dtype=np.float64).reshape(-1, len(NUMBERS)),
            allowed=_masks(work.rows, self.limits.vocab),
        )

    def _allowed_after(self, function: Allowed, ids: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return a mask of the ids that may follow, bool [vocab]; None if all ids may follow. Errors: any error that
        the request's function raises; ValueError if no id may follow."""
        allowed = function(ids)
        if allowed is None:
            return None
        mask = np.zeros(self.limits.vocab, dtype=np.bool_)
        mask[: len(allowed)] = allowed.numpy()[: len(mask)]
        if not mask.any():
            raise ValueError("allowed: no token may follow")
        return mask

    # -- processing results

    def take(self, choices: Sequence[Choice]) -> list[Event]:
        """Convert the results of the oldest step in flight, one per row of logits, to events."""
        events: list[Event] = []
        beams: dict[int, tuple[InFlight, list[Top]]] = {}
        checks: dict[int, _Check] = {}
        for row, choice in zip(self._rows.popleft(), choices, strict=True):
            answer = row.answer
            # Rows with a target score known tokens of the prompt, and are not counted in `unresolved`.
            answer.unresolved -= row.target < 0
            if answer.failure or answer.ended:
                continue
            if choice.token == NOT_FINITE:
                answer.failure = LOGITS_NOT_FINITE
            elif row.target == BEAM:
                beams.setdefault(answer.number, (answer, []))[1].append(choice.top)
            elif row.target == CHOOSE and row.guess is not None:
                check = checks.setdefault(answer.number, _Check(answer))
                if check.take(row.guess, choice.token):
                    events.append(self._chosen(answer, choice, row.guess))
                else:
                    # An earlier guess of the run was wrong, so this row's token is discarded.
                    answer.asked, answer.sequences[0].awaited = answer.asked - 1, answer.sequences[0].awaited - 1
            elif row.target == CHOOSE:
                events.append(self._chosen(answer, choice))
                self._watch(answer, choice.token)
            else:
                self._scored(answer, choice)
                if not answer.request.tokens and len(answer.prompt_logprobs) == len(answer.request.prompt):
                    events.append(self._finished(answer, "length"))
        for check in checks.values():
            check.close()
        for answer, likeliest in beams.values():
            events += self._searched(answer, likeliest)
        for answer in [answer for answer in self._running if answer.failure]:
            events.append(Event(request=answer.number, finish="failed", message=answer.failure))
            self._end(answer)
        return events

    def _watch(self, answer: InFlight, token: int) -> None:
        """Record whether the drafter would have guessed the token, to decide whether to guess the next tokens."""
        if self._drafter is None or answer.confidence is None or answer.ended or answer.guessed:
            return
        answer.confidence.watched(token)
        if not answer.confidence.expected and not answer.guessed and not self._drafter.eager:
            (answer.confidence.expected,) = self._drafter.propose([self._guessed(answer, SURE)])

    def drop(self) -> bool:
        """Drop the newest step if no request needs its results. Return whether the step was dropped."""
        if any(not row.answer.ended for row in self._rows[-1]) or self._running:
            return False
        self._rows.pop()
        return True

    def _scored(self, answer: InFlight, choice: Choice) -> None:
        answer.prompt_logprobs.append(choice.logprob)
        answer.prompt_top.append(choice.top)

    def _chosen(self, answer: InFlight, choice: Choice, guess: int | None = None) -> Event:
        """Append a chosen token, and return its event. Tokens computed after a wrong guess are discarded. guess: as in
        `WantedRow`."""
        request, (sequence,) = answer.request, answer.sequences
        sequence.ids.append(choice.token)
        if guess is not None:
            sequence.computed = len(sequence.ids) - (choice.token != guess)
        sequence.awaited -= 1
        answer.new += 1
        finish: Finish | None = None
        if choice.token in request.stop_ids:
            finish = "stop"
        elif answer.new == request.tokens:
            finish = "length"
        token, logprob, top = choice if request.logprobs is not None else (choice.token, None, ())
        if answer.new == 1:
            event = self._first_event(answer, finish, token=token, logprob=logprob, top=top)
        else:
            event = Event(answer.number, token, logprob, top, finish=finish)
        if finish is not None:
            self._register(sequence, sequence.computed)
            self._end(answer)
        return event

    def _finished(self, answer: InFlight, finish: Finish) -> Event:
        event = self._first_event(answer, finish)
        self._end(answer)
        return event

    def _first_event(self, answer: InFlight, finish: Finish | None, **what: object) -> Event:
        """Return the first event of a request, with the requested results for the prompt."""
        request = answer.request
        if request.prompt_logprobs:
            what["prompt_logprobs"] = tuple(answer.prompt_logprobs)
            what["prompt_top"] = tuple(answer.prompt_top) if request.logprobs else None
        return Event(request=answer.number, finish=finish, **what)  # type: ignore[arg-type]

    def _searched(self, answer: InFlight, likeliest: list[Top]) -> list[Event]:
        assert answer.search is not None
        following = answer.search.advance(likeliest)
        if following:
            self._fork(answer, following)
            return []
        beams = answer.search.result()
        stopped = bool(beams) and beams[0].ids[-1] in answer.request.stop_ids
        event = self._first_event(answer, "stop" if stopped else "length", beams=beams)
        self._end(answer)
        return [event]

    def _fork(self, answer: InFlight, following: Sequence[tuple[int, int]]) -> None:
        """Create the sequences of the next beams. A child shares its parent's full blocks and copies the last block."""
        parent_sequences, size = answer.sequences, self.blocks.size
        parents = [number for number, _ in following]
        for number, sequence in enumerate(parent_sequences):
            if number not in parents:
                self._release(answer, sequence)
        answer.sequences = []
        for child_number, (number, token) in enumerate(following):
            parent = parent_sequences[number]
            if number in parents[child_number + 1 :]:  # otherwise the last child takes over its parent's blocks
                child = CachedSequence(
                    list(parent.ids), list(parent.blocks), parent.computed, parent.prefix, parent.registered
                )
                full = parent.computed // size
                for block in child.blocks[:full]:
                    self.blocks.share(block)
                for position in range(full, len(child.blocks)):
                    child.blocks[position] = self.blocks.take()
                    answer.promised -= 1
                    self._copies.append((parent.blocks[position], child.blocks[position]))
            else:
                child = parent
            child.ids.append(token)
            answer.sequences.append(child)

    def _release(self, answer: InFlight, sequence: CachedSequence) -> None:
        for block in reversed(sequence.blocks):
            answer.promised += self.blocks.release(block)

    def _end(self, answer: InFlight) -> None:
        """Release the blocks and the index of a request, and remove the request."""
        for sequence in answer.sequences:
            self._release(answer, sequence)
            if self._drafter is not None:
                self._drafter.free(sequence.number)
        self.blocks.waive(answer.promised)
        answer.sequences, answer.promised, answer.ended = [], 0, True
        if answer.index >= 0:
            self._indices.append(answer.index)
            answer.index = -1
        for queue in (self._waiting, self._running):
            if answer in queue:
                queue.remove(answer)


def _masks(rows: Sequence[WantedRow], vocab: int) -> NDArray[np.bool_]:
    if all(row.allowed is None for row in rows):
        return np.zeros((0, 0), dtype=np.bool_)
    return np.stack([np.ones(vocab, dtype=np.bool_) if row.allowed is None else row.allowed for row in rows])


def _tops(row: WantedRow) -> int:
    if row.target == BEAM:
        assert row.answer.search is not None
        return row.answer.search.candidates
    if row.target == CHOOSE:
        return row.answer.tops
    return row.answer.request.logprobs or 0


def _numbers(row: WantedRow) -> tuple[float, ...]:
    sampling, new = row.answer.request.sampling, row.number
    if row.target != CHOOSE:
        return NEUTRAL
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    if sampling.greedy:
        return (0.0, 0.0, 1.0, 0.0, sampling.repetition_penalty, 0.0, *penalties)
    chance = uniform(row.answer.seed, new)
    return (
        sampling.temperature,
        sampling.top_k,
        top_p_after(sampling, new),
        sampling.min_p,
        sampling.repetition_penalty,
        chance,
        *penalties,
    )


def _pairs(pairs: Iterable[tuple[int, int]]) -> Integers:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
