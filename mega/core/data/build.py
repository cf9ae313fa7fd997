"""From the data section of a configuration to the datasets of training, validation and test.

Everything that can be wrong with the files is found here: a missing or cut file, an id outside the
vocabulary, a corpus too small for one sample. No torch, so a launcher can do all of it before any rank
starts, and fill the cache that the ranks then read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega.core.config.corpora import expand, is_number
from mega.core.config.sections import DataConfig
from mega.core.data.cache import Arrays, cached
from mega.core.data.chat import ChatDataset, chat_dataset
from mega.core.data.dataset import BlendedDataset, Dataset, MockDataset
from mega.core.data.gpt import GPTDataset
from mega.core.data.indexed import IndexedDataset, bin_path, exists
from mega.core.data.order import (
    SampleOrder,
    blend_order,
    blend_samples,
    blend_shares,
    epochs,
    sample_order,
    split_boundaries,
    split_shares,
)
from mega.core.text.chat import TEMPLATES, template
from mega.core.text.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
_WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}


@dataclass(frozen=True)
class Datasets:
    """A dataset per split, None where nothing was asked or the split is empty; `notes` are for the user.

    named: more validation sets, by the names that the user gave them.
    """

    train: Dataset | None = None
    valid: Dataset | None = None
    test: Dataset | None = None
    named: Mapping[str, Dataset] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def samples_requested(
    *, steps: int, global_batch: int, eval_interval: int, eval_iters: int, train_samples: int | None = None
) -> tuple[int, int, int]:
    """Samples of training, validation and test that a run may read.

    100 steps of 8, validating 5 batches every 50 steps: 800, (100 // 50 + 1) * 5 * 8 = 120, 40.
    """
    train = steps * global_batch if train_samples is None else train_samples
    return train, (steps // eval_interval + 1) * eval_iters * global_batch, eval_iters * global_batch


def parse_blend(flag: str, words: Sequence[str]) -> list[tuple[float | None, str]]:
    """Prefixes, or weight prefix weight prefix ..., as (weight, prefix) pairs; without weights they are None.

    ("0.2", "a", "0.3", "b") -> [(0.2, "a"), (0.3, "b")]; ("a", "b") -> [(None, "a"), (None, "b")].
    """
    if len(words) == 1 or not any(map(is_number, words[::2])):
        return [(None, word) for word in words]
    rule = "must be prefixes, or weight prefix weight prefix ... with weights above 0"
    weights = [float(word) if is_number(word) else -1.0 for word in words[::2]]
    if len(words) % 2 or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"{flag} {' '.join(words)}: {rule}")
    return list(zip(weights, words[1::2], strict=True))


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab: int,
    samples: tuple[int, int, int],
    tokenizer: Tokenizer | None = None,
) -> Datasets:
    """Datasets that hold at least `samples` (train, valid, test) samples of seq_length + 1 tokens.

    vocab: the true vocabulary size, against which every corpus is held.
    Raises ValueError naming flag and file.
    """
    if data.mock_data:
        train, valid, test = (
            MockDataset(samples=count, seq_length=seq_length, vocab=vocab, seed=seed + i) if count else None
            for i, count in enumerate(samples)
        )
        return Datasets(train, valid, test)
    if data.chat_data:
        return Datasets(train=_chat(data, seq_length, seed, samples[0], tokenizer))
    own = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    if data.data_path and any(own.values()):
        raise ValueError(
            f"--data-path {' '.join(data.data_path)}: is split over training, validation and test; it cannot "
            "stand beside --train-data, --valid-data or --test-data"
        )
    if not data.data_path and samples[0] and not data.train_data:
        raise ValueError("--data-path is missing: training needs it, or --train-data, or --mock-data")
    split_shares(data.split)
    builder = _Builder(data.data_cache, seq_length, seed, vocab, mmap=data.mmap)
    made = {
        name: builder.blend(
            "--data-path" if data.data_path else f"--{name}-data",
            expand(data.data_path or own[name], data.corpora),
            data.split if data.data_path else _WHOLE[name],
            name,
            count,
        )
        for name, count in zip(SPLITS, samples, strict=True)
    }
    named = {}
    for word in data.valid_sets:
        label, _, prefix = word.partition("=")
        found = builder.blend("--valid-sets", expand([prefix], data.corpora), _WHOLE["valid"], "valid", samples[2])
        if found is not None:
            named[label] = found
    return Datasets(**made, named=named, notes=tuple(builder.notes))


def _chat(
    data: DataConfig, seq_length: int, seed: int, samples: int, tokenizer: Tokenizer | None
) -> ChatDataset | None:
    if tokenizer is None:
        raise ValueError("--chat-data: needs a tokenizer; give --tokenizer and its files")
    if not samples:
        return None
    name = data.chat_template
    made = template(name, tokenizer)
    key = name if name in TEMPLATES else Path(name).read_text()
    cache = Path(data.data_cache) if data.data_cache else None
    return chat_dataset(
        data.chat_data, tokenizer, made, key, seq_length=seq_length, samples=samples, seed=seed, cache=cache
    )


class _Builder:
    """Opens every corpus once and collects what the user should be told."""

    def __init__(self, cache: str | None, seq_length: int, seed: int, vocab: int, *, mmap: bool) -> None:
        self._cache, self._seq_length, self._seed, self._vocab, self._mmap = cache, seq_length, seed, vocab, mmap
        self._corpora: dict[str, IndexedDataset] = {}
        self.notes: list[str] = []

    def blend(self, flag: str, words: Sequence[str], split: str, name: str, samples: int) -> Dataset | None:
        """The dataset of one split; None where nothing is asked of it or it is empty."""
        if not words or not samples:
            return None
        given = parse_blend(flag, words)
        ranges = [self._range(flag, prefix, split, name) for _, prefix in given]
        # A corpus whose part is empty leaves the blend; the others share its weight.
        parts = [pair for pair, (first, last) in zip(given, ranges, strict=True) if first < last]
        if not parts:
            message = f'{flag} {" ".join(words)}: the {name} part of --split "{split}" is empty'
            if name == "train":
                raise ValueError(message)
            self.notes.append(message)
            return None
        if len(given) == 1:
            return self._gpt(flag, parts[0][1], split, name, samples)
        # Without weights each corpus has its own size, so that all end together.
        shares = blend_shares(
            [self._samples_once(flag, prefix, split, name) if weight is None else weight for weight, prefix in parts]
        )
        counts = blend_samples(shares, samples)
        datasets = [
            self._gpt(flag, prefix, split, name, count) for (_, prefix), count in zip(parts, counts, strict=True)
        ]
        size = sum(counts)
        arrays = cached(
            self._directory(parts[0][1]),
            {"kind": "blend", "shares": shares, "size": size},
            ("chosen", "numbers"),
            lambda: dict(zip(("chosen", "numbers"), blend_order(shares, size), strict=True)),
        )
        return BlendedDataset(datasets, arrays["chosen"], arrays["numbers"])

    def _gpt(self, flag: str, prefix: str, split: str, name: str, samples: int) -> GPTDataset:
        corpus = self._corpus(flag, prefix)
        first, last = self._range(flag, prefix, split, name)
        tokens = int(corpus.lengths[first:last].sum(dtype="int64"))
        if tokens <= self._seq_length:
            raise ValueError(
                f"{flag} {prefix}: its {name} part has {tokens} tokens, needs {self._seq_length + 1} for one "
                f"sample of --seq-length {self._seq_length}"
            )
        passes = epochs(tokens, self._seq_length, samples)
        if passes > 1:
            self.notes.append(
                f"{name}: {prefix} has {tokens:,} tokens; {samples:,} samples of {self._seq_length} take "
                f"{passes} epochs"
            )
        key = {
            "kind": "gpt",
            "corpus": corpus.fingerprint,
            "sequences": [first, last],
            "seq_length": self._seq_length,
            "samples": samples,
            "seed": self._seed,
        }

        def compute() -> Arrays:
            length, seed = self._seq_length, self._seed
            return vars(sample_order(corpus.lengths, first, last, seq_length=length, samples=samples, seed=seed))

        arrays = cached(self._directory(prefix), key, ("documents", "samples", "shuffle"), compute)
        return GPTDataset(corpus, SampleOrder(**arrays), self._seq_length)

    def _samples_once(self, flag: str, prefix: str, split: str, name: str) -> float:
        """Samples that one pass over this part of a corpus gives."""
        first, last = self._range(flag, prefix, split, name)
        tokens = int(self._corpus(flag, prefix).lengths[first:last].sum(dtype="int64"))
        return max((tokens - 1) // self._seq_length, 1)

    def _range(self, flag: str, prefix: str, split: str, name: str) -> tuple[int, int]:
        """First sequence of a split and the one behind its last; equal where it is empty."""
        bounds = split_boundaries(split, len(self._corpus(flag, prefix)))
        part = SPLITS.index(name)
        return bounds[part], bounds[part + 1]

    def _corpus(self, flag: str, prefix: str) -> IndexedDataset:
        """The checked token files of `prefix`, opened once."""
        if prefix not in self._corpora:
            self._corpora[prefix] = _open(flag, prefix, self._vocab, mmap=self._mmap)
        return self._corpora[prefix]

    def _directory(self, prefix: str) -> Path:
        return Path(self._cache) if self._cache else Path(prefix).parent / "index-cache"


def _open(flag: str, prefix: str, vocab: int, *, mmap: bool) -> IndexedDataset:
    """A corpus whose files agree and whose ids the vocabulary has."""
    if not exists(prefix):
        stem = prefix.removesuffix(".bin").removesuffix(".idx")
        near = [near for near in (stem, f"{stem}_text_document") if near != prefix and exists(near)]
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{flag} {prefix}: {bin_path(prefix)} or its .idx does not exist{hint}")
    try:
        corpus = IndexedDataset(prefix, mmap=mmap)
    except ValueError as error:
        raise ValueError(f"{flag} {prefix}: {error}") from None
    smallest, largest = corpus.token_range()
    if smallest < 0 or largest >= vocab:
        raise ValueError(
            f"{flag} {prefix}: holds token ids {smallest} .. {largest}, but the vocabulary's are 0 .. "
            f"{vocab - 1}: it was made with another tokenizer"
        )
    return corpus
