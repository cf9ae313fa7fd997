"""torch's fused kernels as parts of a whole, against float64: within twice the error of the plain form."""

from __future__ import annotations

import pytest
import torch

from mega.core.ops import partial_attention
from mega.core.ops.mask import CAUSAL, FULL
from mega.core.ops.partial_attention import FUSED, PLAIN, PartialAttention, merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH, HALF, WIDTH = 512, 256, 64
FRONT, BACK = slice(0, HALF), slice(HALF, LENGTH)
PARTS = [(FRONT, FRONT, CAUSAL), (BACK, BACK, CAUSAL), (BACK, FRONT, FULL)]


def whole(op: PartialAttention, grad: torch.Tensor, *qkv: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a causal row, computed in three parts."""
    q, k, v = qkv
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], LENGTH), -torch.inf, dtype=out.dtype, device=q.device)
    for queries, keys, mask in PARTS:
        found, found_lse = op.forward(q[:, queries], k[:, keys], v[:, keys], mask)
        merge(out[:, queries], lse[:, :, queries], found, found_lse)
    grads = [torch.zeros(x.shape, dtype=out.dtype, device=q.device) for x in qkv]
    narrow = out.to(q.dtype)
    for queries, keys, mask in PARTS:
        at_queries, at_keys = (x[:, queries] for x in (grad, q)), (x[:, keys] for x in (k, v))
        parts = op.backward(*at_queries, *at_keys, narrow[:, queries], lse[:, :, queries], mask)
        for total, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
            total[:, place] += part
    return [out, *grads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("kernel", ["cudnn", "flash", None])
def test_fused_parts(
    kernel: str | None, dtype: torch.dtype, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that is chosen (no name), and each by name."""
    if kernel is not None:
        monkeypatch.setattr(partial_attention, "_kernel", lambda *_: kernel)
    torch.manual_seed(0)
    shapes = [(2, LENGTH, each, WIDTH) for each in (heads, heads, kv_heads, kv_heads)]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    exact = whole(PLAIN, *(x.double() for x in tensors))
    found, plain = whole(FUSED, *tensors), whole(PLAIN, *tensors)
    for name, truth, fast, slow in zip(("out", "dq", "dk", "dv"), exact, found, plain, strict=True):
        errors = [float((x.double() - truth).norm() / truth.norm()) for x in (fast, slow)]
        assert errors[0] <= 2 * errors[1], (name, errors)
