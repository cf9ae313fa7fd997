"""Hugging Face's folders: config.json, safetensors or torch files, tokenizer files.

What config.json and tensors are called depends on its `model_type`: families/ and bert.py know that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch

from mega.core.architecture import architecture
from mega.core.checkpoint.forms import bert, conversing
from mega.core.checkpoint.forms.block_scaled import dequantised, without_scales
from mega.core.checkpoint.forms.companions import copy_companions
from mega.core.checkpoint.forms.families.decoders import BY_TYPE, family_of
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
from mega.core.checkpoint.forms.form import TOKEN_IDS, Export, Given, Opened, Own, SpecialTokens
from mega.core.checkpoint.forms.mapping import Source, Table, assemble
from mega.core.checkpoint.forms.writing import write_files, write_json
from mega.core.checkpoint.own.container import write_container
from mega.core.checkpoint.own.layout import planned
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json, below

SHARD_BYTES = 5 << 30
"""Largest safetensors file of an exported folder."""


def recognise(path: Path) -> bool:
    return (path / "config.json").exists() and not (path / "manifest.json").exists()


def tokenizer(files: Attachments) -> str | None:
    if "vocab.txt" in files:
        return "BertWordPieceLowerCase" if _lowers(files) else "BertWordPieceCase"
    if "tokenizer.json" in files:
        return _wordpiece(files) or "HuggingFaceTokenizer"
    return "GPT2BPETokenizer" if {"vocab.json", "merges.txt"} <= files.keys() and unread(files) is None else None


def _wordpiece(files: Attachments) -> str | None:
    """The kind of a BERT's tokenizer.json, which transformers writes without a vocab.txt; None for another's."""
    config, file = files.get("config.json"), files.get("tokenizer.json")
    if (
        not isinstance(config, Path)
        or not isinstance(file, Path)
        or read_json(config).get("model_type") not in bert.TYPES
    ):
        return None
    whole = read_json(file)
    if any(below(whole, part).get("type") != kind for part, kind in _BERTS.items()):
        return None
    settings = files.get("tokenizer_config.json")
    said = read_json(settings) if isinstance(settings, Path) else {}
    by_class = "Bert" in str(said.get("tokenizer_class", "BertTokenizer"))
    lowers = said.get("do_lower_case", True) if by_class else below(whole, "normalizer").get("lowercase")
    return "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"


_BERTS = {"model": "WordPiece", "normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}


def unread(files: Attachments) -> str | None:
    """Why a vocab.json and merges.txt are not read as GPT-2's; None where they are, or are not there."""
    if not {"vocab.json", "merges.txt"} <= files.keys() or "tokenizer.json" in files:
        return None
    said = {name: read_json(file) for name in _KINDS_FILES if isinstance(file := files.get(name), Path)}
    config = said.get("tokenizer_config.json", {})
    kind = str(
        config.get("tokenizer_class")
        or _CLASSES.get(str(said.get("config.json", {}).get("model_type")), "GPT2Tokenizer")
    )
    advice = "save them as a tokenizer.json with transformers (AutoTokenizer's save_pretrained)"
    if kind.removesuffix("Fast") != "GPT2Tokenizer":
        return f"vocab.json and merges.txt are of a {kind}, which cuts texts by rules of its own; {advice}"
    listed = config.get("added_tokens_decoder") or {}
    names = (
        [each.get("content") for each in listed.values() if isinstance(each, dict)] if isinstance(listed, dict) else []
    )
    if added := [name for name in (*names, *said.get("added_tokens.json", {})) if name != "<|endoftext|>"]:
        return f"vocab.json and merges.txt have added tokens next to them, such as {added[0]}; {advice}"
    return None


_KINDS_FILES = ("tokenizer_config.json", "added_tokens.json", "config.json")
_QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_CLASSES = {**dict.fromkeys(_QWEN, "Qwen2Tokenizer"), "roberta": "RobertaTokenizer"}
"""`model_type` -> the class of its vocab.json and merges.txt, where no file says it."""


def _lowers(files: Attachments) -> bool:
    """Whether the tokenizer of a vocab.txt makes letters small, as transformers' does where nothing is said."""
    file = files.get("tokenizer_config.json")
    said = {} if not isinstance(file, Path) else read_json(file)
    return bool(said.get("do_lower_case", True))


