"""`mega corpus VERB`: the steps from raw text to a corpus; each reads and writes documents, one JSON object a line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from mega.core.config.sections import TokenizerConfig
from mega.core.corpus.clean import CleanTask
from mega.core.corpus.documents import CorpusStep, SurveyStep
from mega.core.corpus.language import LanguageLibrary
from mega.core.files import check_file, check_source
from mega.options import Command, command

if TYPE_CHECKING:
    from mega.core.corpus.ledger import StepCounts

app = typer.Typer(help="Make a corpus from raw text.", no_args_is_help=True, add_completion=False)

_SECONDS_BETWEEN_LINES = 10.0

Key = Annotated[str, typer.Option("--json-key", help="key of the text")]
AsMegatron = Annotated[
    bool, typer.Option("--as-megatron", help="decide as Megatron-LM's own script does, its slips included")
]

Run = Callable[[CorpusStep | SurveyStep], int]
"""Applies a step as the flags that all verbs share say, and returns the exit code."""


def _shared(
    input: Annotated[
        list[str],
        typer.Option("--input", help="JSON lines, also .gz .zst .xz .bz2; .parquet; a folder; a glob"),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="a folder, or a file: .jsonl, .json, .txt, also with .gz or .zst")
    ],
    workers: Annotated[int, typer.Option("--workers", help="processes; the result does not depend on them")] = 1,
    shard: Annotated[
        str, typer.Option("--shard", help="i/N, 1 <= i <= N: only this share of the input; all write into one folder")
    ] = "1/1",
    compress: Annotated[
        Literal["none", "gz", "zst"], typer.Option("--compress", help="how files of an output folder are packed")
    ] = "none",
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option("--on-error", help="at a line that is not a document")
    ] = "stop",
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="documents that come first, of earlier runs: duplicates of them are dropped"),
    ] = None,
    dropped: Annotated[
        Path | None, typer.Option("--dropped", help="folder for the dropped documents, each with the reason")
    ] = None,
    show_dropped: Annotated[int, typer.Option("--show-dropped", help="dropped documents to print of each reason")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the result of other work")] = False,
) -> Run:
    """The flags of every verb that applies a step."""

    def run(step: CorpusStep | SurveyStep) -> int:
        from mega.core.corpus.folder import RunOptions
        from mega.core.corpus.parts import PART_BYTES
        from mega.core.corpus.run import process
        from mega.core.corpus.shuffle import Shuffle
        from mega.core.corpus.shuffle import shuffle as shuffled

        if workers > 1 and (reason := getattr(step, "one_process", "")):
            raise ValueError(f"--workers {workers}: must be 1; {reason}")

        options = RunOptions(
            output=output,
            against=tuple(against or ()),
            dropped=dropped,
            packing=compress,
            workers=workers,
            shard=_shard(shard),
            on_error=on_error,
            overwrite=overwrite,
            show_dropped=max(show_dropped, 5),
            part_bytes=getattr(step, "part_bytes", None) or PART_BYTES,
            progress=_progress(),
        )
        done = shuffled(input, step, options) if isinstance(step, Shuffle) else process(input, step, options)
        note = "" if done.complete else f"; shard {shard} is done, others are not"
        if done.surveyed:
            note = f"; shard {shard} is surveyed: repeat the call when all shards are"
        note = "; done before with the same settings, and kept" if done.repeated else note
        print(f"{output}: {_summary(done.counts)}{note}")
        _print_samples(done.counts, show_dropped)
        return 0

    return run


def _step(function: Callable[..., CorpusStep | SurveyStep]) -> Callable[..., int]:
    """A verb from a function of its own flags to its step: it gets the flags that all verbs share."""
    shared = inspect.signature(_shared, eval_str=True).parameters
    own = inspect.signature(function, eval_str=True).parameters
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared.values(), *own.values())]

    @functools.wraps(function)
    def verb(**typed: Any) -> int:
        run = _shared(**{name: typed.pop(name) for name in shared})
        return run(function(**typed))

    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in parameters}
    del verb.__wrapped__
    return verb


def _shard(word: str) -> tuple[int, int]:
    try:
        index, count = map(int, word.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        raise ValueError(f"--shard {word}: must be i/N with 1 <= i <= N, as 1/8")
    return index - 1, count


def _progress() -> Callable[[StepCounts, int, int], None]:
    """A line on stderr every few seconds."""
    begin = last = time.monotonic()

    def report(counts: StepCounts, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            share = 100 * done / max(total, 1)
            rate = counts.documents / (now - begin)
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

    A verb reads documents, one JSON object a line, and writes those that it keeps; a call that was interrupted resumes.
    """


