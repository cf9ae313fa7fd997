"""Llama as Meta releases it: params.json and consolidated.NN.pth, one file for each of its tensor ranks.

Names differ, matrices are cut over the files, and query and key rows stand in the order of Meta's rotary
embedding, which turns neighbours (2i, 2i + 1) where ours turns halves (i, i + H/2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.forms.foreign import TorchSource, flat_tensors, inside, read_json
from mega.core.checkpoint.forms.huggingface import check_llama, number_in, whole_in
from mega.core.checkpoint.forms.mapping import Fragment, Source, Table, Target, Tensors, assemble, beside, stacked
from mega.core.checkpoint.own.pieces import Box, CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, inventory

POSITIONS = 4096
"""params.json does not say for how many positions a model was trained; Llama 2's number."""

SCALED_POSITIONS = 131072
"""The same where rotary positions are scaled: Llama 3.1's and 3.2's number."""

SMALL_STRETCH = 32.0
"""Factor of scaled positions in Llama 3.2, whose embeddings are tied, where params.json has none; 3.1's is 8."""

NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}

_BUFFERS = ("rope.freqs", "attention.mask", "freqs_cos", "freqs_sin")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def meta_name(name: str) -> str:
    """Meta's name of a logical tensor.

    >>> meta_name("model.layers.3.self_attn.q_proj.weight")
    'layers.3.attention.wq.weight'
    """
    match = _LAYER.fullmatch(name)
    return f"layers.{match[1]}.{NAMES[match[2]]}" if match else NAMES[name]


def rotary_rows(heads: range, width: int, first: int = 0) -> list[range]:
    """Meta's rows of query or key heads in our order, as runs: of each head its even rows, then its odd ones.

    width: rows of a head. first: Meta's row of the first head.

    >>> [list(run) for run in rotary_rows(range(2), 4)]
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    return [
        range(first + number * width + odd, first + (number + 1) * width, 2)
        for number in range(len(heads))
        for odd in (0, 1)
    ]


class LastTensor:
    """A source that keeps the tensor it read last, for tables that take it in many small runs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: tuple[str, torch.Tensor] | None = None

    @property
    def tensors(self) -> Tensors:
        return self._source.tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            shape = self.tensors[name][0]
            self._last = (name, self._source.read(name, Box((0,) * len(shape), shape)))
        return self._last[1][box.inside(Box((0,) * len(box.start), box.size))]


