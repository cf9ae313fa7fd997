"""torch files that hold more than tensors, read without running anything they name.

torch's own restricted unpickler does the reading. Names on our list become inert objects of ours, which
only keep what they were given; tensors, containers and numbers are torch's list; all else is refused, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.forms.foreign import torch_file


class Inert:
    """Stands for an object of another program: keeps its arguments and its state, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Arguments(Inert):
    """Stands for argparse.Namespace."""

    @property
    def values(self) -> dict[str, Any]:
        state = getattr(self, "state", {})
        return state if isinstance(state, dict) else {}


STAND_INS: dict[str, type[Inert]] = {
    "argparse.Namespace": Arguments,
    **dict.fromkeys(
        (
            "megatron.core.enums.ModelType",
            "megatron.model.enums.ModelType",
            "megatron.core.transformer.enums.AttnBackend",
            "megatron.core.transformer.enums.AttnMaskType",
            "fp16.loss_scaler.LossScaler",
            "fp16.loss_scaler.DynamicLossScaler",
            "megatron.fp16.loss_scaler.LossScaler",
            "megatron.fp16.loss_scaler.DynamicLossScaler",
            # Random states hold numpy arrays; they are not needed here.
            "numpy.core.multiarray._reconstruct",
            "numpy._core.multiarray._reconstruct",
            "numpy.ndarray",
            "numpy.dtype",
            "_codecs.encode",
        ),
        Inert,
    ),
}


def read_pickled(path: Path) -> Any:
    """What a torch file holds. Errors: CheckpointError naming the file and the first thing that is not allowed."""
    stand_ins: list[Any] = [(cls, name) for name, cls in STAND_INS.items()]
    with torch.serialization.safe_globals(stand_ins):
        return torch_file(path, STAND_INS)
