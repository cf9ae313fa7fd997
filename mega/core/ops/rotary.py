"""Rotary position embedding in the half-rotation convention (Su et al. 2021; GPT-NeoX, Hugging Face)."""

from __future__ import annotations

import math

import torch

from mega.core.architecture.layer import LongScaling, Rope, RopeScaling, YarnScaling
from mega.core.ops.norm import accurate


def rotary_table(
    positions: torch.Tensor, rope: Rope, dtype: torch.dtype, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin for positions int64 [tokens]: each [tokens, rope.width / 2] in max(fp32, dtype).

    length: number of columns of a whole row, which determines LongRoPE's factors. None: the number of positions.
    """
    table_dtype, width, scaling = accurate(dtype), rope.width, rope.scaling
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    frequency = (rope.base**-exponent) / rope.interpolation
    if isinstance(scaling, RopeScaling):
        frequency = scaled(frequency, scaling)
    elif isinstance(scaling, YarnScaling):
        frequency = frequency * (1 - (1 - 1 / scaling.factor) * _interpolated(width, rope.base, scaling).to(frequency))
    elif isinstance(scaling, LongScaling):
        is_long = (len(positions) if length is None else length) > scaling.original
        frequency = frequency / frequency.new_tensor(scaling.long if is_long else scaling.short)
    angle = positions.to(torch.float64)[:, None] * frequency[None, :]
    magnitude = 1.0 if scaling is None or isinstance(scaling, RopeScaling) else scaling.magnitude
    return (angle.cos() * magnitude).to(table_dtype), (angle.sin() * magnitude).to(table_dtype)


def _interpolated(width: int, base: float, scaling: YarnScaling) -> torch.Tensor:
    """Return the degree, from 0 to 1, to which YaRN interpolates each of the width / 2 frequencies (Peng et al. 2023,
    section 3.2).

    The degree is 0 for frequencies with more than `beta_fast` rotations within the original positions, 1 for
    frequencies with fewer than `beta_slow` rotations, and linear in the index for frequencies in between.

    >>> yarn = YarnScaling(factor=4.0, original=64, beta_fast=32.0, beta_slow=1.0, truncate=True, magnitude=1.0)
    >>> _interpolated(8, 100.0, yarn).tolist()
    [0.0, 0.3333333333333333, 0.6666666666666666, 1.0]
    """
    first, last = (
        width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 * (first == last)
    return ((torch.arange(width // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)


def scaled(frequency: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale frequencies for longer contexts as in Llama 3.1 (Dubey et al. 2024, section 3.4.2; factors of the released
    models).

    Frequencies are in radians per position. A frequency with fewer than `low` rotations within `original` positions is
    divided by `factor`; a frequency with more than `high` rotations is unchanged. Other frequencies are interpolated
    between these two cases, linearly in the number of rotations.

    >>> turns = torch.tensor([0.5, 1.0, 2.5, 4.0, 9.0])
    >>> extended = scaled(turns * 2 * math.pi / 100, RopeScaling(8.0, 1.0, 4.0, 100)) / (2 * math.pi / 100)
    >>> [round(each, 5) for each in extended.tolist()]
    [0.0625, 0.125, 1.40625, 4.0, 9.0]
    """
    turns = frequency * (scaling.original / (2 * math.pi))
    unchanged = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / scaling.factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R components of each head in x [tokens, heads, d]. Component i is paired with component i + R /
    2.

    cos and sin: each [tokens, R / 2]. If cos and sin are from `spread` ([tokens, 1, R]), x is rotated in place and
    without a gradient.
    """
    if cos.dim() == 3:
        rotated = x if x.shape[-1] == cos.shape[-1] else x[..., : cos.shape[-1]]
        torch.addcmul(rotated * cos, rotated.roll(cos.shape[-1] // 2, -1), sin, out=rotated)
        return x
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def spread(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert cos and sin from [n, R / 2] to [n, 1, R], for which `rotate` needs fewer operations.

    >>> spread(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    (tensor([[[0., 0.]]]), tensor([[[-1.,  1.]]]))
    """
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
