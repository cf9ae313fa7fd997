"""Write Megatron-LM checkpoints, which are trees of `mp_rank_XX[_YYY]/model_optim_rng.pt`, for any tensor and pipeline
parallel size.

`TreeMetadata` contains a checkpoint's non-tensor values, and messages about using the checkpoint; torch_dist_write.py
also uses this class. The names are defined in eras.py, and the tables in trees.py. Random states are not written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from mega.core.architecture import Architecture, architecture
from mega.core.checkpoint.forms.form import Export, ExportSource, FormOptions
from mega.core.checkpoint.forms.mapping import Source, Table, Target, joined
from mega.core.checkpoint.forms.megatron.arguments import (
    TOKENIZER,
    arguments_of,
    core_flags,
    padding_note,
    unused_by_core,
)
from mega.core.checkpoint.forms.megatron.eras import ALIASES, ERAS, HEADS, OWN_STACKS, STYLES, Era, styled
from mega.core.checkpoint.forms.megatron.expert_ranks import names_of_rank
from mega.core.checkpoint.forms.megatron.families import (
    check_retriever,
    check_written,
    family_arguments,
    retriever_arguments,
    written_stages,
)
from mega.core.checkpoint.forms.megatron.state import DISTRIBUTED, OptimizerScalars, state_note, state_table
from mega.core.checkpoint.forms.megatron.state_write import (
    in_order,
    optimizer_scalars,
    overridden,
    state_kinds,
    written_state,
    written_vectors,
)
from mega.core.checkpoint.forms.megatron.trees import TRACKER, WEIGHTS, table
from mega.core.checkpoint.forms.writing import whole_tensor, write_torch
from mega.core.checkpoint.own.disk import new_file, write_all
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.source import OwnSource
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import below

UNKNOWN_TOKENIZER = (
    f"tokenizer: the checkpoint names none, so the export names {TOKENIZER}, which reads ids instead of text; to use "
    "another in Megatron-LM, which compares the names if --vocab-file is given, export with its --tokenizer-type"
)
"""Message about a checkpoint whose tokenizer is unknown."""


@dataclass(frozen=True)
class TreeMetadata:
    """The non-tensor values to write to a Megatron-LM checkpoint."""

    kinds: tuple[str, ...]
    """Kinds of optimizer state to write."""
    scalars: OptimizerScalars | None
    """The optimizer's scalars; None if no optimizer state is written."""
    arguments: Mapping[str, object]
    """Megatron's command-line arguments."""
    iteration: int
    """The iteration in the folder's name."""
    flat: bool
    """Whether the optimizer state is written in the format of the distributed optimizer."""
    notes: tuple[str, ...]
    """Messages for the user."""


