"""`mega eval --task`: run one benchmark on one model in any layout, resume a killed run, and report the result.

    prepare     in the process that the user started: check model, layout and flags before any rank starts
    evaluate    on every rank: load stages, score examples, accumulate sums; rank 0 stores the sums every few seconds
                and reports

The sums are stored next to --json, as FILE.partial, with a fingerprint of model, data and settings. The fingerprint
does not include the layout or the micro-batch size, so an evaluation in another layout can resume from the stored sums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import torch

from mega import __version__
from mega.core.architecture import architecture
from mega.core.config.compose import GivenOptions
from mega.core.config.resolve import column_unit
from mega.core.config.run import Options
from mega.core.data.labelled import content as folder_content
from mega.core.device import Device
from mega.core.files import fingerprint, whole_file
from mega.core.inference.loading.load import OpenedModel
from mega.core.inference.retrieval import OpenRetriever, Retriever
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.consistency import Comparable, check_consistent
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.tasks.ensemble import write
from mega.core.tasks.model import (
    CheckedModel,
    ModelHere,
    as_rank,
    check_model,
    layout_of,
    model_settings,
    open_here,
    row_unit,
    tokenizer_of,
)
from mega.core.tasks.options import BenchmarkInputs, TaskOptions, benchmark
from mega.core.tasks.show import Bar, show
from mega.core.tasks.stored_answers import check_result
from mega.core.tasks.task import Benchmark, Done, Estimate, RowBenchmark, Sums, score
from mega.core.terminal import discard
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import below

SAVE_SECONDS = 5.0
HASHED_BYTES = 1 << 30
"""File size above which a data file is identified by its size and modification time instead of a hash of its
content."""


@dataclass(frozen=True)
class CheckedEvaluation:
    """An evaluation that `prepare` has checked."""

    model: CheckedModel
    options: TaskOptions
    json: str  # path of the file for the result
    retro: str | None = None  # database of neighbours for a model with a retriever
    retriever: OpenRetriever | None = None  # function that opens the database of neighbours
    quiet: bool = False  # print nothing


def note(line: str) -> None:
    """Print a message for the user."""
    print(line, file=sys.stderr)


def prepare(
    options: Options,
    given: GivenOptions,
    benchmark: TaskOptions,
    out: str,
    world: int,
    retriever: OpenRetriever | None = None,
    report: Callable[[str], None] | None = note,
) -> CheckedEvaluation:
    """Check an evaluation before any rank starts. report: function that receives messages for the user; if None,
    neither this function nor the evaluation prints messages.

    Errors: ValueError naming flag or file, its value, and the rule.
    """
    model, model_files = check_model(options, given, world, benchmark.task, retrieves=True)
    lines = report or discard
    evaluation = CheckedEvaluation(model, benchmark, out, options.data.retro, retriever, report is None)
    task, tokenizer = _benchmark(evaluation, model_files, lines)
    # The database is opened here only to report errors before any rank starts.
    _retriever(evaluation, model_files, tokenizer, "cpu")
    check_result(Path(out), model_files.digest, model.load, f"eval-{benchmark.task}.json", lines)
    for line in getattr(task, "notes", ()):
        lines(line)
    # The examples are read here only to report errors in a file once, before any rank starts.
    task.examples(Path(benchmark.valid_data[0]))
    return evaluation


def _benchmark(
    evaluation: CheckedEvaluation, opened: OpenedModel, report: Callable[[str], None] = lambda line: None
) -> tuple[Benchmark[object], Tokenizer | None]:
    model, run = evaluation.model, evaluation.model.run
    tokenizer = tokenizer_of(run, opened, report)
    unit, allows_mismatch = lcm(column_unit(run.parallel), row_unit(run.model)), run.data.allow_tokenizer_mismatch
    vocab = architecture(run.model).input.vocab
    inputs = BenchmarkInputs(evaluation.options, tokenizer, model.length, unit, vocab, allows_mismatch, report)
    return benchmark(inputs), tokenizer


def _retriever(
    evaluation: CheckedEvaluation, opened: OpenedModel, tokenizer: Tokenizer | None, device: str
) -> Retriever | None:
    """Open the retriever; None if the evaluation has no database of neighbours. Errors: ValueError naming flag or
    file."""
    if evaluation.retriever is None:
        return None
    if tokenizer is None:
        raise ValueError("--tokenizer is missing: chunks are embedded as text; give its kind and files")
    return evaluation.retriever(opened.model, tokenizer, device)


# On every rank ------------------------------------------------------------------------------------------------------


def evaluate(evaluation: CheckedEvaluation) -> int:
    """Run the evaluation as one rank of the job that the environment describes, and return 0. Errors: ValueError on
    every rank."""
    as_rank(evaluation.model.run, partial(run_here, evaluation))
    return 0


def evaluation_result(evaluation: CheckedEvaluation) -> Mapping[str, object]:
    """Run the evaluation as `evaluate` does, and return the content of the result file, on every rank."""
    return as_rank(evaluation.model.run, partial(result_here, evaluation))[1]


def run_here(
    evaluation: CheckedEvaluation, rank: int, world: int, device: Device, groups: Groups | None = None
) -> Mapping[str, Estimate]:
    """Run one rank's share of the evaluation, and return the estimates, which are identical on all ranks."""
    return result_here(evaluation, rank, world, device, groups)[0]


