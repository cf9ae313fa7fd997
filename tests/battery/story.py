"""The whole story with one command line: texts become a tokenizer, a GPT and a BERT, scores, finetunings, exports.

    python tests/battery/story.py OUT --novels novels.jsonl.gz --shakespeare input.txt [--lambada lambada_test.jsonl]
        [--wikitext wiki.valid.tokens] [--mnli train.tsv] [--qqp train.tsv] [--small]

Every step is one `mega` line, printed before it runs, and it is what a user would type. By default sizes are those of
one large GPU for about ten minutes; with --small those of one CPU core for half a minute. What is not given is
left out. Interrupted, the same line resumes: token files, checkpoints and scores are kept where they were made.

tasks: MNLI's and QQP's tables are cut in two by a hash of the pair. Conversations are made of Shakespeare's dialogue:
what one says is the prompt, what the next one says is the answer.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.pairs import split_pairs

GPT2 = "--tokenizer GPT2BPETokenizer --vocab-file {out}/bpe/vocab.json --merge-file {out}/bpe/merges.txt"
WORDPIECE = "--tokenizer BertWordPieceLowerCase --vocab-file {out}/wordpiece/vocab.txt"
ONE = "--eval-iters 0 --resume auto"

DATA = (
    ("A tokenizer for GPT", "train-tokenizer --input {novels} --vocab-size {vocab} --output-dir {out}/bpe"),
    (
        "One for BERT",
        "train-tokenizer --kind wordpiece --input {novels} --vocab-size {vocab} --output-dir {out}/wordpiece",
    ),
    ("The novels as tokens", f"preprocess --input {{novels}} --output-prefix {{out}}/novels --append-eod {GPT2}"),
    (
        "The same cut into sentences, as BERT reads them",
        "preprocess --input {novels} --output-prefix {out}/sentences --split-sentences"
        f" --sentence-splitter {{splitter}} {WORDPIECE}",
    ),
    ("Shakespeare as tokens", f"preprocess --input {{plays}} --output-prefix {{out}}/plays --append-eod {GPT2}"),
)
TRAINING = (
    (
        "A BERT",
        f"pretrain --family bert {{bert}} {{machine}} --lr {{bert_lr}} --lr-decay linear --lr-warmup-fraction 0.05"
        f" --data-path {{out}}/sentences_text_sentence {WORDPIECE} --save {{out}}/bert --save-interval {{save}} {ONE}",
    ),
    (
        "A GPT",
        f"pretrain {{gpt}} {{machine}} --lr {{gpt_lr}} --lr-decay cosine --lr-warmup-fraction 0.05 --data-path"
        f" {{out}}/novels_text_document {GPT2} --save {{out}}/gpt --save-interval {{save}} {ONE}",
    ),
)
PERPLEXITY = "eval --task ppl --load {{out}}/{0} --valid-data {{held_out}} {{machine}} --json {{out}}/ppl-{0}.json"
SCORES = (
    ("What the GPT makes of plays that it has not read", PERPLEXITY.format("gpt")),
    (
        "Its score on LAMBADA",
        "eval --task lambada --load {out}/gpt --valid-data {lambada} {machine} {limit} --json {out}/lambada.json",
    ),
    (
        "Its score on WikiText",
        "eval --task wikitext103 --load {out}/gpt --valid-data {wikitext} {machine} {limit} --overlapping-eval"
        " {stride} --json {out}/wikitext.json",
    ),
)
TUNED = (
    (
        "Finetuned on other plays",
        "finetune --load {out}/gpt {tune} {machine} --lr {tune_lr} --lr-warmup-fraction 0.05 --data-path"
        f" {{out}}/plays_text_document --save {{out}}/plays-gpt --save-interval {{save}} {ONE}",
    ),
    ("The held-out plays again", PERPLEXITY.format("plays-gpt")),
    (
        "Finetuned on conversations with adapters",
        "finetune --load {out}/plays-gpt {tune} {machine} --lr {lora_lr} --lora-rank 8 --lora-alpha 16 --chat-data"
        f" {{talks}} --chat-template plain --save {{out}}/adapter --save-interval {{save}} {ONE}",
    ),
)
LABELLED = (
    (
        "BERT finetuned on {task}",
        "finetune --task {task} --load {out}/bert --train-data {out}/{task}/train.tsv --valid-data {out}/{task}/dev.tsv"
        " {label} {machine} --lr {label_lr} --lr-warmup-fraction 0.1 --save {out}/{task}/run --save-interval {save}"
        " --resume auto",
    ),
    (
        "Its score",
        "eval --task {task} --load {out}/{task}/run --valid-data {out}/{task}/dev.tsv {machine} --json"
        " {out}/{task}/score.json",
    ),
    ("For transformers", "convert-llama --load-dir {out}/{task}/run --to hf --save-dir {out}/{task}/hf"),
)
EXPORTS = (
    ("The adapters in peft's form", "convert-llama --load-dir {out}/adapter --to peft --save-dir {out}/peft"),
    (
        "Merged into their base, for transformers",
        "convert-llama --load-dir {out}/adapter --to hf --save-dir {out}/hf",
    ),
    (
        "Text from what was exported",
        "generate --load {out}/hf --prompt 'My lord, ' --tokens {tokens} --temperature 0.8 --top-k 50 --seed 1"
        " --device {device}",
    ),
    ("A page about the run", "report {out}/gpt"),
)


@dataclass(frozen=True)
class Size:
    """What the lines are filled with. documents: of the novels, and rows of each table; None: all."""

    documents: int | None
    values: dict[str, str]


LARGE = Size(
    None,
    {
        "vocab": "16384",
        "machine": "--dtype bf16 --device cuda",
        "device": "cuda",
        "gpt": "--layers 12 --hidden 768 --heads 12 --seq-length 1024 --micro-batch 32 --global-batch 32 --steps 700",
        "gpt_lr": "6e-4",
        "bert": "--layers 12 --hidden 512 --heads 8 --seq-length 128 --micro-batch 512 --global-batch 512 --steps 3400",
        "bert_lr": "6e-4",
        "save": "500",
        "stride": "32",
        "limit": "",
        "tune": "--seq-length 1024 --micro-batch 8 --global-batch 8 --steps 200",
        "tune_lr": "5e-5",
        "lora_lr": "5e-4",
        "label": "--seq-length 128 --micro-batch 32 --global-batch 32 --epochs 4",
        "label_lr": "1e-4",
        "tokens": "120",
    },
)
SMALL = Size(
    60,
    {
        "vocab": "2000",
        "machine": "--device cpu",
        "device": "cpu",
        "gpt": "--layers 2 --hidden 64 --heads 4 --seq-length 192 --micro-batch 8 --global-batch 8 --steps 20",
        "gpt_lr": "5e-3",
        "bert": "--layers 2 --hidden 32 --heads 4 --seq-length 64 --micro-batch 8 --global-batch 16 --steps 6",
        "bert_lr": "2e-3",
        "save": "100",
        "stride": "64",
        "limit": "--limit 20",
        "tune": "--seq-length 128 --micro-batch 8 --global-batch 8 --steps 12",
        "tune_lr": "2e-3",
        "lora_lr": "5e-3",
        "label": "--seq-length 64 --micro-batch 8 --global-batch 16 --epochs 1",
        "label_lr": "1e-3",
        "tokens": "24",
    },
)


@dataclass(frozen=True)
class Sources:
    """The user's files; None: not given."""

    novels: Path
    shakespeare: Path
    lambada: Path | None = None
    wikitext: Path | None = None
    mnli: Path | None = None
    qqp: Path | None = None


