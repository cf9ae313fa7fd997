"""Choose the sentences of each BERT or T5 sample. The result is identical to Megatron-LM's mapping.

Each sample depends on all earlier samples, because the target lengths are drawn one after the other. Therefore a loop
walks from sample to sample. All other work is done for blocks of samples:

    1 starts    number all sentences at which a sample may start, and find where the next sample starts after one with
                the maximum target length
    2 walk      follow these numbers, and search only after a shorter target length
    3 shuffle   swap blocks of entries; only entries that a block touches twice are swapped one by one

The result depends only on document bounds, lengths and a seed. This module does not read tokens or files, and reports
its progress only as an attribute of `ACTIVITY`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from mega.core.activity import ACTIVITY

_LONGEST_SENTENCE = 512
_BLOCK = 1 << 15
_COUNTED = 1 << 16  # number of samples whose passes are counted
_ONE_BY_ONE = 32  # number of swaps that are not worth a numpy operation
_WORDS = 312  # number of words in the state of the 64-bit Mersenne twister
_TWISTS = 32

Integers = NDArray[np.integer]


class SampleRules(TypedDict):
    """The arguments of `sentence_mapping` that do not depend on the corpus."""

    max_length: int
    """Maximum number of tokens in a sample without its control tokens."""
    short_prob: float
    """Probability that a sample has a shorter target length, rounded so that its inverse is a whole number."""
    seed: int
    min_sentences: int
    """Minimum number of sentences in a sample."""


def sentence_mapping(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    samples: int,
    **rules: Unpack[SampleRules],
) -> Integers:
    """Return uint32 [n, 3], the first sentence, end sentence (exclusive) and target length of each sample, in shuffled
    order.

    documents: int64 [documents + 1], first sentence of each document, and the total number of sentences. lengths:
    number of tokens in each sentence of the corpus. The result contains whole passes, with at least `samples` samples
    in total. Documents are skipped if they have too few sentences, or if they have several sentences, one of which has
    more than 512 tokens. Raises ValueError if no document remains.
    """
    dtype: type[np.integer] = np.uint64 if len(lengths) > 2**32 - 1 else np.uint32
    if not samples:
        return np.empty((0, 3), dtype)
    starts, targets = _walked(documents, lengths, rules)
    entries = bytearray()
    for rows in _passes(starts, targets, samples):
        entries += rows.astype(dtype).tobytes()
    mapping = np.frombuffer(entries, dtype).reshape(-1, 3)
    mapping = mapping[_shuffled(len(mapping), rules["seed"] + 1)]
    ACTIVITY.progress = ""
    return mapping


def passes_needed(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    samples: int,
    **rules: Unpack[SampleRules],
) -> tuple[int, bool]:
    """Return the number of passes in a mapping, and whether it is exact: the number for many samples follows from the
    first passes. The arguments and errors are those of `sentence_mapping`."""
    starts, targets = _walked(documents, lengths, rules)
    first = np.concatenate([rows[:, 0] for rows in _passes(starts, targets, min(samples, _COUNTED))])
    passes = passes_of(first)
    return (passes, True) if len(first) >= samples else (math.ceil(samples * passes / len(first)), False)


def _walked(
    documents: NDArray[np.int64], lengths: NDArray[np.int32], rules: SampleRules
) -> tuple[_Starts, Iterator[NDArray[np.int64]]]:
    """Return what `_passes` walks: the starts of samples, and the target lengths."""
    longest = rules["max_length"]
    starts = _Starts.of(documents, lengths, longest, rules["min_sentences"])
    return starts, _targets(longest, rules["short_prob"], rules["seed"])


def passes_of(first_sentences: Integers) -> int:
    """Return the number of passes in a mapping. The sample that starts first, in the first usable document, occurs once
    in every pass."""
    return int(np.count_nonzero(first_sentences == first_sentences.min()))


class _Starts(NamedTuple):
    """The starts of samples in one pass, numbered consecutively. Each usable document has one start per sentence, and
    one more at its end, from which the next start is the first one of the next document. The last document is followed
    by the first. As in Megatron-LM, the end of a document takes one target length too.

    After a sample with the target length t, the next start is the first one, at least `least` sentences later, before
    which the document has t tokens more. If only one sentence of the document then remains, the next start is the end.
    """

    sentences: Integers  # [starts], the sentence at each start; at an end, the sentence after the document
    is_end: NDArray[np.bool_]  # [starts], whether each start is the end of a document
    before: array[int]  # [starts], the number of tokens in usable documents before each start
    following: array[int]  # [starts], the next start, if the sample has the maximum target length
    limits: array[int]  # [starts], the first start in the document from which `following` is the next start
    least: int  # Minimum number of sentences in a sample
    longest: int  # Maximum target length

    @classmethod
    def of(
        cls, documents: NDArray[np.int64], lengths: NDArray[np.int32], max_length: int, min_sentences: int
    ) -> _Starts:
        """Number the starts of a corpus. The arguments and errors are those of `sentence_mapping`."""
        first, last = documents[:-1], documents[1:]
        sizes = last - first
        long_before = np.append(0, np.cumsum(lengths > _LONGEST_SENTENCE))
        has_long = long_before[last] > long_before[first]
        usable = (sizes >= max(min_sentences, 1)) & ((sizes == 1) | ~has_long)
        if not usable.any():
            raise ValueError(
                f"no document has {min_sentences} or more sentences of at most {_LONGEST_SENTENCE} tokens; "
                "was the corpus made with --split-sentences?"
            )
        first, sizes = first[usable], sizes[usable]
        ends = (sizes + 1).cumsum() - 1  # the start at the end of each document
        count = int(ends[-1]) + 1
        is_end = np.zeros(count, np.bool_)
        is_end[ends] = True
        numbers = np.arange(count)
        sentences = numbers + np.repeat(first - (ends - sizes), sizes + 1)
        tokens = np.zeros(count, np.int64)
        tokens[1:][~is_end[:-1]] = lengths[sentences[:-1][~is_end[:-1]]]
        before = tokens.cumsum()
        end = np.repeat(ends, sizes + 1)
        following = np.maximum(np.searchsorted(before, before + max_length), numbers + min_sentences)
        following = np.where(following < end - 1, following, end)
        following[ends] = (ends + 1) % count
        limits = following - is_end[following]
        limits[ends] = 0
        steps = _listed(before), _listed(following), _listed(limits)
        return cls(sentences, is_end, *steps, min_sentences, max_length)


def _listed(numbers: Integers) -> array[int]:
    """Return numbers in an array whose items are read faster than those of a numpy array, and with less memory than
    those of a list."""
    items = array("q")
    items.frombytes(numbers.astype(np.int64).tobytes())
    return items


def _passes(starts: _Starts, targets: Iterator[NDArray[np.int64]], samples: int) -> Iterator[Integers]:
    """Yield blocks of rows [rows, 3] (see `sentence_mapping`) of whole passes, in order, until there are at least
    `samples` rows."""
    at, done = 0, 0
    for block in targets:
        numbers = _walk(starts, at, block)
        at = int(numbers[-1])
        is_sample = ~starts.is_end[numbers[:-1]]
        rows = np.stack([starts.sentences[numbers[:-1]], starts.sentences[numbers[1:]], block], 1)[is_sample]
        # A pass ends where the next start is the first one of the corpus.
        ends = done + is_sample.cumsum()[(numbers[1:] == 0).nonzero()[0]]
        if len(enough := ends[ends >= samples]):
            yield rows[: enough[0] - done]
            return
        yield rows
        done += len(rows)
        ACTIVITY.progress = f"{done:,} of {samples:,} samples are laid out"


def _walk(starts: _Starts, at: int, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start that takes each target length, and the start after them. at: the first start."""
    before, following, limits, least = starts.before, starts.following, starts.limits, starts.least
    visited = array("q", [at])
    visit, longest = visited.append, starts.longest
    for target in targets.tolist():
        if target == longest:
            at = following[at]
        else:
            limit = limits[at]
            stop = bisect_left(before, before[at] + target, at + least, limit)
            at = stop if stop < limit else following[at]
        visit(at)
    return np.frombuffer(visited, np.int64)


