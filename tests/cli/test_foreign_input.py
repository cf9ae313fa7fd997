"""Files of others cost a bounded time and memory, and end in one line that names the file: bombs, devices, panics."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega import cli
from mega.command_line.legacy import deepspeed
from mega.core.checkpoint.own.store import locate
from mega.core.config import toml
from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.data.sources import blocks, lines, pieces
from mega.core.text import probe
from mega.core.text.build import build
from mega.core.text.chat.format import chat_format
from mega.core.text.null import NullTokenizer
from mega.core.training.schedules import Schedules
from mega.core.untrusted import Confined, parse_json, read_limited

TALK = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


def megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_a_zstandard_bomb_takes_blocks_and_not_chunks(tmp_path: Path) -> None:
    """256 MiB of blanks in 8 KB: each chunk of 64 KiB used to be unpacked whole."""
    zstandard = pytest.importorskip("zstandard")
    packer, path = zstandard.ZstdCompressor(level=3).compressobj(), tmp_path / "a.jsonl.zst"
    part = b" " * ((1 << 20) - 1) + b"\n"
    packed = b"".join(packer.compress(part) for _ in range(256)) + packer.flush()
    path.write_bytes(packed)
    before = megabytes()
    (piece,) = pieces([path])
    assert len(packed) < 1 << 16
    assert sum(block.size for block in blocks(piece, ["text"], text_lines=False)) == 256 << 20
    assert megabytes() - before < 120


def test_zstandard_frames_with_checksums_and_skipped_ones(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path, text = tmp_path / "a.jsonl.zst", os.urandom(150_000).hex().encode()
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(text + b"\n")
    path.write_bytes(whole + b"\x51\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(text))
    assert [line.text for line in lines([path], ["text"])] == [text, text]
    for cut in (1, 4, len(whole) // 2, len(whole) - 1, len(whole) + 9):
        path.write_bytes((whole + b"\x51\x2a\x4d\x18\x03\0\0\0abc")[:cut])
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst: cannot be read"):
            list(lines([path], ["text"]))


def test_packed_files_whose_blocks_are_damaged(tmp_path: Path) -> None:
    """The errors of zlib, and of isal where it is there, are of no common kind."""
    import gzip

    path, packed = tmp_path / "a.jsonl.gz", bytearray(gzip.compress(b'{"text": "some text"}\n' * 500))
    packed[12:40] = os.urandom(1) * 28
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: cannot be read"):
        list(lines([path], ["text"]))


def test_columns_that_take_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of 32 MiB is a parquet file of some KB, and is read in a process that ends; a file of no sense, too."""
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": ["a" * (32 << 20)]}), path)
    assert [len(line.text) for line in lines([path], ["text"])] == [(32 << 20) + 11]
    monkeypatch.setattr("mega.core.data.sources._COLUMNS_BYTES", 320 << 20)
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read: "):
        list(lines([path], ["text"]))
    damaged = bytearray(path.read_bytes())
    damaged[4:40] = b"\xff" * 36
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read: "):
        list(lines([path], ["text"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"updates": "7"}, "meta.updates: '7' must be a count"),
        ({"progress": {"step": 7, "consumed": -28}}, "meta.progress.consumed: -28 must be a count"),
        ({"progress": {"step": 7, "eaten": 28}}, "meta.progress.eaten is unknown to this version"),
        ({"progress": [7]}, "meta.progress: must be an object"),
        ({"scaler": {"scale": 0, "clean": 1, "patience": 2}}, "meta.scaler.scale: 0 must be a number above 0"),
        ({"scaler": {"scale": 8.0}}, "meta.scaler: has no clean"),
        ({"dropout_rule": 3}, "meta.dropout_rule: 3 must be 1 or 2"),
        ({"tp_overlap": 1}, "meta.tp_overlap: 1 must be true or false"),
        ({"layout": {"dp": "2"}}, "meta.layout.dp: '2' must be a count"),
        ({"corpora": {"a": []}}, "meta.corpora.a: must be an object"),
        ({"config": {"batch": {"steps": []}}}, r"meta.config.batch.steps: \[\] must be a whole number"),
    ],
)
def test_plain_state_of_a_resealed_manifest(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    shutil.copytree(Path(__file__).parents[1] / "golden/mega", tmp_path / "run")
    path = tmp_path / "run/step-0000007/manifest.json"
    content = json.loads(path.read_bytes())
    content["meta"] |= changed
    text = json.dumps(content).encode()
    path.write_bytes(text)
    path.with_name("manifest.json.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        locate(path.parent)


@pytest.mark.parametrize(
    "part", [{"decay": "a"}, {"style": "rising"}, {"peak": None}, {"batch": 0}, {"decay": 0, "style": "range-test"}]
)
def test_a_schedule_that_cannot_be_computed(part: dict[str, Any]) -> None:
    state = {
        "lr": {"peak": 1e-3, "least": 0.0, "warmup": 4, "decay": 10, "style": "linear", "initial": 0.0, "batch": None},
        "weight_decay": {"start": 0.1, "end": 0.1, "total": 10, "style": "constant"},
    }
    Schedules.from_state_dict(state, "a")
    state["lr"] |= part
    with pytest.raises(ValueError, match="a: its schedule is not one that this version knows"):
        Schedules.from_state_dict(state, "a")


def test_padded_xz_streams(tmp_path: Path) -> None:
    import lzma

    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(b"a\n") + b"\0" * 8 + lzma.compress(b"b\n"))
    assert [line.text for line in lines([path], ["text"])] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10 ** 10 }}", "takes too much memory"),
        ("{{ 'a' * 3000000 }}", "makes 3000000 characters of a conversation, at most"),
    ],
)
def test_templates_have_limits(tmp_path: Path, source: str, message: str) -> None:
    pytest.importorskip("jinja2")
    path = tmp_path / "a.jinja"
    path.write_text(source)
    with pytest.raises(ValueError, match=f"--chat-template {path}: {message}"):
        chat_format(str(path), NullTokenizer(9)).prompt(TALK)


