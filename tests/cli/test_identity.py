"""A verb that is given another tokenizer or template than the weights have: refused, reported or taken, cell by cell.

The rule is RULES of core/text/identity.py; this table is what a user sees of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.checkpoint.own.store import locate
from mega.core.data.indexed import note_path
from mega.core.inference.loading.load import chat_template
from mega.core.text.identity import RULES
from tests.support.shared import shared

SHAPE = "--family llama --layers 1 --hidden 16 --heads 2 --ffn 32 --positions 64".split()
STEP = (
    "--seq-length 32 --micro-batch 1 --steps 1 --lr 1e-3 --lr-decay constant --eval-iters 0 --device cpu --no-progress"
).split()
NULL = ["--tokenizer", "NullTokenizer", "--vocab-size", "500"]


class Place:
    """Runs and token files, made once: `text` and `chat` are runs with one tokenizer, `hf` the first as a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "tokenizer.model"
        self.model.write_bytes(shared("stories260K_hf/tokenizer.model").read_bytes())
        self.same = ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(self.model)]
        (folder / "a.jsonl").write_text('{"text": "Once upon a time there was a model of few words."}\n' * 40)
        (folder / "n.jsonl").write_text(json.dumps({"text": " ".join(["7", "8", "9"] * 9)}) + "\n")
        (folder / "n.jsonl").write_text((folder / "n.jsonl").read_text() * 40)
        turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The model."}]
        (folder / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
        for name, flags in (("a", self.same), ("n", NULL)):
            made("preprocess", "--input", folder / f"{name}.jsonl", "--output-prefix", folder / name, *flags)
        self.tokens, self.others = (folder / f"{name}_text_document" for name in ("a", "n"))
        save = ["--save-interval", "1", "--save"]
        made(
            "pretrain",
            *SHAPE,
            *STEP,
            *self.same,
            "--data-path",
            self.tokens,
            "--split",
            "1,0,0",
            *save,
            folder / "text",
        )
        made("convert-llama", "--load-dir", folder / "text", "--save-dir", folder / "hf")
        self.talks = ["--chat-data", folder / "talks.jsonl"]
        made(
            "finetune",
            "--load",
            folder / "text",
            *STEP,
            *self.talks,
            "--chat-template",
            "llama2",
            *save,
            folder / "chat",
        )


def ours(*words: object) -> int:
    return main([str(word) for word in words])


def made(*words: object) -> None:
    assert ours(*words) == 0, words


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("identity"))


Words = Callable[[Place], list[object]]


def trains(verb: str, load: str, *, data: str = "tokens", tokenizer: str = "") -> Words:
    def words(place: Place) -> list[object]:
        files: list[object] = (
            ["--data-path", getattr(place, data), "--split", "1,0,0"] if data != "talks" else place.talks
        )
        more = ["--finetune", "--use-checkpoint-config"] if verb == "pretrain" else []
        flags = {"": [], "same": place.same, "other": NULL}[tokenizer]
        return [verb, "--load", place.folder / load, *more, *STEP, *files, "--metrics", place.folder / "m", *flags]

    return words


def with_words(first: Words, *more: str) -> Words:
    return lambda place: [*first(place), *more]


def scores(load: str, *, data: str = "tokens", tokenizer: str = "") -> Words:
    def words(place: Place) -> list[object]:
        flags = {"": [], "same": place.same, "other": NULL}[tokenizer]
        line = ["eval", "--task", "ppl", "--valid-data", getattr(place, data), "--load", place.folder / load]
        return [*line, "--device", "cpu", "--json", place.folder / "score.json", "--no-progress", *flags]

    return words


def speaks(load: str, *more: str, tokenizer: str = "") -> Words:
    def words(place: Place) -> list[object]:
        flags = {"": [], "same": place.same, "other": NULL}[tokenizer]
        return ["generate", "--load", place.folder / load, "--prompt", "Once", "--tokens", "2", *more, *flags]

    return words


