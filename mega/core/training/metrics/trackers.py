"""Services that store the metrics of a run: Weights & Biases and MLflow, optional packages that are imported on demand.

Both use the metric names of the Llama-2 fork of Megatron-LM. A run that resumes continues with the same id, which is
stored next to the metrics file, and does not resend a step. If a service fails, the run continues without this service,
because the metrics file also contains all metrics.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mega.core.config.sections import LogConfig
from mega.core.files import whole_file
from mega.core.training.metrics.output import warn

PROJECT = "megatron-lm-3d"
"""Default project name of the Llama-2 fork of Megatron-LM."""

NAMES = {
    "consumed": "utils/steps-vs-samples",
    "lr": "utils/learning-rate",
    "batch": "utils/batch-size",
    "loss": "lm-loss-training/lm loss",
    "loss_scale": "others/loss-scale",
    "grad_norm": "others/grad-norm",
    "zeros": "others/num-zeros",
    "params_norm": "others/params-norm",
}
"""Column of a metrics row -> name of the metric in the Llama-2 fork of Megatron-LM."""


class Tracker(Protocol):
    """A metric tracking service, such as Weights & Biases. since: the last step that the service has already stored."""

    since: int

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def training_values(
    row: Mapping[str, float],
    *,
    tokens: int,
    devices: int,
    replicas: int,
    flops: float,
    memory: int = 0,
    peak: float | None = None,
    terms: Sequence[str] = (),
) -> dict[str, float]:
    """Return the metrics of a training step under the names of the Llama-2 fork of Megatron-LM. Metrics that the fork
    does not have are named in the same way.

    tokens: number of tokens in the global batch. replicas: number of data-parallel ranks. flops: FLOPs per token.
    memory: bytes used on rank 0. peak: peak TFLOP/s of a device, or None if unknown. terms: names of the terms of the
    loss.
    """
    names = {**NAMES, **{term: f"lm-loss-training/{term}" for term in terms}}
    others = {name: f"others/{name.replace('_', '-')}" for name in row if name not in names}
    columns = {**names, **others}
    values = {name: float(row[key]) for key, name in columns.items() if isinstance(row.get(key), int | float)}
    seconds = max(float(row["seconds"]), 1e-9)
    samples = float(row.get("batch") or 0)
    values |= {
        "stats/tflops": (tflops := tokens * flops / seconds / devices / 1e12),
        "stats/samples_per_sec": samples / seconds,
        "stats/samples_per_sec_per_replica": samples / seconds / replicas,
        "stats/tokens_per_sec": tokens / seconds,
        "stats/tokens_per_sec_per_replica": tokens / seconds / replicas,
    }
    values |= {"stats/memory": float(memory)} if memory else {}
    values |= {"stats/mfu": tflops / peak} if peak else {}
    if samples:
        values["others/actual_seq_length"] = tokens / samples
    return _finite(values)


def held_out_values(split: str, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the results of an evaluation under the metric names of the Llama-2 fork of Megatron-LM.

    >>> held_out_values("valid", {"loss": 2.5})
    {'lm-loss-validation/valid loss': 2.5}
    """
    return _finite({f"lm-loss-validation/{split} {name}": float(value) for name, value in measured.items()})


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


class Trackers:
    """The tracking services of a run. start: the step from which the run resumes. last: the last step in the run's
    metrics before the resume. settings: the options of the run."""

    def __init__(self, options: LogConfig, *, start: int, last: int, settings: Mapping[str, Mapping[str, object]]):
        self._note = Path(options.metrics + ".trackers.json")
        ids = _noted(self._note) if start else {}
        self._trackers: dict[str, Tracker] = {}
        if options.wandb:
            self._trackers["--wandb-project"] = wandb = WandbTracker(options, ids.get("wandb"), last, settings)
            ids = {**ids, "wandb": wandb.id}
        if options.mlflow_uri is not None:
            self._trackers["--mlflow-uri"] = mlflow = MlflowTracker(options, ids.get("mlflow"), settings)
            ids = {**ids, "mlflow": mlflow.id}
        if self._trackers:
            with whole_file(self._note) as file:
                file.write(json.dumps(ids).encode())

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step to all services that do not have the step yet."""
        for flag, tracker in list(self._trackers.items()):
            if step <= tracker.since:
                continue
            try:
                tracker.log(step, values)
            except Exception as error:
                del self._trackers[flag]
                warn(f"{flag}: {_line(error)}; the run continues without it")

    def close(self) -> None:
        for flag, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                warn(f"{flag}: {_line(error)}")
        self._trackers.clear()


def _noted(path: Path) -> dict[str, str]:
    """Return each service's run id from before the resume; empty if the file is absent or damaged."""
    try:
        ids = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in ids.items() if isinstance(value, str)} if isinstance(ids, dict) else {}


def _line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]


class WandbTracker:
    """A Weights & Biases run. With WANDB_MODE=offline, the run is stored next to the metrics."""

    def __init__(self, options: LogConfig, run_id: str | None, last: int, settings: Mapping[str, Mapping[str, object]]):
        wandb = importlib.import_module("wandb")
        self.since = last if run_id is not None else 0
        self.id = options.wandb_id or run_id or uuid.uuid4().hex[:8]
        name = options.wandb_name and f"{options.wandb_name}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
        try:
            self._run = wandb.init(
                project=options.wandb_project or PROJECT,
                entity=options.wandb_entity,
                name=name if run_id is None else None,
                id=self.id,
                resume="must" if options.wandb_id else "allow",
                dir=options.wandb_dir or os.path.dirname(os.path.abspath(options.metrics)),
                config=dict(settings),
            )
        except Exception as error:
            raise ValueError(
                f"--wandb-project {options.wandb_project or PROJECT}: {_line(error)}; WANDB_MODE=offline keeps the run "
                "here, for `wandb sync` later"
            ) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of an MLflow experiment, on a server or in a folder."""

    def __init__(self, options: LogConfig, run_id: str | None, settings: Mapping[str, Mapping[str, object]]):
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self._metric, self.since = entities.Metric, 0
        try:
            self._client = mlflow.MlflowClient(tracking_uri=options.mlflow_uri)
            name = options.mlflow_experiment
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
            if run_id is None:
                self.id = str(self._client.create_run(experiment, run_name=options.wandb_name).info.run_id)
                flat = {f"{table}.{key}": value for table, keys in settings.items() for key, value in keys.items()}
                for key, value in flat.items():
                    if value is not None:
                        self._client.log_param(self.id, key, str(value)[:500])
                return
            self.id = run_id
            history = self._client.get_metric_history(run_id, NAMES["loss"])
            self.since = max((point.step for point in history), default=0)
            self._client.update_run(run_id, status="RUNNING")
        except Exception as error:
            raise ValueError(f"--mlflow-uri {options.mlflow_uri}: {_line(error)}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        milliseconds = int(1000 * time.time())
        metrics = [self._metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.id)
