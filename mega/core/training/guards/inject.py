"""Fault injection on one rank (`--inject`), to test guards, audits and restarts.

`config/faults.py` describes the faults, and this module executes them. It does not depend on the guards.

    before a step          damages weights, moments or batches; the rank sleeps, stops, or is killed; a kernel fails
    in the forward pass    damages the output of a layer
    in the backward pass   damages a gradient before the gradient is reduced
    after backward         damages the last stage's reduced gradient of a tied tensor
    in a save              raises the error of a full disk
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
from mega.core.processes.world import restart_count
from mega.core.training.state import TrainState


class Injector:
    """Executes the faults of this rank. named: names of the damaged tensors, for tests."""

    def __init__(self, state: TrainState, faults: Sequence[Fault]):
        self._state, self._faults = state, [each for each in faults if each.rank == state.mesh.rank]
        self._now: list[Fault] = []
        self.named: list[str] = []
        self._before_reduce = state.grads.before_reduce
        state.grads.before_reduce = self._reduce
        heads = {id(getattr(stage, "head", None)) for stage in state.stages}
        self._units = [unit for stage in state.stages for unit in units_of(stage) if id(unit) not in heads]
        for unit in self._units:  # prepended, so that the probes record the damaged output
            unit.register_forward_hook(self._output, prepend=True)
        for each in self._faults:
            if each.target in ("weight", "moment") and not any(self._tensors(each.target)):
                raise ValueError(f"--inject {each.kind}:{each.target}: rank {each.rank} holds no {each.target}")
            if each.target == "tied" and not self._tied():
                raise ValueError(f"--inject {each.kind}:tied: rank {each.rank} holds no tensor that other stages hold")

    def before_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Execute the faults that are due, and return this rank's microbatches, damaged by these faults."""
        self._now, damaged = [each for each in self._faults if each.due(step, each.rank)], list(batches)
        for each in self._now:
            dice = random.Random(each.seed)
            if each.target in ("weight", "moment"):
                self._element(each, dice, list(self._tensors(each.target)))
            elif each.target == "batch":
                number = dice.randrange(len(damaged))
                damaged[number] = self._batch(each, dice, damaged[number])
            elif each.kind == "sleep":
                time.sleep(each.seconds)
            elif each.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if each.kind == "kill" else signal.SIGSTOP)
            elif each.target == "device" and not restart_count():
                _failing_kernel(self._state.device.torch)
        return damaged

    def after_backward(self) -> None:
        """Damage reduced gradients, before their norm is computed."""
        for each in self._now:
            if each.target == "tied":
                self._element(each, random.Random(each.seed), self._tied()[:1])

    def before_save(self, step: int) -> None:
        """Raise the OSError that a fault injects into a save, if one is due. Called while this rank writes."""
        if any(each.target == "save" and each.due(step, each.rank) for each in self._faults):
            raise OSError(errno.ENOSPC, "no space left on device (--inject)")

    def _output(self, module: torch.nn.Module, _: object, output: object) -> object:
        """A forward hook that damages the output of one layer or embedding, each time the module runs in the step."""
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
        buckets = [bucket for bucket in tied_buckets(self._state.grads) if bucket.own_grads.numel()]
        return [(f"grads/{bucket.tied_name()}", bucket.own_grads) for bucket in buckets]

    def _tensors(self, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        state = self._state
        kinds = ("weights", "master") if target == "weight" else ("moment",)
        for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)):
            if piece.key.startswith(kinds) and piece.tensor.numel():
                yield piece.key, piece.tensor.detach()

    def _element(self, each: Fault, dice: random.Random, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Damage one element of one of the tensors."""
        name, tensor = dice.choice(tensors)
        index = tuple(dice.randrange(size) for size in tensor.shape)
        if each.kind == "ulp":  # the largest element, whose damage an update cannot round away
            index = tuple(int(i) for i in torch.unravel_index(tensor.abs().argmax(), tensor.shape))
        self.named.append(name)
        with torch.no_grad():
            if each.kind == "ulp":
                old = tensor[index].clone()
                tensor[index] = torch.nextafter(old, torch.full_like(old, math.inf))
            else:
                tensor[index] = _value(each)

    def _batch(self, each: Fault, dice: random.Random, batch: Batch) -> Batch:
        if each.kind == "spike":
            generator = torch.Generator().manual_seed(each.seed)
            labels = batch.tensors()["labels"]
            permuted = labels.flatten()[torch.randperm(labels.numel(), generator=generator)].view_as(labels)
            return replace(batch, labels=permuted)  # type: ignore[type-var]
        floats = [(name, tensor) for name, tensor in batch.tensors().items() if tensor.is_floating_point()]
        if not floats:
            raise ValueError(f"--inject {each.kind}:batch: a {type(batch).__name__} holds whole numbers only")
        name, tensor = dice.choice(floats)
        tensor = tensor.clone()
        self._element(each, dice, [(name, tensor)])
        return replace(batch, **{name: tensor})  # type: ignore[type-var]


def _value(each: Fault) -> float:
    return math.nan if each.kind == "nan" else math.inf


def _failing_kernel(device: torch.device) -> None:
    """Read beyond the end of a tensor. On a CPU this raises IndexError. On CUDA the kernel fails asynchronously, so any
    later CUDA call of this process may raise the error."""
    torch.zeros(1, device=device)[torch.full((1,), 1 << 20, device=device)]


def _poisoned(output: torch.Tensor, value: float) -> torch.Tensor:
    """Return the output with one element replaced by a NaN or an infinity."""
    mask = torch.zeros_like(output)
    mask.view(-1)[0] = value
    return output + mask


def injector(state: TrainState, texts: Iterable[str]) -> Injector | None:
    """Return the injector for `--inject`; None if this rank has no fault."""
    rank_faults = [each for each in map(fault, texts) if each.rank == state.mesh.rank]
    return Injector(state, rank_faults) if rank_faults else None
