"""The change test of benchmarks: one that the project does not know is one file, and scores alike in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.inference.generation.generate import logits, losses
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import LOSS_BOUND
from mega.core.tasks.score import TokenScorer
from mega.core.tasks.task import score
from mega.core.training.wire import build_mesh, build_state, chosen_ops
from tests.support.runs import small_run
from tests.support.toy_benchmark import LastWord

SP = {"sequence_parallel": True}
BENCHMARK = LastWord(length=16)
PASSAGES = 11
"""Neither microbatches nor data ranks divide them."""


def run(world: int = 1, **layout: Any) -> RunConfig:
    return small_run("gpt", world, layers=2, init_std=0.1, **layout)


@pytest.fixture(scope="module")
def one_rank() -> Any:
    """The model of every layout below as one stage."""
    state = build_state(run(), build_mesh(run(), 0, 1), Device.choose("cpu"))
    state.train(False)
    return state.stages[0]


@pytest.fixture(scope="module")
def passages(one_rank: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third word is the model's own choice, every third is so but for its last id, the others are not."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(PASSAGES):
        ids = torch.randint(1, 509, (3 + number,), generator=generator).tolist()
        context = list(ids)
        for _ in range(2):
            ids.append(int(logits(one_rank, torch.tensor([ids]))[0, -1].argmax()))
        word = ids[-2:]
        word[0] = (word[0] + (number % 3 == 2)) % 509
        word[1] = (word[1] + (number % 3 == 1)) % 509
        lines.append(json.dumps({"context": context, "word": word}))
    path = tmp_path_factory.mktemp("passages") / "last-words.jsonl"
    path.write_text("\n".join(lines))
    return path


def scored(groups: Groups, rank: int, run: RunConfig, world: int, path: Path, micro_batch: int) -> dict[str, float]:
    """Job of one rank."""
    state = build_state(run, build_mesh(run, rank, world, groups), Device.choose("cpu", rank))
    state.train(False)
    ops = chosen_ops(run, state.device.torch)
    scorer = TokenScorer(run.model, state.stages, state.mesh, state.device, ops, greedy=True)
    found = score(scorer, BENCHMARK, BENCHMARK.examples(path), micro_batch)
    return {name: each.mean for name, each in found.items()}


@pytest.fixture(scope="module")
def expected(one_rank: Any, passages: Path) -> dict[str, float]:
    """The same by one model that reads a passage at a time."""
    right, nll = 0, torch.zeros(0)
    for _, context, word in BENCHMARK.examples(passages):
        of_word = losses(one_rank, context + word).detach()[-len(word) :]
        first = logits(one_rank, torch.tensor([context + word]))[0, -len(word) - 1 : -1].argmax(-1)
        right, nll = right + (first.tolist() == word), torch.cat([nll, of_word])
    return {"accuracy": right / PASSAGES, "nll": float(nll.double().mean())}


LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    # (world, micro batch, layout)
    (1, 4, {}),
    (2, 3, {"tp": 2, **SP}),
    (2, 2, {"pp": 2}),
    (2, 2, {}),
    (4, 1, {"zero": 3}),
    (4, 2, {"tp": 2, "cp": 2, **SP}),
]


def test_scores_are_one_models_in_every_layout(pool: Pool, passages: Path, expected: dict[str, float]) -> None:
    (reference,) = pool.run(scored, run(), 1, passages, 1, world=1)
    assert reference["accuracy"] == expected["accuracy"] == 4 / PASSAGES
    assert reference["nll"] == pytest.approx(expected["nll"], rel=1e-6)
    for world, micro_batch, layout in LAYOUTS:
        found = pool.run(scored, run(world, **layout), world, passages, micro_batch, world=world)
        for theirs in found:
            assert theirs == found[0] and theirs["accuracy"] == reference["accuracy"], layout
            assert theirs["nll"] == pytest.approx(reference["nll"], rel=LOSS_BOUND["fp64"]), layout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"context": [1], "word": [2]}\n{"context": [1]}', ':2: needs "context" and "word" (\'word\')'),
        ("[1, 2]", ':1: needs "context" and "word"'),
        (json.dumps({"context": [1] * 16, "word": [1, 2]}), ":1: needs a context, a word, and at most 17 ids"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as refused:
        BENCHMARK.examples(path)
    assert str(path) in str(refused.value) and words in str(refused.value)
