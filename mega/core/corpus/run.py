"""Apply a step to files: part by part, in any number of processes, resumable, with the same bytes however it is run.

    1 survey    of a step that has to see all documents before it can judge one: each part is read, and notes are kept
    2 conclude  from the notes of all parts: which documents go
    3 write     each part is read and its output is written; a step without a survey has only this phase
    4 finish    the counts of all parts are summed up, and the parts joined if the output is one file

A file appears whole or not at all: first the lines of a part, then its counts. Work that was interrupted, in any way,
is resumed by the same call; other work is refused. Several shards write into one folder; with a survey each is called
twice, since it needs the notes of all. It knows no step.
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
    joined,
    locked_folder,
    locked_soon,
    read_record,
    remove_joined_parts,
    remove_work,
    tidy,
    write_record,
)
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.part_files import PartOptions, ReadableDocuments, write_part
from mega.core.corpus.parts import InputPart, is_plain, parts
from mega.core.data.preprocessing.made import stamps
from mega.core.data.sources import find
from mega.core.data.workers import Buffer, Workers
from mega.core.files import whole_file
from mega.core.untrusted import below

VERSION = 1
"""Of what steps do; work of another version is not resumed."""

_CONCLUDED = "concluded.json"


class StepOutcome(NamedTuple):
    """complete: whether all shards are done; repeated: whether it was done before, and nothing was written; surveyed:
    this shard's survey is done, and the call is to be repeated when those of all shards are."""

    counts: StepCounts
    complete: bool = True
    repeated: bool = False
    surveyed: bool = False


def process(inputs: Sequence[str | Path], step: CorpusStep | SurveyStep, options: RunOptions) -> StepOutcome:
    """Apply a step to all documents of `inputs`: files, folders, globs, see `sources.find`.

    JSON lines, also in .gz .zst .xz .bz2; parquet; arrow; of .txt each line is a document.
    Errors: ValueError naming flag, or file and line; OSError of the machine. Parts that are done stay done.
    """
    paths, identity, repeated = begin(inputs, step, options)
    if repeated is not None:
        return repeated
    against = len(find(options.against, "--against")) if options.against else 0
    # What is wrong with its files or libraries is reported before anything is written.
    _ = step.survey(0, options.folder / SURVEY) if isinstance(step, SurveyStep) else step.load()
    with locked_folder(options, accepted(step, paths, options)) as stale:
        writing: CorpusStep
        if isinstance(step, SurveyStep):
            surveyed = _surveyed(paths, step, options)
            if surveyed is not None:
                return StepOutcome(surveyed, complete=False, surveyed=True)
            writing = _Judging(step, options.folder / SURVEY)
        else:
            writing = step
        done = _written(paths, against, writing, options, stale)
        return finish(step, paths, options, identity, done)


def begin(
    inputs: Sequence[str | Path], step: CorpusStep | SurveyStep, options: RunOptions
) -> tuple[list[Path], str, StepOutcome | None]:
    """The files, a hash of the work, and its outcome if it was done before. Errors: ValueError."""
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
        tidy(options)
        return paths, identity, StepOutcome(StepCounts.from_json(below(record, "counts")), repeated=True)
    raise ValueError(
        f"--output {options.output}: holds the result of other inputs or settings; name another place, or give "
        "--overwrite to replace it"
    )


def _check_form(paths: Sequence[Path], options: RunOptions) -> None:
    """One file of output has the form of the input, and a name that says so. Errors: ValueError."""
    if not options.one_file:
        return
    name = options.output.name.lower().removesuffix(".gz").removesuffix(".zst")
    for path in paths:
        if is_plain(path) != name.endswith(".txt"):
            own, end = ("lines of text", ".txt") if is_plain(path) else ("JSON lines", ".jsonl")
            raise ValueError(f"--output {options.output}: of {path} {own} are written; name it {end}, or a folder")


def accepted(step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions) -> list[str]:
    """Hashes of this work and of unfinished work that it resumes: --on-error skip resumes what a bad line has ended."""
    own = _identity(step, paths, options)
    return [own] if options.on_error == "stop" else [own, _identity(step, paths, replace(options, on_error="stop"))]


def _identity(step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions) -> str:
    """A hash of all that the output depends on."""
    work = [VERSION, step.name, _settings(step), options.packed, options.on_error, options.part_bytes]
    work += [options.show_dropped, options.dropped is not None, list(options.against), stamps(paths)]
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()


def _settings(step: object) -> dict[str, object]:
    """The fields that the result depends on."""
    own = {each.name for each in fields(step) if each.metadata.get("setting", True)}  # type: ignore[arg-type]
    return {name: value for name, value in asdict(step).items() if name in own}  # type: ignore[call-overload]


# --- parts in processes ---------------------------------------------------------------------------------------------

PartWork = Callable[[InputPart], StepCounts]


class _PartJob(Protocol):
    """What is done with every part; small enough to be sent to another process."""

    def load(self) -> PartWork:
        """The work, with its libraries loaded."""
        ...


def _results(asked: Iterator[InputPart], job: _PartJob, workers: int) -> Iterator[tuple[InputPart, StepCounts]]:
    if workers == 1:
        work = job.load()
        yield from ((part, work(part)) for part in asked)
        return
    pool: Workers[InputPart, StepCounts] = Workers(
        workers, here=partial(_answering, job), there=partial(_answering, job)
    )
    with pool:
        for part, counts, _ in pool.answers(asked):
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


