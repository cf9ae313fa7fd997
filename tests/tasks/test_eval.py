"""Benchmarks against restatements of what they are, and the verb: layouts, resuming, and what is refused."""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mega import cli
from mega.core.batch import Term
from mega.core.config.compose import GivenOptions
from mega.core.config.run import Options, updated
from mega.core.device import Device
from mega.core.inference.generation.generate import logits, losses
from mega.core.inference.loading.load import load_model, open_model
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.tasks import evaluate, task
from mega.core.tasks.evaluate import CheckedEvaluation, prepare, run_here
from mega.core.tasks.options import TaskOptions
from mega.core.tasks.rows import Windows
from mega.core.tasks.task import Estimate, Sums, as_share, interval
from mega.core.text.detokenize import fairseq, ptb, wiki
from tests.support.shared import shared

PASSAGES, LINES = 16, 12
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "sequence_parallel": True}),
    (2, {"pp": 2, "stage_layers": (2, 3)}),
    (2, {}),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return shared("stories260K_hf/config.json").parent


@pytest.fixture(scope="module")
def passages(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third passage ends as the model would end it."""
    opened = open_model(model)
    tokenizer, stage = opened.tokenizer(), load_model(opened)
    found = []
    for number, line in enumerate(shared("lambada/lambada_test.first500.jsonl").read_text().splitlines()[:PASSAGES]):
        text = json.loads(line)["text"]
        if number % 3 == 0:
            context = tokenizer.encode(text.rsplit(" ", 1)[0])
            own: list[int] = []
            for _ in range(12):
                own.append(int(logits(stage, torch.tensor([[*context, *own]]))[0, -1].argmax()))
            start = len(tokenizer.decode(context))
            text = " ".join([text.rsplit(" ", 1)[0], tokenizer.decode([*context, *own])[start:].split()[0]])
        found.append(json.dumps({"text": text}))
    path = tmp_path_factory.mktemp("lambada") / "passages.jsonl"
    path.write_text("\n".join(found))
    return path


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = shared("wikitext/wiki.valid.tokens").read_text().splitlines(keepends=True)
    path = tmp_path_factory.mktemp("wikitext") / "wiki.tokens"
    path.write_text("".join(lines[:LINES]))
    return path


def asked(load: Path, name: str, data: Path, out: Path, world: int = 1, **values: Any) -> CheckedEvaluation:
    names = {field.name for field in dataclasses.fields(TaskOptions)}
    own = {key: value for key, value in values.items() if key in names}
    run = {key: value for key, value in values.items() if key not in names}
    given = {"load": str(load), "device": "cpu", **run}
    options = TaskOptions(name, (str(data),), **own)
    return prepare(updated(Options(), given), GivenOptions(None, given), options, str(out), world)


def alone(evaluation: CheckedEvaluation) -> Mapping[str, Estimate]:
    return run_here(evaluation, 0, 1, Device.choose("cpu"))


def job(groups: Groups, rank: int, evaluation: CheckedEvaluation, world: int) -> Mapping[str, Estimate]:
    return run_here(evaluation, rank, world, Device.choose("cpu", rank), groups)


def figures(out: Path) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in json.loads(out.read_text())["figures"]}


# Texts --------------------------------------------------------------------------------------------------------------


def plainly(text: str) -> str:
    """spec of Megatron-LM's rules for WikiText, one by one and by other means than the project's."""
    text = "s'".join(text.split("s '"))
    for mark, plain in (("@-@", "-"), ("@,@", ","), ("@.@", ".")):
        text = plain.join(text.split(f" {mark} "))
    for mark in ":;.!?,":
        text = f"{mark} ".join(text.split(f" {mark} "))
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        made, at = [], 0
        while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin + 1)) >= 0:
            made += [text[at:begin], opening, text[begin + 1 : end].strip(), closing]
            at = end + 1
        text = "".join(made) + text[at:]
    for count in (4, 3, 2):
        text = ("=" * count).join(text.split(" ".join("=" * count)))
    text = "\N{DEGREE SIGN}".join(text.split(" \N{DEGREE SIGN} "))
    text = "\n".join(text.split(" \n"))
    text = "\n".join(text.split("\n "))
    return "'s".join(" 1 ".join(text.split(" N ")).split(" 's"))


def test_a_byte_order_mark_is_not_text(model: Path, article: Path, tmp_path: Path) -> None:
    marked = tmp_path / "wiki.tokens"
    marked.write_bytes(codecs.BOM_UTF8 + article.read_bytes())
    found = []
    for path in (article, marked):
        out = tmp_path / "result.json"
        alone(asked(model, "wikitext103", path, out, seq_length=128, limit=2))
        found.append(json.loads(out.read_text())["figures"])
    assert found[0] == found[1]


def test_wikitext_is_turned_back_as_megatron_does() -> None:
    text = shared("wikitext/wiki.valid.tokens").read_text()
    assert wiki(text) == plainly(text) and len(wiki(text)) < 0.98 * len(text)
    assert "@" not in re.sub("[^@ ]@|@[^@ ]", "", wiki(text))[:0] + "".join(re.findall(" @.@ ", wiki(text)))


def test_the_penn_treebank_is_turned_back() -> None:
    text = expected = shared("ptb/ptb.valid.txt").read_text()
    rules = [(" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")]
    for old, new in rules:
        expected = new.join(expected.split(old))
    assert ptb(text) == expected != text


def test_published_ratios() -> None:
    assert (270330 - 1) / (245566 - 1) == 1.1008449901248143
    assert round(2 ** (math.log2(8.46) * 270847 / 245566), 2) == 10.54
    assert round(math.exp(math.log(8.46) * 270847 / 245566), 5) == 10.54006


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        (' In 2006 , he earned 1 @,@ 000 ( one ) " pound " . ', 'In 2006, he earned 1,000 (one) "pound".'),
        (" = Robert <unk> = ", "=Robert <unk>="),
    ],
)
def test_lines_as_fairseq_turns_them_back(line: str, plain: str) -> None:
    pytest.importorskip("sacremoses")
    assert fairseq(line) == plain


def test_every_target_is_judged_once() -> None:
    for count in (1, 2, 7, 8, 9, 10, 31):
        for length, stride in ((8, 8), (8, 3), (8, 1)):
            rows = list(Windows(list(range(count)), length, stride))
            judged = [each for row in rows for each in row.ids[row.judged :]]
            assert judged == list(range(1, count)), (count, length, stride)
            assert all(len(row.ids) <= length + 1 for row in rows)


def test_errors_are_those_of_a_sample() -> None:
    generator = torch.Generator().manual_seed(3)
    totals = torch.rand(50, generator=generator, dtype=torch.float64)
    sums = Sums(["a"])
    for part in totals.split(7):
        sums.add({"a": Term(part, torch.ones_like(part))})
    found = sums.estimates()["a"]
    assert found.mean == pytest.approx(float(totals.mean()), rel=1e-12) and found.examples == 50
    assert found.error == pytest.approx(float(totals.std() / math.sqrt(50)), rel=1e-9)


# Against transformers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """The model and its tokenizer as transformers opens them."""
    transformers = pytest.importorskip("transformers")
    pieces = pytest.importorskip("sentencepiece").SentencePieceProcessor(str(model / "tokenizer.model"))
    return transformers.AutoModelForCausalLM.from_pretrained(model), lambda text: [1, *pieces.encode(text)]


@torch.no_grad()
def their_wikitext(theirs: Any, path: Path, length: int, stride: int) -> dict[str, float]:
    """Megatron-LM's zero-shot perplexity, window by window."""
    model, encode = theirs
    raw = path.read_text()
    ids = encode(plainly(raw))
    targets, total = len(ids) - 1, 0.0
    for number in range(max(math.ceil(max(targets - stride, 0) / stride) + 1, 1)):
        window = ids[number * stride : number * stride + length + 1]
        first = length - stride if number else 0
        if len(window) - 1 > first:
            rows = model(torch.tensor([window[:-1]])).logits[0].double().log_softmax(-1)
            total -= float(sum(rows[at, window[at + 1]] for at in range(first, len(window) - 1)))
    loss, ratio = total / targets, targets / (len(raw.strip().split(" ")) - 1)
    return {
        "avg loss": loss,
        "ppl": math.exp(min(20, loss)),
        "adjusted ppl": math.exp(min(20, loss * ratio)),
        "token ratio": ratio,
    }


@torch.no_grad()
def their_verdicts(theirs: Any, path: Path, strict: bool) -> list[bool]:
    """Of each passage in the file's order."""
    model, encode = theirs
    found = []
    for line in path.read_text().splitlines():
        text = json.loads(line)["text"]
        ids, last = encode(text), 1
        if strict:
            word = text.split()[-1]
            context = encode(text[: text.rfind(word)].strip())
            last = len(encode(f"{text[: text.rfind(word)].strip()} {word}")) - len(context)
        best = model(torch.tensor([ids[:-1]])).logits[0].argmax(-1).tolist()
        found.append(best[-last:] == ids[-last:])
    return found


def test_wikitext_is_what_transformers_finds_in_every_layout(
    pool: Pool, model: Path, theirs: Any, article: Path, tmp_path: Path
) -> None:
    values = {"seq_length": 128, "overlapping_eval": 32, "micro_batch": 3}
    expected = their_wikitext(theirs, article, 128, 32)
    out = tmp_path / "result.json"
    one = alone(asked(model, "wikitext103", article, out, **values))
    for name, value in expected.items():
        assert figures(out)[name] == pytest.approx(value, rel=1e-4), name
    for world, layout in LAYOUTS:
        evaluation = asked(model, "wikitext103", article, tmp_path / "layout.json", world, **values, **layout)
        for found in pool.run(job, evaluation, world, world=world):
            assert found["nll"].mean == pytest.approx(one["nll"].mean, rel=1e-6), layout
            assert found["nll"].error == pytest.approx(one["nll"].error, rel=1e-4), layout


@pytest.mark.parametrize("strict", [False, True])
def test_every_verdict_is_that_of_transformers_in_every_layout(
    pool: Pool, model: Path, theirs: Any, passages: Path, tmp_path: Path, strict: bool
) -> None:
    verdicts = their_verdicts(theirs, passages, strict)
    assert 0 < sum(verdicts) < PASSAGES
    out = tmp_path / "result.json"
    alone(asked(model, "lambada", passages, out, strict_lambada=strict))
    assert figures(out)["number correct"] == sum(verdicts) and figures(out)["total examples"] == PASSAGES
    for number, verdict in enumerate(verdicts):  # each on its own
        alone(asked(model, "lambada", one_line(passages, number, tmp_path), out, strict_lambada=strict))
        assert figures(out)["number correct"] == verdict, number
    for world, layout in LAYOUTS:
        evaluation = asked(model, "lambada", passages, out, world, strict_lambada=strict, **layout)
        for found in pool.run(job, evaluation, world, world=world):
            assert found["accuracy"].mean == sum(verdicts) / PASSAGES, layout


def one_line(path: Path, number: int, folder: Path) -> Path:
    own = folder / "one.jsonl"
    own.write_text(path.read_text().splitlines()[number])
    return own


# By our own model ---------------------------------------------------------------------------------------------------


def test_a_context_window_is_fairseqs(model: Path, article: Path, tmp_path: Path) -> None:
    """Blocks of 8 targets, each fed with up to 24 ids before them; lines end in the end of a document, as it begins."""
    opened = open_model(model)
    tokenizer, stage = opened.tokenizer(), load_model(opened)
    raw = article.read_text()
    ids = [tokenizer.eod]
    for line in raw.splitlines():
        ids += [*tokenizer.encode(wiki(line.strip()).strip()), tokenizer.eod]
    total = 0.0
    for begin in range(1, len(ids), 8):
        block = ids[max(begin - 1 - 24, 0) : begin + 8]
        total += float(losses(stage, block).double()[-len(ids[begin : begin + 8]) :].sum())
    loss, words = total / (len(ids) - 1), len(raw.strip().split(" "))
    out = tmp_path / "result.json"
    alone(asked(model, "wikitext103", article, out, seq_length=32, context_window=24, detokenizer="wiki"))
    assert figures(out)["avg loss"] == pytest.approx(loss, rel=1e-6)
    renormalised = 2 ** (math.log2(2 ** (loss / math.log(2))) * (len(ids) - 1) / words)
    assert figures(out)["adjusted ppl"] == pytest.approx(min(renormalised, math.exp(20)), rel=1e-6)


def test_a_corpus_is_scored_from_text_and_from_token_files(model: Path, tmp_path: Path) -> None:
    opened = open_model(model)
    tokenizer, stage = opened.tokenizer(), load_model(opened)
    documents = ["Once upon a time, there was a little girl.", "She had a cat and a dog.", "The end."]
    text, out = tmp_path / "corpus.jsonl", tmp_path / "result.json"
    text.write_text("\n".join(json.dumps({"text": each}) for each in documents))
    ids = [each for document in documents for each in (*tokenizer.encode(document), tokenizer.eod)]
    windows = [losses(stage, ids[begin : begin + 17]) for begin in range(0, len(ids) - 1, 16)]
    expected = float(torch.cat(windows).double().mean())
    alone(asked(model, "ppl", text, out, seq_length=16))
    assert figures(out)["loss"] == pytest.approx(expected, rel=1e-6)
    size = sum(len(each.encode()) for each in documents)
    assert figures(out)["bits per byte"] == pytest.approx(expected * (len(ids) - 1) / size / math.log(2), rel=1e-6)
    line = ["preprocess", "--input", str(text), "--output-prefix", str(tmp_path / "made"), "--workers", "1"]
    files = ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(model / "tokenizer.model")]
    assert cli.main([*line, *files, "--append-eod"]) == 0
    alone(asked(model, "ppl", tmp_path / "made_text_document", out, seq_length=16))
    assert figures(out)["loss"] == pytest.approx(expected, rel=1e-6)
    found = [alone(asked(model, "ppl", text, out, seq_length=16, random_windows=9, seed=seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2] and found[0]["nll"].weight == 9 * 16


class Killed(Exception):
    """Stands for a kill: nothing is done after it."""


@pytest.mark.parametrize("end, said", [(Killed, ""), (KeyboardInterrupt, "the same line resumes there")])
def test_what_was_killed_is_continued(
    end: type[BaseException],
    said: str,
    model: Path,
    passages: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(task, "SPAN_SECONDS", 0.0)  # a turn at a time
    monkeypatch.setattr(evaluate, "SAVE_SECONDS", 0.0)
    whole, out = tmp_path / "whole.json", tmp_path / "killed.json"
    expected = alone(asked(model, "lambada", passages, whole))
    after = evaluate._Progress.__call__

    def dies(self: Any, done: Any, sums: Any) -> None:
        after(self, done, sums)
        if done.examples >= 8:
            raise end

    with monkeypatch.context() as patched:
        patched.setattr(evaluate._Progress, "__call__", dies)
        with pytest.raises(end):
            alone(asked(model, "lambada", passages, out))
    assert said in capsys.readouterr().err
    assert not out.exists() and json.loads((tmp_path / "killed.json.partial").read_text())["examples"] == 8
    found = alone(asked(model, "lambada", passages, out, micro_batch=3))
    assert "resuming after 8 examples" in capsys.readouterr().err
    kept = json.loads(out.read_text())
    assert kept["resumed_after"] == 8 and not (tmp_path / "killed.json.partial").exists()
    assert kept["fingerprint"] == json.loads(whole.read_text())["fingerprint"]
    for name, each in expected.items():
        assert found[name] == pytest.approx(each, rel=1e-6)


def test_sums_of_other_settings_are_not_continued(
    model: Path, passages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    for damaged in (json.dumps({"fingerprint": "of another", "examples": 9, "sums": []}), "{"):
        (tmp_path / "result.json.partial").write_text(damaged)
        alone(asked(model, "lambada", passages, out, limit=3))
        assert json.loads(out.read_text())["resumed_after"] is None
    assert "is of another model, data or settings" in capsys.readouterr().err


# The verb -----------------------------------------------------------------------------------------------------------


def test_megatrons_command_line(
    model: Path, passages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", "--task", "LAMBADA", "--num-layers", "5", "--hidden-size", "64", "--num-attention-heads", "8"]
    line += ["--seq-length", "512", "--max-position-embeddings", "512", "--log-interval", "10", "--no-load-optim"]
    line += ["--valid-data", str(passages), "--load", str(model), "--micro-batch-size", "8", "--strict-lambada"]
    line += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(model / "tokenizer.model")]
    out = tmp_path / "result.json"
    assert cli.main([*line, "--no-load-rng", "--json", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert " validation results on LAMBADA | number correct: " in printed.out
    assert "not used, nothing is trained: --load-optim, --log-interval" in printed.err
    result = json.loads(out.read_text())
    assert result["settings"]["micro_batch"] == 8 and result["settings"]["options"]["strict_lambada"]
    assert result["tokens_per_second"] > 0 and result["settings"]["model"]["config"]["layers"] == 5


BAD: list[tuple[list[str], str]] = [
    (
        ["--valid-data", "FILE"],
        "--task is missing: give lambada, ppl, wikitext103, toxicity, mnli, qqp or race; or --tasks of lm-eval",
    ),
    (["--task", "lambda", "--valid-data", "FILE"], "--task lambda: is not a benchmark (nearest: lambada); valid: "),
    (["--task", "lambada"], "--valid-data is missing: give the file that --task lambada scores"),
    (["--task", "ppl"], "--valid-data is missing: give the file or prefix that --task ppl scores"),
    (["--task", "lambada", "--valid-data", "."], "--valid-data .: is a folder; give a file"),
    (["--task", "lambada", "--valid-data", "absent"], "--valid-data absent: no such file"),
    (["--task", "lambada", "--valid-data", "EMPTY"], "EMPTY: is empty"),
    (["--task", "lambada", "--valid-data", "BLANK"], "BLANK: holds no passage"),
    (["--task", "lambada", "--valid-data", "OTHER"], 'OTHER:1: must be a JSON object with a text under "text"'),
    (
        ["--task", "lambada", "--valid-data", "WORD", "--strict-lambada"],
        "passage 1: needs a last word and something before it",
    ),
    (["--task", "lambada", "--valid-data", "FILE", "--seq-length", "20"], "--seq-length 20 takes at most 21"),
    (["--task", "wikitext103", "--valid-data", "FILE"], "its path names neither ptb, wiki nor lambada"),
    (["--task", "ppl", "--valid-data", "FILE", "--overlapping-eval", "600"], "must be at most --seq-length 512"),
    (["--task", "ppl", "--valid-data", "FILE", "--overlapping-eval", "0"], "--overlapping-eval 0: must be at least 1"),
    (["--task", "ppl", "--valid-data", "FILE", "--context-window", "512"], "must be less than --seq-length 512"),
    (
        ["--task", "lambada", "--valid-data", "FILE", "--detokenizer", "wiki"],
        "--detokenizer wiki: has no effect with --t",
    ),
    (["--task", "lambada", "--valid-data", "FILE", "--random-windows", "3"], "with --task lambada; of ppl"),
    (
        ["--task", "ppl", "--valid-data", "FILE", "--random-windows", "3", "--overlapping-eval", "8"],
        "--overlapping-eval 8: has no effect with --random-windows",
    ),
    (["--task", "wikitext103", "--valid-data", "FILE", "--json-key", "z"], "--json-key z: has no effect with --task w"),
    (["--task", "ppl", "--valid-data", "FILE", "--cloze-eval"], "--cloze-eval: has no effect with --task"),
    (["--tasks", "x", "--strict-lambada"], "--strict-lambada: has no effect with --tasks"),
    (["--tasks", "x", "--limit", "0"], "--limit 0: must be at least 1"),
    (["--ensemble", "x"], "--load: has no effect with --ensemble"),
    (["--task", "ppl", "--valid-data", "FILE", "--layers", "7"], "--layers 7: the model at MODEL has 5"),
    (["--task", "ppl", "--valid-data", "FILE", "--tp", "2"], "--tp 2 x --pp 1: 1 rank given, but a model takes 2"),
    (["--task", "ppl", "--valid-data", "FILE", "--load", "DIR"], "--load DIR: is empty; must be a run"),
    (["--task", "ppl", "--valid-data", "FILE", "--load", "BARE"], "--tokenizer is missing: the model carries none"),
    (["--task", "ppl", "--valid-data", "FILE", "--json", "absent/a.json"], "--json absent/a.json: directory"),
    (
        ["--task", "ppl", "--valid-data", "FILE", "--load", "."],
        "(llama2.c) or .gguf (llama.cpp); if BARE in it is a Hugging Face folder, give ",
    ),
    (
        ["--task", "ppl", "--valid-data", "pair.bin"],
        "--valid-data pair.bin: is one of two token files; leave .bin away: --valid-data pair",
    ),
]


@pytest.mark.parametrize(("flags", "words"), BAD)
def test_what_is_refused_in_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = "It was a long way to the house, and the girl was very tired when she saw the door of the house."
    contents = {"FILE": sentence, "WORD": "alone", "OTHER": None}
    for name, text in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text} if text else {"words": 1}))
    (tmp_path / "EMPTY.jsonl").write_text("")
    (tmp_path / "BLANK.jsonl").write_text("\n\n")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair{suffix}").write_bytes(b"\xff")
    (tmp_path / "DIR").mkdir()
    (tmp_path / "BARE").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "BARE" / name).write_bytes((model / name).read_bytes())
    files = {name: f"{name}.jsonl" for name in (*contents, "EMPTY", "BLANK")}
    line = [files.get(word, word) for word in flags]
    load = [] if "--load" in flags else ["--load", str(model)]
    assert cli.main(["eval", *line, *load, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    for name, file in files.items():
        said = said.replace(file, name)
    assert words in said.replace(str(model), "MODEL") and said.count("\n") <= 2, said


def test_an_interval_of_an_accuracy_stays_one() -> None:
    almost = Estimate(mean=0.96, error=0.04, weight=25, examples=25)
    found = interval("accuracy", almost, as_share)
    assert (found.value, found.low, found.high) == (0.96, pytest.approx(0.8816), 1.0)
    assert interval("accuracy", Estimate(0.04, 0.04, 25, 25), as_share).low == 0.0
