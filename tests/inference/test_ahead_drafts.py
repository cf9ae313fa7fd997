"""Tokens guessed by the model's own layers of multi-token prediction: what whole rows say, and the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from mega import cli
from mega.core.batch import DecoderBatch
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference import draft_worker, graphs
from mega.core.inference.capacity import even_layers, expected, weight_bytes
from mega.core.inference.draft_worker import AheadWorker
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.graphs import GraphShape
from mega.core.inference.loading.load import empty_stage
from mega.core.inference.options import MTP, EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.speculate import Confidence, Guessed
from mega.core.inference.start import check_layout, engine_on
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.weight import initialise
from mega.core.processes.pool import Pool
from tests.inference.test_engine import (
    FAMILIES,
    GREEDY,
    LLAMA,
    answers,
    counted,
    guessing_requests,
    made,
    prompts,
    tokens,
)
from tests.support.tape import Tape, one_operation
from tests.support.triton import needs_kernels

ROTARY = [name for name, model in FAMILIES.items() if model.position == "rope"]


def engine(stage: Any, speculate: str | None = MTP, **more: Any) -> BatchingEngine:
    options = EngineOptions(block=4, cache_tokens=2048, max_requests=16, prefill_chunk=7, speculate=speculate, **more)
    found = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert found is not None
    return found


def proposed(drafter: Any) -> list[tuple[Guessed, list[int]]]:
    """The guesses that are asked for from here on, and those that are given."""
    seen: list[tuple[Guessed, list[int]]] = []
    original: Callable[[Sequence[Guessed]], list[list[int]]] = drafter.propose

    def propose(of: Sequence[Guessed]) -> list[list[int]]:
        of = [each._replace(ids=list(each.ids)) for each in of]
        seen.extend(zip(of, proposals := original(of), strict=True))
        return proposals

    drafter.propose = propose
    return seen


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
    seen = proposed(drafter)
    with mock.patch.object(Confidence, "checked"):
        for found, wanted in zip(answers(running, asked), expected, strict=True):
            assert tokens(found) == tokens(wanted)
    assert len(seen) > 60 and {len(guesses) for _, guesses in seen} == set(range(1, depths + 1))
    for each, guesses in seen:
        assert guesses == guesses_of(stage, each.ids, depths)[: len(guesses)], each
    assert not drafter._computed


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


MIXTURE = replace(LLAMA, experts=4, experts_chosen=2, expert_ffn=16, mtp_layers=2)


def stage_at(model: ModelConfig, mesh: Mesh) -> Any:
    """A rank's stage of a model whose weights are the same at any layout."""
    cpu, dtype = Device.choose("cpu"), torch.float64
    ops, layers = forward_only(choose(cpu.torch, dtype)), even_layers(model.layers or 0, mesh.pp.size)
    stage = empty_stage(model, mesh, cpu, dtype, ops=ops, stage_layers=layers)
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)  # far from uniform
    return stage.eval()


def said(groups: Groups, rank: int, model: ModelConfig, layout: tuple[int, int, int], speculate: str | None) -> Any:
    """Texts, and guesses by known tokens."""
    tp, pp, ep = layout
    mesh, cpu = Mesh(rank, tp=tp, pp=pp, ep=ep, etp=tp // ep, groups=groups), Device.choose("cpu")
    options = EngineOptions(block=4, cache_tokens=2048, max_requests=16, prefill_chunk=7, speculate=speculate)
    check_layout(model, tp, pp, options, ep)
    running = engine_on(stage_at(model, mesh), mesh, cpu, options)
    if running is None:
        return None
    seen = proposed(running._drafter) if speculate else []
    with mock.patch.object(Confidence, "checked"):
        texts = [tokens(events) for events in answers(running, guessing_requests(7))]
    running.close()
    return texts, {tuple(each.ids): guesses for each, guesses in seen}


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (replace(LLAMA, layers=3, mtp_layers=1), [(2, 1, 1), (1, 2, 1)]),
        (MIXTURE, [(2, 1, 2), (1, 2, 1), (2, 2, 2)]),
        (replace(FAMILIES["gemma"], mtp_layers=2), [(2, 2, 1)]),
    ],
    ids=["llama", "mixture", "gemma"],
)
def test_text_and_guesses_are_the_same_at_any_layout(
    pool: Pool, model: ModelConfig, layouts: list[tuple[int, int, int]]
) -> None:
    plain, _ = said(Groups(), 0, model, (1, 1, 1), None)
    texts, guesses = said(Groups(), 0, model, (1, 1, 1), MTP)
    assert texts == plain and sum(map(len, texts)) > 50 and len(guesses) > 50
    for layout in layouts:
        found_texts, found = pool.run(said, model, layout, MTP, world=layout[0] * layout[1])[0]
        assert found_texts == plain, layout
        common = found.keys() & guesses.keys()
        assert len(common) > 0.8 * len(guesses)
        for ids in common:  # stages alternate between groups of requests, so other numbers of tokens may be guessed
            assert all(one == other for one, other in zip(found[ids], guesses[ids], strict=False)), (layout, ids)


