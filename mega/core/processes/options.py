"""The options of `mega launch`. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import COUNT, FROM_0, Range, VerbSection, option

PORT = Range("1 to 65535", lambda value: 1 <= value <= 65535)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(VerbSection):
    """The hosts on which a script starts a run. Users can add other options of the scheduler to the script."""

    title: ClassVar[str] = "Launch"

    hosts: int = option(1, "number of hosts that the run needs", within=COUNT, metavar="N")
    nproc: int = option(8, "number of ranks per host, usually one per GPU", within=COUNT, metavar="N")
    spares: int = option(
        0, "number of spare hosts, which replace lost hosts; needs --max-restarts in the command", within=FROM_0
    )
    name: str = option("mega", "name of the job")
    minutes: int | None = option(None, "time limit of the job [the scheduler's]", unit="minutes", within=COUNT)
    warning: int = option(
        300, "a Slurm job saves and is requeued this many seconds before its time limit", within=COUNT
    )
    logs: str = option("logs", "folder for the logs of each rank, or of each host")
    port: int = option(29500, "free port on the first host, for the rendezvous", within=PORT)
    partition: str | None = option(None, "partition of Slurm")
    account: str | None = option(None, "account of Slurm")
    image: str | None = option(None, "container image with mega, for Kubernetes")
    volume: str | None = option(None, "volume claim that all hosts mount at /runs, for Kubernetes")
    hostfile: str | None = option(None, "hostfile of mpirun, with one line per host")
    gpus: bool = option(True, "request one GPU for each rank")
