"""Computes the exact bytes of the weights, gradients, masters and moments of one rank, as buckets and optimizer store
them.

The parameters are read from real pipeline stages built on the meta device, and parallel/layout.py assigns them to
buckets.
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
"""Arbitrary batch options for computing constant memory, which does not depend on the batch."""

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

Place = tuple[int, int]
"""The position of a parameter: (index of its unit in the chunk, index in the unit). Unit 0 is before the first stack;
the blocks of the stack follow, then the unit after the stack, and so on.
"""


@dataclass(frozen=True)
class BucketSize:
    """The sizes of one flat bucket."""

    length: int  # Number of elements, including padding
    parameters: int  # Number of parameter elements
    span: int  # Number of elements that this rank updates
    width: int  # Number of bytes per weight element
    whole: int  # Number of elements of the largest matrix if each matrix is updated as a whole, else 0
    vectors: int  # Number of elements after the last matrix
    factors: int  # Number of rows plus columns of all matrices
    places: tuple[Place, ...]  # Units and indices of the bucket's parameters
    users: frozenset[Unit]  # Units that share the bucket's tied parameters
    data: str  # The axis over which the bucket's gradients are reduced


@dataclass(frozen=True)
class Weights:
    """Constant memory of one rank, in bytes."""

    parameters: int  # Number of elements, including vocabulary padding
    weights: int  # Bytes of weights
    grads: int  # Bytes of gradients
    masters: int  # Bytes of masters; 0 if weights are fp32 or wider, or masters are off
    moments: int  # Bytes of moments
    largest: int  # Number of elements in the largest span that this rank updates
    owned: int = 0  # Maximum number of elements in whole matrices that the rank updates at a time (Muon)
    host: int = 0  # Bytes of masters and moments in the host's memory
    frozen: int = 0  # Bytes of weights that are not trained
    frozen_parameters: int = 0  # Number of elements of weights that are not trained
    experts: int = 0  # Number of elements of expert weights, which only some of the data ranks share
    casts: int = 0  # Bytes, included in `weights`, of fp8 casts that the passes of a step share
    overwritten: int = 0  # Number of elements whose gradients a step's first wgrad GEMM overwrites instead of adding

    @property
    def trained(self) -> int:
        """Number of elements that have gradients and are updated."""
        return self.parameters - self.frozen_parameters

    def by_axis(self, shards: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """Yield (trained elements, number of data ranks with copies of them). shards: result of `data_shards`."""
        yield self.trained - self.experts, shards["dp"]
        if self.experts:
            yield self.experts, shards["edp"]

    @property
    def total(self) -> int:
        return self.weights + self.grads + self.masters + self.moments


def wide_bytes(dtype: str) -> int:
    """Bytes per element of max(fp32, dtype), which is the dtype of masters, moments, norms and the loss."""
    return max(4, BYTES[dtype])


def stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...], *, shared: bool = False) -> Weights:
    """The constant memory of each rank with these `chunks`, for a resolved `run` on `dp` data-parallel ranks.

    All tensor ranks of a stage have equal sizes. shared: whether the passes of a step share fp8 casts.
    """
    # Keep only the options that affect the result, so that layouts that differ only in other options share the cached
    # result.
    holding = Options(
        model=run.model, precision=run.precision, parallel=run.parallel, optimizer=run.optimizer, batch=SMALLEST
    )
    return _stage_weights(resolve(updated(holding, {"schedule": None}), 1), dp, chunks, shared)


@lru_cache(maxsize=2048)
def _stage_weights(run: RunConfig, dp: int, chunks: tuple[Chunk, ...], shared: bool) -> Weights:
    parallel, precision = run.parallel, run.precision
    buckets = list(stage_buckets(run, dp, chunks))
    length, span = sum(bucket.length for bucket in buckets), sum(bucket.span for bucket in buckets)
    high = wide_bytes(precision.dtype)
    grads = (span if parallel.zero >= 2 else length) * BYTES[precision.grad_dtype]
    offloaded = run.optimizer.optimizer_offload  # with offload, the host stores masters even if weights are fp32
    masters = sum(one.span * high for one in buckets if offloaded or (precision.masters and one.width != high))
    moments = sum(_moments(run, bucket) for bucket in buckets) * high
    specs = [one for chunk in chunks for part in _parameters(run, chunk) for one in part]
    frozen = [one for one in specs if not trained(one)]
    linear = [one for one in specs if _linear(run, one)]
    casts = 2 * sum(one.elements for one in linear) if shared else 0
    frozen_bytes = sum(one.elements * BYTES[one.dtype] for one in frozen)
    frozen_parameters = sum(one.elements for one in frozen)
    return Weights(
        parameters=sum(bucket.parameters for bucket in buckets) + frozen_parameters,
        weights=sum((one.span if parallel.zero >= 3 else one.length) * one.width for one in buckets)
        + frozen_bytes
        + casts,
        grads=grads,
        masters=0 if offloaded else masters,
        moments=0 if offloaded else moments,
        largest=max(one.span for one in buckets),
        owned=max(max(one.span, one.whole) if one.whole else 0 for one in buckets),
        experts=sum(bucket.parameters for bucket in buckets if bucket.data == "edp"),
        host=masters + moments if offloaded else 0,
        frozen=frozen_bytes,
        frozen_parameters=frozen_parameters,
        casts=casts,
        overwritten=sum(one.elements for one in linear if trained(one)) if precision.fp8 and parallel.zero < 2 else 0,
    )


def _moments(run: RunConfig, bucket: BucketSize) -> int:
    """The number of values that the optimizer stores for a bucket.

    For Adafactor, the number depends on the rank. The result is for the last data rank, which stores the most values
    because vectors are at the end of a bucket.
    """
    options = run.optimizer
    if options.optimizer == "adafactor":
        return bucket.factors + min(bucket.span, bucket.vectors)
    if options.optimizer == "sgd":
        return bucket.span if options.sgd_momentum else 0
    if options.optimizer == "muon" and bucket.whole:
        return bucket.span
    return 2 * bucket.span


class TransientBucket(NamedTuple):
    """Bytes of a whole bucket that a rank allocates temporarily, although it owns only a span of the bucket (ZeRO 2 and
    3)."""

    places: tuple[Place, ...]  # Units and indices of the bucket's parameters
    grads: int  # Bytes of gradients, allocated from the first gradient of the bucket's parameters to the last
    summed: int  # Bytes of this rank's span of the reduced gradients, allocated during the reduction
    weights: int = 0  # Bytes of gathered weights, 0 if the weights are never freed
    sent_for: bool = False  # Whether the weights are gathered while the previous unit runs
    units: tuple[int, ...] = ()  # Units that need the weights


def transient_buckets(run: RunConfig, dp: int) -> list[TransientBucket]:
    """List the temporary buckets of a rank, for a run with a single pipeline stage."""
    if run.parallel.zero < 2:
        return []
    buckets, size, single_rank = [], BYTES[run.precision.grad_dtype], dp * run.parallel.cp == 1
    (chunk,) = chunks = stage_chunks(run)[0]
    after = shape(run.model).after
    for bucket in stage_buckets(run, dp, chunks):
        one = TransientBucket(bucket.places, bucket.length * size, 0 if single_rank else bucket.span * size)
        if run.parallel.zero >= 3:
            weights, users = bucket.length * bucket.width, {unit for unit, _ in bucket.places}
            users |= {chunk.unit(after[unit]) for unit in bucket.users if isinstance(unit, str)}
            prefetches = run.parallel.overlap_param_gather and not single_rank
            one = one._replace(weights=weights, sent_for=prefetches, units=tuple(users))
        buckets.append(one)
    return buckets


def stage_buckets(run: RunConfig, dp: int, chunks: Sequence[Chunk]) -> Iterator[BucketSize]:
    """Yield the buckets of one rank of a stage, chunk by chunk."""
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
        trained_positions = [(unit, number) for unit, part in enumerate(parts) for number in range(len(part))]
        if parallel.zero < 3:
            for spec in plan_buckets([parts[unit][number] for unit, number in trained_positions], rules):
                yield _bucket(spec, trained_positions, parts)
            continue
        planned = {id(part): list(plan_buckets(part, rules)) for part in parts}  # equal blocks share one list
        for unit, part in enumerate(parts):
            places = [(unit, number) for number in range(len(part))]
            yield from (_bucket(spec, places, parts) for spec in planned[id(part)])


def data_shards(parallel: ParallelConfig, dp: int) -> dict[str, int]:
    """Return a dict: data axis -> number of ranks on this axis."""
    data = dp * parallel.cp
    return {"dp": data, "edp": data * parallel.tp // (parallel.etp * parallel.ep)}


def _bucket(spec: BucketSpec, places: Sequence[Place], parts: Sequence[Sequence[ParameterSpec]]) -> BucketSize:
    bucket_positions = tuple(places[number] for number in spec.parameters)
    parameters = [parts[unit][number] for unit, number in bucket_positions]
    matrices = [tensor for parameter in parameters for tensor in parameter.tensors if tensor.decays]
    return BucketSize(
        spec.length,
        sum(parameter.elements for parameter in parameters),
        spec.shard,
        BYTES[spec.dtype],
        max(tensor.elements for tensor in matrices) if spec.reduction.whole else 0,
        spec.length - spec.decay_end,
        sum(sum(tensor.shape) for tensor in matrices),
        bucket_positions,
        frozenset(unit for parameter in parameters for unit in _tied(parameter.tensors[0])),
        parameters[0].tensors[0].data,
    )


def trained(parameter: ParameterSpec) -> bool:
    """Whether a parameter has gradients and therefore belongs to a bucket."""
    return parameter.tensors[0].learned


def _linear(run: RunConfig, parameter: ParameterSpec) -> bool:
    """Whether a parameter is a linear layer's weight in a block, whose GEMMs are in fp8 with --fp8. Adapters, which are
    the only trained matrices of a run that has them, are not in fp8."""
    tensor = parameter.tensors[0]
    return tensor.hidden_matrix and not (run.model.lora_rank and tensor.trainable)


def _trained_parts(parts: Sequence[list[ParameterSpec]]) -> list[list[ParameterSpec]]:
    """The trained parameters of each unit. Equal blocks share one list."""
    trained_of = {id(part): [one for one in part if trained(one)] for part in parts}
    return [trained_of[id(part)] for part in parts]


def _tied(tensor: Tensor) -> tuple[Unit, ...]:
    return tensor.units if len(tensor.units) > 1 else ()


def _parameters(run: RunConfig, chunk: Chunk) -> list[list[ParameterSpec]]:
    """List the parameters of a chunk, one list per unit. Options that do not affect parameters are removed, so that
    more layouts share the cached result."""
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
        parameters_of_kind = {
            experts: unit_parameters(resolve(replace(bare, model=of_kind(run.model, kind)), 1), short)
            for experts, kind in kinds.items()
        }
        # The head's parameters are those of a model whose layers are all of the last layer's kind.
        before, _, after = parameters_of_kind[chunk.kinds[-1].experts]
        return [before, *(parameters_of_kind[kind.experts][1] for kind in chunk.kinds), after]
    unit_iterator = iter(unit_parameters(resolve(bare, 1), short))
    parts = [next(unit_iterator)]
    for count in chunk.stacks:
        parts += [next(unit_iterator)] * count if count else []
        parts.append(next(unit_iterator))
    return parts


@lru_cache(maxsize=2048)
def tied_stages(model: ModelConfig, pp: int, chunks: int, explicit: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return a dict: name -> pipeline stages, for every tensor that several stages store."""
    return {} if pp == 1 else shared_stages(inventory(model), placement(model, pp, chunks, explicit))
