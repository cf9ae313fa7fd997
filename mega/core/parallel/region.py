"""How the ranks of a tensor axis share the work of a layer: between them, in what form, and through what.

column linear   enters the region: every rank has all tokens and computes its own outputs
row linear      leaves it: the ranks' parts add up
"""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.parallel.mesh import SINGLE, Axis
from mega.core.parallel.peers import Peers


@dataclass(frozen=True)
class Region:
    """axis: the ranks. sequence: outside of regions each rank has its own tokens only (never on one rank).

    transport: through what ranks exchange blocks of tokens while they multiply; None: by collectives.
    """

    axis: Axis = SINGLE
    sequence: bool = False
    transport: Peers | None = None

    def __post_init__(self) -> None:
        assert not self.sequence or self.axis.size > 1, "one rank has all tokens"

    @property
    def size(self) -> int:
        return self.axis.size


ALONE = Region()
"""The region of a layer that runs alone."""
