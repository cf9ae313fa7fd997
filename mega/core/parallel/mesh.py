"""One grid of ranks; every group of ranks is a slice of it.

Axes from fastest to slowest: tp, cp, dp, pp. With tp 2, dp 2, pp 2 the ranks are

            tp 0  tp 1
    pp 0 dp 0   0     1
         dp 1   2     3
    pp 1 dp 0   4     5
         dp 1   6     7

Experts see the same ranks as another grid: etp, ep, edp, pp. The ranks of a stage are numbered in order, and etp, the
tensor ranks of each expert, runs fastest among them. It is tp unless another size is given: with dp 4 and ep 2, data
ranks 0 and 2 hold copies of the same experts, 1 and 3 of the others.

An axis of size 1 has no process group and its collectives are the identity, so one CPU and a thousand GPUs run
the same code. `Mesh.at` needs no processes at all: a layout can be built and checked on a laptop. There is no
global mesh; what needs an axis is given it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod

import torch.distributed as dist

from mega.core.architecture.tensor import TENSOR_AXES

ORDER = ("tp", "cp", "dp", "pp")
EXPERT_ORDER = ("etp", "ep", "edp", "pp")

DATA_AXES = {"dp": (("cp", "dp"), ()), "edp": (("edp",), ("ep",))}
"""Name of a data axis, as tensors have it -> (the axes along which gradients of such a tensor add up, the other axes of
the same ranks, over which such tensors are shared out). Its tensor ranks are those of TENSOR_AXES."""


@dataclass(frozen=True)
class Axis:
    """The ranks along one direction of the mesh, seen from one of them.

    ranks: global ranks in order. index: our place among them. group: None where the axis has one rank, or
    where the mesh was built without processes.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.size - 1


SINGLE = Axis("single", (0,), 0)
"""An axis of one rank, for a layer that runs alone."""


@dataclass(frozen=True)
class DataAxis:
    """The ranks that hold copies of a weight and see other tokens, and the groups that follow from them."""

    name: str
    """As tensors have it."""
    tensor: Axis
    """Ranks that cut a weight, or hold copies of one that they see the same tokens or parts of."""
    axis: Axis
    """Gradients of one weight add up over these ranks; ZeRO gives each of them a span."""
    with_tp: Axis
    """The same along with the tensor ranks: all copies of a weight that tensor ranks hold whole."""
    parts: Axis
    """Ranks of one stage that hold a whole logical tensor between them."""
    model: Axis
    """Ranks that hold all such tensors of the model between them, each once."""


