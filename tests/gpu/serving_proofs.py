"""What a server must hold at every layout, on real text: a JSON line a row, appended to --out.

    python -m tests.gpu.serving_proofs --out rows.jsonl                       all rows, on two GPUs
    python -m tests.gpu.serving_proofs --out rows.jsonl texts draws "draft tp1"
    python -m tests.gpu.serving_proofs --out rows.jsonl --device cpu          all rows on a CPU, by a smaller model

    texts               greedy texts of one rank (no guesses, no graph): how many are the same at tp 1, tp 2 and pp 2,
                        without guesses, with --speculate ngram, and with a draft model; with adapters and without
    streams LAYOUT      `mega serve`: a text streamed and whole, with and without guesses, as `texts` has it
    draft LAYOUT        one stream with a draft model and without, greedy and drawn: a model that says what the draft
                        says, one that mostly does, and one of random weights, whose text cannot be guessed
    draws LAYOUT        Pearson's statistic of --draws requests of three tokens each against the product of the model's
                        probabilities: no guesses, n-grams, a draft model; and how many texts guesses change
    canaries LAYOUT     --count requests of mixed lengths that join and leave at random next to others that are
                        cancelled, each by its adapter or none: how many get exactly the greedy text that they get
                        alone; once more without adapters, by recorded steps, and with a draft model
    killed LAYOUT       `mega serve` under load, of which rank 0, or rank 1, is killed: who is named, what requests and
    stopped LAYOUT      /health answer, how long until it ends; the same of a rank that is stopped

LAYOUT is tp1, tp2 or pp2. The model is stories260K laid into a larger shape (tests/support/grown.py), in fp32; of
`draft` Llama-2 7B's shape in bf16. --small: its directory, by default that of the shared data. Rows `streams`, `killed`
and `stopped` need the extra `serve`: where it cannot be installed, `pip install --target build/site fastapi uvicorn
prometheus_client` elsewhere, and PYTHONPATH=build/site here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.capacity import even_layers
from mega.core.inference.generation.generate import logits
from mega.core.inference.loading.adapters import open_adapters
from mega.core.inference.loading.load import empty_stage, load_model, open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.sampling import probabilities
from mega.core.inference.speculate import NGrams
from mega.core.inference.start import engine_on, start_engine
from mega.core.model.decode import use_decoding_layout
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise
from mega.core.processes.connect import connect
from mega.core.processes.launch import launch
from tests.support.grown import Grown

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
GREEDY = Sampling(temperature=0.0)
WORDS = "Once upon a time there was a little dog named Tim who had a big red ball and liked to play in the park".split()
NOISE = 0.2
"""Of the model of most rows: it says what stories260K says, but for a token in twenty."""
HIDDEN, WIDE = {"cpu": 128, "cuda": 1024}, 512
DRAWN = Sampling(temperature=2.5, top_k=4)
TEXTS = 48, 48
"""Requests of `texts`, and new tokens of each."""
TIMEOUT = 0.5
"""--timeout-minutes of the servers of which a rank is stopped."""


class Files(NamedTuple):
    """small: the trained model. model: the grown one. adapters: of it, by name."""

    small: str
    model: str
    adapters: dict[str, str]
    device: str


# --- what all rows use ------------------------------------------------------------------------------------------------


def shaped(small: str | Path, layers: int, hidden: int) -> ModelConfig:
    model = replace(open_model(small).model, layers=layers, hidden=hidden, ffn=11 * hidden // 4)
    return replace(model, heads=8, kv_heads=8, head_dim=hidden // 8)


def prepared(small: Path, place: Path, device: str) -> Files:
    grown = Grown(small, shaped(small, 8, HIDDEN[device]), NOISE)
    grown.write(place / "model")
    adapters = {name: str(adapter(place / name, grown.model, seed)) for seed, name in enumerate(("one", "two"))}
    return Files(str(small), str(place / "model"), adapters, device)


def adapter(place: Path, model: ModelConfig, seed: int) -> Path:
    """One in peft's form, of random values."""
    draw, tensors, targets = torch.Generator().manual_seed(seed), {}, ["q_proj", "v_proj"]
    hidden = model.hidden or 0
    for layer in range(model.layers or 0):
        for linear in targets:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{linear}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, hidden, generator=draw) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(hidden, 4, generator=draw) / 4
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


