"""Embed texts with a BERT model. The vector of a text is the mean of the last hidden states of its tokens, without
[CLS] and [SEP]. A thread prepares the tokens of the next texts while the device embeds the previous ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.data.neighbours import DatabaseManifest
from mega.core.device import DTYPES
from mega.core.inference.capacity import weight_bytes
from mega.core.inference.embedding import TextVectors
from mega.core.inference.loading.load import load_model, load_tokenizer, open_model
from mega.core.model.bert import BertStage

TOGETHER = 4096
"""Number of texts that are prepared together and sorted by length."""


class Embedder(Protocol):
    """The interface of objects that embed texts. digest: identifies the model and all settings that affect the
    vectors."""

    @property
    def digest(self) -> str: ...
    def tokens(self, text: str) -> int:
        """Return the number of tokens in a text."""

    def __call__(self, texts: Iterable[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, [texts, width]. The implementation may iterate over `texts` in another
        thread."""


class BertEmbedder:
    """Embeds texts with a BERT model, from a checkpoint or a Hugging Face folder.

    batch: number of texts per forward pass. length: maximum number of tokens in a text, without [CLS] and [SEP]. dtype:
    dtype of the computation, fp32 or bf16. Errors: ValueError if the model is not a BERT model or has no tokenizer;
    CheckpointError.
    """

    def __init__(self, load: str, *, batch: int, length: int, device: str, dtype: str = "fp32") -> None:
        self._opened, self._batch, self._device = open_model(load), batch, torch.device(device)
        if not FAMILY_DEFAULTS[self._opened.model.family].classifies:
            raise ValueError(f"--embedder {load}: is a model of --family {self._opened.model.family}; must be a BERT")
        self._tokenizer = load_tokenizer(self._opened)
        self._length, self._dtype = min(length, self._opened.model.positions - 2), dtype

    @property
    def digest(self) -> str:
        dtype = "" if self._dtype == "fp32" else f"{self._dtype} "
        return f"{self._opened.digest} {dtype}{self._length}"

    @property
    def width(self) -> int:
        """Number of elements in a vector."""
        return self._opened.architecture.hidden

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in bytes. The weights are loaded when the first text is embedded."""
        return sum(weight_bytes(self._opened.model, DTYPES[self._dtype].itemsize))

    @cached_property
    def _vectors(self) -> TextVectors:
        assert self._tokenizer.roles is not None
        stage = cast(BertStage, load_model(self._opened, self._device, DTYPES[self._dtype])).eval()
        return TextVectors(stage, self._tokenizer.roles.pad, self._device)

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def __call__(self, texts: Iterable[str]) -> NDArray[np.float32]:
        """Return the vectors of texts. Texts of similar length are embedded together. Except for rounding, a vector
        does not depend on the other texts."""
        windows, vectors = self._windows(texts), [np.empty((0, self._opened.model.hidden), np.float32)]
        with ThreadPoolExecutor(1, "texts") as thread:
            prepared = thread.submit(next, windows, None)
            while (rows := prepared.result()) is not None:
                prepared = thread.submit(next, windows, None)
                vectors.append(self._embed(rows))
        return np.concatenate(vectors)

    def _windows(self, texts: Iterable[str]) -> Iterator[list[list[int]]]:
        """Yield lists of ids for `TOGETHER` texts at a time."""
        rows = map(self._row, texts)
        while window := list(islice(rows, TOGETHER)):
            yield window

    def _embed(self, rows: Sequence[list[int]]) -> NDArray[np.float32]:
        order = sorted(range(len(rows)), key=lambda number: (len(rows[number]), number))
        batches = [order[first : first + self._batch] for first in range(0, len(order), self._batch)]
        states = [self._vectors.on_device([rows[number] for number in batch], "inner") for batch in batches]
        vectors = np.empty((len(rows), self._opened.model.hidden), np.float32)
        vectors[order] = torch.cat(states).cpu().numpy()
        return vectors

    def _row(self, text: str) -> list[int]:
        """Return the ids of a text, enclosed in [CLS] and [SEP]. A text without tokens is replaced with a single pad
        token."""
        roles = self._tokenizer.roles
        assert roles is not None
        return [roles.cls, *(self._tokenizer.encode(text)[: self._length] or [roles.pad]), roles.sep]


def open_embedder_of(folder: Path, manifest: DatabaseManifest, load: str, device: str) -> BertEmbedder:
    """Return the embedder that computed a database's vectors. Errors: ValueError if `load` is a different model."""
    _, *dtype, length = manifest.embedder.split(" ") if " " in manifest.embedder else ("", "")
    if not length.isdecimal() or dtype not in ([], ["bf16"]):
        raise ValueError(f"{folder / manifest.NAME}: embedder {manifest.embedder!r}: is damaged; build it again")
    embedder = BertEmbedder(load, batch=128, length=int(length), device=device, dtype=(*dtype, "fp32")[0])
    if embedder.digest != manifest.embedder:
        raise ValueError(f"--embedder {load}: is not the one that made the vectors of {folder}")
    return embedder
