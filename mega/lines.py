"""Old command lines as those of `mega` that do the same, with a line for each thing that has no counterpart.

    pretrain_bert.py --num-layers 24 --fp16 --DDP-impl torch  ->  mega pretrain --family bert --layers 24 --dtype fp16

What a program's name stands for is in config/programs.py, what a flag does in config/sections.py and
config/megatron.py, and what a verb takes is asked of the verb. This file puts the three together; it opens nothing that
a line names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import typer

from mega.argv import MANY, Drops, Meaning, ReadLine, Refuses, Sets, Setting, read
from mega.core.config.corpora import is_number
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.programs import GPT2_FILES, Program, program_of
from mega.core.config.scripts import CommandLine
from mega.options import Command, load


@dataclass
class Translation:
    """What an old line becomes.

    commands: lines of `mega`, in the order in which they are to run. dropped: what changes nothing. lacking: what has
    no counterpart. holes: variables of the new lines that have to be set, and to what. notes: what releases of the old
    program do differently. hints: what else to know. verb: of the last command; "" where nothing does the same.
    """

    verb: str
    commands: list[list[str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    holes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As a script: commands, and the rest as comments."""
        lines = [f"# changes nothing: {line}" for line in self.dropped]
        lines += [f"# no counterpart: {line}" for line in self.lacking]
        lines += [f"# to be set: {line}" for line in self.holes]
        lines += [f"# by release: {line}" for line in self.notes]
        lines += [f"# note: {line}" for line in self.hints]
        # A word may hold a new line, after which a comment would be a command.
        return "\n".join([" ".join(line.splitlines()) for line in lines] + [quoted(one) for one in self.commands])


_AFTER: dict[str, Callable[[Translation, dict[str, list[str]]], None]] = {}
"""Program -> what else its line needs; it is given the options of the last command by flag."""


_BEFORE: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {}
"""Program -> its words in a form that the table of its flags can read."""

NULL = (
    "NullTokenizer adds an end of document to its --vocab-size ids, as in Megatron-LM 23.06; add --null-eod-last where "
    "it is one of them, as in Megatron-core 0.18"
)


PADDING = (
    "T5's cross attention attends to the encoder's padding up to Megatron-core 0.5; leave --memory-padding out where "
    "the release masks it"
)


def translated(line: CommandLine) -> Translation:
    """`line` as `mega` has it. Errors: ValueError where its program is not known."""
    program = program_of(line.program, line.words)
    if not program.verb:
        return Translation("", lacking=[f"{line.program}: {program.why}"])
    base = PurePosixPath(line.program).name
    if base in _WHOLE:
        return _WHOLE[base](line)
    known = _known(program)
    words = _BEFORE[base](line.words) if base in _BEFORE else line.words
    found = read(list(_renamed(words, program)), known)
    placed = _arguments(found, program)
    settings = _with_defaults([*found.settings, *placed], program, _of_verb(program.verb))
    dropped = [note.replace(" is accepted and changes nothing", "") for note in found.notes]
    result = Translation(program.verb, dropped=dropped, lacking=_reasons(found, placed))
    result.holes += [program.hole] if program.hole else []
    if not line.words:
        result.lacking.append(f"{line.program}: names no flags; mega {program.verb} --help shows what it needs")
    options = {setting.flag: setting.values for setting in settings}
    if options.get("--tokenizer") == ["NullTokenizer"] and "--null-eod-last" not in options:
        result.notes.append(NULL)
    if base in _AFTER:
        _AFTER[base](result, options)
        switches = {setting.flag for setting in settings if setting.switch}
        settings = [Setting(flag, values, flag in switches) for flag, values in options.items()]
    typed = [word for setting in settings for word in _typed(setting, program)]
    typed += [word for word in found.others if word.startswith("-")]
    result.commands.append([*_start(line.launcher, program.verb, known, result), *typed])
    return result


def _known(program: Program) -> dict[str, Meaning]:
    """What the verb of a program answers to, and the program's own flags."""
    found: dict[str, Meaning] = dict(_of_verb(program.verb))
    # The words that no flag names could follow one that is dropped, so that those take as many as they have.
    count = 1 if program.arguments else MANY
    found |= {flag: Drops(count, reason) for flag, reason in program.drops.items()}
    found |= {flag: Drops(0, reason) for flag, reason in program.drops_switches.items()}
    found |= {
        flag: Sets(ours, 1, choices=tuple(names), renames=names) for flag, (ours, names) in program.values.items()
    }
    return found | {flag: Refuses(reason) for flag, reason in program.lacks.items()}


