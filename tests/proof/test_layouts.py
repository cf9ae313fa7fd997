"""`mega parity`: names of layouts, the list that is proven, and what ends with exit 1 or a clear line."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from mega.cli import main
from mega.core.proof import layouts as module
from mega.core.proof import parity, rows
from mega.core.proof.layouts import (
    MODELS,
    SHORT,
    TIES,
    ParityLayout,
    every_case,
    every_layout,
    layouts_of,
)
from mega.core.proof.options import ParityOptions


def test_worked_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_names_read_back() -> None:
    for layout in [
        *every_layout(),
        *SHORT,
        *TIES,
        ParityLayout(),
        ParityLayout(pp=2, chunks=2, zero=1),
        ParityLayout(cp=2, ring=True),
    ]:
        assert ParityLayout.parse(layout.name) == layout


def test_the_list_is_complete() -> None:
    """At least 80 layouts: tp, pp in {1, 2, 4} x dp in {1, 2}; cp with each axis; and each word of a name."""
    listed = every_layout()
    assert len(listed) == len(set(listed)) == len({one.name for one in listed}) >= 80
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                if 1 < tp * pp * dp <= 8:
                    assert (
                        ParityLayout(tp=tp, pp=pp, dp=dp) in listed
                        and ParityLayout(tp=tp, pp=pp, dp=dp, sp=tp > 1) in listed
                    )
                    assert ParityLayout(tp=tp, pp=pp, dp=dp, zero=int(dp > 1)) in listed
    across = [one for one in listed if one.cp > 1]
    assert {one.ring for one in across} == {True, False} and {one.cp for one in across} == {2, 4}
    assert all(any(getattr(one, axis) > 1 for one in across) for axis in ("tp", "pp", "dp"))
    for word in ("gpipe", "zb", "uneven", "selective", "full", "block", "share", "offload"):
        assert any(getattr(one, word) for one in listed), word
    assert {one.rule for one in listed} == {"adam", "sgd", "lamb", "adafactor", "muon"}
    assert {one.zero for one in listed} == {0, 1, 2, 3} and {one.chunks for one in listed} == {1, 2, 3}
    assert {one.dp for one in listed if one.mbs == 1} >= {4, 8} and {one.mbs for one in listed} == {1, 2, 4, 8}


def test_an_encoders_and_a_decoders_layouts() -> None:
    """No context axis; a split at each place of four stages; else some stage holds both sides, chunks included."""
    listed = layouts_of("t5")
    assert len(listed) == len(set(listed)) >= 40 and {one.cp for one in listed} == {1}
    assert {one.split for one in listed if one.pp == 4} == {0, 1, 2, 3}
    assert {one.zero for one in listed} == {0, 1, 2, 3} and any(one.zb and one.split for one in listed)


def test_layouts_of_a_model_that_reads_neighbours() -> None:
    listed = layouts_of("gpt-retriever")
    assert len(listed) == len(set(listed)) >= 40 and {one.cp for one in listed} == {1}


def test_every_case_can_be_run() -> None:
    """Each family in each layout, tied and untied ones where stages share an embedding."""
    cases = list(every_case())
    assert {model for model, _ in cases} == set(MODELS)
    for model, layout in cases:
        run = layout.run(model, "fp64")
        untied = ("llama", "gpt-untied", "llama-experts", "llama-experts-dropping", "llama-retriever")
        assert run.model.tied == (model not in untied)
        assert (run.batch.micro_batch, run.model.blocks) == (layout.mbs, layout.blocks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo", "--layouts foo: not a layout"),
        ("tp2,,pp2", "--layouts : not a layout"),
        ("tp4pp4", "--layouts tp4pp4: 16 ranks (valid: 1 to 8"),
        ("tp3", "--layouts tp3: --heads 8: must be divisible by --tp 3"),
        ("pp3", "--layouts pp3: --layers 4: must be divisible by --pp 3"),
        ("dp3", "--layouts dp3: --global-batch 8"),
        ("tp0", "--layouts tp0: not a layout"),
        ("tp8", "--layouts tp8: --kv-heads 4: must be divisible by --tp 8"),
    ],
)
def test_bad_layouts(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--layouts", text]) == 2
    assert message in capsys.readouterr().err


def test_one_layout_equals_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb itself, with the whole vocabulary; in the third step, moments count."""
    monkeypatch.setattr(rows, "STEPS", (1, 3))
    assert main(["parity", "--layouts", "tp2sp", "--family", "gpt", "--json", str(tmp_path / "rows")]) == 0
    (line,) = (tmp_path / "rows").read_text().splitlines()
    row = json.loads(line)
    assert row["fine"] and row["layout"] == "tp2sp" and row["loss"] < 1e-12
    assert 0 < max(row["gradients"]) < 1e-10


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every layout is found equal."""
    same = [parity.StepDifference(step, 0.0, 0.0, 0.0, "grads/model.norm.weight") for step in module.STEPS]
    monkeypatch.setattr(parity, "snapshots", lambda *_: None)
    monkeypatch.setattr(parity, "compare", lambda *_: same)
    return monkeypatch


def test_the_table(without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity"]) == 0
    printed = capsys.readouterr().out
    assert "16 of 16 layouts are within the bounds" in printed and "tp2pp2dp2sp-zero1" in printed
    assert main(["parity", "--all", "--dtype", "fp32"]) == 0
    count = sum(len(layouts_of(model)) for model in MODELS)
    assert count > 2 * len(every_layout()) + 2 * len(TIES) + 40
    assert f"{count} of {count} layouts are within the bounds" in capsys.readouterr().out
    assert main(["parity", "--all", "--layouts", "tp2"]) == 2


def test_where_ranks_share_experts_a_model_has_some(
    without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (models, _) = get_args(get_type_hints(ParityOptions)["family"])
    assert set(get_args(models)) == set(MODELS)
    assert main(["parity", "--layouts", "dp2-ep2-a2a"]) == 0
    printed = capsys.readouterr().out
    assert "gpt-experts" in printed and "llama-experts" in printed and "2 of 2 layouts" in printed
    assert main(["parity", "--layouts", "dp2-ep2", "--family", "llama-experts-dropping"]) == 0
    assert "1 of 1 layouts" in capsys.readouterr().out


def test_a_list_goes_on_where_it_stopped(
    without_ranks: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of this commit are not run again, but count; those of another commit or dtype are not ours."""
    kept = tmp_path / "rows.jsonl"
    asked = ["parity", "--layouts", "tp2,pp2", "--family", "gpt", "--json", str(kept)]
    kept.write_text(json.dumps(vars(rows.Row("gpt", "tp2", "fp64", fine=False, commit="other"))) + "\n")
    assert main(asked) == 0
    known = rows.read_rows(str(kept), rows.code())
    assert [row.layout for row in known] == ["tp2", "pp2"] and all(row.date for row in known)
    without_ranks.setattr(parity, "snapshots", lambda *_: pytest.fail("nothing is due"))
    assert main(asked) == 0 and "2 of 2 layouts" in capsys.readouterr().out
    rows.append(str(kept), rows.Row("gpt", "dp2", "fp64", fine=False, problem="no numbers"), rows.code())
    assert main(["parity", "--layouts", "dp2", "--family", "gpt", "--json", str(kept)]) == 1
    assert len(kept.read_text().splitlines()) == 4


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("tp2 is fine\n")
    assert main(["parity", "--json", str(tmp_path / "notes")]) == 2
    assert "is not a file written by mega parity" in capsys.readouterr().err


