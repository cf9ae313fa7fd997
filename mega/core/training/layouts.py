"""Layouts of ranks by name, the list that `mega parity` proves, and the loop that proves it. No torch until it runs.

A name is what it says: tp2pp2dp2sp is 2 tensor ranks x 2 stages x 2 data ranks with sequence parallelism, cp4-ring is 4
context ranks with ring attention, and -zero1 behind it shares out the optimizer's state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mega.core.config.check import check
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig, updated
from mega.core.config.sections import Family

ParityDtype = Literal["fp64", "fp32"]

STEPS = (1, 10)
MOST_RANKS = 8

_VALUES: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 50257,
    "vocab_multiple": 1,
    "seq_length": 8,
    "micro_batch": 1,
    "global_batch": 8,
    "steps": STEPS[-1],
    "device": "cpu",
    "mock_data": True,
    "bucket_size": 20_000,
}
"""A model of one million weights with everything that a layout could get wrong: biases, grouped heads, dropout
(Megatron's 0.1 by default), a vocabulary that no tensor axis divides, several gradient buckets."""

_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "tied": False,
        "bias": False,
        "qkv_bias": True,
        "ffn": 96,
    },
}

LR = {"fp64": 1e-2, "fp32": 1.5e-4}
"""Adam's first steps are lr x sign(gradient), and rounding decides the sign of a gradient that is nearly zero. A rate
that trains the model keeps that noise within the bounds of fp32; fp64 bears a hundred times as much."""


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, and how they share."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    sp: bool = False
    ring: bool = False
    zero: int = 0

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def name(self) -> str:
        """
        >>> Layout(tp=2, dp=4, sp=True, zero=1).name, Layout().name
        ('tp2dp4sp-zero1', 'tp1')
        """
        axes = (("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("dp", self.dp))
        name = "".join(f"{axis}{size}" for axis, size in axes if size > 1) or "tp1"
        if self.sp:
            name += "sp"
        if self.chunks > 1:
            name += f"-chunks{self.chunks}"
        if self.ring:
            name += "-ring"
        return name + (f"-zero{self.zero}" if self.zero else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """
        >>> Layout.parse("pp2tp2-sp-zero1")
        Layout(tp=2, cp=1, pp=2, dp=1, chunks=1, sp=True, ring=False, zero=1)

        Errors: ValueError where the text is no layout.
        """
        words = re.findall(r"(tp|cp|pp|dp|chunks|zero)([1-9]\d*)|(sp|ring)", text)
        if not text or re.sub(r"(tp|cp|pp|dp|chunks|zero)[1-9]\d*|sp|ring|-", "", text):
            raise ValueError(
                f"--layouts {text}: not a layout (valid: names such as tp2pp2dp2sp or dp4-zero1, with commas between; "
                "tpN, cpN, ppN, dpN, chunksN, zeroN, sp, ring)"
            )
        values: dict[str, Any] = {axis: int(size) for axis, size, flag in words if not flag}
        return cls(**values, **{flag: True for _, _, flag in words if flag})

    def run(self, family: Family, dtype: ParityDtype, lr: float | None = None) -> RunConfig:
        """The small run that this layout is proven on; lr as `LR` says where it is not given.

        Errors: ValueError where the model cannot be cut so, naming the flag.
        """
        if self.world > MOST_RANKS:
            raise ValueError(f"--layouts {self.name}: {self.world} ranks (valid: 1 to {MOST_RANKS} ranks in all)")
        values = {
            "tp": self.tp,
            "cp": self.cp,
            "cp_comm": "ring" if self.ring else "auto",
            "pp": self.pp,
            "chunks": self.chunks,
            "sequence_parallel": self.sp,
            "zero": self.zero,
        }
        chosen = {**_VALUES, **_FAMILIES[family], "family": family, "dtype": dtype, "lr": lr or LR[dtype], **values}
        run = resolve(updated(RunConfig(), chosen), self.world)
        try:
            check(run, self.world)
        except ValueError as error:
            raise ValueError(f"--layouts {self.name}: {error}") from None
        return run


CONTEXT = [
    Layout(cp=2),
    Layout(cp=2, ring=True),
    Layout(cp=4),
    Layout(cp=4, ring=True),
    Layout(tp=2, cp=2),
    Layout(tp=2, cp=2, sp=True, ring=True),
    Layout(tp=2, cp=4, sp=True),
    Layout(tp=4, cp=2, sp=True),
    Layout(cp=2, pp=2, ring=True),
    Layout(cp=4, pp=2, chunks=2),
    Layout(cp=2, dp=2, zero=1),
    Layout(cp=2, dp=2, ring=True, zero=2),
    Layout(cp=2, dp=4, ring=True, zero=3),
    Layout(tp=2, cp=2, pp=2, sp=True),
    Layout(tp=2, cp=2, dp=2, sp=True, ring=True, zero=1),
]
"""Context ranks beside every other axis. Without `ring` attention goes by all-to-all where tp x cp divides the 4
key/value heads."""


def every_layout() -> list[Layout]:
    """tp, pp in {1, 2, 4} x dp in {1, 2} on up to 8 ranks, with and without sequence parallelism, every ZeRO; and a
    context axis beside each of them."""
    found = []
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                if 1 < tp * pp * dp <= MOST_RANKS:
                    shares = (False, True) if tp > 1 else (False,)
                    stages = (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
                    found += [Layout(tp=tp, pp=pp, dp=dp, sp=sp, zero=zero) for sp in shares for zero in stages]
    return found + CONTEXT


QUICK = [Layout.parse(name) for name in ("dp2-zero1", "tp2sp", "pp2", "tp2pp2dp2sp-zero1")]
"""One of each axis, and all together."""


@dataclass(frozen=True)
class Row:
    """How far one layout is from one rank.

    loss: worst relative difference. gradients: worst difference at each of `STEPS`, and in which tensor. problem: why
    there are no numbers.
    """

    family: str
    layout: str
    dtype: str
    fine: bool
    loss: float | None = None
    gradients: tuple[float, ...] = ()
    tensors: tuple[str, ...] = ()
    problem: str | None = None


def prove(families: Sequence[Family], layouts: Sequence[Layout], dtype: ParityDtype) -> Iterator[Row]:
    """Train every family in every layout on local ranks, one row each as it is done."""
    from mega.core.parallel.launch import Pool
    from mega.core.training.parity import compare, snapshots, within

    runs = {(family, layout): layout.run(family, dtype) for family in families for layout in layouts}
    with Pool(max(layout.world for layout in layouts)) as pool:
        for family in families:
            expected = snapshots(pool, Layout().run(family, dtype), 1, STEPS)
            exact = snapshots(pool, Layout().run(family, "fp64", LR[dtype]), 1, STEPS) if dtype == "fp32" else None
            for layout in layouts:
                try:
                    found = snapshots(pool, runs[family, layout], layout.world, STEPS)
                    differences = compare(dtype, STEPS, expected, found, exact)
                except RuntimeError as error:
                    problem = str(error).strip().splitlines()[-1]
                    yield Row(family, layout.name, dtype, fine=False, problem=problem)
                    continue
                yield Row(
                    family,
                    layout.name,
                    dtype,
                    fine=all(within(dtype, one) for one in differences),
                    loss=max(one.loss for one in differences),
                    gradients=tuple(one.gradient for one in differences),
                    tensors=tuple(one.tensor.removeprefix("grads/") for one in differences),
                )
