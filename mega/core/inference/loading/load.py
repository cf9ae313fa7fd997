"""Open a model in any supported format without converting it, and load its weights into stages of any layout.

    open_model(path)                     a mega run, one of its steps, or weights in another format
    load_stages(opened, mesh, device)    this rank's shard of the model, at any tp x cp x pp
    load_model(checkpoint)               the whole model as one stage

This module also finds the tokenizer and the chat template that came with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mega.core.architecture import Architecture, architecture, placement, units
from mega.core.checkpoint.forms.companions import tokenizer_kind, unread_tokenizer
from mega.core.checkpoint.forms.direct import files_digest, main_dtype
from mega.core.checkpoint.forms.foreign import read_json
from mega.core.checkpoint.forms.form import OWN, SpecialTokens
from mega.core.checkpoint.forms.open import ForeignCheckpoint, whole_model
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.source import Readable, StoredWeights
from mega.core.checkpoint.own.store import CheckpointError, locate
from mega.core.config.sections import ModelConfig
from mega.core.config.toml import unfit
from mega.core.device import DTYPES, Device
from mega.core.family import ModelStage, family
from mega.core.model.stage import StageOptions
from mega.core.ops.suite import Ops, choose
from mega.core.parallel.context import with_context_parallel
from mega.core.parallel.experts import ExpertAxes
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.peers import peers
from mega.core.parallel.region import ALONE, Region
from mega.core.parallel.weight import ParameterFactory, weights
from mega.core.text.build import build
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.templates import SOURCE_BYTES, STORED_TOOL_TEMPLATE, TEMPLATES, joined, template_of
from mega.core.text.tokenizer import Tokenizer, least_vocab
from mega.core.untrusted import Json, below, read_limited

FIELDS = {
    "vocab.json": "vocab_file",
    "vocab.txt": "vocab_file",
    "merges.txt": "merge_file",
    "tokenizer.model": "tokenizer_model",
}
"""Name of an attached tokenizer file -> the option for the file's path."""

MODELS = {"HuggingFaceTokenizer": "tokenizer.json", "FairseqTokenizer": "dict.txt"}
"""Tokenizer type -> name of the attached file with the tokenizer's model, if this is not tokenizer.model."""

MOST_ENDS = 64
"""Maximum number of ids in `eos_token_id`; released models have up to five."""


@dataclass(frozen=True)
class OpenedModel:
    """An opened model whose weights have not been read yet."""

    weights: Readable
    """Source from which the weights are read into stages."""
    model: ModelConfig
    """The model's options, resolved and checked."""
    attachments: Mapping[str, Path]
    """Name -> path of each file that came with the weights."""
    meta: Mapping[str, Any]
    """The manifest of a mega run; empty for weights in another format."""
    digest: str
    """Digest that identifies the options and weights of the model."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""

    @property
    def path(self) -> Path:
        return self.weights.path

    @property
    def architecture(self) -> Architecture:
        """The architecture that the model's options describe."""
        return architecture(self.model)

    @property
    def step(self) -> int | None:
        """Training step at which a mega run wrote the weights; None for weights in another format."""
        return int(self.meta["progress"]["step"]) if "progress" in self.meta else None

    @property
    def trained_length(self) -> int | None:
        """Sequence length, in tokens, with which a mega run trained; None for weights in another format."""
        length = self.meta.get("config", {}).get("batch", {}).get("seq_length")
        return length if isinstance(length, int) and length > 0 else None

    @property
    def trained_on_conversations(self) -> bool:
        """Whether the model was trained with a chat template in a mega run."""
        return trained_on_conversations(self.meta)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the embedding, and usually most other weights, are stored."""
        return main_dtype(self.weights.tensors)

    def read(self, wanted: Iterable[Piece]) -> None:
        """Read pieces of `weights/...` tensors into the memory of `wanted`, and convert the dtype if needed. Errors:
        CheckpointError naming file or tensor."""
        self.weights.read(wanted, cast=True)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights. Errors: ValueError if the tokenizer is missing."""
        return load_tokenizer(self)

    def tokenizer_section(self) -> dict[str, Json] | None:
        """The options of the tokenizer that came with the weights; None if the tokenizer is missing."""
        return tokenizer_section(self)

    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text in addition to the tokenizer's end token: `eos_token_id`, a number or a list, in the
        generation_config.json that came with the weights, else in config.json. Errors: CheckpointError naming file and
        key."""
        return declared_ends(self.attachments, self.architecture.input.vocab) or frozenset()

    def ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids that end a text: the tokenizer's end token, and the model's end tokens that exist in the tokenizer."""
        return text_ends(tokenizer, self.stop_ids(), tokenizer.vocab_size)

    def chat_template(self) -> str | None:
        """Return the model's chat template; see the function `chat_template`."""
        return chat_template(self)


