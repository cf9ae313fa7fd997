"""Near duplicates: Megatron-LM's recorded fingerprints, pairs and groups; planted pairs; earlier runs."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega import cli
from mega.core.corpus import buckets
from mega.core.corpus.documents import CorpusDocument
from mega.core.corpus.folder import RunOptions
from mega.core.corpus.minhash import CharShingles, WordShingles, band_keys, chance, overlap
from mega.core.corpus.near_duplicates import NearDuplicates
from mega.core.corpus.run import process
from tests.support.shared import shared


def words_or_skip() -> WordShingles:
    pytest.importorskip("rensa", reason="rensa is not installed: pip install '.[corpus]' in a clone")
    return WordShingles()


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shared("golden/openwebtext/openwebtext.json").read_text())["near_duplicates"]
    return found


def write(path: Path, texts: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"url": url, "text": text}) + "\n" for url, text in texts.items()))
    return path


def kept(folder: Path, inputs: list[Path], step: NearDuplicates, **given: Any) -> list[str]:
    options = RunOptions(output=folder / "out.jsonl", part_bytes=4000, **given)
    found = process(inputs, step, options).counts
    urls = [json.loads(line)["url"] for line in (folder / "out.jsonl").read_text().splitlines()]
    assert found.documents == found.kept + sum(found.dropped.values()) and found.kept == len(urls)
    return urls


def test_fingerprints_and_overlap_are_megatrons() -> None:
    texts, char = golden()["texts"], CharShingles()
    found = char.signatures(list(texts.values()))
    assert found.tolist() == list(golden()["fingerprints"].values())
    for of, rows in golden()["jaccard"].items():
        for first, second, similarity in rows:
            shingles = char.shingles(texts[first]), char.shingles(texts[second])
            assert overlap(*shingles, of=of) == pytest.approx(similarity, abs=1e-12)
    keys, names = band_keys(found, 10), list(texts)
    for band, expected in enumerate(golden()["buckets_of_bands"]):
        shared_keys = [key for key in np.unique(keys[:, band]) if (keys[:, band] == key).sum() > 1]
        met = [[names[i] for i in np.flatnonzero(keys[:, band] == key)] for key in shared_keys]
        assert sorted(sorted(bucket) for bucket in met) == sorted(sorted(bucket) for bucket in expected)


@pytest.mark.parametrize("threshold", ["0.5", "0.7", "0.9"])
def test_pairs_and_groups_are_megatrons(tmp_path: Path, threshold: str) -> None:
    texts = golden()["texts"]
    source = write(tmp_path / "in.jsonl", texts)
    line = [
        "corpus",
        "near-duplicates",
        "--input",
        str(source),
        "--output",
        str(tmp_path / "out.jsonl"),
        "--as-megatron",
    ]
    files = ["--groups", str(tmp_path / "groups"), "--pairs", str(tmp_path / "pairs")]
    assert cli.main([*line, *files, "--threshold", threshold]) == 0
    rows = [json.loads(line) for line in (tmp_path / "groups").read_text().splitlines()]
    groups = [next(iter(row.values())) for row in rows]
    assert sorted(sorted(group) for group in groups) == sorted(golden()["groups_at_threshold"][threshold])
    assert [next(iter(row)) for row in rows] == [str(i) for i in range(len(rows))]
    pairs = {
        (first, second): similarity
        for row in map(json.loads, (tmp_path / "pairs").read_text().splitlines())
        for first, others in row.items()
        for other in others
        for second, similarity in other.items()
    }
    # Megatron-LM compares a bucket's members with one of them; here all are compared.
    for first, second, similarity in golden()["pairs_over_half_exact_mode"]:
        assert pairs.pop((first, second)) == pytest.approx(similarity, abs=1e-9)
    assert list(pairs) == [("u0", "u2")]
    left = [json.loads(line)["url"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert left == [url for url in texts if all(url not in group[1:] for group in groups)]


def web(documents: int, seed: int = 0) -> tuple[dict[str, str], list[tuple[str, str, float]]]:
    """Texts of random words, a third of them copies with some words exchanged; the pairs with their similarity."""
    draw, shingling = random.Random(seed), WordShingles()
    words = [f"w{i:x}" for i in range(5000)]
    texts: dict[str, str] = {}
    planted: list[tuple[str, str]] = []
    for number in range(documents):
        if number % 3 == 2:
            origin = f"u{number - 2}"
            text = texts[origin].split()
            for _ in range(draw.choice([0, 1, 2, 3, 4, 8, 20])):
                text[draw.randrange(len(text))] = draw.choice(words)
            planted.append((origin, f"u{number}"))
            texts[f"u{number}"] = " ".join(text)
        else:
            texts[f"u{number}"] = " ".join(draw.choices(words, k=draw.randint(60, 300)))
    sets = {url: shingling.shingles(text) for url, text in texts.items()}
    return texts, [(one, other, overlap(sets[one], sets[other])) for one, other in planted]


def test_planted_pairs_are_found_and_nothing_else(tmp_path: Path) -> None:
    words_or_skip()
    texts, planted = web(1500)
    source = write(tmp_path / "in.jsonl", texts)
    left = set(kept(tmp_path, [source], NearDuplicates(groups=str(tmp_path / "groups"))))
    high = [pair for pair in planted if pair[2] >= 0.8]
    assert len(high) > 200
    assert sum(other not in left for _, other, _ in high) >= 0.99 * len(high)
    dropped = set(texts) - left
    assert dropped <= {other for _, other, _ in high}  # the comparison is exact, so precision is 1


def test_the_bands_meet_their_curve() -> None:
    """The original's settings find 68 % of pairs at a similarity of 0.8, the default 99.8 %."""
    shingling = words_or_skip()
    draw = np.random.default_rng(0)
    met = {(10, 10): 0, (20, 6): 0}
    trials = 600
    for (bands, rows), _ in met.items():
        own = WordShingles(bands * rows)
        texts = []
        for _ in range(trials):
            base = draw.integers(0, 1 << 40, 320).tolist()
            cut = 32 + 4  # of 316 shingles 284 are common to both, and 32 in each alone: 0.816
            texts += [" ".join(map(str, base)), " ".join(map(str, [*base[:-cut], *draw.integers(0, 1 << 40, cut)]))]
        similarity = overlap(shingling.shingles(texts[0]), shingling.shingles(texts[1]))
        keys = band_keys(own.signatures(texts), bands)
        met[bands, rows] = int((keys[::2] == keys[1::2]).any(1).sum())
        expected = chance(similarity, bands, rows)
        deviation = (expected * (1 - expected) / trials) ** 0.5
        assert abs(met[bands, rows] / trials - expected) <= 4 * deviation + 1 / trials, (bands, rows, met, expected)
    assert round(chance(0.8, 10, 10), 2) == 0.68 and chance(0.8, 20, 6) > 0.997


