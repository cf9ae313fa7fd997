"""A synthetic web with planted copies, languages and questions of a benchmark, through three steps of `mega corpus`.

    near-duplicates    has to drop exact copies and copies with few words exchanged, in the same file or in another one
    decontaminate      has to cut the documents that have a question, and none that have most of one
    clean              has to drop the documents in other languages, and no others

    python tests/battery/corpus_web.py [--documents 2000000] [--work build/corpus-web] [--out FILE] [--keep]

One JSON line a step: recall and precision of what was planted, the largest memory, time. Words are drawn from English
novels, so that a language can be recognised. What is in WORK is not done again: a call that was killed resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.corpus.minhash import WordShingles, overlap
from tests.support.shared import REPOSITORY, shared

FILES = 4
PERIOD = 100
"""Of so many documents 5 are in other languages, 15 copies, 1 has a question and 1 most of one."""
SENTENCE = 12
SHORT, LONG = (120, 170), (280, 330)
OTHERS = {
    "de": "der die und das ist nicht mit ein eine auf für von sich auch wird werden haben über nach wenn aber noch "
    "durch zwischen können müssen schon Jahre Stadt Straße Leute immer wieder später ohne gegen unter bei diese seinen",
    "fr": "le la les des une est dans que qui pour pas sur avec son sont mais nous vous cette été être avoir fait plus "
    "tout très aussi même leur depuis entre après années ville rue toujours jamais beaucoup parce quand où déjà",
    "es": "el la los las una que en por con para del se no su es como más pero sus este entre cuando muy sin sobre "
    "también hasta desde todo nos durante todos años ciudad calle gente siempre nunca porque donde ahora después",
    "ru": "и в не на что он как это по но из за от так же для она они мы был была было быть который только уже "
    "если когда время год город улица люди всегда никогда потому где сейчас после между через другой",
    "zh": "的 一 是 在 不 了 有 和 人 这 中 大 为 上 个 国 我 以 要 他 时 来 用 们 生 到 作 地 于 出 就 分 对 成 会",
}
"""The most frequent words of languages; Chinese ones are written without blanks."""


@cache
def english() -> np.ndarray[Any, Any]:
    """Running words of novels: a word drawn from them is as frequent as in English."""
    found: list[str] = []
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt") as file:
        for _, line in zip(range(1000), file, strict=False):
            found += re.findall(r"[a-z]+", json.loads(line)["text"].lower())
    return np.array(found, object)


def sentences(words: list[str]) -> str:
    return ". ".join(" ".join(words[at : at + SENTENCE]) for at in range(0, len(words), SENTENCE)) + "."


class WebDocument(NamedTuple):
    """kind: "plain", "copy", "near" (1 or 2 words exchanged), "far" (8 to 20), "question", "part", or a language;
    origin: the document that it is a copy of, or its own number; overlap: with that one; question: that it has."""

    number: int
    text: str
    kind: str
    origin: int
    overlap: float = 1.0
    question: int = -1


KINDS = {3: "language", 7: "copy", 13: "near", 17: "far"}
EXCHANGED = {"copy": (0, 1), "near": (1, 3), "far": (8, 21)}


def kind_of(number: int) -> str:
    """
    >>> [kind_of(number) for number in (0, 3, 11, 27, 31, 111)]
    ['plain', 'language', 'question', 'copy', 'part', 'question']
    """
    special = {11: "question", 31: "part"}.get(number % PERIOD)
    return special or KINDS.get(number % 20, "plain")


def questions(documents: int) -> list[list[str]]:
    """Each is planted in about four documents; a phrase that occurs ten times is left in by decontaminate."""
    draw = np.random.default_rng(1)
    words = english()
    count = max(documents // (4 * PERIOD), 1)
    return [list(words[draw.integers(0, len(words), int(draw.integers(13, 21)))]) for _ in range(count)]


def web(documents: int) -> Iterator[WebDocument]:
    """The documents in order. A copy is of any earlier plain document, of about 50,000 that are remembered."""
    draw, words, shingles = np.random.default_rng(0), english(), WordShingles().shingles
    asked, languages = questions(documents), [(name, text.split()) for name, text in OTHERS.items()]
    remembered: list[tuple[int, list[str]]] = []
    for number in range(documents):
        kind = kind_of(number)
        if kind in EXCHANGED and remembered:
            origin, own = remembered[int(draw.integers(len(remembered)))]
            changed, text = list(own), sentences(own)
            for at in draw.choice(len(own), int(draw.integers(*EXCHANGED[kind])), replace=False):
                changed[at] = words[draw.integers(len(words))]
            copied = sentences(changed)
            yield WebDocument(number, copied, kind, origin, overlap(shingles(copied), shingles(text)))
        elif kind == "language":
            name, vocabulary = languages[number // 20 % len(languages)]
            drawn = [vocabulary[at] for at in draw.integers(0, len(vocabulary), int(draw.integers(*SHORT)))]
            yield WebDocument(number, "".join(drawn * 2) if name == "zh" else sentences(drawn), name, number)
        elif kind in ("question", "part"):
            own = list(words[draw.integers(0, len(words), int(draw.integers(*LONG)))])
            which = number // PERIOD % len(asked)
            planted = asked[which] if kind == "question" else [*asked[which][:12], "omitted"]
            own[len(own) // 2 : len(own) // 2] = planted
            yield WebDocument(number, sentences(own), kind, number, question=which)
        else:
            own = list(words[draw.integers(0, len(words), int(draw.integers(*SHORT)))])
            if len(remembered) < 50_000:
                remembered.append((number, own))
            elif number % 20 == 0:
                remembered[int(draw.integers(len(remembered)))] = (number, own)
            yield WebDocument(number, sentences(own), "plain", number)


class PlantedWeb(NamedTuple):
    """What the evaluation has to know of each document, as arrays by number."""

    kinds: np.ndarray[Any, Any]
    origins: np.ndarray[Any, Any]
    overlaps: np.ndarray[Any, Any]


class WebRun:
    """work: the folder of all files, which says what is done."""

    def __init__(self, work: Path, documents: int) -> None:
        self.work, self.documents = work, documents
        work.mkdir(parents=True, exist_ok=True)

    def write(self) -> PlantedWeb:
        """The web's files and what is planted in them, unless they are there."""
        planted = self.work / "planted.npz"
        if not planted.is_file():
            (self.work / "web").mkdir(exist_ok=True)
            files = [open(self.work / "web" / f"{i}.jsonl", "wb") for i in range(FILES)]  # noqa: SIM115
            kinds, origins, overlaps = [], np.zeros(self.documents, np.int64), np.zeros(self.documents, np.float32)
            for each in web(self.documents):
                files[each.number % FILES].write(orjson.dumps({"url": each.number, "text": each.text}) + b"\n")
                kinds.append(each.kind)
                origins[each.number], overlaps[each.number] = each.origin, each.overlap
            for file in files:
                file.close()
            asked = [{"question": " ".join(words)} for words in questions(self.documents)]
            (self.work / "benchmark.json").write_text(json.dumps(asked))
            np.savez(planted, kinds=np.array(kinds), origins=origins, overlaps=overlaps)
        found = np.load(planted)
        if len(found["kinds"]) != self.documents:
            raise SystemExit(
                f"--work {self.work}: holds a web of {len(found['kinds']):,} documents; name another folder"
            )
        return PlantedWeb(found["kinds"], found["origins"], found["overlaps"])

    def step(self, verb: str, source: str, *flags: str) -> dict[str, Any]:
        """Apply a verb, unless that is done; its counts, time and largest memory."""
        measured = self.work / f"{verb}.measured.json"
        row: dict[str, Any] = json.loads(measured.read_text()) if measured.is_file() else {"calls": 0}
        if not row.get("done"):
            line = [sys.executable, "-m", "mega", "corpus", verb, "--input", str(self.work / source), *flags]
            row = watched([*line, "--output", str(self.work / verb)], row, measured)
        return row | {"counts": json.loads((self.work / verb / ".corpus.json").read_text())["counts"]}

    def rows(self, folder: str) -> Iterator[dict[str, Any]]:
        """The documents of a folder."""
        for path in sorted((self.work / folder).glob("*.jsonl")):
            with path.open("rb") as file:
                yield from map(orjson.loads, file)

    def numbers(self, folder: str) -> np.ndarray[Any, Any]:
        """Which documents a folder has."""
        found = np.zeros(self.documents, bool)
        for row in self.rows(folder):
            found[row["url"]] = True
        return found


