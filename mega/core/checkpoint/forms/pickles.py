"""Reads torch files that hold more than tensors, without running anything that the files name.

torch's own restricted unpickler reads them. Objects of the programs that write such files become inert objects that
only store their arguments; tensors, containers and numbers are on torch's allow-list. Everything else, such as
functions of Python and torch, is refused, with its name in the error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mega.core.checkpoint.forms.foreign import torch_file


class Inert:
    """Replaces an object of another program. It stores its arguments and does nothing else."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class Arguments(Inert):
    """Replaces argparse.Namespace."""

    @property
    def values(self) -> dict[str, object]:
        """The arguments by name."""
        state = getattr(self, "state", {})
        state_dict = state if isinstance(state, dict) else {}
        return {key: _argument(value) for key, value in state_dict.items()}


def _argument(value: object) -> object:
    """A value, or the name of its type for tensors, which may be neither true nor false, and for nested containers,
    which can take exponential time to format."""
    containers = (dict, list, tuple, set)
    nested = isinstance(value, containers) and any(isinstance(item, containers) for item in value)
    return type(value).__name__ if nested or isinstance(value, torch.Tensor) else value


_VALUES = ("argparse", "datetime", "enum", "pathlib", "signal")
"""Modules of Python whose objects occur among the arguments of a command line."""

_BY_NAME = ("__builtin__.getattr", "builtins.getattr")
"""The function with which Python up to 3.11.3 pickles a member of an enum, called with the class, which is inert here,
and the member's name."""


def stand_in(name: str) -> type[Inert] | None:
    """The inert class that replaces the class or function that a file calls `name`; None if the name is not allowed.

    Programs store objects of their own along with tensors: enums among the arguments, loss scalers, random states, the
    state of a rerun machine; each release may add others. Functions of Python and torch are not allowed.
    >>> [stand_in(name) for name in ("megatron.core.enums.Fp8Recipe", "os.system", "builtins.eval", "torch.load")]
    [<class 'mega.core.checkpoint.forms.pickles.Inert'>, None, None, None]
    """
    module = name.partition(".")[0]
    if name == "argparse.Namespace":
        return Arguments
    is_third_party = module not in sys.stdlib_module_names and module not in ("torch", "__builtin__", "__main__")
    return Inert if is_third_party or module in _VALUES or name in _BY_NAME else None


def read_pickled(path: Path) -> object:
    """The content of a torch file. Errors: CheckpointError naming the file and the first refused object."""
    return torch_file(path, stand_in)