def _arguments(found: ReadLine, program: Program) -> list[Setting]:
    """The positional words of a line as options of mega."""
    words = [word for word in found.others if not word.startswith("-")]
    flags = program.arguments[: len(words)]
    return [
        Setting(flag, words[index:] if flag == program.arguments[-1] else [words[index]], False)
        for index, flag in enumerate(flags)
    ]


@functools.cache
def _of_verb(words: str) -> Mapping[str, Meaning]:
    """What a verb answers to, or a verb of a verb's: `data merge`."""
    verb, *rest = words.split()
    command = load(verb)
    for name in rest:
        if name not in command.commands:
            raise ValueError(f"mega {words}: there is no such verb")
        command = command.commands[name]
    return command.meanings(typer.Context(command)) if isinstance(command, Command) else {}


def _renamed(words: Sequence[str], program: Program) -> Iterator[str]:
    """The words of a line, with the program's own flags under our names."""
    names = {old.replace("_", "-"): new for old, new in program.renames.items()}
    for word in words:
        word = word.strip() or word  # of a line that continues though a blank follows its backslash
        flag, attached, value = word.partition("=")
        new = names.get(flag.replace("_", "-")) if word.startswith("--") else None
        yield word if new is None else f"{new}{attached}{value}"


def _with_defaults(settings: Sequence[Setting], program: Program, known: Mapping[str, Meaning]) -> list[Setting]:
    """The settings of a line, below what its program's name says, and above what that leaves out."""
    given = {setting.flag for setting in settings}
    adds, defaults = (_stated(row, known) for row in (program.adds, program.defaults))
    added = [setting for setting in (*adds, *defaults) if setting.flag not in given]
    first = [setting for setting in added if setting in adds]
    return [*first, *settings, *(setting for setting in added if setting not in first)]


def _stated(row: Mapping[str, str], known: Mapping[str, Meaning]) -> list[Setting]:
    """The settings of flags and values; "" of a switch, a verb's own included."""
    found = read([word for flag, value in row.items() for word in (flag, value) if word], known)
    return [*found.settings, *(Setting(flag, ["true"], True) for flag in found.others)]


def _reasons(found: ReadLine, placed: Sequence[Setting]) -> list[str]:
    """What is wrong with a line, and words of it that are no flags. placed: options made of such words."""
    used = sum(len(setting.values) for setting in placed)
    unused = [word for word in found.others if not word.startswith("-")][used:]
    words = [f"{word}: is no flag, nor a flag's value" for word in unused]
    return [re.sub(r"; --help(-all)? lists all$", "", line) for line in found.problems] + words


def _typed(setting: Setting, program: Program) -> list[str]:
    """A setting as a person types it."""
    if setting.switch:
        return setting.words
    lowers = setting.flag in program.lowers
    return [setting.flag, *(value.lower() if lowers else value for value in setting.values)]


def quoted(words: Sequence[str]) -> str:
    """Words as a shell reads them; a variable that was left open stays one.

    >>> quoted(["mega", "pretrain", "--save", "my runs", "--load", "$DIR/x"])
    "mega pretrain --save 'my runs' --load $DIR/x"
    """
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    if re.fullmatch(r"[\w@%+=:,./${}\-*?\[\]]+", word):
        return word
    if "$" in word:
        escaped = word.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return "'" + word.replace("'", "'\"'\"'") + "'"


# Launchers -------------------------------------------------------------------------------------------------------

_TORCH = ("torch.distributed.launch", "torch.distributed.run")
_LAUNCH_SWITCHES = ("--standalone", "--use_env", "--use-env", "--no_python", "--no-python")


def _start(launcher: Sequence[str], verb: str, known: Mapping[str, Meaning], result: Translation) -> list[str]:
    """How a verb is started where the old line was started so."""
    here = ["mega", *verb.split()]
    words = [word for word in launcher if word != "-u" and not re.fullmatch(r"(.*/)?python[\d.]*", word)]
    for at, word in enumerate(words):
        if PurePosixPath(word).name == "deepspeed":
            return [*words[:at], *_of_deepspeed(words[at + 1 :], here, known, result)]
        if _is_torchrun(words, at):
            return [*words[:at], *_of_torchrun(words[at + (2 if word == "-m" else 1) :], here, known)]
    inner = len(words) > 1 and words[-1] == "-c" and PurePosixPath(words[-2]).name in ("sh", "bash")
    return [*(words[:-2] if inner else words), *here]


