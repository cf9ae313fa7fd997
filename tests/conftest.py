"""What every test may use: one pool of local ranks, kept alive for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mega.core.parallel.launch import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks; jobs are functions importable by name."""
    with Pool(8) as ranks:
        yield ranks
