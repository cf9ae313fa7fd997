"""What one layer is, as values: branches on a residual stream, each a mixer with its norms.

    Layer(branches=(
        Branch(mixer=Attention(heads=32, kv_heads=8, head_dim=128, ...), before=Norm("input_layernorm", ...), ...),
        Branch(mixer=Dense(width=14336, gated=True, activation="silu", ...), before=Norm(...), ...),
    ))

A family builds these from a model's options; the logical tensors, the modules, the estimate and the converters read
them. Names are relative to the layer. Nothing here is None because it has yet to be derived: None always means "the
layer has no such part". No torch, no ranks, no options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"]


@dataclass(frozen=True)
class Norm:
    """LayerNorm (with a bias) or RMSNorm over the last dim."""

    name: str
    """What its tensors are called."""
    kind: Literal["layernorm", "rmsnorm"]
    width: int
    eps: float
    offset: bool
    """Whether the stored weight is one less than the factor that it stands for."""
    rounds_last: bool = False
    """Whether an RMSNorm is rounded to the dtype after the factor (OLMo 2), not before it; with an offset always."""


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 scales slow rotary frequencies; see ops/rotary.py."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """How YaRN scales rotary frequencies (Peng et al. 2023); see ops/rotary.py."""

    factor: float
    original: int
    """Positions before the scaling."""
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the first and last frequency that are interpolated in part are rounded outwards."""
    magnitude: float
    """What cosines and sines are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class LongScaling:
    """How LongRoPE scales rotary frequencies (Ding et al. 2024): each is divided by a factor of its own."""

    short: tuple[float, ...]
    """Factors for rows of at most `original` tokens."""
    long: tuple[float, ...]
    """Factors for longer rows."""
    original: int
    magnitude: float
    """What cosines and sines are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021)."""

    base: float
    width: int
    """Channels of each head that rotate."""
    interpolation: float = 1.0
    """What positions are divided by."""
    scaling: RopeScaling | YarnScaling | LongScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLoss:
    """A loss that a mixer adds to that of the model's head, such as one that balances the load of experts."""

    name: str
    """What the log calls it. Mixers that share the name share one figure: its mean over their layers."""
    coefficient: float
    """What the loss of each layer is multiplied by."""
    mean_over: Literal["tokens", "sequences", "microbatches"]
    """What its total is divided by: the tokens that the layer reads in the global batch, padding included, its
    sequences, or the number of microbatches of all data ranks, which alone depends on the micro batch size."""


class _Mixer:
    """What all mixers have."""

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        """Each of them is computed once in a forward pass of the mixer's module."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Attention(_Mixer):
    """Attention with grouped heads (Ainslie et al. 2023)."""

    name: str
    """What its linears' names begin with."""
    site: str
    """Names its dropout; hashed into the masks, so that another name is another mask."""
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    source: Literal["self", "memory", "neighbours", "reader"]
    """Where keys and values come from: the layer's own tokens; what another stack made of its tokens; what an encoder
    made of the neighbours of a token's chunk; or, in that encoder, the chunk whose neighbour it reads."""
    causal: bool
    """Whether a token sees only those before it."""
    padding: Literal["masked", "uniform", "zero"]
    """Padding of an encoder's rows: masked as keys of tokens and of the memory; or seen by those who attend to the
    memory, as in Megatron-LM 23.06 to core 0.5, where padding itself attends to all columns evenly (uniform: its
    softmax in torch) or to none (zero: its fused softmax)."""
    window: int | None
    """How many tokens a token sees, itself included, on the sides that it sees."""
    rope: Rope | None
    q_norm: Norm | None
    """Of each head, or, where it is as wide as all heads together, over the whole projection."""
    k_norm: Norm | None
    dropout: float
    score_multiplier: float = 1.0
    """What scores are multiplied by in addition to 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Scores s become softcap x tanh(s / softcap) before the softmax (Gemma 2)."""

    @property
    def width(self) -> int:
        """Of the queries, and of what the heads give."""
        return self.heads * self.head_dim

    def most_keys(self, length: int) -> int:
        """The most of `length` keys that one token sees, had it the whole row on the sides that it sees."""
        if self.window is None:
            return length
        return min(length, self.window if self.causal else 2 * self.window - 1)


