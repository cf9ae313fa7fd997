"""Read and write Llama in Meta's release format: params.json, and one consolidated.NN.pth per tensor rank.

Meta's tensor names differ from the project's, matrices are split over the files, and query and key rows are in the
order of Meta's rotary embedding. Meta's rotary embedding pairs adjacent rows (2i, 2i + 1); the project pairs rows of
the two halves of a head (i, i + H/2).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import torch

from mega.core.architecture import architecture, inventory
from mega.core.architecture.layer import Rope, RopeScaling
from mega.core.checkpoint.forms import chat_files
from mega.core.checkpoint.forms.companions import copy_companions
from mega.core.checkpoint.forms.foreign import TorchSource, check_ranks_differ, flat_tensors, inside, read_json
from mega.core.checkpoint.forms.form import Export, ExportSource, FormOptions, OpenedForm
from mega.core.checkpoint.forms.keys import check_decoder, check_round_trip, number_in, translated, whole_in
from mega.core.checkpoint.forms.mapping import (
    Fragment,
    Source,
    Table,
    Target,
    check_copies,
    gathered,
    prove,
    whole,
)
from mega.core.checkpoint.forms.writing import whole_tensor, write_json, write_torch
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors, whole_box
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

POSITIONS = 4096
"""Number of positions of Llama 2. It is used as the default, because params.json does not record the trained context
length."""

SCALED_POSITIONS = 131072
"""Number of positions if rotary positions are scaled, as in Llama 3.1 and 3.2."""

SMALL_ROPE_FACTOR = 32.0
"""The RoPE scaling factor of Llama 3.2, used if params.json contains no factor and embeddings are tied. If embeddings
are not tied, the factor of Llama 3.1, 8, is used."""

NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_PART = "0/output.weight"
_BUFFERS = ("rope.freqs", "attention.mask", "freqs_cos", "freqs_sin")


def meta_name(name: str) -> str:
    """Return Meta's name for a logical tensor.

    >>> meta_name("model.layers.3.self_attn.q_proj.weight")
    'layers.3.attention.wq.weight'
    """
    return translated(name, NAMES, "layers.{}.")


def rotary_rows(heads: int, width: int) -> list[range]:
    """Return Meta's rows of query or key heads in the project's order: for each head, the even rows, then the odd rows.
    width: rows per head.

        row in Meta's file        0  1  2  3  |  4  5  6  7       two heads of width 4
        rows in this order        0  2  1  3  |  4  6  5  7       pairs (i, i + 2) are Meta's pairs (2i, 2i + 1)

    >>> [list(run) for run in rotary_rows(2, 4)]
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    return [range(number * width + parity, (number + 1) * width, 2) for number in range(heads) for parity in (0, 1)]


