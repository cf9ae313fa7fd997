"""Seeded bugs: every patch still applies, and each run of the tests kills two of them, others on every day.

All of them die in tests/battery/run_mutations.py.
"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime

import pytest

from tests.battery.run_mutations import PATCHES, ROOT, Mutation, read, try_mutation

EVERY = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
A_DAY = 2


def due(day: int) -> list[Mutation]:
    """The seeded bugs whose turn it is on day number `day`."""
    return [EVERY[(A_DAY * day + number) % len(EVERY)] for number in range(A_DAY)]


def test_each_has_its_turn() -> None:
    assert len(EVERY) >= 25
    assert {one.name for day in range(len(EVERY)) for one in due(day)} == {one.name for one in EVERY}


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name)
def test_the_patch_applies(mutation: Mutation) -> None:
    told = subprocess.run(["git", "apply", "--check", mutation.path], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("mutation", due(datetime.now(UTC).toordinal()), ids=lambda mutation: mutation.name)
def test_the_bugs_of_the_day_die(mutation: Mutation) -> None:
    assert try_mutation(mutation, "").killed, f"{mutation.test} does not see it: {mutation.what}"
