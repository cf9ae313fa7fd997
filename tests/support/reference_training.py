"""Training loops of transformers and peft, written out with torch.optim.AdamW: what `mega finetune` is compared with.

A `Recipe` is both mega's flags and the loop's settings. A loop is given a model of transformers, a loss for each step,
and keeps losses, gradient norms, rates and final weights; `difference` compares them with what a run of mega reported
and exported. It uses nothing of mega but, in `inputs`, its own datasets, which say what each step reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

Tensors = dict[str, torch.Tensor]
Ids = list[int]
Talk = list[tuple[str, str]]
"""Roles and what they say."""
IGNORED = -100
"""transformers' label of what is not trained."""
FP32 = {"first": 2e-6, "loss": 2e-6, "norm": 5e-6, "rate": 1e-12, "weights": 1e-4, "tensor": 1e-3}
SUMS = FP32 | {"loss": 1e-5, "norm": 1e-5}
"""Bounds of `difference`, explained in tests/battery/reference_training.py; SUMS: of preferences."""
LINEARS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
"""Of a Llama's blocks."""


@dataclass(frozen=True)
class Recipe:
    """One finetuning. decays: which tensors do, of name and tensor. late: steps by which the rate lags behind."""

    steps: int
    batch: int
    lr: float = 1e-3
    warmup: int = 3
    style: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    decays: Callable[[str, torch.Tensor], bool] = lambda name, tensor: tensor.dim() > 1
    late: int = 0

    @property
    def flags(self) -> list[str]:
        line = (
            f"--global-batch {self.batch} --lr {self.lr} --lr-warmup-steps {self.warmup} --lr-decay {self.style} "
            f"--min-lr 0 --adam-beta1 {self.betas[0]} --adam-beta2 {self.betas[1]} --adam-eps {self.eps} "
            f"--weight-decay {self.decay} --clip-grad {self.clip} --steps {self.steps} --eval-iters 0 --device cpu"
        )
        return line.split()

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """transformers' own."""
        from transformers import optimization

        made = getattr(optimization, f"get_{self.style}_schedule_with_warmup")
        return made(optimizer, num_warmup_steps=self.warmup + self.late, num_training_steps=self.steps + self.late)

    def but(self, **values: Any) -> Recipe:
        return replace(self, **values)


def opened(place: Path) -> Any:
    """A model of transformers, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)


@dataclass
class Trajectory:
    """A training: a number of each for every step, and tensors by transformers' names."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    first: Tensors
    last: Tensors


