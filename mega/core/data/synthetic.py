"""Batches that are functions of sample numbers alone, for comparing layouts and measuring speed without data."""

from __future__ import annotations

from dataclasses import replace

import torch

from mega.core.batch import DecoderBatch
from mega.core.config.sections import ModelConfig
from mega.core.ops.counter import key, mix


def decoder_batch(
    model: ModelConfig, length: int, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> DecoderBatch:
    """Rows of `length` random tokens. samples: int64 [b].

    ragged: rows differ in how many tokens count, from a third to all: a per-rank mean would show. Else all count.
    documents: rows are packed with documents that attention keeps apart.
    """
    vocab = model.vocab
    assert vocab is not None
    columns = torch.arange(length + 1, device=samples.device)
    bits = mix(mix(samples + key(seed, "synthetic"))[:, None] + columns)
    text = (bits & 0x7FFFFFFF) % vocab
    counted = length // 3 + (samples * 7919) % (length - length // 3 + 1)
    weights = columns[None, :length] < counted[:, None] if ragged else torch.ones_like(text[:, 1:])
    positions = columns[None, :length].expand(len(samples), length)
    numbers = ((bits[:, :length] >> 32) % 5 == 0).cumsum(1) if documents else None
    return DecoderBatch(text[:, :-1], text[:, 1:], weights.float(), positions, samples, numbers)


def packed(batch: DecoderBatch, shortest: int = 200, longest: int = 2000) -> DecoderBatch:
    """The same rows as documents of `shortest` to `longest` tokens that attention keeps apart."""
    rows, length = batch.tokens.shape
    bits = mix(mix(batch.samples.cpu() + key("packed"))[:, None] + torch.arange(length // shortest + 1))
    ends = (shortest + (bits & 0x7FFFFFFF) % (longest - shortest + 1)).cumsum(1)
    documents = torch.searchsorted(ends, torch.arange(length).repeat(rows, 1), right=True)
    return replace(batch, documents=documents.to(batch.tokens.device))


def decoder_prompt(ids: torch.Tensor) -> DecoderBatch:
    """ids int64 [b, s] as rows to be continued or judged, each as of a text's beginning; no token follows."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    weights = torch.ones(ids.shape, device=ids.device)
    return DecoderBatch(ids, ids, weights, positions, torch.arange(len(ids), device=ids.device))