class LastTensor:
    """A source that caches the most recently read tensor, for tables that read a tensor in many small ranges."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: tuple[str, torch.Tensor] | None = None

    @property
    def tensors(self) -> Tensors:
        return self._source.tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._source.read(name, whole_box(self.tensors[name][0])))
        return self._last[1][box.index]


def recognise(path: Path) -> bool:
    return (path / "params.json").exists() and any(path.glob("consolidated.*.pth"))


def tokenizer(files: Attachments) -> str | None:
    """Return the kind of tokenizer in a tokenizer.model: Llama2Tokenizer or Llama3Tokenizer.

    Each line of Llama 3's tokenizer.model contains a token in base64 and the token's id. Return None if the folder also
    has a tokenizer.json, which contains the same tokenizer and is used instead.
    """
    file = files.get("tokenizer.model")
    if file is None or "tokenizer.json" in files:
        return None
    with contextlib.nullcontext(BytesIO(file)) if isinstance(file, bytes) else file.open("rb") as stream:
        ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\n", stream.read(100))
    return "Llama3Tokenizer" if ranks else "Llama2Tokenizer"


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    """Open a Meta folder. Tensor names have the format `NN/name`, where NN is the number of the consolidated file."""
    paths = sorted(path.glob("consolidated.*.pth"))
    names = [f"consolidated.{part:02d}.pth" for part in range(len(paths))]
    if [each.name for each in paths] != names:
        raise CheckpointError(f"{path}: parts {[each.name for each in paths]}, not {names}")
    tensors: dict[str, torch.Tensor] = {}
    for part, name in enumerate(names):
        tensors |= flat_tensors(inside(path, name), f"{part}/")
        if part:
            check_ranks_differ(tensors, f"{part}/", f"{part - 1}/", path / name)
    params = path / "params.json"
    return opened(TorchSource(tensors), read_json(params), len(paths), str(params))


def opened(source: Source, params: Mapping[str, Json], parts: int, where: str) -> OpenedForm:
    """Open tensors that have Meta's names. The model is considered tied if input and output embedding are equal.

    where: the origin of `params`, for errors.
    """
    model = model_from_params(params, source.tensors, parts, where)
    check_size(model, source.tensors, where)
    tied = replace(model, tied=True)
    if params.get("use_scaled_rope") and "rope_scaling_factor" not in params:
        tied = replace(tied, rope_scaling_factor=SMALL_ROPE_FACTOR)
    embedding = source.tensors["0/tok_embeddings.weight"][0]
    dim = 0 if embedding[1:] == (params["dim"],) and parts > 1 else 1
    ignored = frozenset(name for name in source.tensors if name.endswith(_BUFFERS))
    if OUTPUT_PART not in source.tensors:
        return OpenedForm(source, tied, replace(table(tied, parts, dim, output=False), ignored=ignored))
    repeated = replace(table(tied, parts, dim), ignored=ignored)
    prove(repeated, source.tensors)
    first = repeated.targets[0]
    try:
        check_copies(Table((first,), tuple(pair for pair in repeated.copies if pair[0] == first.name)), source)
    except CheckpointError:
        return OpenedForm(source, model, replace(table(model, parts, dim), ignored=ignored))
    return OpenedForm(source, tied, repeated)


def model_from_params(params: Mapping[str, Json], tensors: Tensors, parts: int, where: str) -> ModelConfig:
    """Return the resolved model section. Widths missing from params.json are derived from the tensors' shapes.

    Errors: CheckpointError naming a key that the project does not support or that contradicts the tensors.
    """
    hidden = whole_in(params, "dim", where)
    if "0/tok_embeddings.weight" not in tensors:
        raise CheckpointError(f"{where}: the weights hold no tok_embeddings.weight")
    shape, _ = tensors["0/tok_embeddings.weight"]
    vocab = shape[0] * (parts if shape[1:] == (hidden,) else 1)
    if params.get("vocab_size", -1) not in (-1, vocab):
        raise CheckpointError(f"{where}: vocab_size {params['vocab_size']}, tok_embeddings.weight has {vocab} rows")
    return _model(params, vocab, _feed_forward_rows(tensors, where) * parts, where)


def _model(params: Mapping[str, Json], vocab: int, ffn: int, where: str) -> ModelConfig:
    """The model section for params.json, given the two widths that params.json does not contain."""
    hidden, heads = whole_in(params, "dim", where), whole_in(params, "n_heads", where)
    scaled = bool(params.get("use_scaled_rope"))
    return ModelConfig(
        family="llama",
        layers=whole_in(params, "n_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=whole_in(params, "n_kv_heads", where, heads),
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        positions=whole_in(params, "max_seq_len", where, _positions_unsaid(scaled)),
        position="rope",
        rope_base=number_in(params, "rope_theta", where, 10000.0),
        rope_scaling="llama3" if scaled else "none",
        rope_scaling_factor=number_in(params, "rope_scaling_factor", where, 8.0),
        norm="rmsnorm",
        norm_eps=number_in(params, "norm_eps", where, 1e-5),
        activation="swiglu",
        bias=False,
        qkv_bias=False,
        tied=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _feed_forward_rows(tensors: Tensors, where: str) -> int:
    """Return the most common width of the feed-forward matrices in one file. A matrix with any other width is later
    reported as an error."""
    sizes = Counter(
        shape[1 if name.endswith("w2.weight") else 0]
        for name, (shape, _) in tensors.items()
        if "feed_forward" in name and len(shape) == 2
    )
    if not sizes:
        raise CheckpointError(f"{where}: the weights hold no layers.0.feed_forward.w1.weight")
    return sizes.most_common(1)[0][0]


def table(model: ModelConfig, parts: int, embedding_dim: int = 1, *, output: bool = True) -> Table:
    """Return the table that produces `weights/<name>` for every logical tensor from the files of a Meta folder. Every
    file contains all norms. parts: number of files.

    embedding_dim: the dim along which the embedding is split: columns (1) in Llama 2, rows (0) in Llama 3. output:
    whether a tied model also stores the output matrix, as Meta's code expects.

        weights/...q_proj.weight [heads x width, hidden]      0/...wq: heads 0 .. h/P - 1, rows as in `rotary_rows`
                                                              1/...wq: heads h/P .. 2h/P - 1, ...
    """
    targets: list[Target] = []
    copies: list[tuple[str, Fragment]] = []
    for tensor in inventory(model):
        name = f"weights/{tensor.name}"
        sources = [f"{part}/{meta_name(tensor.name)}" for part in range(parts)]
        cut = tensor.cut()
        dim = None if cut is None else cut.dim
        if tensor.name == EMBEDDING:
            dim = embedding_dim
            if architecture(model).tied and output:
                output_parts = [f"{part}/output.weight" for part in range(parts)]
                copies += [(name, each) for each in gathered(tensor.shape, output_parts, 0)]
        if dim is None:
            copies += [(name, whole(tensor.shape, each)) for each in sources[1:]]
        rotated = cut is not None and tensor.name.endswith(("q_proj.weight", "k_proj.weight"))
        runs = rotary_rows(cut.parts // parts, tensor.shape[0] // cut.parts) if cut is not None and rotated else None
        targets.append(Target(name, tensor.shape, gathered(tensor.shape, sources, dim, runs)))
    return Table(tuple(targets), copies=tuple(copies))


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to params.json and consolidated.NN.pth in Meta's release format."""
    model, parts = own.model, options.parts
    params = params_from_model(model)
    structure = architecture(model)
    for name, number in {**structure.block.shared, "vocab": structure.input.vocab}.items():
        if number % parts:
            raise ValueError(f"--parts {parts}: must divide {name} {number}")

    def fill(folder: Path, table: Table, source: Source) -> int:
        cached, bytes_written = LastTensor(source), 0
        for part in range(parts):
            part_targets = [target for target in table.targets if target.name.startswith(f"{part}/")]
            content = {target.name.partition("/")[2]: whole_tensor(target, cached).clone() for target in part_targets}
            bytes_written += write_torch(folder / f"consolidated.{part:02d}.pth", content)
        write_json(folder / "params.json", params)
        copy_companions(own.checkpoint, folder, skip=("config.json", "generation_config.json", "params.json"))
        return bytes_written

    return Export(
        table(model, parts), fill, losses=(*losses(model), *chat_files.generation_losses(own.checkpoint, ends=True))
    )


