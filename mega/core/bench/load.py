"""How an engine or a server answers under load: requests arrive at random at given rates, and each token is timed.

    time to first token     from a request's arrival to its first token; waiting for a place is part of it
    time between tokens     of one request, from each token to its next
    throughput              new tokens of all requests, from the first arrival to the last token

Arrivals are a Poisson process, the same for a seed; rate 0 has all arrive at once. Prompts are random tokens, so no
prefix is shared; answers do not end before they have all their tokens. It knows no weights and no flags.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from urllib.parse import urlsplit

from mega.core.inference.request import Engine, Request, RequestError, Sampling
from mega.core.report.chart import Charts, Scale, svg
from mega.core.report.read import Series

SEED = 1


@dataclass(frozen=True)
class Load:
    """rate: requests a second; 0: all at once. prompt, new: tokens of each request."""

    rate: float
    requests: int
    prompt: int
    new: int

    def arrivals(self) -> list[float]:
        """Seconds at which requests arrive.

        >>> [round(second, 2) for second in Load(2.0, 3, 1, 1).arrivals()]
        [0.0, 0.07, 1.01]
        """
        draw = random.Random(SEED)
        gaps = [0.0, *(draw.expovariate(self.rate) if self.rate else 0.0 for _ in range(self.requests - 1))]
        return list(accumulate(gaps))

    def prompts(self, vocab: int) -> list[tuple[int, ...]]:
        """Ids below `vocab`; others for another load, whose prompts an engine may still have in its cache."""
        draw = random.Random(f"{SEED} {self}")
        return [tuple(draw.randrange(vocab) for _ in range(self.prompt)) for _ in range(self.requests)]


@dataclass(frozen=True)
class Timing:
    """Of one request, in seconds: its arrival, and each time that tokens came. count: of them; where it is not known
    one each time. error: why it has fewer than it should."""

    arrival: float
    tokens: tuple[float, ...]
    error: str = ""
    count: int | None = None


@dataclass(frozen=True)
class ServingRow:
    """What one rate gave. first, between: median and 99th percentile in seconds. whole: median of a request."""

    rate: float
    requests: int
    failed: int
    prompt: int
    new: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    first: tuple[float, float]
    between: tuple[float, float]
    whole: float

    def fields(self) -> dict[str, object]:
        """As a row of --json."""
        return {"name": "serve", **asdict(self)}


def summary(load: Load, timings: Sequence[Timing]) -> ServingRow:
    """Errors: ValueError where no request has been answered."""
    good = [each for each in timings if not each.error]
    if not good:
        raise ValueError(f"--rate {load.rate:g}: no request was answered: {timings[0].error}")
    end = max(each.tokens[-1] for each in good)
    seconds = max(end - timings[0].arrival, 1e-9)
    count = sum(len(each.tokens) if each.count is None else each.count for each in good)
    gaps = [after - before for each in good for before, after in pairwise(each.tokens)]
    return ServingRow(
        rate=load.rate,
        requests=len(timings),
        failed=len(timings) - len(good),
        prompt=load.prompt,
        new=load.new,
        seconds=seconds,
        tokens_per_second=count / seconds,
        requests_per_second=len(good) / seconds,
        first=_spread([each.tokens[0] - each.arrival for each in good]),
        between=_spread(gaps or [0.0]),
        whole=statistics.median(each.tokens[-1] - each.arrival for each in good),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile.

    >>> _spread([float(n) for n in range(101)])
    (50.0, 99.0)
    """
    ordered = sorted(values)
    return statistics.median(ordered), ordered[round(0.99 * (len(ordered) - 1))]


# -- an engine


def of_engine(engine: Engine, load: Load, clock: Callable[[], float] = time.perf_counter) -> list[Timing]:
    """The requests of a load, answered by an engine that has nothing else to do.

    Errors: ValueError where they do not fit.
    """
    prompts, arrivals = load.prompts(engine.limits.vocab), load.arrivals()
    numbers: dict[int, int] = {}
    times: list[list[float]] = [[] for _ in prompts]
    begin, added = clock(), 0
    while added < len(prompts) or not engine.idle:
        now = clock() - begin
        while added < len(prompts) and arrivals[added] <= now:
            request = Request(prompt=prompts[added], tokens=load.new, sampling=Sampling(seed=added))
            try:
                numbers[engine.add(request)] = added
            except RequestError as error:
                raise ValueError(f"--prompt-tokens {load.prompt}, --new-tokens {load.new}: {error}") from None
            added += 1
        if engine.idle:
            time.sleep(min(max(arrivals[added] - now, 0.0), 0.001))
            continue
        events = engine.step()
        now = clock() - begin
        for event in events:
            if event.token is not None:
                times[numbers[event.request]].append(now)
    return [Timing(arrival, tuple(each)) for arrival, each in zip(arrivals, times, strict=True)]


