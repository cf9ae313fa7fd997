"""A DeepSpeed JSON: what becomes of each key, and what is refused by name."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.command_line.legacy import deepspeed
from mega.command_line.legacy.deepspeed import values
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.optim.schedule import LearningRate
from mega.core.training.schedules import Schedules

ASC22: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-2}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 100, "total_num_steps": 1000, "warmup_type": "linear"},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 16,
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e6,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e6,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": True,
    },
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "yuan"},
}
"""The keys of the run that trained Yuan."""


def test_worked_examples() -> None:
    assert doctest.testmod(deepspeed).failed == 0


def test_a_whole_file() -> None:
    assert values(ASC22, "ds.json") == {
        "global_batch": 32,
        "micro_batch": 2,
        "accumulation": 4,
        "clip_grad": 1.0,
        "log_interval": 10,
        "optimizer": "adam",
        "lr": 2e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "weight_decay": 1e-2,
        "lr_decay": "linear",
        "lr_warmup_steps": 100,
        "lr_warmup_style": "linear",
        "lr_decay_steps": 1000,
        "dtype": "fp16",
        "initial_loss_scale": 65536.0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1.0,
        "zero": 2,
        "bucket_size": 5_000_000,
        "overlap_grad_reduce": True,
        "optimizer_offload": True,
        "tensorboard_dir": "logs/yuan",
    }


def test_the_whole_file_is_a_run() -> None:
    """On the 4 data ranks that its batch sizes mean; another number is told."""
    typed = {"steps": 2000, "mock_data": True, "vocab": 100}
    run = compose("tiny-gpt", values(ASC22, "ds.json"), typed)
    check(run, 4)
    with pytest.raises(ValueError, match="--accumulation 4: --micro-batch 2 x 2 data-parallel ranks x this must be"):
        check(run, 2)
    without = compose("tiny-gpt", {"micro_batch": 2, "accumulation": 4}, typed)
    assert resolve(without, 4).batch.global_batch == 32


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16: is enabled along with fp16; enable one of them",
        ),
        ({"fp_16": {"enabled": True}}, "fp_16: is not a key of DeepSpeed's that is known here (nearest: fp16)"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage: must be a whole number, not "two"'),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device: nvme is not supported; valid: cpu, none",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device: cpu is not supported: parameters stay on the device; valid: none",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "optimizer.type: OneBitAdam is not supported; valid: Adam, AdamW, Lamb, SGD, Adafactor",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode: false is not supported: adam's weight decay is decoupled; valid: true",
        ),
        ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas: must be two numbers, not 0.9"),
        (
            {"scheduler": {"type": "TwoCycle"}},
            "scheduler.type: TwoCycle is not supported (nearest: OneCycle); valid: WarmupLR, WarmupDecayLR, Warmup",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}},
            "scheduler.params.cycle_momentum: is true where it is left out: Adam's constants do not change; valid: fal",
        ),
        (
            {"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.0}}},
            "optimizer.params.max_grad_norm: 2.0: must be gradient_clipping, which is 1.0",
        ),
        (
            {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
            "curriculum_learning: every step has samples of --seq-length tokens; valid: enabled false",
        ),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype: fp8 is not supported; valid:"),
        ({"train_batch_size": True}, "train_batch_size: must be a whole number, not true"),
        ([], "must be one JSON object"),
    ],
)
def test_what_is_refused(content: Any, line: str) -> None:
    with pytest.raises(ValueError) as error:
        values(content, "ds.json")
    assert str(error.value).startswith(f"ds.json: {line}")


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        values({"moe": {}, "amp": {"enabled": True}, "zero_optimization": {"cpu_offload_params": True}}, "ds.json")
    assert len(str(error.value).splitlines()) == 3


def test_auto_is_left_to_flags() -> None:
    assert values({"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "gradient_clipping": None}, "ds") == {}


def test_flags_win_and_files_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flag above JSON; a TOML file that says otherwise is an error, unless a flag decides."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}))
    (tmp_path / "run.toml").write_text("[parallel]\nzero = 2\n")
    given = ["pretrain", "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json"), "--print-config"]
    assert main([*given, "--clip-grad", "2"]) == 0
    told = capsys.readouterr().out
    assert "zero = 1\n" in told and "clip_grad = 2.0\n" in told
    given += ["--config", str(tmp_path / "run.toml")]
    assert main(given) == 2
    assert "ds.json: means --zero 1, --config has 2; give the flag" in capsys.readouterr().err
    assert main([*given, "--zero", "2"]) == 0
    assert "zero = 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "says"), [(None, "cannot be read"), ("{", "is not JSON")])
def test_bad_files(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--deepspeed-config .*: {says}"):
        deepspeed.read(str(path))


def test_a_range_test_is_the_same_line() -> None:
    """lr = min_lr (1 + step_rate x step / step_size)."""
    params = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 50, "lr_range_test_step_rate": 5}
    found = values({"scheduler": {"type": "LRRangeTest", "params": params}}, "ds.json")
    assert found == {"lr_decay": "range-test", "lr": 1e-4, "lr_decay_steps": 10}
    rate = LearningRate(peak=1e-4, least=0.0, warmup=0, decay=10 * 8, style="range-test")
    assert [rate(8 * step) for step in (0, 7, 100)] == pytest.approx(
        [1e-4 * (1 + 5 * step / 50) for step in (0, 7, 100)]
    )
    with pytest.raises(ValueError, match="lr_range_test_staircase: true is not supported"):
        values({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}}}, "ds.json")


def test_warm_up_by_logarithm() -> None:
    """DeepSpeed's WarmupLR: ln(step + 1) / ln(steps), 1 from the last step of the warm-up on."""
    rate = LearningRate(peak=1e-3, least=0.0, warmup=80, decay=800, style="constant", batch=8)
    expected = [0.0, 0.30103, 0.4771212547, 0.6020599913]
    assert [rate(8 * step) / 1e-3 for step in range(4)] == pytest.approx(expected, rel=1e-6)
    assert rate(72) == rate(80) == rate(400) == pytest.approx(1e-3)