def at_layout(layout: str, job: Callable[..., Any], files: Files, *args: Any) -> Any:
    """What `job(mesh, device, files, *args)` gives on rank 0 of new ranks."""
    from tests.gpu import serving_proofs  # by name, for the ranks

    tp, pp = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        code = launch(tp * pp, serving_proofs.on_rank, job.__name__, (tp, pp), str(out), files, *args)
        assert code == 0, f"{job.__name__} at {layout} ended with {code}"
        return json.loads(out.read_text())


def on_rank(job: str, layout: tuple[int, int], out: str, files: Files, *args: Any) -> int:
    world, device, groups = connect(files.device)
    mesh = Mesh(world.rank, tp=layout[0], pp=layout[1], groups=groups)
    found = globals()[job](mesh, device, files, *args)
    if mesh.model.first:
        Path(out).write_text(json.dumps(found))
    return 0


def opened(mesh: Mesh, device: Device, files: Files, adapters: bool = False, **options: Any) -> Any:
    """An engine of the grown model; None as of `start_engine`."""
    model = open_model(files.model)
    found = open_adapters({name: Path(each) for name, each in files.adapters.items()}, model) if adapters else ()
    given = EngineOptions(**{"max_requests": 32, "cache_tokens": 32 * 512, "vocab": 512, **options})
    engine = start_engine(model, mesh, device, given, dtype=torch.float32, adapters=found)
    if engine is not None and device.is_cuda:
        engine.warm_up()
    return engine


def said(engine: Any, requests: Sequence[Request]) -> list[list[int]]:
    """The ids of each, all in flight together."""
    numbers = [engine.add(request) for request in requests]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for event in engine.step():
            assert event.finish != "failed", event.message
            if event.token is not None:
                ids[event.request].append(event.token)
    return [ids[number] for number in numbers]


