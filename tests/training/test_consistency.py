"""What ranks must have alike is compared before the first step: one line names what differs and who has it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mega.cli import main
from mega.core.config.compose import compose
from mega.core.config.run import Options, updated
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.device import Device
from mega.core.files import PARTS, WHOLE_BYTES, sampled_digest
from mega.core.parallel.consistency import Comparable, check_consistent
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes import code
from mega.core.processes.pool import Pool
from mega.core.training.saves import place
from mega.core.training.start import consistency
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start

RUN: dict[str, Any] = {
    **{"layers": 2, "hidden": 16, "heads": 2, "seq_length": 8, "vocab": 64, "micro_batch": 1, "global_batch": 2},
    **{"lr": 1e-3, "lr_decay": "constant", "eval_iters": 0, "log_interval": 1, "device": "cpu", "steps": 2},
}
DATA = {"data_path": ("corpus",), "split": "1"}


def write(prefix: Path, seed: int) -> None:
    """Token files whose index and whose note do not depend on the seed."""
    generator = np.random.default_rng(seed)
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add([generator.integers(0, 63, 30).tolist()])


def begin(groups: Groups, rank: int, flags: dict[str, Any], places: list[str], patched: bool = False) -> Any:
    """Job: start a run on two ranks, each in a folder of its own: (error, printed)."""
    printed = io.StringIO()
    with contextlib.ExitStack() as held, contextlib.redirect_stdout(printed):
        held.callback(os.chdir, os.getcwd())
        os.chdir(places[rank])
        if patched and rank == 1:
            held.enter_context(mock.patch.object(code, "_source", lambda: "0" * 64))
        held.enter_context(mock.patch.object(place, "SEEN_WITHIN", 0.2))
        try:
            inputs = open_inputs(resolve_run(compose(flags=flags), 2))
            start(inputs, rank, 2, Device.choose("cpu"), groups, held).play()
        except ValueError as error:
            return str(error), printed.getvalue()
    return "", printed.getvalue()


def told(pool: Pool, flags: dict[str, Any], places: list[Path], **more: Any) -> str:
    """The error of both ranks, which is one."""
    errors = {error for error, _ in pool.run(begin, flags, list(map(str, places)), *more.values(), world=2)}
    assert len(errors) == 1, errors
    return str(errors.pop())


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=["dp", "tp", "pp"])
def test_other_tokens_under_one_path(tmp_path: Path, pool: Pool, layout: dict[str, Any]) -> None:
    """The index, and the note of the tokens' hash, are the first rank's: only the .bin is another one."""
    places = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(places):
        write(folder / "corpus", number)
    for name in ("corpus.idx", *(path.name for path in places[0].glob("corpus*.json"))):
        shutil.copy(places[0] / name, places[1] / name)
    error = told(pool, {**RUN, **DATA, **layout}, places)
    assert error.startswith("the content of corpus ") and " of rank 0, " in error and " of rank 1: must be" in error
    assert told(pool, {**RUN, **DATA, **layout}, [places[0], places[0]]) == ""


def test_another_tokenizer_under_one_path(tmp_path: Path, pool: Pool) -> None:
    """Of as many tokens."""
    places = [tmp_path / "a", tmp_path / "b"]
    for folder, words in zip(places, (["a", "b"], ["b", "a"]), strict=True):
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    kind = {"family": "bert", "tokenizer": "BertWordPieceCase", "vocab_file": "vocab.txt", "mock_data": True}
    run = {name: value for name, value in RUN.items() if name != "vocab"}
    error = told(pool, {**run, **kind}, places)
    assert error.startswith("the tokenizer ") and " of rank 0, " in error and " of rank 1: must be" in error


def test_another_version_of_the_code(tmp_path: Path, pool: Pool) -> None:
    error = told(pool, {**RUN, "mock_data": True}, [tmp_path, tmp_path], patched=True)
    assert error.startswith("the version of mega 0.1.0 (") and "(00000000) of rank 1: must be the same" in error


def test_places_of_checkpoints_that_are_not_one(tmp_path: Path, pool: Pool) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for folder in places:
        folder.mkdir()
    error = told(pool, {**RUN, "mock_data": True, "save": "run", "save_interval": 1}, places)
    assert error.startswith("--save run: what rank 0 writes there on ") and "is not seen by rank 1 on " in error
    assert not list(tmp_path.glob("*/run/*"))
    assert told(pool, {**RUN, "mock_data": True, "save": "run", "save_interval": 1}, [places[0]] * 2) == ""
    assert not list(places[0].glob("run/.seen*"))


@pytest.mark.parametrize("adapters", [False, True])
def test_other_weights_of_others_under_one_path(tmp_path: Path, pool: Pool, adapters: bool) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    shape = "--family llama --layers 1 --hidden 16 --heads 2 --ffn 32 --vocab 64".split()
    steps = "--seq-length 8 --mock-data --micro-batch 1 --lr 1e-3 --eval-iters 0 --device cpu --steps 1".split()
    for number, folder in enumerate(places):
        run = ["--save", str(folder / "ours"), "--seed", str(number), "--save-interval", "1"]
        assert main(["pretrain", *shape, *steps, *run]) == 0
        assert main(["convert-llama", "--load-dir", str(folder / "ours"), "--save-dir", str(folder / "base")]) == 0
    flags = {"load": "base", "finetune": True, "use_checkpoint_config": True, "mock_data": True, "seq_length": 8}
    own = {name: value for name, value in RUN.items() if name not in ("layers", "hidden", "heads", "vocab")}
    error = told(pool, {**own, **flags, **({"lora_rank": 2} if adapters else {})}, places)
    assert error.startswith("base: ranks see different ones: ")


def compared(groups: Groups, rank: int, flags: list[dict[str, Any]], better: list[str], late: float) -> Any:
    """Job: what a rank is told whose flags may be others than another's: (error, lines)."""
    lines: list[str] = []
    own = Comparable(consistency.flags(updated(Options(), flags[rank])), {"torch": better[rank]})
    clock = time.time
    with mock.patch.object(time, "time", lambda: clock() + late * rank):
        try:
            check_consistent(own, Mesh(rank, dp=2, groups=groups).everyone, torch.device("cpu"), lines.append)
        except ValueError as error:
            return str(error), lines
    return "", lines


