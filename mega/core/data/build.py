"""Build the datasets for training, validation and test from the data section of a configuration.

This module reports all errors in files, such as a missing or truncated file, an id outside the vocabulary, or a corpus
that is too small for one sample. This module does not import torch, so that a launcher can build the datasets and fill
the cache before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mega.core.config.corpora import expand, is_number
from mega.core.config.sections import SPLITS, DataConfig, MaskingConfig
from mega.core.data.cache import Arrays, cached
from mega.core.data.chat import ChatDataset, chat_dataset
from mega.core.data.dataset import BlendedDataset, Dataset, DeferredDataset, MockDataset
from mega.core.data.gpt import GPTDataset
from mega.core.data.indexed import IndexedDataset, bin_path, exists
from mega.core.data.infill import infill_of
from mega.core.data.order import (
    blend_order,
    blend_parts,
    blend_samples,
    blend_shares,
    entries_served,
    split_boundaries,
    split_note,
    split_shares,
)
from mega.core.data.phases import BlendPhase, PhaseLayout, phased_dataset
from mega.core.data.recipes import CorpusPart, Gpt, Recipe, description, recipe
from mega.core.data.tfrecords import record_dataset
from mega.core.terminal import discard
from mega.core.text.chat.format import chat_format, shown
from mega.core.text.identity import ALLOW, judge, other_files
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json

_GPT = MaskingConfig()
_WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run. The dataset of a split is None if no samples are requested or the split is empty."""

    train: Dataset | None = None
    """Training set."""
    valid: Dataset | None = None
    """Validation set."""
    test: Dataset | None = None
    """Test set."""
    named: Mapping[str, Dataset] = field(default_factory=dict)
    """Additional validation sets, under the names that the user gave."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    corpora: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Prefix of token files -> hashes of their content."""
    repeats: bool = False
    """Whether the training set reads a corpus more than once."""
    example: tuple[str, ...] = ()
    """A sample, formatted for display before the first step."""
    one_pass: int | None = None
    """Number of samples in one pass over the training set; None if weights cause different numbers of passes over the
    corpora."""
    phases: tuple[BlendPhase, ...] = ()
    """Blends that the training set used earlier in the run."""
    described: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Split -> descriptions of the corpora in the split's blend, each with all settings that determine the samples."""


def samples_requested(
    *, steps: int, global_batch: int, eval_interval: int, eval_iters: int, train_samples: int | None = None
) -> tuple[int, int, int]:
    """Return the maximum numbers of training, validation and test samples that a run reads.

    Example: 100 steps with batches of 8, and 5 validation batches every 50 steps, need 800, (100 // 50 + 1) * 5 * 8 =
    120 and 40 samples.
    """
    train = steps * global_batch if train_samples is None else train_samples
    return train, (steps // eval_interval + 1) * eval_iters * global_batch, eval_iters * global_batch


def parse_blend(flag: str, words: Sequence[str]) -> list[tuple[float | None, str]]:
    """Parse a list of prefixes, or of alternating weights and prefixes, into (weight, prefix) pairs. Without weights,
    each weight in the result is None.

    ("0.2", "a", "0.3", "b") -> [(0.2, "a"), (0.3, "b")]; ("a", "b") -> [(None, "a"), (None, "b")].
    """
    if len(words) == 1 or not any(map(is_number, words[::2])):
        return [(None, word) for word in words]
    rule = "must be prefixes, or weight prefix weight prefix ... with weights above 0"
    weights = [float(word) if is_number(word) else -1.0 for word in words[::2]]
    if len(words) % 2 or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"{flag} {' '.join(words)}: {rule}")
    if not sum(weights) < float("inf"):  # an infinite sum would make each share 0
        raise ValueError(f"{flag} {' '.join(words)}: the weights' sum must be a finite number")
    return list(zip(weights, words[1::2], strict=True))


