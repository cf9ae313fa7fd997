"""Names and parameter order of Megatron-LM's modules in each era, for reading and writing checkpoints.

An era is an entry in `ERAS`: a range of releases that use the same module names. The names of every era are translated
to common names, which are those of legacy checkpoints since 2023-09. In common names, `encoder` is the only stack of
GPT, Llama and BERT. Megatron-core calls GPT's stack `decoder`. Source: Megatron-LM 23.06 to Megatron-core 0.18. This
module does not depend on files or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from mega.core.checkpoint.forms.keys import translated
from mega.core.checkpoint.own.pieces import CheckpointError

Era = Literal["legacy", "legacy-layernorm", "core-local", "core"]
"""The names of the eras, in this order: legacy checkpoints since 2023-09, earlier legacy checkpoints, Megatron-core
with local modules, and Megatron-core with Transformer Engine."""

STYLES: dict[str, Era] = {
    "megatron": "legacy",
    "megatron-23.06": "legacy-layernorm",
    "mcore": "core",
    "core": "core",
    "mcore-local": "core-local",
}
"""Value of --saver -> the era whose module names are written."""

LEAVE = "give --no-load-optim to take the weights alone"

# Names

WORDS = "embedding.word_embeddings.weight"
TIED_COPY = "word_embeddings_for_head.weight"

LEGACY = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.embed_positions": "embedding.position_embeddings",
    "model.norm": "encoder.final_norm",
    "lm_head": "output_layer",
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "self_attention.query_key_value",
    "self_attn.k_proj": "self_attention.query_key_value",
    "self_attn.v_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "mlp.router",
    "mlp.shared_expert_gate": "mlp.shared_expert_gate",
    "mlp.gate_proj": "mlp.dense_h_to_4h",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""The project's module names -> common names."""

BERT = {
    "model.embed_types": "embedding.tokentype_embeddings",
    "pooler.dense": "pooler.dense",
    "lm_head.dense": "lm_head.dense",
    "lm_head.norm": "lm_head.norm",
    "binary_head": "binary_head",
    "classification_head": "classification_head",
    "multichoice_head": "multichoice_head",
}
DECODER = {
    "model.norm": "decoder.final_norm",
    "encoder_attn_layernorm": "post_attention_norm",
    "encoder_attn.q_proj": "inter_attention.query",
    "encoder_attn.k_proj": "inter_attention.key_value",
    "encoder_attn.v_proj": "inter_attention.key_value",
    "encoder_attn.o_proj": "inter_attention.dense",
    "post_attention_layernorm": "post_inter_attention_norm",
}
"""The project's module names in T5's decoder -> common names within the decoder's stack, where they differ from
GPT's."""

RETRIEVER = {
    "inter_attn_layernorm": "post_attention_norm",
    "inter_attn.q_proj": "inter_attention.query",
    "inter_attn.k_proj": "inter_attention.key_value",
    "inter_attn.v_proj": "inter_attention.key_value",
    "inter_attn.o_proj": "inter_attention.dense",
    "post_attention_layernorm": "post_inter_attention_norm",
}
"""The project's module names -> common names, for Retro: the layers that attend to retrieved neighbours, and the first
layer of the neighbours' encoder."""

CORE_DECODER = {
    "post_attention_norm.": "pre_cross_attn_layernorm.",
    "post_inter_attention_norm.": "pre_mlp_layernorm.",
    "inter_attention.query.": "cross_attention.linear_q.",
    "inter_attention.key_value.": "cross_attention.linear_kv.",
    "inter_attention.dense.": "cross_attention.linear_proj.",
}
"""Common names in a T5 decoder -> Megatron-core's names, where they differ from GPT's."""

CORE_HEADS = {
    "gpt": {TIED_COPY: "output_layer.weight"},
    "bert": {
        "lm_head.bias": "output_layer.bias",
        "lm_head.norm.": "lm_head.layer_norm.",
        TIED_COPY: "output_layer.weight",
    },
    "t5": {"lm_head.bias": "lm_head.output_layer.bias", TIED_COPY: "lm_head.output_layer.weight"},
}
"""Family -> {common name of a head's tensor: Megatron-core's name}."""

ALIASES = {
    "t5": {
        "position_embeddings.weight": "embedding.position_embeddings.weight",
        "output_layer.weight": "lm_head.output_layer.weight",
        "output_layer.bias": "lm_head.output_layer.bias",
    }
}
"""Family -> {common name: second name}, for tensors that Megatron-core's modules store under two names. Both names are
written."""

OWN_STACKS = ("bert", "t5")
"""Model families whose layer stacks keep their common names in Megatron-core."""

