"""Special rules for single programs that a table of flags cannot express, such as regrouped words or several commands.

Functions in `BEFORE` change the words of a line before they are read, functions in `AFTER` change the options of the
last command, and functions in `WHOLE` translate a whole line. The row of a program in programs.toml names its
functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from mega.command_line.legacy.launchers import options_of
from mega.command_line.legacy.programs import hole
from mega.command_line.legacy.scripts import CommandLine
from mega.command_line.legacy.tables import table
from mega.command_line.legacy.translation import Translation
from mega.core.config.corpora import is_number
from mega.core.config.presets import FAMILY_DEFAULTS

Translate = Callable[[CommandLine], Translation]
"""A function that translates a part of a command line."""

PADDING = (
    "T5's cross attention attends to the encoder's padding up to Megatron-core 0.5; leave --memory-padding out where "
    "the release masks it"
)


def _corpora() -> Mapping[str, str]:
    """Name of a corpus in Megatron-LM of 2019 -> its file of texts, with the key `text`."""
    corpora: Mapping[str, str] = table("programs")["corpora"]
    return corpora


def _texts_first(result: Translation, options: dict[str, list[str]]) -> None:
    """Add commands that tokenize texts, and set --save-interval, because training scripts of 2019 read texts and saved
    every 5,000 steps."""
    if "--save" in options and "--save-interval" not in options:
        options["--save-interval"] = ["5000"]
    texts = options.get("--train-data", [])
    if options.get("--sample-kind") == ["tfrecords"] or not any(_is_text(word) for word in texts):
        return
    family = options.get("--family", ["gpt"])[-1]
    sentences = family in FAMILY_DEFAULTS and "sample_kind" in FAMILY_DEFAULTS[family].values
    if "--vocab-file" not in options and "--tokenizer-model" not in options:
        _downloaded(result, options)
    level = "sentence" if sentences else "document"
    prefixes: list[str] = []
    for text in texts:
        prefix = PurePosixPath(text).name.split(".")[0]
        if f"{prefix}_text_{level}" in prefixes:  # another folder has a file with the same name
            prefix += f"-{len(prefixes) + 1}"
        prefixes.append(f"{prefix}_text_{level}")
        tokenizer = ("--tokenizer", "--vocab-file", "--merge-file", "--tokenizer-model")
        tokenizer_words = [word for flag in tokenizer if flag in options for word in (flag, *options[flag])]
        level_words = ["--split-sentences"] if sentences else ["--append-eod"]
        result.commands.append(
            [
                "mega",
                "preprocess",
                "--input",
                _corpora().get(text, text),
                "--output-prefix",
                prefix,
                *level_words,
                *tokenizer_words,
            ]
        )
    options["--data-path"] = [word for prefix in prefixes for word in ("1", prefix)] if len(prefixes) > 1 else prefixes
    del options["--train-data"]


def _downloaded(result: Translation, options: dict[str, list[str]]) -> None:
    """Add variables for the tokenizer's files, which the old program downloaded."""
    if options.get("--tokenizer") == ["GPT2BPETokenizer"]:
        options |= {"--vocab-file": ["$GPT2/vocab.json"], "--merge-file": ["$GPT2/merges.txt"]}
        result.holes.append(hole("GPT2"))
    else:
        options["--vocab-file"] = ["$VOCAB"]
        result.holes.append(hole("VOCAB"))


def _is_text(word: str) -> bool:
    return word in _corpora() or word.endswith((".json", ".jsonl", ".csv", ".tsv", ".txt"))


def _validated(result: Translation, options: dict[str, list[str]]) -> None:
    """With --data-path2, which is validation data, use --data-path only for training."""
    if "--valid-data" in options and "--data-path" in options:
        options["--train-data"] = options.pop("--data-path")
        options.pop("--split", None)


