"""The engine: what it answers is what the model says, alone, among others, and at any layout."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.architecture import units
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.cache import Blocks
from mega.core.inference.capacity import even_layers
from mega.core.inference.drafts import ModelDrafts
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.generation.generate import logits
from mega.core.inference.graphs import GraphShape, StepGraphs
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.relay import LostRank, Relay
from mega.core.inference.request import Event, Limits, Request, RequestError, Sampling
from mega.core.inference.sampling import draw, probabilities, uniform
from mega.core.inference.speculate import Guessed, NGrams
from mega.core.inference.start import start_engine
from mega.core.inference.step import Step, scratch_step
from mega.core.inference.worker import Launched, Worker
from mega.core.model.decode import DecodeStep
from mega.core.model.decoder import DecoderStage
from mega.core.ops.fp8_weights import narrowed
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.collectives import all_gather, all_reduce, first_problem
from mega.core.parallel.mesh import Axis, Groups, Mesh
from mega.core.parallel.one_shot import RankExchange
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from mega.core.processes.pool import Pool
from tests.support.shared import shared
from tests.support.triton import needs_kernels

GREEDY = Sampling(temperature=0.0)
CPU = torch.device("cpu")
SMALL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=61, positions=64, qkv_bias=True)
LLAMA = replace(
    SMALL, kv_heads=2, position="rope", norm="rmsnorm", activation="swiglu", bias=False, qkv_bias=False, tied=False
)
FAMILIES = {
    "gpt": SMALL,
    "sinusoidal": replace(SMALL, position="sinusoidal", position_offset=2, embedding_scale=True, activation="gelu"),
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope_scaling="llama3", rope_original_positions=16),
    "interpolated": replace(LLAMA, rope_interpolation=2.0, rope_fraction=0.5),
    "mistral": replace(LLAMA, window=7),
    "qwen3": replace(LLAMA, qk_norm=True),
    "gemma": replace(
        LLAMA,
        norm_placement="both",
        norm_offset=True,
        activation="geglu_tanh",
        window=7,
        window_layers=(1, 0),
        local_rope_base=100.0,
        attention_softcap=3.0,
        logit_softcap=9.0,
        attention_scale=0.3,
    ),
    "olmo": replace(LLAMA, norm_placement="branch", qk_norm=True, qk_norm_whole=True, rope_layers=(1, 0)),
    "gpt-j": replace(
        SMALL,
        position="rope",
        rope_fraction=0.5,
        parallel_branches="one-norm",
        qkv_bias=False,
        out_bias=False,
        head_bias=True,
        tied=False,
        residual_multiplier=0.5,
        attention_scale_by_layer=True,
    ),
}


def made(model: ModelConfig, dtype: torch.dtype = torch.float32, *, fp8_weights: bool = False) -> Any:
    ops = forward_only(choose(CPU, dtype), fp8_weights=fp8_weights)
    stage = DecoderStage(model, units(model), ParameterFactory({}, dtype, CPU, ops), ALONE)
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)  # far from uniform
    return stage.eval()


def engine_of(
    stage: Any,
    *,
    block: int = 4,
    cache: int = 2048,
    requests: int = 16,
    chunk: int = 7,
    tile: int = 0,
    ahead: int = 0,
    groups: int = 1,
    drafter: Any = None,
    device: torch.device = CPU,
) -> Any:
    blocks = cache // block + 1
    worker = Worker(stage, Mesh.at(0), device, blocks=blocks, block=block, requests=requests, tile=tile or None)
    long_from = stage.architecture.long_from
    limits = Limits(stage.model.positions, cache, requests, stage.model.vocab, long_from)
    return BatchingEngine(
        worker, limits, Blocks(blocks, block), chunk=chunk, depth=1 + ahead, groups=groups, drafter=drafter
    )


def answers(engine: Any, requests: Sequence[Request]) -> list[list[Event]]:
    """The events of each request, all in flight together."""
    numbers = [engine.add(request) for request in requests]
    events: dict[int, list[Event]] = {number: [] for number in numbers}
    while not engine.idle:
        for event in engine.step():
            events[event.request].append(event)
    assert all(found[-1].finish is not None for found in events.values())
    held = engine._scheduler.blocks
    assert held.available == held.count - 1, "blocks or promises are lost"
    return [events[number] for number in numbers]


def tokens(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def prompts(count: int, vocab: int = 61) -> list[tuple[int, ...]]:
    draw = random.Random(3)
    return [tuple(draw.randrange(vocab) for _ in range(draw.randrange(1, 30))) for _ in range(count)]


def test_steps_of_the_warm_up_have_different_tokens() -> None:
    """A mixture of experts that gets one token again and again reads few experts, so its steps seem short."""
    found = scratch_step([5, 3], 4, 100).tokens
    assert len(set(found.tolist())) == 8 and 0 <= found.min() <= found.max() < 100


@pytest.mark.parametrize("tile", [0, 8], ids=["ragged", "invariant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_changes_nothing(family: str, tile: int) -> None:
    """Chunks, blocks and neighbours: the log-probabilities are those of the whole text in one pass."""
    stage = made(FAMILIES[family])
    asked = [
        Request(prompt=prompt, tokens=12, sampling=GREEDY, logprobs=2, prompt_logprobs=True) for prompt in prompts(5)
    ]
    for request, events in zip(asked, answers(engine_of(stage, tile=tile), asked), strict=True):
        said = tokens(events)
        text = [*request.prompt, *said]
        expected = logits(stage, torch.tensor([text]))[0].log_softmax(-1)
        found = [*(events[0].prompt_logprobs or ())[1:], *(event.logprob for event in events)]
        theirs = [float(expected[at, token]) for at, token in enumerate(text[1:])]
        assert found == pytest.approx(theirs, abs=2e-5)
        assert said == expected[len(request.prompt) - 1 : -1].argmax(-1).tolist()
        assert all(event.top[0] == (event.token, event.logprob) and len(event.top) == 2 for event in events)


class Player:
    """In a graph's place: does the work again."""

    def __init__(self, work: Callable[[], None]):
        self.work = work

    def play(self) -> None:
        self.work()


