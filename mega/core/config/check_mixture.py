"""Check the options of a mixture of experts in a resolved run. `check` (config/check.py) applies these rules together
with all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mega.core.config.mixture import BALANCES, has_experts
from mega.core.config.resolve import divisors, gathers_experts
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig

Line = Callable[[str, str], str]
"""Function that takes an option's name and a rule, and returns a line of the error message."""


NETWORK = {"gate_proj", "up_proj", "down_proj"}
"""Names of the linear layers of an expert."""


def mixture(run: RunConfig, line: Line) -> Iterator[str]:
    """Yield an error message for each mistake in the options of a mixture of experts."""
    model = run.model
    if not model.experts:
        if run.parallel.ep > 1:
            yield line("ep", "needs --experts")
        if run.parallel.etp != run.parallel.tp:
            yield line("etp", "needs --experts")
        return
    yield from _router(run, line)
    yield from _losses(run, line)
    if not any(has_experts(model, number) for number in range(model.layers)):
        yield line("experts_from", f"leaves none of the {model.layers} layers with experts")
    if missing := [number for number in model.dense_layers if number >= model.layers]:
        yield line("dense_layers", f"has no layer {missing[0]}; valid: 0 to {model.layers - 1}")
    if model.norm_placement == "post" or model.post_norm_residual:
        yield line("experts", "needs --norm-placement pre and --no-post-norm-residual")
    if run.precision.fp8:
        yield line("fp8", "excludes --experts")
    if model.lora_rank and model.lora_dropout and (not model.lora_targets or NETWORK & set(model.lora_targets)):
        yield line("lora_dropout", "must be 0 where experts have adapters, or give --lora-targets of attention alone")
    rule, parallel = run.optimizer.optimizer, run.parallel
    if rule in ("lamb", "adafactor") and (parallel.ep > 1 or parallel.etp != parallel.tp):
        yield line("optimizer", f"needs --ep 1 and --etp {parallel.tp} where a model has experts; valid: adam, sgd")


def _router(run: RunConfig, line: Line) -> Iterator[str]:
    model = run.model
    experts, top_k = model.experts, model.experts_chosen
    new = run.checkpoint.load is None and not run.evaluation.skip_train  # foreign weights may be of any kind
    yield from (line(name, rule) for name, rule in choice(model))
    if top_k > experts:
        return
    softmax_of_one = top_k == 1 and model.router_score == "softmax" and model.router_normalize
    if new and softmax_of_one and model.router_choice != "sinkhorn":
        yield line("experts_chosen", "needs --no-router-normalize (--moe-router-pre-softmax): one probability is 1")
    if model.balance_bias and model.router_score == "softmax":
        yield line("balance_bias", "needs --router-score sigmoid or sqrt-softplus, not softmax")
    if model.balance_bias and model.router_choice != "largest":
        yield line("balance_bias", f"excludes --router-choice {model.router_choice}, which balances on its own")
    tokens = run.batch.micro_batch * run.batch.seq_length
    trains = not run.evaluation.skip_train
    if trains and model.router_choice == "quantile" and tokens * top_k % experts:
        rule = (
            f"needs --experts to divide the {tokens * top_k} choices of a microbatch's {tokens} tokens, not {experts}"
        )
        yield line("router_choice", rule)
    if model.router_choice == "quantile" and top_k == experts:
        yield line("router_choice", f"needs --experts-chosen below --experts {experts}; valid where all are: largest")
    by_sinkhorn = model.router_choice == "sinkhorn" and model.router_score != "softmax"
    if model.router_choice != "largest" and (model.router_groups or by_sinkhorn):
        excluded = "--router-groups" if model.router_groups else f"--router-score {model.router_score}"
        yield line("router_choice", f"excludes {excluded}")
    if model.router_choice == "sinkhorn" and model.router_scale != 1:
        yield line("router_scale", "excludes --router-choice sinkhorn, whose probabilities are those of the logits")
    if model.router_choice == "sinkhorn" and not model.router_normalize:
        yield line("router_normalize", "excludes --router-choice sinkhorn")


