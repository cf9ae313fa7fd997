"""fp8 casts that are shared, by forward and wgrad and by the microbatches of a step, change no bit; and none is old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mega.core.architecture import Cut, Init, Tensor
from mega.core.architecture.adapters import AdapterSpec
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.estimate.memory import memory
from mega.core.ops.autograd import with_recipe
from mega.core.ops.fp8 import Fp8Matmuls, NarrowMatmuls
from mega.core.ops.suite import choose
from mega.core.parallel import weight_casts
from mega.core.parallel.adapter import attach_adapters
from mega.core.parallel.gemms import WeightGemms
from mega.core.parallel.gradients import zero_unwritten
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, Weight, weights
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.state import TrainState
from mega.core.training.step import evaluate_step, train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support.ranks import random
from tests.support.runs import small_run
from tests.training.test_fp8 import BLOCK, OPTIONS

FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": ("gpt", 1, {"hidden_dropout": 0.1}),
    "llama": ("llama", 1, {}),
    "llama, blocks": ("llama", 1, BLOCK),
    "t5": ("t5", 1, {}),
    "selective": ("llama", 1, {"recompute": "selective"}),
    "full": ("llama", 1, FULL),
    "one microbatch": ("llama", 1, {"micro_batch": 4}),
    "adapters": ("llama", 1, {"lora_rank": 4}),
    "adapters, blocks": ("llama", 1, {"lora_rank": 4, **BLOCK}),
    "zero 1": ("llama", 2, {"zero": 1}),
    "zero 3": ("llama", 2, {"zero": 3}),
    "pp 2, zero-bubble": ("llama", 2, {"pp": 2, "schedule": "zb-h1"}),
    "tp 2, sequence": ("gpt", 2, {"tp": 2, "sequence_parallel": True, "kv_heads": 4}),
}


def run_of(model: str, world: int = 1, **values: Any) -> RunConfig:
    return small_run(model, world, **{**OPTIONS, "fp8": True, **values})


def linears(state: TrainState) -> Iterator[ColumnLinear | RowLinear]:
    """The linear layers whose GEMMs are in fp8."""
    for module in (module for stage in state.stages for module in stage.modules()):
        narrow = isinstance(module, ColumnLinear | RowLinear) and isinstance(module.weight.ops.matmuls, NarrowMatmuls)
        if narrow:
            yield module


def built(run: RunConfig, mesh: Mesh | None = None, *, shares: bool = True) -> TrainState:
    """A state; without `shares` one whose GEMMs each cast what they multiply, which saves inputs as they are."""
    state = build_state(run, mesh or Mesh(0), Device.choose("cpu"))
    if not shares:
        state.pipeline.casts = WeightCasts()
        for weight in (linear.weight for linear in linears(state)):
            assert isinstance(weight.ops.matmuls, NarrowMatmuls)
            weight.ops = replace(weight.ops, matmuls=replace(weight.ops.matmuls, saves_narrow=False))
    return state


def assert_same_steps(run: RunConfig, mesh: Mesh) -> None:
    """Steps with an evaluation after each: its weights are newer than the casts of the step."""
    one, other = (built(run, mesh, shares=shares) for shares in (True, False))
    for step in range(3):
        batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 8 * step)]
        a, b = (train_step(state, batches, 3e-3, 0.01) for state in (one, other))
        assert torch.equal(a.loss, b.loss) and torch.equal(a.grad_norm, b.grad_norm)
        for left, right in zip(one.grads.buckets, other.grads.buckets, strict=True):
            assert torch.equal(left.own_grads, right.own_grads) and torch.equal(left.own_weights, right.own_weights)
        assert torch.equal(evaluate_step(one, batches), evaluate_step(other, batches))
        assert all(linear.weight.shared_cast is None for linear in linears(one))
    for state in (one, other):
        state.grads.wait_param_gather()


def _on_a_rank(groups: Groups, rank: int, run: RunConfig) -> None:
    assert_same_steps(run, build_mesh(run, rank, 2, groups))


@pytest.mark.parametrize("name", CASES)
def test_sharing_changes_no_bit(pool: Pool, name: str) -> None:
    """Losses, gradients, weights and validation losses of three steps."""
    model, world, values = CASES[name]
    run = run_of(model, world, **values)
    if world == 1:
        assert_same_steps(run, Mesh(0))
    else:
        pool.run(_on_a_rank, run, world=world)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How often each weight is cast."""
    counts, cast = Counter[int](), Fp8Matmuls.cast_weight

    def cast_weight(self: Fp8Matmuls, weight: torch.Tensor, **options: Any) -> Any:
        counts[id(weight)] += 1
        return cast(self, weight, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Fp8Matmuls, "cast_weight", cast_weight)
        yield counts


