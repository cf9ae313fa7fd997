"""Read fp8 weights with one scale per block of a matrix, as released by DeepSeek. The weights are converted to bf16.

    NAME.weight             F8_E4M3 [out, in]
    NAME.weight_scale_inv   F32 [out / 128, in / 128], rounded up: the factor for the elements of each block

This module handles tensors and the `quantization_config` of config.json, and does not depend on the model family.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mega.core.checkpoint.forms.keys import only
from mega.core.checkpoint.forms.mapping import Source
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors
from mega.core.untrusted import Json

SCALE = "_scale_inv"
"""Suffix that turns a weight's name into the name of its scale."""

READ = torch.bfloat16


def dequantised(source: Source, quantization: object, where: str) -> Source:
    """Return a source in which fp8 weights are dequantised, or `source` itself if config.json has no
    `quantization_config`.

    quantization: the `quantization_config`. Errors: CheckpointError naming an unsupported key, or a tensor whose scale
    is missing.
    """
    if not quantization:
        if scaled := next((name for name, (_, dtype) in source.tensors.items() if dtype == torch.float8_e4m3fn), None):
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
    return BlockScaled(source, (size[0], size[1]))


class BlockScaled:
    """A source that multiplies fp8 matrices by their scales and returns bf16."""

    def __init__(self, source: Source, block: tuple[int, int]) -> None:
        self._source, self._block = source, block
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in source.tensors.items():
            if name.endswith(SCALE) and name.removesuffix(SCALE) in source.tensors:
                continue
            if dtype == torch.float8_e4m3fn:
                self._check(name, shape)
                dtype = READ
            tensors[name] = (shape, dtype)
        self.tensors: Tensors = tensors

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        expected = tuple(-(-size // block) for size, block in zip(shape, self._block))
        scale = self._source.tensors.get(name + SCALE)
        if scale is None or len(shape) != 2 or scale[0] != expected:
            problem = "is missing" if scale is None else f"has shape {scale[0]}"
            raise CheckpointError(
                f"{name + SCALE}: {problem}; must be {expected}, a number for each block of {name} {shape}"
            )

    def read(self, name: str, box: Box) -> torch.Tensor:
        part = self._source.read(name, box)
        if part.dtype != torch.float8_e4m3fn:
            return part
        # The box may begin and end within blocks, so the scales of all overlapping blocks are read, repeated and
        # sliced.
        ends = tuple(start + size for start, size in zip(box.start, box.size, strict=True))
        first = tuple(start // block for start, block in zip(box.start, self._block, strict=True))
        last = tuple(-(-end // block) for end, block in zip(ends, self._block, strict=True))
        size = tuple(end - start for start, end in zip(first, last, strict=True))
        scale = self._source.read(name + SCALE, Box(first, size)).float()
        for dim, block in enumerate(self._block):
            offset = box.start[dim] - first[dim] * block
            scale = scale.repeat_interleave(block, dim).narrow(dim, offset, box.size[dim])
        return (part.float() * scale).to(READ)


def without_scales(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return a config.json for the dequantised weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