def choice(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (option, rule) for each mistake in the numbers of experts and groups. No computation is possible with such
    a model, so these rules also apply to the model section of a checkpoint."""
    experts, top_k = model.experts, model.experts_chosen
    if top_k > experts:
        yield "experts_chosen", f"must be at most --experts {experts}"
        return
    groups = model.router_groups
    if groups is None:
        return
    groups_chosen = model.router_groups_chosen
    if groups_chosen is None:
        yield "router_groups", "needs --router-groups-chosen"
    elif experts % groups:
        yield "router_groups", f"must divide --experts {experts}; valid: {_list(divisors(experts))}"
    elif groups_chosen > groups:
        yield "router_groups_chosen", f"must be at most --router-groups {groups}"
    elif top_k > groups_chosen * (experts // groups):
        rule = f"has {groups_chosen * (experts // groups)} experts in all, but a token chooses {top_k}"
        yield "router_groups_chosen", rule
    elif model.router_group_best is None and top_k % groups_chosen:
        yield "router_groups_chosen", f"must divide --experts-chosen {top_k}, or give --router-group-best"
    elif (model.router_group_best or 1) > experts // groups:
        yield "router_group_best", f"must be at most the {experts // groups} experts of a group"


def _losses(run: RunConfig, line: Line) -> Iterator[str]:
    model = run.model
    if len(model.balance) != len(model.balance_loss):
        yield line("balance_loss", f"must be as many numbers as --balance has names, {len(model.balance)}")
    if unknown := [name for name in model.balance if name not in BALANCES]:
        yield line("balance", f"{unknown[0]} is not a choice; valid: {', '.join(BALANCES)}")
    if len(set(model.balance)) < len(model.balance):
        yield line("balance", "names a loss twice")
    if model.router_choice != "largest" and any(model.balance_loss):
        yield line("balance_loss", f"excludes --router-choice {model.router_choice}, which balances without a loss")
    if model.capacity_factor is not None and model.router_choice == "sinkhorn":
        yield line("capacity_factor", "excludes --router-choice sinkhorn")


def expert_ranks(run: RunConfig, world: int, line: Line) -> Iterator[str]:
    """Yield an error message for each mistake in the distribution of experts over ranks."""
    parallel, model = run.parallel, run.model
    if not model.experts:
        return
    ep, etp, tp = parallel.ep, parallel.etp, parallel.tp
    stage = world // parallel.pp
    if model.experts % ep:
        yield line("ep", f"must divide --experts {model.experts}; valid: {_list(divisors(model.experts))}")
    width = model.expert_ffn or model.ffn
    if width % etp:
        yield line("etp", f"must divide the width of an expert, {width}; valid: {_list(divisors(width))}")
    if model.shared_ffn is not None and model.shared_ffn % tp:
        yield line("shared_ffn", f"must be divisible by --tp {tp}")
    if stage % (ep * etp):
        valid = _list(divisors(stage // etp)) if stage % etp == 0 else "1, with another --etp"
        yield line("ep", f"times --etp {etp} must divide the {stage} ranks of a stage; valid: {valid}")
    elif tp > 1 and not parallel.sequence_parallel and etp != tp and ep * etp != tp:
        rule = f"needs --sequence-parallel, or --etp {tp}: without it --tp {tp} ranks have the same tokens"
        yield line("etp", rule)
    if run.finetuning.task == "dpo" and tp % (ep * etp):
        yield line("task", f"needs --ep times --etp to divide --tp {tp}: data ranks have pairs of other lengths")
    if model.pad_to_capacity and ep > 1 and tp % etp and not gathers_experts(run):
        rule = f"needs an --etp that divides --tp {tp}, or --expert-dispatch all-gather; --etp {etp} shares more tokens"
        yield line("pad_to_capacity", rule)


def inference_ranks(run: RunConfig) -> Iterator[str]:
    """Yield an error message for each mistake in the distribution of experts in a subcommand that does not train. In
    such a subcommand, data ranks process different rows, so only tensor ranks, which have the same tokens, can share
    experts."""
    parallel = run.parallel
    within = parallel.ep * parallel.etp == parallel.tp and not parallel.sequence_parallel
    if run.model.experts and not within and (parallel.ep > 1 or parallel.etp != parallel.tp):
        flag = f"--ep {parallel.ep}" if parallel.ep > 1 else f"--etp {parallel.etp}"
        rule = f"times --etp {parallel.etp} must be --tp {parallel.tp}" if parallel.ep > 1 else "must be --tp over --ep"
        yield f"{flag}: {rule}, without --sequence-parallel, in a verb that trains nothing"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