def open_folder(folder: Path) -> tuple[Source, ModelConfig, Table]:
    """The tensors of a folder (named `part/name`), the model that they are, and where each element goes."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    names = [f"consolidated.{number:02d}.pth" for number in range(len(paths))]
    if [path.name for path in paths] != names:
        raise CheckpointError(f"{folder}: parts {[path.name for path in paths]}, not {names}")
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        tensors |= flat_tensors(inside(folder, name), f"{number}/")
    source, params = TorchSource(tensors), folder / "params.json"
    return source, *understood(source, read_json(params), len(paths), str(params))


def understood(source: Source, params: Mapping[str, Any], parts: int, where: str) -> tuple[ModelConfig, Table]:
    """The model that tensors in Meta's names are, tied where its two tables are equal, and where each element goes.

    where: names the origin of `params` in errors.
    """
    model = model_from_params(params, source.tensors, parts, where)
    tied = replace(model, tied=True)
    if params.get("use_scaled_rope") and "rope_scaling_factor" not in params:
        tied = replace(tied, rope_scaling_factor=SMALL_STRETCH)
    if "0/output.weight" not in source.tensors:
        return tied, import_table(tied, source.tensors, parts)
    untied = import_table(model, source.tensors, parts)
    made = {target.name: target for target in untied.targets}
    pair = [
        assemble(target, Box((0, 0), target.shape), source)
        for target in (made["weights/model.embed_tokens.weight"], made["weights/lm_head.weight"])
    ]
    if not torch.equal(*pair):
        return model, untied
    outputs = frozenset(name for name in source.tensors if name.endswith("/output.weight"))
    table = import_table(tied, source.tensors, parts)
    return tied, replace(table, ignored=table.ignored | outputs)


def model_from_params(params: Mapping[str, Any], tensors: Tensors, parts: int, where: str) -> ModelConfig:
    """The resolved model section. Widths that params.json only implies are read off the tensors.

    Errors: CheckpointError naming a key that has no counterpart or does not fit the tensors.
    """

    def rows(name: str) -> int:
        if f"0/{name}" not in tensors:
            raise CheckpointError(f"{where}: the weights hold no {name}")
        return tensors[f"0/{name}"][0][0]

    hidden, heads = whole_in(params, "dim", where), whole_in(params, "n_heads", where)
    cut_rows = tensors.get("0/tok_embeddings.weight", ((0, 0), torch.float32))[0][1:] == (hidden,)
    vocab = rows("tok_embeddings.weight") * (parts if cut_rows else 1)
    if params.get("vocab_size", -1) not in (-1, vocab):
        raise CheckpointError(f"{where}: vocab_size {params['vocab_size']}, tok_embeddings.weight has {vocab} rows")
    scaled = bool(params.get("use_scaled_rope"))
    return ModelConfig(
        family="llama",
        layers=whole_in(params, "n_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=whole_in(params, "n_kv_heads", where, heads),
        head_dim=hidden // heads,
        ffn=_feed_forward_rows(tensors, where) * parts,
        vocab=vocab,
        positions=whole_in(params, "max_seq_len", where, _positions_unsaid(scaled)),
        position="rope",
        rope_base=number_in(params, "rope_theta", where, 10000.0),
        rope_scaling="llama3" if scaled else "none",
        rope_scaling_factor=number_in(params, "rope_scaling_factor", where, 8.0),
        norm="rmsnorm",
        norm_eps=number_in(params, "norm_eps", where, 1e-5),
        activation="swiglu",
        bias=False,
        qkv_bias=False,
        tied=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _feed_forward_rows(tensors: Tensors, where: str) -> int:
    """The width of the feed-forward layers in one part: that of most of their matrices, so that an odd one is told."""
    sizes = Counter(
        shape[1 if name.endswith("w2.weight") else 0]
        for name, (shape, _) in tensors.items()
        if "feed_forward" in name and len(shape) == 2
    )
    if not sizes:
        raise CheckpointError(f"{where}: the weights hold no layers.0.feed_forward.w1.weight")
    return sizes.most_common(1)[0][0]


def import_table(model: ModelConfig, tensors: Tensors, parts: int) -> Table:
    """`weights/<name>` of every logical tensor from the parts of a Meta folder."""
    targets, copies = [], []
    for tensor in inventory(model):
        name = meta_name(tensor.name)
        here = [f"{part}/{name}" for part in range(parts)]
        for each in here:
            if each not in tensors:
                raise CheckpointError(f"{each}: is missing")
        dim = _cut_dim(tensor, tensors[here[0]][0], parts)
        expected = tuple(n // parts if d == dim else n for d, n in enumerate(tensor.shape))
        for each in here:
            if tensors[each][0] != expected:
                raise CheckpointError(f"{each}: has shape {tensors[each][0]}, params.json implies {expected}")
        if dim is None:
            copies += [(each, here[0]) for each in here[1:]]
            here = here[:1]
        fragments = _gathered(model, tensor, here, dim)
        targets.append(Target(f"weights/{tensor.name}", tensor.shape, tensors[here[0]][1], fragments))
    ignored = frozenset(name for name in tensors if name.endswith(_BUFFERS))
    return Table(tuple(targets), copies=tuple(copies), ignored=ignored)


def export_tables(model: ModelConfig, tensors: Tensors, parts: int) -> list[Table]:
    """For each of `parts` files, its tensors made of `weights/<name>`; norms are in every file."""
    for name in ("heads", "kv_heads", "ffn", "vocab"):
        if getattr(model, name) % parts:
            raise ValueError(f"--parts {parts}: must divide {name} {getattr(model, name)}")
    tables: list[list[Target]] = [[] for _ in range(parts)]
    for tensor in inventory(model):
        names = [meta_name(tensor.name)]
        if tensor.name == "model.embed_tokens.weight" and model.tied:
            names.append("output.weight")
        source = f"weights/{tensor.name}"
        for name in names:
            dim = _export_dim(tensor, name)
            for part in range(parts):
                shape = tuple(n // parts if d == dim else n for d, n in enumerate(tensor.shape))
                fragments = _scattered(model, tensor, source, shape, dim, part)
                tables[part].append(Target(name, shape, tensors[source][1], fragments))
    return [Table(tuple(targets)) for targets in tables]


def joined(tables: Sequence[Table]) -> Table:
    """All files' targets as one table, for the proof; norms and tied tables may be used several times."""
    sources = [fragment.source for table in tables for target in table.targets for fragment in target.fragments]
    repeated = frozenset(source for source in sources if source.endswith(("norm.weight", "embed_tokens.weight")))
    return Table(tuple(target for table in tables for target in table.targets), repeats=repeated)


