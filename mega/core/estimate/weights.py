"""Weights, gradients, masters and moments of one rank, to the byte as the gradient buckets and the optimizer hold them.

The parameters are those of real stages on the meta device, and lie in buckets as parallel/layout.py plans them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mega.core.architecture import Tensor, Unit, inventory, placement, shape
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.config.sections import BatchOptions, ModelConfig, ParallelConfig, ParallelOptions, RuntimeConfig
from mega.core.estimate.chunks import Chunk, of_kind, stage_chunks
from mega.core.parallel.layout import BucketRules, BucketSpec, ParameterSpec, plan_buckets, shared_stages

SMALLEST = BatchOptions(seq_length=1, micro_batch=1)
"""Of a run that is only asked what it holds, which does not depend on it."""

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

Place = tuple[int, int]
"""A parameter's unit in a chunk (0 before the first stack, its blocks, what follows, ...), and its number there."""


@dataclass(frozen=True)
class BucketSize:
    """One flat bucket, in elements: with padding, of parameters, and of the span that this rank updates.

    width: bytes of a weight. whole: elements of the largest of its matrices where these are updated whole, else 0.
    vectors: elements after the last matrix. factors: rows and columns of all its matrices. places: of its parameters.
    users: names of the units of those that are of several. data: the axis of its sum.
    """

    length: int
    parameters: int
    span: int
    width: int
    whole: int
    vectors: int
    factors: int
    places: tuple[Place, ...]
    users: frozenset[Unit]
    data: str


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank. `masters` is 0 where the weights are themselves wide enough, or none are kept.

    parameters: elements, vocabulary padding included. experts: those of them that only some of the data ranks share.
    largest: elements of the largest span that this rank updates. owned: most elements of whole matrices that it updates
    at once. host: masters and moments that lie in the host's memory instead. frozen: bytes of the weights that are not
    trained, and have nothing else; frozen_parameters: their elements.
    """

    parameters: int
    weights: int
    grads: int
    masters: int
    moments: int
    largest: int
    owned: int = 0
    host: int = 0
    frozen: int = 0
    frozen_parameters: int = 0
    experts: int = 0

    @property
    def trained(self) -> int:
        """Elements that have gradients, and are updated."""
        return self.parameters - self.frozen_parameters

    def by_axis(self, shards: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """Trained elements, and the data ranks that hold copies of them. shards: of `data_shards`."""
        yield self.trained - self.experts, shards["dp"]
        if self.experts:
            yield self.experts, shards["edp"]

    @property
    def total(self) -> int:
        return self.weights + self.grads + self.masters + self.moments


def wide(dtype: str) -> int:
    """Bytes of max(fp32, dtype), in which masters, moments, norms and the loss are kept."""
    return max(4, BYTES[dtype])


def stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...]) -> Weights:
    """What each rank with these `chunks` holds of a resolved `run` on `dp` data-parallel ranks.

    All tensor ranks of a stage hold equally much.
    """
    # All that matters here, so that layouts which differ elsewhere share their answer.
    holding = Options(
        model=run.model, precision=run.precision, parallel=run.parallel, optimizer=run.optimizer, batch=SMALLEST
    )
    return _stage_weights(resolve(updated(holding, {"schedule": None}), 1), dp, chunks)


@lru_cache(maxsize=64)
def _stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...]) -> Weights:
    parallel, precision = run.parallel, run.precision
    buckets = list(stage_buckets(run, dp, chunks))
    length, span = sum(bucket.length for bucket in buckets), sum(bucket.span for bucket in buckets)
    high = wide(precision.dtype)
    grads = (span if parallel.zero >= 2 else length) * BYTES[precision.grad_dtype]
    apart = run.optimizer.optimizer_offload
    masters = sum(one.span * high for one in buckets if apart or (precision.masters and one.width != high))
    moments = sum(_moments(run, bucket) for bucket in buckets) * high
    frozen = [one for chunk in chunks for part in _parameters(run, chunk) for one in part if not trained(one)]
    frozen_bytes = sum(one.elements * BYTES[one.dtype] for one in frozen)
    frozen_parameters = sum(one.elements for one in frozen)
    return Weights(
        parameters=sum(bucket.parameters for bucket in buckets) + frozen_parameters,
        weights=sum((one.span if parallel.zero >= 3 else one.length) * one.width for one in buckets) + frozen_bytes,
        grads=grads,
        masters=0 if apart else masters,
        moments=0 if apart else moments,
        largest=max(one.span for one in buckets),
        owned=max(max(one.span, one.whole) if one.whole else 0 for one in buckets),
        experts=sum(bucket.parameters for bucket in buckets if bucket.data == "edp"),
        host=masters + moments if apart else 0,
        frozen=frozen_bytes,
        frozen_parameters=frozen_parameters,
    )


def _moments(run: RunConfig, bucket: BucketSize) -> int:
    """Values that the rule keeps of a bucket. The last data rank has most of Adafactor's: vectors lie at the end."""
    options = run.optimizer
    if options.optimizer == "adafactor":
        return bucket.factors + min(bucket.span, bucket.vectors)
    if options.optimizer == "sgd":
        return bucket.span if options.sgd_momentum else 0
    if options.optimizer == "muon" and bucket.whole:
        return bucket.span
    return 2 * bucket.span


class Transient(NamedTuple):
    """A whole bucket that comes and goes around the span that a rank owns (ZeRO 2 and 3), in bytes.

    places: of its parameters; its gradients come with the first of theirs and go with the last. summed: our span of
    their sum, while they go. weights: where these are not always here. sent_for: while the unit before runs. units:
    those that gather them.
    """

    places: tuple[Place, ...]
    grads: int
    summed: int
    weights: int = 0
    sent_for: bool = False
    units: tuple[int, ...] = ()