def open_form(path: Path, given: Given) -> Opened:
    where = path / "config.json"
    config = read_json(where)
    if (adapter := path / "adapter_config.json").exists():
        raise CheckpointError(f"{adapter}: an adapter is not read; merge it into the weights, or take its files away")
    names = _names(config, where)
    source = unstacked(dequantised(weights_of(path), config.get("quantization_config"), str(where)))
    model = names.model_from_config(config, str(where), source.tensors)
    check_size(model, source.tensors, str(where))
    return Opened(source, model, names.table(model, source.tensors))


def scales_dynamically(files: Mapping[str, Path]) -> bool:
    """Whether the config.json that weights came with has rotary positions whose frequencies change beyond the model's
    positions, which are computed within these alone."""
    return "config.json" in files and dynamic(read_json(files["config.json"])) is not None


class Names(Protocol):
    """What knows the keys and names of a `model_type`: a family of decoders, or bert.py."""

    def model_from_config(self, config: Mapping[str, object], where: str, found: Collection[str] = ...) -> ModelConfig:
        """The model that a config.json describes. found: names of the tensors along with it."""

    def config_from_model(self, options: ModelConfig, dtype: str) -> dict[str, Json]:
        """The config.json of a model. dtype: of the weights, in torch's words."""

    def table(self, options: ModelConfig, found: Collection[str] = ...) -> Table:
        """`weights/<name>` of every logical tensor. found: names in a folder."""


BERT = cast(Names, bert)
TYPES: Mapping[str, Names] = {**BY_TYPE, **dict.fromkeys(bert.TYPES, BERT)}
"""`model_type` -> what knows it."""

OUTSIDE = {
    "gemma3": "its vision tower is not read; save its text model alone (gemma3_text)",
    "deepseek_v2": "its latent attention (MLA) is not computed here",
    "deepseek_v3": "its latent attention (MLA) is not computed here",
    "gpt_oss": "its attention sinks are not computed here",
    "mamba": "its state-space layers are not computed here",
    "mamba2": "its state-space layers are not computed here",
    "t5": "its relative positions are not computed here; --family t5 is Megatron-LM's",
}
"""`model_type` that users have -> why it is not opened."""


def _names(config: Mapping[str, Json], where: Path) -> Names:
    """What knows the names of a `model_type`. Errors: CheckpointError."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        why = f"{OUTSIDE[kind]}; " if isinstance(kind, str) and kind in OUTSIDE else ""
        raise CheckpointError(f"{where}: model_type {kind!r} ({why}valid: {', '.join(TYPES)})")
    return TYPES[kind]


def export(own: Own, to: str, given: Given) -> Export:
    """A folder that transformers' `from_pretrained` opens."""
    return EXPORTS.get(architecture(own.model).family, _export_decoder)(own, to, given)


def _export_bert(own: Own, to: str, given: Given) -> Export:
    tokens, unknown = _bert_tokens(own, given)
    return _folder(own, BERT, tokens, (*bert.losses(own.model), *unknown))


def _export_t5(own: Own, to: str, given: Given) -> Export:
    raise CheckpointError(f"--to {to}: Hugging Face's T5 is another model, without learned positions; valid: mega")


def _export_decoder(own: Own, to: str, given: Given) -> Export:
    attached = own.checkpoint.attachments.get("config.json")
    names = family_of(own.model, None if attached is None else read_json(attached).get("model_type"))
    tokens, losses = _special_tokens(own, given)
    return _folder(own, names, tokens, losses)


EXPORTS: dict[str, Callable[[Own, str, Given], Export]] = {"bert": _export_bert, "t5": _export_t5}
"""Family -> how its folder is written; the others as decoders."""


def _folder(own: Own, names: Names, tokens: SpecialTokens, losses: tuple[str, ...]) -> Export:
    config = _config(names, own, tokens)
    files, others = conversing.written_files(own.checkpoint, config, tokens)
    if names is BERT:  # which neither continues a text nor converses
        files, others = (
            {name: dict(file) for name, file in tokens.files.items() if name not in own.checkpoint.attachments},
            {},
        )

    def fill(folder: Path, table: Table, source: Source) -> int:
        written = _write_shards(folder, table, source)
        write_json(folder / "config.json", config)
        write_files(folder, files, others)
        copy_companions(own.checkpoint, folder, skip=("config.json", "params.json", *tokens.left_out, *files, *others))
        return written

    return Export(names.table(own.model), fill, losses=losses)


