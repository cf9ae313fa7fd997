"""Any number of workers, shards, kills and wrappings give the same bytes; counts add up; mistakes are one line."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mega.core.corpus.folder import RECORD, RunOptions
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.part_files import UNREADABLE
from mega.core.corpus.run import StepOutcome, process
from tests.support.toy_step import ToyStep

PART = 4000


def corpus(folder: Path, documents: int = 450) -> list[Path]:
    """Three files: plain, packed, and one without a last line end; blank lines among them."""
    texts = [
        ("bad one", "left cut right", "change", "kept as it is", "ünder 😀")[i % 5] + f" {i}" for i in range(documents)
    ]
    lines = [json.dumps({"id": 2**70 + i, "text": text}, ensure_ascii=False) for i, text in enumerate(texts)]
    third = documents // 3
    plain, packed, open_end = (folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"))
    plain.write_text("\n\n".join(lines[:third]) + "\n\n")
    packed.write_bytes(gzip.compress(("\n".join(lines[third : 2 * third]) + "\n").encode(), mtime=0))
    open_end.write_text("\r\n".join(lines[2 * third :]))
    return [plain, packed, open_end]


def options(output: Path, **given: object) -> RunOptions:
    return RunOptions(output=output, part_bytes=PART, **given)  # type: ignore[arg-type]


def run(inputs: list[Path], output: Path, step: ToyStep | None = None, **given: object) -> StepOutcome:
    return process(inputs, step or ToyStep(), options(output, **given))


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name[0] != "." or path.name == RECORD
    }


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bytes_do_not_depend_on_workers_or_shards(tmp_path: Path) -> None:
    inputs = corpus(tmp_path)
    whole = run(inputs, tmp_path / "one")
    assert len(content(tmp_path / "one")) >= 6
    assert run(inputs, tmp_path / "two", workers=2).counts == whole.counts
    for index in range(3):
        done = run(inputs, tmp_path / "shards", shard=(index, 3))
        assert done.complete == (index == 2)
    assert done.counts == whole.counts
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "shards")
    assert run(inputs, tmp_path / "shards", shard=(1, 3)).repeated


def test_counts_add_up_and_lines_are_kept_as_they_are(tmp_path: Path) -> None:
    inputs = corpus(tmp_path)
    found = run(inputs, tmp_path / "out.jsonl", dropped=tmp_path / "dropped").counts
    assert (found.documents, found.kept, found.written) == (450, 360, 450)
    assert found.dropped == {"bad word": 90} and found.other == {"cut": 90}
    assert found.measures["kind"] == {"changed": 90}
    assert found.measures["characters"] == {"8": 2, "16": 200, "32": 158}
    written = lines(tmp_path / "out.jsonl")
    assert len(written) == 450 and found.bytes == (tmp_path / "out.jsonl").stat().st_size
    assert written[0] == {"id": 2**70 + 1, "text": "left "} and written[1]["text"] == " right 1"
    assert '"text": "ünder 😀 4"' in (tmp_path / "out.jsonl").read_text()  # a document that is kept stays as it is
    dropped = [line for path in sorted((tmp_path / "dropped").iterdir()) for line in lines(path)]
    assert len(dropped) == 90 and dropped[0] == {"id": 2**70, "text": "bad one 0", "dropped": "bad word"}
    assert len(found.samples["bad word"]) == 5 and "bad one" in found.samples["bad word"][0].text


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_packed_output_is_one_stream_and_can_be_an_input(tmp_path: Path, packing: str) -> None:
    if packing == "zst":
        pytest.importorskip("zstandard")
    inputs = corpus(tmp_path)
    run(inputs, tmp_path / "out.jsonl")
    run(inputs, tmp_path / "packed", packing=packing)
    run(inputs, tmp_path / f"joined.jsonl.{packing}", workers=2)
    keep = ToyStep(key="id_")  # every line lacks it, and is dropped as unreadable
    for place in (tmp_path / "packed", tmp_path / f"joined.jsonl.{packing}"):
        again = process([place], ToyStep(), options(tmp_path / f"{place.name}.out.jsonl"))
        assert again.counts.documents == 450
        assert (tmp_path / f"{place.name}.out.jsonl").stat().st_size > 0
        with pytest.raises(ValueError, match='no key "id_"; there are'):
            process([place], keep, options(tmp_path / f"{place.name}.bad"))


def test_parquet_keeps_all_columns(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    rows = [{"id": i, "text": f"kept {i}", "more": [1, None]} for i in range(50)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=20)
    assert run([tmp_path / "a.parquet"], tmp_path / "out", workers=2).counts.written == 50
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == [
        f"00000-00000{i}.jsonl" for i in range(3)
    ]
    assert lines(tmp_path / "out" / "00000-000001.jsonl")[0] == rows[20]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_step_resumes_to_the_same_bytes(tmp_path: Path, workers: int) -> None:
    inputs = corpus(tmp_path)
    inputs[0].write_text(inputs[0].read_text() + '{"text": "kill"}\n')
    run(inputs, tmp_path / "whole")
    (tmp_path / "kill").touch()
    step = ToyStep(kill_file=str(tmp_path / "kill"))
    script = f"""
