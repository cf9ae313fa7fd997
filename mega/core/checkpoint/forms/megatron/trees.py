"""Read Megatron-LM checkpoints, which are trees of `mp_rank_XX[_YYY]/model_optim_rng.pt`. This module reads the weights
of every family and builds the table for reading and writing.

The names of all eras (eras.py) are translated to common names, so that one table serves all eras. The checkpoint's
`checkpoint_version` determines the order of rows in the fused query-key-value matrix. Checkpoints of any tensor and
pipeline parallel size are supported, with and without interleaved stages. Random states are not converted.
Other modules complete this one: trees_write.py writes checkpoints, arguments.py derives the model from Megatron's
arguments, families.py adds BERT and T5, and state.py reads optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch

from mega.core.architecture import Tensor, architecture, inventory
from mega.core.architecture.layer import Layer
from mega.core.checkpoint.forms.foreign import TorchSource, check_ranks_differ
from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import Fragment, Table, Target, gathered, joined, stacked, whole
from mega.core.checkpoint.forms.megatron.arguments import (
    as_core_uses,
    check_vocabulary,
    model_from_arguments,
    tokenizer_of,
    vocabulary,
)
from mega.core.checkpoint.forms.megatron.eras import (
    BALANCE_BIAS,
    LEAVE,
    THRESHOLDS,
    TIED_COPY,
    WORDS,
    common_name,
    era_of,
    has_two_stacks,
    legacy_name,
    retriever_name,
)
from mega.core.checkpoint.forms.megatron.expert_ranks import expert_ranks_of, is_expert, names_of_rank, whole_names
from mega.core.checkpoint.forms.megatron.families import (
    Stages,
    as_family,
    pair_rows,
    stages_of,
)
from mega.core.checkpoint.forms.megatron.mixture import with_switch
from mega.core.checkpoint.forms.megatron.state import (
    State,
    check_counts,
    plain,
    plain_state,
    read_state,
    state_note,
    state_table,
    values_of,
)
from mega.core.checkpoint.forms.pickles import Arguments, read_pickled
from mega.core.checkpoint.own.disk import read_file
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import CheckpointError, Tensors, naming
from mega.core.config.sections import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = "model_optim_rng.pt"

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
"""Matches the name of a rank's folder: tensor rank, then pipeline rank if there are several pipeline ranks, then expert
rank if there are several expert ranks."""

_BUFFERS = ("inv_freq", "_extra_state")


def recognise(path: Path) -> bool:
    """Whether `path` is the root directory of a Megatron-LM checkpoint, or one iteration's directory."""
    return (path / TRACKER).exists() or any(_RANK.fullmatch(entry.name) for entry in _folders(path))


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    """Open a Megatron-LM checkpoint. path: one iteration's directory, or a root directory, whose tracker file names the
    iteration to open.

    Tensor names have the format `tp.pp.chunk/common name`. Copies of a tensor on several ranks must be equal.
    """
    folder = iteration_of(path)
    ep, experts = _expert_ranks(folder)
    ranks, tp, pp = _ranks(folder, ep)
    tensors, state, chunks, content = _read_ranks(ranks, options.optimizer, experts if ep > 1 else None)
    # All ranks or no rank must have optimizer state, because a run cannot resume with moments for only some parameters.
    if state.ranks not in (0, len(ranks)):
        raise CheckpointError(f"{folder}: {state.ranks} of {len(ranks)} ranks hold the optimizer's state; {LEAVE}")
    arguments = content.get("args")
    values = arguments.values if isinstance(arguments, Arguments) else {}
    source = TorchSource(tensors | state.tensors)
    core = era_of(content[_models(content, folder)[0]]) != "legacy"
    model, notes = model_of_tree(values, source.tensors, tp, options.vocab, path, folder, core=core)
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version not in (0, 1, 2, 3):
        raise CheckpointError(f"{folder}: checkpoint_version {plain(version)!r:.40} (valid: 0, 1, 2, 3)")
    with naming(folder):
        weights = table_of(model, source.tensors, tp, pp, chunks, int(version))
    counts = (
        content.get("iteration", content.get("total_iters", 0)),
        values.get("consumed_train_samples", 0),
        values.get("consumed_valid_samples", 0),
    )
    iteration, consumed, validated = (n if type(n) is int and n >= 0 else 0 for n in counts)
    table = joined([weights, *(state_table(weights, kind) for kind in state.kinds)])
    check_counts(state.scalars, counts[0], folder)
    plain_fields = plain_state(state.scalars, iteration, consumed, validated)
    tokenizer, tokenizer_notes = tokenizer_of(values)
    notes += (*tokenizer_notes, state_note(state.scalars, options.optimizer, "taken"))
    return OpenedForm(source, model, table, iteration, consumed, plain_fields | tokenizer, notes)


