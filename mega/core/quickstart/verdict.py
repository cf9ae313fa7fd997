"""Evaluate a trained model on a held-out document: compute the model's loss and the unigram loss, and generate a text.

This module reads checkpoints of any layout, and the token files of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mega.core.device import Device
from mega.core.inference.generation.generate import generate, losses
from mega.core.inference.loading.load import load_model, open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Sampling
from mega.core.inference.start import engine_on
from mega.core.parallel.mesh import Mesh
from mega.core.quickstart.corpus import Document
from mega.core.quickstart.unigram import unigram

PROMPT = 24
"""Number of tokens at the beginning of the document that form the prompt."""

SAMPLED = 220
"""Maximum number of generated tokens."""


class Verdict(NamedTuple):
    """The evaluation of a trained model on a held-out document."""

    prompt: str
    """The first tokens of the document."""
    document: str
    """The document's text after the prompt."""
    sample: str
    """The text that the model generates after the prompt."""
    tokens: int
    """Number of tokens in the document."""
    model: float
    """Loss of the document under the model, in nats per token."""
    unigram: float
    """Loss of the document under unigram statistics, in nats per token."""


def verdict(checkpoint: Path, document: Document, train: Path) -> Verdict:
    """Evaluate the model of `checkpoint` on `document`. train: prefix of the training tokens, from which the unigram
    statistics are computed."""
    opened_model = open_model(checkpoint)
    tokenizer, stage = opened_model.tokenizer(), load_model(opened_model)
    assert tokenizer.eod is not None
    ids = [tokenizer.eod, *tokenizer.encode(document.text)]
    sampling = Sampling(temperature=0.8, top_k=50, seed=0)
    options = EngineOptions(max_requests=1, vocab=tokenizer.vocab_size)
    engine = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert engine is not None
    sampled = list(generate(engine, ids[: PROMPT + 1], SAMPLED, sampling, stop_ids=frozenset({tokenizer.eod})))
    return Verdict(
        prompt=tokenizer.decode(ids[1 : PROMPT + 1]),
        document=tokenizer.decode(ids[PROMPT + 1 : PROMPT + 1 + SAMPLED]),
        sample=tokenizer.decode(token for token in sampled if token != tokenizer.eod),
        tokens=len(ids) - 1,
        model=float(losses(stage, ids).mean()),
        unigram=unigram(train, ids[1:], tokenizer.vocab_size),
    )


def choose_document(documents: Sequence[Document]) -> Document:
    """Choose the held-out document to show: a topic of Python's help if a topic is long enough, otherwise any document
    that is long enough, otherwise the longest."""
    long = [document for document in documents if len(document.text) >= 1000]
    prose = [document for document in long if document.name.startswith("help/")]
    return next(iter([*prose, *long]), max(documents, key=lambda document: len(document.text)))
