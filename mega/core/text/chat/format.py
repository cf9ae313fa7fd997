"""Encode conversations with a model's chat template, and mark the tokens to train on: the assistant's turns, including
their end tokens.

Only the template can produce control tokens, because messages are encoded as ordinary text. For example, `<|eot_id|>`
in a message is encoded character by character and does not end the turn.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mega.core.text.chat.messages import Conversation, Message
from mega.core.text.chat.templates import NEEDS, SOURCE_BYTES, TEMPLATES, source_of
from mega.core.text.special import Parsed, Span, covered, sections
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Confined

RENDERING = 3
"""Version of the encoding of conversations, which is part of the cache key. Version 1 dropped white space that Jinja
keeps. Version 2 encoded adjacent texts separately, and rendered the template only once for each sequence of roles."""

_SECONDS, _MEMORY = 5, 1 << 29
_MOST_TEXT = 256 << 20
_MARKS = [chr(0xFDD0 + number) for number in range(8)]
"""Characters that do not occur in normal text. Two of them mark names of control tokens in messages."""
_READS_ALL = re.compile(r"\b(items|values|keys|tojson|dictsort|pprint|string|xmlattr)\b")
"""Matches template code that may read all keys of a message."""


class Labelled(NamedTuple):
    """The ids of a conversation, and whether the model is trained on each id."""

    ids: list[int]
    trained: list[bool]


class ChatFormat:
    """Encodes conversations with one chat template and one tokenizer.

    source: the template, as Jinja. variables: values that are passed to the template in addition to a conversation.
    tokens: map from the name of a token in the template's output to its id. ends: ids that end the assistant's turn.
    end_names: names of the tokens in `ends`.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, what: str, *, seconds: int = _SECONDS) -> None:
        """template: a name in TEMPLATES, or Jinja. what: flag and file, for error messages. seconds: limit on processor
        time for rendering. Errors: ValueError beginning with `what` if the template cannot be used; methods raise the
        same error for a conversation that cannot be encoded."""
        is_built_in = template in TEMPLATES
        self.source, self._tokenizer, self._what, self._lock = (
            TEMPLATES.get(template, template),
            tokenizer,
            what,
            threading.Lock(),
        )
        special = tokenizer.special_tokens()
        self.tokens = {**tokenizer.vocabulary_tokens(), **special}
        self.variables = dict(tokenizer.named_tokens())
        if is_built_in:
            self._check_own(template)
        self._ask: Callable[[Mapping[str, object]], dict[str, object]] = (
            _here if is_built_in else self._confined(seconds)
        )
        frame = self._answer(ask="read")["frame"]
        self.end_names: tuple[str, ...] = tuple(frame["ends"])
        self.ends = frozenset(self.tokens[name] for name in self.end_names)
        self._controls = frozenset({*special, *frame["framing"]})

    def _check_own(self, template: str) -> None:
        """Check that the tokenizer has the tokens of a built-in template. For the template `plain`, set the variable
        with the end-of-document token."""
        kind = self._tokenizer.kind
        for name in NEEDS.get(template, ()):
            if name not in self.tokens:
                raise ValueError(f"{self._what}: {kind} has no {name}; another template may fit it")
        if template == "plain":
            ends = [name for name, token in self.tokens.items() if token == self._tokenizer.eod]
            if not ends:
                raise ValueError(f"{self._what}: {kind} has no end of a document; another template may fit it")
            self.variables["eos_token"] = ends[0]

    def _confined(self, seconds: int) -> Callable[[Mapping[str, object]], dict[str, object]]:
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("--chat-template: a Jinja file needs jinja2; pip install '.[data]' in a clone")
        module = "mega.core.text.chat.jinja_process"
        child = Confined(module, self._what, seconds=seconds, memory=_MEMORY, answer_bytes=_MOST_TEXT)
        return child.ask

    def _answer(self, *, marks: Sequence[str] = _MARKS[:2], **question: Any) -> dict[str, Any]:
        """Send a request to the rendering process, and return its response. Errors: ValueError beginning with
        `what`."""
        common = {"source": self.source, "variables": self.variables, "names": list(self.tokens), "marks": marks}
        with self._lock:  # the process handles one request at a time
            return self._ask({**common, **question})

    # --- public methods -----------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, object]] | None = None) -> tuple[int, ...]:
        """Return the ids of a conversation as the prompt for the assistant's next turn. tools: functions that the
        assistant may call. Errors: ValueError if the template rejects the conversation."""
        rendered = self._rendered(Conversation(list(messages), tools), ask="text", reply=True)
        return tuple(self._parsed(rendered).ids)

    def text(self, messages: Sequence[Message]) -> str:
        """Return the prompt for the assistant's next turn as text with names of control tokens. In this text, a control
        token and its name within a message look the same."""
        return str(self._rendered(Conversation(list(messages)), ask="text", reply=True)["text"])

    def labelled(self, talk: Conversation, first: int = 0) -> Labelled:
        """Encode a whole conversation, and mark the tokens to train on. first: number of initial messages that are not
        trained on.

        Errors: ValueError if the template rejects the conversation, or if the end of a turn cannot be determined.
        """
        rendered = self._rendered(talk, ask="turns", first=first, ends=self.end_names)
        turns = [(begin, end) for begin, end in rendered["turns"]]
        if rendered["tagged"]:
            turns = self._later(talk, turns, first)
        parsed, trained = self._parsed(rendered), list[bool]()
        if parsed.spans is None:
            parsed, trained = self._apart(rendered["text"], parsed, turns)
        else:
            trained = self._covered(parsed.spans, turns)
        if rendered["tagged"]:
            self._check_stop(parsed.ids, trained)
        return Labelled(parsed.ids, trained)

    # --- private methods ----------------------------------------------------------------------------------------------

    def _rendered(self, talk: Conversation, **question: Any) -> dict[str, Any]:
        self._check_read(talk)
        marks, messages, tools = self._marked(talk)
        rendered = self._answer(marks=marks, messages=messages, tools=tools, **question)
        most = SOURCE_BYTES + 4 * sum(map(len, _texts(messages)))
        if len(rendered["text"]) > most:
            raise ValueError(
                f"{self._what}: makes {len(rendered['text'])} characters of a conversation, at most {most} are read"
            )
        for message in messages:
            content = message.get("content")
            if message["role"] == "tool" and isinstance(content, str) and not _holds(rendered["text"], content, marks):
                raise ValueError(f"{self._what}: leaves out what a tool says, so that something else would be trained")
        return rendered

    def _check_read(self, talk: Conversation) -> None:
        """Check that the template uses all keys of a conversation. Errors: ValueError if a key is not used."""
        if _READS_ALL.search(self.source) and "tools" in self.source:
            return
        used_keys = {"tools": talk.tools, "tool_calls": [each for each in talk.messages if each.get("tool_calls")]}
        reasoned = [each for each in talk.messages if any(each.get(key) for key in ("reasoning_content", "thinking"))]
        for key, value in used_keys.items():
            if value and re.search(rf"\b{key}\b", self.source) is None:
                raise ValueError(
                    f'{self._what}: does not read "{key}", so that something else would be trained; leave it out'
                )
        if reasoned and re.search("reasoning|thinking", self.source) is None:
            raise ValueError(f"{self._what}: does not read what the assistant thought; leave it out")

    def _marked(self, talk: Conversation) -> tuple[list[str], list[Message], object]:
        """Return two characters that do not occur in the conversation, and copies of the messages and tools in which
        these characters enclose each name of a control token."""
        texts = list(_texts([talk.messages, talk.tools]))
        free = [mark for mark in _MARKS if not any(mark in text for text in texts)][:2]
        if len(free) < 2:
            raise ValueError("the conversation holds characters from U+FDD0 to U+FDD7, which no text should")
        # Nearly all conversations contain no name of a control token.
        if not any(each.name for text in texts for each in sections(text, self._controls)):
            return free, talk.messages, talk.tools
        first, last = free

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                parts = sections(value, self._controls)
                return "".join(
                    f"{first}{each.name}{last}" if each.name else value[each.begin : each.end] for each in parts
                )
            if isinstance(value, list):
                return [marked(each) for each in value]
            if isinstance(value, dict):
                for key in value:
                    if any(each.name for each in sections(key, self._controls)):
                        raise ValueError(f"a name in the conversation spells a control token: {key[:60]!r}")
                return {key: marked(each) for key, each in value.items()}
            return value

        # Roles must not be marked, because templates compare them with constants.
        roles = [each["role"] for each in talk.messages]
        messages = [{**marked(each), "role": role} for each, role in zip(talk.messages, roles, strict=True)]
        return free, messages, marked(talk.tools)

    def _parsed(self, rendered: Mapping[str, Any]) -> Parsed:
        """Encode a rendered conversation. Errors: ValueError if the text of a message becomes a control token."""
        literal = [(begin, end) for begin, end in rendered["literal"]]
        parsed = self._tokenizer.parse(rendered["text"], literal)
        if literal:
            controls = {self.tokens[name] for name in self._controls}
            expected = sum(each.name in self._controls for each in sections(rendered["text"], self.tokens, literal))
            if sum(token in controls for token in parsed.ids) != expected:
                raise ValueError(
                    f"{self._what}: a message spells a control token, which this tokenizer makes of text too"
                )
        return parsed

    def _covered(self, spans: Sequence[Span], turns: Sequence[Span]) -> list[bool]:
        """Return, for each token, whether it is in a turn. Errors: ValueError if no token contains the first or last
        character of a turn."""
        trained = [False] * len(spans)
        for begin, end in turns:
            tokens = covered(spans, begin, end) if begin < end else range(0)
            if tokens is None:
                raise ValueError(
                    f"{self._what}: the assistant's turn begins with a blank that this tokenizer counts to no token, "
                    "or ends with a blank or a character that is not one token of it; have the template strip blanks, "
                    "and end what is trained with a control token"
                )
            trained[tokens.start : tokens.stop] = [True] * len(tokens)
        return trained

    def _apart(self, text: str, whole: Parsed, turns: Sequence[Span]) -> tuple[Parsed, list[bool]]:
        """Return the ids, and whether each token is in a turn, for tokenizers without spans. Each turn, and the text
        between turns, is encoded separately. Errors: ValueError if the ids then differ from those of the whole text."""
        ids, trained, position = list[int](), list[bool](), 0
        for begin, end in [*turns, (len(text), len(text))]:
            for piece, train in ((text[position:begin], False), (text[begin:end], True)):
                piece_ids = self._tokenizer.parse(piece).ids
                ids += piece_ids
                trained += [train] * len(piece_ids)
            position = end
        if ids != whole.ids:
            raise ValueError(f"{self._what}: this tokenizer joins the assistant's turn with what is before or after it")
        return whole, trained

    def _later(self, talk: Conversation, turns: Sequence[Span], first: int) -> list[Span]:
        """Return the turns marked by {% generation %}, except those before message `first`."""
        answers = [number for number in range(len(talk.messages)) if talk.answered(number)]
        if not first:
            return list(turns)
        if len(answers) != len(turns):
            raise ValueError(f"{self._what}: marks {len(turns)} turns by {{% generation %}}, of {len(answers)}")
        return [turn for number, turn in zip(answers, turns, strict=True) if number >= first]

    def _check_stop(self, ids: Sequence[int], trained: Sequence[bool]) -> None:
        """Raise ValueError if the tokens to train on do not end with a control token, because the model would not learn
        to stop."""
        last = [token for token, train in zip(ids, trained, strict=True) if train]
        if last and not self.ends & set(last[-3:]):
            excerpt = self._tokenizer.decode(last[-5:]).strip()
            raise ValueError(
                f"{self._what}: ends what is trained of the assistant's turn with {excerpt!r}, which is no control "
                "token of this tokenizer, so that no stop is trained; give one whose end of turn the tokenizer has"
            )