def params_from_model(options: ModelConfig) -> dict[str, Json]:
    """Return the content of params.json. Errors: CheckpointError naming an option that Meta's Llama does not
    support."""
    check_decoder(options, "Meta's Llama")
    model = architecture(options)
    attention, ffn = model.block.attention, model.block.feed_forward.width
    params = {
        "dim": model.hidden,
        "n_layers": len(model.layers),
        "n_heads": attention.heads,
        "n_kv_heads": attention.kv_heads,
        "vocab_size": model.input.vocab,
        **feed_forward(model.hidden, ffn),
        "norm_eps": model.block.norm.eps,
        **_rope_keys(attention.rope),
    }
    reread = _model(params, model.input.vocab, ffn, "params.json")
    check_round_trip(options, reread, "Meta's Llama", unsupported=("positions", "tied"))
    return params


def _rope_keys(rope: Rope | None) -> dict[str, Json]:
    """The keys for rotary positions; {} for a model without rotary positions, which `check_round_trip` refuses."""
    if rope is None:
        return {}
    if not isinstance(rope.scaling, RopeScaling):
        return {"rope_theta": rope.base}
    return {"rope_theta": rope.base, "use_scaled_rope": True, "rope_scaling_factor": rope.scaling.factor}


def losses(options: ModelConfig) -> tuple[str, ...]:
    """Messages about settings that params.json cannot express and for which other programs assume different values.

    `max_seq_len` cannot be written, because Meta's loader passes `max_seq_len` as an argument in addition to all keys
    of params.json, and fails if params.json contains this key.
    """
    model = architecture(options)
    assumed = _positions_unsaid(any(rope.scaling for rope in model.ropes))
    if model.positions == assumed:
        return ()
    return (f"positions {model.positions}: params.json has no place for them; its reader takes {assumed}",)


def _positions_unsaid(scaled: bool) -> int:
    """The assumed number of positions, which params.json does not contain."""
    return SCALED_POSITIONS if scaled else POSITIONS


def feed_forward(hidden: int, ffn: int) -> dict[str, Json]:
    """Return `multiple_of` and, if needed, `ffn_dim_multiplier`, from which Meta's code computes the width `ffn`.

    Meta's code multiplies int(8 hidden / 3) by `ffn_dim_multiplier` and rounds up to a multiple of `multiple_of`.

    >>> feed_forward(4096, 11008), feed_forward(8192, 28672)
    ({'multiple_of': 256}, {'multiple_of': 4096, 'ffn_dim_multiplier': 1.3})
    """
    base = int(8 * hidden / 3)
    multiples = [multiple for multiple in (256, 4096, 1024, 64, 4) if ffn % multiple == 0] + [1]
    for multiplier in (None, 1.3, 1.5, ffn / base, (ffn + 0.5) / base):
        for multiple in multiples:
            width = base if multiplier is None else int(multiplier * base)
            if -(-width // multiple) * multiple == ffn:
                scaled = {} if multiplier is None else {"ffn_dim_multiplier": multiplier}
                return {"multiple_of": multiple, **scaled}
    raise AssertionError(f"(ffn + 1/2) / base rounds down to {ffn}")
