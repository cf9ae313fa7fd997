"""Writes scripts for Slurm, torchrun and mpirun, and manifests for Kubernetes, that start a run on several hosts.

With --max-restarts in the command, the scheduler starts one process per host, which starts and restarts the ranks of
that host (hosts.py). Otherwise the scheduler starts each rank, and each rank has its own log. This module only
generates text. It does not start processes or read files.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mega.core.config.run import Options
from mega.core.processes.options import LaunchOptions

_FIRST = '"${MASTER_ADDR:?the name of the first host}"'


def process_command(kind: str, launch: LaunchOptions, words: Sequence[str], run: Options) -> list[str]:
    """Return the arguments of `mega` for each process. run: the options parsed from `words` and from the files that
    `words` names.

    Errors: ValueError for options that `kind` does not support.
    """
    supervision = run.supervision
    rank_options = {"hosts": supervision.hosts, "nproc": run.runtime.nproc, "world": run.runtime.world}
    for name, value in rank_options.items():
        if value is not None:
            raise ValueError(f"--{name} {value}: belongs before the command, which is written for so many ranks")
    if launch.spares and not supervision.max_restarts:
        raise ValueError(f"--spares {launch.spares}: needs --max-restarts in the command, which puts them to use")
    command = list(words)
    if run.checkpoint.save is not None and run.checkpoint.resume is None:
        if not run.checkpoint.load_optim:
            raise ValueError("--no-load-optim: would count at each start of the job; valid: --finetune")
        command += ["--resume", "auto"]  # a requeued job, or a restarted container, runs the same command
    if kind == "torchrun":
        if supervision.peer_copy_interval:
            interval = f"--peer-copy-interval {supervision.peer_copy_interval}"
            raise ValueError(f"{interval}: torchrun keeps no memory for its ranks; valid kinds: slurm, mpi, jobset")
        return [*command, *(["--max-restarts", "0"] if supervision.max_restarts else [])]  # the agent restarts ranks
    if supervision.max_restarts or kind in _CONTAINERS:
        command += ["--hosts", str(launch.hosts), "--nproc", str(launch.nproc)]
    return command


def written(kind: str, options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return the script or manifest that starts `mega COMMAND`. restarts: the value of --max-restarts.

    Errors: ValueError for options that `kind` does not support.
    """
    _check_values(kind, options)
    return WRITERS[kind](options, ["mega", *command], restarts)


def _check_values(kind: str, options: LaunchOptions) -> None:
    """Check the options. Errors: ValueError for a value that the scheduler would reject or misread."""
    for name, kinds in _ONLY.items():
        if getattr(options, name) is not None and kind not in kinds:
            raise ValueError(f"--{name} {getattr(options, name)}: belongs to {' and '.join(kinds)}, not to {kind}")
    for name, value in dataclasses.asdict(options).items():
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"--{name} {value!r}: must be one line, without control characters")
    if options.minutes is not None and 60 * options.minutes <= options.warning:
        most = 60 * options.minutes - 1
        raise ValueError(f"--warning {options.warning}: must be less than --minutes {options.minutes}; at most {most}")
    longest = 63 - len(f"-hosts-0-{options.hosts + options.spares - 1}-12345")  # a pod's name has at most 63 characters
    if kind in _CONTAINERS and not (_LABEL.fullmatch(options.name) and len(options.name) <= longest):
        rule = f"lower-case letters, digits and hyphens between them, a letter first, at most {longest}"
        raise ValueError(f"--name {options.name}: must be {rule}, as Kubernetes names hosts after it")


_CONTAINERS = ("jobset", "pytorchjob")

_LEAVING = 300
"""Seconds after the end of the first task at which Slurm terminates the other tasks (`srun --wait`)."""

_STARTS = 6
"""Average number of failures per host after which Kubernetes gives up."""

_RULES = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"containerName": "pytorch", "operator": "In", "values": [1, 2]}},
]
"""A host that Kubernetes evicts does not count as a failure. An exit code of 1 (the launcher gave up) or 2 (a user
error) ends the job. Kubeflow's restart policy ExitCode ends the job for all codes below 128."""

_LABEL = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
"""Pattern that matches valid names of Kubernetes services."""

_ONLY = {
    "partition": ("slurm",),
    "account": ("slurm",),
    "image": ("jobset", "pytorchjob"),
    "volume": ("jobset", "pytorchjob"),
    "hostfile": ("mpi",),
}


