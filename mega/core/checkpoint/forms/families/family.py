"""What a family of decoders is in Hugging Face's form: keys of its config.json, fixed values, names of its tensors.

A family is a row of these, read in both directions: a config.json becomes the options of a model, and a model a
config.json again; `weights/<name>` of every logical tensor is some rows of a tensor of the folder. A key that a family
does not know is refused. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mega.core.architecture import Tensor, architecture, inventory
from mega.core.checkpoint.forms.families.keys import COMMON, Key
from mega.core.checkpoint.forms.keys import check_kept, check_known
from mega.core.checkpoint.forms.mapping import Fragment, Span, Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

Rows = Callable[[ModelConfig], Sequence[range]]
"""Which rows of a stored tensor one of ours is made of, in order."""


@dataclass(frozen=True)
class StoredModule:
    """Some rows of a stored module, or all of them; transposed: its matrix is stored [in, out]."""

    module: str
    rows: Rows | None = None
    transposed: bool = False


EXPERT = re.compile(r"(?<=\.experts)\.(\d+)\.")
"""The number of an expert in the name of one of its modules."""

FUSED = ".gate_up_proj.weight"
"""What the name of an expert's gate and up ends with, where they are one matrix."""

LLAMA_NAMES: Mapping[str, str | StoredModule] = {
    "model.embed_tokens": "embed_tokens",
    "model.norm": "norm",
    "lm_head": "lm_head",
}
"""Our modules outside the layers -> those of Llama's relatives, whose modules in a layer are called as ours."""


@dataclass(frozen=True, kw_only=True)
class HubFamily:
    """One `model_type` of a config.json.

    architecture: its class in transformers. words: for messages. values: options that all its models have. keys: of its
    config.json, besides those that any may have. names: our modules -> stored ones, of a layer by names within it;
    those that are left out are called as ours; {} is the number of an expert. fused: those of a folder whose experts
    are stacked (mixtures.py). prefix, layer: what names begin with, and then those of a layer. outside: stored modules
    without the prefix. buffers: ends of names of tensors that hold no parameters.
    """

    model_type: str
    architecture: str
    words: str
    values: Mapping[str, object]
    keys: Mapping[str, Key]
    names: Mapping[str, str | StoredModule] = field(default_factory=lambda: LLAMA_NAMES)
    fused: Mapping[str, str | StoredModule] | None = None
    prefix: str = "model."
    layer: str = "layers.{}."
    outside: Collection[str] = ("lm_head",)
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")

    # config.json

    def model_from_config(self, config: Mapping[str, object], where: str, found: Collection[str] = ()) -> ModelConfig:
        """The resolved model section that a config.json describes. found: names of the tensors along with it, off which
        nothing is read.

        Errors: CheckpointError naming a key that is unknown, or whose value has no counterpart.
        """
        keys = {**COMMON, **self.keys}
        known = {*keys, *(name for key in keys.values() for name in key.names)}
        check_known({**config, "model_type": self.model_type}, known, where)
        values: dict[str, Any] = dict(self.values)
        for name, key in keys.items():
            values |= key.read(config, name, where)
        model = ModelConfig(**values)
        if model.heads % model.kv_heads:
            raise CheckpointError(
                f"{where}: {model.heads} heads: must be divisible by {model.kv_heads} of keys and values"
            )
        if model.position == "rope" and (width := int(model.head_dim * model.rope_fraction)) % 2:
            raise CheckpointError(f"{where}: {width} channels of a head of {model.head_dim} rotate: must be even")
        return model

    def config_from_model(self, options: ModelConfig, dtype: str) -> dict[str, Json]:
        """A config.json for `AutoModelForCausalLM`. dtype: of the weights, in torch's words ("bfloat16").

        Errors: CheckpointError naming the option that this family does not have.
        """
        config: dict[str, Json] = {"architectures": [self.architecture], "model_type": self.model_type}
        for name, key in self.keys.items():
            config |= key.write(options, name)
        config |= {"initializer_range": options.init_std, "use_cache": True, "torch_dtype": dtype}
        everywhere = (options.window or 0) >= options.positions and options.local_rope_base is None
        unsaid = ("window", "window_layers") if everywhere else ()
        check_kept(options, self.model_from_config(config, "config.json"), self.words, unsaid=unsaid)
        return config

    # Tensors

    def stored(self, name: str, prefix: str | None = None) -> tuple[str, StoredModule]:
        """What a logical tensor is called in a folder, and the part of it that it is.

        prefix: in front of names [the family's].
        """
        prefix = self.prefix if prefix is None else prefix
        module, _, kind = name.rpartition(".")
        within, before = module, prefix
        if module.startswith("model.layers."):
            number, _, within = module.removeprefix("model.layers.").partition(".")
            before = prefix + self.layer.format(number)
        expert = EXPERT.search(within)
        within = within if expert is None else EXPERT.sub(".{}.", within)
        part = self.names.get(within, within)
        part = part if isinstance(part, StoredModule) else StoredModule(part)
        before = "" if part.module in self.outside else before
        module = part.module if expert is None else part.module.format(expert[1])
        return f"{before}{module}.{kind}", part

    @property
    def renames_linears(self) -> bool:
        """Whether linears of the layers are stored under other names than ours, or fused."""
        return any("_proj" in ours for ours in self.names)

    def table(self, options: ModelConfig, found: Collection[str] = ()) -> Table:
        """`weights/<name>` of every logical tensor. found: names in a folder, where they may lack the prefix."""
        if self.fused is not None and any(name.endswith(FUSED) for name in found):
            return replace(self, names=self.fused, fused=None).table(options, found)
        prefixed = not found or any(name.startswith(self.prefix) for name in found)
        prefix = self.prefix if prefixed else ""
        targets = [self._target(options, tensor, prefix) for tensor in inventory(options)]
        head, _ = self.stored("lm_head.weight")
        repeated = architecture(options).tied and head in found
        return Table(
            tuple(targets),
            copies=((targets[0].name, whole(targets[0].shape, head)),) if repeated else (),
            ignored=frozenset(name for name in found if name.endswith(self.buffers)),
        )

    def _target(self, options: ModelConfig, tensor: Tensor, prefix: str) -> Target:
        name, part = self.stored(tensor.name, prefix)
        runs = [range(tensor.shape[0])] if part.rows is None else part.rows(options)
        columns, fragments, row = tuple(map(range, tensor.shape[1:])), [], 0
        transposed = part.transposed and bool(columns)
        for run in runs:
            at, taken = Span(range(row, row + len(run)), *columns), Span(run, *columns)
            taken = Span(*reversed(taken.ranges)) if transposed else taken
            fragments.append(Fragment(name, at, taken, transposed))
            row += len(run)
        assert row == tensor.shape[0], f"{tensor.name}: {row} rows of {tensor.shape}"
        return Target(f"weights/{tensor.name}", tensor.shape, tuple(fragments))


