"""Corpora: speed next to other programs, kills, and the curve of Megatron-LM's bands. The synthetic web: corpus_web.py.

    speed               MinHash, URL filter and ftfy next to datatrove, mattilyra/LSH (where installed) and ftfy alone
    kills [step ...]    each step on 20,000 documents, killed 20 times at random moments and resumed: equal bytes
    curve               Megatron-LM's bands of signatures on planted pairs, next to their computed chance

    python tests/battery/corpora.py speed kills [--out FILE]

Each row is one JSON line. Processor seconds are compared, not hours of a clock: other work may run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.corpus.minhash import CharShingles, WordShingles, band_keys, chance, overlap
from tests.support.shared import shared

ROOT = Path(__file__).resolve().parents[2]
WORDS = np.array([f"{a}{b}{c}" for a in "bcdfglmnprst" for b in ("a", "e", "i", "o", "u", "ai") for c in "xnrslmtkdgz"])
FILES = 4


def mega(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mega", *words]
    return subprocess.run(line, capture_output=True, text=True, check=check, cwd=ROOT)


# --- the web --------------------------------------------------------------------------------------------------------


def texts(documents: int, seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """A text, the number of the document that it is a copy of (or its own), and the words that were exchanged in it.

    Of 20 documents one is an exact copy of an earlier one, one a copy with 1 to 2 words of about 120 exchanged, and one
    a copy with 8 to 20 exchanged, which is no near duplicate at 0.8.
    """
    draw = np.random.default_rng(seed)
    held: list[tuple[int, np.ndarray[Any, Any]]] = []
    for number in range(documents):
        kind = number % 20
        if kind in (7, 13, 17) and held:
            origin, words = held[int(draw.integers(len(held)))]
            words, changed = words.copy(), {7: 0, 13: int(draw.integers(1, 3)), 17: int(draw.integers(8, 21))}[kind]
            places = draw.choice(len(words), changed, replace=False)
            words[places] = draw.integers(0, len(WORDS), changed)
        else:
            origin, changed = number, 0
            words = draw.integers(0, len(WORDS), int(draw.integers(110, 160)))
            if len(held) < 50_000:
                held.append((number, words))
            elif kind == 0:
                held[int(draw.integers(len(held)))] = (number, words)
        yield " ".join(WORDS[words]), origin, changed


# --- the curve of the original's settings ---------------------------------------------------------------------------


def curve(trials: int = 400) -> Iterator[dict[str, Any]]:
    """Pairs of random texts of 600 characters whose shingles overlap by about so much: how often they share a band."""
    draw, shingling = random.Random(0), CharShingles()
    for similarity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        lines, overlaps = [], []
        for _ in range(trials):
            text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=600))
            cut = round(600 * (1 - similarity) / (1 + similarity))
            other = text[:-cut] + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=cut))
            overlaps.append(overlap(shingling.shingles(text), shingling.shingles(other)))
            lines += [text, other]
        keys = band_keys(shingling.signatures(lines), 10)
        met = float((keys[::2] == keys[1::2]).any(1).mean())
        expected = float(np.mean([chance(one, 10, 10) for one in overlaps]))
        bound = 4 * (expected * (1 - expected) / trials) ** 0.5 + 1 / trials
        yield {
            "item": "curve",
            "overlap": round(float(np.mean(overlaps)), 3),
            "met": met,
            "expected": round(expected, 4),
            "ok": abs(met - expected) <= bound,
        }


# --- speed ----------------------------------------------------------------------------------------------------------


def processor(work: Callable[[], object], times: int = 3) -> float:
    """Processor seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def novels(count: int) -> list[str]:
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt") as file:
        return [json.loads(line)["text"] for _, line in zip(range(count), file, strict=False)]


def _in_process(step: Any, source: Path, folder: Path) -> Callable[[], object]:
    from mega.core.corpus.folder import RunOptions
    from mega.core.corpus.run import process

    return lambda: process([source], step, RunOptions(output=folder / "out.jsonl", overwrite=True))


