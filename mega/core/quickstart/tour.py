"""Run the tour of `mega quickstart`. Each step is a command line that the user can type. The tour runs exactly the
commands that it prints.

    corpus -> tokenizer -> token files -> training on 4 ranks -> plot -> one rank -> verdict

The corpus, the plot and the verdict are made by this package; `mega quickstart --only STEP` runs one of these steps.
All other steps are other commands of mega.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mega.core.files import whole_file
from mega.core.processes.signals import handled_signals
from mega.core.quickstart.corpus import make_corpus, read_corpus

GPT2 = "--tokenizer GPT2BPETokenizer --vocab-file {out}/tokenizer/vocab.json --merge-file {out}/tokenizer/merges.txt"

TOUR = (
    ("A corpus: the documentation and source of the Python that runs this", "quickstart --only corpus --out {out}"),
    (
        "A tokenizer of 1024 entries, trained on it",
        "train-tokenizer --input {out}/corpus/train.jsonl --vocab-size 1024 --output-dir {out}/tokenizer",
    ),
    (
        "Text to token files",
        f"preprocess --input {{out}}/corpus/train.jsonl --output-prefix {{out}}/tokens/train --append-eod {GPT2}",
    ),
    (
        "The same for the documents that are held out",
        f"preprocess --input {{out}}/corpus/held-out.jsonl --output-prefix {{out}}/tokens/held-out --append-eod {GPT2}",
    ),
    (
        "A small GPT, cut in 2 tensor ranks x 2 pipeline stages: 4 processes, each with a part of every sum",
        "pretrain --device cpu --nproc 4 --tp 2 --pp 2 --layers 4 --hidden 128 --heads 4 --seq-length 128"
        " --init-std 0.06 --hidden-dropout 0 --attention-dropout 0 --micro-batch 8 --global-batch 16 --steps {steps}"
        " --lr 5e-3 --min-lr 1e-4 --lr-decay cosine --lr-warmup-fraction 0.02 --adam-beta2 0.95"
        " --train-data {out}/tokens/train_text_document --valid-data {out}/tokens/held-out_text_document"
        f" {GPT2} --eval-iters 10 --log-interval 25 --save {{out}}/four-ranks --save-interval {{steps}}",
    ),
    ("Its loss, step by step", "quickstart --only plot --out {out}"),
    (
        "The checkpoint of 4 ranks, cut again for one",
        "reshard --tp 1 --pp 1 --load-dir {out}/four-ranks --save-dir {out}/one-rank",
    ),
    (
        "What the model has learnt: a document that it has never seen, and text of its own",
        "quickstart --only verdict --out {out}",
    ),
)
"""Title and command line of each step. The sizes are chosen so that the tour takes three minutes on two cores."""

MORE = "generate --load {out}/one-rank --prompt 'import ' --temperature 0.8 --top-k 50"


_WAIT_SECONDS = 0.2
"""Seconds after which a signal is passed on to a command that has not ended."""


def tour(out: Path | None, steps: int) -> int:
    """Run every step in the directory `out` (default: a new directory in runs/), with `steps` training steps. Return
    the exit code.

    A failing step ends the tour after printing its error. Errors: ValueError if `out` is not empty.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps}: must be at least 1")
    out = _unused() if out is None else out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists already; give a new directory, or remove it")
    began = time.monotonic()
    for number, (title, line) in enumerate(TOUR, 1):
        words = arguments(line, out, steps)
        print(f"\n[{number}/{len(TOUR)}] {title}\n$ {format_command(['mega', *words])}", flush=True)
        code, stopped = _run([sys.executable, "-m", "mega", *words])
        if stopped:
            print(f"mega: {stopped.name} received in step {number} of {len(TOUR)}; the tour ends", file=sys.stderr)
            return code or 128 + stopped
        if code:
            print(f"mega: step {number} of {len(TOUR)} failed with exit code {code}", file=sys.stderr)
            return code
    print(f"\nDone in {time.monotonic() - began:.0f} s; everything is in {out}. Ask the model for more:")
    print(closing(out))
    return 0


