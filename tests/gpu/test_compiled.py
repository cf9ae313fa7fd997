"""Kernels are compiled for a GPU that is not there, because Triton's interpreter accepts more than its compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.triton import needs_kernels

pytestmark = needs_kernels
ROOT = Path(__file__).resolve().parents[2]
ITEMS = ["paged qwen3-30b-a3b", "mixture qwen3 1"]
"""Those that are compiled in seconds; `python tests/battery/compiled.py` compiles all."""


def test_kernels_compile(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "tests/battery/compiled.py", *ITEMS, "--out", str(rows), "--commit", "now"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    variants = [each for line in rows.read_text().splitlines() for each in json.loads(line)["variants"]]
    assert {"_look", "_tiles", "_down_row"} <= {each["kernel"] for each in variants}
    assert all(each["registers"] > 0 for each in variants)
