"""GPT-2's BPE with fairseq's ids. The pieces are GPT-2's; their ids follow four special ids, in the order of a
dict.txt.

A line of dict.txt contains a GPT-2 id in digits (for `FairseqWords`, a word of any BPE) and the number of its
occurrences. The symbol in the first line has id 4. Lines such as `madeupword0000 0` pad the table to a round size.
RoBERTa, BART and Megatron-11b use this numbering.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mega.core.text.gpt2 import GPT2Tokenizer
from mega.core.text.probe import FILE_BYTES
from mega.core.text.tokenizer import Encoded, Tokenizer
from mega.core.untrusted import read_limited

SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
"""Special symbol -> id. These ids precede the ids of a dict.txt."""

OVERWRITE = "#fairseq:overwrite"
"""Marker at the end of a line that replaces an earlier line with the same symbol."""


_UNPUBLISHED = "transformers has none that numbers tokens by a dict.txt of fairseq"


class FairseqTokenizer(Tokenizer):
    """A tokenizer from GPT-2's vocab.json and merges.txt and a dict.txt. No token is added before or after a text."""

    kind = "FairseqTokenizer"
    bos = SPECIAL["<s>"]
    pad = SPECIAL["<pad>"]
    eod = SPECIAL["</s>"]

    def __init__(self, vocab_file: Path, merge_file: Path, dictionary: Path) -> None:
        self._gpt2 = GPT2Tokenizer(vocab_file, merge_file)
        self._files = {**self._gpt2.files(), "dict.txt": dictionary}
        self._symbols = read_dictionary(dictionary)

    @property
    def vocab_size(self) -> int:
        return len(self._symbols)

    def encode(self, text: str) -> list[int]:
        return [self._fairseq_id.get(token, SPECIAL["<unk>"]) for token in self._gpt2.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        import numpy as np

        encoded = self._gpt2.encode_batch(texts)
        table = np.full(self._gpt2.vocab_size, SPECIAL["<unk>"], np.int64)
        for gpt2_id, fairseq_id in self._fairseq_id.items():
            if gpt2_id < len(table):
                table[gpt2_id] = fairseq_id
        return Encoded(table[encoded.ids], encoded.offsets)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids. Special ids and padding ids have no text."""
        symbols = (self._symbols[int(token)] for token in ids)
        return self._gpt2.decode([int(symbol) for symbol in symbols if symbol.isdecimal()])

    def control(self, name: str) -> int | None:
        return SPECIAL.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        return SPECIAL

    def unpublished(self) -> str | None:
        return _UNPUBLISHED

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    @cached_property
    def _fairseq_id(self) -> dict[int, int]:
        """Return a map from GPT-2 ids to fairseq ids."""
        return {int(symbol): number for number, symbol in enumerate(self._symbols) if symbol.isdecimal()}


class FairseqWords(Tokenizer):
    """A tokenizer from only a dict.txt, for texts to which BPE has already been applied. The symbols are words
    separated by white space."""

    kind = "FairseqTokenizer"
    bos = SPECIAL["<s>"]
    pad = SPECIAL["<pad>"]
    eod = SPECIAL["</s>"]

    def __init__(self, dictionary: Path) -> None:
        self._dictionary = dictionary
        self._symbols = read_dictionary(dictionary)
        self._ids = {symbol: number for number, symbol in enumerate(self._symbols)}

    @property
    def vocab_size(self) -> int:
        return len(self._symbols)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, SPECIAL["<unk>"]) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self._symbols[int(token)] for token in ids)

    def control(self, name: str) -> int | None:
        return SPECIAL.get(name)

    def unpublished(self) -> str | None:
        return _UNPUBLISHED

    def files(self) -> Mapping[str, Path]:
        return {"dict.txt": self._dictionary}


def read_dictionary(path: Path) -> list[str]:
    """Return the symbols in order of their ids. Errors: ValueError naming the file and the malformed line."""
    symbols = list(SPECIAL)
    ids = dict(SPECIAL)
    try:
        text = read_limited(path, FILE_BYTES, f"--tokenizer-model {path}").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--tokenizer-model {path}: not UTF-8 ({error})") from None
    for number, line in enumerate(io.StringIO(text, newline=None), 1):  # str.splitlines would also split at U+0085
        symbol, *rest = (line := line.removesuffix("\n")).split(" ")
        overwrites = rest[1:] == [OVERWRITE]
        if not symbol or not rest or not rest[0].isdecimal() or (len(rest) > 1 and not overwrites):
            raise ValueError(f"--tokenizer-model {path}:{number}: {line[:80]!r} is not a symbol and a count")
        if symbol in ids and not overwrites:
            raise ValueError(f"--tokenizer-model {path}:{number}: {symbol} is there already, at id {ids[symbol]}")
        ids[symbol] = len(symbols)
        symbols.append(symbol)
    return symbols
