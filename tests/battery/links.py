"""Hosts of which one has a bad link, clock or disk: results are equal, or that host is named.

    python tests/battery/links.py [CASE ...] [--times N] [--out rows.jsonl]

Two hosts of two ranks, in network namespaces; the second one has the fault from the start, or from a step on. One JSON
line a run: codes, seconds, whether weights and moments are bitwise those of a run on one host, and whether every host's
log names the one with the fault.

    delay, loss, both    100 ms each way, 1 % of frames, both (relay.py): equal
    cut                  the link is taken down, --timeout-minutes 0.25: named within that and 10 s
    forward, back        the time of day jumps by an hour: equal, and `mega report` adds up
    slow, broken         a sync takes 2 s: equal; it fails: named, with the reason
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.restarts import RUN, tensors, undisturbed
from tests.support.hosts import Host, hosts

HERE = Path(__file__).resolve()
SUPPORT = HERE.parent.parent / "support"
NPROC, PORT = 2, 29631

LINKS = {"delay": (0.1, 0.0), "loss": (0.0, 0.01), "both": (0.1, 0.01)}
"""Seconds each way, share of frames that is lost."""

FAULTS = {"forward": (3600.0, 0.0), "back": (-3600.0, 0.0), "slow": (0.0, 2.0), "broken": (0.0, -1.0)}
"""Seconds that are added to the time of day; that a sync takes, or fails."""

CASES = (*LINKS, "cut", *FAULTS)


@contextlib.contextmanager
def bad_link(made: list[Host], delay: float, loss: float) -> Iterator[None]:
    """Between the last host and the switch."""
    switch, _, number = made[-1].name.rpartition("-")
    space, key = f"{switch}-switch", switch.removeprefix("mega-")
    for each, host in enumerate(made):
        _run("ip", "netns", "exec", host.name, sys.executable, str(SUPPORT / "relay.py"), "plain", f"m{key}{each}")
    port = f"port{number}"
    for words in (
        "link add late0 type veth peer name late1",
        f"link set {port} nomaster",
        "link set late1 master switch up",
        "link set late0 up",
    ):
        _run("ip", "-n", space, *words.split())
    relay = [sys.executable, str(SUPPORT / "relay.py"), port, "late0", str(delay), str(loss)]
    job = subprocess.Popen(["ip", "netns", "exec", space, *relay])
    try:
        yield
    finally:
        job.kill()
        job.wait()
        _run("ip", "-n", space, "link", "del", "late0")
        _run("ip", "-n", space, "link", "set", port, "master", "switch")


def _written(job: subprocess.Popen[str], log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["tee", str(log)], stdin=job.stdout, stdout=subprocess.DEVNULL)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def built() -> Path:
    """The library of faults."""
    place = Path(tempfile.mkdtemp(prefix="mega-fault-")) / "fault.so"
    _run("cc", "-shared", "-fPIC", "-O2", "-o", str(place), str(SUPPORT / "fault.c"), "-ldl")
    return place


def play(case: str, library: Path) -> dict[str, Any]:
    steps = 10 if case in LINKS else 120
    reference, _ = undisturbed(steps, 2 * NPROC)
    with hosts(2) as made, tempfile.TemporaryDirectory(prefix="mega-links-") as folder, contextlib.ExitStack() as held:
        if case in LINKS:
            held.enter_context(bad_link(made, *LINKS[case]))
        fault, save = Path(folder) / "fault", Path(folder) / "run"
        fault.write_bytes(struct.pack("dd", 0.0, 0.0))
        minutes = "0.25" if case == "cut" else "5"
        words = ["--steps", str(steps), "--timeout-minutes", minutes, "--save", str(save)]
        command = [sys.executable, "-m", "mega", *RUN, *words, "--nproc", str(NPROC), "--hosts", "2"]
        place = {"MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
        faulty = {"LD_PRELOAD": str(library), "MEGA_FAULT": str(fault)} if case in FAULTS else {}
        logs = [Path(folder) / "log-0", Path(folder) / "log-1"]
        jobs = [made[0].start(command, place), made[1].start(command, {**place, **faulty})]
        writers = [_written(job, log) for job, log in zip(jobs, logs, strict=True)]
        began = time.monotonic()
        if case not in LINKS:
            _wait(save, 40)
            began = time.monotonic()
            if case == "cut":
                made[1].cut()
            else:
                with fault.open("r+b") as mapped:  # which must not become shorter for a moment
                    mapped.write(struct.pack("dd", *FAULTS[case]))
        jobs[0].wait(timeout=500)
        seconds = time.monotonic() - began  # the one that is cut off waits for others for the time-out once more
        codes = [job.wait(timeout=500) for job in jobs]
        for writer in writers:
            writer.wait()
        said = [log.read_text() for log in logs]
        row = {"case": case, "codes": codes, "seconds": round(seconds, 1)}
        row["lines"] = [[line for line in text.splitlines() if line.startswith("mega: ")][-3:] for text in said]
        return row | _verdict(case, codes, seconds, said, save, reference, made[1].name, steps)


def _verdict(
    case: str, codes: list[int], seconds: float, said: list[str], save: Path, reference: Path, name: str, steps: int
) -> dict[str, Any]:
    if case in ("cut", "broken"):
        reason = "" if case == "cut" else r"ranks? [23].*Input/output error"
        named = name in said[0] and re.search(reason, said[0]) is not None
        return {"named": named, "good": named and 0 not in codes and (case != "cut" or seconds < 25)}
    equal = tensors(save, steps) == tensors(reference, steps)
    _run(sys.executable, "-m", "mega", "report", str(save))
    page = re.sub(r"<[^>]+>", " ", (save / "report.html").read_text())
    shares = [
        float(share) for share in re.findall(r"(-?[\d.]+) %", page.partition("Goodput")[2].partition("restarts")[0])
    ]
    sane = min(shares) >= 0 and abs(sum(shares) - 100) < 1
    return {"equal": equal, "report": sane, "good": equal and sane and codes == [0, 0], "shares": shares}


def _wait(save: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            if json.loads((save / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= step:
                return
        time.sleep(0.01)
    raise TimeoutError(f"no step {step}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/battery/links.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    library = built()
    with arguments.out.open("a") as out:
        for case in arguments.cases:
            for number in range(sum(row["case"] == case for row in rows), arguments.times):
                rows.append({**play(case, library), "number": number})
                print(json.dumps(rows[-1]), flush=True)
                out.write(json.dumps(rows[-1]) + "\n")
                out.flush()
    return int(any(not row["good"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
