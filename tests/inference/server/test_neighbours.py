"""Answers of a model that reads neighbours say what it has read."""

from __future__ import annotations

import json

from mega.core.inference.server.options import ServerOptions
from mega.core.text.build import build
from tests.inference.server.conftest import serving
from tests.inference.test_retrieval import CHUNK, VOCAB, engine


def test_what_was_read_is_in_every_answer() -> None:
    tokenizer = build(tokenizer="NullTokenizer", vocab_size=VOCAB - 1)
    asked = {"prompt": [3] * (2 * CHUNK), "max_tokens": CHUNK + 1, "temperature": 0, "ignore_eos": True}
    with serving(engine("gpt"), tokenizer, ServerOptions(name="m")) as running:
        whole = running.ask("POST", "/v1/completions", asked)
        streamed = running.ask("POST", "/v1/completions", {**asked, "stream": True})
        megatron = {"prompts": ["3 " * (2 * CHUNK)], "tokens_to_generate": 2}
        old = running.ask("PUT", "/api", {**megatron, "top_k": 1})
        beams = running.ask("PUT", "/api", {**megatron, "beam_width": 2, "stop_token": 1})
    assert whole.status == 200, whole.body
    (choice,) = whole.json["choices"]
    assert [each["chunk"] for each in choice["neighbours"]] == [0, 1, 2]
    assert choice["neighbours"][0] == {**choice["neighbours"][0], "corpus": "corpus", "document": 1, "text": "text"}
    lines = [json.loads(line[6:]) for line in streamed.body.decode().splitlines() if line.startswith("data: {")]
    read = [line["choices"][0].get("neighbours") for line in lines if line["choices"]]
    assert read[-1] == choice["neighbours"] and not any(read[:-1])
    assert old.status == 200 and len(old.json["neighbours"]) == 1, old.body
    assert beams.status == 400 and b"retriever" in beams.body, beams.body
