"""Who may ask, how much at a time, what slow clients do, and how a server ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mega.core.inference.request import Event, Request
from mega.core.inference.server.driver import Driver, EngineLost
from mega.core.inference.server.limits import ServerLimits
from mega.core.inference.server.options import ServerOptions
from tests.inference.server.conftest import ANSWER, ByteTokenizer, Running, serving
from tests.support.fake_engine import FakeEngine

ONCE = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}


def fake(**given: Any) -> FakeEngine:
    return FakeEngine(list(ANSWER.encode()), 256, vocab=300, **given)


def raw(server: Running, data: bytes, seconds: float = 5.0) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


def test_a_token_opens_all_but_health_and_the_page() -> None:
    with serving(fake(), ByteTokenizer(), ServerOptions(name="fake", token="secret")) as server:
        assert [server.ask("GET", path).status for path in ("/", "/health", "/metrics", "/v1/models")] == [
            200,
            200,
            401,
            401,
        ]
        wrong = server.ask("POST", "/v1/completions", ONCE, Authorization="Bearer secreT")
        assert wrong.status == 401 and wrong.headers["www-authenticate"] == "Bearer"
        assert server.ask("GET", "/v1/models", Authorization="Bearer secret", Host="my.site").status == 200


def test_without_a_token_other_sites_are_not_answered(server: Running) -> None:
    assert server.ask("GET", "/v1/models", Host="evil.example:5000").status == 403
    assert server.ask("GET", "/v1/models", Host="localhost:5000").status == 200
    reply = server.ask("POST", "/v1/completions", json.dumps(ONCE).encode(), Content_Type="text/plain")
    assert reply.status == 415
    assert "access-control-allow-origin" not in server.ask("OPTIONS", "/api", Origin="http://evil.example").headers


def test_large_and_broken_requests_are_refused(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert b" 413 " in raw(server, head + b"Connection: close\r\nContent-Length: 1073741824\r\n\r\n")
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    assert b" 413 " in raw(
        server, head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 9 + b"0\r\n\r\n"
    )
    assert b" 431 " in raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n")
    assert b" 400 " in raw(server, b"\x16\x03\x01\x00\xa5\x01\r\n\r\n")
    assert [server.ask("POST", path, {}).status for path in ("/nothing", "/api")] == [404, 405]


def test_the_queue_is_bounded() -> None:
    options = ServerOptions(name="fake", limits=ServerLimits(max_waiting=2))
    with serving(fake(seconds=0.02, rows=1), ByteTokenizer(), options) as server, ThreadPoolExecutor(8) as pool:
        body = {**ONCE, "max_tokens": 20}
        replies = list(pool.map(lambda _: server.ask("POST", "/v1/completions", body), range(8)))
        assert sorted({reply.status for reply in replies}) == [200, 429]
        assert [reply.status for reply in replies].count(200) == 3
        assert all(reply.headers["retry-after"] == "1" for reply in replies if reply.status == 429)
        assert server.ask("POST", "/v1/completions", {**ONCE, "n": 4}).status == 400


def test_slow_clients_are_sent_away_and_keep_no_one_waiting() -> None:
    limits = ServerLimits(header_seconds=0.5, body_seconds=0.5, max_connections=20, write_seconds=0.5)
    with serving(fake(), ByteTokenizer(), ServerOptions(name="fake", limits=limits)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        for connection in idle[-10:]:
            connection.sendall(b"GET / HT")
        assert server.ask("GET", "/health").status == 200  # though there are more than 20 connections
        assert idle[0].recv(100).startswith(b"HTTP/1.1 429") and idle[-1].recv(100).startswith(b"HTTP/1.1 408")
        assert b" 408 " in raw(server, head + b"Content-Length: 100\r\n\r\n{")
        for connection in idle:
            connection.close()


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = fake(seconds=0.01)
    options = ServerOptions(name="fake", limits=ServerLimits(request_timeout=0.2))
    with serving(engine, ByteTokenizer(), options) as server:
        assert server.ask("POST", "/v1/completions", ONCE).status == 503
        body = server.ask("POST", "/v1/completions", {**ONCE, "stream": True}).body
        assert b"no whole answer within 0.2 s" in body and body.endswith(b"data: [DONE]\n\n")
        time.sleep(0.1)
        assert not engine.running and engine.cancelled == 2


def test_a_request_is_read_before_newer_connections_take_its_place() -> None:
    """Sent while the server is busy with something else, in front of more connections than it has room for."""
    options = ServerOptions(name="fake", limits=ServerLimits(max_connections=16))
    with serving(fake(), ByteTokenizer(), options) as server, contextlib.ExitStack() as opened:
        blocked, release = threading.Event(), threading.Event()
        assert server.server._loop is not None
        server.server._loop.call_soon_threadsafe(lambda: (blocked.set(), release.wait(20)))
        assert blocked.wait(20)
        asking = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        asking.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(60):
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        release.set()
        assert asking.recv(1 << 12).startswith(b"HTTP/1.1 200")


def test_a_failed_engine_is_503_and_ends_the_server() -> None:
    engine = fake(seconds=0.01)
    with serving(engine, ByteTokenizer(), ServerOptions(name="fake")) as server, ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(server.ask, "POST", "/v1/completions", ONCE) for _ in range(3)]
        streamed = pool.submit(server.ask, "POST", "/v1/completions", {**ONCE, "stream": True})
        while len(engine.running) < 4:
            time.sleep(0.01)
        engine.fails = "rank 1 was killed"
        assert {each.result().status for each in whole} == {503}
        assert "rank 1 was killed" in whole[0].result().json["error"]["message"]
        assert b'"server_error"' in streamed.result().body
        server.thread.join(5)
        assert not server.thread.is_alive() and str(server.server.failure) == "rank 1 was killed"


@pytest.mark.parametrize("broken", ["step", "cancel"])
def test_whatever_ends_the_engines_thread_is_heard(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*given: object) -> list[Event]:
        raise SystemExit("gone")

    engine, failed = fake(), list[BaseException]()
    monkeypatch.setattr(engine, "step", list)
    monkeypatch.setattr(engine, broken, ends)

    async def ask() -> object:
        driver = Driver(engine, 1, failed.append)
        driver.start()
        (ticket,) = await driver.add([Request(prompt=(1,), tokens=9)])
        ticket.cancel()
        try:
            return await asyncio.wait_for(ticket.events.get(), 20)
        finally:
            driver.close()

    assert isinstance(asyncio.run(ask()), EngineLost) and str(failed) == "[SystemExit('gone')]"


def test_a_route_that_fails_answers_in_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    engine = fake()
    monkeypatch.setattr(engine, "add", lambda request: {}["of the code"])
    with serving(engine, ByteTokenizer(), ServerOptions(name="fake")) as server:
        reply = server.ask("POST", "/v1/completions", ONCE)
    assert reply.status == 500 and reply.json["error"]["type"] == "server_error"
    assert "'/v1/completions' failed: KeyError in " in capfd.readouterr().err


def test_health_knows_of_logits_that_are_not_finite() -> None:
    """Three requests in a row: one may be a prompt's; and not for longer than they last."""
    engine = fake()
    with serving(engine, ByteTokenizer(), ServerOptions(name="fake")) as server:
        engine.not_finite = True
        for answered in range(4):
            health = server.ask("GET", "/health")
            failed = answered == 3
            assert (health.status, health.json["status"]) == ((503, "failed") if failed else (200, "ok"))
            assert ("the model's logits hold a NaN" in health.json.get("reason", "")) is failed
            reply = server.ask("POST", "/v1/completions", ONCE)
            assert reply.status == 500 and "the model's logits hold a NaN" in reply.json["error"]["message"]
        engine.not_finite = False
        assert server.ask("POST", "/v1/completions", ONCE).status == 200
        health = server.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "ok") and "reason" not in health.json


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    engine = fake(seconds=0.005)
    with serving(engine, ByteTokenizer(), ServerOptions(name="fake")) as server, ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(server.ask, "POST", "/v1/completions", ONCE) for _ in range(3)]
        while len(engine.running) < 3:
            time.sleep(0.01)
        server.server.stop()
        time.sleep(0.1)
        assert server.ask("POST", "/v1/completions", ONCE).status == 503
        health = server.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "draining")
        assert [each.result().status for each in whole] == [200, 200, 200]
    engine = fake(seconds=0.01)
    options = ServerOptions(name="fake", limits=ServerLimits(drain_seconds=0.1))
    with serving(engine, ByteTokenizer(), options) as server, ThreadPoolExecutor(4) as pool:
        cut = [pool.submit(server.ask, "POST", "/v1/completions", {**ONCE, **more}) for more in ({}, {"stream": True})]
        while len(engine.running) < 2:
            time.sleep(0.01)
        server.server.stop()
        assert cut[0].result().status == 503 and b"shutting down" in cut[1].result().body


def test_prompts_are_in_no_log_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    canary = "xyzzy-canary"
    for asked in (False, True):
        options = ServerOptions(name="fake", log_prompts=asked)
        with serving(fake(), ByteTokenizer(), options) as server:
            body = {"prompts": [canary], "tokens_to_generate": 1}
            assert server.ask("PUT", "/api", body).status == 200
            assert server.ask("PUT", "/api", {**body, "top_k": -1}).status == 400
            assert server.ask("PUT", f"/{canary}", body).status == 404
            shown = "".join(capfd.readouterr())
            assert (canary in shown) is asked
            assert server.ask("PUT", "/api", {**body, "no_log": True}).status == 200
            assert canary not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages",
    ],
)
def test_hostile_templates_are_capped(source: str) -> None:
    """More of them in tests/battery/serve_fuzz.py."""
    from mega.core.text.chat.format import ChatFormat

    with pytest.raises(ValueError, match=r"^the chat template: "):
        ChatFormat(source, ByteTokenizer(), "the chat template", seconds=1)