def model_of_tree(
    values: Mapping[str, object], tensors: Tensors, tp: int, vocab: int | None, path: Path, folder: Path, *, core: bool
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the model that Megatron's arguments and the checkpoint's tensors describe, and messages about the
    vocabulary and about ignored arguments. core: whether Megatron-core, which ignores some arguments, wrote the
    checkpoint."""
    values, corrections = as_core_uses(values) if core else (values, ())
    rows = tensors.get(f"0.0.0/{WORDS}", ((0,), torch.float32))[0][0]
    check_vocabulary(values, rows, tp)
    tokens, notes = vocabulary(values, rows * tp, vocab, path)
    model = as_family(model_from_arguments(values, tokens, str(folder)), values, tensors, str(folder))
    if model.experts and not core:
        model = with_switch(model, values)
    check_size(model, tensors, str(folder))
    return model, notes + corrections


Rank: TypeAlias = tuple[int, int, int]
"""(pipeline rank, expert rank, tensor rank), in the order of Megatron's global ranks."""


def _read_ranks(
    ranks: Mapping[Rank, Path], optimizer: bool, experts: int | None
) -> tuple[dict[str, torch.Tensor], State, int, Mapping[str, object]]:
    """Return (all weights, the optimizer's state, the number of model chunks per rank, the content of the first rank's
    file). experts: number of experts per rank; None if every rank has all experts."""
    tensors: dict[str, torch.Tensor] = {}
    state, chunks = State(), 1
    first: dict[str, object] = {}
    numbers: list[object] = []
    for (p, e, t), directory in sorted(ranks.items()):
        content = read_pickled(_weights_file(directory))
        if not isinstance(content, dict):
            raise CheckpointError(f"{directory}: holds {type(content).__name__}, not a checkpoint")
        first = first or content
        if content is not first and (iteration := _iteration(content)) != (first_iteration := _iteration(first)):
            raise CheckpointError(f"{directory}: iteration {iteration}: the first rank's is {first_iteration}")
        numbers.append(content["args"].values.get("rank") if isinstance(content.get("args"), Arguments) else None)
        # Some converters write the same rank number into all files.
        if len(set(map(repr, numbers))) > 1 and not _increase(numbers):
            raise CheckpointError(
                f"{directory}: args.rank {plain(numbers[-1])!r:.40}: is that of another mp_rank folder"
            )
        models = _models(content, directory)
        chunks = len(models)
        weights = [_named(content[key], directory) for key in models]
        if experts is not None:
            weights = [whole_names(tensors_by_name, e, experts, directory) for tensors_by_name in weights]
        named = {f"{t}.{p}.{n}/{name}": each for n, chunk in enumerate(weights) for name, each in chunk.items()}
        if e and experts is not None:
            _check_copies(tensors, named, e, experts, directory)
        tensors |= named
        if t:
            check_ranks_differ(tensors, f"{t}.{p}.", f"{t - 1}.{p}.", directory)
        if optimizer:
            era = era_of(content[models[0]])
            read_state(content, directory, f"{t}.{p}", weights, state, era, experts_apart=experts is not None)
    return tensors, state, chunks, first


def _check_copies(
    tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], rank: int, experts: int, directory: Path
) -> None:
    """Check that an expert rank's tensors equal those of other ranks, except for the experts, which must differ.
    Errors: CheckpointError if either condition is violated."""
    for name in own.keys() & tensors.keys():
        if not torch.equal(own[name], tensors[name]):
            raise CheckpointError(f"{directory}: {name}: differs from that of the expert ranks before it")
    before, owned = names_of_rank(tensors, rank - 1, experts), names_of_rank(own, rank, experts)
    local = {name: tensor for name, tensor in owned.items() if is_expert(name)}
    if local and all(name in before and torch.equal(tensor, before[name]) for name, tensor in local.items()):
        raise CheckpointError(f"{directory}: holds the same experts as the expert rank before it, every one of them")


def _increase(numbers: list[object]) -> bool:
    integers = [n for n in numbers if type(n) is int]
    return len(integers) == len(numbers) and all(a < b for a, b in pairwise(integers))


def _iteration(content: Mapping[str, object]) -> int | None:
    """The iteration recorded in a file's content, or None."""
    iteration = content.get("iteration", content.get("total_iters"))
    return iteration if type(iteration) is int else None


