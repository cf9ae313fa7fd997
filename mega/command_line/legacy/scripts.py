"""Extract the command lines of a shell script: launcher, program and words of each.

Nothing is executed. This module supports continued lines, comments, quotes, variables and arrays that the script itself
sets, defaults (`${A:-b}`) and integer arithmetic. Variables that the script does not set remain as they are. This
module does not depend on flags.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mega.command_line.legacy.programs import is_program


class CommandLine(NamedTuple):
    """A command line. launcher: the words before the program. program: the program's path. words: the words after the
    program."""

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]


LONGEST_LINE = 1 << 20
"""Maximum length of a line with its variables replaced, in characters."""
_HELPERS = ("launch.py", "run.py", "wait_for.py")
"""Scripts that start other programs."""

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_WHOLE_ARRAY = re.compile(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"')
"""A quoted array, each of whose entries is a separate word."""
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_PART = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\\.
    |(?P<end>\|&|\|\|?|&&|;;?|(?<![<>])&(?!>))|(?P<redirection>(?<!\S)(?:\d|&)?[<>])|.""",
    re.DOTALL | re.VERBOSE,
)
"""Quotes and substitutions; the end of a command; the beginning of its redirections; or any other character."""
_KEYWORDS = ("do", "then", "else", "elif", "if", "while", "until", "time", "!", "{", "(", "eval", "exec")
"""Keywords of the shell that may precede a command."""
_BLANK = "\x00"
"""Placeholder for spaces inside substitutions."""


def command_lines(text: str) -> Iterator[CommandLine]:
    """Yield every command of a script that starts a Python program, or a program that is known by name.

    Errors: ValueError for a quote that is not closed.

    >>> script = 'ARGS="--num-layers 2 \\\\\\n --fp16"\\ntorchrun --nproc_per_node 2 pretrain_gpt.py $ARGS  # trains'
    >>> next(command_lines(script)).words
    ('--num-layers', '2', '--fp16')
    """
    variables: dict[str, str] = {}
    for line in (command for statement in _statements(text) for command in _commands(statement)):
        assigned = _ASSIGNMENT.match(line)
        if assigned is not None and not _is_prefix(assigned[3]):
            name, appends, value = assigned.groups()
            value = _unquoted(_expanded(value.strip(), {name: "", **variables}))
            variables[name] = variables.get(name, "") + (" " if value[:1] != " " else "") + value if appends else value
            continue
        words = itertools.dropwhile(_KEYWORDS.__contains__, _words(_expanded(line, variables)))
        command = split_command(list(words))
        if command is not None:
            yield command


def split_command(words: Sequence[str]) -> CommandLine | None:
    """Split words into launcher, program and the program's words; None if no word names a program.

    >>> split_command(["srun", "sh", "-c", "python -u pretrain_gpt.py --fp16"])
    CommandLine(launcher=('srun', 'sh', '-c', 'python', '-u'), program='pretrain_gpt.py', words=('--fp16',))
    >>> split_command(["python", "-m", "examples.megatron_11b.detok", "wiki.test.raw"])
    CommandLine(launcher=('python',), program='examples/megatron_11b/detok.py', words=('wiki.test.raw',))
    """
    for index, word in enumerate(words):
        if index and words[index - 1] == "-c" and " " in word:
            inner = next(filter(None, map(split_command, map(_words, _commands(word)))), None)
            if inner is not None:
                return CommandLine((*words[:index], *inner.launcher), inner.program, inner.words)
        if word.startswith("-") or (word.split("/")[-1] in _HELPERS):
            continue
        if index and words[index - 1] == "-m" and is_program(f"{word.rsplit('.', 1)[-1]}.py", known=True):
            return CommandLine(tuple(words[: index - 1]), f"{word.replace('.', '/')}.py", tuple(words[index + 1 :]))
        if is_program(word):
            return CommandLine(tuple(words[:index]), word, tuple(words[index + 1 :]))
    return None


def _commands(statement: str) -> Iterator[str]:
    """Yield the commands of a line, without their redirections.

    >>> list(_commands("cd x && python a.py --eod '<|end|>' 2>&1 | tee log; python b.py > log &"))
    ['cd x', "python a.py --eod '<|end|>'", 'tee log', 'python b.py']
    """
    parts: list[str] = []
    redirected = False
    for match in _PART.finditer(statement + ";"):
        if match["end"]:
            if command := "".join(parts).strip():
                yield command
            parts, redirected = [], False
        elif match["redirection"]:
            redirected = True
        elif not redirected:
            parts.append(match[0])


def _statements(text: str) -> Iterator[str]:
    """Yield the lines of a script, with continued lines joined, including those inside quotes and arrays."""
    pending = ""
    for raw in text.replace("\r\n", "\n").split("\n"):
        line = pending + _without_comment(raw, pending)
        if line.rstrip().endswith("\\"):
            pending = line.rstrip()[:-1] + " "
        elif _is_open(line):
            pending = line + " "
        else:
            pending = ""
            yield line
    if pending.strip():
        yield pending


def _without_comment(line: str, before: str) -> str:
    """Cut the comment of a line: it begins at a `#` that begins a word outside quotes."""
    quote = _quote_at_end(before)
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote and line[index - 1 : index] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def _quote_at_end(text: str) -> str:
    quote, before = "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter in "\"'" and before != "\\":
            quote = letter
        before = letter
    return quote


def _is_open(line: str) -> bool:
    """Whether a quote or an array continues on the next line."""
    if _quote_at_end(line):
        return True
    return bool(re.match(r"^\s*\w+\+?=\(", line)) and line.count("(") > line.count(")")


def _is_prefix(value: str) -> bool:
    """Whether `A=1 python ...` sets a variable for one command only."""
    try:
        words = shlex.split(value)
    except ValueError:
        return False
    quoted = value.lstrip()[:1] in "\"'("
    return not quoted and len(words) > 1 and split_command(words[1:]) is not None


def _unquoted(value: str) -> str:
    value = value.strip()
    if value[:1] == "(" and value[-1:] == ")":
        return value[1:-1].strip()
    if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
        return value[1:-1].strip()
    return value


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """Replace variables that are set, and evaluate arithmetic. Errors: ValueError if the line becomes too long."""
    line = _WHOLE_ARRAY.sub(r"\1", line)
    text = _ARITHMETIC.sub(_worked_out, _VARIABLE.sub(lambda match: _value_of(match, variables), line))
    if len(text) > LONGEST_LINE:
        raise ValueError(f"{line.strip()[:60]}: becomes longer than {LONGEST_LINE} characters with its variables")
    return _SUBSTITUTION.sub(lambda match: match[0].replace(" ", _BLANK), text)


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[3]
    return variables.get(name, match[2] if match[2] is not None else match[0])


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _worked_out(match: re.Match[str]) -> str:
    """Evaluate `$((2 * 4))` to 8; other expressions remain unchanged."""
    try:
        return str(_number(ast.parse(match[1].replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0].replace(" ", _BLANK)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError


def _words(line: str) -> list[str]:
    """Split a line into words, and remove quotes. Errors: ValueError if a quote is not closed."""
    try:
        return [word.replace(_BLANK, " ") for word in shlex.split(line)]
    except ValueError as error:
        raise ValueError(f"{line.strip()[:60]}: cannot be read as a command line ({error})") from None
