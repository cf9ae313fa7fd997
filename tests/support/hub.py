"""A server of the Hub's protocol on loopback: lists, files by ranges, tokens, cut connections, uploads.

It has what huggingface_hub asks for when it downloads and uploads without Xet, and no more.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SMALL = 1 << 10
"""Bytes up to which a file is kept in git, without a sha256 in the list."""

COMMIT = "c0" * 20


@dataclass
class Hub:
    """repositories: (kind, name) -> path -> bytes. private, gated: names. tokens: valid ones. cut: bytes after which
    answers with files end too early, one for each such answer. overloaded: whether every answer is 503. asked: method,
    path and Range of every request."""

    repositories: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=lambda: {"hf_good"})
    cut: list[int] = field(default_factory=list)
    overloaded: bool = False
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    endpoint: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200, **headers: str) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        body = self._body() if self.command in ("POST", "PUT") else b""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.hub.overloaded:
            self._json({"error": "overloaded"}, 503)
        elif token and token not in self.hub.tokens:
            self._json({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.command == "PUT":
            self.hub.uploads[path.rpartition("/")[2]] = body
            self._answer(200)
        elif self.command == "POST" and not token:
            self._json({"error": "no token"}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.repositories.setdefault(("models", name), {})
            self._json({"url": f"{self.hub.endpoint}/{name}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\w+)/([^/]+))?(?:/.*)?", path):
            self._api(*found.groups(), token, body)  # type: ignore[arg-type]
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            self._file("datasets" if found[1] else "models", found[2], found[3], found[4], token)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            hrefs = {each["oid"]: f"{self.hub.endpoint}/lfs/{each['oid']}" for each in objects}
            answers = [{**each, "actions": {"upload": {"href": hrefs[each["oid"]]}}} for each in objects]
            self._json({"transfer": "basic", "objects": answers})
        else:
            self._json({"error": "not found"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _refused(self, kind: str, name: str, revision: str, token: str) -> bool:
        if (kind, name) not in self.hub.repositories or (name in self.hub.private and not token):
            self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif name in self.hub.gated:
            self._json({"error": "Access is restricted"}, 403, X_Error_Code="GatedRepo")
        elif revision not in ("main", "v1", COMMIT):
            self._json({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        else:
            return False
        return True

    def _api(self, kind: str, name: str, act: str | None, revision: str | None, token: str, body: bytes) -> None:
        if self._refused(kind, name, revision or "main", token):
            return
        files = self.hub.repositories[kind, name]
        if act == "tree":
            self._json([_listed(path, data) for path, data in files.items()])
        elif act == "preupload":
            asked = json.loads(body)["files"]
            modes = ["lfs" if each["size"] > SMALL else "regular" for each in asked]
            plans = [{"path": each["path"], "uploadMode": mode} for each, mode in zip(asked, modes)]
            self._json({"files": [{**plan, "shouldIgnore": False} for plan in plans]})
        elif act == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.uploads[value["oid"]]
            self._json(
                {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
            )
        else:
            self._json(
                {
                    "id": name,
                    "sha": COMMIT,
                    "private": name in self.hub.private,
                    "siblings": [{"rfilename": path} for path in files],
                }
            )

    def _file(self, kind: str, name: str, revision: str, path: str, token: str) -> None:
        if self._refused(kind, name, revision, token):
            return
        data = self.hub.repositories[kind, name].get(path)
        if data is None:
            self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        first = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        facts: dict[str, str] = {"ETag": f'"{_oid(data)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if first:
            facts["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        facts["Content_Length"] = str(len(data) - first)
        part = data[first:]
        if self.command == "GET" and len(data) > SMALL and self.hub.cut:
            part, self.close_connection = part[: self.hub.cut.pop(0)], True
        self._answer(206 if first else 200, part, **facts)


def _oid(data: bytes) -> str:
    if len(data) > SMALL:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _listed(path: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
    if len(data) > SMALL:
        row["lfs"] = {"oid": _oid(data), "size": len(data), "pointerSize": 130}
    else:
        row["oid"] = _oid(data)
    return row


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers at its `endpoint`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
