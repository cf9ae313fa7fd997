"""Run `mega chat`, a conversation at the terminal with a model in this process or on a server.

Lines that begin with / change the conversation or the sampling; all other lines are the user's turns. Every request
contains the whole conversation; the engine reuses the cached keys of previous turns. This module reads standard input.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mega.core.files import check_file, whole_file
from mega.core.inference.generation.generate import generate
from mega.core.inference.generation.prompts import ctrl_c_flag
from mega.core.inference.request import Engine, RequestError, Sampling, flag_line
from mega.core.inference.text_stream import TextStream, Thought
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.messages import Message
from mega.core.text.tokenizer import Tokenizer

HELP = """\
/system TEXT         set the system turn, before all other turns; without TEXT remove it
/undo                take the last turn and its answer back
/reset               begin again, with the same system turn
/set NAME VALUE      temperature, top_p, top_k, min_p, seed, tokens and others; without them, show all
/save FILE           write the conversation as a line that --chat-data reads
/help                these lines
/exit                end, like Ctrl-D; Ctrl-C ends an answer"""


ANSWER_TOKENS = 512
"""Default maximum number of tokens in an answer from a model in this process."""


class Answering(Protocol):
    """The interface of objects that answer conversations."""

    def answer(
        self, messages: Sequence[Message], how: Sampling, tokens: int | None, given: Collection[str] = ()
    ) -> Generator[str, None, None]:
        """Yield the text of the next turn as it arrives. given: names of the fields of `how` that the user has set
        explicitly. tokens: maximum number of tokens in the turn; None for the default of the server or of this process.
        Errors: ValueError with the reason."""


@dataclass
class LocalAnswers:
    """Answers conversations with an engine in this process. chat: the chat format; None for a base model, which
    continues the concatenated texts of all turns."""

    engine: Engine
    tokenizer: Tokenizer
    chat: ChatFormat | None
    ends: frozenset[int]
    adapter: str | None = None

    def answer(
        self, messages: Sequence[Message], how: Sampling, tokens: int | None, given: Collection[str] = ()
    ) -> Generator[str, None, None]:
        ids, longest = self._prompt(messages), self.engine.limits.longest
        if len(ids) >= longest:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the model {longest} positions: /undo or /reset"
            )
        stream = TextStream(self.tokenizer, ids)
        most = min(tokens or ANSWER_TOKENS, longest - len(ids))
        try:
            token_ids = generate(self.engine, ids, most, how, stop_ids=self.ends, adapter=self.adapter)
            try:
                for token in token_ids:
                    if token not in self.ends:
                        yield stream.push(token)
            finally:
                token_ids.close()
        except RequestError as error:
            raise ValueError(flag_line(error)) from None
        yield stream.finish()

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        if self.chat is not None:
            return list(self.chat.prompt(messages))
        ids = self.tokenizer.encode("".join(str(each["content"]) for each in messages))
        start = self.tokenizer.start
        return ids or ([start] if start is not None else [])


@dataclass
class ChatSession:
    """The state of a conversation."""

    answering: Answering
    how: Sampling = field(default_factory=Sampling)
    """Sampling options for answers."""
    tokens: int | None = None
    """Maximum number of tokens in an answer; None for `ANSWER_TOKENS`, or for the server's default."""
    system: str = ""
    """Text of the system turn; "" for no system turn."""
    turns: list[Message] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    """Names of the fields of `how` that the user has set; for the other fields, a server uses its defaults."""

    @property
    def messages(self) -> list[Message]:
        """All messages, beginning with the system turn."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def play(self, read: Callable[[], str], write: Callable[[str], None]) -> int:
        """Run the conversation until the end of the input or /exit. Return the number of input lines that caused an
        error.

        read: function that returns the next line, or raises EOFError at the end. write: function that prints text.
        """
        errors = 0
        while True:
            try:
                line = read().strip()
            except EOFError:
                return errors
            if line == "/exit":
                return errors
            try:
                if line.startswith("/"):
                    write(self.command(line) + "\n")
                elif line:
                    self._turn(line, write)
            except (ValueError, OSError) as error:
                write(f"mega: {error}\n")
                errors += 1

    def _turn(self, line: str, write: Callable[[str], None]) -> None:
        """Request an answer and store the turn. If the answer is interrupted, the text received so far is stored."""
        messages = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        thinking = False
        with ctrl_c_flag(sys.stdin.isatty()) as stopped:
            answer = self.answering.answer(messages, self.how, self.tokens, self.given)
            for piece in answer:
                if isinstance(piece, Thought) != thinking:
                    thinking = not thinking
                    write("[thinks] " if thinking else "\n[answers] ")
                if not thinking:
                    pieces.append(piece)
                write(piece)
                if stopped():
                    answer.close()
                    break
        write("\n")
        self.turns += [{"role": "user", "content": line}, {"role": "assistant", "content": "".join(pieces)}]

    def command(self, line: str) -> str:
        """Run a command; return a message that describes its effect. Errors: ValueError naming the command, OSError."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/help":
                return HELP
            case "/system":
                self.system = rest
                return f"the system says: {rest}" if rest else "the system says nothing"
            case "/reset":
                self.turns.clear()
                return "the conversation begins again"
            case "/undo":
                if not self.turns:
                    raise ValueError("/undo: there is no turn to take back")
                del self.turns[-2:]
                return f"{len(self.turns) // 2} turns are left"
            case "/set":
                return self._set(*rest.split())
            case "/save":
                return self._save(rest)
        raise ValueError(f"{word}: is not a command; /help lists all")

    def _set(self, *words: str) -> str:
        values = {name: getattr(self.how, name) for name in Sampling.__dataclass_fields__ if name != "logit_bias"}
        values["tokens"] = self.tokens or "default"
        if not words:
            return ", ".join(f"{name} {value}" for name, value in values.items())
        if len(words) != 2 or words[0] not in values:
            raise ValueError(f"/set {' '.join(words)}: must be a name and a value; valid names: {', '.join(values)}")
        name, text = words
        try:
            value: float = int(text) if text.lstrip("-").isdecimal() else float(text)
        except ValueError:
            value = math.nan
        if len(text) > 20 or not math.isfinite(value):
            raise ValueError(f"/set {name} {text[:20]}: must be a number")
        if name == "tokens":
            if value != int(value) or value < 1:
                raise ValueError(f"/set tokens {text}: must be a whole number of at least 1")
            self.tokens = int(value)
        else:
            try:
                self.how = replace(self.how, **{name: value})  # type: ignore[arg-type]
            except RequestError as error:
                raise ValueError(f"/set {error}") from None
            self.given.add(name)
        return f"{name} {text}"

    def _save(self, name: str) -> str:
        if not name or not self.turns:
            raise ValueError("/save: must name a file, after a turn")
        check_file("/save", name)
        with whole_file(Path(name)) as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False).encode() + b"\n")
        return f"{name}: {len(self.messages)} messages"


def lines(prompt: str = "> ") -> Callable[[], str]:
    """Return a function that reads lines from standard input. At a terminal, the function shows a prompt and supports
    line editing and history."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - imported for its effect on `input`

        return lambda: input(prompt)
    source: Iterator[str] = iter(sys.stdin)

    def read() -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    return read
