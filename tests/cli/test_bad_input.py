"""Bad input ends before any rank starts: exit 2 and one clear line for each mistake, that names the flag."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import pytest

from mega import cli
from mega.core.files import SEAL

GOOD = "pretrain --model tiny-gpt --micro-batch 2 --steps 10 --lr 1e-3 --mock-data --vocab 100"

TABLE = (Path(__file__).parent / "bad_input.txt").read_text()
BAD = dict(re.findall(r"^([^ #\n].*)\n    (.*)$", TABLE, flags=re.MULTILINE))
"""Flags added to the good command -> the line that they end with."""


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts fails the test; the environment of the tests names no launcher."""

    def started(*_: object) -> int:
        raise AssertionError("a rank was started")

    for name in ("mega.core.training.start.rank", "mega.core.processes.launch"):
        module = types.ModuleType(name)
        module.pretrain = module.launch = started  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS", "MEGA_DEBUG"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Words of the table that stand for files of this test."""
    (tmp_path / "file").write_text("")
    for name in ("empty.idx", "whole.idx", "whole.bin"):
        (tmp_path / name).write_text("")
    (tmp_path / "bad.toml").write_text("[model]\nlayer = 2\n")
    (tmp_path / "masked.toml").write_text("[masking]\nmask_prob = 0.2\n")
    (tmp_path / "step-0000001").mkdir()
    (tmp_path / "step-0000001" / SEAL).write_text("")
    (tmp_path / "link").symlink_to("absent")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "metrics.jsonl")
    (tmp_path / "taken" / "latest").mkdir(parents=True)
    return {
        "DIR": str(tmp_path),
        "FILE": str(tmp_path / "file"),
        "PREFIX": str(tmp_path / "empty"),
        "WHOLE": str(tmp_path / "whole"),
        "TOML": str(tmp_path / "bad.toml"),
        "MASKED": str(tmp_path / "masked.toml"),
        "STEP": str(tmp_path / "step-0000001"),
        "LINK": str(tmp_path / "link"),
        "PIPED": str(tmp_path / "piped"),
        "TAKEN": str(tmp_path / "taken"),
    }


def _at(places: dict[str, str], text: str) -> str:
    for word, path in places.items():
        text = text.replace(word, path)
    return text


@pytest.mark.parametrize("bad", BAD)
def test_one_clear_line_and_exit_2(bad: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    expected = _at(places, BAD[bad])
    code = cli.main(f"{GOOD} {_at(places, bad)}".split())
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert code == 2
    assert printed.out == ""
    assert any(line.startswith(f"mega: {expected}") for line in lines), printed.err
    assert len(lines) == 1, printed.err


def test_the_command_without_a_mistake_starts_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the table above would prove nothing."""
    for more in ("", "--tp 2 --pp 2 --nproc 4 --sequence-parallel --bf16"):
        assert cli.main(f"{GOOD} {more}".split()) == 1
        assert "a rank was started" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--micro-batch 2", "--steps 10", "--lr 1e-3", "--vocab 100", "--mock-data"])
def test_what_a_run_needs_is_asked_for(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(GOOD.replace(missing, "").split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    named = {"--mock-data": "--data-path"}.get(missing, missing.split()[0])
    assert line.startswith(f"mega: {named} is missing: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reshard --load-dir a --save-dir b --tp abc", "--tp abc: must be a whole number"),
        (
            "reshard --load-dir a --save-dir b --stage-layers 3,0",
            "--stage-layers 3,0: must be a whole number, or several with blanks between them",
        ),
        ("checkpoint clean a --keep-last 1.5", "--keep-last 1.5: must be a whole number"),
        ("generate --load a --temperature hot", "--temperature hot: must be a number"),
        ("generate --load a --tokens 0", "--tokens 0: must be at least 1"),
        ("bench --repeats 0", "--repeats 0: must be at least 1"),
    ],
)
def test_a_bad_value_of_a_verbs_own_flag_is_reported_as_a_runs(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err == f"mega: {said}\n"


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 40


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{GOOD} --heads 5 --min-lr 1 --save x --pp 4 --split x".split()) == 2
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_a_rank_that_finds_no_other_names_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that can meet speak once: tests/processes/test_exit_reports.py."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(f"{GOOD} --heads 5".split()) == 2
    assert capsys.readouterr().err.startswith("mega: rank 1: --hidden 64: ")


def test_nproc_under_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(f"{GOOD} --nproc 2".split()) == 2
    assert "--nproc 2: torchrun has started 4 ranks on this host already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK 5: must be 0 to 1, with WORLD_SIZE 2"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK '': must be a whole number, as launchers set it"),
        ({"PMI_RANK": "1", "PMI_SIZE": ""}, "PMI_SIZE '': must be a whole number, as launchers set it"),
    ],
)
def test_no_rank_ends_without_a_word(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(GOOD.split()) == 2
    assert capsys.readouterr().err == f"mega: {said}\n"


@pytest.mark.parametrize("value", ["1", "yes", "True", "on"])
def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MEGA_DEBUG", value)
    with pytest.raises(ValueError):
        cli.main(f"{GOOD} --heads 5".split())


@pytest.mark.parametrize("name", ["MEGA_DEBUG", "MEGA_INJECT"])
def test_a_switch_is_on_off_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "2")
    assert cli.main(GOOD.split()) == 2
    said = capsys.readouterr().err
    assert said == f"mega: {name} '2': must be 1, true, yes or on, or 0, false, no or off\n"
    for value in ("0", "No", ""):
        monkeypatch.setenv(name, value)
        assert cli.main(f"{GOOD} --inject kill@step=1".split()) == 2
        assert "set MEGA_INJECT=1" in capsys.readouterr().err
