"""Memory of a whole run: the parts add up, short plans peak like long ones, and the verb tells it quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.cli import main
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.estimate import memory as estimate
from mega.core.estimate import show
from mega.core.estimate.chunks import stage_chunks
from mega.core.plan import SCHEDULES, plan, simulate

SMALL = {"layers": 24, "hidden": 64, "heads": 4, "vocab": 250, "seq_length": 32, "micro_batch": 1, "dtype": "bf16"}


def run_of(world: int, **flags: Any) -> RunConfig:
    return resolve(compose(flags={**SMALL, **flags}), world)


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "count"),
    [("1f1b", 4, 1, 3), ("1f1b", 4, 1, 33), ("interleaved", 4, 3, 32), ("interleaved", 2, 2, 50), ("zb-h1", 4, 1, 17)],
)
def test_a_short_plan_peaks_like_the_whole(
    schedule: str, pp: int, chunks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(pp, schedule=schedule, pp=pp, chunks=chunks, global_batch=count)
    short = estimate.memory(run, pp)
    monkeypatch.setattr(estimate, "representative", lambda run, count: count)
    assert short == estimate.memory(run, pp)


def test_a_schedule_counts_by_what_it_plays_and_not_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = estimate.memory(run_of(4, schedule="zb-h1", pp=4, global_batch=9), 4)
    monkeypatch.setitem(SCHEDULES, "toy-splitting", SCHEDULES["zb-h1"])
    assert estimate.memory(run_of(4, schedule="toy-splitting", pp=4, global_batch=9), 4) == known


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    pp=st.sampled_from([1, 2, 3, 4]),
    count=st.integers(1, 12),
    tp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1]),
    sequence=st.booleans(),
)
def test_parts_add_up_and_live_microbatches_are_the_plans(schedule, pp, count, tp, dp, zero, sequence):  # type: ignore[no-untyped-def]
    world = tp * pp * dp
    run = run_of(world, schedule=schedule, pp=pp, tp=tp, zero=zero, sequence_parallel=sequence, global_batch=count * dp)
    found = estimate.memory(run, world)
    live = simulate(plan(schedule, pp, 1, count)).live
    for stage in found.stages:
        assert sum(show.parts(stage).values()) == stage.peak
        assert stage.live == live[stage.stage]
    document = json.loads(json.dumps(show.as_json(run, world, found)))
    assert document["peak"] == max(stage["peak"] for stage in document["stages"])


def test_what_is_kept_counts_as_activations_in_a_forward_peak_too() -> None:
    """One microbatch whose peak is at its loss: what autograd keeps of it is no temporary."""
    run = resolve(compose("gpt2-124m", flags={"micro_batch": 1, "dtype": "bf16"}), 1)
    (stage,) = estimate.memory(run, 1).stages
    assert stage.when.startswith("forward")
    (kept,) = estimate.footprints(run, stage_chunks(run)[0], 1, 1).values()
    assert stage.activations == kept.held > stage.working


def test_more_costs_more() -> None:
    """Each saving saves: sharded state, split sequences, recomputation, fewer microbatches in flight."""

    def peak(world: int = 4, **flags: Any) -> int:
        return estimate.memory(run_of(world, **{"global_batch": 64, "hidden": 512, **flags}), world).worst.peak

    assert peak(zero=1) < peak()
    assert peak(tp=2, sequence_parallel=True) < peak(tp=2) < peak()
    assert peak(recompute="full", recompute_method="uniform", recompute_layers=1) < peak(recompute="selective") < peak()
    assert peak(pp=4, schedule="1f1b") < peak(pp=4, schedule="gpipe")
    assert peak(micro_batch=2) > peak()


def test_a_checkpoint_holds_weights_masters_and_moments_without_padding() -> None:
    run = run_of(1, tied=False)
    found = estimate.memory(run, 1)
    assert found.checkpoint == found.parameters * (2 + 4 + 4 + 4)
    bare = run_of(1, tied=False, save_optim=False)
    assert estimate.checkpoint_bytes(bare) == found.parameters * 2
    for dtype, offload, size in (("bf16", False, 10), ("bf16", True, 14), ("fp32", True, 12)):
        apart = run_of(1, tied=False, dtype=dtype, masters=dtype != "bf16", optimizer_offload=offload)
        assert estimate.checkpoint_bytes(apart) == found.parameters * size


def test_peak_of_w2() -> None:
    """GiB measured on an H200."""
    flags = {"micro_batch": 2, "global_batch": 16, "recompute": "selective", "dtype": "bf16"}
    assert estimate.memory(resolve(compose("llama2-7b", flags=flags), 1), 1).worst.peak / 2**30 == pytest.approx(
        136.5, abs=0.05
    )


@pytest.mark.parametrize(
    ("scaling", "micro_batch", "peak"),
    [("tensor", 2, 42.4), ("tensor", 8, 65.8), ("block", 2, 42.5), ("block", 8, 66.0)],
)
def test_peaks_in_fp8(scaling: str, micro_batch: int, peak: float) -> None:
    """GiB measured on an H100, of 8 blocks of Llama-2 7B."""
    flags = {"layers": 8, "micro_batch": micro_batch, "global_batch": 8, "dtype": "bf16"}
    run = resolve(compose("llama2-7b", flags={**flags, "fp8": True, "fp8_scaling": scaling}), 1)
    assert estimate.memory(run, 1).worst.peak / 2**30 == pytest.approx(peak, abs=0.08)


def test_keys_and_values_of_llama3() -> None:
    # 2 x 32 layers x 8 heads x 128 wide x 2 bytes
    run = resolve(compose("llama3-8b", flags={"micro_batch": 1, "dtype": "bf16"}), 1)
    assert estimate.kv_cache_bytes(run) == 131072


def verb(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, what is printed, and what is told on stderr."""
    code = main(["memory-estimate", *words])
    return code, *capsys.readouterr()