@dataclass(frozen=True, kw_only=True)
class Dense(_Mixer):
    """A feed-forward network: to the wide layer, activation, and back. Gated (Shazeer 2020): activation(gate) x up."""

    name: str
    site: str
    """As of `Attention`."""
    width: int
    activation: Activation
    gated: bool
    bias: bool


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, of which a token chooses some before it chooses experts in them (DeepSeek-V3, 2024)."""

    count: int
    chosen: int
    best: int
    """A group's score is the sum of its best scores, as many as this."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """How the experts of a token are chosen, and what their outputs are multiplied by."""

    score: Literal["softmax", "sigmoid", "sqrt-softplus"]
    """What is made of the logits."""
    normalize: bool
    """Whether the scores of the chosen add up to 1. Of softmax else they are those over all experts."""
    scale: float
    choice: Literal["largest", "sinkhorn", "quantile"]
    """How experts are chosen: the largest scores, or such that their load over a microbatch is even."""
    groups: ExpertGroups | None
    bias: bool
    """Of the router's linear."""
    balance_rate: float | None
    """How much a step changes the bias that balances the load, which the choice alone reads; None without one."""
    quantile_ema: float
    """Of `quantile`: the share of the thresholds of the experts that a step keeps."""
    dtype: Literal["fp32", "fp64"] | None
    """Of its linear, the probabilities and the weighted sum; None is that of the activations."""
    jitter: float
    losses: tuple[AuxiliaryLoss, ...]

    @property
    def counts(self) -> bool:
        """Whether the choice reads a bias of each expert that a step sets by what it has counted."""
        return self.balance_rate is not None or self.choice == "quantile"

    def loss(self, name: str) -> AuxiliaryLoss | None:
        return next((loss for loss in self.losses if loss.name == name), None)


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """How many tokens of a microbatch an expert takes at most, and which."""

    factor: float
    """Times its even share."""
    policy: Literal["probs", "position"]
    """Which it keeps: those of largest probability, or the first."""
    padded: bool
    """Whether it gets exactly that many rows."""


@dataclass(frozen=True, kw_only=True)
class Experts(_Mixer):
    """Feed-forward networks of which each token passes those that a router chooses (Shazeer et al. 2017)."""

    name: str
    site: str
    """As of `Attention`."""
    count: int
    chosen: int
    expert: Dense
    """What each of them is; its name follows the number of the expert."""
    shared: Dense | None
    """One that every token passes in addition."""
    shared_gate: bool
    """Whether its output is multiplied by the sigmoid of a linear of its input."""
    router: Router
    capacity: ExpertCapacity | None
    """None: no token is dropped."""

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        return self.router.losses


@dataclass(frozen=True, kw_only=True)
class NeighbourAttention(_Mixer):
    """Chunked cross attention (Borgeaud et al. 2022): the text is cut into chunks, each of which has neighbours, other
    texts. From the last token of a chunk to the last but one of the next, tokens attend to the neighbours of that
    chunk; those before get nothing."""

    attention: Attention
    chunk: int
    """Tokens of one."""
    neighbours: int
    """Of each chunk."""
    width: int
    """Tokens of a neighbour."""
    encoder: tuple[Layer, ...]
    """Layers that read the neighbours first, each by itself, and of the text its chunk; () where those of an earlier
    layer have done so."""
    prefix: str
    """What the names of the encoder's tensors begin with."""

    @property
    def site(self) -> str:
        """Names the branch's dropout."""
        return self.attention.site


