"""Direct preference optimisation (DPO) as a kind of task: pairs of answers, and their log-probabilities under a
reference.

    1 the reference   log-probabilities of all answers under the initial weights, without dropout, computed once before
                      training: the pairs are divided among the data ranks, then all ranks receive all values
    2 its cache       in --data-cache, or under --save, keyed by the digests of these weights and of the pairs
    3 training        the loss of `Preference` (model/objective.py), for each pair

When a run resumes, its weights have already changed, so the run reads the reference from the cache. If the cache has no
entry, the run loads the initial weights from --load again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from mega.core.architecture import architecture
from mega.core.config.run import RunConfig
from mega.core.files import url_of
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.kinds import pretraining
from mega.core.training.kinds.kind import TaskKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mega.core.data.build import Datasets
    from mega.core.data.pairs import PairDataset
    from mega.core.model.objective import Objective
    from mega.core.training.saves.resume import ResumePoint
    from mega.core.training.state import TrainState


def datasets(run: RunConfig, tokenizer: Tokenizer | None) -> Datasets:
    """Return the pairs of --dpo-data and of --valid-sets. Errors: ValueError naming flag, file and line."""
    from mega.core.data.build import Datasets, named_sets
    from mega.core.data.pairs import pair_dataset
    from mega.core.text.chat.format import chat_format, shown

    if tokenizer is None:
        raise ValueError("--dpo-data: needs a tokenizer; give --tokenizer and its files")
    name, (train, _, test), notes = run.data.chat_template, pretraining.requested(run), list[str]()
    template = chat_format(name, tokenizer)
    size = {"seq_length": run.batch.seq_length, "seed": run.runtime.seed}

    def pairs(flag: str, inputs: tuple[str, ...], count: int) -> PairDataset:
        return pair_dataset(flag, inputs, tokenizer, template, samples=count, note=notes.append, **size)

    example: tuple[str, ...] = (f"conversations by the template {name}",)
    trained = pairs("--dpo-data", run.finetuning.dpo_data, train) if train else None
    if trained is not None:
        preferred, other = (shown(trained.answer(row), tokenizer) for row in range(2))
        example += (f"preferred, what is judged in ⟦⟧: {preferred}", f"to: {other}")
    named_pairs = {label: pairs("--valid-sets", (file,), test) for label, file in named_sets(run.data) if test}
    return Datasets(train=trained, named=named_pairs, notes=tuple(notes), example=example)


def objective(run: RunConfig) -> Objective:
    from mega.core.model.objective import Preference

    return Preference(run.finetuning.dpo_beta, run.finetuning.dpo_label_smoothing)


def begin(state: TrainState, data: Datasets, point: ResumePoint | None) -> None:
    """Set the reference log-probabilities of every dataset. Errors: ValueError if the initial weights are no longer
    available."""
    state.reference = _first_weights(state.run, point)
    sets = [cast("PairDataset", each) for each in (data.train, *data.named.values()) if each is not None]
    cache = _cache(state.run)
    for dataset in sets:
        dataset.unit = _unit(state)
        dataset.reference = _known(state, cache, _key(state, dataset), dataset.pairs)
    missing = [dataset for dataset in sets if dataset.reference is None]
    if not missing:
        return
    resumed = point is not None and not point.weights_only
    if resumed:  # the initial weights replace those of the checkpoint until the reference is computed
        _load_first(state)
    for dataset in missing:
        dataset.reference = log_probabilities(state, dataset)
        _keep(state, cache, _key(state, dataset), dataset.reference)
    if resumed:
        from mega.core.training.saves.resume import restore

        assert point is not None
        restore(state, point)


def _unit(state: TrainState) -> int | None:
    """Return the multiple to which the width of microbatches is padded, so that few widths occur; None if all
    microbatches must have the same shape."""
    from mega.core.config.resolve import column_unit, records_graph

    if state.overlaps or (state.device.is_cuda and records_graph(state.run, state.mesh.world)):
        return None
    return 8 * column_unit(state.run.parallel)


def log_probabilities(state: TrainState, dataset: PairDataset) -> NDArray[np.float64]:
    """Return float64 [pairs, 2]: the log-probabilities of both answers of every pair under the current weights, on
    every rank."""
    import torch

    from mega.core.parallel.collectives import all_reduce
    from mega.core.training.step import output_step

    mesh, run = state.mesh, state.run
    size = run.batch.micro_batch
    values = torch.zeros(dataset.pairs, 2, dtype=torch.float64, device=state.device.torch)
    for first in range(0, dataset.pairs, size * mesh.dp.size):
        numbers = range(first + mesh.dp.index * size, first + (mesh.dp.index + 1) * size)
        # Ranks without a pair compute the last pair again, because all ranks must run the same number of passes.
        rows = [dataset.pair(min(number, dataset.pairs - 1)) for number in numbers]
        batch = dataset.collate(rows, numbers.start).to(state.device.torch)
        outputs = output_step(state, [batch])
        if outputs and mesh.tp.first:
            assert outputs[0].shape == (2 * len(rows),), "a log-probability for each row"
            valid = [number for number in numbers if number < dataset.pairs]
            values[valid] = outputs[0].view(-1, 2).double()[: len(valid)]
    all_reduce(values, mesh.everyone)  # each pair was computed by one rank; other ranks add 0
    return values.cpu().numpy()


def _first_weights(run: RunConfig, point: ResumePoint | None) -> str:
    """Return an identifier of the initial weights: a digest, or the seed from which the weights are generated."""
    if point is None:
        return f"seed {run.runtime.seed} of {run.model}"
    if point.weights_only:
        return point.checkpoint.digest
    return str(point.checkpoint.meta.get("reference") or point.checkpoint.digest)


def _load_first(state: TrainState) -> None:
    """Load the initial weights into the state."""
    from mega.core.checkpoint.forms.open import comparable_digest, open_base, open_weights
    from mega.core.checkpoint.own.base import named_base
    from mega.core.checkpoint.own.pieces import CheckpointError
    from mega.core.training.saves.resume import ResumePoint, restore

    path = state.run.checkpoint.load
    if path is None:
        raise ValueError("--task dpo: the reference's log-probabilities are not kept; give --load with its weights")
    first = open_weights(path, exchange=state.exchange)
    if comparable_digest(state.reference or "", first) != state.reference:
        raise CheckpointError(f"--load {path}: is not what this run began with, which its reference needs")
    adapters = architecture(state.run.model).adapters
    if adapters is not None and named_base(first) is None:  # the initial weights had no adapters
        for bucket in state.grads.buckets:
            bucket.own_weights.zero_()
            if state.grads.zero < 3:
                bucket.weights.zero_()
    restore(state, ResumePoint(first, weights_only=True, base=open_base(first, None, exchange=state.exchange)))


# The cache


def _cache(run: RunConfig) -> Path | None:
    save = run.checkpoint.save
    if run.data.data_cache:
        return Path(run.data.data_cache)
    return Path(save) / "reference" if save and not url_of(save) else None


def _key(state: TrainState, dataset: PairDataset) -> Mapping[str, object]:
    return {
        "kind": "dpo reference",
        "weights": state.reference,
        "pairs": dataset.digest,
        "dtype": state.run.precision.dtype,
    }


class _Missing(Exception):
    """Raised if the cache has no entry for a key."""


def _known(state: TrainState, cache: Path | None, key: Mapping[str, object], pairs: int) -> NDArray[np.float64] | None:
    """Return, on all ranks, the reference that rank 0 reads from the cache; None if the cache has no entry."""
    import numpy as np
    import torch

    from mega.core.data.cache import cached
    from mega.core.parallel.collectives import all_reduce

    def missing() -> NoReturn:
        raise _Missing

    # The values and, as the last element, whether rank 0 has found them.
    values = torch.zeros(2 * pairs + 1, dtype=torch.float64)
    if state.mesh.rank == 0 and cache is not None:
        try:
            entry = cached(cache, key, ("reference",), missing)["reference"]
            values[:-1], values[-1] = torch.from_numpy(np.array(entry)).view(torch.float64), 1.0
        except _Missing:
            pass
    values = values.to(state.device.torch)
    all_reduce(values, state.mesh.everyone)
    return values[:-1].view(pairs, 2).cpu().numpy() if bool(values[-1]) else None


def _keep(state: TrainState, cache: Path | None, key: Mapping[str, object], values: NDArray[np.float64]) -> None:
    import numpy as np

    from mega.core.data.cache import cached

    if state.mesh.rank == 0 and cache is not None:
        cached(cache, key, ("reference",), lambda: {"reference": values.reshape(-1).view(np.int64)})


KIND = TaskKind(datasets, pretraining.task, objective, begin)
