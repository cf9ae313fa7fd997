"""Old command lines as those of `mega` that do the same, with a line for each thing that has no counterpart.

    pretrain_bert.py --num-layers 24 --fp16 --DDP-impl torch  ->  mega pretrain --family bert --layers 24 --dtype fp16

What a program's name stands for is in programs.toml, what a flag does in config/sections.py and flags.toml, and which
spellings a verb answers to is given by the caller. This file puts the three together; it opens nothing that a line
names.
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
"""A verb, or a verb of a verb's such as `data merge` -> every spelling that it answers to."""

NULL = (
    "NullTokenizer adds an end of document to its --vocab-size ids, as in Megatron-LM 23.06; add --null-eod-last where "
    "it is one of them, as in Megatron-core 0.18"
)


def translated(line: CommandLine, spellings_of: SpellingsOf) -> Translation:
    """`line` as `mega` has it. Errors: ValueError where its program is not known."""
    program = program_of(line.program, line.words)
    if not program.verb:
        return Translation("", lacking=[f"{line.program}: {program.why}"])
    if program.whole:
        return WHOLE[program.whole](line, lambda part: translated(part, spellings_of))
    of_verb = spellings_of(program.verb)
    known = _known(program, of_verb)
    words = BEFORE[program.before](line.words) if program.before else line.words
    found = read(list(_renamed(words, program)), known)
    placed = _arguments(found, program)
    settings = _with_defaults([*found.settings, *placed], program, of_verb)
    dropped = [note.replace(" is accepted and changes nothing", "") for note in found.notes]
    result = Translation(program.verb, dropped=dropped, lacking=_reasons(found, placed))
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
    typed = [word for setting in settings for word in _typed(setting, program)]
    typed += [word for word in found.others if word.startswith("-")]
    result.commands.append([*start(line.launcher, program.verb, known, result), *typed])
    return result


def _known(program: Program, of_verb: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """What the verb of a program answers to, and the program's own flags."""
    found: dict[str, Meaning] = dict(of_verb)
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
