"""Each step of `mega corpus` on 20,000 documents, killed 20 times by SIGKILL at random moments and called again.

    python tests/battery/corpus_kills.py [STEP ...] [--summary]     STEP: clean, near-duplicates, ..., run

A killed call is repeated to its end, and has to give the bytes and counts of a call that nothing interrupted; every
other time its worker processes are killed with it, else they notice by themselves. Rows are kept: a step that was
proven for this commit is not run again.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mega.commands.corpus  # noqa: F401
from mega import cli
from tests.battery.corpus_web import english, sentences
from tests.battery.data_ledger import run

DOCUMENTS, ROUNDS, FILES = 20_000, 20, 4
QUESTION = "which of the ships that came back in the evening had the children seen first"
STEPS: dict[str, list[str]] = {
    "urls": [],
    "merge": [],
    "shuffle": [],
    "exact-duplicates": [],
    "mask-pii": [],
    "annotate": ["--scorer", "words:words.txt"],
    "select": [],
    "near-duplicates": [],
    "filter": ["--preset", "gopher-repetition", "fineweb"],
    "decontaminate": ["--task-data", "squad=squad.json"],
    "wikipedia": [],
    "clean": ["--min-tokens", "15"],
}
"""Verbs and their flags, in the folder of `write_files`."""
ONE_PROCESS = ("shuffle",)
RECIPE = """
input = ["in"]
output = "OUTPUT"

[[step]]
verb = "clean"
min-tokens = 15

[[step]]
verb = "near-duplicates"

[[step]]
verb = "shuffle"
"""


def write_files(folder: Path) -> None:
    """Documents of about 20 words: every 10th is an earlier one, every 50th has a question, some have an address."""
    draw, words = random.Random(0), english().tolist()
    texts: list[str] = []
    for number in range(DOCUMENTS):
        own = draw.choices(words, k=draw.randrange(16, 26))
        if number % 10 == 9:
            own = draw.choice(texts).split(" ")
        texts.append(" ".join(own))
    for name in ("in", "wiki"):
        (folder / name).mkdir()
    files = [open(folder / "in" / f"{number}.jsonl", "w") for number in range(FILES)]  # noqa: SIM115
    pages: list[list[str]] = [[] for _ in range(FILES)]
    for number, text in enumerate(texts):
        text = sentences(text.split(" "))
        text += f" {QUESTION}? " + text if number % 50 == 0 else ""
        text += f" Write to mail{number}@example.org" if number % 30 == 1 else ""
        score = {"toxicity": draw.random()} if number % 40 else None
        row = {"url": f"http://site{number % 9000}.com/", "text": text, "score": score}
        files[number % FILES].write(json.dumps(row) + "\n")
        pages[number % FILES].append(
            f"<page><title>T{number}</title><ns>0</ns><id>{number}</id><revision><id>{number}</id>"
            f"<text>'''T{number}''' is [[of|in]] {{{{cite|a}}}} {text}</text></revision></page>\n"
        )
    for file in files:
        file.close()
    for number, own in enumerate(pages):
        dump = f"<mediawiki>\n{''.join(own)}</mediawiki>\n".encode()
        (folder / "wiki" / f"{number}.xml.bz2").write_bytes(bz2.compress(dump))
    (folder / "squad.json").write_text(json.dumps({"question": QUESTION}))
    (folder / "words.txt").write_text("war\ndead\nhate\n")


def line_of(step: str, folder: Path, output: str, workers: int) -> list[str]:
    """The command line of a step that writes the folder `output`."""
    line = ["corpus", step]
    if step == "run":
        (folder / f"{output}.toml").write_text(RECIPE.replace("OUTPUT", output))
        return [*line, f"{output}.toml"]
    source = "wiki" if step == "wikipedia" else "in"
    line += ["--input", source, *STEPS[step], "--output", output]
    return line if step in ONE_PROCESS else [*line, "--workers", str(workers)]


def digests(folder: Path) -> dict[str, str]:
    """Of all files the bytes, of records the counts. Half-written files would show by their names.

    Samples of dropped documents say where they are, which, of a step after the first, is in the folder itself.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".corpus.json":
            found[str(path.relative_to(folder))] = json.dumps(json.loads(path.read_text())["counts"]).replace(
                f"{folder.name}/", ""
            )
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Call:
    """`mega` with some words, in a process and a session of its own. It is forked from this one, which has loaded the
    command line: starting Python would take longer than most steps do."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open("errors.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            code = cli.main(list(words))
        finally:
            os._exit(code)

    def wait(self, seconds: float = math.inf) -> int | None:
        """The exit code, negative if it was killed; None if it is still running."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.01)


def killed(line: Sequence[str], folder: Path, wait: float, with_workers: bool) -> bool:
    """Whether it was still running when it was killed."""
    process = Call(line, folder)
    if (code := process.wait(wait)) is None:
        (os.killpg if with_workers else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        return True
    assert code == 0, f"ended with {code} before it was killed: {(folder / 'errors.txt').read_text()[:300]}"
    return False


def prove(step: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        begin = time.monotonic()
        assert Call(line_of(step, folder, "whole", 1), folder).wait() == 0
        took = time.monotonic() - begin
        expected, draw, equal, kills = digests(folder / "whole"), random.Random(step), 0, 0
        wrong: list[str] = []
        for number in range(ROUNDS):
            output = f"out-{number}"
            line, share = line_of(step, folder, output, 1 + number % 2), draw.uniform(0.3, 1.0)
            while not killed(line, folder, share * took, number % 4 > 1):
                shutil.rmtree(folder / output)
                share *= 0.8
            kills += 1
            while draw.random() < 0.3:  # and again
                kills += killed(line, folder, draw.uniform(0.3, 1.0) * took, number % 4 > 1)
            ended = Call(line, folder).wait()
            found = digests(folder / output)
            if ended:
                wrong.append(f"ended with {ended}: {(folder / 'errors.txt').read_text()[:300]}")
            elif found != expected:
                wrong.append(f"differ: {sorted(name for name, _ in found.items() ^ expected.items())}")
            equal += ended == 0 and found == expected
            shutil.rmtree(folder / output)
        assert equal == ROUNDS, f"{equal} of {ROUNDS} resumed to equal bytes; {wrong}"
    return {"documents": DOCUMENTS, "whole_seconds": round(took, 1), "kills": kills, "equal": equal, "of": ROUNDS}


if __name__ == "__main__":
    run("corpus_kills", [(step, partial(prove, step)) for step in [*STEPS, "run"]])