def _run(command: Sequence[str]) -> tuple[int, signal.Signals | None]:
    """Run a command to its end. Return the exit code and the first signal that arrived, or None.

    Signals are passed on, so that a training run can save before it ends; `subprocess.run` would kill the run. The
    terminal may also send the signal to the command, which treats both signals as one request.
    """
    arrived = list[signal.Signals]()
    before = {
        number: signal.signal(number, lambda got, _: arrived.append(signal.Signals(got)))
        for number in handled_signals()
    }
    passed_on = 0
    try:
        with subprocess.Popen(command) as child:
            while True:
                try:
                    return child.wait(timeout=_WAIT_SECONDS), next(iter(arrived), None)
                except subprocess.TimeoutExpired:
                    for number in arrived[passed_on:]:
                        child.send_signal(number)
                    passed_on = len(arrived)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def closing(out: Path) -> str:
    """Return a command line with which the user can continue, ready to paste. If the shell would not find this `mega`,
    for example after `./run quickstart`, the command contains absolute paths."""
    command_path = shutil.which("mega")
    if command_path is not None and os.path.samefile(os.path.dirname(command_path), os.path.dirname(sys.executable)):
        return format_command(["mega", *arguments(MORE, out, 0)])
    return format_command([sys.executable, "-m", "mega", *arguments(MORE, out.resolve(), 0)])


def format_command(words: Sequence[str], columns: int | None = None) -> str:
    """Format a command line for reading and pasting, with a line break between options if it is longer than `columns`.
    None means the width of the terminal; without a terminal, the result is one line.

    >>> print(format_command(["mega", "plot", "runs/a", "--out", "my loss.svg", "--smooth"], 38))
    mega plot runs/a \\
        --out 'my loss.svg' --smooth
    """
    if columns is None:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    units: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not units:
            units.append(word)
        else:
            units[-1] += f" {word}"
    lines = units[:1]
    for unit in units[1:]:
        longer = f"{lines[-1]} {unit}"
        if len(f"$ {longer} \\") <= columns:
            lines[-1] = longer
        else:
            lines.append(f"    {unit}")
    return " \\\n".join(lines)


def arguments(line: str, out: Path, steps: int) -> list[str]:
    """Return the arguments in a line of TOUR. A directory whose name contains spaces remains one argument.

    >>> arguments("pretrain --save {out}/a --steps {steps}", Path("my run"), 9)
    ['pretrain', '--save', 'my run/a', '--steps', '9']
    """
    return [word.format(out=out, steps=steps) for word in shlex.split(line)]


def play(name: str, out: Path) -> None:
    """Run a step of the quickstart: corpus, plot or verdict. Errors: ValueError if an earlier step is missing."""
    {"corpus": _corpus, "plot": _plot, "verdict": _verdict}[name](out)


def _corpus(out: Path) -> None:
    corpus = make_corpus(out / "corpus")
    print(f"{corpus.documents:,} documents, {corpus.characters:,} characters")
    print(corpus.train, corpus.held_out)


def _plot(out: Path) -> None:
    from mega.core.quickstart.unigram import entropy
    from mega.core.report.chart import svg
    from mega.core.report.plot import charts_of, terminal

    _existing(out / "four-ranks" / "metrics.jsonl")
    (curve,) = charts_of([out / "four-ranks"], ["loss"])["loss"].values()
    level = entropy(out / "tokens" / "train_text_document")
    curves = {"training": curve, "unigram statistics": [(step, level) for step, _ in (curve[0], curve[-1])]}
    print(terminal("loss, nats per token", curves, colour=sys.stdout.isatty()))
    print(f"the entropy of unigram statistics is {level:.2f}")
    with whole_file(out / "loss.svg") as file:
        file.write(svg({"loss, nats per token": curves}).encode())
    print(out / "loss.svg")


def _verdict(out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mega.core.quickstart.verdict import choose_document, verdict

    document = choose_document(read_corpus(_existing(out / "corpus" / "held-out.jsonl")))
    evaluation = verdict(_existing(out / "one-rank"), document, out / "tokens" / "train_text_document")
    table = Table(title=Text(f"Both begin: {evaluation.prompt!r}"), title_justify="left", show_lines=False, expand=True)
    table.add_column(f"{document.name}, held out", ratio=1, overflow="fold")
    table.add_column("the model continues", ratio=1, overflow="fold")
    table.add_row(Text(evaluation.document), Text(evaluation.sample))
    Console().print(table)
    print(f"{document.name}, {evaluation.tokens:,} tokens: {evaluation.model:.3f} nats per token under the model,")
    print(f"{evaluation.unigram:.3f} under unigram statistics")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path}: does not exist; run the steps before this one first")
    return path


def _unused() -> Path:
    """Return runs/quickstart, or the first of runs/quickstart-2, -3 ... that does not exist."""
    return next(path for path in _names() if not path.exists())


def _names() -> Iterator[Path]:
    yield Path("runs/quickstart")
    yield from (Path(f"runs/quickstart-{number}") for number in itertools.count(2))
