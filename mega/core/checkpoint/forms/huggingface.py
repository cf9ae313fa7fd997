"""Read and write Hugging Face's folders: config.json, safetensors or torch files, and tokenizer files.

The keys of config.json and the tensor names depend on `model_type`; families/ and bert.py define both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch

from mega.core.architecture import architecture
from mega.core.checkpoint.forms import bert, chat_files
from mega.core.checkpoint.forms.block_scaled import (
    Bounds,
    Dequantised,
    Quantised,
    dequantised,
    quantization_config,
    undivided,
    without_scales,
)
from mega.core.checkpoint.forms.companions import copy_companions
from mega.core.checkpoint.forms.families.decoders import BY_TYPE, family_of
from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.mixtures import unstacked
from mega.core.checkpoint.forms.families.rope import dynamic
from mega.core.checkpoint.forms.foreign import (
    EntrySource,
    TorchSource,
    flat_tensors,
    inside,
    read_json,
    safetensors_source,
)
from mega.core.checkpoint.forms.form import TOKEN_IDS, Export, ExportSource, FormOptions, OpenedForm, SpecialTokens
from mega.core.checkpoint.forms.mapping import Assembled, Source, Table, inverted
from mega.core.checkpoint.forms.writing import write_files, write_json
from mega.core.checkpoint.own.container import write_container
from mega.core.checkpoint.own.layout import planned
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json, below

SHARD_BYTES = 5 << 30
"""Maximum size of each safetensors file in an exported folder, in bytes."""


def recognise(path: Path) -> bool:
    return (path / "config.json").exists() and not (path / "manifest.json").exists()


def tokenizer(files: Attachments) -> str | None:
    if "vocab.txt" in files:
        return "BertWordPieceLowerCase" if _lowers(files) else "BertWordPieceCase"
    if "tokenizer.json" in files:
        return _wordpiece(files) or "HuggingFaceTokenizer"
    return "GPT2BPETokenizer" if {"vocab.json", "merges.txt"} <= files.keys() and unread(files) is None else None


def _wordpiece(files: Attachments) -> str | None:
    """Return the kind of BERT tokenizer in a tokenizer.json, for a folder without a vocab.txt. The kind is determined
    as in transformers. Return None for other tokenizers."""
    config, file = files.get("config.json"), files.get("tokenizer.json")
    if (
        not isinstance(config, Path)
        or not isinstance(file, Path)
        or read_json(config).get("model_type") not in bert.TYPES
    ):
        return None
    content = read_json(file)
    if any(below(content, part).get("type") != kind for part, kind in _BERTS.items()):
        return None
    settings = files.get("tokenizer_config.json")
    tokenizer_config = read_json(settings) if isinstance(settings, Path) else {}
    by_class = "Bert" in str(tokenizer_config.get("tokenizer_class", "BertTokenizer"))
    lowers = tokenizer_config.get("do_lower_case", True) if by_class else below(content, "normalizer").get("lowercase")
    return "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"


_BERTS = {"model": "WordPiece", "normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}


def unread(files: Attachments) -> str | None:
    """Explain why vocab.json and merges.txt are not GPT-2's tokenizer; None if they are, or if the files do not
    exist."""
    if not {"vocab.json", "merges.txt"} <= files.keys() or "tokenizer.json" in files:
        return None
    contents = {name: read_json(file) for name in _KINDS_FILES if isinstance(file := files.get(name), Path)}
    config = contents.get("tokenizer_config.json", {})
    kind = str(
        config.get("tokenizer_class")
        or _CLASSES.get(str(contents.get("config.json", {}).get("model_type")), "GPT2Tokenizer")
    )
    advice = "save them as a tokenizer.json with transformers (AutoTokenizer's save_pretrained)"
    if kind.removesuffix("Fast") != "GPT2Tokenizer":
        return f"vocab.json and merges.txt are of a {kind}, which cuts texts by rules of its own; {advice}"
    decoder = config.get("added_tokens_decoder") or {}
    names = (
        [each.get("content") for each in decoder.values() if isinstance(each, dict)]
        if isinstance(decoder, dict)
        else []
    )
    if added_names := [name for name in (*names, *contents.get("added_tokens.json", {})) if name != "<|endoftext|>"]:
        return f"vocab.json and merges.txt have added tokens next to them, such as {added_names[0]}; {advice}"
    return None


_KINDS_FILES = ("tokenizer_config.json", "added_tokens.json", "config.json")
_QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_CLASSES = {**dict.fromkeys(_QWEN, "Qwen2Tokenizer"), "roberta": "RobertaTokenizer"}
"""`model_type` -> class of the tokenizer in vocab.json and merges.txt, used if no file names the class."""


def _lowers(files: Attachments) -> bool:
    """Whether the tokenizer in a vocab.txt lowercases text, which is transformers' default."""
    file = files.get("tokenizer_config.json")
    tokenizer_config = {} if not isinstance(file, Path) else read_json(file)
    return bool(tokenizer_config.get("do_lower_case", True))


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    config_path = path / "config.json"
    config = read_json(config_path)
    if (adapter := path / "adapter_config.json").exists():
        raise CheckpointError(f"{adapter}: an adapter is not read; merge it into the weights, or take its files away")
    names = _names(config, config_path)
    weights = full_precision(path)
    source, bounds = unstacked(weights), None
    if isinstance(weights, Dequantised):
        bounds = unstacked(Bounds(weights))
    model = names.model_from_config(config, str(config_path), source.tensors)
    check_size(model, source.tensors, str(config_path))
    return OpenedForm(source, model, names.table(model, source.tensors), bounds=bounds)


