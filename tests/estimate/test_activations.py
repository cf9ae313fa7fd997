"""Activation memory held against autograd: what is saved, byte for byte, and what lives at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega.core.architecture import parameters
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve, shares_casts
from mega.core.config.run import RunConfig
from mega.core.estimate import chunks, trace
from mega.core.estimate.chunks import Chunk, stage_chunks
from mega.core.estimate.footprint import Footprint, footprint
from mega.core.estimate.weights import stage_weights, transient_buckets
from mega.core.family import synthetic_batch
from mega.core.ops.fp8 import Cast, Fp8Matmuls
from mega.core.ops.fp8_blocks import BlockMatmuls
from mega.core.ops.kernels import fp8, fp8_blocks
from mega.core.ops.matmuls import Matmuls
from mega.core.parallel import collectives, peers
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.peers import MappedPeers
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.training import wire
from mega.core.training.wire import build_grads, build_stages

SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 250, "seq_length": 96, "micro_batch": 2, "device": "cpu"}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT = {"family": "bert", "sample_kind": "bert"}
T5 = {"family": "t5", "decoder_seq_length": 40}
FEW = {"vocab": 8, "vocab_multiple": 8}
OVERLAP = {"dtype": "bf16", "tp": 2, "sequence_parallel": True, "tp_overlap": True}
FP8 = {"dtype": "bf16", "fp8": True, "ffn": 640, "vocab": 8, "vocab_multiple": 8}
"""With few words, lest all peaks be the loss's."""
HEADS = {"cp": 2, "cp_comm": "all-to-all"}
RING = {"cp": 2, "cp_comm": "ring"}
READS = {"retriever": True, "retro_chunk_length": 16, "retro_layers": (1, 2)}
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}

MAPPED = torch.zeros(1 << 20, dtype=torch.uint8)

