"""BERT in Hugging Face's form: "bert" with norms after each branch, and "megatron-bert" with norms before.

Knows config.json and tensors' names, no files. Which heads a model has is read off its tensors where they are known:
released files hold more than their `architectures` says. Source: transformers' BertForPreTraining, BertForMaskedLM,
BertForSequenceClassification, BertModel, and MegatronBert's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypedDict

from mega.core.architecture import Architecture, architecture, inventory
from mega.core.architecture.model import Output, Rows
from mega.core.checkpoint.forms.keys import check_kept, number_in, only, translated, whole_in
from mega.core.checkpoint.forms.mapping import Table, Target, whole
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

TYPES = {"bert": "post", "megatron-bert": "pre"}
"""`model_type` -> where norms are."""

PREFIX = "bert."
"""In front of every name but the heads'; a model without heads has none."""

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
HEADS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
    "binary_head": "cls.seq_relationship",
    "classification_head": "classifier",
    "multichoice_head": "classifier",
}
"""Our modules -> theirs."""

CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice")

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Ours -> config.json's `hidden_act`, which is the head's too."""

ENDINGS = {".weight": ".gamma", ".bias": ".beta"}
"""What the norms of the first releases are called."""

REPEATED = {
    "model.embed_tokens.weight": "cls.predictions.decoder.weight",
    "lm_head.bias": "cls.predictions.decoder.bias",
}
"""Ours -> what a folder may hold once more."""


def bert_name(name: str, placement: str, prefix: str = PREFIX) -> str:
    """Hugging Face's name of a logical tensor.

    >>> bert_name("model.layers.3.post_attention_layernorm.bias", "post"), bert_name("lm_head.bias", "pre")
    ('bert.encoder.layer.3.attention.output.LayerNorm.bias', 'cls.predictions.bias')
    """
    module = name.rpartition(".")[0]
    if module in HEADS:
        return translated(name, HEADS, "")
    return prefix + translated(name, NAMES | NORMS[placement], "encoder.layer.{}.")


def model_from_config(config: Mapping[str, Json], where: str, found: Collection[str] = ()) -> ModelConfig:
    """The resolved model section that a config.json describes. found: names of the tensors along with it.

    Errors: CheckpointError naming the key.
    """
    for key in ("is_decoder", "add_cross_attention"):
        only(config, key, (False, None), where)
    only(config, "tie_word_embeddings", (True, None), where)
    only(config, "position_embedding_type", ("absolute", None), where)
    theirs = config.get("hidden_act", "gelu")
    activation = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(str(theirs))
    if activation is None:
        raise CheckpointError(f"{where}: hidden_act {theirs!r} (valid: gelu, gelu_new, gelu_pytorch_tanh)")
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
        positions=whole_in(config, "max_position_embeddings", where),
        norm_placement="post" if TYPES[str(config["model_type"])] == "post" else "pre",
        norm_eps=number_in(config, "layer_norm_eps", where, 1e-12),
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        head_activation="gelu" if activation == "gelu" else "gelu_tanh",
        qkv_bias=True,
        token_types=whole_in(config, "type_vocab_size", where, 2),
        hidden_dropout=dropout,
        attention_dropout=number_in(config, "attention_probs_dropout_prob", where, 0.1),
        init_std=number_in(config, "initializer_range", where, 0.02),
        **_heads(config, where, found),
    )


class _Heads(TypedDict, total=False):
    """Options of a model's heads."""

    head: Literal["lm", "classification", "choice", "none"]
    classes: int
    binary_head: bool


