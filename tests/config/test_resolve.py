"""Derived values: Megatron-LM's rules, once, and the same when derived twice."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega.core.config import toml
from mega.core.config.compose import compose
from mega.core.config.presets import PRESETS
from mega.core.config.resolve import (
    batch_sizes,
    data_parallel,
    global_batch_at,
    lengths,
    microbatches,
    no_overlap_reason,
    overlaps_exchanges,
    resolve,
    variant,
)
from mega.core.config.run import Options, RunConfig, updated, value_of
from mega.core.config.sections import BatchConfig

SIZES = {"layers": 4, "hidden": 64, "heads": 4, "seq_length": 32, "micro_batch": 2}
VOCABULARY = 50257


def resolved(world: int = 1, **values: Any) -> RunConfig:
    return resolve(updated(Options(), SIZES | values), world, VOCABULARY)


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, "ffn", 256),
        ({"activation": "swiglu"}, "ffn", 128),
        ({"activation": "swiglu", "hidden": 4096}, "ffn", 10880),
        ({"activation": "swiglu", "ffn": 100}, "ffn", 100),
        ({}, "head_dim", 16),
        ({}, "kv_heads", 4),
        ({"kv_heads": 2}, "kv_heads", 2),
        ({}, "positions", 32),
        ({"positions": 64}, "positions", 64),
        ({"bias": False}, "qkv_bias", False),
        ({"bias": False, "qkv_bias": True}, "qkv_bias", True),
        ({}, "grad_dtype", "fp32"),
        ({"dtype": "bf16"}, "grad_dtype", "fp32"),
        ({"dtype": "fp16"}, "grad_dtype", "fp16"),
        ({"dtype": "fp64"}, "grad_dtype", "fp64"),
        ({"dtype": "fp16", "grad_dtype": "fp32"}, "grad_dtype", "fp32"),
        ({}, "schedule", "1f1b"),
        ({"pp": 2, "layers_per_chunk": 1}, "schedule", "interleaved"),
        ({"pp": 2, "layers_per_chunk": 1}, "chunks", 2),
        ({"sequence_parallel": True}, "sequence_parallel", False),
        ({"sequence_parallel": True, "tp": 2}, "sequence_parallel", True),
        ({"steps": 10}, "lr_decay_steps", 10),
        ({"steps": 10, "lr_decay_steps": 5}, "lr_decay_steps", 5),
        ({"samples": 99}, "lr_decay_samples", 99),
        ({"samples": 99}, "lr_decay_steps", None),
        ({"save": "there"}, "metrics", "there/metrics.jsonl"),
        ({"tokenizer_model": "a/tokenizer.json"}, "tokenizer", "HuggingFaceTokenizer"),
        ({"tokenizer_model": "a.model", "family": "llama"}, "tokenizer", "Llama2Tokenizer"),
        ({"tokenizer_model": "a.model"}, "tokenizer", "GPTSentencePieceTokenizer"),
        ({"vocab_file": "vocab.json"}, "tokenizer", "GPT2BPETokenizer"),
        ({}, "tokenizer", None),
    ],
)
def test_derived(given: dict[str, Any], name: str, expected: Any) -> None:
    assert value_of(resolved(world=2, **given), name) == expected


def test_the_vocabulary_is_the_tokenizers_unless_it_is_given() -> None:
    assert resolved().model.vocab == VOCABULARY
    assert resolved(vocab=51200).model.vocab == 51200


@pytest.mark.parametrize("name", [*SIZES, "vocab"])
def test_a_size_that_is_missing_is_named(name: str) -> None:
    options = updated(Options(), SIZES | {"vocab": VOCABULARY, "positions": 32, name: None})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is missing: give"):
        resolve(options, 1)


def test_nothing_that_every_run_has_is_left_out() -> None:
    """Of the resolved sections no field is None that their types say is there."""
    for preset in PRESETS:
        run = resolve(updated(compose(preset), {"micro_batch": 1, "seq_length": 64}), 1, VOCABULARY)
        for section in vars(run).values():
            hints = get_type_hints(type(section))
            for name, value in vars(section).items():
                assert value is not None or NoneType in get_args(hints[name]), name


def test_another_run_is_resolved_again() -> None:
    run = resolved(dtype="fp16")
    assert variant(run, {}) == run
    assert variant(run, {"dtype": "bf16"}).precision.grad_dtype == "fp16"
    assert variant(run, {"dtype": "bf16", "grad_dtype": None}).precision.grad_dtype == "fp32"


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_batch_arithmetic(tp: int, pp: int, dp: int, micro: int, count: int) -> None:
    world = tp * pp * dp
    run = resolved(world, tp=tp, pp=pp, micro_batch=micro)
    assert data_parallel(run, world) == dp
    assert run.batch.global_batch == micro * dp and microbatches(run, world) == 1
    assert microbatches(run, world, global_batch=micro * dp * count) == count


W3 = {"preset": "gpt-22b", "tp": 4, "sequence_parallel": True, "micro_batch": 4, "vocab": 51200}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tp": 2}, None),
        ({"micro_batch": 3}, None),
        ({"micro_batch": 2}, "as blocks are small"),
        ({"tp": 8}, "as blocks are small"),
        ({"cp": 2, "micro_batch": 6}, None),
        ({"cp": 2}, "as blocks are small"),
        ({"pp": 2, "zero": 1, "cuda_graph": False}, None),
        ({"tp": 1}, "as --sequence-parallel is off"),
        ({"sequence_parallel": False}, "as --sequence-parallel is off"),
        ({"fp8": True}, "which --fp8 excludes"),
        ({"lora_rank": 8}, "which --lora-rank excludes"),
        ({"experts": 4}, "which --experts excludes"),
        ({"retriever": True}, "which --retriever excludes"),
        ({"device": "cpu"}, "as ranks have no GPUs"),
        ({"ops": "reference"}, "as --ops reference is given"),
        ({"preset": "t5-11b", "micro_batch": 64}, "as the model has two stacks"),
        ({"task": "dpo"}, "as rows have different lengths"),
    ],
    ids=str,
)
def test_exchanges_overlap_by_default_where_blocks_are_large(changes: dict[str, Any], reason: str | None) -> None:
    """Neither the number of data ranks nor a CUDA graph changes the choice, and a typed option is the choice."""
    values = W3 | changes
    preset, world = values.pop("preset"), 16
    assert no_overlap_reason(resolve(compose(preset, flags=values), world)) == reason
    for typed, chosen in ((None, reason is None), (True, True), (False, False)):
        for graph in (None, True, False):
            flags = {"cuda_graph": graph, **values, "tp_overlap": typed}
            assert overlaps_exchanges(resolve(compose(preset, flags=flags), 2 * world)) == chosen


def test_what_run_toml_holds_is_resolved_to_the_same_run() -> None:
    for preset in ("llama2-70b", "gpt3-175b", "tiny-gpt", "t5-220m", "bert-110m"):
        run = updated(compose(preset), {"micro_batch": 2, "tp": 2, "pp": 2, "samples": 100, "save": "x"})
        once = resolve(run, 8, vocab=100)
        assert resolve(toml.parse(toml.write(once)), 8) == once


GPT3 = BatchConfig(seq_length=2048, micro_batch=1, global_batch=1536, rampup=(16, 16, 5859375), samples=146484375)


def test_the_ramp_of_gpt3() -> None:
    """The batch of the iteration that starts after so many consumed samples (core facts of the published run)."""
    consumed, step, rises = 0, 0, {}
    before = 0
    while consumed <= 5859375:
        size = global_batch_at(GPT3, consumed)
        if size != before:
            rises[size] = (step, consumed)
            before = size
        consumed, step = consumed + size, step + 1
    assert rises[32] == (3855, 61680)
    assert rises[48] == (5783, 123376)
    assert rises[64] == (7068, 185056)
    assert rises[1520] == (19762, 5798624)
    assert (step, consumed) == (19802, 5859424)
    given = {"global_batch": 1536, "rampup": (16, 16, 5859375), "samples": 146484375}
    assert lengths(resolved(**given)).steps == 111354


def test_every_size_of_a_ramp() -> None:
    batch = BatchConfig(seq_length=8, micro_batch=1, global_batch=10, rampup=(4, 2, 100))
    assert list(batch_sizes(batch)) == [4, 6, 8, 10]
    assert {global_batch_at(batch, consumed) for consumed in range(200)} == {4, 6, 8, 10}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps": 100, "global_batch": 4}, (100, 400, 400, 0)),
        ({"steps": 100, "global_batch": 4, "lr_decay_steps": 50, "lr_warmup_steps": 5}, (100, 400, 200, 20)),
        ({"steps": 100, "global_batch": 4, "lr_warmup_fraction": 0.01}, (100, 400, 400, 4)),
        ({"samples": 403, "global_batch": 4, "lr_warmup_samples": 7}, (100, 403, 403, 7)),
        (
            {"samples": 403, "global_batch": 4, "lr_decay_samples": 40, "lr_warmup_fraction": 0.5},
            (100, 403, 40, 20),
        ),
    ],
)
def test_lengths_in_samples(given: dict[str, Any], expected: tuple[int, ...]) -> None:
    found = lengths(resolved(**given))
    assert (found.steps, found.samples, found.decay_samples, found.warmup_samples) == expected
