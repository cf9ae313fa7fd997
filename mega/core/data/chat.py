"""Build samples for finetuning from whole conversations, which are packed into rows. Only selected tokens contribute to
the loss.

Conversations are tokenized once and stored in the index cache. A row contains as many conversations as fit; a
conversation longer than a row is truncated. Conversations in a row do not attend to each other, and positions restart
with each conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mega.core.data.cache import Arrays, cached
from mega.core.data.sources import STDIN, BadLine, describe_value, find, lines, parsed
from mega.core.text.chat.format import RENDERING, ChatFormat, Labelled
from mega.core.text.chat.messages import conversation
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import parse_json, read_limited

if TYPE_CHECKING:
    from mega.core.batch import DecoderBatch

Found = TypeVar("Found")

MOST_ARRAY = 1 << 30
"""Maximum size in bytes of a file with a single JSON array, which is parsed as a whole."""


class ChatRow(NamedTuple):
    """A packed row of s tokens."""

    tokens: NDArray[np.int64]  # int64 [s]
    labels: NDArray[np.int64]  # int64 [s]
    weights: NDArray[np.float32]  # float32 [s], 1 if the label is trained on, else 0
    documents: NDArray[np.int64]  # int64 [s], index of the conversation within the row
    positions: NDArray[np.int64]  # int64 [s], position within the conversation
    padding: NDArray[np.bool_]  # bool [s], whether the token is padding


class TrainedTexts:
    """Concatenated tokenized texts, with a mask of trained tokens.

    arrays: ids, trained, and offsets, int64 [texts + 1].
    """

    def __init__(self, arrays: Arrays) -> None:
        self._ids, self._trained, self._offsets = arrays["ids"], arrays["trained"], arrays["offsets"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def cut(self, number: int, limit: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Return the first `limit` ids of a text, and their mask of trained tokens."""
        first, end = self._offsets[number : number + 2].tolist()
        span = slice(first, min(end, first + limit))
        return self._ids[span], self._trained[span]

    def whole(self, number: int) -> Labelled:
        span = slice(*self._offsets[number : number + 2].tolist())
        return Labelled(self._ids[span].tolist(), self._trained[span].tolist())


class ChatDataset:
    """A dataset of packed rows. The rows come from consecutive passes over the conversations; each pass is shuffled
    separately.

    arrays: the arrays of `TrainedTexts`; members, the conversation indices in row order; and rows, int64 [rows + 1],
    the index of the first member of each row. Example: conversations a and b in a row of 8, with padding:

        tokens      a a a b b b b .
        documents   0 0 0 1 1 1 1 2
        positions   0 1 2 0 1 2 3 0
    """

    def __init__(self, arrays: Arrays, seq_length: int, filler: int) -> None:
        self._texts, self._members, self._rows = TrainedTexts(arrays), arrays["members"], arrays["rows"]
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
        end = number = 0
        for number, member in enumerate(self._members[self._rows[sample] : self._rows[sample + 1]].tolist()):
            ids, trained_ids = self._texts.cut(member, self._length + 1)
            span = slice(end, end + len(ids))
            text[span], trained[span] = ids, trained_ids
            documents[span], positions[span] = number, np.arange(len(ids))
            end += len(ids)
        documents[end:] = number + 1  # the padding at the end is a separate document
        weights = trained[1:] * (documents[1:] == documents[:-1])
        padding = np.arange(self._length) >= end
        return ChatRow(text[:-1], text[1:], weights, documents[:-1], positions[:-1], padding)

    def conversation(self, number: int) -> Labelled:
        """Return the tokens of one conversation."""
        return self._texts.whole(number)

    def collate(self, rows: Sequence[ChatRow], first_sample: int) -> DecoderBatch:
        """Build a microbatch whose first row is global sample `first_sample`."""
        import torch

        from mega.core.batch import DecoderBatch

        parts = [torch.from_numpy(np.stack(part)) for part in zip(*rows)]
        tokens, labels, weights, documents, positions, padding = parts
        return DecoderBatch(
            tokens=tokens,
            labels=labels,
            loss_weights=weights,
            positions=positions,
            samples=torch.arange(first_sample, first_sample + len(rows)),
            documents=documents,
            padding=padding,
        )