@app.command(name="urls", cls=Command)
@_step
def urls(
    json_key: Annotated[
        str, typer.Option("--json-key", help="key of the URL in JSON lines; of .txt it is the line")
    ] = "url",
    domains: Annotated[
        Path | None,
        typer.Option("--domains", help="file of labels to block, one a line, instead of the built-in list"),
    ] = None,
    extensions: Annotated[
        Path | None,
        typer.Option("--extensions", help="file of endings to block (.pdf), instead of the built-in list"),
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="keep a URL as often as it passes the other tests")
    ] = False,
    as_megatron: AsMegatron = False,
) -> SurveyStep:
    """Drop URLs by domain, extension, length and form, and those that came before: OpenWebText's tests.

    With --as-megatron .7z and .ai pass, and so do domains in capitals, as in Megatron-LM's blacklist_urls.py.
    """
    from mega.core.corpus.urls import DOMAINS, EXTENSIONS, MEGATRON_EXTENSIONS, Urls, listed

    ends = MEGATRON_EXTENSIONS if as_megatron else EXTENSIONS
    return Urls(
        key=json_key,
        domains=tuple(sorted(listed("--domains", domains) if domains else DOMAINS)),
        extensions=tuple(listed("--extensions", extensions)) if extensions else ends,
        any_case=not as_megatron,
        keep_duplicates=keep_duplicates,
    )


def _clean(
    tokenizer: TokenizerConfig,
    json_key: Key = "text",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="what is done, in this order [ftfy_fix_text language min_tokens]"),
    ] = None,
    language: Annotated[str, typer.Option("--language", help="which is kept: a code of ISO 639-1")] = "en",
    language_by: Annotated[
        LanguageLibrary | None,
        typer.Option("--language-by", help="the library that recognises it [py3langid; langdetect with --as-megatron]"),
    ] = None,
    language_model: Annotated[
        str, typer.Option("--language-model", help="fastText model, such as lid.176.ftz; sets --language-by fasttext")
    ] = "",
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="tokens of the shortest document, its end included; see --tokenizer")
    ] = 128,
    as_megatron: AsMegatron = False,
) -> CorpusStep:
    """Repair text by ftfy, and drop what is in another language or short: OpenWebText's clean-up.

    Without a tokenizer a token counts as four bytes. With --as-megatron langdetect recognises languages, and a
    task after ftfy_fix_text is skipped, as cleanup_fix_dataset.py does it.
    """
    from mega.core.corpus.clean import DEFAULT_TASKS, Clean

    if unknown := sorted(set(tasks or ()) - set(get_args(CleanTask))):
        raise ValueError(f"--tasks {unknown[0]}: must be of {', '.join(get_args(CleanTask))}")
    if min_tokens < 1:
        raise ValueError(f"--min-tokens {min_tokens}: must be at least 1")
    return Clean(
        key=json_key,
        tasks=cast(tuple[CleanTask, ...], tuple(tasks or ())) or DEFAULT_TASKS,
        language=language,
        language_by=language_by or ("fasttext" if language_model else "langdetect" if as_megatron else "py3langid"),
        language_model=language_model,
        min_tokens=min_tokens,
        tokenizer=() if tokenizer == TokenizerConfig() else tuple(dataclasses.asdict(tokenizer).items()),
        as_megatron=as_megatron,
    )


app.command(name="clean", cls=Command)(command(_step(_clean)))


