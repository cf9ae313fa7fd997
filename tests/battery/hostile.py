"""Hostile checkpoints: payloads that would run code in every file that any loader reads, and headers that would eat
time or memory. Under an audit hook nothing is executed, opened or connected; every bomb ends in an error within 2 s
of processor time and 200 MB.

An item is one kind of checkpoint: 15 payloads x 5 wrappings x each of its files. What a wrapping does to a file that
is only copied (a dict.txt) or not looked at may end well; code must not run there either. Megatron-core's forms with an
optimizer are kinds of their own; in those the payloads, and names that look like another program's, lie at the places
where such files keep objects, too: arguments, states of reruns, groups of parameters, the index, objects among tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from tests.battery.data_ledger import resident, run
from tests.support.core_forms import CORE, CoreForm, read_equal_bytes_once
from tests.support.foreign_forms import FORMS, Form

HOME = Path(tempfile.mkdtemp(prefix="mega-hostile-"))
CANARY = HOME / "canary"
MODULE = "mega_hostile_canary"
MEGABYTES = 200
SECONDS = 2.0


class Payload:
    """Pickled, it is a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def payloads() -> dict[str, Payload]:
    import ctypes
    import functools
    import importlib
    import operator
    import runpy
    import webbrowser

    touch = f"touch {CANARY}/ran"
    return {
        "os.system": Payload(os.system, touch),
        "subprocess.Popen": Payload(subprocess.Popen, ["touch", f"{CANARY}/ran"]),
        "eval": Payload(eval, f"open({str(CANARY / 'ran')!r}, 'w')"),
        "exec": Payload(exec, f"open({str(CANARY / 'ran')!r}, 'w')"),
        "open": Payload(open, str(CANARY / "ran"), "w"),
        "socket": Payload(socket.create_connection, ("127.0.0.1", 9)),
        "import": Payload(importlib.import_module, MODULE),
        "dlopen": Payload(ctypes.CDLL, str(CANARY / "library.so")),
        "run_path": Payload(runpy.run_path, str(CANARY / "script.py")),
        "browser": Payload(webbrowser.open, "http://127.0.0.1:9"),
        "execv": Payload(os.execv, "/bin/true", ["true"]),
        "rmtree": Payload(shutil.rmtree, str(CANARY)),
        "torch.load": Payload(torch.load, str(CANARY / "inner.pt")),
        "partial": Payload(functools.partial, os.system, touch),
        "attrgetter": Payload(operator.attrgetter("system"), os),
    }


# What must not happen: judged by the interpreter's own audit events ------------------------------------------------

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.", "socket.", "webbrowser.")
armed = False
seen: list[str] = []


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not armed:
        return
    canary = any(str(CANARY) in str(argument) or argument == MODULE for argument in arguments[:2])
    if event.startswith(FORBIDDEN) or event in ("pickle.find_class", "ctypes.dlopen") or canary:
        seen.append(f"{event} {arguments[:2]!r}"[:200])


def read(form: Form | CoreForm, load: Path, target: Path) -> tuple[int, str]:
    """Run the verb with the hook on."""
    global armed
    output = io.StringIO()
    command = [form.verb, "--load-dir", str(load), "--save-dir", str(target), *form.options]
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        armed = True
        try:
            code = main(command)
        finally:
            armed = False
    return code, output.getvalue()


def raw(protocol: int) -> Callable[[Path, Payload], None]:
    def write(path: Path, payload: Payload) -> None:
        path.write_bytes(_pickled(payload, protocol))

    return write


def _pickled(payload: Payload, protocol: int) -> bytes:
    try:
        return pickle.dumps({"model": payload}, protocol)
    except TypeError:  # attrgetter of a module: named, not pickled
        return b"cos\nsystem\n(S'touch " + str(CANARY / "ran").encode() + b"'\ntR."


def torch_file(path: Path, payload: Payload, zipped: bool) -> None:
    with contextlib.suppress(TypeError):
        written(path, {"model": payload, "args": payload}, zipped)


def written(path: Path, content: Any, zipped: bool = True) -> None:
    """As torch.save, which has no files whose names begin with a dot."""
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    path.write_bytes(buffer.getvalue())


def embedded(path: Path, payload: Payload) -> None:
    """Beside what belongs there: in the original dict of a torch file; in a string of any other."""
    try:
        with torch.serialization.safe_globals([__import__("argparse").Namespace]):
            content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        written(path, {**content, "rng_state": payload})
    except Exception:
        path.write_bytes(path.read_bytes() + _pickled(payload, 2))


