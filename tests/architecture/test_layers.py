"""Layers as values: the order of weights, the algebra of branches, and a model whose layers differ, in every room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.architecture import Init, Tensor, architecture, inventory, units
from mega.core.architecture.families import parts
from mega.core.architecture.layer import Layer, Norm
from mega.core.architecture.tensors import layer_tensors
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.inference.generation.generate import logits
from mega.core.inference.request import Request
from mega.core.model.decode import DecodeContext, DecodeParts, layer_functions
from mega.core.model.decoder import DecoderStage
from mega.core.model.forward import ForwardContext, forward_context
from mega.core.model.layer import TransformerLayer
from mega.core.model.mixers import LayerPlace
from mega.core.model.residual import ResidualState
from mega.core.ops.rotary import spread
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise, weights
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import Snapshot, compare, snapshots, within
from mega.core.training.wire import build_stages
from tests.inference.test_engine import GREEDY, answers, engine_of, prompts, tokens
from tests.support import toy_layers, toy_losses
from tests.support.ranks import CPU
from tests.support.runs import small_run

OPTIONS = ModelConfig(
    layers=1, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=19, positions=8, qkv_bias=True, position="rope"
)


# -- the order in which weights are registered sets bytes of ZeRO spans: it is pinned

ATTENTION = ["self_attn.q_proj", "self_attn.o_proj"]
DENSE = ["mlp.up_proj", "mlp.down_proj"]
CROSS = ["encoder_attn_layernorm", "encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.o_proj"]
ORDERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt": ({}, ["input_layernorm", *ATTENTION, "post_attention_layernorm", *DENSE]),
    "bert, norms after": (
        {"family": "bert", "norm_placement": "post", "sample_kind": "bert"},
        ["post_attention_layernorm", *ATTENTION, "post_feedforward_layernorm", *DENSE],
    ),
    "a decoder of T5": (
        {"family": "t5", "sample_kind": "t5", "decoder_layers": 1},
        ["input_layernorm", *ATTENTION, "post_attention_layernorm", *DENSE, *CROSS],
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_weights_are_registered_in_a_pinned_order(case: str) -> None:
    values, expected = ORDERS[case]
    (stage,) = build_stages(small_run(layers=1, kv_heads=8, **values), Mesh.at(0), CPU)
    last = (stage.layers if case != "a decoder of T5" else stage.decoder)[-1]
    firsts = [weight.segments[0].shard.name for weight in weights(last)]
    found = [name.rpartition("layers.0.")[2].removesuffix(".weight") for name in firsts if name.endswith(".weight")]
    assert found == expected


# -- the algebra


def _layer_of(**changes: Any) -> Layer:
    return parts.layer(replace(OPTIONS, **changes))


def _both_sides() -> Layer:
    plain = _layer_of()
    return Layer(
        branches=tuple(
            replace(branch, after=Norm(f"after_{number}", "rmsnorm", 16, 1e-5, False), after_of="branch")
            for number, branch in enumerate(plain.branches)
        )
    )


def test_a_branch_is_one_of_six_forms() -> None:
    """Another one would leave out a norm; so would one without any outside a layer that has one for all."""
    branch = _layer_of().branches[0]
    for changes in ({"before": None, "onto": "normed"}, {"after": branch.before}):
        with pytest.raises(AssertionError, match=r"a branch is one of x \+ f\(norm\(x\)\)"):
            replace(branch, **changes)
    with pytest.raises(AssertionError, match="branches without a norm read that of their layer"):
        replace(_layer_of(), branches=(replace(branch, before=None),))


LAYERS = {
    "before": _layer_of(),
    "onto the normed": _layer_of(post_norm_residual=True),
    "after the sum": _layer_of(norm_placement="post"),
    "both sides": _both_sides(),
    "after the branch": _layer_of(norm_placement="branch", norm="rmsnorm", qk_norm=True, qk_norm_whole=True),
    "parallel": replace(_layer_of(), parallel=True),
    "parallel, of one norm": _layer_of(parallel_branches="one-norm"),
    "multiplied": _layer_of(residual_multiplier=0.25, attention_scale=0.3),
}


def made(
    value: Layer, dtype: torch.dtype = torch.float64, extra: Sequence[Tensor] = ()
) -> tuple[TransformerLayer, ForwardContext]:
    """A layer with random weights, and what eight tokens mean to it."""
    plain = architecture(OPTIONS)
    model = replace(plain, stacks=(replace(plain.stacks[0], layers=(value,)),))
    tensors = {tensor.name: tensor for tensor in (*layer_tensors(model, value, 0), *extra)}
    factory = ParameterFactory({}, dtype, torch.device("cpu"), forward_only(choose(torch.device("cpu"), dtype)))
    layer = TransformerLayer(factory, value, tensors, LayerPlace(0, ALONE, 0.0))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=dtype) * 0.3)
    positions = torch.arange(8)[None]
    samples = torch.zeros(1, dtype=torch.int64)
    context = forward_context(model, samples, positions, ALONE.axis, sequence=False, dropout_seed=None, dtype=dtype)
    return layer, context


def formula(layer: TransformerLayer, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """As a paper writes it, with whole additions."""

    def f(branch: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = branch.mixer.out.biased(branch.mixer.finish(branch.mixer(x, context), context))
        return branch.value.multiplier * y

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module(ResidualState(x))[1]

    if layer.before is not None:
        return x + sum(f(branch, norm(layer.before, x)) for branch in layer.branches)
    if layer.value.parallel:
        return x + sum(f(branch, norm(branch.before, x)) for branch in layer.branches)
    for branch in layer.branches:
        if branch.before is None and branch.value.after_of == "branch":
            x = x + norm(branch.after, f(branch, x))
        elif branch.before is None:
            x = norm(branch.after, x + f(branch, x))
        elif branch.after is not None:
            x = x + norm(branch.after, f(branch, norm(branch.before, x)))
        elif branch.value.onto == "normed":
            x = norm(branch.before, x)
            x = x + f(branch, x)
        else:
            x = x + f(branch, norm(branch.before, x))
    return x


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_its_formula(case: str) -> None:
    layer, context = made(LAYERS[case])
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found, expected = layer(ResidualState(x.clone()), context).sum(layer.ops), formula(layer, x, context)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class WholeRow:
    """A cache of nothing: the tokens of one row attend to each other, as in training."""

    def __init__(self, layer: TransformerLayer, context: ForwardContext):
        self._layer, self._context, self.tables = layer, context, context.tables

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        attention = self._layer.branches[0].mixer
        k, v = kv.chunk(2, 1)
        mask = self._context.attention_mask(attention.value, layer, 0)
        return self._layer.ops.attention(q[None], k[None], v[None], mask).reshape(len(q), -1)

    def attend_new(self, layer: int, fused: torch.Tensor, rotary: Any, place: Any) -> torch.Tensor:
        raise AssertionError("a kernel of CUDA")


@pytest.mark.parametrize("case", LAYERS)
def test_decoding_is_the_same_layer(case: str) -> None:
    decodes(*made(LAYERS[case]))


def test_a_mixer_without_steps_for_decoding_runs_as_in_training() -> None:
    toy_losses.register()
    try:
        value = toy_losses.with_losses(_layer_of(qk_norm=True), (toy_losses.ACTIVATION,))
        router = Tensor("mlp.router.weight", (toy_losses.ROUTES, 16), (0,), Init(std=0.5))
        layer, context = made(value, extra=[router])
        called = []
        layer.branches[1].mixer.register_forward_hook(lambda *_: called.append(True))
        decodes(layer, context)
        assert len(called) == 2  # once in training's pass, once in decoding's
    finally:
        toy_losses.unregister()


@torch.inference_mode()
def decodes(layer: TransformerLayer, context: ForwardContext) -> None:
    """Eight tokens of one row give the same in decoding."""
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected = layer(ResidualState(x.clone()), context).sum(layer.ops)
    assert layer.ops.spread
    tables = [None, *(spread(*table) for table in context.tables.values())]
    stream, step = ResidualState(x.clone()), DecodeContext(WholeRow(layer, context), tables)
    for function in layer_functions(layer, DecodeParts(None, None, None, (None, *context.tables))):
        stream = function(stream, step)
    torch.testing.assert_close(stream.sum(layer.ops), expected, rtol=1e-12, atol=1e-12)


# -- layers that differ


def known(groups: Groups, rank: int, yes: bool) -> None:
    """Job of one rank: the family is registered in its process, or is no longer."""
    (toy_layers.register if yes else toy_layers.unregister)()


@pytest.fixture(scope="module", autouse=True)
def registered(pool: Pool) -> Iterator[None]:
    toy_layers.register()
    pool.run(known, True)
    yield
    toy_layers.unregister()
    pool.run(known, False)


def run(world: int = 1, **layout: Any) -> RunConfig:
    values = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "ffn": 48, "position": "rope", "lr": LR["fp64"]}
    return small_run("gpt", world, family=toy_layers.NAME, layers=4, global_batch=4, **values, **layout)


STEPS = (1, 2)
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "sequence_parallel": True}),
    (4, {"tp": 2, "pp": 2, "zero": 1}),
    (2, {"zero": 3}),
    (2, {"cp": 2, "cp_comm": "ring"}),
]


@pytest.fixture(scope="module")
def reference(pool: Pool) -> list[Snapshot]:
    return snapshots(pool, run(), 1, STEPS)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_training_is_one_ranks(pool: Pool, reference: list[Snapshot], world: int, layout: dict[str, Any]) -> None:
    for difference in compare("fp64", STEPS, reference, snapshots(pool, run(world, **layout), world, STEPS)):
        assert within("fp64", difference), difference


def test_every_tensor_is_trained(reference: list[Snapshot]) -> None:
    first = reference[0]
    assert set(first.gradients) == {f"grads/{tensor.name}" for tensor in inventory(run().model)}
    assert all(float(gradient.abs().max()) > 1e-8 * first.grad_norm for gradient in first.gradients.values())


def test_the_cache_changes_nothing() -> None:
    """Windows and rotary tables by layer: the log-probabilities are those of the whole text in one pass."""
    model = replace(run().model, vocab=61, positions=64)
    ops = forward_only(choose(torch.device("cpu"), torch.float32))
    stage = DecoderStage(model, units(model), ParameterFactory({}, torch.float32, torch.device("cpu"), ops), ALONE)
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
    asked = [
        Request(prompt=prompt, tokens=9, sampling=GREEDY, logprobs=1, prompt_logprobs=True) for prompt in prompts(4)
    ]
    for request, events in zip(asked, answers(engine_of(stage.eval()), asked), strict=True):
        text = [*request.prompt, *tokens(events)]
        expected = logits(stage, torch.tensor([text]))[0].log_softmax(-1)
        found = [*(events[0].prompt_logprobs or ())[1:], *(event.logprob for event in events)]
        assert found == pytest.approx([float(expected[at, token]) for at, token in enumerate(text[1:])], abs=2e-5)
