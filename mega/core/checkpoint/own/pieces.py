"""Rectangles of logical tensors: the rectangles that a rank stores, the intersection of two rectangles, and whether
several rectangles tile a tensor.

This module handles shapes and dtypes, and does not depend on files or ranks.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a dtype in safetensors -> dtype, for the dtypes that a mega checkpoint may contain."""

FOREIGN_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn}
"""Name of a dtype in safetensors -> dtype, for the dtypes that files of other programs may contain."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""dtype -> safetensors name, for the dtypes that a mega checkpoint may contain."""

FOREIGN_NAMES = {dtype: name for name, dtype in FOREIGN_DTYPES.items()}
"""dtype -> safetensors name, for the dtypes that files of other programs may contain."""

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> (shape, dtype)."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be trusted, or does not fit the model or the request. The message names the file or
    the tensor.

    elsewhere: whether the failure was on another rank, whose error contains the details.
    """

    elsewhere = False


class UnreadableError(CheckpointError, OSError):
    """Raised if a disk or a file server cannot currently read a checkpoint. A restarted run may succeed.

    This error reports a failure of the machine, not a mistake of the user. For a missing file, `CheckpointError` is
    raised instead.
    """

    @classmethod
    def of(cls, place: object, error: OSError) -> CheckpointError:
        """Return a CheckpointError or UnreadableError for a file, depending on the operating system's `error`.

        >>> named, passing = FileNotFoundError(2, "No such file or directory"), OSError(116, "Stale file handle")
        >>> UnreadableError.of("a", named), UnreadableError.of("a", passing)
        (CheckpointError('a: No such file or directory'), UnreadableError('a: Stale file handle'))
        """
        kind = CheckpointError if isinstance(error, _NAMED) or error.errno in _LINKED else cls
        return kind(f"{place}: {error.strerror or error}")


_NAMED = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError
_LINKED = errno.ELOOP, errno.ENAMETOOLONG


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Add the prefix `where` to the message of a CheckpointError raised in the `with` block."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from None


@dataclass(frozen=True)
class Piece:
    """A rectangle of a logical tensor, together with a tensor for the rectangle's elements."""

    key: str
    """The tensor's name in the checkpoint ("weights/model.norm.weight", "moment1/...")."""
    whole: tuple[int, ...]
    """Shape of the logical tensor."""
    start: tuple[int, ...]
    """Index of the rectangle's first element in the logical tensor, one number per dim."""
    tensor: torch.Tensor
    """The rectangle's elements, a tensor of the rectangle's shape with any strides, on CPU or CUDA. A rectangle without
    elements is ignored."""

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def check_source(self, path: object, stored: tuple[tuple[int, ...], torch.dtype], cast: bool) -> None:
        """Check that this piece fits the stored tensor. stored: (shape, dtype) of the tensor at `path`. Errors:
        CheckpointError if they differ from the shape and dtype of this piece.

        cast: whether dtypes may differ. If so, the caller converts the values.
        """
        whole, dtype = stored
        if whole != self.whole:
            raise CheckpointError(f"{path}: {self.key} has shape {whole}, expected {self.whole}")
        if dtype != self.tensor.dtype and not cast:
            raise CheckpointError(f"{path}: {self.key} is {dtype}, expected {self.tensor.dtype}")

    def check(self) -> None:
        """Check that the piece is valid. Errors: CheckpointError if dims, bounds or dtype are invalid."""
        if self.tensor.dtype not in NAMES:
            raise CheckpointError(f"{self.key}: dtype {self.tensor.dtype} (valid: {', '.join(DTYPES)})")
        if not self.box.within(self.whole):
            raise CheckpointError(
                f"{self.key}: a rectangle at {self.start} of size {self.size} leaves the shape {self.whole}"
            )


@dataclass(frozen=True)
class Box:
    """A rectangle in a tensor, given by its start and size in each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.size)

    def within(self, whole: Sequence[int]) -> bool:
        return len(self.start) == len(self.size) == len(whole) and all(
            begin >= 0 and length >= 0 and begin + length <= limit
            for begin, length, limit in zip(self.start, self.size, whole, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the intersection of two rectangles in one tensor; None if they do not overlap.

        >>> Box((0, 0), (4, 3)).intersection(Box((2, 1), (9, 9)))
        Box(start=(2, 1), size=(2, 2))
        """
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    @property
    def index(self) -> tuple[slice, ...]:
        """This rectangle as an index into the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """This rectangle as an index into the memory of `outer`, which contains it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.size, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    """The rectangle that covers a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def tiling_fault(whole: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Explain why `boxes` do not cover a tensor of shape `whole` exactly once; None if they do.

    Elements are counted first. If the count is right, any gap implies an overlap, so it is enough to search for
    overlaps, among rectangles whose rows intersect.

    >>> tiling_fault((4, 2), [Box((0, 0), (3, 2))])
    'a gap: 6 of 8 elements are there'
    """
    for box in boxes:
        if not box.within(whole):
            return f"a rectangle at {box.start} of size {box.size} leaves the shape {tuple(whole)}"
    filled = sorted((box for box in boxes if box.elements), key=lambda box: box.start)
    open_boxes: list[Box] = []
    for box in filled:
        row = box.start[0] if box.start else 0
        open_boxes = [other for other in open_boxes if not box.start or other.start[0] + other.size[0] > row]
        for other in open_boxes:
            shared = box.intersection(other)
            if shared:
                return f"an overlap: two rectangles hold the elements at {shared.start} of size {shared.size}"
        open_boxes.append(box)
    present, expected = sum(box.elements for box in filled), prod(whole)
    return None if present == expected else f"a gap: {present} of {expected} elements are there"
