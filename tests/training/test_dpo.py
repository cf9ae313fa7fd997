"""Preferences: loss and gradients in fp64 as written down, any layout and micro batch, the reference kept and found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mega.cli import main
from mega.core.batch import PreferenceBatch
from mega.core.checkpoint.own.pieces import Piece
from mega.core.config.run import RunConfig
from mega.core.data.pairs import PairDataset, conversations, encoded
from mega.core.data.synthetic import decoder_prompt
from mega.core.device import Device
from mega.core.inference.loading.load import open_model
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import Snapshot, assemble, compare, own_samples, within
from mega.core.text.chat.format import chat_format
from mega.core.training.state import TrainState
from mega.core.training.step import backward, means
from mega.core.training.wire import build_mesh, build_state
from tests.data.test_chat import with_im
from tests.support.runs import small_run

BETA, SMOOTHING = 0.7, 0.1
DPO: dict[str, Any] = {
    "task": "dpo",
    "dpo_data": ("x",),
    "dpo_beta": BETA,
    "dpo_label_smoothing": SMOOTHING,
    "layers": 2,
    "global_batch": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def batch(run: RunConfig, pairs: torch.Tensor) -> PreferenceBatch:
    """Pairs that are functions of their numbers: ragged answers, and a reference."""
    length, rows = run.batch.seq_length or 0, []
    for pair in pairs.tolist():
        generator = np.random.default_rng(pair)
        for _ in range(2):
            begin, end = sorted(generator.choice(length + 1, 2, replace=False).tolist())
            weights = (np.arange(length) >= begin) & (np.arange(length) < end)
            rows.append((generator.integers(run.model.vocab or 1, size=length + 1), weights, generator.normal(-30, 3)))
    ids = torch.from_numpy(np.stack([row[0] for row in rows]))
    return PreferenceBatch(
        tokens=ids[:, :-1],
        labels=ids[:, 1:],
        loss_weights=torch.from_numpy(np.stack([row[1] for row in rows])).float(),
        positions=torch.arange(length).expand(len(rows), -1),
        samples=torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten(),
        reference=torch.tensor([row[2] for row in rows], dtype=torch.float64).view(-1, 2),
    )


def built(run: RunConfig) -> TrainState:
    return build_state(run, build_mesh(run, 0, 1), Device.choose("cpu"))


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    return {piece.key: piece.tensor.detach().clone() for piece in state.gradient_pieces()}


def test_loss_and_gradients_are_the_formula() -> None:
    """Against softmax over the whole vocabulary and the loss written out, differentiated by autograd, in fp64."""
    run = small_run("gpt", micro_batch=4, **DPO)
    state, pairs = built(run), batch(run, torch.arange(4))
    names = dict(zip(state.pipeline.names, backward(state, [pairs])[:, 0].tolist(), strict=True))
    ours = gradients(state)
    plain = built(small_run("gpt", micro_batch=8, **{**DPO, "task": "lm", "dpo_data": ()}))
    plain.grads.start()
    logits = plain.stages[0](decoder_prompt(pairs.tokens), outputs=True).outputs[..., : run.model.vocab]
    chosen = logits.log_softmax(-1).gather(-1, pairs.labels[..., None]).squeeze(-1)
    policy = (chosen * pairs.loss_weights.double()).sum(1).view(4, 2)
    assert pairs.reference is not None
    rewards = BETA * (policy - pairs.reference)
    margin = rewards[:, 0] - rewards[:, 1]
    right, wrong = torch.sigmoid(margin).log(), torch.sigmoid(-margin).log()
    loss = -(1 - SMOOTHING) * right - SMOOTHING * wrong
    loss.mean().backward()
    theirs = gradients(plain)
    expected = [loss.sum(), (margin > 0).sum(), margin.sum(), rewards[:, 0].sum(), rewards[:, 1].sum()]
    assert list(names) == ["dpo", "accuracy", "margin", "chosen", "rejected"]
    assert list(names.values()) == pytest.approx([float(each.detach()) for each in expected], rel=1e-12)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-13)


def trained(groups: Groups, rank: int, run: RunConfig, world: int) -> tuple[float, float, list[Piece]]:
    """Job of one rank: a step; loss, gradient norm and this rank's pieces."""
    mesh = build_mesh(run, rank, world, groups)
    state = build_state(run, mesh, Device.choose("cpu", rank))
    sums = backward(state, [batch(run, rows) for rows in own_samples(run, mesh, 0)])
    pieces = [Piece(p.key, p.whole, p.start, p.tensor.detach().clone()) for p in state.gradient_pieces()]
    norm = float(state.optimizer.step(1e-3, 0.0).grad_norm)
    state.grads.wait_param_gather()
    return float(means(state, sums)[0]), norm, pieces


