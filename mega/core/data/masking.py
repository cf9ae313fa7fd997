"""Choose the words of BERT and T5 samples that are masked. All random draws are identical to Megatron-LM's.

Each sample uses a separate random stream, seeded with seed + sample index. A sample therefore does not depend on
batches or ranks. Many samples are made in one call in three phases, so that few operations are done per sample:

    1 per sample    draw from its stream: how its parts are cut, the order of its words, the numbers for phase 3
    2 all at once   find the words; convert the drawn numbers to what they mean at every position of a stream
    3 per sample    choose runs of words in the drawn order, until the budget of tokens is used up

This module does not read files and does not build rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from mega.core.text.tokenizer import Roles

if TYPE_CHECKING:
    from mega.core.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Result = TypeVar("Result")

_SPECIAL, _BEGINS, _CONTINUES = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a tokenizer's vocabulary that masking needs."""

    roles: Roles
    """The control tokens."""
    continues: NDArray[np.bool_]
    """continues[t] is True if token t continues the word of the token before it."""
    ids: Ints
    """The ids from which random replacements are drawn; at least two."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, rows: int | None = None) -> Vocabulary:
        """Return the vocabulary of a tokenizer. rows: number of rows in the model's embedding table, which may be
        smaller than the tokenizer's vocabulary.

        Raises ValueError for a tokenizer that lacks [CLS], [SEP] and [MASK].
        """
        if tokenizer.roles is None:
            raise ValueError(f"--tokenizer {tokenizer.kind}: has no CLS, SEP and MASK, which BERT and T5 need")
        size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        return cls(tokenizer.roles, np.array([tokenizer.continues(i) for i in range(size)]), np.arange(size))

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """uint8 [vocabulary]: 0 for CLS and SEP, 1 for a token that begins a word, 2 for one that continues a word."""
        kinds = np.where(self.continues, _CONTINUES, _BEGINS).astype(np.uint8)
        kinds[np.isin(np.arange(len(kinds)), (self.roles.cls, self.roles.sep))] = _SPECIAL
        return kinds


class Stream(threading.local):
    """The random stream of one sample at a time: numpy's RandomState, and its raw outputs. One per thread, because
    creating a stream takes longer than all other work for a sample."""

    def __init__(self) -> None:
        self._bits = np.random.MT19937(0)
        self._generator = np.random.RandomState(self._bits)
        self.seed = self._generator.seed
        self.uniform = self._generator.random_sample
        self.geometric = self._generator.geometric
        self.raw = self._bits.random_raw  # the generator's next 32-bit outputs, as uint64

    def below(self, count: int) -> int:
        """Return what `RandomState.randint(0, count)` returns, in a tenth of its time."""
        last = count - 1
        low_bits = (1 << last.bit_length()) - 1
        while last > 0:
            if (value := self.raw() & low_bits) <= last:
                return value
        return 0

    def coins(self, count: int) -> bytes:
        """Return `RandomState.random_sample(count) < 0.5`, which is the highest bit of every second output."""
        return self.raw(2 * count).astype("<u8", copy=False).tobytes()[3::16].translate(_IS_SMALL)

    def shuffled(self, items: Ints) -> Ints:
        """Return a shuffled copy."""
        order = items.copy()
        self._generator.shuffle(order)
        return order


_IS_SMALL = bytes(byte < 128 for byte in range(256))


class Exhausted(Exception):
    """More numbers are needed than were drawn."""


def with_enough(attempt: Callable[[int], Result], draws: int) -> Result:
    """Return attempt(draws), with more draws if it raises `Exhausted`."""
    while True:
        try:
            return attempt(draws)
        except Exhausted:
            draws *= 4


class WordIndex:
    """The words of many texts. Tokens and words of all texts are numbered consecutively, without CLS and SEP.

    >>> words = WordIndex()
    >>> words.add(bytes([0, 1, 2, 1, 0]))  # [CLS] un ##aff a [SEP]
    (0, 2)
    >>> words.add(bytes([0, 1, 0]))  # [CLS] b [SEP]
    (2, 3)
    >>> words.starts().tolist()
    [0, 2, 3, 4]

    bounds: the first word of each text, and the number of words. tokens: the number of tokens.
    """

    def __init__(self) -> None:
        self.bounds, self.tokens = [0], 0
        self._texts, self._begins = list[bytes](), list[int]()

    def add(self, kinds: bytes) -> tuple[int, int]:
        """Add a text, given by the kinds of its tokens. Return its first word, and the word after its last. Its first
        token begins a word in any case."""
        kinds = kinds.translate(None, b"\0") if _SPECIAL in kinds else kinds
        first = self.bounds[-1]
        end = first + kinds.count(_BEGINS)
        if kinds[:1] == b"\2":
            end += 1
            self._begins.append(self.tokens)
        self._texts.append(kinds)
        self.bounds.append(end)
        self.tokens += len(kinds)
        return first, end

    def starts(self) -> Ints:
        """Return the first token of each word, and the number of tokens."""
        kinds = np.frombuffer(bytearray().join(self._texts), np.uint8)
        kinds[self._begins] = _BEGINS
        return np.append((kinds == _BEGINS).nonzero()[0], self.tokens)


def choose_words(
    words: WordIndex,
    orders: Sequence[Ints],
    budgets: Sequence[int],
    runs: NDArray[np.uint8],
    steps: NDArray[np.uint8] | None = None,
) -> Ints:
    """Choose runs of words of all texts, each in the order of its text. Return int64 [tokens]: the position of each
    token's draw, as an index into all positions; -1 for tokens that are not chosen.

    orders: the words of each text, shuffled. budgets: maximum number of tokens in all runs of each text. A run that
    exceeds the budget is shortened. A run that overlaps an earlier run is dropped.
    runs: uint8 [texts, width], the number of words that is drawn at each position of a text's draws. The position after
    this draw is two further. steps: uint8 [texts, width], the number of positions that the draw for one token takes;
    None if tokens have no draws, so that all tokens of a run have the position after the run's draw.

    Raises `Exhausted` if a text needs the draws of the last two positions.
    """
    starts, order, most = words.starts(), np.concatenate(orders), np.arange(int(runs.max()))[:, None]
    run_at, jumps = runs.reshape(-1), [] if steps is None else [steps.reshape(-1) + np.arange(steps.size)]
    at = np.arange(len(budgets)) * runs.shape[1]
    # Texts in which words are still to be chosen: their next word in `order`, the end of their words, the budget that
    # is left, the position of their next draw and their last position
    state = [np.array(words.bounds[:-1]), np.array(words.bounds[1:]), np.array(budgets), at, at + runs.shape[1] - 2]
    taken, chosen = np.zeros(len(starts) + len(most), np.bool_), list[tuple[Ints, Ints, Ints]]()
    while True:
        live = ((state[2] > 0) & (state[0] < state[1])).nonzero()[0]
        if (state[3] >= state[4]).any():
            raise Exhausted
        if not len(live):
            return _per_token(chosen, words.tokens, jumps)
        number, limit, left, at, last = (each.take(live) for each in state)
        word = order.take(number)
        first, stop = starts.take(word), np.minimum(word + run_at.take(at), limit)
        size = starts.take(stop) - first
        while (is_long := (size > left) & (stop > word + 1)).any():
            stop = stop - is_long
            size = starts.take(stop) - first
        run = word + most
        in_run = run < stop
        is_chosen = (size <= left) & ~(taken.take(run) & in_run).any(0)
        taken[run[in_run & is_chosen]] = True
        size, at = size * is_chosen, at + 2
        chosen.append((first, size, at))
        state = [number + 1, limit, left - size, _advanced(at, size, jumps), last]


def _advanced(at: Ints, tokens: Ints, jumps: list[Ints]) -> Ints:
    """Return the positions after the draws for a number of tokens. jumps: positions after the draws for 1, 2, 4, ...
    tokens; more are added where needed."""
    while jumps and len(jumps) < int(tokens.max()).bit_length():
        jumps.append(jumps[-1].take(jumps[-1]))
    for bit, jump in enumerate(jumps[: int(tokens.max()).bit_length()]):
        at = np.where(tokens >> bit & 1, jump.take(at), at)
    return at


def _per_token(chosen: list[tuple[Ints, Ints, Ints]], tokens: int, jumps: list[Ints]) -> Ints:
    """Return the position of each token's draw. chosen: first tokens, numbers of tokens, and positions of the first
    tokens' draws, of runs of words."""
    drawn = np.full(tokens, -1)
    if not chosen:
        return drawn
    first, size, at = (np.concatenate(part) for part in zip(*chosen, strict=True))
    while len(more := size.nonzero()[0]):
        first, size, at = first.take(more), size.take(more), at.take(more)
        drawn[first] = at
        first, size, at = first + 1, size - 1, jumps[0].take(at) if jumps else at
    return drawn


