"""A tokenizer without --tokenizer: its files determine the kind, or the message lists the kinds that they fit."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mega import cli
from mega.core.inference.options import OtherTokenizer
from mega.core.text.kind import kind_of_files
from tests.support.shared import shared


def test_files_of_one_kind_determine_it(tmp_path: Path) -> None:
    whole = tmp_path / "tokenizer.json"
    assert kind_of_files(whole, None, None) == kind_of_files(tmp_path, None, None) == "HuggingFaceTokenizer"
    assert kind_of_files(None, tmp_path / "vocab.json", tmp_path / "merges.txt") == "GPT2BPETokenizer"
    ranks = tmp_path / "tokenizer.model"
    ranks.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(b"%d" % i), i) for i in range(128_000)))
    assert kind_of_files(ranks, None, None) == "Llama3Tokenizer"
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n")
    for lower, kind in ((True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
        assert kind_of_files(None, vocabulary, None) == kind


def test_files_of_several_kinds_are_refused_with_these(tmp_path: Path) -> None:
    model, vocabulary, ranks = tmp_path / "a.model", tmp_path / "vocab.txt", tmp_path / "qwen.tiktoken"
    model.write_bytes(b"\n\x0e\n\x05<unk>")
    vocabulary.write_text("[PAD]\n")
    ranks.write_bytes(b"IQ== 0\nIg== 1\n")
    for arguments, message in (
        ((model, None, None), "a.model fits several kinds; give one of SentencePieceTokenizer, GPTSentencePieceTok"),
        ((None, vocabulary, None), "vocab.txt fits several kinds; give one of BertWordPieceLowerCase, BertWordPieceC"),
        ((ranks, None, None), "qwen.tiktoken: has 2 ranks; without --tokenizer only Llama-3's 128,000 are known"),
        ((tmp_path / "b.model", None, None), "b.model: no such file"),
        ((None, None, tmp_path / "merges.txt"), "it must be one of GPT2BPETokenizer, "),
        ((model, vocabulary, None), "it must be one of GPT2BPETokenizer, "),
    ):
        with pytest.raises(ValueError, match=message):
            kind_of_files(*arguments)


def test_preprocess_records_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    files = "--vocab-file", str(shared("gpt2/gpt2-vocab.json")), "--merge-file", str(shared("gpt2/gpt2-merges.txt"))
    words = ["preprocess", "--input", str(tmp_path / "a.txt"), "--append-eod", "--output-prefix"]
    for name, kind in (("inferred", ()), ("given", ("--tokenizer", "GPT2BPETokenizer"))):
        assert cli.main([*words, str(tmp_path / name), *files, *kind]) == 0
        said = capsys.readouterr()
        assert ("the given files are read as GPT2BPETokenizer" in said.out + said.err) == (not kind)
    notes = [json.loads((tmp_path / f"{name}_text_document.json").read_text()) for name in ("inferred", "given")]
    assert notes[0] == notes[1] and notes[0]["tokenizer_options"]["tokenizer"] == "GPT2BPETokenizer"


def test_generate_and_eval_infer_the_kind_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"vocab_file": str(shared("gpt2/gpt2-vocab.json")), "merge_file": str(shared("gpt2/gpt2-merges.txt"))}
    assert OtherTokenizer(**files).described()["tokenizer"] == "GPT2BPETokenizer"
    folder = shared("stories260K_hf/config.json").parent
    (tmp_path / "a.jsonl").write_text('{"text": "Once upon a time"}\n')
    line = ["eval", "--task", "lambada", "--load", str(folder), "--valid-data", str(tmp_path / "a.jsonl")]
    assert cli.main([*line, "--tokenizer-model", str(folder / "tokenizer.model"), "--device", "cpu"]) == 2
    assert "tokenizer.model fits several kinds; give one of SentencePiece" in capsys.readouterr().err
    assert cli.main([*line, "--vocab-file", files["vocab_file"], "--merge-file", files["merge_file"]]) == 2
    assert "GPT2BPETokenizer" in capsys.readouterr().err  # not the model's tokenizer
