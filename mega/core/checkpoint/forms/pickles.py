"""torch files that hold more than tensors, read without running anything they name.

torch's own restricted unpickler does the reading. Objects of the programs that write such files become inert objects of
ours, which only keep what they were given; tensors, containers and numbers are torch's list; all else, what Python and
torch themselves could do, is refused by name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mega.core.checkpoint.forms.foreign import torch_file


class Inert:
    """Stands for an object of another program: keeps its arguments and its state, does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class Arguments(Inert):
    """Stands for argparse.Namespace."""

    @property
    def values(self) -> dict[str, object]:
        """By name."""
        state = getattr(self, "state", {})
        plain = state if isinstance(state, dict) else {}
        return {key: _argument(value) for key, value in plain.items()}


def _argument(value: object) -> object:
    """A value, or its type's name: of a tensor, which may be neither true nor false, and of containers in containers,
    which may take for ever to spell."""
    containers = (dict, list, tuple, set)
    nested = isinstance(value, containers) and any(isinstance(item, containers) for item in value)
    return type(value).__name__ if nested or isinstance(value, torch.Tensor) else value


_VALUES = ("argparse", "datetime", "enum", "pathlib", "signal")
"""Of Python's own modules, those whose objects are among the arguments of a command line."""

_BY_NAME = ("__builtin__.getattr", "builtins.getattr")
"""How Python up to 3.11.3 writes a member of an enum: its class, which is inert here, and its name."""


def stand_in(name: str) -> type[Inert] | None:
    """What is made in place of an object of the class, or of what the function returns, that a file calls `name`.

    Programs keep objects of their own beside tensors: enums among the arguments, loss scalers, random states, what a
    rerun machine knows; each release may bring others. Python's own functions and torch's are not to be met there.

    >>> [stand_in(name) for name in ("megatron.core.enums.Fp8Recipe", "os.system", "builtins.eval", "torch.load")]
    [<class 'mega.core.checkpoint.forms.pickles.Inert'>, None, None, None]
    """
    module = name.partition(".")[0]
    if name == "argparse.Namespace":
        return Arguments
    others = module not in sys.stdlib_module_names and module not in ("torch", "__builtin__", "__main__")
    return Inert if others or module in _VALUES or name in _BY_NAME else None


def read_pickled(path: Path) -> object:
    """What a torch file holds. Errors: CheckpointError naming the file and the first thing that is not allowed."""
    return torch_file(path, stand_in)
