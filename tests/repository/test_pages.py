"""The pages say what is so: every `mega` line in a fenced block is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mega import cli

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def _lines() -> Iterator[str]:
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("mega "):
                    yield line


@pytest.mark.parametrize("line", list(_lines()))
def test_the_line_parses(line: str) -> None:
    _, verb, *rest = shlex.split(line, comments=True)
    assert cli.Verbs(name="mega").get_command(None, verb) is not None
    loaded = cli.load(verb)
    while isinstance(loaded, TyperGroup):
        context = loaded.make_context(verb, rest[:1])
        _, loaded, rest = loaded.resolve_command(context, rest)
    loaded.make_context(verb, rest)  # refuses unknown flags, missing ones and values that are no choice


def test_the_blocks_are_found() -> None:
    assert len(list(_lines())) >= 12


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mega reshard --load-dir a --save-dir b --no-such-flag 1", "--no-such-flag: "),
        ("mega reshard --load-dir a --save-dir b --tp many", "valid integer"),
        ("mega pretrain --family rnn", "--family rnn: is not a choice"),
        ("mega data verfy a", "verfy"),
        ("mega reshard --load-dir a", "Missing parameter: save_dir"),
    ],
)
def test_a_wrong_line_would_show(line: str, why: str) -> None:
    """Refused by the command line for what is wrong with it, and not by a fault of the test."""
    with pytest.raises((TyperException, ValueError), match=why):
        test_the_line_parses(line)


def test_a_wrong_verb_would_show() -> None:
    with pytest.raises(AssertionError):
        test_the_line_parses("mega reshrad --load-dir a --save-dir b")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (REPOSITORY / page).read_text(encoding="utf-8")):
            assert (REPOSITORY / target).exists(), f"{page}: {target}"


def test_every_verb_is_in_the_changelog() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    for verb in cli.Verbs(name="mega").list_commands(None):
        assert verb in text, verb


def test_only_the_device_says_torch_cuda() -> None:
    """Law: what depends on the kind of device stands in one file."""
    sources = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "mega").rglob("*.py")}
    found = {path.name for path, text in sources.items() if "torch.cuda" in text}
    assert found == {"device.py"}
