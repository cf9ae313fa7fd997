"""Read Adam's state from Megatron-LM checkpoints: fp32 master weights and moments, matched to the weights.

Megatron numbers its parameters, so a tensor of the state has no name, only a position in a list. The order of
parameters in each era is in eras.py. This order determines the weight to which a tensor of the state belongs. The table
that converts a weight also converts the weight's master and moments.

Four formats are read: the state of the fp32 optimizer, the state of the optimizer for 16-bit weights with fp32 masters,
and the distributed optimizer's `distrib_optim.pt` as written up to 2023 and as written by Megatron-core. Any other
format is refused, because its order of parameters is unknown and moments could be assigned to the wrong weights.
The module that writes these formats is state_write.py. This module does not depend on training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import TypeGuard

import torch

from mega.core.checkpoint.forms.foreign import torch_file
from mega.core.checkpoint.forms.mapping import Table, renamed
from mega.core.checkpoint.forms.megatron.core import KINDS, bucket_limit, buckets_of, own_buckets
from mega.core.checkpoint.forms.megatron.eras import BALANCES, ERAS, LEAVE, Era, parameter_place
from mega.core.checkpoint.forms.megatron.expert_ranks import parts_of
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.untrusted import Json

DISTRIBUTED = "distrib_optim.pt"
NO_UPDATE = "no update has been made yet (fp16 skips steps until its loss scale fits)"
LARGEST = 1e300
"""Upper limit on the magnitude of every number in an optimizer's state."""

PADDING = 1 << 16
"""Upper limit on the padding of a flat buffer, in elements. A buffer is padded to a multiple of the number of data
ranks, a number that is below this limit."""


def groups_of(dims: Mapping[str, int]) -> dict[bool, list[str]]:
    """Return Megatron's parameter groups: True -> names with weight decay, then False -> names without it, in the order
    of `dims`.

    dims: name -> number of dims of the tensor.
    """
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name, count in dims.items():
        groups[count > 1 and not name.endswith(".bias")].append(name)
    return {decayed: names for decayed, names in groups.items() if names}


def state_table(weights: Table, kind: str) -> Table:
    """The table for one kind of state (`master`, `moment1`, `moment2`), derived from the weights' table. Tensors that
    are not trained have no state."""
    parameters = tuple(
        each for each in weights.targets if not f"{each.name} {each.fragments[0].source}".endswith(BALANCES)
    )
    copies = tuple(pair for pair in weights.copies if not pair[1].source.endswith(BALANCES))
    weights = replace(weights, targets=parameters, copies=copies)
    return renamed(weights, lambda name: name.replace("weights/", f"{kind}/", 1), lambda name: f"{kind}/{name}")


@dataclass(frozen=True)
class OptimizerScalars:
    """The values in an optimizer's state that apply to all parameters."""

    updates: int
    """Number of training steps whose update was not skipped."""
    constants: Mapping[str, float]
    """Name of the project's option -> value of Adam's constant."""
    scaler: Mapping[str, float] | None = None
    """State of the project's loss scaler; None without a scaler."""
    schedule: Mapping[str, Mapping[str, Json]] | None = None
    """The project's schedule; None if the project cannot express Megatron's schedule."""
    samples: int | None = None
    """Number of samples that the schedule has counted."""


@dataclass
class State:
    """The optimizer state of all ranks. tensors: `kind/tp.pp.chunk/common name` -> tensor. scalars: values that are
    identical on all ranks."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: OptimizerScalars | None = None
    ranks: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.partition("/")[0] for name in self.tensors))

    def add(self, tensors: Mapping[str, torch.Tensor], scalars: OptimizerScalars, where: Path) -> None:
        """Add one rank's state. Errors: CheckpointError if the scalars differ between ranks."""
        if self.scalars not in (None, scalars):
            raise CheckpointError(f"{where}: its optimizer is not at the step, scale and schedule of other ranks'")
        for name in tensors.keys() & self.tensors.keys():
            if not torch.equal(tensors[name], self.tensors[name]):
                raise CheckpointError(f"{where}: {name}: differs from that of the expert ranks before it")
        self.scalars = scalars
        self.tensors.update(tensors)
        self.ranks += 1


# Reading


