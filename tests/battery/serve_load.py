"""A server under mixed load for long: streams, chats, beams, schemas, adapters, mistakes and clients that vanish, among
canaries whose answers are those of the same requests alone, to the bit; memory and file descriptors stay flat. Then
SIGTERM under load, and a rank that is killed.

    python tests/battery/serve_load.py                       an hour
    SERVE_LOAD_MINUTES=15 python tests/battery/serve_load.py  less

On stories260K of the shared data, with adapters of random values. Needs the extra `serve`, and Linux.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import ROOT, Item, run
from tests.battery.serve_fuzz import Target
from tests.inference.server.test_serve import descendants, listener, parent
from tests.support.shared import shared

MINUTES = float(os.environ.get("SERVE_LOAD_MINUTES", "60"))
CLIENTS, EVERY = 6, 5.0
GROWTH = 0.05
"""Of memory, from the first third of the time to the last."""
WORDS = "Once upon a time there was a little dog and a big red ball in the park".split()


@contextlib.contextmanager
def served(*flags: str, model: str = "stories260K_hf") -> Iterator[Target]:
    """A server of its own on a free port. model: a folder of the shared data."""
    command = [sys.executable, "-m", "mega", "serve", str(shared(model)), "--port", "0", *flags]
    if model == "stories260K_hf":
        command += ["--chat-template", "plain"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready: "):
                yield Target(int(line.rpartition(":")[2]), process)
                return
        raise AssertionError("the server has not started")
    finally:
        process.kill()
        process.wait()


def adapter(place: Path, seed: int) -> None:
    """One in peft's form, of random values."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((shared("stories260K_hf") / "config.json").read_text())
    rows = {"q_proj": config["hidden_size"], "v_proj": config["hidden_size"] // config["num_attention_heads"]}
    rows["v_proj"] *= config["num_key_value_heads"]
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for linear, outs in rows.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{linear}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, config["hidden_size"], generator=draw) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outs, 4, generator=draw) / 2
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(rows), "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps(told))


def ask(target: Target, path: str, method: str = "POST", **body: Any) -> tuple[int, Any]:
    status, data = target.ask(method, path, json.dumps(body).encode())
    return status, json.loads(data)


# --- mixed load ---------------------------------------------------------------------------------------------------


def canary(target: Target, number: int) -> Any:
    """What does not depend on what else is in flight: text, ids and log-probabilities."""
    model = [None, "one", "two"][number % 3]
    body: dict[str, Any] = {
        "prompt": " ".join(WORDS[: 3 + number]),
        "max_tokens": 24,
        "logprobs": 3,
        "ignore_eos": True,
    }
    body |= {"seed": number, "temperature": 0.0 if number % 2 else 1.0, **({"model": model} if model else {})}
    status, found = ask(target, "/v1/completions", **body)
    return status, found["choices"][0] if status == 200 else found


class Mix:
    """What clients ask, at random; what came of it."""

    def __init__(self, target: Target) -> None:
        self.target, self.statuses, self.wrong = target, Counter[str](), list[str]()
        self.expected = [canary(target, number) for number in range(12)]
        self.stop = threading.Event()

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        kinds: list[Callable[[random.Random], str]] = [self._canary, self._canary, self._stream, self._vanish]
        kinds += [self._chat, self._megatron, self._beam, self._schema, self._mistake, self._tokens]
        while not self.stop.is_set():
            kind = rng.choice(kinds)
            try:
                self.statuses[f"{kind.__name__[1:]} {kind(rng)}"] += 1
            except Exception as error:
                self.wrong.append(f"{kind.__name__[1:]}: {type(error).__name__}: {error}"[:200])

    def _prompt(self, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))

    def _checked(self, kind: str, status: int, wanted: int, fine: bool = True) -> str:
        if status != wanted or not fine:
            self.wrong.append(f"{kind}: {status}")
        return str(status)

    def _canary(self, rng: random.Random) -> str:
        number = rng.randrange(len(self.expected))
        found = canary(self.target, number)
        return self._checked(f"canary {number}", found[0], 200, found == self.expected[number])

    def _stream(self, rng: random.Random, leave: bool = False) -> str:
        body = {"prompt": self._prompt(rng), "max_tokens": rng.randrange(1, 60), "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if leave:
                reply.read(200)
                return str(reply.status)
            return self._checked("stream", reply.status, 200, reply.read().endswith(b"data: [DONE]\n\n"))
        finally:
            connection.close()

    def _vanish(self, rng: random.Random) -> str:
        return self._stream(rng, leave=True)

    def _chat(self, rng: random.Random) -> str:
        talk = [{"role": "user", "content": self._prompt(rng)}]
        status, found = ask(self.target, "/v1/chat/completions", messages=talk, max_tokens=12, model="one", n=2)
        return self._checked("chat", status, 200, len(found.get("choices", ())) == 2)

    def _megatron(self, rng: random.Random) -> str:
        prompts = [self._prompt(rng) for _ in range(3)]
        fields: dict[str, Any] = {"tokens_to_generate": 9, "top_p": 0.9, "random_seed": 3, "logprobs": True}
        status, found = ask(self.target, "/api", "PUT", prompts=prompts, **fields)
        return self._checked("megatron", status, 200, len(found["text"]) == 3)

    def _beam(self, rng: random.Random) -> str:
        fields: dict[str, Any] = {"tokens_to_generate": 8, "beam_width": 3, "stop_token": 1}
        status, found = ask(self.target, "/api", "PUT", prompts=[self._prompt(rng)], **fields)
        return self._checked("beam", status, 200, len(found["scores"]) == 3)

    def _schema(self, rng: random.Random) -> str:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}
        given: dict[str, Any] = {"prompt": self._prompt(rng), "max_tokens": 60, "response_format": form}
        status, found = ask(self.target, "/v1/completions", **given)
        choice = found["choices"][0]
        fine = choice["finish_reason"] == "length" or json.loads(choice["text"])["a"] in (1, 22)
        return self._checked("schema", status, 200, fine)

    def _mistake(self, rng: random.Random) -> str:
        bad: dict[str, Any] = rng.choice(
            [{"top_k": -1}, {"model": "x"}, {"max_tokens": 10**9}, {"what": 1}, {"temperature": "x"}]
        )
        status, _ = ask(self.target, "/v1/completions", prompt="a", **bad)
        return self._checked("mistake", status, 404 if "model" in bad else 400)

    def _tokens(self, rng: random.Random) -> str:
        text = self._prompt(rng)
        ids = ask(self.target, "/tokenize", prompt=text)[1]["tokens"]
        status, found = ask(self.target, "/detokenize", tokens=ids)
        return self._checked("tokens", status, 200, found["prompt"].strip() == text)


