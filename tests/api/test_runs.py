"""Whole runs from Python: what the commands do, as results; nothing is printed, and a mistake is a ValueError."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mega
from mega import cli
from tests.api.conftest import SIZES

TURN = {"role": "user", "content": "a"}


def test_a_run_has_a_result(trained: mega.TrainingResult) -> None:
    rows = [json.loads(line) for line in Path(trained.metrics).read_text().splitlines()]
    assert trained.step == 2 and trained.code == 0
    assert trained.loss == next(row["loss"] for row in rows if row["step"] == 2 and "lr" in row)
    assert trained.evaluation["valid"]["loss"] == next(row["valid_loss"] for row in rows if "valid_loss" in row)


def test_nothing_is_printed_unless_asked(
    trained: mega.TrainingResult, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A finetuning on conversations, whose model then converses."""
    assert trained.checkpoint is not None
    talks = tmp_path / "talks.jsonl"
    talks.write_text(json.dumps({"messages": [TURN, {"role": "assistant", "content": "b"}]}))
    chosen = mega.config(**SIZES, load=trained.checkpoint, chat_data=str(talks), save=tmp_path / "chat")
    result = mega.finetune(chosen, chat_template="plain", eval_iters=0)
    assert capfd.readouterr() == ("", "")
    assert result.step == 2 and result.checkpoint is not None and math.isfinite(result.loss)
    model = mega.load(result.checkpoint)
    assert model.chat("a", tokens=3, seed=1) == model.chat([TURN], tokens=3, seed=1)
    mega.finetune(chosen, chat_template="plain", steps=1, save=tmp_path / "other", verbose=True)
    assert "step 1/1" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: mega.config("tiny-gtp"), "--model tiny-gtp: is not a preset"),
        (lambda: mega.config(layer=2), "layer: is not an option (nearest: layers)"),
        (lambda: mega.config(layers="two", tp=True), "layers: 'two' must be a whole number\ntp: True must be"),
        (lambda: mega.pretrain(mega.config("tiny-gpt"), lr=-1.0, vocab=8, steps=1, micro_batch=1), "--lr -1"),
        (lambda: mega.pretrain(mega.config(**SIZES), max_restarts=1), "max_restarts, hosts: "),
        (lambda: mega.finetune(mega.config(**SIZES)), "--load is missing: "),
        (lambda: mega.config(None, layer=None), "layer: is not an option (nearest: layers)"),
        (lambda: mega.load("no/such/run"), "no/such/run"),
        (lambda: mega.evaluate("run", "ppl", "text.txt", lr=1.0, steps=3), "lr, steps: not used"),
        (lambda: mega.evaluate("run", "ppl", "text.txt", load="other"), "load: the model is that of `path`"),
        (lambda: mega.evaluate("no/such/run", "ppl", "text.txt"), "--load no/such/run: "),
        (lambda: mega.convert("no/such/run", "out"), "--load-dir no/such/run: "),
        (lambda: mega.estimate(mega.config("tiny-gpt"), gpu="h1000"), "h1000"),
    ],
)
def test_a_mistake_is_one_line(call: Any, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert error in str(raised.value)


def test_a_model_generates_and_scores(trained: mega.TrainingResult) -> None:
    assert trained.checkpoint is not None
    model = mega.load(trained.checkpoint)
    one, other = model.generate(["ab", "ba"], tokens=4, temperature=0)
    assert model.generate("ab", tokens=4, temperature=0) == one and len(other) > 0
    ids = torch.tensor(model.tokenizer.encode("abba"))
    logits = model.logits(ids)
    assert logits.shape == (4, 257) and torch.equal(model.logits(ids[None])[0], logits)
    expected = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(model.score("abba")), expected)
    for call, error in (
        (lambda: model.generate("a", heat=1.0), "heat: is not an option of sampling"),
        (lambda: model.generate("a", temperature=-1.0), "--temperature -1.0: must be"),
        (lambda: model.generate("a", tokens=0), "tokens 0: must be"),
        (lambda: model.chat("a"), "has no chat template"),
        (lambda: model.logits([300]), "tokens: ids must be from 0 to 256, not 300"),
        (lambda: model.logits([1.9]), "tokens: ids must be whole numbers"),  # type: ignore[list-item]
        (lambda: model.score([1, 2, -100]), "text: ids must be from 0 to 256, not -100"),
        (lambda: model.score([[1, 2], [3]]), "text: must be token ids"),  # type: ignore[list-item]
        (lambda: model.score("a"), "text: has 1 tokens"),
    ):
        with pytest.raises(ValueError, match=error):
            call()


