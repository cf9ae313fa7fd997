"""Ranks that see different checkpoints: all start from one that all of them see alike, or none starts."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega.core.checkpoint.own.pieces import CheckpointError, UnreadableError
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.checkpoint.own.together import reason_of, together
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.exit_reports import report_of
from mega.core.processes.pool import Pool
from mega.core.training.start.inputs import Inputs, open_inputs, resolve_run
from mega.core.training.start.rank import start
from tests.support.views import KINDS, damage, seen_at

RUN: dict[str, Any] = {
    **{"layers": 2, "hidden": 8, "heads": 2, "seq_length": 8, "vocab": 64, "mock_data": True, "micro_batch": 1},
    **{
        "global_batch": 2,
        "lr": 1e-3,
        "lr_decay": "constant",
        "eval_iters": 0,
        "save_interval": 4,
        "log_interval": 1,
        "device": "cpu",
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {"pp": {"pp": 2}, "zero": {"zero": 1}, "tp": {"tp": 2}}


def inputs_of(flags: dict[str, Any]) -> Inputs:
    """Of two ranks; a run that saves nothing has no interval of saving."""
    kept = {name: value for name, value in flags.items() if name != "save_interval" or flags.get("save")}
    return open_inputs(resolve_run(compose(flags=kept), 2))


def begin(
    groups: Groups, rank: int, flags: dict[str, Any], damaged: int | None, view: str, files: Any, play: bool = True
) -> Any:
    """Job: start a run on two ranks, of which one may see `view`: (error, printed, step, sum over all weights)."""
    printed = io.StringIO()
    with contextlib.ExitStack() as held, contextlib.redirect_stdout(printed):
        if rank == damaged:
            held.enter_context(seen_at(Path(view), *files))
        inputs = inputs_of(flags)
        try:
            training = start(inputs, rank, 2, Device.choose("cpu"), groups, held)
        except Exception as error:
            return (
                plain(f"{type(error).__name__}: {error}", flags, view),
                plain(printed.getvalue(), flags, view),
                None,
                0,
            )
        if play and flags.get("save"):
            training.play()
        pieces = list(training.state.weight_pieces(mine=False))
        total = sum(float(piece.tensor.double().sum()) for piece in pieces)
        return "", plain(printed.getvalue(), flags, view), training.state.progress.step, total


def plain(text: str, flags: dict[str, Any], view: str) -> str:
    """A text in which the run's place is called PLACE, whoever sees it."""
    place = next((str(flags[name]) for name in ("resume", "save", "load") if flags.get(name) not in (None, "auto")), "")
    for name in (view, place.partition("/step-")[0]):
        text = text.replace(name or "PLACE", "PLACE")
    return text


def from_steps(groups: Groups, rank: int, flags: dict[str, Any], places: dict[int, str]) -> dict[int, float]:
    """Job: what `begin` gives for each step, read from a sound view."""
    inputs = inputs_of(flags)
    found = {}
    with contextlib.ExitStack() as held, contextlib.redirect_stdout(io.StringIO()):
        state = start(inputs, rank, 2, Device.choose("cpu"), groups, held).state
        for step, place in places.items():
            pieces = list(state.weight_pieces(mine=False))
            CheckpointStore(Path(place).parent).open(step).read(pieces)
            found[step] = sum(float(piece.tensor.double().sum()) for piece in pieces)
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """For every layout a run with steps 4 and 8, and one of another seed."""
    root = tmp_path_factory.mktemp("views")
    for name, layout in LAYOUTS.items():
        for other, seed in (("run", 1), ("other", 2)):
            flags = {**RUN, **layout, "steps": 8, "seed": seed, "save": str(root / name / other)}
            assert [each[0] for each in pool.run(begin, flags, None, "", (), world=2)] == ["", ""]
    return root


WAYS: dict[str, dict[str, Any]] = {
    "load": {"steps": 10},
    "finetune": {"steps": 10, "finetune": True},
    "resume": {"steps": 10, "resume": "auto"},
    "validate": {"steps": 10, "skip_train": True},
}


