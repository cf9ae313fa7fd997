"""PyTorch's `fully_shard` as the oracle of ZeRO 2 and 3: Hugging Face's GPT-2 with our weights, trained like ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from mega.core.batch import DecoderBatch
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.weight import weights
from mega.core.processes.pool import Pool
from mega.core.proof.parity import assemble, own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_stages, build_state
from tests.model.test_transformers import from_gpt2
from tests.support.ranks import CPU
from tests.support.runs import small_run

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[hf]' in a clone)"
)

STEPS, RANKS, LR, DECAY = 3, 2, 1e-2, 0.1
VALUES: dict[str, Any] = {
    "layers": 2,
    "kv_heads": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "clip_grad": 0.0,
    "vocab_multiple": 1,
}


def steps(run: RunConfig, mesh: Mesh) -> list[list[DecoderBatch]]:
    """Each step's microbatches of this data rank: ragged weights, so that no rank's mean is the whole's."""
    return [[synthetic_batch(run, rows) for rows in own_samples(run, mesh, 8 * step)] for step in range(STEPS)]


def ours(groups: Groups, rank: int, run: RunConfig) -> list[Any]:
    """Job: train in ZeRO; this rank's weights."""
    mesh = Mesh(rank, dp=RANKS, groups=groups)
    state = build_state(run, mesh, Device.choose("cpu"))
    for batches in steps(run, mesh):
        train_step(state, batches, LR, DECAY)
    return list(state.weight_pieces(mine=False))


def theirs(_: Groups, rank: int, run: RunConfig) -> dict[str, torch.Tensor]:
    """Job: the same with fully_shard; whole weights by our names, on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    shape = {"vocab_size": 509, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 8}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **still, attn_implementation="eager"))
    model = model.double().train()
    (start,) = build_stages(run, Mesh.at(0), CPU)
    wholes = {
        segment.shard.name: segment.real(weight.detach()) for weight in weights(start) for segment in weight.segments
    }
    views = from_gpt2({name: parameter.data for name, parameter in model.named_parameters()})
    assert views.keys() == wholes.keys()
    for name, view in views.items():
        view.copy_(wholes[name])

    mesh = init_device_mesh("cpu", (RANKS,))
    comes_and_goes = run.parallel.zero == 3
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=comes_and_goes)
    fully_shard(model, mesh=mesh, reshard_after_forward=comes_and_goes)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    options = run.optimizer
    rule = torch.optim.AdamW(groups, lr=LR, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)
    for batches in steps(run, Mesh.at(rank, dp=RANKS)):
        total = torch.stack([batch.loss_weights.double().sum() for batch in batches]).sum()
        dist.all_reduce(total)
        for batch in batches:
            logits = model(batch.tokens).logits
            nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
            # fully_shard takes the mean over ranks, the loss is one sum over all.
            ((nll * batch.loss_weights.flatten().double()).sum() * RANKS / total).backward()
        rule.step()
        rule.zero_grad()
    return from_gpt2({name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("zero", [2, 3])
def test_fully_shard_trains_the_same_weights(pool: Pool, zero: int) -> None:
    """Two microbatches a step and rank, three steps of AdamW: every weight within 1e-9, far below one update."""
    run = small_run("gpt", RANKS, zero=zero, micro_batch=2, **VALUES)
    found = assemble(piece for pieces in pool.run(ours, run, world=RANKS) for piece in pieces)
    for expected in pool.run(theirs, run, world=RANKS):
        assert {f"weights/{name}" for name in expected} == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[f"weights/{name}"], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} differs")