def _targets(max_length: int, short_prob: float, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield blocks of target lengths. On average, one in round(1 / short_prob) lengths is drawn from 2 .. max_length;
    all others are max_length. The random numbers are the 32-bit outputs of mt19937(seed)."""
    ratio = round(1 / short_prob) if short_prob else 0
    generator = np.random.RandomState(seed)
    while True:
        targets = np.full(_BLOCK, max_length)
        if ratio:
            draws = np.frombuffer(generator.bytes(4 * _BLOCK), "<u4")
            is_short = draws % np.uint32(ratio) == 0
            targets[is_short] = 2 + draws[is_short] % np.uint32(max_length - 1)
        yield targets


def _shuffled(count: int, seed: int) -> Integers:
    """Return 0 .. count - 1, shuffled with C++'s mt19937_64(seed): for i from count - 1 down, swap entry i with entry
    (output mod (i + 1))."""
    order: Integers = np.arange(count, dtype=np.uint32 if count < 2**32 else np.uint64)
    outputs, last = np.zeros(0, np.uint64), count - 1
    draws = mt19937_64(seed)
    while last > 0:
        size = min(max(math.isqrt(last) // 2, 2 * _ONE_BY_ONE), last)  # so that most blocks touch no entry twice
        while len(outputs) < size:
            outputs = np.append(outputs, next(draws))
        partners = outputs[:size] % np.arange(last + 1, last + 1 - size, -1, dtype=np.uint64)
        _exchange(order, last, partners.astype(np.int64))
        outputs, last = outputs[size:], last - size
        ACTIVITY.progress = f"{count - last:,} of {count:,} samples are shuffled"
    return order


def _exchange(order: Integers, first: int, partners: NDArray[np.int64]) -> None:
    """Swap entry first - k with entry partners[k], which is not after it, for k = 0, 1, .. in this order. All entries
    are distinct."""
    size = len(partners)
    if size <= _ONE_BY_ONE:
        for i, j in zip(range(first, first - size, -1), partners.tolist(), strict=True):
            order[i], order[j] = order[j], order[i]
        return
    block = order[first - size + 1 : first + 1][::-1]
    if partners.max() <= first - size:
        moved, replaced = block.copy(), order[partners]
        order[partners] = moved
        if (order[partners] == moved).all():  # otherwise two entries have the same partner
            block[:] = replaced
            return
        order[partners] = replaced
    half = size // 2
    _exchange(order, first, partners[:half])
    _exchange(order, first - half, partners[half:])


def mt19937_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Yield the output of the 64-bit Mersenne twister of the C++ standard, in blocks. For example, seed 5489 produces
    14514284786278117030, ...

    Word i depends on words i - 312, i - 311 and i - 156, so up to 311 words are computed together. Source: Nishimura
    2000, "Tables of 64-bit Mersenne twisters"; ISO C++ [rand.predef].
    """
    words = [seed & (2**64 - 1)]
    for i in range(1, _WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) & (2**64 - 1))
    state = np.empty(_WORDS + _TWISTS * (_WORDS - 1), np.uint64)
    state[-_WORDS:] = words
    upper, lower, one, twist = map(np.uint64, (0xFFFFFFFF80000000, 0x7FFFFFFF, 1, 0xB5026F5AA96619E9))
    while True:
        state[:_WORDS] = state[-_WORDS:]
        for i in range(_WORDS, len(state), _WORDS - 1):
            mixed = (state[i - 312 : i - 1] & upper) | (state[i - 311 : i] & lower)
            mixed = (mixed >> one) ^ ((mixed & one) * twist)
            np.bitwise_xor(state[i - 156 : i], mixed[:156], state[i : i + 156])
            np.bitwise_xor(state[i : i + 155], mixed[156:], state[i + 156 : i + 311])
        x = state[_WORDS:]
        x = x ^ ((x >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield x ^ (x >> np.uint64(43))
