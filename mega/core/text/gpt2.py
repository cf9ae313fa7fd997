"""GPT-2's byte-level BPE from vocab.json and merges.txt, with the fastest library that produces the correct ids.

`reference`, in Python, defines the ids. A faster library is used only if it produces the same ids (fast.py). If there
is no such library, the much slower `reference` is used.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from mega.core.text.fast import Encode, byte_level_json, first_equal
from mega.core.text.probe import FILE_BYTES
from mega.core.text.tokenizer import Encoded, Tokenizer, flatten
from mega.core.text.words import WordCache
from mega.core.untrusted import Json, read_limited

END_OF_TEXT = "<|endoftext|>"
_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

MISMATCHED = 100
"""Maximum number of merges without an id. If more ids are missing, vocab.json and merges.txt are assumed to belong to
different tokenizers."""

Merges = Sequence[tuple[str, str]]


def byte_letters() -> dict[int, str]:
    """Return a map from each byte to the letter that represents it. Printable bytes represent themselves; the other 68
    bytes are represented by the letters from U+0100 on.

    >>> letters = byte_letters(); letters[ord("A")], letters[0], letters[32], letters[10]
    ('A', 'Ā', 'Ġ', 'Ċ')
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's tokenizer, from vocab.json (piece -> id) and merges.txt (a header line, then one pair per line, best
    first)."""

    kind = "GPT2BPETokenizer"
    bos = None
    pad = None

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self._files = {"vocab.json": vocab_file, "merges.txt": merge_file}
        self._vocab = read_vocab(vocab_file)
        self.eod = self._vocab.get(END_OF_TEXT)

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        return self._encode(texts)

    def decode(self, ids: Iterable[int]) -> str:
        letters = "".join(self._pieces[int(token)] for token in ids)
        values = self._bytes
        return b"".join(values.get(c) or c.encode() for c in letters).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if token == self.eod:
            return b""
        return b"".join(self._bytes.get(letter) or letter.encode() for letter in self._pieces[token])

    def control(self, name: str) -> int | None:
        return self.eod if name == END_OF_TEXT else None

    def special_tokens(self) -> Mapping[str, int]:
        return {} if self.eod is None else {END_OF_TEXT: self.eod}

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    def huggingface_files(self) -> dict[str, dict[str, Json]]:
        """Return the files in Hugging Face's format. They include a tokenizer.json, because otherwise the rules that
        transformers applies to vocab.json and merges.txt would depend on the model_type."""
        whole = json.loads(tokenizer_json(self._vocab, read_merges(self._files["merges.txt"])))
        config: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.eod is not None:
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            whole["added_tokens"] = [{"id": self.eod, "content": END_OF_TEXT, "special": True, **plain}]
            config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        return {"tokenizer.json": whole, "tokenizer_config.json": config}

    @cached_property
    def engine(self) -> str:
        """The encoder in use: "fastokens", "tokenizers" or "python"."""
        return self._chosen[0]

    @cached_property
    def _encode(self) -> Encode:
        return self._chosen[1]

    @cached_property
    def _chosen(self) -> tuple[str, Encode]:
        # Merges are read when the first text is encoded, because training needs only the vocabulary size.
        merges = read_merges(self._files["merges.txt"])
        unnumbered = [first + second for first, second in merges if first + second not in self._vocab]
        if len(unnumbered) > MISMATCHED:
            raise ValueError(
                f"--merge-file {self._files['merges.txt']}: {len(unnumbered)} of its {len(merges)} merges make pieces "
                f"that --vocab-file {self._files['vocab.json']} does not have, such as {unnumbered[0]!r}, and such "
                "text would be lost; give the two files of one tokenizer"
            )
        merged_pieces = {first + second for first, second in merges}
        longer = [piece for piece in self._vocab if len(piece) > 1]
        mergeable = sum(piece in merged_pieces for piece in longer)
        if len(longer) > MISMATCHED and mergeable < len(longer) / 2:
            raise ValueError(
                f"--merge-file {self._files['merges.txt']}: its merges make {mergeable} of the {len(longer)} longer "
                f"pieces of --vocab-file {self._files['vocab.json']}; give the two files of one tokenizer"
            )
        return choose_engine(self._vocab, merges)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {token: piece for piece, token in self._vocab.items()}

    @cached_property
    def _bytes(self) -> dict[str, bytes]:
        return {letter: bytes([byte]) for byte, letter in byte_letters().items()}


def read_vocab(path: Path) -> dict[str, int]:
    """Read a vocab.json, and return a map from pieces to ids. Errors: ValueError if the ids are not 0 .. n - 1, each
    exactly once."""
    import orjson

    data = read_limited(path, FILE_BYTES, f"--vocab-file {path}")
    try:
        vocab: dict[str, int] = orjson.loads(data)
    except ValueError as error:
        raise ValueError(f"--vocab-file {path}: not JSON ({error})") from None
    ids = list(vocab.values()) if isinstance(vocab, dict) else [None]
    if set(map(type, ids)) != {int} or set(ids) != set(range(len(ids))):
        raise ValueError(f"--vocab-file {path}: must be a JSON object of pieces whose ids are 0 .. n - 1, each once")
    return vocab


def read_merges(path: Path) -> list[tuple[str, str]]:
    """Read the pairs of a merges.txt in order of rank. Errors: ValueError if a line is not a pair or the file is
    truncated."""
    try:
        lines = read_limited(path, FILE_BYTES, f"--merge-file {path}").decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path}: not UTF-8 ({error})") from None
    if not lines[0].startswith("#version") or lines[-1]:
        raise ValueError(f"--merge-file {path}: must begin with a #version line and end with a newline")
    pairs = []
    for number, line in enumerate(lines[1:-1], 2):
        first, _, second = line.partition(" ")
        if not first or not second or " " in second or "\r" in second:
            raise ValueError(f"--merge-file {path}:{number}: {line!r} is not two symbols with one space between")
        pairs.append((first, second))
    return pairs


def choose_engine(vocab: Mapping[str, int], merges: Merges) -> tuple[str, Encode]:
    """Return the name and encoder of the first library (fastokens, then tokenizers) that produces the same ids as
    `reference` on the probes, else `reference`."""
    definition = reference(vocab, merges)

    def whole() -> str | None:
        return tokenizer_json(vocab, merges) if _complete(vocab, merges) else None

    return first_equal("GPT-2 BPE", definition, whole, ("fastokens", "tokenizers")) or ("python", definition)


def _complete(vocab: Mapping[str, int], merges: Merges) -> bool:
    """Whether every byte and every merge has an id. `reference` assigns id 0 to a missing piece."""
    letters = byte_letters().values()
    return all(letter in vocab for letter in letters) and all(first + second in vocab for first, second in merges)


def reference(vocab: Mapping[str, int], merges: Merges) -> Encode:
    """Return the encoder that defines the ids. The encoder splits texts at the pattern, represents bytes by letters,
    and merges the best pair until no pair is left."""
    import regex

    ranks = {pair: rank for rank, pair in enumerate(merges)}
    letters = byte_letters()
    words = regex.compile(_WORDS)

    def word_ids(word: str) -> list[int]:
        return [vocab.get(piece, 0) for piece in _merge([letters[byte] for byte in word.encode()], ranks)]

    ids_of = WordCache(word_ids)
    return lambda texts: flatten([[token for word in words.findall(text) for token in ids_of[word]] for text in texts])


def _merge(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Repeatedly merge all occurrences of the pair with the lowest rank, from left to right.

    With ranks (h, e) 0, (l, l) 1, (he, ll) 2: h e l l o -> he l l o -> he ll o -> hell o.
    """
    while len(pieces) > 1:
        best = min(pairwise(pieces), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        pieces = list(_joined(pieces, best))
    return pieces


def _joined(pieces: list[str], pair: tuple[str, str]) -> Iterator[str]:
    """Yield `pieces` with each occurrence of `pair` merged into one piece, from left to right."""
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            yield pair[0] + pair[1]
            i += 2
        else:
            yield pieces[i]
            i += 1


def tokenizer_json(vocab: Mapping[str, int], merges: Merges) -> str:
    """Return the vocabulary and merges as the text of a tokenizer.json."""
    return byte_level_json(vocab, [f"{first} {second}" for first, second in merges])
