"""A mixture answers the same at any layout, and as transformers does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mega.core.device import Device
from mega.core.inference.loading.load import load_stages, open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.start import check_layout, start_engine
from mega.core.inference.worker import paged_cache
from mega.core.model import decode
from mega.core.ops import few_rows, paged_attention
from mega.core.ops.few_experts import FewExperts, plain_experts
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from tests.inference.test_engine import answers, prompts, tokens
from tests.support.shared import shared

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def said(groups: Groups, rank: int, family: str, tp: int, pp: int, ep: int) -> list[list[int]] | None:
    mesh = Mesh(rank, tp=tp, pp=pp, ep=ep, etp=tp // ep, groups=groups)
    folder = shared(f"golden/moe/{family}")
    options = EngineOptions(cache_tokens=2048, prefill_chunk=9)
    engine = start_engine(open_model(folder), mesh, Device.choose("cpu"), options, dtype=torch.float64)
    if engine is None:
        return None
    greedy = Sampling(temperature=0.0)
    asked = [Request(prompt=prompt, tokens=20, sampling=greedy) for prompt in prompts(4, 96)]
    asked.append(Request(prompt=first_prompt(family), tokens=12, sampling=greedy))
    found = [tokens(events) for events in answers(engine, asked)]
    engine.close()
    return found


def first_prompt(family: str) -> tuple[int, ...]:
    ids = load_file(shared(f"golden/moe/{family}/expected.safetensors"))["input_ids"]
    return tuple(ids[0].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_transformers(family: str) -> None:
    """The last of five requests in flight."""
    expected = json.loads(shared(f"golden/moe/{family}/expected.json").read_text())["greedy"]
    found = said(Groups(), 0, family, 1, 1, 1)
    assert found is not None
    assert found[-1][: len(expected)] == expected


@pytest.mark.parametrize(("tp", "pp", "ep"), [(2, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_text_is_the_same_at_any_layout(pool: Pool, tp: int, pp: int, ep: int) -> None:
    alone = said(Groups(), 0, "qwen2_moe", 1, 1, 1)
    assert pool.run(said, "qwen2_moe", tp, pp, ep, world=tp * pp)[0] == alone


def trusted_kernels(groups: Groups, rank: int, failing: int | None) -> list[bool]:
    """Whether each kernel of a decoding step is used, where all of them fail on one rank."""
    mesh, device = Mesh(rank, tp=2, ep=2, etp=1, groups=groups), Device.choose("cpu")

    def on_rank(plain: Any) -> Any:
        def run(*given: Any) -> Any:
            if rank == failing:
                raise RuntimeError("cannot be compiled")
            return plain(*given)

        return run

    ops = replace(
        forward_only(choose(device.torch, torch.bfloat16)),
        few_experts=FewExperts(lambda *_: True, on_rank(plain_experts)),
        few_rows=replace(few_rows.PLAIN, linear=on_rank(few_rows.plain_linear)),
        paged_attention=replace(paged_attention.PLAIN, attend=on_rank(paged_attention.PLAIN.attend)),
    )
    opened = open_model(shared("golden/moe/qwen2_moe"))
    (stage,) = load_stages(opened, mesh, device, dtype=torch.bfloat16, ops=ops)
    rows, experts = decode._verified_kernels(stage)
    cache = paged_cache(stage, [None], device.torch, (4, 4), 0, tp=mesh.tp)
    return [rows is not None, experts is not None, cache.attention is not paged_attention.PLAIN]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_tensor_ranks_agree_on_their_kernels(pool: Pool, failing: int | None) -> None:
    """Else they would exchange other tensors in a step, and wait for each other without end."""
    assert pool.run(trusted_kernels, failing, world=2) == [[failing is None] * 3] * 2


@pytest.mark.parametrize(("tp", "ep", "words"), [(2, 4, "--ep 4: must divide --tp 2"), (3, 3, "--tp 3"), (1, 1, None)])
def test_layouts_that_do_not_divide(tp: int, ep: int, words: str | None) -> None:
    model = open_model(shared("golden/moe/mixtral")).model
    if words is None:
        check_layout(model, tp, 1, ep=ep)
        return
    with pytest.raises(ValueError, match=words):
        check_layout(model, tp, 1, ep=ep)
