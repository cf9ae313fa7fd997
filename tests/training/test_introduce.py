"""What a run says of itself before its first step, and in its first lines: short, and what a user asks first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.config.compose import compose
from mega.core.config.resolve import no_overlap_reason, resolve
from mega.core.config.sections import LogConfig
from mega.core.ops import cudnn
from mega.core.training.metrics.meters import Meters
from mega.core.training.start.introduce import expert_axes, overlap_note, summary
from mega.core.training.wire import chosen_ops

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 2 --seq-length 8 --vocab 64 --mock-data --micro-batch 2 --lr 1e-3 "
    "--eval-iters 0 --lr-decay constant --device cpu --no-progress"
).split()


def test_a_run_and_a_resumed_one_introduce_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*RUN, "--save", str(tmp_path), "--save-interval", "11"]
    assert main([*run, "--steps", "11"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "model: gpt, 1 layers, hidden 8, 2 heads, ffn 32, vocabulary 64; 1464 parameters"
    assert said[1] == "layout: 1 rank"
    assert said[2].startswith("device: CPU, ") and said[2].endswith("; dtype fp32")
    assert said[3] == ("operators: torch (no CUDA device); attention: plain torch, for dropout; matmuls: plain torch")
    assert said[4] == "batch: 2 x 8 = 16 tokens a step; micro batch 2, 1 microbatch a rank"
    assert said[5] == "length: 11 steps, 176 tokens"
    assert said[6] == f"saves: in {tmp_path} every 11 steps, and at the end; metrics in metrics.jsonl there"
    assert [line[:10] for line in said if line.startswith("step ")] == ["step  1/11", "step 10/11", "step 11/11"]
    assert main(["checkpoint", "show", str(tmp_path), "--tensors"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{tmp_path / 'step-0000011'}: step 11, ") and shown[0].endswith(" bytes")
    assert shown[1] == "verdict on the training: good" and shown[2].startswith("bytes: not checked; ")
    assert shown[3:5] == [said[0], said[1]] and shown[5].startswith("loss: ") and shown[6].startswith("written: ")
    assert ["weights/model.layers.0.self_attn.q_proj.weight", "8", "x", "8", "float32"] in map(str.split, shown)
    assert main([*run, "--steps", "12", "--resume", "auto", "--dtype", "bf16", "--override-schedule"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "length: 12 steps, 192 tokens; 11 steps are done" in said
    assert "not as in the checkpoint: --dtype bf16 (was fp32)" in said
    assert main([*RUN, "--steps", "99", "--exit-tokens", "32"]) == 0
    assert "length: 2 steps, 32 tokens" in capsys.readouterr().out.splitlines()


DROPS = {"attention_dropout": 0.1}
CUDNN, OURS = "torch's fused kernels, cuDNN's first", "our kernels, for "
WIDE = "cuBLAS, gradients in fp32"


@pytest.mark.parametrize(
    ("preset", "flags", "attention", "matmuls"),
    [
        ("llama2-7b", {}, CUDNN, WIDE),
        ("gpt2-345m", {}, f"{OURS}dropout", WIDE),
        ("gpt2-345m", {"attention_dropout": 0.0}, "our kernels on Hopper GPUs, else cuDNN's", WIDE),
        ("mistral-7b", {"seq_length": 8192}, f"{OURS}a window", WIDE),
        ("bert-345m", {"fp8": True}, f"{OURS}dropout and documents", "cuBLAS in fp8"),
        ("llama2-7b", {"dtype": "fp32"}, "torch's fused kernels", WIDE),
        ("gpt2-345m", {"dtype": "fp32"}, "plain torch, for dropout", WIDE),
        ("llama2-7b", {"ops": "reference"}, "plain torch", "plain torch"),
        ("llama2-7b", {"ops": "reference", "fp8": True}, "plain torch", "fp8, emulated"),
    ],
)
def test_on_a_gpu_it_says_which_attention_and_which_matmuls(
    preset: str, flags: dict[str, Any], attention: str, matmuls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "version", lambda: None)
    said = _said_on_a_gpu(preset, flags)
    (line,) = (line for line in said if line.startswith("operators: "))
    assert f"; attention: {attention}" in line and line.endswith(f"; matmuls: {matmuls}") and len(line) <= 120

    advised = [line for line in said if "'.[cudnn]'" in line]
    assert len(advised) == (preset == "mistral-7b") and all(len(line) <= 120 for line in advised)


def test_on_a_gpu_with_cudnns_package_a_window_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "version", lambda: "1.18.0")
    said = _said_on_a_gpu("mistral-7b", {"seq_length": 8192})
    (line,) = (line for line in said if line.startswith("operators: "))
    assert "; attention: cuDNN's kernels, for a window (nvidia-cudnn-frontend 1.18.0); " in line
    assert not any("'.[cudnn]'" in line for line in said)


def _said_on_a_gpu(preset: str, flags: dict[str, Any]) -> list[str]:
    flags = {"dtype": "bf16", "micro_batch": 1, "vocab": 64, "device": "cuda", **flags}
    run = resolve(compose(preset, flags=flags), 1)
    device = SimpleNamespace(is_cuda=True, name="H", backend="nccl")
    return list(summary(run, device, chosen_ops(run, torch.device("meta")), 1))  # type: ignore[arg-type]


def test_a_line_of_the_log_has_no_empty_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = LogConfig(metrics=str(tmp_path / "m.jsonl"), progress=False, log_interval=1000)
    meters = Meters(options, start=0, steps=1_000_000, flops_per_token=1e12, devices=8, peak=989.0)
    row = {"consumed": 10**9, "loss": 11.25, "lr": 1e-4, "grad_norm": 1234.5, "seconds": 12.3456, "skipped": 3}
    row |= {"loss_scale": 65536.0, "params_norm": 1234.5, "zeros": 0.5}
    meters.step(1000, row, 10**6, 10**11)
    meters.evaluation(1000, "valid", {"loss": 11.25})
    meters.close()
    line, _ = capsys.readouterr().out.splitlines()
    assert "n/a" not in line
    for field in ("step    1000/1000000", "loss 11.250000", "lr 1.000e-04", "grad norm", "skipped 3", "eta "):
        assert field in line


def test_axes_of_experts_are_named() -> None:
    sizes: dict[str, object] = {"layers": 1, "hidden": 8, "heads": 2, "seq_length": 8, "vocab": 64, "micro_batch": 2}
    sizes |= {"experts": 4, "expert_ffn": 8, "steps": 1, "lr": 1e-3, "mock_data": True}
    assert expert_axes(resolve(compose(flags={**sizes, "ep": 2}), 2)) == ["ep 2"]
    assert expert_axes(resolve(compose(flags=sizes), 2)) == []


@pytest.mark.parametrize(
    ("changes", "overlaps", "before", "said"),
    [
        ({}, True, None, "overlap GEMMs, as this is faster on GPUs that can map each other's memory"),
        ({}, False, None, "do not overlap GEMMs, as ranks cannot map each other's memory"),
        ({}, False, False, "do not overlap GEMMs, as in the checkpoint"),
        ({}, False, True, "do not overlap GEMMs, as ranks cannot map each other's memory"),
        ({"tp_overlap": False}, False, None, "do not overlap GEMMs, as asked"),
        ({"micro_batch": 1}, False, None, "do not overlap GEMMs, as blocks are small"),
        ({"micro_batch": 1}, True, True, "overlap GEMMs, as in the checkpoint"),
        ({"micro_batch": 1}, False, True, "do not overlap GEMMs, as ranks cannot map each other's memory"),
        ({"micro_batch": 1, "tp_overlap": True}, True, False, "overlap GEMMs, as asked"),
        ({"fp8": True}, False, True, "do not overlap GEMMs, which --fp8 excludes"),
    ],
)
def test_whether_tensor_ranks_overlap_their_exchanges_and_why(
    changes: dict[str, Any], overlaps: bool, before: bool | None, said: str
) -> None:
    run = resolve(compose("gpt-22b", flags={"tp": 4, "sequence_parallel": True, "micro_batch": 4, **changes}), 4)
    assert overlap_note(run, overlaps, before, no_overlap_reason(run)) == f"exchanges of tensor ranks: {said}"


def test_a_dry_run_says_whether_exchanges_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    line = "pretrain --model gpt-22b --layers 2 --tp 4 --sequence-parallel --micro-batch 4 --dry-run --world 4".split()
    for more, said in (([], "overlap GEMMs, as this is faster on GPUs"), (["--no-tp-overlap"], "do not overlap GEMMs")):
        assert main([*line, *more]) == 0
        assert f"exchanges of tensor ranks: {said}" in " ".join(capsys.readouterr().out.split())