def read_state(
    content: Mapping[str, object],
    directory: Path,
    label: str,
    chunks: Sequence[Mapping[str, torch.Tensor]],
    to: State,
    era: Era = "legacy",
    *,
    experts_apart: bool = False,
) -> None:
    """Add one rank's state, if present, to `to`.

    content: the content of the rank's weights file. label: `tp.pp`, the rank's prefix in names. chunks: the weights of
    each model chunk, keyed by common name. era: the era whose module names the file contains. experts_apart: whether
    the experts are distributed over ranks and therefore have a separate optimizer.
    Errors: CheckpointError naming the file, and the tensor or key that is inconsistent.
    """
    optimizer = content.get("optimizer")
    distributed = directory / DISTRIBUTED
    if optimizer is None and not distributed.exists():
        if (directory / "model_rng.pt").exists():
            raise CheckpointError(
                f"{directory}: the form of optim.pt next to model_rng.pt (2022) is not known; {LEAVE}"
            )
        return
    check_optimizer(values_of(content), directory)
    if experts_apart and distributed.exists():
        raise CheckpointError(f"{distributed}: is not read where ranks share the experts; {LEAVE}")
    weights = {
        f"{label}.{number}/{name}": chunk[name]
        for number, chunk in enumerate(chunks)
        for name in _in_order(chunk, era, directory)
    }
    parts = parts_of(weights) if experts_apart else [(False, weights)]
    optimizers = optimizer if experts_apart and isinstance(optimizer, list) else [optimizer]
    if len(optimizers) != len(parts):
        raise CheckpointError(f"{directory}: has {len(optimizers)} optimizers, its experts need {len(parts)}; {LEAVE}")
    tensors: dict[str, torch.Tensor] = {}
    scalars: OptimizerScalars | None = None
    for (experts, part), each in zip(parts, optimizers, strict=True):
        found, own_scalars = _read_optimizer(content, each, directory, part, era, experts=experts)
        if scalars not in (None, own_scalars):
            raise CheckpointError(f"{directory}: its optimizers are not at one step, scale and schedule; {LEAVE}")
        tensors, scalars = tensors | found, own_scalars
    if scalars is not None:
        to.add(tensors, scalars, directory)


def _read_optimizer(
    content: Mapping[str, object],
    optimizer: object,
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    era: Era,
    *,
    experts: bool,
) -> tuple[dict[str, torch.Tensor], OptimizerScalars]:
    """Return (`kind/name` -> tensor, the scalars) of one optimizer of a rank. weights: the optimizer's parameters in
    order. experts: whether this optimizer is the separate one for experts."""
    optimizer, inner, groups = optimizer_parts(optimizer, directory)
    grouped = groups_of({name: tensor.dim() for name, tensor in weights.items()})
    if ERAS[era].core:
        grouped = in_order_of(groups, grouped)
    checked = check_groups(groups, grouped, directory, experts=experts)
    if (distributed := directory / DISTRIBUTED).exists():
        tensors_found: dict[str, object] = dict(_distributed(distributed, weights, values_of(content)))
    else:
        tensors_found = dict(_ordinary(optimizer, inner, checked, list(grouped.values()), directory))
    all_fp32 = all(tensor.dtype == torch.float32 for tensor in weights.values())
    tensors = _checked(tensors_found, weights)
    if all_fp32:  # fp32 weights serve as their own masters
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("master/")}
    return tensors, scalars_in(content, optimizer, inner, checked, directory)


Group = dict[str, object]
"""A parameter group in the format of torch's optimizers."""


def optimizer_parts(optimizer: object, where: Path) -> tuple[dict[str, object], dict[str, object], list[object]]:
    """Return (the optimizer's state in a file, the part of this state that torch's optimizer wrote, the parameter
    groups).

    Errors: CheckpointError if the state has an unknown format.
    """
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(inner, dict) or not isinstance(groups, list):
        raise CheckpointError(f"{where}: optimizer holds no param_groups, so its form is not known; {LEAVE}")
    return optimizer, inner, groups


def values_of(content: Mapping[str, object]) -> dict[str, object]:
    """Return Megatron's arguments from the content of a file; {} if there are none."""
    values = getattr(content.get("args"), "values", {})
    return values if isinstance(values, dict) else {}


