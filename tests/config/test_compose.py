"""Layers of a run: defaults < family < preset < file < flags; and presets are the published models."""

from __future__ import annotations

import pytest

from mega.core.config.compose import compose
from mega.core.config.presets import FAMILY_DEFAULTS, PRESETS
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig, entries, updated, value_of
from mega.core.inventory import inventory


def test_nothing_given_is_megatrons_defaults() -> None:
    assert compose() == RunConfig()


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


@pytest.mark.parametrize(
    ("preset", "changes", "parameters"),
    [
        ("llama2-7b", {}, 6_738_415_616),
        ("llama2-13b", {}, 13_015_864_320),
        ("llama2-70b", {}, 68_976_648_192),
        ("gpt2-345m", {"vocab": 50304}, 354_871_296),
        ("gpt2-124m", {}, 124_439_808),
        ("gpt-175b", {}, 174_615_846_912),
        ("llama3-8b", {}, 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, changes: dict[str, int], parameters: int) -> None:
    run = resolve(updated(compose(preset), changes), world=1)
    assert sum(tensor.elements for tensor in inventory(run.model)) == parameters


@pytest.mark.parametrize("name", ["layers", "lr", "data_path", "dry_run"])
def test_an_option_is_found_by_its_name(name: str) -> None:
    value = {"layers": 3, "lr": 0.5, "data_path": ("a",), "dry_run": True}[name]
    assert value_of(updated(RunConfig(), {name: value}), name) == value
