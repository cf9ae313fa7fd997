"""Options of verbs are fields of sections; each `typer.Option` that is written by hand has a reason here."""

from __future__ import annotations

import re
from pathlib import Path

import mega

HOUSE = Path(mega.__file__).parent

BY_HAND = {
    "cli.py": (1, "--version, of no verb"),
    "command_line/options.py": (8, "what every section brings along: --config, --help-all, --model, DeepSpeed's"),
    "commands/checkpoint.py": (8, "looks into files and removes some; nothing that a file of options would repeat"),
    "commands/corpus.py": (1, "--dry-run of a recipe, which is a file of options itself"),
    "commands/doctor.py": (2, "how much is printed, and in which form"),
    "commands/plot.py": (4, "a picture of files; nothing that a file of options would repeat"),
    "commands/presets.py": (1, "in which form a table is printed"),
    "commands/quickstart.py": (3, "one example"),
    "commands/report.py": (1, "where the page is written"),
}
"""File -> how many it may have, and why."""


def test_options_are_sections() -> None:
    found = {
        str(path.relative_to(HOUSE)): count
        for path in HOUSE.rglob("*.py")
        if (count := len(re.findall(r"typer\.Option\(", path.read_text())))
    }
    assert found == {file: count for file, (count, _) in BY_HAND.items()}, (
        "an option is a field of a frozen section, made by `option`, next to the code that takes the section"
    )
