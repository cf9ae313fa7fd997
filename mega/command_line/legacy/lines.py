"""Translate command lines of other programs to `mega`, and report everything that has no counterpart.

    pretrain_bert.py --num-layers 24 --fp16 --DDP-impl torch  ->  mega pretrain --family bert --layers 24 --dtype fp16

programs.toml defines what a program's name implies, and config/sections.py and flags.toml define what a flag does. The
caller supplies the spellings that a subcommand accepts. This module combines all three, and opens no file that a
command line names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from mega.command_line.argv import MANY, Drops, Meaning, ReadLine, Refuses, Sets, Setting, read
from mega.command_line.legacy.launchers import start
from mega.command_line.legacy.programs import Program, program_of
from mega.command_line.legacy.rewrites import AFTER, BEFORE, WHOLE
from mega.command_line.legacy.scripts import CommandLine
from mega.command_line.legacy.translation import Translation

SpellingsOf = Callable[[str], Mapping[str, Meaning]]
"""Words of a command, such as `pretrain` or `data merge` -> every spelling that the command accepts."""

NULL = (
    "NullTokenizer adds an end of document to its --vocab-size ids, as in Megatron-LM 23.06; add --null-eod-last where "
    "it is one of them, as in Megatron-core 0.18"
)


def translated(line: CommandLine, spellings_of: SpellingsOf) -> Translation:
    """Translate `line` to `mega`. Errors: ValueError if its program is unknown."""
    program = program_of(line.program, line.words)
    if not program.verb:
        return Translation("", lacking=[f"{line.program}: {program.why}"])
    if program.whole:
        return WHOLE[program.whole](line, lambda part: translated(part, spellings_of))
    of_verb = spellings_of(program.verb)
    meaning_of = _known(program, of_verb)
    words = BEFORE[program.before](line.words) if program.before else line.words
    read_line = read(list(_renamed(words, program)), meaning_of)
    placed = _arguments(read_line, program)
    settings = _with_defaults([*read_line.settings, *placed], program, of_verb)
    dropped = [note.replace(" is accepted and changes nothing", "") for note in read_line.notes]
    result = Translation(program.verb, dropped=dropped, lacking=_reasons(read_line, placed))
    result.holes += [program.hole] if program.hole else []
    if not line.words:
        result.lacking.append(f"{line.program}: names no flags; mega {program.verb} --help shows what it needs")
    options = {setting.flag: setting.values for setting in settings}
    if options.get("--tokenizer") == ["NullTokenizer"] and "--null-eod-last" not in options:
        result.notes.append(NULL)
    if program.after:
        AFTER[program.after](result, options)
        switches = {setting.flag for setting in settings if setting.switch}
        settings = [Setting(flag, values, flag in switches) for flag, values in options.items()]
    words_of_settings = [word for setting in settings for word in _typed(setting, program)]
    words_of_settings += [word for word in read_line.others if word.startswith("-")]
    result.commands.append([*start(line.launcher, program.verb, meaning_of, result), *words_of_settings])
    return result


def _known(program: Program, of_verb: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """The spellings that the subcommand of a program accepts, and the program's own flags."""
    meaning_of: dict[str, Meaning] = dict(of_verb)
    # A positional word may follow a dropped flag, so dropped flags take exactly one value if the program has positional
    # words.
    count = 1 if program.arguments else MANY
    meaning_of |= {flag: Drops(count, reason) for flag, reason in program.drops.items()}
    meaning_of |= {flag: Drops(0, reason) for flag, reason in program.drops_switches.items()}
    meaning_of |= {
        flag: Sets(mega_flag, 1, choices=tuple(names), renames=names)
        for flag, (mega_flag, names) in program.values.items()
    }
    return meaning_of | {flag: Refuses(reason) for flag, reason in program.lacks.items()}


def _arguments(found: ReadLine, program: Program) -> list[Setting]:
    """Turn the positional words of a line into options of mega."""
    words = [word for word in found.others if not word.startswith("-")]
    flags = program.arguments[: len(words)]
    return [
        Setting(flag, words[index:] if flag == program.arguments[-1] else [words[index]], False)
        for index, flag in enumerate(flags)
    ]


def _renamed(words: Sequence[str], program: Program) -> Iterator[str]:
    """Yield the words of a line, with the program's own flags renamed to mega's."""
    names = {old.replace("_", "-"): new for old, new in program.renames.items()}
    for word in words:
        word = word.strip() or word  # a backslash followed by a space leaves a word of spaces
        flag, equals_sign, value = word.partition("=")
        new = names.get(flag.replace("_", "-")) if word.startswith("--") else None
        yield word if new is None else f"{new}{equals_sign}{value}"


def _with_defaults(settings: Sequence[Setting], program: Program, known: Mapping[str, Meaning]) -> list[Setting]:
    """The settings of a line, preceded by the settings that the program's name implies and followed by the program's
    defaults."""
    flags = {setting.flag for setting in settings}
    adds, defaults = (_stated(row, known) for row in (program.adds, program.defaults))
    extra = [setting for setting in (*adds, *defaults) if setting.flag not in flags]
    first = [setting for setting in extra if setting in adds]
    return [*first, *settings, *(setting for setting in extra if setting not in first)]


def _stated(row: Mapping[str, str], known: Mapping[str, Meaning]) -> list[Setting]:
    """Return the settings that a row of the table of programs states. row: flag -> value, which is "" for a flag
    without a value. Such a flag may also be a flag of the mega subcommand."""
    read_line = read([word for flag, value in row.items() for word in (flag, value) if word], known)
    return [*read_line.settings, *(Setting(flag, ["true"], True) for flag in read_line.others)]


def _reasons(found: ReadLine, placed: Sequence[Setting]) -> list[str]:
    """Return the mistakes in a command line, and the unused positional words. placed: options made from positional
    words."""
    used = sum(len(setting.values) for setting in placed)
    unused = [word for word in found.others if not word.startswith("-")][used:]
    words = [f"{word}: is no flag, nor a flag's value" for word in unused]
    return [re.sub(r"; --help(-all)? lists all$", "", line) for line in found.problems] + words


def _typed(setting: Setting, program: Program) -> list[str]:
    """The words of a setting, as a user types them."""
    if setting.switch:
        return setting.words
    lowers = setting.flag in program.lowers
    return [setting.flag, *(value.lower() if lowers else value for value in setting.values)]