Run = Callable[[Sequence[str]], int]


def tell(out: Path, sources: Sources, size: Size, splitter: str = "punkt", run: Run | None = None) -> int:
    """Run every line in order under `out`; the first exit code that is not 0, else 0. run: `mega`, [a new process]."""
    out.mkdir(parents=True, exist_ok=True)
    values = {**size.values, "out": str(out), "splitter": splitter, **_prepared(out, sources, size)}
    lines = [*DATA, *TRAINING, *(each for each in SCORES if _given(each[1], values)), *TUNED]
    chosen = [(task, table) for task in ("mnli", "qqp") if (table := getattr(sources, task)) is not None]
    every = [(title, line, values) for title, line in lines]
    for task, table in chosen:
        split_pairs(task, table, out / task, size.documents and 4 * size.documents)
        every += [(title, line, {**values, "task": task}) for title, line in LABELLED]
    every += [(title, line, values) for title, line in EXPORTS]
    began = time.monotonic()
    for number, (title, line, filled) in enumerate(every, 1):
        words = [word.format(**filled) for word in shlex.split(_expanded(line, filled))]
        print(f"\n[{number}/{len(every)}] {title.format(**filled)}\n$ mega {shlex.join(words)}", flush=True)
        start = time.monotonic()
        if code := (run or _new_process)(words):
            print(f"step {number} of {len(every)} failed with exit code {code}", file=sys.stderr)
            return code
        print(f"({time.monotonic() - start:.1f} s)", flush=True)
    print(f"\nDone in {time.monotonic() - began:.0f} s; everything is in {out}.\n{summary(out)}")
    return 0


