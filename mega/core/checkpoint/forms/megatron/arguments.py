"""Convert Megatron-LM's arguments, in the spellings of all releases, to a model section, and back.

This module also determines the vocabulary size without padding, which the arguments rarely contain. It does not depend
on tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mega.core.architecture import Architecture, architecture
from mega.core.architecture.layer import RopeScaling
from mega.core.checkpoint.forms.foreign import read_json
from mega.core.checkpoint.forms.keys import check_round_trip
from mega.core.checkpoint.forms.megatron.families import FAMILIES
from mega.core.checkpoint.forms.megatron.mixture import mixture_arguments, mixture_flags, mixture_of
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.option import Renamed
from mega.core.config.retriever import RetrieverOptions
from mega.core.config.run import entries
from mega.core.config.sections import TOKENIZER_FILES, TOKENIZERS, ModelConfig
from mega.core.untrusted import Json


def check_vocabulary(values: Mapping[str, object], rows: int, tp: int) -> None:
    """Check that the number of rows of a rank's embedding table agrees with the arguments. Errors: CheckpointError if
    the numbers differ."""
    padded = values.get("padded_vocab_size")
    if type(padded) is int and padded != rows * tp:
        raise CheckpointError(
            f"0.0.0/embedding.word_embeddings.weight: has {rows} rows, args.padded_vocab_size {padded} on {tp} tensor "
            f"ranks says {padded / tp:g}"
        )


def vocabulary(
    values: Mapping[str, object], rows: int, requested: int | None, folder: Path
) -> tuple[int, tuple[str, ...]]:
    """Return the vocabulary size without padding, and messages for the user about rows of the embedding table that are,
    or may be, padding.

    Megatron's arguments contain the padded size. The size before padding is certain only if `vocab_size` equals the
    padded size, because `vocab_size` may exclude an end-of-document token. Checkpoints written by mega contain
    `true_vocab_size`, which is the padded size if mega converted a checkpoint without this argument. If `folder`
    contains a tokenizer, a message reports the tokenizer's size, but no rows are removed for this reason.
    rows: number of rows of the whole table. requested: --true-vocab-size. Errors: ValueError if the requested size is
    impossible.

    >>> vocabulary({"padded_vocab_size": 50304}, 50304, 50257, Path("gpt"))[0]
    50257
    """
    stated, unpadded = values.get("true_vocab_size"), values.get("vocab_size")
    stated = stated if type(stated) is int and 0 < stated <= rows else None
    if requested is not None and (0 < rows < requested or stated not in (None, rows, requested)):
        rule = f"the table of tokens has {rows} rows" if requested > rows else f"args.true_vocab_size is {stated}"
        raise ValueError(f"--true-vocab-size {requested}: {rule}")
    if tokens := requested or stated or (rows if unpadded == rows else None):
        note = f"vocabulary: {tokens:,} of {rows:,} rows are tokens, {rows - tokens:,} of padding are left out"
        return tokens, (f"{note}: {CUT}",) if tokens < rows else ()
    hints = [f"args.vocab_size is {unpadded:,}"] if type(unpadded) is int and 0 < unpadded < rows else []
    if (pieces := folder / "vocab.json").is_file():
        with contextlib.suppress(CheckpointError):  # vocab.json might not contain a JSON object
            hints.append(f"{pieces} has {len(read_json(pieces)):,} pieces")
    return rows, (
        f"vocabulary: all {rows:,} rows are kept; how many of them are tokens, and how many padding, is not said"
        f"{' (' + ', '.join(hints) + ')' if hints else ''}; Megatron-LM's softmax counts padding, so a run that is to "
        "have its losses keeps it (and --no-mask-padded-vocab); --true-vocab-size or --vocab-file leaves it out",
    )


CUT = (
    "Megatron-LM's softmax counted them, so the loss is lower without them, and they do not come back; a run that is "
    "to have its losses keeps all rows (--no-mask-padded-vocab)"
)
"""Text for messages about how removing the padding changes the loss."""


UNCHANGED: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "rotary_interleaved": (False, None),
    "normalization": ("LayerNorm", "RMSNorm"),
    "window_size": (None,),
    "quick_geglu": (False, None),
    "attention_output_gate": (False, None),
    "qk_l2_norm": (False, None),
    "softmax_type": ("vanilla", None),
    "no_rope_freq": (None, 0),
    "multi_latent_attention": (False, None),
    "use_mup": (False, None),
    "glu_linear_offset": (0, None),
    "activation_func_clamp_value": (None,),
    "mtp_use_repeated_layer": (False, None),
    "mtp_detach_heads": (False, None),
}
"""Arguments that change a model's computation but not its tensors -> the values that the project supports."""


