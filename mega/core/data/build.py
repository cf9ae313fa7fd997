"""From the data section of a configuration to the datasets of training, validation and test.

Everything that can be wrong with the files is found here: a missing or cut file, an id outside the
vocabulary, a corpus too small for one sample. No torch, so a launcher can do all of it before any rank
starts, and fill the cache that the ranks then read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mega.core.config.corpora import expand, is_number
from mega.core.config.sections import SPLITS, DataConfig, MaskingConfig
from mega.core.data.cache import Arrays, cached
from mega.core.data.chat import ChatDataset, chat_dataset
from mega.core.data.dataset import BlendedDataset, Dataset, MockDataset
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
from mega.core.text.chat.format import chat_format, shown
from mega.core.text.identity import ALLOW, judge, other_files
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json

_GPT = MaskingConfig()
_WHOLE = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}


@dataclass(frozen=True)
class Datasets:
    """A dataset per split, None where nothing was asked or the split is empty; `notes` are for the user.

    named: more validation sets, by the names that the user gave them. corpora: prefix of token files -> their content.
    repeats: whether a corpus of the training set is read in more passes than one. example: a sample as the
    user is to see it before the first step. one_pass: samples of one pass over the training set, where its corpora are
    all passed over together.
    """

    train: Dataset | None = None
    valid: Dataset | None = None
    test: Dataset | None = None
    named: Mapping[str, Dataset] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    corpora: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    repeats: bool = False
    example: tuple[str, ...] = ()
    one_pass: int | None = None
    phases: tuple[BlendPhase, ...] = ()
    """Former blends of the training set."""
    described: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Split -> what decides the samples of each corpus of its blend."""


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
    if not sum(weights) < float("inf"):  # each share would be 0
        raise ValueError(f"{flag} {' '.join(words)}: the weights' sum must be a finite number")
    return list(zip(weights, words[1::2], strict=True))


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
) -> Datasets:
    """Datasets that hold at least `samples` (train, valid, test) samples of the kind that `masking` names.

    seq_length: tokens of a sample; a GPT sample has one more. vocab: the true vocabulary size, against which every
    corpus is held. pairs: whether a BERT sample has two parts. by_corpus: each corpus of the validation blend is a set
    of its own, too. phases: former blends of the training set. Raises ValueError naming flag and file.
    """
    if data.mock_data:
        train, valid, test = (
            MockDataset(samples=count, seq_length=seq_length, vocab=vocab, seed=seed + i) if count else None
            for i, count in enumerate(samples)
        )
        return Datasets(train, valid, test)
    if data.chat_data:
        return _chat(data, seq_length, seed, samples, tokenizer)
    own = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    _check_corpora(data, training=samples[0] > 0)
    if masking.sample_kind == "tfrecords":
        return _records(data, own, seq_length, seed, vocab, samples)
    split_shares(data.split)
    made_by = recipe(
        masking, seq_length, seed, tokenizer, pairs, data.repeat_short_parts, vocab, infill_of(data, tokenizer, vocab)
    )
    builder = _Builder(made_by, data, vocab, tokenizer, tuple(phases))
    made: dict[str, Any] = {
        name: builder.blend(
            "--data-path" if data.data_path else f"--{name}-data",
            expand(data.data_path or own[name], data.corpora),
            data.split if data.data_path else _WHOLE[name],
            name,
            count,
        )
        for name, count in zip(SPLITS, samples, strict=True)
    }
    named = _named(builder, data, samples[2], by_corpus)
    repeats, whole = "train" in builder.repeated, builder.one_pass.get("train")
    return Datasets(**made, named=named, repeats=repeats, one_pass=whole, **builder.about)


def _named(builder: _Builder, data: DataConfig, samples: int, by_corpus: bool) -> dict[str, Dataset]:
    """Validation sets with names: each corpus of the blend, if asked for, and --valid-sets."""
    named = _by_corpus(builder, data, samples) if by_corpus else {}
    for label, word in named_sets(data):
        blended = expand([word], data.corpora), _WHOLE["valid"], "valid", samples
        if (found := builder.blend("--valid-sets", *blended)) is not None:
            named[label] = found
    return named


def _by_corpus(builder: _Builder, data: DataConfig, samples: int) -> dict[str, Dataset]:
    """The validation part of each corpus of a blend by the last part of its prefix, numbered where several share it."""
    found: dict[str, Dataset] = {}
    flag, words = ("--data-path", data.data_path) if data.data_path else ("--valid-data", data.valid_data)
    for _, prefix in parse_blend(flag, expand(words, data.corpora)):
        split = data.split if data.data_path else _WHOLE["valid"]
        name = Path(prefix).name.removesuffix("_document").removesuffix("_text")
        label = name if name not in found else f"{name}-{len(found) + 1}"
        if (dataset := builder.blend(flag, [prefix], split, "valid", samples)) is not None:
            found[label] = dataset
    return found


