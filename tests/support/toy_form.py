"""A foreign form that the project does not know: a folder of `.npy` files and a model.json. All that adding one takes.

Matrices are stored [in, out], and query, key and value of a block are one file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from mega.core.architecture import inventory
from mega.core.checkpoint.forms.foreign import TorchSource, read_json
from mega.core.checkpoint.forms.form import Export, ExportSource, Form, FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import Fragment, Source, Span, Table, Target
from mega.core.checkpoint.forms.writing import whole_tensor, write_json
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig

FORM = Form(
    name="toy",
    words="a folder of arrays",
    sign="model.json (toy)",
    module=__name__,
    targets=("toy",),
    companions=("toy.txt",),
)


def table(model: ModelConfig) -> Table:
    """`weights/<name>` of every logical tensor from the arrays; written once, for both directions."""
    assert model.heads and model.kv_heads and model.head_dim
    first = {"q": 0, "k": model.heads * model.head_dim, "v": (model.heads + model.kv_heads) * model.head_dim}
    targets = []
    for tensor in inventory(model):
        name, begin, here = tensor.name, 0, Span(*map(range, tensor.shape))
        for part in "qkv":
            if f"{part}_proj" in tensor.name:
                name, begin = tensor.name.replace(f"{part}_proj", "qkv"), first[part]
        rows = range(begin, begin + tensor.shape[0])
        there = Span(rows) if here.columns is None else Span(here.columns, rows)
        fragment = Fragment(name, here, there, transposed=here.columns is not None)
        targets.append(Target(f"weights/{tensor.name}", tensor.shape, (fragment,)))
    return Table(tuple(targets))


def recognise(path: Path) -> bool:
    return (path / "model.json").exists()


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    model = model_of({"config": {"model": read_json(path / "model.json")}}, str(path))
    files = sorted(path.glob("*.npy"))
    arrays = {file.stem: torch.from_numpy(np.load(file, allow_pickle=False)) for file in files}
    return OpenedForm(TorchSource(arrays), model, table(model))


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    def fill(folder: Path, table: Table, source: Source) -> int:
        for target in table.targets:
            np.save(folder / f"{target.name}.npy", whole_tensor(target, source).numpy(), allow_pickle=False)
        write_json(folder / "model.json", dataclasses.asdict(own.model))
        return sum(file.stat().st_size for file in folder.glob("*.npy"))

    return Export(table(own.model), fill)


def tokenizer(files: Attachments) -> str | None:
    return "NullTokenizer" if "toy.txt" in files else None