def _named(model: object, directory: Path) -> dict[str, torch.Tensor]:
    """Return a dict: common name -> tensor, for one model chunk. If a tensor is stored under two names, both copies
    must be equal."""
    stored = dict(_flat(model, directory))
    two_stacks, tensors = has_two_stacks(stored), dict[str, torch.Tensor]()
    for name, tensor in stored.items():
        if not torch.equal(tensors.setdefault(common_name(name, two_stacks), tensor), tensor):
            raise CheckpointError(f"{directory}: {name}: differs from what the model holds under another name")
    return tensors


def _expert_ranks(folder: Path) -> tuple[int, int]:
    """Return (number of ranks over which the experts are distributed, number of experts per rank), from the first
    file's arguments."""
    directories = sorted(entry for entry in _folders(folder) if _RANK.fullmatch(entry.name))
    content = read_pickled(_weights_file(directories[0])) if directories else None
    return expert_ranks_of(values_of(content) if isinstance(content, dict) else {}, folder)


def _ranks(folder: Path, ep: int) -> tuple[dict[Rank, Path], int, int]:
    """Return (rank -> directory, number of tensor ranks, number of pipeline ranks). ep: number of ranks over which the
    experts are distributed."""
    ranks: dict[Rank, Path] = {}
    for entry in _folders(folder):
        if match := _RANK.fullmatch(entry.name):
            tensor_rank, *others = (int(number) for number in match.groups() if number is not None)
            expert_rank = others.pop() if ep > 1 and others else 0
            if len(others) > 1 or expert_rank >= ep:
                raise CheckpointError(f"{entry}: args.expert_model_parallel_size is {ep}")
            ranks[others[0] if others else 0, expert_rank, tensor_rank] = entry
    pp, tp = (1 + max((rank[axis] for rank in ranks), default=-1) for axis in (0, 2))
    absent = [(t, p, e) for p in range(pp) for e in range(ep) for t in range(tp) if (p, e, t) not in ranks]
    if not ranks or absent:
        axes = "(tensor, pipeline, expert)" if ep > 1 else "(tensor, pipeline)"
        missing = [each if ep > 1 else each[:2] for each in absent]
        raise CheckpointError(f"{folder}: holds no mp_rank_XX of {axes} rank {missing or (0, 0)}")
    return ranks, tp, pp


def _models(content: Mapping[str, object], directory: Path) -> list[str]:
    """The keys of a rank's model chunks in the order of the chunks: `model`, or `model0`, `model1`, ..."""
    numbers = {str(key): int(m[1] or 0) for key in content if (m := re.fullmatch(r"model(\d{0,6})", str(key)))}
    if not numbers:
        raise CheckpointError(f"{directory}: holds no model")
    return sorted(numbers, key=numbers.__getitem__)


def iteration_of(path: Path) -> Path:
    """The directory of the iteration that the tracker file names; `path` if the tracker file does not exist."""
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


