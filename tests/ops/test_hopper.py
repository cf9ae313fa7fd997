"""The layout of the arguments of hopper.cu, and that nothing else than a Hopper GPU takes it."""

from __future__ import annotations

import re

import pytest
import torch

from mega.core.ops.kernels import hopper
from mega.core.ops.mask import AttentionMask

SIZES = {"int": 4, "u32": 4, "float": 4, "i64": 8, "Strided": 32}


def test_the_fields_are_those_of_the_source() -> None:
    source = hopper.SOURCE.read_text()
    body = re.sub(r"//.*", "", source.split("struct Problem {")[1].split("};")[0])
    fields = []
    for statement in filter(str.strip, body.split(";")):
        kind, names = re.match(r"\s*(?:const )?(\w+) (.*)", statement, re.S).groups()  # type: ignore[union-attr]
        fields += [(name.strip("* "), 8 if "*" in name else SIZES[kind]) for name in names.split(",")]
    own = [field[0] for field in hopper._Problem._fields_]
    assert fields == [(name, getattr(hopper._Problem, name).size) for name in own]


def test_the_constants_are_those_of_the_source() -> None:
    source = hopper.SOURCE.read_text()
    assert f"constexpr int STEP = {hopper.STEP};" in source
    assert f"Shape<{hopper.TILE // hopper.STEP}, 2, 2," in source


def test_other_devices_are_refused() -> None:
    for device in ("cpu", "meta"):
        q = torch.empty(64, 256, 16, 64, dtype=torch.bfloat16, device=device)
        assert not hopper.applies(q, q, q, AttentionMask())


def test_a_call_compiles_one_module_and_finds_bounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is replaced: what is launched, for which macros, and with how many threads."""
    macros, launched, sizes = set(), [], []

    def compiled(source: object, given: tuple[str, ...], name: str, device: object) -> str:
        macros.add(given)
        return name

    def bounds_of(own: torch.Tensor, other: torch.Tensor, size: int, step: int) -> torch.Tensor:
        sizes.append((size, step))
        return torch.zeros(1)

    monkeypatch.setattr(hopper.nvrtc, "kernel", compiled)
    monkeypatch.setattr(hopper.nvrtc, "launch", lambda name, blocks, threads, *_: launched.append((name, threads)))
    monkeypatch.setattr(hopper.nvrtc, "tensor_map", lambda x, rows: x)
    monkeypatch.setattr(hopper.documents, "bounds", bounds_of)
    numbers, out = torch.zeros(2, 256, dtype=torch.int64), torch.zeros(2, 256, 3, 64, dtype=torch.float16)
    mask = AttentionMask(q_documents=numbers, k_documents=numbers)
    hopper.forward(out, out, out, mask, out, torch.zeros(2, 3, 256))
    hopper.backward(out, out, out, out, out, torch.zeros(2, 3, 256), mask, [out, out, out])
    assert macros == {("WIDTH=64", "FORWARD_GROUPS=4", "HALF", "CAUSAL", "DOCUMENTS")}
    names = ["attention_forward", "attention_prepare", "attention_backward_keys", "attention_backward_queries"]
    assert launched == list(zip(names, (640, 256, 384, 384), strict=True))
    assert sizes == [(256, 64), (128, 64)]
