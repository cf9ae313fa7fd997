"""Computes MinHash signatures and their bands. The fraction of equal entries in two signatures estimates the overlap of
two sets of shingles.

There are two kinds of shingles. `WordShingles` (the default) are runs of five words, hashed by this module and permuted
by rensa. `CharShingles` produces the signatures that Megatron-LM 23.06 computes with mattilyra/LSH: windows of five
bytes, MurmurHash3, and minima of *signed* numbers that start at -1, so a hash whose top bit is 0 is always ignored.
Sources: Broder (1997); MurmurHash3_x86_32 (A. Appleby).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Signatures = NDArray[np.uint32]
"""Signatures as uint32 [documents, permutations]."""
Shingles = NDArray[np.uint64]
"""Hashes of a document's shingles, sorted and without repetitions."""
Overlap = Literal["union", "min", "max"]

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
"""Matches a word, or a single character in scripts that do not separate words."""
_KNOWN_WORDS = 1 << 20
_SEED = 42
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NO_SHINGLE = np.uint32(0xFFFFFFFF)


def mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of hashes, so that every output bit depends on every input bit. Source: Steele et al. (2014),
    splitmix64."""
    h = hashes.copy()
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def _windows(codes: NDArray[np.uint64], size: int) -> Shingles:
    """Return the distinct hashes of all windows of `size` consecutive character codes."""
    count = max(len(codes) - size + 1, 0)
    h = np.zeros(count, np.uint64)
    for i in range(size):
        h *= _MULTIPLIER
        h += codes[i : i + count]
    return np.unique(mixed(h))


class _WordHashes(dict[str, int]):
    """A cache of 64-bit word hashes, which is emptied when it is full."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _KNOWN_WORDS:
            self.clear()
        data = word.encode("utf-8", "surrogatepass")
        word_hash = self[word] = zlib.crc32(data) << 32 | zlib.crc32(data, 0x5BD1E995)
        return word_hash


