"""Encode texts with fast libraries. A library is used only if it produces the same ids as the reference encoder on all
`PROBES`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from mega.core.text.probes import PROBES
from mega.core.text.tokenizer import Encoded, flatten, library_errors
from mega.core.untrusted import Json

Encode = Callable[[Sequence[str]], Encoded]


def fastokens(tokenizer_json: str) -> Encode:
    """Return an encoder that uses fastokens, which writes ids into flat buffers without a Python object per token."""
    import numpy as np
    from fastokens import Tokenizer as Library

    library = Library.from_json_str(tokenizer_json)

    def encode(texts: Sequence[str]) -> Encoded:
        ids, offsets = library.encode_batch_flat(list(texts), split_special_tokens=True)
        return Encoded(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64))

    return encode


def hugging_face(tokenizer_json: str) -> Encode:
    """Return an encoder that uses Hugging Face's library."""
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer_json)
    return lambda texts: flatten([encoding.ids for encoding in library.encode_batch_fast(list(texts))])


ENGINES: dict[str, Callable[[str], Encode]] = {"fastokens": fastokens, "tokenizers": hugging_face}
"""Name of a library -> function that builds an encoder from a tokenizer.json."""


def first_equal(
    what: str,
    definition: Encode,
    tokenizer_json: Callable[[], str | None],
    engines: Sequence[str] = ("fastokens",),
    texts: Sequence[str] = PROBES,
) -> tuple[str, Encode] | None:
    """Return the name and encoder of the first library that produces the same ids as `definition` on `texts`, or None.

    what: name of the tokenizer, for warnings about libraries that fail. tokenizer_json: function that returns the
    vocabulary as a tokenizer.json, or None if this format cannot express the vocabulary.
    """
    for name in engines:
        try:
            with library_errors("fails"):
                if (text := tokenizer_json()) is None:
                    return None
                engine = ENGINES[name](text)
                if all(a.tolist() == b.tolist() for a, b in zip(engine(texts), definition(texts), strict=True)):
                    return name, engine
            problem = "gives other ids"
        except Exception as error:  # a compiled library may raise any exception; try the next library
            problem = f"{type(error).__name__}: {error}"
        logging.getLogger("mega").warning("%s: %s is not used: %s", what, name, problem)
    return None


def byte_level_json(vocab: Mapping[str, int], merges: Sequence[str], words: str | None = None) -> str:
    """Return a byte-level BPE as the text of a tokenizer.json. The file has no added tokens, so that names of control
    tokens in a text are never recognised.

    words: pattern that splits a text into words; a word that is a token is not split further. If None, GPT-2's pattern
    is used, and every word is split by the merges.
    """
    import orjson

    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words is None}
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    absent = ("truncation", "padding", "normalizer", "post_processor")
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model: dict[str, Json] = {"type": "BPE", "vocab": vocab, "merges": merges, **dict.fromkeys(unused)}
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": words is not None}
    whole: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytewise if words is None else {"type": "Sequence", "pretokenizers": [split, bytewise]},
        "decoder": bytewise,
        "model": model,
    }
    return orjson.dumps(whole | dict.fromkeys(absent)).decode()
