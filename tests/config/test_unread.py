"""Options that nothing reads are accepted with a line each, and a run that keeps nothing says so."""

from __future__ import annotations

from typing import Any

import pytest

from mega import cli
from mega.core.config.compose import compose
from mega.core.config.page import page
from mega.core.config.run import entries
from mega.core.training.start.inputs import resolve_run

TRAINS = {"micro_batch": 1, "steps": 4, "lr": 1e-3, "mock_data": True, "vocab": 100}
KEEPS_NOTHING = "without --save this run keeps no weights, only ./metrics.jsonl; to keep them give --save DIR,"


def notes(**values: Any) -> list[str]:
    return list(resolve_run(compose("tiny-gpt", flags=TRAINS | values), 1).notes)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sequence_parallel": True}, "--sequence-parallel: changes nothing without --tp of at least 2"),
        ({"cp_comm": "ring"}, "--cp-comm ring: changes nothing without --cp of at least 2"),
        ({"rope_base": 5e5}, "--rope-base 500000.0: changes nothing without --position rope"),
        (
            {"family": "llama", "rope_scaling_factor": 4.0},
            "--rope-scaling-factor 4.0: changes nothing without --rope-scaling llama3",
        ),
        ({"dtype": "bf16", "hysteresis": 4}, "--hysteresis 4: changes nothing without --dtype fp16"),
        ({"adafactor_clip": 2.0}, "--adafactor-clip 2.0: changes nothing without --optimizer adafactor"),
        (
            {"optimizer": "sgd", "adam_beta2": 0.95},
            "--adam-beta2 0.95: changes nothing without --optimizer adam or lamb",
        ),
        (
            {"lr_decay": "constant", "min_lr": 1e-4},
            "--min-lr 0.0001: changes nothing without --lr-decay linear or cosine or inverse-square-root",
        ),
        (
            {"lr_warmup_init": 1e-5},
            "--lr-warmup-init 1e-05: changes nothing without --lr-warmup-steps of at least 1 or",
        ),
        ({"split": "9,1"}, "--split 9,1: changes nothing without --data-path"),
        ({"load_optim": False}, "--no-load-optim: changes nothing without --load or --resume"),
        ({"save_optim": False}, "--no-save-optim: changes nothing without --save"),
        ({"override_schedule": True}, "--override-schedule: changes nothing without --load or --resume"),
        ({"tensorboard_interval": 5}, "--tensorboard-interval 5: changes nothing without --tensorboard-dir"),
        ({"vocab_size": 100}, "--vocab-size 100: changes nothing without --tokenizer NullTokenizer"),
        (
            {"tokenizer": "NullTokenizer", "vocab_size": 99, "vocab_file": __file__},
            f"--vocab-file {__file__}: changes nothing, NullTokenizer does not read it",
        ),
    ],
)
def test_what_nothing_reads_is_said(values: dict[str, Any], line: str) -> None:
    found = notes(**values)
    assert sum(note.startswith(line) for note in found) == 1, found


def test_what_is_read_is_not() -> None:
    read: dict[str, Any] = {"family": "llama", "rope_base": 5e5, "min_lr": 1e-4, "adam_beta2": 0.95, "dtype": "fp16"}
    read |= {"hysteresis": 4, "lr_warmup_steps": 1, "lr_warmup_init": 1e-5}
    assert [line[: len(KEEPS_NOTHING)] for line in notes(**read)] == [KEEPS_NOTHING]


def test_only_a_run_that_trains_and_does_not_save_keeps_nothing() -> None:
    assert notes(save="new", save_interval=2) == []
    assert not any("without --save this" in line for line in notes(skip_train=True))


def test_a_dry_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "pretrain --model tiny-gpt --micro-batch 1 --steps 4 --lr 1e-3 --mock-data --vocab 100 --dry-run"
    assert cli.main(line.split()) == 0
    assert KEEPS_NOTHING.split(";")[0] in capsys.readouterr().out.replace("\n", " ")


def test_each_reader_is_an_option() -> None:
    for entry in entries().values():
        assert set(entry.option.read_with) <= entries().keys()
    assert "`--keep-every`" in page()
