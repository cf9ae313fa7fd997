"""Find what changes the order of sums in a run that resumes: options with `on_resume="rounding"`, and a different kind
of device. The results then differ from those of an uninterrupted run by rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mega.core.architecture import padded
from mega.core.config.resolve import gathers_by
from mega.core.config.run import RunConfig, entries, options_with, value_of
from mega.core.parallel.context import divides
from mega.core.parallel.mesh import Mesh
from mega.core.untrusted import Json


def rounding_changes(run: RunConfig, stored: Mapping[str, Json], mesh: Mesh, gpu: bool | None) -> Iterator[str]:
    """Yield each option that changes the order of sums in the layout `mesh`, with its values in this run and in the
    checkpoint.

    stored: the checkpoint's options by name. gpu: whether ranks have GPUs; None if this is unknown.
    """
    ranks = {"tp": mesh.tp.size, "cp": mesh.cp.size, "data": mesh.dp.size * mesh.cp.size, "ep": run.parallel.ep}
    ranks["gpu"] = int(bool(gpu))
    for name in options_with(on_resume="rounding"):
        entry, value, before = entries()[name], as_json(value_of(run, name)), stored.get(name)
        if name not in stored or any(ranks[axis] < least for axis, least in entry.option.rounds_over.items()):
            continue
        if _order(run, name, value, ranks) != _order(run, name, before, ranks):
            if entry.kind is bool:
                yield f"{entry.flag if value else entry.off} (was {entry.flag if before else entry.off})"
            else:
                yield f"{entry.flag} {shown(value)} (was {shown(before)})"


def as_json(value: object) -> Json:
    """Return the value of an option in the format that a checkpoint stores."""
    return list(value) if isinstance(value, tuple) else value  # type: ignore[return-value]


def shown(value: object) -> str:
    """Format the value of an option for a message.

    >>> shown([1, 3]), shown([]), shown(0.5)
    ('1 3', 'none', '0.5')
    """
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def device_change(meta: Mapping[str, Json], gpu: bool | None) -> str | None:
    """Return the kind of device of a run that resumes, if it differs from that of the checkpoint. A checkpoint written
    on GPUs records None as its number of threads."""
    if gpu is None or "threads" not in meta or gpu == (meta["threads"] is None):
        return None
    return "GPUs (was CPUs)" if gpu else "CPUs (was GPUs)"


def _order(run: RunConfig, name: str, value: Json, ranks: Mapping[str, int]) -> object:
    """Return a value that is equal for two values of the option `name` if both lead to the same order of sums."""
    parallel = run.parallel
    if name == "vocab_multiple" and isinstance(value, int):
        return padded(run.model.vocab, parallel.tp, value)  # a GEMM of a different size may add in a different order
    if name == "expert_dispatch":  # the order of two summands does not matter
        return run.model.experts_chosen > 2 and gathers_by(run, str(value))
    if name == "cp_comm" and value == "auto":
        heads, kv_heads = run.model.heads // parallel.tp, run.model.kv_heads // parallel.tp
        return "all-to-all" if divides(heads, kv_heads, parallel.cp) else "ring"
    if name == "stage_layers":
        count = parallel.pp * parallel.chunks
        return list(value) if isinstance(value, list | tuple) and value else [run.model.blocks // count] * count
    if name == "zero" and isinstance(value, int):
        # ZeRO 2 and 3 reduce each microbatch, and ZeRO 3 has different buckets. gloo adds in the same order for an
        # all-reduce and a reduce-scatter; NCCL does not guarantee this. The order of only two summands does not matter.
        if ranks["data"] == 2:
            return value >= 2
        return value if ranks["gpu"] else max(value, 1)
    return value
