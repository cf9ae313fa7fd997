"""The lines that the documents show: each becomes lines of mega, and Megatron-11b's give fairseq's numbers.

fairseq's numbers are in tests/golden/fairseq_lines, made by tests/battery/fairseq_lines.py; all lines typed with small
files: tests/battery/document_lines.py.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.command_line.legacy.scripts import command_lines
from mega.core.checkpoint.forms.fairseq import fairseq_name
from mega.core.checkpoint.own.pieces import Box
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate
from mega.core.data.indexed import IndexedDataset
from tests.support.old_lines import translated
from tests.support.shared import shared

GOLDEN = Path(__file__).parents[1] / "golden" / "fairseq_lines"
FAIRSEQ = json.loads((GOLDEN / "fairseq.json").read_text())
TRAIN = (
    "fairseq-train DATA --distributed-world-size 1 --num-workers 2 --model-parallel-size 1 --criterion "
    "vocab_parallel_cross_entropy --task language_modeling --sample-break-mode none --tokens-per-sample 32 --arch "
    "transformer_lm_megatron_11b --share-decoder-input-output-embed --optimizer adam --adam-betas '(0.9, 0.98)' "
    "--adam-eps 1e-08 --clip-norm 0.0 --lr-scheduler inverse_sqrt --lr 0.01 --warmup-updates 4 --weight-decay 0.01 "
    "--dropout 0 --attention-dropout 0 --batch-size 4 --max-update 12 --save-dir run"
)
PREPROCESS = "fairseq-preprocess --only-source --trainpref train.bpe --validpref valid.bpe --testpref test.bpe"
PREPROCESS += " --srcdict model/dict.txt --destdir DATA"
EVALUATE = "fairseq-eval-lm DATA/ --path model/model.pt --task language_modeling --gen-subset test --batch-size 8"
EVALUATE += " --criterion cross_entropy --tokens-per-sample 32"
TINY = "--layers 2 --hidden 16 --heads 2 --ffn 96 --positions 32 --vocab 48 --load model --finetune --log-interval 1"


def typed(line: str, more: str = "") -> None:
    """What a line becomes, run here; `more`: options of mega that make it small."""
    (found,) = command_lines(line)
    result = translated(found)
    assert not result.lacking, result.lacking
    for words in result.commands:
        assert main([*words[1:], *shlex.split(more)]) == 0, words


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Binarised by the document's line."""
    for name in ("train.bpe", "valid.bpe", "test.bpe"):
        shutil.copy(GOLDEN / name, tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("dict.txt", "model-model_part-0.pt"):
        shutil.copy(GOLDEN / name, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    typed(PREPROCESS)
    return tmp_path


def test_binarised_ids_are_fairseqs(place: Path) -> None:
    for name, ids in FAIRSEQ["ids"].items():
        dataset = IndexedDataset(place / "DATA" / f"{name}_text_document")
        assert np.asarray(dataset.tokens).tolist() == ids


@pytest.mark.parametrize("window", [24, 0])
def test_its_perplexity_is_fairseqs(place: Path, window: int) -> None:
    typed(EVALUATE + f" --context-window {window}", "--device cpu --json score.json")
    figures = {each["name"]: each["value"] for each in json.loads((place / "score.json").read_text())["figures"]}
    expected = FAIRSEQ[f"window {window}"]
    assert figures["ppl"] == pytest.approx(expected["perplexity"], rel=2e-6)
    assert figures["avg loss"] / math.log(2) == pytest.approx(expected["loss"], rel=1e-6)


def test_its_training_is_fairseqs(place: Path) -> None:
    """Rate, loss and weights of twelve steps; biases and norms decay, as they do there."""
    typed(TRAIN, f"{TINY} --device cpu --save-interval 12 --eval-iters 1 --no-progress")
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row and "lr" in row]
    assert len(steps) == len(FAIRSEQ["steps"]) == 12
    for ours, theirs in zip(steps, FAIRSEQ["steps"], strict=True):
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    source = OwnSource(locate(place / "run"))
    for key, (shape, _) in source.tensors.items():
        if key.startswith("weights/") and not key.endswith("k_proj.bias"):  # whose gradient is zero, but for rounding
            name = fairseq_name(key.removeprefix("weights/"))
            total = float(source.read(key, Box((0,) * len(shape), shape)).double().abs().sum())
            assert total == pytest.approx(FAIRSEQ["weights"][name], rel=1e-5), name


def test_text_through_all_five_lines(place: Path) -> None:
    """The ids of GPT-2 as text are what the binarisation reads; empty lines are left out, as in fairseq."""
    vocab, merges = shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
    os.symlink(vocab, place / "encoder.json")
    os.symlink(merges, place / "vocab.bpe")
    (place / "wiki.detok").write_text(" Robert is an actor.\n\n He was born in 1980 .\n")
    typed(
        "python -m examples.roberta.multiprocessing_bpe_encoder --encoder-json encoder.json --vocab-bpe vocab.bpe "
        "--inputs wiki.detok --outputs wiki.bpe --workers 60"
    )
    assert (place / "wiki.bpe").read_text() == "19156 318 281 8674 13\n1544 373 4642 287 7169 764\n"


def test_detokenised_line_by_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sacremoses")
    (place / "wiki.test.raw").write_text(" = Robert = \n \n In 2006 , he earned 1 @,@ 000 \N{EN DASH} 2 @,@ 000 . \n")
    capsys.readouterr()
    typed("python -m examples.megatron_11b.detok wiki.test.raw")
    assert capsys.readouterr().out == "=Robert=\n\nIn 2006, he earned 1,000\N{EN DASH}2,000.\n"


@pytest.mark.parametrize(
    ("line", "flag", "value"),
    [
        ("fairseq-train D --lr-scheduler fixed", "--lr-decay", "constant"),
        ("fairseq-train D --lr-scheduler polynomial_decay --total-num-update 9", "--lr-decay-steps", "9"),
        ("fairseq-train D --lr-scheduler inverse_sqrt", "--lr-warmup-steps", "4000"),
        ("fairseq-train D --memory-efficient-fp16", "--dtype", "fp16"),
        ("fairseq-train D --memory-efficient-fp16", "--initial-loss-scale", "128"),
        ("fairseq-train D --adam-betas=(0.9,0.98)", "--adam-beta2", "0.98"),
        ("fairseq-train D --distributed-world-size 8", "--nproc", "8"),
        ("python scripts/split_json.py --input_files a --output_dir b --test_percent 0.1 0.2", "--split", "70,10,20"),
        ("python tools/text_generation_cli.py localhost:5000", "--url", "localhost:5000"),
        ("python scripts/run_gpt2_eval.py --data-path x --webtext-eval --eval-iters 10", "--random-windows", "160"),
        ("python scripts/run_gpt2_eval.py --data-path x --cloze-eval", "--task", "lambada"),
    ],
)
def test_what_a_flag_of_theirs_stands_for(line: str, flag: str, value: str) -> None:
    (found,) = command_lines(line)
    (words,) = translated(found).commands
    assert words[words.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("fairseq-train D --lr-scheduler cosine", "--lr-scheduler cosine: is not a choice; valid: inverse_sqrt, fixed"),
        ("fairseq-train --lr-scheduler fixed", "fairseq-train: names no folder of data; give --train-data"),
        ("fairseq-preprocess --testpref a --destdir b", "--srcdict: no dictionary is counted from the texts here"),
        ("python scripts/presplit_sentences_json.py a b c d", ""),
    ],
)
def test_what_has_no_counterpart_is_named(line: str, reason: str) -> None:
    (found,) = command_lines(line)
    lacking = translated(found).lacking
    assert any(each.startswith(reason) for each in lacking) if reason else not lacking


