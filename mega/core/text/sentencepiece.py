"""Tokenizers from SentencePiece's .model files: Llama-2's tokenizer, a plain tokenizer for GPT, and a tokenizer with
added tokens.

Text is always encoded with the library's plain `encode`, which recognises no control symbols in text. Megatron-LM's
SentencePieceTokenizer first splits a text at names of special tokens, so a corpus can forge these tokens. The
tokenizers in this module do not split texts, so their ids differ from Megatron-LM's if a document contains such a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.text import neighbours
from mega.core.text.fast import Encode
from mega.core.text.neighbours import AddedToken, prepend_scheme, spaces
from mega.core.text.normalization import losses_of
from mega.core.text.probe import check, sentencepiece
from mega.core.text.sentencepiece_bpe import faster
from mega.core.text.sentencepiece_json import described, losses, published, rule_name
from mega.core.text.special import Parsed, Span, aligned, sections
from mega.core.text.tokenizer import Encoded, Roles, Tokenizer, flatten, library_errors
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


def _load(path: Path) -> SentencePieceProcessor:
    """Load a .model file. Errors: ValueError if the file is not a SentencePiece model."""
    check("sentencepiece", path)
    with library_errors(f"--tokenizer-model {path}: not a SentencePiece model"):
        return sentencepiece(path)


def _encoder(model: SentencePieceProcessor) -> Encode:
    """Return a function that encodes many texts, with fastokens if it produces the same ids, else with the
    SentencePiece library."""

    def library(texts: Sequence[str]) -> Encoded:
        return flatten(model.encode(list(texts), num_threads=1))

    return faster(model, library) or library


_SYMBOLS = 1 << 10
"""Number of leading pieces of a model that are searched for control symbols."""


def _present(token: int) -> int | None:
    """Return `token`, or None if it is -1, which SentencePiece returns for a missing token."""
    return token if token >= 0 else None


def _piece_bytes(model: SentencePieceProcessor, token: int) -> bytes:
    """Return the bytes that a piece of the model adds to a text. In pieces, U+2581 represents a space, and names such
    as <0x0A> represent a byte."""
    if model.is_control(token):
        return b""
    piece = str(model.id_to_piece(token))
    return bytes([int(piece[3:5], 16)]) if model.is_byte(token) else piece.replace("\u2581", " ").encode()


def _text_loss(path: Path, model: SentencePieceProcessor) -> str | None:
    """Describe the information lost by the model's normalization and missing pieces; None if nothing is lost."""
    losses_found = losses_of(lambda text: str(model.normalize(text)).replace("\u2581", " "))
    if model.unk_id() in model.encode("\n"):
        losses_found.append("line breaks are unknown tokens")
    rule = rule_name(model)
    named = f"by its normalization {rule}: " if rule else ""
    return f"{path.name} changes texts: {named}{'; '.join(losses_found)}" if losses_found else None


