"""LAMBADA (Paperno et al. 2016), zero-shot: whether a model's most likely continuation of a passage is the passage's
last word.

By default, only the last token of a passage is scored. With --strict-lambada, all tokens of the last word must be the
most likely tokens. The definition is that of Megatron-LM (tasks/zeroshot_gpt).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mega.core.batch import DecoderBatch, Terms
from mega.core.data.sources import texts
from mega.core.parallel.vocab import TokenScores
from mega.core.tasks.options import BenchmarkInputs
from mega.core.tasks.rows import JudgedRow, all_greedy, batch_of, nll_of, per_row
from mega.core.tasks.task import Estimate, Figure, as_share, interval
from mega.core.text.tokenizer import Tokenizer

READS = ("strict_lambada", "json_key")
"""Fields of `options.OWN` that this benchmark reads."""


@dataclass
class Lambada:
    asked: BenchmarkInputs
    name: str = "lambada"
    terms: tuple[str, ...] = ("accuracy", "nll")
    greedy: bool = True
    headline: tuple[str, ...] = ("number correct", "total examples", "avg accuracy")

    def examples(self, path: Path) -> Sequence[JudgedRow]:
        """Return all passages, the longest first, so that the rows of a batch have similar lengths."""
        rows = list(self._rows(path))
        if not rows:
            raise ValueError(f"--valid-data {path}: holds no passage")
        return sorted(rows, key=lambda row: -len(row.ids))

    def _rows(self, path: Path) -> Iterator[JudgedRow]:
        limit, tokenizer = self.asked.length + 1, self.asked.needs_tokenizer()
        passages = texts([path], self.asked.options.json_key)
        for number, text in enumerate(islice(passages, self.asked.options.limit), 1):
            location = f"--valid-data {path}: passage {number}"
            if self.asked.options.strict_lambada:
                row = _last_word(text, tokenizer)
            else:
                ids = tokenizer.encode(text)
                row = JudgedRow(ids, len(ids) - 1)
            if row.judged < 1 or len(row.ids) == row.judged:
                raise ValueError(f"{location}: needs a last word and something before it")
            if len(row.ids) > limit:
                raise ValueError(
                    f"{location}: has {len(row.ids)} tokens; --seq-length {limit - 1} takes at most {limit}"
                )
            yield row

    def batch(self, examples: Sequence[JudgedRow]) -> DecoderBatch:
        return batch_of(examples, self.asked.unit)

    def measure(self, batch: DecoderBatch, scores: TokenScores) -> Terms:
        """Return the metrics of each row. accuracy: 1 if the last word is predicted, else 0. nll: negative
        log-likelihood of the last word, in nats."""
        return {"accuracy": all_greedy(batch, scores), "nll": per_row(nll_of(batch, scores))}

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        accuracy = found["accuracy"]
        return [
            Figure("number correct", round(accuracy.mean * accuracy.weight)),
            Figure("total examples", accuracy.examples),
            interval("avg accuracy", accuracy, as_share),
            interval("ppl", found["nll"], lambda value: math.exp(min(value, 700.0))),
        ]


def _last_word(text: str, tokenizer: Tokenizer) -> JudgedRow:
    """Return a row with the text before the last word as context, and the last word as the scored part.

    A byte-level tokenizer can encode a space and the last word separately. SentencePiece would prepend another space,
    so the whole text is encoded if the ids of the whole text begin with the ids of the context.
    """
    words = text.split()
    if len(words) < 2:
        return JudgedRow([], 0)
    context = tokenizer.encode(before := text[: text.rfind(words[-1])].strip())
    whole = tokenizer.encode(f"{before} {words[-1]}")
    if whole[: len(context)] == context:
        return JudgedRow(whole, len(context))
    lead = len(tokenizer.encode(""))  # number of ids that the tokenizer prepends to every text
    return JudgedRow([*context, *tokenizer.encode(f" {words[-1]}")[lead:]], len(context))


def make(asked: BenchmarkInputs) -> Lambada:
    """Create the benchmark. Errors: ValueError naming the flag."""
    asked.one_file()
    return Lambada(asked)