def speed() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _minhash_speed(folder)
        yield from _url_speed(folder)
        yield _ftfy_speed(folder)


def split_words() -> Any:
    """A tokenizer for datatrove that is faster than any of its own, and needs no library."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Split(WordTokenizer):  # type: ignore[misc]
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    return Split()


def _documents(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "in" / "in.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _minhash_speed(folder: Path) -> Iterator[dict[str, Any]]:
    from mega.core.corpus.near_duplicates import NearDuplicates

    found = novels(2000)
    source = _documents(folder, [{"id": str(i), "url": str(i), "text": text} for i, text in enumerate(found)])
    ours = processor(_in_process(NearDuplicates(), source, folder))
    row = {"item": "speed of near-duplicates", "documents": len(found), "processor_seconds": round(ours, 2)}

    def peer() -> None:
        from datatrove.executor import LocalPipelineExecutor
        from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupFilter
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.writers import JsonlWriter

        shutil.rmtree(folder / "peer", ignore_errors=True)
        words = split_words()
        config, where = MinhashConfig(num_buckets=20, hashes_per_bucket=6), folder / "peer"
        reader = JsonlReader(str(source.parent))
        for number, steps in enumerate(
            (
                [
                    reader,
                    MinhashDedupSignature(output_folder=str(where / "s"), config=config, language=words),
                ],
                [MinhashDedupBuckets(input_folder=str(where / "s"), output_folder=str(where / "b"), config=config)],
                [MinhashDedupCluster(input_folder=str(where / "b"), output_folder=str(where / "r"), config=config)],
                [reader, MinhashDedupFilter(input_folder=str(where / "r")), JsonlWriter(str(where / "o"))],
            )
        ):
            tasks = 20 if number == 1 else 1
            run = LocalPipelineExecutor(steps, tasks=tasks, workers=1, logging_dir=str(where / f"l{number}"))
            for rank in range(tasks):
                run._run_for_rank(rank) if hasattr(run, "_run_for_rank") else None

    theirs = processor(peer, 2)
    yield row | {"peer": "datatrove", "peer_processor_seconds": round(theirs, 2), "ok": theirs >= ours}
    try:
        from lsh.minhash import MinHasher
    except ImportError:
        return
    seeds = np.random.RandomState(1234).randint(0, 1_000_000, 100).astype(np.uint32)
    lsh = processor(lambda: [MinHasher(seeds, char_ngram=5, hashbytes=4).fingerprint(text) for text in found[:400]], 2)
    lsh *= len(found) / 400
    yield row | {
        "peer": "mattilyra/LSH, fingerprints alone",
        "peer_processor_seconds": round(lsh, 2),
        "ok": lsh >= 5 * ours,
    }


def _url_speed(folder: Path) -> Iterator[dict[str, Any]]:
    from datatrove.data import Document
    from datatrove.pipeline.filters import URLFilter

    from mega.core.corpus.urls import Urls, url_test

    links = []
    for path in sorted(shared("webtext_urls/RS_v2_2005-12.urk.json-00.gz").parent.glob("*.gz")):
        with gzip.open(path, "rt") as file:
            links += [json.loads(line)["u"] for line in file]
    step = Urls()
    cold = [url_test(step.domains, step.extensions) for _ in range(3)]  # no host is known yet
    ours = processor(lambda: list(map(cold.pop(), links)))
    whole = processor(_in_process(step, _documents(folder, [{"url": link} for link in links]), folder))
    documents = [Document(text="", id="", metadata={"url": link}) for link in links]
    for name, peer in {
        "datatrove, its own lists": URLFilter(),
        "datatrove, our domains alone": URLFilter(extra_domains=list(step.domains), use_integrated_lists=False),
    }.items():
        peer.filter(documents[0])  # loads its lists
        theirs = processor(lambda peer=peer: [peer.filter(document) for document in documents])  # type: ignore[misc]
        yield {
            "item": "speed of urls",
            "urls": len(links),
            "processor_seconds": round(ours, 3),
            "whole_step": round(whole, 3),
            "peer": name,
            "peer_processor_seconds": round(theirs, 3),
            "ok": theirs >= ours,
        }


def _ftfy_speed(folder: Path) -> dict[str, Any]:
    import ftfy

    from mega.core.corpus.clean import Clean

    found = novels(800)
    found = [text.replace("e", "é", 1).replace("'", "\u2019") if i % 2 else text for i, text in enumerate(found)]
    source = _documents(folder, [{"text": text} for text in found])
    ours = processor(_in_process(Clean(tasks=("ftfy_fix_text",)), source, folder))
    theirs = processor(lambda: [ftfy.fix_text(text) for text in found])
    return {
        "item": "speed of clean, ftfy",
        "documents": len(found),
        "processor_seconds": round(ours, 2),
        "peer": "ftfy alone",
        "peer_processor_seconds": round(theirs, 2),
        "ok": theirs >= 0.95 * ours,
    }


# --- kills ----------------------------------------------------------------------------------------------------------

STEPS: dict[str, list[str]] = {
    "merge": [],
    "urls": ["--json-key", "url"],
    "clean": ["--tasks", "ftfy_fix_text", "general_cleaning", "min_tokens"],
    "near-duplicates": [],
    "decontaminate": [],
}
"""Verbs and their flags. Those that need a file more get it in `_flags`."""


def _flags(step: str, folder: Path) -> list[str]:
    if step == "decontaminate":
        (folder / "squad.json").write_text(json.dumps({"question": " ".join(WORDS[:13])}))
        return ["--task-data", f"squad={folder / 'squad.json'}"]
    return STEPS[step]


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def kills(*steps: str, documents: int = 20_000, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """A process and its workers are killed after a random share of the time that the step takes, until it ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        with (folder / "in" / "a.jsonl").open("w") as file:
            for number, (text, _, _) in enumerate(texts(documents, seed=1)):
                if number % 50 == 0:
                    text += " " + " ".join(WORDS[:13])
                file.write(json.dumps({"url": f"http://site{number % 9000}.com/", "text": text}) + "\n")
        for step in steps or STEPS:
            yield _killed(step, folder, documents, rounds)


