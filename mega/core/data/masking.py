"""Choose the words to mask in BERT and T5 samples. All random draws are identical to Megatron-LM's.

Each sample uses a separate random stream, seeded with seed + sample index, and therefore does not depend on batches or
ranks. Many samples are built in one call, in four phases, to minimize the operations per sample:

    1 per sample    seed the stream, and draw how the parts are cut
    2 all at once   cut all parts, and find their words
    3 per sample    shuffle the words, and draw random numbers for phase 4
    4 all at once   interpret the numbers at every position of a stream, and choose one run of words per text at a time,
                    in the drawn order, until the token budget is used up

This module does not read files and does not build rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mega.core.text.tokenizer import Roles

if TYPE_CHECKING:
    from mega.core.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Result = TypeVar("Result")
Drawn = TypeVar("Drawn", NDArray[np.int64], NDArray[np.uint64])

_SPECIAL, _BEGINS, _CONTINUES = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer's vocabulary that masking needs."""

    roles: Roles
    """The control tokens."""
    continues: NDArray[np.bool_]
    """continues[t] is True if token t continues the word of the token before it."""
    ids: Ints
    """The ids from which random replacements are drawn, at least two."""

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


class Stream:
    """The random stream of one sample: numpy's RandomState, with access to its raw outputs."""

    def __init__(self) -> None:
        bits = np.random.MT19937(0)
        generator = np.random.RandomState(bits)
        self.seed, self.shuffle, self.geometric = generator.seed, generator.shuffle, generator.geometric
        self.raw = bits.random_raw  # the generator's next 32-bit outputs, as uint64


class Streams(threading.local):
    """Streams that are reused in each call, because creating a stream takes ten times as long as all other work for a
    sample. Each thread has separate streams."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []

    def seeded(self, seeds: Sequence[int]) -> list[Stream]:
        """Return one stream per seed, valid until the next call."""
        self._streams += [Stream() for _ in range(len(seeds) - len(self._streams))]
        streams = self._streams[: len(seeds)]
        for stream, seed in zip(streams, seeds, strict=True):
            stream.seed(seed)
        return streams


def draw_below(streams: Sequence[Stream], counts: Ints) -> list[int]:
    """Return the result of `RandomState.randint(0, count)` for each stream, computed ten times as fast."""
    values = list[int]()
    for stream, last in zip(streams, (counts - 1).tolist(), strict=True):
        low_bits = (1 << last.bit_length()) - 1
        value = stream.raw() & low_bits if last > 0 else 0
        while value > last > 0:
            value = stream.raw() & low_bits
        values.append(value)
    return values


def draw_coins(streams: Sequence[Stream], counts: Ints) -> NDArray[np.bool_]:
    """Return the results of `RandomState.random_sample(count) < 0.5` for each stream, concatenated. The results depend
    only on the highest bit of every second output."""
    outputs = [stream.raw(count) for stream, count in zip(streams, (2 * counts).tolist(), strict=True)]
    return np.concatenate(outputs)[::2] < 2**31


class Exhausted(Exception):
    """Raised if more random numbers are needed than were drawn."""


def with_enough(attempt: Callable[[Drawn], Result], draw: Callable[[int], Drawn], count: int) -> Result:
    """Return attempt(draw(count)). If `attempt` raises `Exhausted`, draw further columns until they suffice."""
    draws = draw(count)
    while True:
        try:
            return attempt(draws)
        except Exhausted:
            draws = np.concatenate([draws, draw(draws.shape[1])], axis=1)


class WordIndex(NamedTuple):
    """The words of many texts. Tokens and words are numbered consecutively across texts, without CLS and SEP.

    >>> kinds = np.array([0, 1, 2, 1, 0, 0, 1, 0])  # [CLS] un ##aff a [SEP] [CLS] b [SEP]
    >>> words = WordIndex.of(kinds, np.array([5, 8]))
    >>> words.starts.tolist(), words.bounds.tolist(), words.positions.tolist()
    ([0, 2, 3, 4], [0, 2, 3], [1, 2, 3, 6])
    """

    starts: Ints  # [words + 1], the first token of each word, and the number of tokens
    bounds: Ints  # [texts + 1], the first word of each text, and the number of words
    positions: Ints  # [tokens], the position of each token in the texts, with CLS and SEP

    @classmethod
    def of(cls, kinds: NDArray[np.integer], ends: Ints) -> WordIndex:
        """Return the words of concatenated texts. The first token of a text always begins a word.

        kinds: the kind of each token (see `Vocabulary.kinds`). ends: the end of each text.
        """
        is_token = kinds != _SPECIAL
        positions = is_token.nonzero()[0]
        bounds = np.append(0, np.searchsorted(positions, ends))  # bounds of the texts, in tokens
        begins = kinds[is_token] == _BEGINS
        begins[bounds[:-1][bounds[:-1] < bounds[1:]]] = True
        starts = np.append(begins.nonzero()[0], len(positions))
        return cls(starts, np.searchsorted(starts, bounds), positions)

    def shuffled(self, streams: Sequence[Stream]) -> Ints:
        """Return the indices of all words. Each text's words are shuffled with the text's stream."""
        order, bounds = np.arange(len(self.starts) - 1), self.bounds.tolist()
        for stream, begin, end in zip(streams, bounds, bounds[1:], strict=False):
            stream.shuffle(order[begin:end])
        return order


SPARE = 4
"""Number of positions at the end of a text's draws at which no draw may begin."""


