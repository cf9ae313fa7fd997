"""Recorded command lines of old systems, translated and run in this process on stand-ins of what they name.

A line is *accepted* where all that it says has a counterpart: `mega pretrain` and `mega finetune` then run with
--dry-run, on as many ranks as the layout takes, and other verbs to their last step before they would write or answer.
It is *translated* where some of it has none, each with a line, and *without counterpart* where nothing does the same.
Empty variables of a script, and places that its author had, are stand-ins too; a model that a line loads is a tiny one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mega.cli import main
from mega.command_line.legacy import lines
from mega.command_line.legacy.scripts import CommandLine
from mega.command_line.legacy.translation import Translation, quoted
from mega.command_line.options import spellings_of
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.support.archives import unpack
from tests.support.shared import shared

BLANKS = {
    "--global-batch-size": "8",
    "--train-iters": "100",
    "--lr": "1e-4",
    "--num-samples": "2",
    "--seed": "1",
    "--tensor-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--train-samples": "1000",
    "--lr-decay-samples": "900",
    "--lr-warmup-samples": "10",
    "--eval-interval": "100",
    "--eval-iters": "10",
    "--dataloader-type": "single",
    "--vocab-file": "gpt2-vocab.json",
    "--merge-file": "gpt2-merges.txt",
}
"""What a variable held that was empty when a line was recorded; other flags name a place."""

PLACES = ("--input", "--output-prefix", "--load", "--save", "--data-path", "--data-path2", "--tensorboard-dir")
PLACES += ("--sample-input-file",)


def recorded() -> list[dict[str, Any]]:
    """Rows of system, script, launcher, program and flags, in the order of the file."""
    text = shared("command_lines.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def filled(flags: Sequence[str]) -> list[str]:
    """`flags` with what its empty variables held."""
    words = [word.strip() for word in flags]
    found: list[str] = []
    for index, word in enumerate(words):
        found.append(word)
        bare = index + 1 == len(words) or words[index + 1].startswith("--")
        if bare and word in BLANKS:
            found.append(BLANKS[word])
        elif bare and word in PLACES:
            found.append("PLACE")
    return [word for word in found if word]


class Stands:
    """A directory of stand-ins, made when they are asked for. processes: lines are run as commands of their own."""

    def __init__(self, place: Path, processes: bool = False):
        self.place, self.processes = place, processes

    def file(self, name: str, source: str) -> str:
        """A file of the shared data under the name that is needed."""
        path = self.place / name
        if not path.exists():
            path.symlink_to(shared(source))
        return str(path)

    def tokens(self, sentences: bool) -> str:
        """A prefix of token files: two documents of many sentences."""
        prefix = self.place / ("tokens_text_sentence" if sentences else "tokens_text_document")
        if not prefix.with_suffix(".idx").exists():
            with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
                for _ in range(2):
                    writer.add([[7] * 4000] * 3 if not sentences else [[7] * 20] * 600)
        return str(prefix)

    def corpus(self) -> str:
        """A prefix of token files: four documents of 2,048 random ids of Llama's tokenizer."""
        prefix = self.place / "corpus_text_document"
        if not prefix.with_suffix(".idx").exists():
            ids = np.random.default_rng(1).integers(300, 20_000, (4, 2_048))
            with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
                for document in ids.tolist():
                    writer.add([[*document, 2]])  # 2 ends a document
        return str(prefix)

    def texts(self) -> str:
        path = self.place / "texts.jsonl"
        path.write_text('{"text": "Once upon a time. There was a model."}\n' * 3)
        return str(path)

    def prompts(self) -> str:
        path = self.place / "prompts.txt"
        path.write_text("Once upon\n")
        return str(path)

    def model(self, family: str) -> str:
        """A run of ours, wide and deep enough to be cut as any line cuts it."""
        place = self.place / f"model-{family}"
        if not place.exists():
            shape = ["--layers", "16", "--hidden", "128", "--heads", "64", "--ffn", "128"]
            words = [*shape, "--seq-length", "32", "--positions", "4096", "--vocab-multiple", "1"]
            if family == "bert":
                vocab = self.file("bert-vocab.txt", "bert/bert-base-uncased-vocab.txt")
                words = ["--layers", "4", *words[2:], "--tokenizer", "BertWordPieceLowerCase", "--vocab-file", vocab]
            elif family == "llama":
                words += ["--tokenizer", "Llama2Tokenizer"]
                words += ["--tokenizer-model", self.file("tokenizer.model", "llama2/tokenizer.model")]
            else:
                words = [
                    "--layers",
                    "4",
                    *words[2:],
                    "--vocab-file",
                    self.file("gpt2-vocab.json", "gpt2/gpt2-vocab.json"),
                ]
                words += ["--merge-file", self.file("gpt2-merges.txt", "gpt2/gpt2-merges.txt")]
            words += ["--micro-batch", "1", "--steps", "1", "--lr", "1e-4", "--mock-data", "--eval-iters", "0"]
            words += ["--save", str(place), "--save-interval", "1", "--device", "cpu", "--no-progress"]
            run_quietly(["pretrain", "--family", family, *words])
        return str(place)

    def tree(self) -> str:
        """Megatron-LM's tree of such a run."""
        place = self.place / "tree"
        if not place.exists():
            run_quietly(["reshard", "--load-dir", self.model("llama"), "--save-dir", str(place), "--saver", "megatron"])
        return str(place)

    def folder(self) -> str:
        """The same run as a folder of Hugging Face's."""
        place = self.place / "folder"
        if not place.exists():
            run_quietly(["convert-llama", "--load-dir", self.model("llama"), "--save-dir", str(place), "--to", "hf"])
        return str(place)

    def labelled(self, task: str, words: Sequence[str]) -> list[str]:
        """As many labelled files, or folders of RACE."""
        if task == "race":
            with tarfile.open(shared("race/RACE-dev.tar.gz")) as archive:
                names = [name for name in archive.getnames() if name.endswith(".txt")][:3]
                folder = self.place / "race"
                for name in names:
                    unpack(archive, folder, name)
            return [str((folder / names[0]).parent)] * len(words)
        return [str(shared("mnli/glue_sample/dev_matched.tsv"))] * len(words)


