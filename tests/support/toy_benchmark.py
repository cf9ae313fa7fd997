"""A benchmark that the project does not know: is the last word of a passage the likeliest? All that adding one takes.

A passage is a line of JSON, `{"context": [5, 7], "word": [9, 2]}`, in token ids. Its word is right where every id of it
is the model's first choice after the ids before (LAMBADA, Paperno et al. 2016, scored as GPT-2's authors do).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mega.core.batch import DecoderBatch, Term, Terms
from mega.core.parallel.vocab import TokenScores
from mega.core.tasks.task import Estimate, Figure, interval


class Passage(NamedTuple):
    """number: of the line, from 0."""

    number: int
    context: list[int]
    word: list[int]


@dataclass(frozen=True)
class LastWord:
    """length: columns of a batch; passages are padded to it on the right, where nothing that counts sees them."""

    length: int
    name: str = "toy-last-word"
    terms: tuple[str, ...] = ("accuracy", "nll")
    greedy: bool = True
    headline: tuple[str, ...] = ("accuracy",)

    def examples(self, path: Path) -> list[Passage]:
        found = []
        for number, line in enumerate(path.read_text().splitlines()):
            try:
                row = json.loads(line)
                passage = Passage(number, row["context"], row["word"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}:{number + 1}: needs "context" and "word" ({error})') from None
            if not passage.context or not passage.word or len(passage.context + passage.word) > self.length + 1:
                raise ValueError(f"{path}:{number + 1}: needs a context, a word, and at most {self.length + 1} ids")
            found.append(passage)
        return found

    def batch(self, examples: Sequence[Passage]) -> DecoderBatch:
        ids = torch.zeros(len(examples), self.length + 1, dtype=torch.int64)
        weights = torch.zeros(len(examples), self.length)
        for row, (_, context, word) in enumerate(examples):
            end = len(context) + len(word)
            ids[row, :end] = torch.tensor(context + word)
            weights[row, len(context) - 1 : end - 1] = 1
        positions = torch.arange(self.length).expand_as(weights)
        samples = torch.tensor([passage.number for passage in examples])
        return DecoderBatch(ids[:, :-1], ids[:, 1:], weights, positions, samples)

    def measure(self, batch: DecoderBatch, scores: TokenScores) -> Terms:
        """accuracy: of words; nll: of their ids, in nats."""
        counts = batch.loss_weights.to(scores.nll.dtype)
        assert scores.greedy is not None
        right = (scores.greedy | (counts == 0)).all(1).to(counts.dtype)
        return {
            "accuracy": Term(right, torch.ones_like(right)),
            "nll": Term((scores.nll * counts).sum(1), counts.sum(1)),
        }

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        return [interval("accuracy", found["accuracy"]), interval("nll", found["nll"])]
