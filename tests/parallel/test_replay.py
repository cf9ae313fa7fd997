"""Recorded microbatches: the same numbers, bit for bit, as asking for each kernel, in each layout that may be recorded.

The device's graph is a stand-in here that asks again each time; it shows what is read where, and when. Real graphs are
compared by `tests/gpu/graphs.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from mega.core.config.check import check
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated
from mega.core.device import Device, Recorder
from mega.core.ops.fp8 import Fp8Matmuls
from mega.core.ops.fp8_blocks import BlockMatmuls
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.replay import ReplayedPipeline
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 16, "heads": 2, "vocab": 64, "seq_length": 8, "micro_batch": 1, "global_batch": 6,
    "lr": 1e-2, "hidden_dropout": 0.1, "attention_dropout": 0.1, "reset_attention": True,
}  # fmt: skip
FP8: dict[str, Any] = {"dtype": "bf16", "fp8": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one, fp16": (1, {"dtype": "fp16", "initial_loss_scale": 1024.0}),
    "one, fp8": (1, FP8),
    "one, fp8 in blocks": (1, {**FP8, "fp8_scaling": "block", "hidden": 128, "seq_length": 128}),
    "one, again": (1, {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}),
    "two of data": (2, {}),
    "two of data, zero 1": (2, {"zero": 1}),
    "two of data, fp8, zero 1": (2, {**FP8, "zero": 1}),
    "two of data, one microbatch": (2, {"global_batch": 2}),
    "two of tensors": (2, {"tp": 2, "sequence_parallel": True, "tp_overlap": True}),
    "two of context": (2, {"cp": 2, "reset_attention": False, "attention_dropout": 0.0}),
}


class Again:
    """Asks once more for everything, as often as it is played. A graph reads casts of weights, and makes none."""

    made = played = alive = 0

    def __init__(self, work: Callable[[], None]):
        self._work = work
        Again.made += 1
        Again.alive += 1

    def __del__(self) -> None:
        Again.alive -= 1

    def play(self) -> None:
        with mock.patch.object(Fp8Matmuls, "cast_weight", None), mock.patch.object(BlockMatmuls, "cast_weight", None):
            self._work()
        Again.played += 1


def train(groups: Groups, rank: int, run: RunConfig, world: int) -> None:
    """Three steps each way, in turns."""
    mesh, device = build_mesh(run, rank, world, groups), Device.choose("cpu")
    plain, replayed = build_state(run, mesh, device), build_state(run, mesh, device)
    transport, casts = replayed.stages[0].region.transport, replayed.pipeline.casts
    replayed.pipeline = ReplayedPipeline(replayed.stages, mesh, device.torch, transport, Again, casts)
    addresses = set()
    Again.made = Again.played = 0
    for step in range(3):
        batches = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 6 * step)]
        one, other = (train_step(state, batches, 1e-2, 0.1) for state in (plain, replayed))
        assert torch.equal(one.loss, other.loss) and torch.equal(one.grad_norm, other.grad_norm)
        for a, b in zip(plain.grads.buckets, replayed.grads.buckets, strict=True):
            assert torch.equal(a.weights, b.weights)
        addresses.add(tuple(cast._buffers.rows[0].data_ptr() for cast in casts._casts))
    assert len(addresses) == 1 and len(addresses.pop()) == (8 if run.precision.fp8 else 0)
    asked = mesh.tokens.size > 1 and len(batches) > 1
    assert (Again.made, Again.played) == (1, 2 * (len(batches) - asked))
    for state in (plain, replayed):
        state.grads.wait_param_gather()
        state.pipeline.close()
    assert Again.alive == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_microbatches_are_those_asked_for(pool: Pool, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    pool.run(train, resolve(updated(Options(), {**TINY, **flags}), world), world, world=world)


def test_batches_with_other_tensors_have_a_graph_of_their_own() -> None:
    """Neighbours of a retriever: `found` is missing in a batch whose neighbours all exist."""
    more = {"retriever": True, "retro_chunk_length": 4, "retro_layers": (1,), "reset_attention": False}
    run = resolve(updated(Options(), {**TINY, **more}), 1)
    mesh, device = Mesh(0), Device.choose("cpu")
    plain, replayed = build_state(run, mesh, device), build_state(run, mesh, device)
    replayed.pipeline = ReplayedPipeline(replayed.stages, mesh, device.torch, None, Again)
    Again.made = Again.played = 0
    for step, complete in enumerate([(), (1, 4), (0, 1, 5)]):
        batches: list[Any] = [synthetic_batch(run, rows) for rows in own_samples(run, mesh, 6 * step)]
        batches = [replace(batch, found=None) if at in complete else batch for at, batch in enumerate(batches)]
        one, other = (train_step(state, batches, 1e-2, 0.1) for state in (plain, replayed))
        assert torch.equal(one.loss, other.loss) and torch.equal(one.grad_norm, other.grad_norm)
        for a, b in zip(plain.grads.buckets, replayed.grads.buckets, strict=True):
            assert torch.equal(a.weights, b.weights)
    assert (Again.made, Again.played) == (2, 6)
    replayed.pipeline.close()
    assert Again.alive == 0


def test_recorders_capture_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees the memory that cuBLAS uses on a stream with any graph that was captured there."""
    numbers, used = itertools.count(), list[int]()

    @contextlib.contextmanager
    def capture(graph: object, *, stream: int, **_: object) -> Iterator[None]:
        used.append(stream)
        yield

    stand_ins = {"graph": capture, "Stream": lambda: next(numbers), "CUDAGraph": object, "graph_pool_handle": object}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("mega.core.device._CaptureStream._unused", [])
    recorder, other = Recorder(), Recorder()
    graphs = [recorder(int), recorder(int), other(int)]
    assert used == [0, 0, 1]
    del recorder  # its graphs still use the stream
    graphs.append(Recorder()(int))
    assert used[3:] == [2]
    graphs.clear()  # deletes the graphs of `recorder` first, and the last recorder's graph; `other` still exists
    graphs = [Recorder()(int), Recorder()(int), other(int), Recorder()(int)]
    assert sorted(used[4:6]) == [0, 2] and used[6:] == [1, 3]


