"""Generate synthetic batches that depend only on sample indices, for comparing layouts and measuring speed without
data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.architecture import architecture
from mega.core.batch import DecoderBatch, EncoderDecoderBatch, MaskedBatch, NeighbourBatch
from mega.core.config.sections import ModelConfig
from mega.core.ops.counter import key, mix


def decoder_batch(
    model: ModelConfig, length: int, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> DecoderBatch:
    """Return rows of `length` random tokens. samples: int64 [b], sample indices.

    ragged: whether the fraction of tokens with a loss varies between rows, from a third to all, so that a wrong mean
    over ranks is detected. If False, all tokens have a loss.
    documents: whether rows contain several documents that do not attend to each other.
    """
    columns = torch.arange(length + 1, device=samples.device)
    bits = _bits(samples, columns, seed, "synthetic")
    text = _ids(bits, model)
    weights = _counted(samples, length, ragged)
    positions = columns[None, :length].expand(len(samples), length)
    numbers = ((bits[:, :length] >> 32) % 5 == 0).cumsum(1) if documents else None
    return DecoderBatch(text[:, :-1], text[:, 1:], weights.float(), positions, samples, numbers)


def packed(batch: DecoderBatch, shortest: int = 200, longest: int = 2000) -> DecoderBatch:
    """Divide the rows of a batch into documents of `shortest` to `longest` tokens that do not attend to each other."""
    rows, length = batch.tokens.shape
    bits = mix(mix(batch.samples.cpu() + key("packed"))[:, None] + torch.arange(length // shortest + 1))
    ends = (shortest + (bits & 0x7FFFFFFF) % (longest - shortest + 1)).cumsum(1)
    documents = torch.searchsorted(ends, torch.arange(length).repeat(rows, 1), right=True)
    return replace(batch, documents=documents.to(batch.tokens.device))


def neighbour_batch(
    model: ModelConfig, length: int, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> NeighbourBatch:
    """Return rows of `length` random tokens whose chunks have random neighbours. samples: int64 [b], sample indices.

    ragged: see `decoder_batch`; in addition, about one in five neighbours is missing. documents: ignored, because a row
    is one document.
    """
    text = decoder_batch(model, length, samples, seed=seed, ragged=ragged)
    chunks, each = length // model.retro_chunk_length, model.retro_neighbours
    width = model.retro_chunk_length * model.retro_retrieved_chunks
    columns = torch.arange(chunks * each * width, device=samples.device)
    bits = _bits(samples, columns, seed, "synthetic neighbours").view(-1, chunks, each, width)
    is_found = (bits[..., 0] >> 32) % 5 != 0 if ragged else None
    return NeighbourBatch(**text.tensors(), neighbours=_ids(bits, model), found=is_found)


def neighbour_rows(
    samples: Sequence[NDArray[np.int64]], first: int, *, model: ModelConfig | None = None
) -> NeighbourBatch:
    """Return a batch from rows of token ids, int64 [seq_length + 1]. Every chunk has a copy of itself as neighbour."""
    text = torch.stack([torch.from_numpy(row) for row in samples])
    tokens = text[:, :-1].contiguous()
    assert model is not None
    chunks = tokens.view(len(tokens), -1, 1, model.retro_chunk_length)
    return NeighbourBatch(
        tokens=tokens,
        labels=text[:, 1:].contiguous(),
        loss_weights=torch.ones(tokens.shape),
        positions=torch.arange(tokens.shape[1]).expand_as(tokens),
        samples=torch.arange(first, first + len(samples)),
        neighbours=chunks.repeat(1, 1, model.retro_neighbours, model.retro_retrieved_chunks),
    )


def decoder_prompt(ids: torch.Tensor) -> DecoderBatch:
    """Return a batch for continuing or scoring ids, int64 [b, s]. Each row is the beginning of a text. The labels are
    placeholders."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    weights = torch.ones(ids.shape, device=ids.device)
    return DecoderBatch(ids, ids, weights, positions, torch.arange(len(ids), device=ids.device))


