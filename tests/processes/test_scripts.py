"""Scripts and manifests that start a run on several hosts, held against shells' and Kubernetes' own rules."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.processes.scripts import WRITERS

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 16 "
    "--lr 1e-3 --steps 9 --save runs/a --save-interval 3"
).split()
SCHEMAS: Mapping[str, Any] = json.loads((Path(__file__).parent / "manifests.json").read_text())
"""Of the published custom resources, what the manifests use of them: names, types and what is required."""

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["launch", *words])
    return (code, *capsys.readouterr())


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "mpi"])
@pytest.mark.parametrize("restarts", [[], ["--max-restarts", "3"]], ids=["", "restarts"])
def test_scripts_are_sound_shell(
    kind: str, restarts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ["--hosts", "2", "--nproc", "4", "--logs", "my logs"]
    code, text, _ = launch(capsys, kind, *hosts, "--", *RUN, *restarts)
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert code == 0 and subprocess.run(["bash", "-n", script]).returncode == 0
    assert "--resume auto" in text
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here, so only the shell has read it")
    found = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(("restarts", "wait"), [([], 300), (["--max-restarts", "3"], 0)])
def test_tasks_of_slurm_end_by_themselves(restarts: list[str], wait: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first that stops after the warning ends none of the others, whose code would be another one than 138."""
    _, text, _ = launch(capsys, "slurm", "--hosts", "2", "--nproc", "4", "--", *RUN, *restarts)
    assert "--kill-on-bad-exit=0" in text and f"--wait={wait} " in text and "-eq 138" in text


@pytest.mark.parametrize("how", ["words", "equals", "file"])
@pytest.mark.parametrize("kind", ["slurm", "torchrun", "mpi"])
def test_scripts_follow_what_options_mean(
    kind: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are written."""
    run, config = [*RUN[:-4], "--save-interval", "3"], tmp_path / "run.toml"
    config.write_text('[checkpoint]\nsave = "runs/a"\n[supervision]\nmax_restarts = 3\n')
    words = {"words": ["--save", "runs/a", "--max-restarts", "3"], "equals": ["--save=runs/a", "--max-restarts=3"]}
    code, text, err = launch(
        capsys, kind, "--hosts", "2", "--nproc", "4", "--", *run, *words.get(how, ["--config", str(config)])
    )
    assert code == 0, err
    ending = "--max-restarts 0" if kind == "torchrun" else "--hosts 2 --nproc 4"
    assert f" --resume auto {ending}" in text and ("torchrun" not in text or "=4 --max-restarts=3 " in text)
    assert "-np 8" not in text and "--ntasks-per-node=4" not in text


def test_values_are_one_word_of_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = launch(capsys, "slurm", "--logs", "my logs", "--name", "a b", "--", *RUN)
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "--job-name=a b" in [word for line in lines for word in shlex.split(line)]
    assert all(len(shlex.split(line)) == 1 for line in lines[:-1])


def faults(schema: Mapping[str, Any], value: Any, path: str = "") -> list[str]:
    """What a published schema has against a value."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string") or kind is None:
        return [] if isinstance(value, int | str) else [f"{path}: {value!r}"]
    if not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return [f"{path}: {value!r} is not of type {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is not one of {schema['enum']}"]
    found = [f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    if kind == "array":
        return [*found, *(each for item in value for each in faults(schema["items"], item, path))]
    if kind == "object" and "properties" in schema:
        found += [f"{path}: {name} is unknown" for name in value if name not in schema["properties"]]
        known = {name: each for name, each in value.items() if name in schema["properties"]}
        return [*found, *(x for name, each in known.items() for x in faults(schema["properties"][name], each, name))]
    return found


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_manifests_fit_their_schema(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = "--hosts 2 --nproc 8 --spares 1 --image mega:1 --volume runs --minutes 60".split()
    code, text, _ = launch(capsys, kind, *hosts, "--", *RUN, "--max-restarts", "3")
    manifest = json.loads(text)
    assert code == 0 and faults(SCHEMAS[kind]["schema"], manifest) == []
    assert "OnFailure" not in text and '"backoffLimit": 18' in text
    manifest["spec"]["hosts"] = 2
    assert faults(SCHEMAS[kind]["schema"], manifest) == ["spec: hosts is unknown"]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--hosts", "2", "--nproc", "4"]
    torchrun = ["torchrun", *two, "--", *RUN]
    cases = {
        "serve: is not started on several hosts": ["slurm", "--", "serve"],
        "lsf: is not a kind of launcher; valid: slurm, torchrun": ["lsf", "--", *RUN],
        "--spares 1: needs --max-restarts in the command": ["slurm", *two, "--spares", "1", "--", *RUN],
        "--spares 1: mpirun ends all": ["mpi", *two, "--spares", "1", "--", *RUN, "--max-restarts", "1"],
        "--nproc 4: belongs before the command": ["slurm", *two, "--", *RUN, "--nproc", "4"],
        "--image is missing": ["jobset", *two, "--", *RUN],
        "--image x: belongs to jobset and pytorchjob": ["mpi", *two, "--image", "x", "--", *RUN],
        "--hosts 2: belongs before the command": ["slurm", *two, "--", *RUN, "--nproc=4", "--hosts=2"],
        "--peer-copy-interval 5: torchrun": [*torchrun, "--max-restarts=3", "--peer-copy-interval=5"],
        "--no-load-optim: would count at each start": ["slurm", "--", *RUN, "--load", "runs/a", "--no-load-optim"],
        "--max-restarts 1: excludes --no-save-optim": ["slurm", "--", *RUN, "--max-restarts", "1", "--no-save-optim"],
        "--name 'a\\n#SBATCH -p x': must be one line": ["slurm", "--name", "a\n#SBATCH -p x", "--", *RUN],
        "--name My_run: must be lower-case letters": ["jobset", "--name", "My_run", "--image", "x", "--", *RUN],
        f"--name {'a' * 48}: must be": ["pytorchjob", "--name", "a" * 48, "--image", "x", "--", *RUN],
        "--warning 300: must be less than --minutes 5; at most 299": ["slurm", "--minutes", "5", "--", *RUN],
        "--global-batch 16: must be a multiple of 12": ["slurm", "--hosts", "3", "--nproc", "4", "--", *RUN],
    }
    for rule, words in cases.items():
        code, out, err = launch(capsys, *words)
        assert code == 2 and not out and err.startswith(f"mega: {rule}") and err.count("\n") == 1, err


def test_each_kind_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = launch(capsys, "--help")
    assert all(kind in out for kind in WRITERS)
