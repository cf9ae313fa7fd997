"""Compare tokenizers and chat templates given by flags or adapters with those that came with the weights.

`RULES` in text/identity.py contains the rules for the comparison.
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
"""Value of --chat-template that selects the template that came with the weights, or `plain` if the weights have no
template."""


class ChosenTemplate(NamedTuple):
    """The chosen value of --chat-template, and messages for the user."""

    value: str
    notes: tuple[str, ...] = ()


def check_tokenizer_flags(
    verb: str, source: StoredWeights | OpenedModel, place: object, given: Tokenizer, *, allowed: bool | None = None
) -> list[str]:
    """Compare the tokenizer that flags select with the weights' tokenizer, and return messages. place: path of the
    weights.

    allowed: whether --allow-tokenizer-mismatch was given; None if the subcommand does not have this flag. Errors:
    ValueError if the two tokenizers differ.
    """
    section = tokenizer_section(source)
    if section is None:
        return []
    try:
        own_tokenizer = build(**section)
    except ValueError as error:
        return [f"--tokenizer {given.kind}: counts, for that of {place} cannot be opened: {error}"]
    if _assumed(source, own_tokenizer, given):
        return [f"--tokenizer {given.kind}: nothing at {place} says whether its texts are lower-cased; this is taken"]
    difference = other_tokenizer(place, own_tokenizer, given)
    if difference is None:
        return []
    if _attached(source, own_tokenizer, given):
        return [
            f"--tokenizer {given.kind}: is of a file that came with {place}, whose {own_tokenizer.kind} is left out"
        ]
    instead = "" if allowed is None else f", or {ALLOW} where an id means the same in both"
    line = judge(verb, "tokenizer", difference, advice=f"leave the flags out{instead}", allowed=allowed is True)
    return [] if line is None else [line]


def check_adapter_tokenizer(verb: str, opened: OpenedModel, tokenizer: Tokenizer, adapter: OpenedAdapter) -> list[str]:
    """Return messages about the tokenizer that came with an adapter. The model's tokenizer is used, so both tokenizers
    must produce the same ids.

    Errors: ValueError if the ids differ.
    """
    flag, section = adapter.flag, tokenizer_section(adapter.source)
    if section is None:
        return []
    try:
        adapter_tokenizer = build(**section)
    except ValueError as error:
        return [f"{flag}: its tokenizer cannot be opened, that of {opened.path} counts: {error}"]
    if cuts_alike(tokenizer, adapter_tokenizer):
        return []
    own_identity, adapter_identity = tokenizer.identity(), adapter_tokenizer.identity()
    difference = f"{flag}: came with another tokenizer, {adapter_identity}, than {opened.path}, {own_identity}"
    advice = "give the weights that it was trained on, with their tokenizer"
    line = judge(verb, "tokenizer", difference, advice=advice)
    return [] if line is None else [line]


class AdapterTemplate(NamedTuple):
    """The chat template to use with an adapter. template: name or text of a template; None to use the model's
    template."""

    template: str | None
    notes: tuple[str, ...] = ()


def adapter_template(adapter: OpenedAdapter, own: str | None) -> AdapterTemplate:
    """Return the template that came with an adapter, or no template if it equals `own`, the text of the model's
    template.

    Errors: CheckpointError for a damaged file.
    """
    template = chat_template(adapter.source)
    if template is None or TEMPLATES.get(template, template) == own:
        return AdapterTemplate(None)
    difference = f"{adapter.flag}: converses by the chat template that came with it"
    line = judge("serve", "template", difference)
    return AdapterTemplate(template, () if line is None else (line,))


def doubts(place: Path) -> list[str]:
    """Return the problems with the tokenizer, end tokens or chat template that would make commands reject the weights
    at `place`."""
    model = open_model(place)
    if tokenizer_section(model) is None:
        return []
    problems: list[str] = []
    try:
        tokenizer = model.tokenizer()
        check_tokenizer(model, tokenizer)
    except ValueError as error:
        return [f"its tokenizer cannot be used: {error}"]
    try:
        model.stop_ids()
    except ValueError as error:
        problems.append(f"its ends cannot be used: {error}")
    try:
        template = model.chat_template()
        if template is not None:
            ChatFormat(template, tokenizer, f"{place}: its chat template")
    except ValueError as error:
        problems.append(f"no chat: {error}")
    return problems


def _assumed(source: StoredWeights | OpenedModel, own: Tokenizer, given: Tokenizer) -> bool:
    """Whether both tokenizers are WordPiece and the weights came with only a vocab.txt, which does not specify whether
    text is lower-cased."""
    kinds = {own.kind, given.kind}
    if "progress" in source.meta or len(kinds) == 1 or not kinds <= {"BertWordPieceLowerCase", "BertWordPieceCase"}:
        return False
    first, second = (tokenizer.vocabulary_files()["vocab.txt"].read_bytes() for tokenizer in (own, given))
    return first == second and own.files().keys() == {"vocab.txt"}


def _attached(source: StoredWeights | OpenedModel, own: Tokenizer, given: Tokenizer) -> bool:
    """Whether `given` was built from different files in the same folder, for example from a tokenizer.model next to a
    tokenizer.json."""
    files = given.vocabulary_files()
    if not files or not files.keys().isdisjoint(own.vocabulary_files()):
        return False
    carried = source.attachments
    return all(name in carried and carried[name].read_bytes() == path.read_bytes() for name, path in files.items())


def chosen_template(verb: str, source: StoredWeights | OpenedModel, place: object, asked: str) -> ChosenTemplate:
    """Return the name or the file of the chat template to use. asked: value of --chat-template.

    Errors: ValueError if the template of the weights is requested but does not exist.
    """
    own_place = chat_template_place(source)
    if asked in (MODELS_OWN, EITHER) and own_place is not None:
        return ChosenTemplate(own_place)
    if asked == MODELS_OWN:
        raise ValueError(
            f"--chat-template {asked}: nothing at {place} says what its conversations look like; "
            f"valid there: {', '.join(TEMPLATES)}, or a Jinja file"
        )
    if asked == EITHER:
        difference = f"--chat-template: nothing at {place} says what its conversations look like; plain is taken"
        line = judge(verb, "no template", difference)
        return ChosenTemplate("plain", () if line is None else (line,))
    if own_place is None or _text(asked) == _text(own_place):
        return ChosenTemplate(asked)
    remedy = "leave it out to go by that" if verb == "serve" else f"--chat-template {MODELS_OWN} goes by it"
    difference = f"--chat-template {asked}: {place} has another of its own; {remedy}"
    line = judge(verb, "template", difference)
    return ChosenTemplate(asked, () if line is None else (line,))


def _text(name: str) -> str:
    return name if name in TEMPLATES or not Path(name).is_file() else template_text(name)
