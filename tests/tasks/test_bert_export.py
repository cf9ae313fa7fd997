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

PAIRS = 800
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


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_after_the_round_trip(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = shared(f"bert/bert-base-{'cased' if kind == 'cased' else 'uncased'}-vocab.txt").read_bytes()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary.splitlines()), max_position_embeddings=128, initializer_range=0.2, **sizes
    )
    torch.manual_seed(0)
    theirs = tmp_path / "theirs"
    transformers.BertForSequenceClassification(config).save_pretrained(theirs)
    (theirs / "vocab.txt").write_bytes(vocabulary)
    settings = {"tokenizer_class": "BertTokenizer", **KINDS[kind]}
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
    pairs = questions()
    assert len(pairs) == PAIRS
    rows = [f"{n}\t0\t0\t{first}\t{second}\t{n % 2}" for n, (first, second) in enumerate(pairs)]
    table = tmp_path / "dev.tsv"
    table.write_text("\n".join(["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *rows]) + "\n")

    def of_transformers(place: Path) -> torch.Tensor:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(place).eval()
        found = []
        for at in range(0, PAIRS, 100):
            first, second = zip(*pairs[at : at + 100], strict=True)
            with torch.no_grad():
                inputs = tokenizer(list(first), list(second), return_tensors="pt", padding=True)
                found.append(model(**inputs).logits.softmax(-1))
        return torch.cat(found)

    expected = of_transformers(theirs)
    assert expected[:, 0].std() > 1e-2, "probabilities that differ from pair to pair"
    own, bare, back = tmp_path / "own", tmp_path / "bare", tmp_path / "back"
    assert main(["convert-llama", "--load-dir", str(theirs), "--save-dir", str(own)]) == 0
    assert main(["convert-llama", "--load-dir", str(own), "--save-dir", str(back)]) == 0
    for place in (theirs, own, back):
        torch.testing.assert_close(judged(place, table, tmp_path / "score.json"), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_transformers(back), expected, rtol=0, atol=1e-6)
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
    torch.testing.assert_close(of_transformers(out), expected, rtol=0, atol=1e-6)
