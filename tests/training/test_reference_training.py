"""Short forms of tests/battery/reference_training.py: a few steps of mega's, and of loops over transformers and peft.

Packed conversations train an adapter as peft trains it with one conversation a row; preferences train all weights as
the formula does, and report its rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from tests.data.test_chat import with_im
from tests.support import reference_training as loops
from tests.support.hugging_face import hf_folder
from tests.support.reference_training import IGNORED, LINEARS, SUMS, Recipe, Talk, opened

pytest.importorskip("transformers")
RECIPE = Recipe(steps=4, batch=4, lr=2e-3, warmup=1)
LENGTH = 64
SAY = "abcdefgh ijkl mnop qrst uvwxyz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama with grouped heads over the letters of `with_im`."""
    tokenizer = with_im(tmp_path)
    vocab = max(tokenizer.control(mark) or 0 for mark in ("<|im_start|>", "<|im_end|>")) + 1
    return hf_folder(tmp_path / "model", "llama3", std=0.15, vocab_size=vocab)


def finetuned(load: Path, *words: object) -> Path:
    """Where a run was saved, after every step."""
    save, files = load.parent / "run", ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", load.parent]
    each = ["--save", save, "--save-interval", 1, "--log-interval", 1, "--seq-length", LENGTH, "--micro-batch", 2]
    line = ["finetune", "--load", load, *RECIPE.flags, *files, *each, "--chat-template", "chatml", *words]
    assert main([str(word) for word in line]) == 0
    return save


def exported(place: Path, to: str) -> Path:
    folder = place.parent / f"{place.name}-{to}"
    assert main(["convert-llama", "--to", to, "--load-dir", str(place), "--save-dir", str(folder)]) == 0
    return folder / ("adapter_model.safetensors" if to == "peft" else "model.safetensors")


def check(found: Mapping[str, float]) -> None:
    assert all(found[name] <= bound for name, bound in SUMS.items()), found


def test_packed_conversations_train_pefts_adapter(model: Path) -> None:
    pytest.importorskip("peft", reason="peft is absent: pip install '.[peft]' in a clone")
    data, base = model.parent / "talks.jsonl", model.parent / "base"
    talks: list[Talk] = [
        [("user", SAY[at % 5 : at % 5 + 1]), ("assistant", SAY[at : at + 1 + at * 3 % 7])] for at in range(20)
    ]
    lines = [{"prompt": asked, "completion": answer} for (_, asked), (_, answer) in talks]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["convert-llama", "--load-dir", str(model), "--save-dir", str(base)]) == 0
    save = finetuned(base, "--chat-data", data, "--lora-rank", 4, "--lora-alpha", 8)
    known = [loops.as_chatml(talk, model.parent / "tokenizer.json") for talk in talks]
    batches = loops.conversation_batches(
        loops.inputs(save), [(i[: LENGTH + 1], k[: LENGTH + 1]) for i, k in known], RECIPE
    )
    first = exported(save / "step-0000001", "peft")  # the rate of step 1 is 0
    theirs = loops.adapted(opened(model), first, r=4, lora_alpha=8, target_modules=LINEARS)
    found = loops.train(theirs, RECIPE, lambda model, step: loops.token_loss(model, batches[step]))
    check(loops.difference(loops.saved_names(found), save, exported(save, "peft")))


def test_preferences_are_trained_as_written_down(model: Path) -> None:
    data, beta, smoothing = model.parent / "pairs.jsonl", 0.2, 0.1
    talks: list[tuple[Talk, str, str]] = [
        ([("user", "a"), ("assistant", "b"), ("user", SAY[at])], SAY[at : at + 3], SAY[at : at + 1 + at % 2])
        for at in range(8)
    ]
    lines = [
        {"prompt": [{"role": role, "content": said} for role, said in talk], "chosen": one, "rejected": other}
        for talk, one, other in talks
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--task", "dpo", "--dpo-data", data, "--dpo-beta", beta, "--dpo-label-smoothing", smoothing]
    save = finetuned(model, *words)
    both = []
    for answers in zip(*(talk[1:] for talk in talks), strict=True):
        rows = []
        for (talk, *_), answer in zip(talks, answers, strict=True):
            ids, labels = loops.as_chatml([*talk, ("assistant", answer)], model.parent / "tokenizer.json")
            begin = len(loops.as_chatml(talk, model.parent / "tokenizer.json")[0])
            rows.append((ids, [IGNORED] * begin + labels[begin:]))
        both.append(rows)
    order, rewards = loops.inputs(save).order.tolist(), list[float]()
    with torch.no_grad():
        before = [loops.row_log_probability(opened(model), rows) for rows in both]

    def loss(theirs: Any, step: int) -> torch.Tensor:
        numbers = order[step * RECIPE.batch : (step + 1) * RECIPE.batch]
        one, two = (loops.row_log_probability(theirs, [rows[number] for number in numbers]) for rows in both)
        rewards.append(beta * float((one - before[0][numbers]).detach().mean()))
        return loops.preference_loss((one, two), (before[0][numbers], before[1][numbers]), beta, smoothing)

    found = loops.train(opened(model), RECIPE, loss)
    check(loops.difference(found, save, exported(save, "hf")))
    assert [row["chosen"] for row in loops.metrics(save)] == pytest.approx(rewards, abs=1e-5)
