"""A directory of checkpoints: saved by many ranks at once, published whole or not at all, read in any layout.

    runs/a/latest                       the newest step's directory name
    runs/a/verdicts.json                what became known of the steps since (verdicts.py)
    runs/a/step-0000010/                published by one rename of step-0000010.tmp
        rank-00000.safetensors          every rank's weights
        rank-00000.state.safetensors    every rank's optimizer state: a file of its own, so that it can go first
        tokenizer.json  run.toml        attachments
        manifest.json                   all files' hashes, all tensors' rectangles, plain state
        manifest.json.sha256

Saving, on every rank: (1) rank 0 makes `step-N.tmp/`; (2) each rank writes its files and a sidecar, synced;
(3) rank 0 folds the sidecars into the manifest, renames, moves the pointer. After each phase all ranks agree whether
it went well, and stop together where it did not. How they agree is a callable, since this room knows no ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega.core.checkpoint.own.container import Container, Fetch, file_digest, has_memory, write_container
from mega.core.checkpoint.own.disk import creating, read_file, write_all
from mega.core.checkpoint.own.manifest import (
    WEIGHTS_ONLY,
    Attached,
    Manifest,
    check_attachment_name,
    check_tiling,
    is_state,
    rank_file,
    read_sidecar,
    state_file,
    write_manifest,
    write_sidecar,
)
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.reader import Checkpoint
from mega.core.checkpoint.own.together import (
    Exchange,
    alone,
    attempt,
    describe,
    disagreement,
    gathered,
    reason_of,
    together,
)
from mega.core.checkpoint.own.verdicts import VERDICTS, StepVerdict, decode, encode
from mega.core.files import POINTER, SEAL, locked_alone, sync_directory

Attachments = Mapping[str, Path | bytes]
"""Small files to keep with the tensors: plain name -> where it is now, or its content."""

STEP = re.compile(r"step-(\d{7,15})")
NOTHING = "holds no checkpoint (a directory with step-NNNNNNN in it is wanted)"
_NOTE_LIMIT = 16 << 20
"""Most bytes of a small file next to the steps."""
_LEFTOVER = re.compile(rf"(step-\d+|{POINTER}|{WEIGHTS_ONLY})\.(tmp|old)")


class SaveError(OSError):
    """A save that the machine did not carry out, and why. Nothing was published; every earlier checkpoint is whole.

    elsewhere: the fault is another rank's, whose error says more.
    """

    elsewhere = False


@dataclass(frozen=True)
class SaveReport:
    """What one rank wrote, and how long the save took it, waiting included."""

    bytes: int
    seconds: float


class CheckpointStore:
    """The checkpoints of one run, under one directory.

    store = CheckpointStore(Path("runs/a"))
    store.save(10, [Piece("weights/w", (2,), (0,), torch.ones(2))], {"samples": 40})
    store.open(store.newest()).read([Piece("weights/w", (2,), (0,), w)])
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.place = str(directory)
        """What the user calls it."""

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        meta: Mapping[str, Any],
        *,
        rank: int = 0,
        world: int = 1,
        agree: Callable[[bool], bool] = bool,
        attachments: Attachments = MappingProxyType({}),
    ) -> SaveReport:
        """Publish one checkpoint; all ranks call this together. Over all ranks, pieces tile their tensors.

        meta, attachments: rank 0's count. meta is plain JSON; attachments are small files, by plain name.
        agree: given whether this rank succeeded, returns on all ranks together whether all did.
        An older checkpoint of the same step is replaced when the new one is complete.
        Errors: on every rank, SaveError if any rank failed (disk full, no permission, pieces that do not
        tile their tensors), naming the file; earlier checkpoints stay as they are.
        """
        began = time.monotonic()
        working = self.path(step).with_suffix(".tmp")
        written = 0

        def prepare() -> None:
            if rank == 0:
                self._prepare(working)

        def write() -> None:
            nonlocal written
            written = self._write(working, step, rank, world, pieces, has_memory)

        def publish() -> None:
            if rank == 0:
                self._publish(step, world, working, dict(meta), attachments)

        for phase in (prepare, write, publish):
            fault: Exception | None = None
            try:
                phase()
            except Exception as error:
                fault = error
            if not agree(fault is None):
                if rank == 0:
                    self._clear()
                failure = SaveError(self._failure(step, fault))
                failure.elsewhere = fault is None
                raise failure from fault
        return SaveReport(written, time.monotonic() - began)

    def save_all(
        self,
        step: int,
        ranks: Sequence[Iterable[Piece]],
        meta: Mapping[str, Any],
        *,
        fetch: Fetch = has_memory,
        check: Callable[[], None] = lambda: None,
        attachments: Attachments = MappingProxyType({}),
    ) -> SaveReport:
        """As `save`, but one process writes the file of every rank, one after another.

        fetch: called for every block of every piece for its elements (which are not kept), of several pieces side by
            side; then the pieces' own tensors may be meta tensors, and memory holds a few blocks.
        check: called when all is written; if it raises, nothing is published.
        Nothing is replaced, nothing put before a newer step, where no run would find it, and no other model hidden.
        Errors: CheckpointError where what is to be written is at fault, SaveError where the machine is.
        """
        began = time.monotonic()
        working = self.path(step).with_suffix(".tmp")
        try:
            with self._claimed(step):
                self._same_model(meta)
                try:
                    self._prepare(working)
                    written = sum(
                        self._write(working, step, rank, len(ranks), pieces, fetch) for rank, pieces in enumerate(ranks)
                    )
                    check()
                    self._publish(step, len(ranks), working, dict(meta), attachments)
                except BaseException:
                    self._clear()
                    raise
        except Exception as error:
            with contextlib.suppress(OSError):
                self.directory.rmdir()  # only if nothing is in it
            kind = CheckpointError if isinstance(error, ValueError) else SaveError
            raise kind(self._failure(step, error)) from error
        return SaveReport(written, time.monotonic() - began)

    @contextlib.contextmanager
    def _claimed(self, step: int) -> Iterator[None]:
        """The directory, held, in which `step` may be published.

        Errors: CheckpointError where another has it, or where that step or a newer one is there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.held():
            if there := [each for each in self.steps() if each >= step]:
                raise CheckpointError(f"step {there[-1]} is there already; give a new directory")
            yield

    def _same_model(self, meta: Mapping[str, Any]) -> None:
        """See that what is here is of the model that `meta` describes. Errors: CheckpointError."""
        there = self.newest(verify=False)
        if there is None:
            return
        ours, theirs = (each.get("config", {}).get("model") for each in (meta, self.open(there).meta))
        if ours and theirs and json.loads(json.dumps(ours)) != theirs:
            raise CheckpointError(f"step {there} of another model is there, and would be hidden; give a new directory")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The directory for one process that writes or removes. Without lock support, for every process.

        Errors: CheckpointError where another has it.
        """
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not locked_alone(descriptor):
                raise CheckpointError(f"another process is writing into {self.directory}")
            yield
        finally:
            os.close(descriptor)

    def _prepare(self, working: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear()
        working.mkdir()

    def _write(self, working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
        return write_rank(working, step, rank, world, pieces, fetch)

    def _clear(self) -> None:
        """Remove what is not a checkpoint; nothing else may be saving here."""
        self._recover()
        for left in self.leftovers():
            remove_leftover(left)

    def _publish(self, step: int, world: int, working: Path, meta: dict[str, Any], attachments: Attachments) -> None:
        self._seal(step, world, working, meta, attachments)
        sync_directory(working)
        final = self.path(step)
        previous = final.with_suffix(".old")
        pointer = self.directory / f"{POINTER}.tmp"
        with creating(pointer) as descriptor:
            write_all(descriptor, f"{final.name}\n".encode())
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(final, previous)
        os.rename(working, final)  # here it is published; all that took space was done before
        os.rename(pointer, self.directory / POINTER)
        sync_directory(self.directory)
        shutil.rmtree(previous, ignore_errors=True)

    def _seal(self, step: int, world: int, working: Path, meta: dict[str, Any], attachments: Attachments) -> None:
        """Fold the sidecars, which go, into the manifest."""
        attached = {name: _attach(working, name, source) for name, source in attachments.items()}
        containers: dict[str, Container] = {}
        for rank in range(world):
            path = sidecar(working, rank)
            containers |= read_sidecar(path, rank)
            path.unlink()
        manifest = Manifest(step, world, containers, attached, meta)
        check_tiling(manifest, working)
        write_manifest(working, manifest)

    def _failure(self, step: int, fault: BaseException | None) -> str:
        kept = ", ".join(map(str, self.steps())) or "none"
        place, free = self._where(step)
        where = f"{place}: step {step} was not saved"
        if fault is None:
            return f"{where}: another rank failed (whole: steps {kept})"
        if isinstance(fault, OSError):
            name = fault.filename or self.path(step)
            reason = f"{name}: {fault.strerror or fault}" + ("" if free is None else f"; {free} bytes are free")
        else:
            reason = str(fault) or repr(fault)
        return f"{where}: {reason} (whole: steps {kept})"

    def _where(self, step: int) -> tuple[str, int | None]:
        """What to call the place of a save, and the bytes that are free there; None where that is not known."""
        return str(self.directory), shutil.disk_usage(self.directory).free if self.directory.exists() else None

    def steps(self) -> list[int]:
        """Published steps, oldest first. Published means renamed into place; `newest` also verifies."""
        if not self.directory.is_dir():
            return []
        found = (STEP.fullmatch(entry.name) for entry in os.scandir(self.directory) if _is_directory(entry))
        return sorted(int(match[1]) for match in found if match)

    def _linked(self) -> list[int]:
        """Steps that are only links, which are not followed; `find` reports that."""
        entries = os.scandir(self.directory) if self.directory.is_dir() else ()
        found = (STEP.fullmatch(entry.name) for entry in entries if entry.is_symlink())
        return [int(match[1]) for match in found if match]

    def still(self, steps: Iterable[int]) -> set[int]:
        """Those of some published steps that have not been removed since."""
        return {step for step in steps if self.path(step).is_dir()}

    def leftovers(self) -> list[Path]:
        """What killed saves and removals left; none of it is a checkpoint."""
        found = [path for end in ("tmp", "old") for path in self.directory.glob(f"*.{end}")]
        return sorted(path for path in found if _LEFTOVER.fullmatch(path.name) and not _only_copy(path))

    def newest(self, *, verify: bool = True, report: Callable[[str], None] = lambda line: None) -> int | None:
        """The step of what `find` finds for one rank alone. Errors: as of `find`."""
        found = self.find(verify=verify, report=report)
        return None if found is None else found.step

    def find(
        self,
        *,
        verify: bool = True,
        report: Callable[[str], None] = lambda line: None,
        exchange: Exchange = alone,
    ) -> Checkpoint | None:
        """The newest published checkpoint that every rank trusts, opened, and the same one on all of them.

            1 every rank lists what it sees    and reads the verdicts
            2 newest first, every rank opens   its manifest, and all sizes; with `verify` every byte is hashed
            3 ranks compare what they opened   by the manifest's hash, which stands for run, plain state and tensors

        A step is passed over where any rank cannot open it or sees another one, and where it is suspect (verdicts.py).
        report: is given a line for every one that is passed over, with the ranks and their reasons, and one for a
        pointer that names another one. None only where nothing was ever published.
        Errors: CheckpointError, on all ranks, if there are checkpoints or a pointer, but none can be trusted: a run is
        never silently started again from nothing. Likewise if a rank cannot list the directory.
        """
        # 1
        views = gathered(self._view, exchange)
        steps, first = sorted({step for view in views for step in view["steps"]}), ""
        suspects = {step: verdict for view in views for step, verdict in view["suspects"].items()}
        if any(view["fault"] for view in views):
            report(f"a step may be suspect without being passed over: {describe([view['fault'] for view in views])}")
        for step in reversed(steps):
            # 2
            checkpoint, fault = together(partial(self._look, step, verify, suspects.get(str(step))), exchange)
            # 3
            faults, identities = zip(*exchange([fault, _identity(checkpoint)]), strict=True)
            differ = describe(faults) if any(faults) else disagreement(identities)
            if checkpoint is not None and not differ:
                if (pointer := self._pointer()) != self.path(step).name:
                    report(f"{self.place}/{POINTER} says {pointer!r}; the newest one to trust is step {step}")
                return checkpoint
            report(f"step {step} is passed over: {differ}")
            first = first or differ
        if steps:
            raise CheckpointError(f"{self.place}: none of the checkpoints {steps} can be trusted: {first}")
        if any(view["pointer"] for view in views):
            raise CheckpointError(
                f"{self.place}/{POINTER} says {self._pointer()!r}, but no checkpoint is there; "
                "remove it to start afresh"
            )
        return None

    def _view(self) -> dict[str, Any]:
        """What this rank sees, as plain JSON. suspects: step -> manifest and reason."""
        self._recover()
        verdicts, fault = attempt(self.verdicts)
        suspects = {str(step): [v.manifest, v.reason] for step, v in (verdicts or {}).items() if v.status == "suspect"}
        unread = "" if fault is None else reason_of(fault)
        steps = [*self.steps(), *self._linked()]
        return {"steps": steps, "pointer": self._has_pointer(), "suspects": suspects, "fault": unread}

    def _look(self, step: int, verify: bool, suspect: Sequence[str] | None) -> tuple[Checkpoint | None, str]:
        """A step, opened, or why it is passed over. suspect: the manifest and the reason of a verdict.

        Errors: OSError where an object store cannot be reached, which says nothing of the step.
        """
        try:
            checkpoint = self.open(step)
            if suspect is not None and suspect[0] == checkpoint.digest:
                return None, f"{suspect[1]} (it is taken where it is named, as {self.path(step).name})"
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            return None, reason_of(error)
        return checkpoint, ""

    def open_named(
        self, step: int, report: Callable[[str], None] = lambda line: None, exchange: Exchange = alone
    ) -> Checkpoint:
        """The step that the user names, the same on all ranks. report: is given a line where it is suspect.

        Errors: CheckpointError on all ranks, where any of them cannot open it or sees another one.
        """
        checkpoint = together(partial(self.open, step), exchange)
        if differ := disagreement(exchange(_identity(checkpoint))):
            raise CheckpointError(f"{self.path(step)}: {differ}")
        verdict = (attempt(self.verdicts)[0] or {}).get(step)
        if verdict is not None and (verdict.status, verdict.manifest) == ("suspect", checkpoint.digest):
            report(f"step {step} is taken as it is named, although {verdict.reason}")
        return checkpoint

    def verdicts(self) -> dict[int, StepVerdict]:
        """What became known of the steps. Errors: CheckpointError, OSError where that cannot be read."""
        data = self._note(VERDICTS)
        return {} if data is None else decode(data, self.directory / VERDICTS)

    def set_verdicts(self, verdicts: Mapping[int, StepVerdict]) -> None:
        """Replace all that is known of the steps, at once; by one process. Errors: OSError, CheckpointError."""
        self._set_note(VERDICTS, encode(verdicts))

    def digest(self, step: int) -> str:
        """The hash of a published step's manifest, from its seal."""
        return read_file(self.path(step) / SEAL, 200)[:64].decode("ascii", "replace")

    def _note(self, name: str) -> bytes | None:
        """A small file next to the steps; None where it is absent."""
        path = self.directory / name
        return read_file(path, _NOTE_LIMIT) if os.path.lexists(path) else None

    def _set_note(self, name: str, data: bytes) -> None:
        coming = self.directory / f"{name}.new"  # not a leftover, which a save in the background would remove
        coming.unlink(missing_ok=True)
        with creating(coming) as descriptor:
            write_all(descriptor, data)
        os.rename(coming, self.directory / name)
        sync_directory(self.directory)

    def open(self, step: int) -> Checkpoint:
        """Read and check the manifest of one step. Errors: CheckpointError naming what is wrong with it."""
        path = self.path(step)
        try:
            linked, there = path.is_symlink(), path.is_dir()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if linked:
            raise CheckpointError(f"{path}: is a link, which is not followed; put the directory here, or name its own")
        if not there:
            published = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: no such checkpoint (published steps: {published})")
        checkpoint = Checkpoint(path)
        if checkpoint.step != step:
            raise CheckpointError(f"{path}: the manifest is that of step {checkpoint.step}")
        return checkpoint

    def path(self, step: int) -> Path:
        """Where a step is, or would be, published."""
        return self.directory / f"step-{step:07d}"

    def _pointer(self) -> str:
        try:
            return read_file(self.directory / POINTER, 200).decode("ascii", "replace").strip()
        except CheckpointError as error:
            return str(error)

    def _has_pointer(self) -> bool:
        return os.path.lexists(self.directory / POINTER)

    def _recover(self) -> None:
        """Undo a replacement that was cut between its two renames: the old one comes back."""
        if not self.directory.is_dir():
            return
        for entry in os.scandir(self.directory):
            final = Path(entry.path).with_suffix("")
            if entry.name.endswith(".old") and STEP.fullmatch(final.name) and not final.exists():
                try:
                    os.rename(entry.path, final)
                except FileNotFoundError:
                    continue  # another rank was faster


def _identity(checkpoint: Checkpoint | None) -> str:
    """What ranks compare of a checkpoint that each has opened."""
    if checkpoint is None:
        return ""
    return f"manifest {checkpoint.digest[:16]}{' without optimizer state' if checkpoint.weights_only else ''}"


def remove_leftover(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_rank(working: Path, step: int, rank: int, world: int, pieces: Iterable[Piece], fetch: Fetch) -> int:
    """One rank's containers and its sidecar; the bytes of the former."""
    files: dict[str, list[Piece]] = {rank_file(rank): []}
    for piece in pieces:
        piece.check()
        if piece.box.elements:
            files.setdefault(state_file(rank) if is_state(piece.key) else rank_file(rank), []).append(piece)
    containers = {}
    for name, kept in files.items():
        try:
            about: dict[str, object] = {"step": step, "rank": rank, "world": world}
            containers[name] = write_container(working / name, kept, about, fetch)
        except OSError as error:
            total = sum(piece.bytes for piece in kept)
            path = str(working / name)
            raise OSError(error.errno, f"{error.strerror} ({total} bytes to write)", path) from error
    write_sidecar(sidecar(working, rank), containers)
    return sum(container.size for container in containers.values())


def _attach(working: Path, name: str, source: Path | bytes) -> Attached:
    check_attachment_name(name)
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    with creating(working / name) as descriptor:
        write_all(descriptor, data)
    return Attached(*file_digest(working / name))


def sidecar(working: Path, rank: int) -> Path:
    return working / f"rank-{rank:05d}.json"


def _only_copy(path: Path) -> bool:
    """Whether this is a checkpoint that was moved aside and whose replacement never came."""
    return path.suffix == ".old" and not path.with_suffix("").exists()


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
