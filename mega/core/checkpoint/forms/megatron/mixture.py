"""Convert Megatron's arguments for a mixture of experts. Arguments of Megatron-core 0.18 (0.19 for the router choice
`quantile`) are read and written; arguments of the Switch layers of 2023 are only read.

In Megatron-core, `load_balancing_type` and its coefficients may be lists, and `moe_layer_freq` may be a number or a
list. This module does not read tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.mixture import has_experts
from mega.core.config.sections import ModelConfig

SAME: dict[str, str] = {
    "experts_chosen": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "router_scale": "moe_router_topk_scaling_factor",
    "router_groups": "moe_router_num_groups",
    "router_groups_chosen": "moe_router_group_topk",
    "router_dtype": "moe_router_dtype",
    "router_jitter": "moe_input_jitter_eps",
    "z_loss": "moe_z_loss_coeff",
    "balance_bias": "moe_router_enable_expert_bias",
    "balance_bias_rate": "moe_router_bias_update_rate",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "shared_gate": "moe_shared_expert_gate",
}
"""The project's option -> Megatron-core's argument with the same meaning. None in Megatron-core means the project's
default."""

SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt-softplus"}
BALANCES = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
CHOICES = {"sinkhorn": "sinkhorn", "quantile_balancing": "quantile"}
QUANTILE_EMA = "moe_router_quantile_balancing_ema"
"""An argument of Megatron-core 0.19 that older releases do not accept. It is written only for the router choice
`quantile`."""

UNCHANGED: dict[str, tuple[object, ...]] = {
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "moe_router_force_load_balancing": (False, None),
    "moe_router_force_biased": (None,),
    "moe_mlp_glu_interleave_size": (None,),
}
"""Arguments that change a model's computation but not its tensors -> the values that the project supports."""


def mixture_of(values: Mapping[str, object], layers: int, where: str) -> dict[str, object]:
    """Return the MoE options that the arguments describe; {} for a dense model. Errors: CheckpointError naming an
    argument with an unsupported value."""
    experts = values.get("num_experts")
    if not experts:
        return {}
    if type(experts) is not int or experts < 1:
        raise CheckpointError(f"{where}: args.num_experts {experts!r:.40}: must be a positive whole number")
    for name, valid in UNCHANGED.items():
        if values.get(name) not in valid:
            raise CheckpointError(f"{where}: args.{name} {values[name]!r:.40} (valid: {valid[0]!r})")
    score = values.get("moe_router_score_function") or "softmax"
    if not isinstance(score, str) or score not in SCORES:
        valid_scores = ", ".join(SCORES)
        raise CheckpointError(f"{where}: args.moe_router_score_function {score!r:.40} (valid: {valid_scores})")
    same = {
        option: _checked(option, value, where)
        for option, name in SAME.items()
        if (value := values.get(name)) is not None
    }
    after = score != "softmax" or not values.get("moe_router_pre_softmax")
    options = {"experts": experts, "router_score": SCORES[score], "router_normalize": after}
    return {**options, **same, **_layers(values, layers, where), **_balance(values, where)}


WHOLE = ("experts_chosen", "expert_ffn", "shared_ffn", "router_groups", "router_groups_chosen")
WORDS = {"router_dtype": ("fp32", "fp64"), "drop_policy": ("probs", "position")}
SWITCHES = ("balance_bias", "pad_to_capacity", "shared_gate")


def _checked(name: str, value: object, where: str) -> object:
    """Check that an argument has the type and range of its option. Errors: CheckpointError naming the argument if the
    check fails."""
    if name in WHOLE:
        valid = type(value) is int and value > 0
    elif name in WORDS:
        valid = value in WORDS[name]
    elif name in SWITCHES:
        valid = isinstance(value, bool)
    else:
        valid = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not valid:
        raise CheckpointError(f"{where}: args.{SAME[name]} {value!r:.40}: is not a value that Megatron-core has")
    return value


def _layers(values: Mapping[str, object], layers: int, where: str) -> dict[str, object]:
    """Return the options that determine which layers are MoE layers. Megatron-core's flag is a Python expression for a
    list; files contain the value of the expression."""
    frequency = values.get("moe_layer_freq", 1)
    frequency = 1 if frequency is None else frequency
    if type(frequency) is int and frequency > 0:
        return {"experts_every": frequency}
    if not isinstance(frequency, list) or len(frequency) != layers or any(each not in (0, 1) for each in frequency):
        raise CheckpointError(
            f"{where}: args.moe_layer_freq {frequency!r:.60}: must be a number, or 0 or 1 for each layer"
        )
    return {"dense_layers": tuple(number for number, each in enumerate(frequency) if not each)}


