"""`mega doctor` reports what is there and what is not, and exits with 0 in every case."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import types
from typing import Any

import pytest

from mega import cli
from mega.commands import doctor


def test_it_names_versions_backends_and_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "torch",
        platform.python_version(),
        "gloo",
        "nccl",
        "CPU",
        *(part.package for part in doctor.PACKAGES),
    ):
        assert word in shown


PACKAGE = doctor.Package("made-up", "made_up", "tests")


def test_an_absent_part() -> None:
    assert doctor._state(PACKAGE, cuda=False) == "absent"


def test_a_part_that_needs_a_gpu_is_not_called_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert doctor._state(PACKAGE._replace(cuda=True), cuda=False) == "present, untested here: no CUDA device"


def test_an_untried_package_is_not_called_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: types.ModuleType(name))
    printed = doctor._state(PACKAGE._replace(cuda=True, tried=False), cuda=True)
    assert printed == "present, untested: mega has not been run with it yet"
    assert doctor._state(PACKAGE, cuda=True) == "live"


def test_a_package_whose_import_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> types.ModuleType:
        raise ImportError("libmissing.so: cannot open\nmore")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    assert doctor._state(PACKAGE, cuda=True) == "present, but its import fails: ImportError: libmissing.so: cannot open"


def test_remarks_with_brackets_are_not_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*_: Any) -> Any:
        return iter([("thing", "-", "live [/bold] [red]")])

    monkeypatch.setattr(doctor, "_versions", rows)
    monkeypatch.setattr(doctor, "_summary", lambda: iter(()))
    assert doctor.run(everything=True) == 0
    assert "live [/bold] [red]" in capsys.readouterr().out
