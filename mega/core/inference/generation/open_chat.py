"""Open a model for a conversation on one rank, with its engine, tokenizer, chat template and end tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from mega.core.inference.generation.chat import LocalAnswers
from mega.core.inference.loading.adapters import open_adapters
from mega.core.inference.loading.identity import adapter_template, check_adapter_tokenizer, chosen_template
from mega.core.inference.loading.load import OpenedModel, check_tokenizer, compute_dtype, open_model
from mega.core.inference.options import ChatOptions, EngineOptions
from mega.core.inference.start import check_layout, start_engine
from mega.core.parallel.mesh import Mesh
from mega.core.processes.connect import connect
from mega.core.text.chat.format import ChatFormat, chat_format
from mega.core.text.tokenizer import Tokenizer


def open_chat(place: Path, talk: ChatOptions, engine: EngineOptions, adapters: Mapping[str, Path]) -> LocalAnswers:
    """Open a model, and print a message if it is a base model. Errors: ValueError naming flag, file or tensor."""
    model = open_model(place)
    check_layout(model.model, 1, 1, engine)
    opened_adapters = open_adapters(adapters, model)
    tokenizer = model.tokenizer()
    check_tokenizer(model, tokenizer)
    notes = list(model.notes)
    chat = template(model, tokenizer, talk.chat_template)
    for each in opened_adapters:
        notes += check_adapter_tokenizer("generate", model, tokenizer, each)
        adapter_source, template_notes = adapter_template(each, None if chat is None else chat.source)
        notes += template_notes
        chat = (
            chat if adapter_source is None else ChatFormat(adapter_source, tokenizer, f"{each.flag}: its chat template")
        )
    if chat is None:
        notes.append(f"{place}: has no chat template, so it is a base model, which continues the text of all turns")
    world, device, groups = connect(talk.device)
    mesh, dtype = Mesh(world.rank, groups=groups), compute_dtype(model, device, talk.dtype)
    started = start_engine(model, mesh, device, engine, dtype=dtype, adapters=opened_adapters)
    assert started is not None, "one rank has the engine"
    for line in notes:
        print(f"mega: {line}", file=sys.stderr)
    ends = model.ends(tokenizer) | (chat.ends if chat is not None else frozenset())
    return LocalAnswers(started, tokenizer, chat, ends, next(iter(adapters), None))


def template(opened: OpenedModel, tokenizer: Tokenizer, asked: str | None = None) -> ChatFormat | None:
    """Return the template that --chat-template selects, else the model's template; None if the model has no
    template."""
    if asked is not None:
        for line in chosen_template("serve", opened, opened.path, asked).notes:
            print(f"mega: {line}", file=sys.stderr)
        return chat_format(asked, tokenizer)
    source = opened.chat_template()
    return None if source is None else ChatFormat(source, tokenizer, "the chat template")
