"""Pickles that would keep torch's restricted reader busy, or fill memory, are refused; what torch writes is read."""

from __future__ import annotations

import argparse
import collections
import io
import resource
import signal
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega.core.checkpoint.forms.foreign import torch_file
from mega.core.checkpoint.forms.pickles import Arguments, read_pickled
from mega.core.checkpoint.own.pieces import CheckpointError

START = b"\x80\x02"


def doubled(count: int) -> bytes:
    """A tuple of twice a tuple of twice ..., of 2^count elements."""
    steps = (b"q" + bytes([n]) + b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(count))
    return b"K\x01" + b"".join(steps)


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def long_of(number: int) -> bytes:
    data = number.to_bytes(12, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def counted(name: str, arguments: bytes) -> bytes:
    module, _, word = name.rpartition(".")
    return f"c{module}\n{word}\n".encode() + b"(" + arguments + b"tR"


COLLIDING = b"".join(long_of(number * ((1 << 61) - 1)) + b"K\x01" for number in range(20_000))
BOMBS: dict[str, tuple[bytes, str]] = {
    "a key that hashes for ever": (b"}" + doubled(60) + b"K\x01s", "repeats itself"),
    "a key of a set that hashes for ever": (b"cbuiltins\nset\n](" + doubled(60) + b"e\x85R", "repeats itself"),
    "a storage named by such a key": (b"(K\x01K\x01" + doubled(60) + b"tQ", "repeats itself"),
    "100,000 tuples in one another": (b"}" + b"K\x01" + b"\x85" * 100_000 + b"K\x01s", "more than 100 deep"),
    "numbers that collide as keys": (b"}(" + COLLIDING + b"u", "keys that are neither text nor"),
    "a set of 100,000": (b"cbuiltins\nset\n](" + b"K\x01" * 100_000 + b"e\x85R", "of more than 1,000 elements"),
    "one dict for 10,000 objects": (
        b"}(" + b"".join(text(f"k{n}") + b"N" for n in range(1000)) + b"uq\x00"
        + (counted("torch.nn.parameter.Parameter", b"") + b"h\x00b") * 10_000,
        "repeats itself",
    ),
    "bytes of 10^12": (counted("builtins.bytearray", long_of(10**12)), "builtins.bytearray"),
    "punycode of a megabyte": (
        counted("_codecs.encode", text("\u00fc" * 500_000) + text("punycode")),
        "_codecs.encode into none of",
    ),
    "a million instructions": (b"K\x01" * 1_000_000, "instructions"),
    "memory of 2^40": (counted("torch.storage.UntypedStorage", long_of(1 << 40)), "UntypedStorage"),
    "an instruction that torch does not write": (b"\x8c\x01a", "SHORT_BINUNICODE"),
    "elements for no container": (b"K\x01K\x02a", "damaged"),
    "nothing at all": (b"", "damaged"),
}  # fmt: skip


def zipped(path: Path, pickle: bytes) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            new.writestr(item, pickle if item.filename.endswith("/data.pkl") else old.read(item))


def plain(path: Path, pickle: bytes) -> None:
    """The old form: magic number, version, machine, content, names of storages."""
    buffer = io.BytesIO()
    torch.save(None, buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    nothing = data.rindex(b"\x80\x02N.")
    path.write_bytes(data[:nothing] + pickle + data[nothing + 4 :])


@pytest.mark.parametrize("write", [zipped, plain])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_at_once(tmp_path: Path, bomb: str, write: Callable[[Path, bytes], None]) -> None:
    body, words = BOMBS[bomb]
    write(tmp_path / "x.pt", START + body + b".")
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=words):
        torch_file(tmp_path / "x.pt")
    assert time.process_time() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_the_two_forms_are_read_when_they_are_honest(tmp_path: Path) -> None:
    """The scaffolding of the test above: with an empty dict it is a torch file."""
    for write in (zipped, plain):
        write(tmp_path / "x.pt", START + b"}.")
        assert torch_file(tmp_path / "x.pt") == {}


def everything() -> dict[str, Any]:
    """What training scripts put into their files."""
    layer = torch.nn.Linear(3, 4)
    adam = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(2, 3)).sum().backward()
    adam.step()
    shared = torch.arange(6.0)
    return {
        "model": layer.state_dict(),
        "optimizer": adam.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "views": [shared, shared[1:3], shared.view(2, 3).t()],
        "args": argparse.Namespace(
            seed=1 << 70, betas=(0.9, 0.999), split=None, names={"a", "b"}, shape=torch.Size([2])
        ),
        "rng_state": [{"np": np.random.RandomState(0).get_state(), "python": (3, tuple(range(625)), None)}],
        "vectors": {0: {torch.float32: {"param": torch.zeros(4), (torch.bfloat16, torch.float32): 1}}},
        "counts": collections.Counter({"a": 2}),
        "bytes": b"\x00\xff",
        "device": torch.device("cpu"),
        "deep": [[[[{"a": [1, (2, (3, (4,)))]}]]]],
        "many": {str(number): float(number) for number in range(3000)},
    }


