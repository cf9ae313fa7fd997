"""The layout that a checkpoint's files are cut for, as options of the verbs that write one. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import VerbSection, option
from mega.core.untrusted import Json


@dataclass(frozen=True)
class Layout(VerbSection):
    """Ranks that files are cut for: `tp` tensor ranks of `pp` stages, each with `chunks` runs of blocks."""

    title: ClassVar[str] = "Layout"

    tp: int = option(1, "tensor ranks", megatron="--target-tensor-parallel-size")
    pp: int = option(1, "pipeline stages", megatron="--target-pipeline-parallel-size")
    chunks: int = option(1, "model chunks per pipeline rank")
    stage_layers: tuple[int, ...] = option((), "blocks of each stage, where they are not equal")
    """Of each global stage, as of `stage_layers` in plan/layers.py."""

    @property
    def flags(self) -> dict[str, Json]:
        """The flags of a conversion that ask for it, with their values."""
        return {
            "--target-tensor-parallel-size": self.tp,
            "--target-pipeline-parallel-size": self.pp,
            "--chunks": self.chunks,
            "--stage-layers": self.stage_layers,
        }

    @property
    def section(self) -> dict[str, Json]:
        """What a checkpoint says of it in `config.parallel`."""
        return {**dataclasses.asdict(self), "stage_layers": list(self.stage_layers)}