HEADS = ("lm_head.", "binary_head.", "classification_head.", "multichoice_head.")
"""Prefixes of the common names of the tensors that legacy checkpoints store outside their `language_model`."""


NORMS = {
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "post_inter_attention_norm.": "post_inter_attention_layernorm.",
    ".final_norm.": ".final_layernorm.",
    "lm_head.norm.": "lm_head.layernorm.",
}
"""Segments of common names -> segments of names in legacy checkpoints before 2023-09."""

CORE = {
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "pre_mlp_layernorm.",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    ".final_norm.": ".final_layernorm.",
}
"""Segments of common names -> segments of Megatron-core's names."""

TRANSFORMER_ENGINE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Segments of names with Megatron-core's local modules -> segments of names with Transformer Engine, whose linear
layers contain the norms that precede them."""

_EXPERT = re.compile(r"\.mlp\.(experts\.(\d+)|shared_expert)\.")
"""Pattern for the part of a logical tensor's name that identifies an expert or the shared expert."""

_CORE_EXPERTS = (
    (re.compile(r"\.mlp\.experts\.(?:local_experts\.)?(\d+)\."), r".mlp.local_experts.\1."),
    (re.compile(r"\.mlp\.experts\.(linear_fc\d)\.(weight|bias)(\d+)$"), r".mlp.local_experts.\3.\1.\2"),
    (re.compile(r"\.mlp\.shared_experts\.gate_weight$"), ".mlp.shared_expert_gate.weight"),
    (re.compile(r"(experts\.(?:\d+\.)?)linear_fc1\."), r"\1dense_h_to_4h."),
    (re.compile(r"(experts\.(?:\d+\.)?)linear_fc2\."), r"\1dense_4h_to_h."),
)
"""Patterns for names of expert tensors in any era -> common names, which are those of Megatron-LM's layers of late
2023. Names in release 23.06 lack `local_`. Names in Megatron-core contain `experts.local_experts` or, with grouped
GEMM, end with the expert's index."""

BALANCE_BIAS, THRESHOLDS = ".mlp.router.expert_bias", ".mlp.router.qb_beta"
"""Suffixes of tensors that balance the load of experts: the bias added to router scores when experts are chosen, and
the thresholds of the router choice `quantile` (Megatron-core 0.19)."""

BALANCES = (BALANCE_BIAS, THRESHOLDS)
"""Suffixes of tensors that are not parameters, and therefore have no gradient and no moments."""

# Order

_STACKS = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "embedding.tokentype_embeddings",
    "encoder.layers",
    "encoder.final_norm",
    "decoder.layers",
    "decoder.final_norm",
    "mtp",
)
"""Modules of a model in the order of its parameters, without the modules that only the last pipeline stage has
(`Modules.last`)."""

_CORE_FROM_QKV = (
    "self_attention.query_key_value",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "post_attention_norm",
    "inter_attention.dense",
    "inter_attention.query",
    "inter_attention.key_value",
    "post_inter_attention_norm",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    "mlp.router",
    "mlp.local_experts.0.dense_h_to_4h",
    "mlp.local_experts.0.dense_4h_to_h",
    "mlp.shared_expert_gate",
    "mlp.shared_experts.dense_h_to_4h",
    "mlp.shared_experts.dense_4h_to_h",
)


