"""Choose the sentences of each BERT or T5 sample. The result is identical to Megatron-LM's mapping.

The result depends only on document bounds, lengths and a seed. This module does not read tokens or files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_LONGEST_SENTENCE = 512
_BLOCK = 1 << 12
_WORDS = 312  # number of words in the state of the 64-bit Mersenne twister


def sentence_mapping(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    samples: int,
    max_length: int,
    short_prob: float,
    seed: int,
    min_sentences: int,
) -> NDArray[np.integer]:
    """Return uint32 [n, 3], the first sentence, end sentence (exclusive) and target length of each sample, in shuffled
    order.

    documents: int64 [documents + 1], first sentence of each document, and the total number of sentences. lengths:
    number of tokens in each sentence of the corpus. max_length: maximum number of tokens in a sample without its
    control tokens. The result contains whole passes, with at least `samples` samples in total. Documents are skipped if
    they have too few sentences, or if they have several sentences, one of which has more than 512 tokens. Raises
    ValueError if no document remains.
    """
    usable = [
        (first, [0, *np.cumsum(lengths[first:last], dtype=np.int64).tolist()])
        for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True)
        if last - first >= min_sentences
        and (last - first == 1 or (last > first and int(lengths[first:last].max()) <= _LONGEST_SENTENCE))
    ]
    if not usable and samples:
        raise ValueError(
            f"no document has {min_sentences} or more sentences of at most {_LONGEST_SENTENCE} tokens; "
            "was the corpus made with --split-sentences?"
        )
    targets = _targets(max_length, short_prob, seed)
    needs_64_bits = len(lengths) > 2**32 - 1
    entries = array("Q" if needs_64_bits else "I")  # a list of tuples would use ten times as much memory
    while len(entries) < 3 * samples:
        for first, ends in usable:
            entries.extend(_document(first, ends, min_sentences, targets))
    kind: type[np.integer] = np.uint64 if needs_64_bits else np.uint32
    mapping = np.frombuffer(entries, kind).reshape(-1, 3)
    return mapping[_shuffled(len(mapping), seed + 1)]


def _document(first: int, ends: list[int], min_sentences: int, targets: Iterator[int]) -> Iterator[int]:
    """Yield three numbers for each sample in a document: first sentence, end sentence (exclusive) and target length. A
    sample contains sentences until the target length is reached. If only one sentence of the document then remains, it
    is added to the sample.

    ends: number of tokens in the document before each sentence, and in total. As in Megatron-LM, one more target is
    drawn than there are samples.
    """
    target = next(targets)
    start, count = 0, len(ends) - 1
    while start < count:
        stop = max(bisect_left(ends, ends[start] + target, start + 1), start + min_sentences)
        stop = stop if stop < count - 1 else count
        yield from (first + start, first + stop, target)
        start, target = stop, next(targets)


def _targets(max_length: int, short_prob: float, seed: int) -> Iterator[int]:
    """Yield target lengths. On average, one in round(1 / short_prob) lengths is drawn from 2 .. max_length; all others
    are max_length. The random numbers are the 32-bit outputs of mt19937(seed)."""
    ratio = round(1 / short_prob) if short_prob else 0
    generator = np.random.RandomState(seed)
    while True:
        for draw in np.frombuffer(generator.bytes(4 * _BLOCK), "<u4").tolist() if ratio else [1] * _BLOCK:
            yield 2 + draw % (max_length - 1) if ratio and draw % ratio == 0 else max_length


def _shuffled(count: int, seed: int) -> NDArray[np.uint64]:
    """Return 0 .. count - 1, shuffled with C++'s mt19937_64(seed): for i from count - 1 down, swap entry i with entry
    (output mod (i + 1))."""
    order = array("Q", range(count))
    draws = mt19937_64(seed)
    last = count - 1
    while last > 0:
        positions = np.arange(last, max(last - _WORDS, 0), -1, dtype=np.uint64)
        partners = next(draws)[: len(positions)] % (positions + np.uint64(1))
        for i, j in zip(positions.tolist(), partners.tolist(), strict=True):
            order[i], order[j] = order[j], order[i]
        last -= len(positions)
    return np.frombuffer(order, np.uint64)


def mt19937_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Yield the output of the 64-bit Mersenne twister of the C++ standard, 312 words at a time. For example, seed 5489
    produces 14514284786278117030, ...

    Source: Nishimura 2000, "Tables of 64-bit Mersenne twisters"; ISO C++ [rand.predef].
    """
    words = [seed & (2**64 - 1)]
    for i in range(1, _WORDS):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) & (2**64 - 1))
    state = np.array(words, np.uint64)
    while True:
        state = _twisted(state)
        x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield x ^ (x >> np.uint64(43))


def _twisted(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the next 312 words of the generator's state. Word i depends on words i, i + 1 and i + 156 (mod 312); the
    last of these may already have been replaced."""
    upper, lower = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)

    def mixed(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
        y = (high & upper) | (low & lower)
        return (y >> np.uint64(1)) ^ ((y & np.uint64(1)) * np.uint64(0xB5026F5AA96619E9))

    next_state = np.empty_like(state)
    twist = mixed(state[:-1], state[1:])
    next_state[:156] = state[156:] ^ twist[:156]
    next_state[156:311] = next_state[:155] ^ twist[156:]
    next_state[311] = next_state[155] ^ mixed(state[311], next_state[0])
    return next_state