def snapshot(pool: Pool, world: int, **values: Any) -> list[Snapshot]:
    ranks = pool.run(trained, small_run("llama", world, **{**DPO, **values}), world, world=world)
    return [Snapshot(*ranks[0][:2], assemble(piece for _, _, pieces in ranks for piece in pieces))]


def test_every_layout_and_micro_batch_prefers_the_same(pool: Pool) -> None:
    reference = snapshot(pool, 1)
    for world, layout in (
        (1, {"micro_batch": 4}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "micro_batch": 2}),
        (2, {"zero": 3}),
    ):
        (difference,) = compare("fp64", (1,), reference, snapshot(pool, world, **layout))
        assert within("fp64", difference), (layout, difference)


SHAPE = "--layers 2 --hidden 32 --heads 4 --hidden-dropout 0 --attention-dropout 0".split()
RUN = (
    "--seq-length 48 --global-batch 8 --micro-batch 4 --lr 3e-3 --lr-decay constant --eval-iters 1 --eval-interval 5 "
    "--log-interval 1 --device cpu --chat-template chatml --save-interval 5"
).split()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, list[str]]:
    """Pairs that prefer short answers, and the flags of a tokenizer."""
    with_im(tmp_path)
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no no"} for i in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pairs, ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]


def test_from_start_to_resume(
    files: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, tokenizer = files
    base, tuned, half = (tmp_path / name for name in ("base", "tuned", "half"))
    pretrain = ["pretrain", *SHAPE, *RUN, *tokenizer, "--mock-data", "--chat-template", "plain", "--steps", "1"]
    assert main([*pretrain, "--save", str(base)]) == 0
    more = ["--valid-sets", f"held-out={pairs}", "--steps", "10", "--load", str(base), "--resume", "auto"]
    tune = ["finetune", *RUN, "--task", "dpo", "--dpo-data", str(pairs), "--lora-rank", "4", *more]
    capsys.readouterr()
    assert main([*tune, "--save", str(tuned)]) == 0
    said = capsys.readouterr().out
    assert open_model(tuned).chat_template() == "chatml" and open_model(base).chat_template() is None
    assert (
        f"weights from {base / 'step-0000001'}; " in said and "⟦yes<|im_end|>⟧" in said and "⟦no no<|im_end|>⟧" in said
    )
    rows = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "lr" in row]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6), "the first weights are the reference"
    assert losses[-1] < 0.6 and rows[-1]["held-out_accuracy"] == 1.0
    # stopped half-way: the reference is found; without it, computed again from the first weights
    stored = load_file(tuned / "step-0000010" / "rank-00000.safetensors")
    for left_out in ((), ("reference",)):
        shutil.copytree(tuned, half, ignore=shutil.ignore_patterns("step-0000010", "latest*", *left_out))
        assert main([*tune, "--save", str(half)]) == 0
        ended = load_file(half / "step-0000010" / "rank-00000.safetensors")
        assert all(torch.equal(stored[name], ended[name]) for name in stored)
        shutil.rmtree(half)
    # of others' weights, which have no adapters
    theirs = tmp_path / "theirs"
    assert main(["convert-llama", "--load-dir", str(base), "--save-dir", str(theirs)]) == 0
    tune = ["finetune", *RUN, "--task", "dpo", "--dpo-data", str(pairs), "--load", str(theirs), "--resume", "auto"]
    for steps in ("5", "6"):
        assert main([*tune, "--save", str(half), "--steps", steps]) == 0
        shutil.rmtree(half / "reference")


