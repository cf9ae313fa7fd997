"""A family of decoders in Hugging Face's format: keys of config.json, fixed option values, and tensor names.

A `HubFamily` converts config.json to the options of a model, and back. It also maps every logical tensor to rows of a
tensor in the folder. A key of config.json that the family does not list is refused. This module does not depend on
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mega.core.architecture import Tensor, architecture, inventory
from mega.core.checkpoint.forms.families.keys import COMMON, Key
from mega.core.checkpoint.forms.keys import check_decoder, check_known, check_round_trip
from mega.core.checkpoint.forms.mapping import Fragment, Span, Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

Rows = Callable[[ModelConfig], Sequence[range]]
"""Function that maps the model section to the rows of a stored tensor that form one logical tensor, in the logical
tensor's order."""


@dataclass(frozen=True)
class StoredModule:
    """All rows, or the given rows, of a stored module. transposed: whether the module's matrix is stored as [in,
    out]."""

    module: str
    rows: Rows | None = None
    transposed: bool = False


EXPERT = re.compile(r"(?<=\.experts)\.(\d+)\.")
"""Matches the expert index in the name of an expert's module."""

FUSED = ".gate_up_proj.weight"
"""Suffix of a tensor name for an expert's gate and up projections, stored as one matrix."""

LLAMA_NAMES: Mapping[str, str | StoredModule] = {
    "model.embed_tokens": "embed_tokens",
    "model.norm": "norm",
    "lm_head": "lm_head",
}
"""The project's names of modules outside the layers -> the names in Llama-like families. Modules inside a layer have
the same names in the project and in these families."""


@dataclass(frozen=True, kw_only=True)
class HubFamily:
    """A family of decoders, identified by `model_type` in config.json."""

    model_type: str
    """The value of `model_type`."""
    architecture: str
    """The family's class in transformers."""
    words: str
    """The family's name in messages."""
    values: Mapping[str, object]
    """Option values that all models of the family share."""
    keys: Mapping[str, Key]
    """Key of config.json -> the object that converts its value, in addition to `COMMON`."""
    names: Mapping[str, str | StoredModule] = field(default_factory=lambda: LLAMA_NAMES)
    """The project's module -> stored module. Modules of a layer are listed by their names within the layer, with {} for
    the expert index. Modules that are not listed have the same names in the project and in the folder."""
    fused: Mapping[str, str | StoredModule] | None = None
    """Replacement for `names` in a folder that stacks the experts' matrices (mixtures.py), if the family has such
    folders."""
    prefix: str = "model."
    """Prefix of all stored names."""
    layer: str = "layers.{}."
    """Prefix of names in a layer, following `prefix`."""
    outside: Collection[str] = ("lm_head",)
    """Stored modules whose names have no prefix."""
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
    """Suffixes of stored tensors that are not parameters and are ignored."""

    # config.json

    def model_from_config(self, config: Mapping[str, object], where: str, names: Collection[str] = ()) -> ModelConfig:
        """Return the resolved model section that config.json describes. names: names of the folder's tensors; not used
        by a family of decoders.

        Errors: CheckpointError naming a key that is unknown, or whose value is not supported.
        """
        keys = {**COMMON, **self.keys}
        known_keys = {*keys, *(name for key in keys.values() for name in key.names)}
        check_known({**config, "model_type": self.model_type}, known_keys, where)
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
        """Return the content of config.json for `AutoModelForCausalLM`. dtype: torch's name for the weights' dtype,
        such as "bfloat16".

        Errors: CheckpointError naming an option that the family does not support.
        """
        check_decoder(options, self.words)
        config: dict[str, Json] = {"architectures": [self.architecture], "model_type": self.model_type}
        for name, key in self.keys.items():
            config |= key.write(options, name)
        config |= {"initializer_range": options.init_std, "use_cache": True, "torch_dtype": dtype}
        covers_all = (options.window or 0) >= options.positions and options.local_rope_base is None
        unstated = ("window", "window_layers") if covers_all else ()
        check_round_trip(options, self.model_from_config(config, "config.json"), self.words, unsupported=unstated)
        return config

    # Tensors

    def stored(self, name: str, prefix: str | None = None) -> tuple[str, StoredModule]:
        """Return (name of the stored tensor that contains a logical tensor, the stored module with the rows of the
        logical tensor).

        prefix: prefix of all stored names; by default the family's prefix.
        """
        prefix = self.prefix if prefix is None else prefix
        module, _, kind = name.rpartition(".")
        within, name_prefix = module, prefix
        if module.startswith("model.layers."):
            number, _, within = module.removeprefix("model.layers.").partition(".")
            name_prefix = prefix + self.layer.format(number)
        expert = EXPERT.search(within)
        within = within if expert is None else EXPERT.sub(".{}.", within)
        part = self.names.get(within, within)
        part = part if isinstance(part, StoredModule) else StoredModule(part)
        name_prefix = "" if part.module in self.outside else name_prefix
        module = part.module if expert is None else part.module.format(expert[1])
        return f"{name_prefix}{module}.{kind}", part

    @property
    def renames_linears(self) -> bool:
        """Whether the layers' linear modules are fused or have names that differ from the project's."""
        return any("_proj" in module for module in self.names)

    def table(self, options: ModelConfig, names: Collection[str] = ()) -> Table:
        """Return the table that produces `weights/<name>` for every logical tensor. names: names of the folder's
        tensors, which may be stored without `prefix`."""
        if self.fused is not None and any(name.endswith(FUSED) for name in names):
            return replace(self, names=self.fused, fused=None).table(options, names)
        prefixed = not names or any(name.startswith(self.prefix) for name in names)
        prefix = self.prefix if prefixed else ""
        targets = [self._target(options, tensor, prefix) for tensor in inventory(options)]
        head, _ = self.stored("lm_head.weight")
        repeated = architecture(options).tied and head in names
        return Table(
            tuple(targets),
            copies=((targets[0].name, whole(targets[0].shape, head)),) if repeated else (),
            ignored=frozenset(name for name in names if name.endswith(self.buffers)),
        )

    def _target(self, options: ModelConfig, tensor: Tensor, prefix: str) -> Target:
        name, part = self.stored(tensor.name, prefix)
        runs = [range(tensor.shape[0])] if part.rows is None else part.rows(options)
        columns, fragments, row = tuple(map(range, tensor.shape[1:])), [], 0
        transposed = part.transposed and bool(columns)
        for run in runs:
            span, source_span = Span(range(row, row + len(run)), *columns), Span(run, *columns)
            source_span = Span(*reversed(source_span.ranges)) if transposed else source_span
            fragments.append(Fragment(name, span, source_span, transposed))
            row += len(run)
        assert row == tensor.shape[0], f"{tensor.name}: {row} rows of {tensor.shape}"
        return Target(f"weights/{tensor.name}", tensor.shape, tuple(fragments))


