"""The interface of a checkpoint format for conversions, and the list of all formats. Importing this module imports
neither torch nor the module of any format.

A format of another program consists of an entry in `FORMS` and a module with these functions:

    recognise(path) -> bool                     whether `path` has this format, judging by file names
    open_form(path, options) -> OpenedForm      the tensors, the model, and the table that produces mega tensors
    export(own, to, options) -> Export          if the format has `targets`: the table, and a function that writes files
                                                (in the module `writer`, if given)
    attached(path) -> {name: path}              optional: generated files to store with the weights
    tokenizer(files) -> str | None              optional: the kind of tokenizer that the files contain
    unread(files) -> str | None                 optional: why the files are not a supported tokenizer

A format defines its table for one direction only. Conversions invert and check the table, and count the elements that
they move (mapping.py, convert.py). The commands' flags, their choices, messages and the recognition of paths are all
derived from the entries of `FORMS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from mega.core.untrusted import Json

if TYPE_CHECKING:
    import torch

    from mega.core.checkpoint.forms.mapping import Source, Table
    from mega.core.checkpoint.own.layout import Layout
    from mega.core.checkpoint.own.source import StoredWeights
    from mega.core.checkpoint.own.store import Attachments
    from mega.core.config.sections import ModelConfig

Verb = Literal["convert-llama", "reshard"]


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of token ids in Hugging Face's config.json. If a key is missing, transformers uses the family's default, such as
50256 for GPT-2."""


@dataclass(frozen=True)
class SpecialTokens:
    """Properties of a mega checkpoint's tokenizer that other tools need."""

    ids: Mapping[str, Json]
    """Key in `TOKEN_IDS` -> id; None for a missing token, a list if several tokens end a text."""
    files: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """File name -> JSON content, for files that Hugging Face's tools require when they open the tokenizer, and that the
    checkpoint lacks."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Key such as `bos_token` -> the token's text."""
    single_file: Callable[[], Mapping[str, Json] | None] = lambda: None
    """`Tokenizer.single_file`: returns a tokenizer.json that needs no other files, or None."""
    template: str | None = None
    """The chat template, in Jinja."""
    ends: tuple[int, ...] = ()
    """Ids of tokens that end the assistant's turn."""
    left_out: tuple[str, ...] = ()
    """Tokenizer files that must not be exported: Hugging Face's tools would load a different tokenizer from these
    files."""
    splits_special: bool = False
    """Whether the names of special tokens are text wherever they occur. Only tokenizer_config.json can express this."""
    loss: str | None = None
    """How tokenization in Hugging Face's tools differs from tokenization with this tokenizer, as text for a message."""


def no_tokens(checkpoint: StoredWeights) -> SpecialTokens:
    """Special tokens, with None for all ids, for a checkpoint whose tokenizer is not opened."""
    return SpecialTokens(dict.fromkeys(TOKEN_IDS))


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The user's options for a conversion, except the two paths. Each format uses the options that apply to it."""

    layout: Layout
    """The layout of ranks for which tensors are split into files."""
    base: Path | None = None
    """The base checkpoint of an imported adapter, or the base model's name to write in an exported adapter."""
    parts: int = 1
    """Number of weight files in a Meta folder."""
    vocab: int | None = None
    """Vocabulary size, without padding, of a Megatron-LM checkpoint."""
    heads: int | None = None
    """Number of attention heads, for a checkpoint that does not record this number."""
    optimizer: bool = True
    """Whether to convert optimizer state in addition to weights."""
    distributed: bool = False
    """Whether to write Adam's state in the format of Megatron's distributed optimizer."""
    tokenizer_type: str | None = None
    """The tokenizer type to record in a Megatron-LM checkpoint."""
    outtype: str | None = None
    """The type in which a GGUF file or a Hugging Face folder stores matrices."""
    tokens: Callable[[StoredWeights], SpecialTokens] = no_tokens
    """Function that opens the tokenizer of a mega checkpoint and returns its special tokens. It is used if the
    checkpoint's files do not list the special tokens. Raises ValueError if the checkpoint has no tokenizer."""


@dataclass(frozen=True)
class OpenedForm:
    """An opened checkpoint of another program's format."""

    source: Source
    """The checkpoint's tensors under the format's names."""
    model: ModelConfig
    """The resolved model section."""
    table: Table
    """The table that maps the tensors of `source` to `weights/...` and to optimizer state."""
    step: int = 0
    """The training step at which the checkpoint was written; 0 if unknown."""
    consumed: int = 0
    """Number of training samples consumed before the step at which the checkpoint was written."""
    known: Mapping[str, Json] = field(default_factory=dict)
    """Additional plain state for the mega checkpoint."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    base: StoredWeights | None = None
    """The base model's weights, for an adapter. The base model's tokenizer is used if the adapter has none."""
    rounded: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """Function that takes a name in `source` and values, and rounds the values to the precision of the file. None if
    the format has full precision."""
    bounds: Source | None = None
    """A source of fp32 upper bounds on the errors due to the file's precision, under the tensor names of `source`. None
    if the format has full precision, or if `rounded` returns exact values."""


@dataclass(frozen=True)
class ExportSource:
    """A mega checkpoint to export. source: the checkpoint's weights."""

    checkpoint: StoredWeights
    model: ModelConfig
    source: Source