def scales_dynamically(files: Mapping[str, Path]) -> bool:
    """Whether the config.json stored with weights has dynamic RoPE scaling, which changes the frequencies only for
    positions beyond the model's maximum. This project supports only positions below the maximum."""
    return "config.json" in files and dynamic(read_json(files["config.json"])) is not None


class Names(Protocol):
    """The keys of config.json and the tensor names for one `model_type`, as defined by a family of decoders or
    by bert.py."""

    def model_from_config(self, config: Mapping[str, object], where: str, names: Collection[str] = ...) -> ModelConfig:
        """Return the resolved model section that config.json describes. names: names of the folder's tensors."""

    def config_from_model(self, options: ModelConfig, dtype: str) -> dict[str, Json]:
        """Return the content of config.json. dtype: torch's name for the weights' dtype."""

    def table(self, options: ModelConfig, names: Collection[str] = ...) -> Table:
        """Return the table that produces `weights/<name>` for every logical tensor. names: names of the folder's
        tensors."""


BERT = cast(Names, bert)
TYPES: Mapping[str, Names] = {**BY_TYPE, **dict.fromkeys(bert.TYPES, BERT)}
"""`model_type` -> its keys of config.json and tensor names."""

OUTSIDE = {
    "gemma3": "its vision tower is not read; save its text model alone (gemma3_text)",
    "deepseek_v2": "its latent attention (MLA) is not computed here",
    "deepseek_v3": "its latent attention (MLA) is not computed here",
    "gpt_oss": "its attention sinks are not computed here",
    "mamba": "its state-space layers are not computed here",
    "mamba2": "its state-space layers are not computed here",
    "t5": "its relative positions are not computed here; --family t5 is Megatron-LM's",
}
"""`model_type` of a common model that is not supported -> the reason."""


def _names(config: Mapping[str, Json], where: Path) -> Names:
    """Return the keys and tensor names for the `model_type` of `config`. Errors: CheckpointError if the type is not
    supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        reason = f"{OUTSIDE[kind]}; " if isinstance(kind, str) and kind in OUTSIDE else ""
        raise CheckpointError(f"{where}: model_type {kind!r} ({reason}valid: {', '.join(TYPES)})")
    return TYPES[kind]


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to a folder that transformers' `from_pretrained` opens. Errors: CheckpointError naming a setting
    that the format does not support; ValueError for an --outtype other than fp8."""
    if options.outtype not in (None, OUTTYPE):
        raise ValueError(
            f"--outtype {options.outtype}: a Hugging Face folder has the dtype of the weights, or fp8; valid: {OUTTYPE}"
        )
    return EXPORTS.get(architecture(own.model).family, _export_decoder)(own, to, options)


def _export_bert(own: ExportSource, to: str, options: FormOptions) -> Export:
    if options.outtype is not None:
        raise CheckpointError(f"--outtype {options.outtype}: only decoders are written in fp8; leave it out")
    tokens, unknown = _bert_tokens(own, options)
    return _folder(own, BERT, tokens, (*bert.losses(own.model), *unknown))


def _export_t5(own: ExportSource, to: str, options: FormOptions) -> Export:
    raise CheckpointError(f"--to {to}: Hugging Face's T5 is another model, without learned positions; valid: mega")


def _export_decoder(own: ExportSource, to: str, options: FormOptions) -> Export:
    config_path = own.checkpoint.attachments.get("config.json")
    names = family_of(own.model, None if config_path is None else read_json(config_path).get("model_type"))
    tokens, losses = _special_tokens(own, options)
    if options.outtype is None:
        return _folder(own, names, tokens, losses)
    linears, unquantised = _linears(names, own.model)
    shapes = inverted(names.table(own.model)).tensors(own.source.tensors)
    if (name := undivided(shapes, linears)) is not None:
        losses += (
            f"{name}: has sizes {shapes[name][0]} that are not multiples of 128: kernels for fp8 on GPUs read it, but "
            "transformers' dequantisation, such as on a CPU, takes blocks of other sizes",
        )
    return _folder(own, names, tokens, losses, linears, unquantised)


