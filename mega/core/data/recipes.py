"""Define recipes that turn a part of a corpus into samples: runs of tokens for GPT, pairs of sentences for BERT, spans
for T5.

A recipe defines the units that `--split` divides, the number of samples in one pass, and how a dataset is built and
cached. Recipes do not depend on flag values or blends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mega.core.config.sections import MaskingConfig
from mega.core.data.cache import Arrays, cached
from mega.core.data.dataset import Dataset
from mega.core.data.gpt import GPTDataset
from mega.core.data.indexed import IndexedDataset
from mega.core.data.infill import Infill, InfillDataset
from mega.core.data.mapping import SampleRules, passes_needed, passes_of, sentence_mapping
from mega.core.data.masked import BertDataset, T5Dataset
from mega.core.data.masking import Vocabulary
from mega.core.data.order import SampleOrder, epochs, sample_order
from mega.core.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CorpusPart:
    """The part of a corpus that belongs to one split: units `first` .. `last` - 1."""

    corpus: IndexedDataset  # The token files
    first: int  # Index of the first unit
    last: int  # Index after the last unit
    label: str  # Text at the start of messages about the part
    remedy: str = ""  # Advice at the end of messages about a part that is too small


class Recipe(Protocol):
    """The interface of recipes, one for each type of sample."""

    def units(self, corpus: IndexedDataset) -> int:
        """Return the number of units (sequences or documents) that `--split` divides."""
        ...

    def once(self, part: CorpusPart) -> int:
        """Return the approximate number of samples in one pass, which is the default weight of a corpus."""
        ...

    def dataset(self, part: CorpusPart, samples: int, cache: Path, note: Callable[[str], None]) -> Dataset:
        """Return a dataset of at least `samples` samples. note: function called with a message if the dataset needs
        several passes. Errors: ValueError if the dataset would be empty."""
        ...

    def plan(self, part: CorpusPart, samples: int, note: Callable[[str], None]) -> None:
        """Do the checks of `dataset`, and call `note` as `dataset` does, without computing the order of samples. The
        number of passes may be approximate; the message then says so."""
        ...


@dataclass(frozen=True)
class Gpt:
    """Recipe for samples of seq_length + 1 tokens. The units of a split are sequences, as in Megatron-LM."""

    seq_length: int  # Number of tokens in a sample minus one
    seed: int  # Seed of the order
    repeat_short: bool = False  # Whether to repeat a part that has fewer tokens than one sample
    infill: Infill | None = None  # Fill-in-the-middle permutation, or None

    def units(self, corpus: IndexedDataset) -> int:
        return len(corpus)

    def once(self, part: CorpusPart) -> int:
        return max((self._tokens(part) - 1) // self.seq_length, 1)

    def plan(self, part: CorpusPart, samples: int, note: Callable[[str], None]) -> None:
        tokens, length = self._tokens(part), self.seq_length
        if tokens <= length and not (self.repeat_short and tokens):
            repeat = "; --repeat-short-parts fills it with repeats" if tokens else ""
            repeat += part.remedy
            raise ValueError(
                f"{part.label} has {tokens} tokens, needs {length + 1} for one sample of --seq-length {length}{repeat}"
            )
        if (passes := epochs(tokens, length, samples)) > 1:
            note(f"{part.label} has {tokens:,} tokens; {samples:,} samples of {length} take {passes} epochs")

    def dataset(self, part: CorpusPart, samples: int, cache: Path, note: Callable[[str], None]) -> Dataset:
        self.plan(part, samples, note)
        length = self.seq_length
        key = {  # all values that affect the order, because different runs may share the cache folder
            "kind": "gpt",
            "corpus": part.corpus.fingerprint,
            "sequences": [part.first, part.last],
            "seq_length": length,
            "samples": samples,
            "seed": self.seed,
        }

        def compute() -> Arrays:
            order = sample_order(
                part.corpus.lengths, part.first, part.last, seq_length=length, samples=samples, seed=self.seed
            )
            return vars(order)

        arrays = cached(cache, key, ("documents", "samples", "shuffle"), compute)
        dataset = GPTDataset(part.corpus, SampleOrder(**arrays), length)
        return dataset if self.infill is None else InfillDataset(dataset, self.infill, self.seed)

    def _tokens(self, part: CorpusPart) -> int:
        return int(part.corpus.lengths[part.first : part.last].sum(dtype="int64"))


@dataclass(frozen=True)
class Masked:
    """Recipe for BERT or T5 samples from a corpus of sentences. The units of a split are documents."""

    masking: MaskingConfig
    """The masking section of the configuration."""
    vocabulary: Vocabulary
    """The control tokens and ids that masking needs."""
    seq_length: int
    """Number of tokens in a sample."""
    seed: int
    """Seed of the order and of the masks."""
    pairs: bool = True
    """Whether a BERT sample has two parts."""

    def __post_init__(self) -> None:
        if self._room < 2:
            raise ValueError(f"--seq-length {self.seq_length}: must be at least 5, of which control tokens take 3")
        if self.masking.sample_kind == "t5" and not self.vocabulary.roles.sentinels:
            raise ValueError("--vocab-extra-ids 0: must be greater than 0 for T5, which marks spans with them; try 100")

    @property
    def _room(self) -> int:
        """Number of tokens in a sample without its control tokens."""
        return self.seq_length - (3 if self.masking.sample_kind == "bert" else 2)

    def units(self, corpus: IndexedDataset) -> int:
        return corpus.documents

    def once(self, part: CorpusPart) -> int:
        first, last = part.corpus.document_index[[part.first, part.last]].tolist()
        return max(int(part.corpus.lengths[first:last].sum(dtype="int64")) // self._room, 1)

    def _rules(self) -> SampleRules:
        return {
            "max_length": self._room,
            "short_prob": self.masking.short_seq_prob,
            "seed": self.seed,
            "min_sentences": 2 if self.masking.sample_kind == "bert" and self.pairs else 1,
        }

    def plan(self, part: CorpusPart, samples: int, note: Callable[[str], None]) -> None:
        documents = part.corpus.document_index[part.first : part.last + 1]
        try:
            passes, exact = passes_needed(documents, part.corpus.lengths, samples=samples, **self._rules())
        except ValueError as error:
            raise ValueError(f"{part.label}: {error}") from None
        self._note(note, part, samples, f"{passes}" if exact else f"about {passes}")

    def dataset(self, part: CorpusPart, samples: int, cache: Path, note: Callable[[str], None]) -> Dataset:
        corpus, masking = part.corpus, self.masking
        documents = corpus.document_index[part.first : part.last + 1]
        rules = self._rules()
        key = {
            "kind": "sentences",
            "corpus": corpus.fingerprint,
            "documents": hashlib.sha256(documents.tobytes()).hexdigest(),
            "samples": samples,
            **rules,
        }

        def compute() -> Arrays:
            return {"mapping": sentence_mapping(documents, corpus.lengths, samples=samples, **rules)}

        try:
            mapping = cached(cache, key, ("mapping",), compute)["mapping"]
        except ValueError as error:
            raise ValueError(f"{part.label}: {error}") from None
        self._note(note, part, samples, f"{passes_of(mapping[:, 0])}")
        if masking.sample_kind == "bert":
            return BertDataset(
                corpus,
                mapping,
                self.vocabulary,
                seq_length=self.seq_length,
                seed=self.seed,
                mask_prob=masking.mask_prob,
                binary_head=self.pairs,
            )
        return T5Dataset(
            corpus,
            mapping,
            self.vocabulary,
            seq_length=self.seq_length,
            decoder_seq_length=masking.decoder_seq_length,
            seed=self.seed,
            mask_prob=masking.mask_prob,
        )

    @staticmethod
    def _note(note: Callable[[str], None], part: CorpusPart, samples: int, passes: str) -> None:
        if passes != "1":
            documents = part.last - part.first
            note(f"{part.label} has {documents:,} documents; {samples:,} samples take {passes} epochs")


def recipe(
    masking: MaskingConfig,
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer | None,
    pairs: bool = True,
    repeat_short: bool = False,
    vocab: int | None = None,
    infill: Infill | None = None,
) -> Recipe:
    """Return the recipe for `--sample-kind`. Errors: ValueError if the tokenizer lacks required tokens.

    pairs: whether BERT samples have two parts. repeat_short: whether a part with fewer tokens than one GPT sample may
    be repeated. vocab: the vocabulary size of the model.
    """
    if masking.sample_kind == "gpt":
        return Gpt(seq_length, seed, repeat_short, infill)
    if tokenizer is None:
        raise ValueError(f"--sample-kind {masking.sample_kind}: needs a tokenizer; give --tokenizer and its files")
    return Masked(masking, Vocabulary.of(tokenizer, vocab), seq_length, seed, pairs)


def description(prefix: str, split_name: str, samples: int, seq_length: int, seed: int, split: str) -> str:
    """Describe all settings that determine the samples of one corpus, in the format of Megatron-LM 23.06."""
    return (
        f"GPT Dataset\n\nData prefix {prefix}\nDataset name {split_name}\nNumber of samples {samples}\n"
        f"Sequence length {seq_length}\nRandom seed {seed}\nSplit {split}\n"
    )
