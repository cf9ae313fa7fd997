"""Weights, gradients, masters and moments of one rank, to the byte as the gradient buckets and the optimizer hold them.

Which logical tensors there are and how they are cut comes from the inventory; what is known here besides is which of
them share one parameter, and how parameters lie in buckets (parallel/gradients.py). No tensor is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, inventory
from mega.core.plan.layers import stage_layers
from mega.core.shard import shard

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

ALIGNMENT = 64
"""Elements at which every parameter starts in its bucket (parallel/gradients.py)."""

Rows = tuple[tuple[str, tuple[str, ...]], ...]

_EMBEDDING: Rows = (("positions", ("model.embed_positions",)), ("embedding", ("model.embed_tokens",)))
_BLOCK: Rows = (
    ("attention norm", ("input_layernorm",)),
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("q and k norm", ("self_attn.q_norm",)),
    ("q and k norm", ("self_attn.k_norm",)),
    ("attention out", ("self_attn.o_proj",)),
    ("feed-forward norm", ("post_attention_layernorm",)),
    ("up", ("mlp.gate_proj", "mlp.up_proj")),
    ("down", ("mlp.down_proj",)),
)
_HEAD: Rows = (("logits", ("lm_head",)), ("final norm", ("model.norm",)))
"""The op that uses them, and modules in the order in which a stage defines them; those in one row are one parameter."""

Place = tuple[int, str]
"""Where in a chunk: a unit (0 the embedding, then the blocks, then the head), and an op of it."""

Placed = tuple[int, "Parameter"]
"""A parameter and its unit."""


class Chunk(NamedTuple):
    """What a rank holds of the model in one piece: so many blocks, with the embedding or the head where it has them.

    Ranks whose chunks are equal hold equally much, and take equally long.
    """

    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank: its logical tensors, elements in memory, and the op that uses it."""

    tensors: tuple[Tensor, ...]
    elements: int
    op: str

    @property
    def tensor(self) -> Tensor:
        """The first, which says what holds for all."""
        return self.tensors[0]


@dataclass(frozen=True)
class Bucket:
    """One flat bucket: elements with padding, elements of parameters, and of the span that this rank updates.

    dtype: of its weights. vectors: elements behind the last matrix. factors: rows and columns of all its matrices.
    places: where they are used.
    """

    length: int
    parameters: int
    span: int
    dtype: str
    vectors: int
    factors: int
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank. `masters` is 0 where the weights are themselves wide enough, or none are kept.

    parameters: elements, vocabulary padding included. largest: bytes of the largest bucket's weights. host: masters and
    moments that lie in the host's memory instead.
    """

    parameters: int
    weights: int
    grads: int
    masters: int
    moments: int
    largest: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.grads + self.masters + self.moments


def wide(dtype: str) -> int:
    """Bytes of max(fp32, dtype), in which masters, moments, norms and the loss are kept."""
    return max(4, BYTES[dtype])


def stage_chunks(run: RunConfig) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every pipeline stage of a resolved `run`, as `[stage][chunk]`."""
    model, parallel = run.model, run.parallel
    assert model.layers is not None
    layers = stage_layers(model.layers, parallel.pp, parallel.chunks, parallel.stage_layers)
    ends = (0, 0), (parallel.pp - 1, parallel.chunks - 1)
    return tuple(
        tuple(
            Chunk(len(blocks), (stage, number) == ends[0], (stage, number) == ends[1])
            for number, blocks in enumerate(chunks)
        )
        for stage, chunks in enumerate(layers)
    )


def stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...]) -> Weights:
    """What each rank with these `chunks` holds of a resolved `run` on `dp` data-parallel ranks.

    All tensor ranks of a stage hold equally much.
    """
    # All that matters here, so that layouts which differ elsewhere share their answer.
    parallel = replace(run.parallel, schedule=None)
    holding = RunConfig(model=run.model, precision=run.precision, parallel=parallel, optimizer=run.optimizer)
    return _stage_weights(holding, dp, chunks)