Check = Callable[[str, Sequence[str]], object]
"""Function that raises ValueError if a split with the given descriptions cannot be used."""


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab: int,
    samples: tuple[int, int, int],
    tokenizer: Tokenizer | None = None,
    masking: MaskingConfig = _GPT,
    pairs: bool = True,
    by_corpus: bool = False,
    phases: Sequence[BlendPhase] = (),
    check: Check | None = None,
    defer: bool = False,
) -> Datasets:
    """Build datasets with at least `samples` (train, valid, test) samples of the type that `masking` selects.

    seq_length: number of tokens in a sample; a GPT sample has one more. vocab: the true vocabulary size, for checking
    every corpus. pairs: whether a BERT sample has two parts. by_corpus: whether to also use each corpus of the
    validation blend as a separate validation set. phases: earlier blends of the training set. check: function called
    with the name and `described` of each split before its index is written. defer: whether to compute the order of
    samples only when a sample or the length of a dataset is read. Raises ValueError naming flag and file.
    """
    if data.mock_data:
        return _mock(seq_length, seed, vocab, samples)
    if data.chat_data:
        return _chat(data, seq_length, seed, samples, tokenizer)
    split_inputs = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    _check_corpora(data, training=samples[0] > 0)
    if masking.sample_kind == "tfrecords":
        return _records(data, split_inputs, seq_length, seed, vocab, samples)
    split_shares(data.split)
    sample_recipe = recipe(
        masking, seq_length, seed, tokenizer, pairs, data.repeat_short_parts, vocab, infill_of(data, tokenizer, vocab)
    )
    builder = _Builder(sample_recipe, data, vocab, tokenizer, tuple(phases), check, defer)
    datasets: dict[str, Any] = {
        name: builder.blend(
            "--data-path" if data.data_path else f"--{name}-data",
            expand(data.data_path or split_inputs[name], data.corpora),
            data.split if data.data_path else _WHOLE[name],
            name,
            count,
        )
        for name, count in zip(SPLITS, samples, strict=True)
    }
    named, repeats = _named(builder, data, samples[2], by_corpus), "train" in builder.repeated
    return Datasets(**datasets, named=named, repeats=repeats, one_pass=builder.one_pass.get("train"), **builder.about)


def _named(builder: _Builder, data: DataConfig, samples: int, by_corpus: bool) -> dict[str, Dataset]:
    """Return the named validation sets: those of --valid-sets and, if `by_corpus`, each corpus of the blend."""
    datasets = _by_corpus(builder, data, samples) if by_corpus else {}
    for label, word in named_sets(data):
        blended = expand([word], data.corpora), _WHOLE["valid"], "valid", samples
        if (dataset := builder.blend("--valid-sets", *blended)) is not None:
            datasets[label] = dataset
    return datasets


def _by_corpus(builder: _Builder, data: DataConfig, samples: int) -> dict[str, Dataset]:
    """Return the validation split of each corpus of a blend, keyed by the last component of the corpus's prefix.
    Repeated names get a number as suffix."""
    datasets: dict[str, Dataset] = {}
    flag, words = ("--data-path", data.data_path) if data.data_path else ("--valid-data", data.valid_data)
    for _, prefix in parse_blend(flag, expand(words, data.corpora)):
        split = data.split if data.data_path else _WHOLE["valid"]
        name = Path(prefix).name.removesuffix("_document").removesuffix("_text")
        label = name if name not in datasets else f"{name}-{len(datasets) + 1}"
        if (dataset := builder.blend(flag, [prefix], split, "valid", samples)) is not None:
            datasets[label] = dataset
    return datasets


def _mock(seq_length: int, seed: int, vocab: int, samples: tuple[int, int, int]) -> Datasets:
    train, valid, test = (
        MockDataset(samples=count, seq_length=seq_length, vocab=vocab, seed=seed + i) if count else None
        for i, count in enumerate(samples)
    )
    return Datasets(train, valid, test)


def _check_corpora(data: DataConfig, *, training: bool) -> None:
    """Check the flags that specify corpora. Errors: ValueError if no corpora are given, or if they are given twice."""
    if data.data_path and any((data.train_data, data.valid_data, data.test_data)):
        raise ValueError(
            f"--data-path {' '.join(data.data_path)}: is split over training, validation and test; it cannot "
            "be combined with --train-data, --valid-data or --test-data"
        )
    if not data.data_path and training and not data.train_data:
        raise ValueError("--data-path is missing: training needs it, or --train-data, or --mock-data")


