"""Offsets of tokens in the text of an answer: with every tokenizer, the text at a token's offset begins with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mega.core.inference.request import Event, Request
from mega.core.inference.server.options import ServerOptions
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from tests.inference.server.conftest import ByteTokenizer, Running, serving
from tests.inference.server.test_openai_api import ask, stream
from tests.support.chat_templates import SMALL
from tests.support.fake_engine import FakeEngine
from tests.support.shared import shared

LETTERS = (
    "世界",
    "龍龘",
    "😀",
    "👩‍👩‍👧",
    "a",
    " ",
    "  ",
    "\n",
    "é",
    "hello ",
    " world",
    "\u0301",
    "<|im_end|>",
    "</s>",
)
KINDS = ("llama2", "sentencepiece", "gpt2", "llama3", "bytes", "byte-level", "metaspace", "llama", "unigram")


class ScriptedEngine(FakeEngine):
    """Answers sequence i of a request with seed 0 with `answers[i]`; `rivals` are further alternatives of tokens."""

    answers: tuple[list[int], ...] = ()
    rivals: tuple[int, ...] = ()

    def _advance(self, number: int, request: Request, new: list[int]) -> list[Event]:
        if self.answers:
            self.answer = [*self.answers[(request.sampling.seed or 0) % len(self.answers)], self.end]
        events = super()._advance(number, request, new)
        rivals = tuple((token, -3.0) for token in self.rivals)
        return [event._replace(top=(*event.top, *rivals)) for event in events]


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind in ("llama2", "sentencepiece"):
        name = "Llama2Tokenizer" if kind == "llama2" else "GPTSentencePieceTokenizer"
        return build(tokenizer=name, tokenizer_model=shared("llama2/tokenizer.model"))
    if kind == "llama3":
        return build(tokenizer="Llama3Tokenizer", tokenizer_model=shared("llama3/tokenizer.model"))
    if kind == "gpt2":
        vocab, merges = shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
        return build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    pytest.importorskip("tokenizers")
    SMALL[kind](folder)
    return build(tokenizer="HuggingFaceTokenizer", tokenizer_model=folder)


@contextmanager
def scripted(tokenizer: Tokenizer) -> Iterator[tuple[Running, ScriptedEngine]]:
    end = tokenizer.vocab_size if tokenizer.eod is None else tokenizer.eod
    engine = ScriptedEngine([end], end, vocab=tokenizer.vocab_size + 1, longest=2048)
    with serving(engine, tokenizer, ServerOptions(name="fake", stop_ids=frozenset({end}))) as server:
        yield server, engine


def check_offsets(tokenizer: Tokenizer, text: str, logprobs: dict[str, Any]) -> None:
    names = set(tokenizer.special_tokens()) | {tokenizer.piece(each) for each in tokenizer.special_tokens().values()}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets), (text, logprobs)
    for token, offset, top in zip(logprobs["tokens"], offsets, logprobs["top_logprobs"], strict=True):
        if token not in names and not token.startswith("bytes:"):
            assert text[offset:].startswith(token), (text, token, offset, logprobs)
        assert top is None or token in top, "an alternative is written as the token is"


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_at_an_offset_begins_with_the_token(kind: str, tmp_path: Path) -> None:
    tokenizer, chance = tokenizer_of(kind, tmp_path), random.Random(7)

    def ids(begin: int = 0) -> list[int]:
        encoded = tokenizer.parse("".join(chance.choices(LETTERS, k=chance.randint(1, 12)))).ids
        return encoded[chance.choice((begin, 0)) :] or encoded

    with scripted(tokenizer) as (server, engine):
        for _ in range(12):
            engine.answers = (ids(1), ids(2), [*ids()[:-1], *ids()])
            whole = "".join(chance.choices(LETTERS, k=8))
            for prompt in (whole, ids(), ids(1)[:-1] or [5], ""):
                fields: dict[str, Any] = {"prompt": prompt, "n": 3, "logprobs": 2, "seed": 0}
                fields["echo"] = chance.random() < 0.6
                choices = ask(server, **fields)["choices"]
                parts: list[list[Any]] = [[], [], []]
                for chunk in stream(server, "/v1/completions", **fields, max_tokens=100):
                    parts[chunk["choices"][0]["index"]].append(chunk["choices"][0])
                for choice, streamed in zip(choices, parts, strict=True):
                    check_offsets(tokenizer, choice["text"], choice["logprobs"])
                    assert "".join(part["text"] for part in streamed) == choice["text"]
                    for key, values in choice["logprobs"].items():
                        assert [each for part in streamed for each in part["logprobs"][key]] == values, key


def test_the_first_token_of_llama_2_is_written_without_the_space_that_its_text_lacks() -> None:
    tokenizer = tokenizer_of("llama2", Path())
    hello, world = (tokenizer.encode(f"{word}")[1] for word in ("Hello", "world"))
    bare = 10994  # the piece Hello without a space
    assert tokenizer.decode([bare]) == "Hello" and bare != hello
    with scripted(tokenizer) as (server, engine):
        engine.answers, engine.rivals = ([hello, world],), (world, bare)
        choice = ask(server, prompt=[1], logprobs=5, seed=0)["choices"][0]
        assert choice["text"] == "Hello world"
        assert choice["logprobs"]["tokens"] == ["Hello", " world", "</s>"]
        assert choice["logprobs"]["text_offset"] == [0, 5, 11]
        first, second, _ = choice["logprobs"]["top_logprobs"]
        assert list(first) == ["Hello", "world"] and list(second) == [" world", "Hello"]
        for prompt in ("Hello", [1, hello]):
            echoed = ask(server, prompt=prompt, logprobs=5, seed=0, echo=True)["choices"][0]
            assert echoed["text"] == "Hello Hello world"
            assert echoed["logprobs"]["tokens"] == ["<s>", "Hello", " Hello", " world", "</s>"]
            assert echoed["logprobs"]["text_offset"] == [0, 0, 5, 11, 17]


def test_a_token_after_half_a_character_has_its_own_offset() -> None:
    with scripted(ByteTokenizer()) as (server, engine):
        engine.answers = ([0xE2, ord("a"), 0xE2, 0x82, 0xE2, 0x82, 0xAC],)
        choice = ask(server, prompt="x", logprobs=1, seed=0)["choices"][0]
        assert choice["text"] == "\ufffda\ufffd€" and choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 3, 3, 4]


def test_no_text_is_lost_after_a_prompt_that_ends_within_a_character() -> None:
    tokenizer = tokenizer_of("llama2", Path())
    first, second, third = (tokenizer.control(f"<0x{each:02X}>") or 3 + each for each in "龘".encode())
    letters = tokenizer.encode("ab cd")[1:]
    with scripted(tokenizer) as (server, engine):
        engine.answers = ([third, *letters],)
        choice = ask(server, prompt=[1, first, second], logprobs=1, seed=0)["choices"][0]
        assert choice["text"] == "龘 ab cd" and choice["logprobs"]["text_offset"][:2] == [0, 1]
        engine.answers = (letters,)
        assert ask(server, prompt="x\ufffd", seed=0)["choices"][0]["text"] == " ab cd"


def test_spaces_that_the_tokenizer_removes_shift_no_offset() -> None:
    tokenizer = build(tokenizer="Llama2Tokenizer", tokenizer_model=shared("stories260K_hf/tokenizer.model"))
    with scripted(tokenizer) as (server, engine):
        engine.answers = (tokenizer.encode("time")[1:],)
        for prompt, special in (
            ("a  boy  upon  a", False),
            ("a </s> boy", True),
            ("<s>  boy", False),
            ("  龘  boy", False),
        ):
            fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "parse_special_tokens": special}
            choice = ask(server, **fields, seed=0)["choices"][0]
            check_offsets(tokenizer, choice["text"], choice["logprobs"])
            assert choice["text"] == f"{prompt} time"
