"""Checkpoints that were written once are readable for ever: one tiny one of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.checkpoint.own.pieces import Box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate
from tests.golden.make import EXPECTED, HERE, digest
from tests.support.foreign_forms import FORMS

KINDS = json.loads(EXPECTED.read_text())


def test_every_kind_that_is_read_has_one() -> None:
    assert set(KINDS) >= set(FORMS)
    for kind in KINDS:
        folder = HERE / kind.replace(" ", "-")
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 100_000


@pytest.mark.parametrize("kind", KINDS)
def test_it_still_gives_its_weights(tmp_path: Path, kind: str) -> None:
    row = KINDS[kind]
    assert main([row["verb"], "--load-dir", str(HERE / row["load"]), "--save-dir", str(tmp_path / "run")]) == 0
    source = OwnSource(locate(tmp_path / "run"))
    read = {
        name.removeprefix("weights/"): source.read(name, Box((0,) * len(shape), shape))
        for name, (shape, _) in source.tensors.items()
    }
    assert digest(read) == row["weights"]