CASES: dict[str, dict[str, Any]] = {
    "gpt": QUIET,
    "gpt bf16": {**QUIET, "dtype": "bf16"},
    "gpt fp64": {**QUIET, "dtype": "fp64"},
    "gpt with dropout": {},
    "gpt bf16 with dropout": {"dtype": "bf16"},
    "hidden dropout only": {"dtype": "bf16", "attention_dropout": 0.0},
    "one row": {"micro_batch": 1},
    "plain": {**QUIET, "ops": "reference", "dtype": "bf16"},
    "llama": {"family": "llama", "kv_heads": 2},
    "llama bf16": {"family": "llama", "dtype": "bf16"},
    "llama bf16 grouped": {"family": "llama", "kv_heads": 2, "dtype": "bf16", "ffn": 160},
    "llama plain": {"family": "llama", "ops": "reference", "dtype": "bf16"},
    "llama plain grouped, one row": {"family": "llama", "ops": "reference", "kv_heads": 2, "micro_batch": 1},
    "q and k norms": {"family": "llama", "qk_norm": True, "dtype": "bf16"},
    "relu2, no positions": {**QUIET, "activation": "relu2", "position": "none", "bias": False},
    "norm offset": {**QUIET, "norm_offset": True},
    "norms on both sides, soft caps": {
        **{"family": "llama", "norm_placement": "both", "norm_offset": True, "activation": "geglu_tanh"},
        **{"window": 8, "window_layers": (1, 0), "attention_softcap": 5.0, "logit_softcap": 5.0},
    },
    "norms after, and of projections": {
        **{"family": "llama", "norm_placement": "branch", "qk_norm": True, "qk_norm_whole": True, "dtype": "bf16"},
    },
    "parallel, of one norm": {
        **QUIET,
        **{"parallel_branches": "one-norm", "head_bias": True, "tied": False, "residual_multiplier": 0.5},
    },
    "tp 2": {**QUIET, "tp": 2, "dtype": "bf16"},
    "tp 2, sequence": {"tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "llama tp 2, sequence": {"family": "llama", "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "tp 2, sequence, again": {**QUIET, "tp": 2, "sequence_parallel": True, "recompute": "selective", "dtype": "bf16"},
    "again": {**QUIET, "recompute": "selective"},
    "llama again": {"family": "llama", "recompute": "selective", "dtype": "bf16"},
    "again with dropout": {"recompute": "selective"},
    "again plain, bf16": {**QUIET, "ops": "reference", "recompute": "selective", "dtype": "bf16"},
    "again with dropout, bf16, one row": {"recompute": "selective", "dtype": "bf16", "micro_batch": 1},
    "llama again plain": {"family": "llama", "ops": "reference", "recompute": "selective"},
    "llama again plain, grouped": {
        "family": "llama",
        "ops": "reference",
        "recompute": "selective",
        "kv_heads": 2,
        "dtype": "bf16",
    },
    "again with dropout, tp 2, sequence": {
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "selective",
        "dtype": "bf16",
    },
    "relu2 again": {**QUIET, "activation": "relu2", "bias": False, "recompute": "selective"},
    "relu2 again, bf16": {**QUIET, "activation": "relu2", "bias": False, "recompute": "selective", "dtype": "bf16"},
    "relu2 again with bias": {**QUIET, "activation": "relu2", "recompute": "selective"},
    "few words": {**QUIET, "vocab": 8, "vocab_multiple": 8, "dtype": "bf16"},
    "llama, few words": {"family": "llama", "vocab": 8, "vocab_multiple": 8, "dtype": "bf16"},
    "fp32 residual": {**QUIET, "dtype": "bf16", "residual_fp32": True},
    "fp32 residual and embedding, with dropout": {"dtype": "bf16", "residual_fp32": True, "embedding_fp32": True},
    "fp32 embedding": {**QUIET, "dtype": "bf16", "embedding_fp32": True},
    "llama, fp32 residual, tp 2, sequence, again": {
        **{"family": "llama", "tp": 2, "sequence_parallel": True, "recompute": "selective"},
        **{"dtype": "bf16", "residual_fp32": True},
    },
    "fp32 residual, pp 2": {**QUIET, "dtype": "bf16", "residual_fp32": True, "pp": 2},
    "fp8": {**FP8, **QUIET},
    "fp8, short and wide": {**FP8, **QUIET, "seq_length": 16, "hidden": 128},
    "fp8, llama": {**FP8, "family": "llama", "kv_heads": 2},
    "fp8, llama again": {**FP8, "family": "llama", "recompute": "selective"},
    "fp8, tp 2": {**FP8, **QUIET, "tp": 2},
    "fp8, tp 2, sequence": {**FP8, **QUIET, "tp": 2, "sequence_parallel": True, "seq_length": 32},
    "fp8, narrow, tp 2, sequence": {**FP8, **QUIET, "ffn": 64, "tp": 2, "sequence_parallel": True},
    "fp8, llama pp 2": {**FP8, "family": "llama", "pp": 2},
    "fp8 in blocks": {**FP8, **QUIET, "fp8_scaling": "block", "hidden": 128, "heads": 1, "seq_length": 128},
    "overlap": {**OVERLAP, **QUIET},
    "overlap, few words": {**OVERLAP, **QUIET, **FEW},
    "overlap in pieces": {**OVERLAP, **QUIET, **FEW, "layers": 2, "seq_length": 1024, "micro_batch": 1},
    "overlap, wide": {**OVERLAP, **QUIET, **FEW, "ffn": 640},
    "overlap, llama": {**OVERLAP, **FEW, "family": "llama"},
    "overlap, llama again": {**OVERLAP, **FEW, "family": "llama", "recompute": "selective"},
    "overlap, tp 4": {**OVERLAP, **QUIET, **FEW, "tp": 4},
    "documents": {"family": "llama", "dtype": "bf16", "reset_attention": True},
    "documents with dropout": {"reset_attention": True},
    "neighbours": {**QUIET, **READS, "dtype": "bf16"},
    "neighbours, llama, with dropout, again": {**READS, "family": "llama", "kv_heads": 2, "recompute": "selective"},
    "neighbours, tp 2, sequence": {**READS, "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "neighbours, pp 2": {**QUIET, **READS, "dtype": "bf16", "pp": 2},
    "by heads": {**QUIET, **HEADS, "dtype": "bf16"},
    "by heads, documents": {**HEADS, "family": "llama", "dtype": "bf16", "reset_attention": True},
    "by heads, cp 4": {**HEADS, "cp": 4, "family": "llama", "dtype": "bf16", "micro_batch": 1},
    "by heads, again": {**QUIET, **HEADS, "recompute": "selective", "dtype": "bf16"},
    "by heads, again with dropout": {**HEADS, "recompute": "selective", "dtype": "bf16"},
    "by heads, tp 2": {**QUIET, **HEADS, "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "by heads, grouped": {**HEADS, "family": "llama", "kv_heads": 2, "dtype": "bf16"},
    "by heads with dropout, bf16": {**HEADS, "dtype": "bf16"},
    "by heads, plain": {**QUIET, **HEADS, "ops": "reference", "dtype": "bf16"},
    "ring": {**QUIET, **RING, "seq_length": 384, "dtype": "bf16"},
    "ring, llama": {**RING, "family": "llama", "dtype": "bf16"},
    "ring, grouped": {**RING, "family": "llama", "kv_heads": 2, "dtype": "bf16", "cp_comm": "auto", "cp": 4},
    "ring with dropout": {**RING, "dtype": "bf16"},
    "ring with dropout, documents": {**RING, "cp": 4, "reset_attention": True},
    "ring, again": {**QUIET, **RING, "seq_length": 384, "recompute": "selective", "dtype": "bf16"},
    "ring, plain": {**QUIET, **RING, "ops": "reference"},
    "t5": {**QUIET, **T5},
    "t5 bf16": {**T5, "dtype": "bf16", "tp": 2, "sequence_parallel": True},
    "t5, split": {**T5, "dtype": "bf16", "pp": 4, "split_rank": 2},
    "t5, uneven": {**QUIET, **T5, "pp": 3, "stage_layers": (2, 3, 3)},
    "pp 2": {**QUIET, "pp": 2},
    "pp 2 bf16": {**QUIET, "pp": 2, "dtype": "bf16"},
    "llama pp 2, tp 2": {"family": "llama", "pp": 2, "tp": 2, "dtype": "bf16"},
}

AGAIN: dict[str, dict[str, Any]] = {
    "gpt": {**QUIET, **FULL},
    "gpt, two": {**QUIET, **FULL, "recompute_layers": 2},
    "gpt, three": {**QUIET, **FULL, "recompute_layers": 3, "dtype": "bf16"},
    "gpt with dropout": {**FULL, "dtype": "bf16"},
    "llama": {**FULL, "family": "llama", "dtype": "bf16"},
    "llama, two": {**FULL, "family": "llama", "dtype": "bf16", "recompute_layers": 2},
    "two of four": {**QUIET, **BLOCK, "recompute_layers": 2},
    "llama, three of four": {**BLOCK, "family": "llama", "recompute_layers": 3, "dtype": "bf16"},
    "tp 2, sequence": {**QUIET, **FULL, "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "tp 2, shared": {**QUIET, **FULL, "tp": 2, "distribute_saved": True, "dtype": "bf16"},
    "fp8": {**FP8, **QUIET, **FULL},
    "fp8, llama, two": {**FP8, **FULL, "family": "llama", "recompute_layers": 2},
    "overlap": {**OVERLAP, **QUIET, **FEW, **FULL},
    "overlap, llama, two": {**OVERLAP, **FEW, **FULL, "family": "llama", "recompute_layers": 2},
    "overlap, two of four": {**OVERLAP, **QUIET, **FEW, **BLOCK, "recompute_layers": 2},
    "pp 2": {**QUIET, **FULL, "pp": 2, "dtype": "bf16"},
    "t5": {**QUIET, **T5, **FULL, "dtype": "bf16"},
    "t5, three of four": {**QUIET, **T5, **BLOCK, "recompute_layers": 3, "dtype": "bf16"},
}
"""Blocks computed again: what is kept is exact, the peaks are within a tenth."""

SHARED: dict[str, dict[str, Any]] = {
    "gpt": {**QUIET, "zero": 2},
    "gpt bf16, small buckets": {**QUIET, "zero": 2, "dtype": "bf16", "bucket_size": 20_000},
    "llama, small buckets": {"family": "llama", "zero": 2, "bucket_size": 9_000},
    "gpt, zero 3": {**QUIET, "zero": 3},
    "llama bf16, zero 3": {"family": "llama", "zero": 3, "dtype": "bf16", "kv_heads": 2},
    "tp 2, sequence, zero 3": {**QUIET, "zero": 3, "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "llama again, zero 3": {**FULL, "family": "llama", "zero": 3},
    "t5, zero 3": {**QUIET, **T5, "zero": 3},
}
"""Gradients, and weights, that come and go."""


class Live(TorchDispatchMode):
    """Bytes of all tensors that ops have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def know(self, *tensors: torch.Tensor) -> None:
        """Tensors that are none of ours."""
        self.known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def add(self, size: int) -> None:
        """Bytes that came (or went) without an op."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.add(size)

        def gone() -> None:
            self.known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives that keep sizes and say nothing of values: one process stands for a tensor rank."""

    class Work:
        """Holds what it was given until somebody waits for it, and what it made for as long as it lives, as NCCL's."""

        def __init__(self, given: torch.Tensor | None = None, made: torch.Tensor | None = None) -> None:
            self.given, self.made = given, made

        def wait(self) -> None:
            self.given = None

    def gather(out: torch.Tensor, x: torch.Tensor, **_: Any) -> Work:
        out.zero_()
        return Work(x, out)

    def nothing(*_: Any, **__: Any) -> Work:
        return Work()

    class Copies:
        """Sees everything arrive at once."""

        def copy(self, *_: Any) -> None:
            pass

        wait = copy

    class Apart(MappedPeers):
        """Memory that all ranks map, which no allocator knows of and nobody writes to."""

        def _make(self, size: int, device: torch.device) -> None:
            self._bytes, self._memory, self._begins = size, MAPPED, [0] * self.axis.size

    monkeypatch.setattr(peers, "CopyStream", Copies)
    real = wire.peers
    monkeypatch.setattr(wire, "peers", lambda axis, on: real(axis, on) if on.type == "meta" else Apart(axis))
    monkeypatch.setattr(collectives, "_gather_into", gather)
    monkeypatch.setattr(collectives, "_scatter_sum", gather)
    monkeypatch.setattr(collectives.dist, "all_reduce", nothing)
    monkeypatch.setattr(collectives.dist, "all_to_all_single", nothing)
    monkeypatch.setattr(collectives.dist, "P2POp", nothing)
    monkeypatch.setattr(collectives.dist, "batch_isend_irecv", lambda _: [])


def batch_of(run: RunConfig) -> Any:
    rows = run.batch.micro_batch
    assert rows
    made = synthetic_batch(run, torch.arange(rows), seed=1, documents=run.data.reset_attention)
    return made.map(torch.Tensor.contiguous)


class Coming:
    """Weights that are gathered and let go count while they are here; storages that change size are no new tensors."""

    def __init__(self, live: Live, grads: GradBuffer) -> None:
        for bucket in grads.buckets:
            bucket.start_unshard = partial(self._gather, live, bucket, bucket.start_unshard)  # type: ignore[method-assign]
            bucket.reshard = partial(self._forget, live, bucket, bucket.reshard)  # type: ignore[method-assign]

    def _gather(self, live: Live, bucket: Bucket, gather: Callable[[Axis], None], axis: Axis) -> None:
        if not bucket._weights.untyped_storage().size():
            live.add(bucket._weights.nbytes)
        gather(axis)

    def _forget(self, live: Live, bucket: Bucket, forget: Callable[[], None]) -> None:
        live.add(-bucket._weights.untyped_storage().size())
        forget()


def measured(run: RunConfig, stage: int, dp: int = 1, *, shared: bool = False) -> tuple[int, int, int]:
    """Bytes held after the forward, and peaks of forward and backward, of one rank of a stage. shared: whether casts of
    weights exist already, which are none of these bytes."""
    parallel = run.parallel
    cells = parallel.tp * parallel.cp
    mesh = Mesh.at(stage * cells * dp + cells - 1, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, dp=dp)
    if parallel.tp_overlap:
        mesh.tp = replace(mesh.tp, group=object())  # type: ignore[arg-type]
    (chunk,) = build_stages(run, mesh, torch.device("cpu"))
    grads = build_grads(replace(run, parallel=replace(parallel, overlap_grad_reduce=False)), mesh, [chunk])
    batch = batch_of(run).split(mesh.cp.index, mesh.cp.size)
    live = Live()
    for bucket in grads.buckets:
        live.know(bucket.weights, bucket.own_weights, bucket.own_grads, *([] if parallel.zero > 1 else [bucket.grads]))
    live.know(MAPPED, *(t for t in vars(batch).values() if t is not None))
    if parallel.zero >= 3:
        Coming(live, grads)
        chunk.with_full_params = grads.with_full_params
        passes(chunk, mesh, grads, batch, Live())  # shows in which order weights are wanted
        grads.finish()
    casts = WeightCasts([chunk] if shared else ())
    with casts.shared():
        casts.renew()
        return passes(chunk, mesh, grads, batch, live)


def passes(chunk: Any, mesh: Mesh, grads: GradBuffer, batch: Any, live: Live) -> tuple[int, int, int]:
    """Bytes held after the forward, and peaks of forward and backward, of a step of one microbatch."""
    grads.start()
    grads.final(True)
    with live:
        shapes = [] if mesh.pp.first else chunk.cargo(batch)
        cargo = tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in shapes)
        out = chunk(batch, *cargo, scales=torch.ones(1, dtype=torch.float64))
        tensors = roots(out) if mesh.pp.last else out.cargo
        del out
        kept = sum(bucket._weights.untyped_storage().size() for bucket in grads.buckets) if grads.zero >= 3 else 0
        held, forward = live.live - kept, live.peak  # the last unit's weights stay for its backward pass
        live.peak = live.live
        given = tuple(map(torch.zeros_like, tensors))
        torch.autograd.backward(tensors, given)
    return held, forward, live.peak


def roots(out: StageOutput) -> tuple[torch.Tensor, ...]:
    return tuple(term.total if term.root is None else term.root for term in out.terms.values())


def run_of(flags: dict[str, Any], dp: int = 1) -> RunConfig:
    typed = {**SHAPE, **flags}
    return resolve(compose(flags=typed), typed.get("tp", 1) * typed.get("pp", 1) * typed.get("cp", 1) * dp)


def counted(run: RunConfig, stage: int) -> Footprint:
    (chunk,) = stage_chunks(run)[stage]
    return footprint(run, chunk)


@pytest.mark.parametrize("name", CASES)
def test_against_autograd(name: str, alone: Callable[[], None]) -> None:
    run = run_of(CASES[name])
    for stage in range(run.parallel.pp):
        found = counted(run, stage)
        held, forward, backward = measured(run, stage, shared=shares_casts(run))
        assert found.held + found.in_flight == pytest.approx(held, rel=0.002)
        assert found.forward == pytest.approx(forward, rel=0.05)
        assert found.backward == pytest.approx(backward, rel=0.05)


@pytest.mark.parametrize("name", [name for name in CASES if "fp8" in name and not CASES[name].get("recompute")])
def test_microbatches_that_share_casts(name: str, alone: Callable[[], None]) -> None:
    run = run_of(CASES[name])
    for stage in range(run.parallel.pp):
        (chunk,) = stage_chunks(run)[stage]
        found = footprint(run, chunk, repeats=True)
        held, forward, backward = measured(run, stage, shared=True)
        assert found.held == pytest.approx(held, rel=0.002)
        assert found.forward == pytest.approx(forward, rel=0.05)
        assert found.backward == pytest.approx(backward, rel=0.05)


@pytest.mark.parametrize("name", AGAIN)
def test_blocks_computed_again(name: str, alone: Callable[[], None]) -> None:
    run = run_of(AGAIN[name])
    for stage in range(run.parallel.pp):
        found = counted(run, stage)
        held, forward, backward = measured(run, stage)
        assert found.held + found.in_flight == pytest.approx(held, rel=0.006)
        assert max(found.forward, found.backward) == pytest.approx(max(forward, backward), rel=0.1)


@pytest.mark.parametrize("name", SHARED)
def test_buckets_that_come_and_go(name: str, alone: Callable[[], None]) -> None:
    run = run_of(SHARED[name], dp=2)
    (chunk,) = stage_chunks(run)[0]
    found = footprint(run, chunk, transient_buckets(run, 2))
    held, forward, backward = measured(run, 0, dp=2)
    assert found.held == pytest.approx(held, rel=0.01)
    assert max(found.forward, found.backward) == pytest.approx(max(forward, backward), rel=0.15)
    assert found.backward == pytest.approx(backward, rel=0.15)


REPEATED: dict[str, dict[str, Any]] = {
    "gpt": {**QUIET, "dtype": "bf16"},
    "gpt on a CPU, with dropout": {"device": "cpu"},
    "llama tp 2, sequence": {"family": "llama", "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "selective": {**QUIET, "recompute": "selective", "dtype": "bf16", "residual_fp32": True},
    "full": {**FULL, "dtype": "bf16"},
    "full, two": {**FULL, "recompute_layers": 2},
    "two of them": {**BLOCK, "recompute_layers": 2},
    "zero-bubble": {**QUIET, "pp": 2, "schedule": "zb-h1", "dtype": "bf16"},
    "overlap": {**OVERLAP, **QUIET},
    "ring": {**RING, "dtype": "bf16"},
    "zero 3": {**QUIET, "zero": 3},
    "a last layer of few tokens": {**BERT, "dtype": "bf16"},
    "a last layer of few tokens, full": {**BERT, **FULL, "recompute_layers": 2},
    "a last layer of few tokens, two of them": {**BERT, **BLOCK, "recompute_layers": 2},
}
MIXTURE = {"experts": 4, "experts_chosen": 2, "expert_ffn": 32, "family": "llama", "ffn": 96, "balance_loss": (0.01,)}


@pytest.mark.parametrize(
    "more", [{"experts_from": 3}, {"experts_every": 2}, {"experts_from": 1, "dense_layers": (5,), "zero": 3}], ids=str
)
def test_layers_with_experts_and_without_are_counted_each(more: dict[str, Any]) -> None:
    """A mixed model keeps what its mixtures keep in a model of mixtures, and its other layers in a dense one."""

    def held(**values: Any) -> int:
        run = run_of({"device": "cuda", "dtype": "bf16", **QUIET, **MIXTURE, "layers": 12, "vocab": 256, **values})
        ((chunk,),) = stage_chunks(run)
        return trace.trace(run, chunk).held

    run = run_of({"device": "cuda", "dtype": "bf16", **QUIET, **MIXTURE, "layers": 12, "vocab": 256, **more})
    ((chunk,),) = stage_chunks(run)
    mixtures = sum(kind.experts for kind in chunk.kinds)
    assert 0 < mixtures < 12
    dense, whole = held(experts=0, balance_loss=(0.0,), **{k: v for k, v in more.items() if k == "zero"}), held()
    assert held(**more) == pytest.approx(dense + mixtures * (whole - dense) / 12, rel=1e-3)
    weights = stage_weights(run, 1, (chunk,))
    assert weights.parameters == parameters(run.model)
    assert weights.experts == mixtures * 4 * 3 * 32 * run.model.hidden


STACKS = (  # a chunk of an encoder and a decoder
    (("embedding", "middle", "head"), (6, 5)),
    (("embedding",), (7, 0)),
    ((), (6, 0)),
    (("middle",), (0, 6)),
    (("middle", "head"), (1, 9)),
    ((), (0, 5)),
    (("head",), (0, 2)),
)


@pytest.mark.parametrize("name", REPEATED)
def test_a_few_blocks_stand_for_all(name: str) -> None:
    """What is made of the trace of a few blocks, and of chunks with other ends, is the trace of all of them."""
    run = run_of({"device": "cuda", **REPEATED[name]})
    for first, last in ((True, True), (True, False), (False, True), (False, False)):
        for blocks in (0, 1, 2, 6):
            if not (blocks or first ^ last):
                continue
            chunk = Chunk(("embedding",) * first + ("head",) * last, (blocks,))
            made = trace.trace(run, chunk)
            whole = trace._traced(*trace.reduced_run(run, chunk), 2, False)
            assert len(made.forward) == len(made.backward) == blocks + 2
            for what in ("held", "before", "in_flight", "cargo", "batch", "mapped"):
                assert getattr(made, what) == getattr(whole, what), (first, last, blocks, what)
            if run.parallel.schedule == "zb-h1":
                assert made.deferred == whole.deferred
            if run.model.family == "bert":
                assert (made.forward_work, made.backward_work) == (whole.forward_work, whole.backward_work)
            for way in ("forward", "backward"):
                # Where a part ends, two may count the last of the one and the first of the other.
                assert peak(made, way) == pytest.approx(peak(whole, way), rel=1e-12), (first, last, blocks, way)


@pytest.mark.parametrize("more", [{}, FULL, {**BLOCK, "recompute_layers": 3}, {"zero": 3}], ids=str)
def test_a_few_blocks_of_each_stack_stand_for_all(more: dict[str, Any]) -> None:
    run = run_of({"device": "cuda", "dtype": "bf16", **QUIET, **T5, **more})
    for names, stacks in STACKS:
        chunk = Chunk(names, stacks)
        made = trace.trace(run, chunk)
        whole = trace._traced(*trace.reduced_run(run, chunk), 2, False)
        assert len(made.forward) == len(made.backward) == chunk.blocks + 3
        for what in ("held", "before", "cargo", "batch"):
            assert getattr(made, what) == getattr(whole, what), (chunk, what)
        for way in ("forward", "backward"):
            assert peak(made, way) == pytest.approx(peak(whole, way), rel=1e-12), (chunk, way)


def peak(found: trace.Trace, way: str) -> int:
    live = found.before if way == "forward" else found.held + found.in_flight
    most = live
    for unit in found.forward if way == "forward" else reversed(found.backward):
        for part in unit:
            most, live = max(most, live + part.peak), live + part.change
    return most


def frugal_cast(x: torch.Tensor, dtype: torch.dtype, *, rows: bool = False, columns: bool = False, **_: object) -> Cast:
    """What a kernel's cast leaves, in nobody's numbers."""
    tall, wide = x.shape
    as_it_lies = torch.empty(tall, wide, dtype=dtype) if rows else None
    return Cast(as_it_lies, torch.empty(wide, tall, dtype=dtype) if columns else None, torch.empty(0))


def frugal_product(
    a: torch.Tensor, b: torch.Tensor, _a: torch.Tensor, _b: torch.Tensor, dtype: torch.dtype, *_: Any, **__: Any
) -> torch.Tensor:
    return torch.empty(len(a), len(b), dtype=dtype)


@pytest.mark.parametrize(("ins", "outs"), [(64, 1280), (64, 64), (640, 64)])
def test_what_fp8_kernels_take_besides(ins: int, outs: int) -> None:
    """The kernels on the meta device, against products that allocate their results alone."""
    tokens, sizes = 2 * 96, []
    for device, cast, multiply in (("cpu", frugal_cast, frugal_product), ("meta", fp8.cast, fp8.multiply)):
        matmuls = Fp8Matmuls(Matmuls(), cast=cast, multiply=multiply)
        like = torch.empty(0, dtype=torch.bfloat16, device=device)
        x, grad, weight = like.new_empty(tokens, ins), like.new_empty(tokens, outs), like.new_empty(outs, ins)
        main_grad = torch.empty(outs, ins, device=device)
        forward, backward = (trace.Live({}), trace.Live({})) if device == "meta" else (Live(), Live())
        for live in (forward, backward):
            (live.know if isinstance(live, Live) else live.ignore)(x, grad, weight, main_grad)
        with forward:
            y = matmuls.forward(x, weight)
        with backward:
            prepared = matmuls.prepare(grad)
            to_input = matmuls.dgrad(prepared, weight)
            matmuls.accumulate_wgrad(main_grad, prepared, x)
        del y, prepared, to_input
        sizes.append((forward.peak, backward.peak))
    # Besides, three inverses, and the largest magnitudes of the tensor that is cast.
    assert all(0 <= kernels - frugal <= 4 * (3 + fp8.MAXIMA) for frugal, kernels in zip(*sizes, strict=True))


def test_what_fp8_block_kernels_take_besides() -> None:
    """The kernels on the meta device: a narrow copy of each factor, its scales and the result, and nothing else."""
    matmuls = BlockMatmuls(
        Matmuls(), cast_rows=fp8_blocks.cast_rows, cast_blocks=fp8_blocks.cast_blocks, multiply=fp8_blocks.multiply
    )
    tokens, ins, outs, live = 256, 384, 640, trace.Live({})
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    x, weight = like.new_empty(tokens, ins), like.new_empty(outs, ins)
    live.ignore(x, weight)
    with live:
        y = matmuls.forward(x, weight)
    scales = 4 * (tokens * 3 + 5 * 4)  # rows of blocks of a weight begin at multiples of 4
    assert live.peak == tokens * ins + outs * ins + scales + y.nbytes


MIXED = {
    "windows": {"family": "llama", "window": 64, "window_layers": (1, 1, 0), "local_rope_base": 5000.0},
    "positions": {"family": "llama", "rope_layers": (1, 1, 1, 0)},
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_differ_are_each_what_they_are(name: str) -> None:
    """A chunk is traced by the kinds of its blocks; so its operations are those of all of them, in their order."""
    run = run_of({"device": "cuda", "dtype": "bf16", **QUIET, "pp": 2, "layers": 12, **MIXED[name]})
    for chunk in stage_chunks(run)[0] + stage_chunks(run)[1]:
        made = trace.trace(run, chunk)
        assert len(chunk.kinds) == len(made.forward) - 2 == 6
        numbers = range(6) if "embedding" in chunk.names else range(6, 12)
        assert list(chunk.kinds) == [chunks._kinds(run.model)[number] for number in numbers]
        if "embedding" in chunk.names:  # whose layers are the first ones, so that a reduced run has them
            whole = trace._traced(*trace.reduced_run(run, chunk._replace(kinds=())), 2, False)
            assert made.forward_work[1:-1] == whole.forward_work[1:-1]
            assert made.backward_work[1:-1] == whole.backward_work[1:-1]
            table = 2 * 2 * 96 * 8 * 4  # fp32 cosines and sines of 2 rows of 96 tokens, of the other positions
            assert whole.held - made.held == table * (name == "windows")
            for way in ("forward", "backward"):
                assert peak(whole, way) - peak(made, way) == pytest.approx(table * (name == "windows"), abs=1)
