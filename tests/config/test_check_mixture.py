"""Mistakes in the options of a mixture of experts: one line each, with flag, value, rule and valid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega.core.config.check import check
from mega.core.config.check_mixture import inference_ranks
from mega.core.config.compose import compose
from mega.core.config.resolve import records_graph, resolve
from mega.core.config.run import updated

TRAINS: dict[str, Any] = {"micro_batch": 1, "steps": 4, "lr": 1e-3, "mock_data": True, "vocab": 100, "global_batch": 8}
SIGMOID = {"router_score": "sigmoid"}
SINKHORN = {"experts": 4, "router_choice": "sinkhorn"}
PADDED = {"experts": 4, "capacity_factor": 1.0, "pad_to_capacity": True, "expert_dispatch": "all-to-all"}
GROUPS = {**SIGMOID, "experts": 8, "router_groups": 4}

MISTAKES: list[tuple[dict[str, Any], int, str]] = [
    ({"experts": 1}, 1, "--experts-chosen 2: must be at most --experts 1"),
    ({"experts": 4, "experts_chosen": 5}, 1, "--experts-chosen 5: must be at most --experts 4"),
    ({"experts": 4, "experts_chosen": 1}, 1, "--experts-chosen 1: needs --no-router-normalize"),
    ({"experts": 4, "ep": 3}, 3, "--ep 3: must divide --experts 4; valid: 1, 2, 4"),
    ({"experts": 8, "ep": 8}, 4, "--ep 8: times --etp 1 must divide the 4 ranks of a stage; valid: 1, 2, 4"),
    ({"ep": 2}, 2, "--ep 2: needs --experts"),
    ({"experts": 4, "tp": 4, "etp": 1, "ep": 2}, 8, "--etp 1: needs --sequence-parallel, or --etp 4"),
    ({**GROUPS, "router_groups": 3, "router_groups_chosen": 2}, 1, "--router-groups 3: must divide --experts 8"),
    (GROUPS, 1, "--router-groups 4: needs --router-groups-chosen"),
    ({**GROUPS, "router_groups_chosen": 5}, 1, "--router-groups-chosen 5: must be at most --router-groups 4"),
    ({**GROUPS, "experts_chosen": 3, "router_groups_chosen": 1}, 1, "--router-groups-chosen 1: has 2 experts in all"),
    ({"experts": 4, "drop_policy": "position"}, 1, "--drop-policy position: needs --capacity-factor"),
    ({"experts": 4, "pad_to_capacity": True}, 1, "--pad-to-capacity: needs --capacity-factor"),
    ({"experts_chosen": 4}, 1, "--experts-chosen 4: needs --experts at least 1, not 0"),
    (
        {"experts": 4, "router_choice": "sinkhorn", "balance_loss": (0.1,)},
        1,
        "--balance-loss 0.1: excludes --router",
    ),
    ({"experts": 4, "balance": ("sequence", "global")}, 1, "--balance-loss 0.0: must be as many numbers as --balance"),
    ({"experts": 4, "balance": ("layer",)}, 1, "--balance layer: layer is not a choice; valid: sequence, microbatch,"),
    ({"experts": 4, "balance_bias": True}, 1, "--balance-bias: needs --router-score sigmoid or sqrt-softplus"),
    ({"experts": 4, "shared_gate": True}, 1, "--shared-gate: needs --shared-ffn"),
    ({"experts": 4, "experts_from": 2}, 1, "--experts-from 2: leaves none of the 2 layers with experts"),
    ({"experts": 4, "dtype": "bf16", "fp8": True}, 1, "--fp8: excludes --experts"),
    ({"experts": 4, "expert_ffn": 6, "tp": 4}, 4, "--etp 4: must divide the width of an expert, 6; valid: 1, 2, 3, 6"),
    ({"experts": 4, "ep": 2, "optimizer": "lamb"}, 2, "--optimizer lamb: needs --ep 1 and --etp 1 where a model has"),
    ({"experts": 4, "ep": 2, "optimizer": "adafactor"}, 2, "--optimizer adafactor: needs --ep 1 and --etp 1"),
    ({"experts": 4, "ep": 2, "task": "dpo", "dpo_data": ("x",)}, 2, "--task dpo: needs --ep times --etp to divide"),
    ({**PADDED, "etp": 2, "ep": 2}, 4, "--pad-to-capacity: needs an --etp that divides --tp 1"),
    ({**SINKHORN, "router_scale": 2.5}, 1, "--router-scale 2.5: excludes --router-choice sinkhorn"),
    (
        {**SINKHORN, "router_normalize": False},
        1,
        "--no-router-normalize (--moe-router-pre-softmax): excludes --router-choice sinkhorn",
    ),
    (
        {"experts": 2, "router_choice": "quantile"},
        1,
        "--router-choice quantile: needs --experts-chosen below --experts 2; valid where all are: largest",
    ),
    ({"experts": 4, "cuda_graph": True}, 1, "--cuda-graph: excludes --experts; valid there: --no-cuda-graph"),
]


@pytest.mark.parametrize(("values", "world", "line"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(values: dict[str, Any], world: int, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(updated(compose("tiny-gpt", flags=TRAINS), values), world)
    lines = str(caught.value).splitlines()
    assert [each for each in lines if each.startswith(line)], lines


@pytest.mark.parametrize(
    ("values", "line"), [({"ep": 2}, "--ep 2: times --etp 1 must be --tp 1"), ({"etp": 2}, "--etp 2: ")]
)
def test_a_verb_that_trains_nothing_cuts_experts_by_tensor_ranks(values: dict[str, Any], line: str) -> None:
    mixture = resolve(updated(compose("tiny-gpt", flags=TRAINS), {"experts": 4, **values}), 2)
    (found,) = inference_ranks(mixture)
    assert found.startswith(line)


ONE_OF = {"experts": 4, "experts_chosen": 1}
LONG = {"experts": 3, "router_choice": "quantile", "experts_chosen": 1, "router_normalize": False}


@pytest.mark.parametrize("values", [ONE_OF, LONG], ids=str)
def test_what_only_a_new_model_must_not_be(tmp_path: Path, values: dict[str, Any]) -> None:
    """Weights of others may have one probability of 1, and evaluation has rows of any length."""
    typed = updated(compose("tiny-gpt", flags=TRAINS), {**values, "skip_train": True})
    check(typed, 1)
    with pytest.raises(ValueError, match=r"--experts-chosen 1|--router-choice quantile"):
        check(updated(typed, {"skip_train": False}), 1)
    (tmp_path / "config.json").write_text("{}")
    if "router_choice" not in values:
        check(updated(typed, {"skip_train": False, "load": str(tmp_path)}), 1)


def test_a_graph_of_a_mixture_is_not_chosen() -> None:
    dense, mixture = (resolve(updated(compose("tiny-gpt", flags=TRAINS), {"experts": count}), 1) for count in (0, 4))
    assert records_graph(dense, 1) and not records_graph(mixture, 1)
