"""Creates the architecture of a mixture of experts from the options of a resolved model (config/mixture.py)."""

from __future__ import annotations

from dataclasses import replace

from mega.core.architecture.layer import AuxiliaryLoss, Dense, ExpertCapacity, ExpertGroups, Experts, Router
from mega.core.config.mixture import MixtureOptions

BALANCE_LOSSES = {
    "sequence": ("seq_load_balancing_loss", "sequences"),
    "microbatch": ("load_balancing_loss", "microbatches"),
    "global": ("global_load_balancing_loss", "microbatches"),
}
"""Value of --balance -> the name of the loss in the log, as in Megatron-LM, and the divisor of its total."""

Z_LOSS = "z_loss"


def experts(options: MixtureOptions, network: Dense) -> Experts:
    """Return the mixture of experts of an MoE layer. network: the feed-forward network of a layer without experts."""
    shared = None
    if options.shared_ffn is not None:
        shared = replace(network, name=f"{network.name}.shared_expert", width=options.shared_ffn)
    capacity = None
    if options.capacity_factor is not None:
        capacity = ExpertCapacity(
            factor=options.capacity_factor, policy=options.drop_policy, padded=options.pad_to_capacity
        )
    return Experts(
        name=network.name,
        site=network.site,
        count=options.experts,
        chosen=options.experts_chosen,
        expert=replace(network, name=f"{network.name}.experts", width=options.expert_ffn or network.width),
        shared=shared,
        shared_gate=options.shared_gate,
        router=_router(options),
        capacity=capacity,
    )


def _router(options: MixtureOptions) -> Router:
    groups = None
    if options.router_groups is not None:
        groups_chosen = options.router_groups_chosen or 1
        best = options.router_group_best or max(1, options.experts_chosen // groups_chosen)
        groups = ExpertGroups(options.router_groups, groups_chosen, best)
    return Router(
        score=options.router_score,
        normalize=options.router_normalize,
        scale=options.router_scale,
        choice=options.router_choice,
        groups=groups,
        bias=options.router_bias,
        balance_rate=options.balance_bias_rate if options.balance_bias else None,
        quantile_ema=options.router_quantile_ema,
        dtype=options.router_dtype,
        jitter=options.router_jitter,
        losses=tuple(_losses(options)),
    )


def _losses(options: MixtureOptions) -> list[AuxiliaryLoss]:
    """Yield the router's losses whose coefficient is not 0."""
    losses = []
    for over, coefficient in zip(options.balance, options.balance_loss, strict=True):
        name, divisor = BALANCE_LOSSES[over]
        if coefficient:
            losses.append(AuxiliaryLoss(name=name, coefficient=coefficient, mean_over=divisor))  # type: ignore[arg-type]
    if options.z_loss:
        losses.append(AuxiliaryLoss(name=Z_LOSS, coefficient=options.z_loss, mean_over="tokens"))
    return losses