# Rows of fused tensors


def concatenated_qkv(which: str) -> Rows:
    """Return the rows of query, key or value ("q", "k", "v") in a matrix that consists of all queries, then all keys,
    then all values.

    q of all heads | k of all kv heads | v of all kv heads
    """

    def rows(model: ModelConfig) -> Sequence[range]:
        counts = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        before = "qkv"[: "qkv".index(which)]
        first = sum(counts[each] for each in before) * model.head_dim
        return [range(first, first + counts[which] * model.head_dim)]

    return rows


def interleaved_qkv(which: str) -> Rows:
    """Return the rows of query, key or value in a matrix that consists of query, key and value of the first head, then
    of the second head, and so on.

    q of head 0 | k of head 0 | v of head 0 | q of head 1 | ...
    """

    def rows(model: ModelConfig) -> Sequence[range]:
        width, position = model.head_dim, "qkv".index(which)
        return [range((3 * head + position) * width, (3 * head + position + 1) * width) for head in range(model.heads)]

    return rows


def gate_then_up(which: str) -> Rows:
    """Return the rows of "gate" or "up" in a matrix that consists of the gate projection, then the up projection."""
    position = ("gate", "up").index(which)
    return lambda model: [range(position * model.ffn, (position + 1) * model.ffn)]


def rotary_pairs(model: ModelConfig) -> Sequence[range]:
    """Return the query or key rows in the project's order, for a family that rotates adjacent rows (2i, 2i + 1) as a
    pair. The project pairs rows of the two halves of a head, so the order within a head is the even rotated rows, the
    odd rotated rows, then the rows without rotation."""
    width, turning = model.head_dim, int(model.head_dim * model.rope_fraction)
    return [
        run
        for first in range(0, model.heads * width, width)
        for run in (
            *(range(first + parity, first + turning, 2) for parity in (0, 1)),
            *([range(first + turning, first + width)] if turning < width else []),
        )
    ]
