"""Short forms of tests/gpu/serving_proofs.py, which the long ones are: on two gloo ranks, by a small grown model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.device import Device
from mega.core.inference.generation.generate import logits
from mega.core.inference.loading.load import load_model, open_model
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from tests.gpu import serving_proofs as proofs
from tests.support.shared import shared


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> proofs.Files:
    small = shared("stories260K_hf/config.json").parent
    return proofs.prepared(small, tmp_path_factory.mktemp("grown"), "cpu")


def at(groups: Groups, rank: int, tp: int, pp: int, job: str, *args: Any) -> Any:
    return getattr(proofs, job)(Mesh(rank, tp=tp, pp=pp, groups=groups), Device.choose("cpu"), *args)


def test_a_grown_model_says_what_the_small_one_says(files: proofs.Files, tmp_path: Path) -> None:
    small = open_model(files.small)
    shape = {"layers": 7, "hidden": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "ffn": 256, "vocab": 640}
    grown = proofs.Grown(Path(files.small), proofs.replace(small.model, **shape)).write(tmp_path / "large")
    ids = torch.tensor([[1, 403, 407, 261, 378]])
    ours, theirs = logits(load_model(open_model(grown)), ids)[..., :512], logits(load_model(small), ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_request_gets_its_own_text(files: proofs.Files, pool: Pool, tp: int, pp: int) -> None:
    """Next to others that join, leave and are cancelled, by adapters, with tokens guessed by a draft model."""
    for adapters, speculate in ((True, files.small), (False, None))[:tp]:
        found, _ = pool.run(at, tp, pp, "canaries_at", files, 12, adapters, speculate, world=2)
        assert found["equal"] == found["requests"] == 12 and found["ends"]["others cancelled"], found


def test_texts_are_equal_at_all_layouts(files: proofs.Files, pool: Pool) -> None:
    expected = proofs.alone_texts(Mesh.at(0), Device.choose("cpu"), files, (4, 12))
    for tp, pp in ((2, 1), (1, 2)):
        rows, _ = pool.run(at, tp, pp, "texts_at", files, expected, (4, 12), world=2)
        assert all(row["equal"] == row["of"] == 4 for row in rows), rows


def test_draws_with_guesses_have_the_distribution_of_the_model(files: proofs.Files) -> None:
    def here(layout: str, job: Any, *args: Any) -> Any:
        return job(Mesh.at(0), Device.choose("cpu"), *args)

    with mock.patch.object(proofs, "at_layout", here):
        rows = list(proofs.draws("tp1", files, argparse.Namespace(draws=700)))
    assert [row["speculate"] for row in rows] == ["none", "ngram", "draft"]
    assert all(row["ok"] and row["changed"] == 0 for row in rows), rows
    assert all(row["guessed"] > 100 for row in rows[1:]), rows
