"""Keys of a config.json that say what single layers are: which have a window, which rotary positions, of which base.

Options hold patterns: 0 and 1 for the first layers, which begin again where they end. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mega.core.checkpoint.forms.families.keys import Config, Values
from mega.core.checkpoint.forms.families.rope import FULL, ORIGINAL, SLIDING, RopeKeys, written_scaling
from mega.core.checkpoint.forms.keys import number_in, whole_in
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig

LAYERS = "num_hidden_layers"


def pattern(layers: Sequence[object]) -> tuple[int, ...]:
    """The shortest pattern that gives these layers, 1 where they are true; () where all are.

    >>> pattern([1, 1, 0, 1, 1, 0, 1]), pattern([1, 1])
    ((1, 1, 0), ())
    """
    whole = tuple(int(bool(each)) for each in layers)
    if all(whole):
        return ()
    fits = (n for n in range(1, len(whole) + 1) if all(one == whole[at % n] for at, one in enumerate(whole)))
    return whole[: next(fits)]


def unrolled(pattern: tuple[int, ...], layers: int) -> list[bool]:
    """Whether each of the first `layers` layers is one of a pattern; without one all are."""
    return [not pattern or bool(pattern[number % len(pattern)]) for number in range(layers)]


Rule = Callable[[Config, int], list[str]]
"""Kinds of layers of a config.json that does not list them, of so many."""


def all_slide(config: Config, layers: int) -> list[str]:
    return [SLIDING] * layers


def every(full: int | str, default: int = 0) -> Rule:
    """Every `full`th layer sees all tokens; or every one of the number at the key `full`, `default` without it."""

    def kinds(config: Config, layers: int) -> list[str]:
        step = full if isinstance(full, int) else whole_in(config, full, "config.json", default)
        return [FULL if (number + 1) % step == 0 else SLIDING for number in range(layers)]

    return kinds


def from_layer(config: Config, layers: int) -> list[str]:
    """Qwen's: those from `max_window_layers` on have the window."""
    without = config.get("max_window_layers", 28)
    if type(without) is not int or without < 0:
        raise CheckpointError(f"config.json: max_window_layers {without!r}: must be a whole number of at least 0")
    return [FULL] * min(without, layers) + [SLIDING] * (layers - without)


def full_with_rope(config: Config, layers: int) -> list[str]:
    """SmolLM3's: those without rotary positions have the window."""
    listed = WithoutRope().listed(config, "no_rope_layers", "config.json")
    return [FULL if each else SLIDING for each in listed]


@dataclass(frozen=True)
class Window:
    """`sliding_window`, with the keys that say which layers have it.

    default: where the key is absent; null always is none. rule: which layers, where `layer_types` is not there. switch:
    the window counts only where `use_sliding_window` is true. listed: whether the family reads `layer_types`. others:
    keys that the rule reads. local: layers with a window have rotary positions of their own, so that it is kept where
    it hides nothing. masked_anyway: transformers masks the layers that are listed even where the switch is off.
    """

    default: int | None = None
    rule: Rule = all_slide
    switch: bool = False
    listed: bool = False
    others: tuple[str, ...] = ()
    local: bool = False
    masked_anyway: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        switch, listed = ("use_sliding_window",) * self.switch, ("layer_types",) * self.listed
        return (*switch, *listed, *self.others)

    def read(self, config: Config, name: str, where: str) -> Values:
        layers = whole_in(config, LAYERS, where)
        listed = kinds = config.get("layer_types") if self.listed else None
        if kinds is None:
            kinds = self.rule(config, layers)
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise CheckpointError(f"{where}: layer_types {kinds!r}: must be {FULL} or {SLIDING} for each layer")
        on = not self.switch or bool(config.get("use_sliding_window"))
        if self.masked_anyway and not on and listed and SLIDING in kinds and config.get(name) is not None:
            raise CheckpointError(
                f"{where}: layer_types lists {SLIDING} and {name} is {config[name]!r}: use_sliding_window must be "
                f"true; without a window take {name} out"
            )
        if not on or config.get(name, self.default) is None or SLIDING not in kinds:
            return {}
        window = whole_in(config, name, where, self.default)
        if window >= whole_in(config, "max_position_embeddings", where) and not self.local:
            return {}
        return {"window": window, "window_layers": pattern([kind == SLIDING for kind in kinds])}

    def write(self, model: ModelConfig, name: str) -> Values:
        if model.window is None and not self.listed:
            return {name: None} if self.default is not None or not self.switch else {}
        slides = [model.window is not None and each for each in unrolled(model.window_layers, model.layers)]
        listed = {"layer_types": [SLIDING if each else FULL for each in slides]} if self.listed else {}
        if model.window is None and self.switch:
            return {"use_sliding_window": False}
        switch = {"use_sliding_window": True} if self.switch else {}
        first = {"max_window_layers": 0} if self.rule is from_layer else {}
        return {name: model.window, **switch, **first, **listed}


