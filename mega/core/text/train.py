"""Train a tokenizer on the user's texts: byte-level BPE for gpt2.py, BERT's WordPiece, or a SentencePiece model.

Words are counted first, so that memory grows with the number of different words instead of the length of the corpus.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from mega.core.files import whole_file, write_together
from mega.core.text.gpt2 import END_OF_TEXT, byte_letters

Model = Literal["unigram", "bpe", "char", "word"]
Normalization = Literal["identity", "nmt_nfkc", "nmt_nfkc_cf"]

_CONTROLS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_REPEATED = 10_000  # maximum number of times that a word is repeated in a text passed to the library
_MOST_WORDS = 10_000_000
_LONGEST_WORD = 1000  # number of characters; the library omits longer words
_MOST_BLANKS = 16  # SentencePiece's maximum length of a piece
_SPACED_WORD = re.compile(r"( *)([^ \x00-\x1f]+)| +")


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> tuple[Path, Path]:
    """Write vocab.json and merges.txt into `directory` and return their paths.

    Ids 0 .. 255 are the bytes. Merges follow in order of rank, and the last id is <|endoftext|>. If the texts are too
    short, the vocabulary has fewer than `vocab_size` entries. Errors: ValueError for a vocab_size below 257, or if all
    texts are empty.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not 257 <= vocab_size < 2**31:
        raise ValueError(f"--vocab-size {vocab_size}: must be at least 257, 256 bytes and {END_OF_TEXT}, below 2^31")
    every = iter(texts)
    first = next((text for text in every if text), None)
    if first is None:  # without this check, the result would be a vocabulary of only the 256 bytes
        raise ValueError("--input: holds no text to train on")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(byte_letters().values()), show_progress=False
    )
    library.train_from_iterator(chain([first], every), trainer)
    model = json.loads(library.to_str())["model"]

    vocab = {**model["vocab"], END_OF_TEXT: len(model["vocab"])}
    merges = [" ".join(pair) for pair in model["merges"]]
    directory.mkdir(parents=True, exist_ok=True)
    vocab_file, merge_file = directory / "vocab.json", directory / "merges.txt"
    lines = "".join(f"{line}\n" for line in ["#version: 0.2", *merges])
    write_together({vocab_file: json.dumps(vocab, ensure_ascii=False, indent=0).encode(), merge_file: lines.encode()})
    return vocab_file, merge_file