@dataclass(frozen=True)
class WordShingles:
    """Shingles that are runs of `size` words in lower case. A shorter text has one shingle, and a text without words
    has no shingles."""

    permutations: int = 120
    size: int = 5

    def load(self) -> None:
        """Load rensa. Errors: ValueError if rensa is not installed."""
        try:
            import rensa  # noqa: F401
        except ImportError:
            raise ValueError("mega corpus near-duplicates: needs rensa; pip install '.[corpus]' in a clone") from None

    def shingles(self, text: str) -> Shingles:
        """The shingles of a text."""
        return np.unique(self._hashes([words_of_text(text)])[0])

    def _hashes(self, texts: Sequence[list[str]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the shingle hashes of several texts, concatenated and with repetitions, and the offset of each
        text."""
        sizes = np.array([len(words) for words in texts], np.int64)
        size = self.size if len(texts) > 1 else min(self.size, max(int(sizes[0]), 1))
        codes = word_codes([word for words in texts for word in words])
        counts = np.maximum(sizes - size + 1, 0)
        ends = np.cumsum(sizes)
        first = np.repeat(ends - sizes - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        h = np.zeros(len(first), np.uint64)
        for i in range(size):
            h *= _MULTIPLIER
            h += codes[first + i]
        return mixed(h), np.concatenate([[0], np.cumsum(counts)])

    def signatures(self, texts: Sequence[str]) -> Signatures:
        """Compute signatures [texts, permutations]. All entries for a text without shingles are the largest uint32."""
        from rensa import RMinHash

        words = [words_of_text(text) for text in texts]
        signatures = np.full((len(texts), self.permutations), _NO_SHINGLE, np.uint32)
        long = [i for i, text_words in enumerate(words) if len(text_words) >= self.size]
        sets = [self._hashes([words[i] for i in long])] if len(long) > 1 else [self._hashes([words[i]]) for i in long]
        short = [i for i, text_words in enumerate(words) if 0 < len(text_words) < self.size]
        sets += [self._hashes([words[i]]) for i in short]
        rows: list[list[int]] = []
        for hashes, offsets in sets:
            matrix = RMinHash.digest_matrix_from_flat_token_hashes(
                hashes, offsets.astype(np.uint64), self.permutations, _SEED
            )
            rows += matrix.to_rows()
        if rows:
            signatures[long + short] = np.array(rows, np.uint32)
        return signatures


_known_words = _WordHashes()


_TO_WORDS = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}


def words_of_text(text: str) -> list[str]:
    """Return the words of a text in lower case. In scripts that do not separate words, each character counts as a word.

    >>> words_of_text("It's 3 o'clock"), words_of_text("It\u2019s \u65e5\u672c")
    (['it', 's', '3', 'o', 'clock'], ['it', 's', '\u65e5', '\u672c'])
    """
    text = text.lower()
    return text.translate(_TO_WORDS).split() if text.isascii() else _WORD.findall(text)


def word_codes(words: Sequence[str]) -> NDArray[np.uint64]:
    """Compute a hash of every word."""
    return mixed(np.fromiter(map(_known_words.__getitem__, words), np.uint64, len(words)))


@dataclass(frozen=True)
class CharShingles:
    """Shingles as in Megatron-LM: signatures are computed from windows of five bytes, and the overlap from windows of
    five characters, excluding the last window."""

    permutations: int = 100
    seed: int = 1234
    size: int = 5

    def load(self) -> None:
        """Do nothing, because this class needs no library."""

    def shingles(self, text: str) -> Shingles:
        """Return the hashes of the character windows of a text."""
        codes = np.frombuffer(text[:-1].encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
        return _windows(codes, self.size)

    def signatures(self, texts: Sequence[str]) -> Signatures:
        """Compute signatures [texts, permutations] from byte windows."""
        return np.stack([self._signature(text.encode("utf-8", "surrogatepass")) for text in texts])

    def _signature(self, data: bytes) -> NDArray[np.uint32]:
        seeds = np.random.RandomState(self.seed).randint(0, 1_000_000, self.permutations).astype(np.uint32)
        least = np.full(self.permutations, -1, np.int32)
        windows = _byte_windows(data, self.size)
        for begin in range(0, len(windows), _TOGETHER):
            hashes = murmur3(windows[begin : begin + _TOGETHER], seeds)
            np.minimum(least, hashes.view(np.int32).min(1), out=least)
        return least.view(np.uint32)


_TOGETHER = 512
"""Number of windows per batch, chosen so that the hashes of a batch for all seeds fit into the processor's cache."""


def _byte_windows(data: bytes, size: int) -> NDArray[np.uint8]:
    """Return the distinct windows of `size` bytes, as an array [windows, size]."""
    if len(data) < size:
        return np.zeros((0, size), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), size)
    packed = np.zeros(len(windows), np.uint64)
    for i in range(size):
        packed |= windows[:, i].astype(np.uint64) << np.uint64(8 * i)
    return np.unique(packed).view(np.uint8).reshape(-1, 8)[:, :size]


def murmur3(keys: NDArray[np.uint8], seeds: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Compute MurmurHash3_x86_32 of five-byte keys: [keys, 5] and [seeds] -> [seeds, keys]."""
    assert keys.shape[1] == 5
    first, last = np.ascontiguousarray(keys[:, :4]).view("<u4")[:, 0], keys[:, 4].astype(np.uint32)
    c1, c2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
    h = seeds[:, None] ^ (_rotated(first * c1, 15) * c2)
    h = _rotated(h, 13)
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= (_rotated(last * c1, 15) * c2) ^ np.uint32(5)  # mix in the tail, then the length
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def _rotated(h: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (h << np.uint32(bits)) | (h >> np.uint32(32 - bits))


def band_keys(signatures: Signatures, bands: int) -> NDArray[np.uint64]:
    """Compute a key for every band of every document, [documents, bands]. Two keys are equal if all entries of the two
    bands are equal."""
    documents, permutations = signatures.shape
    rows = signatures.reshape(documents, bands, permutations // bands)
    h = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (documents, bands)).copy()
    for i in range(rows.shape[2]):
        h = mixed(h * _MULTIPLIER + rows[:, :, i])
    return h


def overlap(first: Shingles, second: Shingles, of: Overlap = "union") -> float:
    """Return the size of the intersection of two sets, as a fraction of their union (Jaccard), or of the smaller or
    larger set.

    >>> overlap(np.array([1, 2, 3], np.uint64), np.array([2, 3, 4], np.uint64))
    0.5
    """
    if not len(first) or not len(second):
        return 0.0
    common = len(first) + len(second) - len(np.union1d(first, second))
    sizes: dict[str, Callable[[int, int], int]] = {"min": min, "max": max, "union": lambda a, b: a + b - common}
    return float(common / sizes[of](len(first), len(second)))


def chance(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents with a given similarity have an equal band.

    >>> round(chance(0.8, 20, 6), 4), round(chance(0.8, 10, 10), 4)
    (0.9977, 0.6789)
    """
    return float(1 - (1 - similarity**rows) ** bands)
