"""WikiText-103, zero-shot: the perplexity of a text, per token and per original word.

Tokenizers split a text into different numbers of tokens, so the loss per token is converted to a loss per original
word: adjusted perplexity = exp(loss x tokens / words), as in Megatron-LM (tasks/zeroshot_gpt). With --context-window,
the score is that of fairseq for Megatron-11b: the end-of-document token ends every line and begins the text. fairseq's
recipe first makes token files. The prefix of such token files can be given instead of a text, but then no figures per
word are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.batch import DecoderBatch, Terms
from mega.core.data.indexed import IndexedDataset, exists
from mega.core.parallel.vocab import TokenScores
from mega.core.tasks.options import BenchmarkInputs
from mega.core.tasks.rows import JudgedRow, Windows, batch_of, nll_terms
from mega.core.tasks.task import Estimate, Figure, interval
from mega.core.text.detokenize import DETOKENIZERS, detokenizer_for, fairseq
from mega.core.text.tokenizer import Tokenizer

READS = ("overlapping_eval", "detokenizer", "context_window")
"""Fields of `options.OWN` that this benchmark reads."""

STRIDE = 32
"""Megatron-LM's default of --overlapping-eval."""
MOST_LOSS = 700.0
"""Loss above which the perplexity exp(loss) is reported as infinite."""


@dataclass
class WikiText:
    """The perplexity of WikiText-103. counts: numbers of original words and of tokens, set when the text is read."""

    asked: BenchmarkInputs
    stride: int
    detokenizer: str
    name: str = "wikitext103"
    terms: tuple[str, ...] = ("nll",)
    greedy: bool = False
    headline: tuple[str, ...] = ("avg loss", "ppl", "adjusted ppl", "token ratio")
    counts: dict[str, int] = field(default_factory=dict)

    def examples(self, path: Path) -> Sequence[JudgedRow]:
        if (dataset := self.asked.token_file(path)) is not None:
            token_ids = binarised_ids(dataset)
            self.counts = {"tokens": len(token_ids)}
            return Windows(token_ids, self.asked.length, self.stride)
        text, tokenizer = self.asked.text_of(path), self.asked.needs_tokenizer()
        ids = (fairseq_ids if self.per_line else whole_ids)(text, tokenizer, self.detokenizer)
        words = len(text.strip().split(" "))
        if len(ids) < 2 or words < 2:
            raise ValueError(f"--valid-data {path}: holds {words} word and {len(ids)} tokens; needs two of each")
        self.counts = {"original tokens": words, "tokens": len(ids)}
        return Windows(ids, self.asked.length, self.stride)

    @property
    def per_line(self) -> bool:
        return self.asked.options.context_window is not None

    @property
    def ratio(self) -> float:
        """Number of labels per original word. Megatron-LM omits the first token and word; fairseq also scores the first
        token."""
        targets, words = self.counts["tokens"] - 1, self.counts["original tokens"]
        return targets / (words if self.per_line else words - 1)

    def batch(self, examples: Sequence[JudgedRow]) -> DecoderBatch:
        return batch_of(examples, self.asked.unit)

    def measure(self, batch: DecoderBatch, scores: TokenScores) -> Terms:
        return nll_terms(batch, scores)

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        loss = found["nll"]
        figures = [interval("avg loss", loss), interval("ppl", loss, perplexity)]
        if "original tokens" not in self.counts:
            return [*figures, *(Figure(name, count) for name, count in self.counts.items())]
        return [
            *figures,
            interval("adjusted ppl", loss, lambda value: perplexity(value * self.ratio)),
            Figure("token ratio", self.ratio),
            *(Figure(name, count) for name, count in self.counts.items()),
        ]


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that is too large for a float. Megatron-LM limits perplexities to e^20; this
    limit can hide that a model is worse than a random guess.

    >>> perplexity(1000.0)
    inf
    """
    return math.exp(loss) if loss < MOST_LOSS else math.inf


def whole_ids(text: str, tokenizer: Tokenizer, detokenizer: str) -> list[int]:
    """Return the ids of the whole text without an end-of-document token, as in Megatron-LM."""
    return tokenizer.encode(DETOKENIZERS[detokenizer](text))


def fairseq_ids(text: str, tokenizer: Tokenizer, detokenizer: str) -> list[int]:
    """Return the ids of all lines, each followed by the end-of-document token. The end-of-document token also begins
    the text, where it is not scored."""
    if tokenizer.eod is None:
        raise ValueError(f"--context-window: {tokenizer.kind} has no end of document, which ends lines there")
    plain = fairseq if detokenizer == "fairseq" else DETOKENIZERS[detokenizer]
    ids = [tokenizer.eod]
    for line in text.removesuffix("\n").split("\n"):
        ids += [*tokenizer.encode(plain(line.strip()).strip()), tokenizer.eod]
    return ids


def binarised_ids(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Return all ids of token files, preceded by the id that ends every document. The first id is not scored.

    Errors: ValueError if documents end with different ids.
    """
    ids = np.asarray(dataset.tokens, np.int64)
    ends = np.unique(ids[np.cumsum(dataset.lengths[dataset.lengths > 0]) - 1])
    if len(ends) != 1:
        raise ValueError(
            f"--valid-data {dataset.prefix}: its documents end in {len(ends)} different ids; make it with --append-eod"
        )
    return np.concatenate([ends, ids])


def make(asked: BenchmarkInputs) -> WikiText:
    """Create the benchmark. Errors: ValueError naming the flag."""
    path, window = Path(asked.one("file or prefix")), asked.options.context_window
    if exists(path):
        if window is None:
            raise ValueError(f"--valid-data {path}: is a token file; needs --context-window, or give the text itself")
        if asked.options.detokenizer is not None:
            raise ValueError(f"--detokenizer {asked.options.detokenizer}: has no effect on the token file {path}")
        return WikiText(asked, asked.stride(min(STRIDE, asked.length)), "none", headline=("avg loss", "ppl"))
    asked.readable(str(path))
    detokenizer = asked.options.detokenizer or ("fairseq" if window is not None else detokenizer_for(str(path)))
    if detokenizer == "fairseq" and window is None:
        raise ValueError("--detokenizer fairseq: needs --context-window; it reads line by line")
    if detokenizer is None:
        raise ValueError(
            f"--valid-data {path}: its path names neither ptb, wiki nor lambada; give --detokenizer "
            f"{', '.join(DETOKENIZERS)}"
        )
    return WikiText(asked, asked.stride(min(STRIDE, asked.length)), detokenizer)
