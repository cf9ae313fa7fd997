"""The same weights in Hugging Face's models give the same logits and gradients.

Their names are ours for Llama's relatives; GPT-2 fuses query, key and value and stores [in, out].
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega.core.batch import DecoderBatch
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, updated
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.support.ranks import CPU, random

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[hf]' in a clone)"
)

VOCAB, LENGTH, ROWS = 97, 24, 3
SIZES: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "vocab": VOCAB, "vocab_multiple": 1}
LLAMA: dict[str, Any] = {
    "family": "llama",
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "tied": False,
    "ffn": 56,
}
HF_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def stage_of(dtype: str, ops: str, **values: Any) -> DecoderStage:
    run = updated(Options(), {**SIZES, "seq_length": 64, "micro_batch": 1, "dtype": dtype, "ops": ops, **values})
    run = updated(run, {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"})
    (stage,) = build_stages(resolve(run, 1), Mesh.at(0), CPU)
    return stage


def load(stage: DecoderStage, wholes: dict[str, torch.Tensor]) -> None:
    """Set every logical tensor; none may be left over on either side."""
    left = dict(wholes)
    with torch.no_grad():
        for weight in weights(stage):
            for segment in weight.segments:
                segment.real(weight).copy_(left.pop(segment.shard.name))
    assert not left, sorted(left)


def gradients(stage: DecoderStage) -> dict[str, torch.Tensor]:
    found = {}
    for weight in weights(stage):
        assert weight.grad is not None
        found |= {segment.shard.name: segment.real(weight.grad) for segment in weight.segments}
    return found


def check(stage: DecoderStage, theirs: Any, to_ours: Any, bound: float = 1e-5) -> None:
    """Logits, loss and gradients of one batch with ragged weights. Norms and angles of their Llama are always fp32."""
    theirs = theirs.to(stage.dtype).train(False)
    with torch.no_grad():  # biases and norms are not constants either
        for number, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.1 * random(*parameter.shape, seed=number).to(stage.dtype))
    load(stage, to_ours({name: p.detach() for name, p in theirs.named_parameters()}))

    text = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    scale = random(ROWS, LENGTH, seed=2).abs().to(torch.float32)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    batch = DecoderBatch(text[:, :-1], text[:, 1:], scale, positions, torch.arange(ROWS))
    logits = theirs(batch.tokens).logits
    found = stage(batch, outputs=True).outputs
    assert found is not None
    torch.testing.assert_close(found.detach(), logits.detach(), rtol=bound, atol=bound)

    nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    weight = scale.to(nll.dtype)
    expected = (nll * weight.flatten()).sum() / weight.sum()
    expected.backward()
    loss = stage(batch).terms["lm"]
    mean = loss.total / loss.weight
    mean.backward()
    torch.testing.assert_close(mean, expected, rtol=bound, atol=bound)
    wanted = to_ours({name: p.grad for name, p in theirs.named_parameters()})
    for name, gradient in gradients(stage).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def unchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors


DTYPES = pytest.mark.parametrize("dtype", ["fp64", "fp32"])
OPS = pytest.mark.parametrize("ops", ["auto", "reference"])


@OPS
@DTYPES
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_llama(kv_heads: int, dtype: str, ops: str) -> None:
    config = transformers.LlamaConfig(**HF_LLAMA, num_key_value_heads=kv_heads)
    stage = stage_of(dtype, ops, **LLAMA, kv_heads=kv_heads)
    check(stage, transformers.LlamaForCausalLM(config), unchanged)


@DTYPES
def test_qwen2(dtype: str) -> None:
    """Biases of query, key and value only; tied."""
    config = transformers.Qwen2Config(**HF_LLAMA, num_key_value_heads=2, tie_word_embeddings=True)
    stage = stage_of(dtype, "auto", **{**LLAMA, "kv_heads": 2, "qkv_bias": True, "tied": True})
    check(stage, transformers.Qwen2ForCausalLM(config), unchanged)


@DTYPES
def test_qwen3(dtype: str) -> None:
    """Norms of heads; heads wider than hidden / heads."""
    config = transformers.Qwen3Config(**HF_LLAMA, num_key_value_heads=2, head_dim=16)
    stage = stage_of(dtype, "auto", **{**LLAMA, "kv_heads": 2, "qk_norm": True, "head_dim": 16})
    check(stage, transformers.Qwen3ForCausalLM(config), unchanged)


@DTYPES
def test_mistral(dtype: str) -> None:
    """Each token sees so many before it only."""
    config = transformers.MistralConfig(**HF_LLAMA, num_key_value_heads=2, sliding_window=5)
    stage = stage_of(dtype, "auto", **{**LLAMA, "kv_heads": 2, "window": 5})
    check(stage, transformers.MistralForCausalLM(config), unchanged)


GPT2_NAMES = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def from_gpt2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-2's names and shapes to ours; its products are x W, ours x W^T."""
    found = {
        "model.embed_tokens.weight": tensors["transformer.wte.weight"],
        "model.embed_positions.weight": tensors["transformer.wpe.weight"],
        "model.norm.weight": tensors["transformer.ln_f.weight"],
        "model.norm.bias": tensors["transformer.ln_f.bias"],
    }
    for name, tensor in tensors.items():
        if not name.startswith("transformer.h."):
            continue
        layer, rest = name.removeprefix("transformer.h.").split(".", 1)
        module, kind = rest.rsplit(".", 1)
        ours = tensor.t() if tensor.dim() == 2 else tensor
        if module == "attn.c_attn":
            for one, part in zip("qkv", ours.chunk(3), strict=True):
                found[f"model.layers.{layer}.self_attn.{one}_proj.{kind}"] = part
        else:
            found[f"model.layers.{layer}.{GPT2_NAMES[module]}.{kind}"] = ours
    return found


@OPS
@DTYPES
def test_gpt2(dtype: str, ops: str) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager"
    )
    stage = stage_of(dtype, ops, family="gpt", activation="gelu_tanh")
    check(stage, transformers.GPT2LMHeadModel(config), from_gpt2, 1e-10 if dtype == "fp64" else 1e-5)
