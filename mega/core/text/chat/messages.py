"""Parse conversations from files and requests. A conversation consists of messages, and of functions that the assistant
may call. This module does not depend on tokens or templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mega.core.untrusted import parse_json

ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]
"""A message with `role`, `content`, and other keys that a template may read, such as `tool_calls`, `reasoning_content`
or `name`.
"""


class Conversation(NamedTuple):
    """The messages of a conversation, and JSON schemas of the functions that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, object]] | None = None

    def answered(self, number: int) -> bool:
        """Whether message `number` is from the assistant."""
        return bool(self.messages[number]["role"] == "assistant")


NeutralValues = Mapping[str, tuple[object, ...]]
OF_CONVERSATION: NeutralValues = {"functions": (None, [])}
OF_MESSAGE: NeutralValues = {"weight": (None, 1), "function_call": (None,)}
"""Key of messages (in OpenAI's and Hugging Face's files) that is not passed to templates -> values of the key that have
no effect."""


def check_unread(found: Mapping[str, object], keys: NeutralValues = OF_CONVERSATION) -> None:
    """Raise ValueError if one of the unsupported `keys` has a value that would have an effect."""
    for key, nothing in keys.items():
        if found.get(key) not in nothing:
            raise ValueError(f'"{key}" has no effect here, so that something else would be trained; leave it out')


def conversation(found: object) -> Conversation:
    """Parse the conversation of one JSON object. Errors: ValueError with the reason.

    Formats: {"messages": [{"role", "content"}, ...]}, ShareGPT's {"conversations": [{"from", "value"}, ...]}, Alpaca's
    {"instruction", "input", "output"}, or {"prompt", "completion"}. The first two formats may have "tools". The value
    of a key "system" is inserted as the first message.

    >>> conversation({"instruction": "Add.", "input": "1, 2", "output": "3"}).messages[0]["content"]
    'Add.\\n\\n1, 2'
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
    elif "instruction" in found and "output" in found:
        turns = _alpaca(found)
    else:
        raise ValueError(
            'neither "messages", "conversations", "instruction" and "output" nor "prompt" and "completion"'
        )
    if (system := found.get("system")) not in (None, ""):
        if turns and turns[0]["role"] == "system":
            raise ValueError('"system" has a text, and the first message is of role system too; leave one out')
        turns.insert(0, _turn({"role": "system", "content": system}, "role", "content"))
    for message in turns:
        _check_message(message)
    if not any(message["role"] == "assistant" for message in turns):
        raise ValueError("no message is the assistant's, so there is nothing to train on")
    return Conversation(turns, _tools(found.get("tools")))


def _alpaca(example: Mapping[str, object]) -> list[Message]:
    """Parse Alpaca's format. The input follows the instruction after a blank line. "history" contains earlier pairs
    (question, answer)."""
    texts = [example["instruction"], *([example["input"]] if example.get("input") else [])]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('"instruction" and "input" must be strings')
    turns = [_turn({"role": "user", "content": "\n\n".join(map(str, texts))}, "role", "content")]
    turns.append(_turn({"role": "assistant", "content": example["output"]}, "role", "content"))
    earlier = example.get("history") or []
    for pair in earlier if isinstance(earlier, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError('"history" must be pairs of a question and an answer')
    history = [text for pair in earlier for text in pair] if isinstance(earlier, list) else []
    roles = ("user", "assistant")
    return [
        _turn({"role": roles[index % 2], "content": text}, "role", "content") for index, text in enumerate(history)
    ] + turns


def _check_message(message: Message) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ValueError(f'role "{role}": must be one of {", ".join(ROLES)}')
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"the {role}'s content is not a string")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls)):
        raise ValueError(f"the {role}'s tool_calls are not a list of objects")


def _tools(tools: object) -> list[dict[str, object]] | None:
    """Parse a list of JSON schemas, which some files store as a string."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, '"tools"')
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ValueError('"tools" are not a list of objects')
    return tools


def _turn(turn: object, role: str, content: str) -> Message:
    """Convert a message to the keys `role` and `content`. Keys that are null or have no effect are omitted."""
    if not isinstance(turn, dict) or role not in turn or (content not in turn and not turn.get("tool_calls")):
        raise ValueError(f'a message without "{role}" and "{content}"')
    check_unread(turn, OF_MESSAGE)
    standard_roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    role_name = standard_roles.get(str(turn[role]), str(turn[role]))
    rest = {key: value for key, value in turn.items() if key not in (role, content, *OF_MESSAGE) and value is not None}
    rest = {key: value for key, value in rest.items() if not (key == "tool_calls" and value == [])}
    text = {"content": turn[content]} if turn.get(content) is not None or "tool_calls" not in rest else {}
    return {"role": role_name, **text, **rest}
