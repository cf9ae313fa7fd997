"""Attention to neighbours in a step that continues texts: the same as model/neighbours.py, of any few tokens at a time.

A sequence keeps what its next tokens need: what the encoder will read of the chunk under way, and the keys and values
of the neighbours of the chunk that ended last. The neighbours of a chunk are there before its last token is computed,
which is the first to read them. Of one rank; it knows neither files nor requests.
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
    """What a sequence keeps between steps."""

    text: torch.Tensor | None = None
    """[t, h], t below a chunk's length: what the encoder reads of the tokens of the chunk under way."""
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Layer -> keys and values [k r, kv_heads, d] of the neighbours of the chunk that ended last."""
    found: torch.Tensor | None = None
    """bool [k]: which of these there are. None: no chunk has ended."""


class Run(NamedTuple):
    """Tokens of a step that are of one sequence, from its token number `first` on."""

    sequence: ReadingSequence
    first: int
    tokens: int


def ended(first: int, count: int, chunk: int) -> range:
    """The chunks whose last token is among `count` tokens from number `first` on.

    >>> list(ended(0, 9, 4)), list(ended(3, 1, 4)), list(ended(4, 3, 4))
    ([0, 1], [0], [])
    """
    return range(first // chunk, (first + count) // chunk)


class _Source(NamedTuple):
    """A chunk that tokens of the step read, and which ones. number: of the chunks that end in the step; None: it ended
    before, and is its sequence's."""

    sequence: ReadingSequence
    number: int | None
    tokens: range


class NeighbourStep:
    """What the layers that read neighbours do in one step. runs: of its tokens, in order. neighbours: int64 [n, k, r]
    of the chunks that end in it, in the order of runs. found: bool [n, k], which of them there are."""

    def __init__(self, stage: DecoderStage, runs: Sequence[Run], neighbours: torch.Tensor, found: torch.Tensor):
        self._stage, self._runs, self._neighbours, self._found = stage, runs, neighbours, found
        value = reading(stage)
        self._chunk = value.chunk
        self._sources = self._read()
        where = neighbours.device
        queries = torch.tensor(
            [[*each.tokens, *[-1] * (value.chunk - len(each.tokens))] for each in self._sources],
            dtype=torch.int64,
            device=where,
        ).view(-1, value.chunk)
        self._there, self._queries = queries >= 0, queries.clamp(min=0)
        kept = [self._found_of(each) for each in self._sources]
        self._seen = torch.stack(kept) if kept else found.new_zeros(0, value.neighbours)
        self._encoded: torch.Tensor | None = None

    def _read(self) -> list[_Source]:
        sources, number, begin, chunk = list[_Source](), 0, 0, self._chunk
        for run in self._runs:
            new = ended(run.first, run.tokens, chunk)
            for ends in (new.start - 1, *new):
                # Read from its last token on, up to the last but one of the next.
                first, last = (ends + 1) * chunk - 1 - run.first, (ends + 2) * chunk - 1 - run.first
                tokens = range(begin + max(first, 0), begin + min(last, run.tokens))
                if ends >= 0 and len(tokens):
                    sources.append(_Source(run.sequence, None if ends < new.start else number, tokens))
                number += ends >= new.start
            begin += run.tokens
        return sources

    def _found_of(self, source: _Source) -> torch.Tensor:
        found = source.sequence.found if source.number is None else self._found[source.number]
        assert found is not None
        return found

    def attend(self, mixer: ChunkAttention, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, h] -> [tokens, heads x d], 0 for tokens that read nothing."""
        if len(mixer.encoder):
            self._encoded = self._encode(mixer, x)
        assert self._encoded is not None
        context = ForwardContext(1, len(x), None, {}, None, None, None, SINGLE, False)
        q, k, v = mixer.projected(x, self._encoded, context, context)
        count = len(self._neighbours)
        new = list(zip(*(one.unflatten(0, (count, -1)) for one in (k, v)), strict=True)) if count else []
        pairs = [
            each.sequence.pairs[mixer.layer] if each.number is None else new[each.number] for each in self._sources
        ]
        self._keep(mixer.layer, new)
        out = q.new_zeros(q.shape)
        if pairs:
            keys, values = (torch.stack(each) for each in zip(*pairs, strict=True))
            mixed = mixer.ops.attention(q[self._queries], keys, values, self._mask(mixer, keys.shape[1]))
            out[self._queries[self._there]] = mixed.view(*self._queries.shape, *q.shape[1:])[self._there]
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
        """The last linear, and its bias for tokens that read something."""
        y = mixer.out.matmul(mixed, None)
        if mixer.out.bias is None:
            return y
        reads = y.new_zeros(len(y), 1)
        reads[self._queries[self._there], 0] = (
            self._seen.any(1)[:, None].expand_as(self._queries)[self._there].to(y.dtype)
        )
        return y + mixer.out.bias * reads

    def _encode(self, mixer: ChunkAttention, x: torch.Tensor) -> torch.Tensor:
        """The neighbours of the chunks that end in this step as their encoder has them, [n k r, h]."""
        texts, at = list[torch.Tensor](), 0
        for run in self._runs:
            text = x[at : at + run.tokens]
            text = text if run.sequence.text is None else torch.cat([run.sequence.text, text])
            whole = len(text) // self._chunk * self._chunk
            texts.append(text[:whole])
            run.sequence.text, at = text[whole:].clone(), at + run.tokens
        number, each, width = self._neighbours.shape
        if not number:
            return x[:0]
        states = self._states(number * each, width)
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
        """The last chunk of each sequence is read by tokens of later steps."""
        number = 0
        for run in self._runs:
            number += len(ended(run.first, run.tokens, self._chunk))
            if len(ended(run.first, run.tokens, self._chunk)):
                k, v = new[number - 1]
                run.sequence.pairs[layer] = k.clone(), v.clone()

    def close(self) -> None:
        """After all layers."""
        number = 0
        for run in self._runs:
            number += len(ended(run.first, run.tokens, self._chunk))
            if len(ended(run.first, run.tokens, self._chunk)):
                run.sequence.found = self._found[number - 1]


def reading(stage: DecoderStage) -> NeighbourAttention:
    """The first attention to neighbours of a model that has some."""
    architecture = stage.architecture
    value: NeighbourAttention | None = architecture.layers[architecture.reading[0]].neighbours
    assert value is not None
    return value
