"""Options of a mixture of experts: the number of experts, the router that chooses experts, and load balancing.

These options are part of the model section (sections.py). Without --experts every layer's feed-forward network is dense
and no other option of a mixture may be given. `check_mixture.py` contains the rules for these options. This module does
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mega.core.config.option import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Renamed,
    Section,
    option,
)

DECODERS = ("gpt", "llama")
"""Families of left-to-right language models."""

BALANCES = ("sequence", "microbatch", "global")
"""Scopes over which a loss can balance the experts' load."""

_SILENT: dict[str, str | None] = dict.fromkeys(
    ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
)
"""Values of --moe-router-load-balancing-type. Each value sets at most one of --router-choice and --balance."""


def _mixed(default: Any, help: str, **properties: Any) -> Any:
    """Return an option that is read only if the model has experts."""
    return option(default, help, needs={"experts": COUNT}, **properties)


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(Section):
    """Mixture of experts: the number of experts, the router, and load balancing."""

    experts: int = option(
        0,
        "number of experts per layer, of which each token uses --experts-chosen; 0 makes the feed-forward "
        "network dense",
        megatron="--num-experts",
        within=NOT_NEGATIVE,
        most=2**16,
        families=DECODERS,
    )
    experts_chosen: int = _mixed(
        2, "number of experts that each token uses", megatron="--moe-router-topk", within=COUNT
    )
    expert_ffn: int | None = _mixed(
        None, "width of one expert [ffn]", megatron="--moe-ffn-hidden-size", within=COUNT, most=2**24
    )
    experts_from: int = _mixed(
        0, "index of the first layer with experts; earlier layers are dense", within=NOT_NEGATIVE
    )
    experts_every: int = _mixed(
        1, "every n-th layer has experts, starting at --experts-from", megatron="--moe-layer-freq", within=COUNT
    )
    dense_layers: tuple[int, ...] = _mixed((), "indices of additional dense layers", within=NOT_NEGATIVE)
    shared_ffn: int | None = _mixed(
        None,
        "width of a shared expert, which every token uses in addition to the chosen experts [none]",
        megatron="--moe-shared-expert-intermediate-size",
        within=COUNT,
        most=2**24,
    )
    shared_gate: bool = option(
        False,
        "gate the shared expert's output with the sigmoid of a linear layer of the expert's input",
        megatron={"--moe-shared-expert-gate": True},
        needs={"shared_ffn": ()},
    )
    router_score: Literal["softmax", "sigmoid", "sqrt-softplus"] = _mixed(
        "softmax",
        "function that maps the router's logits to scores",
        megatron={
            "--moe-router-score-function": {
                "softmax": "softmax",
                "sigmoid": "sigmoid",
                "sqrtsoftplus": "sqrt-softplus",
            }
        },
    )
    router_normalize: bool = _mixed(
        True,
        "normalise the scores of the chosen experts to a sum of 1; if off, the softmax is computed over all experts",
        megatron={"--moe-router-pre-softmax": False},
    )
    router_scale: float = _mixed(
        1.0,
        "multiply the probabilities of the chosen experts by this",
        megatron="--moe-router-topk-scaling-factor",
        within=POSITIVE,
    )
    router_choice: Literal["largest", "sinkhorn", "quantile"] = _mixed(
        "largest",
        "how experts are chosen from the scores; sinkhorn and quantile balance the load over a microbatch",
        megatron={
            "--moe-router-load-balancing-type": Renamed(
                {**_SILENT, "sinkhorn": "sinkhorn", "quantile_balancing": "quantile"}
            ),
        },
    )
    router_quantile_ema: float = option(
        0.0,
        "with --router-choice quantile: decay of the thresholds' moving average",
        megatron="--moe-router-quantile-balancing-ema",
        within=BELOW_ONE,
        needs={"router_choice": ("quantile",)},
        on_resume="noted",
    )
    router_groups: int | None = _mixed(
        None,
        "number of groups of experts; a token's experts come from --router-groups-chosen of the groups [one]",
        megatron="--moe-router-num-groups",
        within=COUNT,
    )
    router_groups_chosen: int | None = option(
        None,
        "number of groups from which a token's experts are chosen",
        megatron="--moe-router-group-topk",
        within=COUNT,
        needs={"router_groups": ()},
    )
    router_group_best: int | None = option(
        None,
        "number of highest expert scores whose sum is a group's score [experts-chosen / router-groups-chosen]",
        within=COUNT,
        needs={"router_groups": ()},
    )
    router_bias: bool = _mixed(
        False, "add a bias to the router's linear layer, as in Megatron-LM's Switch layers of 2023"
    )
    router_dtype: Literal["fp32", "fp64"] | None = _mixed(
        None,
        "dtype of the router's linear layer, the probabilities and the weighted sum of the experts' outputs "
        "[the activations' dtype; at least fp32 for scores]",
        megatron="--moe-router-dtype",
    )
    router_jitter: float = _mixed(
        0.0,
        "in training, multiply the router's input by a random factor between 1 - this and 1 + this",
        megatron="--moe-input-jitter-eps",
        within=BELOW_ONE,
        on_resume="noted",
    )
    balance: tuple[str, ...] = _mixed(
        ("sequence",),
        "scope of each loss that balances the experts' load: sequence, independent of the layout; microbatch; "
        "or global, all microbatches so far in the global batch",
        megatron={
            "--moe-router-load-balancing-type": Renamed(
                {**_SILENT, "aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
            ),
        },
        on_resume="noted",
    )
    balance_loss: tuple[float, ...] = _mixed(
        (0.0,),
        "coefficient of each loss of --balance, usually 1e-2",
        megatron="--moe-aux-loss-coeff",
        within=NOT_NEGATIVE,
        on_resume="noted",
    )
    z_loss: float = _mixed(
        0.0,
        "coefficient of the loss that keeps the router's logits small, usually 1e-3",
        megatron="--moe-z-loss-coeff",
        within=NOT_NEGATIVE,
        on_resume="noted",
    )
    balance_bias: bool = _mixed(
        False,
        "balance the load with a bias instead of a loss; the bias affects only the choice of experts and is "
        "updated once per step",
        megatron={"--moe-router-enable-expert-bias": True},
    )
    balance_bias_rate: float = option(
        1e-3,
        "amount by which each update changes the bias of --balance-bias",
        megatron="--moe-router-bias-update-rate",
        within=POSITIVE,
        needs={"balance_bias": ()},
        on_resume="noted",
    )
    capacity_factor: float | None = _mixed(
        None,
        "limit each expert to this times an even share of a microbatch's tokens, and drop the excess [no limit]",
        megatron="--moe-expert-capacity-factor",
        within=POSITIVE,
        on_resume="noted",
    )
    drop_policy: Literal["probs", "position"] = option(
        "probs",
        "which tokens an expert at its capacity limit keeps: those with the largest probabilities, or the first ones",
        megatron="--moe-token-drop-policy",
        needs={"capacity_factor": ()},
        on_resume="noted",
    )
    pad_to_capacity: bool = option(
        False,
        "pad the input of every expert to the capacity limit, so that all ranks exchange the same number of rows",
        megatron={"--moe-pad-expert-input-to-capacity": True},
        needs={"capacity_factor": ()},
        on_resume="free",
    )


def has_experts(options: MixtureOptions, number: int) -> bool:
    """Return whether the layer with index `number` is an MoE layer.

    >>> deepseek = MixtureOptions(experts=256, experts_from=3)
    >>> [has_experts(deepseek, number) for number in range(5)]
    [False, False, False, True, True]
    """
    after = number - options.experts_from
    sparse = options.experts > 0 and after >= 0 and after % options.experts_every == 0
    return sparse and number not in options.dense_layers
