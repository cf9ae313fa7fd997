"""Low-rank adapters (LoRA; Hu et al. 2021) as logical tensors of a model: y = x W^T + scale (x A^T) B^T.

With --lora-rank every tensor of the model stays as it is, and each linear of the blocks among --lora-targets gets two:

    NAME.lora_A.weight   [rank, in]    N(0, 1 / 3 in), the variance of peft's first values
    NAME.lora_B.weight   [out, rank]   zeros, so that training begins with the model as it was

They are cut like their linear: the one that has its cut dimension with it, the other is whole on every tensor rank,
whose gradient there is a part. Those of an expert are where the expert is. A family needs no code of its own for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import sqrt

from mega.core.architecture.model import Adapters
from mega.core.architecture.tensor import Cut, Init, Partial, Tensor
from mega.core.config.sections import ModelConfig, ModelOptions

DOWN, UP = "lora_A", "lora_B"
"""What the two are called, as in peft."""


@dataclass(frozen=True)
class AdapterSpec:
    """One linear's adapter. scale: of its product. dropout: of its input."""

    down: Tensor
    up: Tensor
    scale: float
    dropout: float


def without_adapters(model: ModelConfig) -> ModelConfig:
    """The model that the adapters were added to."""
    return with_adapters(model, ModelOptions())


def with_adapters(model: ModelConfig, of: ModelOptions) -> ModelConfig:
    """`model` with the adapters that another one has."""
    return replace(
        model,
        lora_rank=of.lora_rank,
        lora_alpha=of.lora_alpha,
        lora_targets=of.lora_targets,
        lora_dropout=of.lora_dropout,
    )


def adapted(adapters: Adapters | None, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors of a model, each adapter after the linear that it is added to.

    Errors: ValueError naming a target that is none of its linears.
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
    """Name of a linear's weight -> its adapter. tensors: of `adapted`."""
    if adapters is None:
        return {}
    by_name = {tensor.name: tensor for tensor in tensors}
    found = {}
    for name, up in by_name.items():
        if name.endswith(f".{UP}.weight"):
            stem = name.removesuffix(f"{UP}.weight")
            found[f"{stem}weight"] = AdapterSpec(by_name[f"{stem}{DOWN}.weight"], up, adapters.scale, adapters.dropout)
    return found


def linear_names(tensors: Iterable[Tensor]) -> list[str]:
    """What the linears of a block are called, once each."""
    return list(dict.fromkeys(_linear(tensor) for tensor in tensors if _is_linear(tensor)))


def _is_linear(tensor: Tensor) -> bool:
    """A matrix of a block that tensor ranks share."""
    return len(tensor.shape) == 2 and isinstance(tensor.units[0], int) and tensor.cut() is not None


def _linear(tensor: Tensor) -> str:
    """What a linear is called within its block: q_proj."""
    return tensor.name.split(".")[-2]


def _pair(base: Tensor, rank: int) -> Iterator[Tensor]:
    (outs, ins), cut, stem = base.shape, base.cut(), base.name.removesuffix("weight")
    assert cut is not None
    rows, columns = ((cut,), ()) if cut.dim == 0 else ((), (Cut(1, cut.axis, cut.parts),))
    down, up = (f"{stem}{DOWN}.weight", (rank, ins), columns), (f"{stem}{UP}.weight", (outs, rank), rows)
    for (name, shape, cuts), init in ((down, Init(std=1 / sqrt(3 * ins))), (up, Init())):
        # Ranks that hold a copy have seen their own outputs, or their own inputs, only.
        partial: tuple[Partial, ...] = () if cuts else ("tp",)
        yield replace(base, name=name, shape=shape, init=init, cuts=cuts, partial=partial)
