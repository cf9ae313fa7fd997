"""More ranks than a host has cores or memory for are told of before they start."""

from __future__ import annotations

import sys

import pytest

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve, variant
from mega.core.config.run import RunConfig
from mega.core.estimate import host


def _run() -> RunConfig:
    flags = {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 64, "vocab": 1024, "micro_batch": 2, "tp": 2, "pp": 2}
    return resolve(compose(flags={**flags, "device": "cpu"}), 8)


def test_too_few_cores_and_too_little_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "available", lambda: 2 << 30)
    few, little = host.resource_warnings(_run(), 8)
    assert few == "--nproc 8: this host has 2 cores for these ranks, which wait for each other at every step"
    assert little.startswith("--nproc 8: these ranks need about 2.8 GiB, and this host has 2.0 GiB: ")


def test_one_rank_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available", lambda: 1 << 28)
    (little,) = host.resource_warnings(variant(_run(), {"tp": 1, "pp": 1}), 1)
    assert little.startswith(
        "this run needs about 0.4 GiB, and this host has 0.2 GiB: it may be killed; a smaller model"
    )


def test_enough_is_not_worth_a_word_nor_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 8)
    monkeypatch.setattr(host, "available", lambda: 1 << 40)
    monkeypatch.setitem(sys.modules, "mega.core.estimate.memory", None)
    assert not list(host.resource_warnings(_run(), 8))
