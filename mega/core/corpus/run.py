"""Applies a step to files, part by part, in any number of processes. Runs can be resumed, and the output bytes do not
depend on the number of processes.

    1 survey    only for steps that must read all documents first: each part is read, and notes are stored
    2 conclude  the step reads the notes of all parts, and decides which documents are dropped
    3 write     each part is read and its output is written; a step without a survey has only this phase
    4 finish    the counts of all parts are summed, and the parts are joined if the output is one file

Files are written atomically: first the lines of a part, then its counts. Repeating an interrupted run resumes its work;
a run with other inputs or settings is refused. Several shards write into one folder. A step with a survey must be run
twice per shard, because the second run needs the notes of all shards. This module does not depend on particular steps.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mega.core.corpus.documents import Check, CorpusStep, SurveyStep, Work, check_of, stage_folder
from mega.core.corpus.folder import (
    RECORD,
    SURVEY,
    RunOptions,
    check_output,
    join_parts,
    locked_folder,
    read_record,
    remove_joined_parts,
    remove_leftovers,
    remove_work,
    wait_for_lock,
    write_record,
)
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.part_files import PartOptions, ReadableDocuments, write_part
from mega.core.corpus.parts import InputPart, is_plain, parts
from mega.core.data.preprocessing.provenance import stamps
from mega.core.data.sources import find
from mega.core.data.workers import Buffer, Workers
from mega.core.files import whole_file
from mega.core.untrusted import below

VERSION = 1
"""Version of the steps. Unfinished work of another version is not resumed."""

_CONCLUDED = "concluded.json"


class StepOutcome(NamedTuple):
    """The result of `process`."""

    counts: StepCounts  # Counts of the documents
    complete: bool = True  # Whether all shards are done
    repeated: bool = False  # Whether an earlier run did all the work and this run wrote nothing
    surveyed: bool = False  # Whether only the survey is done; run again when all shards are surveyed


def process(inputs: Sequence[str | Path], step: CorpusStep | SurveyStep, options: RunOptions) -> StepOutcome:
    """Apply a step to all documents of `inputs`, which are files, folders and globs (see `sources.find`).

    Formats: JSON lines (also compressed: .gz .zst .xz .bz2), parquet, arrow, and .txt with one document per line.
    Errors: ValueError naming flag, or file and line; OSError. Finished parts are kept.
    """
    paths, identity, repeated = begin(inputs, step, options)
    if repeated is not None:
        return repeated
    against = len(find(options.against, "--against")) if options.against else 0
    # Load the step's files and libraries first, to report problems before anything is written.
    _ = step.survey(0, options.folder / SURVEY) if isinstance(step, SurveyStep) else step.load()
    with locked_folder(options, accepted_identities(step, paths, options)) as stale:
        writing: CorpusStep
        if isinstance(step, SurveyStep):
            surveyed = _run_surveys(paths, step, options)
            if surveyed is not None:
                return StepOutcome(surveyed, complete=False, surveyed=True)
            writing = _SecondPass(step, options.folder / SURVEY)
        else:
            writing = step
        counts = _write_parts(paths, against, writing, options, stale)
        return finish(step, paths, options, identity, counts)


def begin(
    inputs: Sequence[str | Path], step: CorpusStep | SurveyStep, options: RunOptions
) -> tuple[list[Path], str, StepOutcome | None]:
    """Check options and inputs. Returns the input files, a hash of the work, and the outcome of the work, which is None
    if the work is not done yet. Errors: ValueError naming the invalid flag or input."""
    against = find(options.against, "--against") if options.against else []
    paths = [*against, *find(inputs)]
    check_output(paths, options)
    _check_form(paths, options)
    if against and not isinstance(step, SurveyStep):
        raise ValueError(f"--against: {step.name} looks at one document at a time; leave it out")
    identity = _identity(step, paths, options)
    record = read_record(options.record)
    if record is None or options.overwrite:
        return paths, identity, None
    if record.get("identity") == identity:
        remove_leftovers(options)
        return paths, identity, StepOutcome(StepCounts.from_json(below(record, "counts")), repeated=True)
    raise ValueError(
        f"--output {options.output}: holds the result of other inputs or settings; name another place, or give "
        "--overwrite to replace it"
    )


def _check_form(paths: Sequence[Path], options: RunOptions) -> None:
    """Check that the name of a single output file matches the format of the input (JSON lines or text). Errors:
    ValueError."""
    if not options.one_file:
        return
    name = options.output.name.lower().removesuffix(".gz").removesuffix(".zst")
    for path in paths:
        if is_plain(path) != name.endswith(".txt"):
            form, end = ("lines of text", ".txt") if is_plain(path) else ("JSON lines", ".jsonl")
            raise ValueError(f"--output {options.output}: of {path} {form} are written; name it {end}, or a folder")


def accepted_identities(step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions) -> list[str]:
    """Return the hash of this work, and hashes of other unfinished work that this run can resume. A run with --on-error
    skip can resume work that stopped at a bad line."""
    identity = _identity(step, paths, options)
    return (
        [identity]
        if options.on_error == "stop"
        else [identity, _identity(step, paths, replace(options, on_error="stop"))]
    )


def _identity(step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions) -> str:
    """Hash the step, settings, options and input files, which together determine the output."""
    work = [VERSION, step.name, _settings(step), options.packed, options.on_error, options.part_bytes]
    work += [options.show_dropped, options.dropped is not None, list(options.against), stamps(paths)]
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()


def _settings(step: object) -> dict[str, object]:
    """Return the fields of a step that affect the result."""
    setting_names = {each.name for each in fields(step) if each.metadata.get("setting", True)}  # type: ignore[arg-type]
    return {name: value for name, value in asdict(step).items() if name in setting_names}  # type: ignore[call-overload]


# --- parts in processes ---------------------------------------------------------------------------------------------

PartWork = Callable[[InputPart], StepCounts]


class _PartJob(Protocol):
    """A job that workers perform on every part. Jobs are pickled and sent to worker processes, so they must be
    small."""

    def load(self) -> PartWork:
        """Load libraries, and return the function that processes an input part."""
        ...


def _results(input_parts: Iterator[InputPart], job: _PartJob, workers: int) -> Iterator[tuple[InputPart, StepCounts]]:
    if workers == 1:
        work = job.load()
        yield from ((part, work(part)) for part in input_parts)
        return
    pool: Workers[InputPart, StepCounts] = Workers(
        workers, here=partial(_answering, job), there=partial(_answering, job)
    )
    with pool:
        for part, counts, _ in pool.answers(input_parts):
            yield part, counts


def _answering(job: _PartJob) -> Callable[[InputPart, Buffer], StepCounts]:
    work = job.load()
    return lambda part, buffer: work(part)


@dataclass(frozen=True)
class _WriteJob:
    step: CorpusStep
    options: PartOptions

    def load(self) -> PartWork:
        work = self.step.load()
        check = check_of(self.step)
        return lambda part: write_part(part, self.step.key, check, work, self.options)


def _write_parts(
    paths: Sequence[Path], against: int, step: CorpusStep, options: RunOptions, stale: dict[str, list[Path]]
) -> StepCounts:
    """Write every unfinished part of the shard, and return the summed counts of all parts of the shard. Documents of
    the first `against` files are not written."""
    total = sum(path.stat().st_size for path in paths)
    counts = StepCounts()

    def left() -> Iterator[InputPart]:
        for part in parts(paths, options.shard, options.part_bytes):
            if part.file < against:
                continue
            for path in stale.get(part.name, ()):
                path.unlink(missing_ok=True)
            if (record := read_record(options.folder / f".{part.name}.json")) is None:
                yield part
            else:
                counts.add(StepCounts.from_json(record), options.show_dropped)

    part_options = PartOptions(options.folder, options.dropped, options.packed, options.on_error, options.show_dropped)
    for part, part_counts in _results(left(), _WriteJob(step, part_options), options.workers):
        counts.add(part_counts, options.show_dropped)
        if options.progress is not None:
            options.progress(counts, part.end, total)
    return counts


# --- the survey -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SurveyJob:
    step: SurveyStep
    stage: int
    folder: Path
    stop: bool

    def load(self) -> PartWork:
        survey = self.step.survey(self.stage, self.folder)
        notes_folder, check = stage_folder(self.folder, self.stage), check_of(self.step)

        def work(part: InputPart) -> StepCounts:
            counts = StepCounts()
            notes = survey(ReadableDocuments(part, self.step.key, check, counts, stop=self.stop, samples=0))
            with whole_file(notes_folder / f"{part.name}.npz") as file:
                packed = io.BytesIO()
                np.savez(packed, **notes)  # type: ignore[arg-type]
                file.write(packed.getbuffer())
            return StepCounts(documents=counts.documents)

        return work


@dataclass(frozen=True)
class _SecondPass:
    """Presents the final pass of a survey step as a `CorpusStep`."""

    step: SurveyStep
    folder: Path

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def key(self) -> str:
        return self.step.key

    @property
    def check(self) -> Check:
        return check_of(self.step)

    def load(self) -> Work:
        return self.step.judge(self.folder)


def _run_surveys(paths: Sequence[Path], step: SurveyStep, options: RunOptions) -> StepCounts | None:
    """Run all surveys. A stage begins only when the previous stage has been concluded, which requires the notes of all
    shards.

    Returns None if all surveys are done, or the counts of this shard if other shards are still running.
    """
    for stage in range(step.stages):
        counts = StepCounts()
        notes_folder = stage_folder(options.folder / SURVEY, stage)
        notes_folder.mkdir(parents=True, exist_ok=True)
        if not (notes_folder / _CONCLUDED).is_file():
            _survey(paths, step, stage, options, counts)
        if not (notes_folder / _CONCLUDED).is_file():
            return counts
    return None


def _survey(paths: Sequence[Path], step: SurveyStep, stage: int, options: RunOptions, counts: StepCounts) -> None:
    """Survey every part of the shard that has no notes yet, and conclude the stage when all shards are surveyed."""
    folder = options.folder / SURVEY
    notes_folder = stage_folder(folder, stage)
    total = sum(path.stat().st_size for path in paths)
    index, count = options.shard
    mark = notes_folder / f"shard-{index + 1}-of-{count}.json"
    if not mark.is_file():
        job = _SurveyJob(step, stage, folder, options.on_error == "stop")
        open_parts = (
            part for part in parts(paths, options.shard, options.part_bytes) if not _has_notes(notes_folder, part.name)
        )
        for part, part_counts in _results(open_parts, job, options.workers):
            counts.documents += part_counts.documents
            if options.progress is not None:
                options.progress(counts, part.end + stage * total, (step.stages + 1) * total)
        write_record(mark, {"documents": counts.documents})
    if not all((notes_folder / f"shard-{i + 1}-of-{count}.json").is_file() for i in range(count)):
        return
    # Several shards may reach this line at the same time. The first shard that gets the lock concludes the stage.
    with open(notes_folder / "lock", "wb") as lock:
        if wait_for_lock(lock.fileno()) and not (notes_folder / _CONCLUDED).is_file():
            for stale in [*folder.glob("*.tmp"), *notes_folder.glob("*.tmp")]:
                stale.unlink(missing_ok=True)
            step.conclude(stage, folder, sorted(path.stem for path in notes_folder.glob("*-*.npz")))
            write_record(notes_folder / _CONCLUDED, {})


def _has_notes(folder: Path, name: str) -> bool:
    return (folder / f"{name}.npz").is_file()


# --- finish ---------------------------------------------------------------------------------------------------------


def finish(
    step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions, identity: str, shard_counts: StepCounts
) -> StepOutcome:
    """Finish the work if all shards are done: sum the counts of all parts, join the parts if the output is one file,
    and remove temporary files."""
    index, count = options.shard
    folder, total = options.folder, StepCounts()
    marks = [folder / f".shard-{i + 1}-of-{count}.json" for i in range(count)]
    write_record(marks[index], {})
    if not all(mark.is_file() for mark in marks):
        return StepOutcome(shard_counts, complete=False)
    with open(folder / ".lock-finish", "wb") as lock:
        if not wait_for_lock(lock.fileno()) or (count > 1 and (folder / RECORD).is_file()):
            return StepOutcome(shard_counts)  # another shard is finishing, or has finished
        sidecars = sorted(path for path in folder.glob(".*.json") if path.name[1:6].isdigit())
        for path in sidecars:
            total.add(StepCounts.from_json(read_record(path) or {}), options.show_dropped)
        if options.one_file:
            join_parts(folder, options.output)
        record = {"identity": identity, "step": step.name, "settings": _settings(step)}
        record |= {"inputs": [str(path) for path in paths], "counts": total.as_json()}
        write_record(options.record, json.loads(json.dumps(record, default=str)))
        remove_work(options, [*sidecars, *marks])
        (folder / ".lock-finish").unlink(missing_ok=True)
    shutil.rmtree(folder / SURVEY, ignore_errors=True)
    remove_joined_parts(options)
    return StepOutcome(total)
