"""Weights from Hugging Face, Meta, llama2.c or fairseq into own checkpoints cut for any tp x pp, and back out.

Conversions stream: a few blocks are in memory at a time (one part, where a torch file is written). A table
says where every element comes from; it is proven before a byte is written, and a ledger is kept of what
was moved. A folder appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from mega.core.checkpoint.forms import fairseq, gpt2, huggingface, llama2c, meta
from mega.core.checkpoint.forms.folders import filled_folder
from mega.core.checkpoint.forms.foreign import hugging_face_source, inside, read_json
from mega.core.checkpoint.forms.kinds import NAMES, Kind, Target, check_place, kind_of
from mega.core.checkpoint.forms.ledger import ConversionReport, Ledger
from mega.core.checkpoint.forms.mapping import Source, Table, Tensors, assemble, check_copies, prove
from mega.core.checkpoint.own.container import write_container
from mega.core.checkpoint.own.disk import creating, write_all
from mega.core.checkpoint.own.layout import ONE, Layout, check_model, model_of, plan_files, planned
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.store import Attachments, Checkpoint, locate, store_at
from mega.core.config.sections import ModelConfig
from mega.core.files import whole_file

SHARD_BYTES = 5 << 30
"""Largest safetensors file of an exported folder."""

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "params.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "dict.txt",
)
"""Files that travel with the weights, where they are there."""


class OwnSource:
    """The tensors of an own checkpoint as a source of conversions: its weights, or some kinds."""

    def __init__(self, checkpoint: Checkpoint, kinds: Sequence[str] = ("weights",)) -> None:
        self._checkpoint = checkpoint
        self.tensors: Tensors = {
            key: value for key, value in checkpoint.tensors.items() if key.partition("/")[0] in kinds
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        whole, dtype = self.tensors[name]
        tensor = torch.empty(box.size, dtype=dtype)
        self._checkpoint.read([Piece(name, whole, box.start, tensor)])
        return tensor


def convert(load: Path, save: Path, to: Target | None = None, layout: Layout = ONE, parts: int = 1) -> ConversionReport:
    """Whatever lies at `load` -> a `to` at `save`; own checkpoints go to Hugging Face unless told otherwise.

    layout: ranks that a checkpoint is cut for. parts: files of a Meta folder.
    Errors: ValueError naming flag, file or tensor; `save` is then as it was.
    """
    target = target_of(load, kind_of(load), to)
    if target == "mega":
        return to_mega(load, save, layout)
    return to_hugging_face(load, save) if target == "hf" else to_meta(load, save, parts)


def target_of(load: Path, kind: Kind, to: Target | None) -> Target:
    """What a `kind` becomes at --to `to`. Errors: ValueError where one is not made of the other here."""
    if kind in ("megatron", "torch_dist"):
        raise ValueError(f"{load}: is {NAMES[kind]}; `mega reshard` reads it")
    target = to or ("hf" if kind == "mega" else "mega")
    if (kind == "mega") == (target == "mega"):
        raise ValueError(f"--to {target}: {load} is {NAMES[kind]}; exactly one of the two must be mega")
    return target


def to_mega(load: Path, save: Path, layout: Layout) -> ConversionReport:
    """A folder or file of others -> step 0 of the run directory `save`, in files for the ranks of `layout`."""
    source, model, table = opened(load)
    companions = {name: inside(load, name) for name in COMPANIONS if (load / name).exists()}
    for path in companions.values():
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
    check_model(model, str(load))
    return import_weights(source, table, model, save, layout, attachments=companions)


def opened(load: Path) -> tuple[Source, ModelConfig, Table]:
    """The tensors of a folder or file of others, the model that they are, and where each element goes."""
    kind = kind_of(load)
    if kind == "llama2.c":
        source, params = llama2c.open_file(load)
        return source, *meta.understood(source, params, 1, str(load))
    if kind == "fairseq":
        return fairseq.open_folder(load)
    if kind == "meta":
        return meta.open_folder(load)
    path = load / "config.json"
    config = read_json(path)
    if config.get("quantization_config"):
        raise CheckpointError(f"{path}: quantization_config: quantised weights are not read; dequantise them first")
    if (load / "adapter_config.json").exists():
        raise CheckpointError(
            f"{load / 'adapter_config.json'}: an adapter is not read; merge it into the weights, or take its files away"
        )
    form = gpt2 if config.get("model_type") == "gpt2" else huggingface
    model = form.model_from_config(config, str(path))
    weights = hugging_face_source(load)
    return weights, model, form.import_table(model, weights.tensors)


def import_weights(
    source: Source,
    table: Table,
    model: ModelConfig,
    save: Path,
    layout: Layout,
    *,
    attachments: Attachments = MappingProxyType({}),
    step: int = 0,
    consumed: int = 0,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> ConversionReport:
    """A table of `weights/...` targets (and of an optimizer's), proven first -> one step of the run directory `save`.

    known: what the checkpoint should say besides, or instead, in its plain state.
    """
    check_place(save)
    notes = dtypes_said(table)
    prove(table, source.tensors)
    check_copies(table, source)
    targets = {target.name: target for target in table.targets}
    tensors = {target.name: (target.shape, target.dtype) for target in table.targets}
    files = plan_files(tensors, model, layout)
    ledger = Ledger({target.name: prod(target.shape) for target in table.targets})

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        ledger.moved(piece.key, box.elements)
        return assemble(targets[piece.key], box, source)

    config = {
        "model": dataclasses.asdict(model),
        "precision": {"dtype": huggingface.dtype_of(tensors)},
        "parallel": layout.section,
        "tokenizer": {"tokenizer": tokenizer_kind(attachments)},
    }
    store = store_at(save)
    state = {"progress": {"step": step, "consumed": consumed}, "updates": step, **known}
    state["config"] = {**config, **known.get("config", {})}
    report = store.save_all(step, files, state, fetch=fetch, check=ledger.close, attachments=attachments)
    elements = sum(ledger.expected.values())
    return ConversionReport(len(targets), elements, report.bytes, save / store.path(step).name, notes)


def dtypes_said(table: Table) -> tuple[str, ...]:
    """Lines on weights that are wider than most: fp32 ones of a 16-bit model, such as norms. They are kept as they are.

    They must be of one kind in every block. Any other mixture is damage, or was never meant to be a weight.
    Errors: CheckpointError naming a weight of a dtype that it should not have.
    """
    weights = [target for target in table.targets if target.name.startswith("weights/")]
    elements, kinds = Counter[torch.dtype](), Counter[tuple[str, torch.dtype]]()
    for target in weights:
        elements[target.dtype] += prod(target.shape)
        kinds[_kind(target.name), target.dtype] += 1
    usual = max(elements, key=lambda dtype: (dtype.is_floating_point, elements[dtype]))
    of_kind = {kind: dtype for (kind, dtype), _ in reversed(kinds.most_common())}
    for target in weights:
        kept = {usual, torch.float32} if usual in (torch.bfloat16, torch.float16) else {usual}
        wanted = of_kind[_kind(target.name)] if of_kind[_kind(target.name)] in kept else usual
        if target.dtype != wanted or not usual.is_floating_point:
            others = f"the others are {wanted}" if usual.is_floating_point else "a floating dtype is wanted"
            raise CheckpointError(f"{target.fragments[0].source}: is {target.dtype}, {others}")
    wide = [target.name.removeprefix("weights/") for target in weights if target.dtype != usual]
    if not wide:
        return ()
    return (f"{len(wide)} of {len(weights)} tensors are fp32 among {usual} ({wide[0]}, ...): each keeps its dtype",)


def _kind(name: str) -> str:
    """The name that a tensor has in every block."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


def tokenizer_kind(companions: Attachments) -> str | None:
    """The kind of tokenizer, in the words of --tokenizer, that files travelling with weights are; None for none.

    Both Llama 2 and 3 call theirs tokenizer.model: Llama 3's is lines of a piece in base64 and its number.
    """
    if {"dict.txt", "vocab.json", "merges.txt"} <= companions.keys():
        return "FairseqTokenizer"
    if "tokenizer.json" in companions:
        return "HuggingFaceTokenizer"
    if {"vocab.json", "merges.txt"} <= companions.keys():
        return "GPT2BPETokenizer"
    file = companions.get("tokenizer.model")
    if file is None:
        return None
    with contextlib.nullcontext(BytesIO(file)) if isinstance(file, bytes) else file.open("rb") as stream:
        ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\n", stream.read(100))
    return "Llama3Tokenizer" if ranks else "Llama2Tokenizer"


def to_hugging_face(load: Path, save: Path) -> ConversionReport:
    """An own checkpoint -> a folder that `AutoModelForCausalLM.from_pretrained` opens."""
    checkpoint, model = open_own(load)
    source = OwnSource(checkpoint)
    form = gpt2 if gpt2.is_gpt2(model) else huggingface
    with _named(load):
        config = _own_config(form, checkpoint, model, source.tensors)
    table = form.export_table(model, source.tensors)
    prove(table, source.tensors)

    def fill(folder: Path) -> int:
        written = _write_shards(folder, table, source)
        _write_json(folder / "config.json", config)
        if "generation_config.json" not in checkpoint.attachments:
            _write_json(folder / "generation_config.json", {"_from_model_config": True, **_tokens(config)})
        _copy_companions(checkpoint, folder, skip={"config.json", "params.json"})
        return written

    return report_of(table, filled_folder(save, fill), save)


def to_meta(load: Path, save: Path, parts: int) -> ConversionReport:
    """An own checkpoint -> params.json and `parts` files consolidated.NN.pth, as Meta releases Llama."""
    checkpoint, model = open_own(load)
    source = OwnSource(checkpoint)
    with _named(load):
        params = meta.params_from_model(model)
    tables = meta.export_tables(model, source.tensors, parts)
    prove(meta.joined(tables), source.tensors)
    kept = meta.LastTensor(source)

    def fill(folder: Path) -> int:
        written = 0
        for number, table in enumerate(tables):
            content = {
                target.name: assemble(target, Box((0,) * len(target.shape), target.shape), kept).clone()
                for target in table.targets
            }
            written += write_torch(folder / f"consolidated.{number:02d}.pth", content)
        _write_json(folder / "params.json", params)
        _copy_companions(checkpoint, folder, skip={"config.json", "generation_config.json", "params.json"})
        return written

    report = report_of(meta.joined(tables), filled_folder(save, fill), save)
    return dataclasses.replace(report, losses=meta.losses(model))


def open_own(load: Path) -> tuple[Checkpoint, ModelConfig]:
    """What a user points at, and the model that it holds."""
    checkpoint = locate(load)
    return checkpoint, model_of(checkpoint.meta, str(checkpoint.path))


@contextlib.contextmanager
def _named(load: Path) -> Iterator[None]:
    """Say of which checkpoint it is that what is written has no place for it: no flag of the verb is at fault."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"--load-dir {load}: {error}") from None


def _own_config(form: ModuleType, checkpoint: Checkpoint, model: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    """config.json: the one the weights came with, as long as it still says the same; else our own, with its tokens.

    A released file may claim another dtype than its weights'. Once they were trained, it must say theirs: transformers
    opens them in it.
    """
    dtype = huggingface.DTYPES[huggingface.dtype_of(tensors)]
    attached = checkpoint.attachments.get("config.json")
    config = {} if attached is None else read_json(attached)
    try:
        same = form.model_from_config(config, str(attached)) == model
    except CheckpointError:
        same = False
    if not same:
        made: dict[str, Any] = form.config_from_model(model, dtype)
        return {**made, **_tokens(config)}
    if checkpoint.step:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return config


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _write_shards(folder: Path, table: Table, source: Source) -> int:
    """model.safetensors, or numbered files of at most `SHARD_BYTES` and their index. Returns bytes."""
    shards: list[list[Piece]] = [[]]
    room = SHARD_BYTES
    for target in table.targets:
        piece = planned(target.name, target.shape, (0,) * len(target.shape), target.shape, target.dtype)
        if piece.bytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(piece)
        room -= piece.bytes
    targets = {target.name: target for target in table.targets}
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    written = 0

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        return assemble(targets[piece.key], box, source)

    for name, pieces in zip(names, shards, strict=True):
        written += write_container(folder / name, pieces, None, fetch).size
    if count > 1:
        total = sum(piece.bytes for pieces in shards for piece in pieces)
        weights = {piece.key: name for name, pieces in zip(names, shards, strict=True) for piece in pieces}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        _write_json(folder / "model.safetensors.index.json", index)
    return written


def _copy_companions(checkpoint: Checkpoint, folder: Path, skip: set[str]) -> None:
    for name in COMPANIONS:
        if name in checkpoint.attachments and name not in skip:
            with whole_file(folder / name) as file:
                file.write(checkpoint.attachments[name].read_bytes())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with creating(path) as descriptor:
        write_all(descriptor, (json.dumps(content, indent=2) + "\n").encode())


def write_torch(path: Path, content: object) -> int:
    """A torch file, safe on the disk; its bytes. Errors: OSError, of a full disk for example."""
    try:
        with whole_file(path) as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch closes its archive nevertheless, which hides what stopped it
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return path.stat().st_size


def report_of(table: Table, written: int, path: Path) -> ConversionReport:
    """The report of an export."""
    elements = sum(prod(target.shape) for target in table.targets)
    return ConversionReport(len(table.targets), elements, written, path)
