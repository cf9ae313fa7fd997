"""Pairs of answers to one prompt, one of them preferred: a row for each answer, its own tokens trained, not those of
the assistant's turns before it. Rows are padded to the longest of their microbatch.

A line of a file is {"prompt", "chosen", "rejected"}: texts, or lists of messages (text/chat/messages.py);
without "prompt" both answers are whole conversations, and they may be with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.chat import TrainedTexts, arrays_of, digest, each_line, filler, lost_tokens
from mega.core.text.chat.format import RENDERING, ChatFormat, Labelled
from mega.core.text.chat.messages import Message, check_unread, conversation
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.batch import PreferenceBatch

KEYS = ("prompt", "chosen", "rejected")
JUDGED = 3
"""Which tokens are an answer's own: part of the cache key. 1 had the prompt's assistant too; in
2 what is shared ended with a run of text, and now ends with a message."""


class PairRows(NamedTuple):
    """tokens, labels: int64 [2, s]; weights: float32 [2, s]; reference: float64 [2], or None. longest: tokens of the
    longer row that are not padding."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    reference: NDArray[np.float64] | None
    longest: int


class PairDataset:
    """Sample i is pair order[i]; every pass over the pairs is shuffled by itself.

    texts: all answers, each after its prompt; pair n's are 2 n and 2 n + 1. order: int64 [samples]. digest: of
    everything that the rows depend on. reference: float64 [pairs, 2], log-probabilities of both answers under the
    weights that training begins with, once they are known. unit: a microbatch is as wide as its longest row, in whole
    multiples of it; None: as wide as seq_length, where all have to be alike.
    """

    def __init__(
        self, texts: TrainedTexts, order: NDArray[np.int64], seq_length: int, filler: int, digest: str
    ) -> None:
        self._texts, self._length, self._filler, self.order, self.digest = texts, seq_length, filler, order, digest
        self.reference: NDArray[np.float64] | None = None
        self.unit: int | None = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def pairs(self) -> int:
        return len(self._texts) // 2

    def __getitem__(self, sample: int) -> PairRows:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        return self.pair(int(self.order[sample]))

    def answer(self, row: int) -> Labelled:
        return self._texts.whole(row)

    def pair(self, number: int) -> PairRows:
        """The two rows of one pair."""
        text = np.full((2, self._length + 1), self._filler, np.int64)
        trained = np.zeros((2, self._length + 1), np.float32)
        longest = 1
        for row in range(2):
            ids, kept = self._texts.cut(2 * number + row, self._length + 1)
            text[row, : len(ids)], trained[row, : len(ids)] = ids, kept
            longest = max(longest, len(ids) - 1)
        known = None if self.reference is None else self.reference[number]
        return PairRows(text[:, :-1], text[:, 1:], trained[:, 1:], known, longest)

    def collate(self, rows: Sequence[PairRows], first_sample: int) -> PreferenceBatch:
        """Pairs as one microbatch whose first pair is global sample `first_sample`."""
        import torch

        from mega.core.batch import PreferenceBatch

        width = self._length
        if self.unit is not None:
            width = min(width, -(-max(row.longest for row in rows) // self.unit) * self.unit)
        tokens, labels, weights = (
            torch.from_numpy(np.concatenate([each[:, :width] for each in part])) for part in list(zip(*rows))[:3]
        )
        known = [row.reference for row in rows if row.reference is not None]
        return PreferenceBatch(
            tokens=tokens,
            labels=labels,
            loss_weights=weights,
            positions=torch.arange(width).expand(len(tokens), -1).contiguous(),
            samples=torch.arange(2 * first_sample, 2 * (first_sample + len(rows))),
            reference=torch.from_numpy(np.stack(known)) if known else None,
        )


def pair_dataset(
    flag: str,
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    seq_length: int,
    samples: int,
    seed: int,
    note: Callable[[str], None],
) -> PairDataset:
    """At least `samples` pairs from JSON lines. `flag` is the one that gave them; note: called with lines for the user.

    Errors: ValueError naming file and line of an invalid pair, or where no pair has two different answers.
    """
    about = f"{tokenizer.fingerprint()} {chat.source} {seq_length} {RENDERING} {JUDGED}"
    what, made_of = f"{flag} {' '.join(inputs)}", digest(flag, inputs, about)
    arrays = arrays_of(chain.from_iterable(encoded(inputs, chat)), f"{what}: holds no pair")
    if lost := lost_tokens(what, arrays, seq_length, "answers"):
        note(lost)
    texts, generator = TrainedTexts(arrays), np.random.RandomState(seed)
    pairs = len(texts) // 2
    order = np.concatenate([generator.permutation(pairs) for _ in range(-(-samples // pairs))]).astype(np.int64)
    return PairDataset(texts, order, seq_length, filler(tokenizer), made_of)


def encoded(inputs: Sequence[str], chat: ChatFormat) -> Iterator[tuple[Labelled, Labelled]]:
    """Every pair of the inputs as tokens, chosen first; ValueError naming file and line where one is none."""

    def read(found: object) -> tuple[Labelled, Labelled]:
        one, other = (conversation(each) for each in conversations(found))
        if _question(one.messages) != _question(other.messages):
            raise ValueError("the answers are to different questions")
        # What both answers follow is no part of either: it has no effect on their difference, but would count in the
        # reward of each.
        both = zip(one.messages, other.messages, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        return chat.labelled(one, shared), chat.labelled(other, shared)

    return each_line(inputs, read)


def _question(messages: Sequence[Message]) -> list[Message]:
    """What stands before the assistant's first turn."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def conversations(found: object) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The two conversations of one JSON object, as `conversation` takes them. Errors: ValueError.

    >>> conversations({"prompt": "1 + 1", "chosen": "2", "rejected": "3"})[0]["messages"][-1]
    {'role': 'assistant', 'content': '2'}
    """
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    check_unread(found)
    if absent := [key for key in KEYS[1:] if key not in found]:
        raise ValueError(f'no "{absent[0]}": a pair is {{"prompt", "chosen", "rejected"}}; it has {_listed(found)}')
    prompt = _messages(found.get("prompt", []), "user")
    chosen, rejected = (_whole(prompt, _messages(found[key], "assistant")) for key in KEYS[1:])
    if chosen == rejected:
        raise ValueError("both answers are the same")
    if not prompt and not (isinstance(found["chosen"], list) and isinstance(found["rejected"], list)):
        raise ValueError('no "prompt", and the answers are not whole conversations')
    tools = {"tools": found["tools"]} if "tools" in found else {}
    return {"messages": chosen, **tools}, {"messages": rejected, **tools}


def _whole(prompt: list[object], answer: list[object]) -> list[object]:
    """An answer after its prompt, which it may begin with itself, as UltraFeedback's do."""
    return answer if answer[: len(prompt)] == prompt else prompt + answer


def _listed(found: Mapping[str, object]) -> str:
    return ", ".join(map(repr, list(found)[:8])) or "nothing"


def _messages(found: object, role: str) -> list[object]:
    if isinstance(found, str):
        return [{"role": role, "content": found}]
    if isinstance(found, list):
        return list(found)
    raise ValueError(f"the {role}'s part is neither a text nor a list of messages")
