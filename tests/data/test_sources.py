"""The same documents in every wrapping give the same bytes: packed, in rows, from stdin, in shards, after kills."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.data import sources
from mega.core.data.indexed import IndexedDataset
from mega.core.data.preprocessing import preprocess as module
from mega.core.data.preprocessing.merge import merge
from mega.core.data.preprocessing.preprocess import Sentences, preprocess
from tests.support.shared import REPOSITORY

NULL = {"tokenizer": "NullTokenizer", "vocab_size": 99}
TEXTS = [f"{i} {i % 7}" * (i % 3) for i in range(3000)]


def jsonl(texts: list[str] = TEXTS) -> bytes:
    return b"".join(json.dumps({"text": text, "other": 1}).encode() + b"\n" for text in texts)


def made(prefix: str) -> list[bytes]:
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def run(tmp_path: Path, *inputs: Any, name: str = "out", **options: Any) -> list[bytes]:
    report = preprocess(inputs, f"{tmp_path}/{name}", NULL, append_eod=True, overwrite=True, **options)
    return made(report.outputs[0])


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 5000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    return path


def parquet(path: Path, texts: list[str], group: int) -> Path:
    arrow = pytest.importorskip("pyarrow")
    columns = arrow.table({"text": texts, "n": list(range(len(texts)))})
    pytest.importorskip("pyarrow.parquet").write_table(columns, path, row_group_size=group)
    return path


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstd,
}


@pytest.mark.parametrize("end", PACKED)
def test_packed_lines(tmp_path: Path, plain: Path, end: str) -> None:
    packed = tmp_path / f"b.jsonl.{end}"
    packed.write_bytes(PACKED[end](plain.read_bytes()))
    assert run(tmp_path, packed, name="b") == run(tmp_path, plain)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"b\.jsonl\.{end}: cannot be read"):
        run(tmp_path, packed, name="c")
    assert not list(tmp_path.glob("c*"))


def test_endings_in_capitals_and_a_long_window(tmp_path: Path, plain: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    expected = run(tmp_path, plain)
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(plain.read_bytes()))
    assert run(tmp_path, tmp_path / "B.JSONL.GZ", name="b") == expected
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=window).compressobj()
    (tmp_path / "c.zst").write_bytes(packer.compress(plain.read_bytes()) + packer.flush())
    assert run(tmp_path, tmp_path / "c.zst", name="c") == expected


def test_rows_that_are_no_text_are_refused(tmp_path: Path) -> None:
    import decimal

    rows: list[Any] = [b"1", decimal.Decimal(1)]
    for i, row in enumerate(rows):
        source = parquet(tmp_path / f"{i}.parquet", [row], 1)
        with pytest.raises(ValueError, match=rf'{i}\.parquet:1: "text" is neither a string nor a list of strings'):
            run(tmp_path, source)


def test_rows(tmp_path: Path, plain: Path) -> None:
    arrow = pytest.importorskip("pyarrow")

    table = arrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    parquet(tmp_path / "a.parquet", TEXTS, 700)
    folder = tmp_path / "saved"
    folder.mkdir()
    for i, part in enumerate((table.slice(0, 1000), table.slice(1000))):
        with arrow.ipc.new_stream(folder / f"data-{i}.arrow", table.schema) as writer:
            writer.write_table(part, max_chunksize=300)
    state = {"_data_files": [{"filename": f"data-{i}.arrow"} for i in range(2)], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    expected = run(tmp_path, plain)
    assert run(tmp_path, tmp_path / "a.parquet", name="b") == expected
    assert run(tmp_path, folder, name="c") == expected
    for path in (tmp_path / "a.parquet", folder):
        with pytest.raises(ValueError, match='no column "body"; there are text, n'):
            run(tmp_path, path, json_keys=["body"])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read"):
        run(tmp_path, tmp_path / "a.parquet")


def test_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits; give one of .*/train, .*/test"):
        run(tmp_path, tmp_path)


def test_text_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 2\r\n\n3\n4")
    (tmp_path / "b.jsonl").write_bytes(jsonl(["1 2", "3", "4"]))
    assert run(tmp_path, tmp_path / "a.txt", text_lines=True) == run(tmp_path, tmp_path / "b.jsonl", name="b")
    (tmp_path / "a.txt").write_bytes(b"1\n\xff\n2")
    with pytest.raises(ValueError, match=r"a\.txt:2: "):
        run(tmp_path, tmp_path / "a.txt", text_lines=True)


def test_globs_folders_and_standard_input(tmp_path: Path) -> None:
    """A folder is read in the order of names, under any file names: WikiExtractor's AA/wiki_00 among them."""
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(jsonl(TEXTS[:300]))
    for i in range(3):
        path = tmp_path / "wiki" / "AA" / f"wiki_0{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jsonl(TEXTS[100 * i : 100 * i + 100]))
    expected = run(tmp_path, whole)
    assert run(tmp_path, tmp_path / "wiki", name="b") == expected
    assert run(tmp_path, f"{tmp_path}/wiki/*/wiki_*", name="c") == expected
    subprocess.run(
        [sys.executable, "-m", "mega", "preprocess", "--input", "-", "--output-prefix", f"{tmp_path}/d",
         "--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--append-eod"],
        input=whole.read_bytes(), check=True, cwd=REPOSITORY, capture_output=True, timeout=60,
    )  # fmt: skip
    assert made(f"{tmp_path}/d_text_document") == expected
    with pytest.raises(ValueError, match=r"--input .*\*\.no: matches no file"):
        run(tmp_path, f"{tmp_path}/*.no")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_shards_merge_to_the_whole(tmp_path: Path, plain: Path, count: int) -> None:
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl(TEXTS[:500])))
    rows = parquet(tmp_path / "c.parquet", TEXTS[:400], 30)
    inputs = [plain, packed, rows, plain]
    expected = run(tmp_path, *inputs)
    prefixes = []
    for i in range(count):
        report = preprocess(inputs, f"{tmp_path}/s{i}", NULL, append_eod=True, shard=(i, count))
        prefixes += report.outputs
    merge(prefixes, f"{tmp_path}/merged")
    assert made(f"{tmp_path}/merged") == expected
    note, whole = (json.loads(Path(f"{tmp_path}/{name}.json").read_text()) for name in ("merged", "out_text_document"))
    assert note["tokenizer"]["kind"] == "NullTokenizer"
    for of_its_own in ("work", "skipped"):
        note.pop(of_its_own, None)
        whole.pop(of_its_own)
    assert note == whole