@dataclass(frozen=True)
class Modules:
    """The module names of one era of Megatron-LM."""

    inside: tuple[str, ...]
    """Common names of a block's modules, in the order of the block's parameters."""
    last: tuple[str, ...]
    """Common names of the modules that only the last pipeline stage has, in the order of their parameters."""
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs of (segment of a common name, segment of the era's name)."""
    core: bool = False
    """Whether the modules are Megatron-core's, whose checkpoints store a flat dict."""


_LEGACY = Modules(
    inside=(
        "input_norm",
        "self_attention.query_key_value",
        "self_attention.dense",
        "post_attention_norm",
        "inter_attention.query",
        "inter_attention.key_value",
        "inter_attention.dense",
        "post_inter_attention_norm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        "mlp.router",
        "mlp.local_experts.0.dense_h_to_4h",
        "mlp.local_experts.0.dense_4h_to_h",
    ),
    last=(
        "pooler.dense",
        "output_layer",
        "word_embeddings_for_head",
        "lm_head",
        "lm_head.dense",
        "lm_head.norm",
        "binary_head",
        "classification_head",
        "multichoice_head",
    ),
)
_CORE = Modules(
    inside=("input_norm", "self_attention.dense", *_CORE_FROM_QKV),
    last=(
        "lm_head.dense",
        "lm_head.norm",
        "output_layer",
        "word_embeddings_for_head",
        "lm_head",
        "binary_head",
        "pooler.dense",
    ),
    renames=tuple(CORE.items()),
    core=True,
)
ERAS: dict[Era, Modules] = {
    "legacy": _LEGACY,
    "legacy-layernorm": replace(_LEGACY, renames=tuple(NORMS.items())),
    "core-local": _CORE,
    "core": replace(
        _CORE,
        inside=("self_attention.dense", "input_norm", *_CORE_FROM_QKV),
        renames=(*CORE.items(), *TRANSFORMER_ENGINE.items()),
    ),
}

_LAYER = re.compile(r"((?:encoder|decoder)\.layers)\.(\d+)\.(.+)")
_AHEAD = re.compile(r"(mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
"""Pattern for names in a multi-token prediction layer, in Megatron-core and in this project."""
_AHEAD_FIRST, _AHEAD_LAST = ("enorm", "hnorm", "eh_proj"), "final_norm"
"""The modules of a multi-token prediction layer before and after its transformer layer."""


def stack_of(name: str) -> tuple[str, str]:
    """Return (the stack of a logical tensor, the tensor's name in a model with one stack).

    >>> stack_of("model.decoder.layers.1.mlp.up_proj.bias"), stack_of("model.norm.weight")
    (('decoder', 'model.layers.1.mlp.up_proj.bias'), ('encoder', 'model.norm.weight'))
    """
    match = re.fullmatch(r"model\.(encoder|decoder)\.(.+)", name)
    return (match[1], f"model.{match[2]}") if match else ("encoder", name)


def has_two_stacks(names: Collection[str]) -> bool:
    """Whether the names of a checkpoint's tensors describe an encoder-decoder model. A model with a retriever has one
    stack."""
    return any(re.search(r"decoder\.layers\..*\.(inter|cross)_attention\.", name) for name in names)


def common_head(name: str) -> str:
    """Return the common name of a head's tensor, given its name in any era; return other names unchanged. The bias of
    an output layer belongs to the language-model head.

    >>> common_head("lm_head.layernorm.bias"), common_head("lm_head.output_layer.bias")
    ('lm_head.norm.bias', 'lm_head.bias')
    """
    name = re.sub(r"^lm_head\.(layernorm|layer_norm)\.", "lm_head.norm.", name).replace(
        "lm_head.output_layer.", "output_layer."
    )
    return name.replace("output_layer.bias", "lm_head.bias")


def legacy_name(name: str, layer: int | None = None) -> str:
    """Return the common name of a logical tensor. layer: index of the tensor's block within the pipeline stage.

    >>> legacy_name("model.layers.7.self_attn.q_proj.weight", layer=1)
    'encoder.layers.1.self_attention.query_key_value.weight'
    """
    if expert := _EXPERT.search(name):
        dense = legacy_name(name.replace(expert[0], ".mlp."), layer)
        network = "shared_experts" if expert[2] is None else f"local_experts.{expert[2]}"
        return dense.replace(".mlp.", f".mlp.{network}.")
    if ahead := _AHEAD.fullmatch(name):
        if ".transformer_layer." not in name:
            return name.replace("final_layernorm", _AHEAD_LAST)
        return name.replace(ahead[3], legacy_name(f"model.layers.0.{ahead[3]}", 0).removeprefix("encoder.layers.0."))
    stack, name = stack_of(name)
    modules = LEGACY | (BERT if stack == "encoder" else DECODER)
    name = name.replace(".gate.e_score_correction_bias", ".gate.expert_bias")
    return common_head(translated(name, modules, f"{stack}.layers.{{}}.", layer))


def retriever_name(name: str, layer: int) -> str:
    """Return the common name of a tensor in a layer that attends to retrieved neighbours. layer: as in `legacy_name`.

    >>> retriever_name("model.layers.5.retriever.layers.0.inter_attn.k_proj.weight", 5)
    'encoder.layers.5.retriever.layers.0.inter_attention.key_value.weight'
    """
    match = re.fullmatch(r"model\.layers\.\d+\.(?:retriever\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None, name
    encoder, module, kind = match.groups()
    modules = LEGACY if encoder not in (None, "0") else LEGACY | RETRIEVER
    inside = "" if encoder is None else f"retriever.layers.{encoder}."
    return f"encoder.layers.{layer}.{inside}{modules[module]}.{kind}"


def common_name(name: str, two_stacks: bool = False) -> str:
    """Translate a tensor name of any era to the common name. two_stacks: whether the model is an encoder-decoder model.

    >>> common_name("language_model.transformer.layers.0.attention.dense.bias")
    'encoder.layers.0.self_attention.dense.bias'
    >>> common_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'encoder.layers.0.post_attention_norm.weight'
    >>> common_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", two_stacks=True)
    'decoder.layers.0.post_inter_attention_norm.weight'
    """
    for pattern, common in _CORE_EXPERTS:
        name = pattern.sub(common, name)
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    elif name.startswith(("encoder.", "decoder.", "mtp.")):
        for local, engine in TRANSFORMER_ENGINE.items():
            name = name.replace(engine, local)
        of_decoder = CORE_DECODER if two_stacks and name.startswith("decoder.") else {}
        for legacy, core in (*of_decoder.items(), *CORE.items()):
            name = name.replace(core, legacy)
        name = name if two_stacks else name.replace("decoder.", "encoder.", 1)
    name = re.sub(r"^transformer\.", "encoder.", name)
    name = name.replace(".attention.", ".self_attention.")
    for norm in ("input_layernorm", "post_attention_layernorm", "post_inter_attention_layernorm", "final_layernorm"):
        name = name.replace(norm, norm.replace("layernorm", "norm"))
    return common_head(re.sub(r"^(word|position|tokentype)_embeddings\.", r"embedding.\1_embeddings.", name))


def styled(name: str, era: Era, family: str = "gpt") -> str:
    """Translate a common name to the era's name, as a dotted path in the checkpoint's nested dict.

    >>> styled("encoder.layers.0.input_norm.weight", "core")
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    >>> styled("encoder.final_norm.weight", "core", "bert"), styled("lm_head.norm.bias", "legacy-layernorm", "bert")
    ('encoder.final_layernorm.weight', 'lm_head.layernorm.bias')
    """
    modules = ERAS[era]
    renames = modules.renames
    if modules.core:
        of_decoder = CORE_DECODER if name.startswith("decoder.") else {}
        renames = (*of_decoder.items(), *CORE_HEADS.get(family, CORE_HEADS["gpt"]).items(), *renames)
    for common, of_era in renames:
        name = name.replace(common, of_era)
    if modules.core and "experts." in name:
        name = name.replace(".mlp.local_experts.", ".mlp.experts.local_experts.")
        name = name.replace(".dense_h_to_4h.", ".linear_fc1.").replace(".dense_4h_to_h.", ".linear_fc2.")
    if modules.core:
        name = name.replace(".mlp.shared_expert_gate.weight", ".mlp.shared_experts.gate_weight")
    if modules.core:
        return name if family in OWN_STACKS else re.sub(r"^encoder\.", "decoder.", name)
    return name if name == TIED_COPY or name.startswith(HEADS) else f"language_model.{name}"


def era_of(tree: object) -> Era:
    """Return the era whose module names a state dict contains. tree: the model's state dict in a file.

    >>> era_of({"decoder.layers.0.mlp.linear_fc1.layer_norm_weight": None})
    'core'
    """
    if not isinstance(tree, dict) or "language_model" in tree:
        return "legacy"
    return (
        "core" if any(f".{engine}" in name for name in tree for engine in TRANSFORMER_ENGINE.values()) else "core-local"
    )


_OF_EXPERT = re.compile(r"mlp\.local_experts\.(\d+)\.dense_(h_to_4h|4h_to_h)")


def parameter_place(name: str, era: Era = "legacy") -> tuple[int, int, int, int, bool]:
    """Return a sort key that puts the common names of one model chunk into the order of Megatron's parameters.

    Errors: CheckpointError for a parameter that Megatron's models do not have.

    >>> names = ["output_layer.weight", "encoder.layers.0.mlp.dense_4h_to_h.bias", "encoder.layers.0.input_norm.weight"]
    >>> [name.rpartition(".")[0] for name in sorted(names, key=parameter_place)]
    ['encoder.layers.0.input_norm', 'encoder.layers.0.mlp.dense_4h_to_h', 'output_layer']
    """
    module, _, kind = name.rpartition(".")
    match = _LAYER.fullmatch(module) or _AHEAD.fullmatch(module)
    module_path, layer, inner = (match[1], int(match[2]), match[3]) if match else (module, 0, "input_norm")
    outside, inside, number = _STACKS + ERAS[era].last, ERAS[era].inside, 0
    if module_path == "mtp":
        inside = (*_AHEAD_FIRST, *inside, _AHEAD_LAST)
    if expert := _OF_EXPERT.fullmatch(inner):
        inner, number = "mlp.local_experts.0.dense_h_to_4h", 2 * int(expert[1]) + (expert[2] == "4h_to_h")
    if module_path not in outside or inner not in inside or kind not in ("weight", "bias", "expert_bias", "qb_beta"):
        raise CheckpointError(f"{name}: its place among Megatron-LM's parameters is not known; {LEAVE}")
    return outside.index(module_path), layer, inside.index(inner), number, kind != "weight"
