"""A BERT that leaves mega judges pairs as it did: its folder says what its tokenizer does to letters and accents."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from tests.support.shared import shared

PAIRS = 80
ACCENTS = {"a": "à", "e": "é", "i": "ï", "o": "ö", "u": "ü", "c": "ç", "n": "ñ"}
KINDS: dict[str, dict[str, Any]] = {
    "cased": {"do_lower_case": False},
    "uncased": {"do_lower_case": True},
    "accented": {"do_lower_case": True, "strip_accents": False},
}


def questions() -> list[tuple[str, str]]:
    """Of QQP, with an accent here and there."""
    draws, found = random.Random(2), []
    for line in shared("qqp/dev.tsv").read_text().splitlines()[1:]:
        pair = line.split("\t")[3:5]
        if len(pair) == 2 and all("." not in text and 10 < len(text) < 90 for text in pair):
            first, second = ("".join(ACCENTS.get(c, c) if draws.random() < 0.1 else c for c in text) for text in pair)
            found.append((" ".join(first.split()), " ".join(second.split())))
    return found[:PAIRS]


def judged(place: Path, table: Path, out: Path) -> torch.Tensor:
    """Probabilities of `mega eval`."""
    line = ["eval", "--task", "qqp", "--valid-data", str(table), "--load", str(place), "--device", "cpu"]
    assert main([*line, "--micro-batch", "100", "--json", str(out)]) == 0
    rows = Path(json.loads(out.read_text())["predictions"]).read_text().splitlines()
    return torch.tensor([json.loads(row)["probabilities"] for row in rows])


ENTRIES = 6000
"""The first ones of a published vocabulary: all letters, and the most frequent words and parts of words. Ten programs
read it in each test, and a whole one, as JSON, takes most of their time."""


def vocabulary_of(kind: str, folder: Path) -> Path:
    """A vocab.txt of the first entries, in a folder."""
    lines = published(kind).read_bytes().splitlines(keepends=True)[:ENTRIES]
    (file := folder / f"{kind}.txt").write_bytes(b"".join(lines))
    return file


def published(kind: str) -> Path:
    return shared(f"bert/bert-base-{'cased' if kind == 'cased' else 'uncased'}-vocab.txt")


def their_model(theirs: Path) -> None:
    """Weights drawn at random, without a tokenizer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=ENTRIES, max_position_embeddings=128,
        initializer_range=0.2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(theirs)