def transient_buckets(run: RunConfig, dp: int) -> list[Transient]:
    """The buckets that come and go on a rank of the only stage."""
    if run.parallel.zero < 2:
        return []
    found, size, alone = [], BYTES[run.precision.grad_dtype], dp * run.parallel.cp == 1
    (chunk,) = chunks = stage_chunks(run)[0]
    after = shape(run.model).after
    for bucket in stage_buckets(run, dp, chunks):
        one = Transient(bucket.places, bucket.length * size, 0 if alone else bucket.span * size)
        if run.parallel.zero >= 3:
            weights, users = bucket.length * bucket.width, {unit for unit, _ in bucket.places}
            users |= {chunk.unit(after[unit]) for unit in bucket.users if isinstance(unit, str)}
            ahead = run.parallel.overlap_param_gather and not alone
            one = one._replace(weights=weights, sent_for=ahead, units=tuple(users))
        found.append(one)
    return found


def stage_buckets(run: RunConfig, dp: int, chunks: Sequence[Chunk]) -> Iterator[BucketSize]:
    """The buckets of one rank of a stage, chunk by chunk."""
    parallel = run.parallel
    rules = BucketRules(
        {"tp": parallel.tp, "etp": parallel.etp},
        parallel.sequence_parallel,
        shards=data_shards(parallel, dp) if parallel.zero else {},
        least=parallel.bucket_size if parallel.zero < 3 else None,
        stages=tied_stages(run.model, parallel.pp, parallel.chunks, parallel.stage_layers),
        matrices=run.optimizer.optimizer == "muon",
    )
    for chunk in chunks:
        parts = _trained_parts(_parameters(run, chunk))
        held = [(unit, number) for unit, part in enumerate(parts) for number in range(len(part))]
        if parallel.zero < 3:
            for spec in plan_buckets([parts[unit][number] for unit, number in held], rules):
                yield _bucket(spec, held, parts)
            continue
        planned = {id(part): list(plan_buckets(part, rules)) for part in parts}  # blocks share theirs
        for unit, part in enumerate(parts):
            places = [(unit, number) for number in range(len(part))]
            yield from (_bucket(spec, places, parts) for spec in planned[id(part)])


def data_shards(parallel: ParallelConfig, dp: int) -> dict[str, int]:
    """Data axis -> its ranks."""
    data = dp * parallel.cp
    return {"dp": data, "edp": data * parallel.tp // (parallel.etp * parallel.ep)}


def _bucket(spec: BucketSpec, places: Sequence[Place], parts: Sequence[Sequence[ParameterSpec]]) -> BucketSize:
    here = tuple(places[number] for number in spec.parameters)
    held = [parts[unit][number] for unit, number in here]
    matrices = [tensor for parameter in held for tensor in parameter.tensors if tensor.decays]
    return BucketSize(
        spec.length,
        sum(parameter.elements for parameter in held),
        spec.shard,
        BYTES[spec.dtype],
        max(tensor.elements for tensor in matrices) if spec.reduction.whole else 0,
        spec.length - spec.decay_end,
        sum(sum(tensor.shape) for tensor in matrices),
        here,
        frozenset(unit for parameter in held for unit in _tied(parameter.tensors[0])),
        held[0].tensors[0].data,
    )


def trained(parameter: ParameterSpec) -> bool:
    """Whether a parameter has gradients, and so lies in a bucket."""
    return parameter.tensors[0].learned


def _trained_parts(parts: Sequence[list[ParameterSpec]]) -> list[list[ParameterSpec]]:
    """The trained parameters of each unit; blocks that share theirs still do."""
    kept = {id(part): [one for one in part if trained(one)] for part in parts}
    return [kept[id(part)] for part in parts]


def _tied(tensor: Tensor) -> tuple[Unit, ...]:
    return tensor.units if len(tensor.units) > 1 else ()


def _parameters(run: RunConfig, chunk: Chunk) -> list[list[ParameterSpec]]:
    """Those of a chunk by units. All that does not matter to them is left out, so that layouts share their answer."""
    from mega.core.estimate.trace import unit_parameters

    bare = Options(
        model=run.model,
        precision=run.precision,
        parallel=ParallelOptions(
            tp=run.parallel.tp,
            ep=run.parallel.ep,
            etp=run.parallel.etp,
            sequence_parallel=run.parallel.sequence_parallel,
        ),
        batch=SMALLEST,
        runtime=RuntimeConfig(device=run.runtime.device, ops="reference"),
    )
    if chunk.before is not None:
        return unit_parameters(resolve(bare, 1), chunk)
    short = chunk._replace(stacks=tuple(min(count, 1) for count in chunk.stacks), kinds=())
    kinds = {kind.experts: kind for kind in chunk.kinds}
    if run.model.experts and kinds:
        found = {
            experts: unit_parameters(resolve(replace(bare, model=of_kind(run.model, kind)), 1), short)
            for experts, kind in kinds.items()
        }
        before, _, after = found[chunk.kinds[-1].experts]  # layers of the head are as the last one
        return [before, *(found[kind.experts][1] for kind in chunk.kinds), after]
    held = iter(unit_parameters(resolve(bare, 1), short))
    parts = [next(held)]
    for count in chunk.stacks:
        parts += [next(held)] * count if count else []
        parts.append(next(held))
    return parts


@lru_cache(maxsize=64)
def tied_stages(model: ModelConfig, pp: int, chunks: int, explicit: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Name -> pipeline stages of every tensor that several of them hold."""
    return {} if pp == 1 else shared_stages(inventory(model), placement(model, pp, chunks, explicit))
