"""Chat templates by mega against transformers' `apply_chat_template`: ids of prompts and conversations, and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mega.core.text.build import build
from mega.core.text.chat.format import ChatFormat, _here
from mega.core.text.chat.messages import conversation
from mega.core.text.tokenizer import Tokenizer
from tests.support.chat_templates import CONVERSATIONS, tagged, untagged


def opened(folder: Path) -> tuple[Tokenizer, Any]:
    """A folder's tokenizer by mega, and by transformers."""
    from transformers import AutoTokenizer

    kind = "HuggingFaceTokenizer" if (folder / "tokenizer.json").exists() else "Llama2Tokenizer"
    path = folder if kind == "HuggingFaceTokenizer" else folder / "tokenizer.model"
    (folder / "config.json").write_text('{"model_type": "llama"}')
    ours = build(tokenizer=kind, tokenizer_model=path)
    if kind == "Llama2Tokenizer":
        _merges_by_score(folder)
    return ours, AutoTokenizer.from_pretrained(folder)


def _merges_by_score(folder: Path) -> None:
    """A tokenizer.json for transformers alone. It merges the pieces of a tokenizer.model in the order of their ids, not
    of their scores (5.23), which cuts two blanks in a row otherwise than SentencePiece does."""
    import sentencepiece

    from mega.core.text import sentencepiece_bpe

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = sentencepiece_bpe._rewritable(model.serialized_model_proto())
    assert pieces is not None
    whole = json.loads(sentencepiece_bpe._tokenizer_json(pieces))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = enumerate(("<unk>", "<s>", "</s>"))
    whole["added_tokens"] = [{"id": token, "content": name, "special": True, **plain} for token, name in special]
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def formats(name: str, tokenizer: Tokenizer) -> dict[str, ChatFormat | str]:
    """The two forms of a template; the message where it is refused."""
    found: dict[str, ChatFormat | str] = {}
    with patch.object(ChatFormat, "_confined", lambda self, seconds: _here):  # a process each would take the time
        for form, source in (("untagged", untagged(name)), ("tagged", tagged(name))):
            try:
                found[form] = ChatFormat(source, tokenizer, "--chat-template t.jinja")
            except Exception as error:
                found[form] = f"{type(error).__name__}: {error}"
    return found


def judge(name: str, made: Mapping[str, ChatFormat | str], theirs: Any, talk: str) -> dict[str, str]:
    """What came of each question: "equal", "refused: ..." or "differs: ..."."""
    found = CONVERSATIONS[talk]
    whole = conversation(json.loads(json.dumps(found)))
    how = {"tools": whole.tools, "return_dict": True}
    verdicts: dict[str, str] = {}
    stopless = False
    for form, chat in reversed(made.items()):
        source = untagged(name) if form == "untagged" else tagged(name)
        if isinstance(chat, str):
            verdicts[form] = f"refused: {chat}"
            continue
        verdicts[form] = _whole(chat, theirs, whole, how | {"chat_template": source}, tagged(name), form, stopless)
        stopless = "no stop is trained" in verdicts[form]
        if form == "untagged" and not whole.tools:
            verdicts["prompt"] = _prompt(chat, theirs, whole.messages[:-1], source)
    return verdicts


def _whole(
    chat: ChatFormat, theirs: Any, whole: Any, how: Mapping[str, Any], by_tags: str, form: str, refused: bool
) -> str:
    try:
        ours = chat.labelled(whole)
    except Exception as error:  # what its process would make a line of
        return f"refused: {error}"
    try:
        ids = theirs.apply_chat_template(whole.messages, **how)["input_ids"]
        masked = theirs.apply_chat_template(
            whole.messages, **{**how, "chat_template": by_tags}, return_assistant_tokens_mask=True
        )
    except Exception as error:
        return f"differs: transformers refuses it ({type(error).__name__}: {error})"
    if ours.ids != ids:
        return f"differs: ids {ours.ids} for {ids}"
    if form == "untagged" and refused:
        return (
            "equal: ids (what the tags hold has no control token at its end here, so that there is no mask to compare)"
        )
    if ids != masked["input_ids"]:
        return "equal: ids (the tags take blanks away, so that there is no mask to compare)"
    return (
        "equal"
        if list(map(int, ours.trained)) == masked["assistant_masks"]
        else (
            f"differs: mask of {theirs.convert_ids_to_tokens(ids)}: {list(map(int, ours.trained))} "
            f"for {masked['assistant_masks']}"
        )
    )


def of_transformers(name: str, theirs: Any, talk: str) -> str:
    """What transformers makes of a conversation that mega refuses: "refuses it", "marks nothing", "marks tokens"."""
    whole = conversation(json.loads(json.dumps(CONVERSATIONS[talk])))
    how = {"tools": whole.tools, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        found = theirs.apply_chat_template(whole.messages, chat_template=tagged(name), **how)
    except Exception:
        return "transformers refuses it"
    return "transformers marks tokens" if any(found["assistant_masks"]) else "transformers marks nothing"


def _prompt(chat: ChatFormat, theirs: Any, messages: Any, source: str) -> str:
    try:
        ours = list(chat.prompt(messages))
    except Exception as error:  # what its process would make a line of
        return f"refused: {error}"
    try:
        ids = theirs.apply_chat_template(messages, chat_template=source, add_generation_prompt=True, return_dict=True)
    except Exception as error:
        return f"differs: transformers refuses it ({type(error).__name__}: {error})"
    return "equal" if ours == ids["input_ids"] else f"differs: ids {ours} for {ids['input_ids']}"
