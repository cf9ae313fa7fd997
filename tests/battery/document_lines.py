"""The lines that the four documents show, each translated and typed in a folder of small files under the same names.

    PYTHONPATH=. python tests/battery/document_lines.py ["line 03" ...] [--summary]

Runs that mean a cluster end at --dry-run; the sizes of a model that a line loads are those of the small one. The lines
of Megatron-11b, with fairseq's own numbers: tests/legacy/test_document_lines.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.command_line.legacy.scripts import command_lines
from mega.command_line.legacy.translation import quoted
from tests.battery.data_ledger import run
from tests.support.archives import unpack
from tests.support.old_lines import Stands, run_quietly, translated
from tests.support.shared import shared

TEXT = "Once upon a time there was a model. It read the whole of the web, and then it wrote a page of its own. "
SIZES = ("--layers", "--hidden", "--heads", "--positions", "--seq-length")
TINY = "--layers 2 --hidden 64 --heads 2 --seq-length 64 --vocab 512 --steps 2 --mock-data"
GOLDEN = Path(__file__).parents[1] / "golden" / "fairseq_lines"


class Folder:
    """Files under the names that the documents use."""

    def __init__(self, place: Path):
        self.place, self.stands = place, Stands(place)
        os.environ["NLTK_DATA"] = str(shared("nltk_data"))
        links = {
            "bert-vocab.txt": "bert/bert-base-uncased-vocab.txt",
            "gpt2-vocab.json": "gpt2/gpt2-vocab.json",
            "gpt2-merges.txt": "gpt2/gpt2-merges.txt",
            "encoder.json": "gpt2/gpt2-vocab.json",
            "vocab.bpe": "gpt2/gpt2-merges.txt",
            "lambada.json": "lambada/lambada_test.first500.jsonl",
            "lambada_test.jsonl": "lambada/lambada_test.first500.jsonl",
            "data/glue_data/MNLI/train.tsv": "mnli/glue_sample/dev_matched.tsv",
            "data/glue_data/MNLI/dev_matched.tsv": "mnli/glue_sample/dev_matched.tsv",
            "data/glue_data/MNLI/dev_mismatched.tsv": "mnli/glue_sample/dev_matched.tsv",
            "gpt2/vocab.json": "gpt2/gpt2-vocab.json",
            "gpt2/merges.txt": "gpt2/gpt2-merges.txt",
        }
        for name, source in links.items():
            self.path(name).symlink_to(shared(source))
        lines = [json.dumps({"text": TEXT * (1 + number % 7), "url": f"http://a.bc/{number}"}) for number in range(400)]
        for name in ("my-corpus.json", "wiki.json", "webtext_test.json", "data/wikipedia/wikidump_lines.json"):
            self.path(name).write_text("\n".join(lines) + "\n")
        raw = shared("wikitext/wiki.valid.raw").read_text()[:6000]
        for name in ("wiki.txt", "wiki.test.tokens", "wikitext-103-raw/wiki.test.raw"):
            self.path(name).write_text(raw)
        self.path("wikitext-103-raw/wiki.test.detok").write_text(TEXT + "\n\n" + TEXT + "\n")
        for name in ("data.json", "clean.json", "dedup.json"):
            self.path(name).write_text("\n".join(lines) + "\n")
        self.path("urls/first.txt").write_text("http://a.bc/1\nhttp://imgur.com/x\n")
        self.path("groups").write_text('{"0": ["http://a.bc/0", "http://a.bc/7"]}\n')
        self.path("pairs").write_text('{"http://a.bc/0": [{"http://a.bc/7": 0.9}]}\n')
        self.path("a").write_text('{"text": "one", "score": {"toxicity": 0.5}}\n{"text": "two", "score": null}\n')
        for name, key in (("lambada", "text"), ("squad", "question")):
            self.path(f"tasks/{name}").write_text(json.dumps({key: "what did the model write of the web then"}))
        self.path("run_gpt2_test.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
        self._fairseq()
        self._models()
        self._race()

    def path(self, name: str) -> Path:
        found = self.place / name
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def _fairseq(self) -> None:
        for name in ("dict.txt", "model-model_part-0.pt"):
            shutil.copy(GOLDEN / name, self.path(f"megatron_11b/{name}"))
        shutil.copy(GOLDEN / "test.bpe", self.path("wikitext-103-raw/wiki.test.bpe"))
        words = ["--tokenizer", "FairseqTokenizer", "--tokenizer-model", str(GOLDEN / "dict.txt"), "--text-lines"]
        for name, prefix in (("train", "DATA/train"), ("valid", "DATA/valid"), ("test", "wikitext103-bin/test")):
            source = str(self.path(f"{name}.bpe"))
            Path(source).write_text((GOLDEN / f"{name}.bpe").read_text() * 5)
            made = ["--append-eod", "--input", source, "--output-prefix", str(self.path(prefix))]
            run_quietly(["preprocess", *words, *made])

    def _models(self) -> None:
        gpt, bert = self.stands.model("gpt"), self.stands.model("bert")
        for name in ("checkpoints/gpt2_345m", "gpt2_345"):
            self.path(name).symlink_to(gpt)
        self.path("checkpoints/bert_345m").symlink_to(bert)
        cut = [
            "--tp",
            "4",
            "--pp",
            "4",
            "--saver",
            "megatron",
            "--save-dir",
            str(self.path("checkpoints/gpt3_tp4_pp4")),
        ]
        run_quietly(["reshard", "--load-dir", gpt, *cut])

    def _race(self) -> None:
        with tarfile.open(shared("race/RACE-dev.tar.gz")) as archive:
            names = [name for name in archive.getnames() if name.endswith(".txt")]
            for part in ("train/middle", "dev/middle", "dev/high"):
                of_part = [name for name in names if part.split("/")[1] in name][:4]
                for name in of_part:
                    unpack(archive, self.place / "race", name)
                    self.path(f"data/RACE/{part}/x").parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self.place / "race" / name, self.path(f"data/RACE/{part}/{Path(name).name}"))


class Answering(BaseHTTPRequestHandler):
    """A server as text_generation_cli.py asks it."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"text": ["Once upon a time"], "segments": [["Once"]], "logprobs": None}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """As Perspective."""
        names = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["requestedAttributes"]
        scores = {name: {"summaryScore": {"value": 0.25}} for name in names}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"attributeScores": scores}).encode())

    def log_message(self, *given: Any) -> None:
        pass


def small(words: Sequence[str], row: dict[str, Any]) -> list[str]:
    """The words of a new line after `mega`, as they can run here."""
    verb, rest = words[0], [os.path.expandvars(word) for word in words[1:]]
    if row["where"] == "Retro":
        return _retrieving(verb, rest)
    if verb in ("pretrain", "finetune"):
        dry = ["--dry-run", "--world", "8" if row["document"] == "002" else "1"]
        rest = _without(rest, ("--nproc",))
        if "--deepspeed-config" in rest:
            return [verb, *rest, *dry, *(TINY.split())]
        if row["document"] == "002":
            # Of 11 billion parameters the stages are built without memory; the ids are those of a small dictionary.
            return [verb, *rest, *dry, "--allow-tokenizer-mismatch"]
        if row["document"] == "003":
            rest = [*_without(rest, ("--steps", "--lr-decay-steps", "--load", "--save-interval")), "--steps", "20"]
            rest += ["--save-interval", "10"]
        if verb == "finetune":
            rest = _without(rest, SIZES)
            rest += ["--layers", "4", "--hidden", "128", "--heads", "64", "--ffn", "128", "--seq-length", "32"]
            rest += ["--positions", "4096", "--vocab-multiple", "1"]
        return [verb, *rest, *dry]
    if verb == "eval":
        rest = [*_without(rest, (*SIZES, "--nproc", "--tp", "--dtype", "--context-window")), "--device", "cpu"]
        rest += ["--limit", "2", "--seq-length", "32" if row["document"] == "002" else "256"]
        if "--random-windows" in rest:
            rest[rest.index("--random-windows") + 1] = "4"
        return [verb, *rest, *(["--context-window", "24"] if row["document"] == "002" else [])]
    if "--scorer" in rest:
        rest[rest.index("--scorer") + 1] = "http://localhost:5000"
    if verb == "corpus":
        return [verb, *rest, "--overwrite"] if "group" not in rest else [verb, *rest]
    if "--url" in rest:
        return [verb, *rest, "--prompt", "Once"]
    return [verb, *rest]


def _retrieving(verb: str, rest: Sequence[str]) -> list[str]:
    """A step of Retro. The lines name neither the corpus nor the sizes of a batch, in which the commands must agree."""
    words = ["--split", "75,25,0", "--tokenizer", "Llama2Tokenizer", "--tokenizer-model", os.environ["LLAMA"]]
    sizes = "--seq-length 128 --micro-batch 2 --global-batch 16 --steps 2 --lr 1e-4 --eval-iters 1 --eval-interval 2"
    if rest[0] == "build":
        return [verb, *rest, *words, "--device", "cpu"]
    if rest[0] == "query":
        model = "--layers 24 --hidden 1024 --heads 16 --candidates 8 --saved 2 --device cpu"
        return [verb, *rest, *words, *sizes.split(), *model.split()]
    corpus = ["--data-path", os.environ["RETRO_DATA_PATH"]]
    return [verb, *_without(rest, ("--nproc",)), *words, *sizes.split(), *corpus, "--dry-run", "--world", "8"]


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    return [word for at, word in enumerate(words) if word not in flags and (not at or words[at - 1] not in flags)]


def prove(row: dict[str, Any], folder: Folder) -> dict[str, Any]:
    (line,) = command_lines(row["line"])
    result = translated(line)
    assert not result.lacking, result.lacking
    before = os.getcwd()
    os.chdir(folder.place)
    try:
        for words in result.commands:
            typed = small(words[words.index("mega") + 1 :], row)
            _remove(Path("eval"))  # results of another line's model
            for flag in () if typed[0] == "corpus" else ("--output", "--output-prefix", "--output-dir", "--save-dir"):
                if flag in typed:
                    _remove(Path(typed[typed.index(flag) + 1]))
            run_quietly(typed)
    finally:
        os.chdir(before)
    return {**row, "lines": [quoted(words) for words in result.commands], "dropped": result.dropped}


def _remove(path: Path) -> None:
    for found in [path] if path.is_dir() else path.parent.glob(f"{path.name}*"):
        shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()


if __name__ == "__main__":
    rows = [json.loads(line) for line in shared("golden/document_lines.jsonl").read_text().splitlines()]
    server = ThreadingHTTPServer(("localhost", 5000), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"GPT2": f"{place}/gpt2", "VOCAB": f"{place}/bert-vocab.txt", "TASKS": f"{place}/tasks"}
        folder = Folder(Path(place))
        items = [(f"line {number:02}", partial(prove, row, folder)) for number, row in enumerate(rows)]
        os.environ |= {"LLAMA": str(shared("llama2/tokenizer.model")), "RETRO_DATA_PATH": folder.stands.corpus()}
        os.environ["RETRO_EMBEDDER"] = folder.stands.model("bert")
        run("document_lines", items)