def params_from_model(model: ModelConfig) -> dict[str, Any]:
    """A params.json. Errors: CheckpointError naming an option that Meta's Llama does not have."""
    check_llama(model, "Meta's Llama")
    if model.qkv_bias or model.qk_norm or model.rope_interpolation != 1.0:
        raise CheckpointError("qkv_bias, qk_norm, rope_interpolation: Meta's Llama has none of them")
    stretch = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_original_positions)
    if model.rope_scaling == "llama3" and stretch != (1.0, 4.0, 8192):
        raise CheckpointError(
            f"rope_low_freq_factor, rope_high_freq_factor, rope_original_positions {stretch}: "
            "Meta's Llama has only 1, 4, 8192"
        )
    scaled = {"use_scaled_rope": True, "rope_scaling_factor": model.rope_scaling_factor}
    assert model.hidden is not None and model.heads is not None and model.ffn is not None
    if model.head_dim != model.hidden // model.heads:
        raise CheckpointError(f"head_dim {model.head_dim}: Meta's Llama has hidden / heads")
    return {
        "dim": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
        **feed_forward(model.hidden, model.ffn),
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        **(scaled if model.rope_scaling == "llama3" else {}),
    }


def losses(model: ModelConfig) -> tuple[str, ...]:
    """Lines on what a params.json cannot say of a model and its reader would take otherwise.

    Meta's loader is given `max_seq_len` by its caller beside all keys of params.json, and fails where that has it too.
    """
    taken = _positions_unsaid(model.rope_scaling == "llama3")
    if model.positions == taken:
        return ()
    return (f"positions {model.positions}: params.json has no place for them; whoever reads it back takes {taken}",)


def _positions_unsaid(scaled: bool) -> int:
    """The positions of a params.json that does not say them."""
    return SCALED_POSITIONS if scaled else POSITIONS


def feed_forward(hidden: int, ffn: int) -> dict[str, Any]:
    """`multiple_of` and, if needed, `ffn_dim_multiplier`, from which Meta's code computes `ffn`.

    That is int(8 hidden / 3), times the multiplier, rounded up to the multiple.

    >>> feed_forward(4096, 11008), feed_forward(8192, 28672)
    ({'multiple_of': 256}, {'multiple_of': 4096, 'ffn_dim_multiplier': 1.3})
    """
    base = int(8 * hidden / 3)
    multiples = [multiple for multiple in (256, 4096, 1024, 64, 4) if ffn % multiple == 0] + [1]
    for multiplier in (None, 1.3, 1.5, ffn / base, (ffn + 0.5) / base):
        for multiple in multiples:
            width = base if multiplier is None else int(multiplier * base)
            if -(-width // multiple) * multiple == ffn:
                scaled = {} if multiplier is None else {"ffn_dim_multiplier": multiplier}
                return {"multiple_of": multiple, **scaled}
    raise AssertionError(f"(ffn + 1/2) / base rounds down to {ffn}")


def _cut_dim(tensor: Tensor, part_shape: tuple[int, ...], parts: int) -> int | None:
    """The dim over which the parts share a tensor. Llama 2 cuts the embedding by columns, Llama 3 by rows."""
    if tensor.cut is None:
        return None
    if tensor.name == "model.embed_tokens.weight":
        return 0 if part_shape[1:] == tensor.shape[1:] and parts > 1 else 1
    return tensor.cut.dim


def _export_dim(tensor: Tensor, name: str) -> int | None:
    if tensor.cut is None:
        return None
    return 1 if name == "tok_embeddings.weight" else tensor.cut.dim


def _rotates(tensor: Tensor) -> bool:
    return tensor.name.endswith(("q_proj.weight", "k_proj.weight"))


def _gathered(model: ModelConfig, tensor: Tensor, parts: list[str], dim: int | None) -> tuple[Fragment, ...]:
    """Our tensor from Meta's parts."""
    columns = tensor.shape[1] if len(tensor.shape) == 2 else None
    if dim == 1:
        assert columns is not None
        return beside(parts, tensor.shape[0], columns // len(parts))
    rows = tensor.shape[0] // len(parts)
    if _rotates(tensor):
        assert model.head_dim is not None
        runs = rotary_rows(range(rows // model.head_dim), model.head_dim)
        return stacked([(part, run) for part in parts for run in runs], columns)
    return stacked([(part, range(rows)) for part in parts], columns)


def _scattered(
    model: ModelConfig, tensor: Tensor, source: str, shape: tuple[int, ...], dim: int | None, part: int
) -> tuple[Fragment, ...]:
    """One of Meta's parts from our tensor."""
    if dim == 1:
        return (Fragment(source, Box((0, 0), shape), range(shape[0]), column=part * shape[1]),)
    columns = shape[1] if len(shape) == 2 else None
    first = part * shape[0] if dim == 0 else 0
    if _rotates(tensor):
        assert model.head_dim is not None
        half = model.head_dim // 2
        heads = range(first, first + shape[0], model.head_dim)
        pairs = [range(head + i, head + i + half + 1, half) for head in heads for i in range(half)]
        return stacked([(source, pair) for pair in pairs], columns)
    return stacked([(source, range(first, first + shape[0]))], columns)