@pytest.mark.parametrize(
    ("values", "casts"),
    [
        ({}, 1),
        ({"lora_rank": 4}, 1),
        ({"zero": 2}, 1),
        ({"zero": 3}, 8),  # 4 forward and 4 backward passes
        ({"micro_batch": 4}, 1),
        ({"recompute": "selective"}, 8),
        (FULL, 12),
    ],
    ids=str,
)
def test_a_step_casts_each_weight_once(values: dict[str, Any], casts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it has the memory. Every microbatch of an evaluation casts anew."""
    run = run_of("llama", **values)
    state = built(run)
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)]
    narrow = list(linears(state))
    for _ in range(2):
        with counted(monkeypatch) as counts:
            train_step(state, batches, 3e-3, 0.01)
        assert set(counts.values()) == {casts} and len(counts) == len(narrow) == 4 * 2
        with counted(monkeypatch) as counts:
            evaluate_step(state, batches)
        assert set(counts.values()) == {len(batches)} and len(counts) == len(narrow)


def halved(state: TrainState) -> None:
    """Change weights as kernels and loaded checkpoints do, of which torch's version counters know nothing."""
    for bucket in state.grads.buckets:
        bucket.weights.data.mul_(0.5)


@pytest.mark.parametrize("old", [False, True], ids=["new casts", "casts left from before the update"])
def test_an_update_is_followed_by_a_cast(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the comparison sees a cast that is older than its weight."""
    run = run_of("llama")
    one, other = (built(run, shares=shares) for shares in (True, False))
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, Mesh(0), 0)]
    if old:
        opened = weight_casts._Cast.open

        def reopened(cast: weight_casts._Cast) -> None:
            opened(cast)
            cast._fresh = cast._buffers is not None

        monkeypatch.setattr(weight_casts._Cast, "open", reopened)
    same = []
    for change in (None, None, halved):
        if change is not None:
            change(one), change(other)  # type: ignore[func-returns-value]
        a, b = (train_step(state, batches, 3e-3, 0.01) for state in (one, other))
        same.append(torch.equal(a.loss, b.loss))
    assert same == [True, not old, not old]


def test_a_step_that_fails_leaves_no_cast() -> None:
    state = built(run_of("llama"))
    weight = next(linears(state)).weight
    with pytest.raises(RuntimeError, match="the device is lost"), state.pipeline.casts.shared():
        assert weight.shared_cast is not None
        raise RuntimeError("the device is lost")
    assert weight.shared_cast is None


def test_the_estimate_counts_the_casts() -> None:
    """To the byte, but for the scales: one byte by rows and one by columns, of the base too if adapters are trained."""
    for values in ({}, {"lora_rank": 4}, {"tied": True}):
        run = run_of("llama", **values)
        state = built(run)
        with state.pipeline.casts.shared():
            state.pipeline.casts.renew()
            casts = [linear.weight.shared_cast() for linear in linears(state)]  # type: ignore[misc]
        size = sum(cast.rows.nbytes + cast.columns.nbytes for cast in casts)
        (stage,) = memory(run, 1).stages
        assert stage.held.casts == size > 0
        (alone,) = memory(run_of("llama", **values, recompute="selective"), 1).stages
        assert alone.held.casts == 0 and stage.held.weights - alone.held.weights == size


OUTS, INS, TOKENS = 48, 32, 16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def linear(*, trainable: bool = True, recompute: bool = False) -> ColumnLinear:
    ops = choose(torch.device("cpu"), BF16, fp8="tensor", recompute=recompute)
    factory = ParameterFactory({}, BF16, torch.device("cpu"), ops)
    layer = ColumnLinear(
        factory, [Tensor("q.weight", (OUTS, INS), (0,), Init(), (Cut(0, "tp", OUTS),), trainable=trainable)], [], ALONE
    )
    with torch.no_grad():
        layer.weight.copy_(random(OUTS, INS, seed=1))
    return layer


def saved(layer: ColumnLinear, x: torch.Tensor) -> list[tuple[torch.dtype, int]]:
    """Dtype and size of each tensor that the layer saves for the backward pass."""
    found = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append((tensor.dtype, tensor.numel()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return found


def test_what_a_layer_saves() -> None:
    """The transposed input in fp8 and its scale; but x itself where others need x, and nothing where nothing is
    trained or x is computed again."""
    x, whole = random(TOKENS, INS, seed=0).to(BF16).requires_grad_(), [(BF16, TOKENS * INS)]
    assert saved(linear(), x) == [(E4M3, TOKENS * INS), (torch.float32, 1)]
    assert saved(linear(), with_recipe(x.clone(), lambda: x)) == []
    assert saved(linear(trainable=False), x) == []
    assert saved(linear(recompute=True), x) == whole
    shared = linear()
    shared.gemms = WeightGemms(shared.weight, saves_input=False)
    assert saved(shared, x) == whole
    adapted = linear(trainable=False)
    down, up = (Tensor(name, shape, (0,), Init()) for name, shape in (("A", (4, INS)), ("B", (OUTS, 4))))
    factory = ParameterFactory({}, BF16, torch.device("cpu"), adapted.weight.ops)
    attach_adapters(torch.nn.ModuleList([adapted]), {"q.weight": AdapterSpec(down, up, 1.0, 0.0)}, factory)
    assert saved(adapted, x) == whole
    with torch.no_grad():
        assert saved(linear(), x) == []


def test_a_gradient_without_a_buffer_has_the_weights_dtype() -> None:
    gradients = []
    for layer in (linear(), linear(recompute=True)):
        layer(random(TOKENS, INS, seed=0).to(BF16)).backward(random(TOKENS, OUTS, seed=2).to(BF16))
        gradients.append(layer.weight.grad)
    assert gradients[0] is not None and gradients[0].dtype == BF16 and torch.equal(*gradients)  # type: ignore[arg-type]


def test_only_linear_layers_in_fp8_have_casts() -> None:
    """Not the head, the embedding, norms or adapters; a weight that two layers share has one cast."""
    state = built(run_of("llama", lora_rank=4))
    with state.pipeline.casts.shared():
        shared = {id(weight) for stage in state.stages for weight in weights(stage) if weight.shared_cast is not None}
    assert shared == {id(linear.weight) for linear in linears(state)}
    first, second = linear(), linear()
    second.weight = first.weight
    assert len(WeightCasts([first, second])._casts) == 1


def poisoned(state: TrainState) -> list[Weight]:
    """Weights whose gradients are undefined at the start of a step, after these gradients were made NaN."""
    state.grads.start()
    undefined = [weight for bucket in state.grads.buckets for weight, _, _ in bucket.offsets if weight.unwritten]
    for weight in undefined:
        assert weight.main_grad is not None
        weight.main_grad.fill_(torch.nan)
    return undefined


WRITTEN: dict[str, tuple[str, int, dict[str, Any]]] = {
    name: CASES[name]
    for name in ("llama", "llama, blocks", "t5", "full", "one microbatch", "zero 1", "pp 2, zero-bubble")
} | {"tied": ("gpt", 1, {"tied": True}), "tp 2, sequence": CASES["tp 2, sequence"]}


def assert_written_once(run: RunConfig, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose first wgrad GEMMs overwrite NaN, beside steps that add to zeros."""
    one, other = built(run, mesh), built(run, mesh)
    start = one.grads.start

    def start_poisoned() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(one.grads, "start", start)
            assert len(poisoned(one)) == len(list(linears(one)))

    monkeypatch.setattr(one.grads, "start", start_poisoned)
    for step in range(2):
        batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 8 * step)]
        a = train_step(one, batches, 3e-3, 0.01)
        with monkeypatch.context() as patched:
            patched.setattr(NarrowMatmuls, "overwrites", False)
            b = train_step(other, batches, 3e-3, 0.01)
        assert torch.equal(a.loss, b.loss) and torch.equal(a.grad_norm, b.grad_norm)
        for left, right in zip(one.grads.buckets, other.grads.buckets, strict=True):
            assert torch.equal(left.own_grads, right.own_grads) and torch.equal(left.own_weights, right.own_weights)
    for state in (one, other):
        state.grads.wait_param_gather()


def _written_on_a_rank(groups: Groups, rank: int, run: RunConfig) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_written_once(run, build_mesh(run, rank, 2, groups), monkeypatch)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_first_gradient_of_a_step_overwrites(pool: Pool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no bit, in any layout."""
    model, world, values = WRITTEN[name]
    run = run_of(model, world, **values)
    if world == 1:
        assert_written_once(run, Mesh(0), monkeypatch)
    else:
        pool.run(_written_on_a_rank, run, world=world)


def test_other_gradients_are_zeroed() -> None:
    """Before anything but a wgrad GEMM adds to a gradient that is undefined, and before a graph is replayed."""
    state = built(run_of("llama"))
    weight, *_ = undefined = poisoned(state)
    assert set(map(id, undefined)) == {id(linear.weight) for linear in linears(state)}
    weight.accumulate_grad(torch.ones_like(weight))
    assert not weight.unwritten and weight.main_grad is not None and (weight.main_grad == 1).all()
    zero_unwritten(state.grads)
    for bucket in state.grads.buckets:
        assert bucket.grads is not None and bucket.grads.isfinite().all()
        assert not any(each.unwritten for each, _, _ in bucket.offsets)
