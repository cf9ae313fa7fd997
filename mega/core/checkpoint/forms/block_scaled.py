"""Read and write fp8 weights with one scale per block of a matrix, as released by DeepSeek.

    NAME.weight             F8_E4M3 [out, in]
    NAME.weight_scale_inv   F32 [out / 128, in / 128], rounded up: the factor for the elements of each block

Weights are read in the dtype of the folder's other matrices. This module handles tensors and the `quantization_config`
of config.json, and does not depend on the model family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod

import torch

from mega.core.checkpoint.forms.keys import only
from mega.core.checkpoint.forms.mapping import Source
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors
from mega.core.ops.block_scales import WEIGHT_BLOCK, expanded, grid, half_steps, quantise
from mega.core.ops.fp8 import FORWARD
from mega.core.untrusted import Json

SCALE = "_scale_inv"
"""Suffix to append to a weight's name to get the name of its scale."""

READ = torch.bfloat16
"""The dtype of dequantised weights if the folder has no other matrices."""

# Reading


def dequantised(source: Source, quantization: object, where: str) -> Source:
    """Return a source in which fp8 weights are dequantised, or `source` itself if config.json has no
    `quantization_config`.

    quantization: the `quantization_config`. Errors: CheckpointError naming an unsupported key, or a tensor whose scale
    is missing or invalid.
    """
    if not quantization:
        if scaled := next((name for name, (_, dtype) in source.tensors.items() if dtype == FORWARD), None):
            raise CheckpointError(
                f"{where}: {scaled} is in fp8, and no quantization_config gives the blocks of its scales"
            )
        return source
    if (
        not isinstance(quantization, Mapping)
        or quantization.get("quant_method") != "fp8"
        or quantization.get("weight_block_size") is None
    ):
        raise CheckpointError(
            f"{where}: quantization_config: only fp8 with weight_block_size is read (DeepSeek's form); dequantise "
            "other weights first"
        )
    only(quantization, "fmt", ("e4m3", None), where)
    size = quantization["weight_block_size"]
    if not isinstance(size, list) or len(size) != 2 or any(type(each) is not int or each < 1 for each in size):
        raise CheckpointError(f"{where}: quantization_config.weight_block_size {size!r}: must be two whole numbers")
    return Dequantised(source, (size[0], size[1]))


