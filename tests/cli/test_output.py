"""What verbs print for people and for programs: a summary first, JSON on request, and what is taken by itself."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from mega import cli
from mega.core.data.indexed import noted_tokenizer
from mega.core.tasks.show import show
from mega.core.terminal import print_table
from mega.core.text.train import train_bpe

PACKAGE = Path(cli.__file__).parent

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 2 --seq-length 8 --micro-batch 2 --steps 2 --lr 1e-3 --eval-iters 0 "
    "--lr-decay constant --device cpu --no-progress"
).split()


def test_doctor_opens_with_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[0].startswith("mega ") and lines[-1].endswith("mega doctor --all")


def test_presets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "llama2-7b", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["layers"], found["parameters"]) == ("llama2-7b", [32], 6_738_415_616)


def test_a_run_takes_the_tokenizer_of_its_token_files_and_saves_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--save alone is enough; the pair, merged, still names what made it."""
    (tmp_path / "a.txt").write_text("7 3 5 1\n2 6 4 0 1 2 3 4 5 6 7\n" * 20)
    made = ["preprocess", "--input", str(tmp_path / "a.txt"), "--text-lines", "--output-prefix", str(tmp_path / "a")]
    assert cli.main([*made, "--tokenizer", "NullTokenizer", "--vocab-size", "8", "--append-eod"]) == 0
    prefix, run = str(tmp_path / "a_text_document"), tmp_path / "run"
    assert cli.main(["data", "merge", prefix, prefix, "--output-prefix", str(tmp_path / "both")]) == 0
    assert noted_tokenizer(tmp_path / "both") == {"tokenizer": "NullTokenizer", "vocab_size": 8}
    capsys.readouterr()
    assert cli.main([*RUN, "--data-path", prefix, "--save", str(run)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"mega: {prefix}: its tokenizer is taken, NullTokenizer\n")
    assert "vocabulary 9" in said.out and f"saves: in {run} at the end; " in said.out
    assert cli.main(["checkpoint", "show", str(run), "--tensors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2 and found["verdict"] == "good" and found["layout"] == "1 rank" and found["loss"] > 0
    assert found["tensors"]["weights/model.embed_tokens.weight"] == {"shape": [9, 8], "dtype": "float32"}
    assert cli.main(["data", "inspect", prefix, "--json", "--samples", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["lengths"]) == (40, {"4..7": 20, "8..15": 20})
    assert found["samples"] == [{"sequence": 0, "tokens": 5, "ids": [7, 3, 5, 1, 8], "text": "7 3 5 1 8"}]


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of token files in the working directory, which name a tokenizer of 260 tokens."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("ab abc ab\nabc ab abc\n" * 20)
    files = train_bpe(["ab abc ab " * 20], 260, Path("tokenizer"))
    made = "preprocess --input a.txt --text-lines --output-prefix a --tokenizer GPT2BPETokenizer --append-eod".split()
    assert cli.main([*made, "--vocab-file", str(files[0]), "--merge-file", str(files[1])]) == 0
    return "a_text_document"


@pytest.mark.parametrize("size", ["--vocab 300", "--config run.toml", "--load old"])
def test_a_given_vocabulary_does_not_drop_the_tokenizer_of_token_files(
    tokens: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given by a flag, by a file, or by weights without a tokenizer; the start and a dry run say what is not used."""
    run, data = [*RUN, *size.split()], ["--data-path", tokens, "--save", "run"]
    Path("run.toml").write_text("[model]\nvocab = 300\n")
    if size == "--load old":
        assert cli.main([*RUN, "--mock-data", "--vocab", "300", "--save", "old"]) == 0
        run = ["finetune", *RUN[1:], *size.split()]
    which = "--load old: has a vocabulary of 300, and" if size == "--load old" else "--vocab 300:"
    for more in (["--dry-run"], []):
        capsys.readouterr()
        assert cli.main([*run, *data, *more]) == 0
        said = capsys.readouterr()
        assert f"mega: {tokens}: its tokenizer is taken, GPT2BPETokenizer\n" in said.err
        assert said.out.splitlines().count(f"{which} the tokenizer has 260 tokens") == 1, said.out
    assert {path.name for path in Path("run/step-0000002").iterdir()} >= {"vocab.json", "merges.txt"}
    assert cli.main("generate --load run --prompt ab --tokens 2 --device cpu".split()) == 0
    assert cli.main("convert-llama --load-dir run --save-dir hf --to hf".split()) == 0
    assert Path("hf/tokenizer.json").is_file()


def test_the_tokenizer_of_token_files_must_fit_and_may_be_broken(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*RUN, "--data-path", tokens, "--save", "run", "--vocab"]
    assert cli.main([*run, "258"]) == 2
    assert "mega: --vocab 258: GPT2BPETokenizer has 260 tokens; must be at least 260" in capsys.readouterr().err
    Path("tokenizer/vocab.json").write_text("{")
    assert cli.main([*run, "300"]) == 0
    assert f"mega: {tokens}: its tokenizer cannot be opened, so checkpoints carry none: " in capsys.readouterr().err


def test_a_run_begun_with_a_smaller_vocabulary_resumes(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As earlier versions began it: without the tokenizer of its token files."""
    Path("b.txt").write_text("zyx zyx zyx\n" * 60)
    made = "preprocess --input b.txt --text-lines --output-prefix b --tokenizer GPT2BPETokenizer".split()
    assert cli.main([*made, "--vocab-file", "tokenizer/vocab.json", "--merge-file", "tokenizer/merges.txt"]) == 0
    run = [*RUN, "--data-path", "b_text_document", "--save", "run", "--vocab", "256", "--resume", "auto"]
    note = Path("b_text_document.json")
    note.rename("away")
    assert cli.main(run) == 0
    Path("away").rename(note)
    capsys.readouterr()
    assert cli.main([*run, "--steps", "3", "--override-schedule"]) == 0
    words = "its tokenizer has 260 tokens, and the run that resumes a vocabulary of 256, so checkpoints carry none"
    said = capsys.readouterr()
    assert f"mega: b_text_document: {words}\n" in said.err and "step 3/3" in said.out
    assert cli.main([*run, "--vocab", "255", "--steps", "4"]) == 2


def test_what_made_token_files_may_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix, text in (("idx", ""), ("bin", ""), ("json", '{"tokenizer_options": {"vocab_file": "/no/where"}}')):
        (tmp_path / f"a.{suffix}").write_text(text)
    assert cli.main([*RUN, "--data-path", str(tmp_path / "a")]) == 2
    gone, missing = capsys.readouterr().err.splitlines()
    assert gone.endswith("of /no/where, which is not there any more") and missing.startswith("mega: --vocab is missing")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "generate --load . --greedy --temperature 0.9",
            "--temperature 0.9: excludes --greedy, which draws nothing; give one of them",
        ),
        ("checkpoint show . --meta --json", "--json: --meta prints the plain state alone; give one of the two"),
    ],
)
def test_flags_that_exclude_each_other(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err == f"mega: {said}\n"


def drawn(width: int) -> list[str]:
    """The lines of a table of a name, a path, a number and a text, in a console of `width` columns."""
    out = io.StringIO()
    table = Table("name", box=box.SIMPLE_HEAD)
    table.add_column("path", overflow="fold")
    table.add_column("value", no_wrap=True)
    table.add_column("remark")
    table.add_row("first-of-the-names", "/data/" + 40 * "x", "12,345.6789 to 23,456.7890", "one two three four")
    print_table(Console(file=out, width=width), table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 80])
def test_a_table_cuts_no_value(width: int) -> None:
    text = "\n".join(drawn(width))
    assert "…" not in text and "first-of-the-names" in text and "12,345.6789 to 23,456.7890" in text
    assert text.count("x") == 40 and all(word in text for word in ("one", "two", "three", "four"))


def test_a_wide_console_has_one_line_a_row() -> None:
    assert len([line for line in drawn(200) if "first" in line or "xx" in line]) == 1


def test_a_score_is_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    settings = {name: 1 for name in ("tp", "cp", "pp", "micro_batch", "seq_length", "dtype")}
    figure = {"name": "accuracy of the last word, lower case, without punctuation", "value": 12345.5}
    result = {
        "task": "lambada", "settings": settings | {"model": {"path": "runs/x"}}, "tokens": 9, "tokens_per_second": None,
        "ranks": 1, "device": "cpu", "figures": [figure | {"low": 12344.123456, "high": 12346.654321}],
    }  # fmt: skip
    show(result, [figure["name"]], "here")
    printed = capsys.readouterr().out
    assert "…" not in printed and f"{figure['name']} " in printed and "12,344.1235 to 12,346.6543" in printed


def test_every_verb_prints_its_tables_whole() -> None:
    """Only the quickstart's table, whose two columns share the width and fold, is printed in another way."""
    direct = re.compile(r"\.print\((\w+\.)?\w*table\b")
    printing = {path.name for path in PACKAGE.rglob("*.py") if direct.search(path.read_text())}
    assert printing == {"terminal.py", "tour.py"}
