"""Options of `mega eval`, and the list of benchmarks. This module does not import torch; a benchmark's module is
imported only when the benchmark is used.

A benchmark is a file in benchmarks/, or a format of labelled files (data/formats) whose data labels.py scores.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mega.core.config.compose import nearest
from mega.core.config.option import COUNT, FROM_0, VerbSection, option
from mega.core.config.run import options_with
from mega.core.config.sections import LABELLED
from mega.core.corpus.scorers import ScorerOptions
from mega.core.inference.request import sampling_of
from mega.core.tasks import benchmarks
from mega.core.text.identity import ALLOW, judge, other_files
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.data.indexed import IndexedDataset
    from mega.core.tasks.task import Benchmark

TASKS = {
    **{found.name: f"{benchmarks.__name__}.{found.name}" for found in pkgutil.iter_modules(benchmarks.__path__)},
    **dict.fromkeys(LABELLED, f"{__package__}.labels"),
}
"""Name in --task, in lower case -> the module that makes the benchmark."""


@dataclass(frozen=True)
class TaskOptions(VerbSection):
    """The benchmark, its data and its settings."""

    title: ClassVar[str] = "Benchmark"

    task: str = option("", "benchmark: lambada, ppl of a corpus, wikitext103, toxicity, mnli, qqp or race")
    valid_data: tuple[str, ...] = option(
        (),
        "data to score: one file; for ppl and wikitext103 also the prefix of token files; for labelled tasks "
        "several files",
    )
    overlapping_eval: int | None = option(
        None, "distance between the starts of windows, in tokens [wikitext103: 32; ppl: --seq-length]"
    )
    strict_lambada: bool = option(False, "for lambada, require all tokens of the last word, not only the last token")
    detokenizer: Literal["wiki", "ptb", "fairseq", "none"] | None = option(
        None, "rules that convert wikitext103 to plain text [chosen by the file's path]"
    )
    context_window: int | None = option(
        None, "score wikitext103 as fairseq does, with this many tokens of context; fairseq's recipe has 992"
    )
    json_key: str = option("text", "key of the text in JSON lines", megatron="--json-keys")
    random_windows: int | None = option(
        None, "for ppl, score this number of windows drawn at random instead of the whole text"
    )
    limit: int | None = option(None, "score only the first N examples")
    seed: int = 1234
    """Seed of the random windows, set from the run's --seed."""

    def __post_init__(self) -> None:
        for name in ("overlapping_eval", "context_window", "random_windows", "limit"):
            value = getattr(self, name)
            if value is not None and value < (name != "context_window"):
                raise ValueError(f"{flag(name)} {value}: must be at least {int(name != 'context_window')}")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(VerbSection):
    """The result file, ensembles of several models, and task names of Megatron-LM v1."""

    title: ClassVar[str] = "Result"

    json: str | None = option(None, "file for the result [eval-TASK.json in the current directory]")
    ensemble: tuple[str, ...] = option(
        (), "for mnli, qqp and race: files with predictions of several models, to be averaged, instead of a model"
    )
    cloze_eval: bool = option(False, "same as --task lambada, for command lines from Megatron-LM v1")
    webtext_eval: bool = option(False, "same as --task ppl, for command lines from Megatron-LM v1")


@dataclass(frozen=True, kw_only=True)
class HarnessOptions(VerbSection):
    """Options of lm-eval's tasks."""

    title: ClassVar[str] = "Tasks of lm-eval"

    tasks: tuple[str, ...] = option((), "tasks of lm-eval, such as hellaswag,gsm8k, instead of --task")
    num_fewshot: int | None = option(
        None, "with --tasks: number of examples with answers before each question (few-shot)", within=FROM_0
    )
    include_path: str | None = option(None, "with --tasks: directory of additional task files")
    apply_chat_template: bool = option(False, "with --tasks: format questions with the model's chat template")
    log_samples: bool = option(False, "with --tasks: also write every question and answer to the --json file")
    limit: int | None = None
    """Maximum number of examples to score, set from --limit."""


@dataclass(frozen=True, kw_only=True)
class ToxicityOptions(VerbSection):
    """Generation of continuations for --task toxicity."""

    title: ClassVar[str] = "Toxicity"

    continuations: int = option(25, "for toxicity: number of continuations per prompt", within=COUNT)
    tokens: int = option(
        20, "for toxicity: number of tokens in a continuation", megatron="--out-seq-length", within=COUNT
    )
    top_p: float = option(0.9, "for toxicity: sample from the most likely tokens whose probabilities add up to this")
    temperature: float = option(1.0, "for toxicity: sampling temperature")
    valid_data: str = ""
    """Path of the file of prompts, set from --valid-data."""
    scorer: ScorerOptions = field(default_factory=ScorerOptions)
    limit: int | None = None
    """Maximum number of prompts to continue, set from --limit."""

    def __post_init__(self) -> None:
        sampling_of(temperature=self.temperature, top_p=self.top_p, seed=0)


OWN = {
    "overlapping_eval": None,
    "strict_lambada": False,
    "detokenizer": None,
    "context_window": None,
    "json_key": "text",
    "random_windows": None,
}
"""Fields that only some benchmarks read -> their defaults."""


