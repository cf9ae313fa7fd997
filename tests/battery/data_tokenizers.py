"""Every tokenizer against its reference library: shared corpora, English and Chinese, and 5,000 fuzz strings."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.text import gpt2, llama3
from mega.core.text.build import build
from mega.core.text.probes import PROBES
from tests.battery.data_ledger import run
from tests.support.shared import shared
from tests.text.test_gpt2 import fuzz


def texts() -> list[str]:
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt") as file:
        english = [json.loads(line)["text"] for line in file][::2]
    english += shared("wikitext/wiki.valid.raw").read_text().split("\n")
    chinese = shared("chinese/cmrc2018_trial_contexts.jsonl").read_text().splitlines()
    return [*english, *(json.loads(line)["text"] for line in chinese), *fuzz(5000, 11), *PROBES]


def same(options: dict[str, Any], oracle: Callable[[Sequence[str]], list[list[int]]]) -> dict[str, Any]:
    every = texts()
    tokenizer = build(**options)
    found = tokenizer.encode_batch(every)
    rows = [found.ids[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)]
    differ = [text for text, ours, theirs in zip(every, rows, oracle(every), strict=True) if ours != theirs]
    assert not differ, f"{len(differ)} differ, first {differ[0][:60]!r}"
    return {"texts": len(every), "MB": round(sum(len(text.encode()) for text in every) / 1e6, 1), "differ": 0}


def against_gpt2() -> dict[str, Any]:
    import tiktoken

    options: dict[str, Any] = {
        "tokenizer": "GPT2BPETokenizer",
        "vocab_file": shared("gpt2/gpt2-vocab.json"),
        "merge_file": shared("gpt2/gpt2-merges.txt"),
    }
    made = build(**options)
    ranks = {bytes(made._bytes[c][0] for c in p): i for p, i in made._vocab.items() if p != gpt2.END_OF_TEXT}  # type: ignore[attr-defined]
    library = tiktoken.Encoding("gpt2", pat_str=gpt2._WORDS, mergeable_ranks=ranks, special_tokens={})
    return same(options, lambda every: [library.encode_ordinary(text) for text in every])


def against_llama3() -> dict[str, Any]:
    import tiktoken

    path = shared("llama3/tokenizer.model")
    ranks = llama3.read_ranks(path)
    library = tiktoken.Encoding("llama3", pat_str=llama3._WORDS, mergeable_ranks=ranks, special_tokens={})
    return same(
        {"tokenizer": "Llama3Tokenizer", "tokenizer_model": path},
        lambda every: [[128000, *library.encode_ordinary(text)] for text in every],
    )


def against_sentencepiece(kind: str, model: str) -> Any:
    def prove() -> dict[str, Any]:
        import sentencepiece

        library = sentencepiece.SentencePieceProcessor(model_file=str(shared(model)))
        bos = [1] if kind == "Llama2Tokenizer" else []
        return same(
            {"tokenizer": kind, "tokenizer_model": shared(model)},
            lambda every: [bos + ids for ids in library.encode(list(every))],
        )

    return prove


def against_bert(case: str) -> Any:
    def prove() -> dict[str, Any]:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        path, lower = shared(f"bert/bert-base-{case}-vocab.txt"), case == "uncased"
        vocab = {line: i for i, line in enumerate(path.read_text().splitlines())}
        library = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=200))
        library.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return same(
            {"tokenizer": f"BertWordPiece{'LowerCase' if lower else 'Case'}", "vocab_file": path},
            lambda every: [found.ids for found in library.encode_batch_fast(list(every))],
        )

    return prove


ITEMS = [
    ("GPT-2 = tiktoken", against_gpt2),
    ("Llama-3 = tiktoken", against_llama3),
    ("Llama-2 = sentencepiece", against_sentencepiece("Llama2Tokenizer", "llama2/tokenizer.model")),
    ("stories = sentencepiece", against_sentencepiece("GPTSentencePieceTokenizer", "stories260K/tok512.model")),
    ("BERT uncased = tokenizers", against_bert("uncased")),
    ("BERT cased = tokenizers", against_bert("cased")),
]

if __name__ == "__main__":
    run("data_tokenizers", ITEMS)