@dataclass
class Groups:
    """The process groups of one process, made once per set of ranks and purpose and kept.

    Every rank of the world makes every group, its own or not, in the same order; a mesh does, since its order follows
    from its sizes and the model's inventory alone. (torch can make a group among its members only, but names it by how
    many groups each member has, which differs between first, middle and last stages.)
    timeout: of every exchange; torch gives a new group a default of its own, not that of the first.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict)

    def make(self, parts: Sequence[tuple[int, ...]], purpose: str = "", backend: str | None = None) -> None:
        """One group for each of `parts` that has several ranks and no group yet; on our backend or another."""
        for ranks in parts:
            if len(ranks) > 1 and (ranks, purpose) not in self.made:
                self.made[ranks, purpose] = dist.new_group(
                    list(ranks), self.timeout, backend or self.backend, group_desc=_described(ranks, purpose)
                )

    def get(self, ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup | None:
        return self.made.get((ranks, purpose))


def _described(ranks: tuple[int, ...], purpose: str) -> str:
    """A group in the flight recorder, and in messages of the backend.

    >>> _described((0, 2), ""), _described(tuple(range(64)), "weights")
    ('ranks 0,2', '64 ranks from 0 to 63 (weights)')
    """
    if len(ranks) > 8:
        named = f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    else:
        named = f"ranks {','.join(map(str, ranks))}"
    return f"{named} ({purpose})" if purpose else named


class Mesh:
    """The grid as seen from one rank: sizes, our coordinates, and any axis or product of axes."""

    def __init__(
        self,
        rank: int,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        groups: Groups | None = None,
    ):
        etp = tp if etp is None else etp
        assert tp * cp * dp % (etp * ep) == 0, (tp, cp, dp, etp, ep)
        self.sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        self._expert_sizes = {"etp": etp, "ep": ep, "edp": tp * cp * dp // (etp * ep), "pp": pp}
        self.rank = rank
        self.world = prod(self.sizes.values())
        assert 0 <= rank < self.world, (rank, self.sizes)
        self._groups = groups
        self.tp = self.axis("tp")
        self.cp = self.axis("cp")
        self.dp = self.axis("dp")
        self.pp = self.axis("pp")
        self.everyone = self.axis(*ORDER)
        self.tokens = self.axis("cp", "dp")
        """Ranks that see other tokens of the batch: every sample and every part of it."""
        self.model = self.axis("tp", "pp")
        """Ranks that hold one replica of the model between them."""
        self.stage = self.axis("tp", "cp", "dp")
        """Ranks that hold the same pipeline stage, or a part of it."""
        self.loss_group = self.axis("cp", "dp", "pp")
        """Ranks whose losses add up to the global batch's (stages where a term does not arise hold zeros)."""
        self.ep = self.axis("ep")
        self.etp = self.axis("etp")
        self.data_axes = {name: self._data_axis(name) for name in DATA_AXES}
        self.p2p = self._p2p()

    @classmethod
    def at(cls, rank: int, **sizes: int) -> Mesh:
        """The mesh as `rank` would see it, without processes.

        >>> Mesh.at(5, tp=2, dp=2, pp=2).pp.ranks
        (1, 5)
        """
        return cls(rank, **sizes)  # type: ignore[arg-type]

    def own_group(self, purpose: str) -> Axis:
        """Everyone on the host, with communicators of its own: for a thread that must not meet the training's.

        All ranks must call this together.
        """
        everyone = self.everyone.ranks
        if self._groups is None:
            return Axis(purpose, everyone, self.everyone.index)
        self._groups.make([everyone], purpose, "gloo")
        return Axis(purpose, everyone, self.everyone.index, self._groups.get(everyone, purpose))

    def coordinates(self, rank: int | None = None, *, experts: bool = False) -> dict[str, int]:
        """Axis -> index of a rank (ours by default). experts: on their grid."""
        rest, found = self.rank if rank is None else rank, {}
        for name, size in (self._expert_sizes if experts else self.sizes).items():
            rest, found[name] = divmod(rest, size)
        return found

    def axis(self, *names: str) -> Axis:
        """The ranks that differ from us in these axes of one grid only; the first of its order runs fastest."""
        return self._axis("x".join(names), self.slices(*names))

    def own_data_axis(self, data: str) -> Axis:
        """The ranks of a data axis on a communicator of their own, so that nothing else queues after its transfers."""
        names, _ = DATA_AXES[data]
        return self._axis("x".join(names), self.slices(*names), "weights")

    def _data_axis(self, data: str) -> DataAxis:
        (names, cut), tensor = DATA_AXES[data], TENSOR_AXES[data]
        return DataAxis(
            data,
            self.axis(tensor),
            self.axis(*names),
            self.axis(tensor, *names),
            self.axis(tensor, *cut),
            self.axis(tensor, *cut, "pp"),
        )

    def stages(self, held: Sequence[int]) -> Axis:
        """The ranks of our pipeline at these stages, if ours is among them, else we alone. All ranks call it alike.

        >>> Mesh.at(5, tp=2, pp=4).stages((0, 2, 3)).ranks, Mesh.at(3, tp=2, pp=4).stages((0, 3)).ranks
        ((1, 5, 7), (3,))
        """
        parts = [tuple(ranks[stage] for stage in held) for ranks in self.slices("pp")] if len(held) > 1 else []
        return self._axis("stages", parts, "stages")

    def slices(self, *names: str) -> list[tuple[int, ...]]:
        """The whole world cut into runs of ranks that differ in these axes only.

        >>> Mesh.at(0, tp=2, dp=2).slices("dp")
        [(0, 2), (1, 3)]
        >>> Mesh.at(0, dp=4, ep=2).slices("ep"), Mesh.at(0, dp=4, ep=2).slices("edp")
        ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
        """
        experts = not set(names) <= set(ORDER)
        assert set(names) <= set(EXPERT_ORDER if experts else ORDER), names
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank, experts=experts)
            fixed = tuple(index for name, index in at.items() if name not in names)
            parts.setdefault(fixed, []).append(rank)
        return [tuple(part) for part in parts.values()]

    def _axis(self, name: str, parts: list[tuple[int, ...]], purpose: str = "") -> Axis:
        """The one of `parts` that we are in, or we alone."""
        if self._groups is not None:
            self._groups.make(parts, purpose)
        ranks = next((part for part in parts if self.rank in part), (self.rank,))
        group = self._groups.get(ranks, purpose) if self._groups is not None else None
        return Axis(name, ranks, ranks.index(self.rank), group)

    def _p2p(self) -> dict[tuple[str, int], Axis]:
        """(kind, receiving stage) -> the pair of ranks, for the links that touch us.

        Activations ("F") go from each stage to the next and gradients ("B") to the one before, around a ring.
        Every link is a communicator of its own: a late message on one never blocks another.
        """
        pipelines, stages, touching = self.slices("pp"), self.pp.size, {}
        if stages == 1:
            return {}
        for kind, ahead in (("F", 1), ("B", -1)):
            for source in range(stages):
                target = (source + ahead) % stages
                pairs: list[tuple[int, ...]] = [_ascending(ranks[source], ranks[target]) for ranks in pipelines]
                link = self._axis(f"{kind}{source}", pairs, f"{kind} {source} to {target}")
                if self.pp.index in (source, target):
                    touching[kind, target] = link
        return touching


def _ascending(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