def chat_format(name: str, tokenizer: Tokenizer, *, seconds: int = _SECONDS) -> ChatFormat:
    """Build the format for a template, given by name, Jinja file or tokenizer_config.json. Errors: ValueError naming
    the template."""
    return ChatFormat(
        name if name in TEMPLATES else source_of(name), tokenizer, f"--chat-template {name}", seconds=seconds
    )


def _here(question: Mapping[str, object]) -> dict[str, object]:
    """Render a built-in template in this process."""
    from mega.core.text.chat.jinja_process import answer

    return answer(question)


def _texts(value: object) -> Iterator[str]:
    """Yield every string in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from value
        yield from (text for each in value.values() for text in _texts(each))


def _holds(text: str, content: str, marks: Sequence[str]) -> bool:
    for mark in marks:
        content = content.replace(mark, "")
    return all(word in text for word in content.split()[:1])


def shown(found: Labelled, tokenizer: Tokenizer, most: int = 400) -> str:
    """Format a conversation as one line of at most `most` characters, with brackets around text that is trained on.
    Characters that affect a terminal, such as line breaks or escape sequences, are written as Python escapes."""
    runs: list[tuple[bool, list[int]]] = []
    for token, train in zip(found.ids, found.trained, strict=True):
        if not runs or runs[-1][0] != train:
            runs.append((train, []))
        runs[-1][1].append(token)
    text = "".join(f"⟦{tokenizer.decode(ids)}⟧" if train else tokenizer.decode(ids) for train, ids in runs)
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."
