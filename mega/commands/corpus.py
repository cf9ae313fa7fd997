"""`mega corpus VERB`: the steps that make a corpus from raw text. Each step reads and writes documents, one JSON object
per line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from mega.command_line import help as help_pages
from mega.command_line.options import Command, command
from mega.core.config.sections import TokenizerConfig
from mega.core.corpus.clean import CleanTask
from mega.core.corpus.documents import CorpusStep, SurveyStep
from mega.core.corpus.options import (
    AnnotateOptions,
    CleanOptions,
    CorpusStepOptions,
    DecontaminateOptions,
    ExactDuplicateOptions,
    FilterOptions,
    GroupOptions,
    MaskOptions,
    MergeCorpusOptions,
    NearDuplicateOptions,
    RemoveGroupsOptions,
    SelectOptions,
    ShuffleOptions,
    UrlOptions,
    WikipediaOptions,
)
from mega.core.corpus.scorers import ScorerOptions
from mega.core.files import check_file, check_not_input, check_source

if TYPE_CHECKING:
    from mega.core.corpus.ledger import StepCounts

app = help_pages.group("Make a corpus from raw text.")

_SECONDS_BETWEEN_LINES = 10.0

Run = Callable[[CorpusStep | SurveyStep], int]
"""Runs a step with the flags that all steps share, and returns the exit code."""


def _shared(
    files: CorpusStepOptions,
) -> Run:
    """Return the function that runs a step with the flags that all steps share."""

    def run(step: CorpusStep | SurveyStep) -> int:
        from mega.core.corpus.folder import RunOptions
        from mega.core.corpus.parts import PART_BYTES
        from mega.core.corpus.run import process
        from mega.core.corpus.shuffle import Shuffle
        from mega.core.corpus.shuffle import shuffle as shuffled

        if files.workers > 1 and (reason := getattr(step, "one_process", "")):
            raise ValueError(f"--workers {files.workers}: must be 1; {reason}")

        options = RunOptions(
            output=files.output,
            against=tuple(files.against or ()),
            dropped=files.dropped,
            packing=files.compress,
            workers=files.workers,
            shard=_shard(files.shard),
            on_error=files.on_error,
            overwrite=files.overwrite,
            show_dropped=max(files.show_dropped, 5),
            part_bytes=getattr(step, "part_bytes", None) or PART_BYTES,
            progress=_progress(),
        )
        outcome = (
            shuffled(files.input, step, options) if isinstance(step, Shuffle) else process(files.input, step, options)
        )
        note = "" if outcome.complete else f"; shard {files.shard} is done, others are not"
        if outcome.surveyed:
            note = f"; shard {files.shard} is surveyed: repeat the call when all shards are"
        note = "; done before with the same settings, and kept" if outcome.repeated else note
        print(f"{files.output}: {_summary(outcome.counts)}{note}")
        _print_samples(outcome.counts, files.show_dropped)
        return 0

    return run


def _step(function: Callable[..., CorpusStep | SurveyStep]) -> Callable[..., int]:
    """Make a subcommand from a function that converts option sections to a step. The subcommand also has the section
    that all steps share."""
    own_parameters = inspect.signature(function, eval_str=True).parameters
    shared = inspect.Parameter("files", inspect.Parameter.KEYWORD_ONLY, annotation=CorpusStepOptions)
    parameters = [shared, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own_parameters.values())]

    @functools.wraps(function)
    def verb(files: CorpusStepOptions, **sections: object) -> int:
        run = _shared(files)
        for section in sections.values():
            for name in getattr(section, "writes", ()):
                if (path := getattr(section, name)) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    check_file(flag, str(path))
                    check_not_input(flag, path, files.input)
        return run(function(**sections))

    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in parameters}
    del verb.__wrapped__
    return command(verb)


def _shard(word: str) -> tuple[int, int]:
    try:
        index, count = map(int, word.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        raise ValueError(f"--shard {word}: must be i/N with 1 <= i <= N, as 1/8")
    return index - 1, count


def _progress() -> Callable[[StepCounts, int, int], None]:
    """Return a function that prints the progress on stderr every few seconds."""
    begin = last = time.monotonic()

    def report(counts: StepCounts, done: int, total: int) -> None:
        nonlocal last
        seconds = time.monotonic()
        if seconds - last >= _SECONDS_BETWEEN_LINES:
            last = seconds
            share = 100 * done / max(total, 1)
            rate = counts.documents / (seconds - begin)
            print(f"{share:5.1f} %  {_summary(counts)}, {rate:,.0f} documents/s", file=sys.stderr)

    return report


def _summary(counts: StepCounts) -> str:
    """
    >>> from mega.core.corpus.ledger import StepCounts
    >>> _summary(StepCounts(documents=3, kept=2, written=2))
    '3 documents, 2 kept'
    """
    words = [f"{counts.documents:,} documents, {counts.kept:,} kept"]
    if counts.written != counts.kept:
        words.append(f"as {counts.written:,}")
    words += [f"{count:,} dropped: {reason}" for reason, count in sorted(counts.dropped.items())]
    words += [f"{count:,} {name}" for name, count in sorted(counts.other.items())]
    return ", ".join(words)


def _print_samples(counts: StepCounts, most: int) -> None:
    for reason, samples in sorted(counts.samples.items()) if most else ():
        print(f"\n{reason}, {min(most, len(samples))} of {counts.dropped[reason]:,}:")
        for sample in samples[:most]:
            print(f"  {sample.where}  {sample.text!r}")


@app.callback()
def root() -> None:
    """Make a corpus from raw text.

    A subcommand reads documents, one JSON object per line, and writes the documents that it keeps. Repeat an
    interrupted call to resume it.
    """


@app.command(name="urls", cls=Command)
@_step
def urls(
    step: UrlOptions,
) -> SurveyStep:
    """Drop duplicate URLs, and filter URLs by domain, extension, length and syntax, using OpenWebText's criteria.

    As in Megatron-LM's blacklist_urls.py, --as-megatron keeps URLs that end in .7z or .ai, and URLs whose domain is
    blocked but written in capitals.
    """
    from mega.core.corpus.urls import DOMAINS, EXTENSIONS, MEGATRON_EXTENSIONS, Urls, listed

    ends = MEGATRON_EXTENSIONS if step.as_megatron else EXTENSIONS
    return Urls(
        key=step.json_key,
        domains=tuple(sorted(listed("--domains", step.domains) if step.domains else DOMAINS)),
        extensions=tuple(listed("--extensions", step.extensions)) if step.extensions else ends,
        any_case=not step.as_megatron,
        keep_duplicates=step.keep_duplicates,
    )


def _clean(
    step: CleanOptions,
    tokenizer: TokenizerConfig,
) -> CorpusStep:
    """Repair text with ftfy, and drop texts that are short or in another language, using OpenWebText's rules.

    Without a tokenizer, every four bytes count as one token. As in cleanup_fix_dataset.py, --as-megatron detects
    languages with langdetect, and skips tasks that follow ftfy_fix_text.
    """
    from mega.core.corpus.clean import DEFAULT_TASKS, Clean

    if unknown := sorted(set(step.tasks or ()) - set(get_args(CleanTask))):
        raise ValueError(f"--tasks {unknown[0]}: must be of {', '.join(get_args(CleanTask))}")
    if step.min_tokens < 1:
        raise ValueError(f"--min-tokens {step.min_tokens}: must be at least 1")
    return Clean(
        key=step.json_key,
        tasks=cast(tuple[CleanTask, ...], tuple(step.tasks or ())) or DEFAULT_TASKS,
        language=step.language,
        language_by=step.language_by
        or ("fasttext" if step.language_model else "langdetect" if step.as_megatron else "py3langid"),
        language_model=step.language_model,
        min_tokens=step.min_tokens,
        tokenizer=() if tokenizer == TokenizerConfig() else tuple(dataclasses.asdict(tokenizer).items()),
        as_megatron=step.as_megatron,
    )


app.command(name="clean", cls=Command)(_step(_clean))


@app.command(name="near-duplicates", cls=Command)
@_step
def near_duplicates(
    step: NearDuplicateOptions,
) -> SurveyStep:
    """Drop near duplicates of earlier documents, which are found by MinHash and confirmed by an exact comparison.

    With --as-megatron, a shingle has five characters, signatures are computed as in find_duplicates.py with its 100
    seeds in 10 bands, and the threshold is 0.7.
    """
    from mega.core.corpus.near_duplicates import NearDuplicates

    # None means that the flag was not given, because the defaults differ with --as-megatron.
    bands = step.bands or (10 if step.as_megatron else 20)
    permutations = step.permutations or (100 if step.as_megatron else 120)
    threshold = step.threshold if step.threshold is not None else 0.7 if step.as_megatron else 0.8
    if bands < 1 or permutations < 1 or permutations % bands:
        raise ValueError(f"--permutations {permutations}: must be a multiple of --bands {bands}")
    if not 0 < threshold <= 1:
        raise ValueError(f"--threshold {threshold}: must be above 0 and at most 1")
    if step.shingle_words < 1:
        raise ValueError(f"--shingle-words {step.shingle_words}: must be at least 1")
    return NearDuplicates(
        key=step.json_key,
        threshold=threshold,
        bands=bands,
        rows=permutations // bands,
        shingle_words=step.shingle_words,
        overlap_of=step.overlap,
        as_megatron=step.as_megatron,
        id_key=step.id_key,
        groups=str(step.groups or ""),
        pairs=str(step.pairs or ""),
    )


@app.command(name="decontaminate", cls=Command)
@_step
def decontaminate(
    step: DecontaminateOptions,
) -> SurveyStep:
    """Remove benchmark questions, which are found by matching n-grams of 8 to 13 words, from a corpus.

    With --as-megatron, every document gets a split_id, as in filter_ngrams.py.
    """
    from mega.core.corpus.decontaminate import Decontaminate

    tasks = tuple((name, path) for name, _, path in (word.partition("=") for word in step.task_data))
    for name, path in tasks:
        if not name or not path:
            raise ValueError(f"--task-data {name}: must be NAME=PATH, as squad=dev-v2.0.json")
        check_source(f"--task-data {name}", path)
    if not 1 <= step.min_ngram_size <= step.max_ngram_size:
        raise ValueError(
            f"--min-ngram-size {step.min_ngram_size}: must be 1 .. {step.max_ngram_size}, of --max-ngram-size"
        )
    return Decontaminate(
        key=step.json_key,
        tasks=tasks,
        shortest=step.min_ngram_size,
        longest=step.max_ngram_size,
        common=step.key_threshold,
        least=step.filter_text_char_len,
        margin=step.remove_char_each_side,
        most_pieces=step.splits_count,
        save=str(step.save_dictionary or ""),
        load=str(step.load_dictionary or ""),
        as_megatron=step.as_megatron,
    )


@app.command(name="wikipedia", cls=Command)
@_step
def wikipedia(
    step: WikipediaOptions,
) -> CorpusStep:
    """Convert a dump of Wikipedia, pages-articles.xml.bz2, to documents in the JSON format of WikiExtractor."""
    from mega.core.corpus.wikipedia import Wikipedia

    return Wikipedia(
        site=step.site,
        least=step.min_characters,
        punctuation=step.standard_punctuation,
        sentences=step.lang if step.split_sentences else "",
        splitter=step.sentence_splitter,
    )


@app.command(name="merge", cls=Command)
@_step
def merge(
    step: MergeCorpusOptions,
) -> CorpusStep:
    """Merge many files into one file or folder, and check that each line is a document."""
    from mega.core.corpus.merge import Merge

    return Merge(key=step.json_key)


@app.command(name="annotate", cls=Command)
@_step
def annotate(
    step: AnnotateOptions,
    scorer: ScorerOptions,
) -> CorpusStep:
    """Score every document, for example for toxicity, with a server, a classifier, a list of words or a file of scores.

    A server must have the API of Perspective (POST /v1alpha1/comments:analyze). The score of a blank text, or of a text
    that the server refuses, is null.
    """
    from mega.core.corpus.annotate import Annotate

    if not scorer.scorer:
        raise ValueError("--scorer is missing: give https://HOST, model:DIR, words:FILE or scores:FILE")
    return Annotate(
        scorer=scorer.scorer, key=step.json_key, score_key=step.score_key, most_bytes=step.max_bytes, how=scorer
    )


@app.command(name="select", cls=Command)
@_step
def select(
    step: SelectOptions,
) -> SurveyStep:
    """Keep the documents with the lowest values, such as the least toxic half. Documents without a value are
    dropped."""
    from mega.core.corpus.select import Select

    return Select(by=step.by, share=step.share, above=step.above, report=str(step.report or ""))


@app.command(name="group", cls=Command)
@command
def group(
    step: GroupOptions,
) -> None:
    """Group documents that are connected by pairs of near duplicates, as group_duplicate_url.py does."""
    from mega.core.corpus.grouping import group_pairs

    count, members = group_pairs(step.pairs, step.groups, step.threshold)
    print(f"{step.groups}: {count:,} groups of {members:,} documents")


@app.command(name="remove-groups", cls=Command)
@_step
def remove_groups(
    step: RemoveGroupsOptions,
) -> SurveyStep:
    """Drop all documents of a group except the first."""
    from mega.core.corpus.grouping import RemoveGroups

    return RemoveGroups(groups=str(step.groups), key=step.id_key)


@app.command(name="shuffle", cls=Command)
@_step
def shuffle(
    step: ShuffleOptions,
) -> CorpusStep:
    """Shuffle documents, in bounded memory."""
    from mega.core.corpus.shuffle import Shuffle

    if not 0 <= step.seed < 2**63:
        raise ValueError(f"--seed {step.seed}: must be 0 .. {2**63 - 1}")
    return Shuffle(seed=step.seed)


@app.command(name="filter", cls=Command)
@_step
def quality_filter(
    step: FilterOptions,
) -> CorpusStep:
    """Drop low-quality texts, using the published rules of Gopher and FineWeb, and record the rule that each dropped
    text violates."""
    from mega.core.corpus.quality import PRESETS, QualityFilter, QualityPreset

    if unknown := sorted(set(step.preset or ()) - set(PRESETS)):
        raise ValueError(f"--preset {unknown[0]}: must be of {', '.join(PRESETS)}")
    presets = tuple(
        name for name in ("gopher-repetition", "gopher-quality", "fineweb") if name in (step.preset or PRESETS)
    )
    return QualityFilter(key=step.json_key, presets=cast(tuple[QualityPreset, ...], presets))


@app.command(name="exact-duplicates", cls=Command)
@_step
def exact_duplicates(
    step: ExactDuplicateOptions,
) -> SurveyStep:
    """Drop repeated documents, or remove repeated paragraphs. The first copy is kept."""
    from mega.core.corpus.exact import ExactDuplicates

    return ExactDuplicates(key=step.json_key, paragraphs=step.paragraphs, least=step.min_characters)


@app.command(name="mask-pii", cls=Command)
@_step
def mask_pii(
    step: MaskOptions,
) -> CorpusStep:
    """Mask e-mail addresses, IP addresses, telephone numbers and bank card numbers."""
    from mega.core.corpus.personal import MaskPersonal, PersonalKind

    if unknown := sorted(set(step.kinds or ()) - set(get_args(PersonalKind))):
        raise ValueError(f"--kinds {unknown[0]}: must be of {', '.join(get_args(PersonalKind))}")
    return MaskPersonal(key=step.json_key, kinds=cast(tuple[PersonalKind, ...], tuple(step.kinds or ("email", "ip"))))


@app.command(name="run", cls=Command)
def run_recipe(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="input, output, and a [[step]] for each verb")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command lines without running them")] = False,
) -> int:
    """Run all steps of a recipe in order. Finished steps are not repeated. Show the result with mega report OUTPUT."""
    from mega.core.corpus.recipe import steps

    group = typer.main.get_command(app)
    recipe_steps = steps(recipe)
    for number, step in enumerate(recipe_steps, 1):
        command = group.get_command(typer.Context(group), step.verb)  # type: ignore[attr-defined]
        if command is None or step.verb == "run":
            verbs = ", ".join(name for name in group.commands if name != "run")  # type: ignore[attr-defined]
            raise ValueError(f"{recipe}: step {number}: verb {step.verb}: must be of {verbs}")
        try:
            command.make_context(step.verb, list(step.arguments))  # refuses flags that the subcommand does not have
        except Exception as error:
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ValueError(f"{recipe}: step {number}, {step.verb}: {message}") from None
    for step in recipe_steps:
        if dry_run:
            print(f"mega corpus {shlex.join([step.verb, *step.arguments])}")
        else:
            group.main([step.verb, *step.arguments], standalone_mode=False)
    return 0
