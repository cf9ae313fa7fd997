"""Print samples as a model receives them, one token per line. This module does not depend on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data.batches import Batches
from mega.core.data.build import build_datasets
from mega.core.data.chat import labelled
from mega.core.text.chat.format import chat_format
from mega.core.text.tokenizer import Tokenizer


def conversations(
    inputs: Sequence[str], chat_template: str, tokenizer: Tokenizer, number: int, count: int
) -> Iterator[str]:
    """Yield lines that show `count` conversations, starting at index `number`, in file order. Raises ValueError if
    `number` is too large."""
    texts = labelled(inputs, chat_format(chat_template, tokenizer))
    printed = 0
    for printed, (ids, trained) in enumerate(islice(texts, number, number + count), 1):  # noqa: B007
        yield _row("token", "id", "trained")
        for token, train in zip(ids, trained, strict=True):
            yield _row(repr(tokenizer.piece(token)), token, _yes(train))
    if not printed:
        raise ValueError(f"--number {number}: no such conversation")


def samples(
    data: DataConfig,
    masking: MaskingConfig,
    tokenizer: Tokenizer,
    number: int,
    count: int,
    *,
    seq_length: int,
    seed: int,
    pairs: bool = True,
) -> Iterator[str]:
    """Yield lines that show the training samples `number` .. `number + count - 1` of a run with the given configuration
    sections."""
    datasets = build_datasets(
        data,
        seq_length=seq_length,
        seed=seed,
        vocab=tokenizer.vocab_size,
        samples=(number + count, 0, 0),
        tokenizer=tokenizer,
        masking=masking,
        pairs=pairs,
    )
    assert datasets.train is not None
    batches = Batches(
        datasets.train,
        micro_batch=1,
        vocab=tokenizer.vocab_size,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_positions=data.reset_positions,
        reset_attention=data.reset_attention,
    )
    for sample in range(number, number + count):
        batch = batches.take(sample, 1)[0]
        arrays = {name: np.atleast_1d(value[0].numpy()) for name, value in vars(batch).items() if value is not None}
        kind = next(kind for kind in _FORMS if kind in arrays)
        yield f"sample {sample}"
        yield from _FORMS[kind](arrays, tokenizer)


def _decoder(arrays: Mapping[str, NDArray[np.number]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield lines that show a decoder sample. The column "trained" marks tokens whose prediction has a loss."""
    columns = ["positions", *(["documents"] if "documents" in arrays else [])]
    yield _row("token", "id", "trained", *(name[:-1] for name in columns))
    trained = [False, *(arrays["loss_weights"] > 0).tolist()]
    tokens = [*arrays["tokens"].tolist(), int(arrays["labels"][-1])]
    for position, (token, train) in enumerate(zip(tokens, trained, strict=True)):
        inputs = [int(arrays[name][position]) for name in columns] if position + 1 < len(tokens) else []
        yield _row(repr(tokenizer.piece(token)), token, _yes(train), *inputs)


def _bert(arrays: Mapping[str, NDArray[np.number]], tokenizer: Tokenizer) -> Iterator[str]:
    pair, masked = int(arrays["pairs"][0]), int(arrays["loss_weights"].sum())
    yield f"{int(arrays['lengths'][0])} tokens, {masked} of them masked; parts in the {('right', 'wrong')[pair]} order"
    yield _row("token", "id", "part", "label")
    for position, token in enumerate(arrays["tokens"][: int(arrays["lengths"][0])].tolist()):
        hidden = arrays["loss_weights"][position] > 0
        label = repr(tokenizer.piece(int(arrays["labels"][position]))) if hidden else ""
        yield _row(repr(tokenizer.piece(token)), token, int(arrays["types"][position]), label)


def _t5(arrays: Mapping[str, NDArray[np.number]], tokenizer: Tokenizer) -> Iterator[str]:
    yield _row("encoder's token", "id")
    for token in arrays["encoder_tokens"][: int(arrays["encoder_lengths"][0])].tolist():
        yield _row(repr(tokenizer.piece(token)), token)
    yield _row("decoder's token", "id", "", "predicts")
    size = int(arrays["lengths"][0])
    for token, label in zip(arrays["tokens"][:size].tolist(), arrays["labels"][:size].tolist(), strict=True):
        yield _row(repr(tokenizer.piece(token)), token, "", repr(tokenizer.piece(label)))


_FORMS = {"pairs": _bert, "encoder_tokens": _t5, "documents": _decoder, "positions": _decoder}
"""Field that identifies a type of batch -> function that prints a sample of this type."""


def _yes(flag: bool) -> str:
    return "yes" if flag else ""


def _row(token: str, number: int | str, *cells: int | str) -> str:
    return f"{token:24} {number:>8}  {'  '.join(f'{other!s:8}' for other in cells)}".rstrip()
