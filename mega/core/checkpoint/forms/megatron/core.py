"""Flat buffers and names of Megatron-core's optimizer state, for reading and writing.

A tensor of the state is identified by its position in a list of parameters, whose order eras.py defines, or in a flat
buffer (`buckets_of`). Only the named format of torch_dist identifies state by names (`state_name`). This module follows
Megatron-core 0.18.2, does not depend on files, and uses only the sizes of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mega.core.checkpoint.forms.megatron.eras import TIED_COPY, WORDS

GROUP_KEYS: dict[str, object] = {"is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
"""Additional keys of a parameter group, beyond torch's keys. Megatron-core identifies groups by the first two of these
keys."""

KINDS = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "master": "param"}
"""The project's kind of state -> the distributed optimizer's name."""

_NAMED = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "param": "master", "fp32_param": "master"}
_NAME = re.compile(rf"optimizer\.state\.({'|'.join(_NAMED)})\.(.+)")
_FLAT = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})\.dtype_\([\w., ]+\)"
    r"\.bucket_idx_(\d{1,6})\.(\w+)"
)


def state_name(kind: str, weight: str, *, distributed: bool = False) -> str:
    """Return torch_dist's name for the state of a weight. The state is stacked over layers like the weight.
    distributed: whether the distributed optimizer saved the state, in its fully reshardable mode.

    >>> state_name("master", "output_layer.weight")
    'optimizer.state.fp32_param.output_layer.weight'
    """
    key = "fp32_param" if kind == "master" and not distributed else KINDS[kind]
    return f"optimizer.state.{key}.{weight}"


def named_state(name: str) -> tuple[str, str] | None:
    """Parse a name in torch_dist into (kind of state, weight's name); None if the name does not identify a weight's
    state.

    >>> named_state("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight")
    ('moment2', 'decoder.final_layernorm.weight')
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (_NAMED[match[1]], match[2])


@dataclass(frozen=True)
class FlatName:
    """The name of one of the distributed optimizer's flat buffers in torch_dist."""

    rank: int
    """Index of the rank that saved the buffer; tensor ranks vary fastest, then pipeline ranks."""
    chunk: int
    """Index of the rank's model chunk."""
    bucket: int
    """Index of the chunk's bucket."""
    key: str
    """Megatron's name for the kind of state."""


def flat_name(name: str) -> FlatName | None:
    """Parse a name in torch_dist; None if the name does not identify a flat buffer."""
    match = _FLAT.fullmatch(name)
    return None if match is None else FlatName(int(match[1]), int(match[2]), int(match[3]), match[4])


ALIGNED = 64
"""Alignment of parameters in a bucket, in elements."""


@dataclass
class FlatBucket:
    """The offsets of the parameters in one flat buffer, and the buffer's length without padding at the end."""

    begins: dict[str, int] = field(default_factory=dict)
    length: int = 0


def buckets_of(numbers: Mapping[str, int], limit: int | None, alone: Collection[str] = ()) -> list[FlatBucket]:
    """Return the buckets in which the distributed optimizer stores the parameters of a model chunk, beginning with the
    last parameter.

    numbers: number of elements of each parameter, in the order of the modules. limit: number of elements after which a
    bucket is full; None means a single bucket. alone: parameters that each get a separate bucket, namely tied
    embeddings on several stages.

    >>> buckets_of({"a": 100, "b": 10, "c": 70}, None)
    [FlatBucket(begins={'c': 0, 'b': 128, 'a': 192}, length=292)]
    >>> [each.begins for each in buckets_of({"a": 100, "b": 10, "c": 70}, 70)]
    [{'c': 0}, {'b': 0, 'a': 64}]
    """
    buckets, end = [FlatBucket()], 0
    for name in reversed(list(numbers)):
        begin = -(-end // ALIGNED) * ALIGNED
        if name in alone and buckets[-1].begins:
            buckets[-1].length = begin
            buckets.append(FlatBucket())
            begin = 0
        end = begin + numbers[name]
        buckets[-1].begins[name], buckets[-1].length = begin, end
        if name in alone or (limit is not None and end >= limit):
            buckets.append(FlatBucket())
            end = 0
    return [bucket for bucket in buckets if bucket.begins]


def bucket_limit(values: Mapping[str, object], stage: int, chunk: int) -> int | None:
    """Return the value of `buckets_of`'s argument `limit` for a model chunk of a pipeline stage. values: Megatron's
    arguments."""
    single = not values.get("overlap_grad_reduce") or values.get("overlap_param_gather_with_optimizer_step")
    if single or stage or chunk:
        return None
    size, ranks = values.get("ddp_bucket_size"), values.get("data_parallel_size")
    return size if type(size) is int else max(40_000_000, 1_000_000 * ranks if type(ranks) is int else 0)


_HEADS = ("output_layer.weight", TIED_COPY)


def own_buckets(names: Collection[str], tied: bool) -> tuple[str, ...]:
    """Return the value of `buckets_of`'s argument `alone`: the names of a model chunk's tied embeddings. The value is
    empty if the chunk contains the whole model. names: the chunk's common names."""
    has_all_stages = WORDS in names and any(name.startswith("encoder.final_norm.") for name in names)
    return () if has_all_stages or not tied else tuple(name for name in (WORDS, *_HEADS) if name in names)
