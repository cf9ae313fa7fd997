"""Read the pooling of a sentence-transformers model from `modules.json` and `1_Pooling/config.json`.

This file only reads JSON; inference/embedding.py pools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mega.core.checkpoint.own.store import CheckpointError
from mega.core.untrusted import Json, parse_json, read_limited

_MODES: dict[str, Literal["mean", "cls"]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_BYTES = 1 << 16
"""Largest size of either file."""


def declared_pooling(folder: Path) -> Literal["mean", "cls"] | None:
    """The pooling that a folder of sentence-transformers declares; None if it declares none.

    Errors: CheckpointError naming file and value, for another pooling or a module that changes vectors.
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
    """Errors: CheckpointError for a module after the pooling that has weights of its own, such as Dense."""
    modules = _json(path)
    for module in modules if isinstance(modules, list) else []:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if name not in _MODULES:
            raise CheckpointError(f"{path}: module {name[:40]!r}: must be {', '.join(_MODULES)}")


def _json(path: Path) -> Json:
    return parse_json(read_limited(path, _BYTES, str(path)), str(path))
