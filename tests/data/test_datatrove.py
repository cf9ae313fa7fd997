"""The step in a real datatrove pipeline of two tasks: merged, it is what `mega preprocess` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.data.preprocessing.preprocess import preprocess

datatrove = pytest.importorskip("datatrove")

OPTIONS = {"tokenizer": "NullTokenizer", "vocab_size": 99}


def test_tasks_merge_to_what_preprocess_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader

    from mega.core.data.datatrove_step import TokenFiles

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in "ab":
        texts = ["1 2 3", "4", *(f"{i} {ord(name) - 90}" for i in range(600))]
        (corpus / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    step = TokenFiles(str(tmp_path / "tokens" / "part"), OPTIONS, append_eod=True)
    LocalPipelineExecutor([JsonlReader(str(corpus)), step], tasks=2, logging_dir=str(tmp_path / "logs")).run()
    assert main(f"data merge {tmp_path}/tokens --output-prefix {tmp_path}/merged".split()) == 0
    preprocess([corpus], str(tmp_path / "whole"), OPTIONS, append_eod=True)
    for suffix in ("bin", "idx"):
        merged, whole = tmp_path / f"merged.{suffix}", tmp_path / f"whole_text_document.{suffix}"
        assert merged.read_bytes() == whole.read_bytes()
    capsys.readouterr()
