"""A server against hostile clients: requests whose fields are good or bad by construction, random bodies, attacks that
exhaust, clients that vanish, hostile templates. No 5xx, no 200 for a bad request, no hang, and it answers to the end.

    python tests/battery/serve_fuzz.py                  on stories260K of the shared data
    SERVE_FUZZ_TP=2 python tests/battery/serve_fuzz.py  on two ranks

Needs the extra `serve`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import ROOT, Item, run
from tests.support.shared import shared

CASES, BODIES, ITEM, CLIENTS = 20_000, 5_000, 500, 8
HANG_SECONDS = 30.0


class Target(NamedTuple):
    """The server under test."""

    port: int
    process: subprocess.Popen[str]

    def ask(self, method: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            found = connection.getresponse()
            return found.status, found.read()
        finally:
            connection.close()

    def resident(self) -> int:
        """kB of memory of the server and its children."""
        total = 0
        for place in Path("/proc").glob("[0-9]*/status"):
            try:
                text = place.read_text()
            except OSError:
                continue
            fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            if int(place.parent.name) == self.process.pid or int(fields["PPid"]) == self.process.pid:
                total += int(fields.get("VmRSS", "0 kB").split()[0])
        return total


# --- fields: good and bad by construction -------------------------------------------------------------------------

Values = dict[str, tuple[list[Any], list[Any]]]
WRONG: list[Any] = ["x", [], {}, [1], {"a": 1}, True, -1, 1.5, 10**30, "", "\x00", "😀" * 50]


def without(*kinds: type) -> list[Any]:
    """Values of none of these kinds; a bool is no number."""
    return [value for value in WRONG if type(value) not in kinds]


NUMBERS: Values = {
    "temperature": ([0, 0.5, 1, 100], [-1, 101, *without(int, float)]),
    "top_p": ([0.1, 1, 1.0], [0, -0.1, 1.1, 2, *without(int, float)]),
    "top_k": ([0, 1, 50, 1000], [-1, 1 << 40, 1.5, *without(int)]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1, *without(int, float)]),
    "repetition_penalty": ([1, 1.5, 0.5], [0, -1, 1e9, *without(int, float)]),
    "seed": ([0, 1, 2**63, -5], [2**64, 1.5, *without(int)]),
    "n": ([1, 2, 3], [0, -1, 129, 10**6, *without(int)]),
    "stop": (["a", ["a", "b"], []], ["", [""], ["a"] * 17, [1], 5, {}, True, "a" * 257]),
    "presence_penalty": ([0, 0.0], [1, -1, *without(int, float)]),
    "frequency_penalty": ([0], [0.5, *without(int, float)]),
    "logit_bias": ([{}], [{"1": 5}, [], 5, "x", True]),
    "ignore_eos": ([True, False], without(bool)),
    "user": (["me"], without(str)),
    "metadata": ([{}, {"a": "b"}], ["x", 5, []]),
    "model": ([], ["gpt-4", 5, [], True, ""]),
    "chat_template": ([], ["{{ 1 }}", "{% for i in range(10**9) %}{% endfor %}"]),
    "response_format": (
        [{"type": "text"}],
        [{"type": "x"}, {}, 5, "json", {"type": "regex"}, {"type": "regex", "pattern": 5}],
    ),
}
COMPLETION: Values = {
    "prompt": (
        ["Once", ["a", "b"], [5, 6], [[5], [6, 7]], "", "é😀", [""]],
        [[], 5, True, {}, [[]] * 200, [-1], [10**9], ["a", 5], [1.5], [None], [[["a"]]], "x" * 100_000, [5] * 5000],
    ),
    "max_tokens": ([1, 2, 4], [-1, 10**12, 1.5, *without(int)]),
    "logprobs": ([0, 1, 5], [-1, 21, *without(int)]),
    "echo": ([True, False], without(bool)),
    "best_of": ([1], [2, 0, *without(int)]),
    "suffix": ([""], ["x", 5]),
    **NUMBERS,
}
USER = {"role": "user", "content": "Hi"}
CHAT: Values = {
    "messages": (
        [[USER], [{"role": "system", "content": "s"}, USER], [{**USER, "content": [{"type": "text", "text": "a"}]}]],
        [
            [],
            "x",
            5,
            {},
            [5],
            [{}],
            [{"role": "x", "content": "a"}],
            [{**USER, "content": 5}],
            [USER] * 2000,
            [{**USER, "name": "x"}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": [], "content": "a"}],
        ],
    ),
    "max_tokens": ([1, 2], [0, -1, 10**12, *without(int)]),
    "logprobs": ([True, False], without(bool)),
    "tools": ([[]], [[{}], "x", 5]),
    **NUMBERS,
}
MEGATRON: Values = {
    "prompts": (
        [["Once"], ["a", "b"], ["é😀"]],
        ["x", 5, [], {}, [5], [None], [[]], ["a"] * 129, [""], ["x" * 100_000], True],
    ),
    "tokens_to_generate": ([1, 2, 3], [-1, 10**12, 1.5, *without(int)]),
    "logprobs": ([True, False], without(bool)),
    "temperature": ([0.5, 1, 100], [0, -1, 101, *without(int, float)]),
    "top_k": ([0, 1, 1000], [-1, 1001, 1.5, *without(int)]),
    "top_p_bound": ([], [0.5, 1, "x"]),
    "top_p_decay": ([], [0.5, 1, "x"]),
    "add_BOS": ([True, False], without(bool)),
    "stop_on_eol": ([True, False], without(bool)),
    "stop_on_double_eol": ([True, False], without(bool)),
    "prevent_newline_after_colon": ([True, False], without(bool)),
    "random_seed": ([0, 5], [-1, 1.5, *without(int)]),
    "no_log": ([True, False], without(bool)),
    "beam_width": ([], [0, -1, 10**6, 1.5, *without(int)]),
    "stop_token": ([], [5, "x"]),
    "max_len": ([], [5]),
    "sentences": ([], [["a"]]),
    "foo": ([], [1]),
}
IDS: Values = {"tokens": ([[5], [1, 2, 3]], [5, "x", [-1], [10**9], ["a"], [1.5], [True]])}
TEXT: Values = {"prompt": (["a", ""], [5, [], {}, True]), "add_special_tokens": ([True, False], without(bool))}
ROUTES: list[tuple[str, str, Values, dict[str, Any]]] = [
    ("POST", "/v1/completions", COMPLETION, {"prompt": "Once", "max_tokens": 2}),
    ("POST", "/v1/chat/completions", CHAT, {"messages": [USER], "max_tokens": 2}),
    ("PUT", "/api", MEGATRON, {"prompts": ["Once"], "tokens_to_generate": 2}),
    ("POST", "/tokenize", TEXT, {"prompt": "a"}),
    ("POST", "/detokenize", IDS, {"tokens": [5]}),
]


def case(rng: random.Random) -> tuple[str, str, dict[str, Any], bool]:
    """Method, path, body, and whether it must be refused."""
    method, path, values, base = rng.choice(ROUTES)
    body, bad = dict(base), False
    for name in rng.sample(sorted(values), rng.randint(1, min(4, len(values)))):
        good, wrong = values[name]
        take_bad = not good or (wrong and rng.random() < 0.4)
        body[name] = rng.choice(wrong if take_bad else good)
        bad = bad or bool(take_bad)
    if path == "/v1/completions" and body.get("echo") and body.get("response_format"):
        bad = True
    return method, path, body, bad


def fields(target: Target, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return asked(target, [case(rng) for _ in range(ITEM)])


def asked(target: Target, cases: list[tuple[str, str, Any, bool]]) -> dict[str, Any]:
    """Statuses of all, the slowest, and what was wrong with which."""
    wrong: list[Any] = []
    statuses: Counter[int] = Counter()
    seconds: list[float] = []

    def one(each: tuple[str, str, Any, bool]) -> None:
        method, path, body, bad = each
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        began = time.monotonic()
        try:
            status, reply = target.ask(method, path, data)
        except Exception as error:
            status, reply = 0, repr(error).encode()
        seconds.append(time.monotonic() - began)
        statuses[status] += 1
        if status == 0 or status >= 500 or (bad and status < 400) or (not bad and status != 200):
            wrong.append([method, path, data[:300].decode("latin-1"), bad, status, reply[:300].decode("latin-1")])

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, cases))
    return {"statuses": statuses, "slowest": round(max(seconds), 3), "wrong": wrong[:10], "failed": len(wrong)}


def bodies(target: Target, seed: int) -> dict[str, Any]:
    """Random bytes, mutated JSON, and JSON that is nested, huge or not UTF-8: none is a valid request."""
    rng = random.Random(seed)
    return asked(target, [(*rng.choice([(m, p) for m, p, *_ in ROUTES]), body(rng), True) for _ in range(ITEM)])


def body(rng: random.Random) -> bytes:
    start = b'{"prompt": "Once", "max_tokens": 2'
    kinds: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: start + b', "x": ' + rng.randbytes(8) + b"}",
        lambda: start[: rng.randrange(len(start))],
        lambda: b"[" * rng.randrange(1, 100_000),
        lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        lambda: start + b', "seed": ' + b"9" * rng.randrange(200, 9000) + b"}",
        lambda: start + b', "temperature": ' + rng.choice([b"NaN", b"Infinity", b"1e999", b"-Infinity"]) + b"}",
        lambda: rng.choice([b"null", b"true", b"5", b'"x"', b"[]", b"{}", b"[{}]", b""]),
        lambda: start.replace(b"Once", b"\xff\xfe") + b"}",
        lambda: b"\xef\xbb\xbf" + start + b', "u": 1}',
    ]
    return rng.choice(kinds)()


# --- attacks ------------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


_WATCH = """
import http.client, json, select, sys, time
found = []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    began = time.monotonic()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
    except OSError:
        status = 0
    found.append((time.monotonic() - began, status))
