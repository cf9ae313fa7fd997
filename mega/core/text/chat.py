"""Conversations as tokens: templates, and which tokens are trained on: the assistant's words and its end of turn.

Control tokens come from the template alone. The text of a message is encoded as ordinary text, so that a message that
spells `<|eot_id|>` consists of these characters and ends no turn.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Confined, parse_json, read_limited

ROLES = ("system", "user", "assistant")
RENDERING = 2
"""How conversations become tokens: part of the key of whatever is kept of them. 1 dropped blanks that Jinja keeps."""


class Message(NamedTuple):
    """The content of one role's turn; role is one of ROLES."""

    role: str
    content: str


class TemplatePart(NamedTuple):
    """A run of text, or the name of a control token; and whether it is trained on."""

    text: str
    control: bool
    trained: bool


Template = Callable[[Sequence[Message]], list[TemplatePart]]


def _text(text: str, trained: bool = False) -> TemplatePart:
    return TemplatePart(text, False, trained)


def _control(name: str, trained: bool = False) -> TemplatePart:
    return TemplatePart(name, True, trained)


def llama2(messages: Sequence[Message]) -> list[TemplatePart]:
    """<s>[INST] <<SYS>> system <</SYS>> user [/INST] assistant </s>, once a turn. Errors: ValueError for a system turn
    that is not followed by the user's, which it is a part of here."""
    asked = [message.role for message in messages if message.role != "assistant"]
    if any(role == "system" and after != "user" for role, after in zip(asked, [*asked[1:], None], strict=True)):
        raise ValueError("llama2 has the system's turn within the user's after it, and one here has none after it")
    found: list[TemplatePart] = []
    system = ""
    for message in messages:
        if message.role == "system":
            system = f"<<SYS>>\n{message.content}\n<</SYS>>\n\n"
        elif message.role == "user":
            found += [_control("<s>"), _text(f"[INST] {system}{message.content.strip()} [/INST]")]
            system = ""
        else:
            found += [_text(f"{message.content.strip()} ", True), _control("</s>", True)]
    return found


def llama3(messages: Sequence[Message]) -> list[TemplatePart]:
    """<|begin_of_text|>, then <|start_header_id|>role<|end_header_id|>, two newlines, text <|eot_id|> each turn."""
    found = [_control("<|begin_of_text|>")]
    for role, content in messages:
        trained = role == "assistant"
        found += [_control("<|start_header_id|>"), _text(role), _control("<|end_header_id|>"), _text("\n\n")]
        found += [_text(content.strip(), trained), _control("<|eot_id|>", trained)]
    return found


def chatml(messages: Sequence[Message]) -> list[TemplatePart]:
    """<|im_start|>role, newline, text <|im_end|>, newline, each turn."""
    found: list[TemplatePart] = []
    for role, content in messages:
        trained = role == "assistant"
        found += [_control("<|im_start|>"), _text(f"{role}\n"), _text(content, trained)]
        found += [_control("<|im_end|>", trained), _text("\n")]
    return found


def plain(messages: Sequence[Message]) -> list[TemplatePart]:
    """ "User: text", a blank line between turns, and the end of document after the assistant's: for any tokenizer."""
    found: list[TemplatePart] = []
    for role, content in messages:
        found.append(_text(f"{role.capitalize()}:"))
        if role == "assistant":
            found += [_text(f" {content.strip()}", True), _control(EOD, True)]
        else:
            found.append(_text(f" {content.strip()}\n\n"))
    return found


EOD = "the end of a document"
"""Stands for the tokenizer's own eod, under any name."""

TEMPLATES: Mapping[str, Template] = {"llama2": llama2, "llama3": llama3, "chatml": chatml, "plain": plain}

MODELS_OWN = "model"
"""Stands for the template that came with the weights."""


