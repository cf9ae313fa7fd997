"""Where the assistant's turns are in a conversation that a template has rendered, and what ends them.

A turn begins where the model would be asked for it: after the conversation before it with what begins the assistant's
turn. It ends with the first of the template's ends after that. Both are found by rendering other conversations by the
same template; what these do not agree on is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mega.core.text.special import Span, TextSection, sections

ASKED, ANSWERED = ("What is asked first?", "What is asked then?"), ("The first answer.", "The last answer.")
NEXT = "What comes next is this."
"""Texts that no template holds."""


class Rendered(NamedTuple):
    """A conversation as text. literal: characters that never form a control token; tagged: those between
    {% generation %} and {% endgeneration %}."""

    text: str
    literal: tuple[Span, ...] = ()
    tagged: tuple[Span, ...] = ()


class Render(Protocol):
    """messages, and whether what begins the assistant's turn follows them."""

    def __call__(self, messages: Sequence[Mapping[str, object]], reply: bool = False) -> Rendered: ...


class Frame(NamedTuple):
    """ends: tokens with which the assistant's turn ends, by name. framing: those that stand around a user's turn."""

    ends: tuple[str, ...]
    framing: tuple[str, ...]


def _talk(turns: int) -> list[dict[str, str]]:
    """user, assistant, user ... with texts that can be found again."""
    texts = [text for pair in zip(ASKED, ANSWERED, strict=True) for text in pair]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[:turns])]


def _named(text: str, names: Collection[str]) -> list[TextSection]:
    return [each for each in sections(text, names) if each.name is not None]


def _after(found: Rendered | None, answer: str, names: Collection[str]) -> list[TextSection]:
    """The named tokens after an answer in a text."""
    at = -1 if found is None else found.text.find(answer)
    return [] if found is None or at < 0 else [each for each in _named(found.text, names) if each.begin >= at]


def frame_of(render: Callable[..., Rendered | None], names: Collection[str]) -> Frame:
    """What is known of a template without a conversation. render: None where the template refuses."""
    asked = render(_talk(1)) or render(_talk(1), True)
    framing = {each.name for each in _named(asked.text, names)} if asked is not None else set()
    last = _after(render(_talk(2)), ANSWERED[0], names)
    ends = dict.fromkeys(each.name for each in last[:1])
    if (earlier := _earlier_end(render, names)) is not None:
        ends[earlier] = None
    if (called := _end_of_a_call(render, names)) is not None:
        ends[called] = None
    found = tuple(name for name in ends if name is not None)
    return Frame(found, tuple(sorted({*filter(None, framing), *found})))


def check_renders(render: Render) -> None:
    """Errors: what a template raises that renders neither a question nor one with its answer."""
    try:
        render(_talk(1), True)
    except Exception as error:
        try:
            render(_talk(2))
        except Exception:
            raise error from None


def _earlier_end(render: Callable[..., Rendered | None], names: Collection[str]) -> str | None:
    """What ends a turn of the assistant's that others follow; None where it is what begins the next turn."""
    whole, begun = render(_talk(4)), render(_talk(1), True)
    after = _after(whole, ANSWERED[0], names)
    if whole is None or not after:
        return None
    until = whole.text.find(ASKED[1])
    between = [each for each in after if each.begin < until]
    if not between:
        return None
    name = between[0].name
    asked = render(_talk(1))
    opening = {each.name for each in _named(begun.text[len(asked.text) :], names)} if begun and asked else set()
    before = _named(whole.text[: whole.text.find(ASKED[0])], names)
    opens = name in opening or (len(between) == 1 and name in {each.name for each in before})
    return None if opens else name


def _end_of_a_call(render: Callable[..., Rendered | None], names: Collection[str]) -> str | None:
    """What ends a turn in which the assistant calls a function."""
    call = {"type": "function", "id": "call12345", "function": {"name": "look", "arguments": {"at": "it"}}}
    talk = [*_talk(1), {"role": "assistant", "content": ANSWERED[0], "tool_calls": [call]}]
    found, without = render(talk), render(_talk(2))
    if found is None or without is None or found.text == without.text:
        return None
    tokens = _after(found, ANSWERED[0], names)
    return tokens[-1].name if tokens and not found.text[tokens[-1].end :].strip() else None


