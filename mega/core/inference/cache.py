"""Assign blocks of the KV cache to tokens, with reference counts and reuse of common prefixes.

In this module, blocks are only indices; the worker stores their content. A full block is identified by all tokens up to
its end, so a prompt with the same beginning as an earlier prompt reuses the blocks of the earlier prompt. Unused blocks
keep their content until memory is needed, and are then reused in least recently used order. This module depends on
neither requests nor torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

SCRATCH = 0
"""The block to which keys and values of padding tokens are written. No sequence uses this block."""

ROOT = 0
"""Id of the empty prefix. Sequences whose keys differ, for example because of an adapter, start from a negative id
instead."""


class Blocks:
    """Allocator of `count` blocks of `size` tokens, including SCRATCH.

    Users must reserve all blocks that they may need, so that an admitted sequence never waits for memory.
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
        """Number of blocks that can still be reserved."""
        return len(self._free) + len(self._unused) - self._promised

    @property
    def never_used(self) -> int:
        """Number of blocks other than SCRATCH if no block is in use or registered; otherwise 0."""
        return 0 if self._found or any(self._users) else self.count - 1

    def find(self, ids: Sequence[int], most: int, root: int = ROOT) -> tuple[list[int], int]:
        """Find up to `most` registered blocks that contain the first tokens of `ids` after the prefix `root`. Return
        the blocks and the prefix that they form."""
        prefix, blocks = root, []
        for start in range(0, min(most, len(ids) // self.size) * self.size, self.size):
            block = self._found.get((prefix, tuple(ids[start : start + self.size])))
            if block is None:
                break
            prefix = self._names[block][1]
            blocks.append(block)
        return blocks, prefix

    def admit(self, shared: Sequence[int], more: int) -> bool:
        """Add a user to the blocks `shared`, and reserve `more` blocks. If too few blocks are available, change nothing
        and return False."""
        unused = sum(self._users[block] == 0 for block in shared)
        if unused + more > self.available:
            return False
        for block in shared:
            self.share(block)
        self._promised += more
        return True

    def take(self) -> int:
        """Allocate one of the reserved blocks."""
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
        """Add a user to a block."""
        self._unused.pop(block, None)
        self._users[block] += 1

    def release(self, block: int) -> int:
        """Remove a user from a block. If this was the last user, the block becomes available, one block is reserved in
        its place, and 1 is returned; otherwise, 0 is returned."""
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
        """Cancel the reservation of blocks that have not been allocated."""
        self._promised -= promised

    def register(self, prefix: int, ids: Sequence[int], block: int) -> int:
        """Record that `block` contains the tokens `ids` after `prefix`, or will contain them before the block is read.
        Return the prefix that includes these tokens."""
        assert len(ids) == self.size
        name = (prefix, tuple(ids))
        if name in self._found:  # another sequence computed the same tokens at the same time
            return self._names[self._found[name]][1]
        self._last_prefix += 1
        self._found[name], self._names[block] = block, (name, self._last_prefix)
        return self._last_prefix
