"""Values of layers that families have: every layout of ranks is one process, with all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from mega.core.config.run import RunConfig
from mega.core.processes.pool import Pool
from mega.core.proof.parity import compare, snapshots, within
from tests.support.runs import MODELS, small_run

STEPS = (1, 2)
VALUES: dict[str, dict[str, Any]] = {
    # Gemma 2 and 3, Granite: norms on both sides, windows, bases and no rope by layer, soft caps, numbers everywhere
    "both sides": {
        **MODELS["llama"],
        "norm_offset": True,
        "norm_placement": "both",
        "activation": "geglu_tanh",
        "qk_norm": True,
        "window": 5,
        "window_layers": (1, 0),
        "rope_layers": (1, 1, 0, 1),
        "local_rope_base": 100.0,
        "embedding_multiplier": 3.0,
        "attention_scale": 0.3,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "logit_divisor": 1.5,
        "tied": True,
    },
    # OLMo 2: norms after each branch, and of whole queries and keys; YaRN
    "after": {
        **MODELS["llama"],
        "norm_placement": "branch",
        "qk_norm": True,
        "qk_norm_whole": True,
        "rope_scaling": "yarn",
        "rope_original_positions": 8,
    },
    # GPT-J: parallel branches of one norm, a bias of the logits; branches are multiplied
    "parallel": {
        "position": "rope",
        "rope_fraction": 0.5,
        "parallel_branches": "one-norm",
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "tied": False,
        "residual_multiplier": 0.5,
        "activation": "relu",
        "attention_scale_by_layer": True,
    },
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    (4, {"tp": 2, "pp": 2, "zero": 1}),
    (2, {"zero": 3, "recompute": "full"}),
    (2, {"cp": 2, "cp_comm": "ring"}),
]


def run(values: str, world: int = 1, **layout: Any) -> RunConfig:
    return small_run("gpt", world, **{**VALUES[values], "global_batch": 4, "hidden_dropout": 0.1, **layout})


@pytest.mark.parametrize("values", VALUES)
def test_every_layout_is_one_process(pool: Pool, values: str) -> None:
    reference = snapshots(pool, run(values), 1, STEPS)
    for world, layout in LAYOUTS if values == "both sides" else LAYOUTS[1::2]:
        found = snapshots(pool, run(values, world, **layout), world, STEPS)
        for difference in compare("fp64", STEPS, reference, found):
            assert within("fp64", difference), f"{layout}: {difference}"
