"""Rotates queries and keys in place within the fused projection. The backward pass reverses the rotation while it
concatenates the gradients of queries, keys and values, with one launch for heads that are rotated and one launch for
all other heads. Without rotary positions, nothing is concatenated if the attention kernels wrote the three gradients to
one tensor.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from operator import mul

import torch

from mega.core.ops.autograd import FunctionContext
from mega.core.ops.fused_casts import FusedCasts, gradient_casts, stand_in
from mega.core.ops.heads import Rotary
from mega.core.ops.kernels.language import cdiv, jit, launch, next_power_of_2, tl
from mega.core.ops.kernels.sums import bias_gradient, deliver_sums

TOKENS = 32
"""Number of tokens of a program that concatenates gradients."""
TURNED_TOKENS = 16
"""Number of tokens of a program that rotates heads."""
FEW_HEADS, MANY_HEADS = 4, 16
"""Maximum number of heads that a program rotates, for which it reads cosines and sines once. More heads are faster if
there are enough programs."""
PROGRAMS = 1024
"""Enough programs, each with MANY_HEADS."""
SUMMED = 128
"""Number of tokens per program and per partial sum if the gradient of the bias is computed."""


@jit
def _turn(
    x_at, cos_at, sin_at, tokens, stride, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.arange(0, HALF_BLOCK)
    mask = (token < tokens)[:, None] & (part < HALF)[None, :]
    angle = token[:, None] * HALF + part[None, :]
    cos = tl.load(cos_at + angle, mask, 0.0)
    sin = tl.load(sin_at + angle, mask, 0.0)
    for number in range(HEADS):
        head = tl.program_id(1) * HEADS + number
        offset = x_at + token.to(tl.int64)[:, None] * stride + head * WIDTH + part[None, :]
        first = tl.load(offset, mask, 0.0).to(tl.float32)
        second = tl.load(offset + HALF, mask, 0.0).to(tl.float32)
        tl.store(offset, (first * cos - second * sin).to(x_at.dtype.element_ty), mask)
        tl.store(offset + HALF, (second * cos + first * sin).to(x_at.dtype.element_ty), mask)


@jit
def _gather(
    first_at, second_at, third_at, out_at, cos_at, sin_at, sums_at, first_token, second_token, third_token,
    first_head, second_head, third_head, second, third, tokens, out_token, out_first,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    token_mask = (token < tokens)[:, None]
    # Select the gradient tensor of this head. Heads of the second tensor begin at index `second`, and heads of the
    # third tensor at `third`.
    grad_at = first_at
    if head >= third:
        grad_at = third_at
    elif head >= second:
        grad_at = second_at
    begin = tl.where(head >= third, third, tl.where(head >= second, second, 0))
    grad_token = tl.where(head >= third, third_token, tl.where(head >= second, second_token, first_token))
    grad_head = tl.where(head >= third, third_head, tl.where(head >= second, second_head, first_head))
    source = grad_at + token.to(tl.int64)[:, None] * grad_token + (head - begin) * grad_head
    target = out_at + token.to(tl.int64)[:, None] * out_token + out_first + head * WIDTH
    component = tl.arange(0, BLOCK)
    part = component[None, :]
    if SUMS:
        sums = sums_at + tl.program_id(0) * out_token + out_first + head * WIDTH + component
    if HALF == 0:
        mask = token_mask & (part < WIDTH)
        x = tl.load(source + part, mask, 0.0)
        tl.store(target + part, x, mask)
        if SUMS:
            tl.store(sums, tl.sum(x.to(tl.float32), 0), component < WIDTH)
    else:
        mask = token_mask & (part < HALF)
        angle = token[:, None] * HALF + part
        cos = tl.load(cos_at + angle, mask, 0.0)
        sin = tl.load(sin_at + angle, mask, 0.0)
        first = tl.load(source + part, mask, 0.0).to(tl.float32)
        second = tl.load(source + HALF + part, mask, 0.0).to(tl.float32)
        first_grad, second_grad = first * cos + second * sin, second * cos - first * sin
        tl.store(target + part, first_grad.to(out_at.dtype.element_ty), mask)
        tl.store(target + HALF + part, second_grad.to(out_at.dtype.element_ty), mask)
        if SUMS:
            tl.store(sums, tl.sum(first_grad, 0), component < HALF)
            tl.store(sums + HALF, tl.sum(second_grad, 0), component < HALF)
        if 2 * HALF < WIDTH:
            for after in tl.static_range(2 * HALF, WIDTH, BLOCK):
                rest = token_mask & (after + part < WIDTH)
                x = tl.load(source + after + part, rest, 0.0)
                tl.store(target + after + part, x, rest)
                if SUMS:
                    tl.store(sums + after, tl.sum(x.to(tl.float32), 0), after + component < WIDTH)


def _split(
    fused: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert fused.is_contiguous()
    tokens, stride = fused.shape
    width = stride // (heads + 2 * kv_heads)
    if cos is not None:
        half, turned = cos.shape[1], heads + kv_heads
        parts = cdiv(tokens, TURNED_TOKENS)
        shared = gcd(turned, MANY_HEADS if parts * turned >= PROGRAMS * MANY_HEADS else FEW_HEADS)
        launch(
            _turn, (parts, turned // shared),
            fused, cos, sin, tokens, stride,
            WIDTH=width, HALF=half, HALF_BLOCK=next_power_of_2(half), TOKENS=TURNED_TOKENS, HEADS=shared,
        )  # fmt: skip
    q, k, v = fused.view(tokens, -1, width).split_with_sizes([heads, kv_heads, kv_heads], 1)
    return q, k, v


def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous tensor [..., heads + 2 kv_heads, d] whose heads are q [..., heads, d] and k, v [...,
    kv_heads, d], in this order and without copying, or None if the three tensors are not adjacent views of one storage.

    Addresses are not compared, because all tensors on the meta device have address 0.

    >>> whole = torch.arange(12.0).view(1, 3, 4, 1)
    >>> q, k, v = whole.split_with_sizes([2, 1, 1], 2)
    >>> torch.equal(joined(q, k, v), whole), joined(q, v, k), joined(q, k, v.clone())
    (True, None, None)
    """
    *outer, heads, width = q.shape
    k_at = q.storage_offset() + heads * width
    v_at = k_at + k.shape[-2] * width
    same = q.stride() == k.stride() == v.stride() and q.dtype == k.dtype == v.dtype
    if not same or (k.storage_offset(), v.storage_offset()) != (k_at, v_at):
        return None
    shape = (*outer, heads + k.shape[-2] + v.shape[-2], width)
    stride = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]
    if q.stride() != stride or not list(k.shape[:-2]) == list(v.shape[:-2]) == outer:
        return None
    storage = q.untyped_storage()._cdata
    if k.untyped_storage()._cdata != storage or v.untyped_storage()._cdata != storage:
        return None
    return q.as_strided(shape, stride)


