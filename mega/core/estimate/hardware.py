"""Devices and their clusters as numbers: hardware.toml next to this file, or a file of the user's in the same form."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mega.core.config.toml import loads, read_text, shown

GIB = 2**30

SHARES = ("product", "elementwise", "attention_forward", "attention_backward")
"""Fields that are a share of what the device can do at most."""

RETIRED = {"traffic"}
"""Fields of files that were written before curves were measured; they are read and not used."""

LEAST, MOST = 1e-12, 1e12
"""What a number of any field may be: far from where reckoning with it ends."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its cluster; hardware.toml says what each field means and in which unit."""

    name: str
    memory: float
    communicator: float
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    product: float
    elementwise: float
    attention_forward: float
    attention_backward: float
    launch: float
    host: float
    node: int
    inside: float
    outside: float
    peer: float
    latency: float
    latency_outside: float
    link: float
    host_memory: float

    @property
    def fp8(self) -> float:
        """TFLOP/s of products in fp8: in fp32, which they are emulated in, where the device has none."""
        return self.peak.get("fp8", self.peak["fp32"])


@cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("mega.core.estimate").joinpath("hardware.toml").read_text(encoding="utf-8"))


def hardware(name: str, asked: str | None = None) -> Hardware:
    """A device that we know, or the one that the TOML file `name` describes.

    asked: how the user said it, if not by --gpu. Errors: ValueError naming that, for an unknown name, a broken file, or
    a field that is none.

    >>> hardware("h200").peak["bf16"]
    989.0
    """
    known, asked = _known(), asked or f"--gpu {name}"
    if not name.endswith(".toml"):
        if name.lower() not in known or name.lower() == "base":
            valid = ", ".join(other for other in known if other != "base")
            raise ValueError(f"{asked}: is no known device; valid: {valid}, or a TOML file")
        return _made(name.lower(), known[name.lower()], asked)
    return _made(Path(name).stem, loads(read_text(name, asked), asked), asked)


def _made(name: str, table: Mapping[str, Any], asked: str) -> Hardware:
    base, own = _known()["base"], {field.name for field in fields(Hardware)} - {"name"}
    table = {key: value for key, value in table.items() if key not in RETIRED}
    given = table.get("peak", {})
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{asked}: peak is {shown(given)}; must be a table of TFLOP/s by dtype, such as {{bf16 = 989.0}}"
        )
    for keys, valid in ((table.keys(), own), (given.keys(), base["peak"].keys() | {"fp8"})):
        if unknown := sorted(keys - valid):
            raise ValueError(f"{asked}: unknown field {unknown[0]}; valid: {', '.join(sorted(valid))}")
    values, peak = {**base, **table}, {**base["peak"], **given}
    for key, value in {**values, **peak}.items():
        most = 1.0 if key in SHARES else MOST
        if key != "peak" and (type(value) not in (int, float) or not LEAST <= value <= most):
            raise ValueError(f"{asked}: {key} is {shown(value)}; must be a number from {LEAST:g} to {most:g}")
    if type(values["node"]) is not int:
        raise ValueError(f"{asked}: node is {shown(values['node'])}; must be a whole number of GPUs")
    return Hardware(name, **{**values, "peak": peak})