def result_here(
    evaluation: CheckedEvaluation, rank: int, world: int, device: Device, groups: Groups | None = None
) -> tuple[Mapping[str, Estimate], Mapping[str, object]]:
    """Run one rank's share of the evaluation, and return the estimates and the result that rank 0 writes and prints."""
    model = open_here(evaluation.model, rank, world, device, groups)
    task, tokenizer = _benchmark(evaluation, model.opened)
    examples = task.examples(Path(evaluation.options.valid_data[0]))[: evaluation.options.limit]
    description = _about(evaluation, model, tokenizer, len(examples))
    retriever = _retriever(evaluation, model.opened, tokenizer, device.torch.type)
    # `open_here` has compared code, flags and weights.
    check_consistent(Comparable(_compared(description), {}), model.mesh.everyone, device.torch)
    progress = _Progress(evaluation, str(description["fingerprint"]), task, len(examples), model.mesh, device)
    with progress.interruptible():
        estimates = score(
            model.row_scorer()
            if isinstance(task, RowBenchmark)
            else model.scorer(greedy=task.greedy, retriever=retriever),
            task,
            examples,
            evaluation.model.micro_batch,
            sums=progress.sums,
            done=progress.begun,
            after=progress,
        )
    result = {**description, **_result(task, estimates, progress), "memory": device.memory_peak()}
    if rank == 0:
        progress.close()
        if isinstance(task, RowBenchmark) and progress.sums.shares is not None:
            result["predictions"] = str(predictions_path(evaluation.json))
            write(predictions_path(evaluation.json), task.predictions(progress.sums.shares))
        with whole_file(Path(evaluation.json)) as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
        # The partial file is removed last, so that a kill before this line loses no progress.
        progress.path.unlink(missing_ok=True)
        if not evaluation.quiet:
            show(result, task.headline, evaluation.json)
    return estimates, result


def _about(
    evaluation: CheckedEvaluation, here: ModelHere, tokenizer: Tokenizer | None, examples: int
) -> dict[str, object]:
    """Return all settings of an evaluation, and a fingerprint of the settings that affect the score."""
    options, run = dataclasses.asdict(evaluation.options), here.run
    model = model_settings(evaluation.model, here)
    deciding: dict[str, object] = {
        "options": {name: value for name, value in options.items() if name != "valid_data"},
        "data": {file: _content(Path(file)) for file in evaluation.options.valid_data},
        "model": model,
        "tokenizer": None if tokenizer is None else tokenizer.identity()._asdict(),
        "seq_length": run.batch.seq_length,
        "dtype": run.precision.dtype,
        "ops": run.runtime.ops,
        "examples": examples,
    }
    if evaluation.retro is not None:
        database_file = Path(evaluation.retro) / "retro.json"
        deciding["neighbours"] = _content(database_file) if database_file.is_file() else evaluation.retro
    identity = fingerprint({**deciding, "model": {**model, "path": None}})
    return {"task": evaluation.options.task, "fingerprint": identity, "settings": {**deciding, **layout_of(run)}}


def _compared(description: Mapping[str, object]) -> dict[str, str]:
    """Return the settings of an evaluation except the model, by user-readable names, for the comparison of ranks."""
    settings = below(description, "settings")
    values = {name: value for name, value in settings.items() if name not in ("options", "data", "model", "tokenizer")}
    tokenizer = below(settings, "tokenizer")
    return {
        "--task": str(description["task"]),
        **{f"--{name.replace('_', '-')}": str(value) for name, value in below(settings, "options").items()},
        **{f"the content of {file}": str(digest)[:12] for file, digest in below(settings, "data").items()},
        "the tokenizer": f"{tokenizer.get('kind')} {str(tokenizer.get('fingerprint'))[:12]}" if tokenizer else "none",
        **{name.replace("_", " "): str(value) for name, value in values.items()},
    }


