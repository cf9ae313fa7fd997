"""The grid of ranks. Every group of ranks is a slice of the grid.

Axes, from the fastest-varying to the slowest-varying: tp, cp, dp, pp. With tp 2, dp 2, pp 2 the ranks are

            tp 0  tp 1
    pp 0 dp 0   0     1
         dp 1   2     3
    pp 1 dp 0   4     5
         dp 1   6     7

For experts, the same ranks form a different grid, with the axes etp, ep, edp, pp. The ranks of a stage are numbered in
order, and etp (the tensor ranks of each expert) varies fastest. The size of etp defaults to tp. Example: with dp 4 and
ep 2, data ranks 0 and 2 hold copies of the same experts, and data ranks 1 and 3 hold copies of the other experts.

An axis of size 1 has no process group and its collectives are the identity, so one CPU and a thousand GPUs run the same
code. `Mesh.at` needs no processes, so a layout can be built and checked on a laptop. The mesh is not global; code that
needs an axis gets the axis as an argument.
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
"""Data axis of a tensor -> (axes over which its gradient is summed, axes over which different ranks hold different
tensors with this data axis). TENSOR_AXES contains the tensor axis that belongs to each data axis."""


@dataclass(frozen=True)
class Axis:
    """The ranks along one direction of the mesh, as seen by one of these ranks."""

    name: str
    ranks: tuple[int, ...]  # global ranks in order
    index: int  # position of this rank in `ranks`
    group: dist.ProcessGroup | None = None  # None on an axis of one rank, or if the mesh was built without processes

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
"""An axis of one rank, for a layer that runs on a single rank."""


@dataclass(frozen=True)
class DataAxis:
    """The ranks that hold copies of a weight and process different tokens, and the groups derived from these ranks."""

    name: str
    """The name that tensors use: "dp" or "edp"."""
    tensor: Axis
    """The tensor ranks, which hold shards or copies of the weight, and process the same tokens or shards of the same
    tokens."""
    axis: Axis
    """Ranks over which the gradient of a weight is summed; ZeRO assigns a span to each of these ranks."""
    with_tp: Axis
    """Product of `axis` and `tensor`: all ranks with a copy of a weight that is replicated over tensor ranks."""
    parts: Axis
    """Ranks of one pipeline stage that together hold a whole logical tensor."""
    model: Axis
    """Ranks that together hold exactly one copy of each of the model's tensors that have this data axis."""


