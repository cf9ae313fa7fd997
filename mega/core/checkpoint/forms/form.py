"""What a form of checkpoint is to the conversions, and the one list of forms. Loads no torch and no form.

A foreign form is a row of `FORMS` and a module with

    recognise(path) -> bool                     whether it lies at `path`, by the names of files
    open_form(path, given) -> Opened            its tensors, its model, and the table of ours made of theirs
    export(own, to, given) -> Export            where `targets` says that it is written: the same table, and the files
                                                (in `writer`, where that is a module of its own)
    attached(path) -> {name: path}              optional: files that are kept with its weights, where they are not
                                                files of its folder
    tokenizer(files) -> str | None              optional: the kind of tokenizer that files of its folders are
    unread(files) -> str | None                 optional: why files of its folders are no tokenizer that is read

The table is written once; conversions invert it, prove it and keep the account of what is moved (mapping.py,
convert.py). Flags of the commands, their choices, messages and what is recognised all come from the rows.
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
"""Keys of Hugging Face's config.json. Left out, a family's own number counts, such as GPT-2's 50256."""


@dataclass(frozen=True)
class SpecialTokens:
    """What others must know of the tokenizer of a checkpoint of ours.

    ids: of `TOKEN_IDS`, None where there is no such token, a list where several end a text. files: name -> JSON of the
    files by which Hugging Face's tools open it, in addition to those that the checkpoint carries. names: `bos_token`
    and others -> the token's name.
    template: how the model converses, in Jinja; ends: ids with which the assistant's turn ends. left_out: files of the
    tokenizer that Hugging Face's tools would read as another one; loss: what they do otherwise than it, for a message.
    """

    ids: Mapping[str, Json]
    files: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    ends: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    loss: str | None = None


def no_tokens(checkpoint: StoredWeights) -> SpecialTokens:
    """Of a checkpoint whose tokenizer is not opened."""
    return SpecialTokens(dict.fromkeys(TOKEN_IDS))


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user gives to a conversion besides two places; a form takes what means something for it.

    base: the checkpoint of ours that an adapter belongs to; or how an adapter is to call it. layout: ranks that files
    are cut for. parts: files of a Meta folder. vocab: the true vocabulary of a Megatron-LM tree. heads: attention
    heads, where a tree does not state them. optimizer: convert Adam's state too. distributed: as Megatron's distributed
    optimizer has it. tokenizer_type: what a Megatron-LM tree says of its tokenizer. outtype: how a GGUF file stores
    matrices. tokens: opens the tokenizer of a checkpoint of ours, where its files do not say it; ValueError where there
    is none.
    """

    layout: Layout
    base: Path | None = None
    parts: int = 1
    vocab: int | None = None
    heads: int | None = None
    optimizer: bool = True
    distributed: bool = False
    tokenizer_type: str | None = None
    outtype: str | None = None
    tokens: Callable[[StoredWeights], SpecialTokens] = no_tokens


@dataclass(frozen=True)
class Opened:
    """A foreign checkpoint.

    table: `weights/...` (and state) made of the tensors of `source`. step, consumed: of the run that wrote it, where it
    was one. known: what else a checkpoint of ours should hold in its plain state. notes: lines for the user. base: of
    ours, what adapters belong to, whose tokenizer is theirs where they bring none. rounded: name of a source's tensor,
    numbers of ours -> as the file holds them, where a form stores them less exactly.
    """

    source: Source
    model: ModelConfig
    table: Table
    step: int = 0
    consumed: int = 0
    known: Mapping[str, Json] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    base: StoredWeights | None = None
    rounded: Callable[[str, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Own:
    """A checkpoint of ours that is to be exported; source: its weights."""

    checkpoint: StoredWeights
    model: ModelConfig
    source: Source


@dataclass(frozen=True)
class Export:
    """How a checkpoint of ours becomes a foreign one.

    table: as that of `Opened`. fill: given an empty folder, the table of theirs made of ours, and its source; writes
    all files and returns the bytes of their tensors. source: where it is not the weights alone.
    notes: lines for the user. losses: lines on what this form has no place for.
    """

    table: Table
    fill: Callable[[Path, Table, Source], int]
    source: Source | None = None
    notes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of checkpoint.

    name, words: for code and for messages. sign: by which files in a folder it is recognised, or, alone: what a file is
    named that is one by itself; for a message. module: where its functions are. writer: where `export` is, if not
    there. verb: the command that converts it. targets: what --to or --saver may be to write it. reads, writes: the
    flags that mean something where it is read or written. companions: files that belong to the weights and are kept
    with them. ahead: whether it has layers that predict further tokens, which are left out of it otherwise.
    """

    name: str
    words: str
    sign: str = ""
    alone: str = ""
    module: str = ""
    writer: str = ""
    verb: Verb = "convert-llama"
    targets: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    ahead: bool = True

    def recognise(self, path: Path) -> bool:
        """Whether this form lies at `path`."""
        return bool(self._loaded().recognise(path))

    def open(self, path: Path, given: Given) -> Opened:
        """Errors: CheckpointError naming the file, key or tensor at fault."""
        opened: Opened = self._loaded().open_form(path, given)
        return opened

    def export(self, own: Own, to: str, given: Given) -> Export:
        """to: which of the `targets`. Errors: CheckpointError naming what this form has no place for."""
        writer = importlib.import_module(self.writer) if self.writer else self._loaded()
        export: Export = writer.export(own, to, given)
        return export

    def tokenizer(self, files: Attachments) -> str | None:
        """The kind of tokenizer, as --tokenizer names it, that files kept with weights of this form are."""
        find = getattr(self._loaded(), "tokenizer", None)
        kind: str | None = None if find is None else find(files)
        return kind

    def unread(self, files: Attachments) -> str | None:
        """Why token files kept with weights of this form are not read as a tokenizer; None where they are."""
        why = getattr(self._loaded(), "unread", None)
        found: str | None = None if why is None else why(files)
        return found

    def attached(self, path: Path) -> dict[str, Path] | None:
        """Files that are kept with weights of this form, where they are made of it. Errors: CheckpointError."""
        make = getattr(self._loaded(), "attached", None)
        found: dict[str, Path] | None = None if make is None else make(path)
        return found

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
)
"""Files that are kept with weights of published models, where they are there."""

