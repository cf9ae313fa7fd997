"""`mega bench` on toy sizes: rows, files, several ranks, and the arithmetic of its phases."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mega import cli
from mega.core.bench import rows as bench_rows
from mega.core.bench import training as bench
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig, value_of
from mega.core.device import Device
from mega.core.flops import matmul_parameters, model_flops_per_token
from mega.core.parallel import collectives
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from tests.gpu import recipes
from tests.support.rank_output import printing_to
from tests.support.runs import small_run

TOY = "--layers 1 --hidden 32 --heads 2 --seq-length 16 --vocab 100 --micro-batch 2 --global-batch 4 --dtype fp32"
SHORT = ["--repeats", "2", "--warmup", "1"]


def test_a_row_is_measured_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "w1", *TOY.split(), *SHORT, "--json", str(out)]) == 0
    row = json.loads(out.read_text())
    assert row["name"] == "w1" and row["world"] == 1 and len(row["steps"]) == 2
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds"])
    assert "tokens/s" in capsys.readouterr().out


def test_against_another_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same work only: a smaller model is not a faster trainer."""
    before = str(tmp_path / "before.json")
    line = ["bench", "w1", *TOY.split(), *SHORT]
    assert cli.main([*line, "--json", before]) == 0
    capsys.readouterr()
    assert cli.main([*line, "--against", before, "--recompute", "selective"]) == 0
    assert f"% against {before}" in capsys.readouterr().out
    assert cli.main([*line, "--against", before, "--hidden", "64"]) == 0
    printed = capsys.readouterr().out
    assert (
        "is other work: hidden 32, here 64; " in printed and "%" not in printed.split("not compared")[1].splitlines()[0]
    )
    assert cli.main(["bench", *line[2:], "--against", before]) == 0
    assert "which has no row run" in capsys.readouterr().out


def test_a_pasted_line_of_a_run_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Options without an effect on speed are reported; others are measured, padding of the vocabulary among it."""
    out = tmp_path / "rows.json"
    line = ["bench", *TOY.split(), *SHORT, "--json", str(out), "--trace", str(tmp_path / "trace.json")]
    more = ["--save", "/nowhere", "--samples", "100", "--load", "/nowhere", "--no-mask-padded-vocab", "--deterministic"]
    assert cli.main([*line, *more, "--dry-run"]) == 0
    printed = capfd.readouterr()
    assert "nothing measured" in printed.out and not out.exists()
    with mock.patch.object(Device, "deterministic") as asked:
        assert cli.main([*line, *more]) == 0
    asked.assert_called_once_with()
    assert "not used, random tokens are measured and nothing is kept: --samples, " in printed.err
    assert all(flag in printed.err for flag in ("--save", "--load")) and "--deterministic" not in printed.err
    assert json.loads(out.read_text())["work"]["vocab"] == 128
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_overflows_are_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    line = ["bench", *TOY.replace("fp32", "fp16").split(), *SHORT, "--json", str(out)]
    assert cli.main(line) == 0 and cli.main([*line, "--initial-loss-scale", "1e30"]) == 0
    assert [json.loads(row)["skipped"] for row in out.read_text().splitlines()] == [0, 2]
    assert "; 2 of the timed steps were skipped and updated nothing" in capsys.readouterr().out


def test_two_ranks(tmp_path: Path) -> None:
    with printing_to(tmp_path / "printed"):
        assert cli.main(["bench", "w1", *TOY.split(), *SHORT, "--nproc", "2", "--tp", "2"]) == 0
    assert "2 x CPU" in (tmp_path / "printed").read_text()


@pytest.mark.parametrize(
    "line, message",
    [
        ("bench w9", "row w9: is not known; valid: w1, w2, w2-fp8, w3"),
        ("bench w3", "--tp 8 x --pp 1: 1 rank given, but a model takes 8"),
        ("bench w2 --model tiny-gpt", "--model tiny-gpt: excludes rows"),
        (f"bench w1 {TOY} --against {__file__}", "is not a file written by mega bench --json"),
        (f"bench w1 {TOY} --json /nowhere/x", "--json /nowhere/x: directory /nowhere does not exist"),
        (f"bench w1 {TOY} --trace /", "--trace /: is a directory; must be a file"),
        (
            "bench w1 --calibrate x.toml --lr 1",
            "--calibrate x.toml: measures this machine, not a run; leave out w1, --lr",
        ),
    ],
)
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("held", ["print(1)\n", '{"family": "gpt", "layout": "tp2"}\n'])
def test_rows_are_not_added_to_another_file(tmp_path: Path, held: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "script.py"
    other.write_text(held)
    with mock.patch("mega.core.bench.training.measure", side_effect=AssertionError("measured")):
        assert cli.main(["bench", "w1", *TOY.split(), *SHORT, "--json", str(other)]) == 2
    assert f"--json {other}: is not a file written by mega bench --json" in capsys.readouterr().err
    assert other.read_text() == held


def test_the_rows_are_what_their_peers_were_measured_on() -> None:
    billions = {"w1": 0.354, "w2": 6.607, "w2-fp8": 6.607, "w3": 22.07, "window": 1.876, "bert": 0.3357, "t5": 0.2220}
    flops = {"w1": 2.43, "w2": 46.09, "w2-fp8": 46.09, "w3": 139.7, "window": 12.87, "bert": 1.941, "t5": 0.683}
    for name in bench_rows.ROWS:
        run = resolve(bench_rows.row(name, {}, 8), 8)
        assert run.batch.seq_length
        assert matmul_parameters(run.model) / 1e9 == pytest.approx(billions[name], rel=5e-3)
        assert model_flops_per_token(run) / 1e9 == pytest.approx(flops[name], rel=5e-3)
        assert run.precision.dtype == "bf16" and run.precision.grad_dtype == "fp32"


def test_flags_stand_above_a_row(tmp_path: Path) -> None:
    """A flag counts although its value is the default; so does a line of a TOML file."""
    file = tmp_path / "run.toml"
    file.write_text('[memory]\nrecompute = "none"\n')
    toy = [*TOY.split(), *SHORT, "--kv-heads", "2", "--micro-batch", "4"]
    for typed in (["--recompute", "none"], ["--config", str(file)]):
        with mock.patch("mega.core.bench.training.bench", return_value=0) as measured:
            assert cli.main(["bench", "w2", *toy, *typed]) == 0
        [[(name, run)]] = measured.call_args.args
        assert name == "w2" and run.memory.recompute == "none" and run.batch.micro_batch == 4


@pytest.mark.parametrize(
    "name, world, expected",
    [
        ("w1", 4, {"micro_batch": 64, "global_batch": 512}),
        ("w1", 16, {"micro_batch": 32, "global_batch": 512}),
        ("w2", 4, {"global_batch": 16, "zero": 1, "recompute": "none"}),
        ("w2-fp8", 8, {"global_batch": 32, "fp8": True}),
        ("w3", 4, {"tp": 4, "global_batch": 4}),
        ("w3", 8, {"tp": 8}),
    ],
)
def test_a_row_follows_the_number_of_ranks(name: str, world: int, expected: dict[str, Any]) -> None:
    run = bench_rows.row(name, {}, world)
    assert {key: value_of(run, key) for key in expected} == expected


class Handle:
    """An exchange's handle that records when it has been waited for."""

    def __init__(self, work: Any, name: str, open_: dict[int, str]):
        self._work, self._open = work, open_
        open_[id(self)] = name
        self._kept = self  # as NCCL keeps what was not waited for; also, no other handle gets our id

    def wait(self) -> None:
        self._work.wait()
        self._open.pop(id(self), None)