def translated(line: CommandLine) -> Translation:
    """`line` as `mega translate` has it."""
    return lines.translated(line, spellings_of)


def run_quietly(words: Sequence[str]) -> str:
    """What `mega` printed on stderr. Errors: AssertionError where it did not end with 0."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    lines = [line for line in err.getvalue().splitlines() if "accepted and changes nothing" not in line]
    assert code == 0, f"exit {code}: {' / '.join(lines)[-400:]} | mega {quoted(words)}"
    return err.getvalue()


def judged(row: Mapping[str, Any], stands: Stands) -> dict[str, Any]:
    """What becomes of a recorded line: its outcome, the lines of mega, what has no counterpart.

    Errors: AssertionError with the message where a line of mega does not do.
    """
    launcher = (row["launcher"],) if row["launcher"] else ()
    line = CommandLine(launcher, row["program"], tuple(filled(row["flags"])))
    result = translated(line)
    found = {
        "system": row["system"],
        "program": row["program"],
        "verb": result.verb,
        "lines": [quoted(words) for words in result.commands],
        "dropped": result.dropped,
        "lacking": result.lacking,
    }
    if not result.commands or not row["flags"]:
        return {**found, "outcome": "translated" if result.commands else "without counterpart"}
    before = os.getcwd()
    os.chdir(stands.place)
    try:
        _run(result, stands)
    finally:
        os.chdir(before)
    return {**found, "outcome": "translated" if result.lacking else "accepted"}


def _run(result: Translation, stands: Stands) -> None:
    for words in result.commands:
        start = words.index("mega")
        verb, rest = words[start + 1], _grouped(words[start + 2 :])
        for flag in ("--save-dir", "--output-prefix", "--output"):
            if flag in rest and verb != "checkpoint":
                rest[flag] = [str(stands.place / f"made-{verb}")]
                shutil.rmtree(rest[flag][0], ignore_errors=True)
        _STAND_IN.get(verb, _as_it_is)(rest, stands)
        typed = _typed(rest)
        if stands.processes:
            done = subprocess.run([sys.executable, "-m", "mega", verb, *typed], capture_output=True, text=True)
            assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-400:]} | mega {quoted([verb, *typed])}"
            continue
        with _to_the_last_step(verb):
            run_quietly([verb, *typed])


def _grouped(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> values; "" for what comes before the first."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        else:
            found.setdefault(flag, []).append(word)
    return found


def _typed(rest: Mapping[str, Sequence[str]]) -> list[str]:
    """The words of grouped options."""
    return [word for flag, values in rest.items() for word in ((flag, *values) if flag else values)]


def _as_it_is(rest: dict[str, list[str]], stands: Stands) -> None:
    pass


def _tokenizer(rest: dict[str, list[str]], stands: Stands) -> None:
    """The files of the kind of tokenizer that a line names, or implies."""
    kind = rest.get("--tokenizer", [""])[0]
    if kind == "EncDecTokenizer":
        # jieba is not installed everywhere; its vocabulary is read in the same way.
        rest["--tokenizer"], kind = ["BertWordPieceLowerCase"], "BertWordPieceLowerCase"
    family = rest.get("--family", ["gpt"])[0]
    if kind.startswith("BertWordPiece") or (not kind and family in ("bert", "t5")):
        rest["--vocab-file"] = [stands.file("bert-vocab.txt", "bert/bert-base-uncased-vocab.txt")]
        rest.pop("--merge-file", None)
    elif kind in ("", "GPT2BPETokenizer"):
        if "--vocab-file" in rest or kind:
            rest["--vocab-file"] = [stands.file("gpt2-vocab.json", "gpt2/gpt2-vocab.json")]
            rest["--merge-file"] = [stands.file("gpt2-merges.txt", "gpt2/gpt2-merges.txt")]
    elif "SentencePiece" in kind or kind == "Llama2Tokenizer":
        rest["--tokenizer-model"] = [stands.file("tokenizer.model", "llama2/tokenizer.model")]
        rest.pop("--vocab-file", None)


def _training(rest: dict[str, list[str]], stands: Stands) -> None:
    """Data, tokenizer, checkpoint and ranks of a run, which is not started."""
    _tokenizer(rest, stands)
    family = rest.get("--family", ["gpt"])[0]
    for flag in ("--data-path", "--train-data", "--valid-data", "--test-data"):
        if flag in rest and rest.get("--sample-kind") == ["tfrecords"]:
            rest[flag] = [stands.file("tf.tfrecord", "bert_tfrecord/tf_examples.tfrecord")]
            rest["--seq-length"] = ["128"]  # theirs
        elif flag in rest:
            prefix = stands.tokens(sentences=family in ("bert", "t5"))
            numbered = len(rest[flag]) > 1 and rest[flag][0].replace(".", "").isdigit()
            rest[flag] = ["1", prefix, "2", prefix] if numbered else [prefix]
    _shorten(rest)
    if "--deepspeed-config" in rest:
        path = stands.place / "ds.json"
        path.write_text('{"zero_allow_untested_optimizer": true}')
        rest["--deepspeed-config"] = [str(path)]
    if "--use-checkpoint-config" in rest:
        theirs = "gpt" if "--merge-file" in rest else "llama"
        rest["--load"] = [stands.model(theirs if family == "gpt" else family)]
        for flag in ("--resume", "--vocab"):
            rest.pop(flag, None)
    if "--retro" in rest:
        _neighbours(rest, stands)
    _ranks(rest)


def _retrieving(rest: dict[str, list[str]], stands: Stands) -> None:
    """The corpus, embedder and tokenizer of a database. The line's index needs faiss and millions of chunks."""
    _tokenizer(rest, stands)
    for flag in ("--index", "--index-train"):
        rest.pop(flag, None)
    rest["--data-path"], rest["--embedder"] = [stands.corpus()], [stands.model("bert")]
    rest["--directory"], rest["--device"] = [str(stands.place / "database")], ["cpu"]


