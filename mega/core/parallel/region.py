"""A tensor-parallel region: the ranks that share the work of a layer, and their exchange of tokens.

column linear   enters the region: every rank has all tokens and computes its own outputs
row linear      leaves the region: the partial sums of the ranks are added up
"""

from __future__ import annotations

from dataclasses import dataclass

from mega.core.parallel.mesh import SINGLE, Axis
from mega.core.parallel.peers import Peers


@dataclass(frozen=True)
class Region:
    """The ranks of a tensor-parallel region.

    sequence: whether to use sequence parallelism, in which each rank has only its own tokens outside of regions; must
    be False if there is only one rank.
    transport: object that exchanges blocks of tokens while the GEMMs run. If None, collectives run before or after the
    GEMMs.
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
"""The region of a layer that runs on a single rank."""