def refuse(work: Callable[[], None]) -> Any:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


class Idle(Player):
    """Plays nothing: what was found before stays, but for a number."""

    def play(self) -> None:
        self.work.__self__._out[0, 0] += 50.0  # type: ignore[attr-defined]


SHAPES = [GraphShape("few", 16), GraphShape("many", 128), *(GraphShape("single", rows) for rows in (1, 2, 4, 8))]


@needs_kernels
@pytest.mark.parametrize(
    ("record", "rows", "said", "ahead"),
    [
        (Player, SHAPES, "", 0),
        (Player, SHAPES, "", 1),
        (refuse, [], "not permitted", 0),
        (Idle, [], "other logits", 1),
    ],
)
def test_graphs_of_decoding(
    record: Any,
    rows: list[GraphShape],
    said: str,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Recorded steps, played while requests join and leave, give what others give; failing ones are left out."""
    from mega.core.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "PROGRAMS", 1)  # the interpreter takes them one after the other
    stage = made(replace(LLAMA, window=7, layers=1, heads=2, kv_heads=1))
    asked = [Request(prompt=prompt, tokens=2 + at, sampling=GREEDY, logprobs=0) for at, prompt in enumerate(prompts(7))]
    expected = answers(engine_of(stage), asked)
    stage.ops = replace(stage.ops, paged_attention=paged_attention.PAGED)
    engine = engine_of(stage, chunk=90, ahead=ahead, requests=7)
    worker = engine._worker
    worker.graphs = StepGraphs(DecodeStep(stage), worker.cache, 16, worker._latest, runs=16, most=512, record=record)
    for found, wanted in zip(answers(engine, asked), expected, strict=True):
        assert tokens(found) == tokens(wanted)
        assert [event.logprob for event in found] == pytest.approx([event.logprob for event in wanted], abs=2e-5)
    assert sorted(worker.graphs._recorded) == rows and said in caplog.text


@needs_kernels
def test_all_graphs_are_recorded_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mega.core.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "PROGRAMS", 1)
    stage = made(replace(LLAMA, layers=1, heads=2, kv_heads=1))
    (expected,) = answers(engine_of(stage), [Request(prompt=(1, 2), tokens=3, sampling=GREEDY)])
    stage.ops = replace(stage.ops, paged_attention=paged_attention.PAGED)
    engine = engine_of(stage, requests=5, ahead=1)
    worker = engine._worker
    graphs = worker.graphs = StepGraphs(DecodeStep(stage), worker.cache, 16, worker._latest, runs=5, record=Player)
    engine.warm_up()
    expected_shapes = [
        *(GraphShape("few", size) for size in (64, 32, 16, 8, 4)),
        *(GraphShape("single", n) for n in (8, 4, 2, 1)),
    ]
    assert list(graphs._recorded) == expected_shapes
    (found,) = answers(engine, [Request(prompt=(1, 2), tokens=3, sampling=GREEDY)])
    assert tokens(found) == tokens(expected) and list(graphs._recorded) == expected_shapes


@needs_kernels
def test_a_first_step_without_logits_does_not_end_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a prompt is the first step of its shape, if nothing was recorded before."""
    from mega.core.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "PROGRAMS", 1)
    stage = made(replace(LLAMA, layers=1, heads=2, kv_heads=1))
    asked = [Request(prompt=(1, 2, 3, 4, 5), tokens=2, sampling=GREEDY)]
    (expected,) = answers(engine_of(stage), asked)
    stage.ops = replace(stage.ops, paged_attention=paged_attention.PAGED)
    engine = engine_of(stage, requests=2, chunk=2)
    worker = engine._worker
    worker.graphs = StepGraphs(DecodeStep(stage), worker.cache, 16, worker._latest, runs=2, record=Player)
    (found,) = answers(engine, asked)
    assert tokens(found) == tokens(expected) and list(worker.graphs._recorded) == [GraphShape("single", 1)]


