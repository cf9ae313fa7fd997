"""URLs: every recorded decision of Megatron-LM's script, and where ours differs by choice."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mega import cli
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.run import process
from mega.core.corpus.urls import DOMAINS, EXTENSIONS, MEGATRON_EXTENSIONS, REASONS, Urls, url_test
from tests.support.shared import shared

pytest.importorskip("tldextract", reason="tldextract is not installed: pip install '.[corpus]' in a clone")


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shared("golden/openwebtext/openwebtext.json").read_text())["urls"]
    return found


def decisions(folder: Path, urls: list[str], step: Urls, **given: Any) -> list[str]:
    """What becomes of each URL, by way of files."""
    folder.mkdir()
    (folder / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
    options = RunOptions(output=folder / "out.txt", dropped=folder / "dropped", part_bytes=300, **given)
    found = process([folder / "urls.txt"], step, options).counts
    kept = (folder / "out.txt").read_text().splitlines()
    assert found.kept == len(kept) and found.documents == len(urls) == found.kept + sum(found.dropped.values())
    test, seen, outcomes = url_test(step.domains, step.extensions, any_case=step.any_case), set(), []
    for url in urls:
        outcomes.append(REASONS[test(url)] or ("duplicate" if url in seen else "kept"))
        seen.add(url)
    assert [url for url, outcome in zip(urls, outcomes, strict=True) if outcome == "kept"] == kept
    return outcomes


@pytest.mark.parametrize("workers", [1, 2])
def test_decisions_are_megatrons(tmp_path: Path, workers: int) -> None:
    rows = golden()["rows"]
    original = Urls(extensions=MEGATRON_EXTENSIONS, any_case=False)
    assert decisions(tmp_path / "a", [url for url, _ in rows], original, workers=workers) == [why for _, why in rows]


def test_ours_blocks_two_endings_more_and_domains_in_capitals(tmp_path: Path) -> None:
    rows = golden()["rows"]
    ours = decisions(tmp_path / "a", [url for url, _ in rows], Urls())
    other = {url: found for (url, why), found in zip(rows, ours, strict=True) if why != found}
    assert other == {"http://example.com/a.7z": "extension", "http://example.com/a.ai": "extension"}
    capitals = ["http://IMGUR.com/x"]
    assert decisions(tmp_path / "b", capitals, Urls()) == ["domain"]
    assert decisions(tmp_path / "c", capitals, Urls(any_case=False)) == ["kept"]


def test_the_sets_are_megatrons() -> None:
    assert sorted(DOMAINS) == golden()["domains"]
    assert sorted(MEGATRON_EXTENSIONS) == sorted(golden()["extensions"])
    assert set(EXTENSIONS) - set(MEGATRON_EXTENSIONS) == {".7z", ".ai"}


def test_real_lists_of_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = shared("webtext_urls/RS_v2_2005-12.urk.json-00.gz").parent
    (tmp_path / "mine").write_text("blogspot\n")
    line = ["corpus", "urls", "--input", f"{links}/*.gz", "--json-key", "u", "--show-dropped", "2"]
    assert cli.main([*line, "--output", str(tmp_path / "a.jsonl"), "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "8,227 documents" in printed and "dropped: domain" in printed and "domain, 2 of " in printed
    assert cli.main([*line, "--output", str(tmp_path / "b.jsonl"), "--domains", str(tmp_path / "mine")]) == 0
    assert "blogspot" in (tmp_path / "a.jsonl").read_text() and "blogspot.com" not in (tmp_path / "b.jsonl").read_text()
    assert cli.main([*line, "--output", str(tmp_path / "c.jsonl"), "--domains", str(tmp_path / "none")]) == 2
    assert "--domains" in capsys.readouterr().err


def test_shards_find_each_others_duplicates(tmp_path: Path) -> None:
    urls = [f"http://example{i % 40}.com/" for i in range(100)]
    (tmp_path / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
    for round_ in range(2):
        for index in range(2):
            options = RunOptions(output=tmp_path / "out", part_bytes=300, shard=(index, 2))
            done = process([tmp_path / "urls.txt"], Urls(), options)
            assert done.surveyed == (round_ == 0 and index == 0)
    kept = "".join(path.read_text() for path in sorted((tmp_path / "out").glob("*.txt")))
    assert kept.splitlines() == urls[:40] and done.counts.dropped == {"duplicate": 60}
    assert [path.name for path in (tmp_path / "out").glob(".*")] == [".corpus.json"]