@app.command(name="near-duplicates", cls=Command)
@_step
def near_duplicates(
    json_key: Key = "text",
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="overlap from which two documents are duplicates [0.8]")
    ] = None,
    bands: Annotated[
        int | None,
        typer.Option("--bands", "--num-bands", help="of a signature; documents that share one are compared [20]"),
    ] = None,
    permutations: Annotated[
        int | None,
        typer.Option("--permutations", "--num-seeds", help="length of a signature [120]"),
    ] = None,
    shingle_words: Annotated[int, typer.Option("--shingle-words", help="words of a shingle")] = 5,
    overlap: Annotated[
        Literal["union", "min", "max"],
        typer.Option(
            "--overlap",
            "--jaccard",
            help="what common shingles are a share of",
        ),
    ] = "union",
    groups: Annotated[Path | None, typer.Option("--groups", help="file for the ids of each group")] = None,
    pairs: Annotated[Path | None, typer.Option("--pairs", help="file for pairs that overlap by over 0.5")] = None,
    id_key: Annotated[str, typer.Option("--id-key", help="key of what identifies a document in these files")] = "url",
    as_megatron: AsMegatron = False,
) -> SurveyStep:
    """Drop all but the first of documents that are nearly the same, by MinHash and an exact comparison.

    With --as-megatron shingles are five characters, signatures are those of find_duplicates.py with its 100 seeds in 10
    bands, and the threshold is 0.7.
    """
    from mega.core.corpus.near_duplicates import NearDuplicates

    bands = bands or (10 if as_megatron else 20)
    permutations = permutations or (100 if as_megatron else 120)
    threshold = threshold if threshold is not None else 0.7 if as_megatron else 0.8
    if bands < 1 or permutations < 1 or permutations % bands:
        raise ValueError(f"--permutations {permutations}: must be a multiple of --bands {bands}")
    if not 0 < threshold <= 1:
        raise ValueError(f"--threshold {threshold}: must be above 0 and at most 1")
    if shingle_words < 1:
        raise ValueError(f"--shingle-words {shingle_words}: must be at least 1")
    for flag, path in (("--groups", groups), ("--pairs", pairs)):
        if path is not None:
            check_file(flag, str(path))
    return NearDuplicates(
        key=json_key,
        threshold=threshold,
        bands=bands,
        rows=permutations // bands,
        shingle_words=shingle_words,
        overlap_of=overlap,
        as_megatron=as_megatron,
        id_key=id_key,
        groups=str(groups or ""),
        pairs=str(pairs or ""),
    )


@app.command(name="decontaminate", cls=Command)
@_step
def decontaminate(
    task_data: Annotated[
        list[str],
        typer.Option(
            "--task-data",
            help="NAME=PATH, a benchmark's file or folder; NAME: lambada squad natural_questions triviaqa webqa race "
            "drop coqa piqa, or yours",
        ),
    ],
    json_key: Key = "text",
    min_ngram_size: Annotated[int, typer.Option("--min-ngram-size", help="words of the shortest question")] = 8,
    max_ngram_size: Annotated[int, typer.Option("--max-ngram-size", help="words that make a match")] = 13,
    key_threshold: Annotated[
        int, typer.Option("--key-threshold", help="n-grams that occur as often are common phrases, and stay")
    ] = 10,
    filter_text_char_len: Annotated[
        int, typer.Option("--filter-text-char-len", help="a piece of no more characters is dropped")
    ] = 200,
    remove_char_each_side: Annotated[
        int, typer.Option("--remove-char-each-side", help="characters that are cut on both sides of a match")
    ] = 200,
    splits_count: Annotated[int, typer.Option("--splits-count", help="a document of more pieces is dropped")] = 10,
    save_dictionary: Annotated[
        Path | None, typer.Option("--save-dictionary", help="file for n-grams and counts")
    ] = None,
    load_dictionary: Annotated[Path | None, typer.Option("--load-dictionary", help="a file of n-grams to cut")] = None,
    as_megatron: AsMegatron = False,
) -> SurveyStep:
    """Cut questions of benchmarks out of a corpus, by n-grams of 8 to 13 words.

    With --as-megatron every document gets a split_id, as filter_ngrams.py gives it.
    """
    from mega.core.corpus.decontaminate import Decontaminate

    tasks = tuple((name, path) for name, _, path in (word.partition("=") for word in task_data))
    for name, path in tasks:
        if not name or not path:
            raise ValueError(f"--task-data {name}: must be NAME=PATH, as squad=dev-v2.0.json")
        check_source(f"--task-data {name}", path)
    if not 1 <= min_ngram_size <= max_ngram_size:
        raise ValueError(f"--min-ngram-size {min_ngram_size}: must be 1 .. {max_ngram_size}, of --max-ngram-size")
    if save_dictionary is not None:
        check_file("--save-dictionary", str(save_dictionary))
    return Decontaminate(
        key=json_key,
        tasks=tasks,
        shortest=min_ngram_size,
        longest=max_ngram_size,
        common=key_threshold,
        least=filter_text_char_len,
        margin=remove_char_each_side,
        most_pieces=splits_count,
        save=str(save_dictionary or ""),
        load=str(load_dictionary or ""),
        as_megatron=as_megatron,
    )


