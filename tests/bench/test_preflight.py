"""Which ranks, pairs of hosts, versions and clocks `mega preflight` names."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.bench import preflight
from mega.core.bench.options import PreflightOptions
from mega.core.bench.preflight import problems, rounds
from mega.core.processes import launch
from tests.support.rank_output import printing_to


def fleet(**other: Any) -> list[dict[str, Any]]:
    """Four ranks that are alike, but for what one of them has otherwise."""
    alike = {"figures": {"matmul": 100.0, "write": 1.0}, "facts": {"device": "H100", "torch": "2.8"}}
    rows = [{"rank": rank, "host": f"n{rank // 2}", **alike} for rank in range(4)]
    rows[3] |= other
    return rows


PAIRS = {"n0 - n1": 10.0, "n0 - n2": 10.0, "n1 - n2": 10.0}


@pytest.mark.parametrize(
    ("rows", "pairs", "clocks", "named"),
    [
        (fleet(), PAIRS, [0.0] * 4, ""),
        (fleet(figures={"matmul": 81.0}), PAIRS, [0.0] * 4, ""),
        (fleet(figures={"matmul": 70.0}), PAIRS, [0.0] * 4, "rank 3 on n1: matmul 70 TFLOP/s, 70% of the median 100"),
        (fleet(facts={"device": "H100", "torch": "2.7"}), PAIRS, [0.0] * 4, "rank 3 on n1: torch 2.7, others 2.8"),
        (fleet(), PAIRS | {"n1 - n2": 2.0}, [0.0] * 4, "hosts n1 - n2: 2 GB/s, 20% of the median 10"),
        (fleet(), {}, [0.0, 0.0, 90.0, 0.5], "rank 2 on n1: its clock is +89.8 s from the median"),
    ],
)
def test_what_is_off_is_named(rows: list[Any], pairs: dict[str, float], clocks: list[float], named: str) -> None:
    assert list(problems(rows, pairs, clocks, 0.8)) == [named] * bool(named)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_each_pair_of_hosts_meets_once(count: int) -> None:
    met = list(itertools.chain.from_iterable(rounds(count)))
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for each in rounds(count):
        assert len({host for pair in each for host in pair}) == 2 * len(each)


def printing_slowly(options: PreflightOptions) -> int:
    show = preflight._show

    def slowly(*rest: Any, **more: Any) -> None:
        time.sleep(1.5 * launch.PATIENCE)
        show(*rest, **more)

    preflight._show = slowly
    return preflight.preflight(options)


def test_two_ranks_of_this_host(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the verb, and with what is off. Figures are of this machine, which others use too: only what is off may
    differ, and it is printed before any rank ends."""
    words = ["preflight", "--nproc", "2", "--device", "cpu", "--json", "--save", str(tmp_path), "--megabytes", "4"]
    printed = tmp_path_factory.mktemp("ranks") / "printed"
    with printing_to(printed):
        assert main([*words, "--least", "0.001"]) == 0
        assert launch.launch(2, printing_slowly, PreflightOptions(device="cpu", json=True, least=1.0)) == 1
    found, off = parsed(printed.read_text())
    assert [set(row["figures"]) for row in found["ranks"]] == [
        {"matmul", "copy", "link", "write", "read"},
        {"matmul", "copy", "link"},
    ]
    assert found["faults"] == [] and off["faults"] and not list(tmp_path.iterdir())


def parsed(text: str) -> list[Any]:
    """The JSON values of a text, one after the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found