print(json.dumps(found))
"""


class Watch:
    """How long /health takes meanwhile, seen from a process of its own."""

    def __init__(self, target: Target) -> None:
        command = [sys.executable, "-c", _WATCH, str(target.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds, self.failed = list[float](), 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        found = json.loads(self._process.communicate("end\n", timeout=60)[0])
        self.seconds, self.failed = [each[0] for each in found], sum(each[1] != 200 for each in found)

    def result(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "health_p50": round(statistics.median(ordered), 4),
            "health_p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
            "health_asked": len(ordered),
            "health_failed": self.failed,
        }


def raw(target: Target, parts: Iterator[bytes], seconds: float = 60.0) -> int:
    """The status of the answer to these bytes; 0 for none."""
    with socket.create_connection(("127.0.0.1", target.port), timeout=seconds) as connection:
        with contextlib.suppress(OSError):  # it is cut: the answer is there
            for part in parts:
                connection.sendall(part)
        try:
            return int(connection.recv(1 << 12).split(b" ")[1])
        except (OSError, IndexError):
            return 0


def json_status(target: Target, **given: Any) -> int:
    return target.ask("POST", "/v1/completions", json.dumps({"prompt": "a", **given}).encode())[0]


def large_body(target: Target) -> list[int]:
    mib = b" " * (1 << 20)
    chunk = b"100000\r\n" + mib + b"\r\n"
    return [
        raw(target, iter([HEAD + b"Content-Length: 1073741824\r\n\r\n", *[mib] * 1024])),
        raw(target, iter([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 1024])),
    ]


def large_header(target: Target) -> list[int]:
    return [raw(target, iter([b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n"]))]


def numbers(target: Target) -> list[int]:
    found = [
        json_status(target, max_tokens=10**12),
        json_status(target, n=10**6),
        json_status(target, prompt=["a"] * 10**4),
    ]
    long = json.dumps({"prompts": ["a"] * 10**4}).encode()
    return [*found, target.ask("PUT", "/api", long)[0], target.ask("POST", "/v1/completions", b"[" * 10**5)[0]]


def slow(target: Target) -> list[int]:
    """200 clients that send a byte of their headers, or of their body, a second."""
    clients = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(200)]
    for number, client in enumerate(clients):
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n" if number % 2 else b"POST")
    found: dict[int, int] = {}
    deadline = time.monotonic() + 60
    while len(found) < len(clients) and time.monotonic() < deadline:
        for number, client in enumerate(clients):
            if number in found:
                continue
            client.settimeout(0.001)
            try:
                client.sendall(b"x")
                answer = client.recv(1 << 12)
                found[number] = int(answer.split(b" ")[1]) if answer else 0
            except TimeoutError:
                continue
            except OSError:
                found[number] = 0
        time.sleep(1)
    for client in clients:
        client.close()
    return [found.get(number, -1) for number in range(len(clients))]


def connections(target: Target) -> list[int]:
    """5,000 connections that ask nothing."""
    clients, refused = [], 0
    for _ in range(5000):
        try:
            clients.append(socket.create_connection(("127.0.0.1", target.port), timeout=5))
        except OSError:
            refused += 1
    time.sleep(3)
    for client in clients:
        client.close()
    return [429] * (len(clients) > 0) + [0] * refused


def queue(target: Target) -> list[int]:
    """10,000 prompts at a time, in requests of 16."""
    with ThreadPoolExecutor(200) as pool:
        return list(pool.map(lambda _: json_status(target, prompt=["a"] * 16, max_tokens=2), range(625)))


def pipelined(target: Target) -> list[int]:
    return [raw(target, iter([b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000]))]


def slow_readers(target: Target) -> list[int]:
    """50 clients that ask for the page and read nothing."""
    clients = []
    for _ in range(50):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", target.port))
        client.settimeout(5)
        with contextlib.suppress(OSError):
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        clients.append(client)
    time.sleep(3)
    for client in clients:
        client.close()
    return [400]


ATTACKS: dict[str, tuple[Callable[[Target], list[int]], set[int]]] = {
    "1 GiB body": (large_body, {413}),
    "1 MB header": (large_header, {400, 431}),
    "10^12 tokens, n 10^6, 10^4 prompts, depth 10^5": (numbers, {400, 413, 422}),
    "200 slow clients": (slow, {400, 408, 0}),
    "5,000 connections": (connections, {429}),
    "10^4 prompts in 625 requests": (queue, {200, 429}),
    "5,000 pipelined requests": (pipelined, {200}),
    "50 clients that read nothing": (slow_readers, {400}),
}
"""Name -> the attack, and which statuses are answers to it; 0: the connection was closed."""


def exhaust(target: Target, name: str) -> dict[str, Any]:
    attack, expected = ATTACKS[name]
    before = target.resident()
    with Watch(target) as watch:
        began = time.monotonic()
        found = attack(target)
        seconds = time.monotonic() - began
        time.sleep(1)
    growth = target.resident() / before - 1
    health = watch.result()
    statuses = Counter(found)
    failed = (
        len(set(statuses) - expected) + (health["health_p99"] >= 1) + (health["health_failed"] > 0) + (growth >= 0.1)
    )
    return {"statuses": statuses, "seconds": round(seconds, 1), "memory": f"{growth:+.1%}", **health, "failed": failed}


def vanish(target: Target, seed: int) -> dict[str, Any]:
    """50 clients that leave in the middle, streamed or not; then nothing is in flight."""
    rng = random.Random(seed)

    def one(number: int) -> None:
        stream = {"stream": True} if number % 2 else {}
        data = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, **stream}).encode()
        client = socket.create_connection(("127.0.0.1", target.port))
        client.sendall(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(rng.random())
        client.close()

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(one, range(50)))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = target.ask("GET", "/metrics", b"")[1].decode()
        left = next(line for line in text.splitlines() if line.startswith("mega_sequences_in_flight "))
        if left.endswith(" 0"):
            break
        time.sleep(0.05)
    return {"left": left, "failed": int(not left.endswith(" 0")) + (json_status(target, max_tokens=2) != 200)}


EXPRESSIONS = """''.__class__
''.__class__.__mro__
[].__class__.__base__.__subclasses__()
self.__init__.__globals__
cycler.__init__.__globals__.os.popen('id').read()
lipsum.__globals__['os'].system('id')
config
request
messages.__class__
messages.append(1)
messages.clear()
raise_exception.__globals__
namespace.__init__
''|attr('__class__')
(1).__class__.__bases__
range.__class__
'%s' % 10**10**8
10**10**8
2**2**40
'{0.__class__}'.format(1)
joiner.__init__.__globals__
dict.__base__
''.format_map
open('/etc/passwd')""".splitlines()
TEMPLATES = [
    *[f"{{% for i in range({size}) %}}x{{% endfor %}}" for size in ("10**6", "10**7", "10**8", "10**9", "2**62")],
    *[f"{{{{ 'x' * {size} }}}}" for size in ("10**7", "10**8", "10**9", "2**62")],
    *["{% for a in range(99999) %}" * depth + "{% endfor %}" * depth for depth in (2, 3, 5, 20)],
    *[f"{{{{ {expression} }}}}" for expression in EXPRESSIONS],
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages",
    "{% for",
    "{% set x = namespace(y=[]) %}{% for i in range(10**9) %}{% set x.y = x.y + [i] %}{% endfor %}",
]


def templates(_: Target, number: int) -> dict[str, Any]:
    """A hostile template is refused, or renders to text that says nothing of the machine, within its limits."""
    from mega.core.text.chat.format import ChatFormat
    from tests.inference.server.conftest import ByteTokenizer

    began = time.monotonic()
    try:
        made = ChatFormat(TEMPLATES[number], ByteTokenizer(), "the chat template", seconds=1)
        shown = ByteTokenizer().decode(made.prompt([{"role": "user", "content": "a"}]))
        bad = "class" in shown or "root:" in shown or "uid=" in shown or len(shown) > 1 << 20
    except ValueError as error:
        shown, bad = str(error)[:120], False
    seconds = time.monotonic() - began
    return {"template": TEMPLATES[number][:80], "shown": shown[:120], "seconds": round(seconds, 1), "failed": int(bad)}


# --- the run ------------------------------------------------------------------------------------------------------


@functools.cache
def target() -> Target:
    """The server, started for the first item that needs it; it ends with this process."""
    tp = os.environ.get("SERVE_FUZZ_TP", "1")
    flags = ["--port", "0", "--tp", tp, "--chat-template", "plain"]
    command = [sys.executable, "-m", "mega", "serve", str(shared("stories260K_hf")), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(process.terminate)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready: "):
            return Target(int(line.rpartition(":")[2]), process)
    raise SystemExit("the server has not started")


def proven(work: Callable[[Target, Any], dict[str, Any]], given: Any) -> dict[str, Any]:
    """What `work` found. Errors: AssertionError where anything failed, or the server has ended."""
    found = work(target(), given)
    if found.pop("failed") or target().process.poll() is not None:
        print(json.dumps(found), file=sys.stderr, flush=True)
        raise AssertionError(json.dumps(found))
    return found


def items() -> Iterator[Item]:
    """Name and work of every item."""
    parts: list[tuple[str, Callable[[Target, Any], dict[str, Any]], Iterable[Any]]] = [
        ("exhaust", exhaust, ATTACKS),
        ("vanish", vanish, range(4)),
        ("fields", fields, range(CASES // ITEM)),
        ("bodies", bodies, range(BODIES // ITEM)),
        ("templates", templates, range(len(TEMPLATES))),
    ]
    for name, work, all_given in parts:
        for given in all_given:
            yield f"{name} {given}", functools.partial(proven, work, given)


if __name__ == "__main__":
    run("serve_fuzz", items())