def template(name: str, tokenizer: Tokenizer) -> Template:
    """A template by name, or from a Jinja file or a tokenizer_config.json; ValueError where it is neither."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if Path(name).is_file():
        return jinja(name, tokenizer)
    if name == MODELS_OWN:
        raise ValueError(f"--chat-template {name}: belongs to mega finetune, where the weights at --load bring one")
    raise ValueError(f"--chat-template {name}: must be {', '.join(TEMPLATES)}, or a Jinja file")


_EDGE = "\x1f" * 4
"""Blanks, to Python, at either end of a mark: a template that trims its messages takes them all away."""
_MARK = f"{_EDGE}\ue000{{}}\ue001{_EDGE}"
_MARKS = re.compile(f"((?:{_EDGE})?\ue000[0-9]{{1,9}}\ue001(?:{_EDGE})?)")
_SIGNS = re.compile("[\x1f\ue000\ue001]")
_CONTROL = re.compile(r"(<\|[^|<>]+\|>|</?s>|\[/?[A-Z]+\])")
_NAMES = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>"),
}
"""What a template asks for -> the names that tokenizers have for it."""
SOURCE_BYTES = 1 << 20
"""Most bytes of a template, and of what it makes of a conversation without the messages' own text."""
CONFIG_BYTES = 64 << 20
"""Most bytes of a tokenizer_config.json, which may hold thousands of added tokens too."""
_SECONDS, _MEMORY = 5, 1 << 29


def template_text(file: str) -> str:
    """The text of a Jinja file, or of the template in a tokenizer_config.json. Errors: ValueError."""
    what = f"--chat-template {file}"
    if Path(file).name == "tokenizer_config.json":
        found = parse_json(read_limited(file, CONFIG_BYTES, what), what)
        if isinstance(found, dict) and (text := template_of(found)) is not None:
            return text
        raise ValueError(f'{what}: has no "chat_template"')
    try:
        return read_limited(file, SOURCE_BYTES, what).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: not UTF-8 ({error})") from None


