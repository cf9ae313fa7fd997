"""Families and presets: tables of option values, without other code.

A family corresponds to a training script of Megatron-LM; a preset is a published model. Both are mappings from
option names to values. These values override Megatron-LM's defaults, and a TOML file overrides these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Values = Mapping[str, object]


class FamilyDefaults(NamedTuple):
    """The default option values of a model family, and the features that the family supports."""

    values: Values
    sentencepiece: str = "GPTSentencePieceTokenizer"
    """Type of tokenizer for a SentencePiece model."""
    vocabulary: str = "GPT2BPETokenizer"
    """Type of tokenizer for a --vocab-file without --merge-file."""
    stacks: int = 1
    """Number of stacks of layers: 1, or 2 if the family has an encoder and a decoder (--decoder-layers)."""
    unties: bool = True
    """Whether the output layer may have a matrix separate from the embedding (--no-tied)."""
    classifies: bool = False
    """Whether models of the family may have a head that classifies rows or chooses one of several rows (--head)."""
    writes_ends: bool = True
    """Whether the family's samples contain the tokens for the beginning and end of a text."""


FAMILY_DEFAULTS: dict[str, FamilyDefaults] = {}
"""Value of --family -> the defaults of this family."""


def register_family(name: str, values: Values, **more: Any) -> None:
    """Make `name` a choice of --family with the defaults `values`. more: the other fields of `FamilyDefaults`."""
    FAMILY_DEFAULTS[name] = FamilyDefaults(values, **more)


register_family("gpt", {})
register_family(  # Touvron et al. 2023, arXiv 2307.09288
    "llama",
    {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    sentencepiece="Llama2Tokenizer",
)

register_family(
    "bert",
    {"sample_kind": "bert"},
    vocabulary="BertWordPieceLowerCase",
    unties=False,
    classifies=True,
    writes_ends=False,
)
register_family("t5", {"sample_kind": "t5"}, vocabulary="BertWordPieceLowerCase", stacks=2, unties=False)


def _gpt(layers: int, hidden: int, heads: int, seq_length: int, vocab: int | None) -> dict[str, object]:
    return {
        "family": "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq_length": seq_length,
        "vocab": vocab,
    }


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, seq_length: int, vocab: int | None
) -> dict[str, object]:
    return {**_gpt(layers, hidden, heads, seq_length, vocab), "family": "llama", "kv_heads": kv_heads, "ffn": ffn}


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool, seq_length: int
) -> dict[str, object]:
    """Qwen 2.5: biases of query, key and value only. The embedding table of the larger models has 128 more rows."""
    values = {"qkv_bias": True, "norm_eps": 1e-6, "rope_base": 1e6, "tied": tied}
    return {**_llama(layers, hidden, heads, kv_heads, ffn, seq_length, 151936 if hidden < 3072 else 152064), **values}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> dict[str, object]:
    """Qwen 3: queries and keys are normalised per head, and the head width is 128 for every hidden width."""
    values = {"head_dim": 128, "qk_norm": True, "norm_eps": 1e-6, "rope_base": 1e6, "tied": tied}
    return {**_llama(layers, hidden, heads, 8, ffn, 32768, 151936), **values}


def _mixture(experts: int, chosen: int, width: int, normalize: bool = True) -> dict[str, object]:
    """Return options for an MoE layer in every block. width: feed-forward width of one expert."""
    values = {"experts": experts, "experts_chosen": chosen, "expert_ffn": width, "router_normalize": normalize}
    return {**values, "rope_base": 1e6}


def _bert(layers: int, hidden: int, heads: int, vocab: int | None = 30524) -> dict[str, object]:
    """BERT: the vocabulary is BERT's file of 30,522 tokens plus [BOS] and [EOS], as in Megatron-LM."""
    return {**_gpt(layers, hidden, heads, 512, vocab), "family": "bert", "sample_kind": "bert"}


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, vocab: int | None = 30624) -> dict[str, object]:
    """T5: encoder and decoder have the same shape. The vocabulary is BERT's plus [BOS], [EOS] and 100 sentinels."""
    return {**_gpt(layers, hidden, heads, 512, vocab), "family": "t5", "head_dim": head_dim, "ffn": ffn}


NO_DROPOUT: Values = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _pythia(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, object]:
    """GPT-NeoX: parallel branches with separate norms, and rotary positions on a quarter of each head."""
    return {
        **_gpt(layers, hidden, heads, 2048, vocab),
        "position": "rope",
        "rope_fraction": 0.25,
        "parallel_branches": "two-norms",
        "activation": "gelu",
        "tied": False,
        **NO_DROPOUT,
    }


