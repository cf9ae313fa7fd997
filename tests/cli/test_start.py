"""Starting is cheap: `mega --help` loads neither torch nor numpy nor any verb; and errors end as promised."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mega import __version__, cli

HEAVY = ("torch", "numpy", "safetensors", "pydantic")


def _loaded(*lines: list[str]) -> set[str]:
    """Modules that command lines load, in a Python of their own."""
    runs = "; ".join(f"mega.cli.main({line!r})" for line in lines)
    program = f"import sys, mega.cli; {runs}; print(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_no_verb_and_nothing_heavy() -> None:
    names = _loaded(["--help"])
    assert "mega.cli" in names
    assert not [name for name in names if name.split(".")[0] in HEAVY]
    assert not [name for name in names if name.startswith("mega.commands.")]


@pytest.mark.parametrize(
    "arguments", [["pretrain", "--help"], ["pretrain", "--help-all"], ["pretrain", "--heads", "3"]]
)
def test_a_run_verb_loads_no_torch_before_its_checks(arguments: list[str]) -> None:
    names = _loaded(arguments)
    assert "mega.commands.pretrain" in names
    assert not [name for name in names if name.split(".")[0] in ("torch", "numpy")]


@pytest.fixture
def environment() -> dict[str, str]:
    """Where bytecode stays, as it does where mega is installed: a first run that compiles is not what is timed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


ESTIMATE = [
    *("memory-estimate", "--model", "llama2-7b", "--bf16", "--micro-batch", "1", "--global-batch", "256"),
    *("--tp", "2", "--pp", "2", "--zero", "1", "--sequence-parallel", "--world", "8", "--gpu", "h200"),
]


def test_an_estimate_loads_what_it_traces_with_and_no_more() -> None:
    """Memory is traced on the trainer's own stages, so torch is loaded, but only once the run is checked."""
    again = [*ESTIMATE, "--recompute", "full", "--recompute-method", "uniform", "--recompute-layers", "1"]
    names = _loaded(ESTIMATE, again)
    assert "mega.core.estimate.trace" in names
    assert not [name for name in names if name.split(".")[0] in ("matplotlib", "transformers", "tensorboard")]
    # Each takes as long to load as torch: its compiler, and the symbols that stand for shapes in it.
    compiler = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy")
    assert not [name for name in compiler if name in names]
    for refused in (["memory-estimate", "--help"], [*ESTIMATE, "--heads", "3"]):
        assert not [name for name in _loaded(refused) if name.split(".")[0] in ("torch", "numpy", "safetensors")]


@pytest.mark.parametrize(("arguments", "limit"), [(["--help"], 0.4), (["pretrain", "--help"], 1.0)])
def test_starting_is_quick(arguments: list[str], limit: float, environment: dict[str, str]) -> None:
    """Limits in processor seconds where Typer and rich load in 0.1 s; a slower machine has as many times longer."""

    def seconds(*command: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    # The best of several, side by side: other work on the machine only ever adds.
    programs = [("-c", "import typer, rich.table"), ("-m", "mega", *arguments)]
    libraries, mega = (min(column) for column in zip(*[[seconds(*one) for one in programs] for _ in range(4)]))
    assert mega < limit * max(1.0, libraries / 0.1), (mega, libraries)


def test_an_estimate_takes_little_longer_than_to_load_torch(environment: dict[str, str]) -> None:
    """Half of torch's own load, up to 0.55 by the processor; both in one process, so that what slows one slows the
    other."""
    program = f"""
import time
import torch
loaded = time.process_time()
import mega.cli
mega.cli.main({ESTIMATE!r})
print(loaded, time.process_time() - loaded)"""
    command = [sys.executable, "-c", program]
    shares = []
    for _ in range(6):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        loaded, mega = map(float, done.stdout.splitlines()[-1].split())
        shares.append(mega / loaded)
        if shares[-1] < 0.65:
            return
    raise AssertionError(shares)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mega {__version__}\n"


def test_short_help_and_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "--help"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["pretrain", "--help-all"]) == 0
    whole = capsys.readouterr().out
    for flag in ("--layers", "--num-layers", "--tp", "--lr"):
        assert flag in short and flag in whole
    for flag in (
        "--adam-beta2",
        "--rope-base",
        "--rotary-base",
        "--mask-padded-vocab / --no-mask-padded-vocab",
    ):
        assert flag not in short and flag in whole
    assert "--lr-decay constant|linear|cosine|inverse-square-root" in whole
    assert "[default: 0.999]" in whole


def test_no_verb_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert "pretrain" in shown.out and shown.err == ""


def test_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "mega: mega pretrian: is not a verb (nearest: pretrain); mega --help lists all"


def test_every_verb_with_a_file_has_a_line() -> None:
    from importlib.resources import files

    names = {path.name for path in files("mega.commands").iterdir() if path.name.endswith(".py")}
    written = {name.removesuffix(".py").replace("_", "-") for name in names if not name.startswith("_")}
    assert written <= set(cli.VERBS)


def test_every_listed_verb_loads_and_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.Verbs(name="mega").list_commands(None):
        assert cli.main([verb, "--help"]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "traced"),
    [
        (ValueError("--x 1: must be 2"), 2, False),
        (OSError("runs/a: step 20 was not saved: the disk is full (whole: steps 10)"), 1, False),
        (FloatingPointError("step 3: the loss is nan"), 1, False),
        (RuntimeError("broken"), 1, True),
        (KeyError("gone"), 1, True),
    ],
)
def test_exit_codes(
    error: Exception, code: int, traced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.delenv("MEGA_DEBUG", raising=False)
    assert cli.main([]) == code
    printed = capsys.readouterr().err
    assert ("Traceback" in printed) == traced
    assert str(error.args[0]) in printed


def test_closed_streams_take_no_files_number() -> None:
    script = "import os, sys; from mega import cli; code = cli.main(['--version']); "
    script += "sys.exit(code or any(os.readlink(f'/proc/self/fd/{n}') != os.devnull for n in range(3)))"
    assert subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]).returncode == 0


def test_a_working_directory_that_has_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        tmp_path.rmdir()
        assert cli.main(["presets"]) == 2
    assert capsys.readouterr().err == "mega: the working directory has been removed; change to one that is there (cd)\n"
