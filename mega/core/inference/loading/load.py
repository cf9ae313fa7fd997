"""A model that lies somewhere, opened where it lies and filled into stages of any layout: weights only, no optimizer.

    open_model(path)                     a run of ours, one of its steps, or what others have written; read in place
    load_stages(opened, mesh, device)    this rank's part of it, at any tp x cp x pp
    load_model(checkpoint)               the whole of it as one stage

It also finds the tokenizer and the chat template that come with the weights. It knows neither prompts nor training.
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
from mega.core.text.chat.templates import SOURCE_BYTES, TEMPLATES, template_of
from mega.core.text.tokenizer import Tokenizer, least_vocab
from mega.core.untrusted import Json, below, read_limited

FIELDS = {
    "vocab.json": "vocab_file",
    "vocab.txt": "vocab_file",
    "merges.txt": "merge_file",
    "tokenizer.model": "tokenizer_model",
}
"""Attached tokenizer file -> the option that names it."""

MODELS = {"HuggingFaceTokenizer": "tokenizer.json", "FairseqTokenizer": "dict.txt"}
"""Kind of tokenizer -> the attached file that is its model, where that is not tokenizer.model."""

MOST_ENDS = 64
"""Most ids of `eos_token_id`; released models have up to five."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that lies somewhere.

    weights: what fills stages. model: its section, resolved and checked. attachments: files that came with the
    weights, by name. meta: what a run of ours says of itself; empty of others' models. digest: equal where model and
    weights are. notes: lines for the user.
    """

    weights: Readable
    model: ModelConfig
    attachments: Mapping[str, Path]
    meta: Mapping[str, Any]
    digest: str
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.weights.path

    @property
    def architecture(self) -> Architecture:
        """What the model's section describes."""
        return architecture(self.model)

    @property
    def step(self) -> int | None:
        """Of the run that wrote it; None of others' models."""
        return int(self.meta["progress"]["step"]) if "progress" in self.meta else None

    @property
    def trained_length(self) -> int | None:
        """Columns of the rows that a run of ours trained on; None of others' models."""
        found = self.meta.get("config", {}).get("batch", {}).get("seq_length")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def trained_on_conversations(self) -> bool:
        """Whether a mega run trained it with a chat template."""
        return trained_on_conversations(self.meta)

    @property
    def dtype(self) -> torch.dtype:
        """That most weights are stored in: the embedding's."""
        return main_dtype(self.weights.tensors)

    def read(self, wanted: Iterable[Piece]) -> None:
        """Fill rectangles of `weights/...`, in whatever dtype. Errors: CheckpointError naming file or tensor."""
        self.weights.read(wanted, cast=True)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights. Errors: ValueError where there is none."""
        return load_tokenizer(self)

    def tokenizer_section(self) -> dict[str, Json] | None:
        """The options of a run with that tokenizer; None where there is none."""
        return tokenizer_section(self)

    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text besides the tokenizer's own end: Hugging Face's `eos_token_id`, a number or several, of
        the generation_config.json that came with the weights, else of the config.json. Errors: CheckpointError naming
        file and key."""
        return declared_ends(self.attachments, self.architecture.input.vocab) or frozenset()

    def ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids after which a text ends: the tokenizer's own end, and the model's, as far as the tokenizer knows them."""
        return text_ends(tokenizer, self.stop_ids(), tokenizer.vocab_size)

    def chat_template(self) -> str | None:
        """As the function of that name."""
        return chat_template(self)


def declared_ends(attachments: Mapping[str, Path], vocab: int) -> frozenset[int] | None:
    """`eos_token_id` of the files that came with weights; None where none of them has it. Errors: CheckpointError."""
    for name in ("generation_config.json", "config.json"):
        if name not in attachments:
            continue
        found = read_json(attachments[name]).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if found is None:
            continue
        if len(ids) > MOST_ENDS or any(type(each) is not int or not 0 <= each < vocab for each in ids):
            raise CheckpointError(
                f"{attachments[name]}: eos_token_id {repr(found)[:60]}: must be a token from 0 to {vocab - 1}, or a "
                f"list of at most {MOST_ENDS}"
            )
        return frozenset(ids)
    return None


def trained_on_conversations(meta: Mapping[str, Any]) -> bool:
    """Whether the run of which this is noted trained with a chat template."""
    config = meta.get("config", {})
    return bool(config.get("data", {}).get("chat_data") or config.get("finetuning", {}).get("dpo_data"))


def text_ends(tokenizer: Tokenizer, stop_ids: Iterable[int], known: int) -> frozenset[int]:
    """The tokenizer's end and `stop_ids`; without those from `known` on, which are never drawn."""
    return frozenset(token for token in (tokenizer.eod, *stop_ids) if token is not None and token < known)


