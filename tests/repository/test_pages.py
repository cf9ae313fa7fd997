"""The pages match the code: `mega` lines are ones that the command line takes; paths, links and rooms exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mega import cli
from mega.command_line.legacy.programs import programs
from mega.command_line.options import load
from mega.core.config.sections import TOKENIZERS
from mega.core.text.build import BUILDERS
from tests.battery.run_mutations import PATCHES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "recipes/README.md",
    *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/**/*.md")),
)


@cache
def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def _lines() -> Iterator[str]:
    """Of fenced blocks."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("mega "):
                    yield line


def _inline() -> Iterator[tuple[str, str]]:
    """Page -> code within its sentences and tables, but the generated list of options."""
    for page in PAGES:
        if page != "docs/configuration.md":
            prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
            for code in re.findall(r"`([^`]+)`", prose):
                yield page, " ".join(code.split())


HELP = ["-h", "--help"]
"""As in `mega`: a command keeps the names with which its help was first asked for."""


@pytest.mark.parametrize("line", list(_lines()))
def test_the_line_parses(line: str) -> None:
    loaded, rest = _command(line)
    loaded.make_context(
        line, rest, help_option_names=HELP
    )  # refuses unknown flags, missing ones and values that are no choice


def _command(line: str) -> tuple[object, list[str]]:
    """The command of a line, and its arguments."""
    _, verb, *rest = shlex.split(line, comments=True)
    assert cli.Verbs(name="mega").get_command(None, verb) is not None
    loaded = load(verb)
    while isinstance(loaded, TyperGroup) and rest:
        context = loaded.make_context(verb, rest[:1], help_option_names=HELP)
        _, loaded, rest = loaded.resolve_command(context, rest)
    return loaded, rest


def test_the_blocks_are_found() -> None:
    assert len(list(_lines())) >= 16


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mega reshard --load-dir a --save-dir b --no-such-flag 1", "--no-such-flag: "),
        ("mega reshard --load-dir a --save-dir b --tp many", "must be a whole number"),
        ("mega pretrain --family rnn", "--family rnn: is not a choice"),
        ("mega data verfy a", "verfy"),
        ("mega reshard --load-dir a", "--save-dir is missing: give"),
    ],
)
def test_a_wrong_line_would_show(line: str, why: str) -> None:
    """Refused by the command line for what is wrong with it, and not by a fault of the test."""
    with pytest.raises((TyperException, ValueError), match=why):
        test_the_line_parses(line)


def test_a_wrong_verb_would_show() -> None:
    with pytest.raises(AssertionError):
        test_the_line_parses("mega reshrad --load-dir a --save-dir b")


INCOMPLETE = ("Missing parameter", "is missing: give", "requires an argument", "needs a value")
"""What may be wrong with a command that is only named: `mega checkpoint diff`, `mega bench --calibrate`."""


@pytest.mark.parametrize("line", sorted({code for _, code in _inline() if re.match(r"mega [a-z]", code)}))
def test_a_named_command_exists(line: str) -> None:
    """Its verbs, flags and values; it may leave out what it needs, or which of several verbs is meant."""
    if isinstance(_command(line)[0], TyperGroup):
        return
    try:
        test_the_line_parses(line)
    except (TyperException, ValueError) as problem:
        assert any(words in str(problem) for words in INCOMPLETE), problem


SCRIPT = re.compile(r"(?:^|\s)(?:-m )?(tests[/.][\w/.]+)")


@pytest.mark.parametrize(
    "line",
    sorted({code for _, code in _inline() if re.match(r"(PYTHONPATH=. )?(python|pytest|torchrun|\./run) ", code)}),
)
def test_a_command_of_the_repository_exists(line: str) -> None:
    """The files that it names; of a script, the flags too; of pytest, tests that `-k` chooses."""
    sources = ""
    for name in SCRIPT.findall(line):
        path = REPOSITORY / (name if "/" in name else name.replace(".", "/") + ".py")
        assert path.exists(), f"{name}: is not in the repository"
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        sources += "".join(file.read_text(encoding="utf-8") for file in files)
    if chosen := re.search(r"-k (\w+)", line):
        assert re.search(rf"def test_\w*{chosen[1]}", sources), line
    elif line.startswith(("python", "torchrun")) and sources:
        sources += (REPOSITORY / "tests/battery/data_ledger.py").read_text(encoding="utf-8")
        script = line[line.index("tests") :]
        for flag in re.findall(r"(--[a-z][\w-]*)", script):
            assert f'"{flag.replace("--no-", "--")}"' in sources, f"{flag}: is not a flag of {line}"


def test_links_lead_somewhere() -> None:
    """To files, and to headings of pages."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text_of(page)):
            path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in _anchors(path), f"{page}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_paths_in_the_text_exist() -> None:
    for page, code in _inline():
        path = code.split("::")[0]
        if re.fullmatch(r"[\w./-]+\.(py|toml)|(mega|tests|docs)/[\w./-]+", path) and path not in EXAMPLES:
            if Path(path).name in programs():  # of Megatron-LM
                continue
            assert any((REPOSITORY / root / path).exists() for root in ("", "tests", "mega", "mega/core")), (page, path)


EXAMPLES = {"run.toml", "mine.toml", "hardware.toml", "main.py", "tasks/main.py"}
"""Names of a user's files, and of Megatron-LM's that are no program of their own."""


def test_the_house_is_drawn() -> None:
    """Every room of mega/core is in the drawings of both pages, on the floor that the contracts give it."""
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (floors,) = (one["layers"] for one in contracts if one.get("containers") == ["mega.core"])
    rooms = {path.stem for path in (REPOSITORY / "mega/core").iterdir() if not path.name.startswith("_")}
    assert {room.strip() for floor in floors for room in floor.split("|")} >= rooms
    drawing = re.findall(r"^```\n(.*?)^```", text_of("docs/architecture.md"), re.DOTALL | re.MULTILINE)[0]
    drawn = [part for part in re.split(r".*[┌├└].*", drawing) if "│" in part]
    assert len(drawn) == len(floors), "one compartment a floor"
    for floor, compartment in zip(floors, drawn, strict=True):
        for room in re.findall(r"\w+", floor):
            assert re.search(rf"\b{room}  ", compartment), f"{room} is not drawn on its floor"
    for room in rooms:
        assert re.search(rf"\b{room}\b", text_of("README.md")), room


def test_tables_are_complete() -> None:
    """Each kind of tokenizer has both of its rows, each seeded bug one on its page."""
    assert list(BUILDERS) == list(TOKENIZERS)
    assert {path.stem for path in PATCHES.glob("*.patch")} == set(
        re.findall(r"^\| ([\w-]+) \| .* \| .* \| (?:killed|not run|\*\*)", text_of("docs/mutations.md"), re.MULTILINE)
    )


def test_every_page_is_linked() -> None:
    for page in PAGES:
        assert page == "README.md" or f"]({page})" in text_of("README.md"), page


def test_every_verb_is_in_the_changelog() -> None:
    for verb in cli.Verbs(name="mega").list_commands(None):
        assert verb in text_of("CHANGELOG.md"), verb


def test_only_the_device_says_torch_cuda() -> None:
    """Law: what depends on the kind of device stands in one file."""
    sources = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "mega").rglob("*.py")}
    found = {path.name for path, text in sources.items() if "torch.cuda" in text}
    assert found == {"device.py"}