LLAMA = ["--model", "llama2-7b", "--micro-batch-size", "1", "--bf16", "--tensor-model-parallel-size", "2"]


def test_the_verb_needs_no_device() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mega", "memory-estimate", *LLAMA, "--world", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["parameters"] == 6738415616
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"matplotlib", "torch._dynamo"}


def test_a_program_reads_all_that_a_person_does(capsys: pytest.CaptureFixture[str]) -> None:
    """--fit, --megatron and the length of the training, in one JSON value."""
    small = ["--layers", "4", "--hidden", "512", "--heads", "8", "--vocab", "5000", "--seq-length", "256"]
    words = ["--global-batch", "32", "--steps", "1000", "--mtbf", "24", "--megatron", "--json"]
    code, printed, told = verb(capsys, *small, *words, "--fit", "2xh200")
    assert code == 0, told
    document = json.loads(printed)
    first = document["layouts"][0]
    assert {name: first[name] for name in document["layout"] if name != "cp"} == {
        name: size for name, size in document["layout"].items() if name != "cp"
    }
    assert first["step"] == document["step"]
    assert first["need_gib"] == document["need_gib"] > document["peak"] / 2**30 and document["fits"]
    assert document["communicators"] > 0 and document["mapped"] == 0
    assert document["tried"] >= document["weighed"] >= document["fitting"] >= len(document["layouts"]) > 1
    assert document["start"][0].startswith("torchrun --nproc-per-node 2 -m mega pretrain ")
    assert 0 < document["training"]["effective"] < 1 and document["megatron_mb"]["total"] > 0


def test_the_verb_judges_like_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = verb(capsys, *LLAMA, "--world", "3")
    assert code == 2 and "3 ranks given, but a model takes 2" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draw", "nowhere/bars.svg"], "--draw nowhere/bars.svg: there is no directory nowhere"),
        (["--draw-schedule", "nowhere/plan.svg"], "--draw-schedule nowhere/plan.svg: there is no directory nowhere"),
        (["--draw", "bars.gif"], "--draw bars.gif: must end in .svg or .png"),
        (["--draw-schedule", "plan.gif"], "--draw-schedule plan.gif: must end in .svg or .png"),
        (["--draw", "a.svg", "--draw-schedule", "./a.svg"], "--draw-schedule a.svg: is the file of --draw"),
        (["--draw", "a.svg", "--draw-schedule", "plan.gif"], "--draw-schedule plan.gif: must end in .svg or .png"),
        (["--mtbf", "24"], "--mtbf 24: needs a device"),
        (["--mtbf", "24", "--gpu", "h100"], "--mtbf 24: needs a device (--gpu or --fit), and --steps or --samples"),
        (["--mtbf", "inf", "--gpu", "h100", "--steps", "5"], "--mtbf inf: must be a number from 0.01 to"),
        (["--save-seconds", "inf"], "--save-seconds inf: must be a number from 0 to"),
    ],
)
def test_what_cannot_be_told_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, and before a picture is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["memory-estimate", *LLAMA, "--world", "2", *words]) == 2
    assert capsys.readouterr().err.startswith(f"mega: {said}")
    assert not list(tmp_path.iterdir())


