"""Send PUT /api requests to a mega or Megatron-LM server, for one prompt or for prompts typed at a terminal.

This process does not load a model.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from mega.core.untrusted import Json

MOST_BYTES = 64 << 20
"""Maximum size of an answer in bytes."""
WAIT_SECONDS = 600.0


def ask(url: str, prompt: str, tokens: int, **fields: object) -> str:
    """Return the prompt with its continuation. url: HOST:PORT, or the complete address of a server. fields: additional
    request fields.

    Errors: ValueError for an invalid address or with the server's error message; OSError if the server does not answer.
    """
    reply = _put(url, {"prompts": [prompt], "tokens_to_generate": tokens, **fields})
    texts = reply.get("text") if isinstance(reply, dict) else None
    if not isinstance(texts, list) or not texts or not isinstance(texts[0], str):
        raise ValueError(f"--url {url}: {message_of(reply)}")
    return texts[0]


def converse(url: str, fields: Mapping[str, object], read: Callable[[str], str] = input) -> None:
    """Until the input ends, read prompts and numbers of tokens to generate, as Megatron-LM's text_generation_cli.py
    does."""
    while True:
        try:
            prompt = read("Enter prompt: ")
            tokens = read("Enter number of tokens to generate: ")
        except EOFError:
            return
        try:
            print("Megatron Response: ")
            print(ask(url, prompt, _whole(tokens), **fields), flush=True)
        except ValueError as error:
            print(f"Error {error}", flush=True)


def fields_of(sampling: Mapping[str, float], beams: int, length_penalty: float | None) -> dict[str, Json]:
    """Convert flags of `mega generate` to fields of PUT /api, some of which must be floats. The server's default
    applies to each field whose flag was not given.

    >>> fields_of({"temperature": 0.0, "seed": 0}, 0, None)
    {'top_k': 1}
    >>> fields_of({"temperature": 1.0, "top_k": 0, "top_p": 1, "top_p_decay": 0, "seed": 0}, 0, None)
    {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'random_seed': 0}
    """
    if beams:
        return {"beam_width": beams, **({} if length_penalty is None else {"length_penalty": float(length_penalty)})}
    if sampling.get("temperature") == 0:
        return {"top_k": 1}
    fields: dict[str, Json] = {}
    for name, value in sampling.items():
        if value or name not in ("top_p_decay", "top_p_bound"):  # Megatron-LM rejects 0 in these fields
            fields["random_seed" if name == "seed" else name] = float(value) if name.startswith("top_p") else value
    return fields


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r}: must be a whole number")
    return int(text)


def connected(url: str, route: str) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """Return a connection to a server, the path of a route, and request headers. Errors: ValueError for an invalid
    address."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"--url {url}: must be HOST:PORT, or http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port or (5000 if "//" not in url else None), timeout=WAIT_SECONDS)
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if os.environ.get("MEGA_TOKEN"):
        headers["Authorization"] = f"Bearer {os.environ['MEGA_TOKEN']}"
    base = parts.path.rstrip("/")
    return connection, base.removesuffix(route).removesuffix("/v1") + route, headers


def _put(url: str, body: Mapping[str, object]) -> object:
    connection, path, headers = connected(url, "/api")
    try:
        connection.request("PUT", path, json.dumps(body).encode(), headers)
        reply = connection.getresponse()
        data = reply.read(MOST_BYTES + 1)
    except (http.client.HTTPException, OSError) as error:
        raise OSError(f"--url {url}: no answer: {error or type(error).__name__}") from None
    finally:
        connection.close()
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"--url {url}: {reply.status}: the answer is not JSON") from None
    if reply.status != 200:
        raise ValueError(f"--url {url}: {reply.status}: {message_of(answer)}")
    return answer


def message_of(found: object) -> str:
    """Return the message of an error response in Flask's, OpenAI's or Megatron-LM's format."""
    if isinstance(found, dict):
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    return " ".join(str(found).split())[:300]
