"""A run in steps: the same as `mega.pretrain`, also with losses of the caller, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mega
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from tests.api.conftest import SIZES

OWN: dict[str, Any] = {**SIZES, "vocab": 67, "vocab_multiple": 2, "dtype": "fp64", "steps": 3}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"zero": 3},
    {
        "tied": False,
        "family": "llama",
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "ffn": 48,
        "tp": 2,
    },
]
ROWS = torch.arange(4 * 33).view(4, 33) % 61


def soft(predictions: mega.Predictions, batch: mega.DecoderBatch) -> torch.Tensor:
    """Half of the usual loss, and of that of the likeliest tokens by a rule."""
    other = F.cross_entropy(predictions.logits.flatten(0, 1), (batch.tokens + 3).flatten() % 67, reduction="none")
    return 0.5 * other.view(batch.tokens.shape) - 0.5 * predictions.logprobs


def pairs(predictions: mega.Predictions, batch: mega.DecoderBatch) -> torch.Tensor:
    """The first of two rows is to be likelier."""
    sums = (predictions.logprobs * batch.loss_weights).sum(1).view(-1, 2)
    return -F.logsigmoid(0.1 * (sums[:, 0] - sums[:, 1]))


def losses(values: dict[str, Any]) -> list[float]:
    """Of a step of each kind, from the same microbatches; the last ones depend on the updates before."""
    with mega.Trainer(mega.config(**{**OWN, **values})) as trainer:
        mesh = trainer._begun.state.mesh
        found = []
        for loss, level in ((None, "token"), (soft, "token"), (pairs, "sequence")):
            own = ROWS.view(2, 2, 33)[mesh.dp.index :: mesh.dp.size]
            found.append(trainer.forward_backward([trainer.batch(each) for each in own], loss, level=level))
            result = trainer.step()
            assert result.loss == pytest.approx(found[-1], abs=1e-12) and result.applied
            found.append(result.grad_norm)
        return [*found, float(trainer.steps_done), *trainer.sample([1, 2], 3, temperature=0)]


def _losses(groups: Groups, rank: int, values: dict[str, Any]) -> list[float]:
    return losses(values)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp", "pp", "dp", "llama"])
def test_a_layout_changes_nothing(pool: Pool, layout: dict[str, Any]) -> None:
    model = {name: value for name, value in layout.items() if name not in ("tp", "pp", "zero", "sequence_parallel")}
    expected = losses(model)
    for found in pool.run(_losses, layout, world=2):
        assert found == pytest.approx(expected, abs=1e-9)


def test_it_is_the_run_of_the_command(tokenizer: dict[str, str], tmp_path: Path) -> None:
    """Bit for bit; and what it saves is resumed."""
    run = mega.config(**{**SIZES, "hidden_dropout": 0.1}, **tokenizer, mock_data=True)
    expected = mega.pretrain(run, metrics=str(tmp_path / "metrics.jsonl"))
    with mega.Trainer(run, save=tmp_path / "run") as trainer:
        for number, batches in enumerate(trainer.batches(), 1):
            trainer.forward_backward(batches)
            result = trainer.step()
            if number == 1:
                assert trainer.save() == str(tmp_path / "run")
        assert (result.step, result.loss) == (2, expected.loss) and isinstance(trainer.sample("ab", 2), str)
    with mega.Trainer(run, save=tmp_path / "run", resume="auto") as trainer:
        assert trainer.steps_done == 1
        trainer.forward_backward(next(trainer.batches()))
        assert trainer.step() == result


def test_two_trainers_in_one_process() -> None:
    """One does not know of the other."""
    first, second = (mega.Trainer(mega.config(**OWN)) for _ in range(2))
    for trainer in (first, second):
        trainer.forward_backward(trainer.batch(ROWS))
    assert first.step() == second.step()


def test_a_step_that_is_not_finite_is_not_applied() -> None:
    trainer = mega.Trainer(mega.config(**OWN))
    trainer.forward_backward(trainer.batch(ROWS), lambda predictions, batch: predictions.logprobs / 0)
    assert not trainer.step().applied
    trainer.forward_backward(trainer.batch(ROWS))
    assert trainer.step().applied


def test_mistakes_are_one_line() -> None:
    trainer = mega.Trainer(mega.config(**OWN))
    batch = trainer.batch(ROWS)
    for call, error in (
        (lambda: trainer.step(), "step: forward_backward comes first"),
        (lambda: next(trainer.batches()), "data_path is missing"),
        (lambda: trainer.batch(ROWS.float()), "tokens: torch.float32"),
        (lambda: trainer.batch(ROWS, torch.ones(4, 33)), "weights: has shape"),
        (lambda: trainer.forward_backward([]), "no microbatch"),
        (lambda: trainer.forward_backward(batch, lambda p, b: p.logprobs.sum()), "loss: has shape"),
        (lambda: trainer.forward_backward(batch, pairs), "loss: has shape"),
        (lambda: trainer.sample("a"), "sample: the run has no tokenizer"),
        (lambda: trainer.sample([1], 40), "sample: 1 \\+ 40 tokens"),
        (lambda: trainer.save(), "save is missing"),
        (lambda: mega.Trainer(mega.config(**OWN), nproc=2), "mega.launch"),
    ):
        with pytest.raises(ValueError, match=error):
            call()
