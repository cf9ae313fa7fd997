"""Find control tokens of a chat template that the base of adapters was never trained on.

Adapters change linear layers, not the rows of the embedding and of the head. So adapters can hardly teach a base the
tokens that frame the turns of a conversation. Two signs of untrained tokens are reliable, and cheap to read from the
stored weights:

    zero     the row is zero, or its norm is far below that of usual rows. No gradient has reached it, and weight decay
             may have shrunk it (Llama 3 without instructions)
    equal    the rows of two control tokens are equal, so the model cannot tell the tokens apart (rows that were added
             to a vocabulary with one initial value)

Rows of usual size that differ may also be untrained, for example at random initial values. These rows are not reported,
because trained rows look the same. Tokens that begin or end a document are left out, because pretraining includes them.
This module only reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.config.run import RunConfig
from mega.core.text.chat.format import chat_format
from mega.core.text.chat.messages import Conversation
from mega.core.text.tokenizer import Tokenizer

TABLES = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
"""Tensor with a row for each token -> its name in the message. A tied head has no separate tensor."""

FAINT = 0.01
"""A row is untrained if its norm is below this fraction of the median norm. Rows of trained tokens are within a factor
of about ten of each other."""

BLOCKS, ROWS = 8, 64
"""Number of row blocks, evenly spread over the table, from which the median norm is computed."""


def untrained_tokens(run: RunConfig, tokenizer: Tokenizer | None, base: StoredWeights) -> str | None:
    """Return a warning about control tokens of the chat template that `base` was never trained on; None if there are
    none, or if the run does not train adapters on conversations."""
    if not run.model.lora_rank or tokenizer is None or not (run.data.chat_data or run.finetuning.dpo_data):
        return None
    found = dict[str, list[str]]()
    with contextlib.suppress(CheckpointError, OSError, ValueError):  # only a warning depends on this
        controls = control_tokens(run.data.chat_template, tokenizer)
        for name, word in TABLES.items():
            if names := untrained_rows(base, f"weights/{name}", controls):
                found[word] = names
    if not found:
        return None
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    return (
        f"--chat-template {run.data.chat_template}: {base.path} was not trained on {', '.join(names)}, whose "
        f"rows in the {' and the '.join(found)} are zero or equal, and adapters do not train these rows; start from "
        "weights that know the template, use a template whose tokens these weights know, or leave out --lora-rank"
    )


def control_tokens(template: str, tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return a map from name to id for the control tokens in a conversation of two turns, except those that begin or
    end a document. Errors: ValueError if the template rejects the conversation."""
    form = chat_format(template, tokenizer)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    used = set(form.labelled(Conversation(talk)).ids) - {tokenizer.bos, tokenizer.eod}
    names = {token: name for name, token in form.tokens.items() if token in used}  # a token may have several names
    return {name: token for token, name in names.items()}


def untrained_rows(base: StoredWeights, key: str, controls: Mapping[str, int]) -> list[str]:
    """Return the control tokens whose rows in the tensor `key` are zero or equal. Errors: CheckpointError or OSError if
    the rows cannot be read."""
    if key not in base.tensors or not controls:
        return []
    vocab, width = base.tensors[key][0]
    spread = sorted({(vocab - min(ROWS, vocab)) * number // (BLOCKS - 1) for number in range(BLOCKS)})
    tokens = {name: token for name, token in controls.items() if token < vocab}
    *blocks, rows = _read(base, key, [(begin, min(ROWS, vocab)) for begin in spread], list(tokens.values()), width)
    norms = rows.norm(dim=1)
    faint = norms < FAINT * torch.cat(blocks).norm(dim=1).median()
    equal = (rows[:, None] == rows[None]).all(-1).sum(1) > 1
    return [name for name, is_faint, is_equal in zip(tokens, faint, equal, strict=True) if is_faint or is_equal]


def _read(
    base: StoredWeights, key: str, blocks: Sequence[tuple[int, int]], tokens: Sequence[int], width: int
) -> list[torch.Tensor]:
    """Return blocks of rows (first row, number of rows) of a table, then the rows of `tokens`, all as fp32."""
    whole, dtype = base.tensors[key]
    wanted = [*blocks, *((token, 1) for token in tokens)]
    pieces = [Piece(key, whole, (begin, 0), torch.empty(count, width, dtype=dtype)) for begin, count in wanted]
    base.read(pieces, verify=False)  # the weights were verified when they were loaded
    tensors = [piece.tensor.float() for piece in pieces]
    return [*tensors[: len(blocks)], torch.cat(tensors[len(blocks) :])]
