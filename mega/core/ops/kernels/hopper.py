"""Flash attention for Hopper GPUs (hopper.cu): causal or bidirectional, with documents and counter-based dropout.

These kernels compute what kernels/attention.py computes for whole rows, with the same dropout masks and the same order
of sums, but their warps load, multiply and compute weights at the same time, which Triton's kernels cannot. `applies`
lists what they do not support: windows, offsets, grouped heads, lengths that are not multiples of 128, and work that is
too small to occupy the device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from itertools import compress
from pathlib import Path

import torch

from mega.core.device import is_hopper, multiprocessors
from mega.core.ops import nvrtc
from mega.core.ops.attention import plain
from mega.core.ops.counter import RULE, site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.kernels import documents
from mega.core.ops.kernels.language import cdiv
from mega.core.ops.mask import AttentionMask
from mega.core.ops.trial import error_of, passes

SOURCE = Path(__file__).with_name("hopper.cu")
WIDTHS = 64, 128
"""Widths of heads."""
STEP = 64
"""Rows that a warpgroup computes, and rows that are loaded at a time."""
TILE = 2 * STEP
"""Rows of a block. The forward pass prefers twice as many."""
DTYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
"""dtype -> macros."""
SHORT = {"causal": 1024, "full": 512}
"""Kind of mask -> the longest rows for which these kernels are faster than cuDNN's, at heads of 64, as measured on an
H100 (docs/performance.md). At heads of 128, cuDNN's kernels are faster."""
LOG2E = math.log2(math.e)
_WARPGROUP = 128  # threads


