"""Layers of a run: defaults < family < preset < file < flags; and presets are the published models."""

from __future__ import annotations

import pytest

from mega.core.config.compose import compose
from mega.core.config.presets import FAMILY_DEFAULTS, PRESETS
from mega.core.config.run import Options, entries, updated, value_of


def test_nothing_given_is_megatrons_defaults() -> None:
    assert compose() == Options()


def test_each_layer_stands_above_the_one_before() -> None:
    assert compose().model.norm == "layernorm"
    assert compose(flags={"family": "llama"}).model.norm == "rmsnorm"
    assert compose("llama2-7b").batch.seq_length == 4096
    assert compose("llama2-7b", file={"seq_length": 2048}).batch.seq_length == 2048
    assert compose("llama2-7b", file={"seq_length": 2048}, flags={"seq_length": 512}).batch.seq_length == 512


def test_a_family_stands_below_every_other_layer() -> None:
    assert compose(file={"family": "llama", "norm": "layernorm"}).model.norm == "layernorm"
    assert compose(file={"norm": "layernorm"}, flags={"family": "llama"}).model.norm == "layernorm"


def test_a_value_equal_to_the_default_still_overrides() -> None:
    assert compose("llama2-7b", flags={"bias": True}).model.bias is True


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--model lama2-7b: is not a preset \(nearest: llama2-7b\); valid --model: "):
        compose("lama2-7b")


def test_families_and_presets_name_only_options() -> None:
    for row in (*(family.values for family in FAMILY_DEFAULTS.values()), *PRESETS.values()):
        assert set(row) <= set(entries())


@pytest.mark.parametrize("name", ["layers", "lr", "data_path", "dry_run"])
def test_an_option_is_found_by_its_name(name: str) -> None:
    value = {"layers": 3, "lr": 0.5, "data_path": ("a",), "dry_run": True}[name]
    assert value_of(updated(Options(), {name: value}), name) == value