def _neighbours(rest: dict[str, list[str]], stands: Stands) -> None:
    """A database, and the neighbours of the few samples that the run then has. `rest` has no flag of ranks yet."""
    rest |= {"--samples": ["4"], "--lr-decay-samples": ["3"], "--lr-warmup-samples": ["1"], "--eval-iters": ["1"]}
    rest |= {"--global-batch": ["2"], "--micro-batch": ["2"], "--eval-interval": ["2"]}
    rest["--data-path"] = [stands.corpus()]
    names = ("--data-path", "--split", "--tokenizer", "--tokenizer-model")
    build = {"": ["build"], **{flag: rest[flag] for flag in names}, "--chunk-length": ["64"]}
    _retrieving(build, stands)
    rest["--retro"] = build["--directory"] = [str(stands.place / "neighbours")]
    query = {"": ["query"], **rest, "--embedder": build["--embedder"], "--candidates": ["8"], "--saved": ["2"]}
    for options in (build, {**query, "--dtype": ["fp32"], "--device": ["cpu"]}):
        run_quietly(["retro", *_typed(options)])


def _shorten(rest: dict[str, list[str]]) -> None:
    """A run of at most 4,000 steps; one that counts millions of samples opens no data, which would be repeated."""
    for flag in ("--steps", "--lr-decay-steps"):
        if flag in rest:
            rest[flag] = [str(min(4000, int(rest[flag][0])))]
    if int(rest.get("--samples", ["0"])[0]) > 10**6:
        rest.pop("--data-path", None)