OUTTYPE = "fp8"
"""The value of --outtype that stores matrices in fp8 with one scale per block."""

_LINEAR = re.compile(r"weights/model\.layers\.\d+\..*_proj\.weight")
"""Matches the project's names of linear layers in blocks. Routers and other gates are not matched, because they need
the full precision."""


def _linears(names: HubFamily, model: ModelConfig) -> tuple[list[str], list[str]]:
    """Return (names of the matrices to write in fp8, names of the modules whose matrices keep their dtype). Errors:
    CheckpointError for a family that stores its matrices transposed."""
    linears, others = [], [names.stored("lm_head.weight")[0]]  # transformers creates the head even if it is tied
    for target in inverted(names.table(model)).targets:
        if len(target.shape) != 2:
            continue
        fragment = target.fragments[0]
        if _LINEAR.fullmatch(fragment.source) is None:
            others.append(target.name)
        elif fragment.transposed:
            raise CheckpointError(
                f"--outtype {OUTTYPE}: {names.words} stores {target.name} transposed, which has no form in fp8; leave "
                "it out"
            )
        else:
            linears.append(target.name)
    return linears, list(dict.fromkeys(name.removesuffix(".weight") for name in others))


EXPORTS: dict[str, Callable[[ExportSource, str, FormOptions], Export]] = {"bert": _export_bert, "t5": _export_t5}
"""Family -> export function. All other families are exported as decoders."""


def _folder(
    own: ExportSource,
    names: Names,
    tokens: SpecialTokens,
    losses: tuple[str, ...],
    linears: Collection[str] = (),
    unquantised: Collection[str] = (),
) -> Export:
    """Plan the files of a folder. linears: names of the matrices to write in fp8. unquantised: names of the modules
    whose matrices keep their dtype."""
    config = _config(names, own, tokens)
    if linears:
        config["quantization_config"] = quantization_config(unquantised)
    files, extra_files = chat_files.written_files(own.checkpoint, config, tokens)
    if names is BERT:  # BERT does not generate text, so it needs no generation files
        files, extra_files = (
            {name: dict(file) for name, file in tokens.files.items() if name not in own.checkpoint.attachments},
            {},
        )

    def fill(folder: Path, table: Table, source: Source) -> int:
        weights: Source = Assembled(table, source)
        bytes_written = _write_shards(folder, Quantised(weights, linears) if linears else weights)
        write_json(folder / "config.json", config)
        write_files(folder, files, extra_files)
        copy_companions(
            own.checkpoint, folder, skip=("config.json", "params.json", *tokens.left_out, *files, *extra_files)
        )
        return bytes_written

    return Export(names.table(own.model), fill, losses=losses)


def _special_tokens(own: ExportSource, options: FormOptions) -> tuple[SpecialTokens, tuple[str, ...]]:
    """Return the special tokens, and messages for the user, for example if the special tokens are unknown.

    The special tokens are read from the config.json stored with the weights, or else from the tokenizer.
    """
    config_path = own.checkpoint.attachments.get("config.json")
    config = {} if config_path is None else read_json(config_path)
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    complete = {"bos_token_id", "eos_token_id"} <= ids.keys()
    if complete and not chat_files.trained(own.checkpoint):
        return SpecialTokens(ids), ()
    try:
        tokens = options.tokens(own.checkpoint)
    except ValueError as error:
        if complete:
            return SpecialTokens(ids), ()
        note = f"config.json names no token that ends a text, so transformers' generate does not stop: {error}"
        return SpecialTokens(ids if config_path is not None else dict.fromkeys(TOKEN_IDS)), (note,)
    if complete and tokens.template is None:  # the tokenizer files stored with the weights are exported
        return replace(tokens, ids={**tokens.ids, **ids}, files={}, left_out=(), loss=None), ()
    return replace(tokens, ids={**tokens.ids, **ids}), () if tokens.loss is None else (tokens.loss,)


def _bert_tokens(own: ExportSource, options: FormOptions) -> tuple[SpecialTokens, tuple[str, ...]]:
    """Return the tokenizer files to write for a BERT model, without token ids for config.json, and a message if the
    tokenizer is missing."""
    try:
        tokens = options.tokens(own.checkpoint)
        return replace(tokens, ids={}), () if tokens.loss is None else (tokens.loss,)
    except ValueError as error:
        return SpecialTokens({}), (f"no tokenizer: {error}",)


