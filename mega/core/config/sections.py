"""The sections of a run's configuration, each a panel of flags and a table of the TOML file.

Defaults are those of Megatron-LM (2023) unless a preset or a family sets another value. If `None` means "derived from
other fields, the tokenizer or the world size", the section has two classes: `...Options` contains the values that the
user gave, and its subclass `...Config`, made by `resolve` (config/resolve.py), has derived fields that are never None.
The other sections have one class. This module does not import torch and contains no rules: config/check.py contains all
rules, so that each rule is written once."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from mega.core.config.mixture import DECODERS as DECODERS
from mega.core.config.mixture import MixtureOptions
from mega.core.config.option import (
    ABOVE_ONE,
    BELOW_HALF,
    BELOW_ONE,
    CHANCE,
    COUNT,
    FROM_0,
    MINUTES,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SEVERAL,
    SHARE,
    VALUE,
    ZERO_STAGE,
    Bench,
    OnResume,
    Range,
    Renamed,
    Section,
    option,
    weak,
)
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.retriever import RetrieverOptions
from mega.core.plan.kinds import SCHEDULES

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]

MASKED = ("bert", "t5")
"""Families whose samples have masked or removed words."""

FP8_BLOCK = 128
"""Width, in elements, of an fp8 block with one scale. A block of a weight also has this height."""

MOST_LAYERS = 10_000
"""Upper bound of --layers, ten times the depth of the deepest published model. Layers are built one by one, even in a
dry run."""


MOST_RANKS = 1024
"""Upper bound of --nproc. Each local rank is a process; the largest hosts have several hundred cores."""


@dataclass(frozen=True, kw_only=True)
class DenseOptions(Section):
    """The shape and the computation of a model, except for its mixture of experts and its retriever."""

    title: ClassVar[str] = "Model"
    on_resume: ClassVar[OnResume] = "must match"

    family: str = option("gpt", "model family; sets the family's defaults", common=True, choices=FAMILY_DEFAULTS)
    layers: int | None = option(
        None,
        "number of transformer blocks",
        megatron={"--num-layers": VALUE, "--encoder-num-layers": VALUE},
        spelling_families={"--encoder-num-layers": ("t5",)},
        common=True,
        within=COUNT,
        most=MOST_LAYERS,
    )
    decoder_layers: int | None = option(
        None,
        "number of transformer blocks in T5's decoder; --layers is then the number in the encoder [layers]",
        megatron="--decoder-num-layers",
        within=COUNT,
        most=MOST_LAYERS,
        families=("t5",),
    )
    hidden: int | None = option(
        None, "width of the residual stream", megatron="--hidden-size", common=True, within=COUNT, most=2**20
    )
    heads: int | None = option(
        None,
        "number of attention (query) heads",
        megatron="--num-attention-heads",
        common=True,
        within=COUNT,
        most=2**16,
    )
    kv_heads: int | None = option(
        None,
        "number of key/value heads; grouped-query attention if less than --heads [heads]",
        megatron={"--num-query-groups": VALUE, "--group-query-attention": weak(1)},
        within=COUNT,
        most=2**16,
    )
    head_dim: int | None = option(
        None, "width of one head [hidden / heads]", megatron="--kv-channels", within=COUNT, most=2**16
    )
    ffn: int | None = option(
        None,
        "width of the feed-forward layer [4 hidden; 8/3 hidden with a gated activation]",
        megatron={"--ffn-hidden-size": VALUE, "--intermediate-size": VALUE},
        within=COUNT,
        most=2**24,
    )
    vocab: int | None = option(None, "vocabulary size without padding [the tokenizer's]", within=COUNT, most=2**31 - 1)
    vocab_multiple: int = option(
        128,
        "pad the vocabulary to a multiple of this times tp",
        megatron="--make-vocab-size-divisible-by",
        within=COUNT,
        most=2**31 - 1,
        on_resume="rounding",
    )
    mask_padded_vocab: bool = option(
        True,
        "exclude padded vocabulary rows from the softmax; if off, padded rows count as tokens, and the loaded "
        "checkpoint determines the number of rows",
        on_resume="noted",
    )
    positions: int | None = option(
        None,
        "maximum sequence length [seq-length]",
        megatron="--max-position-embeddings",
        within=COUNT,
        most=2**26,
        on_resume="free",
    )
    position: Literal["learned", "rope", "sinusoidal", "none"] = option(
        "learned",
        "position encoding; sinusoidal is fairseq's variant, sines followed by cosines",
        megatron={
            "--use-rotary-position-embeddings": "rope",
            "--no-position-embedding": weak("none"),
            "--position-embedding-type": {"learned_absolute": "learned", "rope": "rope", "none": "none"},
            "--rope-type": {"rope": "rope"},
        },
    )
    rope_base: float = option(
        10000.0,
        "base of the rotary frequencies",
        megatron="--rotary-base",
        within=POSITIVE,
        read_with={"position": ("rope",)},
    )
    rope_fraction: float = option(
        1.0,
        "fraction of each head's dimensions that are rotated",
        megatron="--rotary-percent",
        within=SHARE,
        read_with={"position": ("rope",)},
    )
    rope_interpolation: float = option(
        1.0,
        "divide positions by this",
        megatron="--rotary-seq-len-interpolation-factor",
        within=POSITIVE,
        read_with={"position": ("rope",)},
    )
    rope_scaling: Literal["none", "llama3", "yarn", "longrope"] = option(
        "none",
        "scale low rotary frequencies as in Llama 3.1 or YaRN, or divide each frequency by a separate factor "
        "(LongRoPE)",
        megatron={"--use-rope-scaling": "llama3"},
        needs={"position": ("rope",)},
    )
    rope_scaling_factor: float = option(
        8.0,
        "divide low rotary frequencies by this",
        megatron="--rope-scaling-factor",
        within=POSITIVE,
        read_with={"rope_scaling": ("llama3", "yarn")},
    )
    rope_low_freq_factor: float = option(
        1.0,
        "rotary frequencies with fewer periods than this within --rope-original-positions are low",
        within=POSITIVE,
        read_with={"rope_scaling": ("llama3",)},
    )
    rope_high_freq_factor: float = option(
        4.0,
        "rotary frequencies with more periods than this within --rope-original-positions are not scaled",
        within=POSITIVE,
        read_with={"rope_scaling": ("llama3",)},
    )
    rope_original_positions: int = option(
        8192,
        "maximum sequence length of the model before scaling",
        within=COUNT,
        read_with={"rope_scaling": ("llama3", "yarn", "longrope")},
    )
    rope_beta_fast: float = option(
        32.0,
        "YaRN: rotary frequencies with more periods than this within --rope-original-positions are not scaled",
        within=POSITIVE,
        read_with={"rope_scaling": ("yarn",)},
    )
    rope_beta_slow: float = option(
        1.0,
        "YaRN: rotary frequencies with fewer periods than this within --rope-original-positions are low",
        within=POSITIVE,
        read_with={"rope_scaling": ("yarn",)},
    )
    rope_truncate: bool = option(
        True, "round YaRN's bounds outwards to whole frequencies", read_with={"rope_scaling": ("yarn",)}
    )
    rope_magnitude: float | None = option(
        None,
        "multiply cosines and sines by this [YaRN: 0.1 ln factor + 1; LongRoPE: sqrt(1 + "
        "ln(--positions / original) / ln(original)), both at least 1]",
        within=POSITIVE,
        read_with={"rope_scaling": ("yarn", "longrope")},
    )
    rope_short_factors: tuple[float, ...] = option(
        (),
        "divisors of the frequencies in rows of at most --rope-original-positions tokens (LongRoPE)",
        within=POSITIVE,
        needs={"rope_scaling": ("longrope",)},
    )
    rope_long_factors: tuple[float, ...] = option(
        (),
        "divisors of the frequencies in rows of more than --rope-original-positions tokens (LongRoPE)",
        within=POSITIVE,
        needs={"rope_scaling": ("longrope",)},
    )
    rope_layers: tuple[int, ...] = option(
        (),
        "pattern of layers with (1) and without (0) rotary positions, repeated over all layers; 1 1 1 0 leaves"
        " out every fourth layer [rotary positions in all layers]",
        within=CHANCE,
        needs={"position": ("rope",)},
    )
    position_offset: int = option(
        0,
        "index of the first sinusoidal position, or row of the first learned position",
        within=NOT_NEGATIVE,
        most=2**16,
        needs={"position": ("sinusoidal", "learned")},
    )
    window: int | None = option(
        None,
        "attention window of every layer: a token attends to itself and the previous --window - 1 tokens; in "
        "an encoder, also to the next --window - 1 tokens [all tokens]",
        within=COUNT,
        most=2**26,
    )
    window_layers: tuple[int, ...] = option(
        (),
        "pattern of layers with --window (1) and with attention to all tokens (0), repeated over all layers "
        "[--window in all layers]",
        within=CHANCE,
        needs={"window": ()},
    )
    local_rope_base: float | None = option(
        None,
        "rotary base of layers with --window, whose positions are neither interpolated nor scaled [--rope-base]",
        within=POSITIVE,
        needs={"window": (), "position": ("rope",)},
    )
    embedding_scale: bool = option(False, "multiply token embeddings by the square root of --hidden")
    embedding_scale_rounded: bool = option(
        False,
        "round the factor of --embedding-scale to the dtype of the embeddings, as Gemma does",
        needs={"embedding_scale": ()},
    )
    embedding_multiplier: float = option(1.0, "multiply token embeddings by this", within=POSITIVE)
    residual_multiplier: float = option(
        1.0, "multiply each branch's output by this before adding the output to the residual stream", within=POSITIVE
    )
    logit_divisor: float = option(1.0, "divide logits by this", within=POSITIVE, families=DECODERS)
    logit_softcap: float | None = option(
        None, "bound logits to +-this with a hyperbolic tangent [no bound]", within=POSITIVE, families=DECODERS
    )
    attention_scale: float | None = option(
        None, "multiply attention scores by this [1 / square root of --head-dim]", within=POSITIVE
    )
    attention_scale_by_layer: bool = option(False, "also divide attention scores by the layer's number, counted from 1")
    attention_softcap: float | None = option(
        None, "bound attention scores to +-this with a hyperbolic tangent [no bound]", within=POSITIVE
    )
    norm: Literal["layernorm", "rmsnorm"] = option(
        "layernorm",
        "type of normalisation",
        megatron={"--normalization": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}},
    )
    norm_eps: float = option(
        1e-5, "epsilon of the norms", megatron={"--norm-epsilon": VALUE, "--layernorm-epsilon": VALUE}, within=POSITIVE
    )
    norm_offset: bool = option(False, "store each norm weight minus 1", megatron={"--apply-layernorm-1p": True})
    activation: Literal["gelu_tanh", "gelu", "swiglu", "geglu", "geglu_tanh", "relu", "relu2"] = option(
        "gelu_tanh",
        "feed-forward activation; gelu is computed exactly, with erf; swiglu and geglu are gated",
        megatron={
            "--swiglu": "swiglu",
            "--squared-relu": "relu2",
            "--openai-gelu": "gelu_tanh",
            "--no-bias-gelu-fusion": weak("gelu"),
        },
    )
    head_activation: Literal["gelu", "gelu_tanh"] = option(
        "gelu", "activation of BERT's head for masked words", families=("bert",)
    )
    mtp_layers: int = option(
        0,
        "number of additional future tokens to predict in training, each with an additional layer in the head",
        megatron="--mtp-num-layers",
        within=NOT_NEGATIVE,
        most=64,
        families=("gpt", "llama"),
    )
    mtp_loss: float = option(
        0.1,
        "weight of the mean loss over the tokens that --mtp-layers predicts",
        megatron="--mtp-loss-scaling-factor",
        within=NOT_NEGATIVE,
        on_resume="noted",
        read_with={"mtp_layers": COUNT},
    )
    bias: bool = option(True, "add biases to the linear layers", megatron={"--disable-bias-linear": False})
    qkv_bias: bool | None = option(
        None, "add biases to query, key and value [as --bias]", megatron={"--add-qkv-bias": True}
    )
    out_bias: bool | None = option(None, "add biases to the output projections of attention [as --bias]")
    head_bias: bool = option(False, "add a bias to the output layer", families=DECODERS)
    qk_norm: bool = option(False, "normalise queries and keys per head", megatron={"--qk-layernorm": True})
    qk_norm_whole: bool = option(
        False, "normalise queries and keys over all heads together", needs={"norm": ("rmsnorm",), "qk_norm": ()}
    )
    tied: bool = option(
        True,
        "share the embedding's weights with the output layer",
        megatron={"--untie-embeddings-and-output-weights": False},
    )
    norm_placement: Literal["pre", "post", "both", "branch"] = option(
        "pre",
        "put norms before each branch (pre); after each residual addition and after the embeddings, as in the "
        "original BERT (post); before and after each branch (both); or after each branch, before the residual "
        "addition (branch)",
        families={"post": ("bert",), "both": DECODERS, "branch": DECODERS},
    )
    parallel_branches: Literal["no", "two-norms", "one-norm"] = option(
        "no",
        "compute attention and feed-forward from the same input, with a norm for each or with one shared norm",
        families={"two-norms": DECODERS, "one-norm": DECODERS},
        needs={"norm_placement": ("pre",)},
    )
    post_norm_residual: bool = option(
        False,
        "use the output of the norm as the residual",
        megatron={"--apply-residual-connection-post-layernorm": True},
        needs={"norm_placement": ("pre",)},
    )
    binary_head: bool = option(
        True,
        "use BERT samples with two segments, whose order the model predicts",
        megatron={"--bert-no-binary-head": False},
        families=("bert",),
        formerly="masking",
    )
    token_types: int | None = option(
        None,
        "number of segments that BERT's token-type embeddings distinguish; 0 disables these embeddings [2; 0 "
        "without --binary-head]",
        within=NOT_NEGATIVE,
        most=2**16,
        families=("bert",),
    )
    head: Literal["lm", "classification", "choice", "none"] = option(
        "lm",
        "BERT's output: masked words and the order of segments (lm), one of --classes for each row "
        "(classification), or one of --classes rows (choice)",
        families=("bert",),
    )
    classes: int = option(
        2,
        "number of classes, or of rows to choose from",
        within=COUNT,
        most=2**20,
        families=("bert",),
        needs={"head": ("classification", "choice")},
    )
    memory_padding: Literal["masked", "uniform", "zero"] = option(
        "masked",
        "how T5 treats padding in the encoder: masked; or as in Megatron-LM 23.06 to core 0.5, where the decoder "
        "attends to padding tokens, and padding tokens attend equally to all tokens (uniform: fp32) or to none (zero: "
        "fused softmax in bf16, fp16)",
        families=("t5",),
        on_resume="noted",
    )
    hidden_dropout: float = option(
        0.1,
        "dropout probability in the residual stream",
        megatron="--hidden-dropout",
        within=BELOW_ONE,
        on_resume="noted",
    )
    attention_dropout: float = option(
        0.1,
        "dropout probability of attention weights",
        megatron="--attention-dropout",
        within=BELOW_ONE,
        on_resume="noted",
    )
    init_std: float = option(
        0.02,
        "standard deviation of the initial weights",
        megatron="--init-method-std",
        within=NOT_NEGATIVE,
        on_resume="free",
    )
    lora_rank: int = option(
        0,
        "rank of low-rank adapters (LoRA), which are then the only trained weights; 0 disables adapters",
        within=NOT_NEGATIVE,
        most=2**16,
    )
    lora_alpha: float = option(
        16.0, "scale adapters by this divided by --lora-rank", within=POSITIVE, read_with={"lora_rank": COUNT}
    )
    lora_targets: tuple[str, ...] = option(
        (),
        "add adapters to these linear layers of the transformer blocks, such as q_proj v_proj [all]",
        read_with={"lora_rank": COUNT},
    )
    lora_dropout: float = option(
        0.0,
        "dropout probability of the adapters' inputs",
        within=BELOW_ONE,
        on_resume="noted",
        read_with={"lora_rank": COUNT},
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RetrieverOptions, MixtureOptions, DenseOptions):
    """The shape and the computation of the model. Options that few models use come last."""

    title: ClassVar[str] = "Model"
    on_resume: ClassVar[OnResume] = "must match"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """A model whose derived fields are all set, as in a resolved run or a checkpoint."""

    layers: int = field()
    hidden: int = field()
    heads: int = field()
    kv_heads: int = field()
    head_dim: int = field()
    ffn: int = field()
    vocab: int = field()
    positions: int = field()
    qkv_bias: bool = field()

    @property
    def stacks(self) -> tuple[int, ...]:
        """Number of transformer blocks in each stack: in the only stack, or in the encoder and in the decoder."""
        return tuple(filter(None, (self.layers, self.decoder_layers)))

    def with_stacks(self, blocks: tuple[int, ...]) -> ModelConfig:
        """Return a copy of the model whose stacks have these numbers of blocks, in the order of `stacks`."""
        return replace(self, layers=blocks[0], decoder_layers=blocks[1] if len(blocks) > 1 else None)

    @property
    def blocks(self) -> int:
        """Number of transformer blocks in all stacks. The encoder's blocks have the lowest indices."""
        return sum(self.stacks)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Section):
    """Dtypes of weights, gradients and the loss scale."""

    title: ClassVar[str] = "Precision"

    dtype: Dtype = option(
        "fp32",
        "dtype of weights and activations",
        megatron={"--bf16": "bf16", "--fp16": "fp16"},
        common=True,
        on_resume="noted",
        evaluated=True,
    )
    fp8: bool = option(
        False,
        "run the GEMMs of the transformer blocks in fp8; the head, sums and master weights keep their dtypes",
        megatron={"--fp8-hybrid": True, "--fp8-format": {"hybrid": True}},
        on_resume="noted",
        needs={"dtype": ("bf16",)},
    )
    fp8_scaling: Literal["tensor", "block"] = option(
        "tensor",
        "scope of one scale with --fp8: a tensor (e4m3 forward, e5m2 for gradients), or a block of 1 x 128 elements "
        "of an activation or gradient and of 128 x 128 of a weight (e4m3, as in DeepSeek-V3)",
        megatron={"--fp8-recipe": {"delayed": "tensor", "tensorwise": "tensor", "blockwise": "block"}},
        on_resume="noted",
        needs={"fp8": ()},
    )
    grad_dtype: Literal["fp32", "fp16", "bf16", "fp64"] | None = option(
        None,
        "dtype in which gradients are accumulated and reduced [fp32; --dtype if that is fp64 or fp16]",
        megatron={
            "--accumulate-allreduce-grads-in-fp32": "fp32",
            "--fp32-allreduce": "fp32",
            "--grad-reduce-in-bf16": "bf16",
        },
        on_resume="noted",
    )
    masters: bool = option(
        True,
        "keep fp32 master copies of 16-bit weights",
        megatron={"--memory-efficient-fp16": False, "--memory-efficient-bf16": False},
        on_resume="noted",
        needs={"dtype": ("bf16", "fp16")},
    )
    loss_scale: float | None = option(
        None, "constant loss scale [dynamic with fp16]", megatron="--loss-scale", within=POSITIVE, on_resume="noted"
    )
    initial_loss_scale: float = option(
        2.0**32,
        "initial value of the dynamic loss scale",
        megatron="--initial-loss-scale",
        within=POSITIVE,
        read_with={"dtype": ("fp16",)},
    )
    min_loss_scale: float = option(
        1.0,
        "minimum of the dynamic loss scale",
        megatron={"--min-loss-scale": VALUE, "--min-scale": VALUE},
        on_resume="noted",
        within=POSITIVE,
        read_with={"dtype": ("fp16",)},
    )
    loss_scale_window: int = option(
        1000,
        "number of steps without overflow after which the loss scale doubles",
        megatron="--loss-scale-window",
        on_resume="noted",
        unit="steps",
        within=COUNT,
        read_with={"dtype": ("fp16",)},
    )
    hysteresis: int = option(
        2,
        "number of overflows after which the loss scale halves",
        megatron="--hysteresis",
        on_resume="noted",
        within=COUNT,
        read_with={"dtype": ("fp16",)},
    )
    residual_fp32: bool = option(
        False,
        "keep the residual stream in fp32",
        megatron={"--fp32-residual-connection": True},
        on_resume="noted",
        needs={"dtype": ("bf16", "fp16")},
    )
    embedding_fp32: bool = option(
        False,
        "keep embedding weights in fp32",
        megatron={"--embedding-weights-in-fp32": True, "--fp32-embedding": True},
        on_resume="noted",
        needs={"dtype": ("bf16", "fp16")},
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(PrecisionOptions):
    """The dtypes of a resolved run."""

    grad_dtype: Dtype = field()


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Section):
    """Number of ranks along each axis. dp is the world size divided by tp x pp x cp."""

    title: ClassVar[str] = "Parallelism"

    tp: int = option(
        1,
        "number of tensor-parallel ranks",
        megatron={"--tensor-model-parallel-size": VALUE, "--model-parallel-size": VALUE},
        common=True,
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    pp: int = option(
        1,
        "number of pipeline stages",
        megatron="--pipeline-model-parallel-size",
        common=True,
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    cp: int = option(
        1,
        "number of context-parallel ranks",
        megatron="--context-parallel-size",
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    ep: int = option(
        1,
        "number of ranks over which each layer's experts are split; --ep times --etp divides the ranks of a stage",
        megatron="--expert-model-parallel-size",
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    etp: int | None = option(
        None,
        "number of tensor-parallel ranks of each expert [tp]",
        megatron="--expert-tensor-parallel-size",
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    expert_dispatch: Literal["auto", "all-gather", "all-to-all"] = option(
        "auto",
        "how tokens reach experts on other ranks; auto is all-gather if --ep is at most --experts-chosen, otherwise"
        " all-to-all",
        megatron={
            "--moe-token-dispatcher-type": {"allgather": "all-gather", "alltoall": "all-to-all", "flex": "all-to-all"}
        },
        on_resume="rounding",
        rounds_over={"ep": 2},
        read_with={"ep": SEVERAL},
    )
    cp_comm: Literal["auto", "ring", "all-to-all"] = option(
        "auto",
        "communication of attention across context ranks; auto is all-to-all if the number of ranks divides "
        "the number of key/value heads, otherwise ring",
        megatron={"--cp-comm-type": {"p2p": "ring", "a2a": "all-to-all"}},
        on_resume="rounding",
        rounds_over={"cp": 2},
        read_with={"cp": SEVERAL},
        evaluated=True,
    )
    sequence_parallel: bool = option(
        False,
        "split the tokens of norms, dropout and residuals over the tensor-parallel ranks",
        megatron={"--sequence-parallel": True},
        on_resume="rounding",
        rounds_over={"tp": 2},
        common=True,
        layout=True,
        read_with={"tp": SEVERAL},
        evaluated=True,
    )
    tp_overlap: bool | None = option(
        None,
        "overlap the exchange of tokens between tensor ranks with GEMMs, using copies into peer memory [on where it"
        " is faster: GPUs of one host, large blocks, --sequence-parallel]",
        megatron={"--tp-comm-overlap": True},
        needs={"sequence_parallel": ()},
        evaluated=True,
    )
    schedule: str | None = option(
        None, "pipeline schedule [1f1b; interleaved with several chunks]", layout=True, choices=SCHEDULES
    )
    chunks: int = option(
        1,
        "number of model chunks per pipeline rank (interleaving)",
        megatron="--num-virtual-stages-per-pipeline-rank",
        on_resume="rounding",
        rounds_over={"data": 3},
        within=COUNT,
        layout=True,
    )
    layers_per_chunk: int | None = option(
        None,
        "number of blocks per model chunk, instead of --chunks",
        megatron="--num-layers-per-virtual-pipeline-stage",
        within=COUNT,
        layout=True,
    )
    stage_layers: tuple[int, ...] = option(
        (),
        "number of blocks in each stage, if the stages differ [equal numbers]",
        on_resume="rounding",
        rounds_over={"data": 3},
        within=COUNT,
        layout=True,
        evaluated=True,
    )
    split_rank: int | None = option(
        None,
        "pipeline rank of the first stage of T5's decoder; earlier stages hold the encoder [stages are split "
        "evenly between encoder and decoder]",
        megatron="--pipeline-model-parallel-split-rank",
        within=COUNT,
        layout=True,
        families=("t5",),
    )
    zero: int = option(
        0,
        "ZeRO stage: shard over dp the optimizer state (1), also gradients (2), also parameters (3)",
        megatron={
            "--use-distributed-optimizer": weak(1),
            "--zero-stage": VALUE,
            "--use-torch-fsdp2": 3,
            "--data-parallel-sharding-strategy": {
                "no_shard": "0",
                "optim": "1",
                "optim_grads": "2",
                "optim_grads_params": "3",
            },
        },
        on_resume="rounding",
        rounds_over={"data": 2},
        within=ZERO_STAGE,
        layout=True,
    )
    bucket_size: int = option(
        40_000_000,
        "minimum number of elements in a gradient bucket",
        megatron={"--zero-reduce-bucket-size": VALUE, "--ddp-bucket-size": VALUE},
        on_resume="rounding",
        rounds_over={"data": 3},
        unit="elements",
        within=COUNT,
    )
    overlap_grad_reduce: bool = option(
        True, "reduce gradients while the backward pass runs", megatron={"--overlap-grad-reduce": True}
    )
    overlap_param_gather: bool = option(
        True,
        "gather weights during computation: updated weights in the next forward pass (zero 1, 2), "
        "the weights of a unit while the previous unit runs (zero 3)",
        megatron={"--overlap-param-gather": True},
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelOptions):
    """The layout of a resolved run."""

    schedule: str = field()
    etp: int = field()


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Section):
    """Number of samples per step, sample length, and length of the run."""

    title: ClassVar[str] = "Batch"

    seq_length: int | None = option(
        None,
        "number of tokens in a sample",
        megatron={"--seq-length": VALUE, "--encoder-seq-length": VALUE},
        spelling_families={"--encoder-seq-length": ("t5",)},
        common=True,
        within=COUNT,
        most=2**26,
        on_resume="noted",
        evaluated=True,
    )
    micro_batch: int | None = option(
        None,
        "number of samples in one forward pass of a rank",
        megatron={"--micro-batch-size": VALUE, "--batch-size": VALUE},
        on_resume="rounding",
        common=True,
        within=COUNT,
        most=2**26,
        layout=True,
        evaluated=True,
    )
    global_batch: int | None = option(
        None,
        "number of samples in one step, over all ranks [micro-batch x dp]",
        megatron="--global-batch-size",
        common=True,
        within=COUNT,
        on_resume="noted",
    )
    accumulation: int | None = option(
        None,
        "number of microbatches per step on each data-parallel rank, instead of --global-batch",
        within=COUNT,
        layout=True,
    )
    rampup: tuple[int, ...] = option(
        (),
        "ramp-up of the global batch: initial size, increment, and number of samples until the full size",
        megatron="--rampup-batch-size",
        within=COUNT,
        bench="unused",
        on_resume="noted",
    )
    steps: int | None = option(
        None,
        "number of optimizer steps",
        megatron="--train-iters",
        common=True,
        unit="steps",
        within=COUNT,
        bench="unused",
    )
    samples: int | None = option(
        None,
        "number of training samples, instead of --steps",
        megatron="--train-samples",
        unit="samples",
        within=COUNT,
        bench="unused",
    )
    loss_normalizer: Literal["global", "microbatch"] = option(
        "global",
        "divide the loss by the sum of loss weights in the global batch; or in each microbatch, and take the mean "
        "over microbatches, as in Megatron-LM",
        megatron={"--calculate-per-token-loss": "global"},
        on_resume="noted",
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig(BatchOptions):
    """The batch of a resolved run. `steps` and `samples` may both be None if the run does not train."""

    seq_length: int = field()
    micro_batch: int = field()
    global_batch: int = field()


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer's update rule and its constants."""

    title: ClassVar[str] = "Optimizer"

    optimizer: Literal["adam", "sgd", "lamb", "adafactor", "muon"] = option(
        "adam",
        "update rule; adam is AdamW; muon orthogonalizes updates of the layers' matrices; other tensors use adam",
        megatron="--optimizer",
        on_resume="must match",
    )
    lr: float | None = option(
        None,
        "peak learning rate",
        megatron="--lr",
        synonyms={"--learning-rate": "--lr"},
        common=True,
        within=NOT_NEGATIVE,
        on_resume="schedule",
    )
    adam_beta1: float = option(
        0.9,
        "decay of the first moment (adam, lamb; in muon for all tensors except the layers' matrices)",
        megatron="--adam-beta1",
        within=BELOW_ONE,
        on_resume="noted",
        read_with={"optimizer": ("adam", "lamb", "muon")},
    )
    adam_beta2: float = option(
        0.999,
        "decay of the second moment (adam, lamb, muon)",
        megatron="--adam-beta2",
        within=BELOW_ONE,
        on_resume="noted",
        read_with={"optimizer": ("adam", "lamb", "muon")},
    )
    adam_eps: float = option(
        1e-8,
        "epsilon of the denominator (adam, lamb, muon)",
        megatron="--adam-eps",
        within=POSITIVE,
        on_resume="noted",
        read_with={"optimizer": ("adam", "lamb", "muon")},
    )
    sgd_momentum: float = option(
        0.9,
        "momentum of sgd",
        megatron="--sgd-momentum",
        within=BELOW_ONE,
        on_resume="noted",
        read_with={"optimizer": ("sgd",)},
    )
    adafactor_relative: bool = option(
        False,
        "adafactor: scale updates by the weight's root mean square x min(lr, 1 / sqrt(step)) instead of lr",
        read_with={"optimizer": ("adafactor",)},
        on_resume="noted",
    )
    adafactor_clip: float = option(
        1.0,
        "adafactor: maximum root mean square of an update",
        within=POSITIVE,
        read_with={"optimizer": ("adafactor",)},
        on_resume="noted",
    )
    adafactor_decay: float = option(
        0.8,
        "adafactor: the decay of second moments is 1 - step^-this",
        within=POSITIVE,
        read_with={"optimizer": ("adafactor",)},
        on_resume="noted",
    )
    muon_momentum: float = option(
        0.95,
        "muon: decay of the running average of gradients",
        megatron="--muon-momentum",
        within=BELOW_ONE,
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_nesterov: bool = option(
        False,
        "muon: use Nesterov momentum",
        megatron="--muon-use-nesterov",
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_coefficients: Literal["quintic", "simple", "polar_express"] = option(
        "quintic",
        "muon: polynomials of the Newton-Schulz iterations, which make a matrix orthogonal",
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_steps: int = option(
        5,
        "muon: number of Newton-Schulz iterations",
        megatron="--muon-num-ns-steps",
        within=COUNT,
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_scale: Literal["spectral", "shape_scaling", "unit_rms_norm"] = option(
        "spectral",
        "muon: scale of the update of a matrix [out, in]: sqrt(max(out, in)), sqrt(max(1, out / in)) or sqrt(out / in)",
        megatron="--muon-scale-mode",
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_factor: float = option(
        1.0,
        "muon: multiply every update of a matrix by this; with 0.2, learning rates tuned for adam can be used",
        megatron="--muon-extra-scale-factor",
        within=POSITIVE,
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    muon_dtype: Literal["bf16", "fp32"] = option(
        "bf16",
        "muon: dtype of the GEMMs in the Newton-Schulz iterations",
        read_with={"optimizer": ("muon",)},
        on_resume="noted",
    )
    weight_decay: float = option(
        0.01,
        "weight decay; decoupled, except in sgd",
        megatron="--weight-decay",
        within=NOT_NEGATIVE,
        on_resume="schedule",
    )
    decay_all: bool = option(
        False,
        "also apply weight decay to biases and norms, as fairseq does",
        on_resume="noted",
        needs={"optimizer": ("adam", "sgd")},
    )
    clip_grad: float = option(
        1.0,
        "clip the global gradient norm to this; 0 disables clipping",
        megatron="--clip-grad",
        within=NOT_NEGATIVE,
        on_resume="noted",
    )
    optimizer_offload: bool = option(
        False,
        "keep master weights and moments in host memory, and run the optimizer update on the host",
        megatron={"--optimizer-cpu-offload": True, "--zero-offload": {"cpu": "true", "none": "false"}},
        on_resume="rounding",
        rounds_over={"gpu": 1},
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Section):
    """Schedules of learning rate and weight decay."""

    title: ClassVar[str] = "Schedule"
    on_resume: ClassVar[OnResume] = "schedule"
    bench: ClassVar[Bench] = "unused"

    lr_decay: Literal[
        "constant", "linear", "cosine", "inverse-square-root", "wsd", "range-test", "range-exponential"
    ] = option(
        "linear",
        "curve of the learning rate; wsd stays at --lr until the final decay; range-test adds --lr every "
        "--lr-decay-steps; range-exponential grows from --min-lr to --lr",
        megatron={
            "--lr-decay-style": Renamed(
                {"WSD": "wsd"},
                refused={
                    "exponential": "is not a choice: in Megatron-LM of 2019 it was never implemented and acted as "
                    "constant, in that of 2020 the rate halved over the decay"
                },
            )
        },
        common=True,
    )
    min_lr: float = option(
        0.0,
        "final learning rate; with range-exponential, the initial one",
        megatron="--min-lr",
        within=NOT_NEGATIVE,
        read_with={"lr_decay": ("linear", "cosine", "inverse-square-root", "wsd", "range-exponential")},
    )
    lr_decay_steps: int | None = option(
        None,
        "length of the learning-rate decay in steps, including the warm-up [all]",
        megatron="--lr-decay-iters",
        unit="steps",
        within=COUNT,
    )
    lr_decay_samples: int | None = option(
        None,
        "length of the learning-rate decay in samples, including the warm-up [all]",
        megatron="--lr-decay-samples",
        unit="samples",
        within=COUNT,
    )
    lr_wsd_decay_steps: int | None = option(
        None,
        "wsd: number of steps in the final decay",
        megatron="--lr-wsd-decay-iters",
        unit="steps",
        within=COUNT,
        needs={"lr_decay": ("wsd",)},
    )
    lr_wsd_decay_samples: int | None = option(
        None,
        "wsd: number of samples in the final decay",
        megatron="--lr-wsd-decay-samples",
        unit="samples",
        within=COUNT,
        needs={"lr_decay": ("wsd",)},
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential",
        "wsd: curve of the final decay",
        megatron="--lr-wsd-decay-style",
        read_with={"lr_decay": ("wsd",)},
    )
    lr_warmup_steps: int = option(
        0, "number of warm-up steps", megatron="--lr-warmup-iters", common=True, unit="steps", within=NOT_NEGATIVE
    )
    lr_warmup_samples: int = option(
        0, "number of warm-up samples", megatron="--lr-warmup-samples", unit="samples", within=NOT_NEGATIVE
    )
    lr_warmup_fraction: float | None = option(
        None,
        "warm-up as a fraction of --lr-decay-steps or --lr-decay-samples",
        megatron={"--lr-warmup-fraction": VALUE, "--warmup": VALUE},
        within=BELOW_ONE,
    )
    lr_warmup_style: Literal["linear", "log"] = option(
        "linear",
        "curve of the warm-up; log grows with the logarithm of the step",
        read_with={"lr_warmup_steps": COUNT, "lr_warmup_samples": COUNT, "lr_warmup_fraction": POSITIVE},
    )
    lr_warmup_init: float = option(
        0.0,
        "learning rate at the start of the warm-up",
        megatron="--lr-warmup-init",
        within=NOT_NEGATIVE,
        read_with={"lr_warmup_steps": COUNT, "lr_warmup_samples": COUNT, "lr_warmup_fraction": POSITIVE},
    )
    start_weight_decay: float | None = option(
        None, "initial weight decay, if not constant", megatron="--start-weight-decay", within=NOT_NEGATIVE
    )
    end_weight_decay: float | None = option(
        None, "final weight decay, if not constant", megatron="--end-weight-decay", within=NOT_NEGATIVE
    )
    weight_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "curve of the weight decay over the run", megatron="--weight-decay-incr-style"
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ScheduleOptions):
    """The schedule of a resolved run."""

    start_weight_decay: float = field()
    end_weight_decay: float = field()


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """Recomputation of activations in the backward pass."""

    title: ClassVar[str] = "Memory"

    recompute: Literal["none", "selective", "full"] = option(
        "none",
        "activations to recompute in the backward pass",
        megatron={
            "--recompute-activations": weak("selective"),
            "--recompute-granularity": VALUE,
            "--checkpoint-activations": "full",
            "--activations-checkpoint-method": {"uniform": "full", "block": "full"},
        },
        layout=True,
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "how --recompute full selects blocks",
        megatron={
            "--recompute-method": VALUE,
            "--recompute-granularity": Renamed({"full": "uniform", "selective": None}),
            "--activations-checkpoint-method": VALUE,
            "--checkpoint-activations": weak("uniform"),
        },
        layout=True,
        needs={"recompute": ("full",)},
    )
    recompute_layers: int | None = option(
        None,
        "number of blocks per group (uniform) or per stage (block)",
        megatron={
            "--recompute-num-layers": VALUE,
            "--recompute-granularity": Renamed({"full": "1", "selective": None}),
            "--checkpoint-num-layers": VALUE,
            "--activations-checkpoint-num-layers": VALUE,
            "--checkpoint-activations": weak(1),
            "--activations-checkpoint-method": weak(1),
        },
        within=COUNT,
        layout=True,
        needs={"recompute": ("full",)},
    )
    distribute_saved: bool = option(
        False,
        "split saved activations over the tensor-parallel ranks",
        megatron={
            "--distribute-saved-activations": True,
            "--distribute-checkpointed-activations": True,
            "--partition-activations": True,
        },
        layout=True,
        read_with={"tp": SEVERAL},
    )


SPLITS = ("train", "valid", "test")
"""The splits of a run's data, in the order of the shares in --split."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Token files, their splits, and the order in which they are read."""

    title: ClassVar[str] = "Data"
    bench: ClassVar[Bench] = "unused"

    data_path: tuple[str, ...] = option(
        (),
        "prefixes of .bin/.idx pairs, or alternating weights and prefixes",
        megatron="--data-path",
        common=True,
        on_resume="noted",
    )
    train_data: tuple[str, ...] = option(
        (),
        "prefixes of training data, not divided by --split; or TFRecords, or labelled files",
        megatron="--train-data-path",
        on_resume="noted",
    )
    valid_data: tuple[str, ...] = option(
        (),
        "prefixes of validation data, not divided by --split; or labelled files, each reported by its name",
        megatron={"--valid-data-path": VALUE, "--data-path2": VALUE},
    )
    test_data: tuple[str, ...] = option(
        (), "prefixes of test data, not divided by --split", megatron="--test-data-path"
    )
    valid_sets: tuple[str, ...] = option(
        (), "additional validation sets, each given as name=prefix and reported by its name"
    )
    corpora: str | None = option(None, "TOML file whose table [corpora] maps names to prefixes")
    chat_data: tuple[str, ...] = option(
        (),
        "conversations in JSON lines, or a data set on the Hub, instead of token files",
        on_resume="noted",
        families=DECODERS,
        hub="dataset",
    )
    chat_template: str = option(
        "auto",
        "auto (the template stored with the weights, or plain if there is none), model (the template stored with the "
        "weights), llama2, llama3, chatml, plain, or a Jinja file",
        on_resume="noted",
    )
    split: str = option(
        "969, 30, 1",
        "shares of training, validation and test data",
        megatron="--split",
        on_resume="noted",
        read_with={"data_path": ()},
    )
    data_cache: str | None = option(None, "directory for cached sample orders", megatron="--data-cache-path")
    mmap: bool = option(
        True,
        "map token files into memory; if off, read data from the files on demand",
        megatron={"--no-mmap-bin-files": False},
    )
    repeat_short_parts: bool = option(
        False,
        "repeat splits of a corpus that are shorter than a sample, as Megatron-LM 23.06 does; if off, short "
        "splits are an error",
    )
    mock_data: bool = option(False, "use random tokens instead of files", megatron={"--mock-data": True})
    retro: str | None = option(
        None,
        "folder written by mega retro, with the database of neighbours and the neighbours of all samples",
        megatron={"--retro-workdir": VALUE, "--retro-project-dir": VALUE},
        metavar="<path>",
        on_resume="noted",
        evaluated=True,
        needs={"retriever": ()},
        families=DECODERS,
    )
    order: Literal["single", "core", "cyclic"] = option(
        "single",
        "sample order: single is that of Megatron-LM 23.06; core is like single, but with the splits and blends of "
        "Megatron-core 0.18; cyclic assigns samples to data-parallel ranks, so the result depends on the "
        "number of ranks",
        megatron="--dataloader-type",
        on_resume="noted",
    )
    data_sharding: bool = option(
        True,
        "cyclic order: shuffle a separate shard of the samples for each data-parallel rank; if off, shuffle "
        "all samples together and assign them round-robin",
        megatron={"--no-data-sharding": False},
        on_resume="noted",
        read_with={"order": ("cyclic",)},
    )
    reset_positions: bool = option(
        False,
        "restart positions after each end-of-document token",
        megatron={"--reset-position-ids": True},
        on_resume="noted",
        families=DECODERS,
    )
    reset_attention: bool = option(
        False,
        "prevent attention across document boundaries",
        megatron={"--reset-attention-mask": True},
        on_resume="noted",
        families=DECODERS,
        bench="read",
    )
    eod_mask_loss: bool = option(
        False,
        "exclude positions whose input is an end-of-document token from the loss",
        megatron={"--eod-mask-loss": True},
        on_resume="noted",
        families=DECODERS,
    )
    fim_data: bool = option(
        False,
        "fill in the middle: move a span of a document to its end, between special tokens",
        megatron={"--fim-data": True},
        on_resume="noted",
        families=DECODERS,
    )
    fim_rate: float = option(
        0.5,
        "fraction of documents that --fim-data changes",
        megatron="--fim-rate",
        within=CHANCE,
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_spm_rate: float = option(
        0.5,
        "fraction of changed documents in which the suffix comes before the prefix",
        megatron="--fim-spm-rate",
        within=CHANCE,
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_split_sample: str | None = option(
        None,
        "token that separates a document into fragments, such as files, which are then changed separately",
        megatron="--fim-split-sample",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_fragment_rate: float = option(
        0.5,
        "fraction of fragments that --fim-data changes",
        megatron="--fim-fragment-rate",
        within=CHANCE,
        on_resume="noted",
        read_with={"fim_split_sample": ()},
    )
    fim_no_prefix: str | None = option(
        None,
        "do not change texts that begin with this string",
        megatron="--fim-no-prefix",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_prefix_token: str = option(
        "<fim_prefix>",
        "token before the prefix",
        megatron="--fim-prefix-token",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_middle_token: str = option(
        "<fim_middle>",
        "token before the middle",
        megatron="--fim-middle-token",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_suffix_token: str = option(
        "<fim_suffix>",
        "token before the suffix",
        megatron="--fim-suffix-token",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_pad_token: str = option(
        "<fim_pad>",
        "token that pads a sample that --fim-data made shorter",
        megatron="--fim-pad-token",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    fim_eod_token: str = option(
        "<|endoftext|>",
        "token that ends a document",
        megatron="--fim-eod-token",
        on_resume="noted",
        read_with={"fim_data": ()},
    )
    allow_tokenizer_mismatch: bool = option(
        False,
        "accept token files or weights made with another tokenizer, such as an earlier version with fewer tokens",
        evaluated=True,
    )
    allow_corpus_change: bool = option(False, "resume even if the contents of the token files have changed")
    data_workers: int = option(
        2,
        "0: load each step's data when the step needs it; any other number: prefetch data on another thread",
        megatron="--num-workers",
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class MaskingConfig(Section):
    """Format of the samples, and masking in the samples of BERT and T5."""

    title: ClassVar[str] = "Samples"

    sample_kind: Literal["gpt", "bert", "t5", "tfrecords"] = option(
        "gpt",
        "gpt: consecutive tokens; bert: segment pairs with masked words; t5: text with some spans removed; "
        "tfrecords: BERT's segment pairs, read from TFRecords",
        megatron={"--use-tfrecords": "tfrecords"},
        families={"bert": ("bert",), "t5": ("t5",), "tfrecords": ("bert",)},
        on_resume="noted",
    )
    mask_prob: float = option(
        0.15,
        "fraction of tokens that are masked or removed",
        megatron="--mask-prob",
        within=SHARE,
        families=MASKED,
        on_resume="noted",
    )
    short_seq_prob: float = option(
        0.1,
        "fraction of samples that are deliberately shortened",
        megatron="--short-seq-prob",
        within=BELOW_ONE,
        families=MASKED,
        on_resume="noted",
    )
    decoder_seq_length: int = option(
        128,
        "number of decoder tokens in a T5 sample",
        on_resume="noted",
        megatron="--decoder-seq-length",
        within=COUNT,
        most=2**26,
        families=("t5",),
    )


GATED: dict[str, Literal["gelu", "gelu_tanh", "silu"]] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Gated value of --activation -> the activation function of the gate."""

LABELLED: dict[str, tuple[Literal["classification", "choice"], int]] = {
    "mnli": ("classification", 3),
    "qqp": ("classification", 2),
    "race": ("choice", 4),
}
"""Task whose samples have labels -> the head of the task's model, and the number of classes or choices."""

TASKS: dict[str, tuple[str, ...]] = {"lm": (), "dpo": ("dpo_data",), **dict.fromkeys(LABELLED, ("train_data",))}
"""Task -> the options that the task requires. training/kinds implements each task."""


@dataclass(frozen=True, kw_only=True)
class FinetuningConfig(Section):
    """The training objective, and its data."""

    title: ClassVar[str] = "Finetuning"
    bench: ClassVar[Bench] = "unused"

    task: str = option(
        "lm",
        "training objective: lm predicts the next token, dpo prefers one of two answers; mnli, "
        "qqp and race predict labels",
        megatron={"--task": Renamed({"MNLI": "mnli", "QQP": "qqp", "RACE": "race"})},
        choices=TASKS,
        on_resume="must match",
    )
    epochs: int | None = option(
        None,
        "number of passes over labelled data, instead of --steps; each pass ends with a validation and a checkpoint",
        megatron="--epochs",
        within=COUNT,
        needs={"task": tuple(LABELLED)},
    )
    keep_last_batch: bool = option(
        False,
        "also train on the last batch of a pass if it has fewer questions than a global batch",
        on_resume="noted",
        needs={"task": tuple(LABELLED)},
    )
    dpo_data: tuple[str, ...] = option(
        (),
        "preference pairs in JSON lines, or a data set on the Hub, with fields prompt, chosen and rejected",
        on_resume="noted",
        needs={"task": ("dpo",)},
        families=DECODERS,
        hub="dataset",
    )
    dpo_beta: float = option(
        0.1,
        "beta of dpo; a larger value keeps the weights closer to the initial weights",
        within=POSITIVE,
        on_resume="noted",
        read_with={"task": ("dpo",)},
    )
    dpo_label_smoothing: float = option(
        0.0,
        "assumed fraction of pairs whose answers are swapped",
        within=BELOW_HALF,
        on_resume="noted",
        read_with={"task": ("dpo",)},
    )


TOKENIZERS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "FairseqTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "Llama3Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "EncDecTokenizer": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}
"""Type of tokenizer -> the options that the tokenizer requires. `text/build.py` builds each tokenizer."""

TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""The options that name files of a tokenizer, in the order of the arguments of `text.kind.kind_of_files`."""

ALSO_READ: dict[str, tuple[str, ...]] = {"FairseqTokenizer": ("vocab_file", "merge_file")}
"""Type of tokenizer -> the optional files that the tokenizer reads."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """The tokenizer that made the token files."""

    title: ClassVar[str] = "Tokenizer"
    evaluated: ClassVar[bool] = True

    tokenizer: str | None = option(
        None,
        "type of tokenizer",
        megatron={
            "--tokenizer-type": Renamed({"BertWordPieceTokenizer": "BertWordPieceLowerCase"}),
            "--tokenizer-model-type": {
                **dict.fromkeys(
                    ("bert-base-uncased", "bert-large-uncased", "bert-base-multilingual-uncased"),
                    "BertWordPieceLowerCase",
                ),
                **dict.fromkeys(
                    ("bert-base-cased", "bert-large-cased", "bert-base-multilingual-cased", "bert-base-chinese"),
                    "BertWordPieceCase",
                ),
                **dict.fromkeys(("bpe", "char", "unigram", "word")),
            },
        },
        common=True,
        choices=TOKENIZERS,
        usual_in={"BertWordPieceLowerCase": MASKED, "BertWordPieceCase": MASKED},
    )
    tokenizer_model: str | None = option(
        None,
        "SentencePiece .model, Hugging Face tokenizer.json or fairseq dict.txt, or a name on the Hub",
        megatron={"--tokenizer-model": VALUE, "--tokenizer-path": VALUE},
        common=True,
        hub="tokenizer",
    )
    vocab_file: str | None = option(None, "vocabulary file", megatron="--vocab-file", common=True)
    merge_file: str | None = option(None, "BPE merges file", megatron="--merge-file", common=True)
    vocab_size: int | None = option(
        None,
        "vocabulary size of the NullTokenizer",
        megatron="--vocab-size",
        within=COUNT,
        read_with={"tokenizer": ("NullTokenizer",)},
    )
    null_eod_last: bool = option(
        False,
        "use the last of NullTokenizer's --vocab-size ids as the end of document, as in Megatron-core 0.18; if"
        " off, use an additional id",
        read_with={"tokenizer": ("NullTokenizer",)},
    )
    vocab_extra_ids: int = option(
        0, "number of sentinel tokens to add", megatron="--vocab-extra-ids", within=NOT_NEGATIVE, usual_in=("t5",)
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Validation during and after training."""

    title: ClassVar[str] = "Evaluation"
    bench: ClassVar[Bench] = "unused"

    eval_interval: int = option(
        1000, "steps between validations", megatron="--eval-interval", unit="steps", within=COUNT
    )
    eval_iters: int = option(
        100,
        "number of batches per validation; 0 or -1 disables validation",
        megatron="--eval-iters",
        common=True,
        within=Range("at least -1", lambda value: value >= -1),
    )
    skip_train: bool = option(False, "evaluate without training", megatron={"--skip-train": True})
    valid_by_corpus: bool = option(False, "also report the validation loss of each corpus of a blend")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Directories for saving, loading and resuming a run, and the retention of checkpoints."""

    title: ClassVar[str] = "Checkpoint"
    bench: ClassVar[Bench] = "unused"

    save: str | None = option(None, "directory to save to", megatron="--save", common=True)
    load: str | None = option(
        None,
        "directory to load from, or a name on the Hub",
        megatron="--load",
        common=True,
        evaluated=True,
        hub="model",
    )
    pretrained_checkpoint: str | None = option(
        None,
        "for mega finetune: the initial weights, used while --load and --save contain no checkpoint of the task",
        megatron="--pretrained-checkpoint",
    )
    save_interval: int | None = option(
        None,
        "steps between checkpoints [only at the end]",
        megatron="--save-interval",
        common=True,
        unit="steps",
        within=COUNT,
        needs={"save": ()},
    )
    resume: str | None = option(
        None,
        "auto: the newest checkpoint under --save that passes verification and was not followed by divergence;"
        " or a step directory, or the name of a step in --save",
        common=True,
    )
    finetune: bool = option(
        False, "load weights only and start at step 0", megatron={"--finetune": True}, needs={"load": ()}
    )
    load_optim: bool = option(
        True, "load the optimizer's state", megatron={"--no-load-optim": False}, read_with={"load": (), "resume": ()}
    )
    save_optim: bool = option(
        True, "save the optimizer's state", megatron={"--no-save-optim": False}, read_with={"save": ()}
    )
    async_save: bool = option(
        False, "save in the background, from a copy in host memory", megatron={"--async-save": True}, needs={"save": ()}
    )
    save_retry_minutes: float = option(
        0,
        "retry a failed save for this many minutes before the run ends; at most --phase-timeout-minutes",
        unit="minutes",
        within=NOT_NEGATIVE,
        needs={"save": ()},
    )
    good_after: int = option(
        100,
        "a checkpoint counts as good after this many further steps without divergence; a resume skips a "
        "checkpoint if the run diverged earlier",
        unit="steps",
        within=COUNT,
        needs={"save": ()},
    )
    keep_last: int | None = option(
        None,
        "keep only this many of the newest checkpoints, plus the newest good checkpoint, the next to become "
        "good, and the checkpoint with the lowest validation loss",
        megatron={"--save-retain-interval": weak(1)},
        within=COUNT,
        needs={"save": ()},
    )
    keep_every: int | None = option(
        None,
        "also keep the checkpoints at multiples of this many steps",
        megatron="--save-retain-interval",
        unit="steps",
        within=COUNT,
        needs={"save": (), "keep_last": ()},
    )
    keep_optimizer_last: int | None = option(
        None, "keep the optimizer's state only in this many of the newest checkpoints", within=COUNT, needs={"save": ()}
    )
    require_load: bool = option(
        False,
        "stop if --load contains no checkpoint",
        megatron={"--exit-on-missing-checkpoint": True},
        needs={"load": ()},
    )
    use_checkpoint_config: bool = option(
        False,
        "use the model section of the checkpoint of --load, or else of the checkpoint from which --resume continues",
        megatron={"--use-checkpoint-args": True},
    )
    override_schedule: bool = option(
        False,
        "use the schedule of this run, even if the checkpoint's schedule differs",
        megatron={"--override-opt_param-scheduler": True, "--override-opt-param-scheduler": True},
        read_with={"load": (), "resume": ()},
    )
    use_checkpoint_schedule: bool = option(
        False,
        "use the schedule of the checkpoint, even if this run's schedule differs",
        megatron={"--use-checkpoint-opt_param-scheduler": True, "--use-checkpoint-opt-param-scheduler": True},
        read_with={"load": (), "resume": ()},
    )


@dataclass(frozen=True, kw_only=True)
class LogOptions(Section):
    """Reports of metrics, samples and profiles."""

    title: ClassVar[str] = "Logging"
    bench: ClassVar[Bench] = "unused"

    log_interval: int = option(
        100, "steps between reports in the log", megatron="--log-interval", common=True, unit="steps", within=COUNT
    )
    metrics: str | None = option(
        None, "JSON-lines file for metrics [metrics.jsonl under --save, or in the current directory]"
    )
    tensorboard_dir: str | None = option(None, "TensorBoard directory", megatron="--tensorboard-dir")
    tensorboard_interval: int = option(
        1,
        "steps between writes to TensorBoard",
        megatron="--tensorboard-log-interval",
        unit="steps",
        within=COUNT,
        read_with={"tensorboard_dir": ()},
    )
    wandb_project: str | None = option(
        None, "report metrics to Weights & Biases, in this project", megatron="--wandb-project"
    )
    wandb_name: str | None = option(
        None,
        "name of the run in Weights & Biases, to which the date is appended; also enables reports to Weights & Biases",
        megatron={"--wandb-name": VALUE, "--wandb-exp-name": VALUE},
    )
    wandb_entity: str | None = option(None, "user or team in Weights & Biases", megatron="--wandb-entity")
    wandb_id: str | None = option(
        None, "resume this run in Weights & Biases; also enables reports to Weights & Biases", megatron="--wandb-id"
    )
    wandb_dir: str | None = option(
        None, "directory for the files of Weights & Biases [next to --metrics]", megatron="--wandb-save-dir"
    )
    mlflow_uri: str | None = option(None, "report metrics to MLflow: the URL of a server, or a folder")
    mlflow_experiment: str = option("mega", "name of the experiment in MLflow", read_with={"mlflow_uri": ()})
    metrics_port: int | None = option(
        None,
        "serve /metrics (Prometheus) and /health on this port of the first rank's host, on all interfaces",
        within=Range("1 to 65535", lambda value: 0 < value <= 65535),
    )
    sample_interval: int | None = option(
        None,
        "steps between generations from fixed prompts; the texts are written to the log and to --metrics",
        unit="steps",
        within=COUNT,
        families=DECODERS,
    )
    sample_prompts: tuple[str, ...] = option(
        (), "prompts of --sample-interval [the beginning of a document]", read_with={"sample_interval": ()}, text=True
    )
    sample_tokens: int = option(
        48, "number of tokens generated for each prompt", within=COUNT, most=2**16, read_with={"sample_interval": ()}
    )
    log_params_norm: bool = option(False, "log the norm of the parameters", megatron={"--log-params-norm": True})
    log_zeros: bool = option(
        False, "log the fraction of gradients that are zero", megatron={"--log-num-zeros-in-grad": True}
    )
    progress: bool = option(True, "show a progress bar on a terminal", evaluated=True)
    profile: str | None = option(
        None,
        "profile the steps from FIRST to LAST: write a trace per rank in --profile-ranks next to --metrics, "
        "and a table to the log",
        metavar="FIRST:LAST",
    )
    profile_ranks: tuple[int, ...] = option(
        (0,), "ranks to profile", megatron="--profile-ranks", read_with={"profile": ()}, within=FROM_0
    )

    @property
    def wandb(self) -> bool:
        """Whether the run reports to Weights & Biases."""
        return any((self.wandb_project, self.wandb_name, self.wandb_id))


@dataclass(frozen=True, kw_only=True)
class LogConfig(LogOptions):
    """The logging section of a resolved run."""

    metrics: str = field()


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section):
    """Reactions to NaN, loss spikes and slow ranks."""

    title: ClassVar[str] = "Guards"
    bench: ClassVar[Bench] = "unused"

    on_nan: Literal["stop", "skip", "rollback"] = option(
        "stop",
        "reaction to a loss, a gradient (unless the loss scale handles it), a weight or a moment that is not "
        "finite: end the run (stop), skip the batch (skip), or return to the newest checkpoint and skip the "
        "batches since then (rollback)",
    )
    on_spike: Literal["warn", "skip", "rollback"] = option(
        "warn",
        "reaction to a loss or gradient norm far above that of the last 128 steps: print a warning (warn), or "
        "act as --on-nan does (skip, rollback)",
    )
    spike_threshold: float = option(
        10.0,
        "size of a spike, in robust standard deviations of the loss or of the logarithm of the gradient norm",
        within=POSITIVE,
    )
    max_rollbacks: int = option(
        3,
        "maximum number of rollbacks before the run ends",
        within=COUNT,
        read_with={"on_nan": ("rollback",), "on_spike": ("rollback",)},
    )
    slow_rank: float = option(
        1.25,
        "report a rank whose working time per step exceeds that of other ranks by this factor",
        within=ABOVE_ONE,
    )
    inject: tuple[str, ...] = option(
        (),
        "inject a fault for a test, such as nan:gradient@step=12,rank=3; also needs MEGA_INJECT=1 in the environment",
        metavar="FAULT",
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Section):
    """Devices and ranks of the run, and conditions for an early stop."""

    title: ClassVar[str] = "Run"

    nproc: int | None = option(
        None, "number of local ranks to start", common=True, within=COUNT, most=MOST_RANKS, bench="host", evaluated=True
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "kind of device to run on", synonyms={"gpu": "cuda"}, common=True, bench="host", evaluated=True
    )
    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "communication backend of the ranks", megatron="--distributed-backend", bench="host", evaluated=True
    )
    timeout_minutes: float = option(
        10,
        "end the run if ranks fail to start or to respond for this long",
        megatron="--distributed-timeout-minutes",
        unit="minutes",
        within=MINUTES,
        bench="host",
        evaluated=True,
    )
    phase_timeout_minutes: float = option(
        60,
        "time limit for loading, building caches, evaluating and saving while all ranks respond; at least "
        "--timeout-minutes",
        unit="minutes",
        within=MINUTES,
        bench="unused",
    )
    seed: int = option(
        1234,
        "seed of initial weights, dropout and data order",
        megatron="--seed",
        common=True,
        within=SEED,
        on_resume="noted",
        evaluated=True,
    )
    deterministic: bool = option(
        False,
        "make the run bitwise reproducible",
        megatron={"--deterministic-mode": True},
        on_resume="rounding",
        rounds_over={"gpu": 1},
        evaluated=True,
    )
    audit_interval: int = option(
        100,
        "steps between comparisons of all copies of weights and moments; 0 disables the comparisons",
        megatron="--check-weight-hash-across-dp-replicas-interval",
        unit="steps",
        within=NOT_NEGATIVE,
    )
    ops: Literal["auto", "reference", "flash-attn", "apex"] = option(
        "auto",
        "fast operators (auto), plain PyTorch references, or mega's operators with the attention of flash-attn"
        " or the norms of apex",
        on_resume="noted",
        evaluated=True,
    )
    cuda_graph: bool | None = option(
        None,
        "on a GPU, capture a microbatch's forward and backward pass as one CUDA graph, for models so small that"
        " the device waits for the host [on for small models, except with pipeline stages or --zero 2 or 3]",
        megatron={
            "--enable-cuda-graph": True,
            "--cuda-graph-impl": {"none": "false", "local": "true", "transformer_engine": "true"},
        },
    )
    dry_run: bool = option(
        False, "check everything and build every stage without allocating memory, but do not train", common=True
    )
    world: int | None = option(None, "world size to check in a dry run", unit="ranks", common=True, within=COUNT)
    exit_interval: int | None = option(
        None,
        "stop at the next multiple of this many steps",
        megatron="--exit-interval",
        unit="steps",
        within=COUNT,
        once=True,
    )
    exit_tokens: int | None = option(
        None, "stop after this many tokens", megatron="--train-tokens", unit="tokens", within=COUNT
    )
    exit_minutes: int | None = option(
        None,
        "stop after this many minutes",
        megatron="--exit-duration-in-mins",
        unit="minutes",
        within=COUNT,
        once=True,
    )
    exit_on_signal: bool = option(
        True,
        "save and stop on Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP, with exit code 128 + the signal's number",
        megatron={"--exit-signal-handler": True},
    )


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig(Section):
    """Options for restarting ranks after a failure. --nproc starts these ranks, on one or several hosts."""

    title: ClassVar[str] = "Supervision"
    bench: ClassVar[Bench] = "unused"

    max_restarts: int = option(
        0,
        "after a rank is lost or fails, restart all ranks from the newest checkpoint, at most this many times "
        "in a row without a newer checkpoint",
        within=FROM_0,
        needs={"save": ()},
    )
    hosts: int | None = option(
        None,
        "number of hosts, each of which runs this command; additional hosts wait as spares. MASTER_ADDR and "
        "MASTER_PORT are the address of the first host",
        within=COUNT,
        needs={"nproc": ()},
    )
    peer_copy_interval: int = option(
        0,
        "steps between copies of the state into the memory of this host and the next one, from which restarted"
        " ranks resume; 0 disables the copies",
        unit="steps",
        within=FROM_0,
        needs={"max_restarts": ()},
    )
