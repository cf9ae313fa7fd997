"""Build the objects of a rank from a resolved config: the mesh, the stages, and the training state.

All constructors receive sections or single values of the config. They also work in a single process, without process
groups and on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mega.core.architecture import Unit, architecture, inventory, placement
from mega.core.config.check import PACKAGES
from mega.core.config.resolve import (
    MEASURED_TFLOPS,
    data_parallel,
    gathers_experts,
    no_overlap_reason,
    overlap_resumes,
    overlaps_exchanges,
    records_graph,
    shares_casts,
)
from mega.core.config.run import RunConfig
from mega.core.device import DTYPES, Device
from mega.core.family import ModelStage, family
from mega.core.model.stage import StageOptions
from mega.core.ops.suite import Ops, choose
from mega.core.optim.choose import rule_of
from mega.core.optim.optimizer import Optimizer
from mega.core.optim.scaler import LossScaler
from mega.core.parallel.collectives import first_problem
from mega.core.parallel.context import with_context_parallel
from mega.core.parallel.experts import ExpertAxes
from mega.core.parallel.gradients import GradBuffer
from mega.core.parallel.layout import shared_stages
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.peers import Peers, peers, peers_if_mapped
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.region import Region
from mega.core.parallel.replay import ReplayedPipeline
from mega.core.parallel.weight import ParameterFactory, initialise, weights
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.training.kinds import kind_of
from mega.core.training.policy import decides
from mega.core.training.state import StepOptions, TrainState


def build_mesh(run: RunConfig, rank: int, world: int, groups: Groups | None = None) -> Mesh:
    """Return the mesh of a run, for one rank of `world`."""
    parallel, dp = run.parallel, data_parallel(run, world)
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.etp}
    return Mesh(rank, dp=dp, groups=groups, **sizes)


def build_state(run: RunConfig, mesh: Mesh, device: Device, overlapped: bool | None = None) -> TrainState:
    """Build the training state of one rank, with initial values. overlapped: see `build_stages`."""
    parallel, ops = run.parallel, chosen_ops(run, device.torch)
    stages = build_stages(run, mesh, device.torch, overlapped)
    grads = build_grads(run, mesh, stages)
    if parallel.zero >= 3:
        for stage in stages:
            if not hasattr(stage, "with_full_params"):
                raise ValueError(f"--zero 3: --family {run.model.family} keeps its weights whole; valid: 0, 1, 2")
            # The stage gathers and frees the weights of each unit around its computation.
            stage.with_full_params = grads.with_full_params
    optimizer = Optimizer(
        grads,
        rule_of(run.optimizer, plain=ops.plain),
        run.optimizer.clip_grad,
        ops,
        masters=run.precision.masters,
        offload=run.optimizer.optimizer_offload,
        decays_all=run.optimizer.decay_all,
    )
    casts = WeightCasts(stages if shares_casts(run) else ())
    pipeline = Pipeline(stages, mesh, device.torch, casts)
    if device.is_cuda and records_graph(run, mesh.world):
        pipeline = ReplayedPipeline(stages, mesh, device.torch, stages[0].region.transport, casts=casts)
    model = architecture(run.model)
    options = StepOptions(
        parallel.schedule,
        parallel.chunks,
        run.batch.loss_normalizer,
        params_norm=run.log.log_params_norm,
        zeros=run.log.log_zeros,
        guarded=decides(run.guards),
        mixtures={
            number: layer.experts.count
            for number, layer in enumerate((*model.layers, *(each.layer for each in model.output.ahead)))
            if layer.experts is not None
        },
    )
    return TrainState(run, mesh, device, stages, grads, optimizer, pipeline, _scaler(run, device.torch), options)


def build_grads(run: RunConfig, mesh: Mesh, stages: list[Any]) -> GradBuffer:
    """Build the gradient buckets of one rank's stages; the weights become views of the buckets."""
    parallel, precision = run.parallel, run.precision
    return GradBuffer(
        stages,
        mesh,
        dtype=DTYPES[precision.grad_dtype],
        sequence=parallel.sequence_parallel,
        shared=shared_stages(inventory(run.model), _placement(run)),
        zero=parallel.zero,
        matrices=run.optimizer.optimizer == "muon",
        bucket_size=parallel.bucket_size,
        overlap=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
    )


