"""Predicts the measured rows of serving (docs/results/serving.json and mixture_decoding.json) and prints both.

PYTHONPATH=. python tests/estimate/served.py

Rows of other programs and of the start of a server are not predicted. Some constants of estimate/serving.py were fitted
to these rows: FP8_READ, SUM's growth with the number of ranks, MIXTURE and GROUPED.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mega.core.bench.load import Load, ServingRow
from mega.core.bench.simulated import simulated
from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.estimate.hardware import hardware
from mega.core.estimate.serving import ServingTimes, StepSize
from mega.core.inference.capacity import GIB, expected
from mega.core.inference.request import Limits

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PRESETS = {"Llama-2 70B": "llama2-70b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Mixtral 8x7B": "mixtral-8x7b"}
LOADS = {
    "one stream": Load(0, 1, 511, 256),
    "64 requests at once": Load(0, 64, 512, 128),
    "8 prompts of 2,048 tokens": Load(0, 8, 2048, 1),
    "first token at 80 % load": Load(0.8 * 3417 / 128, 256, 512, 128),
    "between tokens at 80 % load": Load(0.8 * 3417 / 128, 256, 512, 128),
}


class Row(NamedTuple):
    what: str
    card: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def served(name: str, card: str, *, tp: int = 1, pp: int = 1, fp8: bool = False, **flags: Any) -> ServingTimes:
    """A preset on a card."""
    return ServingTimes(model_alone(compose(name, flags=flags)), "bf16", hardware(card), tp, pp, fp8)


@cache
def loaded(name: str, card: str, tp: int, pp: int, fp8: bool, load: Load) -> ServingRow:
    model = served(name, card, tp=tp, pp=pp, fp8=fp8)
    return simulated(model, limits(model), load).row


def limits(model: ServingTimes) -> Limits:
    """Of a server with 64 requests at once, as `mega memory-estimate --serve` computes them."""
    room = int((model.device.memory - 4 * model.device.communicator) * GIB)
    return expected(model.options, 2, room, "cuda", tp=model.tp, pp=model.pp, requests=64).limits


def serving_rows() -> Iterator[Row]:
    for row in json.loads((RESULTS / "serving.json").read_text(encoding="utf-8")):
        what = row["what"]
        if "transformers" in what or what.startswith("from the start"):
            continue
        load = next(load for name, load in LOADS.items() if name in what)
        tp, pp = (
            next((int(word[3:]) for word in what.split(", ") if word.startswith(axis)), 1) for axis in ("tp", "pp")
        )
        name = next((preset for words, preset in PRESETS.items() if what.startswith(words)), "llama2-7b")
        found = loaded(name, row["card"].split()[-1].lower(), tp, pp, "fp8" in what, load)
        yield Row(what, row["card"], row["figure"], _figure(what, found))


def _figure(what: str, row: ServingRow) -> float:
    """What a row of the results states, in its unit."""
    if "stream" in what:
        return 1e3 * (row.whole - row.first[0]) / (row.new - 1)
    if "prompts" in what:
        return row.requests * row.prompt / row.seconds
    if "%" in what:
        return 1e3 * (row.first if what.startswith("first") else row.between)["99th" in what]
    return row.tokens_per_second


def mixture_rows() -> Iterator[Row]:
    """Steps of sequences of 600 tokens."""
    for row in json.loads((RESULTS / "mixture_decoding.json").read_text(encoding="utf-8")):
        model, sequences = row["what"].split(", ")
        layers, name = model.split(" layers of ")
        number = int(sequences.split()[0])
        one = served(PRESETS[name], row["card"].lower(), layers=int(layers))
        (seconds,) = one.step(StepSize(number, number, (600,) * number, ()))
        yield Row(row["what"], row["card"], row["figure"], 1e3 * seconds.all)


def report(rows: Mapping[str, list[Row]]) -> None:
    for name, each in rows.items():
        for row in each:
            print(f"{row.what:<58} {row.card:>8} {row.measured:>9,.4g} {row.predicted:>9,.4g} {row.error:+.1%}")
        errors = sorted(abs(row.error) for row in each)
        print(f"{name}: {len(each)} rows, median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}")


if __name__ == "__main__":
    report({"serving": list(serving_rows()), "steps of mixtures": list(mixture_rows())})
