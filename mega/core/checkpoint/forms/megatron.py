"""Megatron-LM's trees of `mp_rank_XX[_YYY]/model_optim_rng.pt`, read and written: weights of GPT and Llama.

Two vocabularies of names, the legacy one (2019 to 2023) and Megatron-core's, come down to one table; fused
query-key-value rows stand in the order that `checkpoint_version` says. A tree is read from any tensor and
pipeline size, interleaved or not, and written for any. Random states are left behind; megatron_arguments.py has
what trees say of their model, megatron_state.py optimizers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mega.core.checkpoint.forms.foreign import TorchSource
from mega.core.checkpoint.forms.mapping import Fragment, Source, Table, Target, Tensors, beside, joined, stacked
from mega.core.checkpoint.forms.megatron_arguments import check_vocabulary, model_from_arguments, vocabulary
from mega.core.checkpoint.forms.megatron_state import LEAVE, Facts, State, read_alike, read_state
from mega.core.checkpoint.forms.pickles import Arguments, read_pickled
from mega.core.checkpoint.own.disk import read_file
from mega.core.checkpoint.own.pieces import Box, CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, inventory, padded
from mega.core.plan.layers import stage_layers

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = "model_optim_rng.pt"

Style = Literal["legacy", "legacy-layernorm", "core", "core-local"]
"""Names to write: legacy since 2023-09, legacy before, Megatron-core with Transformer Engine, and without."""

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"(.*layers)\.(\d+)\.(.+)")

LEGACY = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.embed_positions": "embedding.position_embeddings",
    "model.norm": "encoder.final_norm",
    "lm_head": "output_layer",
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "self_attention.query_key_value",
    "self_attn.k_proj": "self_attention.query_key_value",
    "self_attn.v_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "mlp.dense_h_to_4h",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""Our modules -> the legacy tree's, which are the common vocabulary of this file."""

CORE = {
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "pre_mlp_layernorm.",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    "encoder.final_norm.": "decoder.final_layernorm.",
}
TRANSFORMER_ENGINE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
TIED_COPY = "word_embeddings_for_head.weight"
_BUFFERS = ("inv_freq", "_extra_state")


def legacy_name(name: str, layer: int | None = None) -> str:
    """The common name of a logical tensor; `layer` is its block's number within its stage.

    >>> legacy_name("model.layers.7.self_attn.q_proj.weight", layer=1)
    'encoder.layers.1.self_attention.query_key_value.weight'
    """
    module, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(module):
        return f"encoder.layers.{layer if layer is not None else match[2]}.{LEGACY[match[3]]}.{kind}"
    return f"{LEGACY[module]}.{kind}"


def common_name(name: str) -> str:
    """A name of any tree and time in the common vocabulary.

    >>> common_name("language_model.transformer.layers.0.attention.dense.bias")
    'encoder.layers.0.self_attention.dense.bias'
    >>> common_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'encoder.layers.0.post_attention_norm.weight'
    """
    name = name.removeprefix("language_model.")
    if name.startswith("decoder."):
        for local, engine in TRANSFORMER_ENGINE.items():
            name = name.replace(engine, local)
        for legacy, core in CORE.items():
            name = name.replace(core, legacy)
        name = name.replace("decoder.", "encoder.", 1)
    name = re.sub(r"^transformer\.", "encoder.", name)
    name = name.replace(".attention.", ".self_attention.")
    for old in ("input_layernorm", "post_attention_layernorm", "final_layernorm"):
        name = name.replace(old, old.replace("layernorm", "norm"))
    return re.sub(r"^(word|position)_embeddings\.", r"embedding.\1_embeddings.", name)


def styled(name: str, style: Style) -> str:
    """The common name in the vocabulary that is to be written, as a path in the tree.

    >>> styled("encoder.layers.0.input_norm.weight", "core")
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    """
    if style.startswith("core"):
        for legacy, core in CORE.items():
            name = name.replace(legacy, core)
        name = re.sub(r"^encoder\.", "decoder.", name).replace(TIED_COPY, "output_layer.weight")
        for local, engine in TRANSFORMER_ENGINE.items() if style == "core" else ():
            name = name.replace(local, engine)
        return name
    if style == "legacy-layernorm":
        name = re.sub(r"(input|post_attention|final)_norm\.", r"\1_layernorm.", name)
    return name if name == TIED_COPY else f"language_model.{name}"