def _is_torchrun(words: Sequence[str], index: int) -> bool:
    word = words[index]
    if word == "-m":
        return len(words) > index + 1 and words[index + 1] in _TORCH
    return PurePosixPath(word).name == "torchrun"


def _options(words: Sequence[str]) -> dict[str, str]:
    """A launcher's options, with hyphens; under "" a word that is none of them, as a variable that is left open."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, attached, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            found[""] = flag
        elif flag not in _LAUNCH_SWITCHES:
            found[flag.replace("_", "-")] = value if attached else rest.pop(0) if rest else ""
    return found


def _of_torchrun(words: Sequence[str], here: Sequence[str], known: Mapping[str, Meaning]) -> list[str]:
    given = _options(words)
    count = given.get("--nproc-per-node", "1")
    if given.get("--nnodes", "1") == "1" and "--nproc" in known and count.isdecimal() and "" not in given:
        return [*here, *(["--nproc", count] if count != "1" else [])]
    kept = [word for word in words if word not in ("--use_env", "--use-env")]
    return ["torchrun", *kept, "-m", *here]


def _of_deepspeed(
    words: Sequence[str], here: Sequence[str], known: Mapping[str, Meaning], result: Translation
) -> list[str]:
    """DeepSpeed starts a rank on every GPU of a host where it is not told how many."""
    given = _options(words)
    nodes, count = given.pop("--num-nodes", "1"), given.pop("--num-gpus", "gpu")
    for flag, value in given.items():
        if flag not in ("--master-addr", "--master-port"):
            result.lacking.append(
                f"deepspeed {flag} {value}: ranks are not placed from here; start torchrun on each host, or mpirun"
            )
    if nodes == "1" and "--nproc" in known and count.isdecimal():
        return [*here, "--nproc", count]
    return ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", count, "-m", *here]


# What single programs need besides -----------------------------------------------------------------------------------

_CORPORA = {"wikipedia": "data/wikipedia/wikidump_lines.json", "webtext": "data/webtext/data.json"}
"""Names of corpora in Megatron-LM of 2019 -> their texts, each with the key `text`."""


def _texts_first(result: Translation, options: dict[str, list[str]]) -> None:
    """Training of 2019 read texts; their tokens are made before. Its checkpoints came every 5,000 steps."""
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
        if f"{prefix}_text_{level}" in prefixes:  # a file of that name in another folder
            prefix += f"-{len(prefixes) + 1}"
        prefixes.append(f"{prefix}_text_{level}")
        tokenizer = ("--tokenizer", "--vocab-file", "--merge-file", "--tokenizer-model")
        made = [word for flag in tokenizer if flag in options for word in (flag, *options[flag])]
        cut = ["--split-sentences"] if sentences else ["--append-eod"]
        result.commands.append(
            ["mega", "preprocess", "--input", _CORPORA.get(text, text), "--output-prefix", prefix, *cut, *made]
        )
    options["--data-path"] = [word for prefix in prefixes for word in ("1", prefix)] if len(prefixes) > 1 else prefixes
    del options["--train-data"]


def _downloaded(result: Translation, options: dict[str, list[str]]) -> None:
    """The tokenizer's files were downloaded by name; the new lines have a variable in their place."""
    if options.get("--tokenizer") == ["GPT2BPETokenizer"]:
        options |= {"--vocab-file": ["$GPT2/vocab.json"], "--merge-file": ["$GPT2/merges.txt"]}
        result.holes.append(GPT2_FILES)
    else:
        options["--vocab-file"] = ["$VOCAB"]
        result.holes.append("VOCAB: the tokenizer's vocabulary file, which was downloaded by name")


def _is_text(word: str) -> bool:
    return word in _CORPORA or word.endswith((".json", ".jsonl", ".csv", ".tsv", ".txt"))


def _validated(result: Translation, options: dict[str, list[str]]) -> None:
    """--data-path2 is what is validated, and --data-path then only trains."""
    if "--valid-data" in options and "--data-path" in options:
        options["--train-data"] = options.pop("--data-path")
        options.pop("--split", None)


def _merged(result: Translation, options: dict[str, list[str]]) -> None:
    """merge_mp_partitions.py wrote where it read."""
    if "--load-dir" in options and "--save-dir" not in options:
        options["--save-dir"] = [options["--load-dir"][0].rstrip("/") + "-merged"]