_TP, _PP = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
_FOR_CORE = ("--no-load-optim", "--use-distributed-optimizer", "--tokenizer-type")
_HERE = "mega.core.checkpoint.forms."

OWN = Form(
    name="mega", words="a checkpoint of ours", targets=("mega",), writes=(_TP, _PP, "--chunks", "--stage-layers")
)
"""Ours, which is not foreign: own/ reads and writes it."""

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
        writes=(_TP, _PP, *_FOR_CORE),
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
        companions=tuple(name for name in COMPANIONS if name not in ("config.json", "params.json")),
    ),
    Form(
        name="hf",
        words="a Hugging Face folder",
        sign="config.json (Hugging Face)",
        module=_HERE + "huggingface",
        targets=("hf",),
        ahead=False,
        companions=COMPANIONS,
    ),
]
"""Every foreign form; the first that recognises a path is what lies there."""


def targets_of(verb: Verb) -> list[str]:
    """What a command can write, as its flag names it; ours first."""
    return [target for form in (OWN, *reversed(FORMS)) if form is OWN or form.verb == verb for target in form.targets]


def writer_of(target: str) -> Form:
    """The form that --to or --saver `target` writes. Errors: ValueError where there is none."""
    forms = (OWN, *FORMS)
    for form in forms:
        if target in form.targets:
            return form
    raise ValueError(f"{target}: is not written; valid: {', '.join(each for form in forms for each in form.targets)}")


_RANKS = "only checkpoints of ours and trees of Megatron-LM are cut for ranks; leave it out (a Meta folder has --parts)"
_STAGES = "only checkpoints of ours are cut for chunks and uneven stages; leave it out"
_PADDED = "only Megatron-LM pads vocabularies in its files; leave it out"

RULES: dict[str, tuple[str, object]] = {
    _TP: (_RANKS, 1),
    _PP: (_RANKS, 1),
    "--chunks": (_STAGES, 1),
    "--stage-layers": (_STAGES, ()),
    "--parts": ("only a Meta folder has parts; leave it out, or give --to meta", 1),
    "--base": ("only an adapter belongs to other weights; leave it out", None),
    "--true-vocab-size": (_PADDED, None),
    "--vocab-file": (_PADDED, None),
    "--num-attention-heads": ("only a torch_dist folder may not state it; leave it out", None),
    "--outtype": ("only GGUF files have a type of their own; leave it out", None),
    "--use-distributed-optimizer": ("only Megatron-LM's optimizer has such a form; leave it out", False),
    "--tokenizer-type": ("only Megatron-LM's trees say one; leave it out", None),
    "--no-load-optim": ("only from and to Megatron-LM an optimizer's state is optional; leave it out", False),
}
"""Flags of `convert-llama` and `reshard` that mean nothing for some pairs of forms: the rule, and the value that asks
for nothing."""


def check_flags(source: Form, target: Form, given: Mapping[str, object]) -> None:
    """A flag that could only be ignored is refused. Errors: ValueError naming the first such of `given`."""
    for flag, value in given.items():
        rule, unset = RULES[flag]
        if type(value) is int and value < 1:
            raise ValueError(f"{flag} {value}: must be 1 or more")
        if value != unset and flag not in (*source.reads, *target.writes):
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            shown = " ".join(map(str, (flag, *values)))
            raise ValueError(f"{shown}: means nothing from {source.words} to {target.words}: {rule}")
