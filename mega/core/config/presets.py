"""Families and presets: rows of values, nothing else.

A family is what the name of a training script used to mean; a preset is a published model. Both are plain
mappings of option names to values and override Megatron-LM's defaults; the TOML file overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]


class FamilyDefaults(NamedTuple):
    """A family's defaults, and what its options can say of it."""

    values: Values
    sentencepiece: str = "GPTSentencePieceTokenizer"
    """The kind of tokenizer that a SentencePiece model is."""
    vocabulary: str = "GPT2BPETokenizer"
    """The kind of tokenizer that a --vocab-file alone is."""
    stacks: int = 1
    """Stacks of layers, each of which reads a text: 2 with --decoder-layers."""
    unties: bool = True
    """The output layer may have a matrix of its own (--no-tied)."""
    classifies: bool = False
    """It can be built with a head that classifies rows or chooses one of them (--head)."""
    writes_ends: bool = True
    """Its samples hold the tokens for the beginning and end of a text."""


FAMILY_DEFAULTS: dict[str, FamilyDefaults] = {}
"""Every family by its name: the choices of --family."""


def register_family(name: str, values: Values, **more: Any) -> None:
    """Make `name` a choice of --family with defaults `values`; `more` are the other fields of `FamilyDefaults`."""
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


def _gpt(layers: int, hidden: int, heads: int, seq_length: int, vocab: int | None) -> dict[str, Any]:
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
) -> dict[str, Any]:
    return {**_gpt(layers, hidden, heads, seq_length, vocab), "family": "llama", "kv_heads": kv_heads, "ffn": ffn}


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool, seq_length: int
) -> dict[str, Any]:
    """Biases of query, key and value only; the larger models' table of tokens has 128 rows more."""
    rest = {"qkv_bias": True, "norm_eps": 1e-6, "rope_base": 1e6, "tied": tied}
    return {**_llama(layers, hidden, heads, kv_heads, ffn, seq_length, 151936 if hidden < 3072 else 152064), **rest}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> dict[str, Any]:
    """Norms of heads, which are 128 wide whatever the hidden width is."""
    rest = {"head_dim": 128, "qk_norm": True, "norm_eps": 1e-6, "rope_base": 1e6, "tied": tied}
    return {**_llama(layers, hidden, heads, 8, ffn, 32768, 151936), **rest}


def _bert(layers: int, hidden: int, heads: int, vocab: int | None = 30524) -> dict[str, Any]:
    """The vocabulary is that of BERT's file of 30,522 pieces with [BOS] and [EOS], as Megatron-LM has it."""
    return {**_gpt(layers, hidden, heads, 512, vocab), "family": "bert", "sample_kind": "bert"}


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, vocab: int | None = 30624) -> dict[str, Any]:
    """Encoder and decoder alike. The vocabulary is BERT's with [BOS], [EOS] and 100 sentinels."""
    return {**_gpt(layers, hidden, heads, 512, vocab), "family": "t5", "head_dim": head_dim, "ffn": ffn}


LLAMA31_ROPE: Values = {"rope_base": 500000.0, "rope_scaling": "llama3"}
"""Llama 3.1: the other numbers of its rope scaling are the options' defaults."""

LLAMA32: Values = {"rope_scaling_factor": 32.0, "tied": True}
"""Llama 3.2's text models, against 3.1."""

PRESETS: Mapping[str, Values] = {
    # For tests and first steps; the vocabulary is the tokenizer's.
    "tiny-gpt": _gpt(2, 64, 4, 64, None),
    "tiny-llama": _llama(2, 64, 4, 2, 192, 64, None),
    "tiny-bert": {**_bert(2, 64, 4, None), "seq_length": 64},
    "tiny-t5": {**_t5(2, 64, 4, 16, 256, None), "seq_length": 64, "decoder_seq_length": 32},
    # Radford et al. 2019, and the size that Megatron-LM's example scripts train
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
    # Yuan 1.0, Wu et al. 2021, arXiv 2110.04725, and its 4.7B sibling of the ASC22 competition
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
    # Jiang et al. 2023, arXiv 2310.06825: each token sees 4,096 in a layer
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
    # Devlin et al. 2018, arXiv 1810.04805: BERT base
    "bert-110m": {
        **_bert(12, 768, 12),
        "norm_placement": "post",
        "norm_eps": 1e-12,
        "activation": "gelu",
    },
    # Shoeybi et al. 2019, arXiv 1909.08053, section 5.3; the first is what Megatron-LM's example scripts train
    "bert-345m": _bert(24, 1024, 16),
    "bert-1.3b": _bert(24, 2048, 32),
    "bert-3.9b": _bert(48, 2560, 40),
    # Raffel et al. 2020, arXiv 1910.10683, section 3.7, built as Megatron-LM builds the first in its example scripts
    "t5-220m": _t5(12, 768, 12, 64, 3072),
    "t5-770m": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # Shoeybi et al. trained by fairseq, https://github.com/facebookresearch/fairseq/tree/main/examples/megatron_11b
    "megatron-11b": {
        **_gpt(72, 3072, 32, 1024, 51200),
        "ffn": 18432,
        "position": "sinusoidal",
        "position_offset": 2,
        "embedding_scale": True,
        "activation": "gelu",
    },
}