def _special_tokens(own: Own, given: Given) -> tuple[SpecialTokens, tuple[str, ...]]:
    """The special tokens: those of the config.json that the weights came with count, else the tokenizer's.

    With them a line for the user where they are unknown.
    """
    attached = own.checkpoint.attachments.get("config.json")
    known = {} if attached is None else read_json(attached)
    ids = {key: known[key] for key in TOKEN_IDS if key in known}
    whole = {"bos_token_id", "eos_token_id"} <= ids.keys()
    if whole and not conversing.trained(own.checkpoint):
        return SpecialTokens(ids), ()
    try:
        found = given.tokens(own.checkpoint)
    except ValueError as error:
        if whole:
            return SpecialTokens(ids), ()
        lost = f"config.json names no end of a text, so that nothing stops transformers' generate: {error}"
        return SpecialTokens(ids if attached is not None else dict.fromkeys(TOKEN_IDS)), (lost,)
    if whole and found.template is None:  # its files are those that came with the weights
        return replace(found, ids={**found.ids, **ids}, files={}, left_out=(), loss=None), ()
    return replace(found, ids={**found.ids, **ids}), () if found.loss is None else (found.loss,)


def _bert_tokens(own: Own, given: Given) -> tuple[SpecialTokens, tuple[str, ...]]:
    """The files that fix how the tokenizer of a BERT behaves, and a line where there is no tokenizer."""
    try:
        found = given.tokens(own.checkpoint)
        return replace(found, ids={}), () if found.loss is None else (found.loss,)
    except ValueError as error:
        return SpecialTokens({}), (f"no tokenizer: {error}",)


def _config(names: Names, own: Own, tokens: SpecialTokens) -> dict[str, Json]:
    """config.json: the one the weights came with, as long as it still says the same; else our own. Both with `tokens`.

    A released file may claim another dtype than its weights'. Once they were trained, it must say theirs: transformers
    opens them in it.
    """
    dtype = str(own.source.tensors["weights/model.embed_tokens.weight"][1]).removeprefix("torch.")
    attached = own.checkpoint.attachments.get("config.json")
    config = {} if attached is None else without_scales(read_json(attached))
    try:
        theirs = [target.fragments[0].source for target in names.table(own.model).targets]
        same = attached is not None and names.model_from_config(config, str(attached), theirs) == own.model
    except CheckpointError:
        same = False
    if not same:
        scaling = dynamic(config)
        kept = {} if scaling is None else {"rope_scaling": cast(Json, scaling)}
        return _ended(own, {**names.config_from_model(own.model, dtype), **kept, **tokens.ids}, tokens)
    if own.checkpoint.step:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return _ended(own, {**tokens.ids, **config}, tokens)


def _ended(own: Own, config: dict[str, Json], tokens: SpecialTokens) -> dict[str, Json]:
    """With all ends of the assistant's turn, where the model was trained to converse."""
    converses = tokens.template is not None and conversing.trained(own.checkpoint)
    return conversing.with_ends(config, tokens.ends) if converses else config


def _write_shards(folder: Path, table: Table, source: Source) -> int:
    """model.safetensors, or numbered files of at most `SHARD_BYTES` and their index. Returns bytes."""
    targets = {target.name: target for target in table.targets}
    shards: list[list[Piece]] = [[]]
    room = SHARD_BYTES
    for name, (shape, dtype) in table.tensors(source.tensors).items():
        piece = planned(name, shape, (0,) * len(shape), shape, dtype)
        if piece.bytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(piece)
        room -= piece.bytes
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
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weights})
    return written


# Weights


def weights_of(folder: Path) -> EntrySource | TorchSource:
    """The weights of a Hugging Face folder: safetensors if there, else `.bin`; alone or with an index. All numbered
    files of safetensors are read without one too, which transformers does not: each names its tensors.

    Where a folder has several, it is the one that transformers opens.
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
            odd = min(set(weights) ^ set(source.tensors))
            where = "in the index only" if odd in weights else "not in the index"
            raise CheckpointError(f"{folder / index}: {odd} is {where}")
        return source
    if numbered := _numbered(folder):
        return safetensors_source(numbered)
    raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin, nor an index of either")


def _numbered(folder: Path) -> list[Path]:
    """model-00001-of-00003.safetensors and the others. Errors: CheckpointError naming the first that is missing."""
    found = sorted(path.name for path in folder.glob("model-?????-of-?????.safetensors"))
    if not found:
        return []
    count = found[-1][len("model-00001-of-") :].removesuffix(".safetensors")
    last = int(count) if count.isdecimal() else 0
    names = [f"model-{number:05d}-of-{count}.safetensors" for number in range(1, last + 1)]
    if odd := sorted(set(found) ^ set(names)):
        fault = "is missing" if odd[0] in names else f"is not one of {count}"
        raise CheckpointError(f"{folder}: holds no index, and {odd[0]} {fault}")
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