WRAPPINGS: dict[str, Callable[[Path, Payload], None]] = {
    "pickle 2": raw(2),
    "pickle 4": raw(4),
    "torch zip": lambda path, payload: torch_file(path, payload, True),
    "torch legacy": lambda path, payload: torch_file(path, payload, False),
    "embedded": embedded,
}


# Places where Megatron-core's files keep objects ------------------------------------------------------------------


class Named:
    """Pickled, it is a call of what has a `name`, which need not be what pickle itself would call it."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments


class NamingPickler(pickle._Pickler):  # Python's own, in Python: it can be told what to write
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Named):
            super().save(obj, save_persistent_id)  # type: ignore[misc]
            return
        module, _, function = obj.name.partition(":")
        if self.proto >= 4:  # type: ignore[attr-defined]
            self.save(module)
            self.save(function)
            self.write(pickle.STACK_GLOBAL)  # type: ignore[attr-defined]
        else:
            self.write(pickle.GLOBAL + f"{module}\n{function}\n".encode())  # type: ignore[attr-defined]
        self.save(obj.arguments)
        self.write(pickle.REDUCE)  # type: ignore[attr-defined]


class naming:
    Pickler = NamingPickler


def looks() -> dict[str, Named]:
    """Calls by names whose modules hold what command lines hold, or are another program's."""
    ran = str(CANARY / "ran")
    return {
        "argparse.FileType": Named("argparse:FileType", "w"),
        "pathlib.Path.touch": Named("pathlib:Path.touch", ran),
        "pathlib.os": Named("pathlib:os.system", f"touch {ran}"),
        "enum.sys": Named("enum:sys.exit", 3),
        "signal": Named("signal:raise_signal", 10),
        "typer": Named("typer:launch", "http://127.0.0.1:9"),
        "numpy": Named("numpy:savetxt", ran, [1.0]),
        "mega": Named("mega.core.files:whole_file", Path(ran).name),
        "__main__": Named("__main__:Payload", 1),
        "megatron": Named("megatron.core.rerun_state_machine:RerunMode", ran),
    }


def at(*path: Any) -> Callable[[Any, Any], None]:
    """Puts a payload at a place, if that is there."""

    def put(content: Any, payload: Any) -> None:
        for step in path[:-1]:
            content = vars(content) if isinstance(content, argparse.Namespace) else content
            content = next(iter(content.values())) if step is any else content[step]
        content = vars(content) if isinstance(content, argparse.Namespace) else content
        content[path[-1]] = payload

    return put


PLACES = {
    "args": at("args"),
    "an argument": at("args", "num_layers"),
    "an argument of no use": at("args", "rerun_mode"),
    "rerun state": at("rerun_state_machine"),
    "random state": at("rng_state"),
    "optimizer": at("optimizer"),
    "groups": at("optimizer", "optimizer", "param_groups"),
    "a group": at("optimizer", "optimizer", "param_groups", 0, "odd"),
    "betas": at("optimizer", "optimizer", "param_groups", 0, "betas"),
    "a step": at("optimizer", "optimizer", "param_groups", 1, "step"),
    "a group of fp32": at("optimizer", "param_groups", 0, "eps"),
    "a moment": at("optimizer", "optimizer", "state", 0, "exp_avg"),
    "loss scale": at("optimizer", "grad_scaler", "scale"),
    "scheduler": at("opt_param_scheduler", "max_lr"),
    "iteration": at("iteration"),
    "metadata": at("content_metadata"),
    "a weight": at("model", "decoder.final_layernorm.weight"),
    "a vector": at(0, any, "exp_avg"),
    "sizes": at("bucket_sizes"),
}


def placed(path: Path) -> Iterator[tuple[str, Callable[[Path, Any], None]]]:
    """Ways to put a payload into a file without changing the rest."""
    if path.suffix == ".pt":
        for place, put in PLACES.items():
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
            with contextlib.suppress(KeyError, TypeError, IndexError):
                put(content, None)

                def change(file: Path, payload: Any, content: Any = content, put: Any = put) -> None:
                    put(content, payload)
                    buffer = io.BytesIO()
                    torch.save(content, buffer, pickle_module=naming)
                    file.write_bytes(buffer.getvalue())

                yield place, change
    if path.name == ".metadata":
        yield from ((place, in_index(place)) for place in ("planner_data", "storage_meta", "a tensor", "a place"))
    if path.suffix == ".distcp":
        yield "an object", among_tensors(opaque=True)
        yield "a tensor", among_tensors(opaque=False)