@needs_kernels
def test_steps_that_guess_are_captured_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are played from tapes, on which no Python code runs; guesses and text are those of other steps."""
    from mega.core.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "PROGRAMS", 1)
    monkeypatch.setattr(graphs, "FEW", (4, 8))
    stage = made(replace(LLAMA, layers=1, heads=2, kv_heads=1, mtp_layers=2))
    asked = [
        Request(prompt=(1, 2), tokens=9, sampling=GREEDY),
        Request(prompt=(7, 5, 3), tokens=8, sampling=Sampling(seed=2)),
    ]
    options = EngineOptions(block=4, cache_tokens=64, max_requests=2, prefill_chunk=8, speculate=MTP)
    plain = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert plain is not None
    expected_guesses = proposed(plain._drafter)
    with mock.patch.object(Confidence, "checked"):
        expected_texts = [tokens(events) for events in answers(plain, asked)]
    kernels = replace(paged_attention.PAGED, attend=one_operation(paged_attention.PAGED.attend))
    stage.ops = replace(stage.ops, paged_attention=kernels)
    monkeypatch.setattr("mega.core.inference.graphs.Recorder", lambda: Tape)
    monkeypatch.setattr("mega.core.inference.start._records", lambda *_: True)
    running = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert running is not None and isinstance(drafts := running._worker.drafts, AheadWorker)
    running.warm_up()
    shapes = [GraphShape("few", 8), GraphShape("few", 4), GraphShape("single", 2), GraphShape("single", 1)]
    assert [list(each._recorded) for each in drafts.graphs] == [shapes, shapes]
    guesses, played = proposed(running._drafter), Tape.played
    with (
        mock.patch.object(Confidence, "checked"),
        mock.patch.object(draft_worker, "begin_step", side_effect=AssertionError("a step without a graph")),
    ):
        assert [tokens(events) for events in answers(running, asked)] == expected_texts
    assert [(each.ids, found) for each, found in guesses] == [(each.ids, found) for each, found in expected_guesses]
    assert len(guesses) > 5 and Tape.played >= played + len(guesses)
    assert [list(each._recorded) for each in drafts.graphs] == [shapes, shapes]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_all_memory_is_counted(tp: int, pp: int, pool: Pool) -> None:
    """The cache, the states and the weights take the bytes that memory-estimate --serve shows."""
    model = replace(LLAMA, layers=3, mtp_layers=2)
    found = expected(
        model, 8, Device.choose("cpu").room(), "cpu", tp=tp, pp=pp, requests=16, cache_tokens=100, guesses=True
    )
    each_rank = pool.run(held, model, tp, pp, world=tp * pp)
    stages = [max(each_rank[stage * tp : (stage + 1) * tp]) for stage in range(pp)]
    assert [weights for weights, _ in stages] == weight_bytes(model, 8, tp=tp, pp=pp)
    assert max(cache for _, cache in stages) == found.cache
    assert "of keys, values and hidden states" in found.lines()[1]


def held(groups: Groups, rank: int, model: ModelConfig, tp: int, pp: int) -> tuple[int, int]:
    """Bytes of this rank's weights, and of its caches and states."""
    workers: list[Any] = []
    mesh, cpu = Mesh(rank, tp=tp, pp=pp, groups=groups), Device.choose("cpu")
    options = EngineOptions(cache_tokens=100, max_requests=16, speculate=MTP)
    with mock.patch("mega.core.inference.start.follow", lambda worker, _: workers.append(worker)):
        running = engine_on(stage_at(model, mesh), mesh, cpu, options)
    worker = workers[0] if running is None else running._worker
    tensors = [worker.cache.pool]
    if mesh.pp.last:
        tensors += [worker.drafts.cache.pool, worker.drafts.states]
    weights, cached = (
        [each.numel() * each.element_size() for each in many] for many in (worker.stage.parameters(), tensors)
    )
    return sum(weights), sum(cached)


def test_weights_in_fp8_are_counted() -> None:
    """The layers that guess belong to the head, whose weights stay as they are; the text is that without guesses."""
    model, cpu = replace(LLAMA, mtp_layers=1), Device.choose("cpu")
    asked, texts = [Request(prompt=(1, 2, 3), tokens=6, sampling=GREEDY)], []
    for speculate in (None, MTP):
        stage = made(model, torch.bfloat16, fp8_weights=True)
        narrow = [4 * len(each) + each.numel() for each in stage.layers.parameters() if each.dim() == 2]
        running = engine_on(stage, Mesh.at(0), cpu, EngineOptions(cache_tokens=64, speculate=speculate))
        assert running is not None
        assert weight_bytes(model, 2, fp8_weights=True) == [sum(narrow) + 2 * sum(map(torch.numel, stage.parameters()))]
        texts.append(tokens(answers(running, asked)[0]))
    assert texts[0] == texts[1]


def test_an_estimate_of_flags_counts_what_guesses_need(capsys: pytest.CaptureFixture[str]) -> None:
    line = "memory-estimate --serve --model llama2-7b --bf16 --gpu h200 --tp 2 --mtp-layers 1".split()
    assert cli.main([*line, "--speculate", "ngram"]) == 0
    assert "64.00 GiB of keys and values" in capsys.readouterr().out
    assert cli.main([*line, "--speculate", "mtp"]) == 0
    assert "68.00 GiB of keys, values and hidden states" in capsys.readouterr().out
    assert cli.main([*line, "--speculate", "none"]) == 2
    assert "--speculate none: no such model" in capsys.readouterr().err


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="--speculate mtp: the model has no layers that predict"):
        check_layout(LLAMA, 1, 1, EngineOptions(speculate=MTP))


@pytest.mark.parametrize(
    ("options", "adapter", "flag"),
    [
        ({"batch_invariant": True}, (), "--batch-invariant"),
        ({}, ("a=b",), "--adapter"),
    ],
)
def test_what_it_excludes_is_named(options: dict[str, bool], adapter: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ValueError, match=f"--speculate mtp: excludes {flag}"):
        EngineOptions(speculate=MTP, **options).check_speculation(adapter)
