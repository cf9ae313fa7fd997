"""Adapters in peft's form: adapter_config.json and adapter_model.safetensors, next to weights in Hugging Face's form.

peft keeps what a linear of transformers gets, under its name there. For Llama and its relatives these are our names; a
family may call them otherwise, in another order of rows, or have several in one linear (GPT-2's query, key and value):
then their adapters are one with a matrix A below another and B on a diagonal, of as many times the rank. Source: peft's
LoraConfig and get_peft_model_state_dict, 0.21.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mega.core.architecture import architecture, inventory, linears, without_adapters
from mega.core.architecture.adapters import DOWN, UP, with_adapters
from mega.core.architecture.model import Adapters
from mega.core.checkpoint.forms import conversing
from mega.core.checkpoint.forms.companions import copy_companions
from mega.core.checkpoint.forms.families.decoders import family_of
from mega.core.checkpoint.forms.families.family import HubFamily, StoredModule
from mega.core.checkpoint.forms.foreign import TorchSource, read_json, safetensors_source
from mega.core.checkpoint.forms.form import TOKEN_IDS, Export, Given, Opened, Own, SpecialTokens
from mega.core.checkpoint.forms.keys import number_in, only, whole_in
from mega.core.checkpoint.forms.mapping import Source, Table, Target, whole, whole_box
from mega.core.checkpoint.forms.open import open_weights
from mega.core.checkpoint.forms.writing import write_files, write_json
from mega.core.checkpoint.own.base import check_adapters, describe, named_base
from mega.core.checkpoint.own.container import write_container
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.config.sections import ModelConfig, ModelOptions
from mega.core.untrusted import Json, below

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."
"""In front of every name in what peft saves."""
FAMILIES = ("gpt", "llama")
"""Whose linears' names in Hugging Face's form are known here."""

Tensors = dict[str, torch.Tensor]

Linears = dict[str, dict[str, Sequence[range]]]
"""A linear of the folder -> ours that it holds, in order, each with its rows of it."""

NOTHING: tuple[Json, ...] = (None, False, [], {}, "none")
UNKNOWN = (
    *("bias", "modules_to_save", "use_dora", "use_qalora", "lora_bias", "layer_replication", "layers_to_transform"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    *("exclude_modules", "kasa_config", "monteclora_config"),
)
"""Keys that say that an adapter is more than two matrices a linear, the same in every block."""
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""`init_lora_weights` that leave the base as it is: peft takes what the others begin with out of the base's weights,
each time it opens them."""


def recognise(path: Path) -> bool:
    return (path / CONFIG).exists() and not (path / "config.json").exists()


def open_form(path: Path, given: Given) -> Opened:
    """An adapter of the weights at `given.base`, ours or others'."""
    if given.base is None:
        raise CheckpointError(
            f"--base is missing: {path} is an adapter of peft; `mega convert-llama` reads it, with --base and the "
            "weights it was trained on"
        )
    if recognise(given.base):
        raise CheckpointError(f"--base {given.base}: is an adapter itself; must be the weights it was trained on")
    try:
        base = open_weights(str(given.base))
    except CheckpointError as error:  # which begins with the place
        raise CheckpointError(f"--base {error}") from None
    opened = open_adapter(path, model_of(base.meta, str(base.path)), base.path, f"--base {given.base}")
    return replace(opened, known={"base": describe(base)}, base=base)


def open_adapter(path: Path, base: ModelConfig, where: Path, named: str) -> Opened:
    """The adapter at `path` of a model that lies at `where`. named: what messages call that. Its shapes must fit; a
    note says where the adapter names another. Errors: CheckpointError."""
    described = architecture(base)
    if described.adapters is not None:
        raise CheckpointError(f"{named}: holds adapters itself; must be whole")
    family = _family(base, where / "config.json")
    source = safetensors_source([path / WEIGHTS])
    found = {name: source.read(name, whole_box(shape)) for name, (shape, _) in source.tensors.items()}
    config = read_json(path / CONFIG)
    model, ours = _ours(config, found, base, family, path, named)
    said = str(config.get("base_model_name_or_path") or where)
    other = (
        () if Path(said).name.lower() == where.name.lower() else (f"{path}: was trained on {said}; here on {where}",)
    )
    return Opened(TorchSource(ours), model, _as_it_is(ours), notes=other)


