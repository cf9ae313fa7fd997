"""What a trained model is worth: a held-out document under it and under unigram statistics, and text of its own.

It reads a checkpoint of any layout, and the token files that the run trained on.
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
"""Tokens of the document that the model is given to continue."""

SAMPLED = 220
"""Tokens that it adds."""


class Verdict(NamedTuple):
    """prompt: how both texts begin. document, sample: how each continues. model, unigram: its loss, nats per token."""

    prompt: str
    document: str
    sample: str
    tokens: int
    model: float
    unigram: float


def verdict(checkpoint: Path, document: Document, train: Path) -> Verdict:
    """Judge `document`; train is the prefix of the training tokens, whose frequencies are the unigram statistics."""
    opened = open_model(checkpoint)
    tokenizer, stage = opened.tokenizer(), load_model(opened)
    assert tokenizer.eod is not None
    ids = [tokenizer.eod, *tokenizer.encode(document.text)]
    how = Sampling(temperature=0.8, top_k=50, seed=0)
    options = EngineOptions(max_requests=1, vocab=tokenizer.vocab_size)
    engine = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options)
    assert engine is not None
    sampled = list(generate(engine, ids[: PROMPT + 1], SAMPLED, how, stop_ids=frozenset({tokenizer.eod})))
    return Verdict(
        prompt=tokenizer.decode(ids[1 : PROMPT + 1]),
        document=tokenizer.decode(ids[PROMPT + 1 : PROMPT + 1 + SAMPLED]),
        sample=tokenizer.decode(token for token in sampled if token != tokenizer.eod),
        tokens=len(ids) - 1,
        model=float(losses(stage, ids).mean()),
        unigram=unigram(train, ids[1:], tokenizer.vocab_size),
    )


def chosen(documents: Sequence[Document]) -> Document:
    """The held-out document to show: a topic of Python's help if one is long enough, else any, else the longest."""
    long = [document for document in documents if len(document.text) >= 1000]
    prose = [document for document in long if document.name.startswith("help/")]
    return next(iter([*prose, *long]), max(documents, key=lambda document: len(document.text)))