def predictions_path(out: str) -> Path:
    """Return the path of the file with the predictions for every question, next to --json."""
    return Path(out).with_name(f"{Path(out).stem}-predictions.jsonl")


def _content(path: Path) -> str:
    """Return a digest of the content of a file, a folder, or a pair of token files."""
    digest = hashlib.sha256()
    if path.is_dir():
        return folder_content(path)
    for part in (path, Path(f"{path}.idx"), Path(f"{path}.bin")):
        if not part.is_file():
            continue
        status = part.stat()
        digest.update(f"{status.st_size} ".encode())
        if status.st_size > HASHED_BYTES:
            digest.update(f"{status.st_mtime_ns} ".encode())
            continue
        with part.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _result(judged: Benchmark[object], found: Mapping[str, Estimate], progress: _Progress) -> dict[str, object]:
    current, resumed = progress.done, progress.begun
    seconds = max(current.seconds, 1e-9)
    return {
        "figures": [_finite(figure._asdict()) for figure in judged.figures(found)],
        "terms": {name: _finite(each._asdict()) for name, each in found.items()},
        "tokens": current.tokens,
        "seconds": current.seconds,
        "tokens_per_second": (current.tokens - resumed.tokens) / seconds if current.tokens > resumed.tokens else None,
        "resumed_after": resumed.examples or None,
        "ranks": progress.mesh.world,
        "device": progress.device.name,
        "version": __version__,
        "torch": torch.__version__,
    }


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace NaN and infinities with None, because JSON cannot represent them.

    >>> _finite({"name": "ppl", "value": math.nan})
    {'name': 'ppl', 'value': None}
    """
    infinite = (name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value))
    return {**values, **dict.fromkeys(infinite)}


class _Progress:
    """The progress of an evaluation, which rank 0 stores on disk and shows on a terminal. sums, begun: sums and
    progress of an earlier process, identical on every rank."""

    def __init__(
        self,
        evaluation: CheckedEvaluation,
        fingerprint: str,
        judged: Benchmark[object],
        total: int,
        mesh: Mesh,
        device: Device,
    ):
        self.path, self.mesh, self.device = Path(f"{evaluation.json}.partial"), mesh, device
        self._fingerprint, self._saved = fingerprint, time.monotonic()
        stored = self._read() if mesh.rank == 0 else None
        stored = gather_json(stored, mesh.everyone, device.torch)[0]
        self.begun, self.sums = Done(), Sums(judged.terms)
        if stored is not None:
            self.begun = Done(stored["examples"], stored["tokens"])
            self.sums = Sums(judged.terms, torch.tensor(stored["sums"], dtype=torch.float64))
        if isinstance(judged, RowBenchmark):
            rows = [] if stored is None else stored.get("shares", [])
            self.sums.shares = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), judged.classes)
        self.done = self.begun
        bar = evaluation.model.run.log.progress and sys.stderr.isatty()
        prints = mesh.rank == 0 and not evaluation.quiet
        self._bar = Bar(evaluation.options.task, total, self.begun.examples, bar) if prints else None

    def _read(self) -> dict[str, Any] | None:
        """Read the progress stored by an earlier process of this evaluation; None if the file is damaged or belongs to
        another evaluation."""
        try:
            stored = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("fingerprint") != self._fingerprint:
            print(f"{self.path}: is of another model, data or settings; starting from the beginning", file=sys.stderr)
            return None
        print(f"{self.path}: resuming after {stored['examples']} examples", file=sys.stderr)
        return stored

    def __call__(self, done: Done, sums: Sums) -> None:
        self.done = done
        if self._bar is None:
            return
        self._bar.update(done)
        if time.monotonic() - self._saved < SAVE_SECONDS:
            return
        state = {
            "fingerprint": self._fingerprint,
            "examples": done.examples,
            "tokens": done.tokens,
            "sums": sums.values.tolist(),
            **({} if sums.shares is None else {"shares": sums.shares.tolist()}),
        }
        with whole_file(self.path) as file:
            file.write(json.dumps(state).encode())
        self._saved = time.monotonic()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Return a context in which Ctrl-C prints the file that contains the progress."""
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            if self._bar is not None and self.path.exists():
                print(f"{self.path}: holds what was done; the same line resumes there", file=sys.stderr)
            raise

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
