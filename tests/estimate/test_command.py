"""`mega memory-estimate` as it is typed: what it refuses in one line, and that its JSON says what its text says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mega import cli

SEVEN = ["--model", "llama2-7b", "--dtype", "bf16", "--micro-batch", "1", "--global-batch", "64"]
SMALL = ["--layers", "4", "--hidden", "1024", "--heads", "8", "--vocab", "1000", "--dtype", "bf16"]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
HUGE = "9" * 400


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["memory-estimate", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu h100 --steps 10 --mtbf 1e308", "--mtbf 1e+308: must be a number from 0.01 to 1,000,000,000"),
        ("--gpu h100 --steps 10 --mtbf nan", "--mtbf nan: must be a number"),
        ("--gpu h100 --steps 10 --mtbf 0", "--mtbf 0: must be a number"),
        ("--save-seconds -4", "--save-seconds -4: must be a number from 0"),
        ("--restart-seconds soon", "--restart-seconds soon: must be a number"),
        ("--gpu h100 --steps 10 --save-interval 2 --restart-seconds 9", "--restart-seconds 9: needs --mtbf, without"),
        ("--gpu h100 --steps 10 --save-seconds 9", "--save-seconds 9: needs --mtbf or --save-interval, a"),
        ("--gpu h100 --save-interval 2 --save-seconds 9", "--save-seconds 9: needs --mtbf or --save-interval, a"),
        ("--steps 10 --save-interval 2 --save-seconds 9", "--save-seconds 9: needs --mtbf or --save-interval, a"),
        ("--gpus eight", "--gpus eight: must be a whole number"),
        ("--mtbf 24", "--mtbf 24: needs a device"),
        ("--fit 8x80GB --world 16", "--world 16: excludes --fit 8x80GB, which plans 8 ranks"),
        ("--gpus 8 --nproc 4", "--nproc 4: excludes --gpus 8, which plans 8 ranks"),
        (f"--world {HUGE}", f"--world {HUGE}: must be at most 9223372036854775807"),
        (f"--hidden {HUGE}", f"--hidden {HUGE}: must be at most 1048576"),
        ("--draw DIR.svg", "DIR.svg: is a directory"),
        ("--draw DIR.svg/none/a.svg", "there is no directory"),
    ],
)
def test_a_mistake_is_one_line(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "DIR.svg").mkdir()
    typed = words.replace("DIR", str(tmp_path / "DIR")).split()
    assert cli.main(["memory-estimate", *SEVEN, *typed]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.out == "" and len(told.err.splitlines()) == 1


def test_the_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    full = ["--recompute", "full", "--recompute-method", "uniform", "--recompute-layers", "2"]
    words = ["--tp", "2", "--pp", "2", "--world", "8", "--sequence-parallel", "--stage-layers", "15", "17"]
    document = estimate(capsys, *SEVEN, *full, *words, "--megatron")
    said = {
        "schedule": "1f1b",
        "sequence_parallel": True,
        "dtype": "bf16",
        "microbatches": 32,
        "stage_layers": [15, 17],
    }
    said |= {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}
    assert document["layout"].items() >= said.items()
    assert [stage["bytes_per_parameter"] for stage in document["stages"]] == [pytest.approx(18, rel=1e-3)] * 2
    theirs = document["megatron"]
    assert theirs["in_flight"] == 2 and theirs["parameters"] == pytest.approx(6.738e9, rel=1e-3)
    assert theirs["shard"] > theirs["others"] and document["megatron_mb"]["layer"] > 0
    assert cli.main(["memory-estimate", *SEVEN, *full, *words, "--megatron"]) == 0
    told = capsys.readouterr().out
    assert "1.6847e9 on the fullest shard, 1.6191e9 on the others" in told and "2 microbatches in flight" in told


def test_fp32_is_named_with_what_bf16_would_give(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:-2], "--seq-length", "128", "--micro-batch", "1", "--gpu", "h100", "--save-interval", "2"]
    wide, narrow = estimate(capsys, *words), estimate(capsys, *words, "--dtype", "bf16")
    assert wide["bf16"] == {"peak": narrow["peak"], "seconds": narrow["step"]["seconds"]} and "bf16" not in narrow
    assert cli.main(["memory-estimate", *words, "--sequence-parallel", "--split", "9,1"]) == 0
    said = capsys.readouterr()
    (line,) = (line for line in said.out.splitlines() if line.startswith("precision: "))
    assert line.startswith("precision: fp32, ") and "GiB at the peak; with --dtype bf16 " in line
    assert line.endswith(f", and {narrow['step']['seconds']:.3f} s a step instead of {wide['step']['seconds']:.3f}")
    assert said.err == "--sequence-parallel: changes nothing without --tp of at least 2\n"


def test_the_time_is_that_of_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SEVEN, "--world", "8", "--zero", "1", "--gpu", "h100", "--steps", "25000", "--save", "x"]
    words += ["--save-interval", "2", "--save-seconds", "600"]
    plain, failing = (estimate(capsys, *words, *more)["training"] for more in ([], ["--mtbf", "24"]))
    assert (plain["saves"], plain["save_interval"]) == (12500, 2)
    assert 12500 * 600 / 86400 < plain["days"] < failing["days"] < 100
    assert failing["save_every_steps"] > 1000 and failing["save_every_days"] < 1
    slow = estimate(capsys, *words, "--mtbf", "24", "--restart-seconds", "7200")["training"]
    assert slow["days"] > 1.05 * failing["days"] and slow["restart_seconds"] == 7200
    beside = estimate(capsys, *words, "--async-save")["training"]
    assert beside["async_save"] and beside["days"] < plain["days"]
    assert cli.main(["memory-estimate", *words, "--mtbf", "24"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "12500 saves, one every 2 steps" in told and f"save every {failing['save_every_steps']} steps" in told


def test_three_tensor_ranks_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "32", "--hidden", "1536", "--heads", "24", "--vocab", "50304", "--seq-length", "2048"]
    found = estimate(capsys, *words, "--dtype", "bf16", "--global-batch", "64", "--fit", "3x80GB")
    assert found["layout"]["tp"] == 3 and not found["layout"]["sequence_parallel"]  # 2048 is no multiple of 3


def test_the_batches_that_are_told_have_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama2-13b", "--dtype", "bf16", "--fit", "12x80GB", "--global-batch"]
    assert cli.main(["memory-estimate", *words, "64"]) == 2
    told = capsys.readouterr().err
    assert "--global-batch 64: no layout of 12 devices divides it, --layers 40" in told
    assert "valid: multiples of 3, or another number" in told
    assert estimate(capsys, *words, "3")["tried"] > 0


def test_fp8_is_judged_by_the_layouts_tried(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--fp8", "--micro-batch", "2", "--fit", "4x80GB", "--global-batch"]
    assert estimate(capsys, *words, "32", "--seq-length", "1000")["layout"]["micro_batch"] % 2 == 0
    assert cli.main(["memory-estimate", *words, "8", "--seq-length", "1001"]) == 2
    told = capsys.readouterr().err
    assert "--global-batch 8: no layout of 4 devices obeys every rule" in told and "multiples of 16" in told
    assert estimate(capsys, *words, "16", "--seq-length", "1001")["layout"]["micro_batch"] == 16
    assert cli.main(["memory-estimate", *words, "8", "--seq-length", "1000", "--dtype", "fp32"]) == 2
    assert capsys.readouterr().err == "mega: --fp8: needs --dtype bf16, not fp32\n"


def test_the_flags_that_a_start_lacks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--seq-length", "256", "--global-batch", "8", "--fit", "2x80GB"]
    assert estimate(capsys, *words)["missing"] == ["--steps", "--lr", "--data-path"]
    assert cli.main(["memory-estimate", *words, "--lr", "1e-4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "still to be given there: --steps, --data-path"
    assert estimate(capsys, *words, "--lr", "1e-4", "--steps", "9", "--mock-data")["missing"] == []


def test_logits_and_groups_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Each token's logits in bf16, half the words on a rank."""
    words = [*SMALL, "--seq-length", "256", "--micro-batch", "1", "--global-batch", "2", "--tp", "2", "--world", "2"]
    logits = estimate(capsys, *words)["logits"]
    more = estimate(capsys, *words, "--vocab", "2048")["logits"]
    assert more - logits == 2 * 256 * 1024 // 2  # the smaller one is padded to 1,024
    assert cli.main(["memory-estimate", *words]) == 0
    told = capsys.readouterr().out
    assert "logits and loss of a microbatch: 0.00 GiB" in told and "outside the allocator: 1 communicator\n" in told


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line under an example; the page may leave lines out."""
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    examples = re.findall(r"^mega (memory-estimate [^\n]*)\n```\n\n```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    for line, shown in examples:
        assert cli.main(line.split()) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        assert [said for said in shown.splitlines() if said not in printed] == []  # in this order
