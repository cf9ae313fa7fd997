"""What lies at a path, and which flags of a conversion mean something for what is read and what is written.

A kind is told by the names of files; no tensor is read. A flag that could only be ignored is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega.core.checkpoint.forms import fairseq, megatron, torch_dist
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import store_at
from mega.core.files import url_of

Kind = Literal["mega", "hf", "meta", "llama2.c", "fairseq", "megatron", "torch_dist"]
"""What can be read."""

Target = Literal["mega", "hf", "meta"]
"""What `convert-llama` writes."""

NAMES: dict[Kind, str] = {
    "mega": "a checkpoint of ours",
    "hf": "a Hugging Face folder",
    "meta": "a Meta folder",
    "llama2.c": "a llama2.c file",
    "fairseq": "a fairseq folder",
    "megatron": "a tree of Megatron-LM",
    "torch_dist": "a torch_dist folder of Megatron-LM",
}


def kind_of(path: Path) -> Kind:
    """What lies at `path`. Errors: CheckpointError if none of them, or both ours and another's."""
    if url_of(path) is None and not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    foreign = _foreign_kind(path)
    steps = store_at(path).steps() if foreign is None or path.is_dir() else []
    if foreign is not None and steps:
        ours = f"checkpoints of ours (steps {', '.join(map(str, steps))})"
        raise CheckpointError(
            f"{path}: holds {NAMES[foreign]} and {ours}, and which is meant cannot be told; give the step-NNNNNNN, or "
            "move one of the two elsewhere"
        )
    if foreign is not None:
        return foreign
    if (path / "manifest.json").exists() or steps:
        return "mega"
    raise CheckpointError(
        f"{path}: holds no config.json (Hugging Face), no params.json with consolidated.NN.pth (Meta), "
        "no model-model_part-N.pt (fairseq), no mp_rank_NN (Megatron-LM), no .metadata (torch_dist) and no "
        "step-NNNNNNN (mega), and is no .bin or .pt (llama2.c)"
    )


def check_place(save: Path) -> None:
    """See that checkpoints of ours at `save` will be told as such. Errors: ValueError where others' weights are there.

    Beside them nobody could tell which of the two models is meant, and the next conversion would take the other one.
    """
    foreign = _foreign_kind(save) if url_of(save) is None and save.exists() else None
    if foreign is not None:
        raise ValueError(f"--save-dir {save}: holds {NAMES[foreign]}; must be a run's directory, or new")


def _foreign_kind(path: Path) -> Kind | None:
    """What others have written at `path`, told by the names of files; None where nothing of theirs is there."""
    if path.suffix in (".bin", ".pt") and not path.is_dir():
        return "llama2.c"
    if torch_dist.is_distributed(megatron.iteration_of(path)):
        return "torch_dist"
    if megatron.is_tree(path):
        return "megatron"
    if fairseq.parts_of(path):
        return "fairseq"
    if (path / "params.json").exists() and any(path.glob("consolidated.*.pth")):
        return "meta"
    if (path / "config.json").exists() and not (path / "manifest.json").exists():
        return "hf"
    return None


@dataclass(frozen=True)
class Use:
    """Where a flag means something: where one of `load` is read or one of `save` is written.

    unset: the value that asks for nothing. rule: what is said elsewhere.
    """

    rule: str
    load: tuple[Kind, ...] = ()
    save: tuple[Kind, ...] = ()
    unset: object = None


_RANKS = Use(
    "only checkpoints of ours and trees of Megatron-LM are cut for ranks; leave it out (a Meta folder has --parts)",
    save=("mega", "megatron"),
    unset=1,
)
_VOCABULARY = Use(
    "only Megatron-LM pads vocabularies in its files; leave it out",
    load=("megatron", "torch_dist"),
)

_STAGES = "only checkpoints of ours are cut for chunks and uneven stages; leave it out"

USES = {
    "--target-tensor-parallel-size": _RANKS,
    "--target-pipeline-parallel-size": _RANKS,
    "--chunks": Use(_STAGES, save=("mega",), unset=1),
    "--stage-layers": Use(_STAGES, save=("mega",), unset=()),
    "--parts": Use("only a Meta folder has parts; leave it out, or give --to meta", save=("meta",), unset=1),
    "--true-vocab-size": _VOCABULARY,
    "--vocab-file": _VOCABULARY,
    "--num-attention-heads": Use("only a torch_dist folder may not say it; leave it out", load=("torch_dist",)),
    "--no-load-optim": Use(
        "only from and to Megatron-LM an optimizer's state can be left behind; leave it out",
        load=("megatron", "torch_dist"),
        save=("megatron",),
        unset=False,
    ),
}
"""Flags of `convert-llama` and `reshard` that mean nothing for some pairs of kinds."""


def check_flags(source: Kind, target: Kind, given: Mapping[str, object]) -> None:
    """Errors: ValueError naming the first of the flags (spelled as in `USES`) that asks for what `target` has not."""
    for flag, value in given.items():
        use = USES[flag]
        if type(value) is int and value < 1:
            raise ValueError(f"{flag} {value}: must be 1 or more")
        if value != use.unset and source not in use.load and target not in use.save:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            shown = " ".join(map(str, (flag, *values)))
            raise ValueError(f"{shown}: means nothing from {NAMES[source]} to {NAMES[target]}: {use.rule}")