def descriptors(target: Target) -> int:
    return len(list(Path(f"/proc/{target.process.pid}/fd").iterdir()))


def soak() -> dict[str, Any]:
    """Mixed load for MINUTES. Errors: AssertionError with what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--batch-invariant", "--max-requests", "16"]
        for seed, name in enumerate(("one", "two")):
            adapter(Path(folder) / name, seed)
            flags += ["--adapter", f"{name}={folder}/{name}"]
        with served(*flags) as target:
            mix, memory, files = Mix(target), list[int](), list[int]()
            threads = [threading.Thread(target=mix.client, args=(seed,)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            end = time.monotonic() + 60 * MINUTES
            while time.monotonic() < end and target.process.poll() is None:
                time.sleep(EVERY)
                memory.append(target.resident())
                files.append(descriptors(target))
            mix.stop.set()
            for thread in threads:
                thread.join(90)
            time.sleep(1)
            left = target.ask("GET", "/metrics", b"")[1].decode()
            idle = "mega_sequences_in_flight 0" in left
            rest = descriptors(target)
    third = max(1, len(memory) // 3)
    early, late = statistics.median(memory[:third]), statistics.median(memory[-third:])
    found = {
        "minutes": MINUTES,
        "asked": sum(mix.statuses.values()),
        "statuses": dict(sorted(mix.statuses.items())),
        "memory_mb": [round(early / 1024, 1), round(late / 1024, 1)],
        "descriptors": [max(files[:third]), max(files[-third:]), rest],
    }
    assert not mix.wrong and idle, {**found, "idle": idle, "wrong": len(mix.wrong), "first": mix.wrong[:3]}
    assert late < early * (1 + GROWTH) and max(files[-third:]) <= max(files[:third]) + 2, found
    return found


# --- endings ------------------------------------------------------------------------------------------------------


def under_load(target: Target, count: int, then: Callable[[], None]) -> list[int]:
    """The statuses of requests, streamed or not, that are in flight when `then` is done; 0: no connection."""

    def one(number: int) -> int:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": number % 2 == 1}
        try:
            status, data = target.ask("POST", "/v1/completions", json.dumps(body).encode())
        except OSError:
            return 0
        return 503 if b'"error"' in data and status == 200 else status  # as the last event of a stream

    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(one, number) for number in range(count)]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and "in_flight 0" in target.ask("GET", "/metrics", b"")[1].decode():
            time.sleep(0.01)
        then()
        return [each.result() for each in found]


def sigterm(seconds: str) -> dict[str, Any]:
    with served("--drain-seconds", seconds) as target:
        statuses = Counter(under_load(target, 40, target.process.terminate))
        code = target.process.wait(60)
    assert code == 0 and set(statuses) <= {200, 503} and statuses[200] + statuses[503] == 40, (code, statuses)
    return {"statuses": statuses, "exit": code}


def killed(rank: int) -> dict[str, Any]:
    """Rank `rank` of two is killed under load."""
    with served("--tp", "2") as target:
        pids = descendants(target.process.pid)
        first = listener(pids, target.port)
        other = next(pid for pid in pids if pid != first and parent(pid) == parent(first))
        began = [0.0]

        def kill() -> None:
            began[0] = time.monotonic()
            os.kill((first, other)[rank], signal.SIGKILL)

        statuses = Counter(under_load(target, 8, kill))
        code = target.process.wait(30)
        seconds = time.monotonic() - began[0]
        assert target.process.stdout is not None
        shown = target.process.stdout.read()
    assert code != 0 and seconds < 10 and set(statuses) <= {503, 0}, (code, seconds, statuses)
    assert f"rank {rank} was killed by SIGKILL" in shown, shown
    return {"statuses": statuses, "exit": code, "ended_after": round(seconds, 1)}


def items() -> Iterator[Item]:
    """Name and work of every item."""
    for seconds in ("0.2", "30"):
        for number in range(3):
            yield f"sigterm, {seconds} s to drain, {number}", partial(sigterm, seconds)
    for rank in (0, 1):
        for number in range(3):
            yield f"killed rank {rank}, {number}", partial(killed, rank)
    yield f"mixed load, {MINUTES:g} minutes", soak


if __name__ == "__main__":
    run("serve_load", items())