def _merged(result: Translation, options: dict[str, list[str]]) -> None:
    """Set a new output folder, because merge_mp_partitions.py wrote into its input folder."""
    if "--load-dir" in options and "--save-dir" not in options:
        options["--save-dir"] = [options["--load-dir"][0].rstrip("/") + "-merged"]


def _from_megatron(result: Translation, options: dict[str, list[str]]) -> None:
    """Add a conversion to a mega checkpoint, because only mega checkpoints can be exported to Hugging Face's format."""
    if "--load-dir" in options:
        source = options["--load-dir"][0].rstrip("/")
        result.commands.append(["mega", "reshard", "--load-dir", source, "--save-dir", f"{source}-mega"])
        options["--load-dir"] = [f"{source}-mega"]


def _prompts(result: Translation, options: dict[str, list[str]]) -> None:
    if "--input" in options and "--num-samples" in options:
        count = options.pop("--num-samples")[0]
        result.lacking.append(f"--num-samples {count}: with a file of prompts each of them is continued; shorten it")


def _visible_padding(result: Translation, options: dict[str, list[str]]) -> None:
    """Set --memory-padding, because T5's decoder attends to padding in releases before Megatron-core's T5."""
    if any(line.startswith("--use-mcore-models") for line in result.dropped):
        return
    unfused = any(line.startswith("--no-masked-softmax-fusion") for line in result.dropped)
    fused = options.get("--dtype", ["fp32"])[0] in ("bf16", "fp16") and not unfused
    options["--memory-padding"] = ["zero" if fused else "uniform"]
    result.notes.append(PADDING)


def _gpt2_scores(words: Sequence[str]) -> list[str]:
    """Translate run_gpt2_eval.py of 2019: WikiText-103, LAMBADA with --cloze-eval, windows of WebText with
    --webtext-eval."""
    other_words, batch, batches = list[str](), "16", "5000"
    task = ["--task", "wikitext103"]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals_sign, value = word.replace("_", "-").partition("=")
        if name == "--cloze-eval":
            task = ["--task", "lambada"]
        elif name == "--webtext-eval":
            task = ["--task", "ppl"]
        elif name in ("--eval-iters", "--batch-size"):
            number = value if equals_sign else rest.pop(0) if rest else ""
            batch, batches = (number, batches) if name == "--batch-size" else (batch, number)
            other_words += [name, number] if name == "--batch-size" else []
        else:
            other_words.append(word)
    if task[1] == "ppl" and batch.isdecimal() and batches.isdecimal():
        task += ["--random-windows", str(int(batch) * int(batches))]
    return [*task, *other_words]


def _keyed_inputs(words: Sequence[str]) -> list[str]:
    """Split find_duplicates.py's --inputs FILE KEY FILE KEY, and add the folder of kept documents."""
    new_words, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word != "--inputs":
            new_words.append(word)
            continue
        values = list[str]()
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        new_words += ["--input", *values[::2], *(["--id-key", values[1]] if len(values) > 1 else [])]
    if "--output" in new_words:
        new_words += ["--kept", f"{new_words[new_words.index('--output') + 1]}-kept"]
    return new_words


def _ngram_tasks(words: Sequence[str]) -> list[str]:
    """Combine filter_ngrams.py's --tasks NAME ..., --lambada-path FILE and --dedup-dataset FILE KEY."""
    new_words, rest, tasks, paths = list[str](), list(words), list[str](), dict[str, str]()
    while rest:
        word = rest.pop(0)
        name, equals_sign, value = word.replace("_", "-").partition("=")
        values = [value] if equals_sign else []
        while not equals_sign and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name == "--tasks":
            tasks += values
        elif name == "--lambada-path":
            paths["lambada"] = values[0] if values else ""
        elif name == "--dedup-dataset":
            new_words += ["--input", *values[:1], *(["--json-key", values[1]] if len(values) > 1 else [])]
        else:
            new_words += [word, *([] if equals_sign else values)]
    task_data = [f"{task}={paths.get(task, f'$TASKS/{task}')}" for task in tasks]
    return [*(["--task-data", *task_data] if task_data else []), *new_words]


