"""Every preset has the number of parameters that was published of its model.

Exact where a whole number was: "hub" is the count that Hugging Face shows for a repository, the elements of all tensors
of its safetensors files; others name their page. Where only some digits were published, our count rounds to them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from mega.core.architecture import active_parameters, parameters
from mega.core.config.compose import compose
from mega.core.config.presets import PRESETS
from mega.core.config.resolve import model_alone
from mega.core.config.run import updated


class Published(NamedTuple):
    """more: numbers of the published count that are not parameters of ours. vocab: rows of the counted table, where a
    preset has others."""

    preset: str
    count: int
    source: str
    more: int = 0
    vocab: int | None = None


REPEATED = {"qwen3-0.6b": 151936 * 1024, "qwen3-1.7b": 151936 * 2048}
"""The tied output matrix, which these repositories store once more."""

GPT_J_COPIES = 7 * (29 * 2 * 4096 + 28 * 4096) + 8 * 4096
"""Norms and biases of the second linear, of which each of the 8 shards in training had a copy, and a bias of the
embedding."""

PYTHIA = "https://github.com/EleutherAI/pythia, README"
EXACT = (
    Published("llama2-7b", 6_738_415_616, "hub meta-llama/Llama-2-7b-hf"),
    Published("llama2-13b", 13_015_864_320, "hub meta-llama/Llama-2-13b-hf"),
    Published("llama2-70b", 68_976_648_192, "hub meta-llama/Llama-2-70b-hf"),
    Published("llama3-8b", 8_030_261_248, "hub meta-llama/Meta-Llama-3-8B"),
    Published("llama3-70b", 70_553_706_496, "hub meta-llama/Meta-Llama-3-70B"),
    Published("llama3.1-8b", 8_030_261_248, "hub meta-llama/Llama-3.1-8B"),
    Published("llama3.1-70b", 70_553_706_496, "hub meta-llama/Llama-3.1-70B"),
    Published("llama3.2-1b", 1_235_814_400, "hub meta-llama/Llama-3.2-1B"),
    Published("llama3.2-3b", 3_212_749_824, "hub meta-llama/Llama-3.2-3B"),
    Published("mistral-7b", 7_241_732_096, "hub mistralai/Mistral-7B-v0.1"),
    Published("qwen2.5-0.5b", 494_032_768, "hub Qwen/Qwen2.5-0.5B"),
    Published("qwen2.5-1.5b", 1_543_714_304, "hub Qwen/Qwen2.5-1.5B"),
    Published("qwen2.5-3b", 3_085_938_688, "hub Qwen/Qwen2.5-3B"),
    Published("qwen2.5-7b", 7_615_616_512, "hub Qwen/Qwen2.5-7B"),
    Published("qwen2.5-14b", 14_770_033_664, "hub Qwen/Qwen2.5-14B"),
    Published("qwen2.5-32b", 32_763_876_352, "hub Qwen/Qwen2.5-32B"),
    Published("qwen2.5-72b", 72_706_203_648, "hub Qwen/Qwen2.5-72B"),
    Published("qwen3-0.6b", 751_632_384, "hub Qwen/Qwen3-0.6B", REPEATED["qwen3-0.6b"]),
    Published("qwen3-1.7b", 2_031_739_904, "hub Qwen/Qwen3-1.7B", REPEATED["qwen3-1.7b"]),
    Published("qwen3-4b", 4_022_468_096, "hub Qwen/Qwen3-4B"),
    Published("qwen3-8b", 8_190_735_360, "hub Qwen/Qwen3-8B"),
    Published("qwen3-14b", 14_768_307_200, "hub Qwen/Qwen3-14B"),
    Published("qwen3-32b", 32_762_123_264, "hub Qwen/Qwen3-32B"),
    Published("qwen3-30b-a3b", 30_532_122_624, "hub Qwen/Qwen3-30B-A3B"),
    Published("qwen3-235b-a22b", 235_093_634_560, "hub Qwen/Qwen3-235B-A22B"),
    Published("mixtral-8x7b", 46_702_792_704, "hub mistralai/Mixtral-8x7B-v0.1"),
    Published("mixtral-8x22b", 140_620_634_112, "hub mistralai/Mixtral-8x22B-v0.1"),
    Published("olmoe-1b-7b", 6_919_161_856, "hub allenai/OLMoE-1B-7B-0924"),
    Published("pythia-70m", 70_426_624, PYTHIA),
    Published("pythia-160m", 162_322_944, PYTHIA),
    Published("pythia-410m", 405_334_016, PYTHIA),
    Published("pythia-1b", 1_011_781_632, PYTHIA),
    Published("pythia-1.4b", 1_414_647_808, PYTHIA),
    Published("pythia-2.8b", 2_775_208_960, PYTHIA),
    Published("pythia-6.9b", 6_857_302_016, PYTHIA),
    Published("pythia-12b", 11_846_072_320, PYTHIA),
    Published("gpt-neox-20b", 20_554_567_680, "https://huggingface.co/EleutherAI/gpt-neox-20b, model card"),
    Published("gpt-j-6b", 6_053_381_344, "https://huggingface.co/EleutherAI/gpt-j-6b, model card", GPT_J_COPIES),
    Published("olmo2-1b", 1_484_916_736, "hub allenai/OLMo-2-0425-1B"),
    Published("olmo2-7b", 7_298_617_344, "hub allenai/OLMo-2-1124-7B"),
    Published("olmo2-13b", 13_716_198_400, "hub allenai/OLMo-2-1124-13B"),
    Published("olmo2-32b", 32_234_279_936, "hub allenai/OLMo-2-0325-32B"),
    Published("olmo3-7b", 7_298_011_136, "hub allenai/Olmo-3-1025-7B"),
    Published("olmo3-32b", 32_233_522_176, "hub allenai/Olmo-3-1125-32B"),
    Published("gemma-2b", 2_506_172_416, "hub google/gemma-2b"),
    Published("gemma-7b", 8_537_680_896, "hub google/gemma-7b"),
    Published("gemma2-2b", 2_614_341_888, "hub google/gemma-2-2b"),
    Published("gemma2-9b", 9_241_705_984, "hub google/gemma-2-9b"),
    Published("gemma2-27b", 27_227_128_320, "hub google/gemma-2-27b"),
    Published("gemma3-270m", 268_098_176, "hub google/gemma-3-270m"),
    Published("gemma3-1b", 999_885_952, "hub google/gemma-3-1b-pt"),
    Published("phi3-mini", 3_821_079_552, "hub microsoft/Phi-3-mini-4k-instruct"),
    Published("phi3-medium", 13_960_238_080, "hub microsoft/Phi-3-medium-4k-instruct"),
    Published("phi4", 14_659_507_200, "hub microsoft/phi-4"),
    Published("starcoder2-15b", 15_957_889_024, "hub bigcode/starcoder2-15b"),
    Published("smollm3-3b", 3_075_098_624, "hub HuggingFaceTB/SmolLM3-3B-Base"),
    Published("granite3.1-2b", 2_533_531_648, "hub ibm-granite/granite-3.1-2b-base"),
    Published("granite3.1-8b", 8_170_864_640, "hub ibm-granite/granite-3.3-8b-base, of 4 words more", vocab=49159),
    Published("stablelm2-1.6b", 1_644_515_328, "https://huggingface.co/stabilityai/stablelm-2-1_6b, model card"),
    Published("roberta-125m", 124_697_433, "hub FacebookAI/roberta-base"),
    Published("roberta-355m", 355_412_057, "hub FacebookAI/roberta-large"),
    Published("bert-110m", 110_106_428, "hub google-bert/bert-base-uncased", vocab=30522),
    Published("gpt2-124m", 124_439_808, "hub openai-community/gpt2, but for its buffers of masks"),
    Published("gpt2-345m", 354_823_168, "hub openai-community/gpt2-medium, but for its buffers of masks"),
)

NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, table 3"
SHOEYBI = "Shoeybi et al. 2019, arXiv 1909.08053, section 5.3"
NEMO = "NeMo-Framework-Launcher, conf/training/gpt3, whose tables have 51,200 rows"
RAFFEL = "Raffel et al. 2020, arXiv 1910.10683, section 3.7"
ROUNDED: dict[str, tuple[str, str, int | None]] = {
    "starcoder2-3b": ("3.03e9", "https://huggingface.co/bigcode/starcoder2-3b, model size", None),
    "starcoder2-7b": ("7.17e9", "https://huggingface.co/bigcode/starcoder2-7b, model size", None),
    "gpt3-175b": ("175e9", "Brown et al. 2020, arXiv 2005.14165, table 2.1", None),
    "gpt-126m": ("126e6", NEMO, 51200),
    "gpt-5b": ("5e9", NEMO, 51200),
    "gpt-20b": ("20e9", NEMO, 51200),
    "gpt-1.7b": ("1.7e9", NARAYANAN, None),
    "gpt-3.6b": ("3.6e9", NARAYANAN, None),
    "gpt-7.5b": ("7.5e9", NARAYANAN, None),
    "gpt-18b": ("18.4e9", NARAYANAN, None),
    "gpt-39b": ("39.1e9", NARAYANAN, None),
    "gpt-76b": ("76.1e9", NARAYANAN, None),
    "gpt-145b": ("145.6e9", NARAYANAN, None),
    "gpt-310b": ("310.1e9", NARAYANAN, None),
    "gpt-530b": ("529.6e9", NARAYANAN, None),
    "gpt-1t": ("1008.0e9", NARAYANAN, None),
    "gpt-22b": ("22e9", KORTHIKANTI, None),
    "gpt-175b": ("175e9", KORTHIKANTI, None),
    "yuan-4.7b": ("4.7e9", "the ASC22 competition", None),
    "yuan-13b": ("13e9", "Wu et al. 2021, arXiv 2110.04725, table 2", None),
    "bert-345m": ("336e6", SHOEYBI, None),
    "bert-1.3b": ("1.3e9", SHOEYBI, None),
    "bert-3.9b": ("3.9e9", SHOEYBI, None),
    "t5-220m": ("22e7", RAFFEL, None),
    "t5-3b": ("3e9", RAFFEL, None),
    "t5-11b": ("11e9", RAFFEL, None),
    "megatron-11b": ("11e9", "https://github.com/facebookresearch/fairseq/tree/main/examples/megatron_11b", None),
}
"""Preset -> published digits, their source, and rows of the counted table."""

OTHERWISE = {"t5-770m": 737_347_488}
"""Raffel et al. name this size 770 million; their own weights have 737,668,096, ours Megatron-LM's positions, biases
and norms instead of relative positions."""


ACTIVE = {
    "mixtral-8x7b": ("12.9e9", "Jiang et al. 2024, arXiv 2401.04088"),
    "mixtral-8x22b": ("39e9", "https://mistral.ai/news/mixtral-8x22b"),
    "qwen3-30b-a3b": ("3e9", "Qwen Team 2025, arXiv 2505.09388"),
    "qwen3-235b-a22b": ("22e9", "Qwen Team 2025, arXiv 2505.09388"),
    "olmoe-1b-7b": ("1.3e9", "Muennighoff et al. 2024, arXiv 2409.02060"),
}
"""Preset of a mixture -> published digits of the parameters that a token passes, and their source."""


def count(preset: str, vocab: int | None = None) -> int:
    return parameters(model_alone(updated(compose(preset), {} if vocab is None else {"vocab": vocab})))


@pytest.mark.parametrize("published", EXACT, ids=lambda published: published.preset)
def test_a_preset_has_the_published_number_of_parameters(published: Published) -> None:
    assert count(published.preset, published.vocab) + published.more == published.count, published.source


@pytest.mark.parametrize("preset", ROUNDED)
def test_a_preset_rounds_to_the_published_digits(preset: str) -> None:
    digits, source, vocab = ROUNDED[preset]
    assert rounded(count(preset, vocab), digits) == digits, source


@pytest.mark.parametrize("preset", ACTIVE)
def test_active_parameters_round_to_the_published_digits(preset: str) -> None:
    digits, source = ACTIVE[preset]
    assert rounded(active_parameters(model_alone(compose(preset))), digits) == digits, source


def rounded(number: int, digits: str) -> str:
    """As many digits of it."""
    written, _, exponent = digits.partition("e")
    places = len(written.partition(".")[2])
    return f"{number / 10 ** int(exponent):.{places}f}e{exponent}"


def test_every_preset_was_published() -> None:
    """But for those of tests and first steps."""
    known = {published.preset for published in EXACT} | {*ROUNDED, *OTHERWISE}
    assert {name for name in PRESETS if not name.startswith("tiny-")} == known
    assert {preset: count(preset) for preset in OTHERWISE} == OTHERWISE
