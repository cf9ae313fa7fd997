"""Mistakes of users, drawn and typed: each ends with 2 and with one line that names what was typed.

    python tests/battery/mistakes.py --count 150 --seed 0 [--typed 150] [--out FILE]

The first ones are typed as commands of their own, whose seconds count; all others in this process.

A row of JSON a mistake: the line, the exit code, the seconds, what was said, and what is wrong with that. Rows that the
file has are not run again. Ends with 1 where a mistake is not refused as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mega import cli
from mega.core.config.presets import PRESETS
from mega.core.config.run import entries
from mega.core.config.schema import Entry

GOOD = {
    "pretrain": "pretrain --model tiny-gpt --micro-batch 2 --steps 10 --lr 1e-3 --mock-data --vocab 100",
    "memory-estimate": "memory-estimate --model tiny-gpt --micro-batch 2 --vocab 100",
    "bench": "bench --model tiny-gpt --micro-batch 2 --vocab 100",
    "generate": "generate --load . --prompt a",
    "eval": "eval --load . --task lambada --valid-data README.md",
    "reshard": "reshard --load-dir . --save-dir /tmp/never",
    "preprocess": "preprocess --input README.md --output-prefix /tmp/never --tokenizer NullTokenizer --vocab-size 9",
    "train-tokenizer": "train-tokenizer --input README.md --vocab-size 300 --output-dir /tmp/never",
    "plot": "plot .",
}
VERBS = ["checkpoint", "report", "serve", "finetune", "presets", "completions", "doctor"]
OWN = {
    "generate": ["--temperature", "--top-k", "--top-p", "--min-p", "--tokens", "--beams", "--tp", "--num-samples"],
    "reshard": ["--tp", "--pp", "--chunks"],
    "bench": ["--repeats", "--warmup"],
    "preprocess": ["--workers", "--shard"],
    "train-tokenizer": ["--vocab-size", "--character-coverage", "--kind"],
    "plot": ["--smooth", "--out"],
}
MISSING = ["/nowhere/at/all", "runs/frist", "no such file.jsonl"]


def drawn(rng: random.Random) -> str:
    """One mistake as a command line."""
    kinds: list[Callable[[random.Random], str]] = [_value] * 3
    kinds += [_spelling, _own, _place, _verb, _preset, _lost]
    return rng.choice(kinds)(rng)


def _bad(entry: Entry, rng: random.Random) -> str:
    if entry.choices:
        word = rng.choice(entry.choices)
        return rng.choice([word + "x", word[:-1] + "q", "none of these"])
    if entry.kind is int:
        return rng.choice(["1.5", "many", "-3", "1e", "0x10", "nan"])
    if entry.kind is float:
        return rng.choice(["1,5", "fast", "--", "inf", "nan", "-1"])
    return rng.choice(MISSING)


def _value(rng: random.Random) -> str:
    """A value that an option of a run cannot have."""
    numbers = [entry for entry in entries().values() if entry.kind is not bool and not entry.many]
    able = [entry for entry in numbers if entry.choices or (entry.option.within and entry.kind in (int, float))]
    entry = rng.choice(able)
    value = _bad(entry, rng)
    if not entry.choices:
        value = rng.choice([value, "-7" if entry.option.within and not entry.option.within.holds(-7) else "some"])
        if _fits(entry, value):
            value = "some"
    return f"{GOOD['pretrain']} {entry.flag}={shlex.quote(value)}"


def _fits(entry: Entry, value: str) -> bool:
    try:
        number = entry.kind(value)
    except ValueError:
        return False
    return entry.option.within is None or bool(entry.option.within.holds(number))


def _spelling(rng: random.Random) -> str:
    """A flag with two letters exchanged, one doubled, or one lost."""
    verb = rng.choice(["pretrain", "memory-estimate", "bench"])
    flags = [entry.flag for entry in entries().values()]
    flag = rng.choice([each for each in flags if len(each) > 6])
    at = rng.randrange(4, len(flag) - 1)
    changed = [flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :], flag[:at] + flag[at] + flag[at:], flag[:at] + "zz"]
    word = rng.choice([each for each in changed if not any(known.startswith(each) for known in flags)] or [flag + "zz"])
    return f"{GOOD[verb]} {word} 3"


def _own(rng: random.Random) -> str:
    """A flag of a verb's own with a value that it cannot have."""
    verb = rng.choice(list(OWN))
    return f"{GOOD[verb]} {rng.choice(OWN[verb])}={rng.choice(['-5', 'some', '7.5.1', '1e9x'])}"


