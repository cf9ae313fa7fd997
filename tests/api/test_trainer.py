"""A run in steps: the same as `mega.pretrain`, also with losses of the caller, in any layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mega
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.device import Device, restored_settings
from mega.core.model.objective import CustomLoss, LossFunction
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


def own_steps(trainer: mega.Trainer, steps: int) -> list[mega.StepResult]:
    """Of a batch with more rows than the run's, and one that is not trained on."""
    found = []
    for _ in range(steps):
        trainer.batch(ROWS[:1])
        trainer.forward_backward(trainer.batch(torch.cat([ROWS, ROWS.flip(1)])))
        found.append(trainer.step())
    return found


def test_own_batches_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Also where a step has other rows than the run's; and no two steps have one dropout."""
    run = mega.config(**{**OWN, "hidden_dropout": 0.5}, save=tmp_path / "run")
    with mega.Trainer(run) as trainer:
        expected = own_steps(trainer, 1)
        trainer.save()
        expected += own_steps(trainer, 2)
    with mega.Trainer(run, resume="auto") as trainer:
        assert trainer.steps_done == 1 and own_steps(trainer, 2) == expected[1:]
        numbers = {int(each) for _ in range(2) for each in trainer.batch(ROWS).samples}
        assert len(numbers) == 8


def test_what_was_saved_is_judged(tmp_path: Path) -> None:
    """As of `mega pretrain`: sound steps that follow make it good; at the last step all is; not of a run that blew up.
    A loss of the caller's own says nothing of that."""
    place, run = tmp_path / "run", mega.config(**OWN, good_after=1)

    def step(trainer: mega.Trainer, loss: LossFunction | None = None) -> None:
        trainer.forward_backward(trainer.batch(ROWS), loss)
        trainer.step()

    def known() -> dict[int, str]:
        return {step: verdict.status for step, verdict in CheckpointStore(place).verdicts().items()}

    with mega.Trainer(run, save=place, async_save=True) as trainer:
        step(trainer)
        trainer.save()
        trainer._saver.wait()
        assert known() == {1: "unproven"}
        step(trainer, lambda predictions, batch: 1000 - predictions.logprobs)
        assert known() == {1: "good"}
        trainer.save()
    assert known() == {1: "good", 2: "unproven"}
    with pytest.raises(FloatingPointError), mega.Trainer(run, save=place, resume="auto") as trainer:
        raise FloatingPointError("the loss is nan")
    assert known() == {1: "good", 2: "suspect"}
    with mega.Trainer(run, save=tmp_path / "other", steps=1) as trainer:
        step(trainer)
        trainer.save()
    place = tmp_path / "other"
    assert known() == {1: "good"}


def test_a_loss_of_half_precision_is_summed_in_fp32() -> None:
    """In bf16 a sum of ones ends at 256."""
    batch = mega.DecoderBatch(*[torch.ones(1, 1001)] * 4, samples=torch.zeros(1))
    ones: Any = torch.ones(1, 1001, dtype=torch.bfloat16)
    for loss, count in (CustomLoss(lambda p, b: ones), 1001), (CustomLoss(lambda p, b: ones[0, :1], "sequence"), 1):
        term = loss(ones, batch)
        assert term.total.dtype == torch.float32 and float(term.total) == float(term.weight) == count


def test_deterministic_algorithms_of_a_cpu_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose import takes seconds on each rank; where it is imported already, it is told."""
    asked = list[bool]()
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda only, warn_only: asked.append(only))
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    before = torch.get_deterministic_debug_mode()
    with restored_settings():
        Device.choose("cpu").deterministic()
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
    assert torch.get_deterministic_debug_mode() == before and not asked
    monkeypatch.setitem(sys.modules, "torch._inductor", torch)
    Device.choose("cpu").deterministic()
    assert asked == [True]


def test_a_closed_trainer_does_nothing_more(tmp_path: Path) -> None:
    """And what it has set for the process is as it was."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    try:
        with mega.Trainer(mega.config(**OWN), save=tmp_path / "run", deterministic=True) as trainer:
            batch = trainer.batch(ROWS)
            trainer.forward_backward(batch)
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, before[1])
    finally:
        torch.set_num_threads(before[0])
    trainer.close()
    for call in (
        lambda: trainer.step(),
        lambda: trainer.save(),
        lambda: trainer.forward_backward(batch),
        lambda: trainer.batch(ROWS),
        lambda: next(trainer.batches()),
        lambda: trainer.sample([1], 1),
    ):
        with pytest.raises(ValueError, match=r"^the trainer is closed$"):
            call()
    assert trainer.steps_done == 0


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
    trainer, recording = mega.Trainer(mega.config(**OWN)), mega.Trainer(mega.config(**OWN), cuda_graph=True)
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
        (lambda: trainer.batch(ROWS + 7), "tokens: ids must be from 0 to 66, not 67"),
        (lambda: trainer.batch(ROWS - 100), "tokens: ids must be from 0 to 66, not -100"),
        (lambda: trainer.sample([1000], 3), "prompt: ids must be from 0 to 66, not 1000"),
        (lambda: trainer.sample([1], 3, temperature=-1.0), "--temperature -1.0: must be"),
        (lambda: trainer.sample([1], 3, top_k=-1), "--top-k -1: must be"),
        (lambda: trainer.forward_backward(batch, level="foo"), "level 'foo': must be"),  # type: ignore[arg-type]
        (lambda: trainer.forward_backward(batch, level="sequence"), "level 'sequence': must be"),
        (lambda: trainer.step(lr=-1.0), "lr -1.0: must be"),
        (lambda: recording.forward_backward(batch, soft), "loss: excludes cuda_graph"),
        (lambda: trainer.save(), "save is missing"),
        (lambda: mega.Trainer(mega.config(**OWN), dry_run=True), "dry_run, world: "),
        (lambda: mega.Trainer(mega.config(**OWN), max_restarts=1), "max_restarts, hosts: "),
        (lambda: mega.Trainer(mega.config(**OWN), nproc=2), "mega.launch"),
    ):
        with pytest.raises(ValueError, match=error):
            call()
