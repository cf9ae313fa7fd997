"""A mixture against a loop over tokens that is written here: outputs, dropping, shared expert, losses, counts, bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega.core.architecture import architecture, parameters
from mega.core.config.check import check
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.flops import model_flops_per_token
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import check_layout
from mega.core.model.experts import ExpertLayer
from mega.core.ops.routing import quantile
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.routing import balance, expert_layers
from mega.core.training.state import TrainState
from mega.core.training.step import backward, evaluate_step, means, train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_options, small_run

PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "steps": 4, "mock_data": True}
VALUES: dict[str, dict[str, Any]] = {
    "gpt": {"experts": 4, "balance_loss": (0.5,), "z_loss": 0.01},
    "llama": {"experts": 8, "experts_chosen": 3, "expert_ffn": 16, "shared_ffn": 24, "shared_gate": True},
}


def run(model: str, **values: Any) -> RunConfig:
    every = {**PLAIN, **VALUES[model], **values}
    check(small_options(model, **every), 1)
    return small_run(model, **every)


def state_of(config: RunConfig) -> TrainState:
    return build_state(config, build_mesh(config, 0, 1), Device.choose("cpu"))


def step(state: TrainState, number: int = 0) -> list[Any]:
    size = state.run.batch.global_batch
    return [synthetic_batch(state.run, rows) for rows in own_samples(state.run, state.mesh, number * size)]


def weight(layer: ExpertLayer, name: str) -> torch.Tensor:
    """A logical tensor of the layer, by the end of its name."""
    for module in layer.parameters():
        for segment in module.segments:  # type: ignore[attr-defined]
            if segment.shard.name.endswith(name):
                found: torch.Tensor = segment.real(module.detach())
                return found
    raise KeyError(name)


def by_tokens(layer: ExpertLayer, x: torch.Tensor, dropped: set[tuple[int, int]] = frozenset()) -> torch.Tensor:  # type: ignore[assignment]
    """What each token's experts make of it, one by one. dropped: (token, expert) that is left out."""
    value, out = layer.value, torch.zeros_like(x)
    logits = x @ weight(layer, ".gate.weight").T
    for token, row in enumerate(logits):
        best = row.topk(value.chosen)
        for share, expert in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            if (token, expert) not in dropped:
                out[token] += share * network(layer, f"experts.{expert}", x[token])
    if value.shared is not None:
        gate = (x @ weight(layer, "shared_expert_gate.weight").T).sigmoid()
        out = out + gate * torch.stack([network(layer, "shared_expert", token) for token in x])
    return out


def network(layer: ExpertLayer, name: str, x: torch.Tensor) -> torch.Tensor:
    up = weight(layer, f"{name}.up_proj.weight") @ x
    if layer.value.expert.bias:
        wide = F.gelu(up + weight(layer, f"{name}.up_proj.bias"), approximate="tanh")
        return weight(layer, f"{name}.down_proj.weight") @ wide + weight(layer, f"{name}.down_proj.bias")
    wide = F.silu(weight(layer, f"{name}.gate_proj.weight") @ x) * up
    return weight(layer, f"{name}.down_proj.weight") @ wide


def filled(layer: ExpertLayer) -> None:
    """Biases that are not zero."""
    draw = torch.Generator().manual_seed(3)
    for one in layer.parameters():
        if one.dim() == 1:
            one.data.normal_(generator=draw)


@pytest.mark.parametrize("model", VALUES)
def test_every_token_passes_its_experts(model: str) -> None:
    state = state_of(run(model))
    layer = expert_layers(state)[0]
    filled(layer)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    context = state.stages[0].context(step(state)[0])
    with torch.no_grad():
        torch.testing.assert_close(layer(x, context), by_tokens(layer, x), rtol=0, atol=1e-12)


def test_a_single_expert_is_a_dense_network_that_trains() -> None:
    """Files of others have layers of one expert too."""
    state = state_of(run("gpt", experts=1, experts_chosen=1, router_normalize=False))
    layer, batches = expert_layers(state)[0], step(state)
    filled(layer)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([network(layer, "experts.0", token) for token in x])
        torch.testing.assert_close(layer(x, state.stages[0].context(batches[0])), expected, rtol=0, atol=1e-12)
    before = weight(layer, "experts.0.up_proj.weight").clone()
    train_step(state, batches, 1e-2, 0.0)
    assert not weight(layer, "experts.0.up_proj.weight").equal(before)