def _balance(values: Mapping[str, object], where: str) -> dict[str, object]:
    kinds, coefficients = values.get("moe_router_load_balancing_type"), values.get("moe_aux_loss_coeff")
    kinds = kinds if isinstance(kinds, list) else ["aux_loss" if kinds is None else kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [0.0 if coefficients is None else coefficients]
    if unknown := [kind for kind in kinds if kind not in (*BALANCES, *CHOICES, "none")]:
        raise CheckpointError(f"{where}: args.moe_router_load_balancing_type {unknown[0]!r:.40} is not known")
    kinds = [str(kind) for kind in kinds]
    if choices := [CHOICES[kind] for kind in kinds if kind in CHOICES]:
        ema = values.get(QUANTILE_EMA) or 0.0 if choices[0] == "quantile" else 0.0
        if isinstance(ema, bool) or not isinstance(ema, int | float) or not 0 <= ema < 1:
            raise CheckpointError(f"{where}: args.{QUANTILE_EMA} {ema!r:.40}: must be at least 0 and below 1")
        return {"router_choice": choices[0], "router_quantile_ema": float(ema)}
    if kinds == ["none"]:
        return {}
    if len(coefficients) == 1:
        coefficients = coefficients * len(kinds)
    if len(coefficients) != len(kinds) or any(not isinstance(each, int | float) for each in coefficients):
        raise CheckpointError(f"{where}: args.moe_aux_loss_coeff {coefficients!r:.60}: must be one for each loss")
    return {"balance": tuple(BALANCES[kind] for kind in kinds), "balance_loss": tuple(map(float, coefficients))}


def with_switch(model: ModelConfig, values: Mapping[str, object]) -> ModelConfig:
    """Return a model with the Switch layers of 2023, whose arguments contain only the number of experts. The argument
    `expert_parallel` distinguishes the layers of late 2023 from those of release 23.06."""
    if "expert_parallel" in values:
        return replace(model, experts_chosen=1, router_bias=True, router_choice="sinkhorn")
    return replace(model, experts_chosen=1, router_bias=True, router_normalize=False)


def mixture_arguments(options: ModelConfig) -> dict[str, object]:
    """Return Megatron-core's arguments for an MoE model; {} for a dense model. Errors: CheckpointError naming an option
    that Megatron-core does not support."""
    if not options.experts:
        return {}
    if options.router_bias:
        raise CheckpointError("router_bias True: Megatron-core has only False")
    if options.router_score != "softmax" and options.experts_chosen > 1 and not options.router_normalize:
        raise CheckpointError(f"router_normalize False with {options.router_score} scores: Megatron-core has only True")
    if options.router_group_best not in (None, options.experts_chosen // (options.router_groups_chosen or 1)):
        raise CheckpointError(f"router_group_best {options.router_group_best}: Megatron-core has only chosen / groups")
    is_mixture = [int(has_experts(options, number)) for number in range(options.layers)]
    every = options.experts_every if not (options.experts_from or options.dense_layers) else is_mixture
    core_names = {option: name for name, option in (BALANCES | CHOICES).items()}
    kinds = [core_names[each] for each in options.balance]
    balance: object = kinds if len(kinds) > 1 else kinds[0] if any(options.balance_loss) else "none"
    if options.router_choice != "largest":
        balance = core_names[options.router_choice]
    coefficients = options.balance_loss
    return {
        "num_experts": options.experts,
        "moe_layer_freq": every,
        "moe_router_load_balancing_type": balance,
        "moe_aux_loss_coeff": list(coefficients) if len(coefficients) > 1 else coefficients[0],
        "moe_router_score_function": next(name for name, option in SCORES.items() if option == options.router_score),
        "moe_router_pre_softmax": options.router_score == "softmax" and not options.router_normalize,
        "expert_model_parallel_size": 1,
        "moe_grouped_gemm": False,
        **{core_names: _said(options, option) for option, core_names in SAME.items()},
        **({QUANTILE_EMA: options.router_quantile_ema} if options.router_choice == "quantile" else {}),
    }


def _said(options: ModelConfig, name: str) -> object:
    """Return the value of an option for Megatron-core. Some defaults are converted to None, because Megatron-core tests
    these arguments for None."""
    value = getattr(options, name)
    if name == "expert_ffn":
        return options.ffn if value is None else value
    return None if value == {"router_scale": 1.0, "router_jitter": 0.0, "z_loss": 0.0}.get(name, ...) else value


def mixture_flags(arguments: Mapping[str, object]) -> list[str]:
    """Return the flags with which Megatron-core builds the MoE layers that `arguments` describe."""
    if "num_experts" not in arguments:
        return []
    names = ("num_experts", "moe_layer_freq", *SAME.values(), "moe_router_score_function", "moe_router_pre_softmax")
    names += ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    names += (QUANTILE_EMA,) if QUANTILE_EMA in arguments else ()
    names += ("expert_model_parallel_size",) if arguments["expert_model_parallel_size"] != 1 else ()
    flags = []
    for name in names:
        flag, value = "--" + name.replace("_", "-"), arguments[name]
        if isinstance(value, list):
            numbers = value if name != "moe_layer_freq" else ["".join(str(value).split())]
            flags.append(f"{flag} {' '.join(map(str, numbers))}")
        elif value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag} {value}")
    return flags
