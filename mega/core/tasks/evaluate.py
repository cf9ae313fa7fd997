"""`mega eval --task`: one benchmark of one model at any layout; continued where it was killed, and reported.

    prepare     in the process that the user started: the model, the layout, the flags, before any rank starts
    evaluate    on every rank: stages, examples, sums; rank 0 keeps them on disk every few seconds and reports

What was added up lies next to --json, as FILE.partial, under a fingerprint of model, data and settings; the layout and
the micro batch are not of it.
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
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.tasks.ensemble import write
from mega.core.tasks.kept import check_result
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
from mega.core.tasks.task import Benchmark, Done, Estimate, RowBenchmark, Sums, score
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.start.consistency import Comparable, check_consistent
from mega.core.training.start.equal import code

SAVE_SECONDS = 5.0
HASHED_BYTES = 1 << 30
"""Of a data file larger than this, size and time stand for its content."""


@dataclass(frozen=True)
class CheckedEvaluation:
    """A checked evaluation. json: the file of the result. retro, retriever: the database of the neighbours that the
    model reads, and what opens it. quiet: print nothing."""

    model: CheckedModel
    options: TaskOptions
    json: str
    retro: str | None = None
    retriever: OpenRetriever | None = None
    quiet: bool = False


def note(line: str) -> None:
    """A line for the user."""
    print(line, file=sys.stderr)


def discard(line: str) -> None:
    """Prints nothing."""


def prepare(
    options: Options,
    given: GivenOptions,
    benchmark: TaskOptions,
    out: str,
    world: int,
    retriever: OpenRetriever | None = None,
    report: Callable[[str], None] | None = note,
) -> CheckedEvaluation:
    """report: takes lines for the user; None prints nothing, also while it runs.

    Errors: ValueError naming flag or file, its value, and the rule.
    """
    model, opened = check_model(options, given, world, benchmark.task, retrieves=True)
    lines = report or discard
    evaluation = CheckedEvaluation(model, benchmark, out, options.data.retro, retriever, report is None)
    judged, tokenizer = _benchmark(evaluation, opened, lines)
    _retriever(evaluation, opened, tokenizer, "cpu")  # what is wrong with it is said before any rank starts
    check_result(Path(out), opened.digest, model.load, f"eval-{benchmark.task}.json", lines)
    for line in getattr(judged, "notes", ()):
        lines(line)
    judged.examples(Path(benchmark.valid_data[0]))  # what is wrong with a file is reported once, and before any rank
    return evaluation


def _benchmark(
    evaluation: CheckedEvaluation, opened: OpenedModel, report: Callable[[str], None] = lambda line: None
) -> tuple[Benchmark[object], Tokenizer | None]:
    model, run = evaluation.model, evaluation.model.run
    tokenizer = tokenizer_of(run, opened, report)
    unit, mixed = lcm(column_unit(run.parallel), row_unit(run.model)), run.data.allow_tokenizer_mismatch
    vocab = architecture(run.model).input.vocab
    inputs = BenchmarkInputs(evaluation.options, tokenizer, model.length, unit, vocab, mixed, report)
    return benchmark(inputs), tokenizer


def _retriever(
    evaluation: CheckedEvaluation, opened: OpenedModel, tokenizer: Tokenizer | None, device: str
) -> Retriever | None:
    """Errors: ValueError naming flag or file."""
    if evaluation.retriever is None:
        return None
    if tokenizer is None:
        raise ValueError("--tokenizer is missing: chunks are embedded as text; give its kind and files")
    return evaluation.retriever(opened.model, tokenizer, device)


# On every rank ------------------------------------------------------------------------------------------------------


def evaluate(evaluation: CheckedEvaluation) -> int:
    """Score as one rank of the world that the environment describes: 0. Errors: ValueError on every rank."""
    as_rank(evaluation.model.run, partial(run_here, evaluation))
    return 0


def evaluation_result(evaluation: CheckedEvaluation) -> Mapping[str, object]:
    """The same; what the file holds, on every rank."""
    return as_rank(evaluation.model.run, partial(result_here, evaluation))[1]


def run_here(
    evaluation: CheckedEvaluation, rank: int, world: int, device: Device, groups: Groups | None = None
) -> Mapping[str, Estimate]:
    """One rank's part; what was found, the same on all of them."""
    return result_here(evaluation, rank, world, device, groups)[0]


def result_here(
    evaluation: CheckedEvaluation, rank: int, world: int, device: Device, groups: Groups | None = None
) -> tuple[Mapping[str, Estimate], Mapping[str, object]]:
    """One rank's part; what was found, and the result that rank 0 keeps and shows."""
    here = open_here(evaluation.model, rank, world, device, groups)
    judged, tokenizer = _benchmark(evaluation, here.opened)
    examples = judged.examples(Path(evaluation.options.valid_data[0]))[: evaluation.options.limit]
    about = _about(evaluation, here, tokenizer, len(examples))
    retriever = _retriever(evaluation, here.opened, tokenizer, device.torch.type)
    check_consistent(
        Comparable({**code(), **{name: str(value) for name, value in about.items()}}, {}),
        here.mesh.everyone,
        device.torch,
    )
    progress = _Progress(evaluation, str(about["fingerprint"]), judged, len(examples), here.mesh, device)
    with progress.interruptible():
        found = score(
            here.row_scorer()
            if isinstance(judged, RowBenchmark)
            else here.scorer(greedy=judged.greedy, retriever=retriever),
            judged,
            examples,
            evaluation.model.micro_batch,
            sums=progress.sums,
            done=progress.begun,
            after=progress,
        )
    result = {**about, **_result(judged, found, progress), "memory": device.memory_peak()}
    if rank == 0:
        progress.close()
        if isinstance(judged, RowBenchmark) and progress.sums.shares is not None:
            result["predictions"] = str(predictions_path(evaluation.json))
            write(predictions_path(evaluation.json), judged.predictions(progress.sums.shares))
        with whole_file(Path(evaluation.json)) as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
        progress.path.unlink(missing_ok=True)
        if not evaluation.quiet:
            show(result, judged.headline, evaluation.json)
    return found, result


