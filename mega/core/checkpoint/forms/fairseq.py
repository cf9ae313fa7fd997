"""Read fairseq's Megatron-11b, as released: `model-model_part-N.pt`, one file per tensor rank.

The files use fairseq's names, in which `final_layer_norm` is the norm before the feed-forward layer. Query, key and
value are separate matrices, and positions are computed, not learned. Source: fairseq/examples/megatron_11b and the arch
`transformer_lm_megatron`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from mega.core.architecture import inventory
from mega.core.checkpoint.forms.foreign import TorchSource, check_ranks_differ, inside, named_tensors
from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
from mega.core.checkpoint.forms.keys import translated, whole_in
from mega.core.checkpoint.forms.mapping import Fragment, Table, Target, gathered, whole
from mega.core.checkpoint.forms.pickles import Arguments, read_pickled
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import CheckpointError, Tensors
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig

NAMES = {
    "model.embed_tokens": "embed_tokens",
    "model.norm": "layer_norm",
    "input_layernorm": "self_attn_layer_norm",
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
"""The project's module -> fairseq's module, without the prefix `decoder.`."""

PARTS = "model-model_part-*.pt"
OUTPUT = "decoder.output_projection.weight"
_IGNORED = ("decoder.version", "decoder.embed_positions._float_tensor")

Activation = Literal["gelu_tanh", "gelu"]
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""Name of an activation in fairseq -> name in the project. `gelu_accurate` is the tanh approximation."""


REQUIRED = {
    "decoder_learned_pos": False,
    "decoder_normalize_before": True,
    "share_decoder_input_output_embed": True,
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "layernorm_embedding": False,
}
"""Options that change a model's computation but not its tensors -> their only valid values."""


def fairseq_name(name: str) -> str:
    """Return fairseq's name for a logical tensor.

    >>> fairseq_name("model.layers.3.post_attention_layernorm.bias")
    'decoder.layers.3.final_layer_norm.bias'
    """
    return "decoder." + translated(name, NAMES, "layers.{}.")


def recognise(path: Path) -> bool:
    return any(path.glob(PARTS))


def tokenizer(files: Attachments) -> str | None:
    return "FairseqTokenizer" if {"dict.txt", "vocab.json", "merges.txt"} <= files.keys() else None


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    """Open a released model. Tensor names have the format `N/name`, where N is the number of the file."""
    parts = sorted(part.name for part in path.glob(PARTS))
    names = [f"model-model_part-{number}.pt" for number in range(len(parts))]
    if set(parts) != set(names):
        raise CheckpointError(f"{path}: parts {parts}, not {names}")
    tensors: dict[str, torch.Tensor] = {}
    training_options: Mapping[str, object] = {}
    for number, name in enumerate(names):
        file = inside(path, name)
        content = read_pickled(file)
        if not isinstance(content, dict) or not isinstance(state := content.get("model"), dict):
            raise CheckpointError(f"{file}: holds no dict of the model's tensors under `model`")
        tensors |= {f"{number}/{name}": tensor for name, tensor in named_tensors(state, f"{file}: model").items()}
        if number:
            check_ranks_differ(tensors, f"{number}/", f"{number - 1}/", file)
        training_options = training_options or _options(content)
    source = TorchSource(tensors)
    model = model_from_options(training_options, source.tensors, len(names), str(path))
    check_size(model, source.tensors, str(path))
    output = any(name.endswith("/" + OUTPUT) for name in source.tensors)
    ignored = frozenset(name for name in source.tensors if name.endswith(_IGNORED))
    return OpenedForm(source, model, replace(table(model, len(names), output=output), ignored=ignored))


def _options(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of the training run: `args` in old files, `cfg["model"]` in newer files, or {} if the
    arguments were removed."""
    config = content.get("cfg")
    arguments = content.get("args") or (config.get("model") if isinstance(config, dict) else None)
    if isinstance(arguments, Arguments):
        return arguments.values
    return arguments if isinstance(arguments, dict) else {}


def model_from_options(options: Mapping[str, object], tensors: Tensors, parts: int, where: str) -> ModelConfig:
    """Return the resolved model section, derived from the tensors' shapes and from fairseq's options.

    Errors: CheckpointError naming an option that the project does not support or that contradicts the tensors.
    """
    for key, valid in REQUIRED.items():
        if options.get(key, valid) != valid:
            raise CheckpointError(f"{where}: {key} {options[key]!r} (valid: {valid})")

    def shape(name: str) -> tuple[int, int]:
        sizes = tensors.get(f"0/decoder.{name}", ((), torch.float32))[0]
        if len(sizes) != 2:
            raise CheckpointError(f"{where}: 0/decoder.{name}: is missing, or no matrix")
        return sizes[0], sizes[1]

    def share(key: str, otherwise: float) -> float:
        value = options.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise CheckpointError(f"{where}: {key} {value!r}: must be at least 0 and less than 1")
        return float(value)

    rows, hidden = shape("embed_tokens.weight")
    heads = whole_in(options, "decoder_attention_heads", where, 32)
    if hidden % heads:
        raise CheckpointError(f"{where}: decoder_attention_heads {heads}: must divide the width {hidden}")
    activation = ACTIVATIONS.get(str(options.get("activation_fn", "gelu")))
    if activation is None:
        raise CheckpointError(f"{where}: activation_fn {options['activation_fn']!r} (valid: {', '.join(ACTIVATIONS)})")
    layers = {int(match[1]) for name in tensors if (match := re.match(r"0/decoder\.layers\.(\d{1,6})\.", name))}
    if whole_in(options, "decoder_layers", where, len(layers) or 1) != len(layers) or layers != set(range(len(layers))):
        raise CheckpointError(f"{where}: decoder_layers {options.get('decoder_layers')}: the files hold {len(layers)}")
    return ModelConfig(
        family="gpt",
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=shape("layers.0.fc1.weight")[0] * parts,
        vocab=rows * parts,
        positions=whole_in(options, "max_target_positions", where, whole_in(options, "tokens_per_sample", where, 1024)),
        position="sinusoidal",
        position_offset=2,  # fairseq's positions begin after the padding id, which is 1
        embedding_scale=True,
        norm="layernorm",
        norm_eps=1e-5,
        activation=activation,
        bias=True,
        qkv_bias=True,
        tied=True,
        hidden_dropout=share("dropout", 0.1),
        attention_dropout=share("attention_dropout", 0.1),
    )


def table(model: ModelConfig, parts: int, *, output: bool) -> Table:
    """Return the table that produces `weights/<name>` for every logical tensor from the files of a release. output:
    whether the files also store the embedding as the output matrix."""
    targets: list[Target] = []
    copies: list[tuple[str, Fragment]] = []
    for tensor in inventory(model):
        name, cut = f"weights/{tensor.name}", tensor.cut()
        dim = None if cut is None else cut.dim
        sources = [f"{part}/{fairseq_name(tensor.name)}" for part in range(parts)]
        if dim is None:
            copies += [(name, whole(tensor.shape, each)) for each in sources[1:]]
        targets.append(Target(name, tensor.shape, gathered(tensor.shape, sources, dim)))
    if output:
        embedding = targets[0]
        output_parts = gathered(embedding.shape, [f"{part}/{OUTPUT}" for part in range(parts)], 0)
        copies += [(embedding.name, fragment) for fragment in output_parts]
    return Table(tuple(targets), copies=tuple(copies))
