"""Buckets: who reduces with whom, what is counted, what is owned, and what is never forgotten in silence."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from mega.core.batch import DecoderBatch
from mega.core.config.run import updated
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.bucket_sums import square_sum
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.proof.parity import synthetic_batch
from mega.core.training.wire import build_grads, build_stages
from tests.support.ranks import CPU
from tests.support.runs import small_run


def built(model: str = "gpt", rank: int = 0, *, zero: int = 0, overlap: bool = True, **sizes: Any) -> GradBuffer:
    """The buffer of one rank, without processes."""
    mesh = Mesh.at(rank, **{axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp")})
    layout = {name: value for name, value in sizes.items() if name != "dp"}
    run = small_run(model, mesh.world, **layout)
    run = updated(run, {"zero": zero, "bucket_size": 3000, "overlap_grad_reduce": overlap, "grad_dtype": "fp64"})
    return build_grads(run, mesh, build_stages(run, mesh, CPU))


def loss_of(stage: DecoderStage, batch: DecoderBatch) -> torch.Tensor:
    return stage(batch).terms["lm"].total


def one_stage(**options: Any) -> tuple[DecoderStage, GradBuffer, DecoderBatch]:
    run = small_run(layers=2)
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    buffer = GradBuffer([stage], Mesh.at(0), dtype=torch.float64, bucket_size=3000, **options)
    return stage, buffer, synthetic_batch(run, torch.arange(2))


def test_weights_live_in_their_buckets() -> None:
    """Every weight is a view of one bucket, at an aligned place, and no two overlap."""
    buffer = built(tp=2)
    for bucket in buffer.buckets:
        assert len(bucket.weights) == len(bucket.grads)
        free = 0
        for weight, begin, end in bucket.offsets:
            assert begin >= free and begin % 64 == 0 and end - begin == weight.numel()
            assert weight.data_ptr() == bucket.weights[begin:].data_ptr()
            assert weight.main_grad is not None and weight.main_grad.data_ptr() == bucket.grads[begin:].data_ptr()
            free = end


def test_decayed_weights_come_first() -> None:
    """Matrices decay; biases, norms and nothing else do not."""
    for bucket in built(tp=2, sequence_parallel=True).buckets:
        for weight, begin, end in bucket.offsets:
            matrix = weight.dim() == 2
            assert (end <= bucket.decay_end) if matrix else (begin >= bucket.decay_end)


def kind(bucket: Bucket) -> str:
    """What the gradients of a bucket need, in a word."""
    reduction = bucket.reduction
    if reduction.stages:
        return "tied"
    return "partial" if reduction.partial else "whole" if reduction.replicated else "cut"


def kinds(buffer: GradBuffer) -> dict[str, str]:
    return {
        segment.shard.name.removeprefix("model."): kind(bucket)
        for bucket in buffer.buckets
        for weight, _, _ in bucket.offsets
        for segment in weight.segments
    }


def test_what_is_partial() -> None:
    """Norms and row biases under sequence parallelism, norms of heads under any tensor parallelism."""
    plain, sequence = kinds(built("gpt-odd", tp=2)), kinds(built("gpt-odd", tp=2, sequence_parallel=True))
    for name in ("layers.0.input_layernorm.weight", "layers.0.self_attn.o_proj.bias", "norm.bias"):
        assert (plain[name], sequence[name]) == ("whole", "partial")
    for name in ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.bias"):
        assert (plain[name], sequence[name]) == ("partial", "partial")
    for name in ("layers.0.self_attn.q_proj.bias", "layers.0.mlp.down_proj.weight", "embed_tokens.weight"):
        assert (plain[name], sequence[name]) == ("cut", "cut")


def test_tied_weights_have_a_bucket_of_their_own() -> None:
    """The same length on both ends; counted on the first only; one weight used twice on a single stage."""
    first, last = built(rank=0, pp=2), built(rank=1, pp=2)
    (ours,) = [bucket for bucket in first.buckets if kind(bucket) == "tied"]
    (theirs,) = [bucket for bucket in last.buckets if kind(bucket) == "tied"]
    assert len(ours.grads) == len(theirs.grads) and len(ours.offsets) == len(theirs.offsets) == 1
    assert (ours.counted, theirs.counted) == (True, False)
    assert [axis.ranks for axis in ours.axes] == [(0, 1)]
    alone = built()
    assert "tied" not in kinds(alone).values()
    assert sum(bucket.uses - len(bucket.offsets) for bucket in alone.buckets) == 1


@pytest.mark.parametrize("model", ["gpt", "llama", "gpt-odd"])
def test_every_element_is_counted_once(model: str) -> None:
    """Over all ranks of one replica, counted buckets hold each logical tensor exactly once."""
    counted: dict[str, int] = {}
    whole: dict[str, int] = {}
    for rank in range(4):
        for bucket in built(model, rank, tp=2, pp=2, sequence_parallel=True).buckets:
            for segment in (segment for weight, _, _ in bucket.offsets for segment in weight.segments):
                whole[segment.shard.name] = torch.Size(segment.shard.whole).numel()
                mine = torch.Size(segment.shard.size).numel() if bucket.counted else 0
                counted[segment.shard.name] = counted.get(segment.shard.name, 0) + mine
    assert counted == whole


def test_spans_tile_every_bucket() -> None:
    """ZeRO 1: equal, aligned, in order, without gap or overlap."""
    ranks = [built(rank=rank, dp=4, zero=1) for rank in range(4)]
    for buckets in zip(*(rank.buckets for rank in ranks), strict=True):
        spans = [bucket.span for bucket in buckets]
        assert spans[0][0] == 0 and spans[-1][1] == len(buckets[0].weights)
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert len({end - begin for begin, end in spans}) == 1
        assert all(begin % 64 == 0 for begin, _ in spans)
        assert all(len(bucket.own_grads) == bucket.span[1] - bucket.span[0] for bucket in buckets)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_accumulate_like_autograds(overlap: bool) -> None:
    stage, buffer, batch = one_stage(overlap=overlap)
    (alone,) = build_stages(small_run(layers=2), Mesh.at(0), CPU)  # leaves its gradients to autograd
    expected = torch.autograd.grad(loss_of(alone, batch), list(alone.parameters()))
    buffer.start()
    for last in (False, True):
        buffer.final(last)
        loss_of(stage, batch).backward()
    buffer.finish()
    for weight, gradient in zip(weights(stage), expected, strict=True):
        torch.testing.assert_close(weight.main_grad, 2 * gradient, rtol=1e-12, atol=1e-12)
        assert weight.grad is None


def test_a_gradient_that_never_came_is_named() -> None:
    stage, buffer, batch = one_stage()
    buffer.start()
    buffer.final(True)
    stage.head = None  # the second user of the embedding
    stage(batch).cargo[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"1 gradients never arrived: model\.embed_tokens\.weight$"):
        buffer.finish()


def test_a_gradient_too_many_is_an_error() -> None:
    stage, buffer, batch = one_stage()
    buffer.start()
    buffer.final(True)
    loss_of(stage, batch).backward()
    with pytest.raises(AssertionError, match="more gradients than uses"):
        loss_of(stage, batch).backward()


def test_a_new_step_forgets_the_last() -> None:
    stage, buffer, batch = one_stage()
    found = []
    for _ in range(2):
        buffer.start()
        buffer.final(True)
        loss_of(stage, batch).backward()
        buffer.finish()
        found.append(square_sum(buffer))
    assert found[0] == found[1] > 0


def test_every_unit_is_called() -> None:
    """What waits for weights in front of a unit's forward pass is never gone past."""
    run = small_run("llama", micro_batch=2)
    (stage,) = build_stages(run, Mesh(0), CPU)
    assert stage.embedding is not None and stage.head is not None
    calls: Counter[int] = Counter()
    units = [stage.embedding, *stage.layers, stage.head]
    for number, unit in enumerate(units):
        unit.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    loss_of(stage, synthetic_batch(run, torch.arange(2)))
    assert calls == dict.fromkeys(range(len(units)), 1)