@dataclass(frozen=True)
class Export:
    """The plan for exporting a mega checkpoint to another format."""

    table: Table
    """The table that maps the format's tensors to mega tensors, as in `OpenedForm.table`. The export uses the inverse
    table."""
    fill: Callable[[Path, Table, Source], int]
    """Writes all files, given an empty folder, the inverted table and the source of mega tensors. Returns the total
    size of the tensors in bytes."""
    source: Source | None = None
    """The source of the tensors to export; None to export only the weights."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    losses: tuple[str, ...] = ()
    """Messages about settings that this format cannot express."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One checkpoint format."""

    name: str
    """The format's name in code."""
    words: str
    """The format's name in messages."""
    sign: str = ""
    """The files that identify a folder of this format, for a message."""
    alone: str = ""
    """File names of single-file checkpoints of this format, for a message."""
    module: str = ""
    """The module that contains the format's functions."""
    writer: str = ""
    """The module of `export`, if it differs from `module`."""
    verb: Verb = "convert-llama"
    """The command that converts this format."""
    targets: tuple[str, ...] = ()
    """Values of --to or --saver that select this format as the target."""
    reads: tuple[str, ...] = ()
    """Flags that apply when this format is read."""
    writes: tuple[str, ...] = ()
    """Flags that apply when this format is written."""
    companions: tuple[str, ...] = ()
    """Names of files to store with the weights."""
    ahead: bool = True
    """Whether this format can store multi-token prediction layers; otherwise exports omit these layers."""

    def recognise(self, path: Path) -> bool:
        """Whether `path` is a checkpoint of this format."""
        return bool(self._loaded().recognise(path))

    def open(self, path: Path, options: FormOptions) -> OpenedForm:
        """Open a checkpoint of this format. Errors: CheckpointError naming the file, key or tensor at fault."""
        checkpoint: OpenedForm = self._loaded().open_form(path, options)
        return checkpoint

    def export(self, own: ExportSource, to: str, options: FormOptions) -> Export:
        """Plan an export. to: one of `targets`. Errors: CheckpointError naming a setting that this format cannot
        express."""
        writer = importlib.import_module(self.writer) if self.writer else self._loaded()
        export: Export = writer.export(own, to, options)
        return export

    def tokenizer(self, files: Attachments) -> str | None:
        """The value of --tokenizer for the tokenizer files stored with weights of this format."""
        find = getattr(self._loaded(), "tokenizer", None)
        kind: str | None = None if find is None else find(files)
        return kind

    def unread(self, files: Attachments) -> str | None:
        """The reason why the tokenizer files stored with weights of this format are not supported; None if they are
        supported."""
        explain = getattr(self._loaded(), "unread", None)
        reason: str | None = None if explain is None else explain(files)
        return reason

    def attached(self, path: Path) -> dict[str, Path] | None:
        """Files that are generated from the checkpoint at `path`, to be stored with the weights. Errors:
        CheckpointError."""
        make = getattr(self._loaded(), "attached", None)
        files: dict[str, Path] | None = None if make is None else make(path)
        return files

    def _loaded(self) -> ModuleType:
        return importlib.import_module(self.module)


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
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "dict.txt",
    "modules.json",
)
"""Files of published models that are stored with the weights, if they exist."""

POOLING = "1_Pooling.config.json"
TOOL_TEMPLATE = "additional_chat_templates.tool_use.jinja"
NESTED = {POOLING: "1_Pooling/config.json", TOOL_TEMPLATE: "additional_chat_templates/tool_use.jinja"}
"""File name in a mega checkpoint -> path of the file in a model's folder. The pooling is read only for formats with a
modules.json."""

_TP, _PP, _EP = "--tp", "--pp", "--ep"
_FOR_CORE = ("--no-load-optim", "--use-distributed-optimizer", "--tokenizer-type")
_HERE = "mega.core.checkpoint.forms."

OWN = Form(name="mega", words="a mega checkpoint", targets=("mega",), writes=(_TP, _PP, "--chunks", "--stage-layers"))
"""The project's own format. The package `own` reads and writes it."""

