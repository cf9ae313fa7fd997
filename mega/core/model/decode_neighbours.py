"""Attention to neighbours in decoding steps of a few tokens each, as in model/neighbours.py.

Between steps, a sequence stores the states of the current chunk, for the encoder, and the keys and values of the
neighbours of the last complete chunk. The neighbours of a chunk must be retrieved before the chunk's last token is
computed, because that token is the first to attend to these neighbours. This module runs on one rank and does not
depend on files or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from mega.core.architecture.layer import NeighbourAttention
from mega.core.model.decoder import DecoderStage
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, NeighbourStates, forward_context
from mega.core.model.neighbours import ChunkAttention
from mega.core.ops.mask import AttentionMask
from mega.core.parallel.mesh import SINGLE


@dataclass(eq=False)
class ReadingSequence:
    """The state that a sequence keeps between steps."""

    text: torch.Tensor | None = None
    """States of the t tokens in the current, incomplete chunk, [t, h], for the encoder."""
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Layer -> keys and values [k r, kv_heads, d] of the neighbours of the last complete chunk."""
    found: torch.Tensor | None = None
    """bool [k]: which neighbours of the last complete chunk exist. None if no chunk is complete yet."""


class Run(NamedTuple):
    """A run, which consists of the tokens of one sequence in a step."""

    sequence: ReadingSequence
    first: int  # index of the first token in the sequence
    tokens: int  # number of tokens in the step


