"""Where our Triton kernels run: on a CUDA device, else by Triton's interpreter on a CPU, as far as Triton is installed.

The environment chooses when Triton is first imported, which torch may do, so tests/conftest.py imports this at once.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which runs the kernels on a CUDA device, or by its interpreter on a CPU (pip install triton)",
)
