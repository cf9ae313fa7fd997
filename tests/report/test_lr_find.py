"""The learning-rate finder: a sweep's curve read, a rate suggested, a picture drawn; what cannot be swept."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree
from pathlib import Path

import pytest

from mega.cli import main
from mega.commands import finetune, lr_find
from mega.core.config.run import Options, updated
from mega.core.config.sections import CheckpointConfig
from mega.core.report.lr_find import Point, draw, read, smoothed, suggest, sweep

RUN = (
    "--layers 1 --hidden 32 --heads 2 --vocab 31 --seq-length 16 --global-batch 4 --micro-batch 4 --mock-data "
    "--device cpu --hidden-dropout 0 --attention-dropout 0 --clip-grad 0"
).split()


def test_the_steepest_fall_is_suggested() -> None:
    """A curve that falls fastest at 1e-3, is lowest near 1e-2 and explodes after that."""
    rates = [10 ** (-6 + 6 * step / 200) for step in range(201)]
    losses = [5 - 2 / (1 + math.exp(-3 * (math.log10(lr) + 3))) + max(0, 40 * (lr - 0.02)) for lr in rates]
    points = smoothed(list(zip(rates, losses, strict=True)))
    found = suggest(points)
    assert len(points) < 201, "the sweep ends where the loss has risen"
    assert 5e-4 < found.rate < 3e-3 < found.least < 5e-2
    with pytest.raises(ValueError, match="does not fall"):
        suggest(smoothed([(10.0**-k, 5.0 - k) for k in (5, 4, 3, 2)]))


def test_the_planned_run_may_be_given_as_it_is() -> None:
    planned = {"epochs": 3, "lr_decay_samples": 500, "save_interval": 10, "keep_last": 2, "async_save": True}
    found = sweep(updated(Options(), planned))
    assert (found.finetuning.epochs, found.schedule.lr_decay_samples, found.checkpoint) == (
        None,
        None,
        CheckpointConfig(),
    )


@pytest.mark.parametrize(("code", "losses"), [(143, [5.0, 4.0, 6.0]), (1, [5.0, 4.0, 3.0]), (1, None)])
def test_what_did_not_end_is_not_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, losses: list[float] | None
) -> None:
    """Stopped, failed while the loss fell, failed before a step; the metrics of an earlier sweep are still there."""
    metrics = tmp_path / "sweep.jsonl"

    def write(each: list[float]) -> None:
        metrics.unlink(missing_ok=True)
        metrics.write_text("".join(json.dumps({"lr": 10.0**k, "loss": loss}) + "\n" for k, loss in enumerate(each)))

    def ends(run: Options) -> int:
        if losses is not None:
            write(losses)
        return code

    write([5.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr(finetune, "train", ends)
    assert lr_find.run(updated(Options(), {"metrics": str(metrics)})) == code
    assert not metrics.with_suffix(".svg").exists()


def test_a_loss_that_blew_up_leaves_the_fall_to_be_seen(tmp_path: Path) -> None:
    """It is drawn at the upper edge; the frame is of the loss before."""
    points = [Point(10.0**-k, loss, loss) for k, loss in ((5, 4.0), (4, 3.5), (3, 2.0), (2, 3.0), (1, 1e30))]
    draw(points, suggest(points), tmp_path / "sweep.svg")
    picture = xml.etree.ElementTree.parse(tmp_path / "sweep.svg").getroot()
    line = next(part for part in picture.iter() if part.tag.endswith("polyline"))
    heights = [float(place.split(",")[1]) for place in line.attrib["points"].split()]
    assert min(heights) == heights[-1] == 14 and max(heights) == heights[2] == 230 and heights[0] == 122


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "sweep.jsonl"
    saves = ["--save", str(tmp_path / "run"), "--resume", "auto"]  # of the planned run
    flags = ["--metrics", str(metrics), "--steps", "40", "--min-lr", "1e-5", "--lr", "10", *saves]
    assert main(["lr-find", *RUN, *flags]) == 0 and not (tmp_path / "run").exists()
    said = capsys.readouterr().out
    points = read(metrics)
    assert points[0].lr == pytest.approx(1e-5) and points[1].lr / points[0].lr == pytest.approx(10 ** (6 / 40))
    assert "suggested: --lr " in said and "sweep: from 1e-05 (--min-lr) to 10 (--lr); no checkpoint" in said
    picture = xml.etree.ElementTree.parse(metrics.with_suffix(".svg")).getroot()
    assert picture.tag.endswith("svg") and sum(part.tag.endswith("polyline") for part in picture.iter()) == 4
    assert main(["lr-find", *RUN, "--min-lr", "2"]) == 2
    assert "--min-lr 2.0: must be less than" in capsys.readouterr().err
