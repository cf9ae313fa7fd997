"""Measure the cost of unpickling a torch file, before torch's restricted unpickler builds any object.

The restricted unpickler of torch runs no code from the file, but a few bytes of a pickle can cause a lot of work. For
example, a dict key that is a nested tuple, in which each level contains the previous one twice, takes exponential time
to hash. A dict that is passed to a thousand objects takes a thousand times its memory. The scan executes the pickle's
instructions on sizes instead of objects. The scan refuses everything that files of tensors do not need: unusual
instructions, calls of other functions, deep nesting, and work that grows faster than the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from mega.core.checkpoint.own.pieces import CheckpointError

BYTES = 64 << 20
"""Maximum size of one pickle in bytes. A pickle of 10,000 tensors takes about 2 MB."""

INSTRUCTIONS = 400_000
"""Maximum number of instructions in all pickles of a file, enough for about 12,000 tensors."""

WORK = 2_000_000
"""Maximum number of elements hashed, compared or copied, in addition to the elements that the file lists."""

DEPTH = 100
"""Maximum depth of nested tuples. The depth is limited because hashing recurses to this depth."""

ODD_KEYS = 1_000
"""Maximum number of keys that are neither strings nor small numbers. These keys can be chosen to have equal hashes, so
that each new key is compared with all earlier ones."""

HASHING = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.set", "__builtin__.set"})
CALLS = HASHING | {
    "builtins.complex",
    "_codecs.encode",
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._tensor._rebuild_from_type_v2",
}
"""Functions that files of tensors call. The unpickler of torch allows more functions, such as bytearray, with which a
file could allocate 10^12 bytes."""

WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
"""A function that makes a tensor with attributes. Its first argument is the function to call, which must be
`_rebuild_tensor_v2`."""

CODECS = ("latin1", "latin-1", "utf-8", "ascii")
"""Allowed codecs. Other codecs, such as punycode and idna, can take time quadratic in the text's length."""


@dataclass(slots=True, eq=False)
class Sized:
    """The size of an object in the pickle."""

    size: int = 1
    """Number of elements visited when the object is hashed or copied."""
    depth: int = 0
    """Depth of nested tuples in the object."""
    plain: bool = False
    """Whether the object is a string, a small number or a constant."""
    items: tuple[Sized, ...] | None = None
    """The items of a tuple; None for other objects."""
    says: str = ""
    """The name of a function or codec; empty for other objects."""
    grows: bool = False
    """Whether the object is a container to which elements may be added."""

    @property
    def spread(self) -> int:
        """Number of elements that may be copied if the object is passed as an argument, including elements of
        containers in a tuple."""
        return self.size if self.items is None else sum(item.size for item in self.items)


_PLAIN = Sized(plain=True)
_OBJECT = Sized()
_CODEC = {codec: Sized(plain=True, says=codec) for codec in CODECS}
_MARK = Sized()

_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TEXTS = frozenset({"BINUNICODE", "SHORT_BINSTRING"})
_CONSTANTS = frozenset({"NONE", "NEWTRUE", "NEWFALSE"})
_EMPTY = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _RefusedError(ValueError):
    """The reason why a pickle is refused."""