def _shares(words: Sequence[str]) -> list[str]:
    """Convert split_json.py's --test_percent VALID TEST, which are fractions, to shares of all three splits."""
    new_words = list(words)
    for index, word in enumerate(new_words):
        if word.replace("-", "_") == "__test_percent":
            values = new_words[index + 1 : index + 3]
            valid, test = (float(value) * 100 for value in values) if all(map(is_number, values)) else (5.0, 0.0)
            new_words[index : index + 3] = ["--split", f"{100 - valid - test:g},{valid:g},{test:g}"]
            break
    return new_words


def _two_betas(words: Sequence[str]) -> list[str]:
    """Split fairseq's --adam-betas "(0.9, 0.98)" into two options, and add the dtype that its memory-efficient flags
    imply."""
    new_words, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        name, equals_sign, value = word.partition("=")
        if name == "--adam-betas":
            while not equals_sign and rest and not rest[0].startswith("--"):
                value += rest.pop(0)
            for flag, beta in zip(("--adam-beta1", "--adam-beta2"), re.findall(r"[\d.e-]+", value), strict=False):
                new_words += [flag, beta]
        elif name in ("--memory-efficient-fp16", "--memory-efficient-bf16"):
            new_words += [word, f"--{name[-4:].lstrip('-')}"]
        else:
            new_words.append(word)
    return new_words


def _fairseq_trained(result: Translation, options: dict[str, list[str]]) -> None:
    """Set the training and validation data to those in fairseq's data folder, and set fairseq's defaults for the
    schedule and the loss scale."""
    folder = options.pop("DATA", [""])[0].rstrip("/")
    if folder:
        options["--train-data"] = [f"{folder}/train_text_document"]
        options["--valid-data"] = [f"{folder}/valid_text_document"]
    else:
        result.lacking.append("fairseq-train: names no folder of data; give --train-data and --valid-data")
    if "--save-interval" not in options:
        options["--save-interval"] = ["1000"]
        result.hints.append("fairseq saves after every pass over the data; --save-interval says how often, in steps")
    options.setdefault("--lr-decay", ["constant"])
    if options["--lr-decay"] == ["inverse-square-root"]:
        options.setdefault("--lr-warmup-steps", ["4000"])
    if options.get("--dtype") == ["fp16"]:
        defaults = {"--initial-loss-scale": "128", "--hysteresis": "1", "--min-loss-scale": "0.0001"}
        for flag, value in defaults.items():
            options.setdefault(flag, [value])
    if "--nproc" in options and "--tp" in options and options["--nproc"] == ["1"]:
        del options["--nproc"]


def _fairseq_scored(result: Translation, options: dict[str, list[str]]) -> None:
    """Set the data to a subset in fairseq's data folder, and replace the path of a .pt file in --load with its
    folder."""
    folder = options.pop("DATA", [""])[0].rstrip("/")
    subset = options.pop("--gen-subset", ["test"])[0]
    if folder:
        options["--valid-data"] = [f"{folder}/{subset}_text_document"]
    else:
        result.lacking.append("fairseq-eval-lm: names no folder of data; give --valid-data")
    if "--load" in options:
        path = PurePosixPath(options["--load"][0])
        options["--load"] = [str(path.parent)] if path.suffix == ".pt" else [str(path)]
    result.hints.append(
        "in one step: the text itself as --valid-data, such as wiki.test.raw, is detokenised, encoded and scored by "
        "the word of the original, too; the model's folder then needs vocab.json and merges.txt"
    )


