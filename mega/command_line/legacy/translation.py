"""What an old command line becomes, and how it is printed. This file knows neither flags nor programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


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