def _from_megatron(result: Translation, options: dict[str, list[str]]) -> None:
    """Hugging Face's form is written from a checkpoint of ours."""
    if "--load-dir" in options:
        source = options["--load-dir"][0].rstrip("/")
        result.commands.append(["mega", "reshard", "--load-dir", source, "--save-dir", f"{source}-mega"])
        options["--load-dir"] = [f"{source}-mega"]


def _prompts(result: Translation, options: dict[str, list[str]]) -> None:
    if "--input" in options and "--num-samples" in options:
        count = options.pop("--num-samples")[0]
        result.lacking.append(f"--num-samples {count}: with a file of prompts each of them is continued; shorten it")


def _visible_padding(result: Translation, options: dict[str, list[str]]) -> None:
    """The decoder of the releases whose T5 is not Megatron-core's attends to padding; see --memory-padding."""
    if any(line.startswith("--use-mcore-models") for line in result.dropped):
        return
    unfused = any(line.startswith("--no-masked-softmax-fusion") for line in result.dropped)
    fused = options.get("--dtype", ["fp32"])[0] in ("bf16", "fp16") and not unfused
    options["--memory-padding"] = ["zero" if fused else "uniform"]
    result.notes.append(PADDING)


def _gpt2_scores(words: Sequence[str]) -> list[str]:
    """run_gpt2_eval.py of 2019: WikiText-103, LAMBADA by --cloze-eval, windows of WebText by --webtext-eval."""
    kept, batch, batches = list[str](), "16", "5000"
    task = ["--task", "wikitext103"]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, attached, value = word.replace("_", "-").partition("=")
        if name == "--cloze-eval":
            task = ["--task", "lambada"]
        elif name == "--webtext-eval":
            task = ["--task", "ppl"]
        elif name in ("--eval-iters", "--batch-size"):
            number = value if attached else rest.pop(0) if rest else ""
            batch, batches = (number, batches) if name == "--batch-size" else (batch, number)
            kept += [name, number] if name == "--batch-size" else []
        else:
            kept.append(word)
    if task[1] == "ppl" and batch.isdecimal() and batches.isdecimal():
        task += ["--random-windows", str(int(batch) * int(batches))]
    return [*task, *kept]


def _keyed_inputs(words: Sequence[str]) -> list[str]:
    """find_duplicates.py's --inputs FILE KEY FILE KEY, and where the documents that are kept go."""
    kept, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word != "--inputs":
            kept.append(word)
            continue
        values = list[str]()
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        kept += ["--input", *values[::2], *(["--id-key", values[1]] if len(values) > 1 else [])]
    if "--output" in kept:
        kept += ["--kept", f"{kept[kept.index('--output') + 1]}-kept"]
    return kept


def _ngram_tasks(words: Sequence[str]) -> list[str]:
    """filter_ngrams.py's --tasks NAME ..., --lambada-path FILE and --dedup-dataset FILE KEY."""
    kept, rest, tasks, paths = list[str](), list(words), list[str](), dict[str, str]()
    while rest:
        word = rest.pop(0)
        name, attached, value = word.replace("_", "-").partition("=")
        values = [value] if attached else []
        while not attached and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name == "--tasks":
            tasks += values
        elif name == "--lambada-path":
            paths["lambada"] = values[0] if values else ""
        elif name == "--dedup-dataset":
            kept += ["--input", *values[:1], *(["--json-key", values[1]] if len(values) > 1 else [])]
        else:
            kept += [word, *([] if attached else values)]
    named = [f"{task}={paths.get(task, f'$TASKS/{task}')}" for task in tasks]
    return [*(["--task-data", *named] if named else []), *kept]


def _shares(words: Sequence[str]) -> list[str]:
    """split_json.py's --test_percent VALID TEST, which are fractions, as shares of all three parts."""
    kept = list(words)
    for index, word in enumerate(kept):
        if word.replace("-", "_") == "__test_percent":
            values = kept[index + 1 : index + 3]
            valid, test = (float(value) * 100 for value in values) if all(map(is_number, values)) else (5.0, 0.0)
            kept[index : index + 3] = ["--split", f"{100 - valid - test:g},{valid:g},{test:g}"]
            break
    return kept


