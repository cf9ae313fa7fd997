"""2,000 random runs over random corpora: length, micro batch, ramp, data-parallel size changed on the way, epochs,
blend, stop points. Each sample once an epoch, the same order after every resume, the same count on every rank.

    python tests/battery/data_order.py [item ...]      # an item is 100 cases
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.batch import DecoderBatch
from mega.core.config.resolve import global_batch_at
from mega.core.config.sections import BatchConfig, DataConfig
from mega.core.data.batches import Batches
from mega.core.data.build import build_datasets
from mega.core.data.dataset import BlendedDataset, Dataset
from mega.core.data.order import epochs
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.battery.data_ledger import run

MEMORY = Path("/dev/shm")
HOME = Path(tempfile.mkdtemp(prefix="mega-order-", dir=MEMORY if MEMORY.is_dir() else None))
SIZES = (1, 2, 5, 40, 150)  # documents of the corpora
VOCAB = 100_000


def corpora() -> list[tuple[str, int]]:
    """Prefix and tokens of each corpus. Every token of all corpora is another id, so that each place is known by it."""
    rng, made, first = random.Random(0), [], 0
    for number, documents in enumerate(SIZES * 2):
        prefix, begin = HOME / f"c{number}", first
        with IndexedWriter(prefix, np.dtype("<i4")) as writer:
            for _ in range(documents):
                length = rng.choice((1, 2, 7, rng.randrange(1, 60)))
                writer.add([list(range(first, first + length))])
                first += length
        made.append((str(prefix), first - begin))
    return made


CORPORA = corpora()


class Case(NamedTuple):
    """batch: with its ramp; splits: how many data-parallel ranks read from which sample on."""

    data: DataConfig
    batch: BatchConfig
    seq_length: int
    seed: int
    ranks: list[int]
    stops: list[int]


def drawn(rng: random.Random) -> Case:
    micro, most = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 4))
    group = micro * most
    batch = group * rng.randrange(1, 5)
    samples = batch * rng.randrange(1, 30)
    ramp: tuple[int, ...] = ()
    if batch > group and rng.random() < 0.5:
        ramp = (group, group, rng.randrange(1, samples + 1))
    seq_length = rng.choice((1, 2, 5, 16, 64))
    large = [prefix for prefix, tokens in CORPORA if tokens > seq_length]
    prefixes = rng.sample(large, rng.randrange(1, min(4, len(large)) + 1))
    words = [word for prefix in prefixes for word in (str(round(rng.uniform(0.01, 5), 3)), prefix)]
    style = rng.random()
    path = prefixes[:1] if style < 0.5 else prefixes if style < 0.7 else words
    data = DataConfig(
        data_path=tuple(path),
        split="1,0,0",
        data_cache=str(HOME / "cache"),
        order="cyclic" if rng.random() < 0.2 else "single",
        mmap=rng.random() < 0.5,
    )
    ranks = [most] if data.order == "cyclic" else [rank for rank in range(1, most + 1) if most % rank == 0]
    return Case(
        data,
        BatchConfig(micro_batch=micro, global_batch=batch, samples=samples, rampup=ramp, seq_length=seq_length),
        seq_length,
        rng.randrange(10_000),
        ranks,
        sorted(rng.randrange(samples) for _ in range(rng.randrange(4))),
    )


def steps(case: Case) -> list[tuple[int, int]]:
    """First sample and samples of every step."""
    found, consumed = [], 0
    assert case.batch.samples is not None
    while consumed < case.batch.samples:
        size = global_batch_at(case.batch, consumed)
        found.append((consumed, size))
        consumed += size
    return found


Rows = dict[int, tuple[int, ...]]
"""Global sample number -> its tokens."""


def straight(case: Case, dataset: Dataset) -> list[Rows]:
    """What each step reads on the largest number of ranks, none of them ever stopping."""
    return [read(case, dataset, case.ranks[-1], [step])[0] for step in steps(case)]


def read(case: Case, dataset: Dataset, ranks: int, chosen: list[tuple[int, int]], ahead: bool = False) -> list[Rows]:
    """What some steps read, on ranks that begin with the first of them."""
    assert case.batch.micro_batch is not None
    micro = case.batch.micro_batch
    readers = [
        Batches(
            dataset, micro_batch=micro, vocab=VOCAB, dp_index=rank, dp_size=ranks, read_ahead=ahead,
            order="cyclic" if case.data.order == "cyclic" else "single",
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = []
    for first, size in chosen:
        rows: Rows = {}
        for rank, reader in enumerate(readers):
            batches = reader.take(first, size // (micro * ranks))
            own = [int(sample) for batch in batches for sample in batch.samples]
            assert len(own) == size // ranks, (rank, len(own), size)
            for batch in batches:
                assert isinstance(batch, DecoderBatch)
                for sample, tokens, labels in zip(batch.samples, batch.tokens, batch.labels, strict=True):
                    assert int(sample) not in rows
                    rows[int(sample)] = (*tokens.tolist(), int(labels[-1]))
        assert sorted(rows) == list(range(first, first + size))
        found.append(rows)
    return found


def one(case: Case) -> Counter[str]:
    steps_of, total = steps(case), sum(size for _, size in steps(case))
    made = build_datasets(case.data, seq_length=case.seq_length, seed=case.seed, vocab=VOCAB, samples=(total, 0, 0))
    dataset = made.train
    assert dataset is not None and len(dataset) >= total
    whole = straight(case, dataset)

    # Each sample once an epoch: every token of a corpus is a label as often as the corpus is passed over.
    if not isinstance(dataset, BlendedDataset):
        tokens = dict(CORPORA)[case.data.data_path[-1]]
        passes = epochs(tokens, case.seq_length, total)
        labels = Counter(label for i in range(len(dataset)) for label in dataset[i][1:].tolist())
        assert max(labels.values()) <= passes and passes * tokens - labels.total() <= case.seq_length
    elif case.data.data_path[0][0].isdigit():
        weights = np.array([float(word) for word in case.data.data_path[::2]])
        owner = {prefix: i for i, prefix in enumerate(case.data.data_path[1::2])}
        chosen = np.bincount([int(dataset._chosen[i]) for i in range(total)], minlength=len(owner))
        assert (abs(chosen - total * weights / weights.sum()) < len(owner)).all()
    group = case.batch.micro_batch * case.ranks[-1]
    epoch = len(dataset) // group * group if case.data.order == "cyclic" else len(dataset)
    every = {number: row for rows in whole for number, row in rows.items()}
    if case.data.order == "single":
        assert all(every[i] == tuple(dataset[i].tolist()) for i in range(total))
    else:
        pool = Counter(tuple(dataset[i].tolist()) for i in range(len(dataset)))
        for first in range(0, total, epoch):
            assert Counter(every[i] for i in range(first, min(first + epoch, total))) <= pool

    # The same order after every stop, on other ranks, from a cache that another process could have written.
    again = build_datasets(case.data, seq_length=case.seq_length, seed=case.seed, vocab=VOCAB, samples=(total, 0, 0))
    assert again.train is not None
    bounds = [0, *(next(i for i, (first, size) in enumerate(steps_of) if first + size > s) for s in case.stops)]
    rng = random.Random(case.seed)
    resumed: list[Rows] = []
    for begin, end in zip(bounds, [*bounds[1:], len(steps_of)], strict=True):
        ranks = rng.choice(case.ranks)
        resumed += read(case, again.train, ranks, steps_of[begin:end], ahead=end - begin > 2 and rng.random() < 0.1)
    assert resumed == whole
    return Counter(
        blend=isinstance(dataset, BlendedDataset),
        ramp=bool(case.batch.rampup),
        cyclic=case.data.order == "cyclic",
        epochs=len(made.notes) > 0,
        stops=len(case.stops),
        samples=total,
    )


def cases(seed: int) -> Any:
    def prove() -> dict[str, Any]:
        rng, found = random.Random(seed), Counter[str]()
        for number in range(100):
            case = drawn(rng)
            try:
                found += one(case)
            except Exception as error:
                raise AssertionError(f"case {number}: {type(error).__name__} {error} in {case}") from error
        return {"cases": 100, **found}

    return prove


if __name__ == "__main__":
    try:
        run("data_order", [(f"cases {seed}", cases(seed)) for seed in range(20)])
    finally:
        shutil.rmtree(HOME)