@pytest.mark.parametrize("family", ["gpt", "qwen3"])
def test_weights_in_fp8_answer_as_their_rounded_selves(family: str) -> None:
    """The blocks' matrices are given up for their fp8 forms, whose products are those of the weights so rounded."""
    stage, rounded = made(FAMILIES[family], fp8_weights=True), made(FAMILIES[family])
    matrices = [weight for weight in rounded.layers.parameters() if weight.dim() == 2]
    with torch.no_grad():
        for weight in matrices:
            values, scale = narrowed(weight)
            weight.copy_(values.float() * scale[:, None])
    asked = [Request(prompt=prompt, tokens=6, sampling=GREEDY, logprobs=0) for prompt in prompts(3)]
    expected = answers(engine_of(rounded), asked)
    for found, wanted in zip(answers(engine_of(stage), asked), expected, strict=True):
        assert tokens(found) == tokens(wanted)
        assert [event.logprob for event in found] == pytest.approx([event.logprob for event in wanted], abs=1e-4)
    assert sum(weight.numel() == 0 for weight in stage.layers.parameters()) == len(matrices) > 0


def stories() -> Path:
    return shared("stories260K_hf/config.json").parent


def expected_cases() -> list[tuple[Request, list[int]]]:
    cases = []
    for case in json.loads((stories() / "expected.json").read_text())["cases"]:
        mask = torch.ones(512, dtype=torch.bool)
        mask[case["suppressed_ids"]] = False
        allowed = (lambda ids, mask=mask: mask) if case["suppressed_ids"] else None
        length = len(case["greedy_ids"])
        request = Request(prompt=tuple(case["prompt_ids"]), tokens=length, sampling=GREEDY, allowed=allowed)
        cases.append((request, case["greedy_ids"]))
    return cases


def mixed() -> list[Request]:
    """Neighbours of every kind."""
    others = [
        Request(prompt=prompt, tokens=9 * number + 1, sampling=Sampling(seed=number, top_p=0.9, top_k=40 * number))
        for number, prompt in enumerate(prompts(4, 512))
    ]
    return [*others, Request(prompt=(1, 403, 407), tokens=6, beams=3), Request(prompt=(1, 5), tokens=0)]


def speaks_as_expected(groups: Groups, rank: int, tp: int, pp: int, invariant: bool) -> list[bool] | None:
    device, options = (
        Device.choose("cpu"),
        EngineOptions(prefill_chunk=16, cache_tokens=4096, batch_invariant=invariant),
    )
    mesh = Mesh(rank, tp=tp, pp=pp, groups=groups)
    engine = start_engine(open_model(stories()), mesh, device, options)
    if engine is None:
        return None
    cases = expected_cases()
    if invariant:  # which is slow
        cases = [(replace(request, tokens=12), ids[:12]) for request, ids in cases]
    alone = [tokens(answers(engine, [request])[0]) == ids for request, ids in cases]
    among = answers(engine, [mixed()[0], *(request for request, _ in cases), *mixed()[1:]])
    engine.close()
    return alone + [tokens(found) == ids for found, (_, ids) in zip(among[1:], cases, strict=False)]


@pytest.mark.parametrize("invariant", [False, True], ids=["ragged", "invariant"])
def test_stories_alone_and_among_others(invariant: bool) -> None:
    assert all(speaks_as_expected(Groups(), 0, 1, 1, invariant) or [False])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_stories_at_other_layouts(pool: Pool, tp: int, pp: int) -> None:
    stories()  # a rank cannot skip
    first, *rest = pool.run(speaks_as_expected, tp, pp, False, world=tp * pp)
    assert first and all(first) and rest == [None] * (tp * pp - 1)


def counted_sums(groups: Groups, rank: int) -> tuple[int, int]:
    """Sums over tensor ranks that the given one made, and embeddings and branches that this rank computed; the text is
    as expected."""
    sums, steps, whole = [0], list[Step](), Worker.launch

    def exchange_over(axis: Axis, device: torch.device, dtype: torch.dtype) -> RankExchange:
        assert (axis.name, axis.size, device, dtype) == ("tp", 2, CPU, torch.float32)

        def summed(x: torch.Tensor, into: torch.Tensor | None = None) -> None:
            sums[0] += 1
            all_reduce(x, axis)

        return RankExchange(summed, lambda x: all_gather(x[None], axis))

    def launch(own: Worker, step: Step) -> Launched:
        steps.append(step)
        return whole(own, step)

    with (
        mock.patch("mega.core.inference.worker.exchange_over", exchange_over),
        mock.patch.object(Worker, "launch", launch),
    ):
        assert all(speaks_as_expected(groups, rank, 2, 1, False) or [True])
    return sums[0], (1 + 2 * (open_model(stories()).model.layers or 0)) * len(steps)