def test_the_result_does_not_depend_on_how_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words_or_skip()
    texts, _ = web(400)
    names = list(texts)
    inputs = [write(tmp_path / f"{i}.jsonl", {url: texts[url] for url in names[i::2]}) for i in range(2)]
    for place in ("a", "b", "c"):
        (tmp_path / place).mkdir()
    whole = kept(tmp_path / "a", inputs, NearDuplicates())
    assert kept(tmp_path / "b", inputs, NearDuplicates(), workers=2) == whole
    monkeypatch.setattr(buckets, "_ROWS_TOGETHER", 500)  # many files
    assert kept(tmp_path / "c", inputs, NearDuplicates()) == whole
    for _ in range(3):
        for index in range(2):
            done = process(
                inputs, NearDuplicates(), RunOptions(output=tmp_path / "s", part_bytes=4000, shard=(index, 2))
            )
    assert done.complete
    lines = [line for path in sorted((tmp_path / "s").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [json.loads(line)["url"] for line in lines] == whole


def test_duplicates_of_earlier_runs_are_dropped(tmp_path: Path) -> None:
    words_or_skip()
    texts, _ = web(300)
    names = list(texts)
    half = [
        write(tmp_path / f"{i}.jsonl", {url: texts[url] for url in names[i * 150 : (i + 1) * 150]}) for i in range(2)
    ]
    both = kept(tmp_path, half, NearDuplicates())
    (tmp_path / "again").mkdir()
    more = write(tmp_path / "more.jsonl", {f"copy of {url}": texts[url] for url in names[:40]})
    left = kept(tmp_path / "again", [more], NearDuplicates(), against=(str(tmp_path / "out.jsonl"),))
    assert len(both) < 250 and left == []
    with pytest.raises(ValueError, match="--against: merge looks at one document at a time"):
        from mega.core.corpus.merge import Merge

        process([more], Merge(), RunOptions(output=tmp_path / "m.jsonl", against=(str(half[0]),)))


def test_large_buckets_and_empty_texts(tmp_path: Path) -> None:
    words_or_skip()
    texts = {f"u{i}": "the same words in every one of these documents, which are many" for i in range(500)}
    texts |= {f"e{i}": "... --- !!" for i in range(5)} | {"short": "the same", "short2": "The  same."}
    left = kept(tmp_path, [write(tmp_path / "in.jsonl", texts)], NearDuplicates(threshold=1.0))
    assert left == ["u0", "e0", "e1", "e2", "e3", "e4", "short"]


def test_scripts_without_blanks_have_words() -> None:
    shingling = WordShingles()
    assert len(shingling.shingles("日本語のテキストです")) == len("日本語のテキストです") - 4
    assert len(shingling.shingles("one two three four five six")) == 2
    assert len(shingling.shingles("one two")) == 1 and len(shingling.shingles(" ,")) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bands", "7"], "--permutations 120: must be a multiple of --bands 7"),
        (["--threshold", "0"], "--threshold 0.0: must be above 0 and at most 1"),
        (["--groups", "/nowhere/groups"], "--groups /nowhere/groups: directory"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    source = write(tmp_path / "in.jsonl", {"a": "b"})
    line = ["corpus", "near-duplicates", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


def test_the_place_of_a_document_with_an_id_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words_or_skip()
    text = "a text that is long enough to have some shingles of five words"
    source = write(tmp_path / "a.jsonl", {"one": text, "two": text})

    def where(document: CorpusDocument) -> str:
        raise AssertionError("reads the file up to the document")

    monkeypatch.setattr(CorpusDocument, "where", property(where))
    assert kept(tmp_path, [source], NearDuplicates(groups=str(tmp_path / "groups"))) == ["one"]
    assert json.loads((tmp_path / "groups").read_text()) == {"0": ["one", "two"]}