SCALED = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
STAGE_3 = {
    "stage": 3,
    "stage3_max_live_parameters": 1e5,
    "stage3_param_persitence_threshold": 1e5,
    "reduce_bucket_size": 1e5,
    "cpu_offload": True,
    "cpu_offload_params": True,
    "cpu_offload_use_pin_memory": True,
}
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "stage 2": (
        {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 5e6},
            "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}},
            "gradient_clipping": 1.0,
            "fp16": SCALED,
            "zero_allow_untested_optimizer": False,
        },
        0,
    ),
    "stage 3": ({"train_batch_size": 16, "zero_optimization": STAGE_3, "fp16": SCALED}, 2),
    "release": (
        {"zero_optimization": {**STAGE_3, "offload_param": {"device": "cpu", "max_in_cpu": 4e8}}, "fp16": SCALED},
        3,
    ),
    "infinity": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/local", "pin_memory": True},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
            }
        },
        2,
    ),
    "curriculum": (
        {
            "train_batch_size": 512,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7},
            "curriculum_learning": {"enabled": True, "schedule_config": {"difficulty_step": 8}},
        },
        1,
    ),
}
"""What files of a team that trained Yuan ask for -> how much of it cannot be had."""


@pytest.mark.parametrize("name", REAL)
def test_files_of_a_team_load_or_say_what_to_switch(name: str) -> None:
    content, lacking = REAL[name]
    left_out: list[str] = []
    found = values(content, "ds.json", left_out)
    assert len(left_out) == lacking and found["zero"] == content["zero_optimization"]["stage"]
    if lacking:
        with pytest.raises(ValueError, match=r"leave (it|them) out by --deepspeed-lenient$"):
            values(content, "ds.json")


def test_what_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(REAL["stage 3"][0]))
    assert main(["pretrain", "--deepspeed-config", str(path), "--deepspeed-lenient", "--print-config"]) == 0
    printed = capsys.readouterr()
    assert "zero = 3\n" in printed.out and "optimizer_offload = true" in printed.out
    first, second = printed.err.splitlines()
    assert first == (
        f"left out: {path}: zero_optimization.cpu_offload_params: true is not supported: parameters stay on the "
        "device; valid: false"
    )
    assert "(nearest: stage3_param_persistence_threshold)" in second


def test_one_cycle() -> None:
    params = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10, "cycle_momentum": False}
    found = values({"scheduler": {"type": "OneCycle", "params": params}}, "ds.json")
    run = resolve(compose("tiny-gpt", found, {"steps": 40, "micro_batch": 8, "vocab": 64}), 1)
    rate = Schedules.of(run).lr
    expected = {0: 1e-5, 5: 5.05e-4, 10: 1e-3, 15: 5.05e-4, 20: 1e-5, 30: 1e-5}
    assert {step: rate(8 * step) for step in expected} == pytest.approx(expected)


def test_one_mistake_hides_no_other_key() -> None:
    """A schedule whose steps cannot be worked out still knows its other keys."""
    params = {"lr_range_test_step_size": 0, "lr_range_test_staircase": False}
    with pytest.raises(ValueError) as caught:
        values({"scheduler": {"type": "LRRangeTest", "params": params}}, "ds.json")
    assert len(str(caught.value).splitlines()) == 1