def _flat(tree: object, where: Path, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested dict with their dotted names."""
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
    """Return the rows of a tensor rank's query, key or value heads in the rank's fused query-key-value matrix.

    part: "q", "k" or "v". heads, groups: numbers of query heads and of key/value heads on this rank. width: rows per
    head.
    version: the file's checkpoint_version.

        version 0                version 1, by row           versions 2 and 3, by head of a group
        q q q q k k k k v v v v  q k v q k v q k v q k v     q q k v | q q k v
    >>> fused_rows("k", heads=4, groups=2, width=1, version=3)  # q0 q1 k0 v0 q2 q3 k1 v1
    [range(2, 3), range(6, 7)]
    """
    place = "qkv".index(part)
    if version == 0:  # all queries, then all keys, then all values
        return [range(place * heads * width, (place + 1) * heads * width)]
    if version == 1:  # components of q, k, v alternate
        return [range(place, 3 * heads * width, 3)]
    each = heads // groups
    begin, count = ((0, each), (each, 1), (each + 1, 1))[place]
    firsts = (group * (each + 2) + begin for group in range(groups))
    return [range(first * width, (first + count) * width) for first in firsts]


def table_of(model: ModelConfig, tensors: Tensors, tp: int, pp: int, chunks: int, version: int) -> Table:
    """Call `table` for a stored checkpoint, and return the result. The names of `tensors` determine the pipeline stage
    of each block."""
    blocks, structure = _blocks(tensors, pp, chunks), architecture(model)
    if len(blocks) != len(structure.layers):
        last = f"encoder.layers.{max((number for _, number in blocks), default=0)}."
        example = next((name for name in tensors if last in name), "none")
        raise CheckpointError(
            f"args.num_layers {len(structure.stacks[0].layers)}: the files hold {len(blocks)} layers ({example})"
        )
    end = f"{pp - 1}.{chunks - 1}"
    tied = [name for name in (TIED_COPY, "output_layer.weight") if f"0.{end}/{name}" in tensors]
    rows = tensors.get(f"0.0.0/{WORDS}", ((0,), torch.float32))[0][0]
    return table(model, tp, stages_of(structure, blocks, end, tied), rows, version)


def _blocks(tensors: Tensors, pp: int, chunks: int) -> list[tuple[str, int]]:
    """Return (`pp.chunk`, index within the chunk) of each block, in the order of the model. With interleaved stages,
    consecutive chunks are on consecutive ranks. An encoder's blocks precede the decoder's blocks."""
    blocks: list[tuple[str, int]] = []
    for stack in ("encoder", "decoder"):
        for chunk in range(chunks):
            for rank in range(pp):
                pattern = re.compile(rf"0\.{rank}\.{chunk}/{stack}\.layers\.(\d+)\..*")
                local = {int(match[1]) for name in tensors if (match := pattern.fullmatch(name))}
                blocks += [(f"{rank}.{chunk}", number) for number in sorted(local)]
    return blocks


def table(options: ModelConfig, tp: int, stages: Stages, rows: int, version: int = 3) -> Table:
    """Return the table that produces `weights/<name>` for every logical tensor from the files of a Megatron-LM
    checkpoint.

    rows: number of rows of a rank's embedding table, including padding. version: the files' checkpoint_version.

        10 tokens on 2 ranks, rows = 8:      rank 0: tokens 0 .. 7      rank 1: tokens 8, 9, six padding rows
    """
    model = architecture(options)
    if version < 2 and any(each.kv_heads != each.heads for each in model.attentions):
        raise CheckpointError(f"checkpoint_version {version}: has no grouped heads")
    targets: list[Target] = []
    copies: list[tuple[str, Fragment]] = []
    padding: dict[str, tuple[range, str]] = {}
    for tensor in inventory(options):
        name = f"weights/{tensor.name}"
        stage, layer = stages.place(model, tensor.units[0])
        unit = tensor.units[0]
        reads = isinstance(unit, int) and model.layers[unit].neighbours is not None
        common = retriever_name(tensor.name, layer) if reads and layer is not None else legacy_name(tensor.name, layer)
        if options.router_choice == "quantile":
            common = common.replace(BALANCE_BIAS, THRESHOLDS)
        locations = (f"{stage}/{common}", *stages.copies.get(tensor.name, ()))
        sources, *copy_sources = [[f"{t}.{place}" for t in range(tp)] for place in locations]
        cut = tensor.cut()
        if cut is not None and cut.multiple:  # a vocabulary
            counts = [max(0, min(rows, tensor.shape[0] - t * rows)) for t in range(tp)]  # number of tokens on each rank
            width = tensor.shape[1] if len(tensor.shape) == 2 else None
            for parts in (sources, *copy_sources):
                token_rows = [(part, range(count)) for part, count in zip(parts, counts, strict=True) if count]
                padding |= {part: (range(n, rows), name) for part, n in zip(parts, counts, strict=True) if n < rows}
                fragments_found = stacked(token_rows, width)
                if parts is sources:
                    fragments = fragments_found
                else:
                    copies += [(name, fragment) for fragment in fragments_found]
        elif cut is None:
            fragments = (whole(tensor.shape, sources[0]),)
            copies += [(name, whole(tensor.shape, each)) for parts in (sources[1:], *copy_sources) for each in parts]
        else:
            fragments = gathered(tensor.shape, sources, cut.dim, _runs(model.block, tensor, tp, version))
        targets.append(Target(name, tensor.shape, fragments))
    return Table(tuple(targets), copies=tuple(copies), padding=padding)


def _runs(block: Layer, tensor: Tensor, share: int, version: int) -> list[range] | None:
    """The rows of a logical tensor within one rank's fused matrix; None if the tensor is not part of a fused matrix."""
    module = tensor.name.rpartition(".")[0]
    attention, feed_forward = block.attention, block.feed_forward
    heads, kv_heads = attention.heads // share, attention.kv_heads // share
    if (part := module.removesuffix("_proj")[-1]) in "qkv" and module.endswith(f"self_attn.{part}_proj"):
        return fused_rows(part, heads, kv_heads, attention.head_dim, version)
    if part in "kv" and module.endswith((f"encoder_attn.{part}_proj", f"inter_attn.{part}_proj")):
        return pair_rows(part, heads, attention.head_dim, version)
    if feed_forward.gated and module.endswith((".gate_proj", ".up_proj")):
        rows = tensor.shape[0] // share
        return [range(rows)] if module.endswith("gate_proj") else [range(rows, 2 * rows)]
    return None
