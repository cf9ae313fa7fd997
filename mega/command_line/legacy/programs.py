"""What the name of an old program stands for: Megatron-LM's scripts and tools of 2019 to 2024, its forks', fairseq's.

No flag of theirs names the model family or what is to be done; the program's name does. A row of programs.toml says
which verb of `mega` does the same, what the name adds to its line, and which of the program's own flags are called
otherwise, change nothing, or have no counterpart. Flags that training shares are in config/sections.py and flags.toml.
This file knows names, and neither how a line is split into words nor what a verb does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mega.command_line.legacy.tables import table
from mega.core.config.compose import nearest


@dataclass(frozen=True)
class Program:
    """One program.

    verb: words of `mega` that do the same; "" where nothing does, for the reason `why`.
    adds: flag -> value, or "" of a switch, that the name alone stands for.
    defaults: the same, where the line does not give the flag.
    renames: its flags -> ours. drops: its flags that change nothing -> why. lacks: its flags without a counterpart.
    lowers: flags whose values are names that we write in lower case.
    values: its flags -> our flag, and its values -> ours; others are refused.
    drops_switches: as drops, of flags without a value.
    arguments: our flags for the words of its line that no flag names, in their order; the last takes all that follow.
    hole: what has to be given before the new line runs: a variable of it, and what that is.
    before, after, whole: what else its line needs, by name: functions of rewrites.py.
    when: flag -> its values with which the row holds.
    """

    verb: str = ""
    adds: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    drops: Mapping[str, str] = field(default_factory=dict)
    drops_switches: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    lowers: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    hole: str = ""
    why: str = ""
    before: str = ""
    after: str = ""
    whole: str = ""
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def hole(name: str) -> str:
    """A variable that has to be set, and to what."""
    return f"{name}: {table('programs')['holes'][name]}"


def _program(row: Mapping[str, Any]) -> Program:
    """A row of the table: its reasons stand before their flags, and a switch is true."""
    read = {key: value for key, value in row.items() if key != "names"}
    for key in ("adds", "defaults"):
        read[key] = {flag: "" if value is True else value for flag, value in row.get(key, {}).items()}
    for key in ("drops", "drops_switches", "lacks"):
        read[key] = {flag: reason for reason, flags in row.get(key, {}).items() for flag in flags}
    read["values"] = {flag: (one["flag"], _renames(one["choices"])) for flag, one in row.get("values", {}).items()}
    read |= {key: tuple(row[key]) for key in ("lowers", "arguments") if key in row}
    read["when"] = {flag: tuple(values) for flag, values in row.get("when", {}).items()}
    return Program(**{**read, "hole": hole(row["hole"]) if "hole" in row else ""})


def _renames(choices: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    return choices if isinstance(choices, Mapping) else {name: name for name in choices}


@functools.cache
def programs() -> Mapping[str, Sequence[Program]]:
    """Every known program by the name of its file: its rows, of which the first that holds counts."""
    return _by_name("program")


@functools.cache
def _tasks() -> Mapping[str, Sequence[Program]]:
    """The tasks of tasks/main.py by their names in lower case."""
    return _by_name("task")


def _by_name(kind: str) -> Mapping[str, Sequence[Program]]:
    found: dict[str, list[Program]] = {}
    for row in table("programs")[kind]:
        for name in row["names"]:
            found.setdefault(name, []).append(_program(row))
    return found


def program_of(name: str, words: Sequence[str]) -> Program:
    """The row of a program that is called by `name`, whatever its folder, with these words after it.

    Errors: ValueError where it is not known.

    >>> program_of("tasks/main.py", ["--task", "LAMBADA"]).verb
    'eval'
    >>> program_of("pretrain_bort.py", [])
    Traceback (most recent call last):
    ...
    ValueError: pretrain_bort.py: is not a program that is known here (nearest: pretrain_bert.py)
    """
    base = PurePosixPath(name).name
    if base == "main.py":
        return _task(words)
    if base not in programs():
        raise ValueError(f"{name}: is not a program that is known here{nearest(base, [*programs(), 'main.py'])}")
    return next(
        row for row in programs()[base] if all(_value(words, flag) in values for flag, values in row.when.items())
    )


def is_program(word: str, *, known: bool = False) -> bool:
    """Whether a word of a command line names a program, known or not.

    known: whether only a program that is known here counts.

    >>> is_program("tools/preprocess_data.py"), is_program("fairseq-train"), is_program("--nproc_per_node")
    (True, True, False)
    """
    if " " in word or word.startswith("-"):
        return False
    name = PurePosixPath(word).name
    return name in programs() or (word.endswith(".py") and (not known or name == "main.py"))


def _task(words: Sequence[str]) -> Program:
    """tasks/main.py, or tools/retro/main.py. Errors: ValueError where no --task that is known is given."""
    if _value(words, "--retro-tasks") is not None:
        return programs()["tools/retro/main.py"][0]
    task = _value(words, "--task")
    if task is None:
        raise ValueError("main.py: names no --task, which says what it does")
    if task.lower() not in _tasks():
        raise ValueError(f"main.py --task {task}: is not a task that is known here{nearest(task.lower(), _tasks())}")
    (found,) = _tasks()[task.lower()]
    scored = _value(words, "--train-data") is None or _value(words, "--epochs") == "0"
    return _tasks()["lambada"][0] if found.verb == "finetune" and scored else found


def _value(words: Sequence[str], flag: str) -> str | None:
    """The first value of a flag; "" of one without."""
    for index, word in enumerate(words):
        name, attached, value = word.partition("=")
        if name == flag:
            following = words[index + 1] if index + 1 < len(words) else "--"
            return value if attached else "" if following.startswith("--") else following
    return None
