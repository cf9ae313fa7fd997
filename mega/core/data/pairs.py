"""Build preference pairs: two answers to a prompt, one of which is preferred. Each answer is a row in which only the
answer's tokens have a loss; earlier assistant turns have none. Rows are padded to the longest row of their microbatch.

A line of a file is an object {"prompt", "chosen", "rejected"} of texts or lists of messages (text/chat/messages.py).
Without "prompt", both answers must be whole conversations; with "prompt", they may be whole conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.chat import TrainedTexts, arrays_of, digest, each_line, filler, truncation_note
from mega.core.text.chat.format import RENDERING, ChatFormat, Labelled
from mega.core.text.chat.messages import Message, check_unread, conversation
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.batch import PreferenceBatch

KEYS = ("prompt", "chosen", "rejected")
ANSWER_RULE = 3
"""Version of the rule that determines an answer's tokens; part of the cache key. Version 1 included the prompt's
assistant turns. In version 2, the prefix shared by both answers could end inside a message; in version 3, it ends at
the end of a message."""


class PairRows(NamedTuple):
    """The two rows of a pair: chosen, rejected."""

    tokens: NDArray[np.int64]  # int64 [2, s]
    labels: NDArray[np.int64]  # int64 [2, s]
    weights: NDArray[np.float32]  # float32 [2, s]
    padding: NDArray[np.bool_]  # bool [2, s], whether the token is padding
    reference: NDArray[np.float64] | None  # float64 [2], log-probabilities under the reference weights, or None
    longest: int  # Number of tokens in the longer row, without padding


class PairDataset:
    """A dataset of pairs. Sample i is pair order[i]. Each pass over the pairs is shuffled separately.

    texts: all answers, each with its prompt; pair n has texts 2 n and 2 n + 1.
    order: int64 [samples].
    digest: a digest of all inputs and settings that affect the rows.
    reference: float64 [pairs, 2], log-probabilities of both answers under the initial weights; None until they are
    computed.
    unit: the length of a microbatch is that of its longest row, rounded up to a multiple of `unit`. If None, the length
    is seq_length.
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
        """Return the two rows of one pair."""
        text = np.full((2, self._length + 1), self._filler, np.int64)
        trained = np.zeros((2, self._length + 1), np.float32)
        padding = np.ones((2, self._length), np.bool_)
        longest = 1
        for row in range(2):
            ids, trained_ids = self._texts.cut(2 * number + row, self._length + 1)
            text[row, : len(ids)], trained[row, : len(ids)] = ids, trained_ids
            padding[row, : len(ids)] = False
            longest = max(longest, len(ids) - 1)
        reference = None if self.reference is None else self.reference[number]
        return PairRows(text[:, :-1], text[:, 1:], trained[:, 1:], padding, reference, longest)

    def collate(self, rows: Sequence[PairRows], first_sample: int) -> PreferenceBatch:
        """Build a microbatch whose first pair is global sample `first_sample`."""
        import torch

        from mega.core.batch import PreferenceBatch

        width = self._length
        if self.unit is not None:
            width = min(width, -(-max(row.longest for row in rows) // self.unit) * self.unit)
        tokens, labels, weights, padding = (
            torch.from_numpy(np.concatenate([each[:, :width] for each in part])) for part in list(zip(*rows))[:4]
        )
        references = [row.reference for row in rows if row.reference is not None]
        return PreferenceBatch(
            tokens=tokens,
            labels=labels,
            loss_weights=weights,
            positions=torch.arange(width).expand(len(tokens), -1).contiguous(),
            samples=torch.arange(2 * first_sample, 2 * (first_sample + len(rows))),
            padding=padding,
            reference=torch.from_numpy(np.stack(references)) if references else None,
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
    """Build at least `samples` pairs from JSON lines.

    flag: the flag that names the inputs, for use in messages. note: function called with messages for the user.
    Errors: ValueError naming file and line of an invalid pair, or if no pair has two different answers.
    """
    settings = f"{tokenizer.fingerprint()} {chat.source} {seq_length} {RENDERING} {ANSWER_RULE}"
    source, dataset_digest = f"{flag} {' '.join(inputs)}", digest(flag, inputs, settings)
    arrays = arrays_of(chain.from_iterable(encoded(inputs, chat)), f"{source}: holds no pair")
    if loss_note := truncation_note(source, arrays, seq_length, "answers"):
        note(loss_note)
    texts, generator = TrainedTexts(arrays), np.random.RandomState(seed)
    pairs = len(texts) // 2
    order = np.concatenate([generator.permutation(pairs) for _ in range(-(-samples // pairs))]).astype(np.int64)
    return PairDataset(texts, order, seq_length, filler(tokenizer), dataset_digest)


def encoded(inputs: Sequence[str], chat: ChatFormat) -> Iterator[tuple[Labelled, Labelled]]:
    """Yield every pair of the inputs as tokens, the chosen answer first. Errors: ValueError naming file and line of an
    invalid pair."""

    def read(content: object) -> tuple[Labelled, Labelled]:
        one, other = (conversation(each) for each in conversations(content))
        if _question(one.messages) != _question(other.messages):
            raise ValueError("the answers are to different questions")
        # The shared messages have no loss. They cancel in the difference between the answers, but would affect the
        # reward of each answer.
        message_pairs = zip(one.messages, other.messages, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], message_pairs))
        return chat.labelled(one, shared), chat.labelled(other, shared)

    return each_line(inputs, read)


def _question(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the assistant's first turn."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def conversations(content: object) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the two conversations of a JSON object, as arguments of `conversation`. Errors: ValueError for an invalid
    pair.

    >>> conversations({"prompt": "1 + 1", "chosen": "2", "rejected": "3"})[0]["messages"][-1]
    {'role': 'assistant', 'content': '2'}
    """
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    check_unread(content)
    if absent := [key for key in KEYS[1:] if key not in content]:
        raise ValueError(f'no "{absent[0]}": a pair is {{"prompt", "chosen", "rejected"}}; it has {_listed(content)}')
    prompt = _messages(content.get("prompt", []), "user")
    chosen_messages, rejected_messages = (_whole(prompt, _messages(content[key], "assistant")) for key in KEYS[1:])
    if chosen_messages == rejected_messages:
        raise ValueError("both answers are the same")
    if not prompt and not (isinstance(content["chosen"], list) and isinstance(content["rejected"], list)):
        raise ValueError('no "prompt", and the answers are not whole conversations')
    tools = {"tools": content["tools"]} if "tools" in content else {}
    return {"messages": chosen_messages, **tools}, {"messages": rejected_messages, **tools}


def _whole(prompt: list[object], answer: list[object]) -> list[object]:
    """Return the prompt followed by an answer. An answer may begin with a copy of the prompt, as in UltraFeedback."""
    return answer if answer[: len(prompt)] == prompt else prompt + answer


def _listed(fields: Mapping[str, object]) -> str:
    return ", ".join(map(repr, list(fields)[:8])) or "nothing"


def _messages(value: object, role: str) -> list[object]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return list(value)
    raise ValueError(f"the {role}'s part is neither a text nor a list of messages")
