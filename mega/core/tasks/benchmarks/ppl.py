"""The perplexity of a corpus of any size: JSON lines, plain text, or token files from `mega preprocess`.

As in pretraining, documents are concatenated, each followed by an end token, and split into windows, by default without
overlap. With --random-windows, windows are drawn at random, as in Megatron-LM's first version for WebText: first a
document, with a probability proportional to its length in characters, then a window of that document. A short document
is extended by further documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mega.core.batch import DecoderBatch, Terms
from mega.core.config.check_files import half_of_pair
from mega.core.data.sources import texts
from mega.core.parallel.vocab import TokenScores
from mega.core.tasks.benchmarks.wikitext103 import perplexity
from mega.core.tasks.options import BenchmarkInputs, flag
from mega.core.tasks.rows import JudgedRow, TokenIds, Windows, batch_of, nll_terms
from mega.core.tasks.task import Estimate, Figure, interval
from mega.core.text.tokenizer import Tokenizer

READS = ("overlapping_eval", "context_window", "json_key", "random_windows")
"""Fields of `options.OWN` that this benchmark reads."""


@dataclass
class CorpusPerplexity:
    """The perplexity of a corpus. counts: numbers of bytes, words and scored tokens; empty unless the whole text is
    scored."""

    asked: BenchmarkInputs
    stride: int
    name: str = "ppl"
    terms: tuple[str, ...] = ("nll",)
    greedy: bool = False
    headline: tuple[str, ...] = ("loss", "ppl")
    counts: dict[str, int] = field(default_factory=dict)

    def examples(self, path: Path) -> Sequence[JudgedRow]:
        options = self.asked.options
        if (dataset := self.asked.token_file(path)) is not None:
            if options.random_windows is not None:
                raise ValueError(f"--random-windows: draws from texts, and --valid-data {path} is a token file")
            return self._windows(path, dataset.tokens)
        if half := half_of_pair("--valid-data", str(path)):
            raise ValueError(f"--valid-data {path}: {half}")
        tokenizer = self.asked.needs_tokenizer()
        documents = list(texts([self.asked.readable(str(path))], options.json_key))
        if not any(documents):
            raise ValueError(f"--valid-data {path}: holds no text")
        if options.random_windows is not None:
            return list(_random_windows(documents, tokenizer, self.asked.length, options.random_windows, options.seed))
        end = [] if tokenizer.eod is None else [tokenizer.eod]
        windows = self._windows(path, [each for text in documents for each in (*tokenizer.encode(text), *end)])
        self.counts |= {
            "bytes": sum(len(text.encode()) for text in documents),
            "words": sum(len(text.split()) for text in documents),
        }
        return windows

    def _windows(self, path: Path, ids: TokenIds) -> Windows:
        windows = Windows(ids, self.asked.length, self.stride)
        if not len(windows):
            raise ValueError(f"--valid-data {path}: needs at least 2 tokens")
        self.counts = {"tokens": len(ids) - 1}
        return windows

    def batch(self, examples: Sequence[JudgedRow]) -> DecoderBatch:
        return batch_of(examples, self.asked.unit)

    def measure(self, batch: DecoderBatch, scores: TokenScores) -> Terms:
        return nll_terms(batch, scores)

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        loss = found["nll"]
        figures = [interval("loss", loss), interval("ppl", loss, perplexity), Figure("tokens", round(loss.weight))]
        # With --limit, only some windows are scored, so the counts of the whole text do not apply.
        if "bytes" in self.counts and self.counts["tokens"] == loss.weight:
            by_word, by_byte = (self.counts["tokens"] / self.counts[name] for name in ("words", "bytes"))
            figures += [
                interval("word ppl", loss, lambda value: perplexity(value * by_word)),
                interval("bits per byte", loss, lambda value: value * by_byte / math.log(2)),
            ]
        return figures


def _random_windows(
    documents: Sequence[str], tokenizer: Tokenizer, length: int, count: int, seed: int
) -> Iterator[JudgedRow]:
    """Draw `count` windows; each window depends only on the seed and its index."""
    shares = np.cumsum([len(text) for text in documents], dtype=np.float64)
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    for number in range(count):
        random, ids = np.random.default_rng((seed, number)), list[int]()
        while len(ids) < length + 1:
            document = documents[int(np.searchsorted(shares, random.random() * shares[-1], side="right"))]
            document_ids = [*tokenizer.encode(document), *end]
            if not ids and len(document_ids) > length + 1:
                begin = int(random.integers(len(document_ids) - length))
                document_ids = document_ids[begin:]
            ids += document_ids
        yield JudgedRow(ids[: length + 1], 1)


def make(asked: BenchmarkInputs) -> CorpusPerplexity:
    """Create the benchmark. Errors: ValueError naming the flag."""
    asked.one("file or prefix")
    options = asked.options
    for name in ("overlapping_eval", "context_window"):
        value = getattr(options, name)
        if options.random_windows is not None and value is not None:
            raise ValueError(f"{flag(name)} {value}: has no effect with --random-windows, which are judged whole")
    return CorpusPerplexity(asked, asked.stride(asked.length))
