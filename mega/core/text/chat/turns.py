"""Locate the assistant's turns, and the tokens that end these turns, in a conversation that a template has rendered.

A turn begins where generation would begin: after the rendering of the previous messages with the generation prompt. The
turn ends with the first end token after its text. Both positions are determined by rendering modified conversations
with the same template. If the renderings are inconsistent, the template is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mega.core.text.special import Span, TextSection, sections

ASKED, ANSWERED = ("What is asked first?", "What is asked then?"), ("The first answer.", "The last answer.")
NEXT = "What comes next is this."
"""A text that no template should contain."""


class Rendered(NamedTuple):
    """A conversation rendered as text."""

    text: str
    literal: tuple[Span, ...] = ()  # characters that never form a control token
    tagged: tuple[Span, ...] = ()  # characters between {% generation %} and {% endgeneration %}


class Render(Protocol):
    """Renders messages. reply: whether to add the generation prompt, which begins the assistant's next turn."""

    def __call__(self, messages: Sequence[Mapping[str, object]], reply: bool = False) -> Rendered: ...


class Frame(NamedTuple):
    """Names of tokens that delimit turns. ends: tokens that end an assistant's turn. framing: tokens that surround a
    user's turn."""

    ends: tuple[str, ...]
    framing: tuple[str, ...]


def _talk(turns: int) -> list[dict[str, str]]:
    """Return a conversation of `turns` messages (user, assistant, user, ...), whose texts can be found in a
    rendering."""
    texts = [text for pair in zip(ASKED, ANSWERED, strict=True) for text in pair]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[:turns])]


def _named(text: str, names: Collection[str]) -> list[TextSection]:
    return [each for each in sections(text, names) if each.name is not None]


def _after(rendered: Rendered | None, answer: str, names: Collection[str]) -> list[TextSection]:
    """Return the named tokens that follow `answer` in a rendered text."""
    begin = -1 if rendered is None else rendered.text.find(answer)
    return (
        [] if rendered is None or begin < 0 else [each for each in _named(rendered.text, names) if each.begin >= begin]
    )


def frame_of(render: Callable[..., Rendered | None], names: Collection[str]) -> Frame:
    """Find the end and framing tokens of a template. render: function that renders messages, or returns None if the
    template rejects the messages."""
    question = render(_talk(1)) or render(_talk(1), True)
    framing = {each.name for each in _named(question.text, names)} if question is not None else set()
    last = _after(render(_talk(2)), ANSWERED[0], names)
    ends = dict.fromkeys(each.name for each in last[:1])
    if (earlier_end := _earlier_end(render, names)) is not None:
        ends[earlier_end] = None
    if (call_end := _end_of_a_call(render, names)) is not None:
        ends[call_end] = None
    end_names = tuple(name for name in ends if name is not None)
    return Frame(end_names, tuple(sorted({*filter(None, framing), *end_names})))


def check_renders(render: Render) -> None:
    """Check that a template can render a user's message, alone or with an answer. Errors: the exception that the
    template raises."""
    try:
        render(_talk(1), True)
    except Exception as error:
        try:
            render(_talk(2))
        except Exception:
            raise error from None


def _earlier_end(render: Callable[..., Rendered | None], names: Collection[str]) -> str | None:
    """Return the token that ends an assistant's turn if other turns follow the turn; None if the token after the turn
    begins the next turn."""
    whole, prompted = render(_talk(4)), render(_talk(1), True)
    after = _after(whole, ANSWERED[0], names)
    if whole is None or not after:
        return None
    until = whole.text.find(ASKED[1])
    between = [each for each in after if each.begin < until]
    if not between:
        return None
    name = between[0].name
    question = render(_talk(1))
    opening = (
        {each.name for each in _named(prompted.text[len(question.text) :], names)} if prompted and question else set()
    )
    before = _named(whole.text[: whole.text.find(ASKED[0])], names)
    opens = name in opening or (len(between) == 1 and name in {each.name for each in before})
    return None if opens else name


def _end_of_a_call(render: Callable[..., Rendered | None], names: Collection[str]) -> str | None:
    """Return the token that ends a turn in which the assistant calls a function, or None."""
    call = {"type": "function", "id": "call12345", "function": {"name": "look", "arguments": {"at": "it"}}}
    talk = [*_talk(1), {"role": "assistant", "content": ANSWERED[0], "tool_calls": [call]}]
    with_call, without_call = render(talk), render(_talk(2))
    if with_call is None or without_call is None or with_call.text == without_call.text:
        return None
    tokens = _after(with_call, ANSWERED[0], names)
    return tokens[-1].name if tokens and not with_call.text[tokens[-1].end :].strip() else None


def find_turns(render: Render, question: Mapping[str, Any], found: Rendered) -> list[Span]:
    """Return the spans of the assistant's turns, including the end tokens. Errors: ValueError naming the position that
    cannot be determined.

    question: a dict with `messages`, `ends`, `names`, and `first`, the number of messages before the first turn to
    return.
    """
    messages, ends, turns = question["messages"], question["ends"], list[Span]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < question.get("first", 0):
            continue
        begin = _begin(render, messages, number, found.text, question["names"])
        if begin is None:
            begin = _begin_by_count(render, messages, number, found, question["names"])
        end = _end(render, messages, number, Turn(found, begin, ends, question["names"]))
        if end is None:
            raise ValueError(_ENDS_LAST if ends and number < len(messages) - 1 else _without_end(found.text[begin:]))
        turns.append((begin, end))
    return turns