def test_merge_refuses_other_widths_and_damage(tmp_path: Path, plain: Path) -> None:
    run(tmp_path, plain)
    wide = {"tokenizer": "NullTokenizer", "vocab_size": 70000}
    report = preprocess([plain], f"{tmp_path}/wide", wide)
    first = f"{tmp_path}/out_text_document"
    with pytest.raises(ValueError, match="wide_text_document: its ids are int32"):
        merge([first, report.outputs[0]], f"{tmp_path}/m", mixed=True)
    with pytest.raises(ValueError, match="no such file"):
        merge([first, f"{tmp_path}/none"], f"{tmp_path}/m")
    before = Path(f"{first}.bin").read_bytes()
    with pytest.raises(ValueError, match=r"is the input .*, which would be lost"):
        merge([first, first], f"{tmp_path}/../{tmp_path.name}/out_text_document")
    assert Path(f"{first}.bin").read_bytes() == before
    assert not list(tmp_path.glob("m*"))


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_resume_after_any_block_gives_the_same_bytes(tmp_path: Path, plain: Path, kind: str) -> None:
    source = plain
    if kind == "gz":
        source = tmp_path / "a.jsonl.gz"
        source.write_bytes(gzip.compress(plain.read_bytes()))
    elif kind == "parquet":
        source = parquet(tmp_path / "a.parquet", TEXTS, 500)
    inputs = [source, plain]
    expected = run(tmp_path, *inputs)
    for stops in ((3,), (5, 1, 9), (0, 12)):
        for stop in stops:
            seen = iter(range(stop, -1, -1))

            def halt(report: object, read: int, seen: Any = seen) -> None:
                if next(seen, None) is None:
                    raise Stop

            with pytest.raises(Stop):
                run(tmp_path, *inputs, name="r", resume=True, save_every=0.0, progress=halt)
            assert not (tmp_path / "r_text_document.idx").exists()
        assert run(tmp_path, *inputs, name="r", resume=True) == expected
        assert not list(tmp_path.glob("r*tmp")) and not list(tmp_path.glob("r.resume.json"))
        for path in tmp_path.glob("r_text*"):
            path.unlink()