def test_a_whole_line_in_quotes_may_be_longer_than_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = "python pretrain_gpt.py --num-layers 2 --save " + "a" * 300
    assert main(["translate", line]) == 0
    assert capsys.readouterr().out.startswith("mega pretrain --family gpt --layers 2 --save aaa")


def document_lines() -> list[dict[str, Any]]:
    return list(map(json.loads, shared("golden/document_lines.jsonl").read_text().splitlines()))


def test_all_lines_of_the_documents_become_lines_of_mega(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole in quotes and word by word; at most one hole, where a vocabulary was downloaded by name, or two, where
    Retro's preparation names neither its corpora nor the model that embeds them."""
    rows = document_lines()
    assert len(rows) == 34
    for row in rows:
        printed = []
        for words in (shlex.split(row["line"]), [row["line"]]):
            assert main(["translate", *words]) == 0, row["line"]
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        assert "# no counterpart" not in printed[0] and "\nmega " in "\n" + printed[0].replace("torchrun", "mega ")
        assert printed[0].count("# to be set") <= 1 + ("retro/main.py" in row["line"])


def test_stages_of_retro_are_two_verbs() -> None:
    """A stage alone is its verb; what the run is comes from its --retro-gpt flags, and what is not read is named."""
    both = "--retro-tasks build --retro-workdir w --load b --retro-gpt-data-path 1 a 2 c --retro-gpt-split 98,2,0 "
    more = "--retro-gpt-seed 7 --seq-length 9 --retro-index-str IVF8,Flat --retro-query-nprobe 4 --num-layers 3"
    (found,) = command_lines(f"python tools/retro/main.py {both}{more}")
    result = translated(found)
    build, query = (" ".join(words) for words in result.commands)
    same = "--embedder b --data-path 1 a 2 c --split 98,2,0"
    assert build == f"mega retro build --pad-chunks --directory w {same} --index IVF8,Flat"
    assert query.startswith(
        f"mega retro query --family gpt --retriever --retro w {same} --seed 7 --layers 3 --probes 4"
    )
    assert result.dropped == ["--seq-length is not read by mega retro"] and not result.lacking
    (found,) = command_lines("python tools/retro/main.py --retro-tasks query-pretraining-neighbors,x --retro-workdir w")
    result = translated(found)
    assert [words[:3] for words in result.commands] == [["mega", "retro", "query"]]
    assert result.lacking == ["--retro-tasks x: is not a stage"]