def _without_end(rest: str) -> str:
    excerpt = rest.strip()[-20:]
    return (
        f"ends the assistant's turn with {excerpt!r}, which is no control token of this tokenizer, so that no stop is "
        "trained; give one whose end of turn the tokenizer has"
    )


_ENDS_LAST = (
    "does not end the assistant's earlier turns, so that the opening of the next turn would be trained as their end; "
    "give one that ends each, or that marks what is trained by {% generation %}"
)


def _begin(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, text: str, names: Collection[str]
) -> int | None:
    """Return the position where turn `number` begins in `text`; None if `text` does not begin with the rendering of the
    previous messages."""
    before = messages[:number]
    try:
        closed = render(before).text if before else ""
        prompted = render(before, True).text
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"cannot render the conversation up to the assistant's turn, where that turn would begin "
            f"({type(error).__name__}: {error})"
        ) from None
    if text.startswith(prompted):
        return len(prompted) if prompted != closed else _begin_by_content(render, messages, number, text, len(closed))
    if not text.startswith(closed) or not prompted.startswith(closed):
        return None
    # The generation prompt and the real conversation begin with the same `shared` characters. The turn begins at the
    # last token boundary within these characters.
    opening, rest = prompted[len(closed) :], text[len(closed) :]
    shared = next((i for i, (a, b) in enumerate(zip(opening, rest, strict=False)) if a != b), len(rest))
    bounds = [bound for each in sections(opening, names) for bound in (each.begin, each.end)]
    return len(closed) + max((bound for bound in bounds if 0 < bound <= shared), default=0) or None


def _begin_by_content(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, text: str, closed: int
) -> int:
    """Return where a turn begins, for templates without a generation prompt. Text that the template always writes
    before the message's text does not belong to the turn, unless it is only white space."""
    message = messages[number]
    if not isinstance(message.get("content"), str):
        return closed
    probed = render([*messages[:number], {**message, "content": NEXT}, *messages[number + 1 :][:1]]).text
    content_start = probed.find(NEXT, closed)
    return (
        content_start
        if content_start >= 0 and text.startswith(probed[:content_start]) and probed[closed:content_start].strip()
        else closed
    )


def _begin_by_count(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, rendered: Rendered, names: Collection[str]
) -> int:
    """Return where a turn begins, for templates that render turns differently if other turns follow. The turn is
    located by counting the tokens that begin a turn; messages cannot contain these tokens. Errors: ValueError if the
    number of matches is not the number of turns."""
    closed, prompted = render(_talk(1)).text, render(_talk(1), True).text
    opening = prompted[len(closed) :] if prompted.startswith(closed) else ""
    tokens = _named(opening, names)
    starts = [each.begin for each in sections(rendered.text, names, rendered.literal) if each.name is not None]
    begins = [start + len(opening) for start in starts if rendered.text.startswith(opening, start)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not tokens or tokens[0].begin != 0 or len(begins) != len(turns):
        raise ValueError(
            "renders the turns before an assistant's turn otherwise once others follow, so that where that turn begins "
            "is not known; mark what is trained by {% generation %}"
        )
    return begins[turns.index(number)]


def _end(render: Render, messages: Sequence[Mapping[str, object]], number: int, turn: Turn) -> int | None:
    """Return the position after the first end token that follows the text of turn `number`; None if no end token
    follows. End tokens before the message's text, which may end an earlier section of the turn, are skipped. Errors:
    ValueError if the turn does not end before the next message."""
    ends = turn.ends_in(turn.found, len(turn.found.text))
    message, after = messages[number], messages[number + 1 :][:1]
    inner_ends = 0
    if isinstance(message.get("content"), str) and len(ends) > 1:
        probed = render([*messages[:number], {**message, "content": NEXT}, *after])
        content_start = probed.text.find(NEXT, turn.begin)
        if content_start >= 0 and probed.text[: turn.begin] == turn.found.text[: turn.begin]:
            inner_ends = len(turn.ends_in(probed, content_start))
    end = next(iter(ends[inner_ends:]), None)
    if end is not None and after and after[0]["role"] != "assistant" and isinstance(after[0].get("content"), str):
        probed = render([*messages[: number + 1], {**after[0], "content": NEXT}])
        if not probed.text.startswith(turn.found.text[:end]) or NEXT in probed.text[turn.begin : end]:
            raise ValueError(_ENDS_LAST)
    return end


class Turn(NamedTuple):
    """The beginning of an assistant's turn in a rendered conversation, and the tokens that may end the turn."""

    found: Rendered  # the conversation
    begin: int  # index of the turn's first character
    ends: Collection[str]  # names of the tokens that may end the turn
    names: Collection[str]  # names of all tokens

    def ends_in(self, rendered: Rendered, until: int) -> list[int]:
        """Return the position after each end token between the beginning of the turn and `until`."""
        literal = [(max(a - self.begin, 0), b - self.begin) for a, b in rendered.literal if b > self.begin]
        named_tokens = sections(rendered.text[self.begin : until], self.names, literal)
        return [self.begin + each.end for each in named_tokens if each.name in self.ends]
