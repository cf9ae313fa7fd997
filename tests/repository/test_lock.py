"""The lock that ./run installs from has all that the project asks for, with hashes, in versions that it allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package -> its version and hashes; of torch, which cpu.txt pins twice, the last."""
    text = (ROOT / "constraints" / name).read_text()
    found = re.findall(r"^([a-z0-9-]+)==(\S+)[^\\]*\\\n((?:    --hash=sha256:\w{64}(?: \\)?\n)+)", text, re.MULTILINE)
    named = {package: (version, re.findall(r"sha256:(\w{64})", hashes)) for package, version, hashes in found}
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == sum(1 + len(re.findall("sha256:", hashes)) for _, _, hashes in found), f"{name}: other lines"
    return named


def test_every_requirement_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core, dev, cpu, cuda = (pins(name) for name in ("core.txt", "dev.txt", "cpu.txt", "cuda.txt"))
    assert not core.keys() & dev.keys() and not (core.keys() | dev.keys()) & (cpu.keys() | cuda.keys())
    for locked, asked in (
        ({**core, **cpu}, [*project["dependencies"], *extras["track"], "hatchling", "editables"]),
        (
            {**core, **dev, **cpu},
            [*extras["data"], *extras["corpus"], *extras["retro"], *extras["docs"], *extras["dev"]],
        ),
    ):
        for requirement in map(Requirement, asked):
            version, hashes = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement
            assert hashes == sorted(set(hashes)), requirement
    assert cpu["torch"][0] == cuda["torch"][0], "the same torch on every machine"
    assert not set(cuda["torch"][1]) & set(cpu["torch"][1]) and any(name.startswith("nvidia-") for name in cuda)


def test_run_installs_nothing_else() -> None:
    text = (ROOT / "run").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if "pip install" in line]
    assert len(lines) == 3
    assert all(flag in lines[0] for flag in ("--require-hashes", "--no-deps", "--only-binary :all:"))
    assert all(flag in lines[1] for flag in ("--require-hashes", "--no-deps", "--no-build-isolation", "source.txt"))
    assert "--no-deps --no-build-isolation -e ." in lines[2]


def test_what_is_built_is_an_extra_of_its_own() -> None:
    """Users get wheels alone; the tests of what has none build it, with a locked setuptools."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras["yuan"])
    ((name, (version, hashes)),) = pins("source.txt").items()
    assert name == requirement.name and requirement.specifier.contains(version) and len(hashes) == 1
    assert "setuptools" in pins("core.txt") and name not in pins("core.txt") | pins("dev.txt")
