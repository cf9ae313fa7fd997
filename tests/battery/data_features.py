"""Tokenizers without a file of a reference to read, and BERT's and T5's samples of a real corpus, at length."""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data.build import build_datasets
from mega.core.data.masked import T5Dataset
from mega.core.data.preprocessing.preprocess import Sentences, preprocess
from mega.core.text.build import build
from tests.battery.data_ledger import run
from tests.support.shared import shared
from tests.text.test_control_text import extended_texts, hugging_face_texts, yuan_texts

SAMPLES = 10_000
LENGTH = 128


def hugging_face() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {"texts": hugging_face_texts(5000, 2_000_000, Path(folder)), "differ": 0}


def samples(kind: str, folder: Path) -> tuple[Any, Any]:
    """A dataset of 10,000 samples over 400 documents of novels cut into sentences, and its tokenizer."""
    vocab = shared("bert/bert-base-uncased-vocab.txt")
    options: dict[str, Any] = {"tokenizer": "BertWordPieceLowerCase", "vocab_file": vocab, "vocab_extra_ids": 100}
    with gzip.open(shared("novels/novels.jsonl.gz"), "rb") as file:
        (folder / "in.jsonl").write_bytes(b"".join(file.readlines()[::13][:400]))
    preprocess(
        [folder / "in.jsonl"], str(folder / "a"), options, overwrite=True, sentences=Sentences(splitter="sentencex")
    )
    tokenizer = build(**options)
    made = build_datasets(
        DataConfig(train_data=(str(folder / "a_text_sentence"),)),
        seq_length=LENGTH,
        seed=11,
        vocab=tokenizer.vocab_size,
        samples=(SAMPLES, 0, 0),
        tokenizer=tokenizer,
        masking=MaskingConfig(sample_kind=kind, decoder_seq_length=LENGTH),  # type: ignore[arg-type]
    )
    return made.train, tokenizer


def bert() -> dict[str, Any]:
    """15 % masked but for rounding; of these 80, 10 and 10 %; half of the pairs swapped; a tenth short on purpose."""
    with tempfile.TemporaryDirectory() as folder:
        dataset, tokenizer = samples("bert", Path(folder))
        text, labels, real, swapped = (
            np.stack(column)
            for column in zip(
                *((s.text, s.labels, s.padding_mask, s.is_random) for s in map(dataset.__getitem__, range(SAMPLES))),
                strict=True,
            )
        )
    chosen = labels >= 0
    masked, same = text[chosen] == tokenizer.roles.mask, text[chosen] == labels[chosen]
    controls = np.isin(np.where(chosen, labels, text), (tokenizer.roles.cls, tokenizer.roles.sep))
    found = {
        "samples": SAMPLES,
        "masked share": round(float(chosen.sum() / real.sum()), 4),
        "mask": round(float(masked.mean()), 4),
        "kept": round(float((same & ~masked).mean()), 4),
        "random": round(float((~same & ~masked).mean()), 4),
        "swapped": round(float(swapped.mean()), 4),
        "controls masked": int((controls & chosen).sum()),
    }
    assert found["controls masked"] == 0 and 0.13 < found["masked share"] <= 0.15
    for name, share, of in (("mask", 0.8, chosen.sum()), ("random", 0.1, chosen.sum()), ("swapped", 0.5, SAMPLES)):
        assert abs(found[name] - share) < 5 * (share * (1 - share) / of) ** 0.5 + 1e-3, found
    return found


def t5() -> dict[str, Any]:
    """Every sample's spans, put back where their sentinels stand, are the text; 15 % is taken out but for rounding."""
    with tempfile.TemporaryDirectory() as folder:
        dataset, tokenizer = samples("t5", Path(folder))
        assert isinstance(dataset, T5Dataset)
        sentinels, taken, total, spans = set(tokenizer.roles.sentinels), 0, 0, 0
        for i in range(SAMPLES):
            sample = dataset[i]
            parts: dict[int, list[int]] = {}
            for token in sample.labels[sample.loss_mask == 1][:-1].tolist():
                if token in sentinels:
                    current = parts.setdefault(token, [])
                else:
                    current.append(token)
            encoder = sample.text_enc[sample.text_enc != tokenizer.pad].tolist()
            restored = [t for token in encoder for t in parts.get(token, [token])]
            texts = dataset._read([i])
            assert restored == texts.ids[: texts.targets[0]].tolist(), i
            taken, total = taken + sum(map(len, parts.values())), total + len(restored)
            spans += len(parts)
    assert 0.13 < taken / total <= 0.15
    return {"samples": SAMPLES, "taken": round(taken / total, 4), "tokens a span": round(taken / spans, 2)}


ITEMS = [
    ("Yuan = its definition", lambda: {"texts": yuan_texts(5000, 256), "differ": 0}),
    ("SentencePieceTokenizer = sentencepiece", lambda: {"texts": extended_texts(5000, 2_000_000), "differ": 0}),
    ("tokenizer.json = tokenizers", hugging_face),
    ("BERT's masking", bert),
    ("T5's spans", t5),
]

if __name__ == "__main__":
    run("data_features", ITEMS)