@contextlib.contextmanager
def watched() -> Iterator[dict[int, str]]:
    """Names of the exchanges that were not waited for, by handle."""
    waiting: dict[int, str] = {}

    def watch(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **options: Any) -> Any:
            work = start(*args, **options)
            return None if work is None else Handle(work, getattr(start, "__name__", "exchange"), waiting)

        return begin

    places = [(collectives, "_gather_into"), (collectives, "_scatter_sum")]
    places += [(dist, name) for name in ("all_reduce", "isend", "irecv")]
    with contextlib.ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, watch(getattr(place, name))))
        yield waiting


def left_open(groups: Groups, rank: int, run: RunConfig, world: int) -> list[str]:
    """Job: exchanges of a measured row that are still on their way when its state has been thrown away."""
    with watched() as waiting:
        bench.measure("row", run, rank, world, Device.choose("cpu"), groups, repeats=1, warmup=1)
        return sorted(waiting.values())


@pytest.mark.parametrize(
    "world, layout",
    [
        (2, {"zero": 1}),
        (2, {"zero": 3}),
        (4, {"zero": 2, "tp": 2, "sequence_parallel": True}),
        (4, {"zero": 1, "pp": 2, "chunks": 2}),
    ],
)
def test_a_row_waits_for_all_it_has_begun(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    """NCCL keeps the tensors of an exchange that was not waited for: the next row would find less memory."""
    run = small_run("llama", world, **layout)
    assert pool.run(left_open, run, world, world=world) == [[]] * world


def test_communication_counts_only_where_it_is_exposed() -> None:
    found = bench.phases_of(
        [
            (0, 4000, "ncclDevKernel_AllGather"),
            (1000, 2000, "nvjet_sm90"),
            (3000, 6000, "cudnn_generated"),
            (7000, 8000, "_adamw"),
        ]
    )
    assert found == {"communication": 2.0, "products": 1.0, "attention": 3.0, "update": 1.0, "idle": 1.0}


def test_the_rows_of_the_recipes_by_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Small ones on a CPU; what a file holds is not measured again, and what no time is left for not begun."""
    out, names = tmp_path / "rows.jsonl", ["w1 dropout", "7b documents"]
    arguments = ["--out", str(out), "--tiny", "--only", ";".join(names)]
    assert recipes.main([*arguments, "--rounds", "1"]) == 0
    assert recipes.main([*arguments, "--rounds", "2"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in rows] == names * 2 and [bool(row["phases"]) for row in rows] == [
        True,
        True,
        False,
        False,
    ]
    assert recipes.main([*arguments, "--rounds", "9", "--seconds", "0"]) == 0
    assert len(out.read_text().splitlines()) == 4 and "w1 dropout: " in capsys.readouterr().out