def train(model: Any, recipe: Recipe, loss_of: Callable[[Any, int], torch.Tensor]) -> Trajectory:
    """`recipe` on the trainable parameters of a model. loss_of: model and step -> the mean loss of a global batch."""
    model.train()
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = [
        {"params": [each for name, each in named.items() if recipe.decays(name, each) == decays], "weight_decay": decay}
        for decays, decay in ((True, recipe.decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    schedule = recipe.schedule(optimizer)
    found = Trajectory([], [], [], _copied(named), {})
    for step in range(recipe.steps):
        loss = loss_of(model, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip)
        found.losses.append(float(loss.detach()))
        found.norms.append(float(norm))
        found.rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    found.last = _copied(named)
    return found


def _copied(named: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: each.detach().clone() for name, each in named.items()}


def metrics(save: Path) -> list[dict[str, float]]:
    """What a run of mega reported of each step."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "lr" in row]


def difference(theirs: Trajectory, save: Path, exported: Path) -> dict[str, float]:
    """How far a run of mega is from a loop, relative: its metrics under `save`, its final weights in `exported`.

    first: the loss of step 1. loss, norm, rate: the worst of all steps. weights: norm of what differs in all tensors,
    by the norm of what training changed. tensor: the worst of one tensor, likewise; one that hardly changed (a key's
    bias, whose gradient is rounding) is held against a hundredth of the whole change.
    """
    rows = metrics(save)
    ours: Tensors = load_file(exported)
    assert len(rows) == len(theirs.losses), (len(rows), len(theirs.losses))
    absent = sorted(theirs.last.keys() - ours.keys())
    assert not absent, f"not exported: {absent[:3]}"
    off = [float((ours[name].double() - last.double()).norm()) for name, last in theirs.last.items()]
    moved = [float((last.double() - theirs.first[name].double()).norm()) for name, last in theirs.last.items()]
    way = math.hypot(*moved)
    losses = [abs(row["loss"] / loss - 1) for row, loss in zip(rows, theirs.losses, strict=True)]
    pairs = zip(rows, theirs.norms, theirs.rates, strict=True)
    others = [(abs(row["grad_norm"] / norm - 1), abs(row["lr"] - rate)) for row, norm, rate in pairs]
    return {
        "first": losses[0],
        "loss": max(losses),
        "norm": max(norm for norm, _ in others),
        "rate": max(rate for _, rate in others) / max(theirs.rates),
        "weights": math.hypot(*off) / way,
        "tensor": max(differs / max(each, way / 100) for differs, each in zip(off, moved, strict=True)),
    }


# What each step reads, and its loss


def inputs(save: Path) -> Any:
    """The dataset of a run that has been saved: its samples, in the order in which they are read."""
    from mega.core.config.toml import parse
    from mega.core.training.start.inputs import ResolvedRun, open_inputs

    step = max(save.glob("step-*"))
    return open_inputs(ResolvedRun(parse((step / "run.toml").read_text()))).datasets.train


def token_loss(model: Any, rows: Sequence[tuple[Ids, Ids]], *, by_row: bool = False) -> torch.Tensor:
    """Mean over the trained tokens of some rows, each ids and labels, padded on the right. by_row: of each row's."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for _, row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nll = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
    counts = (labels[:, 1:] != IGNORED).sum(1)
    if by_row:
        return (nll.sum(1) / counts.clamp(min=1)).mean()
    return nll.sum() / counts.sum()


def documents(row: Ids, end: int) -> list[Ids]:
    """A row's documents, each with the `end` that ends it; without those of one token, which predict nothing."""
    found: list[Ids] = [[]]
    for token in row:
        found[-1].append(token)
        if token == end:
            found.append([])
    return [each for each in found if len(each) > 1]


def conversations_in(row: Any) -> list[Ids]:
    """The ids of each conversation of a packed row, without what fills it; the last may lack its last id."""
    found: dict[int, Ids] = {}
    for token, document in zip(row.tokens.tolist(), row.documents.tolist(), strict=True):
        found.setdefault(document, []).append(token)
    return list(found.values())


def matching(piece: Ids, known: Sequence[Ids]) -> int | None:
    """Which of `known` begins with a piece that may lack its end by one id; None where none does."""
    found = [at for at, ids in enumerate(known) if 0 <= len(ids) - len(piece) <= 1 and ids[: len(piece)] == piece]
    return found[0] if found else None


def conversation_batches(data: Any, known: Sequence[tuple[Ids, Ids]], recipe: Recipe) -> list[list[tuple[Ids, Ids]]]:
    """The conversations of each step, one a row, with ids and labels of our own making. known: all of them."""
    texts, batches, filled = [ids for ids, _ in known], [], 0
    for step in range(recipe.steps):
        members = []
        for sample in range(step * recipe.batch, (step + 1) * recipe.batch):
            pieces = conversations_in(data[sample])
            numbers = [matching(piece, texts) for piece in pieces]
            filled += numbers[-1] is None
            assert None not in numbers[:-1], "a conversation is not what the template says"
            assert numbers[-1] is not None or len(set(pieces[-1])) == 1, "what fills a row is more than padding"
            members += [number for number in numbers if number is not None]
        batches.append([known[number] for number in members])
    assert filled, "no row is ragged"
    assert sum(map(len, batches)) > 1.5 * recipe.steps * recipe.batch, "hardly anything is packed"
    return batches


def as_chatml(talk: Talk, tokenizer: Path) -> tuple[Ids, Ids]:
    """Ids and labels of a conversation, rendered as one text by ChatML: trained is what lies from an assistant's words
    to its <|im_end|>. tokenizer: a tokenizer.json with both marks."""
    from tokenizers import Tokenizer

    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in talk)
    spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]
    found = Tokenizer.from_file(str(tokenizer)).encode(text)
    kept = [any(first <= begin and end <= last for first, last in spans) for begin, end in found.offsets]
    return found.ids, [token if keep else IGNORED for token, keep in zip(found.ids, kept, strict=True)]


def adapted(model: Any, first: Path, **config: Any) -> Any:
    """A model with peft's adapter, which begins with the values in the file `first`. config: of LoraConfig."""
    import peft

    held = load_file(first)
    ups = [each for name, each in held.items() if "lora_B" in name]
    linears = sum(name.split(".")[-1] in config["target_modules"] for name, _ in model.named_modules())
    assert len(held) == 2 * len(ups) == 2 * linears and not any(bool(each.any()) for each in ups)
    found = peft.get_peft_model(model, peft.LoraConfig(lora_dropout=0.0, **config))
    peft.set_peft_model_state_dict(found, held)
    return found


def saved_names(found: Trajectory) -> Trajectory:
    """With tensors by the names that peft saves them under."""
    found.first, found.last = (
        {name.replace(".default.", "."): each for name, each in held.items()} for held in (found.first, found.last)
    )
    return found


def row_log_probability(model: Any, rows: Sequence[tuple[Ids, Ids]], *, mean: bool = False) -> torch.Tensor:
    """[rows]: sum of the log-probabilities of the trained tokens of each row, run alone. mean: over them."""
    found = []
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        wanted = torch.tensor(labels[1:])
        kept = wanted != IGNORED
        chosen = logits[kept].gather(1, wanted[kept, None])
        found.append(chosen.mean() if mean else chosen.sum())
    return torch.stack(found)


def preference_loss(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], beta: float, smoothing: float
) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7, with the smoothing of Mitchell 2023. ours, theirs: log-probabilities of the
    chosen and the rejected answers under the policy and the reference."""
    margin = beta * ((ours[0] - theirs[0]) - (ours[1] - theirs[1]))
    return (F.softplus(-margin) * (1 - smoothing) + F.softplus(margin) * smoothing).mean()
