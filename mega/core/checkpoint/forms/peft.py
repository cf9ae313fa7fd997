"""Read and write adapters in peft's format (adapter_config.json and adapter_model.safetensors) for a base model in
Hugging Face's format.

An adapter is named after the linear layer of transformers that the adapter modifies. For Llama-like models these names
are equal to the project's names. Other families use different names or a different order of rows, or fuse several of
the project's linears into one (GPT-2's query, key and value). The adapters of fused linears are joined into one adapter
with a larger rank: the matrices A are stacked, and the matrices B form a block diagonal. Source: peft's LoraConfig and
get_peft_model_state_dict, 0.21.
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
from mega.core.checkpoint.forms import chat_files
from mega.core.checkpoint.forms.companions import copy_companions
from mega.core.checkpoint.forms.families.decoders import family_of
from mega.core.checkpoint.forms.families.family import EXPERT, HubFamily, StoredModule
from mega.core.checkpoint.forms.foreign import TorchSource, read_json, safetensors_source
from mega.core.checkpoint.forms.form import TOKEN_IDS, Export, ExportSource, FormOptions, OpenedForm, SpecialTokens
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
"""Prefix of every tensor name in the files that peft saves."""
FAMILIES = ("gpt", "llama")
"""Families for which the names of linears in Hugging Face's format are known."""

Tensors = dict[str, torch.Tensor]

Linears = dict[str, dict[str, Sequence[range]]]
"""Name of a linear in the folder -> {name of a linear in the project: its rows in the folder's linear}."""

