"""A tensor dropped, renamed, reshaped, retyped or added, 100 times in every kind of checkpoint that is read: the
command ends with exit 2 and names the tensor (in flat files, and in our own, which are hashed: the file), and there is
no target directory. Of a renamed tensor the old name or the new one is told.

Each of the 100 takes a random file and a random tensor of it; the seed is the kind's name.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from mega.core.checkpoint.forms.megatron.eras import common_name
from tests.battery.data_ledger import run
from tests.support.foreign_forms import FORMS, Files, Form

COUNT = 100
IGNORED = ("version", "_float_tensor", "tables")
"""Ends of names whose tensors carry nothing in their format."""


def drop(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> str:
    del state[name]
    return name


def rename(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> str:
    stem, _, end = name.rpartition(".")
    items = [(f"{stem}.other_{end}" if key == name else key, tensor) for key, tensor in state.items()]
    state.clear()
    state.update(items)
    return name


def reshape(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> str:
    tensor = state[name]
    dim = rng.randrange(tensor.dim())
    less = tensor.narrow(dim, 0, tensor.shape[dim] - 1)
    shapes = [less, torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim), tensor.flatten(), tensor[None]]
    state[name] = rng.choice([changed for changed in shapes if changed.shape != tensor.shape]).clone()
    return name


def retype(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> str:
    state[name] = state[name].to(rng.choice([torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8]))
    return name


def add(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> str:
    stem, _, end = name.rpartition(".")
    added = f"{stem}.{rng.choice(['lora_a', 'extra', 'scale'])}.{end}"
    state[added] = torch.zeros(rng.randrange(1, 5), rng.randrange(1, 5))
    return added


CHANGES = {change.__name__: change for change in (drop, rename, reshape, retype, add)}
FLAT = ("llama2.c", "llama2.c 1")
"""Flat files have no names to change; and a change there is one of the file's length."""

FILES = {"llama2.c": "model.bin", "llama2.c 1": "model.bin", "mega": "rank-00000.safetensors"}
"""What is named where it is no tensor."""


def told(form: Form, kind: str, folder: Path, change: str, rng: random.Random) -> None:
    """Make one changed checkpoint, read it, and judge what is said."""
    wanted: list[str] = []

    def apply(files: Files) -> None:
        name = rng.choice(sorted(files))
        tensors = sorted(key for key in files[name] if not key.endswith(IGNORED))
        key = rng.choice(tensors)
        if kind in FLAT and change in ("reshape", "retype") and key.startswith("norm"):
            key = tensors[0]
        before = sum(tensor.numel() * tensor.element_size() for tensor in files[name].values())
        wanted.append(CHANGES[change](files[name], key, rng).removeprefix("_orig_mod."))
        after = sum(tensor.numel() * tensor.element_size() for tensor in files[name].values())
        if kind in FLAT and before == after:  # the same bytes: only the shape in memory differs
            files[name][key] = torch.cat([files[name][key].flatten(), torch.zeros(1)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = form.make(folder / "source", apply)
    output = io.StringIO()
    command = [form.verb, "--load-dir", str(load), "--save-dir", str(folder / "run"), *form.options]
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        code = main(command)
    text, culprit = output.getvalue(), wanted[0]
    names = [culprit, common_name(culprit), common_name(culprit).partition("layers.")[2] or culprit]
    if change == "rename":
        names += ["other_" + culprit.rpartition(".")[2]]
    named = FILES[kind] in text if kind in FILES else any(name in text for name in names)
    assert code == 2, (change, culprit, code, text)
    assert named, (change, culprit, text)
    assert not (folder / "run").exists(), (change, culprit)
    assert not list(folder.glob(".run*")) and not list(folder.glob("*.tmp")), (change, culprit)


def mutations(kind: str) -> Any:
    def prove() -> dict[str, Any]:
        rng, form, seen = random.Random(kind), FORMS[kind], Counter[str]()
        changes = tuple(name for name in CHANGES if kind not in FLAT or name != "rename")
        for number in range(COUNT):
            change = changes[number % len(changes)]
            with tempfile.TemporaryDirectory(prefix="mega-mutation-") as folder:
                told(form, kind, Path(folder), change, rng)
            seen[change] += 1
        return {"refused": sum(seen.values()), **seen}

    return prove


def whole(kind: str) -> None:
    """The unchanged one is read: or refusing everything would pass."""
    form = FORMS[kind]
    with tempfile.TemporaryDirectory(prefix="mega-mutation-") as folder, contextlib.redirect_stdout(io.StringIO()):
        load = form.make(Path(folder) / "source")
        assert main([form.verb, "--load-dir", str(load), "--save-dir", f"{folder}/run", *form.options]) == 0


if __name__ == "__main__":
    for each in FORMS:
        whole(each)
    run("foreign_mutations", [(kind, mutations(kind)) for kind in FORMS])
