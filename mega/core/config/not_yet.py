"""What can be asked for but is not built yet: one row each, removed when the feature is built."""

from __future__ import annotations

from collections.abc import Callable

from mega.core.config.run import RunConfig

NOT_YET: dict[str, tuple[Callable[[RunConfig], bool], str]] = {}
"""Option -> (whether a resolved run asks for it, the reason to report)."""
