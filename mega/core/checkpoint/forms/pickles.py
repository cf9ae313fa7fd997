"""torch files that hold more than tensors, read without running anything they name.

torch's own restricted unpickler does the reading. Objects of the programs that write such files become inert objects of
ours, which only keep what they were given; tensors, containers and numbers are torch's list; all else is refused, by
name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mega.core.checkpoint.forms.foreign import torch_file


class Inert:
    """Stands for an object of another program: keeps its arguments and its state, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Arguments(Inert):
    """Stands for argparse.Namespace."""

    @property
    def values(self) -> dict[str, Any]:
        state = getattr(self, "state", {})
        return state if isinstance(state, dict) else {}


_PROGRAMS = re.compile(r"(argparse|datetime|fp16|megatron|numpy|pathlib|signal|transformer_engine)(\.\w+)+")
"""Whose objects are in files besides tensors: arguments of the command line (and the enums, paths and signals among
them), loss scalers, random states, the state of a rerun machine. A release may bring new ones."""


def stand_in(name: str) -> type[Inert] | None:
    """What is made in place of an object of the class, or the result of the function, `name`."""
    if name == "argparse.Namespace":
        return Arguments
    return Inert if _PROGRAMS.fullmatch(name) else None


def read_pickled(path: Path) -> Any:
    """What a torch file holds. Errors: CheckpointError naming the file and the first thing that is not allowed."""
    return torch_file(path, stand_in)
