"""What follows in a constrained answer, by tokenizers that treat the beginning of a text in their own ways."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

pytest.importorskip("llguidance", reason="needs the extra serve")

from mega.core.inference.loading.load import open_model
from mega.core.inference.server.constrain import Grammars, _Tokens
from mega.core.inference.server.fields import BadField
from mega.core.text.tokenizer import Tokenizer
from tests.inference.server.conftest import ByteTokenizer
from tests.support.shared import shared


class BlankFirst(ByteTokenizer):
    """Puts a blank in front of every text, as SentencePiece does."""

    def encode(self, text: str) -> list[int]:
        return list(b" " + text.encode())


def stories() -> Tokenizer:
    return open_model(shared("stories260K_hf")).tokenizer()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["the dog", "é"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("made", [ByteTokenizer, BlankFirst, stories])
def test_any_choice_of_what_may_follow_matches(made: Callable[[], Tokenizer]) -> None:
    tokenizer = made()
    end = tokenizer.eod
    assert end is not None
    grammar = Grammars(tokenizer, 520).compile({"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    for seed in range(10):
        draw, ids = random.Random(seed), [5, 6]
        allowed = grammar.start(frozenset([end]))
        while ids[-1] != end and len(ids) < 100:
            mask = allowed(ids)
            assert mask is not None
            ids.append(draw.choice(mask.nonzero()[:, 0].tolist()))
        found = json.loads(b"".join(tokenizer.token_bytes(token) for token in ids[2:-1]))
        assert found["name"] in ("the dog", "é") and 1 <= found["age"] <= 99


@pytest.mark.parametrize("made", [BlankFirst, stories])
@pytest.mark.parametrize("text", ["{", "the dog", " the", "é", '{"a": 1}', ""])
def test_a_text_within_a_text_is_its_own_bytes(made: Callable[[], Tokenizer], text: str) -> None:
    tokens = _Tokens(made(), 520)
    for given in (text, text.encode()):
        assert b"".join(tokens.tokens[token] for token in tokens(given)) == text.encode()
    assert b"".join(tokens.tokens[token] for token in tokens(b"\xc3")) == b"\xc3"  # half a character


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}])
def test_a_schema_by_which_nothing_begins_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(BadField, match="response_format: no answer can begin by it") as refused:
        Grammars(ByteTokenizer(), 512).compile({"type": "json_schema", "json_schema": {"schema": schema}})
    assert refused.value.field == "response_format"


def test_what_cannot_follow_fails_the_answer() -> None:
    allowed = Grammars(ByteTokenizer(), 257).compile({"type": "regex", "pattern": "[0-9]{3}"}).start(frozenset([256]))
    allowed([1])
    with pytest.raises(ValueError, match="response_format: Parser Error"):
        allowed([1, ord("x")])