def export(own: Own, to: str, given: Given) -> Export:
    """A folder that `PeftModel.from_pretrained` opens over the base in Hugging Face's form."""
    model, named = architecture(own.model), named_base(own.checkpoint)
    if model.adapters is None or named is None:
        raise CheckpointError("holds no adapters; --to peft is for a run with --lora-rank")
    family = _family(own.model, own.checkpoint.attachments.get("config.json"))
    held = {key.removeprefix("weights/"): key for key in own.source.tensors}
    ours = {name: own.source.read(key, whole_box(own.source.tensors[key][0])) for name, key in held.items()}
    theirs = {f"{WRAPPED}{name}": each.contiguous() for name, each in _joined(ours, _linears(family, own.model))}
    config = _config(model.adapters, theirs, family, str(given.base or named["path"]))
    files, others, tokens = _tokenizer_files(own, given)

    def fill(folder: Path, table: Table, source: Source) -> int:
        pieces = [Piece(name, tuple(one.shape), (0,) * one.dim(), one) for name, one in theirs.items()]
        size = write_container(folder / WEIGHTS, pieces, None).size
        write_json(folder / CONFIG, config)
        write_files(folder, files, others)
        copy_companions(own.checkpoint, folder, skip=(*BASES, *tokens.left_out, *files, *others))
        return size

    return Export(_as_it_is(theirs), fill, TorchSource(theirs), losses=() if tokens.loss is None else (tokens.loss,))


BASES = ("config.json", "params.json")
"""Companions that speak of the base alone."""


def _tokenizer_files(own: Own, given: Given) -> tuple[dict[str, dict[str, Json]], dict[str, bytes], SpecialTokens]:
    """The tokenizer and how the model converses, which peft's users keep with the adapter. Nothing where no tokenizer
    is known."""
    try:
        tokens = given.tokens(own.checkpoint)
    except ValueError:
        return {}, {}, SpecialTokens({})
    attached = own.checkpoint.attachments.get("config.json")
    known = {} if attached is None else read_json(attached)
    config = {**tokens.ids, **{key: known[key] for key in TOKEN_IDS if key in known}}
    return *conversing.written_files(own.checkpoint, config, tokens), tokens


def _as_it_is(tensors: Tensors) -> Table:
    """The table of a copy."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Table(tuple(Target(name, shape, (whole(shape, name),)) for name, shape in shapes.items()))


def _family(options: ModelConfig, attached: Path | bytes | None) -> HubFamily:
    """What the base's linears are called by. attached: the config.json that came with the base, which may name a family
    that stores them otherwise than the first that has such a model."""
    model = architecture(options)
    if model.family not in FAMILIES:
        raise CheckpointError(f"adapters of --family {model.family} have no form in peft here; valid: gpt, llama")
    said = read_json(attached).get("model_type") if isinstance(attached, Path) and attached.exists() else None
    return family_of(without_adapters(options), said)


def _linears(family: HubFamily, options: ModelConfig) -> Linears:
    """Of the base's layers."""
    found: Linears = {}
    base, known = without_adapters(options), set(linears(options))
    for tensor in inventory(base):
        stem, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and stem.rpartition(".")[2] in known:
            name, part = family.stored(tensor.name)
            rows = [range(tensor.shape[0])] if part.rows is None else part.rows(base)
            found.setdefault(name.removesuffix(".weight"), {})[stem] = rows
    return found


