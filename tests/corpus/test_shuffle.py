"""Shuffling: every line once, an order that the seed alone decides, in any number of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega import cli
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.shuffle import Shuffle, shuffle


def lines(folder: Path, count: int = 500) -> list[Path]:
    found = [folder / f"{i}.jsonl" for i in range(2)]
    for i, path in enumerate(found):
        path.write_text("".join(f'{{"text": "{n}"}}\n' for n in range(i * count, (i + 1) * count)))
    return found


def test_every_line_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    inputs = lines(tmp_path)
    orders = {}
    for name, step in (
        ("one", Shuffle()),
        ("same", Shuffle(bucket_bytes=2000)),
        ("other", Shuffle(seed=5)),
    ):
        done = shuffle(inputs, step, RunOptions(output=tmp_path / f"{name}.out.jsonl", part_bytes=3000))
        assert done.counts.documents == done.counts.kept == 1000
        orders[name] = (tmp_path / f"{name}.out.jsonl").read_text()
    assert orders["one"] == orders["same"] != orders["other"]
    whole = "".join(path.read_text() for path in inputs)
    assert all(sorted(order.splitlines()) == sorted(whole.splitlines()) for order in orders.values())
    moved = sum(a == b for a, b in zip(orders["one"].splitlines(), whole.splitlines(), strict=True))
    assert moved < 10
    assert shuffle(inputs, Shuffle(), RunOptions(output=tmp_path / "one.out.jsonl", part_bytes=3000)).repeated


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path, 20)
    line = ["corpus", "shuffle", "--input", str(tmp_path / "*.jsonl"), "--output", str(tmp_path / "out"), "--seed", "3"]
    assert cli.main(line) == 0
    assert "40 documents, 40 kept" in capsys.readouterr().out
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [".corpus.json", "00000-000000.jsonl"]
    assert cli.main([*line, "--shard", "1/2"]) == 2
    assert "--shard" in capsys.readouterr().err