def _fairseq_sets(line: CommandLine, translate: Translate) -> Translation:
    """Translate fairseq-preprocess, which makes up to three data sets in one call, each from one or several texts."""
    paths_of_flag, words = dict[str, str](), list(line.words)
    for flag in ("--trainpref", "--validpref", "--testpref", "--destdir"):
        for index, word in enumerate(words):
            name, equals_sign, value = word.partition("=")
            if name == flag:
                paths_of_flag[flag] = value if equals_sign else "".join(words[index + 1 : index + 2])
                del words[index : index + (1 if equals_sign else 2)]
                break
    folder = paths_of_flag.pop("--destdir", "data-bin").rstrip("/")
    result = Translation("preprocess")
    for flag, paths in paths_of_flag.items():
        for number, path in enumerate(paths.split(",")):
            name = flag[2:-4] + (str(number) if number else "")
            set_words = ["--input", path, "--output-prefix", f"{folder}/{name}", *words]
            translation = translate(CommandLine(line.launcher, "fairseq-preprocess-set", tuple(set_words)))
            result.commands += translation.commands
            result.dropped, result.lacking = translation.dropped, translation.lacking
    if not paths_of_flag:
        result.lacking.append(f"{line.program}: names no text; give --trainpref, --validpref or --testpref")
    if not any(word.partition("=")[0] == "--srcdict" for word in words):
        result.lacking.append("--srcdict: no dictionary is counted from the texts here; give its dict.txt")
    return result


RETRO_BUILD = {
    "--retro-workdir": "--directory",
    "--load": "--embedder",
    "--retro-gpt-data-path": "--data-path",
    "--retro-gpt-split": "--split",
    "--retro-gpt-chunk-length": "--chunk-length",
    "--retro-block-size": "--block-size",
    "--retro-doc-block-size": "--doc-block-size",
    "--retro-bert-batch-size": "--embed-batch",
    "--retro-bert-max-chunk-length": "--embed-length",
    "--retro-index-str": "--index",
    "--retro-index-ntrain": "--index-train",
}
RETRO_QUERY = {
    "--retro-workdir": "--retro",
    "--load": "--embedder",
    "--retro-gpt-data-path": "--data-path",
    "--retro-gpt-split": "--split",
    "--retro-gpt-chunk-length": "--retro-chunk-length",
    "--retro-gpt-seq-length": "--seq-length",
    "--retro-gpt-seed": "--seed",
    "--retro-gpt-global-batch-size": "--global-batch",
    "--retro-gpt-eval-interval": "--eval-interval",
    "--retro-gpt-eval-iters": "--eval-iters",
    "--train-samples": "--train-samples",
    "--num-layers": "--layers",
    "--hidden-size": "--hidden",
    "--num-attention-heads": "--heads",
    "--micro-batch-size": "--micro-batch",
    "--lr": "--lr",
    "--retro-query-num-neighbors-query": "--candidates",
    "--retro-query-num-neighbors-save": "--saved",
    "--retro-query-nprobe": "--probes",
    "--retro-index-str": "--index",
}
RETRO_TOKENIZER = {
    "--retro-gpt-tokenizer-type": "--tokenizer",
    "--retro-gpt-vocab-file": "--vocab-file",
    "--retro-gpt-merge-file": "--merge-file",
    "--retro-gpt-tokenizer-model": "--tokenizer-model",
}
"""Flag of Retro's preprocessing -> mega's flag, for each subcommand."""

RETRO_TASKS = {
    "build": ("build", "query"),
    "query-pretraining-neighbors": ("query",),
    "pretraining-query-neighbors": ("query",),
    "query-neighbors": ("query",),
    **dict.fromkeys(("db-build", "index-build", "index-train", "index-add"), ("build",)),
}
"""Stage of Retro's preprocessing -> the subcommands that do it. Each subcommand also does all missing earlier
stages."""


