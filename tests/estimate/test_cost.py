"""The operations of a chunk as recorded, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import stage_chunks
from mega.core.estimate.cost import (
    AttentionWork,
    Card,
    ChunkOperations,
    CollectiveBegin,
    ElementwiseWork,
    Gemm,
    Operation,
    Received,
    Send,
    Wait,
    chunk_pass,
    play_unit,
)
from mega.core.estimate.curves import Curve
from mega.core.estimate.hardware import hardware
from mega.core.estimate.operations import operations, rough_operations
from mega.core.flops import model_flops_per_token
from mega.core.parallel.pieces import together

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "dtype": "bf16", "device": "cuda"}
SMALL = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 8192, "seq_length": 1024, "micro_batch": 2}


def run_of(world: int = 1, preset: str | None = None, **flags: Any) -> RunConfig:
    typed = {**QUIET, **({} if preset else {**SMALL, "global_batch": 2 * world}), **flags}
    return resolve(compose(preset, flags=typed), world)


def listed(run: RunConfig, stage: int = 0) -> ChunkOperations:
    return operations(run, stage_chunks(run)[stage][0])


def every(found: ChunkOperations) -> Iterator[Operation]:
    for units in found[:3]:
        for unit in units:
            yield from unit


def flops(found: ChunkOperations) -> float:
    """Of matmuls and attention, where the whole square counts."""
    total = 0.0
    for one in every(found):
        if isinstance(one, Gemm):
            total += 2.0 * one.times * one.m * one.k * one.n
        elif isinstance(one, AttentionWork):
            total += (8.0 if one.backward else 4.0) * one.rows * one.queries * one.keys * one.width
    return total


def test_a_block_is_its_matmuls_attention_and_passes() -> None:
    """Of a GPT: twelve matmuls, in the layout of each, attention twice, one pass for each norm and activation."""
    found = listed(run_of())
    for unit in (1, 2, 3):
        block = [*found.forward[unit], *found.backward[unit]]
        layouts = Counter(one.layout for one in block if isinstance(one, Gemm))
        assert layouts == {"forward": 4, "dgrad": 4, "wgrad": 4}
        assert {(one.m, one.k, one.n) for one in block if isinstance(one, Gemm)} == {
            (2048, 1024, 3072), (2048, 1024, 1024), (2048, 1024, 4096), (2048, 4096, 1024),
        }  # fmt: skip
        attention = [one for one in block if isinstance(one, AttentionWork)]
        assert [(one.kernel, one.backward, one.rows) for one in attention] == [
            ("cudnn causal", False, 32),
            ("cudnn causal", True, 32),
        ]
        kernels = Counter(one.kernel for one in block if isinstance(one, ElementwiseWork))
        assert kernels["_norm_forward"] == kernels["_norm_backward"] == 2
        assert kernels["activation in a GEMM"] == kernels["slope of an activation"] == kernels["_gather"] == 1


@pytest.mark.parametrize("preset", ["bert-345m", "gpt2-345m"])
def test_gradients_of_heads_that_our_attention_writes_are_not_copied(preset: str) -> None:
    """Only the gradient of the bias is left to sum: one pass over d(q), d(k), d(v), to one partial sum in 256 rows."""
    run = run_of(1, preset, micro_batch=2, global_batch=2, attention_dropout=0.1)
    passes = [one for one in listed(run).backward[2] if isinstance(one, ElementwiseWork)]
    kernels = Counter(one.kernel for one in passes)
    assert kernels["_column_sums"] == 2 and not kernels["_gather"]  # also of the MLP's first bias
    tokens, columns = 2 * run.batch.seq_length, 3 * 1024
    moved = tokens * columns * 2 + tokens // 256 * columns * 4
    assert moved in [one.moved for one in passes if one.kernel == "_column_sums"]


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("gpt2-345m", {}),
        ("gpt2-345m", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ("llama2-7b", {"layers": 4}),
        ("bert-345m", {}),
        ("t5-220m", {}),
    ],
    ids=str,
)
def test_heard_operations_are_the_models(preset: str, flags: dict[str, Any]) -> None:
    """Matmuls and attention by the kernels of a GPU, within 0.5 % of what the log's TFLOP/s count."""
    run = run_of(1, preset, micro_batch=2, global_batch=2, **flags)
    lengths = [run.batch.seq_length, *([run.masking.decoder_seq_length] if run.model.decoder_layers else [])]
    assert flops(listed(run)) == pytest.approx(2 * sum(filter(None, lengths)) * model_flops_per_token(run), rel=5e-3)


