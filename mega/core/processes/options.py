"""Options of the verbs about launchers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import COUNT, FROM_0, Range, VerbSection, option

PORT = Range("1 to 65535", lambda value: 1 <= value <= 65535)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(VerbSection):
    """The hosts that a script starts a run on. Other words of the scheduler's are for the user to add."""

    title: ClassVar[str] = "Launch"

    hosts: int = option(1, "hosts that the run needs", within=COUNT, metavar="N")
    nproc: int = option(8, "ranks of each: its GPUs", within=COUNT, metavar="N")
    spares: int = option(
        0, "hosts more, which wait to replace one that is lost; needs --max-restarts in the command", within=FROM_0
    )
    name: str = option("mega", "what the job is called")
    minutes: int | None = option(None, "time limit of the job [the scheduler's]", unit="minutes", within=COUNT)
    warning: int = option(
        300, "seconds before the end of a Slurm job at which it is told to save, and requeued", within=COUNT
    )
    logs: str = option("logs", "folder for a log of each rank, or of each host")
    port: int = option(29500, "free port of the first host, where hosts meet", within=PORT)
    partition: str | None = option(None, "of Slurm")
    account: str | None = option(None, "of Slurm")
    image: str | None = option(None, "of Kubernetes: the container, with mega in it")
    volume: str | None = option(None, "of Kubernetes: a claim that all hosts mount at /runs")
    hostfile: str | None = option(None, "of mpirun: file with a line a host")
    gpus: bool = option(True, "whether ranks have a GPU each")
