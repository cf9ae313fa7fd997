#!/usr/bin/env python
"""Write the lock files with hashes from which ./run installs: all packages of an environment, as wheels only.

    core.txt   requirements of `mega[track]`, and of building the project; without torch
    dev.txt    additional requirements of `mega[data,corpus,serve,retro,peft,docs,dev]`
    cpu.txt    torch without CUDA, from PyTorch's own index
    cuda.txt   torch with CUDA, from PyPI, and the libraries that it loads

Run it with the Python of an environment in which the tests pass. The versions are those of the environment; packages
that are not installed keep their version in the old locks, or get the newest version. The hashes come from the index,
and cover all wheels for Python 3.11 to 3.13 on Linux (x86_64, aarch64) and macOS (arm64). The script installs nothing,
and treats only torch specially.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

HERE = Path(__file__).parent
INDEX = "https://pypi.org/simple"
TORCH = "https://download.pytorch.org/whl/cpu"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
BUILD = ("hatchling", "editables")  # hatchling requires the second package for an editable install
PLATFORM = re.compile(r"any|manylinux\w*_(x86_64|aarch64)|macosx_\d+_\d+_(arm64|universal2)")


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core = closure([*project["dependencies"], *extras["track"], *BUILD]) - {"torch"}
    wanted = [line for extra in ("data", "corpus", "serve", "retro", "peft", "docs", "dev") for line in extras[extra]]
    dev = closure(wanted) - core - {"torch"}
    write("core.txt", "mega[track], and what builds it", core)
    write("dev.txt", "mega[data,corpus,serve,retro,peft,docs,dev] besides core.txt", dev)
    torch = pinned("torch")
    write(
        "cuda.txt", "torch with CUDA, for Linux", closure([f"torch=={torch}"], installed=False) - core - dev, mac=False
    )
    write_cpu(torch)


def write(name: str, words: str, packages: Iterable[str], *, mac: bool = True) -> None:
    lines = [f"# {words}. Written by constraints/lock.py; pip install --require-hashes --no-deps -r {name}"]
    for package in sorted(packages):
        wheels = [file for file in wheels_of(package, pinned(package)) if mac or "-macosx" not in file["filename"]]
        lines += [f"{package}=={pinned(package)} \\", *hash_lines(file["hashes"]["sha256"] for file in wheels)]
    (HERE / name).write_text("\n".join(lines) + "\n")


def write_cpu(version: str) -> None:
    """Write cpu.txt. The hashes are those of PyTorch's index or, if it cannot be reached, those in the old cpu.txt."""
    path = HERE / "cpu.txt"
    old = path.read_text() if path.exists() else ""
    linux = re.findall(rf"^# (\w{{64}}) (torch-{re.escape(version)}\+cpu-\S+)$", old, re.MULTILINE)
    try:
        linux = [(file["hashes"]["sha256"], file["filename"]) for file in fitting(f"{TORCH}/torch/", f"{version}+cpu")]
    except OSError as error:
        print(f"{TORCH}: not reached ({error}); cpu.txt keeps the hashes that it has", file=sys.stderr)
    if not linux:
        sys.exit(f"no hash of torch {version}+cpu is known")
    mac = [file["hashes"]["sha256"] for file in wheels_of("torch", version) if "macosx" in file["filename"]]
    head = [
        f"# torch without CUDA. On Linux from {TORCH}, where a local index has no such wheel:",
        *(f"# {digest} {name}" for digest, name in sorted(linux, key=lambda pair: pair[1])),
    ]
    linux_pin = f'torch=={version}+cpu ; sys_platform == "linux" \\'
    mac_pin = f'torch=={version} ; sys_platform == "darwin" \\'
    body = [linux_pin, *hash_lines(digest for digest, _ in linux), mac_pin, *hash_lines(mac)]
    path.write_text("\n".join([*head, *body]) + "\n")


def hash_lines(digests: Iterable[str]) -> Iterator[str]:
    *others, last = sorted(digests)
    yield from (f"    --hash=sha256:{digest} \\" for digest in others)
    yield f"    --hash=sha256:{last}"


def closure(wanted: Iterable[str], *, installed: bool = True) -> set[str]:
    """Return the names of all packages that the requirements `wanted` need, on any of `PYTHONS` and `MACHINES`.

    installed: whether the requirements of installed packages are read from the environment, instead of from the index
        (for Linux).
    """
    machines = MACHINES if installed else MACHINES[:1]
    found: dict[str, set[str]] = {}
    todo = [Requirement(line) for line in wanted]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        before = _PINS.get(name)
        version = pinned(name, str(requirement.specifier))
        extras = found.get(name, set()) | {"", *requirement.extras}
        if name in found and extras == found[name] and version == before:
            continue
        found[name] = extras
        needs = (Requirement(line) for line in needs_of(name, version, installed))
        todo += [need for need in needs if any(applies(need, where, extra) for where in machines for extra in extras)]
    return set(found)