ALLOW = "--allow-tokenizer-mismatch"
MADE, OWN, TEMPLATE = "was made with", "has a tokenizer of its own", "--chat-template"
TABLE: dict[str, tuple[Words, str, str]] = {
    "pretrain, its own": (trains("pretrain", "text"), "taken", ""),
    "pretrain, its own by flags": (trains("pretrain", "text", tokenizer="same"), "taken", ""),
    "pretrain, flags and other token files": (
        trains("pretrain", "text", data="others", tokenizer="same"),
        "refused",
        MADE,
    ),
    "pretrain, other token files of others' weights": (trains("pretrain", "hf", data="others"), "refused", MADE),
    "pretrain, other token files": (trains("pretrain", "text", data="others"), "refused", MADE),
    "pretrain, other tokenizer": (trains("pretrain", "text", data="others", tokenizer="other"), "refused", OWN),
    "pretrain, other, allowed": (with_words(trains("pretrain", "text", data="others"), ALLOW), "reported", MADE),
    "pretrain, talks": (with_words(trains("pretrain", "chat", data="talks")), "taken", ""),
    "pretrain, other template": (
        with_words(trains("pretrain", "chat", data="talks"), TEMPLATE, "plain"),
        "reported",
        "has another of its own",
    ),
    "pretrain, no template": (trains("pretrain", "text", data="talks"), "reported", "plain is taken"),
    "finetune, its own": (trains("finetune", "text"), "taken", ""),
    "finetune, its own by flags": (trains("finetune", "text", tokenizer="same"), "taken", ""),
    "finetune, another file of theirs": (trains("finetune", "hf", tokenizer="same"), "reported", "that came with"),
    "finetune, other token files": (trains("finetune", "text", data="others"), "refused", MADE),
    "finetune, other tokenizer": (trains("finetune", "text", data="others", tokenizer="other"), "refused", OWN),
    "finetune, other of others": (trains("finetune", "hf", data="others", tokenizer="other"), "refused", OWN),
    "finetune, other, allowed": (
        with_words(trains("finetune", "text", data="others", tokenizer="other"), ALLOW),
        "reported",
        OWN,
    ),
    "finetune, talks by other": (trains("finetune", "text", data="talks", tokenizer="other"), "refused", OWN),
    "finetune, its template": (trains("finetune", "chat", data="talks"), "taken", ""),
    "finetune, same template": (with_words(trains("finetune", "chat", data="talks"), TEMPLATE, "llama2"), "taken", ""),
    "finetune, other template": (
        with_words(trains("finetune", "chat", data="talks"), TEMPLATE, "plain"),
        "reported",
        "has another of its own",
    ),
    "finetune, no template": (trains("finetune", "text", data="talks"), "reported", "plain is taken"),
    "finetune, none of theirs": (
        with_words(trains("finetune", "text", data="talks"), TEMPLATE, "model"),
        "refused",
        "what its conversations",
    ),
    "eval, its own": (scores("text", tokenizer="same"), "taken", ""),
    "eval, other token files": (scores("text", data="others"), "refused", MADE),
    "eval, other tokenizer": (scores("text", data="others", tokenizer="other"), "refused", OWN),
    "eval, other of others": (scores("hf", data="others", tokenizer="other"), "refused", OWN),
    "eval, other, allowed": (with_words(scores("text", data="others"), ALLOW), "reported", MADE),
    "generate, its own": (speaks("text", tokenizer="same"), "taken", ""),
    "generate, other tokenizer": (speaks("text", tokenizer="other"), "refused", OWN),
    "generate, a template": (speaks("chat", TEMPLATE, "llama2"), "refused", "mega generate continues text as it is"),
    "generate, of conversations": (speaks("chat"), "reported", "was trained on conversations"),
}
"""Case -> the line, what becomes of it, and what a user reads."""


@pytest.mark.parametrize("case", TABLE)
def test_every_cell(case: str, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words, verdict, said = TABLE[case]
    capsys.readouterr()
    code = ours(*words(place))
    printed = capsys.readouterr()
    lines = printed.err + printed.out
    found = (
        "refused"
        if code
        else "reported"
        if re.search(f"{MADE}|{OWN}|{TEMPLATE}|was trained on|that came with", lines)
        else "taken"
    )
    assert (found, code in (0, 2)) == (verdict, True), lines
    assert said in lines, lines
    if verdict == "refused":
        assert len(printed.err.strip().splitlines()) == 1 and not printed.out, lines


def test_the_table_has_every_rule() -> None:
    """Of the verbs above; others are held by the tests of data and of the server."""
    for verb in ("pretrain", "finetune", "eval", "generate"):
        refused = {words[1] for case, words in TABLE.items() if case.startswith(verb)}
        assert set(RULES[verb].values()) - {"taken"} <= refused, verb


def test_the_page_has_the_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "identity.md").read_text()
    cases = ("token files", "tokenizer", "earlier version", "template", "no template")
    for verb, rules in RULES.items():
        row = [f"`{verb}`", *(rules.get(case, "") for case in cases)]
        assert f"| {' | '.join(row)} |" in page, verb


