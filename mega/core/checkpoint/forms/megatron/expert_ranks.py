"""Convert names of experts that Megatron-core's `torch` checkpoints distribute over ranks, in folders
`mp_rank_TT[_PPP]_EEE`.

The files of expert ranks differ only in their experts, which are numbered from 0 in each file, and in a second
optimizer, which contains the state of these experts. This module depends on names and arguments, not on files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from mega.core.checkpoint.own.pieces import CheckpointError

_EXPERT = re.compile(r"(\.mlp\.local_experts\.)(\d{1,6})(?=\.)")

Value = TypeVar("Value")


def is_expert(name: str) -> bool:
    """Whether a common name identifies an expert's tensor.

    >>> is_expert("encoder.layers.0.mlp.local_experts.3.dense_h_to_4h.weight"), is_expert("mlp.router.weight")
    (True, False)
    """
    return _EXPERT.search(name) is not None


def expert_ranks_of(values: Mapping[str, object], where: Path) -> tuple[int, int]:
    """Return (number of ranks over which the experts are distributed, number of experts per rank). values: Megatron's
    arguments.

    Errors: CheckpointError naming an argument whose value is not supported.
    """
    ranks, experts = values.get("expert_model_parallel_size"), values.get("num_experts")
    ranks = 1 if ranks is None else ranks
    if type(ranks) is not int or ranks < 1 or (ranks > 1 and (type(experts) is not int or experts % ranks)):
        rule = f"must be a number that divides args.num_experts {experts!r:.40}"
        raise CheckpointError(f"{where}: args.expert_model_parallel_size {ranks!r:.40}: {rule}")
    tensor_ranks = values.get("tensor_model_parallel_size") or 1
    if experts and (apart := values.get("expert_tensor_parallel_size")) not in (None, tensor_ranks):
        rule = f"must be args.tensor_model_parallel_size {tensor_ranks!r:.40}; have Megatron-core save torch_dist"
        raise CheckpointError(f"{where}: args.expert_tensor_parallel_size {apart!r:.40}: {rule}")
    return ranks, experts // ranks if type(experts) is int else 0


def whole_names(tensors: Mapping[str, Value], rank: int, each: int, where: Path) -> dict[str, Value]:
    """Rename the experts in one rank's file, so that their names contain their indices in the whole model. each: number
    of experts per rank.

    >>> list(whole_names({"a.mlp.local_experts.1.b": 0, "c": 0}, 2, 4, Path("file")))
    ['a.mlp.local_experts.9.b', 'c']
    """
    named: dict[str, Value] = {}
    for name, value in tensors.items():
        match = _EXPERT.search(name)
        if match is not None and int(match[2]) >= each:
            raise CheckpointError(f"{where}: {name}: its args give {each} experts to each rank")
        named[_renumbered(name, rank * each)] = value
    return named


def names_of_rank(tensors: Mapping[str, Value], rank: int, each: int) -> dict[str, Value]:
    """Return the tensors that one rank's file stores, under their names in that file. tensors: all tensors of the
    model. each: number of experts per rank.

    >>> names_of_rank({"a.mlp.local_experts.1.b": 0, "a.mlp.local_experts.2.b": 1, "c": 2}, 1, 2)
    {'a.mlp.local_experts.0.b': 1, 'c': 2}
    """
    own = {
        name: value
        for name, value in tensors.items()
        if (found := _EXPERT.search(name)) is None or int(found[2]) // each == rank
    }
    return {_renumbered(name, -rank * each): value for name, value in own.items()}


def parts_of(tensors: Mapping[str, Value]) -> list[tuple[bool, dict[str, Value]]]:
    """Split tensors by optimizer. Return (whether the optimizer belongs to the experts, tensors) for each optimizer
    that has tensors."""
    parts: dict[bool, dict[str, Value]] = {False: {}, True: {}}
    for name, value in tensors.items():
        parts[is_expert(name)][name] = value
    return [(of_experts, part) for of_experts, part in parts.items() if part]


def _renumbered(name: str, by: int) -> str:
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + by}", name, count=1)