FORMS = [
    Form(
        name="llama2.c",
        words="a llama2.c file",
        alone=".bin or .pt (llama2.c)",
        module=_HERE + "llama2c",
    ),
    Form(
        name="gguf",
        words="a GGUF file",
        alone=".gguf (llama.cpp)",
        module=_HERE + "gguf.opening",
        writer=_HERE + "gguf.saving",
        targets=("gguf",),
        writes=("--outtype",),
        ahead=False,
    ),
    Form(
        name="torch_dist",
        words="a torch_dist folder of Megatron-LM",
        sign=".metadata (torch_dist)",
        module=_HERE + "megatron.torch_dist",
        writer=_HERE + "megatron.torch_dist_write",
        verb="reshard",
        targets=("torch_dist",),
        reads=("--true-vocab-size", "--vocab-file", "--num-attention-heads", "--no-load-optim"),
        writes=(_TP, _PP, *_FOR_CORE),
    ),
    Form(
        name="megatron",
        words="a tree of Megatron-LM",
        sign="mp_rank_NN (Megatron-LM)",
        module=_HERE + "megatron.trees",
        writer=_HERE + "megatron.trees_write",
        verb="reshard",
        targets=("megatron", "megatron-23.06", "mcore", "mcore-local", "core"),
        reads=("--true-vocab-size", "--vocab-file", "--no-load-optim"),
        writes=(_TP, _PP, _EP, *_FOR_CORE),
    ),
    Form(
        name="fairseq",
        words="a fairseq folder",
        sign="model-model_part-N.pt (fairseq)",
        module=_HERE + "fairseq",
        companions=COMPANIONS,
    ),
    Form(
        name="meta",
        words="a Meta folder",
        sign="params.json with consolidated.NN.pth (Meta)",
        module=_HERE + "meta",
        targets=("meta",),
        writes=("--parts",),
        ahead=False,
        companions=COMPANIONS,
    ),
    Form(
        name="mistral",
        words="a Mistral folder",
        sign="params.json with consolidated.safetensors (Mistral)",
        module=_HERE + "mistral",
        companions=COMPANIONS,
    ),
    Form(
        name="peft",
        words="an adapter of peft",
        sign="adapter_config.json (peft)",
        module=_HERE + "peft",
        targets=("peft",),
        reads=("--base",),
        writes=("--base",),
        companions=tuple(name for name in COMPANIONS if name not in ("config.json", "params.json", "modules.json")),
    ),
    Form(
        name="hf",
        words="a Hugging Face folder",
        sign="config.json (Hugging Face)",
        module=_HERE + "huggingface",
        targets=("hf",),
        writes=("--outtype",),
        ahead=False,
        companions=COMPANIONS,
    ),
]
"""All formats of other programs. The first format that recognises a path is used."""


def targets_of(verb: Verb) -> list[str]:
    """The values of a command's target flag; the project's own format comes first."""
    return [target for form in (OWN, *reversed(FORMS)) if form is OWN or form.verb == verb for target in form.targets]


def writer_of(target: str) -> Form:
    """The format that `--to target` or `--saver target` writes. Errors: ValueError if no format has this target."""
    forms = (OWN, *FORMS)
    for form in forms:
        if target in form.targets:
            return form
    raise ValueError(f"{target}: is not written; valid: {', '.join(each for form in forms for each in form.targets)}")


_RANKS = "only mega checkpoints and trees of Megatron-LM are cut for ranks; leave it out (a Meta folder has --parts)"
_STAGES = "only mega checkpoints are cut for chunks and uneven stages; leave it out"
_PADDED = "only Megatron-LM pads vocabularies in its files; leave it out"

RULES: dict[str, tuple[str, object]] = {
    _TP: (_RANKS, 1),
    _PP: (_RANKS, 1),
    _EP: ("only --saver mcore-local has files of ranks that share the experts; leave it out", 1),
    "--chunks": (_STAGES, 1),
    "--stage-layers": (_STAGES, ()),
    "--parts": ("only a Meta folder has parts; leave it out, or give --to meta", 1),
    "--base": ("only an adapter belongs to other weights; leave it out", None),
    "--true-vocab-size": (_PADDED, None),
    "--vocab-file": (_PADDED, None),
    "--num-attention-heads": ("only a torch_dist folder may not state it; leave it out", None),
    "--outtype": ("only GGUF files and Hugging Face folders have a type of their own; leave it out", None),
    "--use-distributed-optimizer": ("only Megatron-LM's optimizer has such a form; leave it out", False),
    "--tokenizer-type": ("only Megatron-LM's trees say one; leave it out", None),
    "--no-load-optim": ("only from and to Megatron-LM an optimizer's state is optional; leave it out", False),
}
"""Flags of `convert-llama` and `reshard` that do not apply to every pair of formats -> (the rule to print in an error
message, the flag's default value)."""


def check_flags(source: Form, target: Form, flags: Mapping[str, object]) -> None:
    """Check that all given flags have an effect on this conversion. Errors: ValueError naming the first flag without
    effect."""
    for flag, value in flags.items():
        rule, unset = RULES[flag]
        if type(value) is int and value < 1:
            raise ValueError(f"{flag} {value}: must be 1 or more")
        if value != unset and flag not in (*source.reads, *target.writes):
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            flag_text = " ".join(map(str, (flag, *values)))
            raise ValueError(f"{flag_text}: means nothing from {source.words} to {target.words}: {rule}")
