"""MNLI, QQP and RACE: their files, their rows, a classifier that learns, resumes, and judges as transformers."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega.cli import main
from mega.core.batch import MaskedBatch
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.data.formats import mnli, qqp, race
from mega.core.data.labelled import LabelledDataset, LabelledSet, labelled_set
from mega.core.data.synthetic import masked_batch
from mega.core.inference.loading.load import open_model
from mega.core.processes.pool import Pool
from mega.core.proof.parity import compare, within
from mega.core.text.build import build
from tests.support.runs import small_run
from tests.support.shared import shared

CONTROLS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(12)]
CLS, SEP = 2, 3
MNLI = "index\ta\tb\tc\td\te\tf\tg\tsentence1\tsentence2\tgold_label"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"


def written(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("vocabulary") / "vocab.txt", *CONTROLS, *WORDS)


def opened(
    path: Path, form: Any, vocabulary: Path, notes: list[str], length: int = 12, cache: Path | None = None
) -> LabelledSet:
    tokenizer = build(tokenizer="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    add = notes.append
    return labelled_set("--valid-data", str(path), form, tokenizer, seq_length=length, cache=cache, note=add)


def ids(text: str) -> list[int]:
    known = {word: number for number, word in enumerate([*CONTROLS, *WORDS])}
    return [known[word] for word in text.split()]


# Files and rows -----------------------------------------------------------------------------------------------------


def test_mnli_is_packed_as_megatron_packs_it(tmp_path: Path, vocabulary: Path) -> None:
    row = "7\t\t\t\t\t\t\t\tw1  w2\tw3\tneutral"
    long = "8\t\t\t\t\t\t\t\tw1 w2 w3 w4\tw5 w6 w7 w8 w9\tentailment"
    notes: list[str] = []
    found = opened(written(tmp_path / "dev.tsv", MNLI, row, long), mnli.FORMAT, vocabulary, notes, 10)
    assert found.uids.tolist() == [7, 8] and found.labels.tolist() == [2, 1]
    first, second = (found.row(number) for number in range(2))
    assert first.tokens[0].tolist() == ids("[CLS] w1 w2 [SEP] w3 [SEP]") + [0] * 4
    assert first.types[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0] and first.lengths.tolist() == [6]
    assert second.tokens[0].tolist() == ids("[CLS] w1 w2 w3 w4 [SEP] w5 w6 w7 [SEP]")
    assert len(notes) == 1 and "1 of 2 rows are longer than --seq-length 10 and lose their end" in notes[0]


def test_qqp_leaves_out_what_the_originals_have_too_much_of(tmp_path: Path, vocabulary: Path) -> None:
    rows = "1\t0\t0\tw1\tw2\t1", "2\t0\t0\tw1\t\t1", "3\t0\t0\tw1", "4\t0\t0\tw3\tw4\t0"
    notes: list[str] = []
    path = written(tmp_path / "train.tsv", QQP, *rows)
    for cache in (None, tmp_path, tmp_path):  # said of what is kept, too
        found = opened(path, qqp.FORMAT, vocabulary, notes, cache=cache)
    assert found.uids.tolist() == [1, 4] and found.labels.tolist() == [1, 0]
    assert "train.tsv: 2 rows" in notes[0] and notes[0].endswith("in line 3") and notes == notes[:1] * 3
    bare = opened(written(tmp_path / "test.tsv", "id\tquestion1\tquestion2", "5\tw1\tw2"), qqp.FORMAT, vocabulary, [])
    assert bare.labels.tolist() == [-1] and bare.row(0).tokens[0, :5].tolist() == ids("[CLS] w1 [SEP] w2 [SEP]")


def passage(**changed: Any) -> str:
    whole = {"article": "w9", "questions": ["w1 _ w2"], "options": [["w3", "w4", "w5", "w6"]], "answers": ["C"]}
    return json.dumps(whole | changed)


def test_race_is_the_same_as_a_folder_and_as_an_archive(tmp_path: Path, vocabulary: Path) -> None:
    for name in ("b", "a"):
        written(tmp_path / "RACE" / "dev" / f"{name}.txt", passage(answers=[name.upper()]))
    with tarfile.open(tmp_path / "race.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "RACE", "RACE")
    for place in (tmp_path / "RACE", tmp_path / "race.tar.gz"):
        found = opened(place, race.FORMAT, vocabulary, [])
        assert found.labels.tolist() == [0, 1]
        row = found.row(0)
        assert row.tokens.shape == (4, 12) and row.lengths.tolist() == [7] * 4
        assert row.tokens[2, :7].tolist() == ids("[CLS] w1 w5 w2 [SEP] w9 [SEP]")


def test_an_empty_article_is_no_other_text(tmp_path: Path, vocabulary: Path) -> None:
    place = written(tmp_path / "RACE" / "a.txt", passage(article="")).parent
    row = opened(place, race.FORMAT, vocabulary, []).row(0)
    assert row.tokens[0, :6].tolist() == ids("[CLS] w1 w3 w2 [SEP] [SEP]") and row.lengths.tolist() == [6] * 4


BAD: list[tuple[Any, str, tuple[str, ...], str]] = [
    (mnli, "a.tsv", ("id\tx", "1\t2"), "its header has 2 columns"),
    (mnli, "a.tsv", (MNLI, "1\t\t\t\t\t\t\t\tw1\tw2\tmaybe"), "a.tsv:2: the label is 'maybe'; valid: contradiction"),
    (mnli, "a.tsv", (MNLI, "1\t\t\t\t\t\t\t\tw1\t\tneutral"), "a.tsv:2: sentence2 is empty"),
    (mnli, "a.tsv", (MNLI, "1\tneutral"), "a.tsv:2: has 2 columns, and the header 11"),
    (mnli, "a.tsv", (MNLI,), "holds a header and no row"),
    (mnli, "a.tsv", ("",), "is empty"),
    (qqp, "a.tsv", ("id\ta\tb\tc", "1"), "QQP's has 6"),
    (qqp, "a.tsv", (QQP, "1\t0\t0\tw1\tw2\t2"), "a.tsv:2: the label is '2'; valid: 0, 1"),
    (qqp, "a.tsv", (QQP, "x\t0\t0\tw1\tw2\t1"), "a.tsv:2: the first column is 'x'"),
    (qqp, "a.tsv", (QQP, "1\t0\t0\tw1\t\t1"), "holds no question of QQP"),
    (race, "a/1.txt", (passage(answers=["E"]),), "1.txt:1: the answer is 'E'; valid: A, B, C, D"),
    (race, "a/1.txt", (passage(options=[["w1"]]),), "1.txt:1: a question has not exactly 4 options"),
    (race, "a/1.txt", (passage(answers=[]),), "has 1 questions, 1 lists of options and 0 answers"),
    (race, "a/1.txt", ("{",), "1.txt:1"),
    (race, "a.tar.gz", ("no archive",), "is neither a folder nor a complete .tar.gz of RACE"),
]


@pytest.mark.parametrize(("module", "name", "lines", "said"), BAD)
def test_what_is_wrong_in_a_file_is_one_line(
    module: Any, name: str, lines: tuple[str, ...], said: str, tmp_path: Path, vocabulary: Path
) -> None:
    path = written(tmp_path / name, *lines)
    with pytest.raises(ValueError) as caught:
        opened(path if path.suffix != ".txt" else path.parent, module.FORMAT, vocabulary, [])
    assert said in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith("--valid-data")


def test_the_real_files_are_read() -> None:
    """RACE's dev has 1,436 + 3,451 questions (Lai et al. 2017, table 2); 9,917 pairs of QQP."""
    labels: dict[str, list[int | None]] = {}
    for form, path in (
        (mnli.FORMAT, "mnli/glue_sample/train.tsv"),
        (mnli.FORMAT, "mnli/glue_sample/test_matched.tsv"),
        (mnli.FORMAT, "mnli/dev_matched.part1.tsv"),
        (qqp.FORMAT, "qqp/glue_sample/train.tsv"),
        (qqp.FORMAT, "qqp/dev.tsv"),
        (race.FORMAT, "race/RACE-dev.tar.gz"),
    ):
        labels[path] = [question.label for question in form.read("--valid-data", shared(path), lambda note: None)]
    assert [len(found) for found in labels.values()] == [6, 5, 4617, 1, 9917, 4887]
    assert set(labels["mnli/glue_sample/test_matched.tsv"]) == {None}
    assert set(labels["race/RACE-dev.tar.gz"]) == {0, 1, 2, 3}


