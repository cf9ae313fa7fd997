"""Which block of the cache holds which tokens: allocation, sharing by reference counts, prefixes that are kept.

Blocks are numbers; what lies in them is the worker's. A full block is known by all tokens up to its end, so a prompt
that begins like one before it finds its blocks, computed once; those without users stay until their memory is
needed, the least recently used first. Knows no requests and no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

SCRATCH = 0
"""The block that padding is written to; it belongs to no sequence."""

ROOT = 0
"""The prefix before the first block; of sequences in which a token has other keys, a number below it."""


class Blocks:
    """`count` blocks of `size` tokens, SCRATCH included.

    A user of blocks first has a number of them promised, so that an admitted sequence never waits for memory.
    """

    def __init__(self, count: int, size: int):
        assert count > 1, count
        self.size, self.count = size, count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._users = [0] * count
        self._promised = 0
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._found: dict[tuple[int, tuple[int, ...]], int] = {}
        self._names: dict[int, tuple[tuple[int, tuple[int, ...]], int]] = {}
        self._last_prefix = ROOT

    @property
    def available(self) -> int:
        """Blocks that can be promised."""
        return len(self._free) + len(self._unused) - self._promised

    @property
    def nobodys(self) -> int:
        """Blocks from 1 on that hold nothing: all of them before the first request, then none."""
        return 0 if self._found or any(self._users) else self.count - 1

    def find(self, ids: Sequence[int], most: int, root: int = ROOT) -> tuple[list[int], int]:
        """The blocks that hold the first tokens of `ids` after `root`, at most so many, and their prefix."""
        prefix, found = root, []
        for start in range(0, min(most, len(ids) // self.size) * self.size, self.size):
            block = self._found.get((prefix, tuple(ids[start : start + self.size])))
            if block is None:
                break
            prefix = self._names[block][1]
            found.append(block)
        return found, prefix

    def admit(self, shared: Sequence[int], more: int) -> bool:
        """Use the blocks `shared`, and have `more` promised. False, and no change, if fewer are available."""
        unused = sum(self._users[block] == 0 for block in shared)
        if unused + more > self.available:
            return False
        for block in shared:
            self.share(block)
        self._promised += more
        return True

    def take(self) -> int:
        """A block of those promised."""
        assert self._promised > 0
        self._promised -= 1
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._found[self._names.pop(block)[0]]
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One user more."""
        self._unused.pop(block, None)
        self._users[block] += 1

    def release(self, block: int) -> int:
        """One user less. The last one may take a block again: gives 1 where that is promised, else 0."""
        self._users[block] -= 1
        if self._users[block]:
            return 0
        if block in self._names:
            self._unused[block] = None
        else:
            self._free.append(block)
        self._promised += 1
        return 1

    def waive(self, promised: int) -> None:
        """Give back what was promised and not taken."""
        self._promised -= promised

    def register(self, prefix: int, ids: Sequence[int], block: int) -> int:
        """`block` holds, or will hold before it is read, the tokens `ids` after `prefix`; the prefix with them."""
        assert len(ids) == self.size
        name = (prefix, tuple(ids))
        if name in self._found:  # computed by another at the same time
            return self._names[self._found[name]][1]
        self._last_prefix += 1
        self._found[name], self._names[block] = block, (name, self._last_prefix)
        return self._last_prefix