def test_resume_refuses_other_work(tmp_path: Path, plain: Path) -> None:
    def halt(report: object, read: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(tmp_path, plain, resume=True, save_every=0.0, progress=halt)
    with pytest.raises(ValueError, match="belongs to work with other inputs"):
        run(tmp_path, plain, plain, resume=True)
    with pytest.raises(ValueError, match="standard input cannot be combined with"):
        run(tmp_path, "-", resume=True)
    (path,) = tmp_path.glob("*.resume.json")
    note = json.loads(path.read_bytes())
    for name, value in (
        ("writers", [{}]),
        ("line", "1"),
        ("report", {"documents": 1.5}),
        ("begin", {"piece": "x"}),
        ("finished", 0),
    ):
        path.write_text(json.dumps({**note, name: value}))
        with pytest.raises(ValueError, match=r"resume\.json: is not a note of how far the work has come"):
            run(tmp_path, plain, resume=True)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"resume\.json: is not JSON that can be read: nested too deeply; remove it"):
        run(tmp_path, plain, resume=True)


@pytest.mark.parametrize("published", [1, 2, 3])
def test_resume_after_a_kill_while_publishing(
    tmp_path: Path, plain: Path, published: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the renaming of the .bin, of the .idx, and before the notes go away."""
    expected = run(tmp_path, plain)
    script = f"""
import os, sys
from mega.core.data import sources
from mega.core.data.preprocessing import preprocess as module
sources.BLOCK_BYTES = 5000
replace, drop, seen = os.replace, module._Notes.drop, []
def counted(a, b):
    replace(a, b)
    if "document" in str(b):
        seen.append(b)
        if len(seen) == {published} and {published} < 3:
            os._exit(9)
os.replace = counted
module._Notes.drop = lambda self: os._exit(9)
module.preprocess([{str(plain)!r}], {str(tmp_path / "r")!r}, {NULL!r}, append_eod=True, resume=True, save_every=0.0)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, timeout=60).returncode == 9
    assert run(tmp_path, plain, name="r", resume=True) == expected
    assert sorted(path.name for path in tmp_path.glob("r*")) == [
        "r_text_document.bin", "r_text_document.idx", "r_text_document.json"
    ]  # fmt: skip