@lru_cache(maxsize=64)
def _stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...]) -> Weights:
    parallel, precision = run.parallel, run.precision
    buckets = list(stage_buckets(run, dp, chunks))
    length, span = sum(bucket.length for bucket in buckets), sum(bucket.span for bucket in buckets)
    high = wide(precision.dtype)
    assert precision.grad_dtype is not None
    grads = (span if parallel.zero >= 2 else length) * BYTES[precision.grad_dtype]
    apart = run.optimizer.optimizer_offload
    masters = sum(one.span * high for one in buckets if apart or (precision.masters and BYTES[one.dtype] != high))
    moments = sum(_moments(run, bucket) for bucket in buckets) * high
    return Weights(
        parameters=sum(bucket.parameters for bucket in buckets),
        weights=sum((one.span if parallel.zero >= 3 else one.length) * BYTES[one.dtype] for one in buckets),
        grads=grads,
        masters=0 if apart else masters,
        moments=0 if apart else moments,
        largest=max(one.length * BYTES[one.dtype] for one in buckets),
        host=masters + moments if apart else 0,
    )


def _moments(run: RunConfig, bucket: Bucket) -> int:
    """Values that the rule keeps of a bucket. The last data rank has most of Adafactor's: vectors lie at the end."""
    options = run.optimizer
    if options.optimizer == "adafactor":
        return bucket.factors + min(bucket.span, bucket.vectors)
    if options.optimizer == "sgd":
        return bucket.span if options.sgd_momentum else 0
    return 2 * bucket.span


def stage_buckets(run: RunConfig, dp: int, chunks: Sequence[Chunk]) -> Iterator[Bucket]:
    """The buckets of one rank of a stage, chunk by chunk (`GradBuffer`)."""
    shares = dp * run.parallel.cp if run.parallel.zero else 1
    for chunk in stage_parameters(run, chunks):
        for group in _groups(run, chunk):
            end = sum(_up(parameter.elements, ALIGNMENT) for _, parameter in group)
            length = _up(end, shares * ALIGNMENT)
            matrices = [parameter for _, parameter in group if parameter.tensor.decays]
            yield Bucket(
                length,
                sum(parameter.elements for _, parameter in group),
                length // shares,
                _dtype(run, group[0][1].tensor),
                length - sum(_up(parameter.elements, ALIGNMENT) for parameter in matrices),
                sum(sum(tensor.shape) for parameter in matrices for tensor in parameter.tensors),
                tuple((unit, parameter.op) for unit, parameter in group),
            )


@dataclass(frozen=True)
class Passing:
    """Whole buckets that come and go around the spans that a rank owns (ZeRO 2 and 3), in bytes.

    opened: place -> gradients that begin to exist with its backward pass. closed: place -> (gradients, span) of each
    bucket that is complete behind it and leaves. gathered: unit -> weights that are here while it runs, and the largest
    bucket of them, which arrives beside. left: what of the microbatch before is still leaving.
    """

    opened: Mapping[Place, int]
    closed: Mapping[Place, Sequence[tuple[int, int]]]
    gathered: Mapping[int, tuple[int, int]]
    left: int