def _olmo2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, object]:
    """OLMo 2: norms after each branch, and norms of queries and keys over all heads together."""
    values = {
        "norm_placement": "branch",
        "qk_norm": True,
        "qk_norm_whole": True,
        "norm_eps": 1e-6,
        "rope_base": 500000.0,
    }
    return {**_llama(layers, hidden, heads, kv_heads, ffn, 4096, 100352), **values}


def _olmo3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, object]:
    return {
        **_olmo2(layers, hidden, heads, kv_heads, ffn),
        "vocab": 100278,
        "seq_length": 65536,
        "window": 4096,
        "window_layers": (1, 1, 1, 0),
        "local_rope_base": 500000.0,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 8.0,
        "rope_original_positions": 8192,
    }


def _gemma(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int, seq_length: int, vocab: int
) -> dict[str, object]:
    """Gemma: norm weights stored minus 1, a gated GELU, and scaled embeddings."""
    return {
        **_llama(layers, hidden, heads, kv_heads, ffn, seq_length, vocab),
        "head_dim": head_dim,
        "norm_eps": 1e-6,
        "norm_offset": True,
        "activation": "geglu_tanh",
        "embedding_scale": True,
        "embedding_scale_rounded": True,
        "tied": True,
    }


def _gemma2(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int, scalar: int
) -> dict[str, object]:
    """Gemma 2. scalar: attention scores are divided by its square root."""
    scale = {} if scalar == head_dim else {"attention_scale": scalar**-0.5}
    return {
        **_gemma(layers, hidden, heads, kv_heads, ffn, head_dim, 8192, 256000),
        "norm_placement": "both",
        "window": 4096,
        "window_layers": (1, 0),
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        **scale,
    }


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, window: int) -> dict[str, object]:
    return {
        **_gemma(layers, hidden, heads, kv_heads, ffn, 256, 32768, 262144),
        "norm_placement": "both",
        "qk_norm": True,
        "window": window,
        "window_layers": (1, 1, 1, 1, 1, 0),
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
    }


def _starcoder2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, base: float) -> dict[str, object]:
    """StarCoder2: GPT's norms, biases and activation, with grouped-query attention and an attention window."""
    return {
        **_gpt(layers, hidden, heads, 16384, 49152),
        "kv_heads": kv_heads,
        "ffn": ffn,
        "position": "rope",
        "rope_base": base,
        "window": 4096,
        **NO_DROPOUT,
    }


def _granite(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, scale: float, divisor: float
) -> dict[str, object]:
    """Granite: embeddings, attention scores, branches and logits are multiplied by constants."""
    return {
        **_llama(layers, hidden, heads, kv_heads, ffn, 131072, 49155),
        "rope_base": 5000000.0 if hidden < 4096 else 10000000.0,
        "tied": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_scale": scale,
        "logit_divisor": divisor,
    }


def _roberta(layers: int, hidden: int, heads: int) -> dict[str, object]:
    """RoBERTa: BERT without segment pairs. The first position uses row 2 of the position embedding table, after the
    padding row. Samples are those of Megatron-LM."""
    return {
        **_bert(layers, hidden, heads, 50265),
        "norm_placement": "post",
        "activation": "gelu",
        "binary_head": False,
        "token_types": 1,
        "position_offset": 2,
    }


LLAMA31_ROPE: Values = {"rope_base": 500000.0, "rope_scaling": "llama3"}
"""Options of Llama 3.1. Its other rope scaling options keep their defaults."""

LLAMA32: Values = {"rope_scaling_factor": 32.0, "tied": True}
"""Options of Llama 3.2's text models that differ from Llama 3.1."""