@dataclass(frozen=True)
class Tree:
    """An opened tree. Source names are `tp.pp.chunk/common name`; all files must agree on what they are.

    notes: lines for the user.
    """

    source: Source
    model: ModelConfig
    table: Table
    iteration: int
    consumed: int
    consumed_valid: int
    optimizer: Facts | None
    notes: tuple[str, ...]


def is_tree(path: Path) -> bool:
    """Whether a path is the root of a tree, or one iteration's directory."""
    return (path / TRACKER).exists() or any(_RANK.fullmatch(entry.name) for entry in _folders(path))


def open_tree(path: Path, vocab: int | None = None, *, optimizer: bool = True) -> Tree:
    """Read a tree: its root (the iteration that the tracker names) or one iteration's directory.

    vocab: the true vocabulary, as of `vocabulary`.
    optimizer: take masters and moments too, where they are there.
    Errors: CheckpointError naming the file or tensor.
    """
    folder = iteration_of(path)
    ranks, tp, pp = _ranks(folder)
    tensors: dict[str, torch.Tensor] = {}
    state = State()
    chunks = 1
    first: dict[str, Any] = {}
    for (t, p), directory in sorted(ranks.items()):
        content = read_pickled(_weights_file(directory))
        if not isinstance(content, dict):
            raise CheckpointError(f"{directory}: holds {type(content).__name__}, not a checkpoint")
        first = first or content
        models = _models(content, directory)
        chunks = len(models)
        weights = [{common_name(name): each for name, each in _flat(content[key], directory)} for key in models]
        for chunk, named in enumerate(weights):
            tensors |= {f"{t}.{p}.{chunk}/{name}": tensor for name, tensor in named.items()}
        if optimizer:
            _check_legacy(content, models, directory)
            read_state(content, directory, f"{t}.{p}", weights, state)
    if state.ranks not in (0, len(ranks)):
        raise CheckpointError(f"{folder}: {state.ranks} of {len(ranks)} ranks hold the optimizer's state; {LEAVE}")
    arguments = first.get("args")
    values = arguments.values if isinstance(arguments, Arguments) else {}
    source = TorchSource(tensors | state.tensors)
    rows = source.tensors.get("0.0.0/embedding.word_embeddings.weight", ((0,), torch.float32))[0][0]
    check_vocabulary(values, rows, tp)
    tokens, notes = vocabulary(values, rows * tp, vocab, path)
    model = model_from_arguments(values, tokens, str(folder))
    version = first.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version not in (0, 1, 2, 3):
        raise CheckpointError(f"{folder}: checkpoint_version {version!r} (valid: 0, 1, 2, 3)")
    table = import_table(model, source.tensors, tp, pp, chunks, int(version))
    counts = (
        first.get("iteration", first.get("total_iters", 0)),
        values.get("consumed_train_samples", 0),
        values.get("consumed_valid_samples", 0),
    )
    iteration, consumed, consumed_valid = (n if type(n) is int and n >= 0 else 0 for n in counts)
    whole = joined([table, *(read_alike(table, kind) for kind in state.kinds)])
    return Tree(source, model, whole, iteration, consumed, consumed_valid, state.facts, notes)


def _ranks(folder: Path) -> tuple[dict[tuple[int, int], Path], int, int]:
    """The directory of each (tensor, pipeline) rank, and how many ranks there are of either kind."""
    ranks = {(int(m[1]), int(m[2] or 0)): e for e in _folders(folder) if (m := _RANK.fullmatch(e.name))}
    tp, pp = (1 + max((rank[axis] for rank in ranks), default=-1) for axis in (0, 1))
    absent = [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in ranks]
    if not ranks or absent:
        raise CheckpointError(f"{folder}: holds no mp_rank_XX of (tensor, pipeline) rank {absent or (0, 0)}")
    return ranks, tp, pp


def _models(content: Mapping[str, Any], directory: Path) -> list[str]:
    """The keys of a rank's chunks in their order: `model`, or `model0`, `model1`, ..."""
    numbers = {str(key): int(m[1] or 0) for key in content if (m := re.fullmatch(r"model(\d{0,6})", str(key)))}
    if not numbers:
        raise CheckpointError(f"{directory}: holds no model")
    return sorted(numbers, key=numbers.__getitem__)


def _check_legacy(content: Mapping[str, Any], models: Iterable[str], directory: Path) -> None:
    """Of Megatron-core's optimizers the order of parameters is not known."""
    legacy = all(isinstance(content[key], dict) and "language_model" in content[key] for key in models)
    if content.get("optimizer") is not None and not legacy:
        raise CheckpointError(f"{directory}: the order of Megatron-core's optimizer state is not known; {LEAVE}")