_LONGEST = 4
"""Number of outputs that decide how a token is replaced. The draw of a random id uses the outputs after them."""


class BertDraws:
    """What the outputs of BERT's streams mean, for a draw that begins at any of them. See `choose_words`.

    outputs: uint64 [texts, draws], raw outputs of each text's stream. runs, steps: uint8 [texts, width].
    """

    def __init__(self, outputs: NDArray[np.uint64], vocabulary: Vocabulary) -> None:
        texts, draws = outputs.shape
        valid, columns, last = draws - _LONGEST, np.arange(draws, dtype=np.int32), len(vocabulary.ids) - 1
        self._vocabulary, self._width = vocabulary, valid + 2
        # RandomState makes a number in [0, 1) of two outputs.
        uniform = (((outputs[:, :-1] >> 5) << 26) | (outputs[:, 1:] >> 6)) * 2.0**-53
        # It draws an integer below n from the low bits of the first output in which they are less than n.
        self._numbers = outputs & ((1 << last.bit_length()) - 1)
        accepted = np.where(self._numbers <= last, columns, np.int32(draws))[:, ::-1]
        self._accepted = np.minimum.accumulate(accepted, axis=1)[:, ::-1][:, _LONGEST:]
        self._masked, self._kept = uniform[:, :valid] < 0.8, uniform[:, 2 : valid + 2] < 0.5
        self.runs, self.steps = np.ones((texts, self._width), np.uint8), np.zeros((texts, self._width), np.uint8)
        for bound in _bounds()[:-1]:
            self.runs[:, :valid] += uniform[:, :valid] >= bound
        after = np.where(self._kept, columns[4:], self._accepted + 1)
        after = np.minimum(np.where(self._masked, columns[2:-2], after), valid)
        # A step above 255 takes 250 rejected outputs: probability 2**-250
        self.steps[:, :valid] = after - columns[:valid]

    def replacements(self, drawn: Ints, tokens: Ints) -> Ints:
        """Return the ids that replace tokens. drawn: the position of each token's draw.

        80 % of the tokens are replaced by [MASK]; 10 % are kept; 10 % are replaced by a random id.
        """
        text, draw = np.divmod(drawn, self._width)
        number = self._vocabulary.ids[self._numbers[text, self._accepted[text, draw]]]
        kept = np.where(self._kept[text, draw], tokens, number)
        return np.where(self._masked[text, draw], self._vocabulary.roles.mask, kept)


@cache
def _bounds() -> list[float]:
    """Return the cumulative probabilities of BERT's runs of n = 1, 2 or 3 words, which have weights 1 / n."""
    weights = 1.0 / np.arange(1, 4)
    weights /= weights.sum()
    bounds = (weights / weights.sum()).cumsum()
    bounds /= bounds[-1]
    cumulative: list[float] = bounds.tolist()
    return cumulative


def ranges(first: Ints, sizes: Ints) -> Ints:
    """Return the concatenation of first[i] .. first[i] + sizes[i] - 1.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = sizes.cumsum()
    numbers: Ints = np.arange(int(sizes.sum())) + np.repeat(first - ends + sizes, sizes)
    return numbers
