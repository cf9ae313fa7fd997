"""--log-params-norm and --log-zeros: of whole logical tensors, in every layout the same."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mega.cli import main
from tests.support.rank_output import printing_to

RUN = (
    "--layers 2 --hidden 16 --heads 2 --seq-length 8 --vocab 101 --no-tied --mock-data --global-batch 4 "
    "--micro-batch 1 --steps 2 --lr 1e-3 --lr-decay constant --eval-iters 0 --save-interval 2 --log-interval 1 "
    "--device cpu --dtype fp64 --log-params-norm --log-zeros"
).split()


def last_row(out: Path, *flags: str) -> dict[str, float]:
    by_ranks = out / "printed"
    with contextlib.redirect_stdout(io.StringIO()) as output, printing_to(by_ranks):
        assert main(["pretrain", *RUN, "--save", str(out), *flags]) == 0
    said = by_ranks.read_text() if flags else output.getvalue()
    assert "| params norm " in said and "| zeros " in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row][-1]


def stored_weights(out: Path) -> dict[str, torch.Tensor]:
    stored = load_file(out / "step-0000002" / "rank-00000.safetensors")
    return {name: tensor for name, tensor in stored.items() if name.startswith("weights/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("alone")
    return out, last_row(out)


def test_as_the_checkpoint_holds(alone: tuple[Path, dict[str, float]]) -> None:
    out, row = alone
    weights = stored_weights(out)
    norm = torch.cat([tensor.flatten() for tensor in weights.values()]).norm()
    assert row["params_norm"] == pytest.approx(float(norm), rel=1e-12)
    # 32 tokens leave at least 69 of 101 rows of the embedding without a gradient.
    assert row["zeros"] > 69 * 16 / sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("layout", ["--nproc 4 --tp 2 --pp 2 --sequence-parallel", "--nproc 2 --zero 1"])
def test_as_on_one_rank(layout: str, alone: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    one, shared = alone[1], last_row(tmp_path, *layout.split())
    assert shared["params_norm"] == pytest.approx(one["params_norm"], rel=1e-12)
    # A key's bias has no gradient but rounding, which is exactly zero here and there.
    biases, elements = 2 * 16, sum(tensor.numel() for tensor in stored_weights(alone[0]).values())
    assert abs(shared["zeros"] - one["zeros"]) * elements < biases + 0.5