def choose_words(
    words: WordIndex, order: Ints, budgets: Ints, runs: NDArray[np.uint8], steps: NDArray[np.uint8] | None = None
) -> tuple[Ints, Ints]:
    """Choose runs of words in all texts, in the order of each text's words in `order`. Return the chosen tokens, int64
    [chosen], and the position of each token's draw among all positions, int64 [chosen].

    order: see `WordIndex.shuffled`. budgets: maximum total number of tokens in each text's runs. A run that exceeds the
    budget is shortened. A run that overlaps an earlier run is dropped.
    runs: uint8 [texts, width], for each position of a text's draws, the number of words in a run whose draw begins
    there. Such a draw takes two positions. steps: uint8 [4, texts * width], the number of positions for the draws of 0
    .. 3 tokens. If `steps` is None, tokens have no draws, and all tokens of a run have the position after the run's
    draw.

    Raises `Exhausted` if a text needs the draws of the last `SPARE` positions.
    """
    starts, ends, run_at, ahead = words.starts, words.starts[1:], runs.reshape(-1), np.arange(runs.max())[:, None]
    at = np.arange(len(budgets)) * runs.shape[1]
    # State of the texts in which words are still to be chosen: next word in `order`, end of the words, remaining
    # budget, position of the next draw, and last position.
    number, limit, budget, last = words.bounds[:-1], words.bounds[1:], budgets, at + runs.shape[1] - SPARE
    is_masked, spans = np.zeros(len(ends), np.bool_), list[tuple[Ints, Ints, Ints]]()
    while True:
        if np.count_nonzero(at >= last):
            raise Exhausted
        live = ((budget > 0) & (number < limit)).nonzero()[0]
        if not len(live):
            return _per_token(spans, steps)
        if len(live) < len(at):
            number, limit, budget, at, last = (each.take(live) for each in (number, limit, budget, at, last))
        word = order.take(number)
        first, run = starts.take(word), np.minimum(word + ahead, limit - 1)
        # number of words within the budget
        fitting = (ends.take(run) <= first + budget).view(np.uint8).sum(0, np.uint8)
        count, was_masked = np.minimum(run_at.take(at), fitting), is_masked.take(run)
        count *= ~(was_masked & (run < word + count)).any(0)
        stop, at = word + count, at + 2
        is_masked[run] = was_masked | (run < stop)
        size = starts.take(np.minimum(stop, limit)) - first
        spans.append((first, size, at))
        number, budget, at = number + 1, budget - size, at if steps is None else _advanced(at, size, steps)


def _advanced(at: Ints, tokens: Ints, steps: NDArray[np.uint8]) -> Ints:
    """Return the positions after the draws of `tokens` tokens. steps: see `choose_words`."""
    positions: Ints = at + steps.take(np.minimum(tokens, 3) * steps.shape[1] + at)
    if len(long := (tokens > 3).nonzero()[0]):
        positions[long] = _advanced(positions.take(long), tokens.take(long) - 3, steps)
    return positions


