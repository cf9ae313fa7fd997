"""Encoder and decoder against a plain float64 model that reads one row at a time, without padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega.core.architecture import inventory, parameters, placement
from mega.core.batch import EncoderDecoderBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.family import synthetic_batch
from mega.core.model.encoder_decoder import EncoderDecoderStage
from mega.core.ops.counter import site_key
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.support.ranks import CPU, random

Weights = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "family": "t5",
    "layers": 2,
    "decoder_layers": 3,
    "hidden": 32,
    "heads": 4,
    "head_dim": 6,
    "ffn": 40,
    "vocab": 97,
    "vocab_multiple": 4,
    "seq_length": 14,
    "decoder_seq_length": 9,
    "micro_batch": 3,
    "dtype": "fp64",
    "device": "cpu",
}
UNDROPPED = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def run_of(**values: Any) -> RunConfig:
    return resolve(compose(flags={**SIZES, **values}), 1)


# The reference ------------------------------------------------------------------------------------------------


def norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(
    w: Weights,
    name: str,
    x: torch.Tensor,
    read: torch.Tensor,
    model: ModelConfig,
    causal: bool,
    real: int | None = None,
) -> Any:
    """x [s, h] looks at read [t, h], head by head. real: tokens of both, after which there is padding, which no token
    sees and which itself sees all evenly, or nothing (--memory-padding)."""
    assert model.heads and model.kv_heads and model.head_dim
    q, k, v = linear(w, f"{name}.q_proj", x), linear(w, f"{name}.k_proj", read), linear(w, f"{name}.v_proj", read)
    mixed, width = [], model.head_dim
    for head in range(model.heads):
        at = head * model.kv_heads // model.heads
        mine, theirs = (slice(number * width, (number + 1) * width) for number in (head, at))
        scores = q[:, mine] @ k[:, theirs].T / math.sqrt(width)
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        probabilities = scores.softmax(-1)
        if real is not None:
            even = 1 / len(read) if model.memory_padding == "uniform" else 0.0
            tokens = F.pad(scores[:real, :real].softmax(-1), (0, len(read) - real))
            probabilities = torch.cat([tokens, torch.full_like(scores[real:], even)])
        mixed.append(probabilities @ v[:, theirs])
    return linear(w, f"{name}.o_proj", torch.cat(mixed, -1))


def reference(
    w: Weights, model: ModelConfig, read: torch.Tensor, written: torch.Tensor, real: int | None = None
) -> torch.Tensor:
    """Logits [d, vocab] of a decoder that has written `written` [d] of what its encoder reads, [e]. real: of `read`
    only so many are tokens, the rest is padding that the decoder sees."""
    assert model.layers and model.decoder_layers

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        return w["model.embed_tokens.weight"][ids] + w["model.embed_positions.weight"][: len(ids)]

    def fed(name: str, x: torch.Tensor) -> torch.Tensor:
        normed = norm(w, f"{name}.post_attention_layernorm", x)
        wide = F.gelu(linear(w, f"{name}.mlp.up_proj", normed), approximate="tanh")
        return x + linear(w, f"{name}.mlp.down_proj", wide)

    def attended(name: str, x: torch.Tensor, causal: bool) -> torch.Tensor:
        normed = norm(w, f"{name}.input_layernorm", x)
        return x + attention(w, f"{name}.self_attn", normed, normed, model, causal, None if causal else real)

    x = embedded(read)
    for number in range(model.layers):
        name = f"model.encoder.layers.{number}"
        x = fed(name, attended(name, x, causal=False))
    memory, y = norm(w, "model.encoder.norm", x), embedded(written)
    for number in range(model.decoder_layers):
        name = f"model.decoder.layers.{number}"
        y = attended(name, y, causal=True)
        normed = norm(w, f"{name}.encoder_attn_layernorm", y)
        y = fed(name, y + attention(w, f"{name}.encoder_attn", normed, memory, model, causal=False))
    y = norm(w, "model.decoder.norm", y)
    return y @ w["model.embed_tokens.weight"].T + w["lm_head.bias"]


# The tests ----------------------------------------------------------------------------------------------------


def stage_and_weights(run: RunConfig) -> tuple[EncoderDecoderStage, Weights]:
    """A stage of the whole model with random weights, norms and biases among them, and the same by name."""
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    found: Weights = {}
    with torch.no_grad():
        for weight in weights(stage):
            for segment in weight.segments:
                real = segment.real(weight)
                real.add_(0.2 * random(*real.shape, seed=len(found)))
                found[segment.shard.name] = real.clone().requires_grad_()
    assert found.keys() == {tensor.name for tensor in inventory(run.model)}
    return stage, found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_heads": 2},
        {"ops": "reference", "recompute": "selective"},
        {"memory_padding": "uniform"},
        {"memory_padding": "zero", "ops": "reference"},
    ],
    ids=str,
)
def test_logits_loss_and_gradients(more: dict[str, Any]) -> None:
    run = run_of(**UNDROPPED, **more)
    stage, w = stage_and_weights(run)
    batch = synthetic_batch(run, torch.arange(3), seed=1)
    assert isinstance(batch, EncoderDecoderBatch)
    assert len(set(batch.encoder_lengths.tolist())) == 3 and len(set(batch.lengths.tolist())) == 3
    found = stage(batch, outputs=True).outputs
    assert found is not None and run.model.vocab
    total = torch.zeros((), dtype=torch.float64)
    for row, (e, d) in enumerate(zip(batch.encoder_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        seen = run.model.memory_padding != "masked"
        read = batch.encoder_tokens[row] if seen else batch.encoder_tokens[row, :e]
        logits = reference(w, run.model, read, batch.tokens[row, :d], e if seen else None)
        torch.testing.assert_close(found[row, :d, : run.model.vocab], logits, rtol=1e-11, atol=1e-11)
        total = total + F.cross_entropy(logits, batch.labels[row, :d], reduction="sum")
    total.backward()
    loss = stage(batch).terms["lm"]
    assert float(loss.weight) == float(batch.lengths.sum())
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    loss.total.backward()
    for weight in weights(stage):
        assert weight.grad is not None
        for segment in weight.segments:
            wanted = w[segment.shard.name].grad
            assert wanted is not None
            assert torch.allclose(segment.real(weight.grad), wanted, rtol=1e-9, atol=1e-10), segment.shard.name


def test_padding_is_not_seen() -> None:
    """Other tokens in the padding of either side change no bit of what counts."""
    run = run_of(**UNDROPPED)
    stage, _ = stage_and_weights(run)
    batch = synthetic_batch(run, torch.arange(3), seed=1)
    assert isinstance(batch, EncoderDecoderBatch)
    other = EncoderDecoderBatch(**{**vars(batch), "encoder_tokens": batch.encoder_tokens.clone()})
    for row, (e, d) in enumerate(zip(batch.encoder_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        other.encoder_tokens[row, e:] = 5
        other.tokens[row, d:] = 7
    assert torch.equal(stage(batch).terms["lm"].total, stage(other).terms["lm"].total)


def test_padding_is_seen_where_it_is_asked_for() -> None:
    """As in Megatron-LM 23.06: other tokens in the encoder's padding change the loss, in the decoder's not."""
    run = run_of(**UNDROPPED, memory_padding="uniform")
    stage, _ = stage_and_weights(run)
    batch = synthetic_batch(run, torch.arange(3), seed=1)
    assert isinstance(batch, EncoderDecoderBatch)
    loss = float(stage(batch).terms["lm"].total.detach())
    for row, (e, d) in enumerate(zip(batch.encoder_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        batch.tokens[row, d:] = 7
        assert float(stage(batch).terms["lm"].total.detach()) == loss
        if e < batch.encoder_tokens.shape[1]:
            batch.encoder_tokens[row, e:] = 5
            assert float(stage(batch).terms["lm"].total.detach()) != loss
            break
    else:
        raise AssertionError("no row has padding")


def test_dropout_of_each_place_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder, decoder and cross attention have the same keys of tokens, so their sites must differ."""
    asked: list[tuple[int, str]] = []

    def seen(layer: int, site: str, rule: int) -> int:
        asked.append((layer, site))
        return site_key(layer, site, rule)

    monkeypatch.setattr("mega.core.model.forward.site_key", seen)
    run = run_of()
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    stage(synthetic_batch(run, torch.arange(3), seed=1))
    assert len(asked) == len(set(asked)) == 2 + 2 * 3 + 3 * 5


def test_sizes_of_the_published_model() -> None:
    """T5 220M of Megatron-LM's scripts, whose vocabulary of 30,524 and 100 sentinels is padded to 30,720."""
    run = resolve(compose("t5-220m", flags={"micro_batch": 1}), 1)
    assert parameters(run.model) == 222_495_744 - (30_720 - 30_624) * (768 + 1)
    assert (run.model.decoder_layers, run.model.positions, run.masking.sample_kind) == (12, 512, "t5")


def test_where_units_lie() -> None:
    """The encoder's final norm and the decoder's embedding lie on the decoder's first stage; chunks take turns."""
    model = run_of().model
    assert placement(model, 3, 1, (2, 2, 1)) == {
        "embedding": (0, 0), 0: (0, 0), 1: (0, 0), "middle": (1, 0), 2: (1, 0), 3: (1, 0), 4: (2, 0), "head": (2, 0),
    }  # fmt: skip
    assert placement(model, 2, 2, (1, 1, 2, 1))["middle"] == (0, 1)
