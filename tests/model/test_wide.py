"""The fp32 residual stream and fp32 embeddings of 16-bit models: what is wide, and that it is worth it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega.core.architecture import inventory
from mega.core.batch import DecoderBatch
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import Snapshot, snapshots, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_stages, build_state
from tests.support.ranks import CPU
from tests.support.runs import small_run

WIDE: dict[str, Any] = {"residual_fp32": True, "embedding_fp32": True}


def stage_of(**values: Any) -> tuple[RunConfig, DecoderStage]:
    run = small_run(hidden_dropout=0.0, attention_dropout=0.0, **values)
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    return run, stage.eval()


def before_head(stage: DecoderStage, batch: DecoderBatch) -> torch.Tensor:
    """What a stage without a head would hand on, [tokens, h]. The stage has none afterwards."""
    stage.head = None
    return stage(batch).cargo[0]


def error(**values: Any) -> float:
    """Root mean square distance of a bf16 model's last stream from that of the same weights in fp64."""
    run, stage = stage_of(layers=16, dtype="bf16", **values)
    _, exact = stage_of(layers=16)
    with torch.no_grad():
        for mine, theirs in zip(weights(stage), weights(exact), strict=True):
            mine.copy_(mine * 8 if mine.dim() > 1 else mine)  # branches as large as the stream
            mine.copy_(mine.to(torch.bfloat16))
            theirs.copy_(mine)
        batch = synthetic_batch(run, torch.arange(4))
        found, expected = before_head(stage, batch).double(), before_head(exact, batch)
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def test_a_wide_stream_loses_less() -> None:
    """Sixteen blocks: every sum is rounded to bf16, or none is."""
    narrow, wide = error(), error(residual_fp32=True)
    assert wide < 0.8 * narrow


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_what_is_wide(model: str) -> None:
    """The stream that stages hand on; the tables in front; nothing else."""
    run, stage = stage_of(model=model, dtype="bf16", **WIDE)
    batch = synthetic_batch(run, torch.arange(2))
    assert stage.cargo(batch) == [((batch.tokens.numel(), 32), torch.float32)]
    assert stage(batch, outputs=True).outputs.dtype == torch.bfloat16
    tables = {tensor.name for tensor in inventory(run.model) if "embedding" in tensor.units}
    for weight in weights(stage):
        wide = weight.segments[0].shard.name in tables
        assert weight.dtype == (torch.float32 if wide else torch.bfloat16)


def test_computed_again_is_the_same(pool: Pool) -> None:
    """Bit for bit, also over tensor ranks and stages."""
    layout = {"tp": 2, "pp": 2, "sequence_parallel": True, "dtype": "bf16", "global_batch": 4, **WIDE}
    kept = snapshots(pool, small_run("gpt", 4, **layout), 4, (2,))[0]
    for again in ({"recompute": "selective"}, {"recompute": "full", "recompute_method": "uniform"}):
        computed = snapshots(pool, small_run("gpt", 4, **layout, **again, recompute_layers=1), 4, (2,))[0]
        assert kept.loss == computed.loss and kept.grad_norm == computed.grad_norm, again


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[Snapshot]:
    return snapshots(pool, small_run(dtype="bf16", **WIDE), 1, (1, 3))


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "sequence_parallel": True}, {"zero": 3}, {"zero": 1}])
def test_layouts_agree_as_bf16_does(pool: Pool, alone: list[Snapshot], layout: dict[str, Any]) -> None:
    """A tied fp32 table on two stages, cut over tensor ranks, and owned in spans."""
    other = snapshots(pool, small_run("gpt", 2, dtype="bf16", **WIDE, **layout), 2, (1, 3))
    for mine, theirs in zip(alone, other, strict=True):
        # 1/16 of bf16's epsilon: logits are rounded on their own, and a loss is the mean over many tokens.
        assert theirs.loss == pytest.approx(mine.loss, rel=torch.finfo(torch.bfloat16).eps / 16)
        assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=2e-2)


def test_wide_tables_are_their_own_masters() -> None:
    run = small_run(dtype="bf16", micro_batch=8, **WIDE)
    state = build_state(run, Mesh.at(0), Device(CPU, "gloo"))
    for owned in state.optimizer.shards:
        assert owned.has_master == (owned.bucket.weights.dtype == torch.bfloat16)
    keys = {piece.key for piece in state.optimizer_pieces(mine=True)}
    assert "master/model.embed_tokens.weight" not in keys and "master/model.norm.weight" in keys
    before = state.stages[0].embedding.tokens.weight.clone()  # type: ignore[union-attr]
    train_step(state, [synthetic_batch(run, torch.arange(8))], 1e-7, 0.0)
    after = state.stages[0].embedding.tokens.weight  # type: ignore[union-attr]
    assert 0 < float((after - before).detach().abs().max()) < 3e-7, "a step far below bf16's resolution"