def _place(rng: random.Random) -> str:
    """Something to read that is not there."""
    place = shlex.quote(rng.choice(MISSING))
    return rng.choice(
        [
            f"generate --load {place} --prompt a",
            f"pretrain {GOOD['pretrain'][9:]} --load {place}",
            f"pretrain --model tiny-gpt --micro-batch 1 --steps 1 --lr 1 --vocab 9 --data-path {place}",
            f"reshard --load-dir {place} --save-dir /tmp/never",
            f"convert-llama --load-dir {place} --save-dir /tmp/never",
            f"eval --task lambada --load {place} --valid-data README.md",
            f"checkpoint show {place}",
            f"checkpoint verify {place}",
            f"checkpoint diff {place} {place}",
            f"report {place}",
            f"plot {place}",
            f"preprocess --input {place} --output-prefix /tmp/never --tokenizer NullTokenizer --vocab-size 9",
            f"train-tokenizer --input {place} --vocab-size 300 --output-dir /tmp/never",
            f"{GOOD['pretrain']} --config {place}",
        ]
    )


def _verb(rng: random.Random) -> str:
    verb = rng.choice([*GOOD, *VERBS])
    at = rng.randrange(1, len(verb) - 1)
    return verb[:at] + rng.choice("qxz") + verb[at + 1 :]


def _preset(rng: random.Random) -> str:
    name = rng.choice(list(PRESETS))
    return f"{rng.choice(['pretrain', 'memory-estimate'])} --micro-batch 1 --model {name[:-1]}{rng.choice('xyz')}"


def _lost(rng: random.Random) -> str:
    """A command without something that it needs."""
    words = GOOD[rng.choice(["pretrain", "reshard", "preprocess", "train-tokenizer"])].split()
    flags = [at for at, word in enumerate(words) if word.startswith("--")]
    at = rng.choice(flags)
    size = 1 + (at + 1 < len(words) and not words[at + 1].startswith("--"))
    return " ".join([*words[:at], *words[at + size :], "--seed 1" if words[0] == "pretrain" else ""]).strip()


def typed(line: str) -> tuple[int, str]:
    """Exit code and stderr of a command of its own."""
    command = [sys.executable, "-m", "mega", *shlex.split(line)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stderr


def inside(line: str) -> tuple[int, str]:
    """The same in this process."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(shlex.split(line))
    return code, said.getvalue()


def tried(line: str, way: Callable[[str], tuple[int, str]], limit: float) -> dict[str, Any]:
    """One row."""
    began = time.monotonic()
    code, text = way(line)
    seconds, said = time.monotonic() - began, text.splitlines()
    wrong = []
    if code != 2:
        wrong.append(f"exit code {code}")
    if "Traceback" in text:
        wrong.append("a traceback")
    if not said or not all(each.startswith("mega: ") or "changes nothing" in each for each in said):
        wrong.append("not lines of `mega: `")
    if seconds > limit:
        wrong.append(f"{seconds:.1f} s")
    return {
        "line": line,
        "code": code,
        "typed": way is typed,
        "seconds": round(seconds, 2),
        "said": said[:6],
        "wrong": wrong,
    }


def rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--typed", type=int, default=150, help="how many of them are commands of their own")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds that a refusal may take")
    parser.add_argument("--out", type=Path, default=Path("build/battery/mistakes.jsonl"))
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    lines: dict[str, None] = {}
    while len(lines) < asked.count:
        lines[drawn(rng)] = None
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = {row["line"]: row for row in rows(asked.out)}
    with asked.out.open("a", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            if line not in done:
                done[line] = tried(line, typed if number < asked.typed else inside, asked.limit)
                out.write(json.dumps(done[line]) + "\n")
                out.flush()
    found = [done[line] for line in lines]
    for row in found:
        if row["wrong"]:
            print(f"{row['line']}\n    {'; '.join(row['wrong'])}: {row['said'][:2]}")
    slowest = max((row for row in found if row["typed"]), key=lambda row: row["seconds"], default={"seconds": 0})
    bad = sum(bool(row["wrong"]) for row in found)
    print(
        f"{len(found) - bad} of {len(found)} refused as they should be; the slowest command took {slowest['seconds']} s"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
