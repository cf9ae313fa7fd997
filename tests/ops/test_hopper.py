"""The layout of the arguments of hopper.cu, and that nothing else than a Hopper GPU takes it."""

from __future__ import annotations

import re

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
