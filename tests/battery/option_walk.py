"""The walk of an option, --micro-batch, from the words of a command line to the code that uses it, drawn.

    PYTHONPATH=. python tests/battery/option_walk.py

Calls are shown that hold the option under its own name: in words, as the key of a mapping, as a parameter, or read from
a section; and the calls between these. A climb is a return from such a call into another module. A reader who follows
the option makes each of them; ends with 1 where there are more than 12.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "mega")
NAME, WORD, MOST = "micro_batch", "--micro-batch", 12
GENERIC = {"value_of", "_as_typed", "updated", "_asdict_inner"}
"""Functions that read every option by its name."""
LINE = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 3 --lr 1e-3 "
    "--steps 1 --device cpu"
)


@dataclass
class Call:
    """One call. module: of mega, else None. holds: the option, under its own name."""

    module: str | None
    function: str
    holds: bool = False
    calls: list[Call] = field(default_factory=list)


class Used(BaseException):
    """The option has come to its use."""


class Walk:
    """The calls of a run until `Batches` takes the option."""

    def __init__(self) -> None:
        self.root = Call(None, "")
        self.open = [self.root]
        self.of_frame: dict[int, Call] = {}

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return" and len(self.open) > 1:
            self.open.pop()
        if event != "call":
            return
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE)
        module = (
            os.path.relpath(code.co_filename, PACKAGE).removesuffix(".py").removeprefix("core/") if inside else None
        )
        call = Call(module, code.co_name)
        if inside and not code.co_name.startswith("<"):
            count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags >> 2 & 1) + (code.co_flags >> 3 & 1)
            call.holds = any(name == NAME or holds(frame.f_locals.get(name)) for name in code.co_varnames[:count])
        self.open[-1].calls.append(call)
        self.open.append(call)
        self.of_frame[id(frame)] = call
        if module == "data/batches" and code.co_name == "__init__":
            sys.setprofile(None)
            raise Used

    def watch(self, section: type) -> None:
        """Note who reads the option from a section."""
        plain: Any = section.__getattribute__

        def read(owner: object, name: str) -> Any:
            if name == NAME:
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_code.co_name.startswith("<"):
                    frame = frame.f_back
                if frame is not None and frame.f_code.co_name not in GENERIC and id(frame) in self.of_frame:
                    self.of_frame[id(frame)].holds = True
            return plain(owner, name)

        section.__getattribute__ = read  # type: ignore[method-assign, assignment]


def holds(value: object) -> bool:
    if isinstance(value, dict):
        return NAME in value
    return isinstance(value, list | tuple) and any(isinstance(word, str) and word.startswith(WORD) for word in value)


def kept(call: Call) -> list[Call]:
    """The call without those that do not hold the option and lead to none that does; outside of mega its calls."""
    call.calls = [each for inner in call.calls for each in kept(inner)]
    if call.module is None:
        return call.calls
    return [call] if call.holds or call.calls else []


def draw(call: Call, open_still: list[Call], depth: int = 0) -> int:
    """Prints the walk; its climbs. Calls that are open still have not returned."""
    print(f"{'  ' * depth}{call.module}.{call.function}")
    climbs = 0
    for each in call.calls:
        climbs += draw(each, open_still, depth + 1)
        if each.module != call.module and not any(each is one for one in open_still):
            climbs += 1
            print(f"{'  ' * depth}  ^ {call.module}")
    return climbs


def main() -> int:
    from mega import cli
    from mega.core.config.sections import BatchConfig, BatchOptions

    walk = Walk()
    for section in (BatchOptions, BatchConfig):
        walk.watch(section)
    sys.setprofile(walk.profile)
    try:
        cli.main(LINE.split())
    except Used:
        pass
    finally:
        sys.setprofile(None)
    climbs = sum(draw(call, walk.open) for call in kept(walk.root))
    print(f"{climbs} climbs; at most {MOST}")
    return int(climbs > MOST)


if __name__ == "__main__":
    sys.exit(main())
