"""`mega chat`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mega.command_line.options import local_place, without
from mega.core.config.option import changed
from mega.core.files import check_source
from mega.core.inference.options import ChatOptions, EngineOptions, SamplingOptions

STATED_BY = "the checkpoint says it, or nothing is trained"
"""The reason why training options have no effect, for messages."""

OF_SERVER = ("url", "system", "tokens", "name")
"""Options that also have an effect in a conversation with a server."""


def run(
    talk: ChatOptions,
    sampling: SamplingOptions,
    engine: Annotated[EngineOptions, without("max_requests", "prefill_chunk", "batch_invariant")],
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="a run's or a step's directory, weights in another format, a name on the Hub", show_default=False
        ),
    ] = None,
) -> int:
    """Chat with a model. Answers are streamed, and use the model's chat template; a base model continues the text.

    Each line is a turn. Lines that begin with / are commands; /help lists all commands. With --url, a server answers:
    mega serve, or any server with OpenAI's API. Ctrl-C ends an answer, and Ctrl-D ends the conversation.
    """
    from mega.core.inference.request import sampling_of

    given_sampling = sampling.given()
    sampling_options = sampling_of(**given_sampling)
    if talk.url is not None:
        ignored = [*changed(engine), *(name for name in changed(talk) if name not in OF_SERVER)]
        if checkpoint is not None or ignored:
            excluded = f"the checkpoint {checkpoint}" if checkpoint is not None else f"--{ignored[0].replace('_', '-')}"
            raise ValueError(f"--url {talk.url}: excludes {excluded}; that server's model answers")
    elif checkpoint is None:
        raise ValueError("CHECKPOINT is missing: give a run's directory, or --url of a server")
    else:
        checkpoint = Path(local_place("CHECKPOINT", str(checkpoint)))
        check_source("CHECKPOINT", checkpoint)
    engine.check(talk.device, talk.adapter)
    engine.check_speculation(talk.adapter)
    from mega.core.inference.generation.chat import Answering, ChatSession, lines

    answering: Answering
    if talk.url is not None:
        from mega.core.inference.server.chat_client import ServerAnswers

        answering = ServerAnswers(talk.url, talk.name)
    else:
        from mega.core.inference.generation.open_chat import open_chat
        from mega.core.inference.loading.adapters import adapter_paths

        assert checkpoint is not None
        answering = open_chat(checkpoint, talk, replace(engine, max_requests=1), adapter_paths(talk.adapter))
    session = ChatSession(answering, sampling_options, talk.tokens, talk.system or "", given=set(given_sampling))
    if sys.stdin.isatty():
        print("a turn a line; /help lists commands, Ctrl-D ends", file=sys.stderr)
    errors = session.play(lines(), lambda text: print(text, end="", flush=True))
    return 1 if errors and not sys.stdin.isatty() else 0
