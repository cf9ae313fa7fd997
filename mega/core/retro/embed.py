"""Embed texts with a BERT. The vector of a text is the mean of the last hidden states of its tokens, without [CLS] and
[SEP]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.data.neighbours import DatabaseManifest
from mega.core.inference.capacity import weight_bytes
from mega.core.inference.embedding import TextVectors
from mega.core.inference.loading.load import load_model, load_tokenizer, open_model
from mega.core.model.bert import BertStage


class Embedder(Protocol):
    """Interface of objects that embed texts. digest: identifies the model and the settings that determine the
    vectors."""

    @property
    def digest(self) -> str: ...
    def tokens(self, text: str) -> int:
        """Return the number of tokens in a text."""

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, [texts, width]."""


class BertEmbedder:
    """Embeds texts with a BERT, from a checkpoint or a Hugging Face folder.

    batch: number of texts that are embedded together. length: maximum number of tokens in a text, without [CLS] and
    [SEP]. Errors: ValueError if the model is not a BERT, or has no tokenizer; CheckpointError.
    """

    def __init__(self, load: str, *, batch: int, length: int, device: str) -> None:
        self._opened, self._batch, self._device = open_model(load), batch, torch.device(device)
        if not FAMILY_DEFAULTS[self._opened.model.family].classifies:
            raise ValueError(f"--embedder {load}: is a model of --family {self._opened.model.family}; must be a BERT")
        self._tokenizer = load_tokenizer(self._opened)
        self._length = min(length, self._opened.model.positions - 2)

    @property
    def digest(self) -> str:
        return f"{self._opened.digest} {self._length}"

    @property
    def width(self) -> int:
        """Number of elements in a vector."""
        return self._opened.architecture.hidden

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in bytes. The weights are loaded with the first text."""
        return sum(weight_bytes(self._opened.model, torch.float32.itemsize))

    @cached_property
    def _vectors(self) -> TextVectors:
        assert self._tokenizer.roles is not None
        stage = cast(BertStage, load_model(self._opened, self._device))
        return TextVectors(stage, self._tokenizer.roles.pad, self._device)

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts. Texts of similar length are embedded together. The result does not depend on the
        order of the texts."""
        ids = [self._tokenizer.encode(text)[: self._length] for text in texts]
        order = sorted(range(len(ids)), key=lambda number: (len(ids[number]), number))
        vectors = np.empty((len(ids), self._opened.model.hidden), np.float32)
        for first in range(0, len(order), self._batch):
            batch_numbers = order[first : first + self._batch]
            vectors[batch_numbers] = self._vectors([self._row(ids[number]) for number in batch_numbers], "inner")
        return vectors

    def _row(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text between [CLS] and [SEP]. A text without tokens is replaced with a single pad
        token."""
        roles = self._tokenizer.roles
        assert roles is not None
        return [roles.cls, *(ids or [roles.pad]), roles.sep]


def open_embedder_of(folder: Path, manifest: DatabaseManifest, load: str, device: str) -> BertEmbedder:
    """Return the embedder that made the vectors of a database. Errors: ValueError if `load` is a different model."""
    length = manifest.embedder.rpartition(" ")[2]
    if not length.isdecimal():
        raise ValueError(f"{folder / manifest.NAME}: embedder {manifest.embedder!r}: is damaged; build it again")
    embedder = BertEmbedder(load, batch=128, length=int(length), device=device)
    if embedder.digest != manifest.embedder:
        raise ValueError(f"--embedder {load}: is not the one that made the vectors of {folder}")
    return embedder