def applies(need: Requirement, where: tuple[str, str, str], extra: str) -> bool:
    """Return whether a requirement applies on a machine with any of `PYTHONS`."""
    if need.marker is None:
        return True
    platform, system, machine = where
    known = {"sys_platform": platform, "platform_system": system, "platform_machine": machine, "extra": extra}
    return any(
        need.marker.evaluate({**known, "python_version": python, "python_full_version": f"{python}.0"})
        for python in PYTHONS
    )


_PINS: dict[str, str] = {}
_ASKED: dict[str, SpecifierSet] = {}


def pinned(name: str, within: str = "") -> str:
    """Return the version of a package: that of the environment, that of the old locks, or the newest that all
    requirements allow."""
    allowed = _ASKED[name] = _ASKED.get(name, SpecifierSet()) & SpecifierSet(within)
    if name not in _PINS:
        try:
            _PINS[name] = Version(metadata.version(name)).public
        except metadata.PackageNotFoundError:
            _PINS[name] = old_pin(name) or newest(name, allowed)
    if not allowed.contains(_PINS[name]):
        _PINS[name] = newest(name, allowed)
    return _PINS[name]


def old_pin(name: str) -> str | None:
    text = "".join(path.read_text() for path in HERE.glob("*.txt"))
    found = re.search(rf"^{re.escape(name)}==([\w.]+)", text, re.MULTILINE)
    return found[1] if found else None


def newest(name: str, allowed: SpecifierSet) -> str:
    versions = {version_of(file) for file in listed(f"{INDEX}/{name}/") if not file["yanked"]} - {None}
    return str(max(allowed.filter(versions)))


def needs_of(name: str, version: str, installed: bool) -> list[str]:
    if installed:
        try:
            return metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            pass
    return Parser().parsestr(about(wheels_of(name, version)[-1])).get_all("Requires-Dist") or []


def about(wheel: dict[str, Any]) -> str:
    """Return the metadata of a wheel, from the index or, if the index has none, from the wheel itself."""
    try:
        return fetched(f"{wheel['url']}.metadata").decode()
    except urllib.error.HTTPError:
        with zipfile.ZipFile(io.BytesIO(fetched(wheel["url"]))) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return archive.read(name).decode()


def wheels_of(name: str, version: str) -> list[dict[str, Any]]:
    """Return a package's wheels for the machines of the lock, Linux on x86_64 last. Each of `PYTHONS` must have one."""
    found = fitting(f"{INDEX}/{name}/", version)
    for python in PYTHONS:
        if not any(fits(tag, (python,)) for file in found for tag in tags_of(file)):
            sys.exit(f"{name} {version}: has no wheel for Python {python}")
    return found


def fitting(page: str, version: str) -> list[dict[str, Any]]:
    mine = [file for file in listed(page) if version_of(file) == Version(version)]
    kept = [file for file in mine if any(fits(tag, PYTHONS) for tag in tags_of(file))]
    return sorted(kept, key=lambda file: (file["filename"].endswith("x86_64.whl"), file["filename"]))


def version_of(file: dict[str, Any]) -> Version | None:
    """Return the version of a wheel; None if the file is not a wheel, or its name is no longer valid."""
    try:
        return parse_wheel_filename(file["filename"])[1]
    except InvalidWheelFilename:
        return None


def tags_of(file: dict[str, Any]) -> frozenset[Tag]:
    return parse_wheel_filename(file["filename"])[3]


def fits(tag: Tag, pythons: Iterable[str]) -> bool:
    """Return whether a wheel with this tag is for one of `pythons` on a machine of the lock."""
    own = {kind + python.replace(".", "") for python in pythons for kind in ("cp", "py")}
    stable = tag.abi == "abi3" and re.fullmatch(r"cp3\d?", tag.interpreter) is not None
    later = tag.abi == "abi3" and tag.interpreter in ("cp310", "cp311")
    return PLATFORM.fullmatch(tag.platform) is not None and (
        tag.interpreter == "py3" or (tag.interpreter in own and tag.abi in (tag.interpreter, "none")) or stable or later
    )


@cache
def listed(page: str) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads(fetched(page))["files"]
    return files


@cache
def fetched(url: str) -> bytes:
    asked = urllib.request.Request(url, headers={"Accept": "application/vnd.pypi.simple.v1+json, */*"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: bytes = answer.read()
    return found


if __name__ == "__main__":
    main()