def test_kill_and_resume(tmp_path: Path) -> None:
    """One real kill -9 at a random moment; the battery does many."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(jsonl(TEXTS) * 30)
    expected = run(tmp_path, source)
    script = (
        "import sys; from mega.core.data.preprocessing.preprocess import preprocess;"
        "from mega.core.data import sources;"
        f"sources.BLOCK_BYTES = 20000; preprocess([sys.argv[1]], sys.argv[2], {NULL!r}, append_eod=True,"
        "resume=True, save_every=0.01, workers=2)"
    )
    command = [sys.executable, "-c", script, str(source), f"{tmp_path}/r"]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    while process.poll() is None and not (tmp_path / "r.resume.json").exists():
        time.sleep(0.01)
    time.sleep(random.random() * 0.3)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    tokenizer = ["--tokenizer", "NullTokenizer", "--vocab-size", "99"]
    outcome = main(
        ["preprocess", f"--input={source}", f"--output-prefix={tmp_path}/r", *tokenizer, "--append-eod", "--resume"]
    )
    assert outcome == 0 and made(f"{tmp_path}/r_text_document") == expected


def test_full_disk_names_the_output(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *parts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.IndexedWriter, "_publish", full)
    with pytest.raises(OSError, match=r"out_text_document: cannot be written \(No space left on device\)"):
        run(tmp_path, plain)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_sentences(tmp_path: Path) -> None:
    pytest.importorskip("sentencex")
    (tmp_path / "a.jsonl").write_bytes(jsonl(["Mr. Smith went home. He slept.", "One", ""]))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    tokenizer = {"tokenizer": "BertWordPieceLowerCase", "vocab_file": str(tmp_path / "vocab.txt")}
    report = preprocess([tmp_path / "a.jsonl"], f"{tmp_path}/out", tokenizer, sentences=Sentences(splitter="sentencex"))
    assert report.outputs == [f"{tmp_path}/out_text_sentence"]
    line = f"preprocess --input {tmp_path}/a.jsonl --output-prefix {tmp_path}/line --split-sentences --lang en"
    flags = f"--sentence-splitter sentencex --tokenizer BertWordPieceLowerCase --vocab-file {tmp_path}/vocab.txt"
    assert main([*line.split(), *flags.split()]) == 0
    assert (tmp_path / "line_text_sentence.bin").read_bytes() == (tmp_path / "out_text_sentence.bin").read_bytes()
    data = IndexedDataset(report.outputs[0])
    assert data.lengths.tolist() == [6, 3, 1] and data.document_index.tolist() == [0, 2, 3, 3]


def test_punkt_needs_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    from mega.core.text.sentences import splitter
    from tests.support.shared import shared

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"--lang english: tokenizers/punkt_tab/english is not where"):
        splitter("punkt")
    monkeypatch.setattr(nltk.data, "path", [str(shared("nltk_data"))])
    text = "Mr. Smith went home!\n\nWas it 3.5 miles? Yes."
    assert splitter("punkt")(text) == ["Mr. Smith went home!", "Was it 3.5 miles?", "Yes."]
    assert splitter("punkt", keep_newlines=True)(text) == ["Mr. Smith went home!\n\n", "Was it 3.5 miles? ", "Yes."]


def test_punkt_cuts_alike_with_any_nltk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curly quotes and guillemets close no sentence, as in the NLTK of Megatron-LM's files; straight ones do."""
    nltk = pytest.importorskip("nltk")
    from mega.core.text.sentences import splitter

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    (tmp_path / "tokenizers/punkt_tab/english").mkdir(parents=True)
    for name, text in (("abbrev_types.txt", "mr"), ("collocations.tab", ""), ("sent_starters.txt", "the")):
        (tmp_path / "tokenizers/punkt_tab/english" / name).write_text(text)
    (tmp_path / "tokenizers/punkt_tab/english/ortho_context.tab").write_text("he\t46\nshe\t46")
    cut = splitter("punkt")
    text = 'She said "Stop." He saw (with Mr. Hill there.) The end.'
    assert cut(text) == ['She said "Stop."', "He saw (with Mr. Hill there.)", "The end."]
    assert cut("She said \u201cStop.\u201d He went.") == ["She said \u201cStop.\u201d He went."]
    assert cut("\u00abStop.\u00bb He went. \u2018No.\u2019 She ran.") == [
        "\u00abStop.\u00bb He went.",
        "\u2018No.\u2019 She ran.",
    ]
    assert cut("Go! \u201d He ran? \u00bb Why... (So.)") == ["Go!", "\u201d He ran?", "\u00bb Why...", "(So.)"]
    kept = splitter("punkt", keep_newlines=True)
    assert kept("She said.\n\nHe went. Mr. Hill ran.\n") == ["She said.\n\n", "He went. ", "Mr. Hill ran."]
    assert kept("Why?.? The end.") == ["Why?.? ", "The end."]
    assert len(kept("a" * 300_000)) == 1, "which takes no quadratic time"


def test_shards_on_the_command_line(tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"preprocess --input {plain} --tokenizer-type NullTokenizer --vocab-size 99 --output-prefix {tmp_path}/o"
    assert main([*base.split(), "--shard", "2/3"]) == 0
    assert (tmp_path / "o_00002-of-00003_text_document.idx").exists()
    for bad in ("0/3", "4/3", "x", "1/0"):
        assert main([*base.split(), "--shard", bad]) == 2
        assert f"--shard {bad}: must be i/N" in capsys.readouterr().err


def test_a_value_that_is_no_text_is_shown_and_not_its_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ["a", "b"]}\n')
    with pytest.raises(sources.BadLine, match=r'a\.jsonl:1: .* a text under "text"; this is \["a", "b"\]$'):
        list(sources.texts([tmp_path / "a.jsonl"]))