def test_every_branch_is_added_up_by_the_given_sum(pool: Pool) -> None:
    stories()
    for sums, branches in pool.run(counted_sums, world=2):
        assert sums == branches > 0


class HalfRecorded:
    """In a graph's place; fails on the last of two ranks while it is recorded, or gives other logits there."""

    def __init__(self, fails: str, rank: int):
        self.fails, self.last, self.played = fails, rank == 1, 0

    def compute(self, *_: Any) -> torch.Tensor:
        return torch.ones(1, 4)

    def record(self, record: Any) -> None:
        if self.fails == "record" and self.last:
            raise RuntimeError("out of memory")

    def play(self, *_: Any) -> torch.Tensor:
        self.played += 1
        return torch.full((1, 4), 2.0 if self.fails == "play" and self.last else 1.0)


def recorded_by_both(groups: Groups, rank: int, fails: str) -> tuple[bool, int]:
    """Whether this rank continues with graphs, and how often it played one."""
    agree = partial(first_problem, axis=Mesh(rank, tp=2, groups=groups).tp, device=CPU)
    decode: Any = None
    graphs = StepGraphs(decode, decode, 1, torch.zeros(1), agree=agree)
    made, step, shape = HalfRecorded(fails, rank), scratch_step([1], 4, 100), GraphShape("single", 1)
    with (
        mock.patch("mega.core.inference.graphs._Graph", lambda *_: made),
        mock.patch.object(StepGraphs, "_parts", lambda *_: None),
    ):
        assert graphs(step, None, shape).tolist() == [[1.0] * 4]
    return graphs.shape_of(step) == shape, made.played


@pytest.mark.parametrize(("fails", "expected"), [("", (True, 1)), ("record", (False, 0)), ("play", (False, 1))])
def test_tensor_ranks_play_a_graph_together_or_none_does(pool: Pool, fails: str, expected: tuple[bool, int]) -> None:
    assert pool.run(recorded_by_both, fails, world=2) == [expected] * 2


def draws_of(groups: Groups, rank: int, tp: int, pp: int) -> list[list[int]] | None:
    mesh, options = Mesh(rank, tp=tp, pp=pp, groups=groups), EngineOptions(cache_tokens=4096, prefill_chunk=9)
    engine = start_engine(open_model(stories()), mesh, Device.choose("cpu"), options)
    if engine is None:
        return None
    how = Sampling(seed=11, temperature=1.2, top_p=0.9, top_p_decay=0.97, min_p=0.01, repetition_penalty=1.3)
    how = replace(how, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias=((5, 1.5), (9, -100.0)))
    asked = [Request(prompt=prompt, tokens=30, sampling=how) for prompt in prompts(3, 512)]
    said = [tokens(events) for events in answers(engine, asked)]
    engine.close()
    return said


def test_a_seed_gives_the_same_text_at_any_layout(pool: Pool) -> None:
    alone = draws_of(Groups(), 0, 1, 1)
    assert pool.run(draws_of, 2, 2, world=4)[0] == alone
    assert alone is not None and len({tuple(ids) for ids in alone}) == 3


def test_stages_are_even() -> None:
    assert even_layers(7, 3) == (3, 2, 2)


def test_prefixes_are_computed_once() -> None:
    engine, long = engine_of(made(LLAMA), chunk=64, tile=8), tuple(range(40))
    steps = counted(engine._worker)
    first, second = (Request(prompt=(*long, end), tokens=1, sampling=GREEDY, logprobs=0) for end in (50, 51))
    together = answers(engine, [first, second, first])
    assert [len(step.tokens) for step in steps] == [
        41 + 1 + 1
    ]  # the others share ten full blocks with the first, which is in the same step
    steps.clear()
    assert answers(engine, [second])[0][0].logprob == together[1][0].logprob
    assert [len(step.tokens) for step in steps] == [1]
    assert tokens(together[0]) == tokens(together[2])


def test_what_does_not_fit_waits_and_what_never_fits_is_refused() -> None:
    engine = engine_of(made(LLAMA), cache=64, requests=3)
    asked = [Request(prompt=prompt, tokens=20, sampling=GREEDY) for prompt in prompts(9)]
    alone = [tokens(answers(engine_of(made(LLAMA)), [request])[0]) for request in asked]
    assert [tokens(events) for events in answers(engine, asked)] == alone
    for bad, field in [
        (Request(prompt=(1,), tokens=64), "tokens"),
        (Request(prompt=(1, 61), tokens=1), "prompt"),
        (Request(prompt=(1,), tokens=30, beams=3), "tokens"),
        (Request(prompt=(1,), tokens=3, beams=4), "beams"),
        (Request(prompt=(1,), tokens=3, adapter="x"), "adapter"),
    ]:
        with pytest.raises(RequestError) as caught:
            engine.add(bad)
        assert caught.value.field == field
    assert engine.idle