def named_sets(data: DataConfig) -> list[tuple[str, str]]:
    """Parse --valid-sets into pairs (name, prefix or file)."""
    pairs = [word.partition("=") for word in data.valid_sets]
    return [(name, value) for name, _, value in pairs]


def _chat(
    data: DataConfig, seq_length: int, seed: int, samples: tuple[int, int, int], tokenizer: Tokenizer | None
) -> Datasets:
    """Build datasets of conversations. The files of --valid-sets must also contain conversations."""
    if tokenizer is None:
        raise ValueError("--chat-data: needs a tokenizer; give --tokenizer and its files")
    name = data.chat_template
    chat = chat_format(name, tokenizer)
    cache = Path(data.data_cache) if data.data_cache else None
    notes: list[str] = []

    def rows(flag: str, inputs: Sequence[str], count: int) -> ChatDataset:
        size = {"seq_length": seq_length, "samples": count, "seed": seed}
        return chat_dataset(flag, inputs, tokenizer, chat, **size, cache=cache, note=notes.append)

    train = rows("--chat-data", data.chat_data, samples[0]) if samples[0] else None
    named_datasets = {label: rows("--valid-sets", [file], samples[2]) for label, file in named_sets(data) if samples[2]}
    example: tuple[str, ...] = (f"conversations by the template {name}",)
    if train is not None:
        example += (f"trained is what stands in ⟦⟧: {shown(train.conversation(0), tokenizer)}",)
    return Datasets(train=train, named=named_datasets, notes=tuple(notes), example=example)


def _records(
    data: DataConfig,
    split_inputs: Mapping[str, Sequence[str]],
    seq_length: int,
    seed: int,
    vocab: int,
    samples: tuple[int, int, int],
) -> Datasets:
    """Build datasets of BERT samples from TFRecords, with one list of files per split."""
    if data.data_path:
        raise ValueError("--data-path: cannot be split where --sample-kind is tfrecords; give --train-data FILES")
    cache = Path(data.data_cache) if data.data_cache else None

    def records(flag: str, inputs: Sequence[str], count: int) -> Dataset | None:
        if not inputs or not count:
            return None
        return record_dataset(flag, inputs, seq_length=seq_length, vocab=vocab, samples=count, seed=seed, cache=cache)

    train, valid, test = (
        records(f"--{name}-data", split_inputs[name], count) for name, count in zip(SPLITS, samples, strict=True)
    )
    named_records = {label: records("--valid-sets", [file], samples[2]) for label, file in named_sets(data)}
    return Datasets(train, valid, test, named={label: one for label, one in named_records.items() if one is not None})


