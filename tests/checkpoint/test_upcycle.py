"""A dense checkpoint as the beginning of a mixture."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert, upcycle
from mega.core.checkpoint.forms.upcycle import Upcycling
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Piece, whole_box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.sections import ModelConfig
from mega.core.inference.loading.load import load_model, open_model
from tests.support import hub_families as hub
from tests.support.foreign_forms import LLAMA, weights_of

SQUARED = replace(LLAMA, family="gpt", activation="relu2", norm="layernorm")


def dense(folder: Path, model: ModelConfig, dtype: torch.dtype = torch.float64) -> Path:
    pieces = [
        Piece(f"weights/{name}", tuple(t.shape), (0,) * t.dim(), t.to(dtype)) for name, t in weights_of(model).items()
    ]
    CheckpointStore(folder).save(7, pieces, {"config": {"model": asdict(model)}, "progress": {"step": 7}})
    return folder


def logits(folder: Path) -> torch.Tensor:
    opened = open_model(folder)
    with torch.no_grad():
        found: torch.Tensor = load_model(opened, dtype=torch.float64)(hub.batch_of(12, vocab=56), outputs=True).outputs
    return found


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (LLAMA, Upcycling(4, 2)),
        (SQUARED, Upcycling(8, 2, granularity=2)),
        (SQUARED, Upcycling(12, 3, granularity=3)),
        (replace(SQUARED, bias=True), Upcycling(8, 2, granularity=2)),
    ],
    ids=["llama-g1", "relu2-g2", "relu2-g3", "relu2-bias"],
)
def test_a_mixture_begins_as_the_dense_model(tmp_path: Path, model: ModelConfig, how: Upcycling) -> None:
    """Whichever experts are chosen, of the same rows of the router; with a square the scale is exact."""
    upcycle(dense(tmp_path / "dense", model), tmp_path / "mixture", how, Layout(2, 1))
    found = open_model(tmp_path / "mixture")
    assert (found.model.experts, found.model.experts_chosen, found.model.expert_ffn) == (
        how.experts,
        how.chosen,
        24 // how.granularity,
    )
    torch.testing.assert_close(logits(tmp_path / "mixture"), logits(tmp_path / "dense"), rtol=0, atol=1e-12)


def test_experts_hold_pieces_and_routers_rows(tmp_path: Path) -> None:
    """Gate, up and down are cut alike and multiplied by the third root of the granularity; nothing else changes."""
    upcycle(dense(tmp_path / "dense", LLAMA, torch.bfloat16), tmp_path / "mixture", Upcycling(6, 3, granularity=3))
    source, before = OwnSource(locate(tmp_path / "mixture")), weights_of(LLAMA)

    def read(name: str) -> torch.Tensor:
        return source.read(f"weights/{name}", whole_box(source.tensors[f"weights/{name}"][0]))

    layer = "model.layers.1.mlp."
    for number in range(6):
        rows = slice(number % 3 * 8, number % 3 * 8 + 8)
        for which, part in (
            ("gate", before[f"{layer}gate_proj.weight"][rows]),
            ("up", before[f"{layer}up_proj.weight"][rows]),
            ("down", before[f"{layer}down_proj.weight"][:, rows]),
        ):
            expected = (part.bfloat16().float() * 3 ** (1 / 3)).bfloat16()
            assert torch.equal(read(f"{layer}experts.{number}.{which}_proj.weight"), expected)
    router = read(f"{layer}gate.weight")
    assert torch.equal(router[:3], router[:1].expand(3, -1)) and torch.equal(router[3:], router[3:4].expand(3, -1))
    assert not torch.equal(router[0], router[3])
    assert torch.equal(read("model.norm.weight"), before["model.norm.weight"].bfloat16())
    assert locate(tmp_path / "mixture").step == 0


def test_the_verb_takes_weights_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(dense(tmp_path / "dense", LLAMA, torch.float32), tmp_path / "theirs", "torch_dist")
    line = ["reshard", "--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "mixture")]
    assert main([*line, "--upcycle", "4"]) == 0
    assert "--finetune" in capsys.readouterr().out
    assert open_model(tmp_path / "mixture").model.experts == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--upcycle", "1"], "--upcycle 1: must be at least 2"),
        (["--upcycle", "4", "--upcycle-granularity", "4"], "--upcycle-chosen 2: must be a multiple of"),
        (["--upcycle", "4", "--upcycle-chosen", "5"], "--upcycle-chosen 5: must be from 2 to --upcycle 4"),
        (["--upcycle", "4", "--upcycle-granularity", "3"], "--upcycle-granularity 3: must divide --upcycle 4"),
        (["--upcycle", "5", "--upcycle-granularity", "5"], "--upcycle-granularity 5: must divide the model's ffn 24"),
        (["--upcycle", "4", "--saver", "torch_dist"], "--saver torch_dist: excludes --upcycle"),
        (["--upcycle-chosen", "3"], "--upcycle"),
        (["--upcycle", "4", "mtp"], "--upcycle 4: mtp_layers 1: must not predict tokens after the next one"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    model = replace(LLAMA, mtp_layers=1) if "mtp" in words else LLAMA
    dense(tmp_path / "dense", model, torch.float32)
    line = ["reshard", "--load-dir", str(tmp_path / "dense"), "--save-dir", str(tmp_path / "mixture")]
    assert main([*line, *(word for word in words if word != "mtp")]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "mixture").exists()
