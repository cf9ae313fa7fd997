"""Check the files and directories of a run: data, tokenizer, outputs. This module checks whether data files exist, but
does not open them.

The packages that read token files and tokenizer files check the content of these files.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import stat
from collections.abc import Callable, Iterator

from mega.core.config.corpora import expand, is_number
from mega.core.config.metrics_owner import metrics_owner
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.resolve import metrics_file
from mega.core.config.run import Options, flag_of, value_of
from mega.core.config.sections import LABELLED, SPLITS, TOKENIZER_FILES, TOKENIZERS, TokenizerConfig
from mega.core.files import POINTER, check_folder, check_source, check_spelling, url_of

Problems = Iterator[str]


def files(options: Options) -> Problems:
    """Yield an error message for each input that is missing, and for each output path that cannot be used."""
    yield from _data(options)
    yield from _split(options)
    yield from _tokenizer(options)
    yield from _directories(options)


def _data(options: Options) -> Problems:
    data = options.data
    data_options = [
        name
        for name in ("data_path", "train_data", "valid_data", "test_data", "chat_data", "mock_data")
        if value_of(options, name)
    ]
    # Tasks other than lm have separate options for data.
    if not data_options and not options.runtime.dry_run and options.finetuning.task == "lm":
        yield "--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data"
    if options.finetuning.task in LABELLED:
        yield from _labelled(options, data_options)
        return
    if data_options and options.finetuning.task != "lm":
        yield f"--task {options.finetuning.task}: has data of its own and excludes {flag_of(data_options[0])}"
    exclusive = next((name for name in ("data_path", "chat_data", "mock_data") if name in data_options), None)
    if exclusive is not None and len(data_options) > 1:
        other = next(name for name in data_options if name != exclusive)
        yield f"{flag_of(exclusive)}: excludes {flag_of(other)}; give one of them"
    if data.mock_data and data.valid_sets:
        yield f"--mock-data: excludes --valid-sets {' '.join(data.valid_sets)}; leave them out, or give data"
    if data.valid_data + data.test_data and not data.train_data and not options.evaluation.skip_train:
        yield "--train-data is missing: it is needed along with --valid-data and --test-data"
    sentences = options.masking.sample_kind in ("bert", "t5")
    for name in ("data_path", "train_data", "valid_data", "test_data"):
        try:
            words = expand(value_of(options, name), data.corpora)
        except ValueError as error:
            yield str(error)
            return
        if options.masking.sample_kind == "tfrecords":
            yield from (f"{flag_of(name)} {word}: there is no such file" for word in words if not os.path.isfile(word))
        else:
            yield from _prefixes(flag_of(name), words, sentences)
    names: set[str] = set()
    for word in data.valid_sets:
        name, _, prefix = word.partition("=")
        if not name or not prefix:
            yield f"--valid-sets {word}: must be name=prefix, or name=file with --chat-data or TFRecords"
        elif name in names:
            yield f"--valid-sets {word}: the name {name} is given twice; each set needs its own"
        elif name in SPLITS:  # results of a set with this name would be mistaken for those of a split
            yield f"--valid-sets {word}: must have another name than {', '.join(SPLITS)}, which are the run's own"
        elif data.chat_data or options.masking.sample_kind == "tfrecords" or options.finetuning.task != "lm":
            if not os.path.isfile(prefix):
                yield f"--valid-sets {prefix}: there is no such file"
        else:
            yield from _prefixes("--valid-sets", expand([prefix], data.corpora), sentences)
        names.add(name)


def _labelled(options: Options, given: list[str]) -> Problems:
    """Check that the files or folders of --train-data and --valid-data exist, and that no other data option is
    given."""
    for name in given:
        if name not in ("train_data", "valid_data"):
            yield f"{flag_of(name)}: --task {options.finetuning.task} reads --train-data and --valid-data only"
    if options.data.valid_sets:
        yield f"--valid-sets: --task {options.finetuning.task} names the sets of --valid-data by their files"
    for name in ("train_data", "valid_data"):
        for path in value_of(options, name):
            if not os.path.exists(path):
                yield f"{flag_of(name)} {path}: there is no such file or folder"


def _prefixes(flag: str, words: tuple[str, ...], sentences: bool) -> Problems:
    """Check `words`: prefixes, or alternating weights and prefixes. sentences: whether the token files must be split
    into sentences."""
    weighted = any(map(is_number, words[::2]))
    if weighted and len(words) > 1:
        if len(words) % 2:
            yield f"{flag} {' '.join(words)}: must be prefixes, or pairs of weight and prefix"
            return
        for weight in words[::2]:
            if not _is_weight(weight):
                yield f"{flag} {weight}: must be a weight greater than 0, as in 0.3 first 0.7 second"
                return
        if not sum(map(float, words[::2])) < float("inf"):
            yield f"{flag} {' '.join(words)}: the weights' sum must be a finite number"
            return
    for prefix in words[1::2] if weighted and len(words) > 1 else words:
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
        if missing:
            yield f"{flag} {prefix}: {_advice(flag, prefix, sentences) or _absent(missing)}"


TEXTS = (".jsonl", ".json", ".txt", ".parquet", ".gz", ".zst", ".xz", ".bz2")
"""File name suffixes of text files."""


def _absent(missing: list[str]) -> str:
    return f"there is no {' and no '.join(missing)}; `mega preprocess` writes both"


def _pair(prefix: str) -> bool:
    return all(os.path.isfile(prefix + suffix) for suffix in (".bin", ".idx"))


def half_of_pair(flag: str, name: str) -> str:
    """Return advice if `name` is the .bin or .idx file of a pair of token files, otherwise an empty string."""
    stem, suffix = os.path.splitext(name)
    if suffix not in (".bin", ".idx") or not _pair(stem):
        return ""
    return f"is one of two token files; leave {suffix} away: {flag} {stem}"


def _advice(flag: str, prefix: str, sentences: bool) -> str:
    """Return advice if `prefix` is similar to the name of a pair of token files, or names a text file or a folder;
    otherwise an empty string."""
    if half := half_of_pair(flag, prefix):
        return half
    stem = os.path.splitext(prefix)[0]
    if os.path.isdir(prefix):
        names = sorted(name.removesuffix(".idx") for name in os.listdir(prefix) if name.endswith(".idx"))
        prefixes = [path for name in names if _pair(path := os.path.normpath(os.path.join(prefix, name)))]
        if not prefixes:
            return "is a folder, and holds no .bin and .idx of one name; `mega preprocess` writes both"
        return f"is a folder; name token files in it, without .bin: {flag} {' '.join(prefixes[:8])}"
    if prefix.endswith(TEXTS) and os.path.isfile(prefix):
        split_flag, level = ("--split-sentences", "sentence") if sentences else ("--append-eod", "document")
        return (
            f"is text; make token files of it: mega preprocess --input {prefix} --output-prefix {stem} {split_flag}, "
            f"with the flags of a tokenizer; then {flag} {stem}_text_{level}"
        )
    if prefix.endswith((".tfrecord", ".tfrecords")) and os.path.isfile(prefix):
        return f"is a file of records; give --use-tfrecords --train-data {prefix}"
    candidates = sorted(path.removesuffix(".idx") for path in glob.glob(f"{glob.escape(prefix)}_*.idx"))
    pairs = [path for path in candidates if _pair(path)]
    return f"there are no such token files; there are {', '.join(pairs[:8])}: {flag} {pairs[0]}" if pairs else ""


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False


def _split(options: Options) -> Problems:
    text = options.data.split
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares):
        yield f"--split {text}: must be up to three shares of at least 0, as in 969,30,1"
    elif not sum(shares):
        yield f"--split {text}: leaves nothing to read; one share or more must be greater than 0, as in 969,30,1"
    elif options.data.data_path and shares[0] == 0 and not options.evaluation.skip_train:
        yield f"--split {text}: leaves nothing to train on; the first share must be greater than 0"


def _tokenizer(options: Options) -> Problems:
    tokenizer = options.tokenizer
    for name in TOKENIZER_FILES:
        path = value_of(options, name)
        # --tokenizer-model may be a directory that contains tokenizer.json.
        if path is not None and not os.path.exists(path):
            yield f"{flag_of(name)} {path}: there is no such file"
    if tokenizer.tokenizer is not None:
        for name in TOKENIZERS[tokenizer.tokenizer]:
            if value_of(options, name) is None:
                yield f"--tokenizer {tokenizer.tokenizer}: needs {flag_of(name)}"
    elif tokenizer.vocab_file is not None and tokenizer.merge_file is None and tokenizer.tokenizer_model is None:
        merges = FAMILY_DEFAULTS[options.model.family].vocabulary == "GPT2BPETokenizer"
        if merges and os.path.exists(tokenizer.vocab_file):
            yield (
                f"--vocab-file {tokenizer.vocab_file}: GPT-2's needs --merge-file with it; alone it is one "
                "of WordPiece, as BERT and T5 have it, or of another kind: name that by --tokenizer"
            )
    elif options.model.vocab is None and not _any_file(tokenizer) and not options.checkpoint.use_checkpoint_config:
        yield "--vocab is missing: give it, or --vocab-file and --merge-file, or --tokenizer-model"
    if tokenizer.tokenizer is None and not _any_file(tokenizer):
        if options.log.sample_interval is not None:
            yield f"--sample-interval {options.log.sample_interval}: needs a tokenizer, which makes text of ids"
        for name in ("reset_positions", "reset_attention", "eod_mask_loss"):
            if value_of(options, name):
                yield f"{flag_of(name)}: needs a tokenizer, which knows the end of a document"


def _any_file(tokenizer: TokenizerConfig) -> bool:
    return any((tokenizer.tokenizer_model, tokenizer.vocab_file, tokenizer.merge_file))


def _trackers(options: Options) -> Problems:
    """Report packages that an option requires and that are not installed. A dry run does not need these packages,
    because it may run on another machine."""
    wandb = next((name for name in ("wandb_project", "wandb_name", "wandb_id") if value_of(options, name)), "wandb_id")
    requirements = {
        wandb: ("wandb",) * 2,
        "mlflow_uri": ("mlflow",) * 2,
        "metrics_port": ("prometheus_client", "track"),
    }
    for name, (library, extra) in requirements.items():
        enabled = value_of(options, name) is not None and not options.runtime.dry_run
        if enabled and importlib.util.find_spec(library) is None:
            yield f"{flag_of(name)} {value_of(options, name)}: needs {library}; pip install '.[{extra}]' in a clone"


def _output_folders(options: Options) -> Problems:
    for name in ("save", "metrics", "tensorboard_dir", "data_cache"):
        path = value_of(options, name)
        if path is None or (name in ("save", "tensorboard_dir") and url_of(path)):
            continue
        misspelled = list(_problem(check_spelling, flag_of(name), path, path))
        yield from misspelled
        # A dry run may run on another machine. A cache that exists may be read-only.
        is_file = name != "metrics" and os.path.exists(path) and not os.path.isdir(path)
        if not (misspelled or is_file or options.runtime.dry_run or name == "data_cache"):
            folder = os.path.dirname(path) or "." if name == "metrics" else path
            yield from _problem(check_folder, flag_of(name), path, folder)


def _problem(checked: Callable[[str, object, str], None], flag: str, value: object, folder: str) -> Problems:
    """Yield the error message of a function that checks a folder, if there is one."""
    try:
        checked(flag, value, folder)
    except ValueError as problem:
        yield str(problem)


def _rows(path: str) -> bool:
    """Return whether a file is empty or begins with a row of metrics. A single row may be incomplete, because the run
    may have been killed while writing the row."""
    with open(path, "rb") as file:
        first, rest = file.readline(1 << 20), file.read(1)
    try:
        return "step" in json.loads(first)
    except (ValueError, TypeError):
        return not first.strip() or (first.startswith(b'{"step"') and not rest)


def _other_run(options: Options, metrics: str) -> str | None:
    """Return the directory of another run that wrote an existing metrics file, if that directory still exists. None if
    this run wrote the file, or continues the run that wrote it (--load without --finetune) and keeps its rows. A file
    at the default path in a local directory belongs to the run of that directory."""
    checkpoint = options.checkpoint
    is_default = options.log.metrics is None and not (checkpoint.save and url_of(checkpoint.save))
    if is_default or not os.path.isfile(metrics):
        return None
    continued = None if checkpoint.finetune else checkpoint.load
    own = {place if url_of(place) else os.path.realpath(place) for place in (checkpoint.save, continued) if place}
    owner = None if os.path.dirname(os.path.realpath(metrics)) in own else metrics_owner(metrics)
    exists = owner is not None and (url_of(owner) is not None or os.path.isdir(owner))
    return owner if exists and owner not in own else None


def _is_open(path: str) -> bool:
    """Return whether `path` is a link to an open stream, such as /dev/stdout, whose file must not be renamed."""
    return os.path.islink(path) and os.readlink(path).startswith("/proc/")


def _blocks(path: str) -> bool:
    """Return whether `path` is a pipe, whose writer waits for a reader, or another object to which rows cannot be
    written. Unnamed streams of this process (/dev/stdout may be such a stream) and character devices such as /dev/null
    and terminals are allowed."""
    target = os.path.realpath(path)
    if not os.path.exists(target) or os.path.isdir(target):
        return False
    mode = os.stat(target).st_mode
    return not stat.S_ISREG(mode) and not stat.S_ISCHR(mode)


def _directories(options: Options) -> Problems:
    for name in ("save", "data_cache", "tensorboard_dir"):
        path = value_of(options, name)
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            yield f"{flag_of(name)} {path}: is a file; must be a directory"
    save = options.checkpoint.save
    if save is not None and os.path.isdir(pointer := os.path.join(save, POINTER)) and not os.path.islink(pointer):
        yield f"--save {save}: {pointer} is a directory, and must be the file that names the newest step; move it away"
    yield from _trackers(options)
    yield from _output_folders(options)
    metrics = metrics_file(options)
    if os.path.isdir(metrics):
        yield f"--metrics {metrics}: is a directory; must be a file"
    elif _blocks(metrics):
        yield f"--metrics {metrics}: is not a regular file; remove it, or name another file"
    elif options.log.metrics is not None and os.path.isfile(metrics) and _is_open(metrics):
        yield f"--metrics {metrics}: leads to a file that is open already; name a file of its own"
    elif options.log.metrics is not None and os.path.isfile(metrics) and not _rows(metrics):
        yield f"--metrics {metrics}: holds something other than metrics, which would be lost; name another file"
    elif (owner := _other_run(options, metrics)) is not None:
        yield f"--metrics {metrics}: holds the metrics of the run that saves to {owner}; name another file"
    load, resume = options.checkpoint.load, options.checkpoint.resume
    if load is not None and options.checkpoint.require_load and not (url_of(load) or os.path.isdir(load)):
        yield f"--load {load}: there is no such directory, and --require-load is given"
    elif load not in (None, options.checkpoint.save) and not (
        options.runtime.dry_run or options.checkpoint.use_checkpoint_config
    ):
        # --save may not exist yet; a dry run may run on another machine; --use-checkpoint-config has already read
        # --load.
        try:
            check_source("--load", str(load))
        except ValueError as problem:
            yield str(problem)
    if resume not in (None, "auto") and not (url_of(str(resume)) or os.path.isdir(str(resume))):
        under = "" if save is None or "/" in str(resume) else ", and no such step in --save"
        yield f"--resume {resume}: there is no such directory{under}; valid --resume: auto, or a step directory"