@app.command(name="wikipedia", cls=Command)
@_step
def wikipedia(
    site: Annotated[str, typer.Option("--site", help="of the URLs")] = "https://en.wikipedia.org/wiki",
    min_characters: Annotated[int, typer.Option("--min-characters", help="of the shortest article")] = 1,
    punctuation: Annotated[
        bool, typer.Option("--standard-punctuation/--keep-punctuation", help="quotes, dashes and dots of a keyboard")
    ] = True,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="a line for each sentence, as BERT's data has them")
    ] = False,
    sentence_splitter: Annotated[Literal["punkt", "sentencex"], typer.Option("--sentence-splitter")] = "punkt",
    lang: Annotated[str, typer.Option("--lang", help="language of the sentences")] = "english",
) -> CorpusStep:
    """Articles of a dump of Wikipedia, pages-articles.xml.bz2, as documents: the JSON of WikiExtractor."""
    from mega.core.corpus.wikipedia import Wikipedia

    return Wikipedia(
        site=site,
        least=min_characters,
        punctuation=punctuation,
        sentences=lang if split_sentences else "",
        splitter=sentence_splitter,
    )


@app.command(name="merge", cls=Command)
@_step
def merge(
    json_key: Annotated[str, typer.Option("--json-key", help="key of a text that every document must have")] = "",
) -> CorpusStep:
    """Many files into one, or into one folder, each line checked to be a document."""
    from mega.core.corpus.merge import Merge

    return Merge(key=json_key)


@app.command(name="annotate", cls=Command)
@_step
def annotate(
    scorer: Annotated[str, typer.Option("--scorer", help="https://HOST, model:DIR, words:FILE or scores:FILE")],
    json_key: Key = "text",
    score_key: Annotated[str, typer.Option("--score-key", help="key that the scores are written to")] = "score",
    max_bytes: Annotated[int, typer.Option("--max-bytes", help="bytes of a text that are scored", min=1)] = 20480,
    key_variable: Annotated[
        str, typer.Option("--key-variable", help="environment variable that holds a server's key")
    ] = "PERSPECTIVE_API_KEY",
    rate: Annotated[float, typer.Option("--rate", help="requests a second at most; 0 is no limit")] = 0.0,
    connections: Annotated[int, typer.Option("--connections", help="requests to a server at a time")] = 8,
    tries: Annotated[int, typer.Option("--tries", help="requests for one text, with growing pauses")] = 6,
    timeout: Annotated[float, typer.Option("--timeout", help="seconds that a server may take for one")] = 30.0,
) -> CorpusStep:
    """Score every document, such as by toxicity: by a server, a classifier, a list of words or a file of scores.

    A server is asked as Perspective is (POST /v1alpha1/comments:analyze). Blank texts, and those that it refuses, get
    null.
    """
    from mega.core.corpus.annotate import Annotate
    from mega.core.corpus.scorers import ScorerOptions

    how = ScorerOptions(
        scorer=scorer, key_variable=key_variable, rate=rate, connections=connections, tries=tries, timeout=timeout
    )
    return Annotate(scorer=scorer, key=json_key, score_key=score_key, most_bytes=max_bytes, how=how)


@app.command(name="select", cls=Command)
@_step
def select(
    by: Annotated[str, typer.Option("--by", help="key of the value, with dots between keys")] = "score.toxicity",
    share: Annotated[float, typer.Option("--share", help="share of all documents that is kept")] = 0.5,
    above: Annotated[float, typer.Option("--above", help="of the report: values above this are counted apart")] = 0.5,
    report: Annotated[Path | None, typer.Option("--report", help="JSON file of means, deviations and ranges")] = None,
) -> SurveyStep:
    """Keep the documents with the least values, such as the least toxic half; those without a value leave."""
    from mega.core.corpus.select import Select

    return Select(by=by, share=share, above=above, report=str(report or ""))


@app.command(name="group", cls=Command)
def group(
    pairs: Annotated[Path, typer.Option("--pairs", help="pairs, as near-duplicates --pairs writes them")],
    groups: Annotated[Path, typer.Option("--groups", help="the file of groups to write")],
    threshold: Annotated[float, typer.Option("--threshold", help="overlap from which two are in one group")] = 0.7,
) -> None:
    """Group near duplicates by their pairs, as group_duplicate_url.py does."""
    from mega.core.corpus.grouping import group_pairs

    count, members = group_pairs(pairs, groups, threshold)
    print(f"{groups}: {count:,} groups of {members:,} documents")