def declared_ends(attachments: Mapping[str, Path], vocab: int) -> frozenset[int] | None:
    """Return the ids under `eos_token_id` in the files that came with the weights; None if no file has this key.
    Errors: CheckpointError if the ids are invalid."""
    for name in ("generation_config.json", "config.json"):
        if name not in attachments:
            continue
        declared = read_json(attachments[name]).get("eos_token_id")
        ids = declared if isinstance(declared, list) else [declared]
        if declared is None:
            continue
        if len(ids) > MOST_ENDS or any(type(each) is not int or not 0 <= each < vocab for each in ids):
            raise CheckpointError(
                f"{attachments[name]}: eos_token_id {repr(declared)[:60]}: must be a token from 0 to {vocab - 1}, or a "
                f"list of at most {MOST_ENDS}"
            )
        return frozenset(ids)
    return None


def trained_on_conversations(meta: Mapping[str, Any]) -> bool:
    """Whether the run with the given manifest trained with a chat template."""
    config = meta.get("config", {})
    return bool(config.get("data", {}).get("chat_data") or config.get("finetuning", {}).get("dpo_data"))


def text_ends(tokenizer: Tokenizer, stop_ids: Iterable[int], known: int) -> frozenset[int]:
    """Return the tokenizer's end token and `stop_ids`, except ids >= `known`, which are never sampled."""
    return frozenset(token for token in (tokenizer.eod, *stop_ids) if token is not None and token < known)


def open_model(path: Path | str) -> OpenedModel:
    """Open the model at `path`: a mega run (its newest step), one of its steps, a URL of either, or weights in another
    format (Hugging Face, Meta, Megatron-LM, fairseq, llama2.c). The weights are not read yet, and nothing is written.

    Errors: CheckpointError, a ValueError, naming the file, key or tensor at fault.
    """
    place = Path(path)
    form = form_at(place)
    if form is OWN:
        return opened_checkpoint(locate(path))
    foreign = ForeignCheckpoint(place, form)
    return OpenedModel(foreign, foreign.model, foreign.attachments, {}, files_digest(place), foreign.notes)


def opened_checkpoint(checkpoint: StoredWeights) -> OpenedModel:
    """Open a mega checkpoint. If the checkpoint contains only adapters, also open the weights of the base model.
    Errors: CheckpointError."""
    whole, model = whole_model(checkpoint)
    return OpenedModel(whole, model, whole.attachments, whole.meta, whole.digest)


def load_stages(
    opened: OpenedModel,
    mesh: Mesh,
    device: Device,
    *,
    dtype: torch.dtype | None = None,
    ops: Ops | None = None,
    sequence: bool = False,
    overlap: bool = False,
    stage_layers: tuple[int, ...] = (),
) -> list[ModelStage]:
    """Load this rank's shard of a model for evaluation, as a list with one stage, for use with `Pipeline`.

    dtype: dtype of the computation; default: dtype of the weights. ops: implementation of the operations; default: the
    fastest for device and dtype. sequence, overlap: values of --sequence-parallel and --tp-overlap. stage_layers:
    number of layers in each stage, if the numbers differ. Errors: ValueError if the layout does not divide the model;
    CheckpointError naming file or tensor.
    """
    stage = empty_stage(
        opened.model,
        mesh,
        device,
        dtype or opened.dtype,
        ops=ops,
        sequence=sequence,
        overlap=overlap,
        stage_layers=stage_layers,
    )
    fill(stage, opened)
    return [stage]