def _heads(config: Mapping[str, Json], where: str, found: Collection[str]) -> _Heads:
    """Which heads a model has, by its tensors, else by the name of its class."""
    named = config.get("architectures")
    architecture = str(named[0]) if named and isinstance(named, list) else "BertModel"
    words = _any(found, "cls.predictions.") if found else architecture.endswith(("ForPreTraining", "ForMaskedLM"))
    classes = _any(found, "classifier.") if found else architecture.endswith(CLASSIFIERS)
    pooled = _any(found, "pooler.", PREFIX + "pooler.") if found else not architecture.endswith("ForMaskedLM")
    if words and classes:
        raise CheckpointError(
            f"{where}: its tensors are of a head for words and of a classifier; one of the two is read"
        )
    if classes and architecture.endswith("ForMultipleChoice"):
        return {"head": "choice", "classes": 4}
    if classes:
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else whole_in(config, "num_labels", where, 2)
        return {"head": "classification", "classes": count}
    # Files may hold a pooler without what judges parts by it.
    judges = pooled and (not words or not found or _any(found, "cls.seq_relationship."))
    return {"head": "lm" if words else "none", "binary_head": judges}


def _any(found: Collection[str], *begins: str) -> bool:
    return any(name.startswith(begins) for name in found)


def config_from_model(options: ModelConfig, dtype: str) -> dict[str, Json]:
    """A config.json for transformers. Errors: CheckpointError naming the option that its BERT does not have."""
    model = architecture(options)
    if not model.input.types:
        raise CheckpointError("token_types 0: Hugging Face's BERT has at least 1, which tokens always have a row of")
    config = _config(model, dtype)
    check_kept(options, model_from_config(config, "config.json"), "Hugging Face's BERT", unsaid=OF_HEADS)
    return config


OF_HEADS = ("head", "head_activation", "binary_head", "classes")
"""Options that are read off a folder's tensors, or reported as lost (`losses`)."""


def _config(model: Architecture, dtype: str) -> dict[str, Json]:
    attention, feed_forward = model.block.attention, model.block.feed_forward
    mtype = next(name for name, placement in TYPES.items() if placement == model.block.norm_placement)
    return {
        "architectures": [{"bert": "Bert", "megatron-bert": "MegatronBert"}[mtype] + _class(model.output)],
        "model_type": mtype,
        "hidden_size": model.hidden,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.heads,
        "intermediate_size": feed_forward.width,
        "max_position_embeddings": model.positions,
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
    """How the name of transformers' class ends."""
    if output.words is not None:
        return "ForPreTraining" if output.rows else "ForMaskedLM"
    return "Model" if output.rows is None else CLASSIFIERS[output.rows.choices > 1]


def _labels(rows: Rows | None) -> dict[str, Json]:
    """What transformers counts classes by; it takes 2 where nothing is said."""
    if rows is None or rows.choices > 1 or rows.classes == 2:
        return {}
    labels = {str(number): f"LABEL_{number}" for number in range(rows.classes)}
    return {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}


def losses(options: ModelConfig) -> tuple[str, ...]:
    """Lines on what Hugging Face's form has no place for."""
    model = architecture(options)
    words, theirs = model.output.words, model.block.feed_forward.activation
    if words is None or words.transform is None or words.transform.activation == theirs:
        return ()
    return (
        f"head_activation {words.transform.activation}: Hugging Face's BERT has one activation, here the blocks' "
        f"{ACTIVATIONS[theirs]}; logits differ by their difference, below 0.0005 of an activation",
    )


def table(options: ModelConfig, found: Collection[str] = ()) -> Table:
    """`weights/<name>` of every logical tensor from Hugging Face's. found: names in a folder."""
    model = architecture(options)
    headed = model.output.words is not None or model.output.rows is not None
    prefix = PREFIX if headed or any(name.startswith(PREFIX) for name in found) else ""
    targets, copies = [], []
    for tensor in inventory(options):
        theirs = bert_name(tensor.name, model.block.norm_placement, prefix)
        for ending, old in ENDINGS.items():
            if theirs not in found and (former := theirs.removesuffix(ending) + old) in found:
                theirs = former
        target = Target(f"weights/{tensor.name}", tensor.shape, (whole(tensor.shape, theirs),))
        targets.append(target)
        if REPEATED.get(tensor.name) in found:
            copies.append((target.name, whole(tensor.shape, REPEATED[tensor.name])))
    ignored = frozenset(name for name in found if name.endswith("embeddings.position_ids"))
    return Table(tuple(targets), copies=tuple(copies), ignored=ignored)