def open_model(path: Path | str) -> OpenedModel:
    """What lies at `path`: a run of ours (its newest step), one of its steps, a URL of either, or others' weights
    (Hugging Face, Meta, Megatron-LM, fairseq, llama2.c). No weight is read yet, and nothing is written.

    Errors: CheckpointError, a ValueError, naming the file, key or tensor at fault.
    """
    place = Path(path)
    form = form_at(place)
    if form is OWN:
        return opened_checkpoint(locate(path))
    found = ForeignCheckpoint(place, form)
    return OpenedModel(found, found.model, found.attachments, {}, files_digest(place), found.notes)


def opened_checkpoint(checkpoint: StoredWeights) -> OpenedModel:
    """A checkpoint of ours, with the weights of its base where it holds adapters alone. Errors: CheckpointError."""
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
    """This rank's part of a model, for evaluation, filled: one stage, in a list as `Pipeline` takes them.

    dtype: computed in [the weights' own]. ops: [the fastest for device and dtype]. sequence, overlap: of the tensor
    axis, as of --sequence-parallel and --tp-overlap. stage_layers: blocks of each stage where they are not equal.
    Errors: ValueError where the layout does not divide the model; CheckpointError naming file or tensor.
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
    """This rank's stage of a model, its weights not set. As of `load_stages`."""
    where = device.torch
    factory = ParameterFactory(
        {axis.name: (axis.index, axis.size) for axis in (mesh.tp, mesh.etp)},
        dtype,
        where,
        with_context_parallel(ops or choose(where, dtype), mesh.cp, "auto"),
    )
    transport = peers(mesh.tp, where) if overlap and mesh.tp.group is not None else None
    region = Region(mesh.tp, sequence=sequence and mesh.tp.size > 1, transport=transport)
    held = [unit for unit, (at, _) in placement(model, mesh.pp.size, 1, stage_layers).items() if at == mesh.pp.index]
    options = StageOptions(cp=mesh.cp, experts=ExpertAxes.of(mesh))
    return family(model).stage(model, held, factory, region, options)


def fill(stage: nn.Module, opened: OpenedModel) -> None:
    """Read every weight of a stage of any layout, and put it into evaluation. Errors: CheckpointError."""
    opened.read(weight_pieces(stage))
    _check_finite(stage, opened.path)
    stage.eval()


def _check_finite(stage: nn.Module, path: Path) -> None:
    """Errors: CheckpointError naming the first tensor that holds a NaN or an infinity, with which a model answers
    nonsense."""
    found = {segment.shard.name: segment.real(weight.data) for weight in weights(stage) for segment in weight.segments}
    names = [name for name, tensor in found.items() if tensor.numel() and tensor.is_floating_point()]
    if names and not torch.stack([found[name].isfinite().all() for name in names]).all():
        name = next(name for name in names if not found[name].isfinite().all())
        raise CheckpointError(f"{path}: {name}: holds a NaN or an infinity")


