"""The search for a layout, the length of a training, and any configuration at all."""

from __future__ import annotations

import doctest
import gc
import importlib
import os
import pkgutil
from collections import Counter
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mega.core.estimate
from mega.command_line.options import command as options_of
from mega.core.architecture import inventory, parameters
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import data_parallel, resolve
from mega.core.config.run import updated
from mega.core.estimate import memory as estimate
from mega.core.estimate import show
from mega.core.estimate.duration import Interruptions, optimum_interval, training, training_time
from mega.core.estimate.hardware import GIB, hardware
from mega.core.estimate.memory import memory
from mega.core.estimate.search import _allowed, _frozen_garbage, any_layout, cluster, command, layouts, search
from mega.core.estimate.steptime import step_time
from mega.core.parallel.mesh import Mesh
from mega.core.training.wire import build_stages

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "dtype": "bf16", "dry_run": True}
SMALL = {**QUIET, "layers": 4, "hidden": 512, "heads": 8, "vocab": 5000, "seq_length": 256, "global_batch": 32}


def test_the_search_returns_the_fastest_that_fits() -> None:
    run, (world, device) = compose(flags=SMALL), cluster("4xh200", None, None)
    found = search(run, world, device)
    times = [candidate.time.seconds for candidate in found.candidates]
    assert times == sorted(times) and found.fitting == found.weighed < found.tried
    everything = []
    for options in layouts(run, world, device.node):
        one = updated(updated(run, {"world": world}), options)
        try:
            check(one, world)
        except ValueError:
            continue
        everything.append(step_time(resolve(one, world), world, device).seconds)
    assert len(everything) == found.tried
    assert times[0] == pytest.approx(min(everything), rel=0.01)


def test_every_axis_plan_and_stage_of_sharing_is_weighed() -> None:
    run, device = compose(flags={**SMALL, "seq_length": 16384, "global_batch": 8}), hardware("h200")
    tried = [options for options in layouts(run, 8, device.node)]
    assert {options["cp"] for options in tried} == {1, 2, 4}
    assert {(options["schedule"], options["chunks"]) for options in tried} >= {("zb-h1", 1), ("1f1b", 1)}
    assert {options["zero"] for options in tried if options["pp"] == 1} == {0, 1, 2, 3}
    assert {options["zero"] for options in tried if options["pp"] > 1} == {0, 1}
    found = search(compose(flags={**SMALL, "seq_length": 16384, "global_batch": 1}), 4, device)
    assert max(candidate.options["cp"] for candidate in found.candidates) > 1  # one sequence, several ranks


def test_what_does_not_fit_is_not_offered() -> None:
    run = compose("llama2-7b", flags={**QUIET, "global_batch": 8})
    world, device = cluster("4x40GB", None, "h100")
    found = search(run, world, device)
    assert 0 < found.fitting < found.weighed <= found.tried
    for candidate in found.candidates:
        assert candidate.need <= device.memory < 40
        assert candidate.world == candidate.dp * candidate.run.parallel.tp * candidate.run.parallel.pp
    world, device = cluster("2x16GB", None, None)
    nothing = search(run, world, device)
    assert not nothing.candidates and nothing.smallest > device.memory


def test_the_command_makes_the_very_run() -> None:
    run = compose("llama2-7b", flags={**QUIET, "global_batch": 8, "steps": 10, "lr": 1e-4, "mock_data": True})
    found = search(run, 4, hardware("h200"), keep=2)
    words = command(found.candidates[0], run)
    import typer
    from typer.testing import CliRunner

    seen: list[Any] = []

    def verb(run: Any) -> None:
        seen.append(run)

    verb.__annotations__["run"] = type(run)
    app = typer.Typer()
    app.command()(options_of(verb))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    chosen = updated(found.candidates[0].run, {"dry_run": False, "world": None})
    assert resolve(seen[0], 4) == chosen
    one, several = show.launch_lines(words, 4, 8, 2), show.launch_lines(words, 64, 8, 2)
    assert one[0].startswith("torchrun --nproc-per-node 4 -m mega pretrain --family llama")
    assert "--nnodes 8" in several[0] and several[1].startswith("sbatch --nodes 8 --ntasks-per-node 8")