def test_two_models_in_one_process(trained: mega.TrainingResult) -> None:
    assert trained.checkpoint is not None
    first, second = mega.load(trained.checkpoint), mega.load(trained.checkpoint)
    assert first.generate("ab", tokens=3, seed=5) == second.generate("ab", tokens=3, seed=5)


def test_a_score_is_that_of_the_model(trained: mega.TrainingResult, tmp_path: Path, capfd: Any) -> None:
    assert trained.checkpoint is not None
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "abba" * 4}) + "\n")
    found = mega.evaluate(trained.checkpoint, "ppl", text, device="cpu", out=tmp_path / "ppl.json")
    assert capfd.readouterr() == ("", "") and (tmp_path / "ppl.json").exists()
    shown = json.loads((tmp_path / "ppl.json").read_text())
    assert found.figures["ppl"].value == next(each["value"] for each in shown["figures"] if each["name"] == "ppl")
    with pytest.raises(ValueError, match="limi: is not an option"):
        mega.evaluate(trained.checkpoint, "ppl", text, limi=3)


def test_a_model_with_a_retriever_is_scored(tokenizer: dict[str, str], tmp_path: Path) -> None:
    """By what `retro` names; what is missing is said before anything starts."""
    reads = {"retriever": True, "retro_layers": (1,), "retro_chunk_length": 8, "steps": 1, "eval_iters": 0}
    run = mega.pretrain(mega.config(**{**SIZES, **reads}, **tokenizer, mock_data=True, save=tmp_path / "run"))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "abba" * 4}) + "\n")
    asked = {"path": str(run.checkpoint), "task": "ppl", "data": tmp_path / "text.jsonl", "device": "cpu"}
    assert mega.evaluate(**asked, retro="none").figures["ppl"].value is not None
    with pytest.raises(ValueError, match="--embedder is missing"):
        mega.evaluate(**asked, retro="database")
    with pytest.raises(ValueError, match="--retro is missing"):
        mega.evaluate(**asked)
    with pytest.raises(ValueError, match="retro: has no effect with task race"):
        mega.evaluate(**{**asked, "task": "race"}, retro="none")


def test_none_stands_for_an_option_that_is_left_out() -> None:
    assert mega.config("gpt2-124m", layers=None, lr=None) == mega.config("gpt2-124m")
    assert mega.config("gpt2-124m", ffn=None, global_batch=None) == mega.config("gpt2-124m")


def test_weights_go_to_another_form_and_back(trained: mega.TrainingResult, tmp_path: Path) -> None:
    assert trained.checkpoint is not None
    report = mega.convert(trained.checkpoint, tmp_path / "hf")
    mega.convert(tmp_path / "hf", tmp_path / "back", tp=2)
    ids = [1, 2, 3]
    expected = mega.load(trained.checkpoint).logits(ids)
    for place in ("hf", "back"):
        torch.testing.assert_close(mega.load(tmp_path / place).logits(ids), expected)
    assert report.path == tmp_path / "hf" and report.tensors > 0


def test_an_estimate_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = "memory-estimate --model tiny-gpt --vocab 512 --tp 2 --micro-batch 1 --world 2 --gpu h100 --json"
    assert cli.main(line.split()) == 0
    shown = json.loads(capsys.readouterr().out)
    found = mega.estimate(mega.config("tiny-gpt", vocab=512, tp=2, micro_batch=1), world=2, gpu="h100")
    assert (found.memory.worst.peak, found.parameters) == (shown["peak"], shown["parameters"])
    assert (found.fits, found.seconds) == (shown["fits"], shown["step"]["seconds"])