class _Builder:
    """Opens every corpus once, and collects notes for the user."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataConfig,
        vocab: int,
        tokenizer: Tokenizer | None,
        phases: tuple[BlendPhase, ...] = (),
        check: Check | None = None,
        defer: bool = False,
    ) -> None:
        self._defer = defer
        self._recipe, self._data, self._vocab, self._tokenizer = recipe, data, vocab, tokenizer
        self._core, self._check = data.order == "core", check
        self.corpora: dict[str, IndexedDataset] = {}
        self.phases = phases
        self.notes: list[str] = []
        self.repeated: set[str] = set()
        # `repeated`: splits that read a corpus more than once.
        self.described: dict[str, tuple[str, ...]] = {}
        self.one_pass: dict[str, int] = {}
        # `one_pass`: split -> number of samples in one pass, except for splits whose weights cause different numbers of
        # passes over the corpora.

    @property
    def contents(self) -> dict[str, Json]:
        """Return the hashes of all token files, keyed by prefix."""
        return {prefix: corpus.content() for prefix, corpus in self.corpora.items()}

    @property
    def about(self) -> dict[str, Any]:
        """Return the fields of `Datasets` that describe how the datasets were built."""
        description = {"corpora": self.contents, "phases": self.phases, "described": self.described}
        return {"notes": self.reported, **description}

    @property
    def reported(self) -> tuple[str, ...]:
        """Return all notes, beginning with the note about --split."""
        note = split_note(self._data.split) if self._data.data_path else ""
        return (*([note] if note else []), *self.notes)

    def blend(self, flag: str, words: Sequence[str], split: str, name: str, samples: int) -> Dataset | None:
        """Return the dataset of one split; None if no samples are requested or the split is empty."""
        if not words or not samples:
            return None
        weighted_prefixes = parse_blend(flag, words)
        if self.phases and name == "train":
            return self._phased(flag, [*self.phases, BlendPhase(samples, samples, weighted_prefixes)], split)
        all_parts = [(weight, prefix, self._part(flag, prefix, split, name)) for weight, prefix in weighted_prefixes]
        # Corpora that are empty in this split are removed, with a note; the other corpora share their weight.
        parts = [(weight, prefix, part) for weight, prefix, part in all_parts if part.first < part.last]
        if not parts:
            split_name = f'the {name} part of --split "{split}" ' if flag == "--data-path" else ""
            message = f"{flag} {' '.join(words)}: {split_name}is empty"
            if name == "train":
                raise ValueError(message)
            self.notes.append(message)
            return None
        for weight, prefix, part in all_parts:
            if part.first < part.last:
                continue
            message = f"{flag} {prefix}: its {name} part is empty"
            if name == "train" and weight is not None:
                raise ValueError(f"{message}, but its weight is {weight:g}; leave both out, or give it another share")
            self.notes.append(f"{message}; the other corpora have its share")
        if len(weighted_prefixes) == 1 or all(weight is None for weight, _ in weighted_prefixes):
            self.one_pass[name] = sum(self._recipe.once(part) for _, _, part in parts)
        if len(weighted_prefixes) == 1:
            self._describe(name, parts, [samples], split)
            return self._dataset(*parts[0][1:], samples, name)
        # Without weights, shares are proportional to the corpora's sizes, so that all corpora end at the same sample.
        shares = blend_shares([self._recipe.once(part) if weight is None else weight for weight, _, part in parts])
        counts = blend_samples(shares, samples, core=self._core)
        self._describe(name, parts, counts, split)
        datasets = [
            self._dataset(prefix, part, count, name, [each for _, each in weighted_prefixes].index(prefix))
            for (_, prefix, part), count in zip(parts, counts, strict=True)
        ]
        size = sum(blend_parts(shares, samples) if self._core else counts)
        return self._built(partial(_blended, datasets, shares, size, samples, self._directory(parts[0][1])))

    def _built(self, build: Callable[[], Dataset]) -> Dataset:
        return DeferredDataset(build) if self._defer else build()

    def _describe(
        self, name: str, parts: Sequence[tuple[float | None, str, CorpusPart]], counts: Sequence[int], split: str
    ) -> None:
        if isinstance(self._recipe, Gpt):
            length, seed = self._recipe.seq_length, self._recipe.seed
            each = zip(parts, counts, strict=True)
            self.described[name] = tuple(
                description(prefix, name, count, length, seed, split) for (_, prefix, _), count in each
            )
            if self._check is not None:
                self._check(name, self.described[name])

    def _phased(self, flag: str, phases: Sequence[BlendPhase], split: str) -> Dataset:
        """Build a training set whose blend changes during the run."""
        layouts: list[PhaseLayout] = []
        parts: dict[str, CorpusPart] = {}
        begin = 0
        for phase in phases:
            parts |= {prefix: self._part(flag, prefix, split, "train") for _, prefix in phase.blend}
            blend = [(weight, prefix) for weight, prefix in phase.blend if parts[prefix].first < parts[prefix].last]
            sizes = [self._recipe.once(parts[prefix]) if weight is None else weight for weight, prefix in blend]
            shares, remaining = blend_shares(sizes), max(phase.asked - begin, 0)
            counts = [remaining] if len(blend) == 1 else blend_samples(shares, remaining, core=self._core)
            layouts.append(PhaseLayout(phase.until, [prefix for _, prefix in blend], shares, counts))
            begin = max(phase.until, begin)

        def segment(prefix: str, samples: int, number: int) -> Dataset:
            base_recipe: Any = self._recipe
            recipe = base_recipe if not number else replace(base_recipe, seed=base_recipe.seed + number)
            return recipe.dataset(parts[prefix], samples, self._directory(prefix), lambda note: None)  # type: ignore[no-any-return]

        return phased_dataset(layouts, segment)

    def _dataset(self, prefix: str, part: CorpusPart, samples: int, name: str, number: int = 0) -> Dataset:
        """Build the dataset of one corpus. number: index of the corpus in the blend, including empty corpora."""

        def passes(note: str) -> None:
            self.notes.append(note)
            self.repeated.add(name)

        def build(note: Callable[[str], None]) -> Dataset:
            dataset = self._recipe.dataset(part, samples, self._directory(prefix), note)
            if isinstance(dataset, GPTDataset):
                dataset.number = number
            return dataset

        if self._defer:
            self._recipe.plan(part, samples, passes)
        return self._built(partial(build, discard if self._defer else passes))

    def _part(self, flag: str, prefix: str, split: str, name: str) -> CorpusPart:
        """Return the part of a corpus that belongs to a split. The part may be empty."""
        corpus = self._corpus(flag, prefix)
        bounds = split_boundaries(split, self._recipe.units(corpus), core=self._core)
        split_index = SPLITS.index(name)
        remedy = ""
        if flag == "--data-path":
            hint = "; --split 95,5,0 makes no test part" if name == "test" else ""
            remedy = f", or give other shares than --split {split}{hint}"
        return CorpusPart(
            corpus, bounds[split_index], bounds[split_index + 1], f"{flag} {prefix}: its {name} part", remedy
        )

    def _corpus(self, flag: str, prefix: str) -> IndexedDataset:
        """Return the token files of `prefix`, which are opened and checked in the first call."""
        if prefix not in self.corpora:
            corpus = _open(flag, prefix, self._vocab, mmap=self._data.mmap)
            if message := other_files(f"{flag} {prefix}", corpus.tokenizer, self._tokenizer):
                advice = f"give that one, or {ALLOW} where an id means the same in both"
                allowed = self._data.allow_tokenizer_mismatch
                line = judge("pretrain", "token files", message, advice=advice, allowed=allowed)
                self.notes += [] if line is None else [line]
            self.corpora[prefix] = corpus
        return self.corpora[prefix]

    def _directory(self, prefix: str) -> Path:
        return Path(self._data.data_cache) if self._data.data_cache else Path(prefix).parent / "index-cache"


def _blended(datasets: Sequence[Dataset], shares: list[float], size: int, samples: int, cache: Path) -> Dataset:
    """Return a blend of datasets with at least `samples` samples. size: number of entries of the blend's order. cache:
    folder for the order."""
    lengths = [len(dataset) for dataset in datasets]

    def compute() -> Arrays:
        """Return Megatron-LM's blend order, truncated before the first entry for which a corpus is too short."""
        corpus_numbers, numbers = blend_order(shares, size)
        served = entries_served(corpus_numbers, numbers, lengths)
        assert served >= samples
        return {"chosen": corpus_numbers[:served], "numbers": numbers[:served]}

    key = {"kind": "blend", "shares": shares, "size": size, "lengths": lengths}
    arrays = cached(cache, key, ("chosen", "numbers"), compute)
    return BlendedDataset(datasets, arrays["chosen"], arrays["numbers"])


def _open(flag: str, prefix: str, vocab: int, *, mmap: bool) -> IndexedDataset:
    """Open a corpus, and check that its files are consistent and that all ids are in the vocabulary."""
    if not exists(prefix):
        stem = prefix.removesuffix(".bin").removesuffix(".idx")
        alternatives = (stem, f"{stem}_text_document", f"{stem}_text_sentence")
        suggestions = [suggestions for suggestions in alternatives if suggestions != prefix and exists(suggestions)]
        hint = f"; did you mean {suggestions[0]}?" if suggestions else ""
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