def tree_metadata(own: ExportSource, to: str, era: Era, options: FormOptions) -> TreeMetadata:
    """Return the non-tensor values to write when a mega checkpoint is exported. to: the value of --saver. Errors:
    CheckpointError naming a setting that the target format cannot express."""
    model, checkpoint, layout = architecture(own.model), own.checkpoint, options.layout
    check_written(model, to, distributed=options.distributed)
    if own.model.retriever:
        check_retriever(own.model, to, layout.pp, state=bool(options.optimizer and state_kinds(checkpoint)))
    if own.model.experts and to not in ("mcore-local", "torch_dist"):
        raise CheckpointError(f"--saver {to}: has no mixture of experts; valid: mcore-local, torch_dist")
    _check_expert_ranks(own.model.experts, layout.ep, to, distributed=options.distributed)
    if own.model.mtp_layers and not ERAS[era].core:
        raise CheckpointError(f"--mtp-layers {own.model.mtp_layers}: --saver {to} has none; valid: mcore, torch_dist")
    kinds = state_kinds(checkpoint) if options.optimizer else ()
    scalars = optimizer_scalars(checkpoint.meta, str(checkpoint.path)) if kinds else None
    progress = below(checkpoint.meta, "progress")
    iteration = max(1, checkpoint.step)  # Megatron's loader refuses iteration 0
    counts = {"iteration": iteration, "consumed_train_samples": progress.get("consumed", 0)}
    tokenizer = options.tokenizer_type or _tokenizer(checkpoint.meta)
    core = ERAS[era].core
    arguments = arguments_of(own.model, layout.tp, layout.pp, tokenizer=tokenizer, core=core) | counts
    arguments |= family_arguments(model, layout.pp) | retriever_arguments(own.model)
    if scalars is not None:
        arguments["consumed_valid_samples"] = progress.get("consumed_valid", 0)
        arguments["lr_warmup_init"] = scalars.schedule["lr"]["initial"] if scalars.schedule else 0.0
    if core:
        dtype = next(dtype for key, (_, dtype) in checkpoint.tensors.items() if key.startswith("weights/"))
        world = layout.tp * layout.pp * layout.ep
        arguments |= {"no_save_rng": True, "no_save_optim": scalars is None, "world_size": world}
        arguments |= {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16, "params_dtype": dtype}
        arguments |= {"use_distributed_optimizer": options.distributed, "data_parallel_size": layout.ep}
        arguments |= {"expert_model_parallel_size": layout.ep} if own.model.experts else {}
        arguments |= {"ckpt_format": to if to == "torch_dist" else "torch"}
        arguments |= {} if (ids := null_ids(checkpoint.meta)) is None else {"vocab_size": ids}
    notes = (
        *([UNKNOWN_TOKENIZER] if tokenizer is None else []),
        *padding_note(model.input.vocab, model.input.rows(layout.tp)),
        *(unused_by_core(arguments) if core else ()),
        _for_core(model.family, arguments, era, scalars) if core else _for_legacy(to, scalars, own.model.retriever),
    )
    notes += (state_note(scalars, options.optimizer, "written"),)
    return TreeMetadata(kinds, scalars, arguments, iteration, options.distributed and scalars is not None, notes)


def _check_expert_ranks(experts: int | None, ranks: int, to: str, *, distributed: bool) -> None:
    """Check --ep. Errors: ValueError naming the rule that is violated."""
    if ranks == 1:
        return
    flag = f"--ep {ranks}"
    if to != "mcore-local" or not experts:
        raise ValueError(f"{flag}: needs --saver mcore-local, and a model with experts")
    if experts % ranks:
        raise ValueError(f"{flag}: must divide the model's {experts} experts")
    if distributed:
        raise ValueError(f"{flag}: excludes --use-distributed-optimizer, whose form Megatron-core cannot load there")


def _tokenizer(meta: Mapping[str, object]) -> str | None:
    """Return the kind of tokenizer that a mega checkpoint records, or that the imported Megatron checkpoint recorded;
    otherwise None."""
    kind = below(meta, "config", "tokenizer").get("tokenizer") or meta.get("megatron_tokenizer")
    return kind if isinstance(kind, str) else None


def null_ids(meta: Mapping[str, object]) -> int | None:
    """Return Megatron-core's --vocab-size for the NullTokenizer with which a mega checkpoint was trained; None for
    other tokenizers. Megatron-core ends documents with the last id. A mega run with --no-null-eod-last ends them with
    an additional id."""
    options = below(meta, "config", "tokenizer")
    size = options.get("vocab_size")
    if _tokenizer(meta) != TOKENIZER or not isinstance(size, int):
        return None
    return size + (not options.get("null_eod_last"))


def _for_legacy(to: str, scalars: OptimizerScalars | None, retriever: bool) -> str:
    flags = "--no-load-rng" if scalars is not None else "--no-load-rng --no-load-optim"
    intro = f"--saver {to} is for Megatron-LM of 2023 (its legacy models), which loads it with {flags}"
    if retriever:
        return f"{intro}, and decides by the number of layers which of them read neighbours"
    return (
        f"{intro}: Megatron-core of "
        "today (0.18) takes it without an error and loads it wrong; for that write --saver mcore, mcore-local or "
        "torch_dist"
    )