def template_of(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer_config.json; of several, by name, the default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


def jinja(file: str, tokenizer: Tokenizer) -> Template:
    """The Hugging Face chat template in `file`, as of `jinja_text`. Errors: ValueError naming the file."""
    return jinja_text(template_text(file), tokenizer, f"--chat-template {file}")


def jinja_text(
    source: str, tokenizer: Tokenizer, what: str, *, reply: bool = False, seconds: int = _SECONDS
) -> Template:
    """A Hugging Face chat template, rendered in a sandbox in a process of its own, within limits.

    what: flag and file, for messages. reply: what begins the assistant's turn follows the last message. seconds: of
    processor time to render.

    Messages are rendered as marks and put in afterwards, so that no text of a message can become markup or a control
    token; blanks at its ends stay where the template leaves them. The text after an assistant's message up to the first
    control token is trained with it, as its end of turn. What is rendered depends on the roles alone, and is rendered
    once for each sequence of them.

    Errors: ValueError beginning with `what`, for the template and of what is returned.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError("--chat-template: a Jinja file needs jinja2; pip install 'mega[data]'")
    known = {key: next((n for n in names if tokenizer.control(n) is not None), "") for key, names in _NAMES.items()}
    child = Confined(
        "mega.core.text.jinja_process", what, seconds=seconds, memory=_MEMORY, answer_bytes=2 * SOURCE_BYTES
    )
    child.ask({"source": source})  # a mistake in it is reported now
    child.close()

    @lru_cache(maxsize=64)
    def rendered(roles: tuple[str, ...]) -> str:
        messages = [{"role": role, "content": _MARK.format(i)} for i, role in enumerate(roles)]
        text: str = child.ask({"source": source, "messages": messages, "reply": reply, **known})
        return text

    def render(messages: Sequence[Message]) -> list[TemplatePart]:
        found: list[TemplatePart] = []
        ending = False
        for i, piece in enumerate(_MARKS.split(rendered(tuple(message.role for message in messages)))):
            if i % 2 and (number := int(_SIGNS.sub("", piece))) < len(messages):
                role, content = messages[number]
                content = content if piece.startswith(_EDGE) else content.lstrip()
                content = content if piece.endswith(_EDGE) else content.rstrip()
                ending = role == "assistant"
                found.append(_text(content, ending))
                continue
            if i % 2 or _SIGNS.search(piece):
                raise ValueError(f"{what}: takes a message's text apart, so that it cannot be put in as it is")
            for word in filter(None, _CONTROL.split(piece)):
                control = tokenizer.control(word) is not None
                found.append(TemplatePart(word, control, ending))
                ending = ending and not control
        return found

    return render


class Labelled(NamedTuple):
    """ids, and for each whether it is trained on."""

    ids: list[int]
    trained: list[bool]


def check_stop(parts: Sequence[TemplatePart]) -> None:
    """Errors: ValueError where no control token is trained after the assistant's words: who learns that never stops."""
    trained = [part for part in parts if part.trained and part.text.strip()]
    if trained and not trained[-1].control:
        raise ValueError(
            f"--chat-template: ends the assistant's turn with {trained[-1].text.strip()[-20:]!r}, which is no control "
            "token of this tokenizer, so that no stop is trained; give one whose end of turn the tokenizer has"
        )


def shown(found: Labelled, tokenizer: Tokenizer, most: int = 400) -> str:
    """A conversation on one line, what is trained between brackets; at most so many characters. What would act on a
    terminal, as a line break or an escape sequence in somebody's text, is written as Python writes it."""
    runs: list[tuple[bool, list[int]]] = []
    for token, train in zip(found.ids, found.trained, strict=True):
        if not runs or runs[-1][0] != train:
            runs.append((train, []))
        runs[-1][1].append(token)
    text = "".join(f"⟦{tokenizer.decode(ids)}⟧" if train else tokenizer.decode(ids) for train, ids in runs)
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def encode(parts: Sequence[TemplatePart], tokenizer: Tokenizer) -> Labelled:
    """Parts as tokens; ValueError where the tokenizer lacks a control token of the template."""
    lead = len(tokenizer.encode(""))  # what a family puts in front of every text
    ids: list[int] = []
    trained: list[bool] = []
    for text, control, train in parts:
        if control:
            token = tokenizer.eod if text == EOD else tokenizer.control(text)
            if token is None:
                raise ValueError(f"--chat-template: {tokenizer.kind} has no {text}; another template may fit it")
            found = [token]
        else:
            found = tokenizer.encode(text)[lead:] if text else []
        ids += found
        trained += [train] * len(found)
    return Labelled(ids, trained)


Nothings = Mapping[str, tuple[Any, ...]]
OF_CONVERSATION: Nothings = {"system": (None, ""), "tools": (None, [], "", "[]"), "functions": (None, [])}
OF_MESSAGE: Nothings = {"weight": (None, 1), "tool_calls": (None, []), "function_call": (None,)}
"""Keys of OpenAI's and Hugging Face's files that no template here is given, and their values that ask for nothing."""


def check_unread(found: Mapping[str, Any], keys: Nothings = OF_CONVERSATION) -> None:
    """Errors: ValueError where an object asks for something by one of `keys`."""
    for key, nothing in keys.items():
        if found.get(key) not in nothing:
            raise ValueError(f'"{key}" has no effect here, so that something else would be trained; leave it out')


def conversation(found: Any) -> list[Message]:
    """The messages of one JSON object; ValueError saying what is wrong with it.

    {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or {"prompt", "completion"}.
    """
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    check_unread(found)
    if "prompt" in found and "completion" in found:
        turns = [("user", found["prompt"]), ("assistant", found["completion"])]
    elif isinstance(found.get("messages"), list):
        turns = [_turn(turn, "role", "content") for turn in found["messages"]]
    elif isinstance(found.get("conversations"), list):
        turns = [_turn(turn, "from", "value") for turn in found["conversations"]]
    else:
        raise ValueError('neither "messages", "conversations" nor "prompt" and "completion"')
    others = {"human": "user", "gpt": "assistant"}
    messages = [Message(others.get(str(role), str(role)), content) for role, content in turns]
    for role, content in messages:
        if role not in ROLES:
            raise ValueError(f'role "{role}": must be one of {", ".join(ROLES)}')
        if not isinstance(content, str):
            raise ValueError(f"the {role}'s content is not a string")
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("no message is the assistant's, so there is nothing to train on")
    return messages


def _turn(turn: Any, role: str, content: str) -> tuple[Any, Any]:
    if not isinstance(turn, dict) or role not in turn or content not in turn:
        raise ValueError(f'a message without "{role}" and "{content}"')
    check_unread(turn, OF_MESSAGE)
    return turn[role], turn[content]
