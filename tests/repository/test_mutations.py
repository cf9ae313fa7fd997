"""Seeded bugs: every patch still applies, two of them die here, and what is no bug survives.

All of them die in tests/battery/run_mutations.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.battery.run_mutations import PATCHES, ROOT, Mutation, read, try_mutation

EVERY = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
DYING = ("rotary-pairs-of-neighbours", "row-bias-on-every-rank")
"""One that is seen without ranks, and one that takes two: the same at any time, so that a run can be repeated."""


def test_none_is_lost() -> None:
    assert len(EVERY) >= 25 and {one.name for one in EVERY} >= set(DYING)


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name)
def test_the_patch_applies(mutation: Mutation) -> None:
    told = subprocess.run(["git", "apply", "--check", mutation.path], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("mutation", [one for one in EVERY if one.name in DYING], ids=lambda mutation: mutation.name)
def test_a_seeded_bug_dies(mutation: Mutation) -> None:
    assert try_mutation(mutation, "").killed, f"{mutation.test} does not see it: {mutation.what}"


def test_what_is_no_bug_survives(tmp_path: Path) -> None:
    """So that it is the bug which a test sees, and not that anything was patched."""
    patch = tmp_path / "none.patch"
    patch.write_text("--- /dev/null\n+++ b/mega/core/none.py\n@@ -0,0 +1 @@\n+NONE = None\n")
    (rotation,) = (one for one in EVERY if one.name == DYING[0])
    assert not try_mutation(Mutation("none", "nothing", rotation.test, patch), "").killed