def _for_core(family: str, arguments: Mapping[str, object], era: Era, scalars: OptimizerScalars | None) -> str:
    """Return a message with the flags that Megatron-core needs to resume from the checkpoint."""
    if family in OWN_STACKS:
        return "Megatron-core 0.18 has classes for it (BertModel, T5Model), and no script that trains them"
    dist = arguments["ckpt_format"] == "torch_dist"
    flags = [f"--ckpt-format {arguments['ckpt_format']}"]
    flags += [] if dist else ["--no-load-rng"]  # a torch_dist folder records the absence of random states
    if scalars is None:
        flags += [] if dist else ["--no-load-optim"]
    elif overridden(scalars):
        flags.append("--override-opt_param-scheduler")
    else:
        flags.append("--use-checkpoint-opt_param-scheduler")
    if scalars is not None and arguments["use_distributed_optimizer"]:
        flags += ["--use-distributed-optimizer"] if dist else ["--use-distributed-optimizer (no --overlap-grad-reduce)"]
    flags += [] if dist else [f"--transformer-impl {'local' if era == 'core-local' else 'transformer_engine'}"]
    return f"Megatron-core 0.18 loads it with: {' '.join([*flags, *core_flags(arguments)])}"


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to a checkpoint that Megatron-LM loads. One rank's file is in memory at a time."""
    era, tp, pp, ep = STYLES[to], options.layout.tp, options.layout.pp, options.layout.ep
    experts = (own.model.experts or ep) // ep
    metadata = tree_metadata(own, to, era, options)
    model, weights = architecture(own.model), written_table(own.model, tp, pp)

    def fill(folder: Path, table: Table, source: Source) -> int:
        bytes_written = 0
        of_rank: dict[str, list[Target]] = {}
        for target in table.targets:
            of_rank.setdefault(re.sub(r"^(\w+/)?(\d+\.\d+)\..*", r"\2", target.name), []).append(target)
        for label, rank_targets in of_rank.items():
            rank, stage = map(int, label.split("."))
            content = {
                re.sub(r"\d+\.\d+\.\d+/", "", target.name): whole_tensor(target, source) for target in rank_targets
            }
            state = {key: content.pop(key) for key in list(content) if key.partition("/")[0] in metadata.kinds}
            for expert_rank in range(ep):
                directory = folder / f"iter_{metadata.iteration:07d}" / rank_directory(rank, stage, pp, expert_rank, ep)
                directory.mkdir(parents=True)
                own_content, own_state = (names_of_rank(each, expert_rank, experts) for each in (content, state))
                global_rank = (stage * ep + expert_rank) * tp + rank
                bytes_written += _write_rank(directory, own_content, own_state, metadata, era, model, global_rank)
        write_tracker(folder, metadata.iteration)
        return bytes_written

    combined = joined([weights, *(state_table(weights, kind) for kind in metadata.kinds)])
    tensors = OwnSource(own.checkpoint, ("weights", *metadata.kinds)) if metadata.kinds else own.source
    return Export(combined, fill, tensors, notes=metadata.notes)


def _write_rank(
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    metadata: TreeMetadata,
    era: Era,
    model: Architecture,
    rank: int,
) -> int:
    """Write one rank's files, and return their size in bytes. weights: common name -> weight. state: `kind/common name`
    -> tensor. rank: Megatron's global rank."""
    bytes_written = 0
    if metadata.scalars is not None and metadata.flat:
        bytes_written += write_torch(directory / DISTRIBUTED, written_vectors(weights, state, era, tied=model.tied))
    content = {
        "args": argparse.Namespace(**metadata.arguments, rank=rank),
        "checkpoint_version": 3.0,
        "iteration": metadata.iteration,
        "model": nested(weights, era, model.family),
        **_optimizer_entries(state, metadata, era),
    }
    return bytes_written + write_torch(directory / WEIGHTS, content)


def _optimizer_entries(state: Mapping[str, torch.Tensor], metadata: TreeMetadata, era: Era) -> dict[str, object]:
    if metadata.scalars is None:
        return {}
    apart = metadata.arguments.get("expert_model_parallel_size", 1) != 1
    return written_state(state, metadata.scalars, era, flat=metadata.flat, experts_apart=apart)


