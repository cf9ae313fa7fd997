"""Every property of an option is set where the option is defined, and readers have no lists of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from mega import cli
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.option import Bench, OnResume, Option, Range
from mega.core.config.presets import FAMILY_DEFAULTS, register_family
from mega.core.config.resolve import resolve
from mega.core.config.run import entries, options_with, updated, value_of
from mega.core.config.schema import Entry
from mega.core.config.sections import ModelConfig
from mega.core.config.toml import unfit

FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.name)
def test_every_option_has_its_properties(entry: Entry) -> None:
    option = entry.option
    assert option.help and not option.help.endswith(".")
    assert option.on_resume in get_args(OnResume)
    assert option.bench in get_args(Bench)
    assert isinstance(option.layout, bool)
    # What changes a result is not left to a search, and a search never has to ask what a checkpoint allows.
    assert not option.layout or option.on_resume in ("free", "rounding")
    assert not option.rounds_over or (option.on_resume == "rounding" and len(option.rounds_over) == 1)
    for other, valid in option.needs.items():
        assert other in entries() and other != entry.name
        assert isinstance(valid, Range) or set(valid) <= set(entries()[other].choices)
    if option.within is not None:
        numbers = entry.default if entry.many else (entry.default,)
        assert all(number is None or option.within.holds(number) for number in numbers)
    assert entry.default is None or not entry.choices or entry.default in entry.choices


MIXTURE = (
    *("router_jitter", "router_quantile_ema", "mtp_loss", "balance", "balance_loss", "balance_bias_rate", "z_loss"),
    *("capacity_factor", "drop_policy"),
)
"""What of a mixture of experts may change on resume, with a word."""

RETRIEVER = ("retro_encoder_hidden_dropout", "retro_encoder_attention_dropout", "retro_gate", "retro_cross_documents")
"""The same of what reads neighbours."""

# What a resume may change, what the planner keeps and what bench takes, written out.


def test_what_a_resume_accepts_of_the_model() -> None:
    free = {"hidden_dropout", "attention_dropout", "lora_dropout", "init_std", "vocab_multiple", "positions"}
    free |= {"mask_padded_vocab", "memory_padding"} | {*MIXTURE, *RETRIEVER} | {"pad_to_capacity"}
    must = set(options_with(on_resume="must match"))
    assert must == FIELDS - free | {"optimizer", "task"}


def test_what_a_resume_notes() -> None:
    assert set(options_with(on_resume="noted")) == {
        *("seed", "data_path", "train_data", "chat_data", "split", "order", "seq_length", "global_batch", "dtype"),
        *("reset_positions", "reset_attention", "eod_mask_loss", "loss_normalizer", "keep_last_batch"),
        *("hidden_dropout", "attention_dropout", "lora_dropout", "dpo_data", "dpo_beta", "dpo_label_smoothing"),
        *(f"fim_{name}" for name in ("data", "rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix")),
        *(f"fim_{name}_token" for name in ("prefix", "middle", "suffix", "pad", "eod")),
        *(f"muon_{name}" for name in ("momentum", "nesterov", "coefficients", "steps", "scale", "factor", "dtype")),
        *("decay_all", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
        *("adafactor_relative", "adafactor_clip", "adafactor_decay", "mask_padded_vocab", "rampup", "chat_template"),
        *("sample_kind", "mask_prob", "short_seq_prob", "decoder_seq_length"),
        *("loss_scale_window", "hysteresis", "min_loss_scale"),
        *MIXTURE,
        *("retro", *RETRIEVER),
        *(
            "fp8",
            "fp8_scaling",
            "memory_padding",
            "data_sharding",
            "grad_dtype",
            "masters",
            "residual_fp32",
            "embedding_fp32",
            "loss_scale",
            "ops",
        ),
    }


def test_what_changes_the_order_of_sums() -> None:
    assert set(options_with(on_resume="rounding")) == {
        *("micro_batch", "vocab_multiple", "sequence_parallel", "cp_comm", "zero", "bucket_size", "chunks"),
        *("stage_layers", "expert_dispatch", "optimizer_offload", "deterministic"),
    }


def test_what_a_layout_is() -> None:
    assert set(options_with(layout=True)) == {
        *("tp", "cp", "pp", "chunks", "schedule", "layers_per_chunk", "sequence_parallel", "zero", "micro_batch"),
        *("recompute", "recompute_method", "recompute_layers", "stage_layers", "distribute_saved", "accumulation"),
        *("split_rank", "ep", "etp"),
    }


def test_what_bench_reads() -> None:
    sections = ("data", "finetuning", "schedule", "evaluation", "checkpoint", "log", "guards", "supervision")
    dropped = {name for name, entry in entries().items() if entry.section in sections}
    assert set(options_with(bench="unused")) == dropped - {"reset_attention"} | {
        *("steps", "samples", "rampup", "phase_timeout_minutes")
    }
    assert set(options_with(bench="host")) == {"device", "backend", "timeout_minutes", "nproc"}


def test_the_schedule_is_its_section_and_two_more() -> None:
    section = {name for name, entry in entries().items() if entry.section == "schedule"}
    assert set(options_with(on_resume="schedule")) == section | {"lr", "weight_decay"}


TRAINS = {"micro_batch": 1, "steps": 4, "lr": 1e-3, "mock_data": True, "vocab": 100}


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.option.needs])
def test_what_an_option_needs_is_checked(name: str) -> None:
    """With it, no line names the option and the other one; without it, one line does."""
    entry = entries()[name]
    on: Any = {int: 3, float: 0.5, str: entry.choices[-1] if entry.choices else "x"}.get(entry.kind, not entry.default)
    on = (on,) if entry.many else on
    (other, valid), *_ = entry.option.needs.items()
    absent = None
    if isinstance(valid, Range):
        there: Any = next(number for number in range(9) if valid.holds(number))
    elif valid:
        there, absent = valid[0], next(choice for choice in entries()[other].choices if choice not in valid)
    else:
        there = {bool: True, int: 2, float: 3.0}.get(entries()[other].kind, "x")

    def lines(value: object) -> list[str]:
        values = {name: on, other: entries()[other].default if value is None else value}
        try:
            check(updated(compose("tiny-gpt", flags=TRAINS), values), 1)
        except ValueError as error:
            return [line for line in str(error).splitlines() if f"needs {entries()[other].flag}" in line]
        return []

    named = [line for line in lines(absent) if line.partition(":")[0].split()[0] in (entry.flag, entry.off)]
    assert len(named) == 1
    assert not [line for line in lines(there) if line in named]


def test_a_family_is_registered_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One call makes it a choice of --family, with its defaults and its tokenizer."""
    assert unfit("model", "family", "toy") == "'toy' is not a choice; valid: gpt, llama, bert, t5"
    register_family("toy", {"norm": "rmsnorm", "tied": False}, sentencepiece="SentencePieceTokenizer")
    try:
        assert entries()["family"].choices == ("gpt", "llama", "bert", "t5", "toy")
        assert unfit("model", "family", "toy") is None
        run = compose("tiny-gpt", flags=TRAINS | {"family": "toy", "hidden_dropout": 0.0})
        assert (run.model.norm, run.model.tied) == ("rmsnorm", False)
        check(run, 1)
        assert cli.main(["pretrain", "--family", "toy", "--print-config"]) == 0
        assert 'family = "toy"' in capsys.readouterr().out
        asked = resolve(updated(run, {"tokenizer_model": "a.model"}), 1)
        assert value_of(asked, "tokenizer") == "SentencePieceTokenizer"
    finally:
        del FAMILY_DEFAULTS["toy"]


def test_a_property_that_does_not_exist_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="on_resum"):
        Option(help="x", on_resum="free")  # type: ignore[call-arg]
