"""What Megatron-core alone says of its optimizer's state: flat buffers, names. Data, both ways.

A tensor of the state has no name, only a place: in a list of parameters, in the order of eras.py, or in a flat buffer
(`buckets_of`). Only torch_dist names some of it (`state_name`). Facts are those of core 0.18.2. Knows no files, and no
tensors but their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mega.core.checkpoint.forms.megatron.eras import TIED_COPY, WORDS

GROUP_KEYS: dict[str, object] = {"is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
"""What a group of parameters says besides the optimizer's own; by the first two core recognises its groups."""

KINDS = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "master": "param"}
"""Our kinds of state, and what the distributed optimizer calls them."""

_NAMED = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "param": "master", "fp32_param": "master"}
_NAME = re.compile(rf"optimizer\.state\.({'|'.join(_NAMED)})\.(.+)")
_FLAT = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})\.dtype_\([\w., ]+\)"
    r"\.bucket_idx_(\d{1,6})\.(\w+)"
)


def state_name(kind: str, weight: str, *, distributed: bool = False) -> str:
    """What torch_dist calls the state of a weight, stacked over layers as it is. distributed: of that optimizer, fully
    reshardable.

    >>> state_name("master", "output_layer.weight")
    'optimizer.state.fp32_param.output_layer.weight'
    """
    theirs = "fp32_param" if kind == "master" and not distributed else KINDS[kind]
    return f"optimizer.state.{theirs}.{weight}"


def named_state(name: str) -> tuple[str, str] | None:
    """The kind of state, and the weight that it belongs to, of a name of torch_dist; None for other names.

    >>> named_state("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight")
    ('moment2', 'decoder.final_layernorm.weight')
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (_NAMED[match[1]], match[2])


@dataclass(frozen=True)
class FlatName:
    """Whose flat buffer a name of torch_dist is: of which (tensor, then pipeline) rank, which model chunk of it, which
    bucket, and what of the state as Megatron calls it."""

    rank: int
    chunk: int
    bucket: int
    key: str


def flat_name(name: str) -> FlatName | None:
    """What a name of torch_dist says, where it is one of the distributed optimizer's flat buffers."""
    match = _FLAT.fullmatch(name)
    return None if match is None else FlatName(int(match[1]), int(match[2]), int(match[3]), match[4])


ALIGNED = 64
"""A parameter begins at a multiple of so many numbers of its bucket."""


@dataclass
class FlatBucket:
    """Some parameters in one flat buffer: where each begins, and how long it is without the padding at its end."""

    begins: dict[str, int] = field(default_factory=dict)
    length: int = 0


def buckets_of(numbers: Mapping[str, int], limit: int | None, alone: Collection[str] = ()) -> list[FlatBucket]:
    """Where the distributed optimizer lays the parameters of a model chunk: from the last to the first.

    numbers: of each parameter, in the order of the modules. limit: a bucket of so many is full; None: there is one.
    alone: tied embeddings of several stages, which get a bucket of their own.

    >>> buckets_of({"a": 100, "b": 10, "c": 70}, None)
    [FlatBucket(begins={'c': 0, 'b': 128, 'a': 192}, length=292)]
    >>> [each.begins for each in buckets_of({"a": 100, "b": 10, "c": 70}, 70)]
    [{'c': 0}, {'b': 0, 'a': 64}]
    """
    made, end = [FlatBucket()], 0
    for name in reversed(list(numbers)):
        begin = -(-end // ALIGNED) * ALIGNED
        if name in alone and made[-1].begins:
            made[-1].length = begin
            made.append(FlatBucket())
            begin = 0
        end = begin + numbers[name]
        made[-1].begins[name], made[-1].length = begin, end
        if name in alone or (limit is not None and end >= limit):
            made.append(FlatBucket())
            end = 0
    return [bucket for bucket in made if bucket.begins]


def bucket_limit(values: Mapping[str, object], stage: int, chunk: int) -> int | None:
    """The `limit` of `buckets_of` for a model chunk of a pipeline stage, by Megatron's arguments."""
    whole = not values.get("overlap_grad_reduce") or values.get("overlap_param_gather_with_optimizer_step")
    if whole or stage or chunk:
        return None
    size, ranks = values.get("ddp_bucket_size"), values.get("data_parallel_size")
    return size if type(size) is int else max(40_000_000, 1_000_000 * ranks if type(ranks) is int else 0)


_HEADS = ("output_layer.weight", TIED_COPY)


def own_buckets(names: Collection[str], tied: bool) -> tuple[str, ...]:
    """The `alone` of `buckets_of`: a tied embedding's parameters among `names` of a model chunk, common ones, unless
    the whole model is there."""
    whole = WORDS in names and any(name.startswith("encoder.final_norm.") for name in names)
    return () if whole or not tied else tuple(name for name in (WORDS, *_HEADS) if name in names)
