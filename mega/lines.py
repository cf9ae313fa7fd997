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

from mega.argv import MANY, Drops, Meaning, ReadLine, Refuses, Setting, read
from mega.core.config.programs import Program, program_of
from mega.core.config.scripts import CommandLine
from mega.options import Command, load


@dataclass
class Translation:
    """What an old line becomes.

    commands: lines of `mega`, in the order in which they are to run. dropped: what changes nothing. lacking: what has
    no counterpart, or has to be given. notes: what releases of the old program do differently. verb: of the last
    command; "" where nothing does the same.
    """

    verb: str
    commands: list[list[str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As a script: commands, and the rest as comments."""
        lines = [f"# changes nothing: {line}" for line in self.dropped]
        lines += [f"# no counterpart: {line}" for line in self.lacking]
        lines += [f"# by release: {line}" for line in self.notes]
        # A word may hold a new line, after which a comment would be a command.
        return "\n".join([" ".join(line.splitlines()) for line in lines] + [quoted(one) for one in self.commands])


_AFTER: dict[str, Callable[[Translation, dict[str, list[str]]], None]] = {}
"""Program -> what else its line needs; it is given the options of the last command by flag."""


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
    found = read(list(_renamed(line.words, program)), known)
    settings = _with_defaults(found.settings, program, known)
    dropped = [note.replace(" is accepted and changes nothing", "") for note in found.notes]
    result = Translation(program.verb, dropped=dropped, lacking=_reasons(found))
    if not line.words:
        result.lacking.append(f"{line.program}: names no flags; mega {program.verb} --help shows what it needs")
    options = {setting.flag: setting.values for setting in settings}
    if options.get("--tokenizer") == ["NullTokenizer"] and "--null-eod-last" not in options:
        result.notes.append(NULL)
    if base in _AFTER:
        _AFTER[base](result, options)
        switches = {setting.flag for setting in settings if setting.switch}
        settings = [Setting(flag, values, flag in switches) for flag, values in options.items()]
    words = [word for setting in settings for word in _typed(setting, program)]
    words += [word for word in found.others if word.startswith("-")]
    result.commands.append([*_start(line.launcher, program.verb, known, result), *words])
    return result


def _known(program: Program) -> dict[str, Meaning]:
    """What the verb of a program answers to, and the program's own flags."""
    found = {**_of_verb(program.verb), **{flag: Drops(MANY, reason) for flag, reason in program.drops.items()}}
    return found | {flag: Refuses(reason) for flag, reason in program.lacks.items()}


@functools.cache
def _of_verb(words: str) -> Mapping[str, Meaning]:
    """What a verb answers to, or a verb of a verb's: `data merge`."""
    verb, *rest = words.split()
    command = load(verb)
    for name in rest:
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
    adds, defaults = (
        read([word for flag, value in row.items() for word in (flag, value) if word], known).settings
        for row in (program.adds, program.defaults)
    )
    added = [setting for setting in (*adds, *defaults) if setting.flag not in given]
    first = [setting for setting in added if setting in adds]
    return [*first, *settings, *(setting for setting in added if setting not in first)]


def _reasons(found: ReadLine) -> list[str]:
    """What is wrong with a line, and words of it that are no flags."""
    words = [f"{word}: is no flag, nor a flag's value" for word in found.others if not word.startswith("-")]
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
    sentences = options.get("--family") in (["bert"], ["t5"])
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
    if "--vocab-file" not in options and "--tokenizer-model" not in options:
        result.lacking.append(
            "--tokenizer-type: its files were downloaded by name; give --vocab-file, of GPT-2's "
            "tokenizer --merge-file too, in both lines"
        )


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


_AFTER |= {
    "pretrain_t5.py": _visible_padding,
    "pretrain_gpt2.py": _texts_first,
    "pretrain_bert.py": _texts_first,
    "finetune_gpt.py": _validated,
    "merge_mp_partitions.py": _merged,
    "merge_mp_gpt.py": _merged,
    "llama_checkpoint_conversion.py": _from_megatron,
    **dict.fromkeys(("generate_samples_gpt.py", "generate_samples_gpt2.py"), _prompts),
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
}
"""Programs of which nothing but two paths is read."""