def empty_stage(
    model: ModelConfig,
    mesh: Mesh,
    device: Device,
    dtype: torch.dtype,
    *,
    ops: Ops | None = None,
    sequence: bool = False,
    overlap: bool = False,
    stage_layers: tuple[int, ...] = (),
) -> Any:
    """Construct this rank's stage of a model without setting its weights. For the arguments, see `load_stages`."""
    torch_device = device.torch
    factory = ParameterFactory(
        {axis.name: (axis.index, axis.size) for axis in (mesh.tp, mesh.etp)},
        dtype,
        torch_device,
        with_context_parallel(ops or choose(torch_device, dtype), mesh.cp, "auto"),
    )
    transport = peers(mesh.tp, torch_device) if overlap and mesh.tp.group is not None else None
    region = Region(mesh.tp, sequence=sequence and mesh.tp.size > 1, transport=transport)
    units_here = [
        unit
        for unit, (stage_index, _) in placement(model, mesh.pp.size, 1, stage_layers).items()
        if stage_index == mesh.pp.index
    ]
    options = StageOptions(cp=mesh.cp, experts=ExpertAxes.of(mesh))
    return family(model).stage(model, units_here, factory, region, options)


def fill(stage: nn.Module, opened: OpenedModel) -> None:
    """Read all weights of a stage of any layout, and switch the stage to evaluation mode. Errors: CheckpointError."""
    opened.read(weight_pieces(stage))
    _check_finite(stage, opened.path)
    stage.eval()


def _check_finite(stage: nn.Module, path: Path) -> None:
    """Check that all weights are finite, because NaN or infinity would make all answers useless. Errors:
    CheckpointError naming the first tensor that is not finite."""
    tensors = {
        segment.shard.name: segment.real(weight.data) for weight in weights(stage) for segment in weight.segments
    }
    names = [name for name, tensor in tensors.items() if tensor.numel() and tensor.is_floating_point()]
    if names and not torch.stack([tensors[name].isfinite().all() for name in names]).all():
        name = next(name for name in names if not tensors[name].isfinite().all())
        raise CheckpointError(f"{path}: {name}: holds a NaN or an infinity")


