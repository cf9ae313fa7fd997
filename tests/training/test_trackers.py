"""Weights & Biases in offline mode and a folder of MLflow, read back: the fork's names, and every step once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.training.metrics.trackers import NAMES, training_values

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 2 --lr 1e-3 "
    "--eval-iters 1 --eval-interval 2 --save-interval 2 --lr-decay constant --device cpu --no-progress "
    "--override-schedule"
).split()

STATS = {"tflops", "samples_per_sec", "samples_per_sec_per_replica", "tokens_per_sec", "tokens_per_sec_per_replica"}


def _killed_and_resumed(place: Path, *more: str) -> None:
    """A run of 4 steps whose last checkpoint is lost, as that of a kill, and its resume from step 2 to step 6."""
    run = [*RUN, "--save", str(place), *more]
    assert main([*run, "--steps", "4"]) == 0
    shutil.rmtree(place / "step-0000004")
    assert main([*run, "--steps", "6", "--resume", "auto"]) == 0
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "lr" in row] == [1, 2, 3, 4, 5, 6]


def test_the_names_are_the_forks() -> None:
    row = {"consumed": 16, "lr": 1e-3, "batch": 8, "loss": 2.0, "grad_norm": float("nan"), "seconds": 2.0, "skipped": 0}
    row |= {"largest_share": 0.25, "params_norm": 3.0}
    values = training_values(row, tokens=64, devices=4, replicas=2, flops=1e12, memory=2**30, peak=16.0)
    assert values == {
        "utils/steps-vs-samples": 16.0,
        "utils/learning-rate": 1e-3,
        "utils/batch-size": 8.0,
        "lm-loss-training/lm loss": 2.0,
        "others/actual_seq_length": 8.0,
        "others/params-norm": 3.0,
        "others/largest-share": 0.25,
        "others/seconds": 2.0,
        "others/skipped": 0.0,
        "stats/tflops": 8.0,
        "stats/mfu": 0.5,
        "stats/memory": 2.0**30,
        "stats/samples_per_sec": 4.0,
        "stats/samples_per_sec_per_replica": 2.0,
        "stats/tokens_per_sec": 32.0,
        "stats/tokens_per_sec_per_replica": 16.0,
    }


@pytest.mark.parametrize(("flag", "library"), [("--wandb-name", "wandb"), ("--mlflow-uri", "mlflow")])
def test_an_extra_that_is_absent_is_named_before_the_run(
    flag: str, library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else find(name))
    assert main([*RUN, "--steps", "2", "--save", "runs/x", flag, "here"]) == 2
    assert capsys.readouterr().err == f"mega: {flag} here: needs {library}; pip install '.[{library}]' in a clone\n"


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    _killed_and_resumed(tmp_path / "run", "--mlflow-uri", uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mega").experiment_id])
    assert {f"stats/{name}" for name in STATS} < set(run.data.metrics) and run.info.status == "FINISHED"
    assert run.data.params["model.hidden"] == "8"
    for name in (NAMES["loss"], NAMES["lr"], "stats/tokens_per_sec"):
        assert sorted(point.step for point in client.get_metric_history(run.info.run_id, name)) == [1, 2, 3, 4, 5, 6]
    valid = client.get_metric_history(run.info.run_id, "lm-loss-validation/valid loss")
    assert sorted(point.step for point in valid) == [2, 4, 6]
    assert "lm-loss-validation/valid perplexity" in run.data.metrics


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    _killed_and_resumed(tmp_path / "run", "--wandb-name", "first", "--wandb-project", "p")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # one id, which `wandb sync` makes one run
    rows = [row for file in files for row in _history(file)]
    steps = [row["_step"] for row in rows if NAMES["loss"] in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {f"stats/{name}" for name in STATS} < set(rows[0])
    assert [row["_step"] for row in rows if "lm-loss-validation/valid loss" in row] == [2, 4, 6]
    assert [row["_step"] for row in rows if "lm-loss-validation/valid perplexity" in row] == [2, 4, 6]


def _history(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of Weights & Biases, whose own process may still be writing its end."""
    from wandb.proto import wandb_internal_pb2 as records

    ended, deadline = False, time.monotonic() + 60
    while not ended:
        assert time.monotonic() < deadline, "the file has no end"
        found = []
        for data in _logged(file.read_bytes()):
            record: Any = records.Record()
            record.ParseFromString(data)
            ended = ended or record.WhichOneof("record_type") == "exit"
            if record.WhichOneof("record_type") != "history":
                continue
            items = record.history.item
            found.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return found


def _logged(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form, after a header of 7 bytes: blocks of 32 KiB; checksum, length, kind."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            yield whole
            whole = b""
