"""Finetuning samples: whole conversations packed into rows, apart from one another, trained where they should be.

Conversations are tokenised once and kept in the index cache. A row holds as many as fit; a longer one is cut. They do
not attend to one another, and positions restart with each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.cache import Arrays, cached
from mega.core.data.sources import STDIN, BadLine, find, lines, parsed
from mega.core.text.chat import Labelled, Template, check_stop, conversation, encode
from mega.core.text.tokenizer import Tokenizer


class ChatRow(NamedTuple):
    """tokens, labels: int64 [s]; weights: float32 [s], 1 where the label is trained on; documents: int64 [s], number
    of the conversation within the row; positions: int64 [s] within the conversation."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    documents: NDArray[np.int64]
    positions: NDArray[np.int64]


class ChatDataset:
    """Row i of every pass over the conversations, reshuffled in each.

    ids, trained: of all conversations back to back; offsets: int64 [conversations + 1];
    members: conversations in the order in which they lie in rows; rows: int64 [rows + 1], first member of each.
    """

    def __init__(self, arrays: Arrays, seq_length: int, filler: int) -> None:
        self._ids, self._trained, self._offsets = arrays["ids"], arrays["trained"], arrays["offsets"]
        self._members, self._rows = arrays["members"], arrays["rows"]
        self._length, self._filler = seq_length, filler

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, sample: int) -> ChatRow:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        text = np.full(self._length + 1, self._filler, np.int64)
        trained = np.zeros(self._length + 1, np.float32)
        documents = np.full(self._length + 1, -1, np.int64)
        positions = np.zeros(self._length + 1, np.int64)
        at = number = 0
        for number, member in enumerate(self._members[self._rows[sample] : self._rows[sample + 1]].tolist()):
            first = int(self._offsets[member])
            size = min(int(self._offsets[member + 1]) - first, self._length + 1)
            place = slice(at, at + size)
            text[place], trained[place] = self._ids[first : first + size], self._trained[first : first + size]
            documents[place], positions[place] = number, np.arange(size)
            at += size
        documents[at:] = number + 1  # what fills the row is a document of its own
        weights = trained[1:] * (documents[1:] == documents[:-1])
        return ChatRow(text[:-1], text[1:], weights, documents[:-1], positions[:-1])

    def conversation(self, number: int) -> Labelled:
        """One conversation's tokens."""
        place = slice(*self._offsets[number : number + 2].tolist())
        return Labelled(self._ids[place].tolist(), self._trained[place].tolist())

    def collate(self, rows: Sequence[ChatRow], first_sample: int) -> Any:
        """Rows as one microbatch whose first row is global sample `first_sample`."""
        import torch

        from mega.core.batch import DecoderBatch

        tokens, labels, weights, documents, positions = (torch.from_numpy(np.stack(part)) for part in zip(*rows))
        return DecoderBatch(
            tokens=tokens,
            labels=labels,
            loss_weights=weights,
            positions=positions,
            samples=torch.arange(first_sample, first_sample + len(rows)),
            documents=documents,
        )


def chat_dataset(
    flag: str,
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    template: Template,
    template_name: str,
    *,
    seq_length: int,
    samples: int,
    seed: int,
    cache: Path | None,
    note: Callable[[str], None],
) -> ChatDataset:
    """At least `samples` rows from conversations in JSON lines. `flag` is the one that gave them, for messages.

    note: called with what the user should know. Raises ValueError naming file and line of an invalid conversation, or
    where nothing is trained.
    """
    paths = find(inputs, flag)
    if STDIN in paths:
        raise ValueError(f"{flag} -: standard input is gone once it is read, and every rank reads; give a file")
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    key = {
        "kind": "chat",
        "inputs": digest.hexdigest(),
        "tokenizer": tokenizer.fingerprint(),
        "template": template_name,
    }
    found = cached(cache, key, ("ids", "trained", "offsets"), lambda: _tokenised(flag, inputs, tokenizer, template))
    if lost := lost_tokens(f"{flag} {' '.join(inputs)}", found, seq_length):
        note(lost)
    lengths = np.minimum(np.diff(found["offsets"]), seq_length + 1)
    packing = key | {"kind": "packing", "seq_length": seq_length, "samples": samples, "seed": seed}
    packed = cached(cache, packing, ("members", "rows"), lambda: pack(lengths, seq_length + 1, samples, seed))
    filler = next(t for t in (tokenizer.pad, tokenizer.eod, 0) if t is not None)
    return ChatDataset({**found, **packed}, seq_length, filler)


def lost_tokens(what: str, found: Arrays, seq_length: int, of: str = "conversations") -> str | None:
    """How many conversations a row is too short for, and how many train nothing; ValueError where none trains anything.

    A run without trained tokens has a loss of 0; weight decay alone changes the model.
    """
    sizes = np.diff(found["offsets"])
    firsts = found["offsets"][:-1]
    trained = np.flatnonzero(found["trained"])
    # The first token of a conversation is not a label.
    until, since = firsts + np.minimum(sizes, seq_length + 1), firsts + 1
    barren = int((np.searchsorted(trained, until) <= np.searchsorted(trained, since)).sum())
    cut = int((sizes > seq_length + 1).sum())
    if barren == len(sizes):
        raise ValueError(f"{what}: no token is trained in what --seq-length {seq_length} leaves of its {of}")
    if not cut and not barren:
        return None
    return f"{what}: of {len(sizes)} {of} --seq-length {seq_length} cuts {cut}; {barren} have no trained token"


def pack(lengths: NDArray[np.int64], room: int, samples: int, seed: int) -> Arrays:
    """Conversations into rows of `room` tokens, in passes of shuffled order, until there are `samples` rows.

    Lengths 3 4 2 in this order, room 6: rows [3] [4 2].
    """
    generator = np.random.RandomState(seed)
    members: list[int] = []
    rows = [0]
    while len(rows) <= samples:
        filled = 0
        for member in generator.permutation(len(lengths)).tolist():
            if filled and filled + int(lengths[member]) > room:
                rows.append(len(members))
                filled = 0
            members.append(member)
            filled += int(lengths[member])
        rows.append(len(members))
    return {"members": np.array(members, np.int64), "rows": np.array(rows, np.int64)}


def labelled(inputs: Sequence[str], tokenizer: Tokenizer, template: Template) -> Iterator[Labelled]:
    """Every conversation of the inputs as tokens; ValueError naming file and line where one is none."""
    for where, line in lines(inputs, ["messages"]):
        try:
            parts = template(conversation(parsed(line)))
            check_stop(parts)
            yield encode(parts, tokenizer)
        except ValueError as error:
            if str(error).startswith("--"):
                raise
            raise BadLine(f"{where}: {error}") from None


def _tokenised(flag: str, inputs: Sequence[str], tokenizer: Tokenizer, template: Template) -> Arrays:
    ids: list[NDArray[np.int32]] = []
    trained: list[NDArray[np.bool_]] = []
    for found in labelled(inputs, tokenizer, template):
        ids.append(np.array(found.ids, np.int32))
        trained.append(np.array(found.trained, np.bool_))
    if not ids:
        raise ValueError(f"{flag} {' '.join(inputs)}: holds no conversation")
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
    return {"ids": np.concatenate(ids), "trained": np.concatenate(trained), "offsets": offsets}
