"""Layouts of ranks by name, and the lists that `mega parity` proves. No torch.

A name lists sizes: tp2pp2dp2sp is 2 tensor ranks x 2 stages x 2 data ranks with sequence parallelism, cp4-ring is 4
context ranks with ring attention, and a trailing -zero1 shares out the optimizer's state. How the work is shared over
time is named alike: pp4-zb is the zero-bubble schedule, pp2-chunks3-uneven 6 chunks of unequal length, mbs8 one
microbatch of 8 samples, tp2-full2 recomputes blocks two by two, pp4-split1 has an encoder's stage before a decoder's
three.
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
"""A model of one million weights with everything that a layout could get wrong: biases, grouped heads, dropout
(Megatron's 0.1 by default), a vocabulary that no tensor axis divides, several gradient buckets."""

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
"""A mixture as DeepSeek-V3's, in all layers but the first."""
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
"""Models that are proven in a layout that is named, where no model is."""

LR = {"fp64": 3e-3, "fp32": 1.5e-4}
"""Adam's first steps are lr x sign(gradient), and rounding decides the sign of a gradient that is nearly zero. A rate
that trains the model keeps that noise within the bounds of fp32; fp64 bears twenty times as much."""

NUMBERS = ("tp", "cp", "pp", "dp", "etp", "ep", "split", "chunks", "mbs", "full", "block", "zero")
FLAGS = ("sp", "a2a", "ring", "gpipe", "zb", "uneven", "selective", "share", "offload")
RULES = ("sgd", "lamb", "adafactor", "muon")
"""Update rules other than adam."""


@dataclass(frozen=True)
class ParityLayout:
    """Ranks along each axis, how they share, in what order they work, and what they compute twice.

    split: the first stage of a decoder; 0: encoder and decoder share all stages.
    ep: ranks that hold other experts. etp: those that share each of them; 0: as tp. a2a: rows are exchanged over ep and
    tokens not gathered.
    mbs: samples of a microbatch, 8 make a step. full, block: `--recompute-layers` of full recompute, by groups or for
    the first blocks of a stage. share: saved activations are cut over the tensor ranks. uneven: stages are not equal.
    offload: the optimizer's state lies on the host.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    etp: int = 0
    ep: int = 1
    split: int = 0
    chunks: int = 1
    sp: bool = False
    a2a: bool = False
    ring: bool = False
    gpipe: bool = False
    zb: bool = False
    uneven: bool = False
    mbs: int = 1
    selective: bool = False
    full: int = 0
    block: int = 0
    share: bool = False
    zero: int = 0
    rule: str = "adam"
    offload: bool = False

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

        Errors: ValueError where the text is not a layout.
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
        """Blocks of the model: one for each chunk at least, and one more where they are to be uneven."""
        return max(FEWEST_BLOCKS, self.pp * self.chunks + self.uneven)

    def depth(self, model: str) -> tuple[int, ...]:
        """Blocks of one of `MODELS`: its only stack's, or its encoder's and its decoder's.

        >>> ParityLayout(pp=4, split=1).depth("t5"), ParityLayout(pp=4).depth("t5"), ParityLayout().depth("gpt")
        ((1, 3), (2, 2), (4,))
        """
        if not _decodes(model):
            return (self.blocks,)
        encoder = self.blocks * self.split // self.pp if self.split else self.blocks // 2
        return encoder, self.blocks - encoder

    def run(self, model: str, dtype: ParityDtype) -> RunConfig:
        """The small run that this layout is proven on, of one of `MODELS`.

        Errors: ValueError where the model cannot be cut so, naming the flag.
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
    """Whether one of `MODELS` has an encoder and a decoder."""
    return family.FAMILIES[MODELS[model].get("family", "gpt")].decodes


def alone(
    model: str, depth: tuple[int, ...], dtype: ParityDtype, lr: float | None = None, rule: str = "adam"
) -> RunConfig:
    """One rank, one sample at a time, of one of `MODELS`: what layouts are compared with. lr: `LR` if None."""
    return resolve(_small(model, depth, dtype, lr or LR[dtype], rule), 1)


def _small(model: str, depth: tuple[int, ...], dtype: ParityDtype, lr: float, rule: str) -> Options:
    values: dict[str, Any] = dict(zip(("layers", "decoder_layers"), depth, strict=False))
    values |= {"dtype": dtype, "lr": lr, "micro_batch": 1, "optimizer": rule}
    return updated(Options(), {**_VALUES, **MODELS[model], **values})


def uneven(blocks: int, pieces: int) -> list[int]:
    """Stages of unequal length, the later ones the longer.

    >>> uneven(4, 2), uneven(5, 4), uneven(7, 6)
    ([1, 3], [1, 1, 1, 2], [1, 1, 1, 1, 1, 2])
    """
    each, more = divmod(blocks, pieces)
    sizes = [each + (number >= pieces - more) for number in range(pieces)]
    if not more:
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
"""Context ranks along with every other axis. Without `ring` attention goes by all-to-all where tp x cp divides the 4
key/value heads."""

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
"""Chunks, schedules and stages of unequal length."""

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
"""What is computed again, in each mode."""

SPLITS = _named(
    "tp1-mbs8", "tp1-mbs4", "dp4", "dp8", "dp4-mbs2", "dp2-mbs4-zero2", "tp2sp-mbs8", "pp2-mbs2", "cp2-mbs4"
)
"""The global batch of 8 in microbatches of other sizes, and over more data ranks."""


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
"""The other rules, where tensors are cut over tensor ranks and in spans, and where two stages share one; state on the
host."""


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
"""Where an encoder's stages end and a decoder's begin; in others of an encoder-decoder's some stage holds both."""


def every_layout() -> list[ParityLayout]:
    """tp, pp in {1, 2, 4} x dp in {1, 2} on up to 8 ranks, with and without sequence parallelism, every ZeRO; and the
    lists above."""
    found = []
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                if 1 < tp * pp * dp <= MOST_RANKS:
                    shares = (False, True) if tp > 1 else (False,)
                    stages = (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
                    found += [ParityLayout(tp=tp, pp=pp, dp=dp, sp=sp, zero=zero) for sp in shares for zero in stages]
    return found + CONTEXT + STAGES + RECOMPUTED + SPLITS + UPDATES


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
"""Where ranks share experts."""


def drawn_mixtures(model: str, count: int, seed: int = 40) -> list[ParityLayout]:
    """Layouts of a mixture, `EXPERTS` and others that the rules allow, drawn at random but always the same ones.

    A microbatch is the reference's where tokens are dropped, since an expert's capacity is that of a microbatch.
    """
    draw, found = random.Random(f"{seed} {model}"), list(EXPERTS)
    dropping = "capacity_factor" in MODELS[model]
    while len(found) < count:
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
        if layout not in found:
            found.append(layout)
    return found


SHORT = _named("dp2-zero1", "tp2sp", "pp2", "tp2pp2dp2sp-zero1")
"""One of each axis, and all together."""

TIES = _named("tp2sp", "pp2", "pp2-chunks2", "pp4-zb", "dp2-zero3", "tp2pp2dp2sp-zero1")
"""Where a tied embedding is shared, for the models that are tied otherwise."""

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
"""Where the place of the norms changes what is kept, cut or exchanged."""

DRAWN = 32
"""Layouts of each of the models with experts."""

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
"""Where neighbours are cut, travel, or are read twice, with other blocks than GPT's."""

SOME = {"gpt-untied": TIES, "llama-tied": TIES, "bert-post": NORMS, "llama-retriever": NEIGHBOURS}
"""Models of a family that are proven in some layouts only."""

Case = tuple[str, ParityLayout]
"""One of `MODELS` in one layout."""


def every_case() -> Iterator[Case]:
    """What `mega parity --all` proves."""
    for model in MODELS:
        for layout in layouts_of(model):
            yield model, layout


def models_of(layout: ParityLayout) -> tuple[str, ...]:
    """Those that are proven in a layout that is named: with experts, where ranks share some."""
    of_experts = layout.ep > 1 or layout.etp or layout.a2a
    return tuple(f"{model}-experts" for model in DECODERS) if of_experts else DECODERS


def layouts_of(model: str) -> list[ParityLayout]:
    """Those that one of `MODELS` is proven in."""
    whole_rows = [layout for layout in every_layout() if layout.cp == 1]
    if _decodes(model):  # an encoder and a decoder share no context axis
        return whole_rows + SPLIT_RANKS
    if model == "gpt-retriever":
        return whole_rows
    if "experts" in MODELS[model]:
        return drawn_mixtures(model, DRAWN)
    return list(SOME.get(model, every_layout()))
