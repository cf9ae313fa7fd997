"""SIGKILL of every rank of a mixture at ep 2, at random moments of training and saving, resumed: bit for bit the same.

kill N   two ranks that hold other experts train 16 steps, with a bias that balances them and a loss, saving every
         second step, and are killed once after a random step; the same command resumes. Losses of all steps and the
         last checkpoint, weights, moments and bias, are those of a run that was not killed, byte for byte.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import locate
from tests.battery.data_ledger import Item, run

KILLS, STEPS = 12, 16
LINE = (
    "pretrain --nproc 2 --device cpu --model tiny-gpt --mock-data --tokenizer NullTokenizer --vocab-size 256 "
    "--vocab 257 "
    "--experts 4 --expert-ffn 32 --ep 2 --expert-dispatch all-to-all --router-score sigmoid --balance-bias "
    "--balance-loss 0.01 --micro-batch 1 --global-batch 4 --lr 1e-3 --eval-iters 0 --log-interval 1 --save-interval 2"
)


def started(home: Path) -> subprocess.Popen[bytes]:
    line = [*LINE.split(), "--steps", str(STEPS), "--save", str(home / "run"), "--load", str(home / "run")]
    with (home / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "mega", *line], stdout=said, stderr=said, start_new_session=True, env=os.environ
        )


def losses(home: Path) -> dict[int, float]:
    """Of each step, as it was last logged."""
    file = home / "run" / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@lru_cache(maxsize=1)
def undisturbed() -> Path:
    home = Path(tempfile.mkdtemp(prefix="mega-mixture-"))
    assert started(home).wait() == 0, (home / "said").read_text()[-500:]
    return home


def prove(number: int) -> dict[str, Any]:
    whole, rng = undisturbed(), random.Random(number)
    home = Path(tempfile.mkdtemp(prefix="mega-mixture-kill-"))
    try:
        after = rng.randrange(2, STEPS - 1)
        child = started(home)
        while max(losses(home), default=0) < after:
            assert child.poll() is None, (home / "said").read_text()[-500:]
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        killed = max(losses(home))
        assert started(home).wait() == 0, (home / "said").read_text()[-500:]
        assert losses(home) == losses(whole), "losses differ"
        different = [each.key for each in diff(locate(home / "run"), locate(whole / "run"))]
        assert not different, different[:5]
        return {"killed after step": killed, "steps": STEPS}
    finally:
        shutil.rmtree(home, ignore_errors=True)


def items() -> Iterator[Item]:
    for number in range(KILLS):
        yield f"kill {number}", lambda number=number: prove(number)  # type: ignore[misc]


if __name__ == "__main__":
    run("mixture_kills", items())
