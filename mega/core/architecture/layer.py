"""The architecture of one layer as frozen dataclasses. A layer consists of branches on a residual stream, each with a
mixer and norms.

    Layer(branches=(
        Branch(mixer=Attention(heads=32, kv_heads=8, head_dim=128, ...), before=Norm("input_layernorm", ...), ...),
        Branch(mixer=Dense(width=14336, gated=True, activation="silu", ...), before=Norm(...), ...),
    ))

A family creates the architecture from a model's options. The logical tensors, the modules, the estimate and the
converters are derived from the architecture. Names are relative to the layer. Options are already resolved, so None
always means that the layer does not have the component. This module does not depend on torch, ranks or options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"]


@dataclass(frozen=True)
class Norm:
    """A LayerNorm (with a bias) or an RMSNorm over the last dimension."""

    name: str
    """The prefix of the names of the norm's tensors."""
    kind: Literal["layernorm", "rmsnorm"]
    width: int
    eps: float
    offset: bool
    """Whether the weight is stored minus 1 (Gemma)."""
    rounds_last: bool = False
    """Whether an RMSNorm's result is rounded to the dtype after multiplication by the weight (OLMo 2), rather than
    before. With `offset` the result is always rounded after the multiplication."""


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of low rotary frequencies in Llama 3.1 (see ops/rotary.py)."""

    factor: float  # divisor of low frequencies
    low: float  # frequencies with fewer rotations than this over `original` positions are low
    high: float  # frequencies with more rotations than this are unchanged
    original: int  # maximum sequence length before the scaling


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """The scaling of rotary frequencies in YaRN (Peng et al. 2023; see ops/rotary.py)."""

    factor: float
    """Divisor of low frequencies."""
    original: int
    """Maximum sequence length before the scaling."""
    beta_fast: float
    """Frequencies with more rotations than this over `original` positions are unchanged."""
    beta_slow: float
    """Frequencies with fewer rotations than this over `original` positions are divided by `factor`."""
    truncate: bool
    """Whether the bounds between unchanged and divided frequencies are rounded outwards to integers."""
    magnitude: float
    """Factor by which cosines and sines are multiplied."""


@dataclass(frozen=True, kw_only=True)
class LongScaling:
    """The scaling of rotary frequencies in LongRoPE (Ding et al. 2024), where each frequency has a separate divisor."""

    short: tuple[float, ...]
    """Divisors of the frequencies for rows of at most `original` tokens."""
    long: tuple[float, ...]
    """Divisors of the frequencies for rows of more than `original` tokens."""
    original: int
    """Maximum sequence length before the scaling."""
    magnitude: float
    """Factor by which cosines and sines are multiplied."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021)."""

    base: float
    width: int
    """Number of rotated channels per head."""
    interpolation: float = 1.0
    """Divisor of positions."""
    scaling: RopeScaling | YarnScaling | LongScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLoss:
    """A loss that a mixer adds to the loss of the model's head, such as the load balance loss of experts."""

    name: str
    """The name in the log. If several mixers have a loss of the same name, the mean over these mixers is logged."""
    coefficient: float
    """Factor of each layer's loss in the total loss."""
    mean_over: Literal["tokens", "sequences", "microbatches"]
    """The divisor of the loss's total over the global batch: the number of the layer's input tokens (including
    padding), of sequences, or of microbatches of all data ranks. Only the number of microbatches depends on the micro
    batch size."""


class _Mixer:
    """Base class of mixers."""

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        """The losses that the mixer's module computes, each once per forward pass."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Attention(_Mixer):
    """Attention with grouped heads (Ainslie et al. 2023)."""

    name: str
    """The prefix of the names of the mixer's linear layers."""
    site: str
    """The name of the mixer's dropout. Masks depend on a hash of the name, so different names produce different
    masks."""
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    source: Literal["self", "memory", "neighbours", "reader"]
    """The source of keys and values: "self", the layer's tokens; "memory", the output of another stack; "neighbours",
    the encoded neighbours of a token's chunk; "reader", in the encoder of neighbours, the chunk of the text."""
    causal: bool
    """Whether a token attends only to itself and earlier tokens."""
    padding: Literal["masked", "uniform", "zero"]
    """Treatment of padding in an encoder's rows. "masked": padding is masked in self-attention and in the memory. The
    other values reproduce Megatron-LM 23.06 to core 0.5, where padding in the memory is visible; padding tokens attend
    uniformly to all columns ("uniform", Megatron-LM's softmax in torch) or to no columns ("zero", Megatron-LM's fused
    softmax)."""
    window: int | None
    """The number of tokens, including itself, that a token attends to in each direction; None if unlimited."""
    rope: Rope | None
    q_norm: Norm | None
    """A norm per head, or one norm over the whole projection if the norm is as wide as all heads together."""
    k_norm: Norm | None
    """As `q_norm`."""
    dropout: float
    """Dropout probability for attention weights."""
    score_multiplier: float = 1.0
    """Factor of the attention scores, in addition to 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Bound of attention scores. The softmax is applied to softcap x tanh(score / softcap) (Gemma 2)."""

    @property
    def width(self) -> int:
        """Number of channels in all heads together, which is the width of the queries and of the output."""
        return self.heads * self.head_dim

    def most_keys(self, length: int) -> int:
        """Return the maximum number of keys that a token attends to in a row of `length` keys."""
        if self.window is None:
            return length
        return min(length, self.window if self.causal else 2 * self.window - 1)


