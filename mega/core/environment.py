"""Switches in environment variables, such as MEGA_DEBUG=1. Options of a run are flags, not variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

DEBUG = "MEGA_DEBUG"
"""Switch for the traceback of each error."""

INJECT = "MEGA_INJECT"
"""Switch without which --inject is refused, so that a flag in a script cannot damage a real run."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch is on. A value that `check_switches` refuses counts as off.

    >>> is_on(DEBUG, {"MEGA_DEBUG": "Yes"}), is_on(DEBUG, {"MEGA_DEBUG": "off"}), is_on(DEBUG, {})
    (True, False, False)
    """
    return environ.get(name, "").strip().lower() in _ON


def check_switches(environ: Mapping[str, str] = os.environ) -> None:
    """Check the values of all switches. Errors: ValueError naming the variable, its value and the valid values."""
    for name in (DEBUG, INJECT):
        if (value := environ.get(name, "")).strip().lower() not in (*_ON, *_OFF):
            raise ValueError(f"{name} {value!r}: must be 1, true, yes or on, or 0, false, no or off")