def test_on_a_cpu_nothing_is_recorded() -> None:
    """So that one command line does for both."""
    run = resolve(updated(Options(), {**TINY, "cuda_graph": True}), 1)
    assert type(build_state(run, Mesh(0), Device.choose("cpu")).pipeline) is Pipeline


def test_a_gradient_that_was_not_recorded_is_missed() -> None:
    """The stand-in can fail: a graph that is never played leaves other weights."""
    run = resolve(updated(Options(), {**TINY, "attention_dropout": 0.0}), 1)
    with mock.patch.object(Again, "play", lambda self: None), pytest.raises(AssertionError):
        train(Groups("gloo"), 0, run, 1)


def test_what_the_device_cannot_record_is_reported() -> None:
    run = resolve(updated(Options(), {**TINY, "attention_dropout": 0.0}), 1)
    refused = mock.patch.object(Again, "__init__", side_effect=RuntimeError("stream is capturing"))
    unmade = mock.patch.object(Again, "__del__", lambda self: None)
    message = pytest.raises(
        RuntimeError, match=r"--cuda-graph: this run cannot be recorded \(stream .*\); give --no-cuda-graph"
    )
    with refused, unmade, message:
        train(Groups("gloo"), 0, run, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [({"pp": 2}, "--cuda-graph: needs --pp 1"), ({"zero": 2}, "--cuda-graph: needs --zero 0 or 1")],
)
def test_what_cannot_be_recorded_is_refused(flags: dict[str, Any], message: str) -> None:
    run = updated(Options(), {**TINY, "steps": 1, "mock_data": True, "cuda_graph": True, **flags})
    with pytest.raises(ValueError, match=message):
        check(run, 2)


def test_nccl_maps_nothing_that_a_graph_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on two devices: so mapped, memory that grows in segments lets a replayed exchange wait for ever."""
    for name in ("NCCL_GRAPH_REGISTER", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that both are put back after the test
        monkeypatch.delenv(name)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.set_device"),
    ):
        Device.choose("cuda")
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
        Device.choose("cuda")
        assert os.environ["NCCL_GRAPH_REGISTER"] == "1"  # a user's word stands
