"""Check every request before its route is called, and count the request afterwards. The gate checks the token, the Host
header, the size of the body, and whether the server still accepts requests. The gate is an ASGI application that wraps
another application, and does not depend on the fields of routes.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mega.core.inference.server.service import Service
from mega.core.untrusted import Json

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, object]]]
Send = Callable[[Mapping[str, object]], Awaitable[None]]

OPEN = ("/", "/index.html", "/health", "/v1/health")
"""Paths that do not need a token: the web page, which contains no data, and the health check."""
FAILED = "the server has failed"
_WATCHED = ("/health", "/v1/health", "/metrics")
"""Paths that remain available while the server drains."""
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
_PAGE = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)


class Gate:
    """Passes permitted requests to the application `inside`. routes: paths that are counted separately; all other paths
    are counted as "other"."""

    def __init__(
        self, inside: Callable[[Any, Any, Any], Awaitable[None]], service: Service, routes: frozenset[str]
    ) -> None:
        self._inside, self._service, self._routes = inside, service, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        service, path, began = self._service, scope["path"], time.monotonic()
        status = [0]

        async def counted(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                extra = (*_HEADERS, *((_PAGE,) if path in OPEN[:2] else ()))
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        service.busy += 1
        try:
            refused = self._refused(scope)
            if refused is not None:
                await _send(counted, *refused)
            else:
                await self._inside(scope, receive, counted)
        except Exception as error:  # the error message may contain a prompt, so it is not printed
            print(f"mega: {path[:60]!r} failed: {_where(error)}", file=sys.stderr, flush=True)
            if not status[0]:
                await _send(counted, 500, FAILED)
        finally:
            service.busy -= 1
            route = path if path in self._routes else "other"
            service.metrics.requests.labels(route, str(status[0] or 499)).inc()
            if scope["method"] in ("POST", "PUT"):
                service.metrics.whole.observe(time.monotonic() - began)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message if the request is rejected; None if it is permitted."""
        headers, path = {name: value for name, value in scope["headers"]}, scope["path"]
        token = self._service.options.token
        if token is None and not _is_local(headers.get(b"host", b"").decode("latin-1")):
            return 403, "Host: must be localhost or an address: without a token no other site is answered"
        authorization = headers.get(b"authorization", b"")
        if (
            token is not None
            and path not in OPEN
            and not hmac.compare_digest(authorization, b"Bearer " + token.encode())
        ):
            return 401, "Authorization: must be Bearer and the server's token"
        if self._service.driver.failure is not None and path not in _WATCHED:
            return 503, "the model has failed; the server is ending"
        if self._service.draining and path not in _WATCHED:
            return 503, "the server is shutting down"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._service.options.limits.max_body:
            return 413, f"the body: must be at most {self._service.options.limits.max_body} bytes"
        return None


def _is_local(host: str) -> bool:
    """Whether a Host header is localhost or an IP address. Other names are rejected, because the owner of a web site
    could make the site's name resolve to this machine.

    >>> [_is_local(host) for host in ("localhost:5000", "127.0.0.1", "[::1]:5000", "evil.example:5000")]
    [True, True, True, False]
    """
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or host.rpartition(":")[0].endswith("]") else host
    if name.strip("[]").lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def failure_body(status: int, text: str) -> dict[str, Json]:
    """Return the body of an error response in OpenAI's format."""
    kind = {401: "authentication_error", 503: "server_error", 500: "server_error"}.get(status, "invalid_request_error")
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


async def _send(send: Send, status: int, text: str) -> None:
    body = json.dumps(failure_body(status, text)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers += [(b"retry-after", b"1"), (b"connection", b"close")]
    if status == 401:
        headers += [(b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _where(error: BaseException) -> str:
    """Return the type of an exception, with the function and line that raised the exception."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    place = f" in {innermost.tb_frame.f_code.co_name}:{innermost.tb_lineno}" if innermost is not None else ""
    return f"{type(error).__name__}{place}"
