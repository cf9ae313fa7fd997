"""Layers of a run: defaults < family < preset < file < flags; and presets are the published models."""

from __future__ import annotations

import re

import pytest

from mega.core.architecture import parameters
from mega.core.config.compose import compose
from mega.core.config.presets import FAMILY_DEFAULTS, PRESETS
from mega.core.config.resolve import model_alone
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


PUBLISHED: list[tuple[str, dict[str, int], int]] = [
    ("llama2-7b", {}, 6_738_415_616),
    ("llama2-13b", {}, 13_015_864_320),
    ("llama2-70b", {}, 68_976_648_192),
    ("gpt2-345m", {"vocab": 50304}, 354_871_296),
    ("gpt2-124m", {}, 124_439_808),
    ("gpt-175b", {}, 174_615_846_912),
    ("llama3-8b", {}, 8_030_261_248),
    ("llama3-70b", {}, 70_553_706_496),
    ("llama3.2-1b", {}, 1_235_814_400),
    ("llama3.2-3b", {}, 3_212_749_824),
    ("mistral-7b", {}, 7_241_732_096),
    ("qwen2.5-0.5b", {}, 494_032_768),
    ("qwen2.5-1.5b", {}, 1_543_714_304),
    ("qwen2.5-3b", {}, 3_085_938_688),
    ("qwen2.5-7b", {}, 7_615_616_512),
    ("qwen2.5-14b", {}, 14_770_033_664),
    ("qwen2.5-32b", {}, 32_763_876_352),
    ("qwen2.5-72b", {}, 72_706_203_648),
    ("qwen3-0.6b", {}, 596_049_920),
    ("qwen3-1.7b", {}, 1_720_574_976),
    ("qwen3-4b", {}, 4_022_468_096),
    ("qwen3-8b", {}, 8_190_735_360),
    ("qwen3-14b", {}, 14_768_307_200),
    ("qwen3-32b", {}, 32_762_123_264),
    ("bert-345m", {"vocab": 30592}, 336_297_858),
    ("bert-110m", {"vocab": 30522}, 110_106_428),
    ("t5-220m", {"vocab": 30720}, 222_495_744),
    ("pythia-70m", {}, 70_426_624),
    ("pythia-160m", {}, 162_322_944),
    ("pythia-410m", {}, 405_334_016),
    ("pythia-1b", {}, 1_011_781_632),
    ("pythia-1.4b", {}, 1_414_647_808),
    ("pythia-2.8b", {}, 2_775_208_960),
    ("pythia-6.9b", {}, 6_857_302_016),
    ("pythia-12b", {}, 11_846_072_320),
    ("gpt-neox-20b", {}, 20_554_567_680),
    ("gpt-j-6b", {}, 6_050_882_784),
    ("olmo2-1b", {}, 1_484_916_736),
    ("olmo2-7b", {}, 7_298_617_344),
    ("olmo2-13b", {}, 13_716_198_400),
    ("olmo2-32b", {}, 32_234_279_936),
    ("olmo3-7b", {}, 7_298_011_136),
    ("olmo3-32b", {}, 32_233_522_176),
    ("gemma-2b", {}, 2_506_172_416),
    ("gemma-7b", {}, 8_537_680_896),
    ("gemma2-2b", {}, 2_614_341_888),
    ("gemma2-9b", {}, 9_241_705_984),
    ("gemma2-27b", {}, 27_227_128_320),
    ("gemma3-270m", {}, 268_098_176),
    ("gemma3-1b", {}, 999_885_952),
    ("phi3-mini", {}, 3_821_079_552),
    ("phi3-medium", {}, 13_960_238_080),
    ("phi4", {}, 14_659_507_200),
    ("starcoder2-3b", {}, 3_030_371_328),
    ("starcoder2-7b", {}, 7_173_923_840),
    ("starcoder2-15b", {}, 15_957_889_024),
    ("smollm3-3b", {}, 3_075_098_624),
    ("granite3.1-2b", {}, 2_533_531_648),
    ("granite3.1-8b", {}, 8_170_848_256),
    ("stablelm2-1.6b", {}, 1_644_515_328),
    ("roberta-125m", {}, 124_697_433),
    ("roberta-355m", {}, 355_412_057),
]
"""Preset, what a count was made with, and the parameters."""


@pytest.mark.parametrize(("preset", "changes", "count"), PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset: str, changes: dict[str, int], count: int) -> None:
    assert parameters(model_alone(updated(compose(preset), changes))) == count


def test_other_presets_are_about_as_large_as_their_names_say() -> None:
    """Within 5 %: names are rounded, and this T5 has learned positions and biases, which Raffel et al.'s does not."""
    sizes = {name: re.search(r"-([\d.]+)([mbt])$", name) for name in set(PRESETS) - {row[0] for row in PUBLISHED}}
    for name, size in sizes.items():
        if size is not None:
            whole = float(size[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[2]]
            assert parameters(model_alone(compose(name))) == pytest.approx(whole, rel=0.05), name


@pytest.mark.parametrize("name", ["layers", "lr", "data_path", "dry_run"])
def test_an_option_is_found_by_its_name(name: str) -> None:
    value = {"layers": 3, "lr": 0.5, "data_path": ("a",), "dry_run": True}[name]
    assert value_of(updated(Options(), {name: value}), name) == value
