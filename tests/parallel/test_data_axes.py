"""A tensor may have a data axis of its own: reductions, ZeRO, norms, audits and checkpoints against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.optim.adafactor import Adafactor
from mega.core.optim.adam import AdamW
from mega.core.optim.lamb import LAMB
from mega.core.optim.rule import Rule
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.weight import weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import assemble
from mega.core.training.guards.audit import audit
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from tests.support.toy_experts import EXPERTS, HIDDEN, batch, toy_state

ADAM = AdamW(0.9, 0.95, 1e-8)
RULES: dict[str, Rule] = {"adam": ADAM, "lamb": LAMB(ADAM), "adafactor": Adafactor()}
CLIP, LR, DECAY, ROWS, TOKENS = 0.05, 1e-2, 0.1, 8, 16
"""A step is of ROWS microbatches of TOKENS tokens."""

LAYOUTS: list[tuple[int, dict[str, int]]] = [
    *((4, {"dp": 4, "ep": 2, "zero": zero}) for zero in range(4)),
    (4, {"cp": 2, "dp": 2, "ep": 2, "zero": 2}),
    (4, {"tp": 2, "dp": 2, "ep": 2, "zero": 1}),  # experts on one rank each, which tensor ranks copy
    (4, {"dp": 4, "ep": 4, "zero": 3}),
    (2, {"dp": 2, "ep": 1, "zero": 0}),
]


def steps_of(state: TrainState, first: int, last: int) -> list[tuple[float, ...]]:
    """Train from step `first` to `last`: loss, norms of gradients and weights, and share of zeros of each."""
    found = []
    for step in range(first, last + 1):
        rows = range((step - 1) * ROWS + state.mesh.dp.index, step * ROWS, state.mesh.dp.size)
        report = train_step(state, [batch(row, TOKENS) for row in rows], LR, DECAY)  # type: ignore[arg-type]
        assert report.params_norm is not None and report.zeros is not None
        numbers = report.loss, report.grad_norm, report.params_norm, report.zeros
        found.append(tuple(float(number) for number in numbers))
    state.grads.wait_param_gather()
    return found


def train(groups: Groups, rank: int, layout: dict[str, int], rule: str, folder: str) -> Any:
    """Job: two steps, a checkpoint, one step; numbers of each step, and pieces of gradients and weights."""
    axes = {name: size for name, size in layout.items() if name != "zero"}
    mesh = Mesh(rank, groups=groups, **axes)
    state = toy_state(mesh, RULES[rule], zero=layout.get("zero", 0), clip=CLIP)
    names = [{s.shard.tensor.data for w, _, _ in b.offsets for s in w.segments} for b in state.grads.buckets]
    assert all(name == {bucket.data.name} for name, bucket in zip(names, state.grads.buckets, strict=True))
    found = steps_of(state, 1, 2)
    pieces = [*state.gradient_pieces(), *state.weight_pieces(mine=False)]
    audit(state)

    def agree(ok: bool) -> bool:
        bad = torch.tensor(float(not ok))
        all_reduce(bad, mesh.everyone, "max")
        return not bad

    kept = [*state.weight_pieces(mine=True), *state.optimizer_pieces(mine=True)]
    CheckpointStore(Path(folder)).save(2, kept, {}, rank=rank, world=mesh.world, agree=agree)
    pieces = [type(p)(p.key, p.whole, p.start, p.tensor.detach().clone()) for p in pieces]
    return found + steps_of(state, 3, 3), pieces


def resume(groups: Groups, rank: int, layout: dict[str, int], rule: str, folder: str) -> list[tuple[float, ...]]:
    """Job: from the checkpoint to step 3."""
    axes = {name: size for name, size in layout.items() if name != "zero"}
    state = toy_state(Mesh(rank, groups=groups, **axes), RULES[rule], zero=layout.get("zero", 0), clip=CLIP)
    checkpoint = CheckpointStore(Path(folder)).open(2)
    checkpoint.read([*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)])
    state.optimizer.updates = 2
    return steps_of(state, 3, 3)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, as whole tensors."""
    checkpoint = CheckpointStore(folder).open(2)
    shapes = {key: shape for key, (shape, _) in checkpoint.tensors.items()}
    whole = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()}
    checkpoint.read([Piece(key, shape, (0,) * len(shape), whole[key]) for key, shape in shapes.items()])
    return whole