def _per_token(runs: list[tuple[Ints, Ints, Ints]], steps: NDArray[np.uint8] | None) -> tuple[Ints, Ints]:
    """Return all tokens of runs, and the position of each token's draw. runs: first tokens, numbers of tokens, and
    positions of the first tokens' draws."""
    none = np.zeros(0, np.int64)
    token, size, at = (np.concatenate(part) for part in zip((none, none, none), *runs, strict=True))
    tokens, positions = [none], [none]
    while len(more := size.nonzero()[0]):
        token, size, at = token.take(more), size.take(more), at.take(more)
        tokens.append(token)
        positions.append(at)
        token, size, at = token + 1, size - 1, at if steps is None else at + steps[1].take(at)
    return np.concatenate(tokens), np.concatenate(positions)


class BertDraws:
    """Interprets the outputs of the random streams of BERT samples, for draws that may begin at any output. See
    `choose_words`.

    outputs: uint64 [texts, draws], raw outputs of each text's stream. runs: uint8 [texts, draws]. steps: uint8 [4,
    texts * draws].
    """

    def __init__(self, outputs: NDArray[np.uint64], vocabulary: Vocabulary) -> None:
        self._vocabulary, count = vocabulary, outputs.size
        padded = np.append(outputs, np.zeros(SPARE, np.uint64))
        # RandomState combines two outputs into a number in [0, 1): these integers divided by 2**53.
        uniform = ((padded[:count] >> 5) << 26) | (padded[1 : count + 1] >> 6)
        self.runs = np.ones(outputs.shape, np.uint8)
        for bound in _bounds()[:-1]:
            self.runs += (uniform >= int(bound * 2**53)).reshape(outputs.shape)
        self._masked, self._kept = uniform < int(0.8 * 2**53), padded[2 : count + 2] < 2**31
        # RandomState draws an integer below n from the low bits of the first output whose low bits are below n.
        last = len(vocabulary.ids) - 1
        self._numbers = padded & ((1 << last.bit_length()) - 1)
        begins, one = np.arange(count), self._step(outputs.shape, last)
        two = one + one.take(begins + one)
        three = two + one.take(begins + two)
        self.steps = np.stack([np.zeros_like(one), one, two, three])

    def _step(self, shape: tuple[int, int], last: int) -> NDArray[np.uint8]:
        """Return uint8 [texts * draws], the number of outputs for the draw of one token: two if the token is masked,
        four if it is kept, else four plus those for a random id. The last draw ends at the first spare position.

        A draw of more than 255 outputs needs 250 rejected outputs, which has probability 2**-250.
        """
        rejected = self._numbers > last
        rejected[shape[0] * shape[1] :] = False
        step = 4 - 2 * self._masked.view(np.uint8)
        random = (~(self._masked | self._kept)).nonzero()[0]
        accepted = random + 4
        while np.count_nonzero(is_rejected := rejected.take(accepted)):
            accepted += is_rejected
        step[random] = accepted + 1 - random
        longest = np.arange(shape[1] - SPARE, -SPARE, -1).clip(0, 255).astype(np.uint8)
        return np.minimum(step.reshape(shape), longest).reshape(-1)

    def replacements(self, drawn: Ints, tokens: NDArray[np.integer]) -> Ints:
        """Return the ids that replace tokens. drawn: the position of each token's draw.

        80 % of the tokens are replaced with [MASK], 10 % are kept, and 10 % are replaced with a random id.
        """
        numbers = self._vocabulary.ids.take(self._numbers.take(drawn + self.steps[1].take(drawn) - 1), mode="clip")
        unmasked = np.where(self._kept.take(drawn), tokens, numbers)
        return np.where(self._masked.take(drawn), self._vocabulary.roles.mask, unmasked)


@cache
def _bounds() -> list[float]:
    """Return the cumulative probabilities with which a run in a BERT sample has n = 1, 2 or 3 words. The probabilities
    are proportional to 1 / n."""
    weights = 1.0 / np.arange(1, 4)
    weights /= weights.sum()
    bounds = (weights / weights.sum()).cumsum()
    bounds /= bounds[-1]
    cumulative: list[float] = bounds.tolist()
    return cumulative


def ranges(first: Ints, sizes: Ints) -> Ints:
    """Return the concatenated ranges first[i] .. first[i] + sizes[i] - 1.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = sizes.cumsum()
    numbers: Ints = np.arange(int(sizes.sum())) + np.repeat(first - ends + sizes, sizes)
    return numbers
