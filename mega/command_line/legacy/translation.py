"""The result of a translation, and its text. This module does not depend on flags or programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Translation:
    """The translation of a command line."""

    verb: str
    """Subcommand of the last command; "" if a counterpart is missing."""
    commands: list[list[str]] = field(default_factory=list)
    """Commands of `mega`, in the order in which to run them."""
    dropped: list[str] = field(default_factory=list)
    """Flags without effect."""
    lacking: list[str] = field(default_factory=list)
    """Parts of the old command line without a counterpart."""
    holes: list[str] = field(default_factory=list)
    """Variables of the commands that the user has to set, with their meaning."""
    notes: list[str] = field(default_factory=list)
    """Differences between releases of the old program."""
    hints: list[str] = field(default_factory=list)
    """Further remarks."""

    def text(self) -> str:
        """The translation as a script: commands, and everything else as comments."""
        lines = [f"# changes nothing: {line}" for line in self.dropped]
        lines += [f"# no counterpart: {line}" for line in self.lacking]
        lines += [f"# to be set: {line}" for line in self.holes]
        lines += [f"# by release: {line}" for line in self.notes]
        lines += [f"# note: {line}" for line in self.hints]
        # A word may contain a line break; the rest of its comment would then be executed.
        return "\n".join(
            [" ".join(line.splitlines()) for line in lines] + [quoted(command) for command in self.commands]
        )


def quoted(words: Sequence[str]) -> str:
    """Quote words for a shell; variables that are not set remain variables.

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
