"""Options of a mixture of experts: how many experts there are, how a router chooses among them, and how their load is
balanced.

These options are part of the model section (sections.py). Without --experts every layer's feed-forward network is dense
and no other option of a mixture may be given. check_mixture.py holds the rules. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mega.core.config.option import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SEVERAL,
    Renamed,
    Section,
    option,
)

DECODERS = ("gpt", "llama")
"""Families that read text from left to right."""

BALANCES = ("sequence", "microbatch", "global")
"""Scopes over which a loss can balance the experts' load."""

_SILENT: dict[str, str | None] = dict.fromkeys(
    ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
)
"""Values of --moe-router-load-balancing-type. Each value sets --router-choice or --balance and leaves the other option
unset."""


def _mixed(default: Any, help: str, **properties: Any) -> Any:
    """An option that only a mixture of experts reads."""
    return option(default, help, needs={"experts": SEVERAL}, **properties)


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(Section):
    """Mixture of experts: the number of experts, and how they are chosen and balanced."""

    experts: int = option(
        0,
        "experts of each layer's feed-forward network; every token uses --experts-chosen of them; 0 is a dense network",
        megatron="--num-experts",
        within=NOT_NEGATIVE,
        most=2**16,
        families=DECODERS,
    )
    experts_chosen: int = _mixed(2, "experts that each token uses", megatron="--moe-router-topk", within=COUNT)
    expert_ffn: int | None = _mixed(
        None, "width of one expert [ffn]", megatron="--moe-ffn-hidden-size", within=COUNT, most=2**24
    )
    experts_from: int = _mixed(
        0, "index of the first layer with experts; the layers before it are dense", within=NOT_NEGATIVE
    )
    experts_every: int = _mixed(
        1, "every n-th layer has experts, starting at --experts-from", megatron="--moe-layer-freq", within=COUNT
    )
    dense_layers: tuple[int, ...] = _mixed((), "indices of further layers that are dense", within=NOT_NEGATIVE)
    shared_ffn: int | None = _mixed(
        None,
        "width of a shared expert that every token uses in addition [none]",
        megatron="--moe-shared-expert-intermediate-size",
        within=COUNT,
        most=2**24,
    )
    shared_gate: bool = option(
        False,
        "multiply the shared expert's output by the sigmoid of a linear layer of its input",
        megatron={"--moe-shared-expert-gate": True},
        needs={"shared_ffn": ()},
    )
    router_score: Literal["softmax", "sigmoid", "sqrt-softplus"] = _mixed(
        "softmax",
        "function that turns the router's logits into scores",
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
        "scores of the chosen experts add up to 1; if off, softmax scores are those over all experts",
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
        "how experts are chosen from the scores; sinkhorn and quantile balance their load over a microbatch",
        megatron={
            "--moe-router-load-balancing-type": Renamed(
                {**_SILENT, "sinkhorn": "sinkhorn", "quantile_balancing": "quantile"}
            ),
        },
    )
    router_quantile_ema: float = option(
        0.0,
        "with --router-choice quantile: share of its previous thresholds that a step keeps",
        megatron="--moe-router-quantile-balancing-ema",
        within=BELOW_ONE,
        needs={"router_choice": ("quantile",)},
        on_resume="noted",
    )
    router_groups: int | None = _mixed(
        None,
        "groups of experts; experts are chosen from only some of the groups [one]",
        megatron="--moe-router-num-groups",
        within=COUNT,
    )
    router_groups_chosen: int | None = option(
        None,
        "groups from which experts are chosen",
        megatron="--moe-router-group-topk",
        within=COUNT,
        needs={"router_groups": ()},
    )
    router_group_best: int | None = option(
        None,
        "the score of a group is the sum of this many of its best scores [experts-chosen / router-groups-chosen]",
        within=COUNT,
        needs={"router_groups": ()},
    )
    router_bias: bool = _mixed(False, "bias of the router's linear layer, as in the Switch layers of 2023")
    router_dtype: Literal["fp32", "fp64"] | None = _mixed(
        None,
        "dtype of the router's linear layer, of probabilities and of the weighted sum [the "
        "activations'; scores fp32 at least]",
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
        "scope over which each loss balances the experts' load: each sequence, the same in every "
        "layout; each microbatch; or the microbatches so far in the global batch",
        megatron={
            "--moe-router-load-balancing-type": Renamed(
                {**_SILENT, "aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
            ),
        },
        on_resume="noted",
    )
    balance_loss: tuple[float, ...] = _mixed(
        (0.0,),
        "coefficient of each loss of --balance; 1e-2 is usual",
        megatron="--moe-aux-loss-coeff",
        within=NOT_NEGATIVE,
        on_resume="noted",
    )
    z_loss: float = _mixed(
        0.0,
        "coefficient of the loss that keeps the router's logits small; 1e-3 is usual",
        megatron="--moe-z-loss-coeff",
        within=NOT_NEGATIVE,
        on_resume="noted",
    )
    balance_bias: bool = _mixed(
        False,
        "balance the load without a loss, by a bias that affects only the choice and is updated once a global batch",
        megatron={"--moe-router-enable-expert-bias": True},
    )
    balance_bias_rate: float = option(
        1e-3,
        "amount by which an update changes the bias of --balance-bias",
        megatron="--moe-router-bias-update-rate",
        within=POSITIVE,
        needs={"balance_bias": ()},
        on_resume="noted",
    )
    capacity_factor: float | None = _mixed(
        None,
        "limit each expert to this times its even share of a microbatch's tokens and drop the rest [drops none]",
        megatron="--moe-expert-capacity-factor",
        within=POSITIVE,
        on_resume="noted",
    )
    drop_policy: Literal["probs", "position"] = option(
        "probs",
        "tokens that an expert keeps: those of largest probability, or the first ones",
        megatron="--moe-token-drop-policy",
        needs={"capacity_factor": ()},
        on_resume="noted",
    )
    pad_to_capacity: bool = option(
        False,
        "pad the input of every expert to its capacity, so that ranks exchange equal numbers of rows",
        megatron={"--moe-pad-expert-input-to-capacity": True},
        needs={"capacity_factor": ()},
        on_resume="free",
    )


def has_experts(options: MixtureOptions, number: int) -> bool:
    """Whether layer `number` is a mixture of experts.

    >>> deepseek = MixtureOptions(experts=256, experts_from=3)
    >>> [has_experts(deepseek, number) for number in range(5)]
    [False, False, False, True, True]
    """
    after = number - options.experts_from
    sparse = options.experts > 0 and after >= 0 and after % options.experts_every == 0
    return sparse and number not in options.dense_layers
