"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE, whose layers are Llama's except for the router and the
experts.

Files usually store each expert's matrices separately. Since version 5, transformers stacks the matrices of a layer's
experts in memory, with gate and up projection concatenated, and writes the stacks if `save_original_format=False`;
`unstacked` presents these stacks under the experts' names. The key `router_aux_loss_coef` is ignored, because the
balance loss of transformers combines all layers and sequences, which no option of the project expresses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from mega.core.checkpoint.forms.families.family import LLAMA_NAMES, HubFamily, Rows, StoredModule
from mega.core.checkpoint.forms.families.keys import CLIP_QKV, Config, Flag, Number, Only, Unread, Values, Whole, flag
from mega.core.checkpoint.forms.families.layers import LAYERS, Window
from mega.core.checkpoint.forms.families.llama import ATTENTION_BIAS, LLAMA, VALUES, kv_heads
from mega.core.checkpoint.forms.families.rope import FULL, SLIDING, RopeKeys
from mega.core.checkpoint.forms.keys import whole_in
from mega.core.checkpoint.forms.mapping import Source
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors, whole_box
from mega.core.config.mixture import has_experts
from mega.core.config.sections import ModelConfig

# Keys


def counted(option: str, default: int) -> Whole:
    return Whole(option, lambda config: default)


@dataclass(frozen=True)
class ExpertWidth:
    """The key `intermediate_size` in a family in which all layers are MoE layers."""

    names = ()

    def read(self, config: Config, name: str, where: str) -> Values:
        return {"ffn": whole_in(config, name, where)}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.expert_ffn or model.ffn}


class OwnWidth(Whole):
    """A key for the width of an expert, in a family whose dense layers have a separate width."""

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: model.expert_ffn or model.ffn}


@dataclass(frozen=True)
class TwoNames(Whole):
    """A key with an integer value that newer files store under a different name. other: the new name."""

    other: str = ""

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.other,)

    def read(self, config: Config, name: str, where: str) -> Values:
        return super().read(config, self.other if config.get(name) is None and self.other in config else name, where)


@dataclass(frozen=True)
class SparseLayers:
    """The keys `decoder_sparse_step`, which is n if every n-th layer is an MoE layer, and `mlp_only_layers`, a list of
    layers that are always dense."""

    names = ("mlp_only_layers",)

    def read(self, config: Config, name: str, where: str) -> Values:
        step, dense = whole_in(config, name, where, 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(each) is not int or each < 0 for each in dense):
            raise CheckpointError(f"{where}: mlp_only_layers {dense!r}: must be numbers of layers")
        layers = whole_in(config, LAYERS, where)
        dense_layers = tuple(sorted({number for number in dense if number < layers}))
        return {"experts_from": step - 1, "experts_every": step, "dense_layers": dense_layers}

    def write(self, model: ModelConfig, name: str) -> Values:
        if model.experts_from == model.experts_every - 1:
            return {name: model.experts_every, "mlp_only_layers": list(model.dense_layers)}
        dense = [number for number in range(model.layers) if not has_experts(model, number)]
        return {name: 1, "mlp_only_layers": dense}


def alternating(config: Config, layers: int) -> list[str]:
    """Apply Qwen2-MoE's rule: every second layer of the first `max_window_layers` layers has the attention window."""
    bound = config.get("max_window_layers", 28)
    if type(bound) is not int or bound < 0:
        raise CheckpointError(f"config.json: max_window_layers {bound!r}: must be a whole number of at least 0")
    return [SLIDING if number % 2 == 0 and number < bound else FULL for number in range(layers)]


ROUTER = {"router_aux_loss_coef": Unread(), "output_router_logits": Unread()}
NORMALIZED = flag("router_normalize")

# Names


def gate_then_up(which: str) -> Rows:
    """Return the rows of an expert's "gate" or "up" in a matrix that consists of the gate projection, then the up
    projection."""
    position = ("gate", "up").index(which)

    def rows(model: ModelConfig) -> list[range]:
        width = model.expert_ffn or model.ffn
        return [range(position * width, (position + 1) * width)]

    return rows


STACKED = {
    **LLAMA_NAMES,
    **{
        f"mlp.experts.{{}}.{which}_proj": StoredModule("mlp.experts.{}.gate_up_proj", gate_then_up(which))
        for which in ("gate", "up")
    },
}
"""The names that `unstacked` assigns to the matrices of a stack."""

_STACK = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


def unstacked(source: Source) -> Source:
    """Return a source with a separate matrix for each expert. Errors: CheckpointError naming a matrix that is stored
    twice."""
    stacks = [
        match
        for name, (shape, _) in source.tensors.items()
        if (match := _STACK.fullmatch(name)) and len(shape) == 3 and 0 not in shape  # so a file bounds the number
    ]
    return Unstacked(source, stacks) if stacks else source