class Dequantised:
    """A source that dequantises fp8 matrices and stacks of matrices. Each block is multiplied by its scale in fp32, and
    the product is rounded once, to the most common dtype of the other matrices."""

    def __init__(self, source: Source, block: tuple[int, int]) -> None:
        self._source, self._block = source, block
        self._dtype = _dtype_of_others(source.tensors)
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in source.tensors.items():
            if name.endswith(SCALE):
                self._check_weight(name)
            elif dtype == FORWARD:
                self._check_scale(name, shape)
                tensors[name] = (shape, self._dtype)
            else:
                tensors[name] = (shape, dtype)
        self.tensors: Tensors = tensors

    def _check_weight(self, scale_name: str) -> None:
        name = scale_name.removesuffix(SCALE)
        if name not in self._source.tensors:
            raise CheckpointError(f"{scale_name}: is there without {name}")
        if (dtype := self._source.tensors[name][1]) != FORWARD:
            raise CheckpointError(f"{scale_name}: is there, but {name} is {dtype}, which needs no scale")

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        expected = grid(shape, self._block)
        scale = self._source.tensors.get(name + SCALE)
        if scale is None or len(shape) < 2 or scale[0] != expected:
            problem = "is missing" if scale is None else f"has shape {scale[0]}"
            raise CheckpointError(
                f"{name + SCALE}: {problem}; must be {expected}, a number for each block of {name} {shape}"
            )
        if not scale[1].is_floating_point:
            raise CheckpointError(f"{name + SCALE}: is {scale[1]}; must be a floating dtype")

    def read(self, name: str, box: Box) -> torch.Tensor:
        if self._source.tensors[name][1] != FORWARD:
            return self._source.read(name, box)
        narrow, scale = self._parts(name, box)
        return (narrow.float() * scale).to(self._dtype)

    def bound(self, name: str, box: Box) -> torch.Tensor:
        """Return, for each element, an fp32 upper bound on the error due to quantisation and to rounding in `read`; 0
        for tensors that are not in fp8."""
        if self._source.tensors[name][1] != FORWARD:
            return torch.zeros(box.size)
        narrow, scale = self._parts(name, box)
        rounding = torch.finfo(self._dtype).eps / 2 + torch.finfo(torch.float32).eps
        return half_steps(narrow) * scale + rounding * (narrow.float() * scale).abs()

    def _parts(self, name: str, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fp8 elements of the rectangle `box`, and the scale of each element. Errors: CheckpointError if a
        scale is invalid: NaN, infinite, negative, or 0 for nonzero elements."""
        narrow, scale = self._source.read(name, box), self._scale(name, box)
        if not (torch.isfinite(scale) & (scale >= 0)).all() or ((scale == 0) & (narrow.float() != 0)).any():
            raise CheckpointError(f"{name + SCALE}: holds a scale that is NaN, infinite, or not above 0")
        return narrow, scale

    def _scale(self, name: str, box: Box) -> torch.Tensor:
        """Return the scale of each element of the rectangle `box`, in fp32."""
        # The box may cut through blocks, so the scales of all overlapping blocks are read, repeated and sliced.
        block = (*(1 for _ in box.size[:-2]), *self._block)
        first = tuple(start // each for start, each in zip(box.start, block, strict=True))
        last = tuple(-(-(a + n) // each) for a, n, each in zip(box.start, box.size, block, strict=True))
        size = tuple(end - start for start, end in zip(first, last, strict=True))
        scale = self._source.read(name + SCALE, Box(first, size)).float()
        within = tuple(a - b * each for a, b, each in zip(box.start, first, block, strict=True))
        whole = tuple(offset + n for offset, n in zip(within, box.size, strict=True))
        return expanded(scale, whole, self._block)[tuple(slice(offset, None) for offset in within)]


class Bounds:
    """A source of error bounds for the tensors of `Dequantised`."""

    def __init__(self, source: Dequantised) -> None:
        self.tensors, self.read = source.tensors, source.bound


def _dtype_of_others(tensors: Tensors) -> torch.dtype:
    """Return the most common dtype of the matrices that are not in fp8, such as the embedding table, weighted by
    size."""
    elements = Counter[torch.dtype]()
    for name, (shape, dtype) in tensors.items():
        if len(shape) > 1 and dtype.is_floating_point and dtype != FORWARD and not name.endswith(SCALE):
            elements[dtype] += prod(shape)
    return elements.most_common(1)[0][0] if elements else READ


# Writing


class Quantised:
    """A source that stores the matrices `names` of another source in fp8, each followed by its scales."""

    def __init__(self, source: Source, names: Collection[str]) -> None:
        self._source, self._names = source, frozenset(names)
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in source.tensors.items():
            tensors[name] = (shape, FORWARD if name in self._names else dtype)
            if name in self._names:
                tensors[name + SCALE] = (grid(shape, WEIGHT_BLOCK), torch.float32)
        self.tensors: Tensors = tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        if name in self._names:
            return self._narrow(name, box)
        if name.removesuffix(SCALE) in self._names:
            return self._scales(name.removesuffix(SCALE), box)
        return self._source.read(name, box)

    def _narrow(self, name: str, box: Box) -> torch.Tensor:
        """Quantise whole blocks, because the scale of a block depends on all its elements."""
        limits = self._source.tensors[name][0]
        start = tuple(a // each * each for a, each in zip(box.start, WEIGHT_BLOCK, strict=True))
        ends = tuple(
            min(-(-(a + n) // each) * each, limit)
            for a, n, each, limit in zip(box.start, box.size, WEIGHT_BLOCK, limits, strict=True)
        )
        outer = Box(start, tuple(end - begin for begin, end in zip(start, ends, strict=True)))
        return quantise(self._source.read(name, outer), WEIGHT_BLOCK)[0][box.inside(outer)]

    def _scales(self, name: str, box: Box) -> torch.Tensor:
        """Return a rectangle of the scales. The weight is read one row of blocks at a time, to limit memory use."""
        (height, width), (first, left) = WEIGHT_BLOCK, box.start
        limits, parts = self._source.tensors[name][0], []
        columns = (left * width, min((left + box.size[1]) * width, limits[1]) - left * width)
        for row in range(first, first + box.size[0]):
            rows = (row * height, min((row + 1) * height, limits[0]) - row * height)
            part = self._source.read(name, Box((rows[0], columns[0]), (rows[1], columns[1])))
            parts.append(quantise(part, WEIGHT_BLOCK)[1])
        return torch.cat(parts)


def quantization_config(unquantised: Collection[str]) -> dict[str, Json]:
    """Return the `quantization_config` of config.json for `Quantised`, in the format of transformers'
    FineGrainedFP8Config. unquantised: names of the linear layers that are not in fp8."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(WEIGHT_BLOCK),
        "modules_to_not_convert": sorted(unquantised),
    }


def undivided(tensors: Tensors, names: Collection[str]) -> str | None:
    """Return the name of a matrix whose sizes are not multiples of the block size; None if there is no such matrix."""
    return next(
        (name for name in names if any(size % each for size, each in zip(tensors[name][0], WEIGHT_BLOCK, strict=True))),
        None,
    )


def without_scales(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return a config.json for the dequantised weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
