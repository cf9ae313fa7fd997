"""Work in turns: a generator gives its turn away where it waits for other ranks, so that another works meanwhile.

    def block(x):
        begun = start_exchange(x)
        yield                      # my exchange is on its way: your turn
        return begun.wait()

Autograd plays the backward pass in the opposite order of the forward one, so that turns alternate there as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]


def alone(work: Turns[T]) -> T:
    """What `work` returns, with nobody to take turns with."""
    return alternately([work])[0]


def alternately(works: Iterable[Turns[T]]) -> list[T]:
    """What each of the works returns, a turn of each after the other.

    >>> def work(name, turns):
    ...     for turn in range(turns):
    ...         print(name, turn)
    ...         yield
    ...     return name
    >>> alternately([work("a", 2), work("b", 1)])
    a 0
    b 0
    a 1
    ['a', 'b']
    """
    waiting = dict(enumerate(works))
    found: dict[int, T] = {}
    while waiting:
        for number, work in list(waiting.items()):
            try:
                next(work)
            except StopIteration as end:
                found[number] = end.value
                del waiting[number]
    return [found[number] for number in sorted(found)]