def train_wordpiece(texts: Iterable[str], vocab_size: int, directory: Path) -> Path:
    """Write vocab.txt, with lower-case pieces, into `directory` and return its path.

    BERT's control tokens come first, then every character at the start of a word and inside a word, then the merged
    pieces. If the texts are too short, the vocabulary has fewer than `vocab_size` entries. Errors: ValueError if the
    characters alone exceed `vocab_size`, or if all texts are empty.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = words(library.normalizer.normalize_str(text) for text in texts)
    if not counts:
        raise ValueError("--input: holds no text to train on")
    letters = sorted(set().union(*counts))
    fixed = [*_CONTROLS, *letters, *(f"##{letter}" for letter in letters)]
    if not len(fixed) <= vocab_size < 2**31:
        raise ValueError(
            f"--vocab-size {vocab_size}: must be at least {len(fixed)}, the control tokens and the texts' "
            f"{len(letters)} characters twice, below 2^31"
        )
    # Characters are passed as special tokens to fix their ids. Otherwise, the order of a hash table would determine
    # their ids, and thus the order of equally frequent merges.
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    library.train_from_iterator(_repeated(counts), trainer)
    vocab = json.loads(library.to_str())["model"]["vocab"]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "vocab.txt"
    with whole_file(path) as file:
        file.write("".join(f"{piece}\n" for piece in sorted(vocab, key=vocab.__getitem__)).encode())
    return path


def _repeated(counts: Counter[str]) -> Iterator[str]:
    """Yield texts in which every word occurs as often as it was counted.

    >>> list(_repeated(Counter({"a": 2})))
    ['a a ']
    """
    for word, count in sorted(counts.items()):
        for first in range(0, count, _REPEATED):
            yield f"{word} " * min(_REPEATED, count - first)


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    directory: Path,
    *,
    model: Model = "unigram",
    coverage: float = 1.0,
    normalization: Normalization | None = None,
) -> tuple[Path, Path]:
    """Write tokenizer.model and tokenizer.vocab into `directory` and return their paths.

    Ids 0, 1 and 2 are <unk>, <s> and </s>. coverage: fraction of the texts' characters that get a piece; other
    characters are encoded as bytes, or as unknown if `normalization` is not identity. normalization: SentencePiece's
    rule; identity preserves every character. Default: identity, or nmt_nfkc for a word model, which cannot encode
    unknown words. Errors: ValueError if SentencePiece cannot build `vocab_size` pieces from the texts.
    """
    import io

    import sentencepiece

    _check_sentencepiece(vocab_size, model, coverage, normalization)
    rule = normalization or ("nmt_nfkc" if model == "word" else "identity")
    keeps = rule == "identity"  # with Llama 2's settings, decoding restores texts exactly
    counts = spaced_words(texts) if keeps else words(texts)
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # Words are passed with counts, so that memory does not grow with the length of the corpus.
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(counts.items())),
            input_format="tsv",
            model_writer=buffer,
            model_type=model,
            vocab_size=vocab_size,
            character_coverage=coverage,
            input_sentence_size=0,
            minloglevel=2,
            normalization_rule_name=rule,
            remove_extra_whitespaces=not keeps,
            allow_whitespace_only_pieces=keeps,
            byte_fallback=keeps,
            split_digits=keeps,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2].strip() or "the texts hold too few words"
        raise ValueError(f"--vocab-size {vocab_size}: SentencePiece finds no such vocabulary ({reason})") from None
    return _save_sentencepiece(buffer.getvalue(), directory)


def _check_sentencepiece(vocab_size: int, model: Model, coverage: float, normalization: Normalization | None) -> None:
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"--vocab-size {vocab_size}: must be 1 .. {2**31 - 1}")
    if not 0.98 <= coverage <= 1:
        raise ValueError(f"--character-coverage {coverage}: must be of 0.98 .. 1")
    if normalization == "identity" and model == "word":
        raise ValueError("--normalization identity: a word model loses unknown words; must be nmt_nfkc or nmt_nfkc_cf")


def _save_sentencepiece(proto: bytes, directory: Path) -> tuple[Path, Path]:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    pieces = (f"{library.id_to_piece(i)}\t{library.get_score(i):g}\n" for i in range(library.vocab_size()))
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "tokenizer.model", directory / "tokenizer.vocab"
    write_together(dict(zip(paths, (proto, "".join(pieces).encode()), strict=True)))
    return paths


def spaced_words(texts: Iterable[str], most: int = _MOST_WORDS) -> Counter[str]:
    """Count words. Each word includes the spaces before it except one, which SentencePiece adds.

    Control characters, such as line breaks, separate words and are not counted, because they are encoded as bytes.

    >>> spaced_words(["if a:\\n    if  b:"])
    Counter({'if': 1, 'a:': 1, '   if': 1, ' b:': 1})
    """

    def units(text: str) -> Iterator[str]:
        for match in _SPACED_WORD.finditer(text):
            blanks = len(match[1]) if match[2] else len(match[0])
            first, *rest = _cut([match[2]]) if match[2] else [""]
            if unit := " " * (min(blanks, _MOST_BLANKS) - 1) + first:
                yield unit
            yield from rest

    return _counted(map(units, texts), most)


def words(texts: Iterable[str], most: int = _MOST_WORDS) -> Counter[str]:
    """Count words, which are separated by white space. Long words, as in scripts without spaces, are divided, and their
    parts are counted.

    If there are more than `most` different words, the rarest words are removed repeatedly.

    >>> words(["a b", "b"])
    Counter({'b': 2, 'a': 1})
    """
    return _counted((_cut(text.replace("\0", " ").split()) for text in texts), most)


def _counted(texts: Iterable[Iterable[str]], most: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    rare = 1
    for units in texts:
        counts.update(units)
        while len(counts) > most:
            counts = Counter({word: count for word, count in counts.items() if count > rare})
            rare += 1
    return counts


def _cut(every: Iterable[str]) -> Iterator[str]:
    for word in every:
        for first in range(0, len(word), _LONGEST_WORD):
            yield word[first : first + _LONGEST_WORD]
