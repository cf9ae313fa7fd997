"""Read torch files that contain other objects in addition to tensors, without running any code that is named in the
files.

The files are read with torch's restricted unpickler, whose allow-list contains tensors, containers and numbers. Objects
of the program that wrote the file, such as Megatron-LM, are replaced with inert objects that only store their
arguments. Everything else, such as functions of Python and torch, is refused with an error that names the refused
object.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mega.core.checkpoint.forms.foreign import torch_file


class Inert:
    """An inert replacement for another program's object. It only stores the object's arguments and state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class Arguments(Inert):
    """Replaces argparse.Namespace."""

    @property
    def values(self) -> dict[str, object]:
        """Argument name -> value."""
        state = getattr(self, "state", {})
        state_dict = state if isinstance(state, dict) else {}
        return {key: _argument(value) for key, value in state_dict.items()}


def _argument(value: object) -> object:
    """Return a plain value unchanged. For a tensor, whose truth value may be undefined, and for a nested container,
    which can take exponential time to format, return the name of the type instead."""
    containers = (dict, list, tuple, set)
    nested = isinstance(value, containers) and any(isinstance(item, containers) for item in value)
    return type(value).__name__ if nested or isinstance(value, torch.Tensor) else value


_VALUES = ("argparse", "datetime", "enum", "pathlib", "signal")
"""Python modules whose objects occur among stored command-line arguments."""

_BY_NAME = ("__builtin__.getattr", "builtins.getattr")
"""The function with which Python up to 3.11.3 pickles a member of an enum. Its arguments are the class, which is
replaced with an inert class, and the member's name."""


def stand_in(name: str) -> type[Inert] | None:
    """Return the inert class to be used instead of the class or function `name`; None if the name is not allowed.

    Programs store various objects with their tensors: enums among the arguments, loss scalers, random states, the state
    of Megatron-core's rerun state machine. Each release may add more. Names in torch and in most modules of Python's
    standard library are not allowed.
    >>> [stand_in(name) for name in ("megatron.core.enums.Fp8Recipe", "os.system", "builtins.eval", "torch.load")]
    [<class 'mega.core.checkpoint.forms.pickles.Inert'>, None, None, None]
    """
    module = name.partition(".")[0]
    if name == "argparse.Namespace":
        return Arguments
    is_third_party = module not in sys.stdlib_module_names and module not in ("torch", "__builtin__", "__main__")
    return Inert if is_third_party or module in _VALUES or name in _BY_NAME else None


def read_pickled(path: Path) -> object:
    """Return the content of a torch file. Errors: CheckpointError naming the file and the first refused object."""
    return torch_file(path, stand_in)