def load_model(
    source: StoredWeights | OpenedModel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Load the whole model as one stage for evaluation. Errors: CheckpointError naming file or tensor."""
    torch_device = torch.device(device)
    model = source if isinstance(source, OpenedModel) else opened_checkpoint(source)
    factory = ParameterFactory({}, dtype, torch_device, choose(torch_device, dtype))
    stage: nn.Module = family(model.model).stage(model.model, units(model.model), factory, ALONE)
    fill(stage, model)
    return stage


def weight_pieces(stage: nn.Module) -> Iterator[Piece]:
    """For each weight, yield the rectangles that a checkpoint fills, and set padding to zero. A weight without padding
    is not zeroed first, because on a CPU the first write to new memory takes longer than reading the file."""
    for weight in weights(stage):
        if sum(segment.real(weight.data).numel() for segment in weight.segments) < weight.numel():
            weight.data.zero_()
        for segment in weight.segments:
            yield Piece(
                f"weights/{segment.shard.name}", segment.shard.whole, segment.shard.start, segment.real(weight.data)
            )


def load_tokenizer(source: StoredWeights | OpenedModel) -> Tokenizer:
    """Load the tokenizer that a run trained with, or that came with the weights, from the files next to the weights.

    Errors: ValueError if the tokenizer is missing.
    """
    section = tokenizer_section(source)
    if section is None:
        reason = unread_tokenizer(source.attachments)
        raise CheckpointError(
            f"{source.path}: carries no tokenizer{'' if reason is None else f' that is read: {reason}'}"
        )
    return build(**section)


def tokenizer_section(source: StoredWeights | OpenedModel) -> dict[str, Any] | None:
    """Return the arguments of `build` for the tokenizer that came with the weights; None if the tokenizer is missing.
    Errors: CheckpointError naming the option."""
    options = below(source.meta, "config", "tokenizer")
    for name in ("tokenizer", "vocab_size", "vocab_extra_ids", "null_eod_last"):
        if options.get(name) is not None and (problem := unfit("tokenizer", name, options[name])) is not None:
            raise CheckpointError(f"{source.path}: config.tokenizer.{name}: {problem}")
    attachments = source.attachments
    kind = str(options.get("tokenizer") or tokenizer_kind(attachments) or "")
    if not kind:
        return None
    files: dict[str, Json] = {FIELDS[name]: str(path) for name, path in attachments.items() if name in FIELDS}
    if (model := MODELS.get(kind)) in attachments:
        files["tokenizer_model"] = str(attachments[str(model)])
    if "WordPiece" in kind and "vocab_file" not in files and "tokenizer.json" in attachments:
        files["vocab_file"] = str(attachments["tokenizer.json"])
    counts = {"vocab_size": options.get("vocab_size"), "vocab_extra_ids": options.get("vocab_extra_ids") or 0}
    return {"tokenizer": kind, **counts, "null_eod_last": bool(options.get("null_eod_last")), **files}


def chat_template(source: StoredWeights | OpenedModel) -> str | None:
    """Return the chat template of a model: a name in `TEMPLATES`, or the text of a Jinja template; None if the model
    has no template. The template that a mega run trained with takes precedence over the template of its initial
    weights. Errors: CheckpointError for a damaged file."""
    data, attachments = below(source.meta, "config", "data"), source.attachments
    trained = below(source.meta, "config", "finetuning").get("dpo_data")
    if data.get("chat_data") or trained:
        if data.get("chat_template") in TEMPLATES:
            return str(data["chat_template"])
        if "chat_template.jinja" not in attachments:  # the run used a Jinja file that was not saved with the weights
            return None
    if "chat_template.jinja" in attachments:
        paths = [attachments[name] for name in ("chat_template.jinja", STORED_TOOL_TEMPLATE) if name in attachments]
        text = joined(*(read_limited(path, SOURCE_BYTES, str(path)).decode("utf-8", "replace") for path in paths))
        return next((name for name, source in TEMPLATES.items() if source == text), text)
    if "tokenizer_config.json" in attachments:
        return template_of(read_json(attachments["tokenizer_config.json"]))
    return None


def chat_template_place(source: StoredWeights | OpenedModel) -> str | None:
    """Return a model's template as a value of --chat-template: a name, or the path of a file. Errors:
    CheckpointError."""
    template = chat_template(source)
    if template is None or template in TEMPLATES:
        return template
    files = (source.attachments.get(name) for name in ("chat_template.jinja", "tokenizer_config.json"))
    return str(next(path for path in files if path is not None))


def compute_dtype(opened: OpenedModel, device: Device, asked: str | None = None) -> torch.dtype:
    """Return the dtype of the computation: `asked` if given, else the weights' dtype. On a CPU, the default is fp32
    unless the weights are fp64."""
    if asked is not None:
        return DTYPES[asked]
    return opened.dtype if device.is_cuda or opened.dtype == torch.float64 else torch.float32


def check_tokenizer(opened: OpenedModel, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the tokenizer has more tokens than the model's vocabulary has ids."""
    model = opened.architecture
    if least_vocab(tokenizer, model.family) > model.input.vocab:
        raise ValueError(
            f"{opened.path}: the model has {model.input.vocab} tokens, its tokenizer {tokenizer.vocab_size}; "
            "give the right one with --tokenizer"
        )


def special_tokens(checkpoint: StoredWeights) -> SpecialTokens:
    """Return the tokenizer's special tokens, for use with other libraries. Errors: ValueError if the tokenizer is
    missing."""
    tokenizer = load_tokenizer(checkpoint)
    files, names = tokenizer.huggingface_files(), dict(tokenizer.named_tokens())
    template, reason = chat_template(checkpoint), tokenizer.unpublished()
    left_out = () if reason is None else tuple(tokenizer.files())
    difference = tokenizer.publishing_loss() if reason is None else f"its tokenizer is left out: {reason}"
    loss = None if difference is None else f"{tokenizer.kind}: {difference}"
    tokens = SpecialTokens(
        tokenizer.special_ids(),
        files,
        names,
        tokenizer.single_file,
        left_out=left_out,
        splits_special=tokenizer.behaviour().get("split") is True,
        loss=loss,
    )
    if template is None:
        return tokens
    chat = ChatFormat(template, tokenizer, f"{checkpoint.path}: its chat template")
    ends = tuple(chat.tokens[name] for name in chat.end_names)
    return replace(tokens, names={**names, **chat.variables}, template=chat.source, ends=ends)
