"""Compose a run's options from layers, each of which overrides the previous: defaults, family, preset, TOML file,
flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mega.core.config.presets import FAMILY_DEFAULTS, PRESETS
from mega.core.config.run import Options, updated

LONGEST_WORD = 100
"""Maximum length, in characters, of a word for which the nearest valid word is searched for, because the search takes
quadratic time."""


class GivenOptions(NamedTuple):
    """Values given by the user: a preset, and the options in a TOML file or flags, including options that were
    explicitly set to their defaults."""

    preset: str | None
    values: Mapping[str, object]
    """Options of the run, by name."""
    own: Mapping[str, object] = {}
    """Options of the subcommand's other sections, by name."""


def compose(
    preset: str | None = None, file: Mapping[str, object] | None = None, flags: Mapping[str, object] | None = None
) -> Options:
    """Compose a run from a `preset`, the values of a TOML `file`, and the values of `flags`.

    >>> run = compose("llama2-7b", file={"lr": 1e-4, "tp": 2}, flags={"tp": 4})
    >>> run.model.norm, run.model.ffn, run.optimizer.lr, run.parallel.tp
    ('rmsnorm', 11008, 0.0001, 4)
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(
            f"--model {preset}: is not a preset{nearest(preset, PRESETS)}; valid --model: {', '.join(PRESETS)}"
        )
    row = PRESETS[preset] if preset is not None else {}
    values = {**row, **(file or {}), **(flags or {})}
    family = str(values.get("family", "gpt"))
    return updated(Options(), {**FAMILY_DEFAULTS[family].values, **values})


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return ` (nearest: ...)` for a message about an unknown `word`, or an empty string if no valid word is similar.

    >>> nearest("lama2-7b", ["llama2-7b", "gpt3-175b"])
    ' (nearest: llama2-7b)'
    """
    matches = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6) if len(word) <= LONGEST_WORD else []
    return f" (nearest: {matches[0]})" if matches else ""


def nearest_flag(flag: str, valid: Iterable[str]) -> str:
    """Return ` (nearest: ...)` for an unknown flag, as `nearest` does. Leading dashes and the order of words are
    ignored.

    >>> nearest_flag("--layrs", ["--layers", "--lr"]), nearest_flag("--size-hidden", ["--hidden-size", "--heads"])
    (' (nearest: --layers)', ' (nearest: --hidden-size)')
    >>> nearest_flag("--zebra", ["--zero", "--bf16"])
    ''
    """
    if len(flag) > LONGEST_WORD:
        return ""
    bare = flag.strip("-").replace("_", "-")
    names = {name.strip("-").replace("_", "-"): name for name in valid}
    reordered = [name for name in names if sorted(name.split("-")) == sorted(bare.split("-"))]
    matches = reordered or difflib.get_close_matches(bare, list(names), n=1, cutoff=0.7)
    return f" (nearest: {names[matches[0]]})" if matches else ""
