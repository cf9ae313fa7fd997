"""`mega serve` as a process: a real model on two ranks answers, drains, and does not outlive one of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from mega.cli import main
from tests.support.shared import shared

MODEL = "stories260K_hf"


@contextmanager
def served(*flags: str, model: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server on a free port: its process, address, and what it reported before it listened."""
    command = [sys.executable, "-m", "mega", "serve", model or str(shared(MODEL)), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
            assert lines and lines[-1].startswith("ready: "), lines
            yield process, lines[-1].split()[-1], lines
        finally:
            process.kill()


def test_a_mistake_is_reported_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mega.core.processes.launch.launch", lambda *_: pytest.fail("ranks have started"))
    assert main(["serve", str(shared(MODEL)), "--port", "0", "--tp", "3"]) == 2
    assert "--tp 3: must divide the model's 4 key/value heads" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(shared(MODEL)), "--port", port, "--tp", "2"]) == 2
    assert f"--port {port}: " in capsys.readouterr().err


def ask(url: str, path: str = "/v1/completions", method: str = "POST", **body: Any) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, json.load(found)
    except HTTPError as error:
        return error.code, json.load(error)


def parent(pid: int) -> int:
    """By /proc; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    """Processes of a process, by /proc."""
    parents = {int(place.name): parent(int(place.name)) for place in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for each in found:
        found += [child for child, its in parents.items() if its == each]
    return found[1:]


def sockets(pid: int) -> set[str]:
    links = set()
    for each in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            links.add(os.readlink(each))
        except OSError:
            continue
    return links


def listener(pids: list[int], port: int) -> int:
    """The process that listens on a port."""
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {row.split()[9] for row in table if row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A"}
    return next(pid for pid in pids if any(f"socket:[{inode}]" in sockets(pid) for inode in inodes))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_two_ranks_answer_as_one_and_end_together() -> None:
    case = json.loads((shared(MODEL) / "expected.json").read_text())["cases"][0]
    with served("--tp", "2") as (process, url, lines):
        assert re.search(r"llama, 5 blocks of 64, .* float32 on 2 cpu ranks; loaded in [\d.]+ s", lines[0])
        assert re.search(r"64 requests at once, \d+ tokens in the cache: \d+ requests of 512 tokens each", lines[1])
        length = len(case["greedy_ids"])
        status, found = ask(url, prompt=case["prompt"], max_tokens=length, temperature=0, logprobs=1, ignore_eos=True)
        whole = ask(url, "/detokenize", tokens=[*case["prompt_ids"], *case["greedy_ids"]])[1]["prompt"]
        assert status == 200 and case["prompt"] + found["choices"][0]["text"] == whole
        body = {"prompts": ["Hello world"], "tokens_to_generate": 1}  # as the README's curl
        status, found = ask(url, "/api", "PUT", **body)
        assert status == 200 and found["text"][0].startswith("Hello world")
        pids = descendants(process.pid)
        first = listener(pids, int(url.rpartition(":")[2]))
        other = next(pid for pid in pids if pid != first and parent(pid) == parent(first))
        replies: list[Any] = []
        long = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 32}
        asking = threading.Thread(target=lambda: replies.append(ask(url, **long)))
        asking.start()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(other, signal.SIGKILL)
        assert process.wait(10) not in (0, None) and time.monotonic() - began < 10
        asking.join(10)
        # Its peer hears of it by their exchange or from the launcher, whichever is first.
        reason = replies[0][1]["error"]["message"]
        assert replies[0][0] == 503 and re.search("rank 1 (has ended|was killed by SIGKILL)", reason), reason
        assert process.stdout is not None and "rank 1 was killed by SIGKILL" in process.stdout.read()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_a_stopped_rank_is_named_within_the_time_out() -> None:
    """Requests in flight get 503 with its number, which no exchange of ranks would ever tell."""
    with served("--tp", "2", "--timeout-minutes", "0.25") as (process, url, _):  # ranks meet within it, too
        pids = descendants(process.pid)
        first = listener(pids, int(url.rpartition(":")[2]))
        os.kill(next(pid for pid in pids if pid != first and parent(pid) == parent(first)), signal.SIGSTOP)
        status, found = ask(url, prompt="Once", max_tokens=50, ignore_eos=True)
        told = "rank 1 has not answered for 15 seconds (--timeout-minutes)"
        assert status == 503 and told in found["error"]["message"]
        assert process.wait(90) == 1
        assert process.stdout is not None and f"mega: rank 0: {told}: it is stopped" in process.stdout.read()


def test_sigterm_lets_answers_finish() -> None:
    with served("--temperature", "0", "--max-length", "64") as (process, url, _):
        replies: list[Any] = []
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "n": 8}
        asking = threading.Thread(target=lambda: replies.append(ask(url, **body)))
        asking.start()
        deadline = time.monotonic() + 20
        while "mega_sequences_in_flight 0" in urllib.request.urlopen(f"{url}/metrics").read().decode():
            if replies or time.monotonic() > deadline:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
        asking.join(10)
        assert replies[0][0] == 200 and len({choice["text"] for choice in replies[0][1]["choices"]}) == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("serve", "CHECKPOINT is missing"),
        ("serve nowhere", "nowhere"),
        ("serve {model} --load {model}", "excludes the checkpoint"),
        ("serve {model} --host 0.0.0.0", "--host 0.0.0.0: others can reach it"),
        ("serve {model} --cuda-graph --adapter a=b", "--cuda-graph: excludes --adapter"),
        ("serve {model} --top-p 2", "--top-p 2.0: must be"),
        ("serve {model} --chat-template none", "--chat-template none"),
        ("serve {model} --token-file {model}/config.json", "--token-file"),
    ],
)
def test_a_mistake_is_named_before_anything_listens(line: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line.format(model=shared(MODEL)).split()) == 2
    assert text in capfd.readouterr().err