_SplitState = tuple[torch.Tensor | None, int, int, int, FusedCasts | None]
"""State for the backward pass: (bias, number of tokens, stride of a token, width of a head, casts of the gradient)."""


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[_SplitState],
        fused: torch.Tensor,
        bias: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, stride = fused.shape
        ctx.save_for_backward(cos, sin)
        ctx.state = bias, tokens, stride, stride // (heads + 2 * kv_heads), gradient_casts(fused)
        return _split(fused.detach(), heads, kv_heads, cos, sin)

    @staticmethod
    def backward(ctx: FunctionContext[_SplitState], *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        bias, tokens, stride, width, casts = ctx.state
        # With rotary positions, the gradients are always copied, because rotating them in place would also change the
        # tensors that autograd may have given to hooks and other ops.
        if cos is None and (whole := joined(*grads)) is not None:
            out = whole.flatten(1)
            return out, None if bias is None else bias_gradient(bias, out), None, None, None, None
        grads = tuple(grad if grad.stride(2) == 1 else grad.contiguous() for grad in grads)
        if casts is not None and cos is not None and bias is None:
            cast = casts.heads_gradient(grads[0], grads[1], grads[2], cos, sin)
            if cast is not None:
                return stand_in((tokens, stride), grads[0], cast), None, None, None, None, None
        block = TOKENS if bias is None else SUMMED
        parts = cdiv(tokens, block)
        sums = None if bias is None else torch.empty(1, parts, stride, dtype=torch.float32, device=grads[0].device)
        out = torch.empty(tokens, stride, dtype=grads[0].dtype, device=grads[0].device)
        first = 0
        for group, half in ((grads, 0),) if cos is None else ((grads[:2], cos.shape[1]), (grads[2:], 0)):
            tensors = (*group, *group[-1:] * (3 - len(group)))
            begins = list(accumulate((grad.shape[1] for grad in group), initial=0))
            heads = begins[-1]
            second, third = (begins[number] if number < len(group) else heads for number in (1, 2))
            launch(
                _gather, (parts, heads), *tensors, out, cos, sin, sums, *(grad.stride(0) for grad in tensors),
                *(grad.stride(1) for grad in tensors), second, third, tokens, stride, first, WIDTH=width, HALF=half,
                BLOCK=next_power_of_2(half or width), TOKENS=block, SUMS=bias is not None,
            )  # fmt: skip
            first += heads * width
        return out, None if sums is None else deliver_sums((bias,), sums)[0], None, None, None, None


def split_heads(
    fused: torch.Tensor, bias: torch.Tensor | None, heads: int, kv_heads: int, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `ops.heads.split_heads`, and rotate `fused` in place."""
    cos, sin = (None, None) if rotary is None else rotary
    if not torch.is_grad_enabled():  # skip autograd, whose overhead exceeds that of a launch
        return _split(fused, heads, kv_heads, cos, sin)
    return _SplitHeads.apply(fused, bias, heads, kv_heads, cos, sin)  # type: ignore[no-any-return]
