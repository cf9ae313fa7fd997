"""Small random models of every family of decoders that Hugging Face's transformers has and mega opens.

A case is a class of transformers' configurations and what it is given. `theirs` builds the model, with all its
arithmetic in fp64 where it asks for fp32, so that it is compared to more than 7 digits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.batch import DecoderBatch
from mega.core.checkpoint.forms.direct import opened_foreign
from mega.core.checkpoint.forms.families.decoders import model_from_config
from mega.core.checkpoint.forms.foreign import TorchSource
from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import assemble
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.layout import ONE
from mega.core.checkpoint.own.pieces import whole_box
from mega.core.config.sections import ModelConfig

VOCAB = 97
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 768,
}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 768}
MIXTURE: dict[str, Any] = {**LLAMA, "num_experts_per_tok": 2, "experts_implementation": "eager"}
TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 192, "rope_theta": 5000.0}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.5, 7.0, 30.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn-biases": ("Llama", {**LLAMA, "attention_bias": True, "rope_parameters": YARN, "head_dim": 12}),
    "llama-mlp-bias": ("Llama", {**LLAMA, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-dynamic": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 40, "head_dim": 16}),
    "qwen2-windows": (
        "Qwen2",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    ),
    "qwen3-windows": (
        "Qwen3",
        {
            **LLAMA,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_bias": True,
        },
    ),
    "smollm3": ("SmolLM3", LLAMA),
    "smollm3-window": (
        "SmolLM3",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 40, "tie_word_embeddings": False},
    ),
    "granite": (
        "Granite",
        {
            **LLAMA,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3",
        {**LLAMA, "rope_parameters": {**LONGROPE, "rope_theta": 1e4}, "original_max_position_embeddings": 128},
    ),
    "phi3-partial": (
        "Phi3",
        {
            **LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "sliding_window": 40,
        },
    ),
    "olmo2": ("Olmo2", LLAMA),
    "olmo3": ("Olmo3", {**LLAMA, "sliding_window": 40, "attention_bias": True}),
    "olmo3-yarn": (
        "Olmo3",
        {
            **LLAMA,
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            **LLAMA,
            "head_dim": 16,
            "sliding_window": 40,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **LLAMA,
            "head_dim": 16,
            "sliding_window": 40,
            "num_hidden_layers": 8,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "starcoder2": ("Starcoder2", {**LLAMA, "sliding_window": 40}),
    "stablelm": ("StableLm", {**LLAMA, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**LLAMA, "use_parallel_residual": True}),
    "pythia": ("GPTNeoX", {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "gpt-neox-serial": (
        "GPTNeoX",
        {
            **{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "gpt2": ("GPT2", GPT),
    "gpt2-scaled": (
        "GPT2",
        {
            **GPT,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "n_inner": 40,
        },
    ),
    "gpt2-unscaled": ("GPT2", {**GPT, "scale_attn_weights": False}),
    "mixtral": ("Mixtral", {**MIXTURE, "num_local_experts": 4, "sliding_window": 40}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **MIXTURE,
            "num_experts": 4,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **MIXTURE,
            "num_experts": 8,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "head_dim": 16,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0, 3],
        },
    ),
    "olmoe": ("Olmoe", {**MIXTURE, "num_experts": 8, "norm_topk_prob": True, "attention_bias": True}),
}
"""Name -> class of transformers' configuration, without its ending, and what it is given."""


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Where code of transformers asks for fp32 it gets fp64."""
    kept = {name: getattr(torch.Tensor, name) for name in ("to", "float", "type")}
    arange, softmax = torch.arange, torch.nn.functional.softmax

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def wrapped(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            return function(*map(widened, args), **{name: widened(value) for name, value in named.items()})

        return run

    torch.Tensor.to = wrapped(kept["to"])  # type: ignore[method-assign]
    torch.Tensor.type = wrapped(kept["type"])  # type: ignore[method-assign]
    torch.Tensor.float = lambda self: self.double()  # type: ignore[method-assign]
    torch.arange, torch.nn.functional.softmax = wrapped(arange), wrapped(softmax)
    made = torch.tensor
    torch.tensor = wrapped(made)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.Tensor, name, function)
        torch.arange, torch.nn.functional.softmax, torch.tensor = arange, softmax, made


def theirs(case: str, *, std: float = 0.3, **changes: Any) -> Any:
    """A random fp64 model of transformers; norms and biases are no constants either."""
    transformers = pytest.importorskip("transformers")
    kind, values = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**TOKENS, **values, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with wide():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).double().train(False)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return model


def saved(folder: Path, case: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same, written as a folder of Hugging Face's."""
    model = theirs(case, **changes)
    model.to(dtype).save_pretrained(folder)
    return model.double()


def opened(folder: Path) -> OpenedForm:
    return opened_foreign(form_at(folder), folder, FormOptions(layout=ONE))


def wholes(found: OpenedForm) -> dict[str, torch.Tensor]:
    """Every logical tensor by name."""
    return {
        target.name.removeprefix("weights/"): assemble(target, whole_box(target.shape), found.source).clone()
        for target in found.table.targets
    }


def batch_of(length: int, rows: int = 2, vocab: int = VOCAB) -> DecoderBatch:
    text = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(rows, length, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(length).expand(rows, length)
    return DecoderBatch(text[:, :-1], text[:, 1:], weights, positions, torch.arange(rows))


def gradients(found: OpenedForm, model: Any) -> dict[str, torch.Tensor]:
    """Those of transformers' parameters as ours: every row where the table says its weight is from."""
    theirs = dict(_as_saved(model.config.model_type, {n: p.grad for n, p in model.named_parameters()}))
    if "lm_head.weight" in theirs:  # GPT-NeoX's, as it is saved
        theirs["embed_out.weight"] = theirs["lm_head.weight"]
    targets = [(target.name.removeprefix("weights/"), target) for target in found.table.targets]
    return {name: assemble(target, whole_box(target.shape), TorchSource(theirs)) for name, target in targets}


def _as_saved(kind: str, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts that transformers stacks in memory, by the names of its files."""
    linears = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if kind == "mixtral":
        linears = {"gate": "w1", "up": "w3", "down": "w2"}
    for name, tensor in tensors.items():
        stem, _, which = name.rpartition(".")
        named = f"{stem}.{which}".replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
        stem = named.rpartition(".")[0]
        if not stem.endswith(".experts"):
            yield named, tensor
            continue
        for number, one in enumerate(tensor):
            parts = {"down": one} if which == "down_proj" else dict(zip(("gate", "up"), one.chunk(2), strict=True))
            yield from ((f"{stem}.{number}.{linears[each]}.weight", part) for each, part in parts.items())


def opened_config(model: Any) -> ModelConfig:
    """The model that the configuration of one of transformers describes."""
    return model_from_config(model.config.to_dict(), "config.json")
