"""Damage of one rank on purpose, `--inject`: what the guards, audits and restarts are proven with.

Each fault is data (config/faults.py); here is what it does and when. It knows no guard.

    before a step          weights, moments and batches are damaged; the rank sleeps, is stopped, or is killed
    in its forward pass    the output of a layer
    in its backward pass   a gradient, before ranks add theirs up
    after that             the last stage's sum of a tied tensor's gradient
    in a save              the disk is full
"""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from mega.core.batch import Batch
from mega.core.config.faults import Fault, fault
from mega.core.model.residual import ResidualState
from mega.core.parallel.bucket_sums import tied_buckets
from mega.core.parallel.gradients import Bucket, units_of
from mega.core.training.state import TrainState


class Injector:
    """The faults of this rank. named: what was damaged, for tests."""

    def __init__(self, state: TrainState, faults: Sequence[Fault]):
        self._state, self._faults = state, [each for each in faults if each.rank == state.mesh.rank]
        self._now: list[Fault] = []
        self.named: list[str] = []
        self._before_reduce = state.grads.before_reduce
        state.grads.before_reduce = self._reduce
        heads = {id(getattr(stage, "head", None)) for stage in state.stages}
        self._units = [unit for stage in state.stages for unit in units_of(stage) if id(unit) not in heads]
        for unit in self._units:  # before the probes look at it
            unit.register_forward_hook(self._output, prepend=True)
        for each in self._faults:
            if each.target in ("weight", "moment") and not any(self._tensors(each.target)):
                raise ValueError(f"--inject {each.kind}:{each.target}: rank {each.rank} holds no {each.target}")
            if each.target == "tied" and not self._tied():
                raise ValueError(f"--inject {each.kind}:tied: rank {each.rank} holds no tensor that other stages hold")

    def before_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """The step's microbatches on this rank, as the faults leave them."""
        self._now, made = [each for each in self._faults if each.due(step, each.rank)], list(batches)
        for each in self._now:
            dice = random.Random(each.seed)
            if each.target in ("weight", "moment"):
                self._element(each, dice, list(self._tensors(each.target)))
            elif each.target == "batch":
                number = dice.randrange(len(made))
                made[number] = self._batch(each, dice, made[number])
            elif each.kind == "sleep":
                time.sleep(each.seconds)
            elif each.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if each.kind == "kill" else signal.SIGSTOP)
        return made

    def after_backward(self) -> None:
        """Gradients are whole; no norm has been taken."""
        for each in self._now:
            if each.target == "tied":
                self._element(each, random.Random(each.seed), self._tied()[:1])

    def before_save(self, step: int) -> None:
        """While this rank writes. Errors: OSError."""
        if any(each.target == "save" and each.due(step, each.rank) for each in self._faults):
            raise OSError(errno.ENOSPC, "no space left on device (--inject)")

    def _output(self, module: torch.nn.Module, _: object, output: object) -> object:
        """Of one layer or embedding, each time that it runs in the step."""
        for each in self._now if module.training else ():
            if each.target == "activation" and self._units[each.seed % len(self._units)] is module:
                if isinstance(output, ResidualState):
                    return output._replace(x=_poisoned(output.x, _value(each)))
                assert isinstance(output, torch.Tensor)
                return _poisoned(output, _value(each))
        return None

    def _reduce(self, bucket: Bucket) -> None:
        buckets = self._state.grads.buckets
        for each in self._now:
            if each.target == "gradient" and each.kind == "spike":
                assert bucket.grads is not None
                bucket.grads.mul_(each.x)
            elif each.target == "gradient" and buckets[each.seed % len(buckets)] is bucket:
                assert bucket.grads is not None
                weight, begin, end = random.Random(each.seed).choice(bucket.offsets)
                name = weight.segments[0].shard.name
                self._element(each, random.Random(each.seed), [(name, bucket.grads[begin:end])])
        self._before_reduce(bucket)

    def _tied(self) -> list[tuple[str, torch.Tensor]]:
        held = [bucket for bucket in tied_buckets(self._state.grads) if bucket.own_grads.numel()]
        return [(f"grads/{bucket.tied_name()}", bucket.own_grads) for bucket in held]

    def _tensors(self, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        state = self._state
        kinds = ("weights", "master") if target == "weight" else ("moment",)
        for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)):
            if piece.key.startswith(kinds) and piece.tensor.numel():
                yield piece.key, piece.tensor.detach()

    def _element(self, each: Fault, dice: random.Random, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        name, tensor = dice.choice(tensors)
        at = tuple(dice.randrange(size) for size in tensor.shape)
        if each.kind == "ulp":  # of a small number, the next update would round it away
            at = tuple(int(index) for index in torch.unravel_index(tensor.abs().argmax(), tensor.shape))
        self.named.append(name)
        with torch.no_grad():
            if each.kind == "ulp":
                old = tensor[at].clone()
                tensor[at] = torch.nextafter(old, torch.full_like(old, math.inf))
            else:
                tensor[at] = _value(each)

    def _batch(self, each: Fault, dice: random.Random, batch: Batch) -> Batch:
        if each.kind == "spike":
            generator = torch.Generator().manual_seed(each.seed)
            labels = batch.tensors()["labels"]
            mixed = labels.flatten()[torch.randperm(labels.numel(), generator=generator)].view_as(labels)
            return replace(batch, labels=mixed)  # type: ignore[type-var]
        named = [(name, tensor) for name, tensor in batch.tensors().items() if tensor.is_floating_point()]
        if not named:
            raise ValueError(f"--inject {each.kind}:batch: a {type(batch).__name__} holds whole numbers only")
        name, tensor = dice.choice(named)
        tensor = tensor.clone()
        self._element(each, dice, [(name, tensor)])
        return replace(batch, **{name: tensor})  # type: ignore[type-var]


def _value(each: Fault) -> float:
    return math.nan if each.kind == "nan" else math.inf


def _poisoned(output: torch.Tensor, value: float) -> torch.Tensor:
    """The same with one broken number."""
    mask = torch.zeros_like(output)
    mask.view(-1)[0] = value
    return output + mask


def injector(state: TrainState, texts: Iterable[str]) -> Injector | None:
    """Of `--inject`; None where this rank has no fault."""
    mine = [each for each in map(fault, texts) if each.rank == state.mesh.rank]
    return Injector(state, mine) if mine else None