class Scan:
    """A scan of one file's pickles in sequence. The limits apply to the total over all pickles of the file.

    inert: function that returns whether a name outside `CALLS` is allowed. A name is allowed if an inert object
    replaces the named object. names: all names found in the pickles.
    """

    def __init__(self, path: Path, inert: Callable[[str], object] = lambda name: None) -> None:
        self._path = path
        self._inert = inert
        self.names: set[str] = set()
        self._left, self._work, self._odd = INSTRUCTIONS, WORK, ODD_KEYS

    def check(self, stream: BytesIO) -> None:
        """Scan the pickle that begins at the current position of `stream`, and advance `stream` to the pickle's end.

        Errors: CheckpointError naming the file and the refused instruction or name.
        """
        try:
            self._play(stream)
        except _RefusedError as error:
            raise CheckpointError(f"{self._path}: {error}") from None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise CheckpointError(f"{self._path}: it is damaged or no torch file") from None

    def _play(self, stream: BytesIO) -> None:
        stack: list[Sized] = []
        memo: dict[object, Sized] = {}
        for operation, argument, _ in pickletools.genops(stream):
            self._left -= 1
            if self._left < 0:
                raise _RefusedError(f"its pickle has more than {INSTRUCTIONS:,} instructions")
            name = operation.name
            if name in _NUMBERS:
                stack.append(_OBJECT if isinstance(argument, int) and abs(argument) >= 1 << 60 else _PLAIN)
            elif name in _TEXTS:
                stack.append(_CODEC.get(str(argument), _PLAIN))
            elif name in _CONSTANTS:
                stack.append(_PLAIN)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                memoized = memo[argument]
                if memoized.items is not None:  # hashing a tuple again costs the same, because its hash is not cached
                    self._charge(memoized.size)
                stack.append(memoized)
            elif name in _EMPTY:
                stack.append(Sized(0, grows=True))
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "TUPLE":
                stack.append(_tuple(_since_mark(stack)))
            elif name in _TUPLES:
                stack.append(_tuple(_last(stack, _TUPLES[name])))
            elif name == "GLOBAL":
                stack.append(Sized(says=str(argument).replace(" ", ".")))
                self.names.add(stack[-1].says)
            elif name in ("REDUCE", "NEWOBJ"):
                function, args = _last(stack, 2)
                stack.append(self._called(function.says, args))
            elif name == "BUILD":
                self._charge(stack.pop().spread)
            elif name in ("APPEND", "APPENDS"):
                self._grown(stack, _last(stack, 1) if name == "APPEND" else _since_mark(stack))
            elif name in ("SETITEM", "SETITEMS"):
                pairs = _last(stack, 2) if name == "SETITEM" else _since_mark(stack)
                for key in pairs[::2]:
                    self._key(key)
                self._grown(stack, pairs)
            elif name == "BINPERSID":
                stored = stack.pop().items
                self._key(stored[2] if stored is not None else _OBJECT)
                stack.append(_OBJECT)
            elif name not in ("PROTO", "STOP"):
                raise _RefusedError(f"not a pickle that torch writes ({name})")

    def _charge(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise _RefusedError(f"its pickle repeats itself more than {WORK:,} times, as no file of tensors does")

    def _key(self, key: Sized) -> None:
        if not key.plain:
            self._charge(key.size)
            self._odd -= 1
        if self._odd < 0:
            raise _RefusedError(f"its pickle has more than {ODD_KEYS:,} keys that are neither text nor small numbers")

    def _grown(self, stack: list[Sized], items: list[Sized]) -> None:
        """Add list elements, or the keys and values of a dict, to the container or object on top of the stack."""
        top = stack[-1]
        if top.grows:
            top.size += sum(1 if item.grows else item.size for item in items)
        elif top is not _OBJECT:
            raise ValueError("elements of what is not a container")

    def _called(self, name: str, args: Sized) -> Sized:
        if not name or args.items is None:
            raise ValueError("a call of what is not a function")
        if name not in CALLS and not self._inert(name):
            raise _RefusedError(f"it holds {name}")
        self._charge(args.spread)
        arguments = [argument.says for argument in args.items[:2]]
        if name == WITH_ATTRIBUTES and arguments != ["torch._utils._rebuild_tensor_v2", "torch.Tensor"]:
            raise _RefusedError(f"it holds {name} of {' and '.join(arguments)}")
        if name in HASHING and args.spread > ODD_KEYS:
            raise _RefusedError(f"it holds {name} of more than {ODD_KEYS:,} elements")
        if name == "_codecs.encode" and not all(argument.says in CODECS for argument in args.items[1:]):
            raise _RefusedError(f"it holds {name} into none of {', '.join(CODECS)}")
        return Sized(0, grows=True) if name in HASHING else _OBJECT


def _tuple(items: list[Sized]) -> Sized:
    depth = 1 + max((item.depth for item in items), default=0)
    if depth > DEPTH:
        raise _RefusedError(f"its pickle nests tuples more than {DEPTH} deep")
    return Sized(1 + sum(1 if item.grows else item.size for item in items), depth, items=tuple(items))


def _last(stack: list[Sized], count: int) -> list[Sized]:
    if len(stack) < count:
        raise IndexError("the stack is empty")
    begin = len(stack) - count
    items = stack[begin:]
    del stack[begin:]
    return items


def _since_mark(stack: list[Sized]) -> list[Sized]:
    count = 0
    while stack[-1 - count] is not _MARK:
        count += 1
    items = _last(stack, count)
    stack.pop()
    return items