def load_model(
    source: StoredWeights | OpenedModel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The whole model as one stage, for evaluation. Errors: CheckpointError naming file or tensor."""
    where = torch.device(device)
    opened = source if isinstance(source, OpenedModel) else opened_checkpoint(source)
    factory = ParameterFactory({}, dtype, where, choose(where, dtype))
    stage: nn.Module = family(opened.model).stage(opened.model, units(opened.model), factory, ALONE)
    fill(stage, opened)
    return stage


def weight_pieces(stage: nn.Module) -> Iterator[Piece]:
    """Every weight of a stage as the rectangles that a checkpoint fills; padding becomes zero. What has none is not
    written twice: on a CPU the first write to fresh memory costs more than reading does."""
    for weight in weights(stage):
        if sum(segment.real(weight.data).numel() for segment in weight.segments) < weight.numel():
            weight.data.zero_()
        for segment in weight.segments:
            yield Piece(
                f"weights/{segment.shard.name}", segment.shard.whole, segment.shard.start, segment.real(weight.data)
            )


def load_tokenizer(source: StoredWeights | OpenedModel) -> Tokenizer:
    """The tokenizer that a run trained with, or that came with the weights, from the files that lie with them.

    Errors: ValueError where there is none.
    """
    section = tokenizer_section(source)
    if section is None:
        why = unread_tokenizer(source.attachments)
        raise CheckpointError(f"{source.path}: carries no tokenizer{'' if why is None else f' that is read: {why}'}")
    return build(**section)


def tokenizer_section(source: StoredWeights | OpenedModel) -> dict[str, Any] | None:
    """The options of a run with that tokenizer; None where there is none. Errors: CheckpointError naming an option."""
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
    """What a model was trained to converse in: a name of `TEMPLATES`, or the text of a Jinja template;
    None where nothing says so. What a run of ours trained by goes before what its first weights came with. Errors:
    CheckpointError for a file that is damaged."""
    data, attachments = below(source.meta, "config", "data"), source.attachments
    trained = below(source.meta, "config", "finetuning").get("dpo_data")
    if data.get("chat_data") or trained:
        if data.get("chat_template") in TEMPLATES:
            return str(data["chat_template"])
        if "chat_template.jinja" not in attachments:  # of a Jinja file that was not kept with the weights
            return None
    if "chat_template.jinja" in attachments:
        path = attachments["chat_template.jinja"]
        text = read_limited(path, SOURCE_BYTES, str(path)).decode("utf-8", "replace")
        return next((name for name, source in TEMPLATES.items() if source == text), text)
    if "tokenizer_config.json" in attachments:
        return template_of(read_json(attachments["tokenizer_config.json"]))
    return None


def chat_template_place(source: StoredWeights | OpenedModel) -> str | None:
    """The same as --chat-template takes it: the name, or the file that holds it. Errors: CheckpointError."""
    found = chat_template(source)
    if found is None or found in TEMPLATES:
        return found
    files = (source.attachments.get(name) for name in ("chat_template.jinja", "tokenizer_config.json"))
    return str(next(path for path in files if path is not None))


def compute_dtype(opened: OpenedModel, device: Device, asked: str | None = None) -> torch.dtype:
    """What a model is computed in: as asked, else what its weights are stored in; on a CPU in fp32 at least."""
    if asked is not None:
        return DTYPES[asked]
    return opened.dtype if device.is_cuda or opened.dtype == torch.float64 else torch.float32


def check_tokenizer(opened: OpenedModel, tokenizer: Tokenizer) -> None:
    """Errors: ValueError where the model has no rows for all of its tokens."""
    model = opened.architecture
    if least_vocab(tokenizer, model.family) > model.input.vocab:
        raise ValueError(
            f"{opened.path}: the model has {model.input.vocab} tokens, its tokenizer {tokenizer.vocab_size}; "
            "give the right one with --tokenizer"
        )


def special_tokens(checkpoint: StoredWeights) -> SpecialTokens:
    """What others must know of that tokenizer. Errors: ValueError where there is none."""
    tokenizer = load_tokenizer(checkpoint)
    files, names = tokenizer.huggingface_files(), dict(tokenizer.named_tokens())
    template, why = chat_template(checkpoint), tokenizer.unpublished()
    left_out = () if why is None else tuple(tokenizer.files())
    lost = tokenizer.publishing_loss() if why is None else f"its tokenizer is left out: {why}"
    loss = None if lost is None else f"{tokenizer.kind}: {lost}"
    found = SpecialTokens(tokenizer.special_ids(), files, names, left_out=left_out, loss=loss)
    if template is None:
        return found
    chat = ChatFormat(template, tokenizer, f"{checkpoint.path}: its chat template")
    ends = tuple(chat.tokens[name] for name in chat.end_names)
    return replace(found, names={**names, **chat.variables}, template=chat.source, ends=ends)