# Rows of fused tensors


def one_after_another(which: str) -> Rows:
    """Of query, key and value, "q", "k" or "v", in a matrix of all queries, then all keys, then all values."""

    def rows(model: ModelConfig) -> Sequence[range]:
        counts = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        before = "qkv"[: "qkv".index(which)]
        first = sum(counts[each] for each in before) * model.head_dim
        return [range(first, first + counts[which] * model.head_dim)]

    return rows


def by_heads(which: str) -> Rows:
    """Of query, key and value in a matrix of one head's three after another's."""

    def rows(model: ModelConfig) -> Sequence[range]:
        width, place = model.head_dim, "qkv".index(which)
        return [range((3 * head + place) * width, (3 * head + place + 1) * width) for head in range(model.heads)]

    return rows


def gate_then_up(which: str) -> Rows:
    """Of gate and up, "gate" or "up", in a matrix of the one above the other."""
    place = ("gate", "up").index(which)
    return lambda model: [range(place * model.ffn, (place + 1) * model.ffn)]


def rotary_pairs(model: ModelConfig) -> Sequence[range]:
    """Of query or key rows whose neighbours (2i, 2i + 1) turn with one another, where ours are half a rotation apart:
    of each head its even rotating rows, its odd ones, then the rest."""
    width, turning = model.head_dim, int(model.head_dim * model.rope_fraction)
    return [
        run
        for first in range(0, model.heads * width, width)
        for run in (
            *(range(first + odd, first + turning, 2) for odd in (0, 1)),
            *([range(first + turning, first + width)] if turning < width else []),
        )
    ]