def test_a_png_without_matplotlib_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    assert main(["memory-estimate", *LLAMA, "--world", "2", "--draw", "a.svg", "--draw-schedule", "b.png"]) == 2
    assert "--draw-schedule b.png: a .png needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_search_says_what_it_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--layers 4 --hidden 512 --heads 8 --vocab 5000 --seq-length 256 --global-batch 8 --gpus 2 --bf16 --fp8".split()
    )
    typed = "--tp 2 --sequence-parallel --tp-overlap --stage-layers 2 2 --accumulation 4".split()
    assert main(["memory-estimate", *words[:-1], *typed]) == 0
    told = capsys.readouterr()
    assert "the search replaces --tp 2, --sequence-parallel, --stage-layers (2, 2), --accumulation 4" in told.err
    assert "--tp-overlap" in told.out and "--stage-layers" not in told.out and "--accumulation" not in told.out
    assert main(["memory-estimate", *words]) == 0
    told = capsys.readouterr()
    assert not told.err and "--fp8" in told.out and "no fp8 products" not in told.out
    assert main(["memory-estimate", *words, "--gpu", "a100"]) == 0
    assert "--fp8: a100 has no fp8 products; timed as emulated in fp32" in capsys.readouterr().out


def test_a_late_host_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-345m --hidden-dropout 0 --attention-dropout 0 --global-batch 64 --world 1 --bf16 --gpu h200"
    late = []
    for more in (["1", "--no-cuda-graph"], ["64"], ["1", "--cuda-graph"], ["1"]):
        assert main(["memory-estimate", *words.split(), "--micro-batch", *more]) == 0
        late.append("with --cuda-graph" in capsys.readouterr().out)
    assert late == [True, False, False, False], "left open, such work is recorded"


@pytest.mark.parametrize("more", ["--experts 4 --experts-chosen 2", "--mtp-layers 1 --position rope"])
def test_a_graph_is_not_suggested_to_a_model_that_excludes_it(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2-345m --hidden-dropout 0 --attention-dropout 0 --micro-batch 1 --global-batch 64 --world 1"
    given = ["memory-estimate", *words.split(), *"--bf16 --gpu h200".split(), *more.split()]
    assert main([*given, "--no-cuda-graph"]) == 0
    assert "with --cuda-graph" not in capsys.readouterr().out
    assert main([*given, "--cuda-graph"]) == 2
    assert f"--cuda-graph: excludes {more.split()[0]}; valid there: --no-cuda-graph" in capsys.readouterr().err


def test_a_graph_keeps_its_microbatchs_memory() -> None:
    """Beside it validation and updates work, or the last of several microbatches where data are shared."""
    for world, more in ((1, {}), (1, {"optimizer": "lamb"}), (2, {}), (2, {"zero": 1}), (2, {"global_batch": 8})):
        flags = {"micro_batch": 4, "global_batch": 16, "dtype": "bf16", **more}
        with_, without = (
            estimate.memory(resolve(compose("gpt2-345m", flags={**flags, "cuda_graph": graph}), world), world)
            for graph in (True, False)
        )
        ((ours,), (theirs,)) = with_.stages, without.stages
        assert ours.peak - theirs.peak == 64 << 20, "workspaces of its own"
        update = 3 * ours.held.largest * 4 if "optimizer" in more else 0
        alone = world == 1 or "global_batch" in more
        kept = max(theirs.working - (32 << 20), update) if alone else theirs.moving - (32 << 20)
        assert ours.graph == kept and theirs.graph == 0


def test_the_verb_shows_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "memory.svg"
    words = [*LLAMA, "--pp", "2", "--world", "4", "--global-batch", "8", "--gpu", "h200", "--megatron"]
    drawn = ["--draw", str(picture), "--draw-schedule", str(tmp_path / "plan.svg")]
    code, printed, told = verb(capsys, *words, *drawn)
    assert code == 0, told
    for word in ("stage", "moments", "in flight", "h200", "MFU", "Megatron-LM says"):
        assert word in printed
    assert max(map(len, printed.splitlines()[1:5])) <= 80
    assert verb(capsys, *words, "--draw-schedule", "-")[1].startswith("rank 0  F0")
    assert "excludes --json" in verb(capsys, *words, "--draw-schedule", "-", "--json")[2]
    assert picture.read_text().startswith("<svg")
    assert (tmp_path / "plan.svg").exists()
