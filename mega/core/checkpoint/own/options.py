"""The layout of a checkpoint's files, as options of the commands that write checkpoints. This module does not import
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import VerbSection, option
from mega.core.untrusted import Json


@dataclass(frozen=True)
class Layout(VerbSection):
    """The layout for which tensors are split into files: `tp` tensor ranks and `pp` pipeline ranks, each with `chunks`
    model chunks. Experts can also be distributed over `ep` ranks, but only in Megatron-core checkpoints with one
    file per rank."""

    title: ClassVar[str] = "Layout"

    tp: int = option(1, "tensor ranks", megatron="--target-tensor-parallel-size")
    pp: int = option(1, "pipeline stages", megatron="--target-pipeline-parallel-size")
    chunks: int = option(1, "model chunks per pipeline rank")
    stage_layers: tuple[int, ...] = option((), "number of blocks in each stage, if the stages differ")
    """Number of blocks in each of the pp x chunks stages, as in the argument `explicit` of `stage_layers`
    (plan/layers.py)."""
    ep: int = option(
        1,
        "number of ranks over which experts are split, for --saver mcore-local",
        megatron="--target-expert-parallel-size",
    )

    @property
    def flags(self) -> dict[str, Json]:
        """Flag of a conversion command -> the value that requests this layout."""
        return {
            "--tp": self.tp,
            "--pp": self.pp,
            "--ep": self.ep,
            "--chunks": self.chunks,
            "--stage-layers": self.stage_layers,
        }

    @property
    def section(self) -> dict[str, Json]:
        """This layout, as recorded in a checkpoint's `config.parallel`."""
        recorded = {**dataclasses.asdict(self), "stage_layers": list(self.stage_layers)}
        return {name: value for name, value in recorded.items() if name != "ep"}  # mega's files do not depend on ep