@pytest.mark.parametrize("words", [("8", None), ("0xh100", None), ("8x", None), ("8xh100", 4), ("8xh999", None)])
def test_bad_clusters(words: tuple[str, int | None]) -> None:
    with pytest.raises(ValueError, match=r"--(fit|gpu) "):
        cluster(words[0], words[1], None)


def test_a_cluster_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--fit 8xh100: excludes --gpu a100"):
        cluster("8xh100", None, "a100")
    with pytest.raises(ValueError, match="--fit 8x80GB: excludes --gpus 4"):
        cluster("8x80GB", 4, None)
    mine = tmp_path / "my own.toml"
    mine.write_text("memory = 10.0\n")
    assert cluster(f"4x{mine}", None, None)[1].memory == 10.0


@pytest.mark.parametrize(
    ("world", "tp", "hosts"), [(12, 2, (2, 6)), (12, 4, (3, 4)), (14, 1, (2, 7)), (13, 1, (13, 1))]
)
def test_hosts_start_as_many_ranks_as_there_are_devices(world: int, tp: int, hosts: tuple[int, int]) -> None:
    """Whole hosts of 8 would start 16 ranks for 12 devices."""
    words = show.launch_lines([], world, 8, tp)
    assert f"--nproc-per-node {hosts[1]} --nnodes {hosts[0]} " in words[0]
    assert f"--nodes {hosts[0]} --ntasks-per-node {hosts[1]} " in words[1]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("peak = 5", "peak is 5; must be a table"),
        ("peak = {int8 = 5}", "unknown field int8"),
        ("memory = nan", "memory is nan"),
        ("bandwidth = inf", "bandwidth is inf"),
        ("node = 3.5", "node is 3.5; must be a whole number"),
        ("memory = true", "memory is True"),
        (f"memory = 1{'0' * 400}", "memory is 1000.*must be a number from 1e-12 to 1e"),
        (f"memory = 1{'0' * 5000}", "is not TOML"),
        ("memory = " + "[" * 2000, "is not TOML that can be read: nested too deeply"),
        ("product = 5", "product is 5; must be a number from 1e-12 to 1"),
        ("elementwise = 100", "elementwise is 100; must be"),
        ("attention_forward = 1.01", "attention_forward is 1.01; must be"),
    ],
)
def test_a_broken_device_is_told(table: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(table)
    with pytest.raises(ValueError, match=said):
        hardware(str(path))


def test_no_layout_says_what_to_change() -> None:
    with pytest.raises(
        ValueError, match=r"--global-batch 32: no layout of 7 devices divides it.*valid: multiples of 7"
    ):
        search(compose(flags=SMALL), 7, hardware("h100"))


def test_groups_of_tensor_ranks_fill_whole_hosts() -> None:
    """96 heads can be shared by 3 and 6, but on hosts of 8 such groups would leave devices idle or lie on two."""
    run = compose("gpt3-175b", flags={**QUIET, "global_batch": 1536})
    assert {options["tp"] for options in layouts(run, 768, 8)} == {1, 2, 4, 8}
    assert {options["tp"] for options in layouts(run, 6, 8)} == {1, 2, 3, 6}
    odd = updated(run, {"layers": 4, "global_batch": 4})
    assert {options["tp"] for options in layouts(odd, 24, 8)} == {3, 6}  # no other layout divides 4 samples
    long = compose(flags={**SMALL, "seq_length": 12288, "global_batch": 1})
    assert {options["cp"] for options in layouts(long, 3, 8)} == {3}


def test_a_search_thaws_nothing_that_was_frozen_before() -> None:
    """Or else every later collection of garbage in the process walks all modules again."""
    gc.freeze()
    before = gc.get_freeze_count()
    with _frozen_garbage():
        pass
    assert gc.get_freeze_count() >= before > 0


def test_a_search_makes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of layouts have a few plans and one model in common: none of these is walked through a second time."""
    walked: list[tuple[Any, ...]] = []

    def noting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            walked.append((function.__name__, *args))
            return function(*args)

        return call

    monkeypatch.setattr("mega.core.architecture.inventory", noting(inventory))
    monkeypatch.setattr("mega.core.estimate.memory.plan", noting(estimate.plan))
    estimate.timelines_of.cache_clear()
    parameters.cache_clear()
    run, on = compose("gpt-22b", flags={"dtype": "bf16", "global_batch": 16}), hardware("a100")
    found = search(run, 4, on, keep=1)
    assert found.tried == sum(_allowed(updated(any_layout(run, 4), row), 4) for row in layouts(run, 4, on.node))
    times = Counter(walked)
    assert {name for name, *_ in times} == {"inventory", "plan"} and set(times.values()) == {1}
    assert len(times) < found.tried / 10


def test_clusters() -> None:
    assert cluster(None, 1024, "a100")[0] == 1024
    assert cluster("8x40GB", None, "a100")[1].memory == pytest.approx(39.4)
    with pytest.raises(ValueError, match="--gpus 0"):
        cluster(None, 0, None)
    with pytest.raises(ValueError, match="--global-batch is missing"):
        search(compose("llama2-7b"), 8, hardware("h100"))


def test_the_best_interval_wastes_least() -> None:
    """Against Daly's wall time at other intervals, and against the simplest possible bound."""
    save, failures = 60.0, 20000.0
    best = optimum_interval(save, failures)

    def wall(interval: float) -> float:
        return failures * (exp((interval + save) / failures) - 1) / interval

    assert all(wall(best) <= wall(best * factor) * 1.0005 for factor in (0.5, 0.8, 0.95, 1.05, 1.2, 2.0))
    plain = training_time(10.0, 1000)
    assert (plain.days, plain.effective, plain.save_every) == (10000 / 86400, 1.0, None)
    troubled = training_time(10.0, 1000, save_seconds=save, restart_seconds=600, failure_seconds=failures)
    assert 0.8 < troubled.effective < 1 - save / (best + save)


def test_no_interval_is_too_long_or_too_short() -> None:
    rare = training_time(10.0, 1000, save_seconds=60, restart_seconds=600, failure_seconds=1e300)
    assert rare.days == pytest.approx(10060 / 86400) and (rare.saves, rare.save_every_steps) == (1, 1000)
    often = training_time(10.0, 1000, save_seconds=1e9, restart_seconds=600, failure_seconds=36.0)
    assert (often.days, often.effective) == (inf, 0.0)
    run = resolve(compose("gpt2-124m", flags={"micro_batch": 1, "global_batch": 1, "steps": 10}), 1)
    with pytest.raises(ValueError, match=r"--mtbf 0.01: .* never ends"):
        training(run, 1, hardware("h100"), Interruptions(0.01, 1e9))
    assert training(updated(run, {"steps": None}), 1, hardware("h100"), Interruptions()) is None


@pytest.mark.parametrize(
    ("interval", "overlapped", "seconds"),
    [
        (None, False, 10000.0),  # never saved
        (100, False, 10000 + 10 * 400.0),
        (300, False, 10000 + 4 * 400.0),  # after 300, 600, 900, and the last
        (5000, False, 10000 + 400.0),
        (100, True, 10000 + 400.0),  # each fits into the next 100 steps; the last is waited for
        (30, True, 10000 + 33 * 100.0 + 400.0),  # 400 s do not fit into 300
    ],
)
def test_saves_take_their_time(interval: int | None, overlapped: bool, seconds: float) -> None:
    """1,000 steps of 10 s, with saves of 400 s."""
    whole = training_time(10.0, 1000, save_interval=interval, save_seconds=400.0, overlapped=overlapped)
    assert whole.days == pytest.approx(seconds / 86400) and whole.effective == pytest.approx(10000 / seconds)
    assert whole.save_every is None


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_time_is_that_of_the_interval_asked_for(overlapped: bool) -> None:
    days = {}
    for interval in (1, 20, 54, 90, 160, 1000, None):
        whole = training_time(
            10.0, 20000, save_interval=interval, save_seconds=70.0, overlapped=overlapped, failure_seconds=4000.0
        )
        days[interval] = whole.days
        assert whole.save_every_steps == (7 if overlapped else 70)
        assert whole.save_every_days == pytest.approx(days[None]) if interval is None else days[interval] > 0
    assert min(days.values()) == days[None] and len(set(days.values())) == 7
    slower = training_time(
        10.0, 20000, save_seconds=70.0, overlapped=overlapped, failure_seconds=4000.0, restart_seconds=900.0
    )
    assert slower.days > 1.2 * days[None]


def test_small_batches_of_a_ramp_take_less_time() -> None:
    """GPT-3's: 111,354 steps, of which 19,802 rise from 16 samples to 1,536; every sample counts alike on one rank."""
    flags = {"micro_batch": 1, "global_batch": 1536, "samples": 146484375, "optimizer": "sgd", "sgd_momentum": 0.0}
    device = hardware("h100")
    days = []
    for rampup in ((), (16, 16, 5859375)):
        run = resolve(compose("gpt2-345m", flags={**QUIET, **flags, "rampup": rampup}), 1)
        whole = training(run, 1, device, Interruptions())
        assert whole is not None
        days.append(whole.days)
    assert days[0] < days[1] < 1.01 * days[0]


@settings(max_examples=int(os.environ.get("MEGA_RANDOM_CONFIGS", "60")))
@given(
    flags=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 12),
            "hidden": st.sampled_from([8, 24, 64, 96]),
            "heads": st.sampled_from([1, 2, 3, 4, 8]),
            "seq_length": st.sampled_from([8, 12, 16, 33]),
            "micro_batch": st.integers(1, 3),
            "tp": st.sampled_from([1, 2, 3, 4]),
            "pp": st.sampled_from([1, 2, 3, 4]),
            "global_batch": st.sampled_from([None, 4, 8, 12, 24, 25]),
        },
        optional={
            "family": st.sampled_from(["gpt", "llama"]),
            "kv_heads": st.sampled_from([1, 2, 3]),
            "chunks": st.sampled_from([1, 2, 3]),
            "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1"]),
            "sequence_parallel": st.booleans(),
            "zero": st.integers(0, 3),
            "dtype": st.sampled_from(["fp32", "bf16", "fp16", "fp64"]),
            "grad_dtype": st.sampled_from(["fp32", "bf16", "fp64"]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "recompute_method": st.sampled_from(["uniform", "block"]),
            "recompute_layers": st.integers(1, 4),
            "distribute_saved": st.booleans(),
            "reset_attention": st.booleans(),
            "qk_norm": st.booleans(),
            "norm_offset": st.booleans(),
            "attention_dropout": st.sampled_from([0.0, 0.1]),
            "activation": st.sampled_from(["gelu", "swiglu", "relu2"]),
            "vocab_multiple": st.sampled_from([1, 128]),
            "stage_layers": st.sampled_from([(), (2, 2), (1, 3)]),
            "optimizer": st.sampled_from(["adam", "sgd"]),
            "cp": st.sampled_from([1, 2]),
            "ops": st.sampled_from(["auto", "reference"]),
        },
    ),
    world=st.sampled_from([1, 2, 4, 8, 12]),
)
def test_any_configuration(flags: dict[str, Any], world: int) -> None:
    """A mistake named by its flag, or an estimate that agrees with itself and with the stages as they are built."""
    typed = {name: value for name, value in flags.items() if value is not None}
    run = compose(flags={**typed, "vocab": 77, "dry_run": True, "world": world})
    try:
        check(run, world)
    except ValueError as error:
        assert all(line.startswith("--") for line in str(error).splitlines()), error
        return
    run = resolve(run, world)
    found = memory(run, world)
    time = step_time(run, world, hardware("h100"))
    assert time.seconds > 0 and 0 <= time.bubble < 1 and 0 < time.mfu < 1
    assert estimate.minimum_gib(run, world, 0.4) <= found.needed(0.4)
    parallel, dp = run.parallel, data_parallel(run, world)
    for stage in found.stages:
        assert all(size >= 0 for size in show.parts(stage).values())
        assert sum(show.parts(stage).values()) == stage.peak < GIB
        mesh = Mesh.at(
            stage.stage * parallel.tp * parallel.cp * dp, tp=parallel.tp, cp=parallel.cp, dp=dp, pp=parallel.pp
        )
        built = torch.nn.ModuleList(build_stages(run, mesh, torch.device("meta")))
        assert stage.held.parameters == sum(parameter.numel() for parameter in built.parameters())


def test_the_rooms_examples() -> None:
    for module in pkgutil.iter_modules(mega.core.estimate.__path__):
        results = doctest.testmod(importlib.import_module(f"mega.core.estimate.{module.name}"))
        assert results.failed == 0
