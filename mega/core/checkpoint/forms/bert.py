"""BERT in Hugging Face's format: "bert" has a norm after each branch and "megatron-bert" a norm before each branch; in
"roberta", positions begin after the padding id and the heads' names differ.

This module handles config.json and tensor names, not files. The heads of a model are determined from tensor names where
possible, because released files contain more heads than the key `architectures` lists. Source: transformers'
BertForPreTraining, BertForMaskedLM, BertForSequenceClassification, BertModel, and MegatronBert's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from mega.core.architecture import Architecture, architecture, inventory
from mega.core.architecture.model import Output, Rows
from mega.core.checkpoint.forms.families.keys import COMMON
from mega.core.checkpoint.forms.keys import check_known, check_round_trip, number_in, only, translated, whole_in
from mega.core.checkpoint.forms.mapping import Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json


@dataclass(frozen=True)
class BertType:
    """One `model_type`."""

    classes: str
    """Prefix of transformers' class names for this `model_type`."""
    placement: Literal["post", "pre"]
    """Position of the norms: after each branch ("post") or before each branch ("pre")."""
    prefix: str
    """Prefix of all stored names except the names of heads. In a model without heads, names have no prefix."""
    heads: Mapping[str, str]
    """Name of a head's module in the project -> name of the module in transformers."""
    repeated: Mapping[str, str]
    """The project's tensor -> name of an optional second copy of the tensor in the folder."""
    offset: bool = False
    """Whether position 0 uses the embedding row pad_token_id + 1, as in RoBERTa."""


NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    "model.embed_positions": "embeddings.position_embeddings",
    "model.embed_types": "embeddings.token_type_embeddings",
    "model.embed_norm": "embeddings.LayerNorm",
    "model.norm": "encoder.ln",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "pooler.dense": "pooler.dense",
}
NORMS = {
    "post": {
        "post_attention_layernorm": "attention.output.LayerNorm",
        "post_feedforward_layernorm": "output.LayerNorm",
    },
    "pre": {"input_layernorm": "attention.ln", "post_attention_layernorm": "ln"},
}
_HEADS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
    "binary_head": "cls.seq_relationship",
    "classification_head": "classifier",
    "multichoice_head": "classifier",
}
"""Module name in the project -> module name in transformers."""

_ROBERTA_HEADS = {
    "lm_head.dense": "lm_head.dense",
    "lm_head.norm": "lm_head.layer_norm",
    "lm_head": "lm_head",
    "pooler.dense": "classifier.dense",
    "classification_head": "classifier.out_proj",
}
KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
    *("layer_norm_eps", "tie_word_embeddings", "position_embedding_type"),
)
"""Keys of config.json that are read, in addition to the keys that all model types share."""

WITHOUT_EFFECT = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    *("pooler_type", "output_past"),
)
"""Keys that occur in released config.json files and that transformers ignores."""

CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice")

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
"""The project's activation -> `hidden_act` in config.json, which also applies to the head."""

ENDINGS = {".weight": ".gamma", ".bias": ".beta"}
"""Suffix of a norm's tensor -> its suffix in the first releases."""


def _repeated(decoder: str) -> Mapping[str, str]:
    return {"model.embed_tokens.weight": f"{decoder}.weight", "lm_head.bias": f"{decoder}.bias"}


TYPES: Mapping[str, BertType] = {
    "bert": BertType("Bert", "post", "bert.", _HEADS, _repeated("cls.predictions.decoder")),
    "megatron-bert": BertType("MegatronBert", "pre", "bert.", _HEADS, _repeated("cls.predictions.decoder")),
    "roberta": BertType("Roberta", "post", "roberta.", _ROBERTA_HEADS, _repeated("lm_head.decoder"), offset=True),
}


def bert_name(name: str, kind: str, prefix: str | None = None, *, pools: bool = True) -> str:
    """Return Hugging Face's name for a logical tensor. kind: a `model_type`. pools: whether the pooler belongs to the
    base model rather than to the classification head.

    >>> bert_name("model.layers.3.post_attention_layernorm.bias", "bert"), bert_name("lm_head.bias", "megatron-bert")
    ('bert.encoder.layer.3.attention.output.LayerNorm.bias', 'cls.predictions.bias')
    """
    bert_type = TYPES[kind]
    module = name.rpartition(".")[0]
    if module in bert_type.heads and not (module == "pooler.dense" and pools):
        return translated(name, bert_type.heads, "")
    prefix = bert_type.prefix if prefix is None else prefix
    return prefix + translated(name, NAMES | NORMS[bert_type.placement], "encoder.layer.{}.")