# -- a server


def of_server(url: str, load: Load, vocab: int) -> list[Timing]:
    """The requests of a load, sent to /v1/completions at `url` (HOST:PORT), each on a connection of its own.

    Errors: ValueError for an address that is not one; OSError where none answers.
    """
    return asyncio.run(_ask_all(*_address(url), load, load.prompts(vocab)))


def vocabulary(url: str) -> int:
    """Tokens that a server knows, by /tokenizer_info. Errors: as of `of_server`."""
    status, lines = asyncio.run(_whole(*_address(url), "/tokenizer_info"))
    try:
        return int(json.loads(lines)["vocab_size"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--url {url}: /tokenizer_info answers {status}, and no vocab_size") from None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or not host or not port:
        raise ValueError(f"--url {url}: must be HOST:PORT")
    return host, port


def _head(host: str, method: str, path: str, body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += ["Content-Type: application/json"]
    if os.environ.get("MEGA_TOKEN"):
        lines.append(f"Authorization: Bearer {os.environ['MEGA_TOKEN']}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _whole(host: str, port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_head(host, "GET", path, b""))
    found = await reader.read()
    writer.close()
    head, _, body = found.decode(errors="replace").partition("\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


async def _ask_all(host: str, port: int, load: Load, prompts: Sequence[Sequence[int]]) -> list[Timing]:
    begin = time.perf_counter()

    async def one(number: int, arrival: float) -> Timing:
        await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
        given = {"prompt": list(prompts[number]), "max_tokens": load.new, "seed": number, "ignore_eos": True}
        given |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            times, error, count = await _stream(host, port, json.dumps(given).encode(), begin)
        except OSError as problem:
            times, error, count = [], str(problem), None
        return Timing(arrival, tuple(times), error, count)

    return list(await asyncio.gather(*(one(number, at) for number, at in enumerate(load.arrivals()))))


async def _stream(host: str, port: int, body: bytes, begin: float) -> tuple[list[float], str, int | None]:
    """When text came, what went wrong, and how many tokens the answer has: part of a character is no text yet."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(_head(host, "POST", "/v1/completions", body))
        status = (await reader.readline()).decode(errors="replace").strip()
        times: list[float] = []
        count, ended = None, False
        while line := await reader.readline():
            now = time.perf_counter() - begin
            if line.startswith(b"{") and " 200 " not in status:
                return times, line.decode(errors="replace")[:200], count
            if not line.startswith(b"data: "):
                continue
            ended = line.strip() == b"data: [DONE]"
            event = {} if ended else json.loads(line[len(b"data: ") :])
            if "error" in event:
                return times, str(event["error"])[:200], count
            if event.get("choices"):
                times.append(now)
            count = (event.get("usage") or {}).get("completion_tokens", count)
        return times, "" if ended and times else f"{status}: the answer has no end", count
    finally:
        writer.close()


# -- what is shown


def table(rows: Sequence[ServingRow]) -> str:
    """A line a rate; times in milliseconds, median and 99th percentile. median s: seconds of a whole request."""
    head = f"{'rate':>8} {'requests':>8} {'failed':>6} {'tokens/s':>9} {'req/s':>7} {'first ms':>17} {'between ms':>17}"
    lines = [
        f"{head} {'median s':>8}",
        f"{'':>8} {'':>8} {'':>6} {'':>9} {'':>7} {'median      p99':>17} {'median      p99':>17}",
    ]
    for row in rows:
        rate = f"{row.rate:g}" if row.rate else "at once"
        times = " ".join(f"{1e3 * a:8.1f} {1e3 * b:8.1f}" for a, b in (row.first, row.between))
        lines.append(
            f"{rate:>8} {row.requests:>8} {row.failed:>6} {row.tokens_per_second:>9,.1f} "
            f"{row.requests_per_second:>7.2f} {times} {row.whole:>8.2f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[ServingRow], title: str) -> str:
    """The rows as an SVG over the rate: median and 99th percentile of both times, and throughput."""
    rows = sorted(rows, key=lambda row: row.rate or float("inf"))

    def times(pairs: Sequence[tuple[float, float]]) -> dict[str, Series]:
        return {
            name: [(float(at), 1e3 * pair[of]) for at, pair in enumerate(pairs)]
            for of, name in enumerate(("median", "99th percentile"))
        }

    charts: Charts = {
        "time to first token, ms": times([row.first for row in rows]),
        "time between tokens, ms": times([row.between for row in rows]),
        "tokens a second": {"new": [(float(at), row.tokens_per_second) for at, row in enumerate(rows)]},
    }
    names = [f"{row.rate:g}" if row.rate else "at once" for row in rows]
    return svg(charts, Scale(over="rate", names=names), f"{title}, over requests a second")
