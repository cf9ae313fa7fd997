"""Reads the constants of devices and clusters from hardware.toml, or from a user's file in the same format."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mega.core.config.toml import loads, quoted, read_text
from mega.core.estimate.curves import Curves, checked

GIB = 2**30

SHARES = ("product", "elementwise", "attention_forward", "attention_backward")
"""Fields that are fractions of the device's peak."""

RETIRED = {"traffic"}
"""Fields of files from versions without measured curves. These fields are accepted but ignored."""

LEAST, MOST = 1e-12, 1e12
"""Limits of every number in a file, well inside the range in which float arithmetic neither overflows nor
underflows."""


@dataclass(frozen=True)
class Hardware:
    """The constants of one device type and its cluster. `hardware.toml` documents the fields in detail."""

    name: str  # Name of the device
    memory: float  # GiB that a process can allocate
    communicator: float  # GiB outside the allocator for each process group
    peak: Mapping[str, float] = field(hash=False)  # Dense TFLOP/s by dtype
    bandwidth: float  # TB/s of the memory
    product: float  # Fraction of the peak that a large product reaches
    elementwise: float  # Fraction of the bandwidth that an elementwise kernel reaches
    attention_forward: float  # Fraction of the peak that causal attention reaches, forward
    attention_backward: float  # Fraction of the peak that causal attention reaches, backward
    launch: float  # Microseconds between two kernels
    host: float  # Host time in microseconds per block and microbatch, forward plus backward
    node: int  # Number of GPUs per host
    inside: float  # Bus GB/s of collectives within a host
    outside: float  # GB/s of each GPU's network card
    peer: float  # GB/s between two GPUs of a host
    latency: float  # Microseconds per ring step within a host
    latency_outside: float  # Microseconds per ring step between hosts
    link: float  # GB/s of copies between a GPU and its host, one direction
    host_memory: float  # GB/s of a host's memory
    curves: Curves | None = None  # Measured times of operations; None to scale the times of an H100

    @property
    def fp8(self) -> float:
        """TFLOP/s of fp8 products; on a device without fp8, the rate of fp32, which emulates fp8 products."""
        return self.peak.get("fp8", self.peak["fp32"])

    @property
    def tflops16(self) -> float:
        """TFLOP/s of products of 16-bit floats; some devices reach a high rate only in fp16."""
        return max(self.peak["bf16"], self.peak["fp16"])


@cache
def _known_devices() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("mega.core.estimate").joinpath("hardware.toml").read_text(encoding="utf-8"))


def hardware(name: str, source: str | None = None) -> Hardware:
    """Return the device called `name` in hardware.toml, or the device that the TOML file `name` describes.

    source: the flag whose value is `name`; default --gpu. Errors: ValueError naming the flag, for an unknown name, a
    broken file, or an unknown field.

    >>> hardware("h200").peak["bf16"]
    989.0
    """
    devices, source = _known_devices(), source or f"--gpu {name}"
    if not name.endswith(".toml"):
        if name.lower() not in devices or name.lower() == "base":
            valid = ", ".join(other for other in devices if other != "base")
            raise ValueError(f"{source}: is no known device; valid: {valid}, or a TOML file")
        return from_table(name.lower(), devices[name.lower()], source)
    return from_table(Path(name).stem, loads(read_text(name, source), source), source)


def from_table(name: str, table: Mapping[str, Any], source: str) -> Hardware:
    """Return the device that the values of a file describe. source: name of the file, used in messages. Errors:
    ValueError naming the field."""
    base, field_names = _known_devices()["base"], {field.name for field in fields(Hardware)} - {"name"}
    curves = checked(source, table["curves"]) if "curves" in table else None
    table = {key: value for key, value in table.items() if key not in RETIRED | {"curves"}}
    peaks = table.get("peak", {})
    if not isinstance(peaks, Mapping):
        raise ValueError(
            f"{source}: peak is {quoted(peaks)}; must be a table of TFLOP/s by dtype, such as {{bf16 = 989.0}}"
        )
    for keys, valid in ((table.keys(), field_names), (peaks.keys(), base["peak"].keys() | {"fp8"})):
        if unknown := sorted(keys - valid):
            raise ValueError(f"{source}: unknown field {unknown[0]}; valid: {', '.join(sorted(valid))}")
    values, peak = {**base, **table}, {**base["peak"], **peaks}
    for key, value in {**values, **peak}.items():
        most = 1.0 if key in SHARES else MOST
        if key != "peak" and (type(value) not in (int, float) or not LEAST <= value <= most):
            raise ValueError(f"{source}: {key} is {quoted(value)}; must be a number from {LEAST:g} to {most:g}")
    if type(values["node"]) is not int:
        raise ValueError(f"{source}: node is {quoted(values['node'])}; must be a whole number of GPUs")
    return Hardware(name, **{**values, "peak": peak}, curves=curves)