class PlainSentencePiece(Tokenizer):
    """A tokenizer with the pieces of a .model file. The model's eos ends a document. For Llama-2, bos also precedes
    every text.

    Hugging Face's files next to the model, if any, add tokens and determine whether a space is prepended to text
    between control tokens. Otherwise, each text between control tokens is encoded separately, as in Meta's programs.
    """

    def __init__(self, path: Path, *, kind: str, prepend_bos: bool) -> None:
        self.kind = kind
        self._path = path
        self._model = _load(path)
        self._prepend_bos = prepend_bos
        files_beside = neighbours.paths(path)
        self._said = neighbours.read(files_beside)
        self._pieces = int(self._model.vocab_size())
        self._added = dict(self._without_own(self._said.added))
        self._files = files_beside if self._added or self._said.splits_special else {}
        self._names = {token: added_token.name for token, added_token in self._added.items()}
        self.bos = self._at("bos_token", self._model.bos_id())
        self.eod = self._at("eos_token", self._model.eos_id())
        self.pad = self._at("pad_token", self._model.pad_id())
        if prepend_bos and self.bos is None:
            raise ValueError(f"--tokenizer-model {path}: {kind} puts bos in front of a text, and the model has none")

    def _without_own(self, added: Mapping[int, AddedToken]) -> Iterator[tuple[int, AddedToken]]:
        """Yield the added tokens that are not pieces of the model. Errors: ValueError if an added token has the id of
        another piece."""
        for token, each in added.items():
            if token >= self._pieces:
                yield token, each
            elif self._model.id_to_piece(token) != each.name:
                raise ValueError(
                    f"--tokenizer-model {self._path}: {each.name} of the files next to it has the id {token}, which is "
                    f"{self._model.id_to_piece(token)!r} in the model; give the files of one tokenizer"
                )

    def _at(self, key: str, own: int) -> int | None:
        """Return the id of the token under `key` in Hugging Face's files if these files add tokens, else the id
        `own`."""
        name = self._said.named.get(key) if self._added else None
        return _present(own) if name is None else self.control(name)

    @property
    def vocab_size(self) -> int:
        return max(self._pieces, *(token + 1 for token in self._added), 0)

    def encode(self, text: str) -> list[int]:
        if self._searched:
            searched_ids: list[int] = self.encode_batch([text]).ids.tolist()
            return searched_ids
        ids: list[int] = self._model.encode(text)
        return [self.bos, *ids] if self._prepend_bos and self.bos is not None else ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        import numpy as np

        ids, offsets = flatten([self._split(text) for text in texts]) if self._searched else self._encode(texts)
        if not self._prepend_bos or self.bos is None:
            return Encoded(ids, offsets)
        return Encoded(np.insert(ids.astype(np.int64), offsets[:-1], self.bos), offsets + np.arange(len(offsets)))

    def _split(self, text: str) -> list[int]:
        """Encode raw text. Added tokens in the text are recognised unless they are special."""
        ids: list[int] = []
        for name, begin, end in sections(text, self._searched):
            ids += [self._searched[name]] if name else self.section(text[begin:end], begin == 0).ids
        return ids

    @cached_property
    def _searched(self) -> dict[str, int]:
        return {added_token.name: token for token, added_token in self._added.items() if not added_token.special}

    def special_tokens(self) -> Mapping[str, int]:
        return {} if self._said.splits_special else self._specials

    @cached_property
    def _specials(self) -> dict[str, int]:
        controls = (token for token in range(min(self._pieces, _SYMBOLS)) if self._model.is_control(token))
        specials = {str(self._model.id_to_piece(token)): token for token in controls}
        if (unknown := self._model.unk_id()) >= 0:
            specials[str(self._model.id_to_piece(unknown))] = unknown
        return specials | {added_token.name: token for token, added_token in self._added.items() if added_token.special}

    def vocabulary_tokens(self) -> Mapping[str, int]:
        return self._searched

    def named_tokens(self) -> Mapping[str, str]:
        if self._said.named:
            return self._said.named
        unknown = self._model.unk_id()
        return {**super().named_tokens(), **({"unk_token": self.piece(unknown)} if unknown >= 0 else {})}

    def section(self, text: str, first: bool) -> Parsed:
        blank = True
        if self._said.config:
            scheme = prepend_scheme(self._said.config)
            blank = scheme == "always" or (scheme == "first" and first)
            blank = blank and not text.startswith(" ")
        ids: list[int] = self._model.encode(text) if blank else self._without_blank(text)
        return Parsed(ids, self._spans(text, ids, blank))

    def _spans(self, text: str, ids: Sequence[int], blank: bool) -> list[Span] | None:
        """Return the span of characters of each id. blank: whether the model prepended a space to the text."""
        pieces = [self.token_bytes(token) for token in ids]
        if blank and pieces and pieces[0].startswith(b" "):
            pieces[0] = pieces[0][1:]
        spans = aligned(text, pieces)
        if spans and pieces[0] == b"":  # the space is a separate token; it gets the span of the first character
            spans[0] = (0, 1)
        return spans

    def spans_of(self, text: str, ids: Sequence[int]) -> list[Span] | None:
        return self._spans(text, ids, True)

    def _without_blank(self, text: str) -> list[int]:
        """Encode a text without the space that the model prepends, by encoding the text after a newline and removing
        the newline's ids."""
        ids: list[int] = self._model.encode("\n" + text)
        lead = self._model.encode("\n")
        if ids[: len(lead)] != lead:
            raise ValueError(
                f"--tokenizer-model {self._path}: joins a line's end with {text[:20]!r}, which is not read"
            )
        return ids[len(lead) :]

    def control(self, name: str) -> int | None:
        token_id = next((token for token, each in self._names.items() if each == name), None)
        return self._specials.get(name) if token_id is None else token_id

    @cached_property
    def _encode(self) -> Encode:
        return _encoder(self._model)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; added tokens are written by name."""
        tokens = [int(token) for token in ids]
        if not self._added:
            return str(self._model.decode(tokens))
        runs = [(is_added, list(run)) for is_added, run in groupby(tokens, key=self._names.__contains__)]
        texts = (
            "".join(map(self._names.__getitem__, run)) if is_added else self._decoded(run, number)
            for number, (is_added, run) in enumerate(runs)
        )
        return "".join(texts)

    def _decoded(self, run: list[int], number: int) -> str:
        """Decode a run of pieces of the model. A space at the beginning is kept if an added token precedes the run."""
        text = str(self._model.decode(run))
        return f" {text}" if number and self.piece(run[0]).startswith("\u2581") else text

    def piece(self, token: int) -> str:
        return self._names.get(token) or ("" if token >= self._pieces else str(self._model.id_to_piece(token)))

    def token_bytes(self, token: int) -> bytes:
        if token >= self._pieces:
            special = token not in self._names or self._added[token].special
            return b"" if special else self._names[token].encode()
        return _piece_bytes(self._model, token)

    def files(self) -> Mapping[str, Path]:
        return {**self._files, "tokenizer.model": self._path}

    def vocabulary_files(self) -> Mapping[str, Path]:
        return {"tokenizer.model": self._path}

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        return neighbours.without_template(content) if name == neighbours.CONFIG else content

    def behaviour(self) -> Mapping[str, object]:
        """Return what the files next to the model change: whether names of special tokens are text and, if the files
        add tokens, these tokens, the tokens that begin, end and pad a text, and the rule for spaces between control
        tokens."""
        split = {"split": True} if self._said.splits_special else {}
        if not self._added:
            return split
        added = [[token, *added_token] for token, added_token in sorted(self._added.items())]
        scheme = prepend_scheme(self._said.config) if self._said.config else None
        return {"added": added, "ends": [self.bos, self.eod, self.pad], "scheme": scheme, **split}

    def huggingface_files(self) -> Mapping[str, Mapping[str, Json]]:
        """Return the files in Hugging Face's format. They include a tokenizer.json if this format can express the
        model, because transformers' conversion of a tokenizer.model may split texts differently."""
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        token_names = {key: None if token is None else self.piece(token) for key, token in ids.items()}
        if self._published is None:
            return {}
        unknown = {"unk_token": self.piece(self._model.unk_id())}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **token_names, **unknown}
        return {"tokenizer.json": self._published, "tokenizer_config.json": config}

    def single_file(self) -> dict[str, Json] | None:
        if self._published is None:
            return None
        special_pieces = self._published["added_tokens"]
        entries: list[Json] = list(special_pieces) if isinstance(special_pieces, list) else []
        for token, each in sorted(self._added.items()):
            flags: dict[str, Json] = {"lstrip": each.lstrip, "rstrip": each.rstrip, "single_word": each.single_word}
            flags |= {"normalized": each.normalized, "special": each.special}
            entries.append({"id": token, "content": each.name, **flags})
        never = self._searched and self._said.config and prepend_scheme(self._said.config) == "never"
        return {**self._published, "added_tokens": entries, **(spaces("never") if never else {})}

    @cached_property
    def _published(self) -> dict[str, Json] | None:
        return published(self._model, self._prepend_bos)

    def unpublished(self) -> str | None:
        if self._published is not None:
            return None
        return f"no tokenizer.json gives the ids of this {described(self._model)} of SentencePiece"

    def text_loss(self) -> str | None:
        return _text_loss(self._path, self._model)

    def publishing_loss(self) -> str | None:
        return f"transformers {' and '.join(differences)}" if (differences := losses(self._model)) else None