def _config(names: Names, own: ExportSource, tokens: SpecialTokens) -> dict[str, Json]:
    """Return the content of config.json, including `tokens`. The stored config.json is used if it still describes the
    model; otherwise a new config.json is created.

    The config.json of a released model may name a dtype that differs from the dtype of the weights. After training,
    config.json must name the actual dtype, because transformers converts the weights to the named dtype.
    """
    dtype = str(own.source.tensors["weights/model.embed_tokens.weight"][1]).removeprefix("torch.")
    config_path = own.checkpoint.attachments.get("config.json")
    config = {} if config_path is None else without_scales(read_json(config_path))
    try:
        source_names = [target.fragments[0].source for target in names.table(own.model).targets]
        unchanged = (
            config_path is not None and names.model_from_config(config, str(config_path), source_names) == own.model
        )
    except CheckpointError:
        unchanged = False
    if not unchanged:
        scaling = dynamic(config)
        rope_scaling = {} if scaling is None else {"rope_scaling": cast(Json, scaling)}
        return _with_chat_ends(own, {**names.config_from_model(own.model, dtype), **rope_scaling, **tokens.ids}, tokens)
    if own.checkpoint.step:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return _with_chat_ends(own, {**tokens.ids, **config}, tokens)


def _with_chat_ends(own: ExportSource, config: dict[str, Json], tokens: SpecialTokens) -> dict[str, Json]:
    """Add all tokens that end the assistant's turn to the config, if the model was trained for chat."""
    converses = tokens.template is not None and chat_files.trained(own.checkpoint)
    return chat_files.with_ends(config, tokens.ends) if converses else config


def _write_shards(folder: Path, source: Source) -> int:
    """Write model.safetensors, or numbered files of at most `SHARD_BYTES` and an index. Return the number of bytes."""
    shards: list[list[Piece]] = [[]]
    room = SHARD_BYTES
    for name, (shape, dtype) in source.tensors.items():
        piece = planned(name, shape, (0,) * len(shape), shape, dtype)  # a meta tensor; `fetch` reads each block
        if piece.bytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(piece)
        room -= piece.bytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    bytes_written = 0

    def fetch(piece: Piece, box: Box) -> torch.Tensor:
        return source.read(piece.key, box)

    for name, pieces in zip(names, shards, strict=True):
        bytes_written += write_container(folder / name, pieces, None, fetch).size
    if count > 1:
        total = sum(piece.bytes for pieces in shards for piece in pieces)
        weights = {piece.key: name for name, pieces in zip(names, shards, strict=True) for piece in pieces}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weights})
    return bytes_written


# Weights


def full_precision(folder: Path) -> Source:
    """Open the weights of a Hugging Face folder, dequantised if they are in fp8. Errors: CheckpointError."""
    config = folder / "config.json"
    return dequantised(weights_of(folder), read_json(config).get("quantization_config"), str(config))


def weights_of(folder: Path) -> EntrySource | TorchSource:
    """Open the weights of a Hugging Face folder, from safetensors files if present, otherwise from `.bin` files. The
    weights are either in a single file, or in several files with an index.

    If both a single file and an index exist, the one that transformers would open is used. Unlike transformers, this
    function also reads numbered safetensors files without an index, because each file names its tensors.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).exists():
            weights, paths = {}, [inside(folder, single)]
        elif (folder / index).exists():
            weights = _weight_map(folder / index)
            paths = [inside(folder, name) for name in sorted(set(weights.values()))]
        else:
            continue
        source = TorchSource(_merged(paths)) if single.endswith(".bin") else safetensors_source(paths)
        if weights and set(weights) != set(source.tensors):
            mismatched = min(set(weights) ^ set(source.tensors))
            place = "in the index only" if mismatched in weights else "not in the index"
            raise CheckpointError(f"{folder / index}: {mismatched} is {place}")
        return source
    if numbered := _numbered(folder):
        return safetensors_source(numbered)
    raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin, nor an index of either")


def _numbered(folder: Path) -> list[Path]:
    """Return the names of numbered files, such as model-00001-of-00003.safetensors. Errors: CheckpointError naming the
    first missing file."""
    names_found = sorted(path.name for path in folder.glob("model-?????-of-?????.safetensors"))
    if not names_found:
        return []
    count = names_found[-1][len("model-00001-of-") :].removesuffix(".safetensors")
    last = int(count) if count.isdecimal() else 0
    names = [f"model-{number:05d}-of-{count}.safetensors" for number in range(1, last + 1)]
    if mismatched := sorted(set(names_found) ^ set(names)):
        fault = "is missing" if mismatched[0] in names else f"is not one of {count}"
        raise CheckpointError(f"{folder}: holds no index, and {mismatched[0]} {fault}")
    return [inside(folder, name) for name in names]


def _merged(paths: list[Path]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors = flat_tensors(path)
        if twice := merged.keys() & tensors.keys():
            raise CheckpointError(f"{path}: {min(twice)} is in another file too")
        merged |= tensors
    return merged


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    weights = content.get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for every tensor")
    return weights
