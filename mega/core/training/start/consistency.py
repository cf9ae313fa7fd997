"""The values of a training run that are compared between ranks before the first step (parallel/consistency.py). Code,
flags, tokenizer and data must be identical on all ranks. Devices, drivers and library versions should be equal.

This module depends neither on the model nor on steps.
"""

from __future__ import annotations

import platform

import torch

from mega.core.device import Device
from mega.core.parallel.consistency import Comparable
from mega.core.processes.code import code
from mega.core.training.start.equal import contents, flags
from mega.core.training.start.inputs import Inputs


def comparable(inputs: Inputs, device: Device) -> Comparable:
    """Return the values of this rank that are compared with those of other ranks."""
    return Comparable({**code(), **flags(inputs.run), **contents(inputs)}, _machine(device))


def _machine(device: Device) -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    return {"the device": device.name, **versions, **device.library_versions()}
