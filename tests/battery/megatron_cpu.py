"""Run a training program of Megatron-LM 23.06 itself on a CPU, with gloo, and record each step in full precision.

    python megatron_cpu.py CHECKOUT STEPS.jsonl pretrain_bert.py --num-layers 2 ...

CHECKOUT is a checkout of NVIDIA/Megatron-LM at the tag 23.06. Nothing in it is changed: torch.cuda is given CPU
functions, apex's norm, Adam and multi-tensor functions are written in torch, and `train` first saves the initial
weights under --save as iteration 0, for mega to start from. STEPS.jsonl gets a line per step: loss, norm.
With FUSED_SOFTMAX=1 the softmax treats wholly masked rows as the CUDA kernel of bf16 and fp16 does. With
WHOLE_HEAD_BIAS=1 the bias of T5's head, cut over tensor ranks, is marked as that, which `T5LMHead` fails to do: without
it the norm of all gradients leaves out that bias on every tensor rank but the first.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # before torch.cuda is changed: it lists its functions
from torch.nn import functional as F

CPU = torch.device("cpu")


def no_op(*arguments: Any, **named: Any) -> Any:
    return None


def load(name: str) -> Any:
    return importlib.import_module(name)


def module(name: str, **members: Any) -> Any:
    made: Any = types.ModuleType(name)
    for key, value in members.items():
        setattr(made, key, value)
    sys.modules[name] = made
    return made


def cuda_on_the_cpu() -> None:
    """torch.cuda's functions that Megatron-LM calls, for one CPU device."""
    cuda: Any = torch.cuda
    kinds = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte")
    for kind in kinds:
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    for name in ("synchronize", "empty_cache", "manual_seed", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, no_op)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state, cuda.set_rng_state = (lambda *a: torch.get_rng_state()), (lambda s, *a: torch.set_rng_state(s))
    cuda.is_available, cuda.current_device, cuda.device_count = (lambda: True), (lambda: CPU), (lambda: 1)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *a: 0)
    cuda.memory_stats = lambda *a: {}
    same: Callable[..., Any] = lambda self, *a, **k: self  # noqa: E731
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = same
    module_class: Any = torch.nn.Module
    module_class.cuda = same
    plain = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *a: Any, **k: Any) -> Any:
        return plain(self).replace("torch.", "torch.cuda.") if dtype is None else plain(self, dtype, *a, **k)

    tensor_class.type = named
    for name in ("_jit_set_nvfuser_enabled", "_jit_set_texpr_fuser_enabled"):
        setattr(torch._C, name, no_op)


class LayerNormFunction:
    """apex's affine layer norm."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)


class Adam(torch.optim.AdamW):
    """apex's FusedAdam, whose weight decay is decoupled."""


def apex() -> None:
    def apply(operation: Callable[..., Any], buffer: Any, lists: Any, *rest: Any) -> Any:
        return operation(buffer, lists, *rest)

    def norm(buffer: Any, lists: Any, per_tensor: bool) -> Any:
        return torch.sqrt(sum((tensor.float() ** 2).sum() for tensor in lists[0])), None

    def scale(buffer: Any, lists: Any, factor: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    module("apex")
    module("apex.optimizers", FusedAdam=Adam, FusedSGD=torch.optim.SGD)
    module("apex.multi_tensor_apply", multi_tensor_applier=apply)
    module("amp_C", multi_tensor_l2norm=norm, multi_tensor_scale=scale)
    module("fused_layer_norm_cuda")
    module("apex.normalization")
    module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=LayerNormFunction)


def old_names() -> None:
    """What torch and numpy of 2023 still had."""
    module("torch._six", inf=float("inf"))
    images = module("torchvision", datasets=None)  # imported by its vision models, which do not run
    images.transforms = module("torchvision.transforms")
    module("torchvision.datasets", VisionDataset=object)
    older: Any = np
    for name, value in {"product": np.prod, "float": float, "bool": bool, "int": int, "object": object}.items():
        setattr(older, name, value)


def fused_softmax() -> None:
    """Where every key of a query is masked, its weights are 0, as in Megatron's CUDA kernel; torch's are equal."""
    softmax_class: Any = load("megatron.model.fused_softmax").FusedScaleMaskSoftmax
    plain = softmax_class.forward_torch_softmax

    def softmax(self: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> Any:
        found = plain(self, scores, mask)
        return found if mask is None else found.masked_fill(mask.all(-1, keepdim=True), 0.0)

    softmax_class.forward_torch_softmax = softmax


def recorded(out: Path) -> None:
    """Have Megatron's loop save its initial weights and record every step."""
    names = ("core.tensor_parallel.random", "fused_kernels", "initialize", "training")
    random_states, kernels, initialize, training = (load(f"megatron.{name}") for name in names)
    kernels.load = initialize._warmup_jit_function = no_op
    random_states._set_cuda_rng_state = lambda state, device=-1: torch.set_rng_state(state)
    train, step = training.train, training.train_step

    def train_from_saved(forward: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any) -> Any:
        args = training.get_args()
        if os.environ.get("WHOLE_HEAD_BIAS"):
            for name, parameter in model[0].named_parameters():
                if name.endswith("lm_head.bias"):
                    parameter.tensor_model_parallel = True
        if args.iteration == 0:
            training.save_checkpoint(0, model, optimizer, scheduler)
        return train(forward, model, optimizer, scheduler, *rest)

    def one_step(*arguments: Any) -> Any:
        losses, skipped, norm, zeros = step(*arguments)
        if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            line = {"loss": {name: float(value) for name, value in losses.items()}, "norm": float(norm)}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return losses, skipped, norm, zeros

    training.train, training.train_step = train_from_saved, one_step


if __name__ == "__main__":
    checkout, steps, program = sys.argv[1:4]
    sys.argv = [program, *sys.argv[4:]]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    cuda_on_the_cpu()
    apex()
    old_names()
    sys.path.insert(0, checkout)
    recorded(Path(steps))
    if os.environ.get("FUSED_SOFTMAX"):
        fused_softmax()
    runpy.run_path(str(Path(checkout) / program), run_name="__main__")
