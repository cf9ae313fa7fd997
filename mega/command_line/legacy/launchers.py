"""Launchers of old command lines: how `mega` is started where torchrun, DeepSpeed or mpirun started a program."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from mega.command_line.legacy.translation import Translation

_TORCH = ("torch.distributed.launch", "torch.distributed.run")
_LAUNCH_SWITCHES = ("--standalone", "--use_env", "--use-env", "--no_python", "--no-python")


def start(launcher: Sequence[str], verb: str, known: Collection[str], result: Translation) -> list[str]:
    """How a verb is started where the old line was started so."""
    here = ["mega", *verb.split()]
    words = [word for word in launcher if word != "-u" and not re.fullmatch(r"(.*/)?python[\d.]*", word)]
    for at, word in enumerate(words):
        if PurePosixPath(word).name == "deepspeed":
            return [*words[:at], *_of_deepspeed(words[at + 1 :], here, known, result)]
        if _is_torchrun(words, at):
            return [*words[:at], *_of_torchrun(words[at + (2 if word == "-m" else 1) :], here, known)]
    inner = len(words) > 1 and words[-1] == "-c" and PurePosixPath(words[-2]).name in ("sh", "bash")
    return [*(words[:-2] if inner else words), *here]


def _is_torchrun(words: Sequence[str], index: int) -> bool:
    word = words[index]
    if word == "-m":
        return len(words) > index + 1 and words[index + 1] in _TORCH
    return PurePosixPath(word).name == "torchrun"


def options_of(words: Sequence[str]) -> dict[str, str]:
    """A launcher's options, with hyphens; under "" a word that is none of them, as a variable that is left open."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, attached, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            found[""] = flag
        elif flag not in _LAUNCH_SWITCHES:
            found[flag.replace("_", "-")] = value if attached else rest.pop(0) if rest else ""
    return found


def _of_torchrun(words: Sequence[str], here: Sequence[str], known: Collection[str]) -> list[str]:
    given = options_of(words)
    count = given.get("--nproc-per-node", "1")
    if given.get("--nnodes", "1") == "1" and "--nproc" in known and count.isdecimal() and "" not in given:
        return [*here, *(["--nproc", count] if count != "1" else [])]
    kept = [word for word in words if word not in ("--use_env", "--use-env")]
    return ["torchrun", *kept, "-m", *here]


def _of_deepspeed(words: Sequence[str], here: Sequence[str], known: Collection[str], result: Translation) -> list[str]:
    """DeepSpeed starts a rank on every GPU of a host where it is not told how many."""
    given = options_of(words)
    nodes, count = given.pop("--num-nodes", "1"), given.pop("--num-gpus", "gpu")
    for flag, value in given.items():
        if flag not in ("--master-addr", "--master-port"):
            result.lacking.append(
                f"deepspeed {flag} {value}: ranks are not placed from here; start torchrun on each host, or mpirun"
            )
    if nodes == "1" and "--nproc" in known and count.isdecimal():
        return [*here, "--nproc", count]
    return ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", count, "-m", *here]
