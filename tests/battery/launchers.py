"""What `mega launch` prints, run by Slurm, Open MPI and torchrun on two hosts of two ranks, in network namespaces.

    python tests/battery/launchers.py [slurm slurm-ranks mpi mpi-ranks torchrun] [--out rows.jsonl]

One JSON line a case: what happened to the job, whether it ended well, and whether weights and moments are bitwise those
of a run that nothing disturbed. Needs root; Slurm's daemons and munged are started for the test and ended after it.

    slurm             --max-restarts: a rank is killed, then Slurm's warning comes and the job is queued again; twice
    slurm-ranks       Slurm starts each rank: the warning, twice
    mpi, mpi-ranks    mpirun starts a process a host, of which a rank is killed; or each rank
    torchrun          its agent starts the ranks again, of which one is killed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.restarts import RUN, tensors, undisturbed
from tests.support.hosts import Host, hosts

NPROC, STEPS = 2, 400

MARK = "MEGA_BATTERY"
"""A variable that all processes of a job have; its value is where the job saves."""

CONFIG = """
ClusterName=mega
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
SelectType=select/linear
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


class Job:
    """A run that is under way. save: where."""

    def __init__(self, save: Path, lines: Callable[[], str]):
        self.save, self.lines = save, lines

    def step(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            return int(json.loads((self.save / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def wait(self, done: Callable[[], bool], what: str, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s: {self.lines()[-3000:]}")
            time.sleep(0.05)

    def kill_rank(self) -> None:
        """The newest one of this job: a fork server's child, which shows its server's command, or torchrun's own."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration):
                if MARK.encode() + b"=" + os.fsencode(self.save) in (path / "environ").read_bytes().split(b"\0"):
                    status = (path / "status").read_text().splitlines()
                    parent = next(line.split()[1] for line in status if line.startswith("PPid:"))
                    words, above = ((Path("/proc") / each / "cmdline").read_bytes() for each in (path.name, parent))
                    forked = b"forkserver" in words and b"forkserver" in above
                    if forked or (b"\0pretrain\0" in words and b"torchrun" in above):
                        found.append(int(path.name))
        if not found:
            raise AssertionError(f"no rank runs: {self.lines()[-3000:]}")
        os.kill(max(found), signal.SIGKILL)


def script(kind: str, folder: Path, save: Path, more: list[str], run: list[str]) -> Path:
    """What `mega launch` prints."""
    words = [kind, "--hosts", "2", "--nproc", str(NPROC), "--no-gpus", "--logs", str(folder / "logs"), *more]
    command = [*RUN, "--steps", str(STEPS), "--save", str(save), *run]
    line = [sys.executable, "-m", "mega", "launch", *words, "--", *command]
    text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    place = folder / "run.sh"
    place.write_text(text)
    place.chmod(0o755)
    (folder / "logs").mkdir()
    return place


def know_each_other(made: list[Host]) -> None:
    """Each host resolves the others' names to their addresses, and its own as Debian's installer leaves it."""
    for host in made:
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}"]
        lines += [f"{other.address} {other.name}" for other in made if other is not host]
        (Path("/etc/netns") / host.name / "hosts").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def slurm(made: list[Host], place: Path, more: dict[str, str]) -> Iterator[Callable[..., str]]:
    """A controller on the first host, a daemon on each; gives what runs a command of Slurm. more: variables of it."""
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=2 State=UNKNOWN" for host in made)
    (place / "slurm.conf").write_text(
        CONFIG.format(first=made[0].name, address=made[0].address, place=place, nodes=nodes)
    )
    (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which looks for none that it does not need
    (place / "state").mkdir()
    place.chmod(0o755)
    key = place / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    variables = {"SLURM_CONF": str(place / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={place}/munge.socket"]
    munge += [f"--pid-file={place}/munged.pid", f"--log-file={place}/munged.log", f"--seed-file={place}/munged.seed"]
    daemons: list[subprocess.Popen[Any]] = [
        subprocess.Popen(munge, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ]
    try:
        time.sleep(1)
        daemons.append(made[0].start(["slurmctld", "-D"], variables))
        time.sleep(2)
        daemons += [host.start(["slurmd", "-D", "-N", host.name], variables) for host in made]

        def call(*words: str) -> str:
            return made[0].start(words, {**variables, **more}).communicate(timeout=60)[0]

        deadline = time.monotonic() + 60
        while " 2   idle " not in call("sinfo"):
            if any(daemon.poll() is not None for daemon in daemons) or time.monotonic() > deadline:
                raise OSError("".join(path.read_text()[-1500:] for path in sorted(place.glob("slurm*.log"))))
            time.sleep(0.2)
        yield call
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
            daemon.kill()


def play_slurm(restarts: bool, made: list[Host], folder: Path) -> dict[str, Any]:
    save = folder / "run"
    path = script("slurm", folder, save, ["--minutes", "30"], ["--max-restarts", "3"] if restarts else [])
    with slurm(made, folder, {MARK: str(save), "OMP_NUM_THREADS": "1"}) as call:
        said = call("sbatch", f"--chdir={folder}", str(path))
        number = said.split()[-1]

        def state() -> str:
            return next(
                (
                    word.split("=")[1]
                    for word in call("scontrol", "show", "job", number).split()
                    if word.startswith("JobState=")
                ),
                "",
            )

        def lines() -> str:
            logs = sorted((folder / "logs").glob("*")) + sorted(folder.glob("slurm*.log"))
            return said + state() + "".join(f"\n-- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

        job = Job(save, lines)
        for count, at in enumerate((60, 180), start=1):
            job.wait(lambda at=at: job.step() >= at, f"step {at}")  # type: ignore[misc]
            if restarts:
                job.kill_rank()
                job.wait(lambda at=at: job.step() >= at + 40, f"step {at + 40}")  # type: ignore[misc]
            call("scancel", "--signal=USR1", number)
            job.wait(lambda count=count: _requeues(call, number) >= count, "the job is queued again")  # type: ignore[misc]
        job.wait(lambda: state() in ("COMPLETED", "FAILED", "CANCELLED"), "the end")
        text = lines()
        return {
            "state": state(),
            "queued again": _requeues(call, number),
            "restarts": text.count("mega: restart "),
            "ok": state() == "COMPLETED",
            "said": text[-1500:],
        }


def _requeues(call: Callable[..., str], number: str) -> int:
    found = [word for word in call("scontrol", "show", "job", number).split() if word.startswith("Restarts=")]
    return int(found[0].split("=")[1]) if found else 0


def play_mpi(restarts: bool, made: list[Host], folder: Path) -> dict[str, Any]:
    """Its remote shell is one into the namespace of a host."""
    agent = folder / "agent"
    inside = 'ip netns exec $host unshare -u sh -c \'hostname "$0"; exec sh -c "$*"\' $host'
    agent.write_text(
        '#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do shift; done\n'  # options of ssh
        f'host=$1; shift\nexec {inside} "$@"\n'
    )
    agent.chmod(0o755)
    (folder / "hostfile").write_text("".join(f"{host.name} slots={NPROC}\n" for host in made))
    save = folder / "run"
    more = ["--hostfile", str(folder / "hostfile")]
    path = script("mpi", folder, save, more, ["--max-restarts", "3"] if restarts else [])
    variables = {
        "MASTER_ADDR": made[0].address,
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "1",
    }
    return _watched(made[:1], path, variables, save, restarts, folder)


def play_torchrun(made: list[Host], folder: Path) -> dict[str, Any]:
    save = folder / "run"
    path = script("torchrun", folder, save, [], ["--max-restarts", "3"])
    return _watched(made, path, {"MASTER_ADDR": made[0].name}, save, True, folder)  # by its name it knows itself


def _watched(
    on: list[Host], path: Path, variables: dict[str, str], save: Path, kill: bool, folder: Path
) -> dict[str, Any]:
    """The script on each of these hosts, to its end; a rank is killed on the way."""
    logs = [folder / f"log-{number}" for number in range(len(on))]
    more = {**variables, MARK: str(save), "OMP_NUM_THREADS": "1"}
    jobs = [host.start(["sh", "-c", f"exec {path} > {log} 2>&1"], more) for host, log in zip(on, logs, strict=True)]
    job = Job(save, lambda: "".join(log.read_text() for log in logs))
    try:
        if kill:
            job.wait(lambda: job.step() >= 60 or all(each.poll() is not None for each in jobs), "step 60")
            job.kill_rank()
        codes = [each.wait(timeout=400) for each in jobs]
    finally:
        for each in jobs:
            each.kill()
    said = job.lines()
    return {"codes": codes, "ok": not any(codes), "restarts": said.count("mega: restart "), "said": said[-1500:]}


CASES: dict[str, Callable[[list[Host], Path], dict[str, Any]]] = {
    "slurm": lambda made, folder: play_slurm(True, made, folder),
    "slurm-ranks": lambda made, folder: play_slurm(False, made, folder),
    "mpi": lambda made, folder: play_mpi(True, made, folder),
    "mpi-ranks": lambda made, folder: play_mpi(False, made, folder),
    "torchrun": play_torchrun,
}


def play(case: str) -> dict[str, Any]:
    reference, _ = undisturbed(STEPS, 2 * NPROC)
    folder = Path(tempfile.mkdtemp(prefix="mega-launchers-"))
    try:
        with hosts(2) as made:
            know_each_other(made)
            began = time.monotonic()
            try:
                row = {"case": case, **CASES[case](made, folder)}
            except (OSError, AssertionError) as error:  # a time-out is the first of these
                row = {"case": case, "ok": False, "error": str(error)[-3000:]}
            row["seconds"] = round(time.monotonic() - began, 1)
        equal = row["ok"] and tensors(folder / "run", STEPS) == tensors(reference, STEPS)
        return {**row, "equal": equal, "good": equal}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--out", type=Path, default=Path("build/battery/launchers.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    with arguments.out.open("a") as out:
        for case in arguments.cases:
            if any(row["case"] == case and row["good"] for row in rows):
                continue
            rows.append(play(case))
            print(json.dumps(rows[-1]), flush=True)
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    return int({row["case"] for row in rows if row["good"]} != {row["case"] for row in rows})


if __name__ == "__main__":
    sys.exit(main())
