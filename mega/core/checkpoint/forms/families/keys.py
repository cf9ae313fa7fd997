"""Classes for the keys of config.json, which convert a key's value to options of a model and back.

Each family defines the default for an absent key, as in transformers. This module does not depend on the model
family or on files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mega.core.checkpoint.forms.keys import number_in, whole_in
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig

Config = Mapping[str, object]
Values = dict[str, Any]
"""Option -> value, or key of config.json -> value."""


class Key(Protocol):
    """One key of config.json, or several related keys. name: the first key."""

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of config.json that are read in addition to the first key."""

    def read(self, config: Config, name: str, where: str) -> Values:
        """Return the options that the key determines. Errors: CheckpointError naming the key."""

    def write(self, model: ModelConfig, name: str) -> Values:
        """Return the keys of config.json that express the model's options."""


@dataclass(frozen=True)
class _Alone:
    """A key that does not depend on other keys."""

    names = ()


@dataclass(frozen=True)
class Whole(_Alone):
    """A key whose value is a positive integer. default: function that computes the value of an absent or null key; None
    if the key is required."""

    option: str
    default: Callable[[Config], int] | None = None

    def read(self, config: Config, name: str, where: str) -> Values:
        use_default = config.get(name) is None and self.default is not None
        return {self.option: self.default(config) if use_default and self.default else whole_in(config, name, where)}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: getattr(model, self.option)}


@dataclass(frozen=True)
class Number(_Alone):
    """A key whose value is a number. optional: whether null is allowed and leaves the option unset."""

    option: str
    default: float | None = None
    optional: bool = False

    def read(self, config: Config, name: str, where: str) -> Values:
        if self.optional and config.get(name, self.default) is None:
            return {self.option: None}
        return {self.option: number_in(config, name, where, self.default)}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: getattr(model, self.option)}


@dataclass(frozen=True)
class Flag(_Alone):
    """A key whose value is true or false; null means false. on, off: the options for true and for false."""

    default: bool
    on: Config
    off: Config

    def read(self, config: Config, name: str, where: str) -> Values:
        value = config.get(name, self.default)
        if value not in (True, False, None) or (isinstance(value, int | float) and not isinstance(value, bool)):
            raise CheckpointError(f"{where}: {name} {value!r}: must be true or false")
        return dict(self.on if value else self.off)

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: all(_held(model, option) == value for option, value in self.on.items())}


def flag(option: str, default: bool = False) -> Flag:
    """A key that determines a single option."""
    return Flag(default, {option: True}, {option: False})


@dataclass(frozen=True)
class Word(_Alone):
    """A key whose value is a word. values: word -> the option's value. If several words have the same meaning, an
    export writes the first word."""

    option: str
    values: Mapping[str, str]
    default: str

    def read(self, config: Config, name: str, where: str) -> Values:
        value = config.get(name, self.default)
        if not isinstance(value, str) or value not in self.values:
            raise CheckpointError(f"{where}: {name} {value!r} (valid: {', '.join(self.values)})")
        return {self.option: self.values[value]}

    def write(self, model: ModelConfig, name: str) -> Values:
        option_value = getattr(model, self.option)
        return {name: next((word for word, value in self.values.items() if value == option_value), self.default)}


@dataclass(frozen=True)
class Only(_Alone):
    """A key that may have only the listed values. An export writes the first value. absent: whether the key may be
    absent. effect: what other values change, for the message."""

    values: tuple[object, ...]
    absent: bool = True
    effect: str = ""

    def read(self, config: Config, name: str, where: str) -> Values:
        present = name in config or not self.absent
        if present and not any(value is config.get(name) or _same(value, config.get(name)) for value in self.values):
            valid = next(value for value in self.values if value is not None)
            rule = f": {self.effect}, which mega does not do; valid: null" if self.effect else f" (valid: {valid!r})"
            raise CheckpointError(f"{where}: {name} {config.get(name)!r}{rule}")
        return {}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {} if self.values[0] is None else {name: self.values[0]}


@dataclass(frozen=True)
class Unread(_Alone):
    """A key that does not affect the model's computation."""

    def read(self, config: Config, name: str, where: str) -> Values:
        return {}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {}


def _same(one: object, other: object) -> bool:
    """Whether two values are equal. Unlike with ==, 1 and True are different."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _held(model: ModelConfig, option: str) -> object:
    """Return the value of a model's option, derived if the option is unset."""
    value = getattr(model, option)
    return model.bias if option == "out_bias" and value is None else value


NULL = Only((None, False))
"""A key that must be false."""

CLIP_QKV = Only((None, False), effect="clips queries, keys and values")
"""OLMo's bound of the projections of attention, which may only be absent."""

COMMON: Mapping[str, Key] = dict.fromkeys(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id"),
        *("auto_map", "name_or_path", "initializer_range", "initializer_factor", "return_dict", "output_attentions"),
        *("output_hidden_states", "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16"),
        *(
            "tf_legacy_loss",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "finetuning_task",
            "task_specific_params",
        ),
        *("tokenizer_class", "prefix", "chunk_size_feed_forward", "max_length", "min_length", "do_sample", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "early_stopping"),
        *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "attn_implementation"),
        *("classifier_dropout", "pruned_heads", "cache_implementation", "suppress_tokens", "max_new_tokens"),
        *(
            "pretraining_tp",
            "keys_to_ignore_at_inference",
            "tie_last_hidden_states",
            "unsloth_fixed",
            "unsloth_version",
        ),
        *("gradient_checkpointing", "quantization_config", "experts_implementation"),
    ),
    Unread(),
) | {
    "is_decoder": Unread(),
    "is_encoder_decoder": NULL,
    "add_cross_attention": NULL,
    "cross_attention_hidden_size": NULL,
    "per_layer_config": Only((None, {})),
    "use_return_dict": Unread(),
}
"""Keys that every config.json may contain. `quantization_config` is handled when the weights are read
(block_scaled.py)."""