def test_flags_that_differ_are_named(pool: Pool) -> None:
    assert pool.run(compared, [{"metrics": "a"}] * 2, ["2.11"] * 2, 0.0, world=2) == [("", [])] * 2
    other = [{"metrics": "a", "lr": 1e-3}, {"metrics": "b", "lr": 2e-3}]
    found = pool.run(compared, other, ["2.11"] * 2, 0.0, world=2)
    line = "--lr 0.001 of rank 0, 0.002 of rank 1; --metrics a of rank 0, b of rank 1: must be the same on every rank"
    assert [error for error, _ in found] == [f"{line}; start all of them with the same flags and files"] * 2


def test_what_is_better_alike_is_only_said(pool: Pool) -> None:
    found = pool.run(compared, [{}, {}], ["2.11", "2.13"], 0.0, world=2)
    assert found == [("", ["ranks differ in torch 2.11 of rank 0, 2.13 of rank 1"])] * 2
    ((error, (line,)), _) = pool.run(compared, [{}, {}], ["2.11", "2.11"], -3600.0, world=2)
    assert (
        not error and line.startswith("clocks of ranks are apart, against the median: rank 1 on ")
    ) or "rank 0" in line


def test_a_digest_of_a_part_tells_another_file(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(range(256)))
    before = sampled_digest(small)
    small.write_bytes(bytes([*range(255), 0]))
    assert sampled_digest(small) != before
    with large.open("wb") as file:
        file.truncate(WHOLE_BYTES + 12345)
    found = {sampled_digest(large)}
    for at in (0, (WHOLE_BYTES + 12344) // 2 // PARTS * PARTS, WHOLE_BYTES + 12344):
        with large.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        found.add(sampled_digest(large))
    assert len(found) >= 3  # the first byte and the last one are always read