def masked_batch(
    model: ModelConfig, length: int, samples: torch.Tensor, *, seed: int, ragged: bool = True, documents: bool = False
) -> MaskedBatch:
    """Return rows with two parts of random tokens. About one token in seven is masked. samples: int64 [b], sample
    indices.

    ragged: whether up to half of each row is padding, and the pair label of every fourth row is unknown (-1).
    documents: ignored, because a row is one document.
    """
    bits = _masked_bits(samples, length, seed)
    lengths = length - (samples * 7919) % (length // 2 + 1) if ragged else torch.full_like(samples, length)
    pairs = (bits[:, 0] >> 40) & 1
    if ragged:
        pairs = pairs.masked_fill(samples % 4 == 3, -1)
    rows = architecture(model).output.rows
    if rows is not None:
        pairs = pairs[:: rows.choices]
    return _masked_rows(_ids(bits, model), lengths, pairs, samples, bits)


def masked_rows(samples: Sequence[Any], first: int) -> MaskedBatch:
    """Return a batch from rows of token ids, int64 [seq_length + 1], each divided into two parts. first: global index
    of the first sample."""
    tokens = torch.stack([torch.from_numpy(row[:-1]) for row in samples])
    numbers = torch.arange(first, first + len(samples))
    lengths = torch.full_like(numbers, tokens.shape[1])
    return _masked_rows(tokens, lengths, numbers % 2, numbers, _masked_bits(numbers, tokens.shape[1], 0))


def _masked_bits(samples: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """Return random bits, int64 [b, length], as a function of sample indices and columns."""
    return mix(mix(samples + key(seed, "masked"))[:, None] + torch.arange(length, device=samples.device))


def _masked_rows(
    tokens: torch.Tensor, lengths: torch.Tensor, pairs: torch.Tensor, samples: torch.Tensor, bits: torch.Tensor
) -> MaskedBatch:
    """Mask one in every seven columns with token 0. The second part begins in the middle of a row."""
    length = tokens.shape[1]
    columns = torch.arange(length, device=samples.device)
    is_token = columns < lengths[:, None]
    # [b, ceil(length / 7)]: one of the columns 0 to 6, one of 7 to 13, ...
    columns_to_mask = torch.arange(0, length, 7, device=samples.device) + ((bits[:, ::7] >> 32) & 0x7FFFFFFF) % 7
    predicted = columns_to_mask.clamp(max=length - 1)
    masked = is_token & torch.zeros_like(is_token).scatter(1, predicted, True)
    return MaskedBatch(
        tokens=tokens.masked_fill(masked | ~is_token, 0),
        labels=tokens.masked_fill(~masked, 0),
        loss_weights=masked.float(),
        types=(is_token & (columns >= lengths[:, None] // 2)).long(),
        lengths=lengths,
        pairs=pairs,
        samples=samples,
        predicted=predicted,
    )


def encoder_decoder_batch(
    model: ModelConfig,
    length: int,
    samples: torch.Tensor,
    *,
    seed: int,
    ragged: bool = True,
    documents: bool = False,
    decoder_length: int = 0,
) -> EncoderDecoderBatch:
    """Return rows of `length` random tokens for the encoder, and of `decoder_length` other random tokens for the
    decoder. samples: int64 [b], sample indices.

    ragged: whether the rows of encoder and decoder are padded to different degrees. documents: ignored.
    """
    columns = torch.arange(decoder_length + 1, device=samples.device)
    text = _ids(_bits(samples, columns, seed, "synthetic decoder"), model)
    encoder_ids = _ids(_bits(samples, torch.arange(length, device=samples.device), seed, "synthetic"), model)
    encoder_mask, decoder_mask = _counted(samples, length, ragged), _counted(samples + 1, decoder_length, ragged)
    return EncoderDecoderBatch(
        encoder_tokens=encoder_ids * encoder_mask,
        encoder_lengths=encoder_mask.sum(1),
        tokens=text[:, :-1] * decoder_mask,
        labels=text[:, 1:] * decoder_mask,
        loss_weights=decoder_mask.float(),
        lengths=decoder_mask.sum(1),
        samples=samples,
    )


def copied_rows(samples: Sequence[Any], first: int, *, decoder_length: int = 0) -> EncoderDecoderBatch:
    """Return a batch from rows that have one token more than the encoder reads. The decoder copies the encoder's row,
    which is repeated if the decoder's row is longer."""
    text = torch.stack([torch.from_numpy(row) for row in samples])
    encoder_ids, lengths = text[:, :-1], torch.full((len(samples),), text.shape[1] - 1)
    decoder_ids = text[:, torch.arange(decoder_length + 1) % text.shape[1]]
    return EncoderDecoderBatch(
        encoder_tokens=encoder_ids.contiguous(),
        encoder_lengths=lengths,
        tokens=decoder_ids[:, :-1].contiguous(),
        labels=decoder_ids[:, 1:].contiguous(),
        loss_weights=torch.ones(len(samples), decoder_length),
        lengths=torch.full_like(lengths, decoder_length),
        samples=torch.arange(first, first + len(samples)),
    )


def _bits(samples: torch.Tensor, columns: torch.Tensor, seed: int, name: str) -> torch.Tensor:
    """Return random bits, int64 [b, columns], as a function of sample indices and columns."""
    return mix(mix(samples + key(seed, name))[:, None] + columns)


def _ids(bits: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    return (bits & 0x7FFFFFFF) % architecture(model).input.vocab


def _counted(samples: torch.Tensor, length: int, ragged: bool) -> torch.Tensor:
    """Return int64 [b, length], 1 in the first n columns of each row and 0 elsewhere. If `ragged`, n varies between a
    third of `length` and `length`; otherwise n is `length`."""
    if not ragged:
        return torch.ones(len(samples), length, dtype=torch.int64, device=samples.device)
    counts = length // 3 + (samples * 7919) % (length - length // 3 + 1)
    return (torch.arange(length, device=samples.device) < counts[:, None]).long()
