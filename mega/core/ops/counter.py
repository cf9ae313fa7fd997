"""Random numbers that are functions of what they act on: no stream, no state, no rank.

A dropout mask or an initial weight is a hash of (seed, what it belongs to, element), so it is the same in
every layout, under recompute and after any resume. The hash is the finaliser of SplitMix64 (Steele, Lea,
Flood 2014) in wrapping int64 arithmetic, which every device computes alike.
"""

from __future__ import annotations

import hashlib
import math

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    """64 well-mixed bits for every int64 of `z`; neighbouring inputs give unrelated outputs."""
    z = z * _signed(_GOLDEN)
    if not z.is_meta:  # each round takes as much memory as the last step
        z = (z ^ _shift(z, 30)) * _signed(_FIRST)
        z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def key(*parts: int | str) -> int:
    """A 64-bit key of a tuple such as (seed, "init", name), as a signed int."""
    text = "\x1f".join(map(str, parts))
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def token_keys(seed: int, samples: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One key per token: samples int64 [b], columns int64 [s] -> int64 [b, s]."""
    rows = mix(samples + key(seed, "token"))
    return mix(rows[:, None] + columns[None, :])


def site_keys(keys: torch.Tensor, layer: int, site: str) -> torch.Tensor:
    """Keys of the tokens at one place of the model, such as (3, "attention")."""
    return mix(keys + key(layer, site))


def keep_mask(keys: torch.Tensor, elements: torch.Tensor, probability: float) -> torch.Tensor:
    """True where an element survives dropout: keys [..., 1] and elements [n] broadcast; P(False) = probability."""
    bits = _shift(mix(keys + elements * _signed(_SECOND)), 32)
    return bits >= int(probability * 2**32)


def normal_(out: torch.Tensor, name_key: int, start: tuple[int, ...], whole: tuple[int, ...], std: float) -> None:
    """Fill `out` with N(0, std), each element a function of its place in the whole tensor alone.

    out: the block that begins at `start` of a row-major tensor of shape `whole`. Box-Muller in float64 on the
    two halves of one hash, so that rounding to float32 hides any difference between math libraries.
    """
    columns = whole[-1] if len(whole) > 1 else 1
    matrix = out if out.dim() > 1 else out.unsqueeze(-1)
    first_row, first_column = start[0], start[1] if len(start) > 1 else 0
    within = torch.arange(first_column, first_column + matrix.shape[1], device=out.device)
    step = max(1, (1 << 22) // max(1, matrix.shape[1]))  # rows at a time: bounded memory
    for row in range(0, matrix.shape[0], step):
        block = matrix[row : row + step]
        rows = torch.arange(first_row + row, first_row + row + block.shape[0], device=out.device)
        bits = mix(mix(rows[:, None] * columns + within[None, :]) + name_key)
        high = (_shift(bits, 32).double() + 0.5) / 2**32
        low = (bits & 0xFFFFFFFF).double() / 2**32
        block.copy_((-2.0 * high.log()).sqrt() * torch.cos(2.0 * math.pi * low) * std)
