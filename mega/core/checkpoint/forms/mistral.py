"""Read Mistral in its developers' release format: params.json and consolidated.safetensors, with Meta's names and
rotary order.

A folder that also has a config.json is read as a Hugging Face folder. Source: mistral-inference's TransformerArgs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mega.core.checkpoint.forms import meta
from mega.core.checkpoint.forms.foreign import EntrySource, inside, read_json, safetensors_source
from mega.core.checkpoint.forms.form import Export, ExportSource, FormOptions, OpenedForm
from mega.core.checkpoint.forms.keys import number_in, only, whole_in
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import Attachments
from mega.core.config.sections import ModelConfig

POSITIONS = 32768
"""Number of positions of most 7B models. It is used as the default, because params.json does not record the trained
context length."""

KEYS = (
    *("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "rope_theta"),
    *("sliding_window", "max_seq_len", "tied_embeddings", "model_type", "causal"),
)
WITHOUT_EFFECT = ("max_batch_size", "use_biases")
"""Keys that have no effect. The second key, if present, must be false."""


def recognise(path: Path) -> bool:
    return (path / "params.json").exists() and bool(_parts(path)) and not (path / "config.json").exists()


def _parts(path: Path) -> list[Path]:
    return sorted(path.glob("consolidated*.safetensors"))


def tokenizer(files: Attachments) -> str | None:
    return meta.tokenizer(files)


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    source = _SinglePart(safetensors_source([inside(path, each.name) for each in _parts(path)]))
    params_path = str(path / "params.json")
    model = model_from_params(read_json(path / "params.json"), params_path)
    check_size(model, source.tensors, params_path)
    return OpenedForm(source, model, meta.table(model, 1, output=False))


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    raise CheckpointError(f"--to {to}: Mistral's own form is read only; valid: hf, meta, mega")


class _SinglePart(EntrySource):
    """A source whose tensors have the names `0/name`, as in a Meta folder with one file."""

    def __init__(self, source: EntrySource) -> None:
        super().__init__({f"0/{name}": entry for name, entry in source.entries.items()})


def model_from_params(params: Mapping[str, object], where: str) -> ModelConfig:
    """Return the resolved model section. Errors: CheckpointError naming a key that is unknown or not supported."""
    for key, value in params.items():
        if key not in (*KEYS, *WITHOUT_EFFECT) and value is not None:
            raise CheckpointError(
                f"{where}: {key} {value!r:.60}: is not a key that is read here (valid: {', '.join(KEYS)})"
            )
    only(params, "model_type", ("transformer", None), where)
    only(params, "causal", (True, None), where)
    only(params, "use_biases", (False, None), where)
    only(params, "tied_embeddings", (False, True, None), where)
    hidden, heads = whole_in(params, "dim", where), whole_in(params, "n_heads", where)
    window = None if params.get("sliding_window") is None else whole_in(params, "sliding_window", where)
    if window is None and params.get("rope_theta") is None:  # default: 1e4 in old mistral-inference, 1e6 in new
        raise CheckpointError(f"{where}: rope_theta: must be there where sliding_window is not; readers differ on it")
    return ModelConfig(
        family="llama",
        layers=whole_in(params, "n_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=whole_in(params, "n_kv_heads", where, heads),
        head_dim=whole_in(params, "head_dim", where, hidden // heads),
        ffn=whole_in(params, "hidden_dim", where),
        vocab=whole_in(params, "vocab_size", where),
        positions=whole_in(params, "max_seq_len", where, POSITIONS),
        window=window,
        position="rope",
        rope_base=number_in(params, "rope_theta", where, 10000.0),
        norm="rmsnorm",
        norm_eps=number_in(params, "norm_eps", where),
        activation="swiglu",
        bias=False,
        qkv_bias=False,
        tied=params.get("tied_embeddings") is True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