def in_index(place: str) -> Callable[[Path, Any], None]:
    def change(file: Path, payload: Any) -> None:
        index = pickle.loads(file.read_bytes())  # noqa: S301  (written here)
        if place in ("planner_data", "storage_meta"):
            setattr(index, place, payload)
        elif place == "a tensor":
            index.state_dict_metadata[next(iter(index.state_dict_metadata))] = payload
        else:
            index.storage_data[next(iter(index.storage_data))] = payload
        buffer = io.BytesIO()
        NamingPickler(buffer, 4).dump(index)
        file.write_bytes(buffer.getvalue())

    return change


def among_tensors(*, opaque: bool) -> Callable[[Path, Any], None]:
    """In place of the objects, or tensors, of an optimizer, or of others where there is none of it."""

    def change(file: Path, payload: Any) -> None:
        index = pickle.loads((file.parent / ".metadata").read_bytes())  # noqa: S301
        chosen = [key for key in index.storage_data if (key.offset is None) == opaque]
        chosen = [key for key in chosen if key.fqn.startswith("optimizer.")] or chosen
        buffer = io.BytesIO()
        torch.save([{"param_groups": [payload]}] if opaque else payload, buffer, pickle_module=naming)
        length = file.stat().st_size
        with open(file, "ab") as stream:
            stream.write(buffer.getvalue())
        for key in chosen:
            place = index.storage_data[key]
            if place.relative_path == file.name:
                place.offset, place.length = length, len(buffer.getvalue())
        (file.parent / ".metadata").write_bytes(pickle.dumps(index, protocol=4))

    return change


def place_item(kind: str) -> Callable[[], dict[str, Any]]:
    """Each payload at each place of each kind of file, whose first is taken."""

    def prove() -> dict[str, Any]:
        form, counts, names = CORE[kind], Counter[str](), set[str]()
        pristine = HOME / "pristine"
        shutil.rmtree(pristine, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form.make(pristine)
        for file in sorted(path.relative_to(pristine) for path in pristine.rglob("*") if path.is_file()):
            if file.name in names:
                continue
            names.add(file.name)
            for place, put in placed(pristine / file):
                for name, payload in {**payloads(), **looks()}.items():
                    ends_well(form, pristine, file, put, payload, f"{file}, {place}, {name}", counts)
        return {"places": counts.total(), **counts}

    return prove


def ends_well(
    form: Form | CoreForm,
    pristine: Path,
    file: Path,
    wrap: Callable[[Path, Any], None],
    payload: Any,
    where: str,
    counts: Counter[str],
) -> None:
    """Put a payload into a file of a copy, read it, and see that it has not been run."""
    source, target = HOME / "source", HOME / "target"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pristine, source)
    try:
        wrap(source / file, payload)
    except TypeError:  # attrgetter of a module cannot be pickled
        counts["not to be written"] += 1
        return
    seen.clear()
    code, text = read(form, source / form.path, target)
    assert not seen, f"{where}: {seen}"
    assert sorted(os.listdir(CANARY)) == KEPT, where
    assert code in (0, 2), f"{where}: exit {code}: {text}"
    assert code == 0 or not target.exists(), where
    counts["refused" if code else "of no effect"] += 1