@pytest.mark.parametrize(
    ("layout", "way", "kind"),
    [
        ("pp", "finetune", "unreadable"),
        ("pp", "resume", "unread"),
        ("pp", "load", "unread"),
        ("zero", "resume", "older"),
        ("zero", "load", "cut"),
        ("tp", "resume", "missing"),
        ("tp", "validate", "older"),
    ],
)
def test_ranks_start_from_one_step_or_none(
    places: Path, tmp_path: Path, pool: Pool, layout: str, way: str, kind: str
) -> None:
    """Rank 1 cannot trust step 8; step 4 is the newest that both can."""
    source, view = places / layout / "run", tmp_path / "view"
    shutil.copytree(source, view)
    place = tmp_path / "run"
    shutil.copytree(source, place)
    file = damage(kind, CheckpointStore(view), 8, CheckpointStore(places / layout / "other"), random.Random(1))
    if kind == "unread":
        file = next(view.glob("step-0000008/rank-*[0-9].safetensors"))
    name = f"PLACE/{file.relative_to(view)}"
    files = {"unreadable": (str(file), ""), "unread": ("", str(file))}.get(kind, ())
    metrics = {"metrics": str(tmp_path / "metrics.jsonl")}
    flags = {**RUN, **LAYOUTS[layout], **WAYS[way], ("save" if way == "resume" else "load"): str(place), **metrics}
    found = pool.run(begin, flags, 1, str(view), files, world=2)
    errors = {error for error, *_ in found}
    assert len(errors) == 1, errors
    if kind == "unread" and way == "load":  # its bytes are not looked at before they are read
        assert errors == {f"UnreadableError: rank 1: {name}: Input/output error"}
        return
    assert errors == {""}
    printed = found[0][1]
    if kind == "older":
        assert "step 8 is passed over: ranks see different ones: manifest " in printed
    else:
        assert "step 8 is passed over: rank 1: PLACE/step-0000008" in printed and (kind != "unread" or name in printed)
    start_flags = {**RUN, **LAYOUTS[layout], "steps": 1, "metrics": str(tmp_path / "none.jsonl")}
    sums = pool.run(from_steps, start_flags, {4: str(source / "x"), 8: str(source / "x")}, world=2)
    if way == "resume":
        assert [step for _, _, step, _ in found] == [10, 10] and "at step 4" in printed
    else:
        assert [read for *_, read in found] == [each[4] for each in sums]
        assert [read for *_, read in found] != [each[8] for each in sums]


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ((None, OSError(5, "Input/output error", "a")), 1),
        ((UnreadableError("a: Stale file handle"), OSError("the connection is gone")), 1),
        ((None, CheckpointError("a: truncated")), 2),
        ((OSError(5, "Input/output error", "a"), CheckpointError("a: truncated")), 2),
    ],
)
def test_what_a_machine_does_not_read_may_pass(faults: tuple[Exception | None, ...], code: int) -> None:
    """Ranks that start again may read it, so that such an end is not final, as one by a mistake is."""

    def act() -> None:
        if faults[1] is not None:
            raise faults[1]

    def met(own: Any) -> list[Any]:
        there = [None if fault is None else reason_of(fault) for fault in faults]
        passing = [fault is None or isinstance(fault, OSError) for fault in faults]
        return [{**own, "fault": said or "", "passing": may} for said, may in zip(there, passing, strict=True)]

    with pytest.raises(CheckpointError) as found:
        together(act, met)
    report = report_of(found.value)
    assert report.code == code and report.permanent == (code == 2) and "OSError(" not in report.text


@pytest.mark.parametrize("kind", ["missing", "older"])
def test_a_named_step_is_taken_or_refused(places: Path, tmp_path: Path, pool: Pool, kind: str) -> None:
    place, view = places / "pp" / "run", tmp_path / "view"
    shutil.copytree(place, view)
    damage(kind, CheckpointStore(view), 8, CheckpointStore(places / "pp" / "other"), random.Random(1))
    flags = {**RUN, **LAYOUTS["pp"], "steps": 10, "resume": str(CheckpointStore(place).path(8))}
    found = pool.run(begin, flags, 1, str(view), (), world=2)
    (error,) = {error for error, *_ in found}
    assert ("ranks see different ones" if kind == "older" else "rank 1: PLACE/step-0000008: no such") in error


def test_where_no_step_is_seen_by_all_none_starts(places: Path, tmp_path: Path, pool: Pool) -> None:
    """Nor from the beginning, nor from --load, which another rank would not do."""
    place = tmp_path / "run"
    shutil.copytree(places / "pp" / "run", place)
    (tmp_path / "empty").mkdir()
    flags = {
        **RUN,
        **LAYOUTS["pp"],
        "steps": 10,
        "resume": "auto",
        "save": str(place),
        "load": str(places / "pp/other"),
    }
    found = pool.run(begin, flags, 1, str(tmp_path / "empty"), (), world=2)
    (error,) = {error for error, *_ in found}
    assert "PLACE: none of the checkpoints [4, 8] can be trusted: rank 1: " in error and "no such" in error


def test_newer_steps_that_one_rank_sees_are_not_mixed_in(places: Path, tmp_path: Path, pool: Pool) -> None:
    place, view = tmp_path / "run", tmp_path / "view"
    shutil.copytree(places / "pp" / "run", place)
    shutil.copytree(place, view)
    shutil.rmtree(view / "step-0000008")
    flags = {**RUN, **LAYOUTS["pp"], "steps": 10, "load": str(place), "save": str(place)}
    found = pool.run(begin, flags, 1, str(view), (), world=2)
    (error,) = {error for error, *_ in found}
    assert "--save PLACE: holds step 8, and this run starts at step 4" in error


def test_every_kind_of_damage_is_tried() -> None:
    assert set(KINDS) == {"missing", "unreadable", "unread", "older", "cut"}
