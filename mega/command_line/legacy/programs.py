"""The subcommand and the options that the name of a program implies: scripts and tools of Megatron-LM (2019 to 2024),
of its forks and of fairseq.

These programs have no flag for the model family or the task; the program's name implies both. A row of programs.toml
names the equivalent subcommand of `mega`, the flags that the program's name implies, and the program's own flags that
are renamed, have no effect, or have no counterpart. Flags of training are in config/sections.py and flags.toml. This
module depends on the names of programs, but not on how a line is split into words or on what a subcommand does.
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
    """One row of programs.toml: a program, or a program with certain flags."""

    verb: str = ""
    """Subcommand of `mega` that does the same; "" if there is none (`why` is the reason)."""
    adds: Mapping[str, str] = field(default_factory=dict)
    """Flag -> value that the program's name implies; the value of a switch is ""."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Flag -> value that is used if the command line does not set the flag."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Flag of the program -> mega's flag."""
    drops: Mapping[str, str] = field(default_factory=dict)
    """Flag of the program that has no effect -> the reason."""
    drops_switches: Mapping[str, str] = field(default_factory=dict)
    """The same as `drops`, for flags that take no value."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Flag of the program that has no counterpart -> the reason."""
    values: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    """Flag of the program -> (mega's flag, value of the program -> mega's value); other values are refused."""
    lowers: tuple[str, ...] = ()
    """Flags whose values mega writes in lower case."""
    arguments: tuple[str, ...] = ()
    """Mega's flags for the positional words of the command line, in order; the last flag takes all remaining words."""
    hole: str = ""
    """A variable in the new command line that the user has to set, and its meaning."""
    why: str = ""
    """The reason for a missing counterpart."""
    before: str = ""
    """Name of a function in rewrites.BEFORE, applied to the words of the line."""
    after: str = ""
    """Name of a function in rewrites.AFTER, applied to the translated options."""
    whole: str = ""
    """Name of a function in rewrites.WHOLE, which translates the whole line."""
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag -> the values of this flag for which this row applies."""


def hole(name: str) -> str:
    """A variable that the user has to set, and its meaning."""
    return f"{name}: {table('programs')['holes'][name]}"


def _program(row: Mapping[str, Any]) -> Program:
    """Build a program from a row of the table, which maps reasons to flags and marks switches with true."""
    read = {key: value for key, value in row.items() if key != "names"}
    for key in ("adds", "defaults"):
        read[key] = {flag: "" if value is True else value for flag, value in row.get(key, {}).items()}
    for key in ("drops", "drops_switches", "lacks"):
        read[key] = {flag: reason for reason, flags in row.get(key, {}).items() for flag in flags}
    read["values"] = {
        flag: (value_row["flag"], _renames(value_row["choices"])) for flag, value_row in row.get("values", {}).items()
    }
    read |= {key: tuple(row[key]) for key in ("lowers", "arguments") if key in row}
    read["when"] = {flag: tuple(values) for flag, values in row.get("when", {}).items()}
    return Program(**{**read, "hole": hole(row["hole"]) if "hole" in row else ""})


def _renames(choices: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    return choices if isinstance(choices, Mapping) else {name: name for name in choices}


@functools.cache
def programs() -> Mapping[str, Sequence[Program]]:
    """File name of every known program -> its rows; the first row that applies is used."""
    return _by_name("program")


@functools.cache
def _tasks() -> Mapping[str, Sequence[Program]]:
    """Task of tasks/main.py, in lower case -> its rows."""
    return _by_name("task")


def _by_name(kind: str) -> Mapping[str, Sequence[Program]]:
    rows_by_name: dict[str, list[Program]] = {}
    for row in table("programs")[kind]:
        for name in row["names"]:
            rows_by_name.setdefault(name, []).append(_program(row))
    return rows_by_name


def program_of(name: str, words: Sequence[str]) -> Program:
    """The row of programs.toml for the program `name`, in any folder, that applies to these words.

    Errors: ValueError if the program is unknown.

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
    """Whether a word of a command line names a program, even an unknown one.

    known: accept only known programs.

    >>> is_program("tools/preprocess_data.py"), is_program("fairseq-train"), is_program("--nproc_per_node")
    (True, True, False)
    """
    if " " in word or word.startswith("-"):
        return False
    name = PurePosixPath(word).name
    return name in programs() or (word.endswith(".py") and (not known or name == "main.py"))


def _task(words: Sequence[str]) -> Program:
    """The row for the --task of tasks/main.py or tools/retro/main.py. Errors: ValueError if no known --task is
    given."""
    if _value(words, "--retro-tasks") is not None:
        return programs()["tools/retro/main.py"][0]
    task = _value(words, "--task")
    if task is None:
        raise ValueError("main.py: names no --task, which says what it does")
    if task.lower() not in _tasks():
        raise ValueError(f"main.py --task {task}: is not a task that is known here{nearest(task.lower(), _tasks())}")
    (program,) = _tasks()[task.lower()]
    scored = _value(words, "--train-data") is None or _value(words, "--epochs") == "0"
    return _tasks()["lambada"][0] if program.verb == "finetune" and scored else program


def _value(words: Sequence[str], flag: str) -> str | None:
    """The first value of a flag; "" for a flag without values, None if the flag is absent."""
    for index, word in enumerate(words):
        name, equals_sign, value = word.partition("=")
        if name == flag:
            following = words[index + 1] if index + 1 < len(words) else "--"
            return value if equals_sign else "" if following.startswith("--") else following
    return None
