"""`mega chat`: turns, commands, a model of this process and a server; each mistake is a line and ends nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Generator, Sequence
from pathlib import Path

import pytest

from mega import cli
from mega.core.inference.generation.chat import ChatSession, LocalAnswers, lines
from mega.core.inference.request import Sampling
from mega.core.inference.server.chat_client import ServerAnswers
from mega.core.inference.server.options import ServerOptions
from mega.core.text.chat.format import chat_format
from mega.core.text.chat.messages import Message
from tests.inference.server.conftest import ByteTokenizer, serving
from tests.support.fake_engine import FakeEngine


class Parrot:
    """Answers with how many messages it was given, and the last one."""

    def answer(
        self, messages: Sequence[Message], how: Sampling, tokens: int | None, given: Collection[str] = ()
    ) -> Generator[str, None, None]:
        if tokens == 1:
            raise ValueError("too short")
        yield f"{len(messages)} "
        yield f"{messages[-1]['content']} {how.temperature}"


def said(session: ChatSession, text: str) -> str:
    source, out = iter(text.splitlines()), list[str]()

    def read() -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    session.play(read, out.append)
    return "".join(out)


def test_turns_and_commands(tmp_path: Path) -> None:
    session, file = ChatSession(Parrot()), tmp_path / "talk.jsonl"
    assert said(session, "Hi\n/system Be brief.\nSo?") == "1 Hi 1.0\nthe system says: Be brief.\n4 So? 1.0\n"
    assert (
        said(session, "/undo\n/set temperature 0.7\nAnd?\n/exit\nnever")
        == "1 turns are left\ntemperature 0.7\n4 And? 0.7\n"
    )
    assert said(session, f"/save {file}").endswith(": 5 messages\n")
    assert json.loads(file.read_text())["messages"] == session.messages and session.messages[0]["role"] == "system"
    assert said(session, "/reset\n/undo\n/help").startswith(
        "the conversation begins again\nmega: /undo: there is no turn"
    )
    assert session.turns == [] and session.system == "Be brief."


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/sett 1", "/sett: is not a command; /help lists all"),
        ("/set temperature hot", "/set temperature hot: must be a number"),
        ("/set tokens 1e400", "/set tokens 1e400: must be a number"),
        ("/set temperature " + "1" * 400, "/set temperature " + "1" * 20 + ": must be a number"),
        ("/set temperature -1", "/set temperature -1: must be a number from 0"),
        ("/set tokens 0", "/set tokens 0: must be a whole number of at least 1"),
        ("/set warmth 1", "/set warmth 1: must be a name and a value; valid names: temperature, "),
        ("/save", "/save: must name a file, after a turn"),
        ("/set tokens 1\nHi", "too short"),
    ],
)
def test_a_mistake_is_a_line_and_ends_nothing(line: str, error: str) -> None:
    session = ChatSession(Parrot())
    shown = said(session, f"{line}\n/set tokens 9\nHi").splitlines()
    assert any(each.startswith(f"mega: {error}") for each in shown) and shown[-1] == "1 Hi 1.0"
    assert len(session.turns) == 2


def test_a_model_of_this_process_and_a_base_model() -> None:
    tokenizer, engine = ByteTokenizer(), FakeEngine(list("Wörld".encode()), 256, vocab=300)
    chat = chat_format("plain", tokenizer)
    for template, prompt in ((chat, "User: Hi\n\nAssistant:"), (None, "Hi")):
        session = ChatSession(LocalAnswers(engine, tokenizer, template, frozenset({256})))
        assert said(session, "Hi") == "Wörld\n" and bytes(engine.seen[-1].prompt).decode() == prompt
        assert said(session, "x" * 300).startswith("mega: the conversation has ")
    session = ChatSession(LocalAnswers(engine, tokenizer, None, frozenset({256})))
    said(session, "Hi\n, you")
    assert bytes(engine.seen[-1].prompt).decode() == "HiWörld, you"


def test_a_server() -> None:
    tokenizer, engine = ByteTokenizer(), FakeEngine(list("Wörld".encode()), 256, vocab=300)
    with serving(engine, tokenizer, ServerOptions(name="fake", top_p=0.5), chat_format("plain", tokenizer)) as running:
        session = ChatSession(ServerAnswers(running.url, "fake"), tokens=20)
        assert said(session, "Hi\n/set presence_penalty 1\nHo") == "Wörld\npresence_penalty 1\nWörld\n"
        assert engine.seen[-1].sampling.presence_penalty == 1
        said(session, "/set top_p 1\nHo")
        assert session.given == {"presence_penalty", "top_p"} and engine.seen[-1].sampling.top_p == 1
        assert said(session, "x" * 300).startswith(f"mega: --url {running.url}: 400: This model's maximum context")
        assert "Wörld" in said(ChatSession(ServerAnswers(running.url, "fake")), "Hi"), (
            "the server's number of tokens fits"
        )
        wrong = ChatSession(ServerAnswers(running.url, "other"))
        assert "model 'other': is not served here" in said(wrong, "Hi")
    assert said(session, "Hi").startswith(f"mega: --url {running.url}: no answer: ")


def test_thoughts_are_shown_and_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ServerAnswers("nowhere")
    deltas = [{"reasoning_content": "hm, "}, {"reasoning_content": "yes"}, {"content": "Yes"}, {"content": "."}]
    pieces = [piece for delta in deltas for piece in answers._texts({"choices": [{"delta": delta}]})]
    monkeypatch.setattr(ServerAnswers, "answer", lambda *asked: (piece for piece in pieces))
    session = ChatSession(answers)
    assert said(session, "Is it?") == "[thinks] hm, yes\n[answers] Yes.\n"
    assert session.turns[-1] == {"role": "assistant", "content": "Yes."}


def test_lines_that_ended_in_an_error_are_counted() -> None:
    feed = iter(["Hi", "/nothing", "/set tokens 0"])

    def read() -> str:
        try:
            return next(feed)
        except StopIteration:
            raise EOFError from None

    assert ChatSession(Parrot()).play(read, lambda text: None) == 2


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb"))
    read = lines()
    assert [read(), read(), read()] == ["a\n", "\n", "b"]
    with pytest.raises(EOFError):
        read()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("chat", "CHECKPOINT is missing: give a run's directory, or --url of a server"),
        ("chat a --url b", "--url b: excludes the checkpoint a; that server's model answers"),
        ("chat --url b --dtype bf16", "--url b: excludes --dtype; that server's model answers"),
        ("chat /no/where", "CHECKPOINT /no/where: "),
    ],
)
def test_flags(line: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"mega: {error}")
