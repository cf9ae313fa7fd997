"""The shape of mega/: no import circles, no function longer than a screen, no name from the private vocabulary.

What still offends is counted here, and may only become less. `python tests/repository/test_structure.py` prints every
place.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = 50

CIRCLES: list[set[str]] = []
"""Modules that still import each other."""

LONG = {
    "task.score": 51,
    "fairseq.model_from_options": 53,
    "torch_dist.read_records": 74,
    "numpy_files._described": 57,
    "preprocess.preprocess": 91,
    "duration.training_time": 63,
    "training.measure": 60,
}
"""Functions that are still longer than LINES, and how long they may be."""

EVERYWHERE = ""
FORBIDDEN: dict[str, dict[str, tuple[int, str]]] = {
    EVERYWHERE: {
        "again": (5, "recompute"),
        "forget": (0, "free, reshard"),
        "around": (0, "unshard hook, with_full_params"),
        "arrive": (0, "wait_param_gather"),
        "road": (0, "gather stream or group"),
        "homes": (0, "buckets_of"),
        "sink": (0, "main_grad"),
        "absorb": (0, "accumulate_grad"),
        "Maker": (0, "ParameterFactory"),
        "product": (6, "matmul, GEMM"),
        # A key of bench's JSON and of hardware.toml.
        "products": (4, "matmuls; forward, dgrad, wgrad"),
        "slots": (4, "segments, buffers, workers"),  # of a paged cache: the field says so
        "places": (2, "stages_used, offsets, positions"),
        "Flow": (0, "ForwardContext"),
        "flow": (0, "forward context"),
        "facts": (8, "state_dict"),
        "Sight": (0, "AttentionMask"),
        "sight": (0, "mask"),
        "Drop": (0, "dropout spec"),
        "Circle": (0, "RingState"),
        "HandOn": (0, "RingShift"),
        "swap": (1, "all_to_all"),
        "leave_region": (0, "reduce or scatter from region"),
        "own_block": (0, "local_shard"),
        "across": (1, "with_context_parallel"),
        "Way": (0, "copy descriptor"),
        "Pace": (0, "StepArgs"),
        "Room": (0, "allocator"),
        "Flat": (0, "FlatState"),
        "Owned": (0, "ShardState"),
        # A key of parity's rows.
        "fine": (1, "finite"),
        "unscheduled": (0, "skipped_samples"),
        "Vote": (0, "stop signal"),
        "Asked": (0, "all-reduced flag"),
        "Interrupt": (0, "stop signal"),
        "Prepared": (0, "resolved inputs"),
        "Origin": (0, "ResumePoint"),
        "companions": (5, "sidecar files"),
        "claim": (0, "lock"),
        "alone_in": (0, "check_no_newer"),
        "going_on": (0, "resume"),
        "Course": (0, "timeline"),
        "Moment": (0, "live set"),
        "Passing": (0, "event"),
        "travelling": (0, "in flight"),
        "agreement": (0, "logit comparison"),
        "stretch": (1, "rope scaling"),
        "foretold": (0, "predicted positions, targets"),
        "told": (1, "reported, described"),
        "say": (0, "report"),
        "tell": (0, "report, describe"),
        "unrecorded": (0, "eager_microbatches"),
        "behind": (1, "after"),
        "beside": (8, "along with, next to"),
        "nobody": (0, "no one"),
        "whoever": (0, "the one who"),
        "anew": (0, "again, recomputed"),
        "dealt": (1, "assigned"),
    },
    "core/model": {
        "make": (0, "factory"),
        "rows": (3, "batch"),
        "columns": (2, "seq"),
        "Stream": (0, "ResidualState"),
    },
    "core/optim": {
        "halves": (0, "decay split"),
        "move": (0, "step"),
    },
    "core/parallel": {
        "hold": (0, "defer_wgrad"),
        "release": (0, "take_deferred"),
        "compute": (0, "run_wgrad"),
        "leave": (0, "launch_grad_reduce"),
        "leaving": (0, "being reduced"),
        "apart": (0, "own communicator"),
        "channel": (0, "own communicator"),
        "ends": (0, "embedding group"),
        "reports": (0, "loss group"),
        "links": (0, "p2p groups"),
        "words": (0, "format_error"),
        "Part": (0, "RingBlock"),
    },
    "core/training": {
        "complete": (0, "resolve"),
    },
}
"""Room of mega/ -> word of ours -> how many definitions may still use it, and the word of the field.