def test_what_exceeds_the_capacity_is_dropped() -> None:
    """Of 16 tokens and 2 choices of 4 experts each takes at most 16 x 2 / 4 x 0.5 = 4: those of largest probability."""
    state = state_of(run("gpt", capacity_factor=0.5))
    layer = expert_layers(state)[0]
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    asked: dict[int, list[tuple[float, int]]] = {}
    for token, row in enumerate(x @ weight(layer, ".gate.weight").T):
        best = row.topk(2)
        for share, expert in zip(best.values.softmax(0).tolist(), best.indices.tolist(), strict=True):
            asked.setdefault(expert, []).append((-share, token))
    dropped = {(token, expert) for expert, each in asked.items() for _, token in sorted(each)[4:]}
    context = state.stages[0].context(step(state)[0])
    with torch.no_grad():
        found = layer(x, context)
        torch.testing.assert_close(found, by_tokens(layer, x, dropped), rtol=0, atol=1e-12)
        layer.eval()  # where none is
        torch.testing.assert_close(layer(x, context), by_tokens(layer, x), rtol=0, atol=1e-12)
    assert dropped


def test_losses_and_loads_of_a_step() -> None:
    """Core's seq_aux_loss: E / (k s^2) x the sum over experts of counts x scores; mean over sequences and layers."""
    state = state_of(run("gpt", recompute="full", recompute_method="uniform", recompute_layers=1))
    inputs: list[torch.Tensor] = []
    for layer in expert_layers(state):
        layer.register_forward_hook(
            lambda module, given, made: (
                inputs.append(given[0].detach() @ module.router.gate.detach().T) if len(inputs) < 32 else None
            )
        )
    with torch.no_grad():
        state.train()
        batches = step(state)
        for batch in batches:
            state.stages[0](batch)
        logits, hooked = list(inputs), len(inputs)
    loss, found = means(state, backward(state, batches))
    counts = torch.stack([torch.bincount(one.topk(2).indices.flatten(), minlength=4) for one in logits])
    each = [4 / (2 * 16**2) * (count * one.softmax(1).sum(0)).sum() for count, one in zip(counts, logits, strict=True)]
    balance, z = torch.stack(each).mean(), torch.cat(logits).logsumexp(1).square().mean()
    assert hooked == 8 * 4
    torch.testing.assert_close(found["seq_load_balancing_loss"], balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(found["z_loss"], z, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, found["lm"] + 4 * (0.5 * balance + 0.01 * z), rtol=1e-12, atol=0)
    assert state.load is not None  # once, though every layer is computed twice
    assert torch.equal(state.load.counts, counts.view(8, 4, 4).sum(0).double())
    assert float(state.load.dropped.sum()) == 0


@pytest.mark.parametrize("over", ["sequence", "microbatch", "global"])
def test_tokens_that_fill_a_row_do_not_count(over: str) -> None:
    """Rows with four columns of filler give the losses, loads and gradients of the rows without them."""
    found = []
    for filled in (False, True):
        state = state_of(run("gpt", balance=(over,)))
        parts = [replace(batch, **{name: each[:, :12] for name, each in columns(batch)}) for batch in step(state)]
        if filled:
            parts = [with_filler(batch) for batch in parts]
        loss, terms = means(state, backward(state, parts))
        assert state.load is not None
        grads = torch.cat([bucket.own_grads for bucket in state.grads.buckets])
        found.append((loss, terms, state.load.counts.clone(), grads))
    (loss, terms, counts, grads), (loss_filled, terms_filled, counts_filled, grads_filled) = found
    torch.testing.assert_close(loss_filled, loss, rtol=1e-12, atol=0)
    for name, value in terms.items():
        torch.testing.assert_close(
            terms_filled[name], value, rtol=1e-12, atol=0, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert counts.sum() == 4 * 8 * 12 * 2 and torch.equal(counts, counts_filled)
    torch.testing.assert_close(grads_filled, grads, rtol=1e-9, atol=1e-12)


def columns(batch: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in batch.tensors().items() if each.dim() == 2]


def with_filler(batch: Any) -> Any:
    """Rows with four more tokens, which only fill them."""
    longer = {name: F.pad(each, (0, 4)) for name, each in columns(batch)}
    return replace(batch, **longer, padding=F.pad(torch.zeros_like(batch.tokens, dtype=torch.bool), (0, 4), value=True))


def test_the_bias_moves_towards_an_even_load() -> None:
    values = {"router_score": "sigmoid", "balance_bias": True, "balance_bias_rate": 0.25}
    state = state_of(run("llama", **values))
    train_step(state, step(state), 1e-3, 0.0)
    assert state.load is not None
    for layer, counts in zip(expert_layers(state), state.load.counts, strict=True):
        assert layer.router.balance is not None
        even = 8 * 16 * 3 / 8
        expected = [0.25 if count < even else -0.25 if count > even else 0.0 for count in counts.tolist()]
        assert layer.router.balance.tolist() == expected


def test_thresholds_are_quantiles_of_the_logits() -> None:
    """The mean over the microbatches of what would have made each even, less its mean; a recomputed layer counts once;
    the choice of the next step goes by them."""
    values = {"router_choice": "quantile", "recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    state, inputs = state_of(run("gpt", balance_loss=(0.0,), **values)), list[torch.Tensor]()
    first = expert_layers(state)[0].router
    state.train()
    handle = first.register_forward_hook(
        lambda router, given, made: inputs.append(given[0].detach() @ router.gate.detach().T)
    )
    with torch.no_grad():
        for batch in step(state):
            state.stages[0](batch)
    handle.remove()
    train_step(state, step(state), 0.0, 0.0)
    expected = torch.stack([quantile(logits, torch.zeros(4), 2) for logits in inputs]).mean(0)
    assert first.balance is not None and len(inputs) == 8
    torch.testing.assert_close(first.balance.double(), expected - expected.mean(), rtol=1e-6, atol=1e-7)
    assert state.load is not None
    before = state.load.counts[0]
    train_step(state, step(state), 0.0, 0.0)
    assert state.load.counts[0].std() < before.std()


def test_the_bias_stays_where_an_update_is_skipped() -> None:
    values = {"router_score": "sigmoid", "balance_bias": True, "balance_bias_rate": 0.25}
    state = state_of(run("llama", **values))
    backward(state, step(state))
    biases = [layer.router.balance for layer in expert_layers(state)]
    assert all(bias is not None and not bias.any() for bias in biases)
    balance(state, torch.tensor(False))
    assert all(bias is not None and not bias.any() for bias in biases)


def test_a_held_out_set_judges_the_text_alone() -> None:
    """Whatever was trained on before; of layers' losses nothing is found."""
    state = state_of(run("gpt", balance=("global",)))
    fresh = evaluate_step(state, step(state))
    backward(state, step(state, 1))
    names = list(state.pipeline.names)
    assert torch.equal(evaluate_step(state, step(state)), fresh)
    assert fresh[names.index("lm"), 1] > 0
    assert not fresh[[number for number, name in enumerate(names) if name != "lm"]].any()


def test_parameters_and_operations_are_of_the_active_experts() -> None:
    config = run("llama")
    dense = small_run("llama", **PLAIN)
    per_expert, router, shared = 3 * 32 * 16, 8 * 32, 3 * 32 * 24 + 32
    more = 4 * (8 * per_expert + router + shared - 3 * 32 * 48)
    assert parameters(config.model) == parameters(dense.model) + more
    active = 4 * (3 * per_expert + router + shared - 3 * 32 * 48)
    assert model_flops_per_token(config) == pytest.approx(model_flops_per_token(dense) + 6 * active)


def test_layers_with_experts() -> None:
    config = run("llama", layers=6, experts_from=1, experts_every=2, dense_layers=(3,))
    assert [layer.experts is not None for layer in architecture(config.model).layers] == [
        *(False, True, False, False, False, True)
    ]


@pytest.mark.parametrize("flag", ["--fp8-weights", "--batch-invariant"])
def test_an_engine_refuses_what_experts_do_not_do(flag: str) -> None:
    options = EngineOptions(**{flag[2:].replace("-", "_"): True})
    check_layout(small_run("gpt", **PLAIN).model, 1, 1, options)
    with pytest.raises(ValueError, match=f"^{flag}: does nothing for experts"):
        check_layout(run("gpt").model, 1, 1, options)
