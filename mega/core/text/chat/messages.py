"""Conversations as files and requests have them: messages by role, functions that may be called. No tokens, no
templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mega.core.untrusted import parse_json

ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]
"""`role`, `content`, and what else a template may read: `tool_calls`, `reasoning_content`, `name` and others."""


class Conversation(NamedTuple):
    """messages, and the functions that the assistant may call, as JSON schemas."""

    messages: list[Message]
    tools: list[dict[str, object]] | None = None

    def answered(self, number: int) -> bool:
        return bool(self.messages[number]["role"] == "assistant")


Nothings = Mapping[str, tuple[object, ...]]
OF_CONVERSATION: Nothings = {"system": (None, ""), "functions": (None, [])}
OF_MESSAGE: Nothings = {"weight": (None, 1), "function_call": (None,)}
"""Keys of OpenAI's and Hugging Face's files that no template here is given, and their values that ask for nothing."""


def check_unread(found: Mapping[str, object], keys: Nothings = OF_CONVERSATION) -> None:
    """Errors: ValueError where an object asks for something by one of `keys`."""
    for key, nothing in keys.items():
        if found.get(key) not in nothing:
            raise ValueError(f'"{key}" has no effect here, so that something else would be trained; leave it out')


def conversation(found: object) -> Conversation:
    """The conversation of one JSON object; ValueError saying what is wrong with it.

    {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or {"prompt", "completion"};
    with the first two "tools" too.
    """
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    check_unread(found)
    if "prompt" in found and "completion" in found:
        turns = [_turn({"role": "user", "content": found["prompt"]}, "role", "content")]
        turns.append(_turn({"role": "assistant", "content": found["completion"]}, "role", "content"))
    elif isinstance(found.get("messages"), list):
        turns = [_turn(turn, "role", "content") for turn in found["messages"]]
    elif isinstance(found.get("conversations"), list):
        turns = [_turn(turn, "from", "value") for turn in found["conversations"]]
    else:
        raise ValueError('neither "messages", "conversations" nor "prompt" and "completion"')
    for message in turns:
        _check_message(message)
    if not any(message["role"] == "assistant" for message in turns):
        raise ValueError("no message is the assistant's, so there is nothing to train on")
    return Conversation(turns, _tools(found.get("tools")))


def _check_message(message: Message) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ValueError(f'role "{role}": must be one of {", ".join(ROLES)}')
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"the {role}'s content is not a string")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls)):
        raise ValueError(f"the {role}'s tool_calls are not a list of objects")


def _tools(found: object) -> list[dict[str, object]] | None:
    """A list of JSON schemas, which some files keep as a text."""
    if isinstance(found, str) and found.strip():
        found = parse_json(found, '"tools"')
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError('"tools" are not a list of objects')
    return found


def _turn(turn: object, role: str, content: str) -> Message:
    """A message by its usual keys; what is null, or says nothing, is left out."""
    if not isinstance(turn, dict) or role not in turn or (content not in turn and not turn.get("tool_calls")):
        raise ValueError(f'a message without "{role}" and "{content}"')
    check_unread(turn, OF_MESSAGE)
    others = {"human": "user", "gpt": "assistant"}
    named = others.get(str(turn[role]), str(turn[role]))
    rest = {key: value for key, value in turn.items() if key not in (role, content, *OF_MESSAGE) and value is not None}
    rest = {key: value for key, value in rest.items() if not (key == "tool_calls" and value == [])}
    said = {"content": turn[content]} if turn.get(content) is not None or "tool_calls" not in rest else {}
    return {"role": named, **said, **rest}
