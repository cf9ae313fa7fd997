"""The engine at length: requests that join and leave at random among others, and its speed next to transformers'.

    python -m tests.battery.engine canaries      1,000 requests in runs of 100: each answer is that of the request alone
    python -m tests.battery.engine speed MODEL   16 requests at once of a Hugging Face directory; `generate` of the same

One JSON line a row to --out; rows of canaries that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from mega.core.device import Device
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.start import start_engine
from mega.core.parallel.mesh import Mesh
from tests.inference.test_engine import FAMILIES, check_canaries, made

TOKENS, ROUNDS = 100, 12


def canaries(out: Path) -> None:
    """Ten runs over the families."""
    done = {json.loads(line)["seed"] for line in out.read_text().splitlines()} if out.exists() else set()
    for seed in set(range(10)) - done:
        family = list(FAMILIES)[seed % len(FAMILIES)]
        began = time.monotonic()
        check_canaries(made(FAMILIES[family]), requests=100, seed=seed)
        row = {"seed": seed, "family": family, "requests": 100, "equal": True, "s": time.monotonic() - began}
        _keep(out, row)


def speed(out: Path, model: str) -> None:
    """Twelve rounds in which each takes its turn: medians in seconds of this process and of the clock, and the ratio of
    the two in a round, [median, least, most], since other work on the machine slows both."""
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    prompts = [[1, *((7 * row + 3 * at) % 500 + 3 for at in range(12))] for row in range(16)]
    ids = torch.tensor(prompts)
    engine = start_engine(open_model(model), Mesh.at(0), Device.choose("cpu"), EngineOptions(max_requests=16))
    asked = [Request(prompt=tuple(prompt), tokens=TOKENS, sampling=Sampling(temperature=0.0)) for prompt in prompts]

    def ours() -> None:
        assert engine is not None
        for request in asked:
            engine.add(request)
        while not engine.idle:
            engine.step()

    def other() -> None:
        lengths: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    found: dict[str, list[tuple[float, float]]] = {"mega": [], "transformers": []}
    for turn in range(1 + ROUNDS):
        for name, run in (("mega", ours), ("transformers", other)):
            clock, process = time.perf_counter(), time.process_time()
            run()
            if turn:
                found[name].append((time.process_time() - process, time.perf_counter() - clock))
    row: dict[str, Any] = {"rows": 16, "tokens": TOKENS, "threads": torch.get_num_threads()}
    for number, kind in enumerate(("process_s", "s")):
        row[kind] = {name: statistics.median(times[number] for times in each) for name, each in found.items()}
        pairs = zip(found["transformers"], found["mega"], strict=True)
        ratios = [theirs_took[number] / ours_took[number] for theirs_took, ours_took in pairs]
        row[f"{kind} ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    _keep(out, row)


def _keep(out: Path, row: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("canaries", "speed"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    place = given.out or Path("build/battery") / f"engine-{given.what}.jsonl"
    if given.what == "canaries":
        canaries(place)
    else:
        speed(place, given.model)