def payload_item(kind: str) -> Callable[[], dict[str, Any]]:
    def prove() -> dict[str, Any]:
        form, counts = ({**FORMS, **CORE})[kind], Counter[str]()
        pristine = HOME / "pristine"
        shutil.rmtree(pristine, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form.make(pristine)  # type: ignore[attr-defined]
        files = sorted(path.relative_to(pristine) for path in pristine.rglob("*") if path.is_file())
        for file in files:
            for payload_name, payload in payloads().items():
                for wrapping, wrap in WRAPPINGS.items():
                    where = f"{file}, {payload_name}, {wrapping}"
                    ends_well(form, pristine, file, wrap, payload, where, counts)  # type: ignore[arg-type]
        return {"files": len(files), **counts}

    return prove


# Bombs and tricks ----------------------------------------------------------------------------------------------------


def bomb_item(kind: str, name: str, change: Callable[[Path], None]) -> Callable[[], dict[str, Any]]:
    def prove() -> dict[str, Any]:
        source, target, form = HOME / "source", HOME / "target", ({**FORMS, **CORE})[kind]
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load = form.make(source)  # type: ignore[attr-defined]
        change(source)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
        before, begin = resident("VmRSS"), time.process_time()
        code, text = read(form, load, target)  # type: ignore[arg-type]
        seconds, grown = time.process_time() - begin, resident("VmHWM") - before
        assert code == 2 and text.strip(), (code, text)
        assert not target.exists() and not seen, seen
        assert seconds < SECONDS and grown < MEGABYTES, (seconds, grown)
        return {"cpu seconds": round(seconds, 2), "MB": grown, "said": text.strip().replace(f"{HOME}/", "")[-150:]}

    return prove


def header(text: bytes, length: int | None = None, data: bytes = b"") -> Callable[[Path], None]:
    size = (len(text) if length is None else length).to_bytes(8, "little")

    def change(source: Path) -> None:
        (source / "model.safetensors").write_bytes(size + text + data)

    return change


def entry(**fields: Any) -> Callable[[Path], None]:
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}
    return header(json.dumps({"lm_head.weight": whole}).encode(), data=b"0000")


def config(**fields: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        path = source / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def text(name: str, content: bytes) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).write_bytes(content)

    return change


def index(file: str) -> Callable[[Path], None]:
    return text("model.safetensors.index.json", json.dumps({"weight_map": {"lm_head.weight": file}}).encode())


def link(name: str, to: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink()
        (source / name).symlink_to(to)

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink()
        os.mkfifo(source / name)

    return change


def zip_bomb(name: str) -> Callable[[Path], None]:
    """1 GiB of zeros, packed to a megabyte, as a tensor's data."""

    def change(source: Path) -> None:
        with zipfile.ZipFile(source / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}, 2))
            with archive.open("archive/data/0", "w", force_zip64=True) as stream:
                for _ in range(1 << 10):
                    stream.write(bytes(1 << 20))

    return change


def state_of(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        with torch.serialization.safe_globals([__import__("argparse").Namespace]):
            content = torch.load(io.BytesIO((source / name).read_bytes()), weights_only=True)
        torch.save(change(content), source / name)

    return apply


def vast(content: dict[str, Any]) -> dict[str, Any]:
    """Tables of 2^40 rows, each the same stored one."""
    row = torch.zeros(16)
    tables = {name: row.expand(1 << 40, 16) for name in ("tok_embeddings.weight", "output.weight")}
    return {**content, **tables}


def claimed(source: Path) -> None:
    """A flat file whose header claims 2^30 of everything."""
    path = source / "model.bin"
    data = path.read_bytes()
    path.write_bytes(b"".join((1 << 29).to_bytes(4, "little") for _ in range(7)) + data[28:])


def sealed(**fields: Any) -> Callable[[Path], None]:
    """Our own manifest with other values in its model section, and a seal that fits."""

    def change(source: Path) -> None:
        import hashlib

        folder = source / "step-0000007"
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["meta"]["config"]["model"].update(fields)
        data = json.dumps(manifest).encode()
        (folder / "manifest.json").write_bytes(data)
        seal = f"{hashlib.sha256(data).hexdigest()}  manifest.json\n"
        (folder / "manifest.json.sha256").write_text(seal)

    return change


def tuples(source: Path) -> None:
    """A pickle whose key is a tuple of tuples, 60 deep, each twice the one before: hashing it takes for ever."""
    data = b"\x80\x04}" + b"K\x01" + b"\x94h\x00\x86" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(1, 60))
    (source / "iter_0000010" / ".metadata").write_bytes(data + b"K\x01s.")