@dataclass(frozen=True)
class RopeByKind:
    """Rotary positions of layers with a window and of those without: `rope_parameters` by the kind of layer.

    It is a family's key `max_position_embeddings`. full: of layers without a window; it is scaled as that of old files
    is, which have no others. local_base: of layers with one where nothing is said; local_key: what old files call it;
    None: they have the other's base, not scaled.
    """

    full: RopeKeys
    local_base: float | None = None
    local_key: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.full.names, *((self.local_key,) if self.local_key else ()))

    def read(self, config: Config, name: str, where: str) -> Values:
        said = config.get("rope_parameters") or {}
        if config.get(ORIGINAL) is not None:
            raise CheckpointError(f"{where}: {ORIGINAL}: must be among the numbers of its kind of layer, not outside")
        if not isinstance(said, Mapping) or (said and not any(kind in said for kind in (FULL, SLIDING))):
            raise CheckpointError(f"{where}: rope_parameters {said!r:.60}: must be objects by kind of layer")
        if not said:
            found = self.full.read(config, name, where)
            return {**found, "local_rope_base": self._local(config, found, where)}
        if odd := [kind for kind in said if kind not in (FULL, SLIDING)]:
            raise CheckpointError(
                f"{where}: rope_parameters {odd[0]!r}: is not a kind of layer; valid: {FULL}, {SLIDING}"
            )
        plain = {key: value for key, value in config.items() if key not in ("rope_theta", self.local_key)}
        former = config.get("rope_scaling") or {}
        if not isinstance(former, Mapping) or not isinstance(said.get(FULL) or {}, Mapping):
            raise CheckpointError(f"{where}: rope_parameters {said!r:.60}: must be objects of numbers by kind of layer")
        full = {"rope_theta": config.get("rope_theta"), **(said.get(FULL) or {}), **former}
        found = self.full.read({**plain, "rope_scaling": None, "rope_parameters": full}, name, where)
        sliding = said.get(SLIDING) or {}
        if not isinstance(sliding, Mapping) or (kind := sliding.get("rope_type", "default")) != "default":
            raise CheckpointError(f"{where}: rope_parameters of {SLIDING}: rope_type {kind!r} (valid: default)")
        if odd := [key for key in sliding if key not in ("rope_type", "rope_theta")]:
            raise CheckpointError(
                f"{where}: rope_parameters of {SLIDING}: {odd[0]}: is not a key of rope_type 'default'"
            )
        old = {} if self.local_key is None else {"rope_theta": config.get(self.local_key)}
        base = self.local_base or self.full.base
        local = number_in({**old, **sliding}, "rope_theta", where, base)
        return {**found, "local_rope_base": _unless_same(local, found)}

    def _local(self, config: Config, found: Values, where: str) -> float | None:
        """The base of layers with a window in an old file."""
        if self.local_key is not None:
            return _unless_same(number_in(config, self.local_key, where, self.local_base), found)
        if found["rope_base"] != self.full.base:
            raise CheckpointError(
                f"{where}: rope_theta {found['rope_base']}: versions of transformers differ on layers with a window; "
                "say rope_parameters of each kind of layer"
            )
        return _unless_same(self.full.base, found)

    def write(self, model: ModelConfig, name: str) -> Values:
        full = {"rope_type": "default", **(written_scaling(model) or {}), "rope_theta": model.rope_base}
        local = model.rope_base if model.local_rope_base is None else model.local_rope_base
        both = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}
        return {name: model.positions, "rope_parameters": both}


def _unless_same(local: float, full: Values) -> float | None:
    """The base of layers with a window; None where they turn as the others do."""
    plain = full.get("rope_interpolation", 1.0) == 1.0 and full.get("rope_scaling", "none") == "none"
    return None if plain and local == full["rope_base"] else local


@dataclass(frozen=True)
class WithoutRope:
    """SmolLM3's `no_rope_layers`: 1 for layers with rotary positions, 0 for those without; without the list every
    `no_rope_layer_interval`th has none."""

    names = ("no_rope_layer_interval",)

    def listed(self, config: Config, name: str, where: str) -> list[int]:
        layers, listed = whole_in(config, LAYERS, where), config.get(name)
        if listed is None:
            step = whole_in(config, "no_rope_layer_interval", where, 4)
            listed = [int((number + 1) % step != 0) for number in range(layers)]
        if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
            raise CheckpointError(f"{where}: {name} {listed!r}: must be 0 or 1 for each layer")
        return listed[:layers]

    def read(self, config: Config, name: str, where: str) -> Values:
        return {"rope_layers": pattern(self.listed(config, name, where))}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: [int(each) for each in unrolled(model.rope_layers, model.layers)]}
