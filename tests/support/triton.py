"""Where our Triton kernels run: on a CUDA device, else by Triton's interpreter on a CPU, as far as Triton is installed.

The environment chooses when Triton is first imported, which torch may do, so tests/conftest.py imports this at once.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INSTALLED = importlib.util.find_spec("triton") is not None
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

needs_kernels = pytest.mark.skipif(
    not INSTALLED,
    reason="needs triton, which runs the kernels on a CUDA device, or by its interpreter on a CPU (pip install triton)",
)


def _has(names: dict[str, Any], value: object) -> bool:
    return any(each is value for each in names.values())


def _replace_language_once() -> None:
    """The interpreter puts its own functions in the place of the language's, anew for each function that a kernel
    calls, which is half of the time of our tests. Leave that out where they are in place already."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    replace: Any = getattr(interpreter, "_patch_lang", None)
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None:  # another version, which takes the time it takes
        return

    def replace_once(function: Any) -> Any:
        seen = [each for each in (interpreter.tl, interpreter.tl.core) if _has(function.__globals__, each)]
        done = seen and not any(is_builtin(each.load) or is_builtin(each.tensor.to) for each in seen)
        return scope() if done else replace(function)

    interpreter._patch_lang = replace_once


if INSTALLED and not CUDA:
    _replace_language_once()
