"""The completion files in the repository are those that `mega` writes, and a shell that asks gets answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mega import cli
from mega.commands.completions import SHELLS, script

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_file_is_fresh(shell: str) -> None:
    written = (REPOSITORY / "completions" / f"mega.{shell}").read_text()
    assert written == script(shell), "run: mega completions completions"


def test_the_verb_writes_them(tmp_path: Path) -> None:
    assert cli.main(["completions", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "mega.bash",
        "mega.fish",
        "mega.zsh",
    ]


def test_a_file_is_no_place_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        assert cli.main(["completions", str(place)]) == 2
        assert capsys.readouterr().err == f"mega: directory {place}: {file} is not a directory; name another place\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mega pret", {"pretrain"}),
        ("mega pretrain --seq", {"--seq-length", "--sequence-parallel"}),
        ("mega pretrain --num-layers 2 --layers x --no-progr", set()),
        ("mega pretrain --device c", {"cpu", "cuda"}),
        ("mega pretrain --model tiny", {"tiny-gpt", "tiny-llama"}),
        ("mega pretrain --init-method-s", {"--init-method-std"}),
    ],
)
def test_a_shell_that_asks_gets_answers(words: str, expected: set[str]) -> None:
    asked = os.environ | {
        "_MEGA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "mega"], env=asked, capture_output=True, text=True, timeout=60, check=True
    )
    assert set(done.stdout.split()) >= expected
    assert done.stderr == ""