def test_a_child_ends_with_its_time() -> None:
    with Confined("mega.core.text.chat.jinja_process", "--chat-template a", seconds=1, memory=1 << 29) as child:
        source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        question = {
            "ask": "text",
            "source": source,
            "messages": [],
            "variables": {},
            "names": [],
            "marks": "\ufdd0\ufdd1",
        }
        with pytest.raises(ValueError, match="--chat-template a: takes too long; at most 1 s of processor time"):
            child.ask(question)
        assert child.ask({**question, "source": "again"})["text"] == "again"


def test_a_panic_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This template names a token that the library looks up when it encodes, and panics."""
    pytest.importorskip("tokenizers")
    monkeypatch.delenv("MEGA_READ_TOKENIZERS", raising=False)
    path = tmp_path / "tokenizer.json"
    content: dict[str, Any] = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    path.write_text(json.dumps(content))
    assert build(tokenizer="HuggingFaceTokenizer", tokenizer_model=path).encode("a") == [0]
    for vocab in ({}, {"a": 1 << 31}):
        content["model"]["vocab"] = vocab
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"--tokenizer-model {path}: must have ids"):
            build(tokenizer="HuggingFaceTokenizer", tokenizer_model=path)
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match=f"--tokenizer-model {path}: not a tokenizer.json"):
        probe.check("tokenizers", path)


def test_devices_pipes_and_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--config /dev/zero: holds more than the 1 MiB"):
        toml.read("/dev/zero")
    monkeypatch.setattr("mega.core.untrusted.WAIT_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"--config .*pipe: a pipe out of which nothing came"):
        toml.read(str(tmp_path / "pipe"))
    end, begin = os.pipe()
    os.write(begin, b"[model]\nlayers = 2\n")
    os.close(begin)
    assert toml.read(f"/dev/fd/{end}") == {"layers": 2}
    os.close(end)
    assert read_limited("/dev/null", 1, "x") == b""


@pytest.mark.parametrize("text", ["1e999", "NaN", "9" * 200, "[" * 100_000, '{"a": -1e999}'])
def test_json_that_cannot_be_computed_with(text: str) -> None:
    with pytest.raises(ValueError, match=r"^a\.json: is not JSON that can be read: "):
        parse_json(text, "a.json")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "fp16.initial_scale_power: 5000: must be 0 to 127"),
        (
            {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_rate": 5e-324}}},
            "scheduler.params.lr_range_test_step_rate: 5e-324 must divide",
        ),
    ],
)
def test_deepspeed_numbers(content: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^ds.json: {line}"):
        deepspeed.values(content, "ds.json")


def test_toml_that_takes_quadratic_time_or_is_something_else() -> None:
    with pytest.raises(ValueError, match=r"a\.toml: is not TOML that can be read: line 1 has a key of over 100 parts"):
        toml.values("a" + ".a" * 20_000 + "=1", "a.toml")
    with pytest.raises(ValueError, match=r"\.\.\. and more") as error:
        toml.values("[model]\n" + "".join(f"key{i} = 1\n" for i in range(10_000)), "a.toml")
    assert len(str(error.value).splitlines()) == toml.MOST_PROBLEMS + 1
    with pytest.raises(ValueError, match="thousands of digits must be a number"):
        toml.values("[optimizer]\nlr = 0x" + "f" * 5000, "a.toml")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"layers": 3_000_000}, "--layers 3000000: must be at most 10000"),
        ({"hidden": 1 << 40}, f"--hidden {1 << 40}: must be at most 1048576"),
        ({"seq_length": 1 << 22, "micro_batch": 64}, "--seq-length 4194304: makes 268435456 tokens"),
        ({"layers": 100, "pp": 100, "global_batch": 1 << 20}, "--global-batch 1048576: makes 1048576 microbatches"),
        ({"save": "/tmp/\udcff"}, r"--save '/tmp/\\udcff': must be UTF-8"),
    ],
)
def test_shapes_that_cannot_be_planned(given: dict[str, Any], line: str) -> None:
    typed = {"steps": 1, "lr": 1e-3, "mock_data": True, "vocab": 100, "micro_batch": 1, **given}
    with pytest.raises(ValueError, match=f"(?m)^{line}"):
        check(compose("tiny-gpt", flags=typed), world=given.get("pp", 1))


def test_an_estimate_that_did_not_end(capsys: pytest.CaptureFixture[str]) -> None:
    command = "memory-estimate --model tiny-gpt --micro-batch 1 --vocab 100 --layers 3000000"
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err == "mega: --layers 3000000: must be at most 10000\n"
