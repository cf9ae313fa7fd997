"""Sums of small tensors over an axis in one exchange, through memory that all its ranks map.

A decoding step adds up 8 KB twice a block, and NCCL's all-reduce of so little is nearly all latency. Here every rank
puts its tensor where the others read it; when all have, each reads all of them and adds them up itself, in the order of
ranks: the same bits on every rank, every time. torch's operation does this; it uses no NVLink multicast, and a graph
can hold it. Every rank reads what all have, so larger tensors, which NCCL shares out, stay with it.

For CUDA ranks of one host on NCCL. All ranks of an axis add up the same tensors in the same order. Where one of them
ends, the others wait in the middle of a sum, without a timeout, until their launcher ends them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mega.core.ops.trial import error_of, first_line, problem_of
from mega.core.parallel.collectives import all_gather, all_reduce, first_problem, gather_json
from mega.core.parallel.mesh import Axis

LIMIT = 256 * 2**10
"""Bytes of the largest tensor."""

ALIGNMENT = 16
"""A tensor is so many bytes, or a multiple: a thread reads as many at once."""

TRIED = (ALIGNMENT, 8 * 2**10, 40 * 2**10 + ALIGNMENT, LIMIT) * 3
"""Bytes of the tensors that are tried: sums of less than a warp, of one block of threads, of some, and the largest."""

Sum = Callable[[torch.Tensor], object]
"""Adds up a tensor over an axis, in place."""

log = logging.getLogger(__name__)


class OneShot:
    """one_shot(x): adds up a tensor that `takes` takes, in place. All ranks of the axis open it together.

    Errors: RuntimeError where memory cannot be mapped; of a sum, in a dtype for which torch has none (not bf16, fp32).
    """

    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype):
        import torch.distributed._symmetric_memory as symmetric

        assert axis.group is not None
        # Of its own, not by `symmetric.empty`, which takes it from a pool: the operation reads from where a pool's
        # piece begins, and another engine's buffer may be there.
        memory: Any = symmetric._SymmetricMemory
        self._buffer: torch.Tensor = memory.empty_strided_p2p((LIMIT // dtype.itemsize,), (1,), dtype, device)
        symmetric.rendezvous(self._buffer, axis.group)
        self._name = axis.group.group_name
        # The form that copies too lets ranks read before all warps of a block have copied (torch 2.11 to 2.13).
        self._add = torch.ops.symm_mem.one_shot_all_reduce_out

    def __call__(self, x: torch.Tensor) -> None:
        ours = self._buffer[: x.numel()].view(x.shape)
        ours.copy_(x)
        self._add(ours, "sum", self._name, x)


def takes(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is added up in one exchange; its place in memory aside, which may differ between ranks.

    >>> [takes(torch.empty(count), torch.float32) for count in (1, 4, 65536, 65540)]
    [False, True, True, False]
    """
    fits = x.nbytes <= LIMIT and x.nbytes % ALIGNMENT == 0
    return fits and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0


def sum_over(axis: Axis, device: torch.device, dtype: torch.dtype) -> Sum:
    """How tensors are added up over the axis in a step of few tokens. All its ranks call this together.

    dtype: of most of them.
    """
    if axis.size == 1 or device.type != "cuda" or dist.get_backend(axis.group) != "nccl":
        return partial(all_reduce, axis=axis)
    return tried(axis, device, dtype, lambda: OneShot(axis, device, dtype))


def tried(axis: Axis, device: torch.device, dtype: torch.dtype, open_small: Callable[[], Sum]) -> Sum:
    """What adds up small tensors by `open_small()`, where it is right, and others by the group.

        1 see that the ranks are on one host        else some would wait for memory that others cannot send them
        2 map memory                                on every rank, or on none
        3 compare with the group's sums

    After each all ranks agree whether they continue. Where they do not, a line says why, and the group adds up all.
    """
    by_group: Sum = partial(all_reduce, axis=axis)
    small, problem = by_group, None
    if len(set(gather_json(socket.gethostname(), axis, device))) > 1:
        problem = "the ranks are on several hosts"
    if problem is None:
        try:
            small = open_small()
        except Exception as error:
            problem = first_line(error)
        problem = first_problem(problem, axis, device)
    if problem is None:
        problem = problem_of(lambda: _off(small, axis, device, dtype), dtype)
        problem = first_problem(problem, axis, device)
    if problem is None:
        return lambda x: small(x) if takes(x, dtype) else by_group(x)
    if axis.first:
        log.warning("small tensors are added up over ranks as large ones: in one exchange fails (%s)", problem)
    return by_group


def _off(small: Sum, axis: Axis, device: torch.device, dtype: torch.dtype) -> float:
    """The error against the group's sums. Errors: RuntimeError where ranks find different bits."""
    generator = torch.Generator(device).manual_seed(axis.index)
    found = [torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype) for size in TRIED]
    plain = [x.clone() for x in found]
    for x in found:  # one after the other, so that one's memory is the next one's
        small(x)
    for x in plain:
        all_reduce(x, axis)
    for x in found:
        everywhere = all_gather(x[None], axis)
        if not torch.equal(everywhere, x.expand_as(everywhere)):
            raise RuntimeError("ranks find different sums")
    return error_of(found, plain)