def table_of(pairs: list[tuple[str, str]], folder: Path) -> Path:
    rows = [f"{n}\t0\t0\t{first}\t{second}\t{n % 2}" for n, (first, second) in enumerate(pairs)]
    table = folder / "dev.tsv"
    table.write_text("\n".join(["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *rows]) + "\n")
    return table


def of_transformers(place: Path, pairs: list[tuple[str, str]]) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place).eval()
    found = []
    for at in range(0, len(pairs), 100):
        first, second = zip(*pairs[at : at + 100], strict=True)
        with torch.no_grad():
            how = {"return_tensors": "pt", "padding": True, "return_token_type_ids": True}
            inputs = tokenizer(list(first), list(second), **how)
            found.append(model(**inputs).logits.softmax(-1))
    return torch.cat(found)


def converted(source: Path, target: Path) -> Path:
    assert main(["convert-llama", "--load-dir", str(source), "--save-dir", str(target)]) == 0
    return target


FAST: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    "cased": ("cased", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, False),
    "uncased": ("uncased", {"tokenizer_class": "BertTokenizerFast"}, True),
    "accented": ("accented", {"tokenizer_class": "BertTokenizer", "strip_accents": False}, True),
    "by tokenizer.json alone": ("cased", {"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    "nothing said": ("cased", None, False),
}
"""A tokenizer.json without a vocab.txt: weights, tokenizer_config.json, whether it lower-cases by itself."""


@pytest.mark.parametrize("case", FAST)
def test_a_tokenizer_json_without_a_vocab_txt(tmp_path: Path, case: str) -> None:
    """As transformers 5 saves a BERT: read, scored, tuned and exported, with its probabilities."""
    transformers = pytest.importorskip("transformers")
    kind, settings, lowers = FAST[case]
    theirs = tmp_path / "theirs"
    their_model(theirs)
    made = transformers.BertTokenizer(vocab=str(vocabulary_of(kind, tmp_path)), do_lower_case=lowers)
    made.save_pretrained(theirs)
    (theirs / "tokenizer_config.json").unlink()
    if settings is not None:
        named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
        (theirs / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    assert not (theirs / "vocab.txt").exists()
    pairs = questions()[:40]
    table, expected = table_of(pairs, tmp_path), of_transformers(theirs, pairs)
    own = converted(theirs, tmp_path / "own")
    back = converted(own, tmp_path / "back")
    line = ["finetune", "--task", "qqp", "--load", str(theirs), "--train-data", str(table), "--steps", "1", "--lr", "0"]
    line += ["--micro-batch", "4", "--device", "cpu", "--save", str(tmp_path / "run"), "--save-interval", "1"]
    assert main([*line, "--seq-length", "64", "--eval-iters", "0"]) == 0
    tuned = converted(tmp_path / "run", tmp_path / "tuned")
    for place in (theirs, own, back, tmp_path / "run", tuned):
        torch.testing.assert_close(judged(place, table, tmp_path / "score.json"), expected, rtol=0, atol=1e-6)
    for place in (back, tuned):
        torch.testing.assert_close(of_transformers(place, pairs), expected, rtol=0, atol=1e-6)


def test_a_tokenizer_json_is_the_vocab_txt_that_it_holds(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from mega.core.text.build import build

    transformers.BertTokenizer(vocab=str(published("cased")), do_lower_case=False).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    first = build(tokenizer="BertWordPieceCase", vocab_file=published("cased"))
    second = build(tokenizer="BertWordPieceCase", vocab_file=file)
    assert second.identity() == first.identity() and second.files().keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for change in (
        {"model": {"type": "BPE"}},
        {"normalizer": None},
        {"added_tokens": [{"content": "[X]", "id": 28996}]},
    ):
        (tmp_path / "odd.json").write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(ValueError, match=r"odd\.json: must be a vocab\.txt, or a tokenizer\.json of a BERT"):
            build(tokenizer="BertWordPieceCase", vocab_file=tmp_path / "odd.json")


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_after_the_round_trip(tmp_path: Path, kind: str) -> None:
    theirs = tmp_path / "theirs"
    their_model(theirs)
    (theirs / "vocab.txt").write_bytes(vocabulary_of(kind, tmp_path).read_bytes())
    settings = {"tokenizer_class": "BertTokenizer", **KINDS[kind]}
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
    pairs = questions()
    assert len(pairs) == PAIRS
    table = table_of(pairs, tmp_path)
    expected = of_transformers(theirs, pairs)
    assert expected[:, 0].std() > 1e-2, "probabilities that differ from pair to pair"
    own, bare, back = tmp_path / "own", tmp_path / "bare", tmp_path / "back"
    assert main(["convert-llama", "--load-dir", str(theirs), "--save-dir", str(own)]) == 0
    assert main(["convert-llama", "--load-dir", str(own), "--save-dir", str(back)]) == 0
    for place in (theirs, own, back):
        torch.testing.assert_close(judged(place, table, tmp_path / "score.json"), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_transformers(back, pairs), expected, rtol=0, atol=1e-6)
    if kind == "accented":
        return
    (theirs / "tokenizer_config.json").unlink()
    # A run of mega's own, which has no file but vocab.txt, writes the settings of its kind of tokenizer.
    line = ["finetune", "--task", "qqp", "--load", str(theirs), "--train-data", str(table), "--steps", "1", "--lr", "0"]
    line += ["--micro-batch", "4", "--device", "cpu", "--save", str(bare), "--save-interval", "1", "--seq-length", "64"]
    line += ["--tokenizer", f"BertWordPiece{'Case' if kind == 'cased' else 'LowerCase'}"]
    assert main([*line, "--vocab-file", str(theirs / "vocab.txt"), "--eval-iters", "0"]) == 0
    out = tmp_path / "bare-hf"
    assert main(["convert-llama", "--load-dir", str(bare), "--save-dir", str(out)]) == 0
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert said["do_lower_case"] == (kind == "uncased") and said["tokenize_chinese_chars"] is True
    torch.testing.assert_close(of_transformers(out, pairs), expected, rtol=0, atol=1e-6)