def ended(first: int, count: int, chunk: int) -> range:
    """Return the indices of the chunks whose last token is one of the `count` tokens that start at token `first`.

    >>> list(ended(0, 9, 4)), list(ended(3, 1, 4)), list(ended(4, 3, 4))
    ([0, 1], [0], [])
    """
    return range(first // chunk, (first + count) // chunk)


class _Source(NamedTuple):
    """A chunk whose neighbours some tokens of the step attend to."""

    sequence: ReadingSequence
    number: int | None  # index among the chunks that end in this step; None if the chunk ended earlier
    tokens: range  # the tokens of the step that attend to the chunk's neighbours


class NeighbourStep:
    """One decoding step of the layers that attend to neighbours.

    runs: the runs of tokens in the step, in order. neighbours: int64 [n, k, r], for the chunks that end in the step, in
    the order of runs. found: bool [n, k], which neighbours exist.
    """

    def __init__(self, stage: DecoderStage, runs: Sequence[Run], neighbours: torch.Tensor, found: torch.Tensor):
        self._stage, self._runs, self._neighbours, self._found = stage, runs, neighbours, found
        value = reading(stage)
        self._chunk = value.chunk
        self._sources = self._read()
        device = neighbours.device
        queries = torch.tensor(
            [[*each.tokens, *[-1] * (value.chunk - len(each.tokens))] for each in self._sources],
            dtype=torch.int64,
            device=device,
        ).view(-1, value.chunk)
        self._there, self._queries = queries >= 0, queries.clamp(min=0)
        found_of_sources = [self._found_of(each) for each in self._sources]
        self._seen = torch.stack(found_of_sources) if found_of_sources else found.new_zeros(0, value.neighbours)
        self._encoded: torch.Tensor | None = None

    def _read(self) -> list[_Source]:
        sources, number, begin, chunk = list[_Source](), 0, 0, self._chunk
        for run in self._runs:
            new = ended(run.first, run.tokens, chunk)
            for ends in (new.start - 1, *new):
                # The chunk's last token and all but the last token of the next chunk attend to the chunk's neighbours.
                first, last = (ends + 1) * chunk - 1 - run.first, (ends + 2) * chunk - 1 - run.first
                tokens = range(begin + max(first, 0), begin + min(last, run.tokens))
                if ends >= 0 and len(tokens):
                    sources.append(_Source(run.sequence, None if ends < new.start else number, tokens))
                number += ends >= new.start
            begin += run.tokens
        return sources

    def _found_of(self, source: _Source) -> torch.Tensor:
        exists = source.sequence.found if source.number is None else self._found[source.number]
        assert exists is not None
        return exists

    def attend(self, mixer: ChunkAttention, x: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs for x [tokens, h], with shape [tokens, heads x d]. The outputs of tokens without
        neighbours are 0."""
        if len(mixer.encoder):
            self._encoded = self._encode(mixer, x)
        assert self._encoded is not None
        context = ForwardContext(1, len(x), None, {}, None, None, None, SINGLE, False)
        q, k, v = mixer.projected(x, self._encoded, context, context)
        count = len(self._neighbours)
        new = list(zip(*(tensor.unflatten(0, (count, -1)) for tensor in (k, v)), strict=True)) if count else []
        pairs = [
            each.sequence.pairs[mixer.layer] if each.number is None else new[each.number] for each in self._sources
        ]
        self._keep(mixer.layer, new)
        out = q.new_zeros(q.shape)
        if pairs:
            keys, values = (torch.stack(each) for each in zip(*pairs, strict=True))
            outputs = mixer.ops.attention(q[self._queries], keys, values, self._mask(mixer, keys.shape[1]))
            out[self._queries[self._there]] = outputs.view(*self._queries.shape, *q.shape[1:])[self._there]
        return out.flatten(1)

    def _mask(self, mixer: ChunkAttention, keys: int) -> AttentionMask:
        missing = (~self._seen).long().repeat_interleave(keys // self._seen.shape[1], 1)
        return AttentionMask(
            "full",
            softcap=mixer.value.softcap,
            q_documents=missing.new_zeros(len(missing), self._chunk),
            k_documents=missing,
        )

    def finish(self, mixer: ChunkAttention, mixed: torch.Tensor) -> torch.Tensor:
        """Apply the last linear layer, and add its bias for the tokens that have neighbours."""
        y = mixer.out.matmul(mixed, None)
        if mixer.out.bias is None:
            return y
        reads = y.new_zeros(len(y), 1)
        reads[self._queries[self._there], 0] = (
            self._seen.any(1)[:, None].expand_as(self._queries)[self._there].to(y.dtype)
        )
        return y + mixer.out.bias * reads

    def _encode(self, mixer: ChunkAttention, x: torch.Tensor) -> torch.Tensor:
        """Return the encoded neighbours of the chunks that end in this step, [n k r, h]."""
        texts, begin = list[torch.Tensor](), 0
        for run in self._runs:
            text = x[begin : begin + run.tokens]
            text = text if run.sequence.text is None else torch.cat([run.sequence.text, text])
            whole = len(text) // self._chunk * self._chunk
            texts.append(text[:whole])
            run.sequence.text, begin = text[whole:].clone(), begin + run.tokens
        number, count, width = self._neighbours.shape
        if not number:
            return x[:0]
        states = self._states(number * count, width)
        return mixer.encode(states, torch.cat(texts))

    def _states(self, count: int, width: int) -> NeighbourStates:
        stage = self._stage
        positions = torch.arange(width, device=self._neighbours.device).expand(count, width)
        samples = torch.zeros(count, dtype=torch.int64, device=positions.device)
        context = forward_context(
            *(stage.architecture, samples, positions, stage.region.axis),
            sequence=False,
            dropout_seed=None,
            dtype=stage.dtype,
        )
        tokens = cast(Embedding, stage.embedding)(self._neighbours.flatten(0, 1), positions, context)
        return NeighbourStates(tokens, context, None, (1, self._neighbours.shape[1], width), self._chunk)

    def _keep(self, layer: int, new: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store the keys and values of the neighbours of each sequence's last chunk, for tokens of later steps."""
        number = 0
        for run in self._runs:
            number += len(ended(run.first, run.tokens, self._chunk))
            if len(ended(run.first, run.tokens, self._chunk)):
                k, v = new[number - 1]
                run.sequence.pairs[layer] = k.clone(), v.clone()

    def close(self) -> None:
        """Finish the step after all layers, and record which neighbours of the last chunks exist."""
        number = 0
        for run in self._runs:
            number += len(ended(run.first, run.tokens, self._chunk))
            if len(ended(run.first, run.tokens, self._chunk)):
                run.sequence.found = self._found[number - 1]


def reading(stage: DecoderStage) -> NeighbourAttention:
    """Return the first attention to neighbours in the model of `stage`."""
    architecture = stage.architecture
    value: NeighbourAttention | None = architecture.layers[architecture.reading[0]].neighbours
    assert value is not None
    return value
