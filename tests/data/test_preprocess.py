"""JSON lines to token files: Megatron-LM's bytes, any number of workers, and every bad line named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.data import sources as module
from mega.core.data.indexed import IndexedDataset
from mega.core.data.preprocessing.preprocess import Report, preprocess
from mega.core.text.build import build
from tests.support.shared import shared

NULL = {"tokenizer": "NullTokenizer", "vocab_size": 99}


def lines(path: Path, *objects: Any) -> Path:
    """A file of lines; bytes stand as they are, anything else as JSON."""
    path.write_bytes(b"".join(o if isinstance(o, bytes) else json.dumps(o).encode() + b"\n" for o in objects))
    return path


def run(path: Path, **options: Any) -> tuple[Report, list[list[int]], list[int]]:
    """Report, sequences and document index of the first key."""
    report = preprocess([path], str(path.parent / "out"), NULL, overwrite=True, **options)
    data = IndexedDataset(report.outputs[0])
    return report, [data[i].tolist() for i in range(len(data))], data.document_index.tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_megatron_made_files_are_reproduced(tmp_path: Path, workers: int) -> None:
    source = shared("megatron_indexed/test.jsonl")
    code = main(
        f"preprocess --input {source} --output-prefix {tmp_path}/test --tokenizer-type NullTokenizer "
        f"--vocab-size 131072 --append-eod --workers {workers}".split()
    )
    assert code == 0
    for end in ("bin", "idx"):
        made = tmp_path / f"test_text_document.{end}"
        assert made.read_bytes() == shared(f"megatron_indexed/test_text_document.{end}").read_bytes()


def test_workers_and_packing_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lines(tmp_path / "a.jsonl", *({"text": f"{i} {i % 7}" * (i % 3)} for i in range(5000)))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    made = []
    for name, workers in (("a.jsonl", 1), ("a.jsonl", 2), ("a.jsonl.gz", 1)):
        report = preprocess([tmp_path / name], f"{tmp_path}/{len(made)}", NULL, append_eod=True, workers=workers)
        assert report.documents == 5000
        made.append([Path(f"{report.outputs[0]}.{end}").read_bytes() for end in ("bin", "idx")])
    assert made[0] == made[1] == made[2]


def test_eod_after_every_document_that_has_a_token(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", {"text": "1 2"}, {"text": ""}, {"text": ["3", "", "4 5"]}, {"text": []})
    report, sequences, documents = run(source, append_eod=True)
    assert sequences == [[1, 2, 99], [3], [4, 5, 99]] and documents == [0, 1, 1, 3, 3]
    assert (report.documents, report.tokens, report.skipped) == (4, 7, 0)
    _, sequences, documents = run(source)
    assert sequences == [[1, 2], [3], [4, 5]] and documents == [0, 1, 1, 3, 3]


def test_every_key_gets_its_files(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", {"text": "1", "title": "2 3", "x": None}, {"text": "4", "title": "5"})
    report = preprocess([source, source], f"{tmp_path}/out", NULL, json_keys=("text", "title"))
    assert report.outputs == [f"{tmp_path}/out_text_document", f"{tmp_path}/out_title_document"]
    texts, titles = (IndexedDataset(name).tokens.tolist() for name in report.outputs)
    assert texts == [1, 4, 1, 4] and titles == [2, 3, 5, 2, 3, 5]


def test_harmless_oddities(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "1"}\r\n', b"\n", b"  \r\n", b'{"text": "2"}')
    assert run(source)[1] == [[1], [2]]


BAD = {
    b"{\n": "a.jsonl:2",
    b'{"text": "\xff"}\n': "a.jsonl:2",
    b'{"text": "\\ud800"}\n': "a.jsonl:2",
    b"[" * 100_000 + b"\n": "a.jsonl:2",
    b"[1]\n": "a.jsonl:2: not a JSON object",
    b'{"body": "1"}\n': "a.jsonl:2: no key \"text\"; there are 'body'",
    b"{}\n": "there are none",
    b'{"text": 1}\n': "neither a string nor a list",
    b'{"text": ["1", 2]}\n': "neither a string nor a list",
    b'{"text": "x"}\n': "a.jsonl:2: NullTokenizer: 'x'",
    b'{"text": "70000"}\n': "a.jsonl:2: token id 70000 is above 65535",
    b'{"text": "1\\u0000"}\n': "a.jsonl:2: NullTokenizer",
}


# A line that does not parse and one that the tokenizer refuses, from a worker process too.
FROM_WORKERS = [(b"{\n", 2), (b'{"text": "x"}\n', 2)]


@pytest.mark.parametrize(
    ("bad", "workers"), [*((bad, 1) for bad in BAD), *FROM_WORKERS], ids=range(len(BAD) + len(FROM_WORKERS))
)
def test_bad_line_is_named_or_skipped(tmp_path: Path, bad: bytes, workers: int) -> None:
    source = lines(tmp_path / "a.jsonl", {"text": "1"}, bad, {"text": "3"})
    with pytest.raises(ValueError) as caught:
        run(source, workers=workers)
    assert BAD[bad] in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    report, sequences, _ = run(source, on_error="skip", workers=workers)
    assert sequences == [[1], [3]] and (report.documents, report.skipped) == (2, 1)
    assert BAD[bad] in report.reasons[0]


def test_line_numbers_run_on_through_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    source = lines(tmp_path / "a.jsonl", *[{"text": "1"}] * 40, b"\n", b"{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:42: "):
        run(source)


def test_line_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(module, "MOST_LINE_BYTES", 1 << 20)
    source = lines(tmp_path / "a.jsonl", {"text": "1"}, {"text": "1 " * 10**6})
    with pytest.raises(ValueError, match=r"a\.jsonl:2: a line longer than 1 MiB"):
        run(source)
    lines(source, {"text": "1"}, {"text": "1 " * 10**6}, {"text": "3"}, b"{\n")
    report, sequences, _ = run(source, on_error="skip")
    assert sequences == [[1], [3]] and (report.documents, report.skipped) == (2, 2)
    assert ["jsonl:2: a line" in report.reasons[0], "jsonl:4: " in report.reasons[1]] == [True, True]


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf1 2\n3\n")
    assert run(tmp_path / "a.txt", append_eod=True)[1] == [[1, 2, 3, 99]]
    assert run(tmp_path / "a.txt", text_lines=True)[1] == [[1, 2], [3]]
    (tmp_path / "b.txt").write_bytes(b"1 \xff")
    with pytest.raises(ValueError, match=r"b\.txt:1: not UTF-8 at byte 2"):
        run(tmp_path / "b.txt")


def test_what_python_writes_into_json_is_read(tmp_path: Path) -> None:
    """NaN is not JSON, but Megatron-LM's reader takes it; half a surrogate pair is taken by neither's tokenizer."""
    source = tmp_path / "a.jsonl"
    lines(source, {"text": "1", "score": float("nan"), "worth": float("inf")}, b'{"text": "2", "n": 1e999}\n')
    assert run(source)[1] == [[1], [2]]
    lines(
        source,
        {"text": "1"},
        b'{"text": "2", "n": [nan]}\n',
        b'{"text": "3", "n": NaN, "k": "\\ud83d"}\n',
        b'{"text": "\xff"}\n',
    )
    report, sequences, _ = run(source, on_error="skip")
    assert sequences == [[1]] and [reason.rpartition(": ")[2] for reason in report.reasons] == [
        "not JSON, invalid literal, expected 'null' at character 20",
        "not JSON, unexpected character, expected a JSON value at character 19",
        "not UTF-8 at byte 10",
    ]


def test_real_text_comes_back(tmp_path: Path) -> None:
    sources = [shared("novels/novels.jsonl.gz"), shared("tinyshakespeare/input.txt")]
    vocab, merges = shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
    code = main(
        f"preprocess --input {sources[0]} {sources[1]} --output-prefix {tmp_path}/real --append-eod "
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges} --workers 2".split()
    )
    assert code == 0
    data = IndexedDataset(tmp_path / "real_text_document")
    tokenizer = build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    with gzip.open(sources[0]) as file:
        texts = [json.loads(line)["text"] for line in file] + [sources[1].read_text()]
    assert len(data) == len(texts) == 5327
    for i in (0, 1, 2600, 5325, 5326):
        assert tokenizer.decode(data[i]) == texts[i] + "<|endoftext|>"


def test_cut_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "1"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: cannot be read"):
        run(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: cannot be read"):
        run(tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--input {d}/no --tokenizer-type NullTokenizer --vocab-size 9", "--input {d}/no: no such file"),
        ("--input {d}/a --tokenizer-type NullTokenizer", "--vocab-size"),
        ("--input {d}/a", "--tokenizer is missing: it must be one of"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --lang german", "--lang: sets how sentences"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --keep-newlines", "--keep-newlines: sets how"),
        ("--input {d}/a --tokenizer-type GPT2BPETokenizer", "--vocab-file is missing"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --workers 0", "--workers 0: must be"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --json-keys a a", "--json-keys a a"),
        ("--input {d}/a {d}/pipe --tokenizer-type NullTokenizer --vocab-size 9", "{d}/pipe: a pipe or a device"),
        ("--input {d}/[ap]* --tokenizer-type NullTokenizer --vocab-size 9", "{d}/pipe: a pipe or a device"),
        ("--input {d}/a {d}/lost --tokenizer-type NullTokenizer --vocab-size 9", "{d}/lost: no such file, the link"),
        ("--input {d} --tokenizer-type NullTokenizer --vocab-size 9", "{d}/lost: no such file, the link"),
        ("--input= --tokenizer-type NullTokenizer --vocab-size 9", "--input '': must not be empty"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 3000000000", "--vocab-size 3000000000: Null"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --vocab-extra-ids -1", "--vocab-extra-ids -1: "),
        (
            "--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --shard \u00b2/3",
            "--shard \u00b2/3: must be i/N",
        ),
        ("--input {d}/empty --tokenizer-type NullTokenizer --vocab-size 9", "holds no document"),
        ("--input {d}/a --tokenizer-type NullTokenizer --vocab-size 9 --json-keys b", '{d}/a:1: no key "b"'),
    ],
)
def test_bad_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    lines(tmp_path / "a", {"text": "1"})
    lines(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "lost").symlink_to("nowhere")
    code = main(["preprocess", "--output-prefix", f"{tmp_path}/out", *arguments.format(d=tmp_path).split()])
    printed = capsys.readouterr().err.strip()
    assert code == 2 and message.format(d=tmp_path) in printed and len(printed.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "lost", "pipe"]


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_folder_in_the_way_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    lines(tmp_path / "a", {"text": "1"})
    (there := tmp_path / f"out_text_document.{end}").mkdir()
    monkeypatch.setattr("mega.core.data.preprocessing.writer.IndexedWriter.extend", None)
    words = f"preprocess --input {tmp_path}/a --output-prefix {tmp_path}/out --overwrite"
    assert main([*words.split(), *"--tokenizer-type NullTokenizer --vocab-size 9".split()]) == 2
    assert capsys.readouterr().err == f"mega: {there}: is a directory; must be a file\n"
    assert {path.name for path in tmp_path.iterdir()} == {"a", there.name}


@pytest.mark.parametrize("forks", [True, False])
def test_workers_hand_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool) -> None:
    """A block without a token, from processes forked or spawned."""
    monkeypatch.setattr("mega.core.data.workers._can_fork", lambda: forks)
    source = lines(tmp_path / "a.jsonl", {"text": ""}, b"bad\n")
    report, sequences, _ = run(source, workers=2, on_error="skip")
    assert sequences == [] and (report.documents, report.skipped) == (1, 1)


def test_broken_merges_are_no_document_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("a a")
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    source = lines(tmp_path / "a.jsonl", {"text": "a"})
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"^--merge-file .*merges\.txt: must begin with"):
            preprocess(
                [source],
                f"{tmp_path}/out",
                {"tokenizer": "GPT2BPETokenizer", **files},
                on_error="skip",
                workers=workers,
            )


def test_megatron_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its preprocess_data.py and merge_datasets.py as scripts call them."""
    (tmp_path / "in.jsonl").write_text('{"text": "1 2", "title": "3"}\n{"text": "4", "title": "5 6"}\n')
    preprocess = (
        f"preprocess --input {tmp_path}/in.jsonl --output-prefix {tmp_path}/out/{{}} --json-keys text title"
        " --tokenizer-type NullTokenizer --vocab-size 9 --append-eod --workers 1 --partitions 1 --dataset-impl mmap"
        " --log-interval 1000 --keep-sequential-samples"
    )
    assert main(preprocess.format("a").split()) == 0
    assert main(f"data merge --input {tmp_path}/out --output-prefix {tmp_path}/merged".split()) == 0
    merged = IndexedDataset(tmp_path / "merged")
    assert merged.tokens.tolist() == [1, 2, 9, 4, 9, 3, 9, 5, 6, 9] and merged.documents == 4
    capsys.readouterr()


