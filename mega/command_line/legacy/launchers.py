"""Translate launchers: how to start `mega` in place of a program that torchrun, DeepSpeed or mpirun started."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from mega.command_line.legacy.translation import Translation

_TORCH = ("torch.distributed.launch", "torch.distributed.run")
_LAUNCH_SWITCHES = ("--standalone", "--use_env", "--use-env", "--no_python", "--no-python")


def start(launcher: Sequence[str], verb: str, known: Collection[str], result: Translation) -> list[str]:
    """The words with which to start a subcommand, given the launcher of the old command line."""
    mega_words = ["mega", *verb.split()]
    words = [word for word in launcher if word != "-u" and not re.fullmatch(r"(.*/)?python[\d.]*", word)]
    for index, word in enumerate(words):
        if PurePosixPath(word).name == "deepspeed":
            return [*words[:index], *_of_deepspeed(words[index + 1 :], mega_words, known, result)]
        if _is_torchrun(words, index):
            return [*words[:index], *_of_torchrun(words[index + (2 if word == "-m" else 1) :], mega_words, known)]
    runs_shell = len(words) > 1 and words[-1] == "-c" and PurePosixPath(words[-2]).name in ("sh", "bash")
    return [*(words[:-2] if runs_shell else words), *mega_words]


def _is_torchrun(words: Sequence[str], index: int) -> bool:
    word = words[index]
    if word == "-m":
        return len(words) > index + 1 and words[index + 1] in _TORCH
    return PurePosixPath(word).name == "torchrun"


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, spelled with hyphens. The key "" contains a word that is not an option, such as a
    variable that is not set."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, equals_sign, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            options[""] = flag
        elif flag not in _LAUNCH_SWITCHES:
            options[flag.replace("_", "-")] = value if equals_sign else rest.pop(0) if rest else ""
    return options


def _of_torchrun(words: Sequence[str], here: Sequence[str], known: Collection[str]) -> list[str]:
    options = options_of(words)
    count = options.get("--nproc-per-node", "1")
    if options.get("--nnodes", "1") == "1" and "--nproc" in known and count.isdecimal() and "" not in options:
        return [*here, *(["--nproc", count] if count != "1" else [])]
    launcher_words = [word for word in words if word not in ("--use_env", "--use-env")]
    return ["torchrun", *launcher_words, "-m", *here]


def _of_deepspeed(words: Sequence[str], here: Sequence[str], known: Collection[str], result: Translation) -> list[str]:
    """Translate DeepSpeed's launcher, which without --num_gpus starts a rank on every GPU of a host."""
    options = options_of(words)
    nodes, count = options.pop("--num-nodes", "1"), options.pop("--num-gpus", "gpu")
    for flag, value in options.items():
        if flag not in ("--master-addr", "--master-port"):
            result.lacking.append(
                f"deepspeed {flag} {value}: ranks are not placed from here; start torchrun on each host, or mpirun"
            )
    if nodes == "1" and "--nproc" in known and count.isdecimal():
        return [*here, "--nproc", count]
    return ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", count, "-m", *here]
