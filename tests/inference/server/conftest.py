"""Servers on real sockets, in threads: one with an engine that only pretends."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from mega.core.inference.server.options import ServerOptions
from mega.core.inference.server.run import HttpServer, bind
from mega.core.text.chat.format import ChatFormat, chat_format
from mega.core.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """A server that runs, and a client of it."""

    def __init__(self, server: HttpServer, port: int, thread: threading.Thread) -> None:
        self.server, self.port, self.thread = server, port, thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if data is not None else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, data, given | {k.replace("_", "-"): v for k, v in headers.items()})
            found = connection.getresponse()
            return Reply(found.status, dict(found.getheaders()), found.read())
        finally:
            connection.close()


@contextmanager
def serving(
    engine: Any, tokenizer: Tokenizer, options: ServerOptions, chat: ChatFormat | None = None
) -> Iterator[Running]:
    server, listening, ready = HttpServer(engine, tokenizer, options, chat), bind("127.0.0.1", 0), threading.Event()
    thread = threading.Thread(target=lambda: _quietly(server, listening, ready), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield Running(server, listening.getsockname()[1], thread)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def _quietly(server: HttpServer, listening: Any, ready: threading.Event) -> None:
    try:
        server.run(listening, ready.set)
    except RuntimeError:
        assert server.failure is not None


class ByteTokenizer(Tokenizer):
    """A token is a byte; 256 ends a document."""

    kind = "ByteTokenizer"
    eod, bos, pad = 256, None, None
    vocab_size = 257  # type: ignore[assignment]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return b"".join(b"<|end|>" if token == 256 else bytes([token]) for token in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == 256 else bytes([token])

    def files(self) -> Mapping[str, Path]:
        return {}

    def control(self, name: str) -> int | None:
        return 256 if name == "<|end|>" else None

    def special_tokens(self) -> Mapping[str, int]:
        return {"<|end|>": 256}


ANSWER = "Hello, wörld!\nAnd on.\n\nEnd"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(list(ANSWER.encode()), 256, vocab=300)


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Running]:
    tokenizer = ByteTokenizer()
    options = ServerOptions(name="fake", adapters=("poet",), temperature=1.0, max_tokens_to_oom=1000)
    with serving(engine, tokenizer, options, chat_format("plain", tokenizer)) as running:
        yield running