def chat_dataset(
    flag: str,
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    seq_length: int,
    samples: int,
    seed: int,
    cache: Path | None,
    note: Callable[[str], None],
) -> ChatDataset:
    """Build at least `samples` rows from conversations in JSON lines.

    flag: the flag that names the inputs, for use in messages. note: function called with messages for the user.
    Raises ValueError naming file and line of an invalid conversation, or if no token is trained.
    """
    key = {
        "kind": "chat",
        "inputs": digest(flag, inputs),
        "tokenizer": tokenizer.fingerprint(),
        "template": chat.source,
        "rendering": RENDERING,
    }

    def tokenised() -> Arrays:
        return arrays_of(labelled(inputs, chat), f"{flag} {' '.join(inputs)}: holds no conversation")

    texts = cached(cache, key, ("ids", "trained", "offsets"), tokenised)
    if loss_note := truncation_note(f"{flag} {' '.join(inputs)}", texts, seq_length):
        note(loss_note)
    lengths = np.minimum(np.diff(texts["offsets"]), seq_length + 1)
    packing = key | {"kind": "packing", "seq_length": seq_length, "samples": samples, "seed": seed}
    packed = cached(cache, packing, ("members", "rows"), lambda: pack(lengths, seq_length + 1, samples, seed))
    return ChatDataset({**texts, **packed}, seq_length, filler(tokenizer))


def digest(flag: str, inputs: Sequence[str], settings: str = "") -> str:
    """Return a digest of `settings` and of the input files. Errors: ValueError if an input is standard input."""
    paths, hasher = find(inputs, flag), hashlib.sha256(settings.encode())
    if STDIN in paths:
        raise ValueError(f"{flag} -: standard input is gone once it is read, and every rank reads; give a file")
    for path in paths:
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


def filler(tokenizer: Tokenizer) -> int:
    """Return the id that pads rows."""
    return next(token for token in (tokenizer.pad, tokenizer.eod, 0) if token is not None)


def truncation_note(source: str, texts: Arrays, seq_length: int, unit: str = "conversations") -> str | None:
    """Return a message about conversations that are truncated or have no trained token; None if there are no such
    conversations. Errors: ValueError if no token is trained.

    Without trained tokens, the loss would be 0, and only weight decay would change the weights.
    """
    sizes = np.diff(texts["offsets"])
    firsts = texts["offsets"][:-1]
    trained = np.flatnonzero(texts["trained"])
    # the first token of a conversation is never a label
    until, since = firsts + np.minimum(sizes, seq_length + 1), firsts + 1
    barren = int((np.searchsorted(trained, until) <= np.searchsorted(trained, since)).sum())
    cut = int((sizes > seq_length + 1).sum())
    if barren == len(sizes):
        raise ValueError(f"{source}: no token is trained in what --seq-length {seq_length} leaves of its {unit}")
    if not cut and not barren:
        return None
    return f"{source}: of {len(sizes)} {unit} --seq-length {seq_length} cuts {cut}; {barren} have no trained token"


def pack(lengths: NDArray[np.int64], room: int, samples: int, seed: int) -> Arrays:
    """Pack conversations into rows of `room` tokens, in shuffled order, until there are `samples` rows.

    Example: conversations of lengths 3 4 2, in this order and with room 6, form the rows [3] [4 2].
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


def labelled(inputs: Sequence[str], chat: ChatFormat) -> Iterator[Labelled]:
    """Yield every conversation of the inputs as tokens. Errors: ValueError naming file and line of an invalid
    conversation."""
    return each_line(inputs, lambda found: chat.labelled(conversation(found)))


def each_line(inputs: Sequence[str], read: Callable[[object], Found]) -> Iterator[Found]:
    """Apply `read` to each JSON value in the inputs: a line, an item of a file with a single array, or a row of a
    table.

    Errors: ValueError raised by `read`, with file and line prepended.
    """
    for location, value in chain.from_iterable(map(_values, find(inputs))):
        try:
            content = value()
            if not isinstance(content, dict):
                raise ValueError(f"not a JSON object; {describe_value(content)}")
            yield read(content)
        except ValueError as error:
            if str(error).startswith("--"):
                raise
            raise BadLine(f"{location}: {error}") from None


def _values(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """For each value in a file, yield the value's location and a function that reads the value."""
    if (items := _array(path)) is not None:
        for number, item in enumerate(items, 1):
            yield f"{path}: item {number}", partial(lambda found: found, item)
        return
    for location, line in lines([path], []):
        yield location, partial(parsed, line)


def _array(path: Path) -> list[object] | None:
    """Return the items of a .json file with a single array, such as alpaca_data.json; None for any other file. Errors:
    ValueError for invalid JSON."""
    if path.suffix != ".json":
        return None
    with path.open("rb") as file:
        if not file.read(64).lstrip().startswith(b"["):
            return None
    content = parse_json(read_limited(path, MOST_ARRAY, str(path)), str(path))
    return list(content) if isinstance(content, list) else None


def arrays_of(texts: Iterable[Labelled], message: str) -> Arrays:
    """Convert texts to the arrays of `TrainedTexts`. Errors: ValueError with `message` if `texts` is empty."""
    ids: list[NDArray[np.int32]] = []
    trained: list[NDArray[np.bool_]] = []
    for each in texts:
        ids.append(np.array(each.ids, np.int32))
        trained.append(np.array(each.trained, np.bool_))
    if not ids:
        raise ValueError(message)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64)
    return {"ids": np.concatenate(ids), "trained": np.concatenate(trained), "offsets": offsets}