def _in_order(chunk: Mapping[str, torch.Tensor], era: Era, where: Path) -> list[str]:
    """The parameter names of a model chunk in the order of Megatron's parameters. Errors: CheckpointError if a file of
    Megatron-core lists them in a different order."""
    stored_names = [name for name in chunk if not name.endswith(BALANCES)]
    names = sorted(stored_names, key=lambda name: parameter_place(name, era))
    if ERAS[era].core and names != stored_names:
        misplaced = next(name for name, stored in zip(names, stored_names, strict=True) if name != stored)
        raise CheckpointError(f"{where}: {misplaced}: its place is not that among Megatron-core's parameters; {LEAVE}")
    return names


def in_order_of(groups: Sequence[object], grouped: Mapping[bool, list[str]]) -> dict[bool, list[str]]:
    """Return `grouped` in the order of the state's `groups`. A group that does not record its weight decay counts as a
    group with weight decay."""
    has_decay = [plain(group.get("wd_mult", 1.0)) != 0 if isinstance(group, dict) else True for group in groups]
    return {decayed: grouped[decayed] for decayed in dict.fromkeys((*has_decay, *grouped)) if decayed in grouped}


def check_optimizer(values: Mapping[str, object], where: Path) -> None:
    """Check that the project supports the optimizer that Megatron's arguments describe. Errors: CheckpointError if the
    optimizer's state or update rule is not supported."""
    if plain(optimizer := values.get("optimizer")) not in (None, "adam"):
        raise CheckpointError(f"{where}: args.optimizer {plain(optimizer)!r:.40}: only Adam's state is read; {LEAVE}")
    if plain(values.get("apply_wd_to_qk_layernorm")) not in (None, False):
        raise CheckpointError(f"{where}: args.apply_wd_to_qk_layernorm: one-dimensional weights do not decay; {LEAVE}")
    if plain(values.get("decoupled_lr")) is not None:
        raise CheckpointError(f"{where}: args.decoupled_lr: embedding and head have the rate of all; {LEAVE}")


def check_groups(
    groups: Sequence[object], grouped: Mapping[bool, Sequence[str]], where: Path, *, experts: bool = False
) -> list[Group]:
    """Return the checked parameter groups of an optimizer's state. experts: whether the groups belong to the separate
    optimizer for experts that are distributed over ranks.

    Errors: CheckpointError if the groups do not match the model.
    """
    checked = [group for group in groups if isinstance(group, dict)]
    for number, group in enumerate(checked):
        is_expert = plain(group.get("is_expert_parallel")) or False
        if is_expert is not experts or plain(group.get("is_decoupled_lr")) not in (None, False):
            raise CheckpointError(f"{where}: optimizer.param_groups[{number}]: experts or a rate of its own; {LEAVE}")
    if not len(checked) == len(groups) == len(grouped):
        raise CheckpointError(
            f"{where}: optimizer has {len(groups)} param_groups, the model makes {len(grouped)}; {LEAVE}"
        )
    for number, (group, decayed) in enumerate(zip(checked, grouped, strict=True)):
        for key, valid in (("wd_mult", float(decayed)), ("lr_mult", 1.0)):
            if not numeric([value := group.get(key, valid)]) or value != valid:
                raise CheckpointError(
                    f"{where}: optimizer.param_groups[{number}].{key} {plain(value)!r:.40}: must be {valid:g}, since "
                    f"it begins with {grouped[decayed][0]}; {LEAVE}"
                )
    return checked


def _ordinary(
    optimizer: Mapping[str, object],
    inner: Mapping[str, object],
    groups: Sequence[Mapping[str, object]],
    grouped: Sequence[Sequence[str]],
    where: Path,
) -> Iterator[tuple[str, object]]:
    """Yield (`kind/name`, tensor) from the state of a non-distributed optimizer, which stores one tensor of each kind
    per parameter."""
    states = inner.get("state")
    if not isinstance(states, dict):
        raise CheckpointError(f"{where}: optimizer holds no state, and there is no {DISTRIBUTED}; {LEAVE}")
    if not states:
        raise CheckpointError(f"{where}: optimizer.state is empty: {NO_UPDATE}; {LEAVE}")
    count = sum(map(len, grouped))
    if len(states) != count:
        raise CheckpointError(f"{where}: optimizer.state has {len(states)} entries, the model has {count} parameters")
    masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    if masters is not None:
        masters = _listed(masters, len(grouped), f"{where}: optimizer.fp32_from_fp16_params")
    remaining = dict(states)
    for number, (group, names) in enumerate(zip(groups, grouped, strict=True)):
        indices = _listed(group.get("params"), len(names), f"{where}: optimizer.param_groups[{number}].params")
        for name, index in zip(names, indices, strict=True):
            # Used entries are removed, so that no entry is used for two parameters.
            parameter_state = remaining.pop(index, None) if isinstance(index, int) else None
            for kind in ("moment1", "moment2"):
                yield f"{kind}/{name}", parameter_state.get(KINDS[kind]) if isinstance(parameter_state, dict) else None
        if masters is not None:
            label = f"{where}: optimizer.fp32_from_fp16_params[{number}]"
            for name, master in zip(names, _listed(masters[number], len(names), label), strict=True):
                yield f"master/{name}", master