def _expanded(line: str, values: dict[str, str]) -> str:
    """A line with its groups of flags written out; paths, which may hold blanks, are filled in word by word."""
    groups = {name for name, value in values.items() if value.startswith("--") or not value}
    for name in groups:
        line = line.replace(f"{{{name}}}", values[name])
    return line


def _given(line: str, values: dict[str, str]) -> bool:
    return all(f"{{{name}}}" not in line or name in values for name in ("lambada", "wikitext"))


def _new_process(words: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "mega", *words], check=False).returncode


def _prepared(out: Path, sources: Sources, size: Size) -> dict[str, str]:
    """Files that are no step of `mega`: the novels (fewer if so asked), plays, held-out plays, and conversations."""
    novels = sources.novels
    if size.documents is not None:
        opened = gzip.open if novels.suffix == ".gz" else open
        with opened(novels, "rt", encoding="utf-8") as file:
            kept = "".join(itertools.islice(file, size.documents))
        novels = _written(out / "novels.jsonl", kept)
    speeches = sources.shakespeare.read_text(encoding="utf-8").strip().split("\n\n")
    speeches = speeches[: size.documents and 10 * size.documents]
    scenes = ["\n\n".join(speeches[first : first + 20]) for first in range(0, len(speeches), 20)]
    trained = max(1, len(scenes) * 9 // 10)
    files = {
        "novels": novels,
        "plays": _written(out / "plays.jsonl", _lines({"text": scene} for scene in scenes[:trained])),
        "held_out": _written(out / "held-out.jsonl", _lines({"text": scene} for scene in scenes[trained:])),
        "talks": _written(out / "talks.jsonl", _lines(_talks(speeches[: 20 * trained]))),
        "lambada": sources.lambada,
        "wikitext": sources.wikitext,
    }
    return {name: str(path) for name, path in files.items() if path is not None}


def _talks(speeches: Sequence[str]) -> Iterator[dict[str, str]]:
    """What is said, and what is said to that, without the speakers' names."""
    said = [speech.partition("\n")[2].strip() for speech in speeches]
    for prompt, completion in zip(said[::2], said[1::2], strict=False):
        if prompt and completion and len(prompt) + len(completion) < 400:
            yield {"prompt": prompt, "completion": completion}


def _lines(rows: Iterator[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _written(path: Path, text: str) -> Path:
    """A file that keeps its time where it is the same already: what was made of it need not be made again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def summary(out: Path) -> str:
    """The figures of every score, a line each."""
    found = []
    for path in sorted(out.rglob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and isinstance(kept.get("figures"), list):
            figures = ", ".join(f"{figure['name']} {figure['value']:.4g}" for figure in kept["figures"])
            found.append(f"{path.relative_to(out)}: {figures}")
    return "\n".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for all that is made")
    parser.add_argument("--novels", type=Path, required=True, help="JSON lines with `text`, also .gz")
    parser.add_argument("--shakespeare", type=Path, required=True, help="speeches, a blank line between two")
    parser.add_argument("--lambada", type=Path, help="JSON lines with `text`")
    parser.add_argument("--wikitext", type=Path, help="wiki.valid.tokens")
    parser.add_argument("--mnli", type=Path, help="GLUE's table")
    parser.add_argument("--qqp", type=Path, help="GLUE's table")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--sentence-splitter", choices=("punkt", "sentencex"), default="punkt")
    asked = vars(parser.parse_args())
    size, splitter = SMALL if asked.pop("small") else LARGE, asked.pop("sentence_splitter")
    return tell(asked.pop("out"), Sources(**asked), size, splitter)


if __name__ == "__main__":
    sys.exit(main())
