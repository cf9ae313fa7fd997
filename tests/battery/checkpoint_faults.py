"""What a disk, a bug or a power cut may do to checkpoints: never a wrong byte loaded, never the last whole one lost.

flips N       a bit flipped, 100 places: refused, naming the file, and the tensor where one was hit
pointers      50 contents of the pointer: the newest whole checkpoint, or an error; never a fresh start
full N        saves onto a small file system, 10 sizes: the one before stays whole, the next one works with room
replay N      every prefix of the file operations of some saves and removals, as a power cut may leave it: what was
              not synced is kept, dropped or torn, names that were not synced are lost
retention N   30 saves with removals, killed 3 times at any file operation, a reader on some: at every operation at
              least so many whole checkpoints as are to be kept, none taken from a reader
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.core.checkpoint.own.manifest import MANIFEST, read_manifest
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.retention import retain
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, SaveError
from mega.core.files import SEAL
from tests.battery.data_ledger import Item, run

NUMBERS = 64
"""Elements of a tensor; small, so that thousands of checkpoints take seconds."""


def pieces_of(step: int, rank: int, numbers: int = NUMBERS) -> list[Piece]:
    """One of two ranks' halves of three tensors, whose every element is the step."""
    half = numbers // 2
    return [
        Piece(f"{kind}/w", (numbers,), (rank * half,), torch.full((half,), float(step)))
        for kind in ("weights", "moment1", "moment2")
    ]


def save(store: CheckpointStore, step: int, numbers: int = NUMBERS) -> None:
    ranks = [pieces_of(step, rank, numbers) for rank in range(2)]
    store.save_all(step, ranks, {"step": step}, attachments={"run.toml": b"steps = 9\n"})


def replace(store: CheckpointStore, step: int) -> None:
    """As a run saves, which replaces a checkpoint of the same step; `save_all` refuses to."""
    store.save(step, [*pieces_of(step, 0), *pieces_of(step, 1)], {"step": step})


def assert_exact(checkpoint: Checkpoint) -> None:
    """Every byte is what was saved."""
    checkpoint.verify()
    assert checkpoint.meta == {"step": checkpoint.step}
    for key, (whole, dtype) in checkpoint.tensors.items():
        tensor = torch.zeros(whole, dtype=dtype)
        checkpoint.read([Piece(key, whole, (0,), tensor)])
        assert torch.equal(tensor, torch.full_like(tensor, float(checkpoint.step))), key


@contextlib.contextmanager
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mega-faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# -- flipped bits