UNUSED: dict[str, object] = {
    "rotary_seq_len_interpolation_factor": 1,
    "rope_scaling_factor": 8.0,
    "openai_gelu": False,
    "apply_residual_connection_post_layernorm": False,
}
"""Arguments that Megatron-core accepts but ignores (up to 0.19) -> the value that Megatron-core's models use
instead."""


def as_core_uses(values: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the arguments of a checkpoint of Megatron-core, corrected to the values that Megatron-core's models use,
    and a message for each correction.

    Checkpoints written by mega need no correction.

    >>> as_core_uses({"openai_gelu": True, "swiglu": True})
    ({'openai_gelu': False, 'swiglu': True}, ())
    """
    if "true_vocab_size" in values:
        return dict(values), ()
    notes = (
        f"args.{name} {values[name]!r}: Megatron-core does not use it (up to 0.19), nor does the model that is made "
        "here; leave it out of the command line"
        for name in _misleading(values)
    )
    return {**values, **{name: used for name, used in UNUSED.items() if name in values}}, tuple(notes)


def unused_by_core(arguments: Mapping[str, object]) -> tuple[str, ...]:
    """Messages about `arguments` that Megatron-core ignores although they would change the model's computation."""
    return tuple(
        f"args.{name} {arguments[name]!r}: Megatron-core does not use it (up to 0.19): it computes as with "
        f"{UNUSED[name]!r}, and has other losses"
        for name in _misleading(arguments)
    )


def _misleading(values: Mapping[str, object]) -> list[str]:
    """Names of the `UNUSED` arguments whose values differ from the values that Megatron-core's models use."""
    rope = values.get("position_embedding_type") == "rope"
    erf = not (values.get("bias_gelu_fusion", True) or values.get("swiglu") or values.get("squared_relu"))
    matters = {
        "rotary_seq_len_interpolation_factor": rope,
        "rope_scaling_factor": rope and values.get("use_rope_scaling"),
        "openai_gelu": erf,
    }
    return [n for n, used in UNUSED.items() if values.get(n) not in (used, None) and matters.get(n, True)]


SIZES = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
}
"""The project's option -> Megatron's argument, for arguments that every checkpoint must contain."""