def _about(
    evaluation: CheckedEvaluation, here: ModelHere, tokenizer: Tokenizer | None, examples: int
) -> dict[str, object]:
    """Every setting that makes a score, and a hash of those that decide it."""
    asked, run = dataclasses.asdict(evaluation.options), here.run
    model = model_settings(evaluation.model, here)
    decides: dict[str, object] = {
        "options": {name: value for name, value in asked.items() if name != "valid_data"},
        "data": {file: _content(Path(file)) for file in evaluation.options.valid_data},
        "model": model,
        "tokenizer": None if tokenizer is None else tokenizer.identity()._asdict(),
        "seq_length": run.batch.seq_length,
        "dtype": run.precision.dtype,
        "ops": run.runtime.ops,
        "examples": examples,
    }
    if evaluation.retro is not None:
        noted = Path(evaluation.retro) / "retro.json"
        decides["neighbours"] = _content(noted) if noted.is_file() else evaluation.retro
    known_by = fingerprint({**decides, "model": {**model, "path": None}})
    return {"task": evaluation.options.task, "fingerprint": known_by, "settings": {**decides, **layout_of(run)}}


def predictions_path(out: str) -> Path:
    """Where what was predicted of every question is kept, next to --json."""
    return Path(out).with_name(f"{Path(out).stem}-predictions.jsonl")


def _content(path: Path) -> str:
    """What tells the content of a file, a folder, or a pair of token files, from another."""
    found = hashlib.sha256()
    if path.is_dir():
        return folder_content(path)
    for part in (path, Path(f"{path}.idx"), Path(f"{path}.bin")):
        if not part.is_file():
            continue
        about = part.stat()
        found.update(f"{about.st_size} ".encode())
        if about.st_size > HASHED_BYTES:
            found.update(f"{about.st_mtime_ns} ".encode())
            continue
        with part.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _result(judged: Benchmark[object], found: Mapping[str, Estimate], progress: _Progress) -> dict[str, object]:
    done, begun = progress.done, progress.begun
    seconds = max(done.seconds, 1e-9)
    return {
        "figures": [_finite(figure._asdict()) for figure in judged.figures(found)],
        "terms": {name: _finite(each._asdict()) for name, each in found.items()},
        "tokens": done.tokens,
        "seconds": done.seconds,
        "tokens_per_second": (done.tokens - begun.tokens) / seconds if done.tokens > begun.tokens else None,
        "resumed_after": begun.examples or None,
        "ranks": progress.mesh.world,
        "device": progress.device.name,
        "version": __version__,
        "torch": torch.__version__,
    }


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """JSON has no NaN: what nothing counts for is null.

    >>> _finite({"name": "ppl", "value": math.nan})
    {'name': 'ppl', 'value': None}
    """
    infinite = (name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value))
    return {**values, **dict.fromkeys(infinite)}


class _Progress:
    """What was added up, kept on disk by rank 0 and shown on a terminal. sums, begun: of an earlier process, the same
    on every rank."""

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
        kept = self._read() if mesh.rank == 0 else None
        kept = gather_json(kept, mesh.everyone, device.torch)[0]
        self.begun, self.sums = Done(), Sums(judged.terms)
        if kept is not None:
            self.begun = Done(kept["examples"], kept["tokens"])
            self.sums = Sums(judged.terms, torch.tensor(kept["sums"], dtype=torch.float64))
        if isinstance(judged, RowBenchmark):
            rows = [] if kept is None else kept.get("shares", [])
            self.sums.shares = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), judged.classes)
        self.done = self.begun
        bar = evaluation.model.run.log.progress and sys.stderr.isatty()
        speaks = mesh.rank == 0 and not evaluation.quiet
        self._bar = Bar(evaluation.options.task, total, self.begun.examples, bar) if speaks else None

    def _read(self) -> dict[str, Any] | None:
        """What an earlier process of the same evaluation kept; of another one, or damaged, nothing."""
        try:
            kept = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict) or kept.get("fingerprint") != self._fingerprint:
            print(f"{self.path}: is of another model, data or settings; starting from the beginning", file=sys.stderr)
            return None
        print(f"{self.path}: resuming after {kept['examples']} examples", file=sys.stderr)
        return kept

    def __call__(self, done: Done, sums: Sums) -> None:
        self.done = done
        if self._bar is None:
            return
        self._bar.update(done)
        if time.monotonic() - self._saved < SAVE_SECONDS:
            return
        kept = {
            "fingerprint": self._fingerprint,
            "examples": done.examples,
            "tokens": done.tokens,
            "sums": sums.values.tolist(),
            **({} if sums.shares is None else {"shares": sums.shares.tolist()}),
        }
        with whole_file(self.path) as file:
            file.write(json.dumps(kept).encode())
        self._saved = time.monotonic()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A user who ends it by Ctrl-C is told what is kept."""
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