NOTHING: tuple[Json, ...] = (None, False, [], {}, "none")
UNKNOWN = (
    *("bias", "modules_to_save", "use_dora", "use_qalora", "lora_bias", "layer_replication", "layers_to_transform"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    *("kasa_config", "monteclora_config", "velora_config"),
)
"""Keys of adapter_config.json for variants of adapters that are not supported, such as DoRA or adapters in only some
blocks. Adapters that set these keys are refused."""
READ = (
    *("peft_type", "init_lora_weights", "r", "rank_pattern", "alpha_pattern", "lora_alpha", "use_rslora"),
    "lora_dropout",
)
"""Keys of adapter_config.json that are read."""
WITHOUT_EFFECT = (
    *("base_model_name_or_path", "task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_pattern", "fan_in_fan_out", "runtime_config", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("megatron_config", "megatron_core"),
)
"""Keys without an effect on stored adapters, such as those that name the linears: the names of the tensors do."""
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` for which the base's weights are unchanged. For other values, peft subtracts the
initial adapter from these weights each time it opens the adapter."""


def recognise(path: Path) -> bool:
    return (path / CONFIG).exists() and not (path / "config.json").exists()


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    """Open an adapter for the base weights at `options.base`, which may have any readable format."""
    if options.base is None:
        raise CheckpointError(
            f"--base is missing: {path} is an adapter of peft; `mega convert-llama` reads it, with --base and the "
            "weights it was trained on"
        )
    if recognise(options.base):
        raise CheckpointError(f"--base {options.base}: is an adapter itself; must be the weights it was trained on")
    try:
        base = open_weights(str(options.base))
    except CheckpointError as error:  # the error's message begins with the path
        raise CheckpointError(f"--base {error}") from None
    adapter = open_adapter(path, model_of(base.meta, str(base.path)), base.path, f"--base {options.base}")
    return replace(adapter, known={"base": describe(base)}, base=base)


def open_adapter(path: Path, base: ModelConfig, where: Path, named: str) -> OpenedForm:
    """Open the adapter at `path` for the base model stored at `where`. named: the base model's name in messages.

    The adapter's shapes must match the base. If the adapter names a different base, a message reports this. Errors:
    CheckpointError.
    """
    base_architecture = architecture(base)
    if base_architecture.adapters is not None:
        raise CheckpointError(f"{named}: holds adapters itself; must be whole")
    family = _family(base, where / "config.json")
    source = safetensors_source([path / WEIGHTS])
    stored = {name: source.read(name, whole_box(shape)) for name, (shape, _) in source.tensors.items()}
    config = read_json(path / CONFIG)
    model, tensors = _ours(config, stored, base, family, path, named)
    recorded_base = str(config.get("base_model_name_or_path") or where)
    notes = (
        ()
        if Path(recorded_base).name.lower() == where.name.lower()
        else (f"{path}: was trained on {recorded_base}; here on {where}",)
    )
    return OpenedForm(TorchSource(tensors), model, _as_it_is(tensors), notes=notes)


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to a folder that `PeftModel.from_pretrained` can load on top of the base in Hugging Face's
    format."""
    model, base_record = architecture(own.model), named_base(own.checkpoint)
    if model.adapters is None or base_record is None:
        raise CheckpointError("holds no adapters; --to peft is for a run with --lora-rank")
    family = _family(own.model, own.checkpoint.attachments.get("config.json"))
    keys = {key.removeprefix("weights/"): key for key in own.source.tensors}
    tensors = {name: own.source.read(key, whole_box(own.source.tensors[key][0])) for name, key in keys.items()}
    peft_tensors = {
        f"{WRAPPED}{name}": each.contiguous() for name, each in _joined(tensors, _linears(family, own.model))
    }
    config = _config(model.adapters, peft_tensors, family, str(options.base or base_record["path"]))
    # Users of peft load the tokenizer from the adapter's folder.
    files, extra_files, tokens = _tokenizer_files(own, options)

    def fill(folder: Path, table: Table, source: Source) -> int:
        pieces = [
            Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in peft_tensors.items()
        ]
        size = write_container(folder / WEIGHTS, pieces, None).size
        write_json(folder / CONFIG, config)
        write_files(folder, files, extra_files)
        copy_companions(own.checkpoint, folder, skip=(*BASES, *tokens.left_out, *files, *extra_files))
        return size

    losses = (*(() if tokens.loss is None else (tokens.loss,)), *_lost_by_peft(peft_tensors))
    return Export(_as_it_is(peft_tensors), fill, TorchSource(peft_tensors), losses=losses)


def _lost_by_peft(tensors: Tensors) -> Iterator[str]:
    """Report what peft does not load on top of transformers 5, which stacks the experts of a layer. peft takes the last
    word of a linear's name for that of an expert's linear in every layer, and joins gate and up projections. Source:
    peft's transformers_weight_conversion.py, 0.21."""
    modules = {_bare(name).rsplit(".", 2)[0] for name in tensors}
    of_experts = {name.rpartition(".")[2] for name in modules if EXPERT.search(name)}
    others = sorted(name for name in modules if not EXPERT.search(name) and name.rpartition(".")[2] in of_experts)
    with_merged = "peft on transformers 5 does not load them; --to hf writes the merged weights"
    if others:
        yield (
            f"{len(others)} adapters outside the experts, such as that of {others[0]}, are of linears with the names "
            f"of experts' linears: {with_merged}"
        )
    for pair in (("gate_proj", "up_proj"), ("w1", "w3")):
        if len(of_experts.intersection(pair)) == 1:
            yield f"the adapters of experts are of only one of {' and '.join(pair)}: {with_merged}"


BASES = ("config.json", "params.json")
"""Names of files that describe only the base, and are not copied."""


def _tokenizer_files(
    own: ExportSource, options: FormOptions
) -> tuple[dict[str, dict[str, Json]], dict[str, bytes], SpecialTokens]:
    """The tokenizer and chat files, which peft's users store with the adapter; empty if no tokenizer is known."""
    try:
        tokens = options.tokens(own.checkpoint)
    except ValueError:
        return {}, {}, SpecialTokens({})
    config_file = own.checkpoint.attachments.get("config.json")
    known_ids = {} if config_file is None else read_json(config_file)
    config = {**tokens.ids, **{key: known_ids[key] for key in TOKEN_IDS if key in known_ids}}
    return *chat_files.written_files(own.checkpoint, config, tokens), tokens


def _as_it_is(tensors: Tensors) -> Table:
    """Return a table that copies all tensors unchanged."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Table(tuple(Target(name, shape, (whole(shape, name),)) for name, shape in shapes.items()))


def _family(options: ModelConfig, config_path: Path | bytes | None) -> HubFamily:
    """The family that determines the names of the base's linears. config_path: the config.json stored with the base. A
    family named in config.json takes precedence over the first family that can express the model."""
    model = architecture(options)
    if model.family not in FAMILIES:
        raise CheckpointError(f"adapters of --family {model.family} have no form in peft here; valid: gpt, llama")
    model_type = (
        read_json(config_path).get("model_type") if isinstance(config_path, Path) and config_path.exists() else None
    )
    return family_of(without_adapters(options), model_type)


def _linears(family: HubFamily, options: ModelConfig) -> Linears:
    """The linears in the base's layers that have adapters."""
    rows_of: Linears = {}
    base, adapted = without_adapters(options), set(linears(options))
    for tensor in inventory(base):
        stem, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and stem.rpartition(".")[2] in adapted:
            name, part = family.stored(tensor.name)
            rows = [range(tensor.shape[0])] if part.rows is None else part.rows(base)
            rows_of.setdefault(name.removesuffix(".weight"), {})[stem] = rows
    return rows_of


def _config(adapters: Adapters, tensors: Tensors, family: HubFamily, base: str) -> dict[str, Json]:
    """The content of adapter_config.json, which identifies linears by name suffixes."""
    widths = {name: each.shape[0] for name, each in tensors.items() if name.endswith(f"{DOWN}.weight")}
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
    """The suffix of a linear's name that is common to all layers. The suffix includes the branch, because GPT-2 has a
    c_proj in both branches, but excludes the index of an expert."""
    within, last = linear.split(".")[-2:]
    return f"{within}.{last}" if family.renames_linears and not within.isdigit() else last


# Translation from peft's names to the project's names


def _ours(
    config: Mapping[str, Json], stored_tensors: Tensors, base: ModelConfig, family: HubFamily, path: Path, named: str
) -> tuple[ModelConfig, Tensors]:
    """Return (the model section with adapters, `weights/NAME` -> tensor of an adapter). Errors: CheckpointError naming
    the key or tensor."""
    config_path = str(path / CONFIG)
    only(config, "peft_type", ("LORA",), config_path)
    for key in UNKNOWN:
        only(config, key, NOTHING, config_path)
    for key, value in config.items():
        if key not in (*READ, *WITHOUT_EFFECT, *UNKNOWN) and value not in NOTHING:
            rule = "is not a known key; take it out if it changes nothing of what the adapter computes"
            raise CheckpointError(f"{config_path}: {key} {value!r:.60}: {rule}")
    only(config, "init_lora_weights", BEGINNINGS, config_path)
    rank = whole_in(config, "r", config_path)
    ranks, alphas = below(config, "rank_pattern"), below(config, "alpha_pattern")
    stored = _linears(family, base)
    if not set(ranks) <= {_end(name, family) for name, parts in stored.items() if len(parts) > 1}:
        raise CheckpointError(f"{config_path}: rank_pattern {ranks!r}: one rank for all linears is read; valid: {{}}")
    root = math.sqrt if config.get("use_rslora") else float
    alpha = number_in(config, "lora_alpha", config_path)
    # rsLoRA divides by the square root of the rank.
    scale = alpha / root(rank)
    for end in {**ranks, **alphas}:
        end_scale = number_in(alphas, end, config_path, alpha) / root(whole_in(ranks, end, config_path, rank))
        if not math.isclose(end_scale, scale):
            raise CheckpointError(
                f"{config_path}: {end} has a scale of {end_scale:g}, others {scale:g}: one for all is read"
            )
    by_name = dict(_split(stored_tensors, stored, rank))
    targets = dict.fromkeys(name.split(".")[-3] for name in by_name)
    lora_options = ModelOptions(
        lora_rank=rank,
        lora_alpha=scale * rank,
        lora_targets=() if set(targets) == set(linears(base)) else tuple(targets),
        lora_dropout=number_in(config, "lora_dropout", config_path, 0.0),
    )
    model = with_adapters(base, lora_options)
    shapes = {f"weights/{name}": tuple(each.shape) for name, each in by_name.items()}
    check_adapters(model, shapes, str(path / WEIGHTS), named)
    return model, {f"weights/{name}": each for name, each in by_name.items()}


def _bare(name: str) -> str:
    return name.removeprefix(WRAPPED)


# Fused linears


def _joined(tensors: Tensors, stored: Linears) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors to write. The adapters of linears that the folder fuses into one are joined.

    a fused linear of q, k and v, each with an adapter of rank r:

    A [3r, in] = q.A      B [q + k + v rows, 3r] = q.B  0    0
                 k.A                               0    k.B  0
                 v.A                               0    0    v.B
    """
    for linear, parts in stored.items():
        adapted = {stem: rows for stem, rows in parts.items() if f"{stem}.{DOWN}.weight" in tensors}
        if not adapted:
            continue
        downs, ups = ([tensors[f"{stem}.{half}.weight"] for stem in adapted] for half in (DOWN, UP))
        rank, outs = downs[0].shape[0], sum(len(run) for rows in parts.values() for run in rows)
        up = ups[0].new_zeros(outs, len(adapted) * rank)
        for number, (rows, each) in enumerate(zip(adapted.values(), ups, strict=True)):
            up[_numbers(rows), number * rank : (number + 1) * rank] = each
        yield f"{linear}.{DOWN}.weight", torch.cat(downs)
        yield f"{linear}.{UP}.weight", up


def _split(tensors: Tensors, stored: Linears, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the project's names and tensors. The adapter of a fused linear is split into one adapter per linear of the
    project; adapters that consist of zeros are omitted."""
    for name, tensor in tensors.items():
        linear, _, half = _bare(name).removesuffix(".weight").rpartition(".")
        down, up = (tensors.get(f"{WRAPPED}{linear}.{each}.weight") for each in (DOWN, UP))
        outs = sum(len(_numbers(rows)) for rows in stored.get(linear, {}).values())
        if down is None or up is None or up.shape[0] != outs:
            yield _bare(name), tensor  # `check_adapters` refuses the name
        elif half == UP:
            for stem, (first, second) in _parts(down, up, stored[linear], rank, name):
                yield f"{stem}.{DOWN}.weight", first
                yield f"{stem}.{UP}.weight", second


def _parts(
    down: torch.Tensor, up: torch.Tensor, parts: Mapping[str, Sequence[range]], rank: int, name: str
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Split the adapter of a fused linear into one adapter per linear. Each linear gets its columns of the block
    diagonal, or all columns if B is not block diagonal."""
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
            columns = slice(column * rank, (column + 1) * rank)
            yield stem, (down[columns].clone(), block[:, columns].clone())
            column += 1
        elif used:
            stems = ", ".join(each.rpartition(".")[2] for each in parts)
            raise CheckpointError(f"{name}: an adapter of rank {down.shape[0]} must be {rank} for each of {stems}")


def _numbers(rows: Sequence[range]) -> list[int]:
    return [row for run in rows for row in run]


def _columns(block: torch.Tensor, rank: int) -> Sequence[int]:
    return [number for number, part in enumerate(torch.split(block, rank, 1)) if bool(part.any())]
