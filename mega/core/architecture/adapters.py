"""Low-rank adapters (LoRA; Hu et al. 2021) as logical tensors of a model: y = x W^T + scale (x A^T) B^T.

With --lora-rank the tensors of the model are frozen, and each linear layer named in --lora-targets gets two additional
tensors:

    NAME.lora_A.weight   [rank, in]    N(0, 1 / 3 in), the variance of peft's initial values
    NAME.lora_B.weight   [out, rank]   zeros, so that training starts from the unchanged model

An adapter is sharded like its linear layer: the matrix that contains the sharded dimension is sharded, and the other
matrix is replicated on every tensor rank, which computes a partial gradient of it. The adapters of an expert are on the
expert's ranks. Model families need no code for adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import sqrt

from mega.core.architecture.model import Adapters
from mega.core.architecture.tensor import Cut, Init, Partial, Tensor
from mega.core.config.sections import ModelConfig, ModelOptions

DOWN, UP = "lora_A", "lora_B"
"""The names of the two matrices of an adapter, as in peft."""


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of one linear layer."""

    down: Tensor  # A
    up: Tensor  # B
    scale: float  # factor of the adapter's output
    dropout: float  # dropout probability for the input


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Return `model` without adapters."""
    return with_adapters(model, ModelOptions())


def with_adapters(model: ModelConfig, source: ModelOptions) -> ModelConfig:
    """Return `model` with the adapter options of `source`."""
    return replace(
        model,
        lora_rank=source.lora_rank,
        lora_alpha=source.lora_alpha,
        lora_targets=source.lora_targets,
        lora_dropout=source.lora_dropout,
    )


def adapted(adapters: Adapters | None, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of a model, with the tensors of each adapter after the adapter's linear layer.

    Errors: ValueError if a target is not a linear layer of the model.
    """
    if adapters is None:
        yield from tensors
        return
    plain = list(tensors)
    linears = linear_names(plain)
    if unknown := [target for target in adapters.targets if target not in linears]:
        raise ValueError(f"--lora-targets {unknown[0]}: is not a linear of the blocks; valid: {', '.join(linears)}")
    for tensor in plain:
        yield replace(tensor, trainable=False)
        if _is_linear(tensor) and (not adapters.targets or _linear(tensor) in adapters.targets):
            yield from _pair(tensor, adapters.rank)


def adapter_specs(adapters: Adapters | None, tensors: Iterable[Tensor]) -> dict[str, AdapterSpec]:
    """Return a map from the name of a linear layer's weight to the layer's adapter. tensors: the result of
    `adapted`."""
    if adapters is None:
        return {}
    by_name = {tensor.name: tensor for tensor in tensors}
    specs = {}
    for name, up in by_name.items():
        if name.endswith(f".{UP}.weight"):
            stem = name.removesuffix(f"{UP}.weight")
            specs[f"{stem}weight"] = AdapterSpec(by_name[f"{stem}{DOWN}.weight"], up, adapters.scale, adapters.dropout)
    return specs


def linear_names(tensors: Iterable[Tensor]) -> list[str]:
    """Return the distinct names of the linear layers in blocks."""
    return list(dict.fromkeys(_linear(tensor) for tensor in tensors if _is_linear(tensor)))


def _is_linear(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix in a block and is sharded over tensor ranks."""
    return len(tensor.shape) == 2 and isinstance(tensor.units[0], int) and tensor.cut() is not None


def _linear(tensor: Tensor) -> str:
    """Return the name of a linear layer within the block, for example q_proj."""
    return tensor.name.split(".")[-2]


def _pair(base: Tensor, rank: int) -> Iterator[Tensor]:
    (outs, ins), cut, stem = base.shape, base.cut(), base.name.removesuffix("weight")
    assert cut is not None
    rows, columns = ((cut,), ()) if cut.dim == 0 else ((), (Cut(1, cut.axis, cut.parts),))
    down, up = (f"{stem}{DOWN}.weight", (rank, ins), columns), (f"{stem}{UP}.weight", (outs, rank), rows)
    for (name, shape, cuts), init in ((down, Init(std=1 / sqrt(3 * ins))), (up, Init())):
        # A replicated matrix is multiplied with different inputs (or outputs) on each rank, so each gradient is
        # partial.
        partial: tuple[Partial, ...] = () if cuts else ("tp",)
        yield replace(base, name=name, shape=shape, init=init, cuts=cuts, partial=partial)