class _Strided(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


class _Problem(ctypes.Structure):
    """`Problem` of hopper.cu, which explains the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counter", "lse", "stats", "keys", "documents", "bounds")),
        *((name, ctypes.c_int64) for name in ("keys_stride", "documents_stride", "site")),
        *((name, ctypes.c_int) for name in ("batches", "heads", "length", "first_head")),
        *((name, ctypes.c_float) for name in ("scale", "first_scale", "second_scale")),
        ("threshold", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("early", "border", "late")),
        ("first", _Strided),
        ("second", _Strided),
    )


def applies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether these kernels support an attention call on this device."""
    b, s, heads, width = q.shape
    return (
        is_hopper(q.device)
        and q.dtype in DTYPES
        and width in WIDTHS
        and q.shape == k.shape
        and s % TILE == 0
        and b * heads * (s // TILE) >= multiprocessors(q.device)
        and mask.q_offset == 0
        and mask.window is None
        and mask.softcap is None
        and mask.q_documents is mask.k_documents
        and (mask.q_documents is None or mask.q_documents.stride(-1) == 1)
        and (mask.dropout is None or _draws_pairs(mask.dropout, s))
        and all(map(loads, (q, k, v)))
        and trusted(q.device, q.dtype, width)
    )


def is_short(mask: AttentionMask, length: int, width: int) -> bool:
    """Whether these kernels, where they apply, are faster than cuDNN's for a mask that cuDNN supports."""
    return width == min(WIDTHS) and length <= SHORT[mask.kind]


def _draws_pairs(drop: AttentionDropout, t: int) -> bool:
    """Whether all tiles of keys begin at a multiple of 16 columns, so that two scores of a thread share a draw."""
    early, border, late = drop.shifts()
    whole = drop.rule == RULE and drop.keys.stride(-1) == 1
    return whole and early % 16 == late % 16 == 0 and (border >= t or border % TILE == 0)


def loads(x: torch.Tensor) -> bool:
    """Whether the device's copy engine can load heads of x."""
    size = x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in x.stride()[:3])


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Compute `out` [b, s, heads, width] and `lse` fp32 [b, heads, s]. Call this function only if `applies`."""
    groups, problem = _forward_groups(q), _problem(q, mask)
    problem.lse, problem.first, problem.first_scale = lse.data_ptr(), _strided(out), 1 / _keep(mask)
    _run("attention_forward", problem, mask, (q, q), (k, v), _bounds(mask, groups * STEP), groups)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
    grads: Sequence[torch.Tensor],
) -> None:
    """Compute `grads`: d(q), d(k), d(v). Call this function only if `applies`, and `loads(grad)`."""
    b, s, heads, width = q.shape
    keep, problem = _keep(mask), _problem(q, mask)
    stats = torch.empty(b, heads, s, 4, dtype=torch.int32, device=q.device)
    problem.lse, problem.stats, problem.first_scale = lse.data_ptr(), stats.data_ptr(), keep
    problem.first, problem.second = _strided(out), _strided(grad)
    blocks = cdiv(b * s * heads * (width // 8), 2 * _WARPGROUP)
    nvrtc.launch(_kernel("attention_prepare", q, mask), blocks, 2 * _WARPGROUP, q.device, problem)
    problem.first, problem.second = _strided(grads[1]), _strided(grads[2])
    problem.first_scale, problem.second_scale = 1 / keep / math.sqrt(width), 1 / keep
    bounds = _bounds(mask, TILE)  # tiles of keys and of queries have the same tokens
    _run("attention_backward_keys", problem, mask, (k, v), (q, grad), bounds)
    problem.first = _strided(grads[0])
    _run("attention_backward_queries", problem, mask, (q, grad), (k, v), bounds)


def _keep(mask: AttentionMask) -> float:
    return 1.0 if mask.dropout is None else mask.dropout.keep


def _forward_groups(q: torch.Tensor) -> int:
    """Return the number of warpgroups that compute a tile of the forward pass."""
    return 4 if q.shape[-1] == 64 and q.shape[1] % (2 * TILE) == 0 else 2


def _bounds(mask: AttentionMask, rows: int) -> torch.Tensor | None:
    """Return the bounds of tiles of `rows` tokens, or None without documents."""
    numbers = mask.q_documents
    return None if numbers is None else documents.bounds(numbers, numbers, rows, STEP)


def _strided(x: torch.Tensor) -> _Strided:
    return _Strided(x.data_ptr(), *x.stride()[:3])


def _problem(q: torch.Tensor, mask: AttentionMask) -> _Problem:
    b, s, heads, width = q.shape
    problem = _Problem(batches=b, heads=heads, length=s, scale=LOG2E / math.sqrt(width))
    numbers, drop = mask.q_documents, mask.dropout
    if numbers is not None:
        problem.documents, problem.documents_stride = numbers.data_ptr(), numbers.stride(0)
    if drop is not None:
        problem.keys, problem.keys_stride = drop.keys.data_ptr(), drop.keys.stride(0)
        problem.site, problem.first_head, problem.threshold = drop.site, drop.first_head, drop.threshold << 16
        problem.early, problem.border, problem.late = drop.shifts()
    return problem


def _kernel(name: str, q: torch.Tensor, mask: AttentionMask) -> nvrtc.Kernel:
    given = mask.kind == "causal", mask.q_documents is not None, mask.dropout is not None
    macros = *DTYPES[q.dtype], *compress(("CAUSAL", "DOCUMENTS", "DROP"), given)
    sizes = f"WIDTH={q.shape[-1]}", f"FORWARD_GROUPS={_forward_groups(q)}"
    return nvrtc.kernel(SOURCE, (*sizes, *macros), name, q.device)


def _run(
    name: str,
    problem: _Problem,
    mask: AttentionMask,
    tiles: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    bounds: torch.Tensor | None,
    groups: int = TILE // STEP,
) -> None:
    """Launch a kernel whose blocks own rows of `tiles` and read the rows of `steps`."""
    device = tiles[0].device
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    problem.counter = counter.data_ptr()
    problem.bounds = None if bounds is None else bounds.data_ptr()
    maps = (nvrtc.tensor_map(x, STEP) for x in (*tiles, *steps))
    threads = (groups + 1) * _WARPGROUP
    nvrtc.launch(_kernel(name, tiles[0], mask), multiprocessors(device), threads, device, *maps, problem)


# -- the comparison with the plain implementation


@cache
def trusted(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the results for a small case agree with those of the plain implementation. If not, a warning is
    logged."""
    return passes(
        lambda: _trial_error(device, dtype, width), dtype, "attention by Triton instead of hopper.cu: its kernels"
    )


def _trial_error(device: torch.device, dtype: torch.dtype, width: int) -> float:
    b, s, heads = 2, 2 * TILE, 3
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(b, s, heads, width, device=device, generator=generator).to(dtype).requires_grad_() for _ in range(4)
    )
    numbers = (torch.arange(s, device=device) // 100).expand(b, s).contiguous()
    keys = token_keys(1, torch.arange(b, device=device), torch.arange(s, device=device))
    drop = AttentionDropout(keys, site_key(0, "attention"), 0, (range(s),), 0.1)
    mask = AttentionMask(q_documents=numbers, k_documents=numbers, dropout=drop)
    out, lse = torch.empty_like(q), torch.empty(b, heads, s, device=device)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    with torch.no_grad():
        forward(q, k, v, mask, out, lse)
        backward(grad, q, k, v, out, lse, mask, grads)
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        exact = plain(leaves[0], leaves[1], leaves[2], mask)
        true = torch.autograd.grad(exact, leaves, grad.detach().float())
    return error_of([out, *grads], [exact.detach(), *true])
