"""What is typed wrong in a first hour: one line that names it, before torch is loaded; and what is taken as it is."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mega import cli
from mega.core.data.preprocessing.writer import IndexedWriter

TABLE = (Path(__file__).parent / "mistakes.txt").read_text()
MISTAKES = dict(re.findall(r"^(\S.*)\n    (.*)$", TABLE, flags=re.MULTILINE))
"""What is typed -> the line that it ends with."""

RUN = "pretrain --model tiny-gpt --micro-batch 2 --steps 10 --lr 1e-3 --vocab 100"

PROGRAM = """
import contextlib, io, json, shlex, sys
from mega import cli
found = []
for line in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = cli.main(shlex.split(line))
    found.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, empty = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("empty")
    (folder / "my.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (folder / "my.tfrecord").touch()
    (folder / "wrong.jsonl").write_text(json.dumps({"content": "a"}) + "\n")
    (folder / "array.json").write_text(json.dumps([{"text": "a"}]))
    with IndexedWriter(folder / "my_text_document", np.dtype("uint16")) as writer:
        writer.add([[1, 2, 3]])
    return {"FOLDER": str(folder), "EMPTY": str(empty), "RUN": RUN}


def _at(places: dict[str, str], text: str) -> str:
    for word, meant in places.items():
        text = re.sub(rf"\b{word}\b", meant, text)
    return text


@pytest.fixture(scope="module")
def ended(places: dict[str, str]) -> dict[str, tuple[int, str, bool]]:
    """What is typed -> exit code, stderr, and whether torch had been loaded: all lines in one Python of their own."""
    typed = json.dumps([_at(places, line) for line in MISTAKES])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=300, check=True)
    return dict(zip(MISTAKES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("line", MISTAKES)
def test_one_line_before_torch_is_loaded(
    line: str, places: dict[str, str], ended: dict[str, tuple[int, str, bool]]
) -> None:
    code, said, torch = ended[line]
    assert code == 2 and not torch, said
    (only,) = said.splitlines()
    assert only.startswith(f"mega: {_at(places, MISTAKES[line])}"), only


def test_help_is_asked_for_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for line in ("presets --help", "presets -h", "help presets"):
        assert cli.main(shlex.split(line)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and texts == texts[:1] * 3
    assert cli.main(["help"]) == 0 and "presets" in capsys.readouterr().out


def test_other_words_for_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    line = "pretrain --model tiny-gpt --micro-batch 2 --steps 10 --learning-rate 3e-3 --vocab 100 --mock-data"
    assert cli.main([*line.split(), "--device", "gpu", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "lr = 0.003\n" in printed and 'device = "cuda"\n' in printed


def test_presets_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "gpt2", "llama2-70b"]) == 0
    head, *rows = (row.split() for row in capsys.readouterr().out.splitlines())
    assert head[0] == "preset" and [row[0] for row in rows] == ["gpt2-124m", "gpt2-345m", "llama2-70b"]
    assert rows[2][1:] == ["llama", "80", "8192", "64/8", "4096", "32000", "69.0B", "128.5", "1156"]


def test_help_shows_the_flags_of_the_readmes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    for verb, flags in re.findall(r"^mega (pretrain|memory-estimate|preprocess|generate)(.*)$", blocks, re.MULTILINE):
        assert cli.main([verb, "--help"]) == 0
        shown = capsys.readouterr().out
        assert [flag for flag in re.findall(r"--[a-z-]+", flags) if flag not in shown] == []