def test_deferred_weight_gradients_are_listed_apart() -> None:
    whole, split = (listed(run_of(2, pp=2, schedule=schedule, layers=8)) for schedule in ("1f1b", "zb-h1"))
    assert flops(whole) == flops(split) and not any(whole.weight)
    late = [one for unit in split.weight for one in unit]
    assert {one.layout for one in late if isinstance(one, Gemm)} == {"wgrad"}
    assert not any(isinstance(one, Gemm) and one.layout == "wgrad" for unit in split.backward for one in unit)
    assert split.cargo == 2 * 1024 * 1024 * 2


def test_tensor_ranks_exchange_what_a_layer_says() -> None:
    """Under sequence parallelism a block gathers twice and scatters twice forward; every exchange is waited for."""
    found = listed(run_of(2, tp=2, sequence_parallel=True))
    begun = [one for one in found.forward[2] if isinstance(one, CollectiveBegin)]
    assert [one.kind for one in begun] == ["all-gather", "reduce-scatter"] * 2
    assert {(one.size, one.ranks, one.stride) for one in begun} == {(2 * 1024 * 1024 * 2, 2, 1)}
    everything = list(every(found))
    numbers = [one.number for one in everything if isinstance(one, CollectiveBegin)]
    assert sorted(numbers) == sorted(one.number for one in everything if isinstance(one, Wait))


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("seq", [512, 2048, 8192])
def test_overlapped_exchanges_are_sent_and_arrive(tp: int, seq: int) -> None:
    """A matmul along with an exchange is cut into pieces, fewer where a block is short."""
    flags = {"tp": tp, "sequence_parallel": True, "tp_overlap": True, "seq_length": seq}
    pieces = tp // together(tp, 2 * seq // tp)
    found = listed(run_of(tp, **flags))
    block = found.forward[2]
    assert sum(isinstance(one, Gemm) for one in block) == 4 * pieces
    sent = sum(one.blocks for one in block if isinstance(one, Send))
    assert sent == sum(one.blocks for one in block if isinstance(one, Received)) == 4 * (tp - 1)


@pytest.mark.parametrize("flags", [{}, {"recompute": "selective"}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_larger_microbatches_grow_evenly(flags: dict[str, Any]) -> None:
    world = flags.get("tp", 1)
    run = run_of(world, micro_batch=8, global_batch=8, **flags)
    chunk, on = stage_chunks(run)[0][0], hardware("h100")
    rough, exact = (chunk_pass(found(run, chunk), on, recorded=True) for found in (rough_operations, operations))
    assert rough.all == pytest.approx(exact.all, rel=2e-3)


def test_a_curve_runs_through_its_points() -> None:
    points = [((64.0,), 64.0, 1.0), ((128.0,), 128.0, 1.5), ((1024.0,), 1024.0, 8.0)]
    curve = Curve(points, 0.1)
    for place, work, seconds in points:
        assert curve.seconds(place, work) == pytest.approx(seconds, rel=1e-3)
    assert 1.5 < curve.seconds((256.0,), 256.0) < 8.0
    # Another card of half the speed is as busy with half of it; what is not work takes as long.
    assert curve.seconds((64.0,), 64.0, 0.5) == pytest.approx(0.1 + 2 * (1.5 - 0.1) / 2, rel=1e-3)


def test_a_collective_hides_behind_what_it_does_not_wait_for() -> None:
    on = hardware("h200")
    gather = CollectiveBegin(1, "all-gather", 1 << 28, 2, 1)
    gemm = Gemm(8192, 8192, 8192, "forward", "bf16", 0)
    exchange, product = Card(on).collective("all-gather", 1 << 28, 2, 1), Card(on).seconds(gemm)
    assert play_unit((gather, Wait(1), gemm), on).seconds == pytest.approx(exchange + product)
    along = play_unit((gather, gemm, Wait(1)), on).seconds
    assert max(exchange, product) < along < exchange + product
    assert play_unit((gather, gemm, Wait(1)), on)[1:] == (1, 1)


def test_copies_arrive_one_after_the_other() -> None:
    on = hardware("h200")
    each = 1e8 / (on.inside * 1e9)
    send, first, second = Send(1, 100_000_000, 2), Received(1, 1), Received(1, 1)
    assert play_unit((send, first), on).seconds == pytest.approx(each)
    assert play_unit((send, first, second), on).seconds == pytest.approx(2 * each)


def test_a_host_is_late_unless_a_graph_was_recorded() -> None:
    found, on = listed(run_of(micro_batch=1, global_batch=1)), hardware("h200")
    eager, graph = (chunk_pass(found, on, recorded=recorded) for recorded in (False, True))
    assert eager.all > 2 * graph.all
    assert eager.forward / eager.backward == pytest.approx(graph.forward / graph.backward)
