"""Finetuning on conversations: packed as unpacked, whatever the micro batch; a small model learns to end its turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.api.training import from_weights, with_stored_options
from mega.cli import main
from mega.core.batch import DecoderBatch
from mega.core.checkpoint.forms.open import open_weights
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import locate
from mega.core.config.run import Options, RunConfig, updated
from mega.core.data.chat import ChatDataset
from mega.core.device import Device
from mega.core.inference.generation.generate import logits
from mega.core.inference.loading.load import load_model
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import Snapshot, assemble, compare, own_samples, within
from mega.core.text.build import build
from mega.core.text.chat.templates import template_text
from mega.core.training.start.untrained import untrained_tokens
from mega.core.training.step import backward, means
from mega.core.training.wire import build_mesh, build_state
from tests.data.test_chat import with_im
from tests.support.runs import small_run

LENGTHS = (5, 9, 3, 11, 4, 7, 2, 6)


def dataset(packed: list[list[int]], seq_length: int) -> ChatDataset:
    """Conversations of `LENGTHS` tokens, their second half trained, as rows of the given members."""
    generator, offsets = np.random.default_rng(1), np.concatenate([[0], np.cumsum(LENGTHS)])
    trained = np.concatenate([np.arange(size) >= size // 2 for size in LENGTHS])
    arrays: dict[str, Any] = {
        "ids": generator.integers(509, size=offsets[-1]).astype(np.int32),
        "trained": trained,
        "offsets": offsets,
        "members": np.array([member for row in packed for member in row]),
        "rows": np.concatenate([[0], np.cumsum([len(row) for row in packed])]),
    }
    return ChatDataset(arrays, seq_length, 0)


def stepped(rows: ChatDataset, micro_batch: int, model: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    count = len(rows)
    run = small_run(model, layers=2, hidden_dropout=0.0, attention_dropout=0.0, micro_batch=micro_batch)
    state = build_state(run, build_mesh(run, 0, 1), Device.choose("cpu"))
    batches: list[DecoderBatch] = [
        rows.collate([rows[at] for at in range(first, min(first + micro_batch, count))], first)
        for first in range(0, count, micro_batch)
    ]
    sums = backward(state, batches)
    return sums, {piece.key: piece.tensor.detach().clone() for piece in state.gradient_pieces()}


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_packed_is_unpacked_whatever_the_micro_batch(model: str) -> None:
    """A microbatch's share of the loss is its share of trained tokens, which differ from row to row."""
    alone = [[member] for member in range(len(LENGTHS))]
    sums, gradients = stepped(dataset(alone, 12), 8, model)
    for rows, length, micro_batch in ((alone, 12, 1), (alone, 12, 3), ([[1, 2], [0, 4, 6], [3], [5, 7]], 16, 2)):
        others, theirs = stepped(dataset(rows, length), micro_batch, model)
        torch.testing.assert_close(others, sums, rtol=1e-12, atol=0)
        scale = max(float(each.abs().max()) for each in gradients.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-10, atol=1e-13 * scale)


PACKED = [[1, 2], [0, 4, 6], [3], [5, 7]]


def trained(groups: Groups, rank: int, run: RunConfig, world: int) -> tuple[float, float, list[Piece]]:
    """Job of one rank: a step over packed rows; loss, gradient norm and this rank's pieces."""
    mesh, rows = build_mesh(run, rank, world, groups), dataset(PACKED, 16)
    state = build_state(run, mesh, Device.choose("cpu", rank))
    own = [samples.tolist() for samples in own_samples(run, mesh, 0)]
    sums = backward(state, [rows.collate([rows[at] for at in numbers], numbers[0]) for numbers in own])
    pieces = [Piece(p.key, p.whole, p.start, p.tensor.detach().clone()) for p in state.gradient_pieces()]
    norm = float(state.optimizer.step(1e-3, 0.0).grad_norm)
    state.grads.wait_param_gather()
    return float(means(state, sums)[0]), norm, pieces


def snapshot(pool: Pool, world: int, **layout: Any) -> list[Snapshot]:
    ranks = pool.run(trained, small_run("llama", world, layers=2, global_batch=4, **layout), world, world=world)
    return [Snapshot(*ranks[0][:2], assemble(piece for _, _, pieces in ranks for piece in pieces))]


def test_packed_rows_train_the_same_in_every_layout(pool: Pool) -> None:
    reference = snapshot(pool, 1)
    for world, layout in ((4, {"tp": 2, "pp": 2, "sequence_parallel": True}), (2, {"cp": 2})):
        (difference,) = compare("fp64", (1,), reference, snapshot(pool, world, **layout))
        assert within("fp64", difference), (layout, difference)