def _ranks(rest: dict[str, list[str]]) -> None:
    tp, pp = (int(rest.get(flag, ["1"])[0]) for flag in ("--tp", "--pp"))
    rest.pop("--nproc", None)
    rest |= {"--dry-run": [], "--world": [str(tp * pp)]}


def _finetuning(rest: dict[str, list[str]], stands: Stands) -> None:
    task = rest["--task"][0]
    for flag in ("--train-data", "--valid-data"):
        if flag in rest:
            rest[flag] = stands.labelled(task, rest[flag])
    rest["--pretrained-checkpoint"] = [stands.model("bert")]
    rest["--vocab-file"] = [stands.file("bert-vocab.txt", "bert/bert-base-uncased-vocab.txt")]
    _ranks(rest)


def _scoring(rest: dict[str, list[str]], stands: Stands) -> None:
    rest["--load"] = [stands.model("bert" if rest["--task"][0] in ("mnli", "qqp", "race") else "gpt")]
    for flag in ("--layers", "--hidden", "--heads", "--positions"):
        rest.pop(flag, None)
    rest["--valid-data"] = [stands.file("lambada.jsonl", "lambada/lambada_test.first500.jsonl")]
    _tokenizer(rest, stands)
    rest["--device"] = ["cpu"]


def _writing(rest: dict[str, list[str]], stands: Stands) -> None:
    rest["--input"], rest["--workers"] = [stands.texts()], ["1"]
    rest["--overwrite"] = []
    rest.pop("--split-sentences", None)  # NLTK's data is not everywhere
    _tokenizer(rest, stands)


def _speaking(rest: dict[str, list[str]], stands: Stands) -> None:
    kind = rest.get("--tokenizer", ["GPT2BPETokenizer"])[0]
    rest["--load"] = [stands.folder() if kind == "Llama2Tokenizer" else stands.model("gpt")]
    if kind == "EncDecTokenizer":
        for flag in ("--tokenizer", "--vocab-file"):
            rest.pop(flag, None)
    else:
        _tokenizer(rest, stands)
    if "--input" in rest:
        rest["--input"] = [stands.prompts()]
    for flag in ("--tp", "--pp"):
        rest[flag] = ["1"]
    if not {"--input", "--num-samples", "--prompt"} & rest.keys():
        rest["--prompt"] = ["Once"]


def _serving(rest: dict[str, list[str]], stands: Stands) -> None:
    rest["--load"] = [stands.model("gpt")]


def _cutting(rest: dict[str, list[str]], stands: Stands) -> None:
    rest["--load-dir"] = [stands.tree()]


def _converting(rest: dict[str, list[str]], stands: Stands) -> None:
    rest["--load-dir"] = [stands.folder() if rest.get("--to") != ["hf"] else stands.model("llama")]


def _comparing(rest: dict[str, list[str]], stands: Stands) -> None:
    rest[""] = ["diff", stands.model("llama"), stands.model("llama")]


_STAND_IN = {
    "pretrain": _training,
    "finetune": _finetuning,
    "eval": _scoring,
    "preprocess": _writing,
    "generate": _speaking,
    "serve": _serving,
    "reshard": _cutting,
    "convert-llama": _converting,
    "checkpoint": _comparing,
    "retro": _retrieving,
}
"""Verb -> what puts stand-ins into the options of its line."""


@contextlib.contextmanager
def _to_the_last_step(verb: str) -> Iterator[None]:
    """Scoring, generation and serving are prepared and not begun."""
    places = {
        "eval": ["mega.core.tasks.evaluate.evaluate"],
        "generate": ["mega.core.inference.generation.prompts.write_texts"],
        "serve": ["mega.core.inference.server.start.serve_rank"],
    }.get(verb, [])
    places += ["mega.core.processes.launch.launch"] if verb in ("eval", "generate", "serve") else []
    with contextlib.ExitStack() as held:
        for place in places:
            held.enter_context(mock.patch(place, return_value=0))
        yield
