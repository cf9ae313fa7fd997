"""Keys of config.json for individual layers: which layers have an attention window, which have rotary positions, and
the RoPE base per kind of layer.

The project's options represent these properties as patterns: 0 or 1 for each of the first layers, repeated for the
following layers. This module does not depend on the model family.
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
    """Return the shortest pattern of 0 and 1 that, when repeated, produces the flags `layers`; () if all flags are
    true.

    >>> pattern([1, 1, 0, 1, 1, 0, 1]), pattern([1, 1])
    ((1, 1, 0), ())
    """
    flags = tuple(int(bool(each)) for each in layers)
    if all(flags):
        return ()
    fits = (
        n for n in range(1, len(flags) + 1) if all(value == flags[position % n] for position, value in enumerate(flags))
    )
    return flags[: next(fits)]


def unrolled(pattern: tuple[int, ...], layers: int) -> list[bool]:
    """Return, for each of the first `layers` layers, whether the pattern selects the layer. An empty pattern selects
    all layers."""
    return [not pattern or bool(pattern[number % len(pattern)]) for number in range(layers)]


Rule = Callable[[Config, int], list[str]]
"""Function that takes config.json and the number of layers, and returns the kind of each layer. It is used for a
config.json without `layer_types`."""


def all_slide(config: Config, layers: int) -> list[str]:
    return [SLIDING] * layers


def every(full: int | str, default: int = 0) -> Rule:
    """Return the rule by which every `full`th layer has full attention. full: the interval, or a key of config.json
    whose value is the interval. default: the interval if the key is absent."""

    def kinds(config: Config, layers: int) -> list[str]:
        step = full if isinstance(full, int) else whole_in(config, full, "config.json", default)
        return [FULL if (number + 1) % step == 0 else SLIDING for number in range(layers)]

    return kinds


def from_layer(config: Config, layers: int) -> list[str]:
    """Apply Qwen's rule: layers with index `max_window_layers` and above have the attention window."""
    first_window = config.get("max_window_layers", 28)
    if type(first_window) is not int or first_window < 0:
        raise CheckpointError(f"config.json: max_window_layers {first_window!r}: must be a whole number of at least 0")
    return [FULL] * min(first_window, layers) + [SLIDING] * (layers - first_window)


def full_with_rope(config: Config, layers: int) -> list[str]:
    """Apply SmolLM3's rule: layers without rotary positions have the attention window."""
    has_rope = WithoutRope().listed(config, "no_rope_layers", "config.json")
    return [FULL if each else SLIDING for each in has_rope]


@dataclass(frozen=True)
class Window:
    """The key `sliding_window`, together with the keys that determine which layers have a window."""

    default: int | None = None
    """The window size if the key `sliding_window` is absent. A value of null always means no window."""
    rule: Rule = all_slide
    """The rule that determines the kinds of layers if `layer_types` is absent."""
    switch: bool = False
    """Whether the attention window applies only if `use_sliding_window` is true."""
    listed: bool = False
    """Whether the family uses `layer_types`."""
    others: tuple[str, ...] = ()
    """Additional keys of config.json that `rule` reads."""
    local: bool = False
    """Whether layers with a window have a separate RoPE base. If so, the window is kept even if it covers all
    positions."""
    masked_anyway: bool = False
    """Whether transformers applies the window according to `layer_types` even if `use_sliding_window` is false."""

    @property
    def names(self) -> tuple[str, ...]:
        switch, layer_types = ("use_sliding_window",) * self.switch, ("layer_types",) * self.listed
        return (*switch, *layer_types, *self.others)

    def read(self, config: Config, name: str, where: str) -> Values:
        layers = whole_in(config, LAYERS, where)
        layer_types = kinds = config.get("layer_types") if self.listed else None
        if kinds is None:
            kinds = self.rule(config, layers)
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise CheckpointError(f"{where}: layer_types {kinds!r}: must be {FULL} or {SLIDING} for each layer")
        enabled = not self.switch or bool(config.get("use_sliding_window"))
        if self.masked_anyway and not enabled and layer_types and SLIDING in kinds and config.get(name) is not None:
            raise CheckpointError(
                f"{where}: layer_types lists {SLIDING} and {name} is {config[name]!r}: use_sliding_window must be "
                f"true; without a window take {name} out"
            )
        if not enabled or config.get(name, self.default) is None or SLIDING not in kinds:
            return {}
        window = whole_in(config, name, where, self.default)
        if window >= whole_in(config, "max_position_embeddings", where) and not self.local:
            return {}
        return {"window": window, "window_layers": pattern([kind == SLIDING for kind in kinds])}

    def write(self, model: ModelConfig, name: str) -> Values:
        if model.window is None and not self.listed:
            return {name: None} if self.default is not None or not self.switch else {}
        slides = [model.window is not None and each for each in unrolled(model.window_layers, model.layers)]
        layer_types = {"layer_types": [SLIDING if each else FULL for each in slides]} if self.listed else {}
        if model.window is None and self.switch:
            return {"use_sliding_window": False}
        switch = {"use_sliding_window": True} if self.switch else {}
        first = {"max_window_layers": 0} if self.rule is from_layer else {}
        return {name: model.window, **switch, **first, **layer_types}