def hashed_for_ever(name: str, zipped: bool = True) -> Callable[[Path], None]:
    """The torch file `name` with such a key: of tuples of twice a tuple, 60 deep."""
    steps = (b"q" + bytes([n]) + b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
    body = b"\x80\x02}K\x01" + b"".join(steps) + b"K\x01s."

    def change(source: Path) -> None:
        buffer = io.BytesIO()
        torch.save(None, buffer, _use_new_zipfile_serialization=zipped)
        if not zipped:
            data = buffer.getvalue()
            nothing = data.rindex(b"\x80\x02N.")
            (source / name).write_bytes(data[:nothing] + body + data[nothing + 4 :])
            return
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(source / name, "w") as new:
            for item in old.infolist():
                new.writestr(item, body if item.filename.endswith("/data.pkl") else old.read(item))

    return change


PROTO, RECORD = b"\x80\x04", b"\x8c\x01m\x8c\x01R\x93)\x81"  # a new record of class m.R
DOUBLED = b"K\x01\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
"""A tuple of twice a tuple, 60 deep."""


def named(key: str) -> bytes:
    return b"\x8c" + bytes([len(key)]) + key.encode()


def with_state(**fields: bytes) -> bytes:
    """A record whose state has these fields, each the bytes that make it."""
    return RECORD + b"}(" + b"".join(named(key) + value for key, value in fields.items()) + b"ub"


def a_name_for_ever(source: Path) -> None:
    """Of which the hash takes for ever, where the index has the name of a tensor."""
    key = with_state(fqn=DOUBLED, offset=b"N")
    place = with_state(relative_path=named("f"), offset=b"K\x00", length=b"K\x00")
    index_of(source, with_state(storage_data=b"}" + key + place + b"s"))


def spelled_for_ever(source: Path) -> None:
    index_of(source, DOUBLED + named("R") + b"\x93")


def marks(source: Path) -> None:
    index_of(source, b"(" * 200_000 + b"t" * 200_000)


def one_dict_for_all(source: Path) -> None:
    """20,000 keys, given to 20,000 records."""
    keys = b"".join(b"\x8c\x06" + b"%06d" % n + b"K\x01" for n in range(20_000))
    index_of(source, b"}\x94(" + keys + b"u" + (RECORD + b"h\x00b") * 20_000)


def one_list_for_all(source: Path) -> None:
    """20,000 numbers, given to 20,000 calls."""
    index_of(source, b"]\x94(" + b"K\x01" * 20_000 + b"e" + b"\x8c\x01m\x8c\x01R\x93\x94" + b"h\x01h\x00R" * 20_000)


def index_of(source: Path, body: bytes) -> None:
    (next(source.glob("iter_*")) / ".metadata").write_bytes(PROTO + body + b".")


def lists(value: Any = 1) -> Any:
    """A list of twice a list, 60 deep: spelling it takes for ever."""
    for _ in range(60):
        value = [value, value]
    return value


def content_of(name: str, *path: Any) -> Callable[[Path], None]:
    """Such a list at a place of a torch file."""

    def change(content: Any) -> Any:
        at(*path)(content, lists())
        return content

    return state_of(name, change)


FOR_EVER = {
    "hf bin": "pytorch_model.bin",
    "meta": "consolidated.01.pth",
    "llama2.c pt": "ckpt.pt",
    "megatron": "iter_0000007/mp_rank_01_000/model_optim_rng.pt",
    "mcore": "iter_0000007/mp_rank_01/model_optim_rng.pt",
    "megatron released": "release/mp_rank_00/model_optim_rng.pt",
    "torch_dist": "iter_0000010/common.pt",
    "fairseq": "model-model_part-1.pt",
}
"""A torch file of each kind that has one."""


BOMBS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("hf", "a header of 2^63 bytes", header(b"{}", 1 << 63)),
    ("hf", "a header of 2^40 bytes", header(b"{}", 1 << 40)),
    ("hf", "a header of 2^64 - 1 bytes", header(b"{}", (1 << 64) - 1)),
    ("hf", "a header nested 10^6 deep", header(b"[" * 1_000_000)),
    ("hf", "a shape of 2^61 x 2^61", entry(shape=[1 << 61, 1 << 61])),
    ("hf", "a shape of 2^200", entry(shape=[1 << 200])),
    ("hf", "a shape of 10^5 dims", entry(shape=[1] * 100_000)),
    ("hf", "offsets at 2^62", entry(data_offsets=[1 << 62, (1 << 62) + 4])),
    ("hf", "negative offsets", entry(data_offsets=[-4, 0])),
    ("hf", "10^12 layers", config(num_hidden_layers=10**12)),
    ("hf", "10^11 layers", config(num_hidden_layers=10**11)),
    ("hf", "a vocabulary of 10^11", config(vocab_size=10**11)),
    (
        "hf",
        "a number of 10^5 digits",
        text("config.json", b'{"model_type": "llama", "vocab_size": ' + b"9" * 100_000 + b"}"),
    ),
    ("hf", "JSON nested 10^6 deep", text("config.json", b'{"a":' * 1_000_000)),
    ("hf", "a config of the root directory", link("config.json", "/etc/passwd")),
    ("hf", "weights linked elsewhere", link("model.safetensors", "/etc/hostname")),
    ("hf", "weights that are a device", link("model.safetensors", "/dev/zero")),
    ("hf", "weights that are a pipe", fifo("model.safetensors")),
    ("hf", "a config that is a pipe", fifo("config.json")),
    ("hf sharded", "an index to ../", index("../canary/script.py")),
    ("hf sharded", "an index to /etc", index("/etc/passwd")),
    ("hf bin", "a zip bomb", zip_bomb("pytorch_model.bin")),
    ("meta", "a zip bomb", zip_bomb("consolidated.00.pth")),
    ("meta", "2^40 rows of one stored", state_of("consolidated.00.pth", vast)),
    ("meta", "10^9 layers", text("params.json", b'{"dim": 16, "n_layers": 1000000000, "n_heads": 4, "n_kv_heads": 2}')),
    ("llama2.c", "sizes of 2^29", claimed),
    ("llama2.c", "a file that is a device", link("model.bin", "/dev/zero")),
    ("llama2.c", "a file that is a pipe", fifo("model.bin")),
    ("megatron", "a zip bomb", zip_bomb("iter_0000007/mp_rank_00_000/model_optim_rng.pt")),
    ("megatron", "a tracker to ../", text("latest_checkpointed_iteration.txt", b"../../canary")),
    ("megatron", "a tracker of 10^9 digits", text("latest_checkpointed_iteration.txt", b"9" * 10_000_000)),
    ("torch_dist", "a tuple that hashes for ever", tuples),
    ("torch_dist", "an index of 10^6 marks", text("iter_0000010/.metadata", b"\x80\x04" + b"(" * 1_000_000)),
    ("mega", "10^12 layers", sealed(layers=10**12)),
    ("mega", "heads as text", sealed(heads="4")),
    ("mega", "a fraction of layers", sealed(layers=2.5)),
    *((kind, "a key that hashes for ever", hashed_for_ever(name)) for kind, name in FOR_EVER.items()),
    *((kind, "such a key, no archive", hashed_for_ever(name, zipped=False)) for kind, name in FOR_EVER.items()),
    ("torch_dist, bf16", "a name that hashes for ever", a_name_for_ever),
    ("torch_dist, bf16", "a module that is spelled for ever", spelled_for_ever),
    ("torch_dist, bf16", "200,000 marks, each ended", marks),
    ("torch_dist, bf16", "a dict for 20,000 records", one_dict_for_all),
    ("torch_dist, bf16", "a list for 20,000 calls", one_list_for_all),
    *(
        (kind, f"lists that are spelled for ever: {'.'.join(map(str, path))}", content_of(name, *path))
        for kind, name in (
            ("torch_dist, bf16", "iter_0000007/common.pt"),
            ("mcore, bf16", "iter_0000007/mp_rank_00_000/model_optim_rng.pt"),
        )
        for path in (
            ("args", "num_layers"),
            ("args", "position_embedding_type"),
            ("iteration",),
            ("optimizer", "optimizer", "param_groups", 0, "betas"),
            ("optimizer", "optimizer", "param_groups", 0, "lr_mult"),
            ("optimizer", "optimizer", "param_groups", 0, "step"),
        )
    ),
    ("mega", "no width", sealed(hidden=None)),
    ("mega", "minus one head", sealed(heads=-1)),
]

if __name__ == "__main__":
    CANARY.mkdir()
    (HOME / f"{MODULE}.py").write_text(f"open({str(CANARY / 'ran')!r}, 'w')")
    (CANARY / "script.py").write_text(f"open({str(CANARY / 'ran')!r}, 'w')")
    torch.save({}, CANARY / "inner.pt")
    KEPT = sorted(os.listdir(CANARY))
    sys.path.insert(0, str(HOME))
    for each in (*FORMS.values(), *CORE.values()):  # whatever is imported lazily is imported before the hook is on
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert read(each, each.make(Path(scratch) / "source"), Path(scratch) / "target")[0] == 0  # type: ignore[arg-type,attr-defined]
    sys.addaudithook(audit)
    read_equal_bytes_once()
    random.seed(0)
    items = [(f"payloads in {kind}", payload_item(kind)) for kind in FORMS]
    items += [(f"payloads in {kind}", payload_item(kind)) for kind in CORE]
    items += [(f"places of {kind}", place_item(kind)) for kind in CORE]
    items += [(f"{kind}: {name}", bomb_item(kind, name, change)) for kind, name, change in BOMBS]
    try:
        run("hostile", items)
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
