"""Read the pooling mode of a sentence-transformers model from `modules.json` and `1_Pooling/config.json`.

Both files are in the model's folder, or are attached to a checkpoint that was converted from the folder.
inference/embedding.py implements the pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mega.core.checkpoint.forms.form import POOLING
from mega.core.checkpoint.own.store import CheckpointError
from mega.core.untrusted import Json, parse_json, read_limited

_FLAGS: dict[str, Literal["mean", "cls"]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""Keys that older versions of sentence-transformers set to true."""
_MODES: dict[str, Literal["mean", "cls"]] = {"mean": "mean", "cls": "cls"}
"""Values of `pooling_mode`, which newer versions of sentence-transformers write as a string or as a list with one
string."""
_MODULES = ("Transformer", "Pooling", "Normalize")
_BYTES = 1 << 16
"""Maximum size, in bytes, of each file that this module reads."""


def declared_pooling(files: Mapping[str, Path]) -> Literal["mean", "cls"] | None:
    """Return the pooling mode in the files of a sentence-transformers model; None if the files do not specify one.

    files: name -> path of each file that came with the weights. Errors: CheckpointError naming file and value, if the
    mode is not supported.
    """
    config = files.get(POOLING)
    if config is None:
        return None
    settings = _json(config)
    settings = settings if isinstance(settings, dict) else {}
    if "pooling_mode" in settings:
        mode, valid = settings["pooling_mode"], _MODES
        modes = [str(each) for each in (mode if isinstance(mode, list) else [mode])]
    else:
        valid = _FLAGS
        modes = [str(key) for key, flag in settings.items() if key.startswith("pooling_mode_") and flag is True]
    if len(modes) != 1 or modes[0] not in valid:
        names = " and ".join(modes)[:80] or "none"
        raise CheckpointError(f"{config}: pooling {names}: must be one of {', '.join(valid)}; or give --pooling")
    return valid[modes[0]]


def check_modules(files: Mapping[str, Path]) -> None:
    """Check modules.json if `files` contains it. Errors: CheckpointError for a module that changes the vectors, such as
    Dense."""
    path = files.get("modules.json")
    if path is None:
        return
    modules = _json(path)
    for module in modules if isinstance(modules, list) else []:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if name not in _MODULES:
            raise CheckpointError(f"{path}: module {name[:40]!r}: must be {', '.join(_MODULES)}")


def _json(path: Path) -> Json:
    return parse_json(read_limited(path, _BYTES, str(path)), str(path))