def test_a_pass_holds_every_question_once(tmp_path: Path, vocabulary: Path) -> None:
    rows = [f"{number}\t0\t0\tw{number}\tw0\t{number % 2}" for number in range(7)]
    one = opened(written(tmp_path / "train.tsv", QQP, *rows), qqp.FORMAT, vocabulary, [])
    for keep, length in ((False, 6), (True, 9)):
        data = LabelledDataset([one], samples=2 * length, batch=3, seed=5, keep_last=keep)
        assert len(data) == 2 * length and data.one_pass == length
        passes = [[data[begin + number] for number in range(length)] for begin in (0, length)]
        seen = [[int(row.tokens[0, 1]) for row in found if row.label >= 0] for found in passes]
        assert all(len(set(found)) == len(found) == min(length, 7) for found in seen) and seen[0] != seen[1]
        assert data.collate(passes[0], 0).pair_weights.sum() == min(length, 7)


# Training and judging -----------------------------------------------------------------------------------------------


def pairs(path: Path, count: int, seed: int) -> Path:
    """Questions whose second part tells the class."""
    draws, rows = random.Random(seed), []
    for number in range(count):
        label = draws.randrange(2)
        second = draws.choices(WORDS[:6] if label else WORDS[6:], k=3)
        rows.append(f"{number}\t0\t0\t{' '.join(draws.choices(WORDS, k=3))}\t{' '.join(second)}\t{label}")
    return written(path, QQP, *rows)