def _slurm(options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return a batch script. Slurm signals the job before its time limit, and the job then saves and is requeued."""
    tasks = 1 if restarts else options.nproc
    heads = {
        "job-name": options.name,
        "nodes": options.hosts + options.spares,
        "ntasks-per-node": tasks,
        **({"gpus-per-node": options.nproc} if options.gpus else {}),
        **({"partition": options.partition} if options.partition else {}),
        **({"account": options.account} if options.account else {}),
        **({"time": options.minutes} if options.minutes else {}),
        "signal": f"USR1@{options.warning}",
        "output": f"{options.logs}/%x-%j.out",
        "open-mode": "append",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in heads.items())]
    lines += ["#SBATCH --requeue", "#SBATCH --exclusive", *(["#SBATCH --no-kill"] if restarts else [])]
    each = f"{options.logs}/%x-%j-" + ("%N.log" if restarts else "%t.log")
    srun = ["srun", f"--output={each}", "--open-mode=append", "--cpu-bind=none"]
    srun += ["--kill-on-bad-exit=0", *(["--no-kill", "--wait=0"] if restarts else [f"--wait={_LEAVING}"])]
    place = [
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"MASTER_PORT={options.port}",
        "export MASTER_ADDR MASTER_PORT",
    ]
    requeue = [
        'if [ "$code" -eq 138 ]; then  # saved after Slurm\'s warning that the time is up',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
    run = shlex.join([*srun, *command])
    folder = (
        f"mkdir -p {shlex.quote(options.logs)}  # also before sbatch: Slurm opens the job's log before this line runs"
    )
    return _script([*lines, "", folder, *place, "code=0", f"{run} || code=$?", *requeue, 'exit "$code"'])


def _torchrun(options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return a script to run on each host. The agent of torchrun restarts the ranks."""
    if options.spares:
        hosts = f"{options.hosts}:{options.hosts + options.spares}"
        raise ValueError(f"--spares {options.spares}: torchrun would run on {hosts} hosts; valid kinds: slurm, jobset")
    before = ["torchrun", f"--nnodes={options.hosts}", f"--nproc-per-node={options.nproc}"]
    before += [f"--max-restarts={restarts}"] if restarts else []
    before += ["--rdzv-backend=c10d", f"--rdzv-id={options.name}", f"--log-dir={options.logs}"]
    after = ["--redirects=3", "--tee=3", "-m", *command]
    line = f"exec {shlex.join(before)} --rdzv-endpoint={_FIRST}:{options.port} {shlex.join(after)}"
    return _script(["#!/bin/sh", line])


def _mpi(options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return a script that runs mpirun, which ends all processes when one process is lost."""
    if options.spares:
        raise ValueError(f"--spares {options.spares}: mpirun ends all when a host is lost; valid kinds: slurm, jobset")
    each = 1 if restarts else options.nproc
    mpirun = ["mpirun", "-np", str(options.hosts * each), "--map-by", f"ppr:{each}:node", "--bind-to", "none"]
    mpirun += ["--hostfile", options.hostfile] if options.hostfile else []
    mpirun += ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "--output-filename", options.logs]
    address = f"MASTER_ADDR={_FIRST}"
    line = shlex.join([*mpirun, *command])
    return _script(
        ["#!/bin/sh", address, f"MASTER_PORT={options.port}", "export MASTER_ADDR MASTER_PORT", f"exec {line}"]
    )


def _pod(options: LaunchOptions, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """Return the Kubernetes pod of one host. The host's log is the container's log."""
    if options.image is None:
        raise ValueError("--image is missing: give the container that has mega in it")
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": options.image,
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"containerPort": options.port}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if options.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": options.nproc}}
    volumes: list[dict[str, object]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if options.volume:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}})
        container["volumeMounts"].append({"name": "runs", "mountPath": "/runs"})
    return {
        "restartPolicy": "Never",  # the job's failure policy starts a new pod
        "terminationGracePeriodSeconds": options.warning,
        "containers": [container],
        "volumes": volumes,
    }


def _jobset(options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return a manifest of a JobSet with one pod per host."""
    count, first = options.hosts + options.spares, f"{options.name}-hosts-0-0.{options.name}"
    pod = _pod(options, command, {"MASTER_ADDR": first, "MASTER_PORT": str(options.port)})
    limits: dict[str, object] = {"activeDeadlineSeconds": 60 * options.minutes} if options.minutes else {}
    limits |= {"backoffLimit": _STARTS * count, "podFailurePolicy": {"rules": _RULES}}
    job = {"parallelism": count, "completions": count, "completionMode": "Indexed", **limits}
    hosts = {"name": "hosts", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
    spec = {"network": {"enableDNSHostnames": True}, "replicatedJobs": [hosts]}
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", options.name, spec)


def _pytorchjob(options: LaunchOptions, command: Sequence[str], restarts: int) -> str:
    """Return a manifest for Kubeflow, whose operator sets MASTER_ADDR and MASTER_PORT of each pod."""
    pod = _pod(options, command, {})
    del pod["restartPolicy"]  # the operator derives this policy from the policy of the replicas
    count = {"Master": 1, "Worker": options.hosts + options.spares - 1}
    pods = {
        kind: {"replicas": n, "restartPolicy": "ExitCode", "template": {"spec": pod}} for kind, n in count.items() if n
    }
    limits: dict[str, object] = {"activeDeadlineSeconds": 60 * options.minutes} if options.minutes else {}
    limits["backoffLimit"] = _STARTS * (options.hosts + options.spares)
    spec = {"runPolicy": {"cleanPodPolicy": "None", **limits}, "pytorchReplicaSpecs": pods}
    return _manifest("kubeflow.org/v1", "PyTorchJob", options.name, spec)


def _manifest(version: str, kind: str, name: str, spec: Mapping[str, object]) -> str:
    """Return a manifest as JSON, which `kubectl apply -f` accepts as well as YAML."""
    whole = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return json.dumps(whole, indent=2) + "\n"


def _script(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


WRITERS: Mapping[str, Callable[[LaunchOptions, Sequence[str], int], str]] = {
    "slurm": _slurm,
    "torchrun": _torchrun,
    "mpi": _mpi,
    "jobset": _jobset,
    "pytorchjob": _pytorchjob,
}
"""Scheduler -> the function that writes its script or manifest."""
