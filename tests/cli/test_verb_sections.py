"""Options of every verb are sections: a TOML file can give each of them, flags override it, and mistakes are lines."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega.cli import VERBS, main
from mega.command_line.options import Command, load


def _commands() -> Iterator[tuple[str, ...]]:
    """Every verb, and every verb of a verb, that takes sections."""
    for verb in VERBS:
        found = load(verb)
        for words, command in [
            ((verb,), found),
            *(((verb, name), each) for name, each in getattr(found, "commands", {}).items()),
        ]:
            if isinstance(command, Command) and any(param.name == "print_config" for param in command.params):
                yield words


def _arguments(words: tuple[str, ...]) -> list[str]:
    """What the command line alone can give: its positional arguments, and required options of no section."""
    found = load(words[0])
    command = found if len(words) == 1 else found.commands[words[1]]
    required = [param for param in command.params if param.required]
    return [
        word for param in required for word in ([] if param.param_type_name == "argument" else [param.opts[0]]) + ["x"]
    ]


COMMANDS = list(_commands())
RUNS = {"pretrain", "finetune", "lr-find", "eval", "bench", "memory-estimate"}


def test_the_verbs_that_take_sections() -> None:
    verbs = {words[0] for words in COMMANDS}
    assert {"serve", "generate", "reshard", "convert-llama", *RUNS} <= verbs


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_printed_configuration_is_read_back(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *_arguments(words), "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "a.toml").write_text(printed)
    assert main([*words, *_arguments(words), "--config", str(tmp_path / "a.toml"), "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(printed) != {}


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[0] not in RUNS], ids=" ".join)
def test_an_unknown_table_is_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[nothing]\nx = 1\n")
    assert main([*words, *_arguments(words), "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mega: {path}: [nothing]: is not a table; valid: ")


def test_a_flag_overrides_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('[engine]\nmax_requests = 8\nfp8_weights = true\n[model]\nload = "a"\nadapter = ["x=y"]\n')
    assert main(["serve", "--config", str(path), "--max-requests", "9", "--no-fp8-weights", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "max_requests = 9" in shown and "fp8_weights = false" in shown
    assert 'load = "a"' in shown and 'adapter = ["x=y"]' in shown
    assert main(["serve", "--config", str(path), "--port", "0"]) == 2
    assert capsys.readouterr().err == "mega: --load a: no such file or directory\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[engine]\nmax_request = 8\n", "[engine] max_request: is not an option (nearest: max_requests)"),
        ("[engine]\nmax_requests = '8'\n", "[engine] max_requests: '8' must be a whole number"),
        ("[limits]\nmax_requests = 8\n", "[limits] max_requests: belongs under [engine], not here"),
        ("[layout]\ndtype = 'int8'\n", "[layout] dtype: 'int8' is not a choice; valid: fp32, bf16, fp16"),
        ("[model]\nload = 3\n", "[model] load: 3 must be a string"),
        ("[answers]\nno_chat = 'x'\n", "[answers] no_chat: is not an option"),
    ],
)
def test_mistakes_in_a_file(text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    assert main(["serve", "nowhere", "--config", str(path)]) == 2
    assert capsys.readouterr().err == f"mega: {path}: {rule}\n"


def test_a_number_of_a_file_is_in_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text("[listen]\nport = 70000\n[layout]\ntp = 0\n")
    assert main(["serve", "nowhere", "--config", str(tmp_path / "a.toml")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "mega: --port 70000: must be 0 to 65535",
        "mega: --tp 0: must be at least 1",
    ]


def test_an_option_that_must_be_given_may_be_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'[reshard]\nload_dir = "{tmp_path / "none"}"\nsave_dir = "b"\n')
    assert main(["reshard", "--save-dir", "b"]) == 2
    assert capsys.readouterr().err.startswith("mega: --load-dir is missing: give a run's directory")
    assert main(["reshard", "--config", str(path)]) == 2
    assert capsys.readouterr().err == f"mega: --load-dir {tmp_path / 'none'}: no such file or directory\n"


def test_tables_of_a_verb_stand_next_to_those_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.toml"
    path.write_text("[parallel]\ntp = 2\n[bench]\nrepeats = 3\n[serving]\nrate = [1.0, 2.0]\n")
    assert main(["bench", "--config", str(path), "--warmup", "2", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "tp = 2" in shown and "repeats = 3\nwarmup = 2" in shown and "rate = [1.0, 2.0]" in shown
    assert main(["pretrain", "--config", str(path)]) == 2
    assert "[bench]: is not a table" in capsys.readouterr().err


def test_help_of_all_verbs_loads_no_torch() -> None:
    calls = "; ".join(f"mega.cli.main({[*words, '--help']!r})" for words in COMMANDS)
    program = f"import sys, mega.cli; {calls}; print(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not loaded & {"torch", "safetensors", "pydantic_settings"}