def test_requests_end_by_stop_cancel_or_failure() -> None:
    engine = engine_of(made(LLAMA))
    (said,) = answers(engine, [Request(prompt=(1, 2), tokens=9, sampling=GREEDY)])
    third = tokens(said)[2]
    first = tokens(said).index(third) + 1
    (stopped,) = answers(engine, [Request(prompt=(1, 2), tokens=9, sampling=GREEDY, stop_ids=frozenset({third}))])
    assert tokens(stopped) == tokens(said)[:first] and stopped[-1].finish == "stop"

    def fails(ids: Sequence[int]) -> torch.Tensor:
        raise KeyError("no rule")

    kept = engine.add(Request(prompt=(1, 2), tokens=9, sampling=GREEDY))
    left = engine.add(Request(prompt=(3, 2), tokens=9, sampling=GREEDY))
    failed = engine.add(Request(prompt=(4, 2), tokens=9, sampling=GREEDY, allowed=lambda ids: torch.zeros(61)))
    late = engine.add(Request(prompt=(4, 2, 9, 8), tokens=9, sampling=GREEDY, allowed=fails))
    events = engine.step()
    engine.cancel(left)
    engine.cancel(left)
    engine.cancel(12345)
    while not engine.idle:
        events += engine.step()
    ends = {event.request: (event.finish, event.message) for event in events if event.finish}
    assert ends == {
        kept: ("length", ""),
        left: ("cancelled", ""),
        failed: ("failed", "allowed: no token may follow"),
        late: ("failed", "'no rule'"),
    }
    assert tokens([event for event in events if event.request == kept]) == tokens(said)
    assert engine._scheduler.blocks.available == engine._scheduler.blocks.count - 1


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    asked = [Request(prompt=prompt, tokens=0, logprobs=1, prompt_logprobs=True) for prompt in ((5,), (5, 6))]
    (one,), (two,) = answers(engine_of(made(LLAMA)), asked)
    assert (one.finish, one.prompt_logprobs, one.prompt_top) == ("length", (None,), ((),))
    assert two.finish == "length" and two.prompt_logprobs is not None and len(two.prompt_logprobs) == 2


def test_a_rank_reports_its_own_error_and_the_loss_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega.core.inference.relay.ENDING", 0.0)
    relay = object.__new__(Relay)
    relay.axis = Axis("relay", (0,), 0)
    relay.processes = [[socket.gethostname(), os.getpid()]]
    own = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    assert relay.explained(own) is own
    found = relay.explained(RuntimeError("[pair.cc:534] Connection closed by peer"))
    assert isinstance(found, LostRank) and str(found).startswith("another rank has ended or cannot be reached")


def test_only_what_is_allowed_follows() -> None:
    engine = engine_of(made(LLAMA))
    for how, beams in ((GREEDY, 0), (Sampling(seed=3), 0), (GREEDY, 3)):
        request = Request(prompt=(2,), tokens=15, allowed=odd_after_even, sampling=how, beams=beams)
        (events,) = answers(engine, [request])
        said = list(events[-1].beams[0].ids) if events[-1].beams else tokens(events)
        assert [token % 2 for token in said] == [1, 0] * 7 + [1]


def test_what_a_request_names_is_forced_or_banned() -> None:
    """Beside a request that names nothing, and again after it."""
    engine = engine_of(made(FAMILIES["gpt"]))
    plain = Request(prompt=(1, 2, 3), tokens=6, sampling=GREEDY)
    free = tokens(answers(engine, [plain])[0])
    banned = replace(GREEDY, logit_bias=tuple((token, -100.0) for token in sorted(set(free))))
    forced = replace(GREEDY, logit_bias=((7, 100.0),))
    once = replace(forced, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((7, 1.0),))
    asked = [replace(plain, sampling=how) for how in (banned, forced, once, GREEDY)]
    for _ in range(2):
        without, sevens, _, again = (tokens(each) for each in answers(engine, asked))
        assert not set(without) & set(free) and sevens == [7] * 6 and again == free