def _two_betas(words: Sequence[str]) -> list[str]:
    """fairseq's --adam-betas "(0.9, 0.98)" as two options, and what its fp16 stands for."""
    kept, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        name, attached, value = word.partition("=")
        if name == "--adam-betas":
            while not attached and rest and not rest[0].startswith("--"):
                value += rest.pop(0)
            for flag, beta in zip(("--adam-beta1", "--adam-beta2"), re.findall(r"[\d.e-]+", value), strict=False):
                kept += [flag, beta]
        elif name in ("--memory-efficient-fp16", "--memory-efficient-bf16"):
            kept += [word, f"--{name[-4:].lstrip('-')}"]
        else:
            kept.append(word)
    return kept


def _fairseq_trained(result: Translation, options: dict[str, list[str]]) -> None:
    """Sets of a folder, and the defaults of its schedules and of its loss scale."""
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
    """A set of a folder; a model by its file, which stands for one file of each rank."""
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


def _fairseq_sets(line: CommandLine) -> Translation:
    """fairseq-preprocess makes up to three sets in one go, each of a text or of several."""
    given, words = dict[str, str](), list(line.words)
    for flag in ("--trainpref", "--validpref", "--testpref", "--destdir"):
        for index, word in enumerate(words):
            name, attached, value = word.partition("=")
            if name == flag:
                given[flag] = value if attached else "".join(words[index + 1 : index + 2])
                del words[index : index + (1 if attached else 2)]
                break
    folder = given.pop("--destdir", "data-bin").rstrip("/")
    result = Translation("preprocess")
    for flag, paths in given.items():
        for number, path in enumerate(paths.split(",")):
            name = flag[2:-4] + (str(number) if number else "")
            one = ["--input", path, "--output-prefix", f"{folder}/{name}", *words]
            made = translated(CommandLine(line.launcher, "fairseq-preprocess-set", tuple(one)))
            result.commands += made.commands
            result.dropped, result.lacking = made.dropped, made.lacking
    if not given:
        result.lacking.append(f"{line.program}: names no text; give --trainpref, --validpref or --testpref")
    if not any(word.partition("=")[0] == "--srcdict" for word in words):
        result.lacking.append("--srcdict: no dictionary is counted from the texts here; give its dict.txt")
    return result


_BEFORE |= {
    "run_gpt2_eval.py": _gpt2_scores,
    "find_duplicates.py": _keyed_inputs,
    "filter_ngrams.py": _ngram_tasks,
    "split_json.py": _shares,
    **dict.fromkeys(("fairseq-train", "train.py"), _two_betas),
}
_AFTER |= {
    "pretrain_t5.py": _visible_padding,
    "pretrain_gpt2.py": _texts_first,
    "pretrain_bert.py": _texts_first,
    "finetune_gpt.py": _validated,
    "merge_mp_partitions.py": _merged,
    "merge_mp_gpt.py": _merged,
    "llama_checkpoint_conversion.py": _from_megatron,
    **dict.fromkeys(("generate_samples_gpt.py", "generate_samples_gpt2.py"), _prompts),
    **dict.fromkeys(("fairseq-train", "train.py"), _fairseq_trained),
    **dict.fromkeys(("fairseq-eval-lm", "eval_lm.py"), _fairseq_scored),
}


def _compared(first: str, second: str, verb: str) -> Callable[[CommandLine], Translation]:
    """A program that compares two checkpoints of others', named by these flags; `verb` reads them."""

    def compare(line: CommandLine) -> Translation:
        given, result = _options(line.words), Translation("checkpoint diff")
        converted = []
        for flag in (first, second):
            if flag not in given:
                result.lacking.append(f"{flag}: needs a value")
                continue
            place = re.sub(r"/(mp_rank_[\d_]+/)?model_optim_rng\.pt$", "", given[flag])
            converted.append(f"{place}-mega")
            result.commands.append(["mega", *verb.split(), "--load-dir", place, "--save-dir", converted[-1]])
        result.commands.append(["mega", "checkpoint", "diff", *converted])
        return result

    return compare


_WHOLE: dict[str, Callable[[CommandLine], Translation]] = {
    "is_same.py": _compared("--model-path-1", "--model-path-2", "reshard"),
    "check.py": _compared("--base-hf-model-path", "--converted-hf-model-path", "convert-llama"),
    **dict.fromkeys(("fairseq-preprocess", "preprocess.py"), _fairseq_sets),
}
"""Programs whose line becomes several, or of which nothing but two paths is read."""
