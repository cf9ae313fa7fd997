"""Each step of `mega corpus` with each kind of bad input, with scorers that do not answer, and on a disk that is full.

    python tests/battery/corpus_faults.py ["select: full disk" ...] [--summary]

A row has what the step said. Of a full disk: a file system in memory (as root) that is too small is made larger step by
step; the same call is repeated each time, and in the end has to give the bytes of a call with enough room.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.corpus_kills import digests
from tests.battery.data_ledger import Item, run
from tests.support.corpus_faults import FAULTS, STEPS, Case, call, walk

DOCUMENTS = 1500
SMALLEST, LARGEST = 1 << 15, 1 << 25


def faulty(step: str, fault: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        return {"said": walk(step, fault, Path(name) / "case")}


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALLEST}", "mega-full", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def full_disk(step: str) -> dict[str, Any]:
    """Without enough room each call ends in one line that names a file there and the reason."""
    with tempfile.TemporaryDirectory() as name:
        case = Case(step, Path(name) / "case")
        case.lines = [[case.line(number) for number in range(first, DOCUMENTS, 3)] for first in range(3)]
        case.write()
        assert call(case.words()).code == 0
        before, said, size = case.inputs(), [], SMALLEST
        with small_disk(disk := case.place / "disk"):
            words = case.words("--workers", "1" if step == "shuffle" else "2", output=disk / "out")
            while (found := call(words)).code:
                assert found.code == 1 and len(found.errors) == 1, found
                assert "No space left on device" in found.errors[0] and str(disk) in found.errors[0], found.errors[0]
                said.append(found.errors[0].replace(str(case.place), ""))
                size *= 2
                assert size <= LARGEST, "never ends"
                subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
            assert digests(disk / "out") == digests(case.place / "out"), "other bytes"
        assert case.inputs() == before
        assert said, "the disk was never full"
        return {"calls": len(said) + 1, "said": sorted(set(said))}


class Silent(http.server.BaseHTTPRequestHandler):
    """A server that takes longer than it may."""

    def do_POST(self) -> None:
        time.sleep(3)

    def log_message(self, *given: Any) -> None:
        pass


def scorer_without_answer(slow: bool) -> dict[str, Any]:
    """No connection, or an answer that does not come in time: one line, after as many tries as asked for."""
    server = http.server.ThreadingHTTPServer(("localhost", 0), Silent)
    url = f"http://localhost:{server.server_port}"
    if slow:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    with tempfile.TemporaryDirectory() as name:
        case = Case("annotate", Path(name) / "case")
        case.write()
        flags = ["--scorer", url, "--tries", "2", "--timeout", "0.5"]
        words = ["corpus", "annotate", "--input", str(case.place / "in"), "--output", str(case.place / "out")]
        begin = time.monotonic()
        found = call([*words, *flags])
        assert found.code == 2 and len(found.errors) == 1 and f"--scorer {url}" in found.errors[0], found
        assert time.monotonic() - begin < 30
        assert not (case.place / "out" / ".corpus.json").exists()
        repaired = call([*case.words(), "--overwrite"])
        assert repaired.code == 0 and case.counts()["documents"] == case.counts()["kept"] == 18, repaired
        return {"said": found.errors[0]}


def broken_recipe() -> dict[str, Any]:
    """A bad line in the second step's input ends the recipe; skipping it there resumes after the first."""
    with tempfile.TemporaryDirectory() as name:
        case = Case("merge", Path(name) / "case")
        case.write()
        case.lines[1][2] = b'{"url": "http://a.example/"}'
        case.write()
        recipe, text = case.place / "recipe.toml", 'input = ["{in}"]\noutput = "{out}"\n[[step]]\nverb = "shuffle"\n'
        text = text.replace("{in}", str(case.place / "in")).replace("{out}", str(case.place / "corpus"))
        recipe.write_text(f'{text}[[step]]\nverb = "exact-duplicates"\n')
        found = call(["corpus", "run", str(recipe)])
        first = case.place / "corpus" / "1-shuffle" / "00000-000000.jsonl"
        assert found.code == 2 and len(found.errors) == 1 and f"{first}:" in found.errors[0], found
        made = first.stat().st_mtime_ns
        recipe.write_text(f'{text}[[step]]\nverb = "exact-duplicates"\non-error = "skip"\n')
        assert call(["corpus", "run", str(recipe)]).code == 0 and first.stat().st_mtime_ns == made
        counts = json.loads((case.place / "corpus" / "2-exact-duplicates" / ".corpus.json").read_bytes())["counts"]
        assert (counts["documents"], counts["kept"], counts["dropped"]) == (18, 17, {"not a document": 1}), counts
        return {"said": found.errors[0].replace(str(case.place), "")}


def items() -> list[Item]:
    found: list[Item] = [(f"{step}: {fault}", partial(faulty, step, fault)) for step in STEPS for fault in FAULTS]
    found += [(f"{step}: full disk", partial(full_disk, step)) for step in STEPS]
    found += [("annotate: no scorer", partial(scorer_without_answer, False))]
    found += [("annotate: slow scorer", partial(scorer_without_answer, True))]
    return [*found, ("run: field missing", broken_recipe)]


if __name__ == "__main__":
    run("corpus_faults", items())
