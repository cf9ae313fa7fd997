"""Rules of a run that the command line's table of bad inputs does not reach, and runs that have no problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega.core.config import toml
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve

TRAINS = {"micro_batch": 1, "steps": 4, "lr": 1e-3, "mock_data": True, "vocab": 100}


def problems(world: int = 1, **values: Any) -> list[str]:
    try:
        check(compose("tiny-gpt", flags=TRAINS | values), world)
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (1, {}),
        (8, {"tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8}),
        (4, {"tp": 4, "kv_heads": 4, "zero": 1, "dtype": "bf16"}),
        (1, {"steps": None, "samples": 100, "lr_decay_samples": 50, "lr_warmup_samples": 10}),
        (1, {"lr_warmup_fraction": 0.01, "min_lr": 1e-4, "lr_decay": "cosine"}),
        (1, {"weight_decay_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}),
        (2, {"pp": 2, "schedule": "gpipe", "dtype": "fp64"}),
    ],
)
def test_good_runs(world: int, values: dict[str, Any]) -> None:
    assert problems(world, **values) == []


def test_a_resolved_run_passes_as_the_typed_one_does() -> None:
    run = compose("tiny-gpt", flags=TRAINS | {"tp": 2, "pp": 2, "save": "new", "save_interval": 2})
    check(run, 4)
    check(toml.parse(toml.write(resolve(run, 4))), 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "bf16", "grad_dtype": "fp16"}, "--grad-dtype fp16: needs --dtype fp16, not bf16"),
        ({"masters": False}, "--no-masters (--memory-efficient-fp16): needs --dtype bf16 or fp16, not fp32"),
        ({"embedding_fp32": True}, "--embedding-fp32: needs --dtype bf16 or fp16, not fp32"),
        ({"residual_fp32": True, "dtype": "bf16", "post_norm_residual": True}, "--residual-fp32: excludes --post-norm"),
        ({"residual_fp32": True}, "--residual-fp32: needs --dtype bf16 or fp16, not fp32"),
        ({"stage_layers": (1, 2)}, "--stage-layers 1 2: must be 1 numbers (--pp x --chunks) whose sum is --layers 2"),
        ({"layers_per_chunk": 3}, "--layers-per-chunk 3: must divide the 2 layers of a stage"),
        ({"rampup": (1, 1, 10)}, "--rampup 1 1 10: needs --samples and excludes --steps"),
        ({"rampup": (1, 2), "steps": None, "samples": 10}, "--rampup 1 2: must be three numbers"),
        (
            {"rampup": (1, 2, 10), "steps": None, "samples": 10, "global_batch": 4},
            "--rampup 1 2 10: must reach --global-batch 4 from 1 in whole increments of 2",
        ),
        (
            {"rampup": (1, 1, 10), "steps": None, "samples": 10, "global_batch": 4, "micro_batch": 2},
            "--rampup 1 1 10: passes through a batch of 1, which must be a multiple of 2",
        ),
        ({"zero": 2, "pp": 2}, "--zero 2: needs --pp 1, not 2"),
        ({"recompute": "full"}, "--recompute full: needs --recompute-method; valid: uniform, block"),
        ({"keep_last": 2}, "--keep-last 2: needs --save"),
        (
            {"finetune": True, "load": "x", "resume": "step-0000001", "save": "x", "save_interval": 1},
            "--resume step-0000001: excludes",
        ),
        ({"valid_data": ("x",), "mock_data": False}, "--train-data is missing: "),
        ({"qk_norm_whole": True}, "--qk-norm-whole: needs --norm rmsnorm"),
        ({"window_layers": (1, 0)}, "--window-layers 1 0: needs --window"),
        ({"head_bias": True, "logit_softcap": 3.0}, "--head-bias: excludes --logit-softcap"),
    ],
)
def test_bad_runs(values: dict[str, Any], message: str) -> None:
    assert any(line.startswith(message) for line in problems(**values)), problems(**values)


def test_data_files_are_looked_for_in_pairs(tmp_path: Path) -> None:
    prefix = str(tmp_path / "text")
    for suffix, left in ((".bin", ".idx"), (".idx", None)):
        (tmp_path / f"text{suffix}").write_bytes(b"")
        found = problems(mock_data=False, data_path=("1", prefix))
        assert len(found) == (left is not None)
        assert all(f"there is no {prefix}{left};" in line for line in found)


def test_a_dry_run_needs_neither_data_nor_length() -> None:
    nothing: dict[str, Any] = {"steps": None, "lr": None, "mock_data": False}
    assert problems(**nothing, dry_run=True) == []
    assert len(problems(**nothing)) == 3


def test_a_tensor_split_that_is_finer_than_the_kv_heads_is_told_once() -> None:
    assert problems(4, tp=4, heads=4, kv_heads=2) == ["--kv-heads 2: must be divisible by --tp 4; valid --tp: 1, 2"]


def test_valid_tensor_splits_divide_all_that_is_split() -> None:
    found = problems(4, tp=4, heads=6, hidden=192, ffn=768)
    assert found == ["--heads 6: must be divisible by --tp 4; valid --tp: 1, 2, 3, 6"]
    assert problems(5, tp=5, heads=6, hidden=192, ffn=512) == [
        "--heads 6: must be divisible by --tp 5; valid --tp: 1, 2",
        "--ffn 512: must be divisible by --tp 5; valid --tp: 1, 2",
    ]


def test_a_model_that_comes_from_the_checkpoint_is_not_asked_for(tmp_path: Path) -> None:
    flags = {"micro_batch": 1, "seq_length": 8, "steps": 4, "lr": 1e-3, "mock_data": True}
    (tmp_path / "step-0000001").mkdir()
    check(compose(flags=flags | {"use_checkpoint_config": True, "load": str(tmp_path)}), 1)
    with pytest.raises(ValueError, match="--layers is missing"):
        check(compose(flags=flags), 1)