def test_it_learns_to_end_its_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_im(tmp_path)
    talks = [{"prompt": f"say {a} {b}", "completion": f"{a}{b}"} for a in "abcdefgh" for b in "12345678"]
    data, save = tmp_path / "talks.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    flags = (
        f"--layers 2 --hidden 64 --heads 4 --seq-length 96 --hidden-dropout 0 --attention-dropout 0 --global-batch 8 "
        f"--micro-batch 8 --steps 40 --lr 5e-3 --lr-warmup-steps 5 --eval-iters 0 --save-interval 40 --device cpu "
        f"--chat-data {data} --chat-template chatml --save {save} --tokenizer HuggingFaceTokenizer "
        f"--tokenizer-model {tmp_path}"
    )
    assert main(["pretrain", *flags.split()]) == 0
    assert "⟦" in (said := capsys.readouterr().out) and "<|im_end|>⟧" in said, "a sample is shown"
    assert "conversations by the template chatml\n" in said
    tokenizer, stage = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path), load_model(locate(save))
    end, ended = tokenizer.control("<|im_end|>"), 0
    start = tokenizer.control("<|im_start|>")
    assert start is not None and end is not None
    for talk in talks[::4]:
        prompt = [start, *tokenizer.encode(f"user\n{talk['prompt']}"), end, *tokenizer.encode("\n"), start]
        prompt += tokenizer.encode("assistant\n")
        for _ in range(12):
            prompt.append(int(logits(stage, torch.tensor([prompt]))[0, -1].argmax()))
            if prompt[-1] == end:
                break
        ended += prompt[-1] == end
    assert ended >= 0.95 * len(talks[::4]), f"{ended} of {len(talks[::4])}"


def base_of(place: Path, rows: dict[str, torch.Tensor], head: dict[str, torch.Tensor] | None = None) -> str:
    """A model of Hugging Face's form with the tokenizer of `with_im`, and given rows in its embedding and its head."""
    tokenizer = with_im(place)
    golden = Path(__file__).resolve().parents[1] / "golden" / "hf"
    tensors, config = load_file(golden / "model.safetensors"), json.loads((golden / "config.json").read_text())
    for name, changes in (("model.embed_tokens.weight", rows), ("lm_head.weight", head or {})):
        table = torch.randn(tokenizer.vocab_size, 16, generator=torch.Generator().manual_seed(len(name)))
        for token, row in changes.items():
            table[tokenizer.control(token)] = row
        tensors[name] = table.to(tensors[name].dtype)
    save_file(tensors, place / "model.safetensors")
    more = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64}
    (place / "config.json").write_text(json.dumps({**config, **more}))
    return str(place)


START, END = "<|im_start|>", "<|im_end|>"
NOISE = torch.randn(16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("rows", "head", "words"),
    [
        ({}, {}, None),
        ({START: NOISE, END: 0.1 * NOISE}, {}, None),
        ({START: torch.zeros(16)}, {}, f"{START}, whose rows in the embedding"),
        ({START: 1e-3 * NOISE, END: 2e-3 * NOISE}, {END: torch.zeros(16)}, f"{START}, {END}, whose rows in the embed"),
        ({}, {START: NOISE, END: NOISE}, f"{START}, {END}, whose rows in the head"),
        ({END: torch.zeros(16)}, {START: torch.zeros(16)}, f"{END}, {START}, whose rows in the embedding and the head"),
    ],
)
def test_control_tokens_that_the_base_of_adapters_has_not_seen_are_named(
    rows: dict[str, torch.Tensor], head: dict[str, torch.Tensor], words: str | None, tmp_path: Path
) -> None:
    base, talks = (
        open_weights(base_of(tmp_path, rows, head)),
        {"chat_data": ("talks.jsonl",), "chat_template": "chatml"},
    )
    tokenizer = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path)

    def line(**values: Any) -> str | None:
        return untrained_tokens(small_run("llama", **values), tokenizer, base)

    found = line(**talks, lora_rank=2)
    assert found is None if words is None else found is not None and f"was not trained on {words}" in found
    assert line(**talks) is None and line(lora_rank=2) is None, "of runs that train these rows, or do not use them"


def test_a_run_says_so_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks, base = tmp_path / "talks.jsonl", base_of(tmp_path, {START: torch.zeros(16)})
    talks.write_text('{"prompt": "a", "completion": "b"}\n')
    flags = "--lora-rank 2 --seq-length 64 --micro-batch 1 --steps 1 --lr 1e-3 --eval-iters 0 --device cpu"
    chat = ["--chat-data", str(talks), "--chat-template", "chatml", "--metrics", str(tmp_path / "m.jsonl")]
    assert main(["finetune", "--load", base, *flags.split(), *chat]) == 0
    said = capsys.readouterr().out
    line = f"--chat-template chatml: {base} was not trained on {START}, whose rows in the embedding are zero or equal"
    assert said.index(line) < said.index("step 1/1")


def test_the_template_of_the_weights_is_asked_for_by_name(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    shutil.copytree(Path(__file__).resolve().parents[1] / "golden" / "hf", tmp_path / "hf")
    begins = {"load": str(tmp_path / "hf"), "chat_data": ("talks.jsonl",)}
    notes: list[str] = []

    def chosen(name: str) -> str:
        run = updated(Options(), {**begins, "chat_template": name})
        return with_stored_options(from_weights(run), notes.append).data.chat_template

    with pytest.raises(ValueError, match=r"--chat-template model: nothing at .*hf says what its conversations"):
        chosen("model")
    config = tmp_path / "hf" / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": source}]}))
    assert chosen("model") == str(config) and template_text(str(config)) == source
    file = tmp_path / "hf" / "chat_template.jinja"
    file.write_text(source)
    assert chosen("model") == chosen(str(file)) == str(file)
    assert notes == []
    assert chosen("plain") == "plain"
    assert notes == [
        f"--chat-template plain: {tmp_path / 'hf'} has another of its own; --chat-template model goes by it"
    ]