def test_padding_that_no_row_needs_is_left_out(
    files: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, the losses are those of rows of --seq-length."""
    pairs, tokenizer = files
    answers = ["y" * (1 + 3 * number) for number in range(8)]
    lines = [json.dumps({"prompt": f"{i}", "chosen": one, "rejected": "no"}) for i, one in enumerate(answers)]
    pairs.write_text("\n".join(lines))
    tune = ["pretrain", *SHAPE[:-4], *RUN, *tokenizer, "--task", "dpo", "--dpo-data", str(pairs), "--steps", "3"]
    widths, collate = list[int](), PairDataset.collate

    def seen(self: PairDataset, *arguments: Any) -> Any:
        widths.append(collate(self, *arguments).tokens.shape[1])
        return collate(self, *arguments)

    monkeypatch.setattr(PairDataset, "collate", seen)
    losses = []
    for name in ("short", "whole"):
        assert main([*tune, "--micro-batch", "1", "--save", str(tmp_path / name)]) == 0
        rows = (json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "lr" in row])
        if name == "short":
            assert {width % 8 for width in widths} == {0} and min(widths) < max(widths) <= 48, widths
            monkeypatch.setattr("mega.core.training.kinds.dpo._unit", lambda state: None)
            widths.clear()
    assert set(widths) == {48} and losses[0] == pytest.approx(losses[1], rel=2e-6)


def test_a_prompt_that_its_answers_repeat_is_there_once() -> None:
    """As in UltraFeedback: a text, and whole conversations that begin with it."""
    turns = (("user", "a"), ("assistant", "good"), ("assistant", "bad"))
    user, good, bad = ({"role": role, "content": content} for role, content in turns)
    whole = conversations({"prompt": "a", "chosen": [user, good], "rejected": [user, bad]})
    assert whole == ({"messages": [user, good]}, {"messages": [user, bad]})
    assert conversations({"prompt": [user], "chosen": [good], "rejected": [bad]}) == whole


def test_what_both_answers_follow_is_judged_in_neither(tmp_path: Path) -> None:
    """The assistant's earlier turns would count in both rewards, and in their difference not at all."""
    tokenizer, turns = with_im(tmp_path), [("user", "a"), ("assistant", "first"), ("user", "b")]
    prompt = [{"role": role, "content": content} for role, content in turns]
    good, bad = ([*prompt, {"role": "assistant", "content": content}] for content in ("goat", "gnu"))
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "chosen": "goat", "rejected": "gnu"},
        {"chosen": good, "rejected": bad},
        {"prompt": "b", "chosen": "goat", "rejected": "gnu"},
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for both in encoded([str(pairs)], chat_format("chatml", tokenizer)):
        judged = [[token for token, own in zip(*each, strict=True) if own] for each in both]
        assert [tokenizer.decode(ids) for ids in judged] == ["goat<|im_end|>", "gnu<|im_end|>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "b"}', 'pairs.jsonl:1: no "rejected": a pair is'),
        ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "pairs.jsonl:1: both answers are the same"),
        ('{"chosen": "a", "rejected": "b"}', 'pairs.jsonl:1: no "prompt"'),
        ('{"prompt": 3, "chosen": "a", "rejected": "b"}', "pairs.jsonl:1: the user's part is neither"),
        ("\n", "pairs.jsonl: holds no pair"),
        (
            '{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}], '
            '"rejected": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}',
            "pairs.jsonl:1: the answers are to different questions",
        ),
    ],
)
def test_bad_pairs(line: str, message: str, files: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    pairs, tokenizer = files
    pairs.write_text(line + "\n")
    command = ["pretrain", *SHAPE, *RUN[:-2], *tokenizer, "--task", "dpo", "--dpo-data", str(pairs), "--steps", "1"]
    assert main(command) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert message in said


def test_bad_flags(files: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    pairs, tokenizer = files
    base = ["pretrain", *SHAPE, *RUN[:-2], *tokenizer, "--steps", "1"]
    for flags, message in (
        (["--task", "dpo"], "--task dpo: needs --dpo-data"),
        (["--dpo-data", str(pairs), "--mock-data"], "needs --task dpo, not lm"),
        (["--task", "dpo", "--dpo-data", str(pairs), "--dpo-label-smoothing", "0.5"], "less than 0.5"),
    ):
        assert main([*base, *flags]) == 2
        assert message in capsys.readouterr().err