def write_tracker(folder: Path, iteration: int) -> None:
    """Write the tracker file, from which Megatron reads the newest iteration."""
    with new_file(folder / TRACKER) as descriptor:
        write_all(descriptor, str(iteration).encode())


def written_table(options: ModelConfig, tp: int, pp: int) -> Table:
    """Return the table for a checkpoint on `tp` x `pp` ranks. Errors: ValueError naming the flag by whose value the
    model is not divisible."""
    model = architecture(options)
    of_stages = {"layers": len(model.layers)} if len(model.stacks) == 1 else {}
    for flag, ranks, numbers in (("--tp", tp, model.block.shared), ("--pp", pp, of_stages)):
        for name, number in numbers.items():
            if number % ranks:
                raise ValueError(f"{flag} {ranks}: must divide {name} {number} for Megatron-LM")
    return table(options, tp, written_stages(model, pp), model.input.rows(tp) // tp)


_Tree: TypeAlias = "torch.Tensor | dict[str, _Tree]"


def nested(content: Mapping[str, torch.Tensor], era: Era, family: str = "gpt") -> Mapping[str, object]:
    """Return the model's state dict for one file. Megatron-core's state dicts are flat, in the order of the modules.
    Legacy state dicts are nested down to the stacks and heads, within which names are dotted."""
    if ERAS[era].core and family in OWN_STACKS:
        ordered = in_order(content, "", era)
        flat = {styled(name, era, family): tensor for name, tensor in ordered.items()}
        return flat | {alias: flat[name] for alias, name in ALIASES.get(family, {}).items() if name in flat}
    if ERAS[era].core:
        return _flat(content, era)
    tree: dict[str, _Tree] = {}
    for name, tensor in content.items():
        depth = 2 if name.startswith(("encoder.", "decoder.", "pooler.")) else 1 if name.startswith(HEADS) else -1
        *path, leaf = styled(name, era).split(".", depth)
        branch = tree
        for step in path:
            below_it = branch.setdefault(step, {})
            assert isinstance(below_it, dict)
            branch = below_it
        branch[leaf] = tensor
    return tree


LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
"""Names of the modules that have an extra state in Megatron-core's blocks. The extra state is used for fp8 and is
otherwise empty."""


def _flat(content: Mapping[str, torch.Tensor], era: Era) -> dict[str, torch.Tensor | None]:
    """Return Megatron-core's weights in the order of its modules, and the empty extra states that Megatron-core
    expects."""
    engine, tree = era == "core", dict[str, torch.Tensor | None]()
    empty = torch.empty(0, dtype=torch.uint8) if engine else None
    ordered = [(styled(name, era), tensor) for name, tensor in in_order(content, "", era).items()]
    for number, (name, tensor) in enumerate(ordered):
        module = name.rpartition(".")[0]
        if engine and module.endswith(LINEARS[0]) and name.endswith("weight"):
            tree[module.replace("linear_proj", "core_attention") + "._extra_state"] = empty
        tree[name] = tensor
        following = ordered[number + 1][0] if number + 1 < len(ordered) else ""
        norms = ("decoder.final_layernorm", "q_layernorm", "k_layernorm") if engine else ()
        if module.endswith((*LINEARS, *norms)) and not following.startswith(module + "."):
            tree[f"{module}._extra_state"] = empty
    if ordered[-1][0].startswith(("decoder.final_layernorm", "output_layer")):
        tree["output_layer._extra_state"] = None
    return tree


def rank_directory(tp_rank: int, stage: int, pp: int, expert_rank: int = 0, ep: int = 1) -> str:
    """Return the name of a rank's folder.

    >>> rank_directory(1, 0, 1), rank_directory(1, 0, 1, 3, 4), rank_directory(1, 2, 4, 3, 4)
    ('mp_rank_01', 'mp_rank_01_003', 'mp_rank_01_002_003')
    """
    return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{expert_rank:03d}" if ep > 1 else "")
