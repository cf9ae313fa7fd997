"""`mega eval` on 500 passages of LAMBADA and a long piece of WikiText, verdict by verdict against transformers.

lambada M S L    model M (stories260K as it lies, or a GPT that is trained here and exported), strict or not, layout L:
                 as many passages right as transformers finds
verdicts M S     the same ones
wikitext M L     loss, perplexity and adjusted perplexity, windows 32 apart: 1e-4 relative
killed           two tensor ranks killed by SIGKILL, resumed by two stages: the verdicts of an undisturbed run
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.config.compose import GivenOptions
from mega.core.config.run import Options, updated
from mega.core.device import Device
from mega.core.tasks.benchmarks.lambada import Lambada
from mega.core.tasks.model import check_model, open_here, tokenizer_of
from mega.core.tasks.options import BenchmarkInputs, TaskOptions
from mega.core.tasks.rows import all_greedy, batch_of
from tests.battery.data_ledger import ROOT, Item, run
from tests.support.shared import shared
from tests.tasks.test_eval import their_verdicts, their_wikitext

FLAGS: dict[str, dict[str, list[str]]] = {
    "stories": {
        "tp1": [],
        "tp2": ["--nproc", "2", "--tp", "2", "--sequence-parallel"],
        "pp2": ["--nproc", "2", "--pp", "2", "--stage-layers", "2", "3"],
        "dp2": ["--nproc", "2"],
    },
    "gpt": {
        "tp1": [],
        "tp2": ["--nproc", "2", "--tp", "2"],
        "pp2": ["--nproc", "2", "--pp", "2"],
        "dp2": ["--nproc", "2"],
    },
}
LENGTH, LINES = {"stories": 256, "gpt": 256}, 120


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="mega-evaluation-"))


def mega(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mega", *map(str, words)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr[-400:])
    return found


@functools.cache
def trained() -> Path:
    """A run of 200 steps on Shakespeare, with a tokenizer of its own."""
    place, text = folder(), shared("tinyshakespeare/input.txt")
    lines = place / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in text.read_text().split("\n\n")))
    mega("train-tokenizer", "--input", lines, "--vocab-size", 1000, "--output-dir", place / "tokenizer")
    files = ["--tokenizer", "GPT2BPETokenizer", "--vocab-file", place / "tokenizer" / "vocab.json"]
    files += ["--merge-file", place / "tokenizer" / "merges.txt"]
    mega("preprocess", "--input", lines, "--output-prefix", place / "tokens", "--workers", 1, "--append-eod", *files)
    shape = ["--layers", 4, "--hidden", 96, "--heads", 4, "--seq-length", 512, "--micro-batch", 4, "--device", "cpu"]
    rest = ["--data-path", place / "tokens_text_document", "--lr", "2e-3", "--steps", 200, "--save-interval", 200]
    rest += ["--split", "1,0,0", "--eval-iters", 0, "--metrics", place / "metrics.jsonl"]
    mega("pretrain", *shape, *rest, *files, "--save", place / "run")
    mega("convert-llama", "--load-dir", place / "run", "--save-dir", place / "hf", "--to", "hf")
    return place / "run"


@functools.cache
def model(name: str) -> tuple[Path, Any]:
    """Where it lies, and the same as transformers opens it: a model, and what encodes a text."""
    import sentencepiece
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name == "gpt":
        load = trained()
        library = AutoTokenizer.from_pretrained(load.parent / "hf")
        return load, (AutoModelForCausalLM.from_pretrained(load.parent / "hf"), library.encode)
    load = shared("stories260K_hf/config.json").parent
    pieces = sentencepiece.SentencePieceProcessor(str(load / "tokenizer.model"))
    return load, (AutoModelForCausalLM.from_pretrained(load), lambda text: [1, *pieces.encode(text)])


def lambada() -> Path:
    return shared("lambada/lambada_test.first500.jsonl")


@functools.cache
def verdicts(name: str, strict: bool) -> list[bool]:
    return their_verdicts(model(name)[1], lambada(), strict)


@functools.cache
def article() -> Path:
    path = folder() / "wiki.part.tokens"
    lines = shared("wikitext/wiki.valid.tokens").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:LINES]))
    return path


@functools.cache
def perplexities(name: str) -> dict[str, float]:
    return their_wikitext(model(name)[1], article(), LENGTH[name], 32)


def evaluated(name: str, task: str, data: Path, *flags: object) -> dict[str, float]:
    out = folder() / "result.json"
    mega(
        "eval", "--task", task, "--load", model(name)[0], "--valid-data", data, "--device", "cpu", "--json", out, *flags
    )
    return {figure["name"]: figure["value"] for figure in json.loads(out.read_text())["figures"]}


def of_lambada(name: str, strict: bool, layout: str) -> dict[str, Any]:
    expected, flags = verdicts(name, strict), ["--strict-lambada"] * strict
    found = evaluated(name, "lambada", lambada(), *flags, *FLAGS[name][layout])
    assert found["number correct"] == sum(expected), (found["number correct"], sum(expected))
    assert found["total examples"] == len(expected)
    return {"right": sum(expected), "of": len(expected), "ppl": found["ppl"]}


def same_verdicts(name: str, strict: bool) -> dict[str, Any]:
    """Passage by passage, in the file's order."""
    given = {"load": str(model(name)[0]), "device": "cpu"}
    options = TaskOptions("lambada", (str(lambada()),), strict_lambada=strict)
    checked, opened = check_model(updated(Options(), given), GivenOptions(None, given), 1)
    here = open_here(checked, 0, 1, Device.choose("cpu"), None)
    asked = BenchmarkInputs(options, tokenizer_of(checked.run, opened), checked.length, 1, opened.model.vocab or 0)
    rows, scorer = list(Lambada(asked)._rows(lambada())), here.scorer(greedy=True)
    found: list[bool] = []
    for first in range(0, len(rows), 8):
        batch = batch_of(rows[first : first + 8], 1)
        found += [bool(right) for right in all_greedy(batch, scorer.score([batch])[0]).total]
    other = [
        number for number, pair in enumerate(zip(found, verdicts(name, strict), strict=True)) if pair[0] != pair[1]
    ]
    assert not other, other
    return {"passages": len(found), "right": sum(found)}