class Unstacked:
    """A source that presents stacks [experts, out, in] as matrices [out, in], each under the expert's name."""

    def __init__(self, source: Source, stacks: list[re.Match[str]]) -> None:
        self._source = source
        self._within: dict[str, tuple[str, int]] = {}
        tensors = dict(source.tensors)
        for stack in stacks:
            (experts, *shape), dtype = tensors.pop(stack[0])
            for number in range(experts):
                name = f"{stack[1]}{number}.{stack[2]}.weight"
                if name in source.tensors:
                    raise CheckpointError(f"{name}: is there twice, alone and in {stack[0]}")
                tensors[name] = (tuple(shape), dtype)
                self._within[name] = (stack[0], number)
        self.tensors: Tensors = tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        if name not in self._within:
            return self._source.read(name, box)
        stack, number = self._within[name]
        return self._source.read(stack, Box((number, *box.start), (1, *box.size)))[0]


def read_parameter(source: Source, family: HubFamily, name: str) -> torch.Tensor:
    """Return a parameter of a model in transformers from a folder that stores it under the same name, or as matrices
    of single experts, or as a router with the family's name.

    name: the parameter's name in transformers, without the prefix "model." if the folder's names lack it.
    """

    def read(stored: str) -> torch.Tensor:
        return source.read(stored, whole_box(source.tensors[stored][0]))

    if name in source.tensors:
        return read(name)
    prefix = family.prefix if name.startswith(family.prefix) else ""
    logical = f"model.{name.removeprefix(prefix)}"
    stack = _STACK.fullmatch(logical)
    if stack is None:
        return read(family.stored(logical, prefix)[0])
    projections = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else (stack[2],)
    experts: list[torch.Tensor] = []
    while True:
        modules = [f"{stack[1]}{len(experts)}.{projection}.weight" for projection in projections]
        names = [family.stored(module, prefix)[0] for module in modules]
        if names[0] not in source.tensors:
            return torch.stack(experts)
        experts.append(torch.cat([read(each) for each in names]))


# Families

mixtral = HubFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    words="Hugging Face's Mixtral",
    values=VALUES,
    keys={
        **LLAMA,
        **ROUTER,
        "num_key_value_heads": kv_heads(8),
        "intermediate_size": ExpertWidth(),
        "max_position_embeddings": RopeKeys(base=1e6),
        "rms_norm_eps": Number("norm_eps", 1e-5),
        "sliding_window": Window(),
        "num_local_experts": counted("experts", 8),
        "num_experts_per_tok": counted("experts_chosen", 2),
        "router_jitter_noise": Only((0.0, None)),
    },
    names={
        **LLAMA_NAMES,
        "mlp.gate": "block_sparse_moe.gate",
        **{
            f"mlp.experts.{{}}.{which}_proj": f"block_sparse_moe.experts.{{}}.{theirs}"
            for which, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
    fused=STACKED,
)

qwen3_moe = HubFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    words="Hugging Face's Qwen3-MoE",
    values={**VALUES, "qk_norm": True},
    keys={
        **LLAMA,
        **ROUTER,
        "num_key_value_heads": kv_heads(4),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": Only((False, None)),
        "sliding_window": Window(4096, switch=True, others=("max_window_layers",)),
        "num_experts": TwoNames("experts", lambda config: 128, "num_local_experts"),
        "num_experts_per_tok": counted("experts_chosen", 8),
        "moe_intermediate_size": OwnWidth("expert_ffn", lambda config: 768),
        "norm_topk_prob": NORMALIZED,
        "decoder_sparse_step": SparseLayers(),
    },
    fused=STACKED,
)

qwen2_moe = HubFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    words="Hugging Face's Qwen2-MoE",
    values={**VALUES, "shared_gate": True},
    keys={
        **LLAMA,
        **ROUTER,
        "num_key_value_heads": kv_heads(16),
        "qkv_bias": Flag(True, {"qkv_bias": True}, {"qkv_bias": False}),
        "sliding_window": Window(4096, alternating, switch=True, listed=True, others=("max_window_layers",)),
        "num_experts": counted("experts", 60),
        "num_experts_per_tok": counted("experts_chosen", 4),
        "moe_intermediate_size": OwnWidth("expert_ffn", lambda config: 1408),
        "shared_expert_intermediate_size": counted("shared_ffn", 5632),
        "norm_topk_prob": NORMALIZED,
        "decoder_sparse_step": SparseLayers(),
    },
    fused=STACKED,
)

olmoe = HubFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    words="Hugging Face's OLMoE",
    values={**VALUES, "qk_norm": True, "qk_norm_whole": True},
    keys={
        **LLAMA,
        **ROUTER,
        "intermediate_size": ExpertWidth(),
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": Only((False, None)),
        "rms_norm_eps": Number("norm_eps", 1e-5),
        "clip_qkv": CLIP_QKV,
        "num_experts": counted("experts", 64),
        "num_experts_per_tok": counted("experts_chosen", 8),
        "norm_topk_prob": NORMALIZED,
    },
    fused=STACKED,
)

FAMILIES = (mixtral, qwen3_moe, qwen2_moe, olmoe)
