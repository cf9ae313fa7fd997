"""`mega retro` killed (SIGKILL) at random moments of each stage, and started again until it ends: equal bytes.

    python tests/battery/retro_kills.py --shared ../shared/data --out build/battery/retro_kills.jsonl

One JSON line a kill: the stage, after how many files it came, and whether the folder is that of the run that was never
killed. Rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mega.core.data.indexed import token_dtype
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.text.build import build

KILLS = 20
STAGES = {"chunks": "db/individual", "vectors": "index", "neighbours": "query"}
"""Stage -> where its blocks are."""


class Work:
    """The commands of one folder."""

    def __init__(self, shared: Path, folder: Path) -> None:
        self.files = str(shared / "gpt2" / "gpt2-vocab.json"), str(shared / "gpt2" / "gpt2-merges.txt")
        flags = "--vocab-file", self.files[0], "--merge-file", self.files[1]
        self.gpt, self.folder = ["--tokenizer", "GPT2BPETokenizer", *flags], folder
        self.blend = ["--data-path", "3", str(folder / "a"), "1", str(folder / "b"), "--split", "80,20,0"]
        self.bert = ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file"]
        self.bert.append(str(shared / "bert" / "bert-base-uncased-vocab.txt"))

    def prepare(self, texts: Sequence[str]) -> None:
        """Corpora, and a BERT of one step."""
        words = build(tokenizer="GPT2BPETokenizer", vocab_file=self.files[0], merge_file=self.files[1])
        assert words.eod is not None
        for name, part in (("a", texts[:14]), ("b", texts[14:])):
            with IndexedWriter(self.folder / name, token_dtype(words.vocab_size)) as writer:
                for text in part:
                    writer.add([[*words.encode(text), words.eod]])
        sizes = "--family bert --mock-data --layers 2 --hidden 16 --heads 2 --micro-batch 2 --global-batch 2 --lr 1e-3"
        more = ["--seq-length", "64", "--steps", "1", "--save-interval", "1", "--eval-iters", "0", "--device", "cpu"]
        run("pretrain", *sizes.split(), *more, *self.bert, "--save", str(self.folder / "bert"))

    def building(self, db: Path) -> list[str]:
        sizes = "--chunk-length 16 --block-size 9 --doc-block-size 2 --device cpu".split()
        return ["retro", "build", "--directory", str(db), *self.embedder, *sizes, *self.blend, *self.gpt]

    def querying(self, db: Path) -> list[str]:
        sizes = (
            "--layers 2 --hidden 16 --heads 2 --micro-batch 2 --global-batch 2 --lr 1e-3 --device cpu --seq-length 32"
        )
        retro = f"--retriever --retro {db} --retro-layers 1 --retro-chunk-length 16 --steps 9 --eval-iters 1"
        search = "--candidates 40 --saved 4".split()
        return ["retro", "query", *sizes.split(), *retro.split(), *search, *self.embedder, *self.blend, *self.gpt]

    @property
    def embedder(self) -> list[str]:
        return ["--embedder", str(self.folder / "bert")]


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "mega", *words], check=True, stdout=subprocess.DEVNULL)


def killed(words: Sequence[str], folder: Path, files: int) -> bool:
    """Whether a run was killed when `folder` had that many whole files, or ended before."""
    process = subprocess.Popen([sys.executable, "-m", "mega", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if sum(not path.name.endswith(".tmp") for path in folder.rglob("*.*")) >= files:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    return False


def digest(folder: Path) -> str:
    """Of the names and bytes of all files but those that a killed process left half written."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith(".tmp"):
            found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/battery/retro_kills.jsonl"))
    parser.add_argument("--kills", type=int, default=KILLS, help="of each stage")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = given.out.read_text().count("\n") if given.out.exists() else 0
    texts = json.loads((given.shared / "golden/retro/retro_data.json").read_text())["docs"]
    with tempfile.TemporaryDirectory() as place:
        work, folder = Work(given.shared.resolve(), Path(place)), Path(place) / "whole"
        work.prepare(texts)
        for words in (work.building(folder), work.querying(folder)):
            run(*words)
        whole = digest(folder)
        for number in range(done, given.kills * len(STAGES)):
            stage = list(STAGES)[number % len(STAGES)]
            row = {"stage": stage, **one(work, Path(place) / f"{number}", folder / STAGES[stage], stage, number, whole)}
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def one(work: Work, db: Path, model: Path, stage: str, number: int, whole: str) -> dict[str, object]:
    """Kill one stage once, then start it again, and compare."""
    count = sum(path.is_file() for path in model.rglob("*"))
    files = random.Random(number).randrange(1, count)
    words = work.querying(db) if stage == "neighbours" else work.building(db)
    if stage == "neighbours":
        run(*work.building(db))
    (db / STAGES[stage]).mkdir(parents=True, exist_ok=True)
    was = killed(words, db / STAGES[stage], files)
    for again in (work.building(db), work.querying(db)):
        run(*again)
    return {"files": files, "killed": was, "equal": digest(db) == whole}


if __name__ == "__main__":
    main()