PRESETS: Mapping[str, Values] = {
    # For tests and first steps; the tokenizer determines the vocabulary size.
    "tiny-gpt": _gpt(2, 64, 4, 64, None),
    "tiny-llama": _llama(2, 64, 4, 2, 192, 64, None),
    "tiny-bert": {**_bert(2, 64, 4, None), "seq_length": 64},
    "tiny-t5": {**_t5(2, 64, 4, 16, 256, None), "seq_length": 64, "decoder_seq_length": 32},
    # Radford et al. 2019, and the model size of Megatron-LM's example scripts
    "gpt2-124m": _gpt(12, 768, 12, 1024, 50257),
    "gpt2-345m": _gpt(24, 1024, 16, 1024, 50257),
    # Brown et al. 2020, arXiv 2005.14165
    "gpt3-175b": {**_gpt(96, 12288, 96, 2048, 50257), "init_std": 0.006},
    # NVIDIA's NeMo launcher, https://github.com/NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3
    "gpt-126m": {**_gpt(12, 768, 12, 2048, 50257), "init_std": 0.023},
    "gpt-5b": {**_gpt(24, 4096, 32, 2048, 50257), "init_std": 0.01},
    "gpt-20b": {**_gpt(44, 6144, 48, 2048, 50257), "init_std": 0.008165},
    # Narayanan et al. 2021, arXiv 2104.04473, table 1
    "gpt-1.7b": _gpt(24, 2304, 24, 2048, 51200),
    "gpt-3.6b": _gpt(30, 3072, 32, 2048, 51200),
    "gpt-7.5b": _gpt(36, 4096, 32, 2048, 51200),
    "gpt-18b": _gpt(40, 6144, 48, 2048, 51200),
    "gpt-39b": _gpt(48, 8192, 64, 2048, 51200),
    "gpt-76b": _gpt(60, 10240, 80, 2048, 51200),
    "gpt-145b": _gpt(80, 12288, 96, 2048, 51200),
    "gpt-310b": _gpt(96, 16384, 128, 2048, 51200),
    # Yuan 1.0, Wu et al. 2021, arXiv 2110.04725, and its 4.7B variant in the ASC22 competition
    "yuan-4.7b": _gpt(40, 3072, 24, 2048, 53228),
    "yuan-13b": {**_gpt(40, 5120, 40, 2048, 53228), "init_std": 0.002},
    # Korthikanti et al. 2022, arXiv 2205.05198, table 3
    "gpt-22b": _gpt(48, 6144, 64, 2048, 51200),
    "gpt-175b": _gpt(96, 12288, 96, 2048, 51200),
    "gpt-530b": _gpt(105, 20480, 128, 2048, 51200),
    "gpt-1t": _gpt(128, 25600, 160, 2048, 51200),
    # Touvron et al. 2023, arXiv 2307.09288
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 4096, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 4096, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 4096, 32000),
    # Dubey et al. 2024, arXiv 2407.21783
    "llama3-8b": {**_llama(32, 4096, 32, 8, 14336, 8192, 128256), "rope_base": 500000.0},
    "llama3-70b": {**_llama(80, 8192, 64, 8, 28672, 8192, 128256), "rope_base": 500000.0},
    "llama3.1-8b": {**_llama(32, 4096, 32, 8, 14336, 131072, 128256), **LLAMA31_ROPE},
    "llama3.1-70b": {**_llama(80, 8192, 64, 8, 28672, 131072, 128256), **LLAMA31_ROPE},
    # Meta 2024, the model cards of Llama 3.2
    "llama3.2-1b": {**_llama(16, 2048, 32, 8, 8192, 131072, 128256), **LLAMA31_ROPE, **LLAMA32},
    "llama3.2-3b": {**_llama(28, 3072, 24, 8, 8192, 131072, 128256), **LLAMA31_ROPE, **LLAMA32},
    # Jiang et al. 2023, arXiv 2310.06825: in a layer, each token attends to 4,096 tokens
    "mistral-7b": {**_llama(32, 4096, 32, 8, 14336, 32768, 32000), "window": 4096},
    # Qwen Team 2024, arXiv 2412.15115, and the models' config.json
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, True, 32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, True, 32768),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, True, 32768),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944, False, 131072),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, False, 131072),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, False, 131072),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, False, 131072),
    # Qwen Team 2025, arXiv 2505.09388
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
    # Qwen Team 2025, arXiv 2505.09388: a token uses 8 of the 128 experts in each layer
    "qwen3-30b-a3b": {**_qwen3(48, 2048, 32, 6144, False), "kv_heads": 4, **_mixture(128, 8, 768)},
    "qwen3-235b-a22b": {**_qwen3(94, 4096, 64, 12288, False), "kv_heads": 4, **_mixture(128, 8, 1536)},
    # Jiang et al. 2024, arXiv 2401.04088, and the models' config.json
    "mixtral-8x7b": {**_llama(32, 4096, 32, 8, 14336, 32768, 32000), **_mixture(8, 2, 14336)},
    "mixtral-8x22b": {**_llama(56, 6144, 48, 8, 16384, 65536, 32000), **_mixture(8, 2, 16384)},
    # Muennighoff et al. 2024, arXiv 2409.02060, and the model's config.json
    "olmoe-1b-7b": {
        **_llama(16, 2048, 16, 16, 1024, 4096, 50304),
        **_mixture(64, 8, 1024, normalize=False),
        "rope_base": 10000.0,
        "qk_norm": True,
        "qk_norm_whole": True,
    },
    # Biderman et al. 2023, arXiv 2304.01373: GPT-NeoX's layers
    "pythia-70m": _pythia(6, 512, 8, 50304),
    "pythia-160m": _pythia(12, 768, 12, 50304),
    "pythia-410m": _pythia(24, 1024, 16, 50304),
    "pythia-1b": _pythia(16, 2048, 8, 50304),
    "pythia-1.4b": _pythia(24, 2048, 16, 50304),
    "pythia-2.8b": _pythia(32, 2560, 32, 50304),
    "pythia-6.9b": _pythia(32, 4096, 32, 50432),
    "pythia-12b": _pythia(36, 5120, 40, 50688),
    # Black et al. 2022, arXiv 2204.06745
    "gpt-neox-20b": {**_pythia(44, 6144, 64, 50432), "activation": "gelu_tanh"},
    # Wang and Komatsuzaki 2021, https://github.com/kingoflolz/mesh-transformer-jax
    "gpt-j-6b": {
        **_gpt(28, 4096, 16, 2048, 50400),
        "position": "rope",
        "rope_fraction": 0.25,
        "parallel_branches": "one-norm",
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "tied": False,
        **NO_DROPOUT,
    },
    # OLMo Team 2024, arXiv 2501.00656, and the models' config.json
    "olmo2-1b": _olmo2(16, 2048, 16, 16, 8192),
    "olmo2-7b": _olmo2(32, 4096, 32, 32, 11008),
    "olmo2-13b": _olmo2(40, 5120, 40, 40, 13824),
    "olmo2-32b": _olmo2(64, 5120, 40, 8, 27648),
    # OLMo Team 2025, the models' config.json: three of every four layers have a window, and the fourth has YaRN
    "olmo3-7b": _olmo3(32, 4096, 32, 32, 11008),
    "olmo3-32b": _olmo3(64, 5120, 40, 8, 27648),
    # Gemma Team 2024, arXiv 2403.08295
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384, 256, 8192, 256000),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576, 256, 8192, 256000),
    # Gemma Team 2024, arXiv 2408.00118
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216, 256, 256),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336, 256, 256),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, 128, 144),
    # Gemma Team 2025, arXiv 2503.19786, and the models' config.json: the text-only models
    "gemma3-270m": _gemma3(18, 640, 4, 1, 2048, 512),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, 512),
    # Abdin et al. 2024, arXiv 2404.14219 and 2412.08905
    "phi3-mini": {**_llama(32, 3072, 32, 32, 8192, 4096, 32064), "window": 2047},
    "phi3-medium": {**_llama(40, 5120, 40, 10, 17920, 4096, 32064), "window": 2047},
    "phi4": {**_llama(40, 5120, 40, 10, 17920, 16384, 100352), "rope_base": 250000.0},
    # Lozhkov et al. 2024, arXiv 2402.19173
    "starcoder2-3b": _starcoder2(30, 3072, 24, 2, 12288, 999999.4420358813),
    "starcoder2-7b": _starcoder2(32, 4608, 36, 4, 18432, 1000000.0),
    "starcoder2-15b": {**_starcoder2(40, 6144, 48, 4, 24576, 100000.0), "tied": False},
    # Hugging Face 2025, the model's config.json: every fourth layer has no position encoding
    "smollm3-3b": {
        **_llama(36, 2048, 16, 4, 11008, 65536, 128256),
        "rope_base": 5000000.0,
        "rope_layers": (1, 1, 1, 0),
        "norm_eps": 1e-6,
        "tied": True,
    },
    # IBM Research 2024, the models' config.json
    "granite3.1-2b": _granite(40, 2048, 32, 8, 8192, 0.015625, 8.0),
    "granite3.1-8b": {**_granite(40, 4096, 32, 8, 12800, 0.0078125, 16.0), "tied": True},
    # Bellagente et al. 2024, arXiv 2402.17834
    "stablelm2-1.6b": {
        **_llama(24, 2048, 32, 32, 5632, 4096, 100352),
        "norm": "layernorm",
        "rope_fraction": 0.25,
        "qkv_bias": True,
    },
    # Liu et al. 2019, arXiv 1907.11692
    "roberta-125m": _roberta(12, 768, 12),
    "roberta-355m": _roberta(24, 1024, 16),
    # Devlin et al. 2018, arXiv 1810.04805: BERT base
    "bert-110m": {
        **_bert(12, 768, 12),
        "norm_placement": "post",
        "norm_eps": 1e-12,
        "activation": "gelu",
    },
    # Shoeybi et al. 2019, arXiv 1909.08053, section 5.3; Megatron-LM's example scripts train the first model
    "bert-345m": _bert(24, 1024, 16),
    "bert-1.3b": _bert(24, 2048, 32),
    "bert-3.9b": _bert(48, 2560, 40),
    # Raffel et al. 2020, arXiv 1910.10683, section 3.7, with the architecture of T5 in Megatron-LM's example scripts
    "t5-220m": _t5(12, 768, 12, 64, 3072),
    "t5-770m": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # trained with fairseq, following Shoeybi et al. 2019,
    # https://github.com/facebookresearch/fairseq/tree/main/examples/megatron_11b
    "megatron-11b": {
        **_gpt(72, 3072, 32, 1024, 51200),
        "ffn": 18432,
        "position": "sinusoidal",
        "position_offset": 2,
        "embedding_scale": True,
        "activation": "gelu",
    },
}
