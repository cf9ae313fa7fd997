"""Conversations as tokens: templates, and which tokens are trained on: the assistant's words and its end of turn.

Control tokens come from the template alone. The text of a message is encoded as ordinary text, so that a message that
spells `<|eot_id|>` consists of these characters and ends no turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mega.core.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")


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
    """<s>[INST] <<SYS>> system <</SYS>> user [/INST] assistant </s>, once a turn."""
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


def template(name: str, tokenizer: Tokenizer) -> Template:
    """A template by name, or from a Jinja file; ValueError where it is neither."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if Path(name).is_file():
        try:
            return jinja(Path(name).read_bytes().decode(), tokenizer)
        except UnicodeDecodeError as error:
            raise ValueError(f"--chat-template {name}: not UTF-8 ({error})") from None
    raise ValueError(f"--chat-template {name}: must be {', '.join(TEMPLATES)}, or a Jinja file")


_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


def jinja(source: str, tokenizer: Tokenizer) -> Template:
    """A Hugging Face chat template, in a sandbox.

    Messages are rendered as marks and put in afterwards, so that no text of a message can become markup or a control
    token; blanks at the ends of a message are dropped. The text after an assistant's message up to the first control
    token is trained with it, as its end of turn.
    """
    try:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("--chat-template: a Jinja file needs jinja2; pip install 'mega[data]'") from None

    def refuse(message: str) -> None:
        raise ValueError(f"--chat-template: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"--chat-template: not a Jinja template ({error})") from None
    names = re.compile(r"(<\|[^|<>]+\|>|</?s>|\[/?[A-Z]+\])")
    bos = next((n for n in ("<s>", "<|begin_of_text|>", "<|endoftext|>") if tokenizer.control(n) is not None), "")
    ends = ("</s>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>")
    eos = next((n for n in ends if tokenizer.control(n) is not None), "")

    def render(messages: Sequence[Message]) -> list[TemplatePart]:
        marked = [{"role": m.role, "content": _MARK.format(i)} for i, m in enumerate(messages)]
        try:
            text = compiled.render(messages=marked, bos_token=bos, eos_token=eos, add_generation_prompt=False)
        except ValueError:
            raise
        except Exception as error:  # a template is a program, which may fail in any way
            raise ValueError(f"--chat-template: {error}") from None
        found: list[TemplatePart] = []
        ending = False
        for i, piece in enumerate(_MARKS.split(text)):
            if i % 2:
                message = messages[int(piece)]
                ending = message.role == "assistant"
                found.append(_text(message.content.strip(), ending))
                continue
            for word in filter(None, names.split(piece)):
                control = tokenizer.control(word) is not None
                found.append(TemplatePart(word, control, ending))
                ending = ending and not control
        return found

    return render


class Labelled(NamedTuple):
    """ids, and for each whether it is trained on."""

    ids: list[int]
    trained: list[bool]


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


def conversation(found: Any) -> list[Message]:
    """The messages of one JSON object; ValueError saying what is wrong with it.

    {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or {"prompt", "completion"}.
    """
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
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
        raise ValueError("the assistant's content is empty, so there is nothing to train on")
    return messages


def _turn(turn: Any, role: str, content: str) -> tuple[Any, Any]:
    if not isinstance(turn, dict) or role not in turn or content not in turn:
        raise ValueError(f'a message without "{role}" and "{content}"')
    return turn[role], turn[content]
