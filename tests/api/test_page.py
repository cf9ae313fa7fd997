"""docs/python.md: its names are those of the package, and its examples run; so do the loops of examples/."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mega
from tests.api.conftest import SIZES

ROOT = Path(mega.__file__).resolve().parents[1]
PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_names_are_the_same_everywhere() -> None:
    table = PAGE[PAGE.index("## Names") :]
    on_page = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    stub = ast.parse((ROOT / "mega/__init__.pyi").read_text())
    typed = {name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(mega.__all__) == on_page == {*typed, "__version__"}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            assert all(node.module == f"mega.{mega._MODULES[name.name]}" for name in node.names)


@pytest.mark.parametrize("name", ["config", "estimation"])
def test_examples_of_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"mega.api.{name}")).failed == 0


def test_importing_it_loads_no_torch() -> None:
    """Nor does a configuration; every name is one."""
    code = (
        "import sys, mega; mega.config('gpt2-124m', tp=2); mega.launch; mega.pretrain; mega.estimate; mega.evaluate;"
        "mega.convert; assert not {'torch', 'numpy'} & set(sys.modules), 'torch'; assert 'Trainer' in dir(mega)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        mega.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_its_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 5
    shown = []
    for example in EXAMPLES:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(example, "docs/python.md", "exec", dont_inherit=True), space)
        shown.append(capsys.readouterr().out)
    first, plan, own, ranks, score = shown
    assert first.startswith("20 ") and "torch.Size([3, 41])" in first
    assert "fits: True" in plan and own.startswith("5 ")
    losses = ast.literal_eval(ranks)
    assert len(losses) == 2 and losses[0] == losses[1] and "first-hf" in score


def example(name: str) -> dict[str, Any]:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    return runpy.run_path(str(path))


def test_a_student_learns_from_its_teacher(trained: mega.TrainingResult, tokenizer: dict[str, str]) -> None:
    """The divergence falls: from a student of other weights, and the same of equal weights is nothing."""
    run = mega.config(**{**SIZES, "steps": 12, "lr": 3e-2, "seed": 7}, **tokenizer, mock_data=True)
    steps = example("distillation")["distil"](trained.checkpoint, run, share=1.0)
    assert steps[-1].step == 12 and steps[-1].loss < 0.5 * steps[0].loss
    same = mega.config(**{**SIZES, "steps": 1}, **tokenizer, mock_data=True, load=trained.checkpoint, finetune=True)
    assert example("distillation")["distil"](trained.checkpoint, same, share=1.0)[0].loss == pytest.approx(0, abs=1e-6)


def test_the_model_of_load_is_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Started as the header says; not where nothing is left to do."""
    run, place = mega.config(**{**SIZES, "vocab": 20, "steps": 1}), tmp_path / "run"
    with mega.Trainer(run, save=place) as trainer:
        trainer.forward_backward(trainer.batch(torch.arange(18).view(2, 9)))
        trainer.step()
        trainer.save()
    file = tmp_path / "run.toml"
    batch = "seq_length = 32\nmicro_batch = 2\nsteps = 1"
    file.write_text(f'[checkpoint]\nload = "{place}"\n[batch]\n{batch}\n[optimizer]\nlr = 1e-3\n')
    monkeypatch.setattr(sys, "argv", ["reward.py", "--config", str(file), "--prompt", "1 2"])
    runpy.run_path(str(ROOT / "examples/reward.py"), run_name="__main__")
    assert len(ast.literal_eval(capsys.readouterr().out)) == 1
    resumed = mega.config(file=file, use_checkpoint_config=True, override_schedule=True)
    with pytest.raises(ValueError, match="steps 1: must be more than the 1 that"):
        example("reward")["reinforce"](resumed, [1, 2], len)


def test_a_reward_rises() -> None:
    space = example("reward")
    run = mega.config(**{**SIZES, "vocab": 20, "steps": 6, "lr": 0.1, "seq_length": 8})
    rewards = space["reinforce"](run, [1, 2], space["even_tokens"], tokens=2, group=8)
    assert len(rewards) == 6 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.5