def unread(given: Iterable[str]) -> list[str]:
    """Return the names in `given` of the options that affect training but not a score."""
    read = {*options_with(evaluated=True), *options_with(on_resume="must match"), "positions"}
    return [name for name in given if name not in read]


@dataclass(frozen=True)
class BenchmarkInputs:
    """The inputs from which a benchmark is made."""

    options: TaskOptions
    tokenizer: Tokenizer | None  # the model's tokenizer
    length: int  # maximum number of columns in a row
    unit: int  # divisor of the number of columns in a row
    vocab: int  # number of ids in the model's vocabulary
    mixed: bool = False  # whether to accept token files made with another tokenizer
    report: Callable[[str], None] = lambda line: None  # receives messages for the user

    def needs_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Errors: ValueError if the tokenizer is missing."""
        if self.tokenizer is None:
            raise ValueError(
                "--tokenizer is missing: the model carries none; give its kind and files, such as --tokenizer-model"
            )
        return self.tokenizer

    def one(self, what: str = "file") -> str:
        """Return the single value of --valid-data. Errors: ValueError if the option has no value or several values."""
        files, task = self.options.valid_data, self.options.task
        if not files:
            raise ValueError(f"--valid-data is missing: give the {what} that --task {task} scores")
        if len(files) != 1:
            raise ValueError(f"--valid-data {' '.join(files)}: must be exactly one {what} for --task {task}")
        return files[0]

    def one_file(self) -> Path:
        """Return the single value of --valid-data, which must be a file. Errors: those of `one` and `readable`."""
        return self.readable(self.one())

    def token_file(self, path: Path) -> IndexedDataset | None:
        """Open the token files of a prefix; None if they do not exist. Errors: ValueError if an id is not in the
        model's vocabulary, or if the token files were made with another tokenizer."""
        from mega.core.data.indexed import IndexedDataset, exists

        if not exists(path):
            return None
        dataset = IndexedDataset(path)
        largest = dataset.token_range()[1]
        if largest >= self.vocab:
            raise ValueError(f"--valid-data {path}: holds token {largest}; the model has {self.vocab}")
        if difference := other_files(f"--valid-data {path}", dataset.tokenizer, self.tokenizer):
            advice = f"give token files of the model's tokenizer, or {ALLOW} where an id means the same in both"
            line = judge("eval", "token files", difference, advice=advice, allowed=self.mixed)
            self.report(line or "")
        return dataset

    def readable(self, file: str) -> Path:
        """Return the path of a file. Errors: ValueError if the file does not exist or is empty."""
        path = Path(file)
        if not path.is_file():
            raise ValueError(f"--valid-data {file}: {'is a folder; give a file' if path.is_dir() else 'no such file'}")
        if not path.stat().st_size:
            raise ValueError(f"--valid-data {file}: is empty")
        return path

    def text_of(self, path: Path) -> str:
        """Return the content of a text file, without a byte order mark. Errors: ValueError if the file is not UTF-8."""
        try:
            return path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"--valid-data {path}: not UTF-8 at byte {error.start}") from None

    def stride(self, default: int) -> int:
        """Return the distance between the starts of windows. Errors: ValueError if there would be gaps between
        windows."""
        distance, window = self.options.overlapping_eval, self.options.context_window
        if window is not None and distance is not None:
            raise ValueError(f"--overlapping-eval {distance}: excludes --context-window {window}, which sets it")
        if window is not None and window >= self.length:
            raise ValueError(f"--context-window {window}: must be less than --seq-length {self.length}")
        stride = self.length - window if window is not None else default if distance is None else distance
        if stride > self.length:
            raise ValueError(f"--overlapping-eval {stride}: must be at most --seq-length {self.length}")
        return stride


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def task_named(name: str) -> str:
    """Return the name of a benchmark in lower case. Errors: ValueError if the benchmark does not exist."""
    if name.lower() not in TASKS:
        raise ValueError(f"--task {name}: is not a benchmark{nearest(name.lower(), TASKS)}; valid: {', '.join(TASKS)}")
    return name.lower()


def benchmark(asked: BenchmarkInputs) -> Benchmark[object]:
    """Create the benchmark that the options select. Errors: ValueError naming the flag."""
    check_read(asked.options)
    task: Benchmark[object] = importlib.import_module(TASKS[asked.options.task]).make(asked)
    return task


def check_read(options: TaskOptions) -> None:
    """Check that the benchmark reads every given flag. Errors: ValueError naming a flag that the benchmark does not
        read, and the benchmarks that read this flag.

    READS in a benchmark's module lists the fields of `OWN` that the benchmark reads; without READS, all fields are
    read.
    """
    reads = getattr(importlib.import_module(TASKS[options.task]), "READS", OWN)
    for name, default in OWN.items():
        value = getattr(options, name)
        if value == default or name in reads:
            continue
        readers = [task for task in TASKS if name in getattr(importlib.import_module(TASKS[task]), "READS", ())]
        text = "" if value is True else f" {value}"
        raise ValueError(
            f"{flag(name)}{text}: has no effect with --task {options.task}; of {' and '.join(readers) or 'no task'}"
        )
