"""Compute how much memory a served model needs, for estimates and in a running server.

This module computes the bytes of weights and cache on a rank, and the number of blocks in the cache (the requested
number, or as many as fit). It depends only on a model's inventory and a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mega.core.architecture import Architecture, architecture, inventory, placement
from mega.core.config.sections import ModelConfig
from mega.core.inference.options import BLOCK
from mega.core.inference.request import Limits
from mega.core.inference.speculate import MOST
from mega.core.shard import on_tensor_rank, shard

GIB = 1 << 30

READ_SEQUENCES = 2
"""Number of sequences whose neighbours are stored, per request that can be in flight."""

SHARES = {"cuda": 0.85, "cpu": 0.25}
"""Type of device -> fraction of the remaining memory that the cache may use."""


@dataclass(frozen=True)
class Capacity:
    """The capacity of a server. weights, cache, neighbours: bytes on the rank that needs the most memory."""

    limits: Limits
    weights: int
    cache: int
    neighbours: int = 0
    guesses: bool = False
    """Whether `cache` includes the hidden states that the model's multi-token prediction layers read."""
    draft_weights: int = 0
    draft_cache: int = 0
    """Bytes of the draft model on rank 0, in addition to `weights` and `cache`."""

    def lines(self, longest: int | None = None) -> list[str]:
        """Describe the capacity for the user. longest: maximum number of tokens in a request; default: the model's
        maximum."""
        limits, tokens = self.limits, min(longest or self.limits.longest, self.limits.longest)
        fit = min(limits.requests, limits.cache // tokens)
        cached = "keys, values and hidden states" if self.guesses else "keys and values"
        neighbours = f"to find and keep neighbours it needs {self.neighbours / GIB:.2f} GiB more"
        draft = (
            f"rank 0 also holds the draft model: {self.draft_weights / GIB:.2f} GiB of weights and "
            f"{self.draft_cache / GIB:.2f} GiB of keys and values"
        )
        return [
            f"{limits.requests} requests at once, {limits.cache} tokens in the cache: "
            f"{fit} requests of {tokens} tokens each, the longest",
            f"a rank holds {self.weights / GIB:.2f} GiB of weights and {self.cache / GIB:.2f} GiB of {cached}",
            *([neighbours] if self.neighbours else []),
            *([draft] if self.draft_weights else []),
        ]

    def with_draft(self, draft: DraftSize, size: int) -> Capacity:
        """Return a copy of this capacity that includes the memory of a draft model. size: tokens per block."""
        cache = draft.blocks(self.limits.cache, size) * size * draft.token
        return replace(self, draft_weights=draft.weights, draft_cache=cache)


@dataclass(frozen=True)
class DraftSize:
    """Memory sizes of the draft model (--speculate DIR), which runs unsharded on rank 0.

    weights: bytes of the weights. token: bytes of one token in the draft model's cache. sequence: maximum number of
    tokens in a sequence, without guesses. requests: maximum number of sequences.
    """

    weights: int
    token: int
    sequence: int
    requests: int

    def blocks(self, cache: int, size: int) -> int:
        """Return the number of blocks in the draft model's cache. This cache stores the sequences that are in the
        model's cache (of `cache` tokens), the guesses after each sequence, and one block of padding."""
        return -(-(min(self.requests * self.sequence, cache) + self.requests * MOST) // size) + 1

    def fitting_blocks(self, share: int, token: int, size: int) -> int:
        """Return the number of blocks of the model's cache that fit into `share` bytes together with the draft model's
        cache. token: bytes of one token in the model's cache.

        >>> small = DraftSize(weights=0, token=1, sequence=160, requests=2)
        >>> small.fitting_blocks(1000, token=4, size=16), 4 * 16 * 11 + 16 * small.blocks(11 * 16, 16)
        (11, 928)
        """
        guesses = self.requests * MOST + 2 * size  # two blocks are reserved for padding and rounding
        growing = (share - guesses * self.token) // ((token + self.token) * size)
        whole = (share - (self.requests * self.sequence + guesses) * self.token) // (token * size)
        return max(growing, whole, 0)


def draft_size(draft: ModelConfig, model: Architecture, itemsize: int, requests: int) -> DraftSize:
    """Return the sizes of a draft model for `model`. itemsize: bytes per element in the dtype of the computation."""
    (weights,), small = weight_bytes(draft, itemsize), architecture(draft)
    return DraftSize(weights, cache_bytes(small, itemsize), min(model.positions, small.positions), requests)


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Divide the layers among the stages as evenly as possible. The first stages get the extra layers, because the last
    stage also has the output head.

    >>> even_layers(5, 2)
    (3, 2)
    """
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def cache_bytes(model: Architecture, itemsize: int, *, tp: int = 1, layers: int | None = None) -> int:
    """Return the bytes of one token's keys and values on a rank. layers: number of layers in the rank's stage; default:
    all layers."""
    layer_count, cached = len(model.layers) if layers is None else layers, model.cached
    return 2 * layer_count * (cached.kv_heads // tp) * cached.head_dim * itemsize


def token_bytes(
    model: Architecture, itemsize: int, stage_layers: Sequence[int], *, tp: int = 1, guesses: bool = False
) -> list[int]:
    """Return, for each stage, the bytes of one token in a rank's cache. stage_layers: number of layers in each stage.
    guesses: whether the model's own multi-token prediction layers guess tokens.

    The multi-token prediction layers are on the last stage, and have keys and values like the model's other layers.
    They read the output of the final norm, which each tensor rank stores unsharded.
    """
    stages = [cache_bytes(model, itemsize, tp=tp, layers=layers) for layers in stage_layers]
    if guesses:
        stages[-1] += cache_bytes(model, itemsize, tp=tp, layers=len(model.output.ahead)) + model.hidden * itemsize
    return stages


def neighbour_bytes(model: Architecture, itemsize: int, requests: int) -> int:
    """Return the number of bytes that a model with a retriever stores for its sequences between steps; 0 for other
    models.

    Each layer that reads neighbours stores the keys and values of the last chunk's neighbours. In addition, the hidden
    states of the current chunk are stored once per sequence.
    """
    if not model.reading:
        return 0
    values = [each.neighbours for each in model.layers if each.neighbours is not None]
    pairs = [2 * each.neighbours * each.width * each.attention.kv_heads * each.attention.head_dim for each in values]
    return READ_SEQUENCES * requests * (sum(pairs) + (values[0].chunk - 1) * model.hidden) * itemsize


def weight_bytes(
    model: ModelConfig, itemsize: int, *, tp: int = 1, pp: int = 1, fp8_weights: bool = False
) -> list[int]:
    """Return, for each stage, the bytes of weights on a rank, including padding. fp8_weights: see `ops.fp8_weights`."""
    stages = placement(model, pp, 1, even_layers(len(architecture(model).layers), pp))
    stage_bytes = [0] * pp
    for tensor in inventory(model):
        part = shard(tensor, on_tensor_rank(0, tp))
        narrow = fp8_weights and len(part.local) == 2 and all(isinstance(unit, int) for unit in tensor.units)
        size = part.elements + 4 * part.local[0] if narrow else part.elements * itemsize
        for stage in {stages[unit][0] for unit in tensor.units}:
            stage_bytes[stage] += size
    return stage_bytes


def wanted_tokens(model: Architecture, requests: int, asked: int | None) -> int:
    """Return the cache's capacity in tokens: `asked` if given, else enough for `requests` requests of maximum
    length."""
    return asked if asked is not None else requests * model.positions


def fitting_blocks(left: int, kind: str, token: int, size: int, draft: DraftSize | None = None) -> int:
    """Return the number of blocks that fit into the cache's share of `left` bytes. size: tokens per block. token: bytes
    per token. kind: type of device. draft: sizes of the draft model on this rank; its cache uses the same share."""
    share = int(left * SHARES[kind])
    return share // (token * size) if draft is None else draft.fitting_blocks(share, token, size)


def cache_blocks(wanted: int, fits: int, size: int, *, asked: bool) -> int:
    """Return the number of blocks to allocate, including SCRATCH. wanted: number of tokens to cache. fits: number of
    blocks that fit on the rank with the least memory. asked: whether the user specified `wanted`.

    Errors: ValueError if the specified number does not fit, or if not even one block fits.
    """
    blocks = min(-(-wanted // size), fits)
    if asked and blocks * size < wanted:
        raise ValueError(f"--cache-tokens {wanted}: at most {blocks * size} fit into memory")
    if blocks < 1:
        raise ValueError("not even one block of the cache fits into memory; give more ranks")
    return blocks + 1


def expected(
    options: ModelConfig,
    itemsize: int,
    room: int,
    kind: str,
    *,
    tp: int,
    pp: int,
    requests: int,
    cache_tokens: int | None = None,
    fp8_weights: bool = False,
    retriever: int = 0,
    guesses: bool = False,
    draft: ModelConfig | None = None,
) -> Capacity:
    """Return the capacity that a server will have. itemsize: bytes per element of weights and cache. room: free bytes
    on each device, or in the host memory that all CPU ranks share. retriever: bytes that a retriever uses on the
    device. guesses: as in `token_bytes`. draft: the model that guesses tokens.

    Errors: ValueError if the weights leave too little memory.
    """
    model, weights = architecture(options), weight_bytes(options, itemsize, tp=tp, pp=pp, fp8_weights=fp8_weights)
    token_of_stage = token_bytes(model, itemsize, even_layers(len(model.layers), pp), tp=tp, guesses=guesses)
    neighbours = retriever + neighbour_bytes(model, itemsize, requests)
    small = None if draft is None else draft_size(draft, model, itemsize, requests)
    fits = []
    for stage, (held, token) in enumerate(zip(weights, token_of_stage, strict=True)):
        here = small if stage == 0 else None  # the draft model is on rank 0
        needed = neighbours + held + (here.weights if here is not None else 0)
        left = room - (needed if kind == "cuda" else neighbours)
        if left <= 0:
            raise ValueError(f"{needed / GIB:.1f} GiB of weights a rank do not fit; give more ranks")
        # CPU ranks share the memory of the host.
        fits.append(fitting_blocks(left, kind, token, BLOCK, here) // (1 if kind == "cuda" else tp * pp))
    tokens = wanted_tokens(model, requests, cache_tokens)
    blocks = cache_blocks(tokens, min(fits), BLOCK, asked=cache_tokens is not None)
    limits = Limits(model.positions, (blocks - 1) * BLOCK, requests, model.input.vocab)
    capacity = Capacity(limits, max(weights), blocks * BLOCK * max(token_of_stage), neighbours, guesses)
    return capacity if small is None else capacity.with_draft(small, BLOCK)
