"""Chat templates by mega against transformers' `apply_chat_template`, every one on every tokenizer and conversation.

FAMILY: TEMPLATE      all conversations by one template on one tokenizer: ids of the prompt, ids and trained mask of the
                      whole, in the template's untagged form and with {% generation %}; `equal`, `refused`, `differs`

Tokenizers: Llama 2's model with Hugging Face's older files next to it (three ways), Llama 3's and GPT-2's as mega
exports them, and small ones of other families, trained on the conversations. An item that differs fails.

transformers 5.23 merges the pieces of a tokenizer.model in the order of their ids, not of their scores, so that it cuts
two blanks in a row otherwise than SentencePiece; there it is given the same merges in the order of their scores.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.text.build import build
from tests.battery.data_ledger import Item, run
from tests.support.chat_judge import formats, judge, of_transformers, opened
from tests.support.chat_templates import CONVERSATIONS, SMALL, TEMPLATES, sentencepiece
from tests.support.shared import shared


def exported(**options: Any) -> Callable[[Path], None]:
    """A tokenizer of mega's as an export of it has it."""

    def make(folder: Path) -> None:
        for name, content in build(**options).huggingface_files().items():
            (folder / name).write_text(json.dumps(content))

    return make


def families() -> dict[str, Callable[[Path], None]]:
    llama2 = shared("llama2/tokenizer.model")
    gpt2 = {"vocab_file": shared("gpt2/gpt2-vocab.json"), "merge_file": shared("gpt2/gpt2-merges.txt")}
    return {
        **SMALL,
        "llama2": sentencepiece(llama2),
        "llama2-legacy": sentencepiece(llama2, legacy=True),
        "llama2-alone": sentencepiece(llama2, added=False),
        "llama2-exported": exported(tokenizer="Llama2Tokenizer", tokenizer_model=llama2),
        "llama3-exported": exported(tokenizer="Llama3Tokenizer", tokenizer_model=shared("llama3/tokenizer.model")),
        "gpt2-exported": exported(tokenizer="GPT2BPETokenizer", **gpt2),
    }


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    families()[family](folder)
    return opened(folder)


def item(family: str, name: str) -> dict[str, Any]:
    ours, theirs = pair(family)
    made, found, wrong, reasons = formats(name, ours), Counter[str](), list[str](), Counter[str]()
    for talk in CONVERSATIONS:
        for what, verdict in judge(name, made, theirs, talk).items():
            kind, _, reason = verdict.partition(": ")
            found[kind] += 1
            if kind == "differs":
                wrong.append(f"{talk}, {what}: {reason[:400]}")
            if kind == "refused":
                reasons[f"{_kind(reason)}; {of_transformers(name, theirs, talk)}"] += 1
    assert not wrong, "; ".join(wrong[:3])
    return {**found, "reasons": dict(reasons)}


REASONS = (
    'does not read "tools"',
    "does not read what the assistant thought",
    "does not end the assistant's earlier turns",
    "no control token",
    "begins with a blank that this tokenizer counts to no token",
    "joins the assistant's turn",
    "renders the turns before an assistant's turn otherwise once others follow",
    "is undefined",
    "Only user and assistant roles are supported!",
    "System role not supported",
)
"""What a refusal says."""


def _kind(reason: str) -> str:
    return next((each for each in REASONS if each in reason), reason[:120])


def items() -> list[Item]:
    return [(f"{family}: {name}", functools.partial(item, family, name)) for family in families() for name in TEMPLATES]


if __name__ == "__main__":
    run("chat_templates", items())