def test_the_penalty_is_that_of_others() -> None:
    transformers = pytest.importorskip("transformers")
    stage, prompt = made(LLAMA), [5, 9, 9, 33]
    said: list[int] = []
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    for _ in range(20):
        ids = torch.tensor([[*prompt, *said]])
        said.append(int(processor(ids, logits(stage, ids)[:, -1]).argmax()))
    how = Sampling(temperature=0.0, repetition_penalty=1.7)
    asked = [Request(prompt=tuple(prompt), tokens=20, sampling=how)] * 2
    first = answers(engine_of(stage), [asked[0], Request(prompt=(1,), tokens=8, sampling=GREEDY)])[0]
    again = answers(engine_of(stage, chunk=1), asked)[1]
    assert tokens(first) == tokens(again) == said


@pytest.mark.parametrize(("width", "penalty", "stop"), [(1, 1.0, None), (4, 1.0, 2), (3, 0.2, 426), (4, 2.5, 426)])
def test_beam_scores_are_those_of_transformers(width: int, penalty: float, stop: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories(), dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    prompt = (1, 403, 407, 261, 378)
    found = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=24,
        length_penalty=penalty,
        eos_token_id=stop,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    engine = start_engine(open_model(stories()), Mesh.at(0), Device.choose("cpu"), EngineOptions(cache_tokens=4096))
    stop_ids = frozenset() if stop is None else frozenset({stop})
    request = Request(prompt=prompt, tokens=24, beams=width, length_penalty=penalty, stop_ids=stop_ids)
    ours = answers(engine, [*mixed(), request])[-1][-1].beams
    for beam, row in zip(ours, found.sequences, strict=True):
        ids, padding = row[len(prompt) :].split([len(beam.ids), len(row) - len(prompt) - len(beam.ids)])
        assert beam.ids == tuple(ids.tolist()) and set(padding.tolist()) <= {0, stop}
    if width > 1:
        assert [beam.score for beam in ours] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


def test_one_answer_does_not_depend_on_the_others() -> None:
    """Bit for bit under tiles; the long form of it is tests/battery/engine.py."""
    check_canaries(made(LLAMA), requests=60, seed=1)


def odd_after_even(ids: Sequence[int]) -> torch.Tensor:
    return torch.arange(61) % 2 != ids[-1] % 2


@pytest.mark.parametrize("seed", range(3))
def test_looking_ahead_changes_nothing(seed: int) -> None:
    """Steps that are made before the results of the one before are there give the same answers, and lose no block:
    among them answers that end by a stop id, are cancelled, constrained, scored, penalised or searched by beams."""
    stage = made(LLAMA)
    draw = random.Random(seed)
    asked = []
    for number in range(40):
        prompt = (*draw.choice([(), tuple(range(9))]), *(draw.randrange(61) for _ in range(draw.randrange(1, 12))))
        request = Request(
            prompt=prompt,
            tokens=draw.randrange(15),
            sampling=draw.choice([GREEDY, Sampling(seed=number), Sampling(seed=number, repetition_penalty=1.5)]),
            stop_ids=frozenset(draw.sample(range(61), draw.choice([0, 6]))),
            logprobs=draw.choice([None, None, 1]),
            prompt_logprobs=draw.random() < 0.2,
        )
        if request.tokens and draw.random() < 0.3:
            request = replace(request, **draw.choice([{"beams": 3}, {"allowed": odd_after_even}]))
        asked.append(request)
    engine, plain = (
        engine_of(stage, requests=9, cache=400, ahead=seed + 1, groups=1 + seed % 2),
        engine_of(stage, requests=9, cache=400),
    )
    launched = counted(engine._worker)
    for request, found, expected in zip(asked, answers(engine, asked), answers(plain, asked), strict=True):
        assert tokens(found) == tokens(expected) and found[-1].finish == expected[-1].finish, request
        assert [beam.ids for beam in found[-1].beams] == [beam.ids for beam in expected[-1].beams]
        for one, other in zip(found, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            theirs = other.prompt_logprobs and [*other.prompt_logprobs[1:]]
            assert (one.prompt_logprobs and [*one.prompt_logprobs[1:]]) == pytest.approx(theirs, abs=2e-5)
    assert any((step.tokens < 0).any() for step in launched)
    check_canaries(stage, requests=30, seed=seed, ahead=seed + 1, groups=1 + seed % 2)


def counted(worker: Any) -> list[Step]:
    """The steps that a worker is given from here on."""
    steps: list[Step] = []
    launch = worker.launch

    def kept(step: Step) -> Launched:
        steps.append(step)
        return launch(step)  # type: ignore[no-any-return]

    worker.launch = kept
    return steps


def test_a_step_too_many_is_dropped_and_its_blocks_can_be_found() -> None:
    """After a stop id the step that was made meanwhile is not waited for; a full block of the answer is kept."""
    stage = made(LLAMA)
    (said,) = answers(engine_of(stage), [Request(prompt=(1, 2), tokens=9, sampling=GREEDY)])
    end = tokens(said)[5]
    engine = engine_of(stage, ahead=1)
    steps = counted(engine._worker)
    request = Request(prompt=(1, 2), tokens=9, sampling=GREEDY, stop_ids=frozenset({end}))
    (found,) = answers(engine, [request])
    new = tokens(said).index(end) + 1
    assert tokens(found) == tokens(said)[:new] and len(steps) == new + 1
    more = Request(prompt=(1, 2, *tokens(found), 7), tokens=1, sampling=GREEDY)
    answers(engine, [more])
    assert len(steps[-1].tokens) == 2 + new + 1 - (2 + new) // 4 * 4


def check_canaries(stage: Any, requests: int, seed: int, ahead: int = 0, groups: int = 1) -> None:
    """Requests that join and leave at random, some cancelled: each answer is what it is alone, to the last bit (ahead:
    but for the last bits of log-probabilities, which are not compared then)."""
    draw = random.Random(seed)
    vocab = stage.model.vocab
    asked = []
    for number in range(requests):
        start = draw.choice([(), tuple(range(9)), tuple(range(20))])
        prompt = (*start, *(draw.randrange(vocab) for _ in range(draw.randrange(1, 12))))
        how = draw.choice([GREEDY, Sampling(seed=number), Sampling(seed=number, top_k=5, repetition_penalty=1.5)])
        beams, scores = draw.choice([0, 0, 0, 3]), None if ahead else 1
        asked.append(Request(prompt=prompt, tokens=draw.randrange(1, 14), sampling=how, beams=beams, logprobs=scores))
    alone_engine = engine_of(stage, tile=0 if ahead else 8)
    alone = [answers(alone_engine, [request])[0] for request in asked]
    engine = engine_of(stage, tile=0 if ahead else 8, cache=400, requests=9, ahead=ahead, groups=groups)
    numbers: dict[int, int] = {}
    found: dict[int, list[Event]] = {}
    cancelled, left = set(), list(range(requests))
    while left or not engine.idle:
        for _ in range(min(len(left), draw.randrange(4))):
            which = left.pop(0)
            numbers[engine.add(asked[which])] = which
        if numbers and draw.random() < 0.1:
            number = draw.choice(list(numbers))
            engine.cancel(number)
            cancelled.add(number)
        for event in engine.step():
            found.setdefault(event.request, []).append(event)
    for number, which in numbers.items():
        got, expected = (
            [
                event._replace(request=0, beams=tuple(beam.ids for beam in event.beams) if ahead else event.beams)
                for event in events
            ]
            for events in (found[number], alone[which])
        )
        if got[-1].finish == "cancelled":
            assert number in cancelled and got[:-1] == expected[: len(got) - 1]
        else:
            assert got == expected, which


class Wrong:
    """Guesses of a text that is known, some of them wrong."""

    eager = True

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float = 0.2):
        self.texts, self.wrong, self.draw, self.freed = texts, wrong, random.Random(7), set[int]()

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        return [self._after(each.ids, len(each.numbers)) for each in asked]

    def _after(self, ids: Sequence[int], count: int) -> list[int]:
        text = next(text for text in self.texts if list(text[: len(ids)]) == list(ids))
        right = list(text[len(ids) : len(ids) + count])
        return [token if self.draw.random() > self.wrong else (token + 1) % 61 for token in right]

    def free(self, number: int) -> None:
        self.freed.add(number)

    def close(self) -> None:
        pass


def guessing_requests(count: int) -> list[Request]:
    draw = random.Random(5)
    asked = []
    for number, prompt in enumerate(prompts(count)):
        how = draw.choice([GREEDY, Sampling(seed=number), Sampling(seed=number, top_p=0.9, top_p_decay=0.9)])
        stop_ids = frozenset(draw.sample(range(61), draw.choice([0, 5])))
        logprobs = draw.choice([None, 1])
        asked.append(
            Request(
                prompt=prompt[:20], tokens=draw.randrange(1, 40), sampling=how, stop_ids=stop_ids, logprobs=logprobs
            )
        )
    return asked


@pytest.mark.parametrize(("ahead", "groups"), [(0, 1), (1, 1), (2, 2)])
def test_guesses_change_nothing(ahead: int, groups: int) -> None:
    """Right and wrong guesses, of requests that join and leave next to others that are not guessed: the same tokens,
    drawn or greedy, fewer steps, and no block is lost."""
    stage, asked = made(LLAMA), guessing_requests(24)
    plain = engine_of(stage, requests=6)
    steps = counted(plain._worker)
    expected = answers(plain, asked)
    texts = [[*request.prompt, *tokens(events)] for request, events in zip(asked, expected, strict=True)]
    drafter = Wrong(texts)
    engine = engine_of(stage, requests=6, ahead=ahead, groups=groups, drafter=drafter)
    fewer = counted(engine._worker)
    mixed_in = [
        *asked,
        Request(prompt=(3, 4), tokens=6, beams=3),
        Request(prompt=(5,), tokens=9, allowed=odd_after_even),
    ]
    for found, wanted in zip(answers(engine, mixed_in), expected, strict=False):
        assert tokens(found) == tokens(wanted) and found[-1].finish == wanted[-1].finish
        logprobs = [event.logprob for event in wanted]
        assert [event.logprob for event in found] == pytest.approx(logprobs, abs=2e-5)
    assert len(drafter.freed) >= 24 and (groups > 1 or len(fewer) < len(steps))
    again = answers(engine, asked[:3])  # prefixes that are found hold no key of a wrong guess
    assert [tokens(events) for events in again] == [tokens(events) for events in expected[:3]]


def test_text_that_repeats_itself_is_guessed_by_its_own_words() -> None:
    stage = made(LLAMA)
    request = Request(prompt=tuple(range(9)), tokens=45, sampling=GREEDY)
    plain = engine_of(stage)
    steps = counted(plain._worker)
    (expected,) = answers(plain, [request])
    engine = engine_of(stage, ahead=1, drafter=NGrams())
    fewer = counted(engine._worker)
    (found,) = answers(engine, [request])
    assert tokens(found) == tokens(expected) and len(fewer) <= len(steps) + 1


@pytest.mark.parametrize("small", ["itself", "another"])
def test_a_draft_model_changes_nothing(small: str) -> None:
    """Where it is the model itself, every guess is right, drawn ones too: a step has up to 16 tokens."""
    stage = made(LLAMA)
    other = stage if small == "itself" else made(replace(LLAMA, layers=1))
    asked = [replace(request, stop_ids=frozenset()) for request in guessing_requests(9)]
    expected = answers(engine_of(stage), asked)
    worker = Worker(other, Mesh.at(0), CPU, blocks=200, block=4, requests=16, tile=None)
    blocks = Blocks(200, 4)
    drafter = ModelDrafts(worker, blocks, chunk=7)
    engine = engine_of(stage, drafter=drafter, ahead=1)
    steps = counted(engine._worker)
    for found, wanted in zip(answers(engine, asked), expected, strict=True):
        assert tokens(found) == tokens(wanted)
    assert blocks.available == blocks.count - 1, "the draft model's blocks are lost"
    if small == "itself":
        assert len(steps) < 25, "most guesses are right"
    assert any(len(step.tokens) > len(step.counts) for step in steps)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_drafter_whose_guesses_are_wrong_is_rarely_asked(ahead: int) -> None:
    """Twice at first, then after 16, 64 ... tokens: its guesses cost time."""
    stage = made(LLAMA)
    (request,) = [Request(prompt=(1, 2, 3), tokens=60, sampling=GREEDY)]
    (expected,) = answers(engine_of(stage), [request])
    drafter = Wrong([[*request.prompt, *tokens(expected)]], wrong=1.0)
    with mock.patch.object(drafter, "propose", wraps=drafter.propose) as propose:
        (found,) = answers(engine_of(stage, ahead=ahead, drafter=drafter), [request])
    assert tokens(found) == tokens(expected) and propose.call_count == 3


def test_a_draft_model_without_finite_logits_guesses_nothing() -> None:
    stage, other = made(LLAMA), made(replace(LLAMA, layers=1))
    with torch.no_grad():
        other.head.weight.fill_(float("nan"))
    asked = guessing_requests(6)
    expected = answers(engine_of(stage), asked)
    worker = Worker(other, Mesh.at(0), CPU, blocks=200, block=4, requests=16, tile=None)
    engine = engine_of(stage, drafter=ModelDrafts(worker, Blocks(200, 4), chunk=7), ahead=1)
    steps = counted(engine._worker)
    for found, wanted in zip(answers(engine, asked), expected, strict=True):
        assert tokens(found) == tokens(wanted)
    first = [len(request.prompt) for request in asked]
    guessed = sum(int((step.counts > 1).sum()) for step in steps)
    assert guessed <= sum(-(-length // 7) for length in first), "only prompts are runs of several tokens"


def test_drawn_tokens_have_their_distribution() -> None:
    """Pearson's statistic of 50,000 draws over 12 ids: below its 99.9th percentile. Guesses change no draw: above."""
    how = Sampling(temperature=1.3, top_k=12)
    generator = torch.Generator().manual_seed(1)
    logits_of = torch.randn(61, generator=generator) * 2
    expected = probabilities(logits_of, how)
    draws = torch.tensor([uniform(seed, 3) for seed in range(50_000)], dtype=torch.float64)[:, None]
    ids = draw(expected.expand(50_000, -1), draws)
    counts = torch.bincount(ids, minlength=61).double()
    mass = expected.double() * 50_000
    there = mass > 0
    assert not counts[~there].any()
    assert float(((counts - mass)[there] ** 2 / mass[there]).sum()) < 31.3  # 11 degrees of freedom