def build_stages(run: RunConfig, mesh: Mesh, device: torch.device, overlapped: bool | None = None) -> list[Any]:
    """Build the model chunks of one rank, each a `ModelStage`, with initial values unless `device` is meta.

    overlapped: for a run that resumes, whether its exchanges of tensor ranks overlapped GEMMs (`overlapped_before`).
    """
    parallel, precision, memory = run.parallel, run.precision, run.memory
    factory = ParameterFactory(
        {axis.name: (axis.index, axis.size) for axis in (mesh.tp, mesh.etp)},
        DTYPES[precision.dtype],
        device,
        with_context_parallel(chosen_ops(run, device), mesh.cp, parallel.cp_comm),
        recompute=memory.recompute == "selective",
        embedding=torch.float32 if precision.embedding_fp32 else None,
    )
    region = Region(
        mesh.tp,
        sequence=parallel.sequence_parallel and mesh.tp.size > 1,
        transport=_transport(run, mesh, device, overlapped),
    )
    full = memory.recompute == "full"
    options = StageOptions(
        dropout_seed=run.runtime.seed if architecture(run.model).drops else None,
        residual=torch.float32 if precision.residual_fp32 else None,
        full_recompute=(memory.recompute_method, memory.recompute_layers) if full else (None, None),
        distribute_saved=memory.distribute_saved,
        objective=kind_of(run).objective(run),
        cp=mesh.cp,
        experts=ExpertAxes.of(mesh),
        gathers_experts=gathers_experts(run),
    )
    chunk_units: list[list[Unit]] = [[] for _ in range(parallel.chunks)]
    for unit, (stage, chunk) in _placement(run).items():
        if stage == mesh.pp.index:
            chunk_units[chunk].append(unit)
    build = family(run.model).stage
    stages: list[ModelStage] = [build(run.model, chunk, factory, region, options) for chunk in chunk_units]
    if not any(weight.requires_grad for stage in stages for weight in weights(stage)):  # type: ignore[arg-type]
        raise ValueError(f"--lora-rank {run.model.lora_rank}: --family {run.model.family} has no adapters; valid: 0")
    if device.type != "meta":
        initialise(nn.ModuleList(stages), run.runtime.seed)  # type: ignore[arg-type]
    return stages


def _transport(run: RunConfig, mesh: Mesh, device: torch.device, overlapped: bool | None) -> Peers | None:
    """Return the object through which tensor ranks exchange tokens while they compute GEMMs; None if exchanges do not
    overlap GEMMs.

    A run that resumes keeps the setting of its checkpoint, because split GEMMs and a different summation order change
    the rounding. Otherwise exchanges overlap by default only on GPUs that can map each other's memory, if the overlap
    is faster on the GPUs of all ranks.
    """
    asked = run.parallel.tp_overlap
    if asked is not None:
        overlaps = asked
    elif overlapped is not None:
        overlaps = overlap_resumes(run, overlapped)
    elif device.type == "cuda":
        overlaps = first_problem(no_overlap_reason(run, tflops16(device)), mesh.everyone, device) is None
    else:
        overlaps = device.type != "cpu" and overlaps_exchanges(run)
    if not overlaps or (mesh.tp.group is None and device.type != "meta"):
        return None
    if device.type == "cuda" and asked is None:
        return peers_if_mapped(mesh.tp, mesh.everyone, device)
    return peers(mesh.tp, device)


def tflops16(device: torch.device) -> float:
    """Return a device's peak 16-bit TFLOP/s; that of an H100 if the peak is unknown."""
    return Device(device, "").peak_tflops or MEASURED_TFLOPS


def chosen_ops(run: RunConfig, device: torch.device) -> Ops:
    """Return the implementations of ops for this run on `device`; for the meta device, those for the device on which
    the run trains."""
    precision, shapes = run.precision, device.type == "meta"
    if shapes:
        device = torch.device("cpu" if run.runtime.device == "cpu" else "cuda")
    return choose(
        device,
        DTYPES[precision.dtype],
        reference=run.runtime.ops == "reference",
        package=run.runtime.ops if run.runtime.ops in PACKAGES else None,
        fp8=precision.fp8_scaling if precision.fp8 else None,
        recompute=run.memory.recompute == "selective",
        shapes=shapes,
    )


def _placement(run: RunConfig) -> dict[Unit, tuple[int, int]]:
    parallel = run.parallel
    return placement(run.model, parallel.pp, parallel.chunks, parallel.stage_layers)


def _scaler(run: RunConfig, device: torch.device) -> LossScaler | None:
    """Return the loss scaler: constant with --loss-scale, in any precision; otherwise dynamic for fp16, and None
    for other dtypes."""
    options = run.precision
    if options.loss_scale is not None:
        return LossScaler(initial=options.loss_scale, window=None, device=device)
    if options.dtype != "fp16":
        return None
    return LossScaler(
        initial=options.initial_loss_scale,
        window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        least=options.min_loss_scale,
        device=device,
    )