def _killed(step: str, folder: Path, documents: int, rounds: int) -> dict[str, Any]:
    flags = ["corpus", step, "--input", str(folder / "in"), *_flags(step, folder)]
    begin = time.monotonic()
    mega(*flags, "--output", str(folder / f"{step}-whole"))
    took = time.monotonic() - begin
    expected, equal, killed = digest(folder / f"{step}-whole"), 0, 0
    draw = random.Random(step)
    for number in range(rounds):
        out = folder / f"{step}-{number}"
        line = [sys.executable, "-m", "mega", *flags, "--output", str(out), "--workers", str(1 + number % 2)]
        wait = draw.uniform(0.2, 1.0) * took
        while True:
            process = subprocess.Popen(
                line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            try:
                process.wait(wait)
                break
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                killed, wait = killed + 1, 1.3 * wait
        equal += process.returncode == 0 and digest(out) == expected and not list(out.glob("*.tmp"))
        shutil.rmtree(out, ignore_errors=True)
    return {
        "item": f"kills of {step}",
        "documents": documents,
        "seconds": round(took, 1),
        "kills": killed,
        "equal": equal,
        "of": rounds,
        "ok": equal == rounds and killed > 0,
    }


ITEMS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "speed": speed,
    "kills": kills,
    "curve": curve,
}


def main() -> None:
    words = sys.argv[1:]
    out = Path("build/battery/corpora.jsonl")
    if "--out" in words:
        at = words.index("--out")
        out = Path(words[at + 1])
        del words[at : at + 2]
    out.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    while words:
        item, given = words.pop(0), []
        while words and words[0] not in ITEMS:
            given.append(words.pop(0))
        for row in ITEMS[item](*(int(word) if word.isdigit() else word for word in given)):
            row |= {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
            print(json.dumps(row), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
