"""From a resolved config to a rank's place in the mesh and its stages there.

Also of ranks that do not exist: without groups, on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mega.core.config.check import PACKAGES
from mega.core.config.resolve import data_parallel
from mega.core.config.run import RunConfig
from mega.core.device import DTYPES
from mega.core.model.decoder import DecoderStage
from mega.core.ops.suite import Ops, choose
from mega.core.parallel.context import with_context_parallel
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.peers import peers
from mega.core.parallel.weight import Maker, Weight, initialise
from mega.core.plan import stage_layers


def build_mesh(run: RunConfig, rank: int, world: int, groups: Groups | None = None) -> Mesh:
    """The layout of a run as one rank of `world` sees it."""
    parallel, dp = run.parallel, data_parallel(run, world)
    return Mesh(rank, tp=parallel.tp, cp=parallel.cp, dp=dp, pp=parallel.pp, groups=groups)


def chosen_ops(run: RunConfig, device: torch.device) -> Ops:
    """What this run computes with on `device`."""
    precision = run.precision
    return choose(
        device,
        DTYPES[precision.dtype],
        reference=run.runtime.ops == "reference",
        package=run.runtime.ops if run.runtime.ops in PACKAGES else None,
        fp8=precision.fp8,
        recompute=run.memory.recompute == "selective",
    )


def build_stages(run: RunConfig, mesh: Mesh, device: torch.device) -> list[DecoderStage]:
    """The model chunks of one rank, with their initial values unless `device` is meta."""
    model, parallel = run.model, run.parallel
    assert model.layers is not None
    tp = mesh.tp
    if parallel.tp_overlap and tp.group is not None:
        tp = replace(tp, peers=peers(tp, device))
    coordinates = {"tp": (tp.index, tp.size)}
    make = Maker(
        coordinates,
        DTYPES[run.precision.dtype],
        device,
        with_context_parallel(chosen_ops(run, device), mesh.cp, parallel.cp_comm),
        again=run.memory.recompute == "selective",
        embedding=torch.float32 if run.precision.embedding_fp32 else None,
    )
    layers = stage_layers(model.layers, mesh.pp.size, parallel.chunks, parallel.stage_layers)[mesh.pp.index]
    drops = bool(model.hidden_dropout or model.attention_dropout)
    stages: list[DecoderStage] = []
    shared: Weight | None = None
    for chunk, blocks in enumerate(layers):
        first = mesh.pp.first and chunk == 0
        last = mesh.pp.last and chunk == parallel.chunks - 1
        stage = DecoderStage(
            model,
            blocks,
            make,
            tp,
            first=first,
            last=last,
            sequence=parallel.sequence_parallel,
            dropout_seed=run.runtime.seed if drops else None,
            embedding=shared,
            recompute=run.memory,
            residual=torch.float32 if run.precision.residual_fp32 else None,
        )
        if stage.embedding is not None and model.tied:
            shared = stage.embedding.tokens.weight
        stages.append(stage)
    if device.type != "meta":
        initialise(nn.ModuleList(stages), run.runtime.seed)
    return stages
