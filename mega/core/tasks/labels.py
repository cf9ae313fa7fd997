"""Score a classifier on labelled sets: accuracy of each set and of all sets together, and predictions for every
question.

The questions come from a `Format` (data/formats). For files without labels, predictions are written but no score is
computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.batch import MaskedBatch, Term, Terms
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.sections import LABELLED, ModelConfig
from mega.core.data.formats import format_of
from mega.core.data.labelled import Format, LabelledSet, labelled_batch, labelled_set, set_names
from mega.core.tasks.options import BenchmarkInputs
from mega.core.tasks.task import Estimate, Figure, as_share, interval

READS: tuple[str, ...] = ()
"""Fields of `options.OWN` that this benchmark reads."""

HEADS = tuple(head for head, _ in LABELLED.values())


class Item(NamedTuple):
    """A question. position: index among the questions of all sets. where: index of the question's set. number: index
    within this set."""

    position: int
    where: int
    number: int


@dataclass
class Labels:
    """A benchmark that classifies rows with the model's head."""

    asked: BenchmarkInputs
    form: Format
    notes: list[str] = field(default_factory=list)
    greedy: bool = False

    def __post_init__(self) -> None:
        options, tokenizer = self.asked.options, self.asked.needs_tokenizer()
        self.name = self.form.name
        self.sets: dict[str, LabelledSet] = {}
        for name, path in set_names(options.valid_data).items():
            self.sets[name] = labelled_set(
                "--valid-data",
                path,
                self.form,
                tokenizer,
                seq_length=self.asked.length,
                cache=None,
                note=self.notes.append,
            )
        self.terms = ("accuracy", *(f"accuracy {name}" for name in self.sets), "loss")
        self.headline = ("correct", "total", "accuracy")

    def examples(self, path: Path) -> Sequence[Item]:
        """Return every question of every set. `path` is ignored, because the sets are already loaded."""
        every = [(set_index, number) for set_index, one in enumerate(self.sets.values()) for number in range(len(one))]
        return [Item(index, *each) for index, each in enumerate(every)]

    def batch(self, examples: Sequence[Item]) -> MaskedBatch:
        """Make a batch of rows, padded to the length of the longest row, rounded up to a multiple of the unit. A row's
        sample index identifies the question."""
        sets, unit = list(self.sets.values()), self.asked.unit
        longest = max(sets[item.where].longest([item.number]) for item in examples)
        width = -(-longest // unit) * unit
        rows: MaskedBatch = labelled_batch([sets[item.where].row(item.number, width) for item in examples], 0)
        first = torch.tensor([item.position for item in examples]) * self.form.choices
        samples = (first[:, None] + torch.arange(self.form.choices)).flatten()
        return MaskedBatch(**{**rows.tensors(), "samples": samples})

    def measure(self, batch: MaskedBatch, scores: torch.Tensor) -> Terms:
        """Return the terms of a batch. scores: logits of the classes, [questions, classes]."""
        labelled = (batch.pairs >= 0).double()
        correct = (scores.argmax(-1) == batch.pairs).double() * labelled
        nll = F.cross_entropy(scores.double(), batch.pairs.clamp(min=0), reduction="none") * labelled
        ends = torch.tensor([len(one) for one in self.sets.values()]).cumsum(0).to(labelled.device)
        set_of_question = torch.searchsorted(ends, self.numbers(batch), right=True)
        set_terms = {}
        for set_index, name in enumerate(self.sets):
            in_set = (set_of_question == set_index).double()
            set_terms[f"accuracy {name}"] = Term(correct * in_set, labelled * in_set)
        return {"accuracy": Term(correct, labelled), **set_terms, "loss": Term(nll, labelled)}

    def numbers(self, batch: MaskedBatch) -> torch.Tensor:
        """Return the indices of a batch's questions among all questions."""
        return batch.samples[:: self.form.choices] // self.form.choices

    @property
    def classes(self) -> int:
        return len(self.form.labels)

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        accuracy, has_several = found["accuracy"], len(self.sets) > 1
        correct = 0 if math.isnan(accuracy.mean) else round(accuracy.mean * accuracy.weight)
        set_figures = (
            [interval(f"accuracy {name}", found[f"accuracy {name}"], as_share) for name in self.sets]
            if has_several
            else []
        )
        return [
            Figure("correct", correct),
            Figure("total", round(accuracy.weight)),
            interval("accuracy", accuracy, as_share),
            *set_figures,
            interval("loss", found["loss"]),
        ]

    def predictions(self, probabilities: torch.Tensor) -> list[dict[str, object]]:
        """Return the stored prediction for each question, in order. probabilities: [questions, classes]."""
        sets, rows = list(self.sets.items()), []
        for item, shares in zip(self.examples(Path()), probabilities.tolist(), strict=False):
            name, one = sets[item.where]
            label = int(one.labels[item.number])
            rows.append(prediction(self.form, name, int(one.uids[item.number]), None if label < 0 else label, shares))
        return rows


def prediction(form: Format, name: str, uid: int, label: int | None, shares: Sequence[float]) -> dict[str, object]:
    """Return the stored prediction for a question. shares: the predicted probability of each class."""
    answer = max(range(len(shares)), key=shares.__getitem__)
    return {
        "task": form.name,
        "set": name,
        "uid": uid,
        "label": label,
        "answer": answer,
        "name": form.labels[answer],
        "probabilities": list(shares),
    }


def check_head(path: Path, model: ModelConfig, task: str) -> None:
    """Check the head of a model. Errors: ValueError if the model lacks the head that a benchmark needs."""
    head, classes = LABELLED[task]
    classifies = FAMILY_DEFAULTS[model.family].classifies
    if classifies and (model.head, model.classes) == (head, classes):
        return
    model_flags = f"--family {model.family}"
    if classifies:
        model_flags += f" with --head {model.head}" + (f" --classes {model.classes}" if model.head in HEADS else "")
    raise ValueError(
        f"--load {path}: is a model of {model_flags}; --task {task} needs --family bert with --head {head} --classes "
        f"{classes}, which `mega finetune --task {task}` makes"
    )


def make(asked: BenchmarkInputs) -> Labels:
    """Create the benchmark. Errors: ValueError naming the flag, the file and the line."""
    task = asked.options.task
    if not asked.options.valid_data:
        raise ValueError(f"--valid-data is missing: give the files of --task {task} that are to be scored")
    return Labels(asked, format_of(task))