@dataclass(frozen=True)
class RopeByKind:
    """Keys for rotary positions that differ between layers with and without a window: `rope_parameters` by kind of
    layer.

    A family lists this object under the key `max_position_embeddings`. full: keys for layers without a window; old
    files have only these keys. local_base: default RoPE base of layers with a window. local_key: the key for this base
    in old files; None if old files have no such key.
    """

    full: RopeKeys
    local_base: float | None = None
    local_key: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.full.names, *((self.local_key,) if self.local_key else ()))

    def read(self, config: Config, name: str, where: str) -> Values:
        parameters = config.get("rope_parameters") or {}
        if config.get(ORIGINAL) is not None:
            raise CheckpointError(f"{where}: {ORIGINAL}: must be among the numbers of its kind of layer, not outside")
        if not isinstance(parameters, Mapping) or (
            parameters and not any(kind in parameters for kind in (FULL, SLIDING))
        ):
            raise CheckpointError(f"{where}: rope_parameters {parameters!r:.60}: must be objects by kind of layer")
        if not parameters:
            options = self.full.read(config, name, where)
            return {**options, "local_rope_base": self._local(config, options, where)}
        if unknown := [kind for kind in parameters if kind not in (FULL, SLIDING)]:
            raise CheckpointError(
                f"{where}: rope_parameters {unknown[0]!r}: is not a kind of layer; valid: {FULL}, {SLIDING}"
            )
        other_keys = {key: value for key, value in config.items() if key not in ("rope_theta", self.local_key)}
        old_scaling = config.get("rope_scaling") or {}
        if not isinstance(old_scaling, Mapping) or not isinstance(parameters.get(FULL) or {}, Mapping):
            raise CheckpointError(
                f"{where}: rope_parameters {parameters!r:.60}: must be objects of numbers by kind of layer"
            )
        # Later entries take precedence. As in transformers, old keys override new keys.
        full = {"rope_theta": config.get("rope_theta"), **(parameters.get(FULL) or {}), **old_scaling}
        options = self.full.read({**other_keys, "rope_scaling": None, "rope_parameters": full}, name, where)
        sliding = parameters.get(SLIDING) or {}
        if not isinstance(sliding, Mapping) or (kind := sliding.get("rope_type", "default")) != "default":
            raise CheckpointError(f"{where}: rope_parameters of {SLIDING}: rope_type {kind!r} (valid: default)")
        if unknown := [key for key in sliding if key not in ("rope_type", "rope_theta")]:
            raise CheckpointError(
                f"{where}: rope_parameters of {SLIDING}: {unknown[0]}: is not a key of rope_type 'default'"
            )
        old_keys = {} if self.local_key is None else {"rope_theta": config.get(self.local_key)}
        base = self.local_base or self.full.base
        local_base = number_in({**old_keys, **sliding}, "rope_theta", where, base)
        return {**options, "local_rope_base": _unless_same(local_base, options)}

    def _local(self, config: Config, options: Values, where: str) -> float | None:
        """The RoPE base of layers with a window, from an old file."""
        if self.local_key is not None:
            return _unless_same(number_in(config, self.local_key, where, self.local_base), options)
        if options["rope_base"] != self.full.base:
            raise CheckpointError(
                f"{where}: rope_theta {options['rope_base']}: versions of transformers differ on layers with a window; "
                "say rope_parameters of each kind of layer"
            )
        return _unless_same(self.full.base, options)

    def write(self, model: ModelConfig, name: str) -> Values:
        full = {"rope_type": "default", **(written_scaling(model) or {}), "rope_theta": model.rope_base}
        local = model.rope_base if model.local_rope_base is None else model.local_rope_base
        by_kind = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}
        return {name: model.positions, "rope_parameters": by_kind}


def _unless_same(local: float, full: Values) -> float | None:
    """Return the option `local_rope_base`: None if layers without a window have the base `local` and no scaling,
    otherwise `local`."""
    unscaled = full.get("rope_interpolation", 1.0) == 1.0 and full.get("rope_scaling", "none") == "none"
    return None if unscaled and local == full["rope_base"] else local


@dataclass(frozen=True)
class WithoutRope:
    """The key `no_rope_layers` of SmolLM3, a list: 1 for each layer with rotary positions, otherwise 0. If the list is
    missing, every `no_rope_layer_interval`th layer has no rotary positions."""

    names = ("no_rope_layer_interval",)

    def listed(self, config: Config, name: str, where: str) -> list[int]:
        layers, has_rope = whole_in(config, LAYERS, where), config.get(name)
        if has_rope is None:
            step = whole_in(config, "no_rope_layer_interval", where, 4)
            has_rope = [int((number + 1) % step != 0) for number in range(layers)]
        if not isinstance(has_rope, list) or len(has_rope) < layers or any(each not in (0, 1) for each in has_rope):
            raise CheckpointError(f"{where}: {name} {has_rope!r}: must be 0 or 1 for each layer")
        return has_rope[:layers]

    def read(self, config: Config, name: str, where: str) -> Values:
        return {"rope_layers": pattern(self.listed(config, name, where))}

    def write(self, model: ModelConfig, name: str) -> Values:
        return {name: [int(each) for each in unrolled(model.rope_layers, model.layers)]}
