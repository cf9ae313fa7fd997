"""Texts between steps: the same whatever the layout, and training is what it would have been without them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start

RUN: dict[str, Any] = {
    **{"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "mock_data": True, "micro_batch": 2, "global_batch": 2},
    **{"lr": 1e-2, "steps": 4, "eval_iters": 0, "lr_decay": "constant", "log_interval": 1, "progress": False},
    **{"tokenizer": "NullTokenizer", "vocab_size": 40, "sample_tokens": 5},
}


def _trained(groups: Groups, rank: int, metrics: str, more: dict[str, Any]) -> None:
    world = more.get("tp", 1) * more.get("pp", 1)
    prepared = open_inputs(resolve_run(compose(flags={**RUN, **more, "metrics": metrics}), world))
    assert start(prepared, rank, world, Device.choose("cpu"), groups, contextlib.ExitStack()).play() == 0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_of_fixed_prompts_in_any_layout(pool: Pool, tmp_path: Path) -> None:
    asked = {"sample_interval": 2, "sample_prompts": ("1 2 3", "7")}
    layouts: dict[str, dict[str, Any]] = {"one": {}, "four": {"tp": 2, "pp": 2, "sequence_parallel": True}}
    for name, layout in layouts.items():
        world = layout.get("tp", 1) * layout.get("pp", 1)
        pool.run(_trained, str(tmp_path / name), {**asked, **layout}, world=world)
    pool.run(_trained, str(tmp_path / "silent"), {}, world=1)
    one, four, silent = (_rows(tmp_path / name) for name in (*layouts, "silent"))
    texts = [row for row in one if "sample 1" in row or "sample 2" in row]
    assert [(row["step"], *(set(row) - {"step"})) for row in texts] == [
        *[(2, "sample 1"), (2, "sample 2")],
        *[(4, "sample 1"), (4, "sample 2")],
    ]
    assert all(row["sample 1"].startswith("1 2 3 ") for row in texts[::2])
    assert [row for row in four if "sample 1" in row or "sample 2" in row] == texts
    assert [row["loss"] for row in silent if "lr" in row] == [row["loss"] for row in one if "lr" in row]