def test_bad_text_file_is_one_bad_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 2\n3")
    (tmp_path / "b.txt").write_bytes(b"4 \xff")
    (tmp_path / "c.txt").write_bytes(b"5")
    options = {"tokenizer": "NullTokenizer", "vocab_size": 9}
    inputs = [tmp_path / f"{name}.txt" for name in "abc"]
    with pytest.raises(ValueError, match=r"b\.txt:1: not UTF-8 at byte 2"):
        preprocess(inputs, str(tmp_path / "out"), options)
    report = preprocess(inputs, str(tmp_path / "out"), options, on_error="skip")
    assert (report.documents, report.skipped) == (2, 1)
    report = preprocess(inputs, str(tmp_path / "lines"), options, on_error="skip", text_lines=True)
    assert (report.documents, report.skipped) == (3, 1) and "not UTF-8 at byte" in report.reasons[0]


def test_special_tokens_that_texts_spell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, and the output says so; or tokens, by a flag."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    texts = ["a<|im_end|>b", "<| im_end", "<|im_end|>"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = f"--tokenizer HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    for flag, lengths, how in (
        ("", [12, 9, 10], "text; --parse-special-tokens makes tokens of them"),
        ("--parse-special-tokens --workers 2", [3, 9, 1], "tokens, by --parse-special-tokens"),
    ):
        line = f"preprocess --input {tmp_path}/a.jsonl --output-prefix {tmp_path}/out{len(flag)} {files} {flag}"
        assert main(line.split()) == 0
        assert f"2 documents spell special tokens such as <|im_end|>, which are {how}\n" in capsys.readouterr().out
        data = IndexedDataset(f"{tmp_path}/out{len(flag)}_text_document")
        assert [len(data[i]) for i in range(3)] == lengths