@pytest.mark.parametrize("archive", [True, False])
def test_what_torch_writes_is_read(tmp_path: Path, archive: bool) -> None:
    torch.save(everything(), tmp_path / "x.pt", _use_new_zipfile_serialization=archive)
    found = read_pickled(tmp_path / "x.pt")
    assert found.keys() == everything().keys() and found["bytes"] == b"\x00\xff"
    assert isinstance(found["args"], Arguments) and found["args"].values["seed"] == 1 << 70
    assert torch.equal(found["views"][2], torch.arange(6.0).view(2, 3).t())


def test_a_file_that_begins_as_an_archive_is_scanned_as_one(tmp_path: Path) -> None:
    """torch looks at the first bytes, zip readers at the last; neither way leads around the scan."""
    plain(tmp_path / "old.pt", START + b"}" + doubled(60) + b"K\x01s.")
    zipped(tmp_path / "new.pt", START + b"}.")
    data = (tmp_path / "old.pt").read_bytes() + (tmp_path / "new.pt").read_bytes()
    (tmp_path / "both.pt").write_bytes(data)
    (tmp_path / "head.pt").write_bytes((tmp_path / "new.pt").read_bytes()[:-30])
    for name in ("both.pt", "head.pt"):
        with pytest.raises(CheckpointError, match=r"repeats itself|not a torch file"):
            torch_file(tmp_path / name)


def test_objects_of_other_programs_are_inert_by_pattern(tmp_path: Path) -> None:
    """An enum that no release has had yet; a signal, and a tensor with attributes, as Megatron-core's masters are."""
    kind = text("kind") + counted("megatron.core.tomorrow.Kind", b"K\x03")
    body = b"}" + text("args") + b"cargparse\nNamespace\n)\x81}" + kind + b"sbs"
    zipped(tmp_path / "x.pt", START + body + b".")
    assert read_pickled(tmp_path / "x.pt")["args"].values["kind"].arguments == (3,)
    with pytest.raises(CheckpointError, match=r"it holds argparse\.Namespace"):
        torch_file(tmp_path / "x.pt")
    master = torch.arange(4.0)
    master.partition_dim, master.is_qkv = 0, True  # type: ignore[attr-defined]
    torch.save({"args": argparse.Namespace(exit_signal=signal.SIGTERM), "master": master}, tmp_path / "y.pt")
    assert torch.equal(read_pickled(tmp_path / "y.pt")["master"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("function", "kind"),
    [("builtins.bytearray", "torch.Tensor"), ("torch._utils._rebuild_tensor_v2", "collections.OrderedDict")],
)
def test_a_tensor_with_attributes_is_only_made_of_a_tensor(tmp_path: Path, function: str, kind: str) -> None:
    """The function that torch calls for one calls whatever it is given."""
    names = b"".join(f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode() for name in (function, kind))
    given = names + long_of(10**12) + b"\x85}"
    zipped(tmp_path / "x.pt", START + counted("torch._tensor._rebuild_from_type_v2", given) + b".")
    with pytest.raises(CheckpointError, match="_rebuild_from_type_v2 of"):
        read_pickled(tmp_path / "x.pt")