def prompts(files: Files, count: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Of words, some of which come again."""
    draw, tokenizer = random.Random(seed), open_model(files.model).tokenizer()
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 12)) * draw.choice([1, 1, 3])) for _ in range(count)]
    return [tuple(tokenizer.encode(text)) for text in texts]


def guesses_of(engine: Any) -> Counter[str]:
    """Steps from here on, and tokens in them that were guessed."""
    counts, launch_step = Counter[str](), engine._worker.launch

    def counted(step: Any) -> Any:
        counts["steps"] += 1
        counts["guessed"] += max(0, len(step.wanted) - len(step.counts))
        return launch_step(step)

    engine._worker.launch = counted
    return counts


def closed(engine: Any) -> None:
    engine.close()
    gc.collect()


# --- texts ------------------------------------------------------------------------------------------------------------


def text_requests(files: Files, adapters: bool, size: tuple[int, int] = TEXTS) -> list[Request]:
    names = [None, *files.adapters] if adapters else [None]
    return [
        Request(prompt=prompt, tokens=size[1], sampling=GREEDY, adapter=names[at % len(names)])
        for at, prompt in enumerate(prompts(files, size[0]))
    ]


def speculations(files: Files) -> dict[str, str | None]:
    return {"none": None, "ngram": "ngram", "draft": files.small}


def alone_texts(mesh: Mesh, device: Device, files: Files, size: tuple[int, int] = TEXTS) -> dict[str, list[list[int]]]:
    """One after the other on one rank, without a graph."""
    found = {}
    for adapters in (False, True):
        engine = opened(mesh, device, files, adapters, cuda_graph=False if device.is_cuda else None)
        found[str(adapters)] = [said(engine, [request])[0] for request in text_requests(files, adapters, size)]
        closed(engine)
    return found


def texts_at(
    mesh: Mesh, device: Device, files: Files, expected: dict[str, list[list[int]]], size: tuple[int, int] = TEXTS
) -> Any:
    rows = []
    for adapters in (False, True):
        for name, speculate in speculations(files).items():
            engine = opened(mesh, device, files, adapters, speculate=speculate)
            if engine is None:
                continue
            counts = guesses_of(engine)
            found = said(engine, text_requests(files, adapters, size))
            equal = sum(map(list.__eq__, found, expected[str(adapters)]))
            rows.append({"speculate": name, "adapters": adapters, "equal": equal, "of": len(found), **counts})
            closed(engine)
    return rows


def texts(files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    expected = at_layout("tp1", alone_texts, files)
    for layout in LAYOUTS:
        for row in at_layout(layout, texts_at, files, expected):
            yield {"layout": layout, **row, "ok": row["equal"] == row["of"]}


# --- a server ---------------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    port: int
    process: subprocess.Popen[str]

    def ask(self, path: str, body: dict[str, Any] | None = None, seconds: float = 120.0) -> tuple[int, str]:
        """Status and text; 0 where the connection ends."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            found = connection.getresponse()
            return found.status, found.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()


@contextlib.contextmanager
def served(files: Files, layout: str, *flags: str) -> Iterator[Server]:
    tp, pp = LAYOUTS[layout]
    command = [sys.executable, "-m", "mega", "serve", files.model, "--port", "0", "--tp", str(tp), "--pp", str(pp)]
    command += ["--device", files.device, "--dtype", "fp32", "--max-requests", "32", "--cache-tokens", "32768", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                yield Server(int(line.rpartition(":")[2]), process)
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


def streamed(text: str) -> str:
    """The text of a stream's events."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def streams(layout: str, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    expected = at_layout("tp1", alone_texts, files)["True"]
    requests, tokenizer = text_requests(files, True), open_model(files.model).tokenizer()
    adapters = [f"--adapter={name}={place}" for name, place in files.adapters.items()]
    for name, speculate in speculations(files).items():
        flags = [] if speculate is None else ["--speculate", speculate]
        with served(files, layout, *adapters, *flags) as server:
            found: dict[tuple[int, bool], str] = {}

            def ask(number: int, stream: bool, server: Server = server, found: Any = found) -> None:
                request = requests[number]
                body = {"prompt": list(request.prompt), "max_tokens": request.tokens, "temperature": 0}
                body |= {
                    "ignore_eos": True,
                    "stream": stream,
                    **({"model": request.adapter} if request.adapter else {}),
                }
                status, text = server.ask("/v1/completions", body)
                whole = streamed(text) if stream else json.loads(text)["choices"][0]["text"]
                found[number, stream] = whole if status == 200 else f"{status} {text}"

            both = [threading.Thread(target=ask, args=(at, stream)) for at in range(24) for stream in (False, True)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
        right = 0
        for number in range(24):
            prompt = list(requests[number].prompt)
            text = tokenizer.decode([*prompt, *expected[number]]).removeprefix(tokenizer.decode(prompt))
            right += found[number, False] == found[number, True] == text
        yield {"layout": layout, "speculate": name, "equal": right, "of": 24, "ok": right == 24}


def ranks_of(server: Server) -> list[int]:
    """Processes of ranks, rank 0 first: it listens."""
    from tests.inference.server.test_serve import descendants, listener, parent

    pids = descendants(server.process.pid)
    first = listener(pids, server.port)
    return [first, *(pid for pid in pids if pid != first and parent(pid) == parent(first))]


def ended(how: str, layout: str, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Under load: 8 requests, streamed or not, of 400 tokens each, again and again until none is answered."""
    seconds = 10.0 if how == "killed" else 60 * TIMEOUT + 30
    for rank in (0, 1):
        with served(files, layout, "--timeout-minutes", str(TIMEOUT)) as server:
            pids, stop = ranks_of(server), threading.Event()
            statuses, health, messages = Counter[int](), Counter[int](), set[str]()

            def load(
                number: int, server: Server = server, stop: Any = stop, s: Any = statuses, m: Any = messages
            ) -> None:
                while not stop.is_set():
                    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": number % 2 == 1}
                    status, text = server.ask("/v1/completions", body)
                    if '"error"' in text:
                        status = 503 if status == 200 else status
                        m.add(json.loads(text.split("data: ")[-2 if "[DONE]" in text else -1])["error"]["message"])
                    s[status] += 1
                    if status != 200:
                        return

            def watch(server: Server = server, stop: Any = stop, health: Any = health) -> None:
                while not stop.is_set():
                    health[server.ask("/health", seconds=2.0)[0]] += 1
                    time.sleep(0.02)

            threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
            threads.append(threading.Thread(target=watch))
            for thread in threads:
                thread.start()
            time.sleep(2.0)
            began = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            try:
                code: int | None = server.process.wait(seconds + 60)
            except subprocess.TimeoutExpired:
                code = None
            took = time.monotonic() - began
            stop.set()
            left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and not dead(pid)]
            server.process.kill()
            assert server.process.stdout is not None
            shown = server.process.stdout.read() if code is not None else ""
        line = next((each for each in shown.splitlines() if f"rank {rank}" in each), "")
        answers = rank == 0 or (statuses[503] > 0 and any(f"rank {rank}" in each for each in messages))
        ok = code not in (0, None) and took < seconds and bool(line) and answers and not left
        row: dict[str, Any] = {
            "layout": layout,
            "rank": rank,
            "exit": code,
            "seconds": round(took, 1),
            "line": line,
            "left": len(left),
        }
        row |= {"statuses": dict(statuses), "health": dict(health), "messages": sorted(messages), "shown": shown[-800:]}
        yield {**row, "ok": ok}


def dead(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


# --- a draft model ----------------------------------------------------------------------------------------------------


def draft_speed(mesh: Mesh, device: Device, files: Files, layers: int | None) -> Any:
    """Tokens a second of one stream, without and with a draft model, by turns."""
    rows = []
    if device.is_cuda:
        model = replace(model_alone(compose("llama2-7b")), layers=layers or 32)
    else:
        model = shaped(files.small, layers or 8, WIDE)
    for noise in (0.0, NOISE, None):
        dtype = torch.bfloat16 if device.is_cuda else torch.float32
        stages = even_layers(model.layers or 0, mesh.pp.size)
        grown = Grown(Path(files.small), model, noise or 0.0)
        ops = forward_only(choose(device.torch, dtype))
        stage = empty_stage(grown.model, mesh, device, dtype, ops=ops, stage_layers=stages)
        grown.fill(stage) if noise is not None else initialise(stage, 1)
        stage.eval()
        if not device.is_cuda:
            use_decoding_layout(stage)
        for sampling in (GREEDY, Sampling(seed=1)):
            found: dict[str, list[dict[str, float]]] = {"none": [], "draft": []}
            for name in ("none", "draft") * 2:
                options = EngineOptions(
                    max_requests=8, cache_tokens=4096, vocab=512, speculate=speculations(files)[name]
                )
                engine = engine_on(stage, mesh, device, options)
                if engine is None:
                    continue
                if device.is_cuda:
                    engine.warm_up()
                found[name] += [one_stream(engine, device, files, sampling, seed) for seed in range(4)][1:]
                closed(engine)
            if mesh.model.first:
                row = {name: statistics.median(each["speed"] for each in runs) for name, runs in found.items()}
                row["ratio"] = row["draft"] / row["none"]
                row["tokens_a_step"] = statistics.median(each["tokens_a_step"] for each in found["draft"])
                rows.append({"noise": noise, "greedy": sampling.greedy, "blocks": model.layers, **row})
        del stage
        gc.collect()
    return rows


def one_stream(engine: Any, device: Device, files: Files, sampling: Sampling, seed: int) -> dict[str, float]:
    """After the first token."""
    new = 200 if device.is_cuda else 64
    (prompt,) = prompts(files, 1, seed)
    engine.add(Request(prompt=prompt, tokens=new, sampling=sampling))
    began, steps, count = 0.0, 0, 0
    while not engine.idle:
        events = engine.step()
        steps += bool(events)
        count += len(events)
        if events and not began:
            began, count = time.perf_counter(), 0
    took = time.perf_counter() - began
    return {"speed": count / took, "tokens_a_step": (new - 1) / max(1, steps - 1)}


def draft(layout: str, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for row in at_layout(layout, draft_speed, files, given.layers):
        least = 1.7 if row["noise"] == 0 else 0.97
        yield {"layout": layout, **row, "ok": row["ratio"] >= least}


# --- draws ------------------------------------------------------------------------------------------------------------


class EagerNGrams(NGrams):
    """Guesses from the first token on."""

    eager = True


def drawn_at(mesh: Mesh, device: Device, files: Files, count: int, prompt: Sequence[int]) -> Any:
    found: dict[str, Any] = {}
    for name in speculations(files):
        engine = opened(mesh, device, files, speculate=speculations(files)[name], max_requests=64)
        if engine is None:
            continue
        if name == "ngram":
            engine._drafter = engine._scheduler._drafter = EagerNGrams()
        counts = guesses_of(engine)
        asked = [Request(prompt=tuple(prompt), tokens=3, sampling=replace(DRAWN, seed=at)) for at in range(count)]
        began = time.monotonic()
        ids = said(engine, asked)
        found[name] = {"ids": ids, "seconds": round(time.monotonic() - began, 1), **counts}
        closed(engine)
    return found


def draws(layout: str, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompt = open_model(files.model).tokenizer().encode("Once upon a time there was a little dog. Once upon a")
    expected = joint(files, prompt)
    found = at_layout(layout, drawn_at, files, given.draws, prompt)
    plain = found["none"]["ids"]
    for name, each in found.items():
        ids = each.pop("ids")
        seen, outside = Counter(map(tuple, ids)), 0
        statistic, cells, rest_mass, rest_seen = 0.0, 0, 0.0, 0
        for cell, share in expected.items():
            mass = share * len(ids)
            if mass < 5:
                rest_mass, rest_seen = rest_mass + mass, rest_seen + seen[cell]
                continue
            statistic, cells = statistic + (seen[cell] - mass) ** 2 / mass, cells + 1
        outside = sum(number for cell, number in seen.items() if cell not in expected)
        if rest_mass >= 5:
            statistic, cells = statistic + (rest_seen - rest_mass) ** 2 / rest_mass, cells + 1
        p = float(torch.special.gammaincc(torch.tensor((cells - 1) / 2), torch.tensor(statistic / 2)))
        row = {"layout": layout, "speculate": name, "draws": len(ids), "cells": cells, "statistic": round(statistic, 1)}
        row |= {"p": round(p, 4), "outside": outside, "changed": sum(map(list.__ne__, ids, plain)), **each}
        yield {**row, "ok": p > 0.001 and not outside}


def joint(files: Files, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Each three tokens that may follow, and how likely they are: by whole forward passes of one rank on a CPU."""
    stage = load_model(open_model(files.model))
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        ids = torch.tensor([[*prompt, *cell] for cell in cells])
        shares = probabilities(logits(stage, ids)[:, -1, :512], DRAWN)
        cells = {
            (*cell, int(token)): share * float(row[token])
            for (cell, share), row in zip(cells.items(), shares, strict=True)
            for token in row.nonzero()[:, 0]
        }
    return cells


# --- canaries ---------------------------------------------------------------------------------------------------------


def canary_requests(files: Files, count: int, adapters: bool) -> list[Request]:
    draw, names = random.Random(2), [None, *files.adapters] if adapters else [None]
    return [
        Request(prompt=prompt, tokens=draw.choice([1, 2, 5, 12, 30, 60]), sampling=GREEDY, adapter=draw.choice(names))
        for prompt in prompts(files, count, 3)
    ]


def canaries_at(mesh: Mesh, device: Device, files: Files, count: int, adapters: bool, speculate: str | None) -> Any:
    engine = opened(mesh, device, files, adapters, max_requests=16, cache_tokens=4096, speculate=speculate)
    if engine is None:
        return None
    asked, draw = canary_requests(files, count, adapters), random.Random(4)
    alone = [said(engine, [request])[0] for request in asked]
    others = [replace(request, tokens=60) for request in asked[: count // 5]]
    queue = [(at, request) for at, request in enumerate([*asked, *others])]
    draw.shuffle(queue)
    known: dict[int, int] = {}
    ids: dict[int, list[int]] = {}
    ends, doomed = Counter[str](), list[int]()
    while queue or not engine.idle:
        for _ in range(min(len(queue), draw.randrange(4))):
            at, request = queue.pop()
            number = engine.add(request)
            known[number], ids[number] = at, []
            if at >= count:
                doomed.append(number)
        if doomed and draw.random() < 0.3:
            engine.cancel(doomed.pop(draw.randrange(len(doomed))))
        for event in engine.step():
            if event.token is not None:
                ids[event.request].append(event.token)
            if event.finish is not None and known[event.request] < count:
                ends[event.finish] += 1
            elif event.finish is not None:
                ends[f"others {event.finish}"] += 1
    wrong = [known[number] for number, found in ids.items() if known[number] < count and found != alone[known[number]]]
    engine.close()
    return {"requests": count, "equal": count - len(wrong), "ends": ends, "wrong": wrong[:5]}


def canaries(layout: str, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for adapters, speculate in ((True, None), (False, None), (True, "draft")):
        guesses = speculations(files)[speculate or "none"]
        row = at_layout(layout, canaries_at, files, given.count, adapters, guesses)
        ok = row["equal"] == given.count
        yield {"layout": layout, "adapters": adapters, "speculate": speculate or "none", **row, "ok": ok}


ROWS: dict[str, Callable[[Files, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "texts": texts,
    **{f"streams {layout}": partial(streams, layout) for layout in LAYOUTS},
    **{f"draft {layout}": partial(draft, layout) for layout in LAYOUTS},
    **{f"draws {layout}": partial(draws, layout) for layout in LAYOUTS},
    **{f"canaries {layout}": partial(canaries, layout) for layout in LAYOUTS},
    **{f"{how} {layout}": partial(ended, how, layout) for how in ("killed", "stopped") for layout in ("tp2", "pp2")},
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="texts, streams tp2, ...; all")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", type=Path, help="directory of stories260K in Hugging Face's form")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--layers", type=int, help="blocks of the model of row draft")
    given = parser.parse_args(arguments)
    if unknown := [row for row in given.rows if row not in ROWS]:
        parser.error(f"{unknown[0]}: valid: {', '.join(ROWS)}")
    small = given.small
    if small is None:
        from tests.support.shared import shared

        small = shared("stories260K_hf/config.json").parent
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        files = prepared(small, Path(folder), given.device)
        for name in given.rows or ROWS:
            began, found = time.monotonic(), list[dict[str, Any]]()
            try:
                found += ROWS[name](files, given)
            except Exception as error:
                found.append({"ok": False, "error": f"{type(error).__name__}: {error}"})
            for row in found:
                line = json.dumps({"row": name, "device": given.device, **row})
                print(line, flush=True)
                with open(given.out, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
                bad += not row["ok"]
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