def flips(seed: int) -> dict[str, Any]:
    rng, named = random.Random(seed), 0
    with home() as directory:
        store = CheckpointStore(directory)
        save(store, 1, 2000)
        save(store, 2, 2000)
        retain(store, keep_optimizer_last=1)  # so that step 1 has the file that says so
        files = [path for step in (1, 2) for path in store.path(step).iterdir()]
        manifests = {step: read_manifest(store.path(step)) for step in (1, 2)}
        for _ in range(100):
            path = rng.choices(files, [file.stat().st_size for file in files])[0]
            whole = path.read_bytes()
            at = rng.randrange(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            step = int(path.parent.name.removeprefix("step-"))
            expected = MANIFEST if path.name == SEAL else path.name
            try:
                store.open(step).verify()
            except CheckpointError as error:
                assert expected in str(error) or SEAL in str(error) or "weights-only" in str(error), error
                container = manifests[step].containers.get(path.name)
                hit = [e.key for e in container.entries if e.offset <= at < e.offset + e.bytes] if container else []
                assert not hit or f"tensor {hit[0]}" in str(error), (hit, error)
                named += len(hit)
            else:
                raise AssertionError(f"{path} byte {at}: not noticed")
            path.write_bytes(whole)
        for step in (1, 2):
            assert_exact(store.open(step))
    return {"flips": 100, "refused": 100, "tensors named": named, "silent": 0}


# -- the pointer


def pointers() -> dict[str, Any]:
    rng = random.Random(0)
    texts = [
        b"",
        b"\n",
        b"\0" * 20,
        b"\xff" * 9,
        b"step-0000009\n",
        b"step-0000001\n",
        b"step-0000002",
        b"STEP-0000002\n",
        b"step-2\n",
        b"../step-0000002\n",
        b"/etc/passwd\n",
        b"step-0000002.tmp\n",
        b"x" * 100_000,
        b"step-0000002\nstep-0000001\n",
        *(bytes(rng.randrange(256) for _ in range(rng.randrange(30))) for _ in range(30)),
    ]
    kinds: list[Callable[[Path], object]] = [
        *((lambda path, text=text: path.write_bytes(text)) for text in texts),
        lambda path: None,  # absent
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("step-0000001"),
        lambda path: path.symlink_to("/nowhere"),
        lambda path: path.symlink_to("latest"),
        os.mkfifo,
    ]
    assert len(kinds) == 50
    found = refused = 0
    with home() as directory:
        store = CheckpointStore(directory)
        for kind in kinds:
            for published in (True, False):
                shutil.rmtree(directory, ignore_errors=True)
                if published:
                    save(store, 1)
                    save(store, 2)
                    (directory / "latest").unlink()
                else:
                    directory.mkdir()
                kind(directory / "latest")
                if published:
                    assert store.newest() == 2
                    assert_exact(store.open(2))
                    found += 1
                elif os.path.lexists(directory / "latest"):
                    try:
                        raise AssertionError(f"a fresh start: {store.newest()}")
                    except CheckpointError as error:
                        assert "latest" in str(error), error
                    refused += 1
    return {"newest whole found": found, "refused where none is left": refused, "fresh starts": 0}


# -- a full disk


def full(part: int) -> dict[str, Any]:
    """Ten sizes of a tmpfs, between what one checkpoint takes and what two do."""
    failed = 0
    numbers = 40_000
    with home() as directory:
        probe = CheckpointStore(directory / "probe")
        save(probe, 1, numbers)
        one = sum(-(-path.stat().st_size // 4096) * 4096 for path in probe.path(1).iterdir()) + 8192
        shutil.rmtree(directory / "probe")
        mount = directory / "small"
        mount.mkdir()
        for number in range(part * 10, part * 10 + 10):
            size = one + one * number // 50 // 4096 * 4096 + 4096
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "mega-full", mount], check=True)
            try:
                store = CheckpointStore(mount / "run")
                save(store, 1, numbers)
                try:
                    save(store, 2, numbers)
                except SaveError as error:
                    failed += 1
                    assert "step 2 was not saved" in str(error) and "No space left" in str(error), error
                    assert "bytes are free" in str(error) and "whole: steps 1" in str(error), error
                    assert store.newest() == 1 and not store.leftovers()
                    assert_exact(store.open(1))
                    subprocess.run(["mount", "-o", f"remount,size={3 * one}", mount], check=True)
                    save(store, 2, numbers)
                assert store.newest() == 2
                assert_exact(store.open(2))
            finally:
                subprocess.run(["umount", mount], check=True)
    return {"sizes": 10, "did not fit": failed, "previous one lost": 0}


# -- power cuts

Op = tuple[Any, ...]


class Recorder:
    """The file operations of this process below a directory, in order, as `os` is asked for them."""

    def __init__(self, root: Path) -> None:
        self.root, self.ops = root, list[Op]()
        self._open: dict[int, str] = {}
        self._deep = 0

    def _name(self, path: Any) -> str | None:
        try:
            return str(Path(os.path.abspath(path)).relative_to(self.root))
        except (ValueError, TypeError):
            return None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "close", "rename", "unlink", "mkdir")}
        rmtree = shutil.rmtree

        def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            descriptor = int(real["open"](path, flags, *rest, **more))
            name = self._name(path)
            if name is not None and not more.get("dir_fd"):
                self._open[descriptor] = name
                if flags & os.O_CREAT:
                    self.ops.append(("create", name))
            return descriptor

        def written(descriptor: int, data: Any, offset: int) -> int:
            count = int(real["pwrite"](descriptor, data, offset))
            if descriptor in self._open:
                self.ops.append(("write", self._open[descriptor], bytes(memoryview(data)[:count]), offset))
            return count

        def synced(descriptor: int) -> None:
            real["fsync"](descriptor)
            if descriptor in self._open:
                self.ops.append(("sync", self._open[descriptor]))

        def closed(descriptor: int) -> None:
            self._open.pop(descriptor, None)
            real["close"](descriptor)

        def named(kind: str) -> Callable[..., None]:
            def act(*paths: Any, **more: Any) -> None:
                real[kind](*paths, **more)
                if not self._deep and not more.get("dir_fd"):
                    self.ops.append((kind, *(self._name(path) for path in paths if isinstance(path, str | Path))))

            return act

        def removed(path: Any, *rest: Any, **more: Any) -> None:
            """One removal file by file, in the order of their names."""
            if os.path.isdir(path):
                self.ops += [("unlink", self._name(file)) for file in sorted(Path(path).iterdir())]
                self.ops.append(("rmdir", self._name(path)))
            self._deep += 1
            try:
                rmtree(path, *rest, **more)
            finally:
                self._deep -= 1

        stand_ins: dict[str, Any] = {"open": opened, "pwrite": written, "fsync": synced, "close": closed}
        stand_ins |= {name: named(name) for name in ("rename", "unlink", "mkdir")}
        with patch.multiple(os, **stand_ins), patch.object(shutil, "rmtree", removed):
            yield