def test_the_page_gives_a_checkpoint_more_tokens(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reserved rows take new tokens; otherwise transformers adds rows. --vocab and the permission add none."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "identity.md").read_text()
    block = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    made("convert-llama", "--load-dir", place.folder / "text", "--save-dir", "first-hf", "--to", "hf")
    exec(compile(block[1], "identity.md", "exec"), {})
    larger = ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", "larger/tokenizer.json"]
    chat = ["finetune", *STEP, *place.talks, "--chat-template", "chatml"]
    reserving = ["pretrain", *SHAPE, *STEP, *place.same, "--data-path", place.tokens, "--split", "1,0,0"]
    capsys.readouterr()
    assert ours(*reserving, "--load", place.folder / "text", "--vocab", "520", "--save", "x") == 2
    assert "--vocab 520: the checkpoint " in capsys.readouterr().err
    for allowed, message in (([], "has a tokenizer of its own"), (["--allow-tokenizer-mismatch"], "and Hugging")):
        assert ours(*chat, "--load", place.folder / "text", *larger, *allowed, "--save", "x") == 2
        assert message in capsys.readouterr().err
    made(*chat, "--load", "larger", "--save", "resized")
    assert "vocabulary 514;" in capsys.readouterr().out
    made(*reserving, "--vocab", "520", "--save", "reserved")
    made(*chat, "--load", "reserved", *larger, "--allow-tokenizer-mismatch", "--save", "filled")
    assert "vocabulary 520;" in capsys.readouterr().out


def test_what_an_earlier_version_noted_is_taken(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A hash of all files, as of a tokenizer.json with the files next to it; damaged notes say nothing."""
    from mega.core.text.build import build

    made = build(tokenizer="Llama2Tokenizer", tokenizer_model=place.model)
    path = note_path(str(place.tokens))
    kept = Path(path).read_bytes()
    note = json.loads(kept)
    for tokenizer in (made.identity()._asdict() | {"fingerprint": made._hash(512, "whole files")}, {"kind": 3}):
        Path(path).write_text(json.dumps({**note, "tokenizer": tokenizer}))
        assert ours(*trains("finetune", "text")(place)) == 0
        assert MADE not in capsys.readouterr().err
    Path(path).write_bytes(kept)


def test_a_second_finetuning_converses_as_the_first(place: Place) -> None:
    words = trains("finetune", "chat", data="talks")(place)
    assert ours(*words, "--save", place.folder / "again", "--save-interval", 1) == 0
    assert chat_template(locate(place.folder / "again")) == chat_template(locate(place.folder / "chat")) == "llama2"


def test_finetuning_begins_with_weights(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["finetune", *SHAPE, *STEP, *place.same, "--data-path", place.tokens, "--split", "1,0,0"]
    capsys.readouterr()
    for more in ([], ["--resume", "auto", "--save", place.folder / "none", "--save-interval", 1]):
        assert ours(*line, *more) == 2
        assert "--load is missing: mega finetune begins with the weights of a run" in capsys.readouterr().err
    assert not (place.folder / "none").exists()


def test_null_tokenizers_size_is_read_by_generate(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    save = ["--save", place.folder / "null", "--save-interval", 1]
    assert ours("pretrain", *SHAPE, *STEP, *NULL, "--data-path", place.others, "--split", "1,0,0", *save) == 0
    capsys.readouterr()
    line = ["generate", "--load", place.folder / "null", "--prompt", "7 8", "--tokens", 2]
    assert ours(*line, *NULL) == 0
    assert "changes nothing" not in capsys.readouterr().err
    assert ours(*line, "--vocab-size", 500) == 2
    assert "--vocab-size: needs --tokenizer NullTokenizer" in capsys.readouterr().err


def test_anothers_result_is_not_replaced(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def score(load: str, *more: object) -> tuple[int, str]:
        line = ["eval", "--task", "ppl", "--valid-data", place.tokens, "--load", place.folder / load, "--device", "cpu"]
        code = ours(*line, *more)
        return code, capsys.readouterr().err

    assert score("text")[0] == score("text")[0] == 0
    kept = Path("eval-ppl.json").read_bytes()
    code, said = score("chat")
    assert code == 2 and "is the result of another model" in said and "give --json FILE" in said
    assert Path("eval-ppl.json").read_bytes() == kept
    code, said = score("chat", "--json", "mine.json")
    assert code == 0 and "another model" not in said
    code, said = score("text", "--json", "mine.json")
    assert code == 0 and "is the result of another model" in said and "which is replaced" in said
