"""Write Adam's state in the formats that state.py reads, for Megatron-LM of 2023 and for Megatron-core.

The state is written either with one tensor per parameter, or in the format of the distributed optimizer, with flat
vectors in `distrib_optim.pt`. Adam's step count is stored in the parameter groups, as FusedAdam of Apex and Transformer
Engine expects. In contrast, AdamW of torch stores the count with each parameter, and cannot resume from these files.
This module depends on the order of weights, but not on their names or on folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mega.core.checkpoint.forms.keys import number_in
from mega.core.checkpoint.forms.megatron.core import GROUP_KEYS, KINDS, buckets_of, own_buckets
from mega.core.checkpoint.forms.megatron.eras import BALANCES, ERAS, LEAVE, Era, parameter_place
from mega.core.checkpoint.forms.megatron.expert_ranks import parts_of
from mega.core.checkpoint.forms.megatron.state import (
    DECAY,
    LR,
    LR_STYLES,
    OptimizerScalars,
    groups_of,
    numeric,
)
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.config.sections import OptimizerConfig
from mega.core.untrusted import Json, below


def state_kinds(checkpoint: StoredWeights) -> tuple[str, ...]:
    """Return the kinds of state to write for Megatron-LM; () if the checkpoint has no optimizer state.

    Errors: CheckpointError if the checkpoint has state that Megatron-LM's format cannot express.
    """
    kinds = {key.partition("/")[0] for key in checkpoint.tensors} - {"weights"}
    if not kinds:
        return ()
    dtypes = {key: dtype for key, (_, dtype) in checkpoint.tensors.items()}
    narrow = {dtype for key, dtype in dtypes.items() if key.startswith("weights/")} != {torch.float32}
    expected = {"moment1", "moment2", *(["master"] if narrow else [])}
    if kinds != expected:
        raise CheckpointError(
            f"holds {', '.join(sorted(kinds))} along with its weights, a tree of Megatron-LM "
            f"{', '.join(sorted(expected))}; {LEAVE}"
        )
    for key, dtype in dtypes.items():
        if not key.startswith("weights/") and dtype != torch.float32:
            raise CheckpointError(f"{key}: is {dtype}, a tree of Megatron-LM holds torch.float32; {LEAVE}")
    return tuple(sorted(expected))


def optimizer_scalars(meta: Mapping[str, Json], where: str) -> OptimizerScalars:
    """Return the optimizer's scalars from a mega checkpoint. Errors: CheckpointError if the optimizer is not Adam."""
    options = below(meta, "config", "optimizer")
    if options.get("optimizer", "adam") != "adam":
        raise CheckpointError(f"{where}: holds the state of {options['optimizer']}, Megatron-LM's is Adam's; {LEAVE}")
    defaults = OptimizerConfig()
    names = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
    constants = {name: number_in(options, name, where, getattr(defaults, name) or 0.0) for name in names}
    progress, scaler = below(meta, "progress"), below(meta, "scaler")
    skipped = progress.get("skipped_samples", progress.get("unscheduled", 0))
    counts, scales = [progress.get("consumed", 0), skipped, meta.get("updates", 0)], list(scaler.values())
    assert numeric(counts) and numeric(scales)  # plain_state.py has checked these values
    schedule = (
        {part: below(meta, "schedule", part) for part in ("lr", "weight_decay")} if meta.get("schedule") else None
    )
    scaler_state = dict(zip(scaler, scales, strict=True)) or None
    return OptimizerScalars(int(counts[2]), constants, scaler_state, schedule, int(counts[0] - counts[1]))


def written_state(
    tensors: Mapping[str, torch.Tensor],
    scalars: OptimizerScalars,
    era: Era,
    *,
    flat: bool,
    experts_apart: bool = False,
) -> dict[str, object]:
    """Return the optimizer's entries in one rank's weights file: `optimizer`, and `opt_param_scheduler` if
    there is a schedule.

    tensors: `kind/common name` -> tensor of the state. If there are masters, the format of the optimizer for 16-bit
    weights is used, otherwise that of the fp32 optimizer. flat: whether to write only the parameter groups, because
    `written_vectors` writes the tensors. experts_apart: whether experts get a separate optimizer, as in a checkpoint in
    which the experts are distributed over ranks.
    """
    parts = parts_of(tensors) if experts_apart else [(False, dict(tensors))]
    optimizers = [_written_optimizer(part, scalars, era, flat=flat, experts=experts) for experts, part in parts]
    optimizer = optimizers if len(optimizers) > 1 else optimizers[0]
    return {"optimizer": optimizer, **written_scheduler(scalars, era)}