def test_a_file_that_cannot_be_is_refused_before_the_work(
    without_ranks: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_ranks.setattr(parity, "snapshots", lambda *_: pytest.fail("a layout was trained"))
    lost = tmp_path / "none" / "rows"
    (tmp_path / "link").symlink_to(lost)
    for path in (lost, tmp_path / "link"):
        assert main(["parity", "--layouts", "tp2", "--json", str(path)]) == 2
        assert f"--json {path}: directory {tmp_path / 'none'} does not exist" in capsys.readouterr().err


def test_beyond_the_bounds(without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    far = [
        parity.StepDifference(step, 0.0, 2e-10 * step, 2.0 * step, "grads/model.norm.weight") for step in module.STEPS
    ]
    without_ranks.setattr(parity, "compare", lambda *_: far)
    assert main(["parity", "--layouts", "tp2"]) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL" in printed and "model.norm.weight" in printed and "0 of 2" in printed


def test_a_layout_that_fails_is_a_row(without_ranks: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others are still proven."""

    def snapshots(pool: Any, run: Any, world: int, steps: Any) -> None:
        if world == 2:
            raise RuntimeError("rank 1 of 2: trace\nmodel.norm.weight: replicas differ")

    without_ranks.setattr(parity, "snapshots", snapshots)
    assert main(["parity", "--layouts", "tp2,tp4", "--family", "gpt", "--json", str(tmp_path / "rows")]) == 1
    first, second = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert first["problem"] == "model.norm.weight: replicas differ" and not first["fine"]
    assert second["fine"]


def test_bounds_of_the_steps() -> None:
    """A share of 1 of what is allowed is the last that is fine; NaN never is."""

    def fine(dtype: str, step: int, gradient: float, loss: float = 0.0) -> bool:
        one = torch.ones(1, dtype=torch.float64)
        error, share = parity.Measure(one, None, parity.gradient_bound(dtype, step), 0.0)(one + gradient)
        return parity.within(dtype, parity.StepDifference(step, loss, error, share, ""))

    assert fine("fp64", 1, 0.9e-10) and not fine("fp64", 10, 1.1e-10)
    assert fine("fp32", 10, 1.9e-4) and not fine("fp32", 1, 2e-4)
    assert not fine("fp64", 1, 0.0, 1.1e-12)
    assert not fine("fp64", 1, float("nan")) and not fine("fp64", 1, 0.0, float("nan"))


def test_where_the_reference_is_rounding_fp64_judges() -> None:
    """Zero in theory: four times the reference's own noise is fine, more is not. Accurate: nothing is let pass."""
    noise, zero = torch.tensor([3e-8, -1e-8]), torch.zeros(2, dtype=torch.float64)
    measure = parity.Measure(noise, zero, 1e-5, 1e-6)
    assert measure(torch.tensor([-1.19e-7, 0.0]))[1] < 1 < measure(torch.tensor([-1.21e-7, 0.0]))[1]
    assert measure(torch.tensor([0.0]), start=(1,))[1] == 0.0
    accurate = parity.Measure(torch.ones(2), torch.ones(2, dtype=torch.float64) + 1e-7, 1e-5, 1e-6)
    assert accurate(torch.ones(2) + 2e-5)[1] > 1
    assert accurate(torch.tensor([1.0, float("nan")]))[1] != 0.0