def of_wikitext(name: str, layout: str) -> dict[str, Any]:
    expected = perplexities(name)
    found = evaluated(name, "wikitext103", article(), "--seq-length", LENGTH[name], *FLAGS[name][layout])
    worst = max(abs(found[each] / value - 1) for each, value in expected.items())
    assert worst <= 1e-4, worst
    return {"ppl": found["ppl"], "adjusted": found["adjusted ppl"], "ratio": found["token ratio"], "worst": worst}


def killed() -> dict[str, Any]:
    load, out = model("stories")[0], folder() / "killed.json"
    words = ["eval", "--task", "lambada", "--load", load, "--valid-data", lambada(), "--device", "cpu", "--json", out]
    command = [sys.executable, "-m", "mega", *map(str, words), "--nproc", "2", "--tp", "2", "--micro-batch", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = Path(f"{out}.partial")
    while process.poll() is None and not partial.exists():
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = json.loads(partial.read_text())["examples"]
    assert 0 < done < len(verdicts("stories", False)) and not out.exists()
    said = mega(*words, *FLAGS["stories"]["pp2"])
    kept = json.loads(out.read_text())
    found = {figure["name"]: figure["value"] for figure in kept["figures"]}
    assert kept["resumed_after"] == done and f"resuming after {done} examples" in said.stderr
    assert found["number correct"] == sum(verdicts("stories", False)) and not partial.exists()
    return {"killed after": done, "right": found["number correct"]}


ITEMS: list[Item] = [
    *(
        (
            f"lambada {name} {'strict' if strict else 'last token'} {layout}",
            functools.partial(of_lambada, name, strict, layout),
        )
        for name, layouts in FLAGS.items()
        for strict in (False, True)
        for layout in layouts
    ),
    *(
        (f"wikitext {name} {layout}", functools.partial(of_wikitext, name, layout))
        for name, layouts in FLAGS.items()
        for layout in layouts
    ),
    *(
        (f"verdicts {name} {'strict' if strict else 'last token'}", functools.partial(same_verdicts, name, strict))
        for name in FLAGS
        for strict in (False, True)
    ),
    ("killed", killed),
]

if __name__ == "__main__":
    run("evaluation", ITEMS)