def _retro_stages(line: CommandLine, _: Translate) -> Translation:
    """Translate Retro's preprocessing. Its model flags describe the embedder, and its --retro-gpt flags describe the
    run."""
    values_of_flag, words, flag = dict[str, list[str]](), [], ""
    for word in line.words:
        flag, equals_sign, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        words = values_of_flag.setdefault(flag.replace("--retro-project-dir", "--retro-workdir"), [])
        words += [value] if equals_sign or not word.startswith("--") else []
    tasks = [task for word in values_of_flag.get("--retro-tasks", []) for task in word.split(",")]
    unknown = [f"--retro-tasks {each}: is not a stage" for each in tasks if each not in RETRO_TASKS]
    result = Translation("retro build", lacking=unknown)
    read = {"--retro-tasks", *RETRO_BUILD, *RETRO_QUERY, *RETRO_TOKENIZER}
    result.dropped += [f"{each} is not read by mega retro" for each in values_of_flag if each not in read]
    if "--retro-bert-vocab-file" in values_of_flag:
        result.hints.append("the folder of --embedder must have the BERT's tokenizer with it, as a mega run has")
    verbs = [verb for task in tasks for verb in RETRO_TASKS.get(task, ())]
    needed = {"--retro-workdir": "WORKDIR", "--load": "EMBEDDER", "--retro-gpt-data-path": "DATA_PATH"}
    for missing, name in needed.items():
        if not values_of_flag.get(missing):
            values_of_flag[missing] = [f"$RETRO_{name}"]
            result.holes.append(hole(f"RETRO_{name}"))
    # The original embeds padded chunks, and its pretrain_retro.py trains a GPT with a retriever.
    extra_words = {"build": ["--pad-chunks"], "query": ["--family", "gpt", "--retriever"]}
    for verb, table_of in (("build", RETRO_BUILD), ("query", RETRO_QUERY)):
        if verb in verbs:
            flags = {**table_of, **RETRO_TOKENIZER}
            typed = [
                word
                for old_flag, mega_flag in flags.items()
                if values_of_flag.get(old_flag)
                for word in (mega_flag, *values_of_flag[old_flag])
            ]
            result.commands.append(["mega", "retro", verb, *extra_words[verb], *typed])
            result.verb = f"retro {verb}"
    if "query" in verbs and "--retro-gpt-seq-length" not in values_of_flag:
        result.hints.append("mega retro query takes all flags of the run whose samples are looked for")
    return result


def _compared(first: str, second: str, verb: str) -> Callable[[CommandLine, Translate], Translation]:
    """Translate a program that compares two checkpoints in other formats, given by the flags `first` and `second`.
    verb: the subcommand that converts the checkpoints."""

    def compare(line: CommandLine, translate: Translate) -> Translation:
        options, result = options_of(line.words), Translation("checkpoint diff")
        converted = []
        for flag in (first, second):
            if flag not in options:
                result.lacking.append(f"{flag}: needs a value")
                continue
            checkpoint = re.sub(r"/(mp_rank_[\d_]+/)?model_optim_rng\.pt$", "", options[flag])
            converted.append(f"{checkpoint}-mega")
            result.commands.append(["mega", *verb.split(), "--load-dir", checkpoint, "--save-dir", converted[-1]])
        result.commands.append(["mega", "checkpoint", "diff", *converted])
        return result

    return compare


BEFORE: Mapping[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "gpt2_scores": _gpt2_scores,
    "keyed_inputs": _keyed_inputs,
    "ngram_tasks": _ngram_tasks,
    "shares": _shares,
    "two_betas": _two_betas,
}
AFTER: Mapping[str, Callable[[Translation, dict[str, list[str]]], None]] = {
    "texts_first": _texts_first,
    "validated": _validated,
    "visible_padding": _visible_padding,
    "merged": _merged,
    "from_megatron": _from_megatron,
    "prompts": _prompts,
    "fairseq_trained": _fairseq_trained,
    "fairseq_scored": _fairseq_scored,
}
WHOLE: Mapping[str, Callable[[CommandLine, Translate], Translation]] = {
    "trees_compared": _compared("--model-path-1", "--model-path-2", "reshard"),
    "folders_compared": _compared("--base-hf-model-path", "--converted-hf-model-path", "convert-llama"),
    "fairseq_sets": _fairseq_sets,
    "retro_stages": _retro_stages,
}
"""Programs whose command line is translated into several commands, or from whose command line only two paths are
read."""