def _listed(value: object, count: int, what: str) -> list[object]:
    if not isinstance(value, list) or len(value) != count:
        actual = f"has {len(value)} entries" if isinstance(value, list) else "is not a list"
        raise CheckpointError(f"{what}: {actual}, the model has {count}; {LEAVE}")
    return value


def _distributed(
    path: Path, weights: Mapping[str, torch.Tensor], values: Mapping[str, object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (`kind/name`, tensor) from the distributed optimizer's state: flat vectors that begin with the last
    parameter and end with padding.

        vector:  | last parameter | ... | second | first | padding |          reversed order of `weights`

    Release 23.06 stores one vector per dtype; later releases of 2023 store a list with one vector per bucket.
    Megatron-core also leaves gaps between parameters (`buckets_of`). values: Megatron's arguments.
    """
    content = torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, no vectors; {LEAVE}")
    chunks: dict[int, list[str]] = {}
    for name in weights:
        chunks.setdefault(int(name.partition("/")[0].rpartition(".")[2]), []).append(name)
    if unknown := set(content) - {"bucket_sizes", "buckets_coalesced", *chunks}:
        raise CheckpointError(f"{path}: holds {str(min(unknown, key=str))!r:.40}, the model has {len(chunks)} chunks")
    for number, names in chunks.items():
        dtypes = content.get(number)
        if not isinstance(dtypes, dict) or len(dtypes) != 1:
            raise CheckpointError(f"{path}: holds no vectors of model chunk {number} in one gradient dtype")
        (vectors,) = dtypes.values()
        flat = {
            kind: _flat(vectors.get(key) if isinstance(vectors, dict) else None, f"{path}: {number}: {key}")
            for kind, key in KINDS.items()
        }
        begins = _begins(names, weights, values) if "buckets_coalesced" in content else None
        for kind, vector in flat.items():
            yield from _cut(vector, names, weights, begins, kind, path)


def _begins(
    names: Sequence[str], weights: Mapping[str, torch.Tensor], values: Mapping[str, object]
) -> tuple[dict[str, int], int]:
    """Return (parameter name -> offset in the flat vector, the vector's length). Megatron-core concatenates the buckets
    of a model chunk into this vector."""
    label = names[0].partition("/")[0]
    _, stage, chunk = map(int, label.split("."))
    common = {name.partition("/")[2]: name for name in names}
    tied = not values.get("untie_embeddings_and_output_weights", False)
    numbers = {name: weights[common[name]].numel() for name in common}
    begins: dict[str, int] = {}
    length = 0
    for bucket in buckets_of(numbers, bucket_limit(values, stage, chunk), own_buckets(common, tied)):
        begins |= {common[name]: length + begin for name, begin in bucket.begins.items()}
        length += bucket.length
    return begins, length


def _cut(
    vector: torch.Tensor,
    names: Sequence[str],
    weights: Mapping[str, torch.Tensor],
    begins: tuple[dict[str, int], int] | None,
    kind: str,
    path: Path,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's slice of a flat vector that stores one kind of state. begins: the result of `_begins`;
    None if the vector has no gaps."""
    label, end = f"{path}: {KINDS[kind]}", 0
    if begins is not None and len(vector) != begins[1]:
        raise CheckpointError(f"{label}: has {len(vector)} numbers, core's buckets of these parameters {begins[1]}")
    for name in reversed(names):
        shape = weights[name].shape
        begin = end if begins is None else begins[0][name]
        end = begin + prod(shape)
        if end > len(vector):
            raise CheckpointError(f"{label}: ends at {len(vector)} numbers, within {name}")
        yield f"{kind}/{name}", vector[begin:end].view(shape)
    if len(vector) - end >= PADDING:
        raise CheckpointError(f"{label}: {len(vector) - end} numbers after {names[0]}")


def _flat(value: object, what: str) -> torch.Tensor:
    buckets: list[torch.Tensor] = []
    for bucket in value if isinstance(value, list) and value else [value]:
        if not isinstance(bucket, torch.Tensor) or bucket.dim() != 1 or bucket.dtype != torch.float32:
            raise CheckpointError(f"{what}: is not an fp32 vector")
        buckets.append(bucket)
    return buckets[0] if len(buckets) == 1 else torch.cat(buckets)


def _checked(tensors: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Check that all tensors exist, are fp32 and have their weights' shapes, and that each master rounds to its weight.

    The check of the masters also verifies the order of the parameters.
    """
    kinds = {name.partition("/")[0] for name in tensors}
    if any(tensor.dtype != torch.float32 for tensor in weights.values()):
        kinds.add("master")
    for kind in sorted(kinds):
        for name, weight in weights.items():
            tensor = tensors.get(f"{kind}/{name}")
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{kind}/{name}: is missing in the optimizer's state")
            if tensor.shape != weight.shape or tensor.dtype != torch.float32:
                expected = f"torch.float32 {tuple(weight.shape)}"
                raise CheckpointError(f"{kind}/{name}: is {tensor.dtype} {tuple(tensor.shape)}, expected {expected}")
            if kind == "master" and not torch.equal(tensor.to(weight.dtype), weight):
                raise CheckpointError(f"{kind}/{name}: rounded to {weight.dtype}, it is not the weight; {LEAVE}")
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def scalars_in(
    content: Mapping[str, object],
    optimizer: Mapping[str, object],
    inner: Mapping[str, object],
    groups: Sequence[Mapping[str, object]],
    where: Path,
) -> OptimizerScalars:
    """Return the scalars of an optimizer's state. optimizer, inner, groups: the results of `optimizer_parts` for the
    file `where`.

    Errors: CheckpointError if the values are not those of a single Adam optimizer.
    """
    steps = _steps(groups, inner.get("state"))
    if not steps:
        raise CheckpointError(f"{where}: optimizer: has no step: {NO_UPDATE}; {LEAVE}")
    if len(set(steps)) != 1 or not numeric(steps) or steps[0] < 0:
        raise CheckpointError(f"{where}: optimizer: step {sorted(set(map(str, steps)))!s:.200}: must be one number")
    constants, *other_constants = (_constants(group, where) for group in groups)
    if any(other != constants for other in other_constants):
        raise CheckpointError(f"{where}: optimizer: betas and eps must be the same in all param_groups; {LEAVE}")
    return OptimizerScalars(int(steps[0]), constants, _scaler(optimizer.get("grad_scaler"), where), *_schedule(content))


def _steps(groups: Sequence[Mapping[str, object]], states: object) -> list[Plain]:
    """Return all of Adam's step counts. They are stored per group, per parameter, or once for all parameters. A missing
    count is returned as None."""
    parameter_states = dict(states) if isinstance(states, dict) else {}
    steps_found = [plain(parameter_states.pop("common_step"))] if "common_step" in parameter_states else []
    for holders in (groups, list(parameter_states.values())):
        steps = [plain(each.get("step")) if isinstance(each, dict) else None for each in holders]
        steps_found += steps if any(step is not None for step in steps) else []
    return steps_found


def _constants(group: Mapping[str, object], where: Path) -> dict[str, float]:
    betas, eps = group.get("betas"), plain(group.get("eps"))
    beta_values = [plain(beta) for beta in betas] if isinstance(betas, tuple | list) else []
    values = [*beta_values, eps]
    if len(values) != 3 or not numeric(values) or not all(0 <= beta < 1 for beta in values[:2]) or values[2] < 0:
        raise CheckpointError(f"{where}: optimizer: betas {beta_values}, eps {eps!r:.40}: are not Adam's; {LEAVE}")
    return dict(zip(("adam_beta1", "adam_beta2", "adam_eps"), map(float, values), strict=True))


Plain = int | float | str | None


def plain(value: object) -> Plain:
    """Convert a value to a number, a string, or None. A tensor with one element is converted to a number, and a value
    of any other type to the name of its type."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return value if value is None or isinstance(value, int | float | str) else type(value).__name__


def numeric(values: Sequence[object]) -> TypeGuard[Sequence[int | float]]:
    """Whether all values are finite numbers with magnitudes below `LARGEST`."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and all(abs(number) < LARGEST and isfinite(number) for number in numbers)


def _scaler(state: object, where: Path) -> dict[str, float] | None:
    """The state of the loss scaler; None for a constant scale, which has no state."""
    if state is None or (isinstance(state, dict | list) and not state):
        return None
    names = ("scale", "growth_tracker", "hysteresis_tracker")
    values = [plain(state.get(name)) for name in names] if isinstance(state, dict) else []
    if not values or not numeric(values) or values[0] <= 0:
        raise CheckpointError(f"{where}: optimizer.grad_scaler: is not a loss scale; {LEAVE}")
    return {"scale": float(values[0]), "clean": int(values[1]), "patience": int(values[2])}


LR = {"peak": "max_lr", "least": "min_lr", "warmup": "lr_warmup_steps", "decay": "lr_decay_steps"}
DECAY = {"start": "start_wd", "end": "end_wd", "total": "wd_incr_steps"}
LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
"""Styles of the learning-rate schedule. The weight-decay schedule has only the first three."""


def _schedule(content: Mapping[str, object]) -> tuple[Mapping[str, Mapping[str, Json]] | None, int | None]:
    """The project's schedule and the number of samples that the schedule has counted, from `opt_param_scheduler`;
    (None, None) if the format of `opt_param_scheduler` is unknown."""
    scheduler = content.get("opt_param_scheduler")
    if not isinstance(scheduler, dict):
        return None, None
    lr = {option: scheduler.get(key) for option, key in LR.items()}
    decay = {option: scheduler.get(key) for option, key in DECAY.items()}
    styles, numbers = (scheduler.get("lr_decay_style"), scheduler.get("wd_incr_style")), [*lr.values(), *decay.values()]
    samples, initial = scheduler.get("num_steps"), values_of(content).get("lr_warmup_init", 0.0)
    if not numeric([*numbers, samples]) or not all(plain(style) in LR_STYLES for style in styles):
        return None, None
    lr |= {"style": styles[0], "initial": initial if numeric([initial]) else 0.0, "batch": None}
    for values, name in ((lr, "warmup"), (lr, "decay"), (decay, "total")):
        values[name] = int(values[name] or 0)
    return {"lr": lr, "weight_decay": {**decay, "style": styles[1]}}, int(samples or 0)


def check_counts(scalars: OptimizerScalars | None, iteration: object, folder: Path) -> None:
    """Check that the number of updates, the file's iteration and the folder's name are consistent. Weights without
    optimizer state are not checked. Errors: CheckpointError if the numbers are inconsistent."""
    if scalars is None:
        return
    match = re.fullmatch(r"iter_(\d{1,15})", folder.name)
    if type(iteration) is not int or (match and int(match[1]) != iteration) or scalars.updates > iteration:
        raise CheckpointError(
            f"{folder}: iteration {plain(iteration)!r:.40}, {scalars.updates} updates of the optimizer: must be the "
            f"folder's number, and no more than it; {LEAVE}"
        )


def plain_state(scalars: OptimizerScalars | None, iteration: int, consumed: int, validated: int) -> dict[str, Json]:
    """The plain state of a mega checkpoint with optimizer state. validated: number of validation samples consumed."""
    if scalars is None:
        return {}
    return {
        "config": {"optimizer": {"optimizer": "adam", **scalars.constants}},
        "progress": {
            "step": iteration,
            "consumed": consumed,
            "consumed_valid": validated,
            "skipped": max(0, iteration - scalars.updates),
            "skipped_samples": 0 if scalars.samples is None else max(0, consumed - scalars.samples),
        },
        "updates": scalars.updates,
        "scaler": scalars.scaler,
        "schedule": scalars.schedule,
    }


def state_note(scalars: OptimizerScalars | None, requested: bool, action: str) -> str:
    """A one-line message for the user about the optimizer's state."""
    if not requested:
        return "optimizer: left out, if there is any"
    if scalars is None:
        return "optimizer: the source holds no state"
    extras = [name for name, value in (("loss scale", scalars.scaler), ("schedule", scalars.schedule)) if value]
    return f"optimizer: Adam's state after {scalars.updates:,} updates {action}" + "".join(
        f", {name}" for name in extras
    )