Mixer = Attention | Dense | Experts | NeighbourAttention
"""What a branch computes of its input."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One residual branch.

    before alone:                    x + f(norm(x))
    before, onto "normed":           n + f(n), n = norm(x)
    after alone, of the "sum":       norm(x + f(x))                  Vaswani et al. 2017, BERT
    before and after, of "branch":   x + after(f(before(x)))         Gemma 2 and 3
    after alone, of the "branch":    x + after(f(x))                 OLMo 2
    no norm:                         x + f(x)                        in a parallel layer with a norm of its own
    """

    mixer: Mixer
    before: Norm | None
    after: Norm | None
    after_of: Literal["sum", "branch"]
    onto: Literal["stream", "normed"]
    """What the branch is added to: its input, or the norm of it."""
    dropout: float
    """Of the branch before it is added."""
    multiplier: float = 1.0
    """What the branch is multiplied by before it is added."""

    def __post_init__(self) -> None:
        forms = {
            ("stream", True, None): "x + f(norm(x))",
            ("normed", True, None): "n + f(n)",
            ("stream", False, "sum"): "norm(x + f(x))",
            ("stream", True, "branch"): "x + after(f(before(x)))",
            ("stream", False, "branch"): "x + after(f(x))",
            ("stream", False, None): "x + f(x)",
        }
        form = (self.onto, self.before is not None, None if self.after is None else self.after_of)
        assert form in forms, f"{form}: a branch is one of {', '.join(forms.values())}"
        assert self.multiplier == 1.0 or self.after is None, "a norm after the branch would undo the multiplier"

    @property
    def site(self) -> str:
        """Names the branch's dropout."""
        return f"{self.mixer.site}_out"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Branches, one after the other, or all of the same stream."""

    branches: tuple[Branch, ...]
    parallel: bool = False
    """Whether all branches read the layer's input and are added up (GPT-J, GPT-NeoX)."""
    before: Norm | None = None
    """A norm of the layer's input that all parallel branches read, which have none before them then (GPT-J)."""

    def __post_init__(self) -> None:
        bare = any(branch.before is None and branch.after is None for branch in self.branches)
        assert bare == (self.before is not None), "branches without a norm read that of their layer"
        assert self.before is None or self.parallel, "only parallel branches read one norm"

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        """Of all its mixers; a loss that several compute stands there several times."""
        return tuple(loss for branch in self.branches for loss in branch.mixer.auxiliary_losses)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(branch.mixer for branch in self.branches if isinstance(branch.mixer, Attention))

    @property
    def attention(self) -> Attention:
        """Its attention to its own tokens."""
        return next(attention for attention in self.attentions if attention.source == "self")

    @property
    def neighbours(self) -> NeighbourAttention | None:
        """What reads neighbours, where it does."""
        return next((branch.mixer for branch in self.branches if isinstance(branch.mixer, NeighbourAttention)), None)

    @property
    def experts(self) -> Experts | None:
        """Its mixture of experts, where it has one."""
        return next((branch.mixer for branch in self.branches if isinstance(branch.mixer, Experts)), None)

    @property
    def feed_forward(self) -> Dense:
        """Its feed-forward network, or each of its experts."""
        experts = self.experts
        if experts is not None:
            return experts.expert
        return next(branch.mixer for branch in self.branches if isinstance(branch.mixer, Dense))

    @property
    def shared(self) -> dict[str, int]:
        """What tensor ranks share equally, by the option's name."""
        attention = self.attention
        return {"heads": attention.heads, "kv_heads": attention.kv_heads, "ffn": self.feed_forward.width}

    @property
    def norm(self) -> Norm:
        """Its first norm."""
        norms = (norm for branch in self.branches for norm in (branch.before, branch.after) if norm is not None)
        return self.before or next(norms)

    @property
    def norm_placement(self) -> Literal["pre", "post"]:
        """Whether its norms stand before its branches or after them."""
        return "post" if self.branches[0].before is None and self.before is None else "pre"