def passing(run: RunConfig, dp: int, *, repeats: bool) -> Passing | None:
    """What comes and goes on a rank of the only stage, where something does. repeats: over several microbatches."""
    if run.parallel.zero < 2:
        return None
    assert run.model.layers and run.precision.grad_dtype
    opened: dict[Place, int] = {}
    closed: dict[Place, list[tuple[int, int]]] = {}
    gathered: dict[int, tuple[int, int]] = {}
    for bucket in stage_buckets(run, dp, stage_chunks(run)[0]):
        places = set(bucket.places)
        if run.model.tied and (0, "embedding") in places:
            places.add((run.model.layers + 1, "logits"))
        first, last = min(places, key=_order), max(places, key=_order)
        size = bucket.length * BYTES[run.precision.grad_dtype]
        opened[last] = opened.get(last, 0) + size
        closed.setdefault(first, []).append((size, size * bucket.span // bucket.length))
        if run.parallel.zero >= 3:
            here = bucket.length * BYTES[bucket.dtype]
            for unit in {unit for unit, _ in places}:
                held, largest = gathered.get(unit, (0, 0))
                gathered[unit] = (held + here, max(largest, here))
    left = sum(closed[min(closed, key=_order)][-1]) if repeats else 0
    return Passing(opened, closed, gathered, left)


_OPS = [op for rows in (tuple(reversed(_EMBEDDING)), _BLOCK, tuple(reversed(_HEAD))) for op, _ in rows]


def _order(place: Place) -> tuple[int, int]:
    """Places in the order of the forward pass."""
    unit, op = place
    return unit, _OPS.index(op)


def stage_parameters(run: RunConfig, chunks: Sequence[Chunk]) -> Iterator[list[Placed]]:
    """The parameters of each chunk of a stage with their units, in order of definition; a tied one once on a rank."""
    model, parallel = run.model, run.parallel
    embedding, block, head = _modules(model, parallel.tp)
    for blocks, first, last in chunks:
        tied = [embedding[-1]] if model.tied and last and parallel.pp > 1 else []
        units = [embedding if first else [], *[block] * blocks, tied + head if last else []]
        yield [(unit, parameter) for unit, parameters in enumerate(units) for parameter in parameters]


@lru_cache(maxsize=64)
def _modules(model: ModelConfig, tp: int) -> tuple[list[Parameter], list[Parameter], list[Parameter]]:
    """Parameters of the embedding, of a block and of the head (without a tied weight)."""
    logical = {tensor.name.removeprefix("model.layers.0."): tensor for tensor in inventory(replace(model, layers=1))}

    def parameters(rows: Rows) -> list[Parameter]:
        found = []
        for op, names in rows:
            for part in ("weight", "bias"):
                held = [logical[f"{name}.{part}"] for name in names if f"{name}.{part}" in logical]
                if held:
                    elements = sum(shard(tensor, {"tp": (0, tp)}).elements for tensor in held)
                    found.append(Parameter(tuple(held), elements, op))
        return found

    return parameters(_EMBEDDING), parameters(_BLOCK), parameters(_HEAD)


def _groups(run: RunConfig, chunk: list[Placed]) -> Iterator[list[Placed]]:
    """Neighbouring parameters whose gradients reduce alike, at least `bucket_size` elements where there are as many.

    Under ZeRO 3 those of each unit by themselves, whatever their size.
    """
    groups: dict[tuple[str, str], list[Placed]] = {}
    sizes: dict[tuple[str, str], int] = {}
    alone, before = run.parallel.zero >= 3, 0
    for unit, parameter in chunk:
        if alone and unit != before:
            yield from groups.values()
            groups, before = {}, unit
        alike = _kind(run, parameter.tensor), _dtype(run, parameter.tensor)
        groups.setdefault(alike, []).append((unit, parameter))
        sizes[alike] = sizes.get(alike, 0) + parameter.elements
        full = not alone and sizes[alike] >= run.parallel.bucket_size
        if alike[0] == "tied" or full:
            del sizes[alike]
            yield groups.pop(alike)
    yield from groups.values()


def _dtype(run: RunConfig, tensor: Tensor) -> str:
    return "fp32" if run.precision.embedding_fp32 and "embedding" in tensor.units else run.precision.dtype


def _kind(run: RunConfig, tensor: Tensor) -> str:
    parallel = run.parallel
    if len(tensor.units) > 1 and parallel.pp > 1:
        return "tied"
    if parallel.tp == 1 or tensor.cut is not None:
        return "cut"
    if "tp" in tensor.partial or ("sequence" in tensor.partial and parallel.sequence_parallel):
        return "partial"
    return "whole"


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
