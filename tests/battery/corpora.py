"""Corpora: speed next to other programs, and the curve of Megatron-LM's bands. See also corpus_web and corpus_kills.

    speed               MinHash, URL filter and ftfy next to datatrove, mattilyra/LSH (where installed) and ftfy alone
    curve               Megatron-LM's bands of signatures on planted pairs, next to their computed chance

    python tests/battery/corpora.py speed curve [--out FILE]

datatrove needs xxhash < 4, pyahocorasick and fasteners. Each row is one JSON line. Processor seconds are compared, not
hours of a clock: other work may run.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.corpus.minhash import CharShingles, band_keys, chance, overlap
from tests.support.shared import shared

ROOT = Path(__file__).resolve().parents[2]
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


ITEMS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "speed": speed,
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
    for item in words:
        for row in ITEMS[item]():
            row |= {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
            print(json.dumps(row), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