def _written(
    paths: Sequence[Path], against: int, step: CorpusStep, options: RunOptions, stale: dict[str, list[Path]]
) -> StepCounts:
    """Write every part of the shard that is not done; the counts of all. The first `against` files are not written."""
    total = sum(path.stat().st_size for path in paths)
    counts = StepCounts()

    def left() -> Iterator[InputPart]:
        for part in parts(paths, options.shard, options.part_bytes):
            if part.file < against:
                continue
            for path in stale.get(part.name, ()):
                path.unlink(missing_ok=True)
            if (done := read_record(options.folder / f".{part.name}.json")) is None:
                yield part
            else:
                counts.add(StepCounts.from_json(done), options.show_dropped)

    part_options = PartOptions(options.folder, options.dropped, options.packed, options.on_error, options.show_dropped)
    for part, found in _results(left(), _WriteJob(step, part_options), options.workers):
        counts.add(found, options.show_dropped)
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
        own, check = stage_folder(self.folder, self.stage), check_of(self.step)

        def work(part: InputPart) -> StepCounts:
            counts = StepCounts()
            notes = survey(ReadableDocuments(part, self.step.key, check, counts, stop=self.stop, samples=0))
            with whole_file(own / f"{part.name}.npz") as file:
                packed = io.BytesIO()
                np.savez(packed, **notes)  # type: ignore[arg-type]
                file.write(packed.getbuffer())
            return StepCounts(documents=counts.documents)

        return work


@dataclass(frozen=True)
class _Judging:
    """The second pass of a step, as a step."""

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


def _surveyed(paths: Sequence[Path], step: SurveyStep, options: RunOptions) -> StepCounts | None:
    """Make all surveys; each begins when the one before is concluded, which takes the notes of all shards.

    None when that is done; else what this shard has counted, since others are not as far.
    """
    for stage in range(step.stages):
        counts = StepCounts()
        own = stage_folder(options.folder / SURVEY, stage)
        own.mkdir(parents=True, exist_ok=True)
        if not (own / _CONCLUDED).is_file():
            _survey(paths, step, stage, options, counts)
        if not (own / _CONCLUDED).is_file():
            return counts
    return None


def _survey(paths: Sequence[Path], step: SurveyStep, stage: int, options: RunOptions, counts: StepCounts) -> None:
    """Survey every part of the shard that is not surveyed, and conclude when those of all shards are."""
    folder = options.folder / SURVEY
    own = stage_folder(folder, stage)
    total = sum(path.stat().st_size for path in paths)
    index, count = options.shard
    mark = own / f"shard-{index + 1}-of-{count}.json"
    if not mark.is_file():
        job = _SurveyJob(step, stage, folder, options.on_error == "stop")
        asked = (part for part in parts(paths, options.shard, options.part_bytes) if not _noted(own, part.name))
        for part, found in _results(asked, job, options.workers):
            counts.documents += found.documents
            if options.progress is not None:
                options.progress(counts, part.end + stage * total, (step.stages + 1) * total)
        write_record(mark, {"documents": counts.documents})
    if not all((own / f"shard-{i + 1}-of-{count}.json").is_file() for i in range(count)):
        return
    with open(own / "lock", "wb") as lock:
        if locked_soon(lock.fileno()) and not (own / _CONCLUDED).is_file():
            for stale in [*folder.glob("*.tmp"), *own.glob("*.tmp")]:
                stale.unlink(missing_ok=True)
            step.conclude(stage, folder, sorted(path.stem for path in own.glob("*-*.npz")))
            write_record(own / _CONCLUDED, {})


def _noted(folder: Path, name: str) -> bool:
    return (folder / f"{name}.npz").is_file()


# --- the end --------------------------------------------------------------------------------------------------------


def finish(
    step: CorpusStep | SurveyStep, paths: Sequence[Path], options: RunOptions, identity: str, done: StepCounts
) -> StepOutcome:
    """When the parts of all shards are done: sum up their counts, join them if one file is asked for, and tidy up."""
    index, count = options.shard
    folder, total = options.folder, StepCounts()
    marks = [folder / f".shard-{i + 1}-of-{count}.json" for i in range(count)]
    write_record(marks[index], {})
    if not all(mark.is_file() for mark in marks):
        return StepOutcome(done, complete=False)
    with open(folder / ".lock-finish", "wb") as lock:
        if not locked_soon(lock.fileno()) or (count > 1 and (folder / RECORD).is_file()):
            return StepOutcome(done)  # another shard finishes, or has done so
        sidecars = sorted(path for path in folder.glob(".*.json") if path.name[1:6].isdigit())
        for path in sidecars:
            total.add(StepCounts.from_json(read_record(path) or {}), options.show_dropped)
        if options.one_file:
            joined(folder, options.output)
        record = {"identity": identity, "step": step.name, "settings": _settings(step)}
        record |= {"inputs": [str(path) for path in paths], "counts": total.as_json()}
        write_record(options.record, json.loads(json.dumps(record, default=str)))
        remove_work(options, [*sidecars, *marks])
        (folder / ".lock-finish").unlink(missing_ok=True)
    shutil.rmtree(folder / SURVEY, ignore_errors=True)
    remove_joined_parts(options)
    return StepOutcome(total)