from pathlib import Path
from tests.corpus.test_run import run
from tests.support.toy_step import ToyStep
run({list(map(str, inputs))!r}, Path({str(tmp_path / "out")!r}), {step!r}, workers={workers})
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == (-signal.SIGKILL if workers == 1 else 1), ended.stderr
    assert not (tmp_path / "out" / RECORD).exists()
    done = [path.name[1 : -len(".json")] for path in (tmp_path / "out").glob(".*-*.json")]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.jsonl") if path.stem in done}
    assert before
    assert run(inputs, tmp_path / "out", step).counts.documents == 451
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())  # what was done is not done twice
    left, whole = content(tmp_path / "out"), content(tmp_path / "whole")
    del left[RECORD], whole[RECORD]  # another step has another identity
    assert left == whole and not list((tmp_path / "out").glob("*.tmp"))


def test_what_a_call_left_that_was_killed_at_its_end_goes(tmp_path: Path) -> None:
    inputs = corpus(tmp_path, 60)
    run(inputs, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    left = (".corpus.json.0123456789ab.tmp", ".00000-000000.json", ".shard-1-of-1.json", ".work.json")
    for name in (*left, ".lock-1-of-1", ".lock-finish"):
        (tmp_path / "out" / name).write_text("{}")
    assert run(inputs, tmp_path / "out").repeated
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_other_work_is_refused_and_replaced_on_request(tmp_path: Path) -> None:
    inputs = corpus(tmp_path, 60)
    run(inputs, tmp_path / "out")
    assert run(inputs, tmp_path / "out").repeated
    with pytest.raises(ValueError, match="holds the result of other inputs or settings"):
        run(inputs[:2], tmp_path / "out")
    assert run(inputs[:2], tmp_path / "out", overwrite=True).counts.documents == 40
    assert not list((tmp_path / "out").glob("00002*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="is not empty, and holds no corpus"):
            run(inputs, tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("lines_before", [0, 400])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a', "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"body": "a"}', "no key \"text\"; there are 'body'; name it by --json-key"),
        ('{"text": 3}', '"text" is not a string, but 3'),
    ],
)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, lines_before: int, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "kept"}\n' * lines_before + line + "\n" + '{"text": "bad"}\n')
    with pytest.raises(ValueError) as caught:
        run([path], tmp_path / "out", workers=2)
    assert str(caught.value).startswith(f"{path}:{lines_before + 1}: ") and words in str(caught.value)
    found = run([path], tmp_path / "skipped", on_error="skip").counts
    assert found.dropped == {UNREADABLE: 1, "bad word": 1}
    assert found.documents == lines_before + 2 == found.kept + sum(found.dropped.values())
    assert words in found.samples[UNREADABLE][0].text


def test_a_packed_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    packed = corpus(tmp_path)[1]
    packed.write_bytes(packed.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: cannot be read after byte"):
        run([packed], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_output_is_never_an_input(tmp_path: Path) -> None:
    inputs = corpus(tmp_path, 30)
    before = inputs[0].read_bytes()
    for output in (inputs[0], tmp_path):
        with pytest.raises(ValueError, match=r"--output .*: would replace the input|is not empty"):
            run(inputs, output)
    assert inputs[0].read_bytes() == before


def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    inputs = corpus(tmp_path)
    run(inputs, tmp_path / "whole.jsonl")
    script = f"""
import resource
from pathlib import Path
from mega.cli import _report
from tests.corpus.test_run import run
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    run({list(map(str, inputs))!r}, Path({str(tmp_path / "out.jsonl")!r}))
except OSError as error:
    raise SystemExit(_report(error))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "File too large" in ended.stderr, ended.stderr
    assert str(tmp_path) in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()
    run(inputs, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_counts_survive_json() -> None:
    counts = StepCounts(documents=3, kept=1, written=2)
    counts.dropped["short"] += 2
    counts.sample("short", "a:1", "00000-000000", 0, "text", 3)
    counts.measure({"language": "en"})
    assert StepCounts.from_json(json.loads(json.dumps(counts.as_json()))) == counts


def test_half_written_files_of_a_killed_call_go(tmp_path: Path) -> None:
    inputs, out, dropped = corpus(tmp_path), tmp_path / "out", tmp_path / "dropped"
    for name in ("00000-000000.jsonl.0123456789ab.tmp", ".work.json.0123456789ab.tmp"):
        for folder in (out, dropped):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("half")
    run(inputs, out, overwrite=True, dropped=dropped)
    assert not [*out.glob("*.tmp"), *out.glob(".*.tmp"), *dropped.glob("0*.tmp")]
    for folder in (out, dropped):
        (folder / "00000-000001.jsonl.0123456789ab.tmp").write_text("half")
    (out / ".corpus.json").unlink()
    run(inputs, out, overwrite=True, dropped=dropped)
    assert not [*out.glob("*.tmp"), *dropped.glob("0*.tmp")]


def test_dropped_documents_of_other_work_are_not_mixed(tmp_path: Path) -> None:
    inputs, dropped = corpus(tmp_path), tmp_path / "dropped"
    run(inputs, tmp_path / "one", dropped=dropped)
    with pytest.raises(ValueError, match=r"--dropped .*dropped: holds documents of other work"):
        run(inputs[:1], tmp_path / "two", dropped=dropped)
    counts = run(inputs[:1], tmp_path / "one", dropped=dropped, overwrite=True).counts
    assert sum(len(lines(path)) for path in dropped.iterdir()) == counts.dropped["bad word"] == 30
