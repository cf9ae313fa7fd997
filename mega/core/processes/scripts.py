"""What starts a run on several hosts: a script for Slurm, torchrun or mpirun, or a manifest for Kubernetes.

With --max-restarts in the command one process a host starts the ranks of its host, and again (hosts.py); without it
the scheduler starts each rank, which then has a log of its own. Text alone: nothing is started, and no file is read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mega.core.processes.options import LaunchOptions

_FIRST = '"${MASTER_ADDR:?the name of the first host}"'


def written(kind: str, options: LaunchOptions, words: Sequence[str]) -> str:
    """The script, or the manifest, that starts `mega WORDS`. Errors: ValueError for options that `kind` cannot heed."""
    supervised = "--max-restarts" in words
    if options.spares and not supervised:
        raise ValueError(f"--spares {options.spares}: needs --max-restarts in the command, which puts them to use")
    if clash := [word for word in words if word in ("--hosts", "--nproc")]:
        raise ValueError(f"{clash[0]}: belongs before the command, which is written for so many hosts and ranks")
    for name, kinds in _ONLY.items():
        if getattr(options, name) is not None and kind not in kinds:
            raise ValueError(f"--{name} {getattr(options, name)}: belongs to {' and '.join(kinds)}, not to {kind}")
    if "--save" in words and "--resume" not in words:
        words = [*words, "--resume", "auto"]  # a job that is queued again, or a container, runs the same command
    return WRITERS[kind](options, words, supervised)


_ONLY = {
    "partition": ("slurm",),
    "account": ("slurm",),
    "image": ("jobset", "pytorchjob"),
    "volume": ("jobset", "pytorchjob"),
    "hostfile": ("mpi",),
}


def _line(options: LaunchOptions, words: Sequence[str], supervised: bool) -> list[str]:
    """The command of one process."""
    own = ["--hosts", str(options.hosts), "--nproc", str(options.nproc)] if supervised else []
    return ["mega", *words, *own]


def _slurm(options: LaunchOptions, words: Sequence[str], supervised: bool) -> str:
    """A job that is told to save before its time is up, and then waits for its turn again."""
    tasks = 1 if supervised else options.nproc
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
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in heads.items())]
    lines += ["#SBATCH --requeue", "#SBATCH --exclusive", *(["#SBATCH --no-kill"] if supervised else [])]
    each = f"{options.logs}/%x-%j-" + ("%N.log" if supervised else "%t.log")
    command = ["srun", f"--output={each}", "--open-mode=append", "--cpu-bind=none"]
    command += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"] if supervised else ["--kill-on-bad-exit=1"]
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
    run = shlex.join([*command, *_line(options, words, supervised)])
    folder = f"mkdir -p {shlex.quote(options.logs)}  # sbatch does not make it: it has to be there before"
    return _script([*lines, "", folder, *place, "code=0", f"{run} || code=$?", *requeue, 'exit "$code"'])


def _torchrun(options: LaunchOptions, words: Sequence[str], supervised: bool) -> str:
    """To be run on each host; torchrun's own agent restarts the ranks, so the command's --max-restarts goes to it."""
    rest, restarts = list(words), []
    if supervised:
        at = rest.index("--max-restarts")
        restarts = [f"--max-restarts={''.join(rest[at + 1 : at + 2])}"]
        del rest[at : at + 2]
    hosts = f"{options.hosts}:{options.hosts + options.spares}" if options.spares else str(options.hosts)
    if options.spares:
        raise ValueError(f"--spares {options.spares}: torchrun would run on {hosts} hosts; valid kinds: slurm, jobset")
    where = f"--rdzv-endpoint={_FIRST}:{options.port}"
    words = [
        *("torchrun", f"--nnodes={hosts}", f"--nproc-per-node={options.nproc}", *restarts, "--rdzv-backend=c10d"),
        *(f"--rdzv-id={options.name}", f"--log-dir={options.logs}", "--redirects=3", "--tee=3", "-m", "mega", *rest),
    ]
    quoted = [shlex.quote(word) for word in words]
    at = quoted.index("--rdzv-backend=c10d") + 1
    return _script(["#!/bin/sh", "exec " + " ".join([*quoted[:at], where, *quoted[at:]])])


def _mpi(options: LaunchOptions, words: Sequence[str], supervised: bool) -> str:
    """mpirun ends all where one of its processes is lost."""
    if options.spares:
        raise ValueError(f"--spares {options.spares}: mpirun ends all when a host is lost; valid kinds: slurm, jobset")
    each = 1 if supervised else options.nproc
    command = ["mpirun", "-np", str(options.hosts * each), "--map-by", f"ppr:{each}:node", "--bind-to", "none"]
    command += ["--hostfile", options.hostfile] if options.hostfile else []
    command += ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "--output-filename", options.logs]
    address = f"MASTER_ADDR={_FIRST}"
    line = shlex.join([*command, *_line(options, words, supervised)])
    return _script(
        ["#!/bin/sh", address, f"MASTER_PORT={options.port}", "export MASTER_ADDR MASTER_PORT", f"exec {line}"]
    )


def _pod(options: LaunchOptions, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """What a host of Kubernetes runs. Its log is the container's."""
    if options.image is None:
        raise ValueError("--image is missing: give the container that has mega in it")
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": options.image,
        "command": _line(options, words, supervised=True),
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
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": options.warning,
        "containers": [container],
        "volumes": volumes,
    }


def _jobset(options: LaunchOptions, words: Sequence[str], supervised: bool) -> str:
    count, first = options.hosts + options.spares, f"{options.name}-hosts-0-0.{options.name}"
    pod = _pod(options, words, {"MASTER_ADDR": first, "MASTER_PORT": str(options.port)})
    limits = {"activeDeadlineSeconds": 60 * options.minutes} if options.minutes else {}
    job = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 6 * count, **limits}
    hosts = {"name": "hosts", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
    spec = {"network": {"enableDNSHostnames": True}, "replicatedJobs": [hosts]}
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", options.name, spec)


def _pytorchjob(options: LaunchOptions, words: Sequence[str], supervised: bool) -> str:
    """The operator sets MASTER_ADDR and MASTER_PORT of each pod."""
    pod = _pod(options, words, {})
    policy = pod.pop("restartPolicy")
    count = {"Master": 1, "Worker": options.hosts + options.spares - 1}
    pods = {kind: {"replicas": n, "restartPolicy": policy, "template": {"spec": pod}} for kind, n in count.items() if n}
    limits = {"activeDeadlineSeconds": 60 * options.minutes} if options.minutes else {}
    spec = {"runPolicy": {"cleanPodPolicy": "None", **limits}, "pytorchReplicaSpecs": pods}
    return _manifest("kubeflow.org/v1", "PyTorchJob", options.name, spec)


def _manifest(version: str, kind: str, name: str, spec: Mapping[str, object]) -> str:
    """As JSON, which `kubectl apply -f` takes as it takes YAML."""
    whole = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return json.dumps(whole, indent=2) + "\n"


def _script(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


WRITERS: Mapping[str, Callable[[LaunchOptions, Sequence[str], bool], str]] = {
    "slurm": _slurm,
    "torchrun": _torchrun,
    "mpi": _mpi,
    "jobset": _jobset,
    "pytorchjob": _pytorchjob,
}
"""Kinds of schedulers."""
