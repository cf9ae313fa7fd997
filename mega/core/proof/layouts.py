"""Layouts of ranks by name, and the lists of layouts that `mega parity` compares. This module does not import torch.

A layout's name lists its sizes. For example, tp2pp2dp2sp is 2 tensor ranks x 2 stages x 2 data ranks with sequence
parallelism, cp4-ring is 4 context ranks with ring attention, and a trailing -zero1 shards the optimizer's state. Names
may also list options: pp4-zb uses the zero-bubble schedule, pp2-chunks3-uneven has 6 chunks of unequal length, tp1-mbs8
uses microbatches of 8 samples, tp2-full2 recomputes groups of two blocks, and pp4-split1 has 1 stage for the encoder
and 3 for the decoder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mega.core import family
from mega.core.config.check import check
from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated

ParityDtype = Literal["fp64", "fp32"]

STEPS = (1, 10)
MOST_RANKS = 8
FEWEST_BLOCKS = 4

_VALUES: dict[str, Any] = {
    "hidden": 32,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 50257,
    "vocab_multiple": 1,
    "seq_length": 8,
    "global_batch": 8,
    "steps": STEPS[-1],
    "device": "cpu",
    "mock_data": True,
    "bucket_size": 20_000,
}
"""Options of a model with one million weights and with all features in which a layout could introduce errors: biases,
grouped-query attention, dropout (0.1, Megatron's default), a vocabulary size that is not divisible by the number of
tensor ranks, and several gradient buckets."""

_LLAMA: dict[str, Any] = {
    "family": "llama",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "tied": False,
    "bias": False,
    "qkv_bias": True,
    "ffn": 96,
}
_SIGMOID: dict[str, Any] = {
    "experts": 8,
    "experts_chosen": 3,
    "expert_ffn": 16,
    "experts_from": 1,
    "shared_ffn": 16,
    "shared_gate": True,
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "router_groups": 4,
    "router_groups_chosen": 3,
    "router_group_best": 2,
    "balance_bias": True,
    "balance_bias_rate": 0.05,
    "balance_loss": (0.1,),
}
"""A model with MoE layers as in DeepSeek-V3, except in the first layer."""
_RETRIEVER: dict[str, object] = {"retriever": True, "retro_layers": (1, 2), "retro_chunk_length": 2}
_BERT: dict[str, Any] = {"family": "bert", "sample_kind": "bert"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": _LLAMA,
    "gpt-untied": {"tied": False},
    "llama-tied": {**_LLAMA, "tied": True},
    "bert": _BERT,
    "bert-post": {**_BERT, "norm_placement": "post", "activation": "gelu"},
    "t5": {"family": "t5", "sample_kind": "t5", "decoder_seq_length": 12},
    "gpt-experts": {"experts": 4, "expert_ffn": 32, "balance_loss": (0.5,), "z_loss": 0.01},
    "gpt-experts-dropping": {"experts": 4, "expert_ffn": 32, "capacity_factor": 0.75, "drop_policy": "position"},
    "gpt-retriever": _RETRIEVER,
    "llama-retriever": {**_LLAMA, **_RETRIEVER},
    "llama-experts": {**_LLAMA, **_SIGMOID},
    "llama-experts-dropping": {**_LLAMA, **_SIGMOID, "capacity_factor": 0.75, "pad_to_capacity": True},
}
FAMILIES = ("gpt", "llama", "bert", "t5")
DECODERS = ("gpt", "llama")
"""Names of the models with which a layout is tested if the user names only the layout."""

LR = {"fp64": 3e-3, "fp32": 1.5e-4}
"""dtype -> learning rate. Adam's first steps are lr x sign(gradient), and rounding decides the sign of a gradient that
is nearly zero. With a typical learning rate, the resulting difference is within the tolerance for fp32. For fp64, the
learning rate can be twenty times as high."""

NUMBERS = ("tp", "cp", "pp", "dp", "etp", "ep", "split", "chunks", "mbs", "full", "block", "zero")
FLAGS = ("sp", "a2a", "ring", "gpipe", "zb", "uneven", "selective", "share", "offload")
RULES = ("sgd", "lamb", "adafactor", "muon")
"""Optimizers other than adam."""


@dataclass(frozen=True)
class ParityLayout:
    """One layout: the sizes of all parallel axes, and the pipeline schedule, recomputation, sharding and optimizer."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    etp: int = 0
    """Number of tensor ranks per expert; 0 means `tp`."""
    ep: int = 1
    """Number of ranks over which the experts are distributed."""
    split: int = 0
    """Index of the decoder's first stage; 0 if the stages are not divided between encoder and decoder."""
    chunks: int = 1
    sp: bool = False
    """Whether to use sequence parallelism."""
    a2a: bool = False
    """Whether tokens are dispatched to experts by an all-to-all instead of an all-gather."""
    ring: bool = False
    """Whether to use ring attention over the context ranks."""
    gpipe: bool = False
    zb: bool = False
    """Whether to use the zero-bubble schedule."""
    uneven: bool = False
    """Whether stages have different numbers of blocks."""
    mbs: int = 1
    """Number of samples per microbatch; a step has 8 samples."""
    selective: bool = False
    """Whether to use selective recomputation."""
    full: int = 0
    """`--recompute-layers` for full recomputation with method `uniform`; 0 disables it."""
    block: int = 0
    """`--recompute-layers` for full recomputation with method `block`; 0 disables it."""
    share: bool = False
    """Whether saved activations are sharded over the tensor ranks."""
    zero: int = 0
    rule: str = "adam"
    """The optimizer: adam, or one of `RULES`."""
    offload: bool = False
    """Whether the optimizer's state is kept in host memory."""

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def name(self) -> str:
        """
        >>> ParityLayout(tp=2, dp=4, sp=True, zero=1).name, ParityLayout(pp=2, chunks=3, full=1).name
        ('tp2dp4sp-zero1', 'pp2-chunks3-full1')
        """
        axes = (("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("dp", self.dp))
        name = "".join(f"{axis}{size}" for axis, size in axes if size > 1) or "tp1"
        if self.sp:
            name += "sp"
        words = [
            f"etp{self.etp}" * bool(self.etp),
            f"ep{self.ep}" * (self.ep > 1),
            "a2a" * self.a2a,
            f"split{self.split}" * (self.split > 0),
            f"chunks{self.chunks}" * (self.chunks > 1),
            *(word * getattr(self, word) for word in ("ring", "gpipe", "zb", "uneven")),
            f"mbs{self.mbs}" * (self.mbs > 1),
            "selective" * self.selective,
            *(f"{word}{getattr(self, word)}" * bool(getattr(self, word)) for word in ("full", "block")),
            "share" * self.share,
            f"zero{self.zero}" * bool(self.zero),
            self.rule * (self.rule in RULES),
            "offload" * self.offload,
        ]
        return "-".join([name, *filter(None, words)])

    @classmethod
    def parse(cls, text: str) -> ParityLayout:
        """
        >>> ParityLayout.parse("pp2tp2-sp-zero1") == ParityLayout(tp=2, pp=2, sp=True, zero=1)
        True

        Errors: ValueError if the text is not a layout.
        """
        word = rf"({'|'.join(NUMBERS)})([1-9]\d*)|({'|'.join(FLAGS + RULES)})"
        if not text or re.sub(rf"{word}|-", "", text):
            raise ValueError(
                f"--layouts {text}: not a layout (valid: names such as tp2pp2dp2sp or dp4-zero1, with commas between; "
                f"{', '.join(f'{name}N' for name in NUMBERS)}, {', '.join(FLAGS + RULES)})"
            )
        words = re.findall(word, text)
        values: dict[str, Any] = {axis: int(size) for axis, size, flag in words if not flag}
        flags = {flag: True for _, _, flag in words if flag in FLAGS}
        rule = next((flag for _, _, flag in words if flag in RULES), "adam")
        return cls(**values, **flags, rule=rule)

    @property
    def blocks(self) -> int:
        """Number of blocks in the model: at least one per chunk, and one more for uneven stages."""
        return max(FEWEST_BLOCKS, self.pp * self.chunks + self.uneven)

    def depth(self, model: str) -> tuple[int, ...]:
        """Number of blocks in each stack of `model`, which is one of `MODELS`: (blocks,), or (encoder blocks, decoder
        blocks).

        >>> ParityLayout(pp=4, split=1).depth("t5"), ParityLayout(pp=4).depth("t5"), ParityLayout().depth("gpt")
        ((1, 3), (2, 2), (4,))
        """
        if not _decodes(model):
            return (self.blocks,)
        encoder = self.blocks * self.split // self.pp if self.split else self.blocks // 2
        return encoder, self.blocks - encoder

    def run(self, model: str, dtype: ParityDtype) -> RunConfig:
        """Return the small run with which this layout is tested. model: one of `MODELS`.

        Errors: ValueError naming the flag if the model cannot be split into this layout.
        """
        if self.world > MOST_RANKS:
            raise ValueError(f"--layouts {self.name}: {self.world} ranks (valid: 1 to {MOST_RANKS} ranks in all)")
        values = {
            "micro_batch": self.mbs,
            "tp": self.tp,
            "cp": self.cp,
            "cp_comm": "ring" if self.ring else "auto",
            "pp": self.pp,
            "ep": self.ep,
            "etp": self.etp or None,
            "expert_dispatch": "all-to-all" if self.a2a else "all-gather",
            "split_rank": self.split or None,
            "chunks": self.chunks,
            "schedule": "zb-h1" if self.zb else "gpipe" if self.gpipe else None,
            "stage_layers": tuple(uneven(self.blocks, self.pp * self.chunks)) if self.uneven else (),
            "sequence_parallel": self.sp,
            "zero": self.zero,
            "recompute": "full" if self.full or self.block else "selective" if self.selective else "none",
            "recompute_method": "uniform" if self.full else "block" if self.block else None,
            "recompute_layers": self.full or self.block or None,
            "distribute_saved": self.share,
            "optimizer_offload": self.offload,
        }
        options = updated(_small(model, self.depth(model), dtype, LR[dtype], self.rule), values)
        try:
            check(options, self.world)
        except ValueError as error:
            raise ValueError(f"--layouts {self.name}: {error}") from None
        return resolve(options, self.world)


def _decodes(model: str) -> bool:
    """Whether `model`, which is one of `MODELS`, has an encoder and a decoder."""
    return family.FAMILIES[MODELS[model].get("family", "gpt")].decodes


def reference_run(
    model: str, depth: tuple[int, ...], dtype: ParityDtype, lr: float | None = None, rule: str = "adam"
) -> RunConfig:
    """Return the reference run: one rank, one sample per microbatch. model: one of `MODELS`. lr: default
    `LR[dtype]`."""
    return resolve(_small(model, depth, dtype, lr or LR[dtype], rule), 1)


def _small(model: str, depth: tuple[int, ...], dtype: ParityDtype, lr: float, rule: str) -> Options:
    values: dict[str, Any] = dict(zip(("layers", "decoder_layers"), depth, strict=False))
    values |= {"dtype": dtype, "lr": lr, "micro_batch": 1, "optimizer": rule}
    return updated(Options(), {**_VALUES, **MODELS[model], **values})


def uneven(blocks: int, pieces: int) -> list[int]:
    """Divide `blocks` into stages of unequal length, and return the number of blocks per stage; later stages are
    longer.

    >>> uneven(4, 2), uneven(5, 4), uneven(7, 6)
    ([1, 3], [1, 1, 1, 2], [1, 1, 1, 1, 1, 2])
    """
    each, remainder = divmod(blocks, pieces)
    sizes = [each + (number >= pieces - remainder) for number in range(pieces)]
    if not remainder:
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] + 1
    return sizes


# -- the lists


def _named(*names: str) -> list[ParityLayout]:
    return [ParityLayout.parse(name) for name in names]


CONTEXT = _named(
    "cp2",
    "cp2-ring",
    "cp4",
    "cp4-ring",
    "tp2cp2",
    "tp2cp2sp-ring",
    "tp2cp4sp",
    "tp4cp2sp",
    "cp2pp2-ring",
    "cp4pp2-chunks2",
    "cp2dp2-zero1",
    "cp2dp2-ring-zero2",
    "cp2dp4-ring-zero3",
    "tp2cp2pp2sp",
    "tp2cp2dp2sp-ring-zero1",
)
"""Layouts that combine context ranks with every other axis. Without `ring`, attention uses all-to-all if the 4
key/value heads are divisible by tp x cp."""

STAGES = _named(
    "pp2-chunks2",
    "pp2-chunks3",
    "pp4-chunks2",
    "pp2-uneven",
    "pp4-uneven",
    "pp2-chunks2-uneven",
    "pp2-chunks3-uneven",
    "pp4-gpipe",
    "pp2-zb",
    "pp4-zb",
    "pp4-zb-uneven",
    "pp2dp2-zb-zero1",
    "tp2pp2sp-zb",
    "tp2pp4sp-zb",
    "cp2pp2-ring-zb",
    "tp2pp2sp-chunks3",
    "tp2pp4sp-chunks2",
    "pp2dp2-chunks3-zero1",
    "pp4dp2-chunks2",
    "tp2pp2dp2sp-chunks2-zero1",
)
"""Layouts with chunks, with different pipeline schedules, and with stages of unequal length."""

RECOMPUTED = _named(
    "tp1-selective",
    "tp2sp-selective",
    "pp2-chunks2-selective",
    "pp4-zb-selective",
    "cp2-ring-selective",
    "cp2-selective",
    "dp4-selective-zero3",
    "tp1-full1",
    "tp2sp-full2",
    "pp2dp2-full1-zero1",
    "pp2-chunks2-full1",
    "dp4-full1-zero2",
    "dp2-full2-zero3",
    "cp2-ring-full1",
    "tp2pp2sp-block1",
    "pp2-chunks3-block1",
    "dp2-block2-zero2",
    "tp2-full1-share",
    "tp4-full2-share",
    "tp2pp2-block1-share",
)
"""Layouts with recomputation in each mode."""

SPLITS = _named(
    "tp1-mbs8", "tp1-mbs4", "dp4", "dp8", "dp4-mbs2", "dp2-mbs4-zero2", "tp2sp-mbs8", "pp2-mbs2", "cp2-mbs4"
)
"""Layouts that split the global batch of 8 samples into microbatches of different sizes, or over more data ranks."""


UPDATES = _named(
    "dp2-zero1-lamb",
    "tp2sp-lamb",
    "tp2dp2-zero3-lamb",
    "tp2pp2dp2sp-zero1-lamb",
    "tp4-adafactor",
    "pp4-adafactor",
    "dp4-zero3-adafactor",
    "cp2dp2-zero2-adafactor",
    "tp2pp2dp2sp-zero1-adafactor",
    "pp2dp2-zero1-sgd",
    "dp2-offload",
    "tp2pp2dp2sp-zero1-adafactor-offload",
    "dp4-zero3-lamb-offload",
    "tp2dp2-muon",
    "tp4sp-muon",
    "dp4-zero2-muon",
    "cp2dp2-zero3-muon",
    "tp2pp2dp2sp-zero1-muon",
    "tp2dp2-zero1-muon-offload",
)
"""Layouts with optimizers other than adam or with optimizer state in host memory. They cover tensors that are sharded
over tensor ranks or by ZeRO, and a tensor that two stages share."""


SPLIT_RANKS = _named(
    "pp2-split1",
    "pp4-split1",
    "pp4-split2",
    "pp4-split3",
    "pp2-split1-mbs4",
    "pp4-split2-gpipe",
    "pp4-split1-zb",
    "pp4-split3-zb",
    "pp4-split1-full1",
    "pp4-split2-selective",
    "tp2pp2sp-split1",
    "tp2pp4sp-split3",
    "pp2dp2-split1-zero1",
    "pp4dp2-split1-zero1",
    "tp2pp2dp2sp-split1-zero1",
    "tp2pp2dp2sp-split1-zero1-adafactor",
)
"""Layouts in which each pipeline stage holds blocks of either the encoder or the decoder. Without `split`, an
encoder-decoder model can have a stage with blocks of both."""


def every_layout() -> list[ParityLayout]:
    """All layouts with tp and pp in {1, 2, 4} and dp in {1, 2} on up to 8 ranks, with and without sequence parallelism
    and with every ZeRO stage, followed by `CONTEXT`, `STAGES`, `RECOMPUTED`, `SPLITS` and `UPDATES`."""
    grid = []
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                if 1 < tp * pp * dp <= MOST_RANKS:
                    shares = (False, True) if tp > 1 else (False,)
                    stages = (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
                    grid += [ParityLayout(tp=tp, pp=pp, dp=dp, sp=sp, zero=zero) for sp in shares for zero in stages]
    return grid + CONTEXT + STAGES + RECOMPUTED + SPLITS + UPDATES


EXPERTS = _named(
    "dp2-ep2",
    "dp2-ep2-a2a",
    "tp2sp",
    "tp2sp-etp1-ep2-a2a",
    "tp2-etp1-ep2",
    "cp2-ep2-a2a",
    "dp2-etp2",
    "pp2-zb",
    "dp4-ep4-a2a-zero3",
    "tp2pp2dp2sp-ep2-zero1",
    "dp2pp2-ep2-a2a-chunks2-full1",
)
"""Layouts that distribute experts over ranks."""


def drawn_mixtures(model: str, count: int, seed: int = 40) -> list[ParityLayout]:
    """`count` layouts for a model with experts: `EXPERTS`, and valid layouts drawn at random with a fixed seed.

    A model that drops tokens keeps the reference's microbatch size, because the capacity of an expert depends on that
    size.
    """
    draw, layouts = random.Random(f"{seed} {model}"), list(EXPERTS)
    dropping = "capacity_factor" in MODELS[model]
    while len(layouts) < count:
        tp, cp, pp, dp = (draw.choice((1, 1, 2, 4)) for _ in range(4))
        chunks = draw.choice((1, 1, 2)) if pp > 1 else 1
        layout = ParityLayout(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=dp,
            etp=draw.choice((0, 0, 1, 2)),
            ep=draw.choice((1, 2, 2, 4)),
            chunks=chunks,
            sp=tp > 1 and draw.random() < 0.7,
            a2a=draw.random() < 0.6,
            zb=pp > 1 and chunks == 1 and draw.random() < 0.4,
            gpipe=pp > 1 and chunks == 1 and draw.random() < 0.2,
            mbs=1 if dropping else draw.choice((1, 1, 2)),
            selective=draw.random() < 0.2,
            full=draw.choice((0, 0, 0, 1)),
            zero=draw.choice((0, 1) if pp > 1 else (0, 1, 2, 3)),
        )
        if layout.world > MOST_RANKS or (layout.selective and layout.full) or (layout.zb and layout.gpipe):
            continue
        try:
            layout.run(model, "fp64")
        except ValueError:
            continue
        if layout not in layouts:
            layouts.append(layout)
    return layouts


SHORT = _named("dp2-zero1", "tp2sp", "pp2", "tp2pp2dp2sp-zero1")
"""One layout for each axis, and one layout that combines all axes."""

TIES = _named("tp2sp", "pp2", "pp2-chunks2", "pp4-zb", "dp2-zero3", "tp2pp2dp2sp-zero1")
"""Layouts for models that tie the embedding to the head although their family does not, or do not tie it although their
family does."""

NORMS = _named(
    "tp2sp",
    "tp2pp2dp2sp-zero1",
    "pp2-chunks2",
    "pp4-zb",
    "dp2-zero3",
    "cp2",
    "tp2cp2sp-ring",
    "tp1-selective",
    "tp2sp-full2",
)
"""Layouts in which the placement of norms changes which tensors are saved, sharded or communicated."""

DRAWN = 32
"""Number of layouts in which each model with experts is tested."""

NEIGHBOURS = _named(
    "tp2sp",
    "tp4",
    "pp2-uneven",
    "pp4-zb",
    "pp2-chunks2-full1",
    "dp2-zero3",
    "dp2-full2-zero3",
    "tp2pp2dp2sp-zero1",
    "tp2-full2-share",
    "tp2sp-selective",
    "tp1-mbs8",
)
"""Layouts that shard, send or recompute the retrieved neighbours, for models whose blocks differ from GPT's."""

SOME = {"gpt-untied": TIES, "llama-tied": TIES, "bert-post": NORMS, "llama-retriever": NEIGHBOURS}
"""Model -> its layouts, for models that are tested only in some layouts."""

Case = tuple[str, ParityLayout]
"""(name of a model in `MODELS`, layout)"""


def every_case() -> Iterator[Case]:
    """All cases of `mega parity --all`."""
    for model in MODELS:
        for layout in layouts_of(model):
            yield model, layout


def models_of(layout: ParityLayout) -> tuple[str, ...]:
    """Return the models with which `layout` is tested if no model is given. If the layout distributes experts, these
    are models with experts."""
    has_experts = layout.ep > 1 or layout.etp or layout.a2a
    return tuple(f"{model}-experts" for model in DECODERS) if has_experts else DECODERS


def layouts_of(model: str) -> list[ParityLayout]:
    """Return the layouts in which `model`, which is one of `MODELS`, is tested."""
    whole_rows = [layout for layout in every_layout() if layout.cp == 1]
    if _decodes(model):  # an encoder-decoder model does not support context ranks
        return whole_rows + SPLIT_RANKS
    if model == "gpt-retriever":
        return whole_rows
    if "experts" in MODELS[model]:
        return drawn_mixtures(model, DRAWN)
    return list(SOME.get(model, every_layout()))
