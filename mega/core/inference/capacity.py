"""How much fits into memory when a model is served: the same arithmetic before a server starts and in it.

Bytes of weights and of the cache on a rank, and how many blocks of the cache are taken: what is asked for, as far as it
fits. It knows a model's inventory and a layout; no device, no tensor and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.architecture import Architecture, architecture, inventory, placement
from mega.core.config.sections import ModelConfig
from mega.core.inference.options import BLOCK
from mega.core.inference.request import Limits
from mega.core.shard import on_tensor_rank, shard

GIB = 1 << 30

SHARES = {"cuda": 0.85, "cpu": 0.25}
"""Kind of device -> share of the memory that is left which the cache may take."""


@dataclass(frozen=True)
class Capacity:
    """What a server of so many ranks accepts. weights, cache: bytes of the fullest rank."""

    limits: Limits
    weights: int
    cache: int

    def lines(self, longest: int | None = None) -> list[str]:
        """For the user. longest: tokens of a request [the model's]."""
        limits, tokens = self.limits, min(longest or self.limits.longest, self.limits.longest)
        fit = min(limits.requests, limits.cache // tokens)
        return [
            f"{limits.requests} requests at once, {limits.cache} tokens in the cache: "
            f"{fit} requests of {tokens} tokens each, the longest",
            f"a rank holds {self.weights / GIB:.2f} GiB of weights and {self.cache / GIB:.2f} GiB of keys and values",
        ]


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as equal as they can be; the last has the head to compute, so the first have more.

    >>> even_layers(5, 2)
    (3, 2)
    """
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def cache_bytes(model: Architecture, itemsize: int, *, tp: int = 1, layers: int | None = None) -> int:
    """Bytes of keys and values that one rank holds for one token. layers: of its stage [all]."""
    held, kept = len(model.layers) if layers is None else layers, model.cached
    return 2 * held * (kept.kv_heads // tp) * kept.head_dim * itemsize


def weight_bytes(
    model: ModelConfig, itemsize: int, *, tp: int = 1, pp: int = 1, fp8_weights: bool = False
) -> list[int]:
    """Bytes of weights of a rank of each stage, padding included. fp8_weights: as of `ops.fp8_weights`."""
    stages = placement(model, pp, 1, even_layers(len(architecture(model).layers), pp))
    held = [0] * pp
    for tensor in inventory(model):
        part = shard(tensor, on_tensor_rank(0, tp))
        narrow = fp8_weights and len(part.local) == 2 and all(isinstance(unit, int) for unit in tensor.units)
        size = part.elements + 4 * part.local[0] if narrow else part.elements * itemsize
        for stage in {stages[unit][0] for unit in tensor.units}:
            held[stage] += size
    return held


def wanted_tokens(model: Architecture, requests: int, asked: int | None) -> int:
    """Tokens of the cache that would be taken: what is asked for, else what so many requests need at most."""
    return asked if asked is not None else requests * model.positions


def fitting_blocks(left: int, kind: str, token: int, size: int) -> int:
    """Blocks of `size` tokens of `token` bytes that may be taken of `left` bytes of a device of a kind of `SHARES`."""
    return int(left * SHARES[kind]) // (token * size)


def cache_blocks(wanted: int, fits: int, size: int, *, asked: bool) -> int:
    """Blocks to be made, the one for padding included. wanted: tokens. fits: blocks, on the rank with the least room.

    asked: by the user, who is not given less. Errors: ValueError where that, or not even one block, fits.
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
) -> Capacity:
    """What a server will report of a model in `itemsize` bytes a number. room: bytes of each device, or of the one host
    that all ranks of a CPU share.

    Errors: ValueError where the weights leave no room, or too little.
    """
    model, weights = architecture(options), weight_bytes(options, itemsize, tp=tp, pp=pp, fp8_weights=fp8_weights)
    layers = max(even_layers(len(model.layers), pp))
    token = cache_bytes(model, itemsize, tp=tp, layers=layers)
    left = room - max(weights) if kind == "cuda" else room
    if left <= 0:
        raise ValueError(f"{max(weights) / GIB:.1f} GiB of weights a rank do not fit; give more ranks")
    fits = fitting_blocks(left, kind, token, BLOCK) // (1 if kind == "cuda" else tp * pp)
    wanted = wanted_tokens(model, requests, cache_tokens)
    blocks = cache_blocks(wanted, fits, BLOCK, asked=cache_tokens is not None)
    limits = Limits(model.positions, (blocks - 1) * BLOCK, requests, model.input.vocab)
    return Capacity(limits, max(weights), blocks * BLOCK * token)