@dataclass(frozen=True, kw_only=True)
class Dense(_Mixer):
    """A feed-forward network: down(activation(up(x))), or, if gated, down(activation(gate(x)) x up(x)) (Shazeer
    2020)."""

    name: str
    site: str
    """The name of the mixer's dropout, as in `Attention`."""
    width: int
    """Number of channels of the hidden layer."""
    activation: Activation
    gated: bool
    bias: bool


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts. A token's experts are chosen from the groups with the best scores (DeepSeek-V3, 2024)."""

    count: int
    chosen: int
    best: int
    """A group's score is the sum of this many of its largest scores."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """The rule that chooses experts for each token, and computes the factors of the experts' outputs."""

    score: Literal["softmax", "sigmoid", "sqrt-softplus"]
    """The function that maps logits to scores."""
    normalize: bool
    """Whether the scores of the chosen experts are normalized to a sum of 1. If not, the softmax is over all
    experts."""
    scale: float
    """Factor of the probabilities of the chosen experts."""
    choice: Literal["largest", "sinkhorn", "quantile"]
    """How experts are chosen: "largest" selects the largest scores; the other rules balance the load over a
    microbatch."""
    groups: ExpertGroups | None
    bias: bool
    """Whether the router's linear layer has a bias."""
    balance_rate: float | None
    """The change per step of the load-balancing bias, which affects only which experts are chosen. None if the router
    does not have this bias."""
    quantile_ema: float
    """Decay of the moving average of the experts' thresholds. Used only if `choice` is "quantile"."""
    dtype: Literal["fp32", "fp64"] | None
    """The dtype of the router's linear layer, probabilities and weighted sum; None for the dtype of the activations."""
    jitter: float
    """Range of the noise on the router's input, which is multiplied by random factors in [1 - jitter, 1 + jitter]."""
    losses: tuple[AuxiliaryLoss, ...]

    @property
    def counts(self) -> bool:
        """Whether experts are chosen with a bias per expert, which every step updates to balance the experts' load."""
        return self.balance_rate is not None or self.choice == "quantile"

    def loss(self, name: str) -> AuxiliaryLoss | None:
        return next((loss for loss in self.losses if loss.name == name), None)


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """The limit on the number of tokens per expert in a microbatch."""

    factor: float
    """The limit, as a multiple of the number of tokens per expert under an even load."""
    policy: Literal["probs", "position"]
    """Which tokens an expert keeps: those with the largest probabilities, or the first ones."""
    padded: bool
    """Whether rows are padded so that the number of rows of each expert equals the limit."""


@dataclass(frozen=True, kw_only=True)
class Experts(_Mixer):
    """A mixture of feed-forward networks (experts), from which a router chooses some for each token (Shazeer et al.
    2017)."""

    name: str
    site: str
    """The name of the mixer's dropout, as in `Attention`."""
    count: int
    chosen: int
    """The number of experts chosen for each token."""
    expert: Dense
    """The network of each expert, whose tensors are named NAME.NUMBER."""
    shared: Dense | None
    """A shared network that is applied to every token; None if the mixture has only chosen experts."""
    shared_gate: bool
    """Whether the shared network's output is multiplied by a gate, which is the sigmoid of a linear function of the
    input."""
    router: Router
    capacity: ExpertCapacity | None
    """The limit on tokens per expert; None if no token is dropped."""

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        return self.router.losses


