"""`--help` of every verb: 80 columns, flags whole, two worked examples, each a line that the verb takes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator

import pytest
from typer.core import TyperGroup

from mega import cli
from mega.command_line.examples import EXAMPLES
from mega.command_line.options import load


def _commands() -> Iterator[str]:
    for verb in cli.Verbs(name="mega").list_commands(None):
        found = load(verb)
        yield from (f"{verb} {name}" for name in found.commands) if isinstance(found, TyperGroup) else (verb,)


def _taken(line: str) -> bool:
    """Whether its verb takes the line; what it names need not be there."""
    words = shlex.split(re.split(r" (?:>|&&) ", line.replace("\\\n", ""))[0])  # as a shell joins lines
    words = words[words.index("mega") + 1 :]
    command = load(words.pop(0))
    if isinstance(command, TyperGroup):
        command = command.commands[words.pop(0)]
    return command.make_context("mega", words) is not None


@pytest.mark.parametrize("command", list(_commands()))
def test_help_fits_80_columns_with_flags_whole_and_two_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    examples = EXAMPLES[command]
    assert len(examples) == 2
    for words, line in examples:
        assert line in shown and words in shown and _taken(line)
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "…" not in shown


def test_no_example_is_of_a_verb_that_is_gone() -> None:
    assert set(EXAMPLES) == set(_commands())


@pytest.mark.parametrize("group", ["", *(verb for verb in cli.VERBS if isinstance(load(verb), TyperGroup))])
def test_a_group_lists_its_verbs_without_rich(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, and where nothing is asked for."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "typer.rich_utils", None)  # an import of it would fail
    assert cli.main([*group.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    names = load(group).commands if group else cli.VERBS
    assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in names)
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert cli.main(group.split()) == 2 and capsys.readouterr().out == shown