def find_turns(render: Render, question: Mapping[str, Any], found: Rendered) -> list[Span]:
    """The characters of each of the assistant's turns, with its end. Errors: ValueError saying what is not known.

    question: `messages`, `ends`, `names`, and `first`, the number of messages before the first turn that counts.
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
    shown = rest.strip()[-20:]
    return (
        f"ends the assistant's turn with {shown!r}, which is no control token of this tokenizer, so that no stop is "
        "trained; give one whose end of turn the tokenizer has"
    )


_ENDS_LAST = (
    "does not end the assistant's earlier turns, so that the opening of the next turn would be trained as their end; "
    "give one that ends each, or that marks what is trained by {% generation %}"
)


def _begin(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, text: str, names: Collection[str]
) -> int | None:
    """Where turn `number` begins in the text; None where the text does not begin with the messages before it."""
    before = messages[:number]
    try:
        closed = render(before).text if before else ""
        asked = render(before, True).text
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"cannot render the conversation up to the assistant's turn, where that turn would begin "
            f"({type(error).__name__}: {error})"
        ) from None
    if text.startswith(asked):
        return len(asked) if asked != closed else _begin_by_content(render, messages, number, text, len(closed))
    if not text.startswith(closed) or not asked.startswith(closed):
        return None
    opening, rest = asked[len(closed) :], text[len(closed) :]
    shared = next((i for i, (a, b) in enumerate(zip(opening, rest, strict=False)) if a != b), len(rest))
    bounds = [at for each in sections(opening, names) for at in (each.begin, each.end)]
    return len(closed) + max((at for at in bounds if 0 < at <= shared), default=0) or None


def _begin_by_content(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, text: str, closed: int
) -> int:
    """The same where nothing is put in front of a turn that is asked for: what the template always writes before the
    message's own text is not trained, but for blanks."""
    own = messages[number]
    if not isinstance(own.get("content"), str):
        return closed
    probed = render([*messages[:number], {**own, "content": NEXT}, *messages[number + 1 :][:1]]).text
    at = probed.find(NEXT, closed)
    return at if at >= 0 and text.startswith(probed[:at]) and probed[closed:at].strip() else closed


def _begin_by_count(
    render: Render, messages: Sequence[Mapping[str, object]], number: int, found: Rendered, names: Collection[str]
) -> int:
    """The same where turns look otherwise once others follow: by what begins each of them, which no message can spell.
    Errors: ValueError where that is not as often in the text as there are turns."""
    closed, asked = render(_talk(1)).text, render(_talk(1), True).text
    opening = asked[len(closed) :] if asked.startswith(closed) else ""
    tokens = _named(opening, names)
    starts = [each.begin for each in sections(found.text, names, found.literal) if each.name is not None]
    begins = [at + len(opening) for at in starts if found.text.startswith(opening, at)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not tokens or tokens[0].begin != 0 or len(begins) != len(turns):
        raise ValueError(
            "renders the turns before an assistant's turn otherwise once others follow, so that where that turn begins "
            "is not known; mark what is trained by {% generation %}"
        )
    return begins[turns.index(number)]


def _end(render: Render, messages: Sequence[Mapping[str, object]], number: int, turn: Turn) -> int | None:
    """Where turn `number` ends: with the first end after what the message says; a template may end parts of a turn with
    the same token. None where there is no end. Errors: ValueError where it is not before the next message."""
    ends = turn.ends_in(turn.found, len(turn.found.text))
    own, after = messages[number], messages[number + 1 :][:1]
    before = 0
    if isinstance(own.get("content"), str) and len(ends) > 1:
        probed = render([*messages[:number], {**own, "content": NEXT}, *after])
        at = probed.text.find(NEXT, turn.begin)
        if at >= 0 and probed.text[: turn.begin] == turn.found.text[: turn.begin]:
            before = len(turn.ends_in(probed, at))
    end = next(iter(ends[before:]), None)
    if end is not None and after and after[0]["role"] != "assistant" and isinstance(after[0].get("content"), str):
        probed = render([*messages[: number + 1], {**after[0], "content": NEXT}])
        if not probed.text.startswith(turn.found.text[:end]) or NEXT in probed.text[turn.begin : end]:
            raise ValueError(_ENDS_LAST)
    return end


class Turn(NamedTuple):
    """A turn of the assistant's in a rendered conversation, of which the end is looked for."""

    found: Rendered
    begin: int
    ends: Collection[str]
    names: Collection[str]

    def ends_in(self, rendered: Rendered, until: int) -> list[int]:
        """The places after each end between the turn's beginning and another place."""
        literal = [(max(a - self.begin, 0), b - self.begin) for a, b in rendered.literal if b > self.begin]
        named = sections(rendered.text[self.begin : until], self.names, literal)
        return [self.begin + each.end for each in named if each.name in self.ends]
