"""Megatron-LM's names and orders by era: the worked examples, and every name there and back."""

from __future__ import annotations

import doctest
import importlib

import pytest

from mega.core.checkpoint.forms.megatron.eras import ERAS, OWN_STACKS, Era, common_name, parameter_place, styled


@pytest.mark.parametrize("name", "core eras families state state_write torch_dist trees trees_write".split())
def test_worked_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"mega.core.checkpoint.forms.megatron.{name}")).failed == 0


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("family", ["gpt", *OWN_STACKS])
def test_a_written_name_is_read_as_what_it_was(era: Era, family: str) -> None:
    """Every module of a block, and those outside that a family has; each has a place of its own."""
    stacks = ("encoder", "decoder") if family == "t5" else ("encoder",)
    inside = [each for each in ERAS[era].inside if family == "t5" or "inter_attention" not in each]
    names = [f"{stack}.layers.3.{module}.weight" for stack in stacks for module in inside]
    names += ["embedding.word_embeddings.weight", *(f"{stack}.final_norm.bias" for stack in stacks)]
    names += {"gpt": [], "t5": ["lm_head.bias"]}.get(
        family, ["lm_head.norm.weight", "lm_head.bias", "pooler.dense.bias"]
    )
    assert len({styled(name, era, family) for name in names}) == len(names)
    assert [common_name(styled(name, era, family), family == "t5") for name in names] == names
    assert len({parameter_place(name, era) for name in names}) == len(names)