`lower_case` is found as these parts, in this order, of any name: of a module, class, function, parameter, field or
variable. `Capitals` are found as the whole name of a class.
"""

METHODS = 15
MANY_METHODS = set("Driver HuggingFaceTokenizer PlainSentencePiece Scheduler Service StackStage".split())
"""Classes that still have more methods than METHODS."""

TWICE = set("Bucket Chunk Entry Family Report Table Training _Rank".split())
"""Names that more than one class still has."""


@cache
def sources() -> dict[str, ast.Module]:
    """Path from the repository -> syntax tree of every module of mega/."""
    paths = sorted((REPOSITORY / "mega").rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def circles() -> list[set[str]]:
    """The largest sets of modules that import each other, imports for type checking included."""
    graph = grimp.build_graph("mega")
    found: list[set[str]] = []
    for module in sorted(graph.modules):
        circle = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if circle and circle | {module} not in found:
            found.append(circle | {module})
    return found


def functions() -> dict[str, int]:
    """`module.function` -> its lines, decorators aside. Of several with one name, the longest counts."""
    lengths: defaultdict[str, int] = defaultdict(int)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name = f"{Path(path).stem}.{node.name}"
                lengths[name] = max(lengths[name], node.end_lineno - node.lineno + 1)
    return lengths


def definitions(path: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, what it is, and name of everything that a module defines: itself, classes, functions, parameters, names."""
    yield 1, "module", Path(path).stem
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield node.lineno, "class", node.name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, "function", node.name
            case ast.arg():
                yield node.lineno, "parameter", node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, "variable", node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, "field", node.attr


def parts(name: str) -> list[str]:
    """The words of a name, in lower case.

    >>> parts("_dealt_anew"), parts("HandOn")
    (['dealt', 'anew'], ['hand', 'on'])
    """
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def bears(name: str, kind: str, word: str) -> bool:
    """Whether a definition of this name and kind uses a word of FORBIDDEN."""
    if word[0].isupper():
        return kind == "class" and name.strip("_") == word
    have, wanted = parts(name), word.split("_")
    return any(have[at : at + len(wanted)] == wanted for at in range(len(have)))


@cache
def offenders() -> dict[tuple[str, str], list[str]]:
    """Room and forbidden word -> definitions that use it, as `path:line kind name`, each once a module and kind."""
    found: dict[tuple[str, str], list[str]] = {(room, word): [] for room in FORBIDDEN for word in FORBIDDEN[room]}
    for path, tree in sources().items():
        first: dict[tuple[str, str], int] = {}
        for line, kind, name in definitions(path, tree):
            first.setdefault((kind, name), line)
        for (kind, name), line in first.items():
            for room, word in found:
                if path.startswith(f"mega/{room}") and bears(name, kind, word):
                    found[room, word].append(f"{path}:{line} {kind} {name}")
    return found


def classes() -> dict[str, list[str]]:
    """Name of a class -> the modules that define one of this name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path}:{node.lineno}")
    return found


def test_no_module_imports_itself_through_others() -> None:
    assert [circle for circle in circles() if circle not in CIRCLES] == []


def test_functions_fit_on_a_screen() -> None:
    long = {name: lines for name, lines in functions().items() if lines > LONG.get(name, LINES)}
    assert long == {}


def test_names_are_words_of_the_field() -> None:
    for (room, word), found in offenders().items():
        allowed, field = FORBIDDEN[room][word]
        assert len(found) <= allowed, f"{word}: say {field}, as others do: {found}"


def test_a_name_has_one_meaning() -> None:
    several = {name: places for name, places in classes().items() if len(places) > 1 and name not in TWICE}
    assert several == {}


def test_a_class_has_one_subject() -> None:
    """As far as the number of its methods shows it."""
    nodes = [node for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    many = {node.name for node in nodes if sum(isinstance(each, kinds) for each in node.body) > METHODS}
    assert many - MANY_METHODS == set()


def test_a_wrong_name_would_show() -> None:
    tree = ast.parse("class _Maker:\n    def around(self, alone_in):\n        self.claim, way = 1, 2")
    found = {(kind, name) for _, kind, name in definitions("mega/sink.py", tree)}
    assert found == {
        ("module", "sink"),
        ("class", "_Maker"),
        ("function", "around"),
        ("parameter", "self"),
        ("parameter", "alone_in"),
        ("field", "claim"),
        ("variable", "way"),
    }
    assert bears("_Maker", "class", "Maker") and not bears("maker", "variable", "Maker")
    assert bears("alone_in_folder", "function", "alone_in") and not bears("alone", "parameter", "alone_in")
    assert bears("ProductSink", "class", "sink") and not bears("sinking", "variable", "sink")


def main() -> None:
    """Everything that still offends, as a list of work."""
    for circle in circles():
        print("circle:", *sorted(circle))
    for name, lines in sorted(functions().items(), key=lambda item: -item[1]):
        if lines > LINES:
            print(f"long: {name} {lines}")
    for name, places in sorted(classes().items()):
        if len(places) > 1:
            print(f"twice: {name}", *places)
    for (room, word), found in offenders().items():
        allowed, field = FORBIDDEN[room][word]
        print(f"word: {word}" + f" in {room}" * bool(room) + f" -> {field}: {len(found)}, allowed {allowed}")
        for place in found:
            print(f"    {place}")


if __name__ == "__main__":
    main()
