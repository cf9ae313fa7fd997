"""Groups of ranks, by the golden vectors of Megatron's layouts and for a cluster that no laptop has."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega.core.architecture import inventory
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, updated
from mega.core.parallel import mesh as module
from mega.core.parallel.mesh import ORDER, Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages


def test_worked_examples() -> None:
    assert doctest.testmod(module, globs={**vars(module), "Mesh": Mesh}).failed == 0


def test_groups_of_sixteen() -> None:
    """Tensor 2, data 2, pipeline 4, as Megatron-LM lays them out."""
    mesh = Mesh.at(0, tp=2, dp=2, pp=4)
    assert mesh.slices("tp")[:2] == [(0, 1), (2, 3)]
    assert mesh.slices("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert mesh.slices("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert mesh.slices("tp", "pp") == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
    ends = {Mesh.at(rank, tp=2, dp=2, pp=4).stages((0, 3)).ranks for rank in (0, 1, 2, 3)}
    assert ends == {(0, 12), (1, 13), (2, 14), (3, 15)}


def test_a_rank_between_the_ends_shares_nothing() -> None:
    assert Mesh.at(5, tp=2, dp=2, pp=4).stages((0, 3)).ranks == (5,)
    assert Mesh.at(5, tp=2, dp=2, pp=4).stages((0, 1, 3)).ranks == (1, 5, 13)


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.data())
def test_every_axis_partitions_the_world(tp: int, cp: int, dp: int, pp: int, data: st.DataObject) -> None:
    world = tp * cp * dp * pp
    rank = data.draw(st.integers(0, world - 1))
    names = data.draw(st.lists(st.sampled_from(ORDER), min_size=1, unique=True))
    mesh = Mesh.at(rank, tp=tp, cp=cp, dp=dp, pp=pp)
    parts = mesh.slices(*names)
    assert sorted(one for part in parts for one in part) == list(range(world))
    axis = mesh.axis(*names)
    assert axis.ranks in parts and axis.ranks[axis.index] == rank
    ours = mesh.coordinates()
    for other in axis.ranks:
        theirs = mesh.coordinates(other)
        assert all(theirs[name] == ours[name] for name in ORDER if name not in names)


@pytest.mark.parametrize("pp", [2, 4])
def test_links_are_seen_alike_from_both_ends(pp: int) -> None:
    """Every pair of neighbours has one link for each direction of cargo, in a ring."""
    meshes = [Mesh.at(rank, tp=2, pp=pp) for rank in range(2 * pp)]
    for mesh in meshes:
        for (kind, target), link in mesh.p2p.items():
            ahead = 1 if kind == "F" else -1
            source = (target - ahead) % pp
            expected = {mesh.pp.ranks[source], mesh.pp.ranks[target]}
            assert set(link.ranks) == expected and mesh.rank in expected
            for rank in link.ranks:
                assert meshes[rank].p2p[kind, target].ranks == link.ranks


def test_gpt3_175b_on_128_ranks() -> None:
    """tp 8 x pp 16: the ranks' blocks cover every tensor as often as the inventory requires, on no memory at all."""
    values = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257, "seq_length": 2048, "micro_batch": 1}
    run = resolve(updated(Options(), {**values, "tp": 8, "pp": 16}), 128)
    held: dict[str, int] = {}
    for rank in range(128):
        mesh = Mesh.at(rank, tp=8, pp=16)
        for stage in build_stages(run, mesh, torch.device("meta")):
            for weight in weights(stage):
                for segment in weight.segments:
                    size = torch.Size(segment.shard.size).numel()
                    held[segment.shard.name] = held.get(segment.shard.name, 0) + size
    for tensor in inventory(run.model):
        copies = len(tensor.units) * (1 if tensor.cut() else 8)
        assert held.pop(tensor.name) == copies * tensor.elements, tensor.name
    assert not held