class Disk:
    """Names and contents after some operations; what was written and what of it is safe."""

    def __init__(self) -> None:
        self.folders: set[str] = {"."}
        self.files: dict[str, int] = {}
        """Name -> number of the content, which stays with a file that is renamed."""
        self.written: dict[int, bytes] = {}
        self.safe: dict[int, bytes] = {}

    def apply(self, op: Op) -> None:
        kind, name = op[0], op[1]
        if kind == "mkdir":
            self.folders.add(name)
        elif kind == "create":
            self.files[name] = len(self.written)
            self.written[len(self.written)] = b""
        elif kind == "write":
            before, data, offset = self.written[self.files[name]], op[2], op[3]
            self.written[self.files[name]] = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]
        elif kind == "sync" and name in self.files:
            self.safe[self.files[name]] = self.written[self.files[name]]
        elif kind == "unlink":
            self.files.pop(name, None)
        elif kind == "rmdir":
            self.folders.discard(name)
        elif kind == "rename":
            target = op[2]
            moved = [(path, target + path[len(name) :]) for path in self.files if _within(path, name)]
            for path, new in moved:
                self.files[new] = self.files.pop(path)
            for path in [path for path in self.folders if _within(path, name)]:
                self.folders.discard(path)
                self.folders.add(target + path[len(name) :])

    def build(self, root: Path, rng: random.Random, how: str) -> None:
        """As files. how: what became of content that was not synced: kept, dropped, torn."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for folder in sorted(self.folders):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, number in self.files.items():
            content, safe = self.written[number], self.safe.get(number, b"")
            if content != safe and how == "dropped":
                content = safe
            elif content != safe and how == "torn":
                whole = rng.randrange(len(safe), len(content) + 1)
                content = content[:whole] + bytes(rng.randrange(len(content) - whole + 1))
            if (root / name).parent.is_dir():
                (root / name).write_bytes(content)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


NAMES = ("mkdir", "create", "rename", "unlink", "rmdir")


def replay(seed: int) -> dict[str, Any]:
    """Step 1 is there; step 2 is saved, 1 loses its optimizer, step 3 is saved, step 1 goes, step 3 is replaced."""
    rng, tried = random.Random(seed), 0
    with home() as directory:
        store = CheckpointStore(directory / "live")
        store.directory.mkdir()
        recorder = Recorder(directory / "live")
        marks: list[tuple[int, int]] = []

        def done(step: int) -> None:
            marks.append((len(recorder.ops), step))

        with recorder.listening():
            for act in (
                lambda: save(store, 1),
                lambda: save(store, 2),
                lambda: retain(store, keep_optimizer_last=1),
                lambda: save(store, 3),
                lambda: retain(store, keep_last=2),
                lambda: replace(store, 3),
            ):
                act()
                done(store.steps()[-1])
        ops = recorder.ops
        begin = marks[0][0]
        found: dict[int, int] = {}
        for length in range(begin, len(ops) + 1):
            least = max(step for mark, step in marks if mark <= length)
            last_sync = max((i for i in range(length) if ops[i][0] == "sync" and ops[i][1] == "."), default=0)
            for how in ("kept", "dropped", "torn", "names lost"):
                cut = length if how != "names lost" else rng.randrange(max(last_sync, begin), length + 1)
                disk = Disk()
                for number, op in enumerate(ops[:length]):
                    if number >= cut and op[0] in NAMES:
                        continue
                    if op[0] in ("write", "sync") and op[1] not in disk.files:
                        continue  # its name was lost
                    disk.apply(op)
                root = directory / "replayed"
                disk.build(root, rng, "torn" if how == "names lost" else how)
                again = CheckpointStore(root)
                newest = again.newest()
                assert newest is not None and newest >= least, (length, how, newest, least)
                assert_exact(again.open(newest))
                if tried % 10 == 0:
                    save(again, 9)
                    assert again.newest() == 9 and not again.leftovers()
                found[newest] = found.get(newest, 0) + 1
                tried += 1
    return {"operations": len(ops) - begin, "states": tried, "newest": found, "failed": 0}


# -- retention


KILLS = 3


class Killed(BaseException):
    """In the place of SIGKILL: no handler of ours catches it."""


def retention(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    keep, every = (1, 2, 5)[seed % 3], (None, 7)[seed % 2]
    with_state = rng.choice((None, 1))
    looks = kills = spared = 0
    with home() as directory:
        store = CheckpointStore(directory / "run")
        reading: Checkpoint | None = None
        most = 0
        more = 1  # than are to be kept: the one that is being saved
        countdown = 10**9

        def passing(steps: list[int]) -> list[int]:
            """Without the milestones."""
            return [step for step in steps if every is None or step % every]

        def look() -> None:
            """Before every file operation: enough whole ones are there; and now and then, death."""
            nonlocal looks, most, countdown
            looks += 1
            whole = [step for step in store.steps() if _opens(store, step)]
            assert len(whole) >= min(keep, most), (whole, keep)
            assert len(passing(whole)) <= keep + more, (whole, keep, more)
            most = max(most, len(whole))
            countdown -= 1
            if countdown <= 0:
                raise Killed

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def act(*args: Any, **more: Any) -> Any:
                look()
                return real(*args, **more)

            return act

        names = ("rename", "unlink", "rmdir", "mkdir", "fsync")
        stand_ins: dict[str, Any] = {name: watched(getattr(os, name)) for name in names}
        with patch.multiple(os, **stand_ins):
            deaths = sorted(rng.sample(range(2, 26), KILLS))
            for step in range(1, 31):
                if countdown > 10**6 and deaths and step >= deaths[0]:  # else the one before is still to come
                    del deaths[0]
                    countdown = rng.randrange(1, 30)
                try:
                    save(store, step)
                    retain(store, keep, every, with_state)
                    held = max(0, len(passing(store.steps())) - keep)
                    assert held <= (reading is not None), (store.steps(), keep)
                    more = 1 + held
                except Killed:
                    kills, more = kills + 1, more + 1  # nobody took one away
                    countdown = 10**9
                if reading is not None:
                    assert_exact(reading)
                    spared += reading.step not in store.steps()[-keep:]
                    reading = None
                elif rng.random() < 0.3 and store.steps():
                    reading = store.open(store.steps()[0])
            assert kills == KILLS, kills
            save(store, 31)
            retain(store, keep, every, with_state)
        for step in store.steps():
            assert_exact(store.open(step))
        kept = passing(store.steps())
        assert kept == passing(list(range(31 - keep + 1, 32))) or reading, kept
        assert not store.leftovers()
    return {"saves": 31, "kills": kills, "keep": keep, "every": every, "looks": looks, "spared for a reader": spared}


def _opens(store: CheckpointStore, step: int) -> bool:
    try:
        store.open(step)
    except CheckpointError:
        return False
    return True


ITEMS: list[Item] = [
    *((f"flips {n}", lambda n=n: flips(n)) for n in range(5)),
    ("pointers", pointers),
    *((f"full {n}", lambda n=n: full(n)) for n in range(5)),
    *((f"replay {n}", lambda n=n: replay(n)) for n in range(3)),
    *((f"retention {n}", lambda n=n: retention(n)) for n in range(10)),
]

if __name__ == "__main__":
    run("checkpoint_faults", ITEMS)
