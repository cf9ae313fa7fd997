"""Counter-based random numbers, which depend only on keys and element positions, not on the state of a generator.

A dropout mask or an initial weight is a hash of (seed, token or tensor name, element), so it is the same in every
parallel layout, under recomputation and after a resume. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood
2014) in wrapping int64 arithmetic, which produces identical results on every device. Dropout within a token uses a
cheaper hash of the token's key, because a training step of GPT 345M draws 10^11 random numbers.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_NUMBER = 0x2545F4914F6CDD1D
_LOW = (1 << 32) - 1

OLD_RULE, RULE = 1, 2
"""Versions of the dropout rule. A run that started with the old rule (SplitMix64 for every element) continues with the
old rule after a resume."""


def _signed(value: int) -> int:
    """Return the int64 that has the same 64 bits as `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    """Mix the 64 bits of every int64 in `z`, so that neighbouring inputs have unrelated outputs."""
    z = z * _signed(_GOLDEN)
    if not z.is_meta:  # on the meta device, one round is enough because all rounds need the same memory
        z = (z ^ _shift(z, 30)) * _signed(_FIRST)
        z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def key(*parts: int | str) -> int:
    """Compute a 64-bit key of a tuple such as (seed, "init", name), as a signed int."""
    text = "\x1f".join(map(str, parts))
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def token_keys(seed: int, samples: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Compute a key per token, int64 [b, s], from samples int64 [b] and columns int64 [s]."""
    rows = mix(samples + key(seed, "token"))
    return mix(rows[:, None] + columns[None, :])


@cache
def site_key(layer: int, site: str, rule: int = RULE) -> int:
    """Compute the key of a site in the model, such as (3, "attention"). The key is odd, because Triton would recompile
    kernels for integers that are divisible by 16."""
    return key(layer, site) if rule == OLD_RULE else key(layer, site) | 1


def row_keys(keys: torch.Tensor, site: int, number: torch.Tensor | int = 0) -> torch.Tensor:
    """Compute the keys of tokens at one site of the model. number: distinguishes several uses of a token's key, such as
    different heads."""
    if isinstance(number, int):
        return mix(keys + _signed(site + number * _NUMBER))
    return mix(keys + site + number * _NUMBER)


def keep_mask(rows: torch.Tensor, elements: torch.Tensor, probability: float, rule: int = RULE) -> torch.Tensor:
    """Return a mask that is True for elements that survive dropout. rows: keys [..., 1] from `row_keys`. elements:
    indices [n], which are broadcast with rows."""
    if rule == OLD_RULE:
        return _shift(mix(rows + elements * _signed(_SECOND)), 32) >= int(probability * 2**32)
    return draw(rows, elements) >= threshold(probability)


def draw(rows: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Draw 16 random bits for each element of a row.

    In each aligned group of 16 elements, e and e + 8 use the two halves of the same 32 bits, so a kernel needs only one
    draw for both elements. The 32 bits are computed from a counter and the two halves of the row's key, with two
    multiplications whose results are folded (Philox 4x32; Salmon et al. 2011).
    """
    group = (elements >> 4 << 3) | (elements & 7)
    bits = _fold(_fold((rows & _LOW) ^ group, 0xD2511F53) ^ _shift(rows, 32), 0xCD9E8D57)
    return torch.where(elements & 8 != 0, bits >> 16, bits & 0xFFFF)


def _fold(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply two 32-bit numbers, and return the exclusive or of the two 32-bit halves of the product."""
    bits64 = x * factor
    return _shift(bits64, 32) ^ (bits64 & _LOW)


def threshold(probability: float) -> int:
    """Return how many of the 65,536 possible draws drop an element; at least 1 if the probability is not 0.

    >>> threshold(0.1), threshold(0.5)
    (6554, 32768)
    """
    return min(max(round(probability * (1 << 16)), 1), (1 << 16) - 1) if probability else 0


def kept_share(probability: float, rule: int = RULE) -> float:
    """Return the exact probability that an element survives, given the integer threshold. Surviving elements are
    divided by this probability."""
    return 1 - probability if rule == OLD_RULE else 1 - threshold(probability) / (1 << 16)


def normal_(out: torch.Tensor, name_key: int, start: tuple[int, ...], whole: tuple[int, ...], std: float) -> None:
    """Fill `out` with samples from a normal distribution with mean 0 and standard deviation `std`. Each element depends
    only on its position in the whole tensor.

    out: the block that begins at index `start` of a row-major tensor of shape `whole`. The Box-Muller transform is
    applied in float64 to the two halves of one hash. Rounding to float32 then removes the differences between math
    libraries."""
    columns = whole[-1] if len(whole) > 1 else 1
    matrix = out if out.dim() > 1 else out.unsqueeze(-1)
    first_row, first_column = start[0], start[1] if len(start) > 1 else 0
    within = torch.arange(first_column, first_column + matrix.shape[1], device=out.device)
    step = max(1, (1 << 22) // max(1, matrix.shape[1]))  # number of rows per step, to limit memory
    for row in range(0, matrix.shape[0], step):
        block = matrix[row : row + step]
        rows = torch.arange(first_row + row, first_row + row + block.shape[0], device=out.device)
        bits = mix(mix(rows[:, None] * columns + within[None, :]) + name_key)
        high = (_shift(bits, 32).double() + 0.5) / 2**32
        low = (bits & 0xFFFFFFFF).double() / 2**32
        block.copy_((-2.0 * high.log()).sqrt() * torch.cos(2.0 * math.pi * low) * std)