@dataclass(frozen=True, kw_only=True)
class NeighbourAttention(_Mixer):
    """Chunked cross attention (Borgeaud et al. 2022).

    The text is split into chunks, and each chunk has neighbours, which are retrieved texts. The last token of a chunk,
    and all but the last token of the next chunk, attend to the chunk's neighbours. Tokens before the last token of the
    first chunk attend to no neighbours.
    """

    attention: Attention
    chunk: int
    """Number of tokens in a chunk."""
    neighbours: int
    """Number of neighbours of each chunk."""
    width: int
    """Number of tokens in a neighbour."""
    encoder: tuple[Layer, ...]
    """Layers of the encoder, which attend to the chunk; () if an earlier layer has the encoder."""
    prefix: str
    """The prefix of the names of the encoder's tensors."""

    @property
    def site(self) -> str:
        """The name of the branch's dropout."""
        return self.attention.site


Mixer = Attention | Dense | Experts | NeighbourAttention
"""The types of mixer. A mixer is the main function of a branch."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One residual branch.

    norm before the branch:          x + f(norm(x))
    same, added to norm's output:    n + f(n), n = norm(x)
    norm after the sum:              norm(x + f(x))                  Vaswani et al. 2017, BERT
    before and after the branch:     x + after(f(before(x)))         Gemma 2 and 3
    norm after the branch:           x + after(f(x))                 OLMo 2
    no norm:                         x + f(x)                        in a parallel layer with one shared norm
    """

    mixer: Mixer
    before: Norm | None
    """The norm of the branch's input."""
    after: Norm | None
    """The norm after the branch."""
    after_of: Literal["sum", "branch"]
    """The input of the norm `after`: the sum of stream and branch, or the branch alone."""
    onto: Literal["stream", "normed"]
    """The tensor to which the branch is added: the stream or the normalized stream."""
    dropout: float
    """Dropout probability for the branch's output."""
    multiplier: float = 1.0
    """Factor of the branch's output."""

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
        """The name of the branch's dropout."""
        return f"{self.mixer.site}_out"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer whose branches run sequentially, or in parallel on the same stream."""

    branches: tuple[Branch, ...]
    parallel: bool = False
    """Whether all branches read the layer's input and their outputs are summed (GPT-J, GPT-NeoX)."""
    before: Norm | None = None
    """A norm of the layer's input that all parallel branches share, instead of a norm per branch (GPT-J)."""

    def __post_init__(self) -> None:
        bare = any(branch.before is None and branch.after is None for branch in self.branches)
        assert bare == (self.before is not None), "branches without a norm read that of their layer"
        assert self.before is None or self.parallel, "only parallel branches read one norm"

    @property
    def queries_alone(self) -> bool:
        """Whether the layer can compute its output for some tokens only, from the keys and values of all tokens:
        bidirectional attention to whole rows, then feed-forward networks, in branches that are added to the stream or
        whose sum with the stream is normalized."""
        first, *others = self.branches
        return (
            not self.parallel
            and isinstance(first.mixer, Attention)
            and (first.mixer.source, first.mixer.causal, first.mixer.window) == ("self", False, None)
            and first.multiplier == 1.0
            and (first.after is None or first.after_of == "sum")
            and all(isinstance(branch.mixer, Dense) for branch in others)
        )

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        """The losses of all mixers in the layer. A loss that several mixers compute is listed several times."""
        return tuple(loss for branch in self.branches for loss in branch.mixer.auxiliary_losses)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(branch.mixer for branch in self.branches if isinstance(branch.mixer, Attention))

    @property
    def attention(self) -> Attention:
        """The layer's self-attention."""
        return next(attention for attention in self.attentions if attention.source == "self")

    @property
    def neighbours(self) -> NeighbourAttention | None:
        """The layer's attention to neighbours, or None."""
        return next((branch.mixer for branch in self.branches if isinstance(branch.mixer, NeighbourAttention)), None)

    @property
    def experts(self) -> Experts | None:
        """The layer's mixture of experts, or None."""
        return next((branch.mixer for branch in self.branches if isinstance(branch.mixer, Experts)), None)

    @property
    def feed_forward(self) -> Dense:
        """The layer's feed-forward network, or the network of each expert."""
        experts = self.experts
        if experts is not None:
            return experts.expert
        return next(branch.mixer for branch in self.branches if isinstance(branch.mixer, Dense))

    @property
    def shared(self) -> dict[str, int]:
        """Option name -> the dimension that must be a multiple of the number of tensor ranks."""
        attention = self.attention
        return {"heads": attention.heads, "kv_heads": attention.kv_heads, "ffn": self.feed_forward.width}

    @property
    def norm(self) -> Norm:
        """The layer's first norm."""
        norms = (norm for branch in self.branches for norm in (branch.before, branch.after) if norm is not None)
        return self.before or next(norms)

    @property
    def norm_placement(self) -> Literal["pre", "post"]:
        """Whether the layer's norms are before or after the branches."""
        return "post" if self.branches[0].before is None and self.before is None else "pre"