@app.command(name="remove-groups", cls=Command)
@_step
def remove_groups(
    groups: Annotated[Path, typer.Option("--groups", help="groups, as corpus group writes them")],
    id_key: Annotated[str, typer.Option("--id-key", help="key of what identifies a document there")] = "url",
) -> SurveyStep:
    """Drop all documents of a group but the first."""
    from mega.core.corpus.grouping import RemoveGroups

    return RemoveGroups(groups=str(groups), key=id_key)


@app.command(name="shuffle", cls=Command)
@_step
def shuffle(
    seed: Annotated[int, typer.Option("--seed", help="of the order")] = 1234,
) -> CorpusStep:
    """Documents in a random order, in bounded memory."""
    from mega.core.corpus.shuffle import Shuffle

    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: must be 0 .. {2**63 - 1}")
    return Shuffle(seed=seed)


@app.command(name="filter", cls=Command)
@_step
def quality_filter(
    json_key: Key = "text",
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", help="published rules: gopher-repetition, gopher-quality, fineweb [all three]"),
    ] = None,
) -> CorpusStep:
    """Drop texts of low quality by the published rules of Gopher and FineWeb, and say which rule each breaks."""
    from mega.core.corpus.quality import PRESETS, QualityFilter, QualityPreset

    if unknown := sorted(set(preset or ()) - set(PRESETS)):
        raise ValueError(f"--preset {unknown[0]}: must be of {', '.join(PRESETS)}")
    chosen = tuple(name for name in ("gopher-repetition", "gopher-quality", "fineweb") if name in (preset or PRESETS))
    return QualityFilter(key=json_key, presets=cast(tuple[QualityPreset, ...], chosen))


@app.command(name="exact-duplicates", cls=Command)
@_step
def exact_duplicates(
    json_key: Key = "text",
    paragraphs: Annotated[bool, typer.Option("--paragraphs", help="cut out lines that came before")] = False,
    min_characters: Annotated[
        int, typer.Option("--min-characters", help="of a paragraph that is looked at, and of what must be left")
    ] = 60,
) -> SurveyStep:
    """Drop all but the first of equal documents, or cut out all but the first of equal paragraphs."""
    from mega.core.corpus.exact import ExactDuplicates

    return ExactDuplicates(key=json_key, paragraphs=paragraphs, least=min_characters)


@app.command(name="mask-pii", cls=Command)
@_step
def mask_pii(
    json_key: Key = "text",
    kinds: Annotated[list[str] | None, typer.Option("--kinds", help="of email, ip, phone, card [email ip]")] = None,
) -> CorpusStep:
    """Mask addresses of mail and of machines, telephone numbers and bank cards."""
    from mega.core.corpus.personal import MaskPersonal, PersonalKind

    if unknown := sorted(set(kinds or ()) - set(get_args(PersonalKind))):
        raise ValueError(f"--kinds {unknown[0]}: must be of {', '.join(get_args(PersonalKind))}")
    return MaskPersonal(key=json_key, kinds=cast(tuple[PersonalKind, ...], tuple(kinds or ("email", "ip"))))


@app.command(name="run", cls=Command)
def run_recipe(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="input, output, and a [[step]] for each verb")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command lines, and run none")] = False,
) -> int:
    """All steps of a recipe, one after another; what is done is kept. Then: mega report OUTPUT."""
    from mega.core.corpus.recipe import steps

    group = typer.main.get_command(app)
    listed = steps(recipe)
    for number, step in enumerate(listed, 1):
        command = group.get_command(typer.Context(group), step.verb)  # type: ignore[attr-defined]
        if command is None or step.verb == "run":
            verbs = ", ".join(name for name in group.commands if name != "run")  # type: ignore[attr-defined]
            raise ValueError(f"{recipe}: step {number}: verb {step.verb}: must be of {verbs}")
        try:
            command.make_context(step.verb, list(step.arguments))  # is every flag one of the verb's?
        except Exception as error:
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ValueError(f"{recipe}: step {number}, {step.verb}: {message}") from None
    for step in listed:
        if dry_run:
            print(f"mega corpus {shlex.join([step.verb, *step.arguments])}")
        else:
            group.main([step.verb, *step.arguments], standalone_mode=False)
    return 0
