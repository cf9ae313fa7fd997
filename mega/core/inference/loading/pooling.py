"""Read the pooling of a sentence-transformers model from `modules.json` and `1_Pooling/config.json`.

This file only reads JSON; inference/embedding.py does the pooling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mega.core.checkpoint.own.store import CheckpointError
from mega.core.untrusted import Json, parse_json, read_limited

_MODES: dict[str, Literal["mean", "cls"]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_BYTES = 1 << 16
"""Maximum size of either file in bytes."""


def declared_pooling(folder: Path) -> Literal["mean", "cls"] | None:
    """The pooling that the folder of a sentence-transformers model declares; None if it declares no pooling.

    Errors: CheckpointError naming file and value, for any other pooling or for a module that changes the vectors.
    """
    modules, config = folder / "modules.json", folder / "1_Pooling" / "config.json"
    if modules.is_file():
        _check_modules(modules)
    if not config.is_file():
        return None
    settings = _json(config)
    flags = settings if isinstance(settings, dict) else {}
    modes = [str(key) for key, flag in flags.items() if key.startswith("pooling_mode_") and flag is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        names = " and ".join(modes) or "none"
        raise CheckpointError(f"{config}: pooling {names}: must be one of {', '.join(_MODES)}; or give --pooling")
    return _MODES[modes[0]]


def _check_modules(path: Path) -> None:
    """Check the modules. Errors: CheckpointError for a module with weights after the pooling, such as Dense."""
    modules = _json(path)
    for module in modules if isinstance(modules, list) else []:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if name not in _MODULES:
            raise CheckpointError(f"{path}: module {name[:40]!r}: must be {', '.join(_MODULES)}")


def _json(path: Path) -> Json:
    return parse_json(read_limited(path, _BYTES, str(path)), str(path))
