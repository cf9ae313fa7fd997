"""Tokens guessed by the model's own layers of multi-token prediction: what whole rows say, and the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.batch import DecoderBatch
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.options import MTP, EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.speculate import Confidence, Guessed
from mega.core.inference.start import check_layout, engine_on
from mega.core.parallel.mesh import Mesh
from tests.inference.test_engine import FAMILIES, LLAMA, answers, counted, guessing_requests, made, prompts, tokens

ROTARY = [name for name, model in FAMILIES.items() if model.position == "rope"]


def engine(stage: Any, speculate: str | None = MTP, **more: Any) -> BatchingEngine:
    options = EngineOptions(block=4, cache_tokens=2048, max_requests=16, prefill_chunk=7, speculate=speculate, **more)
    found = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert found is not None
    return found


@torch.no_grad()
def guesses_of(stage: Any, ids: Sequence[int], depths: int) -> list[int]:
    """Of a whole row, as in training: each depth reads the tokens one further on, of which the last are guesses."""
    text, columns = list(ids), len(ids) - 1
    row, positions = torch.tensor([text[:-1]]), torch.arange(columns)[None]
    batch = DecoderBatch(row, row, torch.ones(1, columns), positions, torch.zeros(1, dtype=torch.int64))
    stream, *_ = stage.stream(batch, None)
    h, context = stage.head.norm(stream)[1], stage.context(batch)
    for depth, layer in enumerate(stage.head.ahead[:depths]):
        h = layer(h, torch.tensor([text[depth + 1 : depth + 1 + columns]]), positions, context)
        logits = h[-1:] @ stage.head.weight.T
        text.append(int(logits[:, : stage.model.vocab].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_guesses_are_those_of_whole_rows(depths: int, ahead: int) -> None:
    """Prompts longer than a pass, guesses that are wrong, several at once; and the answers are the same."""
    stage = made(replace(LLAMA, mtp_layers=depths), torch.float64)
    asked = [Request(prompt=each, tokens=12, sampling=Sampling(temperature=0.0)) for each in prompts(9)]
    expected = answers(engine(stage, None), asked)
    running = engine(stage, ahead=ahead)
    drafter: Any = running._drafter
    drafter._chunk = 5
    seen: list[tuple[Guessed, list[int]]] = []
    original: Callable[[Sequence[Guessed]], list[list[int]]] = drafter.propose

    def propose(of: Sequence[Guessed]) -> list[list[int]]:
        of = [each._replace(ids=list(each.ids)) for each in of]
        seen.extend(zip(of, proposals := original(of), strict=True))
        return proposals

    with mock.patch.object(drafter, "propose", propose), mock.patch.object(Confidence, "checked"):
        for found, wanted in zip(answers(running, asked), expected, strict=True):
            assert tokens(found) == tokens(wanted)
    assert len(seen) > 60 and {len(guesses) for _, guesses in seen} == set(range(1, depths + 1))
    for each, guesses in seen:
        assert guesses == guesses_of(stage, each.ids, depths)[: len(guesses)], each
    blocks = drafter._blocks
    assert blocks.available == blocks.count - 1 and not drafter._watched, "blocks or states are lost"


@pytest.mark.parametrize("family", ROTARY)
def test_answers_are_the_same(family: str) -> None:
    """Greedy and drawn, with and without prefixes that an earlier request has computed."""
    stage = made(replace(FAMILIES[family], mtp_layers=2), torch.float64)
    asked = guessing_requests(9)
    expected = answers(engine(stage, None), asked)
    running = engine(stage, ahead=1)
    with mock.patch.object(Confidence, "checked"):
        for _ in range(2):
            for found, wanted in zip(answers(running, asked), expected, strict=True):
                assert tokens(found) == tokens(wanted)


def test_right_guesses_save_steps() -> None:
    """A model that counts, and whose layers ahead count on: each step gives three tokens."""
    stage = made(replace(LLAMA, layers=1, vocab=32, mtp_layers=2))
    eye = torch.eye(32)
    with torch.no_grad():
        for name, weight in stage.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.zero_()  # branches add nothing
        stage.embedding.tokens.weight[:32] = eye
        stage.head.weight[:32] = eye.roll(1, 0)
        for layer in stage.head.ahead:
            layer.embedding.tokens.weight[:32] = eye
            layer.join.weight.copy_(torch.cat([eye, 0 * eye], 1))
    running = engine(stage)
    steps = counted(running._worker)
    for sampling in (Sampling(temperature=0.0), Sampling(seed=3, temperature=0.01)):
        (events,) = answers(running, [Request(prompt=(3, 4, 5), tokens=31, sampling=sampling)])
        assert tokens(events) == [(6 + number) % 32 for number in range(31)]
    assert len(steps) == 2 * 11


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [(LLAMA, 1, "the model has no layers that predict"), (replace(LLAMA, mtp_layers=1), 2, "needs --tp 1 and --pp 1")],
)
def test_where_it_cannot_be_it_is_refused(model: ModelConfig, tp: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"--speculate mtp: {words}"):
        check_layout(model, tp, 1, EngineOptions(speculate=MTP))


@pytest.mark.parametrize(
    ("options", "adapter", "flag"),
    [
        ({"batch_invariant": True}, (), "--batch-invariant"),
        ({"cuda_graph": True}, (), "--cuda-graph"),
        ({}, ("a=b",), "--adapter"),
    ],
)
def test_what_it_excludes_is_named(options: dict[str, bool], adapter: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ValueError, match=f"--speculate mtp: excludes {flag}"):
        EngineOptions(speculate=MTP, **options).check_speculation(adapter)