def watched(line: list[str], before: dict[str, Any], measured: Path) -> dict[str, Any]:
    """Run a line; seconds of a clock and of processors, the largest memory of all its processes together, in bytes, and
    calls, with those of `before`, calls that were killed. They are written to `measured` as long as it runs."""
    begin = time.monotonic()
    process = psutil.Popen(line, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    row = {"calls": before["calls"] + 1, "memory_bytes": before.get("memory_bytes", 0)}
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            row["memory_bytes"] = max(row["memory_bytes"], sum(one.memory_info().rss for one in family))
            used = sum(sum(one.cpu_times()[:2]) for one in family)
            row["seconds"] = round(before.get("seconds", 0) + time.monotonic() - begin, 1)
            row["processor_seconds"] = round(before.get("processor_seconds", 0) + used, 1)
        measured.write_text(json.dumps(row))
        time.sleep(1)
    if process.returncode:
        raise SystemExit(f"{' '.join(line)}: ended with {process.returncode}")
    row["done"] = True
    measured.write_text(json.dumps(row))
    return row


def judged(planted: int, found: int, wrong: int, step: dict[str, Any]) -> dict[str, Any]:
    """found: of the planted ones; wrong: what went and should not have gone."""
    counts = step["counts"]
    adds_up = counts["documents"] == counts["kept"] + sum(counts["dropped"].values())
    recall, precision = found / max(planted, 1), found / max(found + wrong, 1)
    ok = recall >= 0.99 and precision >= 0.99 and adds_up and step["memory_bytes"] <= 2 << 30
    measured = {key: step[key] for key in ("seconds", "processor_seconds", "memory_bytes", "calls")}
    return (
        {"planted": planted, "recall": recall, "precision": precision, "counts": counts["dropped"]}
        | measured
        | {"ok": ok}
    )


def clean(run: WebRun, planted: PlantedWeb) -> dict[str, Any]:
    """Which documents are in another language is planted; all others stay."""
    step = run.step("clean", "decontaminate", "--tasks", "ftfy_fix_text", "language")
    before, others = run.numbers("decontaminate"), np.isin(planted.kinds, list(OTHERS))
    gone = before & ~run.numbers("clean")
    by = {name: float(gone[before & (planted.kinds == name)].mean()) for name in OTHERS}
    return judged(int((before & others).sum()), int((gone & others).sum()), int((gone & ~others).sum()), step) | {
        "by_language": by
    }


def near_duplicates(run: WebRun, planted: PlantedWeb) -> dict[str, Any]:
    """Pairs of a document and its origin that overlap by 0.8 and are in one group; a group has one origin."""
    step = run.step("near-duplicates", "web", "--groups", str(run.work / "groups"))
    group_of = np.full(run.documents, -1, np.int64)
    wrong = 0
    for index, row in enumerate((run.work / "groups").open("rb")):
        members = np.array([int(one) for one in next(iter(orjson.loads(row).values()))])
        group_of[members] = index
        families = planted.origins[members]
        wrong += int((families != families[0]).sum())
    alike = (planted.origins != np.arange(run.documents)) & (planted.overlaps >= 0.8)
    found = alike & (group_of >= 0) & (group_of == group_of[planted.origins])
    across = alike & (planted.origins % FILES != np.arange(run.documents) % FILES)
    own = {"exact": alike & (planted.overlaps == 1), "near": alike & (planted.overlaps < 1), "across_files": across}
    recalls = {name: [int(of.sum()), float(found[of].mean())] for name, of in own.items()}
    return judged(int(alike.sum()), int(found.sum()), wrong, step) | {"pairs": recalls}


def decontaminate(run: WebRun, planted: PlantedWeb) -> dict[str, Any]:
    """A document with a question is cut or gone, and no piece has the question; all others stay whole."""
    step = run.step("decontaminate", "near-duplicates", "--task-data", f"squad={run.work / 'benchmark.json'}")
    before, whole = run.numbers("near-duplicates"), np.zeros(run.documents, bool)
    asked, has = questions(run.documents), planted.kinds == "question"
    missed = 0
    for row in run.rows("decontaminate"):
        whole[row["url"]] |= "split_id" not in row
        if has[row["url"]]:
            text = " ".join(re.findall(r"\w+", row["text"]))
            missed += " ".join(asked[row["url"] // PERIOD % len(asked)]) in text
    cut = before & ~whole
    row = judged(int((before & has).sum()), int((cut & has).sum()) - missed, int((cut & ~has).sum()), step)
    return row | {"pieces_with_a_question": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--work", type=Path, default=Path("build/corpus-web"))
    parser.add_argument("--out", type=Path, default=Path("build/battery/corpus_web.jsonl"))
    parser.add_argument("--keep", action="store_true", help="leave the documents in WORK")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY)
    run = WebRun(given.work.resolve(), given.documents)
    planted, ok = run.write(), True
    given.out.parent.mkdir(parents=True, exist_ok=True)
    size = sum(path.stat().st_size for path in (run.work / "web").glob("*"))
    for evaluate in (near_duplicates, decontaminate, clean):
        row = {"item": f"web, {evaluate.__name__}", "documents": given.documents, "bytes": size}
        row |= evaluate(run, planted) | {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
        ok &= row["ok"]
        print(json.dumps(row), flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    if not given.keep:
        shutil.rmtree(run.work)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