class ExtendedSentencePiece(Tokenizer):
    """A tokenizer with the pieces of a .model file, followed by the tokens that BERT and T5 need but the model lacks.

    Missing tokens are added in this order: <CLS> <SEP> <EOD> <MASK>, then pad, bos and eos under the model's own names
    or as <PAD> <BOS> <EOS>, then <extra_id_0> ... `specials` maps each of these names to its id.
    """

    kind = "SentencePieceTokenizer"

    def __init__(self, path: Path, extra_ids: int = 0) -> None:
        self._path = path
        self._model = _load(path)
        self._pieces = int(self._model.vocab_size())
        id_of = {self._model.id_to_piece(token): token for token in range(self._pieces)}
        pad, bos, eos = (
            self._model.id_to_piece(token) if token >= 0 else missing
            for token, missing in (
                (self._model.pad_id(), "<PAD>"),
                (self._model.bos_id(), "<BOS>"),
                (self._model.eos_id(), "<EOS>"),
            )
        )
        sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        self.added_sentinels = sum(name not in id_of for name in sentinels)
        self.specials: dict[str, int] = {}
        # the order, as in Megatron-LM, determines the ids of missing tokens
        for name in ["<CLS>", "<SEP>", "<EOD>", "<MASK>", pad, bos, eos, *sentinels]:
            self.specials[name] = id_of.setdefault(name, len(id_of))
        self._names = {token: name for name, token in self.specials.items()}
        self._size = len(id_of)
        self.eod = self.specials["<EOD>"]
        self.bos = self.specials[bos]
        self.pad = self.specials[pad]
        self.roles = Roles(
            cls=self.specials["<CLS>"],
            sep=self.specials["<SEP>"],
            mask=self.specials["<MASK>"],
            pad=self.pad,
            bos=self.bos,
            eos=self.specials[eos],
            sentinels=tuple(self.specials[name] for name in sentinels),
        )

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        return self._encode(texts)

    def control(self, name: str) -> int | None:
        return self.specials.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        return self.specials

    @cached_property
    def _encode(self) -> Encode:
        return _encoder(self._model)

    def piece(self, token: int) -> str:
        return self._names.get(token) or str(self._model.id_to_piece(token))

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._names else _piece_bytes(self._model, token)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; special tokens are written by name, separated by spaces."""
        spans = groupby((int(token) for token in ids), key=lambda token: token in self._names)
        parts = []
        for special, run in spans:
            tokens = list(run)
            parts.append(" ".join(self._names[t] for t in tokens) if special else self._model.decode(tokens))
        return " ".join(parts)

    def text_loss(self) -> str | None:
        return _text_loss(self._path, self._model)

    def unpublished(self) -> str | None:
        return f"transformers has none that adds tokens to a SentencePiece model as {self.kind} does"

    def files(self) -> Mapping[str, Path]:
        return {"tokenizer.model": self._path}
