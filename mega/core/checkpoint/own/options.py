"""The layout of a checkpoint's files, as options of the verbs that write checkpoints. This module does not import
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import VerbSection, option
from mega.core.untrusted import Json


@dataclass(frozen=True)
class Layout(VerbSection):
    """The ranks for which tensors are cut into files: `tp` tensor ranks of `pp` stages, each stage with `chunks` model
    chunks."""

    title: ClassVar[str] = "Layout"

    tp: int = option(1, "tensor ranks", megatron="--target-tensor-parallel-size")
    pp: int = option(1, "pipeline stages", megatron="--target-pipeline-parallel-size")
    chunks: int = option(1, "model chunks per pipeline rank")
    stage_layers: tuple[int, ...] = option((), "blocks of each stage, if they differ")
    """One number for each global stage, as in `stage_layers` of plan/layers.py."""

    @property
    def flags(self) -> dict[str, Json]:
        """The flags of a conversion that request this layout, with their values."""
        return {
            "--target-tensor-parallel-size": self.tp,
            "--target-pipeline-parallel-size": self.pp,
            "--chunks": self.chunks,
            "--stage-layers": self.stage_layers,
        }

    @property
    def section(self) -> dict[str, Json]:
        """This layout in the form in which a checkpoint records it in `config.parallel`."""
        return {**dataclasses.asdict(self), "stage_layers": list(self.stage_layers)}