CASES = [(world, layout, "adam") for world, layout in LAYOUTS]
CASES += [(4, {"dp": 4, "ep": 2, "zero": zero}, rule) for rule in ("lamb", "adafactor") for zero in (0, 1)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each rule: what one process trains."""
    places = {rule: tmp_path_factory.mktemp(rule) for rule in RULES}
    return {
        rule: (*train(Groups(), 0, {}, rule, str(place / "one")), stored(place / "one"), place / "one")
        for rule, place in places.items()
    }


def named(case: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in case.items()) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("world", "layout", "rule"), CASES, ids=named)
def test_every_layout_is_one_process(
    pool: Pool, reference: dict[str, Any], tmp_path: Path, world: int, layout: dict[str, int], rule: str
) -> None:
    numbers, pieces, kept, place = reference[rule]
    ranks = pool.run(train, layout, rule, str(tmp_path / "run"), world=world)
    whole = assemble(piece for _, found in ranks for piece in found)
    for name, tensor in assemble(iter(pieces)).items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-10, atol=1e-13, msg=name)
    for found, _ in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers), rtol=1e-10, atol=0)
    # its checkpoint is that of one process, and each is resumed in the other's layout
    theirs = stored(tmp_path / "run")
    assert theirs.keys() == kept.keys() and any("factors" in key for key in kept) == (rule == "adafactor")
    for name, tensor in kept.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-10, atol=1e-13, msg=name)
    again = [
        *pool.run(resume, layout, rule, str(place), world=world),
        resume(Groups(), 0, {}, rule, str(tmp_path / "run")),
    ]
    for found in again:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers[2:]), rtol=1e-10, atol=0)


def test_one_process_is_plain_torch() -> None:
    """Gradients and norm of the first step by autograd, one expert at a time, and how they are clipped."""
    state = toy_state(Mesh(0), ADAM, clip=CLIP)
    leaves = {w.segments[0].shard.name: w.detach().clone().requires_grad_() for w in weights(state.stages[0])}
    total, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        one = batch(row, TOKENS)
        x = F.linear(one.x, leaves["dense.weight"]).tanh() * leaves["dense.scale"]
        for token in range(TOKENS):
            own = slice(token % EXPERTS * HIDDEN, (token % EXPERTS + 1) * HIDDEN)
            y = leaves["experts.weight"][own] @ x[token] + leaves["experts.bias"][own]
            total = total + one.loss_weights[token] * (y - one.target[token]).square().sum()
        weight += one.loss_weights.sum()
    (total / weight).backward()
    (loss, norm, _, _), *_ = steps_of(state, 1, 1)
    grads = {piece.key.removeprefix("grads/"): piece.tensor for piece in state.gradient_pieces()}
    assert grads.keys() == leaves.keys() and loss == pytest.approx(float((total / weight).detach()), rel=1e-12)
    squares = sum(float(leaf.grad.square().sum()) for leaf in leaves.values() if leaf.grad is not None)
    assert norm == pytest.approx(squares**0.5, rel=1e-12) and norm > CLIP
    for name, leaf in leaves.items():  # the step has clipped them where they are
        assert leaf.grad is not None
        torch.testing.assert_close(grads[name], leaf.grad * CLIP / (norm + 1e-6), rtol=1e-10, atol=1e-14)


def drift(groups: Groups, rank: int) -> str:
    """Job: an element of the experts changes on rank 3, whose copy rank 1 has; what the audit says."""
    state = toy_state(Mesh(rank, groups=groups, dp=4, ep=2), ADAM)
    audit(state)
    if rank == 3:
        state.stages[0].experts.weight.data[0, 0] += 1e-12
    try:
        audit(state)
    except FloatingPointError as error:
        return str(error)
    return ""


def test_an_expert_that_drifts_is_named(pool: Pool) -> None:
    said = pool.run(drift, world=4)
    assert len(set(said)) == 1 and "copies have drifted apart: weights/experts.weight: ranks 1 and 3 differ" in said[0]