def _check_corpora(data: DataConfig, *, training: bool) -> None:
    """Errors: ValueError where corpora are missing, or given twice."""
    if data.data_path and any((data.train_data, data.valid_data, data.test_data)):
        raise ValueError(
            f"--data-path {' '.join(data.data_path)}: is split over training, validation and test; it cannot "
            "be combined with --train-data, --valid-data or --test-data"
        )
    if not data.data_path and training and not data.train_data:
        raise ValueError("--data-path is missing: training needs it, or --train-data, or --mock-data")


def named_sets(data: DataConfig) -> list[tuple[str, str]]:
    """The name and the prefix or file of each of --valid-sets."""
    pairs = [word.partition("=") for word in data.valid_sets]
    return [(name, value) for name, _, value in pairs]


def _chat(
    data: DataConfig, seq_length: int, seed: int, samples: tuple[int, int, int], tokenizer: Tokenizer | None
) -> Datasets:
    """Rows of conversations; --valid-sets are files of conversations too."""
    if tokenizer is None:
        raise ValueError("--chat-data: needs a tokenizer; give --tokenizer and its files")
    name = data.chat_template
    made = chat_format(name, tokenizer)
    cache = Path(data.data_cache) if data.data_cache else None
    notes: list[str] = []

    def rows(flag: str, inputs: Sequence[str], count: int) -> ChatDataset:
        size = {"seq_length": seq_length, "samples": count, "seed": seed}
        return chat_dataset(flag, inputs, tokenizer, made, **size, cache=cache, note=notes.append)

    train = rows("--chat-data", data.chat_data, samples[0]) if samples[0] else None
    named = {label: rows("--valid-sets", [file], samples[2]) for label, file in named_sets(data) if samples[2]}
    example: tuple[str, ...] = (f"conversations by the template {name}",)
    if train is not None:
        example += (f"trained is what stands in ⟦⟧: {shown(train.conversation(0), tokenizer)}",)
    return Datasets(train=train, named=named, notes=tuple(notes), example=example)


def _records(
    data: DataConfig,
    own: Mapping[str, Sequence[str]],
    seq_length: int,
    seed: int,
    vocab: int,
    samples: tuple[int, int, int],
) -> Datasets:
    """BERT's samples from TFRecords, one list of files for each split."""
    if data.data_path:
        raise ValueError("--data-path: cannot be split where --sample-kind is tfrecords; give --train-data FILES")
    cache = Path(data.data_cache) if data.data_cache else None

    def records(flag: str, inputs: Sequence[str], count: int) -> Dataset | None:
        if not inputs or not count:
            return None
        return record_dataset(flag, inputs, seq_length=seq_length, vocab=vocab, samples=count, seed=seed, cache=cache)

    train, valid, test = (
        records(f"--{name}-data", own[name], count) for name, count in zip(SPLITS, samples, strict=True)
    )
    found = {label: records("--valid-sets", [file], samples[2]) for label, file in named_sets(data)}
    return Datasets(train, valid, test, named={label: one for label, one in found.items() if one is not None})