def iteration_of(path: Path) -> Path:
    """The directory of the iteration that the tracker names; the path itself without a tracker."""
    if not (path / TRACKER).exists():
        return path
    word = read_file(path / TRACKER, 100).decode("ascii", "replace").strip()
    if word != "release" and not re.fullmatch(r"\d{1,15}", word):
        raise CheckpointError(f"{path / TRACKER}: says {word!r}, neither a number nor release")
    return path / (word if word == "release" else f"iter_{int(word):07d}")


def _folders(path: Path) -> Iterable[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()] if path.is_dir() else []


def _weights_file(directory: Path) -> Path:
    for name in (WEIGHTS, "model_rng.pt"):
        if (directory / name).exists():
            return directory / name
    raise CheckpointError(f"{directory}: holds no {WEIGHTS}")


def _flat(tree: Any, where: Path, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors below a nested dict, by dotted name."""
    if not isinstance(tree, dict) or len(prefix) > 1000:
        raise CheckpointError(f"{where}: model{prefix} is {type(tree).__name__}, not a dict of tensors")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name.endswith(_BUFFERS):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _flat(value, where, f"{name}.")


# Rows of fused matrices


def fused_rows(part: str, heads: int, groups: int, width: int, version: int) -> list[range]:
    """Where one tensor rank's rows of query, key or value heads stand in its fused matrix.

    part: "q", "k" or "v". heads, groups: query and key/value heads of this rank. width: rows of a head.
    version: the file's checkpoint_version.

    >>> fused_rows("k", heads=4, groups=2, width=1, version=3)  # q0 q1 k0 v0 q2 q3 k1 v1
    [range(2, 3), range(6, 7)]
    """
    place = "qkv".index(part)
    if version == 0:  # all queries, all keys, all values
        return [range(place * heads * width, (place + 1) * heads * width)]
    if version == 1:  # components of q, k, v take turns
        return [range(place, 3 * heads * width, 3)]
    each = heads // groups
    begin, count = ((0, each), (each, 1), (each + 1, 1))[place]
    firsts = (group * (each + 2) + begin for group in range(groups))
    return [range(first * width, (first + count) * width) for first in firsts]


def import_table(model: ModelConfig, tensors: Tensors, tp: int, pp: int, chunks: int, version: int) -> Table:
    """`weights/<name>` of every logical tensor from the files of a tree."""
    if version < 2 and model.kv_heads != model.heads:
        raise CheckpointError(f"checkpoint_version {version}: has no grouped heads")
    places = _places(tensors, pp, chunks)
    if len(places) != model.layers:
        last = f"encoder.layers.{max((number for _, number in places.values()), default=0)}."
        named = next((name for name in tensors if last in name), "none")
        raise CheckpointError(f"args.num_layers {model.layers}: the files hold {len(places)} layers ({named})")
    targets: list[Target] = []
    copies: list[tuple[str, str]] = []
    dropped: dict[str, range] = {}
    for tensor in inventory(model):
        place = tensor.units[0]
        stage, layer = places[place] if isinstance(place, int) else (_end(place, pp, chunks), None)
        name = legacy_name(tensor.name, layer)
        parts = [f"{t}.{stage}/{name}" for t in range(tp)]
        for part in parts:
            if part not in tensors:
                raise CheckpointError(f"{part}: is missing")
            expected = _part_shape(model, tensor, tensors[parts[0]][0], tp)
            if tensors[part][0] != expected:
                raise CheckpointError(f"{part}: has shape {tensors[part][0]}, args and other ranks imply {expected}")
        if tensor.cut is None:
            copies += [(part, parts[0]) for part in parts[1:]]
            parts = parts[:1]
        fragments = _gathered(model, tensor, tensors, parts, version)
        if name.endswith("word_embeddings.weight") or name == "output_layer.weight":
            dropped |= _padding(tensors, parts, tensor.shape[0])
        targets.append(Target(f"weights/{tensor.name}", tensor.shape, tensors[parts[0]][1], fragments))
    if model.tied:
        copies += _tied_copies(tensors, tp, _end("head", pp, chunks))
    table_copies = tuple(sorted(set(copies)))
    return Table(tuple(targets), copies=table_copies, dropped=dropped)


def _end(place: str, pp: int, chunks: int) -> str:
    return "0.0" if place == "embedding" else f"{pp - 1}.{chunks - 1}"


def _places(tensors: Tensors, pp: int, chunks: int) -> dict[int, tuple[str, int]]:
    """Block number -> (pipeline rank and chunk, number within); chunks go round the ranks in turn."""
    found: dict[int, tuple[str, int]] = {}
    for chunk in range(chunks):
        for rank in range(pp):
            pattern = re.compile(rf"0\.{rank}\.{chunk}/encoder\.layers\.(\d+)\..*")
            local = {int(match[1]) for name in tensors if (match := pattern.fullmatch(name))}
            for number in sorted(local):
                found[len(found)] = (f"{rank}.{chunk}", number)
    return found


def _part_shape(model: ModelConfig, tensor: Tensor, first: tuple[int, ...], share: int) -> tuple[int, ...]:
    """The shape of one rank's tensor that holds its share of a logical one. Vocabularies are padded as the first is."""
    if tensor.cut is None:
        return tensor.shape
    if tensor.cut.multiple:
        return (*first[:1], *tensor.shape[1:])
    module = tensor.name.rpartition(".")[0]
    rows, *columns = (size // share if dim == tensor.cut.dim else size for dim, size in enumerate(tensor.shape))
    assert model.heads and model.kv_heads and model.head_dim
    if _runs(model, tensor, share, version=3) is None:
        return (rows, *columns)
    if "self_attn" in module:
        return ((model.heads + 2 * model.kv_heads) * model.head_dim // share, *columns)
    return (2 * rows, *columns)


def _gathered(
    model: ModelConfig, tensor: Tensor, tensors: Tensors, parts: list[str], version: int
) -> tuple[Fragment, ...]:
    columns = tensor.shape[1] if len(tensor.shape) == 2 else None
    share = len(parts)
    if tensor.cut is not None and tensor.cut.dim == 1:
        assert columns is not None
        return beside(parts, tensor.shape[0], columns // share)
    runs = _runs(model, tensor, share, version)
    if runs is None:  # vocabulary rows, or a whole tensor: as many as there are, in order
        runs_of = {}
        left = tensor.shape[0]
        for part in parts:
            count = min(left, tensors[part][0][0])
            runs_of[part] = [range(count)]
            left -= count
        return stacked([(part, run) for part in parts for run in runs_of[part] if len(run)], columns)
    return stacked([(part, run) for part in parts for run in runs], columns)


def _runs(model: ModelConfig, tensor: Tensor, share: int, version: int) -> list[range] | None:
    """A logical tensor's rows within one rank's fused matrix; None where nothing is fused."""
    module = tensor.name.rpartition(".")[0]
    assert model.heads and model.kv_heads and model.head_dim and model.ffn
    if (part := module.removesuffix("_proj")[-1]) in "qkv" and module.endswith(f"self_attn.{part}_proj"):
        return fused_rows(part, model.heads // share, model.kv_heads // share, model.head_dim, version)
    if model.activation == "swiglu" and module.endswith(("mlp.gate_proj", "mlp.up_proj")):
        rows = model.ffn // share
        return [range(rows)] if module.endswith("gate_proj") else [range(rows, 2 * rows)]
    return None


def _padding(tensors: Tensors, parts: list[str], vocab: int) -> dict[str, range]:
    """Vocabulary rows behind the true ones."""
    found, first = {}, 0
    for part in parts:
        rows = tensors[part][0][0]
        if first + rows > vocab:
            found[part] = range(max(0, vocab - first), rows)
        first += rows
    return found


def _tied_copies(tensors: Tensors, tp: int, last: str) -> list[tuple[str, str]]:
    """The last stage's copy of a tied embedding, under either of its names. A stage that is the first too has none."""
    pairs = []
    for rank in range(tp):
        names = [f"{rank}.{last}/{name}" for name in (TIED_COPY, "output_layer.weight")]
        found = [name for name in names if name in tensors]
        if not found and last != "0.0":
            raise CheckpointError(f"{names[0]}: is missing")
        pairs += [(name, f"{rank}.0.0/embedding.word_embeddings.weight") for name in found]
    return pairs


# Writing


def export_tables(model: ModelConfig, tensors: Tensors, tp: int, pp: int) -> dict[tuple[int, int], Table]:
    """(tensor rank, stage) -> the targets of its file, by common name, made of `weights/<name>`."""
    for kind, ranks, names in (("tensor", tp, ("heads", "kv_heads", "ffn")), ("pipeline", pp, ("layers",))):
        for name in names:
            if (number := getattr(model, name)) % ranks:
                raise ValueError(f"--target-{kind}-parallel-size {ranks}: must divide {name} {number} for Megatron-LM")
    assert model.layers is not None
    stages = [chunks[0] for chunks in stage_layers(model.layers, pp)]
    tables = {}
    for stage, blocks in enumerate(stages):
        mine: dict[str, list[Tensor]] = {}
        for tensor in inventory(model):
            for place in tensor.units:
                if isinstance(place, int) and place in blocks:
                    mine.setdefault(legacy_name(tensor.name, place - blocks[0]), []).append(tensor)
                elif (place == "embedding" and stage == 0) or (place == "head" and stage == pp - 1):
                    copy = place == "head" and place != tensor.units[0]
                    if not (copy and pp == 1):
                        mine.setdefault(TIED_COPY if copy else legacy_name(tensor.name), []).append(tensor)
        for rank in range(tp):
            targets = [_scattered(model, tensors, name, group, rank, tp) for name, group in mine.items()]
            tables[rank, stage] = Table(tuple(targets))
    return tables


def _scattered(model: ModelConfig, tensors: Tensors, name: str, group: list[Tensor], rank: int, tp: int) -> Target:
    """One tensor of one rank's file from the logical tensors that it holds."""
    first = group[0]
    dtype = tensors[f"weights/{first.name}"][1]
    if first.cut is not None and first.cut.dim == 1:
        width = first.shape[1] // tp
        shape: tuple[int, ...] = (first.shape[0], width)
        fragment = Fragment(f"weights/{first.name}", Box((0, 0), shape), range(shape[0]), column=rank * width)
        return Target(name, shape, dtype, (fragment,))
    columns = first.shape[1] if len(first.shape) == 2 else None
    runs = _sources(model, group, rank, tp)
    rows = sum(len(run) for _, run in runs)
    fragments = stacked([(f"weights/{tensor.name}", run) for tensor, run in runs], columns)
    return Target(name, (rows,) if columns is None else (rows, columns), dtype, fragments)


def _sources(model: ModelConfig, group: list[Tensor], rank: int, tp: int) -> list[tuple[Tensor, range]]:
    """The rows of one rank's matrix, in order: (logical tensor, its rows)."""
    first = group[0]
    if len(group) == 3:  # query, key, value: each group's query heads, then its key, then its value
        assert model.heads and model.kv_heads and model.head_dim
        each, width = model.heads // model.kv_heads * model.head_dim, model.head_dim
        share = model.kv_heads // tp
        return [
            (tensor, range(number * rows, (number + 1) * rows))
            for number in range(rank * share, (rank + 1) * share)
            for tensor, rows in zip(group, (each, width, width), strict=True)
        ]
    if len(group) == 2 or (first.cut is not None and first.cut.multiple == 0):  # gate above up, or one alone
        rows = first.shape[0] // tp
        return [(tensor, range(rank * rows, (rank + 1) * rows)) for tensor in group]
    if first.cut is None:
        return [(first, range(first.shape[0]))]
    vocab = first.shape[0]
    rows = padded(vocab, tp, model.vocab_multiple) // tp
    begin, end = rank * rows, (rank + 1) * rows
    real = [(first, range(begin, min(end, vocab)))] if begin < vocab else []
    last = (first, range(vocab - 1, vocab))  # padding repeats the last row, as Megatron's own tool does
    return real + [last] * (end - max(begin, vocab))


def whole_table(tables: Iterable[Table]) -> Table:
    """All files' targets as one table, for the proof; copies of norms and of the vocabulary are allowed."""
    targets = joined(tables).targets
    sources = {fragment.source for target in targets for fragment in target.fragments}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj.weight", "gate_proj", "up_proj", "down_proj.weight")
    repeats = frozenset(source for source in sources if not any(word in source for word in linear))
    return Table(targets, repeats=repeats)


def nested(content: Mapping[str, torch.Tensor], style: Style) -> dict[str, Any]:
    """The model tree of a file. Core trees are flat; legacy ones nest above the layers' dotted names."""
    if style.startswith("core"):
        return {styled(name, style): tensor for name, tensor in content.items()}
    tree: dict[str, Any] = {}
    for name, tensor in content.items():
        *path, leaf = styled(name, style).split(".", 2 if name.startswith("encoder.") else -1)
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[leaf] = tensor
    return tree


def rank_directory(tp_rank: int, stage: int, pp: int) -> str:
    return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")


def file_content(
    model: Mapping[str, Any], arguments: Mapping[str, Any], iteration: int, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The top level of a `model_optim_rng.pt`; `state` is what it says of the optimizer."""
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": dict(model),
        **state,
    }
