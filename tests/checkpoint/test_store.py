"""The own format: any layout into any other bitwise, damage refused, a save whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mega.core.checkpoint.own import container
from mega.core.checkpoint.own.manifest import MANIFEST, rank_file
from mega.core.checkpoint.own.pieces import DTYPES, Box, CheckpointError, tiling_fault
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, Piece, SaveError
from mega.core.files import SEAL
from mega.core.shard import span_rectangles


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as any dtype, so that NaN payloads and negative zeros are among the values."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return a.shape == b.shape and torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))


def halved(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """A random partition of a box by repeated cuts, empty parts included."""
    if depth == 0 or not box.size or not draw(st.booleans()):
        return [box]
    dim = draw(st.integers(0, len(box.size) - 1))
    at = draw(st.integers(0, box.size[dim]))
    parts = []
    for begin, length in ((0, at), (at, box.size[dim] - at)):
        start = tuple(s + begin * (d == dim) for d, s in enumerate(box.start))
        size = tuple(length if d == dim else n for d, n in enumerate(box.size))
        parts += halved(draw, Box(start, size), depth - 1)
    return parts


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    whole = Box((0,) * len(shape), shape)
    return shape, halved(draw, whole, 4), halved(draw, whole, 4)


def spans(shape: tuple[int, ...], parts: int) -> list[Box]:
    """A flat cut in equal spans, as an optimizer shares a tensor out."""
    length = -(-prod(shape) // parts)
    cuts = [(i * length, min((i + 1) * length, prod(shape))) for i in range(parts)]
    return [Box(start, size) for begin, end in cuts for start, size in span_rectangles(shape, begin, end)]


@settings(max_examples=60)
@given(case=partitions(), dtype=st.sampled_from(sorted(DTYPES)), strided=st.booleans(), small=st.booleans())
def test_any_cut_reads_into_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], list[Box], list[Box]],
    dtype: str,
    strided: bool,
    small: bool,
) -> None:
    shape, saved, wanted = case
    whole = tensor_of(shape, DTYPES[dtype], seed=1)
    source = whole.mT.contiguous().mT if strided and len(shape) > 1 else whole
    at_origin = Box((0,) * len(shape), shape)
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as patch:
        if small:  # blocks and runs of a few bytes: the paths that only large tensors take
            patch.setattr(container, "BLOCK", 24)
            patch.setattr(container, "SMALL_ROW", 6)
        pieces = [Piece("weights/t", shape, box.start, source[box.inside(at_origin)]) for box in saved]
        store.save(3, pieces, {})
        targets = [torch.zeros(box.size, dtype=DTYPES[dtype]) for box in wanted]
        checkpoint = store.open(3)
        checkpoint.read(
            Piece("weights/t", shape, box.start, target) for box, target in zip(wanted, targets, strict=True)
        )
        checkpoint.verify()
    for box, target in zip(wanted, targets, strict=True):
        assert same_bytes(target, whole[box.inside(at_origin)])


def test_one_element_with_the_strides_of_a_view(tmp_path: Path) -> None:
    columns = torch.arange(8.0).view(2, 4).mT.contiguous().mT
    store = CheckpointStore(tmp_path)
    store.save(1, [Piece("w", (1,), (0,), columns[0, 1:2])], {})
    into = torch.zeros(2, 4).mT.contiguous().mT
    store.open(1).read([Piece("w", (1,), (0,), into[1, 2:3])])
    assert into[1, 2] == 1 and into.sum() == 1


def on_ranks(world: int, run: Callable[[int, Callable[[bool], bool]], None]) -> list[BaseException | None]:
    """Run `run(rank, agree)` on threads that meet to agree; what each rank raised."""
    barrier = threading.Barrier(world, timeout=30)
    faults: list[BaseException | None] = [None] * world
    said = [True] * world

    def body(rank: int) -> None:
        def agree(fine: bool) -> bool:
            said[rank] = fine
            barrier.wait()
            verdict = all(said)
            barrier.wait()
            return verdict

        try:
            run(rank, agree)
        except Exception as error:
            faults[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_flat_spans_of_several_ranks(tmp_path: Path, ranks: int) -> None:
    """ZeRO spans saved by `ranks`, read by another number of ranks and by columns."""
    whole = tensor_of((11, 5), torch.float32, seed=2)
    boxes = spans((11, 5), ranks)
    owner = [index * ranks // len(boxes) for index in range(len(boxes))]
    store = CheckpointStore(tmp_path)

    def run(rank: int, agree: Callable[[bool], bool]) -> None:
        mine = [box for box, who in zip(boxes, owner, strict=True) if who == rank]
        pieces = [Piece("moment1/w", (11, 5), box.start, whole[box.inside(Box((0, 0), (11, 5)))]) for box in mine]
        store.save(1, pieces, {"ranks": ranks}, rank=rank, world=ranks, agree=agree)

    assert on_ranks(ranks, run) == [None] * ranks
    checkpoint = store.open(1)
    assert (checkpoint.world, checkpoint.meta) == (ranks, {"ranks": ranks})
    for begin, end in ((0, 2), (2, 5)):
        columns = torch.zeros(11, end - begin)
        checkpoint.read([Piece("moment1/w", (11, 5), (0, begin), columns)])
        assert same_bytes(columns, whole[:, begin:end])


def small_store(directory: Path, steps: tuple[int, ...] = (10,)) -> CheckpointStore:
    store = CheckpointStore(directory)
    for step in steps:
        pieces = [
            Piece("weights/a", (6, 4), (0, 0), tensor_of((3, 4), torch.bfloat16, step)),
            Piece("weights/a", (6, 4), (3, 0), tensor_of((3, 4), torch.bfloat16, step + 1)),
            Piece("master/a", (5,), (0,), tensor_of((5,), torch.float64, step)),
            Piece("scalar", (), (), torch.tensor(step)),
            Piece("empty", (0, 3), (0, 0), torch.empty(0, 3)),
        ]
        store.save(step, pieces, {"step": step}, attachments={"run.toml": b"steps = 20\n"})
    return store


def test_opens_with_safetensors_and_explains_itself(tmp_path: Path) -> None:
    small_store(tmp_path)
    path = tmp_path / "step-0000010" / rank_file(0)
    with safe_open(str(path), "pt") as opened:
        assert set(opened.keys()) == {"weights/a@0", "weights/a@1", "scalar"}
        about = json.loads(opened.metadata()["mega"])
        assert about["pieces"]["weights/a@1"] == {"key": "weights/a", "whole": [6, 4], "start": [3, 0]}
        assert same_bytes(opened.get_tensor("weights/a@1"), tensor_of((3, 4), torch.bfloat16, 11))


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        small_store(tmp_path)
    finally:
        os.umask(old)
    files = list((tmp_path / "step-0000010").iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}


def test_strict_reading(tmp_path: Path) -> None:
    checkpoint = small_store(tmp_path).open(10)
    for piece, words in (
        (Piece("weights/b", (6, 4), (0, 0), torch.zeros(6, 4)), "no tensor weights/b"),
        (Piece("weights/a", (6, 5), (0, 0), torch.zeros(6, 5)), "weights/a has shape"),
        (Piece("weights/a", (6, 4), (0, 0), torch.zeros(6, 4)), "weights/a is torch.bfloat16"),
        (Piece("weights/a", (6, 4), (4, 0), torch.zeros(6, 4)), "leaves the shape"),
        (Piece("weights/a", (6, 4), (0,), torch.zeros(6)), "leaves the shape"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.read([piece])
    wide = torch.zeros(2, 4)
    checkpoint.read([Piece("weights/a", (6, 4), (0, 0), wide)], cast=True)
    assert torch.equal(wide, tensor_of((3, 4), torch.bfloat16, 10)[:2].float())
    assert checkpoint.attachments["run.toml"].read_text() == "steps = 20\n"


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([Piece("w", (4,), (0,), torch.zeros(3))], "gap: 3 of 4"),
        ([Piece("w", (4,), (0,), torch.zeros(3)), Piece("w", (4,), (2,), torch.zeros(2))], "overlap"),
        ([Piece("w", (4,), (0,), torch.zeros(2)), Piece("w", (5,), (2,), torch.zeros(2))], "is both"),
        ([Piece("w", (4,), (2,), torch.zeros(3))], "leaves the shape"),
        ([Piece("w", (4,), (0,), torch.zeros(4, dtype=torch.complex64))], "dtype"),
    ],
)
def test_pieces_that_are_no_whole_are_not_published(tmp_path: Path, pieces: list[Piece], words: str) -> None:
    store = small_store(tmp_path)
    with pytest.raises(SaveError, match=words):
        store.save(11, pieces, {})
    assert store.steps() == [10] and not list(tmp_path.glob("*.tmp"))


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    directory = tmp_path / "step-0000010"
    chance = random.Random(0)
    for name in sorted(os.listdir(directory)):
        original = (directory / name).read_bytes()
        for _ in range(40):
            bit = chance.randrange(len(original) * 8)
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            (directory / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=MANIFEST if name == SEAL else name):
                store.open(10).verify()
            with pytest.raises(CheckpointError):
                store.newest()
        (directory / name).write_bytes(original)
    store.open(10).verify()


def test_a_flipped_bit_names_its_tensor_and_is_met_when_read(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    path = tmp_path / "step-0000010" / rank_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last entry: bfloat16 rows are stored behind wider dtypes
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="tensor weights/a"):
        store.open(10).read([Piece("weights/a", (6, 4), (0, 0), torch.zeros(6, 4, dtype=torch.bfloat16))])
    store.open(10).read([Piece("master/a", (5,), (0,), torch.zeros(5, dtype=torch.float64))])


def damage(directory: Path, kind: str, name: str) -> None:
    path = directory / name
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif kind == "emptied":
        os.truncate(path, 0)
    elif kind == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind == "linked":
        moved = directory.parent / "elsewhere"
        shutil.move(path, moved)
        path.symlink_to(moved)
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "other step":
        shutil.copy(directory.parent / "step-0000005" / name, path)


@pytest.mark.parametrize("kind", ["missing", "truncated", "emptied", "longer", "linked", "pipe", "other step"])
@pytest.mark.parametrize("name", [rank_file(0), MANIFEST, SEAL, "run.toml"])
def test_damaged_files_are_passed_over(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "other step" and name == "run.toml":
        pytest.skip("the same bytes in both steps")
    store = small_store(tmp_path, (5, 10))
    damage(tmp_path / "step-0000010", kind, name)
    told: list[str] = []
    assert store.newest(report=told.append) == 5
    assert "step 10 is passed over" in told[0]
    shutil.rmtree(tmp_path / "step-0000005")
    with pytest.raises(CheckpointError, match="can be trusted"):
        store.newest()


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_attachment_is_passed_over_in_a_quick_search_too(tmp_path: Path, verify: bool) -> None:
    """A search that reads no tensors hashes attachments: what is read of the newest step is then there."""
    store, told = small_store(tmp_path, (5, 10)), list[str]()
    (tmp_path / "step-0000010" / "run.toml").write_bytes(b"steps = 21\n")
    assert store.newest(verify=verify, report=told.append) == 5 and "run.toml" in told[0], told


def test_a_foreign_file_is_noticed(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    (tmp_path / "step-0000010" / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="does not belong here"):
        store.open(10).verify()


def test_two_ranks_files_exchanged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    rows = tensor_of((4, 4), torch.float32, 0)

    def run(rank: int, agree: Callable[[bool], bool]) -> None:
        half = rows[2 * rank : 2 * rank + 2]
        store.save(1, [Piece("w", (4, 4), (2 * rank, 0), half)], {}, rank=rank, world=2, agree=agree)

    assert on_ranks(2, run) == [None, None]
    first, second = (tmp_path / "step-0000001" / rank_file(rank) for rank in range(2))
    os.rename(first, tmp_path / "x")
    os.rename(second, first)
    os.rename(tmp_path / "x", second)
    with pytest.raises(CheckpointError, match="rank-00000"):
        store.open(1).verify()


@pytest.mark.parametrize(
    "pointer", [b"", b"\xff" * 9, b"step-0000099\n", b"step-0000005\n", b"../../etc\n", b"x" * 10_000, None]
)
def test_a_broken_pointer_never_means_a_fresh_start(tmp_path: Path, pointer: bytes | None) -> None:
    store = small_store(tmp_path, (5, 10))
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    told: list[str] = []
    assert store.newest(report=told.append) == 10 and len(told) == 1
    for step in (5, 10):
        shutil.rmtree(tmp_path / f"step-{step:07d}")
    if pointer is not None:
        with pytest.raises(CheckpointError, match="no checkpoint is there"):
            store.newest()
    else:
        assert store.newest() is None


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest() is None
    with pytest.raises(CheckpointError, match=r"no such checkpoint \(published steps: none\)"):
        CheckpointStore(tmp_path / "none").open(3)


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    store.save(10, [Piece("w", (2,), (0,), torch.ones(2))], {"again": True})
    assert store.open(10).meta == {"again": True}
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-0000010"]
    os.rename(tmp_path / "step-0000010", tmp_path / "step-0000010.old")  # killed between two renames
    assert store.leftovers() == [], "the only copy is no leftover"
    assert store.newest() == 10


def test_one_rank_fails_and_all_say_so(tmp_path: Path) -> None:
    store = small_store(tmp_path)

    def run(rank: int, agree: Callable[[bool], bool]) -> None:
        tensor = torch.zeros(2, dtype=torch.complex64 if rank == 1 else torch.float32)
        store.save(12, [Piece("w", (6,), (2 * rank,), tensor)], {}, rank=rank, world=3, agree=agree)

    faults = on_ranks(3, run)
    assert all(isinstance(fault, SaveError) for fault in faults)
    assert "another rank failed" in str(faults[0]) and "was not saved: w: dtype torch.complex64" in str(faults[1])
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-0000010"]
    assert store.newest() == 10


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_store(tmp_path)
    real = os.pwrite
    for room in range(0, 2000, 97):
        left = [room]

        def write(descriptor: int, data: bytes, offset: int, left: list[int] = left) -> int:
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = real(descriptor, data[: left[0]], offset)
            left[0] -= count
            return count

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(SaveError, match=r"step 11 was not saved.*No space left.*whole: steps 10"):
                store.save(11, [Piece("w", (400,), (0,), torch.ones(400))], {})
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-0000010"]
        assert store.newest() == 10
    store.save(11, [Piece("w", (400,), (0,), torch.ones(400))], {})
    assert store.newest() == 11


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(SaveError, match="Permission denied"):
            store.save(11, [Piece("w", (1,), (0,), torch.ones(1))], {})
    finally:
        tmp_path.chmod(0o755)
    assert store.newest() == 10


KILLED = """
import os, sys, torch
from pathlib import Path
from mega.core.checkpoint.own.store import CheckpointStore, Piece
for place in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        store = CheckpointStore(Path(place.strip()))
        for step in range(1, 100_000):
            w = torch.full((200, 1000), float(step))
            store.save(step, [Piece("w", (200, 1000), (0, 0), w)], {"step": step})
            print(step, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
"""A process for each folder, forked from one that has imported torch."""


def test_killed_while_saving(tmp_path: Path) -> None:
    chance, command = random.Random(1), [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for place in (tmp_path / str(number) for number in range(4)):
            print(place, file=process.stdin, flush=True)
            pid, said = (int(process.stdout.readline()) for _ in range(2))
            time.sleep(chance.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "ended\n":
                said = int(line)
            store = CheckpointStore(place)
            newest = store.newest()
            assert newest is not None and newest >= said
            w = torch.zeros(200, 1000)
            store.open(newest).read([Piece("w", (200, 1000), (0, 0), w)])
            assert torch.equal(w, torch.full_like(w, float(newest)))
            shutil.rmtree(place)
        process.stdin.close()


def sealed(directory: Path, text: bytes) -> None:
    """Put a hostile manifest in place with a seal that matches."""
    import hashlib

    (directory / MANIFEST).write_bytes(text)
    (directory / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def test_hostile_manifests(tmp_path: Path) -> None:
    small_store(tmp_path)
    directory = tmp_path / "step-0000010"
    good = (directory / MANIFEST).read_text()

    def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
        fields = json.loads(good)
        change(fields)
        return json.dumps(fields).encode()

    def entry(column: int, value: object) -> bytes:
        def change(fields: dict[str, Any]) -> None:
            fields["files"][rank_file(0)]["entries"][0][column] = value

        return edited(change)

    hostile = [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 200_000,
        b'{"step": NaN}',
        edited(lambda f: f.update(format_version=2)),
        edited(lambda f: f.update(format="x")),
        edited(lambda f: f.update(world=2)),
        edited(lambda f: f.update(world=2**63)),
        edited(lambda f: f.update(step=-1)),
        edited(lambda f: f.update(step=11)),
        edited(lambda f: f.update(meta=[])),
        edited(lambda f: f.update(files={"../../../etc/passwd": {}})),
        edited(lambda f: f["files"].update({"../x.safetensors": f["files"][rank_file(0)]})),
        edited(lambda f: f["attachments"].update({"../run.toml": {"size": 1, "sha256": "0" * 64}})),
        edited(lambda f: f["attachments"].update({"a\0b": {"size": 1, "sha256": "0" * 64}})),
        edited(lambda f: f["files"][rank_file(0)].update(size=2**63)),
        edited(lambda f: f["files"][rank_file(0)].update(header=0)),
        edited(lambda f: f["files"][rank_file(0)].update(entries={})),
        edited(lambda f: f["files"][rank_file(0)]["entries"].pop()),
        entry(0, 3),
        entry(1, "F4"),
        entry(2, [2**61, 2**61]),
        entry(2, [1] * 100_000),
        entry(3, [1]),
        entry(4, [2**60]),
        entry(4, [0]),
        entry(4, [True]),
        entry(5, 0),
        entry(5, 2**62),
        entry(6, "x"),
    ]
    for text in hostile:
        sealed(directory, text)
        with pytest.raises(CheckpointError, match="manifest"):
            checkpoint = CheckpointStore(tmp_path).open(10)
            checkpoint.verify()
    sealed(directory, good.encode())
    Checkpoint(directory).verify()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", "rank-00000.json", MANIFEST, SEAL, ".x", "a\0"])
def test_attachment_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(SaveError, match="attachment"):
        CheckpointStore(tmp_path).save(1, [], {}, attachments={name: b""})


def test_linked_step_directories_are_not_followed(tmp_path: Path) -> None:
    store = small_store(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step-0000010").symlink_to(tmp_path / "a" / "step-0000010")
    assert CheckpointStore(tmp_path / "b").steps() == []
    for act in (lambda linked: linked.open(10), CheckpointStore.find):  # never a fresh start without a word
        with pytest.raises(CheckpointError, match="step-0000010: is a link, which is not followed"):
            act(CheckpointStore(tmp_path / "b"))
    assert store.steps() == [10]


@given(case=partitions(), drop=st.data())
@settings(max_examples=100)
def test_tilings_are_recognised(case: tuple[tuple[int, ...], list[Box], list[Box]], drop: st.DataObject) -> None:
    shape, boxes, others = case
    assert tiling_fault(shape, boxes) is None
    extra = drop.draw(st.sampled_from(others))
    if extra.elements:
        assert "overlap" in (tiling_fault(shape, [*boxes, extra]) or "")
    filled = [box for box in boxes if box.elements]
    lost = drop.draw(st.sampled_from(filled))
    assert "gap" in (tiling_fault(shape, [box for box in boxes if box is not lost]) or "")


def test_all_is_synced_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the publishing rename every file, and the directory that names them, is already on the disk."""
    synced: set[int] = set()
    unsynced: dict[str, set[str]] = {}
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def rename(source: Path, target: Path) -> None:
        inside = [source, *source.iterdir()] if source.is_dir() else [source]
        unsynced[Path(target).name] = {path.name for path in inside if path.stat().st_ino not in synced}
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    small_store(tmp_path)
    assert unsynced == {"step-0000010": set(), "latest": set()}
    assert tmp_path.stat().st_ino in synced