def _kind(model: Architecture) -> str:
    """Return the `model_type` of a model."""
    features = (model.block.norm_placement, model.input.learned_from > 0)
    return next((name for name, each in TYPES.items() if (each.placement, each.offset) == features), "bert")


def model_from_config(config: Mapping[str, Json], where: str, names: Collection[str] = ()) -> ModelConfig:
    """Return the resolved model section that config.json describes. names: names of the folder's tensors.

    Errors: CheckpointError naming the key.
    """
    check_known(config, (*COMMON, *KEYS, *WITHOUT_EFFECT), where)
    only(config, "problem_type", ("single_label_classification", None), where)
    for key in ("is_decoder", "add_cross_attention"):
        only(config, key, (False, None), where)
    only(config, "tie_word_embeddings", (True, None), where)
    only(config, "position_embedding_type", ("absolute", None), where)
    kind = TYPES[str(config["model_type"])]
    # In RoBERTa, position 0 uses the embedding row pad_token_id + 1.
    offset = whole_in(config, "pad_token_id", where, 1) + 1 if kind.offset else 0
    positions = whole_in(config, "max_position_embeddings", where) - offset
    if positions < 1:
        raise CheckpointError(f"{where}: max_position_embeddings: must be more than pad_token_id and 1")
    hidden_act = config.get("hidden_act", "gelu")
    activation = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(str(hidden_act))
    if activation is None:
        raise CheckpointError(f"{where}: hidden_act {hidden_act!r} (valid: gelu, gelu_new, gelu_pytorch_tanh)")
    hidden, heads = whole_in(config, "hidden_size", where), whole_in(config, "num_attention_heads", where)
    dropout = number_in(config, "hidden_dropout_prob", where, 0.1)
    only(config, "classifier_dropout", (None, dropout), where)
    return ModelConfig(
        family="bert",
        layers=whole_in(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=whole_in(config, "intermediate_size", where),
        vocab=whole_in(config, "vocab_size", where),
        positions=positions,
        position_offset=offset,
        norm_placement=kind.placement,
        norm_eps=number_in(config, "layer_norm_eps", where, 1e-12),
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        head_activation="gelu" if activation == "gelu" or kind.offset else "gelu_tanh",
        qkv_bias=True,
        token_types=whole_in(config, "type_vocab_size", where, 2),
        hidden_dropout=dropout,
        attention_dropout=number_in(config, "attention_probs_dropout_prob", where, 0.1),
        init_std=number_in(config, "initializer_range", where, 0.02),
        **_heads(config, where, names),
    )


class _Heads(TypedDict, total=False):
    """Options for a model's heads."""

    head: Literal["lm", "classification", "choice", "none"]
    classes: int
    binary_head: bool


def _heads(config: Mapping[str, Json], where: str, names: Collection[str]) -> _Heads:
    """Derive the options for a model's heads from the tensor names, or from `architectures` if the names are
    unknown."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if architectures and isinstance(architectures, list) else "BertModel"
    kind = TYPES[str(config["model_type"])]
    of_words = architecture.endswith(("ForPreTraining", "ForMaskedLM"))
    words = _any(names, "cls.predictions.", "lm_head.") if names else of_words
    classes = _any(names, "classifier.") if names else architecture.endswith(CLASSIFIERS)
    pooled = _any(names, "pooler.", kind.prefix + "pooler.") if names else not architecture.endswith("ForMaskedLM")
    if words and classes:
        raise CheckpointError(
            f"{where}: its tensors are of a head for words and of a classifier; one of the two is read"
        )
    if classes and kind.offset and names and pooled:
        raise CheckpointError(f"{where}: {architecture}: only RobertaForSequenceClassification's head is read")
    of_pairs_alone = _any(names, "cls.seq_relationship.") and not words
    of_tokens = classes and not (_any(names, "classifier.dense.") if kind.offset else pooled)
    if names and (of_pairs_alone or of_tokens or _any(names, "qa_outputs.")):
        readable = ("ForPreTraining", "ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice", "Model")
        raise CheckpointError(f"{where}: {architecture}: its head is not read; valid: {', '.join(readable)}")
    if classes and architecture.endswith("ForMultipleChoice"):
        return {"head": "choice", "classes": 4}
    if classes:
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else whole_in(config, "num_labels", where, 2)
        return {"head": "classification", "classes": count}
    # Files may contain a pooler without the head that classifies sentence pairs.
    judges = pooled and (not words or not names or _any(names, "cls.seq_relationship."))
    return {"head": "lm" if words else "none", "binary_head": judges}


def _any(names: Collection[str], *begins: str) -> bool:
    return any(name.startswith(begins) for name in names)


def config_from_model(options: ModelConfig, dtype: str) -> dict[str, Json]:
    """Return the content of config.json for transformers. Errors: CheckpointError naming an option that transformers'
    BERT does not support."""
    model = architecture(options)
    if not model.input.types:
        raise CheckpointError("token_types 0: Hugging Face's BERT has at least 1, which tokens always have a row of")
    rows, kind = model.output.rows, TYPES[_kind(model)]
    if rows is not None and rows.name not in kind.heads:
        raise CheckpointError(f"{rows.name}: Hugging Face's {kind.classes} has no such head")
    config = _config(model, dtype)
    check_round_trip(options, model_from_config(config, "config.json"), "Hugging Face's BERT", unsupported=HEAD_OPTIONS)
    return config


HEAD_OPTIONS = ("head", "head_activation", "binary_head", "classes")
"""Options that config.json does not contain and that may therefore change in an export. These options are derived from
the tensors when a folder is read, or reported as lost (`losses`)."""


def _config(model: Architecture, dtype: str) -> dict[str, Json]:
    attention, feed_forward = model.block.attention, model.block.feed_forward
    mtype = _kind(model)
    offset = model.input.learned_from
    return {
        "architectures": [TYPES[mtype].classes + _class(model.output)],
        "model_type": mtype,
        "hidden_size": model.hidden,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.heads,
        "intermediate_size": feed_forward.width,
        "max_position_embeddings": model.positions + offset,
        **({"pad_token_id": offset - 1} if offset else {}),
        "vocab_size": model.input.vocab,
        "type_vocab_size": model.input.types,
        "hidden_act": ACTIVATIONS.get(feed_forward.activation, "gelu"),
        "layer_norm_eps": model.block.norm.eps,
        "hidden_dropout_prob": model.input.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        "initializer_range": model.init_std,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        **_labels(model.output.rows),
    }


def _class(output: Output) -> str:
    """Return the suffix of the class name in transformers for a model with these heads."""
    if output.words is not None:
        return "ForPreTraining" if output.rows else "ForMaskedLM"
    return "Model" if output.rows is None else CLASSIFIERS[output.rows.choices > 1]


def _labels(rows: Rows | None) -> dict[str, Json]:
    """Return the keys of config.json for the number of classes; {} for two classes, transformers' default."""
    if rows is None or rows.choices > 1 or rows.classes == 2:
        return {}
    labels = {str(number): f"LABEL_{number}" for number in range(rows.classes)}
    return {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}


def losses(options: ModelConfig) -> tuple[str, ...]:
    """Messages about settings that Hugging Face's format cannot express. Activations without a counterpart are refused
    by `config_from_model`."""
    model = architecture(options)
    words, activation = model.output.words, model.block.feed_forward.activation
    if words is None or words.transform is None or words.transform.activation == activation:
        return ()
    if activation not in ACTIVATIONS:
        return ()
    return (
        f"head_activation {words.transform.activation}: Hugging Face's BERT has one activation, here the blocks' "
        f"{ACTIVATIONS[activation]}; logits differ by their difference, below 0.0005 of an activation",
    )


def table(options: ModelConfig, names: Collection[str] = ()) -> Table:
    """Return the table that produces `weights/<name>` for every logical tensor. names: names of the folder's
    tensors."""
    model = architecture(options)
    headed = model.output.words is not None or model.output.rows is not None
    kind = _kind(model)
    prefix = TYPES[kind].prefix if headed or any(name.startswith(TYPES[kind].prefix) for name in names) else ""
    pools = model.output.rows is None or not TYPES[kind].offset
    targets, copies = [], []
    for tensor in inventory(options):
        name = bert_name(tensor.name, kind, prefix, pools=pools)
        for ending, old in ENDINGS.items():
            if name not in names and (former := name.removesuffix(ending) + old) in names:
                name = former
        target = Target(f"weights/{tensor.name}", tensor.shape, (whole(tensor.shape, name),))
        targets.append(target)
        repeated_name = TYPES[kind].repeated.get(tensor.name)
        if repeated_name is not None and repeated_name in names:
            copies.append((target.name, whole(tensor.shape, repeated_name)))
    ignored = frozenset(name for name in names if name.endswith("embeddings.position_ids"))
    return Table(tuple(targets), copies=tuple(copies), ignored=ignored)