def _written_optimizer(
    tensors: Mapping[str, torch.Tensor], scalars: OptimizerScalars, era: Era, *, flat: bool, experts: bool
) -> dict[str, object]:
    """Return the state of one optimizer. experts: whether this optimizer is the separate one for experts."""
    of_kind = {kind: in_order(tensors, f"{kind}/", era) for kind in KINDS}
    grouped = groups_of({name: tensor.dim() for name, tensor in of_kind["moment1"].items()})
    groups = written_groups(scalars, grouped, era)
    if experts:
        groups = [{**group, "is_expert_parallel": True} for group in groups]
    optimizer: dict[str, object] = {"param_groups": groups}
    if flat:
        optimizer = {"optimizer": optimizer}
    else:
        numbers = {name: number for number, name in enumerate(name for names in grouped.values() for name in names)}
        states = {
            n: {KINDS[kind]: of_kind[kind][name] for kind in ("moment1", "moment2")} for name, n in numbers.items()
        }
        for group, names in zip(groups, grouped.values(), strict=True):
            group["params"] = [numbers[name] for name in names]
        optimizer = {"state": states, "param_groups": groups}
        if of_kind["master"]:
            masters = [[of_kind["master"][name] for name in names] for names in grouped.values()]
            optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": masters}
    return {**optimizer, **written_scaler(scalars)}


def in_order(tensors: Mapping[str, torch.Tensor], prefix: str, era: Era) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, under names without the prefix, in the order of Megatron's
    parameters."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return {name: tensors[prefix + name] for name in sorted(names, key=lambda name: parameter_place(name, era))}


def written_groups(scalars: OptimizerScalars, decayed: Iterable[bool], era: Era) -> list[dict[str, object]]:
    """Return Megatron's parameter groups, without the lists of parameters.

    The current learning rate and weight decay are not needed, because Megatron's scheduler sets both before each step.
    """
    constants = scalars.constants
    lr, wd = (scalars.schedule or {}).get("lr", {}), (scalars.schedule or {}).get("weight_decay", {})
    rates = {"max_lr": lr.get("peak", constants["lr"]), "min_lr": lr.get("least", 0.0)}
    decay = number_in(wd, "start", "schedule", constants["weight_decay"])
    return [
        {
            **(GROUP_KEYS | rates if ERAS[era].core else {}),
            "lr": constants["lr"],
            "betas": (constants["adam_beta1"], constants["adam_beta2"]),
            "eps": constants["adam_eps"],
            "weight_decay": decay * one,
            "bias_correction": True,
            "step": scalars.updates,
            "wd_mult": float(one),
            "lr_mult": 1.0,
        }
        for one in decayed
    ]


def written_scaler(scalars: OptimizerScalars) -> dict[str, object]:
    """Return the entry for the loss scaler's state; {} without a loss scaler."""
    if scalars.scaler is None:
        return {}
    scale = torch.tensor([scalars.scaler["scale"]], dtype=torch.float32)
    counts = {"growth_tracker": int(scalars.scaler["clean"]), "hysteresis_tracker": int(scalars.scaler["patience"])}
    return {"grad_scaler": {"scale": scale, **counts}}


def written_scheduler(scalars: OptimizerScalars, era: Era) -> dict[str, object]:
    """Return Megatron's scheduler, derived from the project's schedule. Megatron-core requires a scheduler to load an
    optimizer. If Megatron cannot express the schedule (`overridden`), a constant schedule is written for Megatron-core,
    and a message advises the user to override this schedule."""
    lr: Mapping[str, object]
    decay: Mapping[str, object]
    if scalars.schedule is not None and not overridden(scalars):
        lr, decay = scalars.schedule["lr"], scalars.schedule["weight_decay"]
    elif not ERAS[era].core:
        return {}
    else:
        constants = scalars.constants
        lr = {"peak": constants["lr"], "least": 0.0, "warmup": 0, "decay": 1, "style": "constant"}
        decay = {"start": constants["weight_decay"], "end": constants["weight_decay"], "total": 1, "style": "constant"}
    scheduler = {
        **{key: lr[option] for option, key in LR.items()},
        "lr_decay_style": lr["style"],
        **{key: decay[option] for option, key in DECAY.items()},
        "wd_incr_style": decay["style"],
        "num_steps": scalars.samples,
    }
    return {"opt_param_scheduler": scheduler}


def overridden(scalars: OptimizerScalars) -> bool:
    """Whether the schedule in `scalars` is one that Megatron cannot express and that the user must override."""
    lr = (scalars.schedule or {}).get("lr")
    return lr is None or lr["style"] not in LR_STYLES or lr.get("batch") is not None


def written_vectors(
    weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], era: Era, *, tied: bool
) -> dict[object, object]:
    """Return the content of one rank's `distrib_optim.pt`, for a run that does not overlap gradient reduction with the
    backward pass.

    weights: common name -> weight. state: `kind/common name` -> tensor; without masters, the fp32 weights are written
    as masters. tied: whether the model ties its embedding; true even if the head is on another rank.
    """
    names = [name for name in in_order(weights, "", era) if not name.endswith(BALANCES)]
    buckets = buckets_of({name: weights[name].numel() for name in names}, None, own_buckets(names, tied))
    length, vectors = sum(bucket.length for bucket in buckets), {}
    for kind, key in KINDS.items():
        vector, begin = torch.zeros(length), 0
        for bucket in buckets:
            for name, offset in bucket.begins.items():
                tensor = state[f"{kind}/{name}"] if f"{kind}/{name}" in state else weights[name]
                vector[begin + offset : begin + offset + tensor.numel()] = tensor.flatten()
            begin += bucket.length
        vectors[key] = vector
    dtype = weights[names[0]].dtype
    gradients = dtype if dtype == torch.float16 else torch.float32
    return {"buckets_coalesced": True, 0: {(dtype, gradients): {**vectors, "numel_unpadded": length}}}