SHAPE = "--family bert --layers 2 --hidden 32 --heads 4 --norm-placement post --activation gelu --head-activation gelu"
RUN = "--seq-length 12 --micro-batch 8 --global-batch 16 --log-interval 1 --device cpu --lr 3e-3".split()
EPOCHS = "--epochs 8 --lr-warmup-fraction 0.06".split()


def test_from_pretrained_to_predictions(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learns, resumes bit for bit where it was stopped, and is judged item by item as transformers judges it."""
    monkeypatch.chdir(tmp_path)
    train, own, other = (
        pairs(Path("train.tsv"), 70, 1),
        pairs(Path("dev_a.tsv"), 21, 2),
        pairs(Path("dev_b.tsv"), 10, 3),
    )
    start = f"pretrain {SHAPE.replace('post', 'pre')} --mock-data --steps 1 --eval-iters 0"
    start += " --save base --save-interval 1 --vocab-file"
    assert main([*start.split(), str(vocabulary), *RUN]) == 0
    sentences = ["finetune", "--load", "base", "--mock-data", "--steps", "1", "--dry-run", *RUN]
    assert main(sentences) == 0, "trained on as what it is"
    sets = ["--train-data", str(train), "--valid-data", str(own), str(other)]
    tune = ["finetune", "--task", "qqp", *sets, *RUN, *EPOCHS, "--pretrained-checkpoint", "base"]
    capsys.readouterr()
    assert main([*tune, "--save", "whole"]) == 0
    said = capsys.readouterr().out
    assert "begin at their initial values: classification_head.weight, classification_head.bias" in said
    assert "70 questions to train on, of which a pass reads 64" in said
    assert CheckpointStore(Path("whole")).steps() == [*range(4, 33, 4)]
    rows = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    judged = {name: row[name] for row in rows for name in row if name.endswith("_accuracy")}
    assert set(judged) == {"dev-a_accuracy", "dev-b_accuracy"} and all(share > 0.9 for share in judged.values())
    going_on = [*tune, "--save", "half", "--load", "half"]
    assert main([*going_on, "--exit-interval", "6"]) == 0 and main(going_on) == 0
    first, second = (CheckpointStore(Path(name)).open(32) for name in ("whole", "half"))
    assert set(first.tensors) == set(second.tensors) and not list(diff(first, second))

    score = ["eval", "--task", "qqp", "--valid-data", str(own), str(other), "--device", "cpu", "--micro-batch", "4"]
    assert main([*score, "--load", "whole", "--json", "one.json"]) == 0
    found = json.loads(Path("one.json").read_text())
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert values["total"] == 31 and values["accuracy dev-a"] == pytest.approx(judged["dev-a_accuracy"])
    assert values["accuracy dev-b"] == pytest.approx(judged["dev-b_accuracy"])
    kept = [json.loads(line) for line in Path(found["predictions"]).read_text().splitlines()]
    assert [row["uid"] for row in kept] == [*range(21), *range(10)]
    together = ["eval", "--ensemble", found["predictions"], found["predictions"], "--json", "both.jsonl"]
    assert main(together) == 0
    assert [json.loads(line) for line in Path("both.jsonl").read_text().splitlines()] == kept
    as_transformers("whole", "MegatronBertForSequenceClassification", own, qqp.FORMAT, kept[:21])


def as_transformers(run: str, kind: str, path: Path, form: Any, kept: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["convert-llama", "--load-dir", run, "--to", "hf", "--save-dir", f"{run}-hf"]) == 0
    theirs = getattr(transformers, kind).from_pretrained(f"{run}-hf").double().eval()
    tokenizer, rows = open_model(run).tokenizer(), len(kept)
    data = labelled_set("x", str(path), form, tokenizer, seq_length=12, cache=None, note=lambda note: None)
    batch: MaskedBatch = LabelledDataset([data], samples=1, batch=rows, seed=None, keep_last=True).collate(
        [data.row(number) for number in range(rows)], 0
    )
    shape = (rows, form.choices, -1) if form.choices > 1 else (rows, -1)
    seen = (torch.arange(12) < batch.lengths[:, None]).long()
    with torch.no_grad():
        logits = theirs(
            input_ids=batch.tokens.view(shape),
            attention_mask=seen.view(shape),
            token_type_ids=batch.types.view(shape),
        ).logits
    ours = torch.tensor([row["probabilities"] for row in kept], dtype=torch.float64)
    torch.testing.assert_close(ours, logits.softmax(-1), rtol=1e-5, atol=1e-6)
    assert [row["answer"] for row in kept] == logits.argmax(-1).tolist()


def test_choices_are_trained_and_judged(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = random.Random(4)
    for name in range(6):
        right = [draws.randrange(4) for _ in range(2)]
        options = [[WORDS[1] if one == answer else draws.choice(WORDS[6:]) for one in range(4)] for answer in right]
        lines = passage(questions=["w2 _", "w3 ?"], options=options, answers=["ABCD"[answer] for answer in right])
        written(Path(f"RACE/train/{name}.txt"), lines)
    tune = f"finetune {SHAPE} --task race --train-data RACE/train --save run --steps 2 --save-interval 2 --vocab-file"
    assert main([*tune.split(), str(vocabulary), *RUN, "--micro-batch", "2", "--global-batch", "4"]) == 0
    score = "eval --task race --valid-data RACE/train --device cpu --micro-batch 5 --json one.json --load"
    assert main([*score.split(), "run"]) == 0
    kept = [json.loads(line) for line in Path("one-predictions.jsonl").read_text().splitlines()]
    assert len(kept) == 12 and all(len(row["probabilities"]) == 4 for row in kept)
    as_transformers("run", "BertForMultipleChoice", Path("RACE/train"), race.FORMAT, kept)
    capsys.readouterr()
    assert main([*score.replace("race", "qqp", 1).replace("RACE/train", "x").split(), "run"]) == 2
    error = capsys.readouterr().err
    assert "--head choice --classes 4; --task qqp needs --family bert with --head classification" in error


def test_every_layout_judges_choices_alike(pool: Pool, steps: Callable[..., Any]) -> None:
    """Loss and gradients of rows that stand together, in fp64. Without a head for words nothing of it is shared with
    the last stage."""
    reference = steps(1)
    (difference,) = compare("fp64", (1,), reference, steps(4, tp=2, pp=2, sequence_parallel=True))
    assert within("fp64", difference), difference


@pytest.fixture
def steps(pool: Pool) -> Callable[..., Any]:
    from tests.training import test_dpo

    def snapshot(world: int, **values: Any) -> Any:
        own = {"task": "race", "train_data": ("x",), "layers": 2, "global_batch": 4, "micro_batch": 2}
        run = small_run("bert", world, **own, **values)
        ranks = pool.run(trained, run, world, world=world)
        return [test_dpo.Snapshot(*ranks[0][:2], test_dpo.assemble(piece for *_, pieces in ranks for piece in pieces))]

    return snapshot


def trained(groups: Any, rank: int, run: Any, world: int) -> Any:
    """Job of one rank: a step with dropout; loss, gradient norm and this rank's pieces."""
    from tests.training import test_dpo as other

    mesh = other.build_mesh(run, rank, world, groups)
    state = other.build_state(run, mesh, other.Device.choose("cpu", rank))
    batches = []
    for questions in other.own_samples(run, mesh, 0):
        rows = (questions[:, None] * 4 + torch.arange(4)).flatten()
        batch = masked_batch(run.model, run.batch.seq_length, rows, seed=1)
        batches.append(replace(batch, pairs=questions % 4))
    sums = other.backward(state, batches)
    pieces = [other.Piece(p.key, p.whole, p.start, p.tensor.detach().clone()) for p in state.gradient_pieces()]
    norm = float(state.optimizer.step(1e-3, 0.0).grad_norm)
    state.grads.wait_param_gather()
    return float(other.means(state, sums)[0]), norm, pieces


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--family", "gpt"], "--task qqp: needs a model of --family bert, not gpt"),
        (["--data-path", "x"], "--data-path: --task qqp reads --train-data and --valid-data only"),
        (["--valid-data", "nowhere.tsv"], "--valid-data nowhere.tsv: there is no such file or folder"),
        (["--lora-rank", "4"], "--lora-rank 4: excludes --task qqp, whose head is new"),
        (["--steps", "3"], "--epochs 8: is 8 steps here and excludes --steps"),
        (["--load", "x", "--pretrained-checkpoint", "y"], "--pretrained-checkpoint y: excludes --load x"),
        (["--valid-data", "a/dev.tsv", "b/dev.tsv"], "--valid-data b/dev.tsv: is named dev, as a/dev.tsv is"),
    ],
)
def test_what_a_finetuning_refuses(
    flags: list[str],
    said: str,
    tmp_path: Path,
    vocabulary: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.tsv", "a/dev.tsv", "b/dev.tsv"):
        written(Path(name), QQP, *(f"{n}\t0\t0\tw1\tw2\t1" for n in range(16)))
    line = [*SHAPE.split()[:8], "--task", "qqp", "--train-data", "train.tsv", "--vocab-file", str(vocabulary)]
    assert main(["finetune", *line, *RUN, *EPOCHS, "--dry-run", *flags]) == 2
    assert said in capsys.readouterr().err


def test_passes_are_named_where_steps_are_missing(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = str(pairs(tmp_path / "train.tsv", 16, 1))
    line = [*SHAPE.split(), "--task", "qqp", "--train-data", train, "--vocab-file", str(vocabulary)]
    assert main(["finetune", *line, *RUN]) == 2
    assert "--steps is missing: give the steps to train, or --samples or --epochs\n" in capsys.readouterr().err


def test_weights_say_which_family_it_is(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As others' BERT has it, a row for each line of its vocabulary; and flags of BERT's without --family. Rows are
    judged at the length of the finetuning."""
    monkeypatch.chdir(tmp_path)
    train = str(pairs(Path("train.tsv"), 16, 1))
    words = ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    shape = [*SHAPE.split(), "--vocab", str(len(CONTROLS) + len(WORDS)), "--mock-data", "--steps", "1"]
    assert main(["pretrain", *shape, *RUN, *words, "--eval-iters", "0", "--save", "base", "--save-interval", "1"]) == 0
    from_base = ["--load", "base", *RUN, "--steps", "1"]
    sentences = ["finetune", *from_base, "--mock-data", "--mask-prob", "0.2", "--dry-run"]
    assert main([*sentences, *words]) == 0
    tune = ["finetune", *from_base, "--task", "qqp", "--train-data", train, *words, "--seq-length", "9"]
    assert main([*tune, "--save", "tuned", "--save-interval", "1"]) == 0
    score = ["eval", "--task", "qqp", "--valid-data", train, *"--device cpu --load tuned --json score.json".split()]
    for more, length in ([], 9), ([*words, "--seq-length", "12"], 12):
        assert main([*score, *more]) == 0
        assert json.loads(Path("score.json").read_text())["settings"]["seq_length"] == length
    capsys.readouterr()
    assert main([*sentences, "--model", "tiny-gpt", "--family", "gpt", *words]) == 2
    assert capsys.readouterr().err.endswith("--mask-prob 0.2: needs --family bert or t5\n")


def test_numbers_of_a_shuffle_are_as_they_were(tmp_path: Path, vocabulary: Path) -> None:
    """The order of a pass is part of what a run that resumes relies on."""
    order = np.random.RandomState(1234 + 1).permutation(6).tolist()
    rows = [f"{number}\t0\t0\tw{number}\tw0\t1" for number in range(6)]
    one = opened(written(tmp_path / "train.tsv", QQP, *rows), qqp.FORMAT, vocabulary, [])
    data = LabelledDataset([one], samples=12, batch=3, seed=1234, keep_last=False)
    assert [int(data[6 + number].tokens[0, 1]) - len(CONTROLS) for number in range(6)] == order
