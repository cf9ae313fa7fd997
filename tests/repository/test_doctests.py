"""The worked examples in all docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import mega

MODULES = [
    module.name
    for module in pkgutil.walk_packages(mega.__path__, "mega.")
    if not module.name.endswith("__main__") and ".kernels" not in module.name
]
"""Kernels need Triton and have no examples."""


def package_of(name: str) -> str:
    return ".".join(name.split(".")[:3])


@pytest.mark.parametrize("package", sorted({package_of(name) for name in MODULES}))
def test_examples(package: str) -> None:
    for name in MODULES:
        if package_of(name) == package:
            module = importlib.import_module(name)
            results = doctest.testmod(module)
            assert results.failed == 0, name