SAME: dict[str, tuple[str, float | bool]] = {
    "rope_base": ("rotary_base", 10000.0),
    "rope_fraction": ("rotary_percent", 1.0),
    "rope_scaling_factor": ("rope_scaling_factor", 8.0),
    "hidden_dropout": ("hidden_dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "init_std": ("init_method_std", 0.02),
    "norm_offset": ("apply_layernorm_1p", False),
    "qk_norm": ("qk_layernorm", False),
    "post_norm_residual": ("apply_residual_connection_post_layernorm", False),
}
"""The project's option -> (Megatron's argument with the same meaning, default if the checkpoint omits the argument)."""


ZERO_CENTERED = "layernorm_zero_centered_gamma"
"""Megatron-core's name for --apply-layernorm-1p."""


def model_from_arguments(values: Mapping[str, object], vocab: int, where: str) -> ModelConfig:
    """Return the resolved model section that Megatron's arguments describe, in the spelling of any release."""

    def number(name: str, otherwise: int | None = None) -> int:
        value = values.get(name)
        value = otherwise if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{where}: args.{name} {value!r}: must be a positive whole number")
        return value

    decimal = partial(_decimal, values, where)
    _check_unchanged(values, where)
    sizes: dict[str, Any] = {option: number(argument) for option, argument in SIZES.items()}
    same: dict[str, Any] = {
        option: bool(values.get(argument)) if isinstance(otherwise, bool) else decimal(argument, otherwise)
        for option, (argument, otherwise) in SAME.items()
    }
    hidden, heads = sizes["hidden"], sizes["heads"]
    grouped = bool(values.get("group_query_attention"))
    rope = values.get("position_embedding_type") == "rope" or bool(values.get("use_rotary_position_embeddings"))
    none = values.get("position_embedding_type") == "none"
    has_positions = values.get("add_position_embedding", True) and not (rope or none)
    swiglu = bool(values.get("swiglu"))
    bias = bool(values.get("add_bias_linear", not values.get("disable_bias_linear", False)))
    rmsnorm = values.get("normalization", "LayerNorm") == "RMSNorm"
    same["norm_offset"] |= bool(values.get(ZERO_CENTERED))  # Megatron-core's spelling of this option
    same |= mixture_of(values, sizes["layers"], where)
    if rmsnorm and same["norm_offset"]:
        raise CheckpointError(f"{where}: args.{ZERO_CENTERED} with RMSNorm: only LayerNorm's weights may count from 0")
    return ModelConfig(
        **sizes,
        **same,
        family="llama" if rmsnorm and swiglu and rope else "gpt",
        kv_heads=number("num_query_groups") if grouped else heads,
        head_dim=number("kv_channels", hidden // heads),
        ffn=number("ffn_hidden_size", 4 * hidden),
        vocab=vocab,
        vocab_multiple=number("make_vocab_size_divisible_by", 128),
        position="rope" if rope else "learned" if has_positions else "none",
        rope_interpolation=decimal("rotary_seq_len_interpolation_factor", 1.0),
        rope_scaling="llama3" if values.get("use_rope_scaling") else "none",
        norm="rmsnorm" if rmsnorm else "layernorm",
        norm_eps=decimal("norm_epsilon", decimal("layernorm_epsilon", 1e-5)),
        activation=_activation(values, swiglu, bias),
        bias=bias,
        qkv_bias=bias or bool(values.get("add_qkv_bias")),
        tied=not values.get("untie_embeddings_and_output_weights", False),
        mtp_layers=number("mtp_num_layers") if values.get("mtp_num_layers") else 0,
        mtp_loss=decimal("mtp_loss_scaling_factor", 0.1),
    )


def _check_unchanged(values: Mapping[str, object], where: str) -> None:
    """Check that the project supports the described model. Errors: CheckpointError naming an argument with an
    unsupported value."""
    for name, valid in UNCHANGED.items():
        if values.get(name, valid[0]) not in valid:
            raise CheckpointError(f"{where}: args.{name} {values[name]!r} (valid: {', '.join(map(repr, valid))})")


def _decimal(values: Mapping[str, object], where: str, name: str, otherwise: float) -> float:
    value = values.get(name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < sys.float_info.max:
        raise CheckpointError(f"{where}: args.{name} {value!r:.40}: must be a finite number")
    return float(value)


def _activation(
    values: Mapping[str, object], swiglu: bool, bias: bool
) -> Literal["gelu_tanh", "gelu", "swiglu", "relu2"]:
    """The activation function. Megatron's fused gelu, which requires biases, uses the tanh approximation; its unfused
    gelu is exact (erf)."""
    if swiglu:
        return "swiglu"
    if values.get("squared_relu"):
        return "relu2"
    fused = values.get("bias_gelu_fusion", True) and bias
    return "gelu_tanh" if fused or values.get("openai_gelu") else "gelu"


def arguments_of(
    options: ModelConfig, tp: int, pp: int, *, tokenizer: str | None = None, core: bool = False
) -> dict[str, object]:
    """Return the arguments that Megatron's loaders read from a checkpoint.

    tokenizer: the value of --tokenizer-type. core: whether to use the spellings of Megatron-core 0.18 instead of those
    of Megatron-LM in 2023.
    Errors: CheckpointError naming an option that Megatron-LM does not have.
    """
    model = architecture(options)
    if model.input.sinusoid_from is not None:
        raise CheckpointError("--position sinusoidal: Megatron-LM has only learned, rope, none")
    arguments = {
        **_size_arguments(model, options.rope_fraction),
        **_position_arguments(model, core),
        **_layer_arguments(model, core),
        **({"ffn_hidden_size": options.ffn} if options.experts else {}),
        **mixture_arguments(options),
        **_prediction_arguments(options),
        "untie_embeddings_and_output_weights": model.output.words is not None and not model.tied,
        "apply_query_key_layer_scaling": False,
        "make_vocab_size_divisible_by": model.input.vocab_multiple,
        "padded_vocab_size": model.input.rows(tp),
        "true_vocab_size": model.input.vocab,  # ignored by Megatron's loaders, read by mega's loader
        "tokenizer_type": tokenizer or TOKENIZER,
        "data_parallel_random_init": False,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "consumed_valid_samples": 0,
    }
    unstated = FAMILY_OPTIONS if model.family in FAMILIES else RETRIEVER_OPTIONS if options.retriever else ()
    check_round_trip(options, model_from_arguments(arguments, model.input.vocab, "args"), "Megatron-LM", unstated)
    return arguments


FAMILY_OPTIONS = (
    *("family", "decoder_layers", "norm_placement", "head", "head_activation", "binary_head", "classes"),
    *("token_types", "memory_padding"),
)
"""Options of BERT and T5 that have no argument in Megatron; families.py derives these options from tensors, or checks
them."""


RETRIEVER_OPTIONS = tuple(field.name for field in dataclasses.fields(RetrieverOptions))
"""Options of a retriever; families.py writes the corresponding arguments."""


TOKENIZER = "NullTokenizer"
"""The tokenizer type that is written if none is known. Megatron's converters stop if the type is missing, and
NullTokenizer, which reads ids instead of text, is the only type that does not imply a text tokenizer. If --vocab-file
is given, Megatron compares the type with the flag, so the user must then record the type with --tokenizer-type."""


def tokenizer_of(values: Mapping[str, object]) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Return plain state that keeps the tokenizer type of Megatron's arguments for a later export, and a message that
    names the tokenizer, whose files are not part of a Megatron checkpoint. Both are empty for NullTokenizer.

    >>> tokenizer_of({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "a/b.model"})[0]
    {'megatron_tokenizer': 'Llama2Tokenizer'}
    """
    kind = values.get("tokenizer_type")
    if not isinstance(kind, str) or kind == TOKENIZER:
        return {}, ()
    flags = {f"--{name.replace('_', '-')}": values.get(name) for name in TOKENIZER_FILES}
    words = [f"--tokenizer-type {kind}", *(f"{flag} {file}" for flag, file in flags.items() if isinstance(file, str))]
    note = f"tokenizer: not in the checkpoint, which was trained with {' '.join(words)}"
    spelled = entries()["tokenizer"].option.megatron["--tokenizer-type"]
    names = {*TOKENIZERS, *(spelled.values if isinstance(spelled, Renamed) else ())}
    advice = "give these to the runs that start from it" if kind in names else "mega has no such type"
    return {"megatron_tokenizer": kind}, (f"{note}; {advice}",)


def _size_arguments(model: Architecture, rope_fraction: float) -> dict[str, object]:
    """Return the values of the Megatron arguments that `SIZES` and `SAME` list."""
    block, rope = model.block, model.block.attention.rope
    scaling = None if rope is None or not isinstance(rope.scaling, RopeScaling) else rope.scaling
    return {
        "num_layers": len(model.stacks[0].layers),
        "hidden_size": model.hidden,
        "num_attention_heads": block.attention.heads,
        "max_position_embeddings": model.positions,
        "rotary_base": SAME["rope_base"][1] if rope is None else rope.base,
        "rotary_percent": rope_fraction,
        "rope_scaling_factor": SAME["rope_scaling_factor"][1] if scaling is None else scaling.factor,
        "hidden_dropout": model.input.dropout,
        "attention_dropout": block.attention.dropout,
        "init_method_std": model.init_std,
        "apply_layernorm_1p": block.norm.offset,
        "qk_layernorm": block.attention.q_norm is not None,
        "apply_residual_connection_post_layernorm": block.branches[0].onto == "normed",
    }


def _prediction_arguments(options: ModelConfig) -> dict[str, object]:
    """Megatron-core's arguments for multi-token prediction."""
    if not options.mtp_layers:
        return {}
    return {"mtp_num_layers": options.mtp_layers, "mtp_loss_scaling_factor": options.mtp_loss}


def _position_arguments(model: Architecture, core: bool) -> dict[str, object]:
    """Megatron's arguments for positions. With rope, command lines of 2023 contained --no-position-embedding;
    Megatron-core requires `add_position_embedding` to have its default value, True."""
    rope, has_positions = model.block.attention.rope, model.input.learned_positions > 0
    kind = "rope" if rope else "learned_absolute" if has_positions or not core else "none"
    return {
        "position_embedding_type": kind,
        "add_position_embedding": has_positions or core,
        "use_rotary_position_embeddings": rope is not None,
        "rotary_seq_len_interpolation_factor": None if rope is None or rope.interpolation == 1 else rope.interpolation,
        "use_rope_scaling": rope is not None and rope.scaling is not None,
    }


def _layer_arguments(model: Architecture, core: bool) -> dict[str, object]:
    attention, feed_forward, norm = model.block.attention, model.block.feed_forward, model.block.norm
    grouped, tanh = attention.kv_heads != attention.heads, feed_forward.activation == "gelu_tanh"
    return {
        "encoder_num_layers": len(model.stacks[0].layers),
        "ffn_hidden_size": feed_forward.width,
        "group_query_attention": grouped,
        "num_query_groups": attention.kv_heads if core or grouped else 1,
        "kv_channels": attention.head_dim,
        "seq_length": model.positions,
        "normalization": "RMSNorm" if norm.kind == "rmsnorm" else "LayerNorm",
        "norm_epsilon": norm.eps,
        "layernorm_epsilon": norm.eps,
        ZERO_CENTERED: norm.offset,
        "swiglu": feed_forward.gated,
        "squared_relu": feed_forward.activation == "relu2",
        "openai_gelu": tanh and not feed_forward.bias,
        "bias_gelu_fusion": tanh and feed_forward.bias,
        "add_bias_linear": feed_forward.bias,
        "disable_bias_linear": not feed_forward.bias,
        "add_qkv_bias": attention.qkv_bias and (core or not feed_forward.bias),
    }


def core_flags(arguments: Mapping[str, object]) -> list[str]:
    """Return the flags with which Megatron-core 0.18 builds the model. arguments: the result of `arguments_of`.

    The flags include every argument that Megatron-core compares with the checkpoint, and every argument whose default
    would produce a different model.
    """
    rope, grouped = bool(arguments["use_rotary_position_embeddings"]), bool(arguments["group_query_attention"])
    linear, scaled = arguments["rotary_seq_len_interpolation_factor"] is not None, bool(arguments["use_rope_scaling"])
    names = [
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size"),
        *("ffn_hidden_size", "num_attention_heads", "kv_channels", *(["num_query_groups"] * grouped)),
        *("max_position_embeddings", "position_embedding_type", *(["rotary_base", "rotary_percent"] * rope)),
        *(["rotary_seq_len_interpolation_factor"] * linear),
        *(["rope_scaling_factor"] * scaled),
        *(name for name in ("mtp_num_layers", "mtp_loss_scaling_factor") if name in arguments),
        *("normalization", "norm_epsilon", "attention_dropout", "hidden_dropout", "make_vocab_size_divisible_by"),
        *("padded_vocab_size", "tokenizer_type"),  # without padded_vocab_size, Megatron-core pads differently
    ]
    names += ["vocab_size"] if arguments["tokenizer_type"] == TOKENIZER else []
    arguments = {"vocab_size": arguments["true_vocab_size"], **arguments}
    short = {"rotary_base", "norm_epsilon", "attention_dropout", "hidden_dropout"}
    values = {name: f"{arguments[name]:g}" if name in short else arguments[name] for name in names}
    bias = arguments["add_bias_linear"]
    erf = not (arguments["bias_gelu_fusion"] or arguments["swiglu"] or arguments["squared_relu"])
    switches = {
        "bf16": arguments.get("bf16"),
        "fp16": arguments.get("fp16"),
        "group_query_attention": grouped,
        "use_rope_scaling": scaled,
        "swiglu": arguments["swiglu"],
        "squared_relu": arguments["squared_relu"],
        "openai_gelu": arguments["openai_gelu"],
        "no_bias_gelu_fusion": erf and bias,
        "disable_bias_linear": not bias,
        "add_qkv_bias": arguments["add_qkv_bias"] and not bias,
        "untie_embeddings_and_output_weights": arguments["untie_embeddings_and_output_weights"],
        "qk_layernorm": arguments["qk_layernorm"],
        "apply_layernorm_1p": arguments["apply_layernorm_1p"],
        "apply_residual_connection_post_layernorm": arguments["apply_residual_connection_post_layernorm"],
    }
    flags = [f"{_flag(name)} {value}" for name, value in values.items()]
    return [*flags, *(_flag(name) for name, is_set in switches.items() if is_set), *mixture_flags(arguments)]


def _flag(name: str) -> str:
    """Return the command-line flag for an argument.

    >>> _flag("num_layers")
    '--num-layers'
    """
    return "--" + name.replace("_", "-")


def padding_note(tokens: int, rows: int) -> tuple[str, ...]:
    """A message about padding in an embedding table; empty if the table has no padding. rows: number of rows written.
    tokens: number of tokens."""
    if rows == tokens:
        return ()
    return (
        f"vocabulary: padded from {tokens:,} to {rows:,} rows by copies of the last token's, and their moments; "
        "Megatron-LM's softmax counts them, so its loss is higher than it was here, and not what it was in a tree "
        "whose padding was left out (read it without --true-vocab-size to keep that)",
    )
