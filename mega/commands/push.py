"""`mega push`: upload a model to a repository on the Hub, with a model card."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega.core.files import check_source
from mega.core.hub.names import HubName
from mega.core.hub.options import PushOptions
from mega.core.hub.upload import CARD, check_push, check_temporary_room, model_card, push, repository
from mega.core.processes.world import note
from mega.core.untrusted import read_limited

if TYPE_CHECKING:
    from mega.core.checkpoint.own.pieces import Tensors

MOST_CARD = 1 << 20
"""Maximum size of a model card, in bytes."""


def run(
    options: PushOptions,
    directory: Annotated[Path, typer.Argument(help="a run's directory, one step in it, or a Hugging Face folder")],
    name: Annotated[str, typer.Argument(help="OWNER/NAME; created if it does not exist")],
) -> int:
    """Upload a model: safetensors, tokenizer, JSON files, and a generated model card.

    A mega checkpoint is first converted to Hugging Face's format in $TMPDIR. The token is read from HF_TOKEN, or from
    hf auth login. An existing model card in the repository is kept.
    """
    check_source("DIRECTORY", directory)
    target = repository(name)
    card = None if options.card is None else _read_card(options.card)
    check_push(target)

    from mega.core.checkpoint.forms.form import OWN
    from mega.core.checkpoint.forms.recognise import form_at

    # The folder must exist until the upload has ended, so all code below is inside the block.
    with tempfile.TemporaryDirectory(prefix="mega-push-") as temporary:
        folder = directory
        if (form := form_at(directory)) is OWN:
            from mega.core.checkpoint.forms.convert import convert
            from mega.core.inference.loading.load import open_model, special_tokens

            check_temporary_room(directory, _weight_bytes(open_model(directory).weights.tensors))
            conversion = convert(directory, Path(temporary) / "model", "hf", tokens=special_tokens)
            folder = conversion.path
            for line in conversion.losses:
                note(line)
        elif form.name not in ("hf", "peft"):
            raise ValueError(
                f"DIRECTORY {directory}: is {form.words}; mega convert-llama --to hf makes a folder for it"
            )
        if card is None:
            existing_card = folder / CARD
            card = (
                existing_card.read_text(encoding="utf-8")
                if existing_card.is_file()
                else _card(directory, target, options)
            )
        print(push(folder, target, options, card, note))
    return 0


def _weight_bytes(tensors: Tensors) -> int:
    """Return the size of all weights in bytes, without optimizer state."""
    weights = (value for name, value in tensors.items() if name.startswith("weights/"))
    return sum(prod(shape) * dtype.itemsize for shape, dtype in weights)


def _read_card(path: Path) -> str:
    try:
        return read_limited(path, MOST_CARD, f"--card {path}").decode()
    except UnicodeDecodeError:
        raise ValueError(f"--card {path}: is not UTF-8 text") from None


def _card(directory: Path, name: HubName, options: PushOptions) -> str:
    """Return a model card generated from the weights."""
    from mega.core.architecture import architecture
    from mega.core.architecture.words import parameter_words, shape_words
    from mega.core.checkpoint.forms.open import open_weights
    from mega.core.checkpoint.own.model import model_of

    weights = open_weights(str(directory))
    model = model_of(weights.meta, str(directory))
    model_architecture = architecture(model)
    table = {
        "shape": shape_words(model_architecture),
        "parameters": parameter_words(model),
        "positions": f"{model.positions:,}",
    }
    if weights.step:
        table["trained"] = f"{weights.step:,} steps"
    tasks = {"bert": "fill-mask", "t5": None}
    return model_card(name, table, options, task=tasks.get(model_architecture.family, "text-generation"))