class _Builder:
    """Opens every corpus once and collects what to report to the user."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataConfig,
        vocab: int,
        tokenizer: Tokenizer | None,
        phases: tuple[BlendPhase, ...] = (),
    ) -> None:
        self._recipe, self._data, self._vocab, self._tokenizer = recipe, data, vocab, tokenizer
        self._core = data.order == "core"
        self.corpora: dict[str, IndexedDataset] = {}
        self.phases = phases
        self.notes: list[str] = []
        self.repeated: set[str] = set()
        """Splits that read a corpus more than once."""
        self.described: dict[str, tuple[str, ...]] = {}
        self.one_pass: dict[str, int] = {}
        """Split -> samples of one pass over it, but where weights give each corpus passes of its own."""

    @property
    def contents(self) -> dict[str, Json]:
        """Prefix -> what its token files hold."""
        return {prefix: corpus.content() for prefix, corpus in self.corpora.items()}

    @property
    def about(self) -> dict[str, Any]:
        """Fields of `Datasets` that say how they were made."""
        known = {"corpora": self.contents, "phases": self.phases, "described": self.described}
        return {"notes": self.reported, **known}

    @property
    def reported(self) -> tuple[str, ...]:
        """All notes, the one on --split first."""
        note = split_note(self._data.split) if self._data.data_path else ""
        return (*([note] if note else []), *self.notes)

    def blend(self, flag: str, words: Sequence[str], split: str, name: str, samples: int) -> Dataset | None:
        """The dataset of one split; None where nothing is asked of it or it is empty."""
        if not words or not samples:
            return None
        given = parse_blend(flag, words)
        if self.phases and name == "train":
            return self._phased(flag, [*self.phases, BlendPhase(samples, samples, given)], split)
        whole = [(weight, prefix, self._part(flag, prefix, split, name)) for weight, prefix in given]
        # A corpus whose part is empty leaves the blend; the others share its weight, which is reported.
        parts = [(weight, prefix, part) for weight, prefix, part in whole if part.first < part.last]
        if not parts:
            whose = f'the {name} part of --split "{split}" ' if flag == "--data-path" else ""
            message = f"{flag} {' '.join(words)}: {whose}is empty"
            if name == "train":
                raise ValueError(message)
            self.notes.append(message)
            return None
        for weight, prefix, part in whole:
            if part.first < part.last:
                continue
            message = f"{flag} {prefix}: its {name} part is empty"
            if name == "train" and weight is not None:
                raise ValueError(f"{message}, but its weight is {weight:g}; leave both out, or give it another share")
            self.notes.append(f"{message}; the other corpora have its share")
        if len(given) == 1 or all(weight is None for weight, _ in given):
            self.one_pass[name] = sum(self._recipe.once(part) for _, _, part in parts)
        if len(given) == 1:
            self._describe(name, parts, [samples], split)
            return self._dataset(*parts[0][1:], samples, name)
        # Without weights each corpus has its own size, so that all end together.
        shares = blend_shares([self._recipe.once(part) if weight is None else weight for weight, _, part in parts])
        counts = blend_samples(shares, samples, core=self._core)
        self._describe(name, parts, counts, split)
        datasets = [
            self._dataset(prefix, part, count, name, [each for _, each in given].index(prefix))
            for (_, prefix, part), count in zip(parts, counts, strict=True)
        ]
        size = sum(blend_parts(shares, samples) if self._core else counts)
        lengths = [len(dataset) for dataset in datasets]

        def compute() -> Arrays:
            """As long as Megatron-LM's, but for entries at the end that a corpus is too short for."""
            chosen, numbers = blend_order(shares, size)
            served = entries_served(chosen, numbers, lengths)
            assert served >= samples
            return {"chosen": chosen[:served], "numbers": numbers[:served]}

        key = {"kind": "blend", "shares": shares, "size": size, "lengths": lengths}
        arrays = cached(self._directory(parts[0][1]), key, ("chosen", "numbers"), compute)
        return BlendedDataset(datasets, arrays["chosen"], arrays["numbers"])

    def _describe(
        self, name: str, parts: Sequence[tuple[float | None, str, CorpusPart]], counts: Sequence[int], split: str
    ) -> None:
        if isinstance(self._recipe, Gpt):
            length, seed = self._recipe.seq_length, self._recipe.seed
            each = zip(parts, counts, strict=True)
            self.described[name] = tuple(
                description(prefix, name, count, length, seed, split) for (_, prefix, _), count in each
            )

    def _phased(self, flag: str, phases: Sequence[BlendPhase], split: str) -> Dataset:
        """The training set of a blend that has changed."""
        layouts: list[PhaseLayout] = []
        parts: dict[str, CorpusPart] = {}
        begin = 0
        for phase in phases:
            parts |= {prefix: self._part(flag, prefix, split, "train") for _, prefix in phase.blend}
            used = [(weight, prefix) for weight, prefix in phase.blend if parts[prefix].first < parts[prefix].last]
            sizes = [self._recipe.once(parts[prefix]) if weight is None else weight for weight, prefix in used]
            shares, left = blend_shares(sizes), max(phase.asked - begin, 0)
            counts = [left] if len(used) == 1 else blend_samples(shares, left, core=self._core)
            layouts.append(PhaseLayout(phase.until, [prefix for _, prefix in used], shares, counts))
            begin = max(phase.until, begin)

        def segment(prefix: str, samples: int, number: int) -> Dataset:
            changed: Any = self._recipe
            recipe = changed if not number else replace(changed, seed=changed.seed + number)
            return recipe.dataset(parts[prefix], samples, self._directory(prefix), lambda note: None)  # type: ignore[no-any-return]

        return phased_dataset(layouts, segment)

    def _dataset(self, prefix: str, part: CorpusPart, samples: int, name: str, number: int = 0) -> Dataset:
        """number: of the corpus in the blend, of which some may be left out."""

        def passes(note: str) -> None:
            self.notes.append(note)
            self.repeated.add(name)

        dataset = self._recipe.dataset(part, samples, self._directory(prefix), passes)
        if isinstance(dataset, GPTDataset):
            dataset.number = number
        return dataset

    def _part(self, flag: str, prefix: str, split: str, name: str) -> CorpusPart:
        """What a split may use of a corpus; nothing where the split is empty."""
        corpus = self._corpus(flag, prefix)
        bounds = split_boundaries(split, self._recipe.units(corpus), core=self._core)
        place = SPLITS.index(name)
        remedy = ""
        if flag == "--data-path":
            without = "; --split 95,5,0 makes no test part" if name == "test" else ""
            remedy = f", or give other shares than --split {split}{without}"
        return CorpusPart(corpus, bounds[place], bounds[place + 1], f"{flag} {prefix}: its {name} part", remedy)

    def _corpus(self, flag: str, prefix: str) -> IndexedDataset:
        """The checked token files of `prefix`, opened once."""
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


def _open(flag: str, prefix: str, vocab: int, *, mmap: bool) -> IndexedDataset:
    """A corpus whose files agree and whose ids the vocabulary has."""
    if not exists(prefix):
        stem = prefix.removesuffix(".bin").removesuffix(".idx")
        others = (stem, f"{stem}_text_document", f"{stem}_text_sentence")
        near = [near for near in others if near != prefix and exists(near)]
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
