"""Ranks of a model that see other weights or options under one path refuse to start, and name the difference."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mega.cli import main
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.start import start_engine
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.tasks.evaluate import CheckedEvaluation, run_here
from mega.core.tasks.model import check_model
from mega.core.tasks.options import TaskOptions

SHAPE = "--layers 2 --hidden 16 --heads 2 --seq-length 8 --vocab 70 --mock-data --micro-batch 1 --lr 1e-3".split()
MORE = "--steps 1 --eval-iters 0 --device cpu --tokenizer NullTokenizer --vocab-size 64".split()
RULE = "must be the same on every rank; start all of them with the same flags and files"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folders of two hosts: `run` is another model on each, `weights` too, and `same` differs in a note alone."""
    folders = [tmp_path_factory.mktemp("host") for _ in range(2)]
    for number, folder in enumerate(folders):
        assert main(["pretrain", *SHAPE, *MORE, "--save", str(folder / "run"), "--seed", str(number)]) == 0
        for name in ("weights", "same"):
            assert main(["convert-llama", "--load-dir", str(folders[0] / "run"), "--save-dir", str(folder / name)]) == 0
        (folder / "same" / "README.md").write_text(f"downloaded by host {number}")
    file = folders[1] / "weights" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    return list(map(str, folders))


@contextlib.contextmanager
def on_host(folder: str) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def starts(groups: Groups, rank: int, hosts: list[str], load: str, more: list[dict[str, Any]], layout: Any) -> str:
    """Job: the error of a rank that starts an engine, or "" where it starts."""
    options, device = EngineOptions(cache_tokens=64, vocab=64, **more[rank]), Device.choose("cpu")
    with on_host(hosts[rank]):
        try:
            engine = start_engine(open_model(load), Mesh(rank, groups=groups, **layout[rank]), device, options)
        except ValueError as error:
            return str(error)
    if engine is not None:
        engine.close()
    return ""


@pytest.mark.parametrize("load", ["run", "weights"])
def test_other_weights_under_one_path(pool: Pool, hosts: list[str], load: str) -> None:
    errors = pool.run(starts, hosts, load, [{}, {}], [{"tp": 2}] * 2, world=2)
    assert errors[0] == errors[1] and errors[0].endswith(RULE) and errors[0].count(" of rank 0, ") == 1, errors
    assert errors[0].startswith("the weights of the model "), errors


def test_files_that_do_not_count_may_differ(pool: Pool, hosts: list[str]) -> None:
    assert pool.run(starts, hosts, "same", [{}, {}], [{"pp": 2}] * 2, world=2) == ["", ""]


@pytest.mark.parametrize(
    ("more", "layout", "words"),
    [
        ({"prefill_chunk": 4}, {"tp": 2}, "--prefill-chunk None of rank 0, 4 of rank 1"),
        ({}, {"pp": 2}, "--tp 2 of rank 0, 1 of rank 1; --pp 1 of rank 0, 2 of rank 1"),
    ],
)
def test_other_options(pool: Pool, hosts: list[str], more: dict[str, Any], layout: Any, words: str) -> None:
    errors = pool.run(starts, hosts, "same", [{}, more], [{"tp": 2}, layout], world=2)
    assert errors == [f"{words}: {RULE}"] * 2


def scores(groups: Groups, rank: int, hosts: list[str], load: list[str], limits: list[int]) -> str:
    """Job: the error of a rank that scores a text."""
    with on_host(hosts[rank]):
        Path("text.txt").write_text(f"1 2 3 4 5 6 {rank}\n" * 9)
        options = TaskOptions(task="ppl", valid_data=("text.txt",), limit=limits[rank])
        given = compose(flags={"load": load[rank], "device": "cpu", "tokenizer": "NullTokenizer", "vocab_size": 64})
        try:
            model, _ = check_model(given, type("Given", (), {"values": {}, "preset": None})(), 2)  # type: ignore[arg-type]
            run_here(CheckedEvaluation(model, options, "out.json"), rank, 2, Device.choose("cpu"), groups)
        except ValueError as error:
            return str(error)
    return ""


def test_an_evaluation_names_weights_and_data(pool: Pool, hosts: list[str]) -> None:
    errors = pool.run(scores, hosts, ["weights"] * 2, [4, 4], world=2)
    assert errors[0] == errors[1] and errors[0].startswith("the weights of "), errors
    assert errors[0].count("of rank 0") == 1 and errors[0].endswith(RULE), errors
    errors = pool.run(scores, hosts, ["same"] * 2, [4, 3], world=2)
    assert errors[0] == errors[1] and "--limit 4 of rank 0, 3 of rank 1; the content of text.txt " in errors[0], errors
    assert "{" not in errors[0], errors