@dataclass
class Groups:
    """The process groups of one process, created once for each set of ranks and purpose.

    Every rank of the world must create every group, even groups without this rank, in the same order. A mesh creates
    groups in an order that depends only on its sizes and the model's inventory. (torch can also create a group among
    only its members. The group's name would then depend on each member's number of groups, which differs between the
    first, middle and last pipeline stages.)
    """

    backend: str | None = None
    timeout: timedelta | None = None
    """Timeout of every collective. It is passed to each group, because a new group would otherwise have torch's default
    timeout."""
    gloo: str = "gloo"
    """The name of the backend of gloo groups in torch."""
    groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict)

    def create(self, parts: Sequence[tuple[int, ...]], purpose: str = "", backend: str | None = None) -> None:
        """Create a group for each set of several ranks in `parts` that has no group yet. backend: None for the default
        backend."""
        for ranks in parts:
            if len(ranks) > 1 and (ranks, purpose) not in self.groups:
                name = backend or self.backend
                self.groups[ranks, purpose] = dist.new_group(
                    list(ranks),
                    self.timeout,
                    self.gloo if name == "gloo" else name,
                    group_desc=_group_description(ranks, purpose),
                )

    def get(self, ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup | None:
        return self.groups.get((ranks, purpose))


def _group_description(ranks: tuple[int, ...], purpose: str) -> str:
    """Return the description of a group for the flight recorder and for messages of the backend.

    >>> _group_description((0, 2), ""), _group_description(tuple(range(64)), "weights")
    ('ranks 0,2', '64 ranks from 0 to 63 (weights)')
    """
    if len(ranks) > 8:
        text = f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    else:
        text = f"ranks {','.join(map(str, ranks))}"
    return f"{text} ({purpose})" if purpose else text


class Mesh:
    """The grid as seen by one rank, with the grid's sizes, the rank's coordinates, and any axis or product of axes."""

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
        # All axes are created here, even unused ones, because all ranks must create all groups in the same order.
        self.tp = self.axis("tp")
        self.cp = self.axis("cp")
        self.dp = self.axis("dp")
        self.pp = self.axis("pp")
        self.everyone = self.axis(*ORDER)
        self.tokens = self.axis("cp", "dp")
        """Ranks with different tokens of the batch, that is, different samples or different columns of a sample."""
        self.model = self.axis("tp", "pp")
        """Ranks that together hold one replica of the model."""
        self.stage = self.axis("tp", "cp", "dp")
        """Ranks that hold shards or copies of this rank's pipeline stage."""
        self.loss_group = self.axis("cp", "dp", "pp")
        """Ranks whose losses sum to the loss of the global batch (stages that do not compute a term contribute
        zeros)."""
        self.ep = self.axis("ep")
        self.etp = self.axis("etp")
        self.data_axes = {name: self._data_axis(name) for name in DATA_AXES}
        self.p2p = self._p2p()

    @classmethod
    def at(cls, rank: int, **sizes: int) -> Mesh:
        """Return the mesh as seen by `rank`, without processes.

        >>> Mesh.at(5, tp=2, dp=2, pp=2).pp.ranks
        (1, 5)
        """
        return cls(rank, **sizes)  # type: ignore[arg-type]

    def own_group(self, purpose: str) -> Axis:
        """Return an axis of all ranks with a separate gloo group, for a thread whose collectives must not mix with
        those of training.

        All ranks must call this together.
        """
        everyone = self.everyone.ranks
        if self._groups is None:
            return Axis(purpose, everyone, self.everyone.index)
        self._groups.create([everyone], purpose, "gloo")
        return Axis(purpose, everyone, self.everyone.index, self._groups.get(everyone, purpose))

    def coordinates(self, rank: int | None = None, *, experts: bool = False) -> dict[str, int]:
        """Return a map from the name of each axis to the index of `rank` (default: this rank) on it. experts: use the
        grid of experts."""
        rest, coordinates = self.rank if rank is None else rank, {}
        for name, size in (self._expert_sizes if experts else self.sizes).items():
            rest, coordinates[name] = divmod(rest, size)
        return coordinates

    def axis(self, *names: str) -> Axis:
        """Return the ranks that differ from this rank only in the axes `names` of one grid. The first axis of ORDER
        varies fastest."""
        return self._axis("x".join(names), self.slices(*names))

    def own_data_axis(self, data: str) -> Axis:
        """Return a data axis on a separate communicator, so that other collectives do not wait for its transfers."""
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

    def stages(self, numbers: Sequence[int]) -> Axis:
        """Return the ranks of the pipeline stages `numbers` in this rank's pipeline if this rank's stage is one of
        them, otherwise this rank alone.

        All ranks must call this with the same arguments.

        >>> Mesh.at(5, tp=2, pp=4).stages((0, 2, 3)).ranks, Mesh.at(3, tp=2, pp=4).stages((0, 3)).ranks
        ((1, 5, 7), (3,))
        """
        parts = [tuple(ranks[stage] for stage in numbers) for ranks in self.slices("pp")] if len(numbers) > 1 else []
        return self._axis("stages", parts, "stages")

    def slices(self, *names: str) -> list[tuple[int, ...]]:
        """Return all ranks, grouped so that the ranks of a group differ only in the axes `names`.

        >>> Mesh.at(0, tp=2, dp=2).slices("dp")
        [(0, 2), (1, 3)]
        >>> Mesh.at(0, dp=4, ep=2).slices("ep"), Mesh.at(0, dp=4, ep=2).slices("edp")
        ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
        """
        experts = not set(names) <= set(ORDER)
        assert set(names) <= set(EXPERT_ORDER if experts else ORDER), names
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            coordinates = self.coordinates(rank, experts=experts)
            fixed = tuple(index for name, index in coordinates.items() if name not in names)
            parts.setdefault(fixed, []).append(rank)
        return [tuple(part) for part in parts.values()]

    def _axis(self, name: str, parts: list[tuple[int, ...]], purpose: str = "") -> Axis:
        """Return the axis of the set in `parts` that contains this rank, or an axis of this rank alone if no set
        does."""
        if self._groups is not None:
            self._groups.create(parts, purpose)
        ranks = next((part for part in parts if self.rank in part), (self.rank,))
        group = self._groups.get(ranks, purpose) if self._groups is not None else None
        return Axis(name, ranks, ranks.index(self.rank), group)

    def _p2p(self) -> dict[tuple[str, int], Axis]:
        """Return a map (kind, receiving stage) -> the link's pair of ranks, for each link of this rank's pipeline
        stage.

        Activations ("F") go from each stage to the next and gradients ("B") to the previous stage, around a ring.
        Every link has its own communicator, so that a late message on one link never blocks another.
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