def _config(adapters: Adapters, theirs: Tensors, family: HubFamily, base: str) -> dict[str, Json]:
    """What peft reads; the linears by the ends of their names."""
    widths = {name: each.shape[0] for name, each in theirs.items() if name.endswith(f"{DOWN}.weight")}
    ends = {_end(_bare(name).rsplit(".", 2)[0], family): width for name, width in widths.items()}
    ranks = {end: width for end, width in ends.items() if width != adapters.rank}
    transposed = any(isinstance(part, StoredModule) and part.transposed for part in family.names.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": list(ends),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "rank_pattern": dict[str, Json](ranks),
        "alpha_pattern": {name: adapters.scale * rank for name, rank in ranks.items()},
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _end(linear: str, family: HubFamily) -> str:
    """What it is called in each layer: GPT-2 has a c_proj in both branches. That of an expert, without its number."""
    within, last = linear.split(".")[-2:]
    return f"{within}.{last}" if family.renames_linears and not within.isdigit() else last


# Theirs as ours


def _ours(
    config: Mapping[str, Json], found: Tensors, base: ModelConfig, family: HubFamily, path: Path, named: str
) -> tuple[ModelConfig, Tensors]:
    """The model with its adapters, and these by `weights/NAME`. Errors: CheckpointError naming key or tensor."""
    where = str(path / CONFIG)
    only(config, "peft_type", ("LORA",), where)
    for key in UNKNOWN:
        only(config, key, NOTHING, where)
    only(config, "init_lora_weights", BEGINNINGS, where)
    rank = whole_in(config, "r", where)
    ranks, alphas = below(config, "rank_pattern"), below(config, "alpha_pattern")
    stored = _linears(family, base)
    if not set(ranks) <= {_end(name, family) for name, parts in stored.items() if len(parts) > 1}:
        raise CheckpointError(f"{where}: rank_pattern {ranks!r}: one rank for all linears is read; valid: {{}}")
    root = math.sqrt if config.get("use_rslora") else float
    alpha = number_in(config, "lora_alpha", where)
    scale = alpha / root(rank)
    for end in {**ranks, **alphas}:
        theirs = number_in(alphas, end, where, alpha) / root(whole_in(ranks, end, where, rank))
        if not math.isclose(theirs, scale):
            raise CheckpointError(f"{where}: {end} has a scale of {theirs:g}, others {scale:g}: one for all is read")
    named_ours = dict(_split(found, stored, rank))
    targets = dict.fromkeys(name.split(".")[-3] for name in named_ours)
    of = ModelOptions(
        lora_rank=rank,
        lora_alpha=scale * rank,
        lora_targets=() if set(targets) == set(linears(base)) else tuple(targets),
        lora_dropout=number_in(config, "lora_dropout", where, 0.0),
    )
    model = with_adapters(base, of)
    shapes = {f"weights/{name}": tuple(each.shape) for name, each in named_ours.items()}
    check_adapters(model, shapes, str(path / WEIGHTS), named)
    return model, {f"weights/{name}": each for name, each in named_ours.items()}


def _bare(name: str) -> str:
    return name.removeprefix(WRAPPED)


# Several linears in one


def _joined(ours: Tensors, stored: Linears) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's names; what the linears in one of its own have as one adapter."""
    for linear, parts in stored.items():
        held = {stem: rows for stem, rows in parts.items() if f"{stem}.{DOWN}.weight" in ours}
        if not held:
            continue
        downs, ups = ([ours[f"{stem}.{half}.weight"] for stem in held] for half in (DOWN, UP))
        rank, outs = downs[0].shape[0], sum(len(run) for rows in parts.values() for run in rows)
        up = ups[0].new_zeros(outs, len(held) * rank)
        for number, (rows, each) in enumerate(zip(held.values(), ups, strict=True)):
            up[_numbers(rows), number * rank : (number + 1) * rank] = each
        yield f"{linear}.{DOWN}.weight", torch.cat(downs)
        yield f"{linear}.{UP}.weight", up


def _split(found: Tensors, stored: Linears, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Our names; the adapter of a linear that holds several as theirs, those that are not zero."""
    for name, tensor in found.items():
        linear, _, half = _bare(name).removesuffix(".weight").rpartition(".")
        down, up = (found.get(f"{WRAPPED}{linear}.{each}.weight") for each in (DOWN, UP))
        outs = sum(len(_numbers(rows)) for rows in stored.get(linear, {}).values())
        if down is None or up is None or up.shape[0] != outs:
            yield _bare(name), tensor  # which is refused by its name
        elif half == UP:
            for stem, (first, second) in _parts(down, up, stored[linear], rank, name):
                yield f"{stem}.{DOWN}.weight", first
                yield f"{stem}.{UP}.weight", second


def _parts(
    down: torch.Tensor, up: torch.Tensor, parts: Mapping[str, Sequence[range]], rank: int, name: str
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Of one adapter: each part's own columns of a diagonal, or all of them where it is of one rank."""
    count = down.shape[0] // rank
    if len(parts) > 1 and (down.shape[0] % rank or count > len(parts)):
        raise CheckpointError(
            f"{name}: an adapter of rank {down.shape[0]} is not read; valid: {rank}, {len(parts) * rank}"
        )
    column = 0
    for stem, rows in parts.items():
        block = up[_numbers(rows)]
        if len(parts) == 1 or count == 1:
            yield stem, (down.clone(), block)
            continue
        used = _columns(block, rank)
        if used == [column]:
            here = slice(column * rank, (column + 1) * rank)
            yield stem, (down[here].clone(), block[:, here].clone())
            column += 1
        elif used:
            several = ", ".join(each.rpartition(".")[2] for each in parts)
            raise CheckpointError(f"{name}: an adapter of rank {down.shape[0]} must be {rank} for each of {several}")


def _numbers(rows: Sequence[range]) -> list[int]:
    return [row for run in rows for row in run]


def _columns(block: torch.Tensor, rank: int) -> Sequence[int]:
    return [number for number, part in enumerate(torch.split(block, rank, 1)) if bool(part.any())]
