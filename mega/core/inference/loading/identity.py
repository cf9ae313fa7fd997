"""A tokenizer and a chat template that flags name or adapters bring, held against those that came with the weights.

The rule is `RULES` of text/identity.py; this file finds what weights have. It knows no flags but in messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mega.core.checkpoint.own.source import StoredWeights
from mega.core.inference.loading.adapters import OpenedAdapter
from mega.core.inference.loading.load import (
    OpenedModel,
    chat_template,
    chat_template_place,
    check_tokenizer,
    open_model,
    tokenizer_section,
)
from mega.core.text.build import build
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.templates import MODELS_OWN, TEMPLATES, template_text
from mega.core.text.identity import ALLOW, cuts_alike, judge, other_tokenizer
from mega.core.text.tokenizer import Tokenizer

EITHER = "auto"
"""--chat-template: that of the weights where they have one, else plain."""


class Judged(NamedTuple):
    """What counts, and lines for the user."""

    value: str
    notes: tuple[str, ...] = ()


def check_tokenizer_flags(
    verb: str, source: StoredWeights | OpenedModel, place: object, given: Tokenizer, *, allowed: bool | None = None
) -> list[str]:
    """Lines for the user on a tokenizer that flags name in addition to that of the weights at `place`.

    allowed: whether --allow-tokenizer-mismatch was given; None where the verb does not have it.
    Errors: ValueError where it is another one.
    """
    section = tokenizer_section(source)
    if section is None:
        return []
    try:
        own = build(**section)
    except ValueError as error:
        return [f"--tokenizer {given.kind}: counts, for that of {place} cannot be opened: {error}"]
    if _assumed(source, own, given):
        return [f"--tokenizer {given.kind}: nothing at {place} says whether its texts are lower-cased; this is taken"]
    difference = other_tokenizer(place, own, given)
    if difference is None:
        return []
    if _attached(source, own, given):
        return [f"--tokenizer {given.kind}: is of a file that came with {place}, whose {own.kind} is left out"]
    instead = "" if allowed is None else f", or {ALLOW} where an id means the same in both"
    line = judge(verb, "tokenizer", difference, advice=f"leave the flags out{instead}", allowed=allowed is True)
    return [] if line is None else [line]


def check_adapter_tokenizer(verb: str, opened: OpenedModel, tokenizer: Tokenizer, adapter: OpenedAdapter) -> list[str]:
    """Lines for the user on the tokenizer that came with an adapter; the model's counts, and must cut texts alike.

    Errors: ValueError where it does not.
    """
    named, section = adapter.flag, tokenizer_section(adapter.source)
    if section is None:
        return []
    try:
        own = build(**section)
    except ValueError as error:
        return [f"{named}: its tokenizer cannot be opened, that of {opened.path} counts: {error}"]
    if cuts_alike(tokenizer, own):
        return []
    mine, other = tokenizer.identity(), own.identity()
    difference = f"{named}: came with another tokenizer, {other}, than {opened.path}, {mine}"
    advice = "give the weights that it was trained on, with their tokenizer"
    line = judge(verb, "tokenizer", difference, advice=advice)
    return [] if line is None else [line]


class AdapterTemplate(NamedTuple):
    """template: a name, or the text; None where that of the model counts."""

    template: str | None
    notes: tuple[str, ...] = ()


def adapter_template(adapter: OpenedAdapter, own: str | None) -> AdapterTemplate:
    """By what an adapter converses: the template that came with it. own: the text of the model's.

    Errors: CheckpointError for a damaged file.
    """
    found = chat_template(adapter.source)
    if found is None or TEMPLATES.get(found, found) == own:
        return AdapterTemplate(None)
    difference = f"{adapter.flag}: converses by the chat template that came with it"
    line = judge("serve", "template", difference)
    return AdapterTemplate(found, () if line is None else (line,))


def doubts(place: Path) -> list[str]:
    """What of weights at `place` a verb that uses them would refuse: their tokenizer, ends or chat template."""
    opened = open_model(place)
    if tokenizer_section(opened) is None:
        return []
    found: list[str] = []
    try:
        tokenizer = opened.tokenizer()
        check_tokenizer(opened, tokenizer)
    except ValueError as error:
        return [f"its tokenizer cannot be used: {error}"]
    try:
        opened.stop_ids()
    except ValueError as error:
        found.append(f"its ends cannot be used: {error}")
    try:
        template = opened.chat_template()
        if template is not None:
            ChatFormat(template, tokenizer, f"{place}: its chat template")
    except ValueError as error:
        found.append(f"no chat: {error}")
    return found


def _assumed(source: StoredWeights | OpenedModel, own: Tokenizer, given: Tokenizer) -> bool:
    """Whether another kind of WordPiece is that of a folder with vocab.txt alone, which says nothing of letters."""
    kinds = {own.kind, given.kind}
    if "progress" in source.meta or len(kinds) == 1 or not kinds <= {"BertWordPieceLowerCase", "BertWordPieceCase"}:
        return False
    first, second = (tokenizer.vocabulary_files()["vocab.txt"].read_bytes() for tokenizer in (own, given))
    return first == second and own.files().keys() == {"vocab.txt"}


def _attached(source: StoredWeights | OpenedModel, own: Tokenizer, given: Tokenizer) -> bool:
    """Whether it is of other files that came with the weights: a tokenizer.model next to a tokenizer.json."""
    files = given.vocabulary_files()
    if not files or not files.keys().isdisjoint(own.vocabulary_files()):
        return False
    carried = source.attachments
    return all(name in carried and carried[name].read_bytes() == path.read_bytes() for name, path in files.items())


def chosen_template(verb: str, source: StoredWeights | OpenedModel, place: object, asked: str) -> Judged:
    """The name or the file of the template by which a run converses. asked: --chat-template.

    Errors: ValueError where the weights' own is asked for, and they have none.
    """
    own = chat_template_place(source)
    if asked in (MODELS_OWN, EITHER) and own is not None:
        return Judged(own)
    if asked == MODELS_OWN:
        raise ValueError(
            f"--chat-template {asked}: nothing at {place} says what its conversations look like; "
            f"valid there: {', '.join(TEMPLATES)}, or a Jinja file"
        )
    if asked == EITHER:
        difference = f"--chat-template: nothing at {place} says what its conversations look like; plain is taken"
        line = judge(verb, "no template", difference)
        return Judged("plain", () if line is None else (line,))
    if own is None or _text(asked) == _text(own):
        return Judged(asked)
    own_one = "leave it out to go by that" if verb == "serve" else f"--chat-template {MODELS_OWN} goes by it"
    difference = f"--chat-template {asked}: {place} has another of its own; {own_one}"
    line = judge(verb, "template", difference)
    return Judged(asked, () if line is None else (line,))


def _text(name: str) -> str:
    return name if name in TEMPLATES or not Path(name).is_file() else template_text(name)
