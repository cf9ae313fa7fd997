"""A second hundred of mistakes around tokenizers, templates, adapters and exports: the words of users of Hugging Face,
Megatron-LM, vLLM and llama.cpp, typed into every verb and sent to a server. None is silent.

    PYTHONPATH=. python tests/battery/identity_strangers.py ["serve: ..." ...] [--summary]

A mistake ends with exit code 2 (a request with a status from 400 on) and one line that says what is wrong; or, where
the table below says so, with exit code 0 and a line that holds what is quoted there.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.cli import main
from tests.battery.data_ledger import run
from tests.cli.test_identity import NULL, SHAPE, STEP, Place
from tests.support.chat_templates import byte_level
from tests.support.shared import shared

SAID: dict[str, str] = {
    "preprocess: a cased vocabulary, lower-cased": "have capital letters, which no text has",
    "preprocess: an uncased vocabulary, cased": "such words become [UNK]",
    "preprocess: a size for a model": "--vocab-size 32000: changes nothing",
    "preprocess: Null too small": "ids go up to 9, NullTokenizer has 6",
    "preprocess: tokens spelled, as text": "spell special tokens such as <s>, which are text",
    "preprocess: tokens spelled, parsed": "spell special tokens such as <s>, which are tokens",
    "data: decoded by another": "are decoded with another one",
    "finetune: ShareGPT's": "⟦Me.⟧",
    "finetune: roles human and gpt": "⟦Me.⟧",
    "finetune: talks longer than a row": "--seq-length 32 cuts 8",
    "finetune: adapters on adapters": "the checkpoint's model counts, and not --lora-rank 4",
    "finetune: adapters that are one already, whole": "trained: adapters of rank 2 alone",
    "finetune: a scale without a rank": "--lora-alpha",
    "finetune: a size for another vocabulary": "the checkpoint's model counts, and not --vocab 600",
    "pretrain: a model's vocabulary and another": "--vocab 32000: the tokenizer has 512 tokens",
    "generate: tokens spelled": "a prompt spells special tokens such as <s>, which are text",
    "generate: more tokens than positions": "the model has 64 positions",
    "serve: a tokenizer": "changes nothing",
    "convert-llama: a tokenizer of words": "its tokenizer is left out",
    "convert-llama: more tokens than rows": "its tokenizer cannot be used",
    "convert-llama: a template that is broken": "no chat:",
    "convert-llama: ends of another": "its ends cannot be used",
    "checkpoint: two models": "36 of 36 tensors differ",
    "request: tokens spelled": "the prompt spells special tokens such as <s>, which are text",
}
"""Mistake -> what a user reads, where it is no error."""


def preprocessing(place: Place) -> dict[str, str]:
    f, gpt2, merges = place.folder, shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
    cased, uncased = shared("bert/bert-base-cased-vocab.txt"), shared("bert/bert-base-uncased-vocab.txt")
    llama3, same = shared("llama3/tokenizer.model"), shlex.join(map(str, place.same))
    lines = {
        "a name of the hub": "--tokenizer HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-2-7b-hf",
        "AutoTokenizer": f"--tokenizer AutoTokenizer --tokenizer-model {f}/hf",
        "NeoX's kind": f"--tokenizer-type HFTokenizer --vocab-file {f}/hf/tokenizer.json",
        "core's TikTokenizer": f"--tokenizer-type TikTokenizer --tokenizer-model {llama3}",
        "--tokenizer-name": f"--tokenizer-name {f}/hf",
        "config.json for tokenizer.json": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/hf/config.json",
        "its folder for tokenizer.model": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/hf",
        "tokenizer.json for tokenizer.model": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/hf/tokenizer.json",
        "tokenizer.json for vocab.json": (
            f"--tokenizer GPT2BPETokenizer --vocab-file {f}/hf/tokenizer.json --merge-file {merges}"
        ),
        "merges of another": f"--tokenizer GPT2BPETokenizer --vocab-file {f}/bpe/vocab.json --merge-file {merges}",
        "vocabulary of another": f"--tokenizer GPT2BPETokenizer --vocab-file {gpt2} --merge-file {f}/bpe/merges.txt",
        "Llama 3 by SentencePiece": f"--tokenizer GPTSentencePieceTokenizer --tokenizer-model {llama3}",
        "Llama 3 of tokenizer.json": f"--tokenizer Llama3Tokenizer --tokenizer-model {f}/hf/tokenizer.json",
        "half a model": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/half.model",
        "a .vocab": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/tok.vocab",
        "a cased vocabulary, lower-cased": f"--tokenizer BertWordPieceLowerCase --vocab-file {cased}",
        "an uncased vocabulary, cased": f"--tokenizer BertWordPieceCase --vocab-file {uncased}",
        "a size for a model": f"{same} --vocab-size 32000",
        "sentinels of a tokenizer.json": (
            f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/hf/tokenizer.json --vocab-extra-ids 100"
        ),
        "Null too small": "--tokenizer NullTokenizer --vocab-size 5",
        "added tokens of another": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/clash/tokenizer.model",
        "broken tokenizer_config.json": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/badcfg",
        "a template for a tokenizer": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/chat.jinja",
        "a checkpoint for a tokenizer": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/text",
        "a gguf for a tokenizer": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/model.gguf",
    }
    ids = {"Null too small": "n.jsonl"}
    words: dict[str, str] = {}
    for name, it in lines.items():
        source = f"--input {f}/{ids.get(name, 'a.jsonl')}"
        words[f"preprocess: {name}"] = f"preprocess --overwrite {source} --output-prefix {f}/x {it}"
    for name, more in {
        "talks as text": f"--input {f}/talks.jsonl",
        "talks by key": f"--input {f}/talks.jsonl --json-keys messages",
        "two keys of which one is not there": f"--input {f}/a.jsonl --json-keys text label",
        "one JSON array": f"--input {f}/array.json",
        "tokens spelled, as text": f"--input {f}/spelled.jsonl",
        "tokens spelled, parsed": f"--input {f}/spelled.jsonl --parse-special-tokens",
        "a chat template": f"--input {f}/a.jsonl --chat-template chatml",
    }.items():
        words[f"preprocess: {name}"] = f"preprocess --output-prefix {f}/x --overwrite {same} {more}"
    corpus = f"train-tokenizer --input {f}/a.jsonl --output-dir {f}/trained"
    words["train-tokenizer: more entries than text"] = f"{corpus} --vocab-size 90000 --kind sentencepiece"
    words["train-tokenizer: fewer entries than bytes"] = f"{corpus} --vocab-size 100"
    words["train-tokenizer: a kind that is none"] = f"{corpus} --vocab-size 300 --kind unigram"
    words["train-tokenizer: token files"] = (
        f"train-tokenizer --input {place.tokens}.bin --output-dir {f}/trained --vocab-size 300"
    )
    words["data: ids of raw text"] = f"data inspect {f}/a.jsonl"
    words["data: a note of nothing"] = f"data note {f}/talks"
    words["data: decoded by another"] = f"data inspect {place.tokens} {shlex.join(NULL)}"
    words["data: split of token files"] = f"data split {place.tokens}.bin --output-dir {f}/split"
    words["corpus: a tokenizer"] = f"corpus filter --input {f}/a.jsonl --output {f}/o.jsonl --tokenizer Llama2Tokenizer"
    words["corpus: talks"] = f"corpus filter {f}/talks.jsonl --output {f}/o.jsonl"
    return words


def training(place: Place) -> dict[str, str]:
    f, same = place.folder, shlex.join(map(str, place.same))
    step, shape = shlex.join(STEP), shlex.join(SHAPE)
    text, data = f"--load {f}/text", f"--data-path {place.tokens} --split 1,0,0"
    talks = f"--chat-data {f}/talks.jsonl"
    lines = {
        "an adapter as weights": f"--load {f}/peft {data}",
        "a file of weights": f"--load {f}/hf/model.safetensors {data}",
        "weights of the hub": f"--load meta-llama/Llama-2-7b-hf {data}",
        "--model-name-or-path": f"--model-name-or-path {f}/hf {data}",
        "a gguf": f"--load {f}/model.gguf {data}",
        "a tokenizer's folder as weights": f"--load {f}/bpe {data}",
        "chat_ml": f"{text} {talks} --chat-template chat_ml",
        "Jinja itself": f"{text} {talks} --chat-template '{{{{ messages }}}}'",
        "a tokenizer_config.json without one": f"{text} {talks} --chat-template {f}/hf/tokenizer_config.json",
        "tokenizer.json as a template": f"{text} {talks} --chat-template {f}/hf/tokenizer.json",
        "talks as a template": f"{text} {talks} --chat-template {f}/talks.jsonl",
        "Jinja that is broken": f"{text} {talks} --chat-template {f}/broken.jinja",
        "a filter that is none": f"{text} {talks} --chat-template {f}/filter.jinja",
        "a template without turns": f"{text} {talks} --chat-template {f}/constant.jinja",
        "a template without ends": f"{text} {talks} --chat-template {f}/endless.jinja",
        "ends of another family": f"{text} {talks} --chat-template {f}/chat.jinja",
        "ShareGPT's": f"{text} --chat-data {f}/sharegpt.jsonl --chat-template plain",
        "Alpaca's": f"{text} --chat-data {f}/alpaca.jsonl --chat-template plain",
        "roles human and gpt": f"{text} --chat-data {f}/roles.jsonl --chat-template plain",
        "no answer": f"{text} --chat-data {f}/unanswered.jsonl --chat-template plain",
        "pictures": f"{text} --chat-data {f}/pictures.jsonl --chat-template plain",
        "tools that it does not read": f"{text} --chat-data {f}/tools.jsonl --chat-template plain",
        "talks in an array": f"{text} --chat-data {f}/array.json --chat-template plain",
        "an end that is no end": f"{text} {talks} --chat-template llama2 --eos-token '<|im_end|>'",
        "talks longer than a row": f"{text} --chat-data {f}/long.jsonl --chat-template plain",
        "preferences of talks": f"{text} --dpo-data {f}/talks.jsonl --chat-template plain",
        "adapters on adapters": f"--load {f}/lora {talks} --lora-rank 4",
        "adapters that are one already, whole": f"--load {f}/lora {talks}",
        "adapters of odd linears": f"{text} {talks} --chat-template plain --lora-rank 2 --lora-targets q_proj,w_nope",
        "a scale without a rank": f"{text} {talks} --chat-template plain --lora-alpha 32",
        "--peft": f"{text} {talks} --peft lora",
        "raw text for token files": f"{text} --data-path {f}/a.jsonl --split 1,0,0",
        "a prefix without its key": f"{text} --data-path {f}/a --split 1,0,0",
        "two tokenizers in a blend": f"{text} --data-path 0.5 {place.tokens} 0.5 {place.others} --split 1,0,0",
        "a tokenizer.model alone": f"{text} {data} --tokenizer-model {shared('llama2/tokenizer.model')}",
        "a size for another vocabulary": f"{text} {data} --vocab 600",
        "a step that is not there": f"--load {f}/text/step-0000099 {data}",
        "a template for a BERT": f"--load {f}/bert {talks} --chat-template plain",
        "token files of another kind for a BERT": f"--load {f}/bert {data}",
        "a tokenizer with more tokens than rows": f"--load {f}/wider {talks} --chat-template plain",
    }
    words = {f"finetune: {name}": f"finetune {step} {line} --metrics {f}/metrics" for name, line in lines.items()}
    for name, line in {
        "no tokenizer": f"{shape} {talks} --chat-template plain",
        "a tokenizer of the hub": (
            f"{shape} {data} --tokenizer HuggingFaceTokenizer --tokenizer-model mistralai/Mistral-7B-v0.1"
        ),
        "a model's vocabulary and another": f"--model llama2-7b {same} {data} --layers 1 --dry-run",
        "a vocabulary too small": f"{shape} {same} {data} --vocab 100",
        "adapters of nothing": f"{shape} {same} {data} --lora-rank 4",
    }.items():
        words[f"pretrain: {name}"] = f"pretrain {step} {line} --metrics {f}/metrics"
    return words


def answering(place: Place) -> dict[str, str]:
    f = place.folder
    score = f"eval --device cpu --json {f}/s.json --task"
    text = f"generate --load {f}/text --tokens 1 --prompt a"
    words = {
        "eval: an adapter": f"{score} ppl --valid-data {f}/a.jsonl --load {f}/peft",
        "eval: a template of none": f"{score} race --valid-data {f}/race --load {f}/text --apply-chat-template",
        "eval: pairs by a decoder": f"{score} qqp --valid-data {f}/pairs.tsv --load {f}/text",
        "eval: perplexity of a BERT": f"{score} ppl --valid-data {f}/a.jsonl --load {f}/bert",
        "eval: talks": f"{score} ppl --valid-data {f}/talks.jsonl --load {f}/chat",
        "eval: a folder": f"{score} ppl --valid-data {f}/bpe --load {f}/text",
        "eval: a tokenizer.model alone": (
            f"{score} ppl --valid-data {f}/a.jsonl --load {f}/text --tokenizer-model {place.model}"
        ),
        "eval: a tokenizer with more tokens than rows": f"{score} ppl --valid-data {f}/a.jsonl --load {f}/wider",
        "eval: no tokenizer": f"{score} ppl --valid-data {f}/a.jsonl --load {f}/untold",
        "generate: an adapter": f"generate --load {f}/peft --prompt a",
        "generate: a BERT": f"generate --load {f}/bert --prompt a",
        "generate: an adapter without a name": f"{text} --adapter {f}/peft",
        "generate: a model as an adapter": f"{text} --adapter a={f}/hf",
        "generate: a run as an adapter": f"{text} --adapter a={f}/chat",
        "generate: an adapter of another tokenizer": f"{text} --adapter a={f}/foreign",
        "generate: an adapter that is not there": f"{text} --adapter a={f}/nowhere",
        "generate: tokens spelled": f"generate --load {f}/text --tokens 1 --prompt '<s>[INST] Hi [/INST]'",
        "generate: more tokens than positions": f"generate --load {f}/text --prompt a --tokens 9999",
        "generate: no tokenizer": f"generate --load {f}/untold --prompt a --tokens 1",
        "generate: a tokenizer with more tokens than rows": f"generate --load {f}/wider --prompt a --tokens 1",
        "generate: talks as prompts": f"generate --load {f}/chat --input {f}/talks.jsonl --tokens 1",
        "generate: --model": f"generate --model {f}/hf --prompt a",
        "generate: -m of llama.cpp": f"generate -m {f}/model.gguf -p a -n 4",
        "generate: ends of another": f"generate --load {f}/badend --prompt a --tokens 1",
        "serve: an adapter": f"serve {f}/peft",
        "serve: a model as an adapter": f"serve {f}/text --adapter a={f}/hf",
        "serve: an adapter without a name": f"serve {f}/text --adapter {f}/peft",
        "serve: an adapter of another tokenizer": f"serve {f}/text --adapter a={f}/foreign",
        "serve: an adapter of another base": f"serve {f}/other --adapter a={f}/peft",
        "serve: two adapters of a name": f"serve {f}/text --adapter a={f}/peft --adapter a={f}/lora",
        "serve: an adapter by the model's name": f"serve {f}/text --adapter text={f}/peft",
        "serve: a template that is not there": f"serve {f}/text --chat-template {f}/no.jinja",
        "serve: a template that is broken": f"serve {f}/text --chat-template {f}/broken.jinja",
        "serve: a template that the tokenizer lacks": f"serve {f}/text --chat-template chatml",
        "serve: its own by name": f"serve {f}/text --chat-template model",
        "serve: a tokenizer": f"serve {f}/text --tokenizer Llama2Tokenizer --tokenizer-model {place.model}",
        "serve: vLLM's name": f"serve {f}/text --served-model-name mine",
        "serve: vLLM's adapters": f"serve {f}/text --enable-lora --lora-modules a={f}/peft",
        "serve: vLLM's --model": f"serve --model {f}/hf",
        "serve: vLLM's length": f"serve {f}/text --max-model-len 64",
        "serve: vLLM's ranks": f"serve {f}/text --tensor-parallel-size 3",
        "serve: llama.cpp's context": f"serve -m {f}/model.gguf -c 4096",
        "serve: a name of the hub": "serve meta-llama/Llama-2-7b-hf",
        "serve: a BERT": f"serve {f}/bert",
        "serve: no tokenizer": f"serve {f}/untold",
        "serve: a tokenizer with more tokens than rows": f"serve {f}/wider",
        "serve: NaN": f"serve {f}/nan",
        "serve: ends of another": f"serve {f}/badend",
    }
    return words


def converting(place: Place) -> dict[str, str]:
    f, to = place.folder, "convert-llama --save-dir"
    score = shlex.join(SHAPE)
    return {
        "convert-llama: to safetensors": f"{to} {f}/d1 --load-dir {f}/text --to safetensors",
        "convert-llama: an adapter without its base": f"{to} {f}/d2 --load-dir {f}/peft",
        "convert-llama: an adapter on an adapter": f"{to} {f}/d3 --load-dir {f}/peft --base {f}/lora",
        "convert-llama: an adapter on another model": f"{to} {f}/d4 --load-dir {f}/peft --base {f}/other",
        "convert-llama: a base for a model": f"{to} {f}/d5 --load-dir {f}/hf --base {f}/text",
        "convert-llama: a gguf": f"{to} {f}/d6 --load-dir {f}/model.gguf",
        "convert-llama: no weights": f"{to} {f}/d7 --load-dir {f}/untold-config",
        "convert-llama: a quantised one": f"{to} {f}/d8 --load-dir {f}/quantised",
        "convert-llama: a size that is not the weights'": f"{to} {f}/d9 --load-dir {f}/resized",
        "convert-llama: a model_type that is none": f"{to} {f}/d10 --load-dir {f}/falcon",
        "convert-llama: to meta, of adapters": f"{to} {f}/d11 --load-dir {f}/peft --base {f}/text --to meta",
        "convert-llama: a tree": f"{to} {f}/d12 --load-dir {f}/tree",
        "convert-llama: peft of a whole run": f"{to} {f}/d13 --load-dir {f}/chat --to peft",
        "convert-llama: a BERT to meta": f"{to} {f}/d14 --load-dir {f}/bert-run --to meta",
        "convert-llama: into a run": f"{to} {f}/text --load-dir {f}/hf --to hf",
        "convert-llama: a name of the hub": f"{to} {f}/d15 --load-dir meta-llama/Llama-2-7b-hf",
        "convert-llama: a tokenizer of words": f"{to} {f}/d16 --load-dir {f}/words",
        "convert-llama: more tokens than rows": f"{to} {f}/d17 --load-dir {f}/wider",
        "convert-llama: a template that is broken": f"{to} {f}/d18 --load-dir {f}/badtemplate",
        "convert-llama: ends of another": f"{to} {f}/d19 --load-dir {f}/badend",
        "reshard: an adapter": f"reshard --load-dir {f}/peft --save-dir {f}/e2",
        "reshard: to Hugging Face": f"reshard --load-dir {f}/text --save-dir {f}/e3 --saver llama2_hf",
        "reshard: adapters to a tree": f"reshard --load-dir {f}/lora --save-dir {f}/e5 --saver megatron",
        "reshard: three ranks": f"reshard --load-dir {f}/text --save-dir {f}/e6 --tp 3",
        "reshard: a tokenizer": f"reshard --load-dir {f}/text --save-dir {f}/e7 --tokenizer-type GPT2BPETokenizer",
        "memory-estimate: a tokenizer that is not there": (
            f"memory-estimate {score} --tokenizer HuggingFaceTokenizer --tokenizer-model {f}/no.json --seq-length 32"
        ),
        "memory-estimate: no vocabulary": f"memory-estimate {score} --seq-length 32",
        "memory-estimate: a Hugging Face folder": f"memory-estimate --model {f}/hf --seq-length 32",
        "checkpoint: a Hugging Face folder": f"checkpoint show {f}/hf",
        "checkpoint: a difference to a Hugging Face folder": f"checkpoint diff {f}/text {f}/hf",
        "checkpoint: verified, an adapter of peft": f"checkpoint verify {f}/peft",
        "checkpoint: a tokenizer": f"checkpoint show {f}/bpe",
        "checkpoint: two models": f"checkpoint diff {f}/text {f}/other",
    }


TALK = [{"role": "user", "content": "Who?"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat of a model without a template": ("/v1/chat/completions", {"messages": TALK, "model": "text"}),
    "messages to completions": ("/v1/completions", {"messages": TALK}),
    "a prompt to chat": ("/v1/chat/completions", {"prompt": "a"}),
    "a model that is not served": ("/v1/completions", {"prompt": "a", "model": "gpt-4"}),
    "an adapter by adapter": ("/v1/completions", {"prompt": "a", "adapter": "lora"}),
    "an adapter by lora_request": ("/v1/completions", {"prompt": "a", "lora_request": {"name": "lora"}}),
    "tools": ("/v1/chat/completions", {"messages": TALK, "model": "lora", "tools": [{"type": "function"}]}),
    "a picture": (
        "/v1/chat/completions",
        {"model": "lora", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    "a role of tools": ("/v1/chat/completions", {"model": "lora", "messages": [{"role": "tool", "content": "a"}]}),
    "a role human": ("/v1/chat/completions", {"model": "lora", "messages": [{"role": "human", "content": "a"}]}),
    "ShareGPT's messages": ("/v1/chat/completions", {"model": "lora", "messages": [{"from": "human", "value": "a"}]}),
    "a system turn alone": (
        "/v1/chat/completions",
        {"model": "lora", "messages": [{"role": "system", "content": "a"}]},
    ),
    "a template in a request": (
        "/v1/chat/completions",
        {"model": "lora", "messages": TALK, "chat_template": "{{ messages }}"},
    ),
    "template arguments": (
        "/v1/chat/completions",
        {"model": "lora", "messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "continue_final_message": (
        "/v1/chat/completions",
        {"model": "lora", "messages": TALK, "continue_final_message": True},
    ),
    "stop_token_ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": [2]}),
    "skip_special_tokens": ("/v1/completions", {"prompt": "a", "skip_special_tokens": False}),
    "guided_json": ("/v1/completions", {"prompt": "a", "guided_json": {}}),
    "ids of another vocabulary": ("/v1/completions", {"prompt": [1, 31999]}),
    "n_predict": ("/v1/completions", {"prompt": "a", "n_predict": 8}),
    "llama.cpp's route": ("/completion", {"prompt": "a"}),
    "text-generation-inference's route": ("/generate", {"inputs": "a"}),
    "a bias of tokens": ("/v1/completions", {"prompt": "a", "logit_bias": {"5": -100}}),
    "tokens spelled": ("/v1/completions", {"prompt": "<s>[INST] a [/INST]", "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "messages to tokenize": ("/tokenize", {"messages": TALK}),
    "ids that are no ids": ("/detokenize", {"tokens": [99999]}),
    "a prompt to PUT /api of today": ("/api", {"prompts": ["a"], "tokens_to_generate": 1, "model": "lora"}),
}
"""Request to a server of `text` with the adapter `lora` -> route and body."""


def prepared(folder: Path) -> Place:
    place = Place(folder)
    _made_of_runs(place)
    _made_of_files(place)
    _folders(place)
    return place


def _made_of_runs(place: Place) -> None:
    f, save = place.folder, ["--save-interval", "1", "--save"]
    data = ["--data-path", place.tokens, "--split", "1,0,0"]
    lora = ["--lora-rank", "2", "--chat-template", "llama2", *save, f / "lora"]
    other = [word if word != "16" else "32" for word in SHAPE]
    for words in (
        ["finetune", "--load", f / "text", *STEP, *place.talks, *lora],
        ["convert-llama", "--load-dir", f / "lora", "--save-dir", f / "peft", "--to", "peft"],
        ["pretrain", *other, *STEP, *place.same, *data, *save, f / "other"],
        ["pretrain", *SHAPE, *STEP, *NULL, "--data-path", place.others, "--split", "1,0,0", *save, f / "null"],
        ["reshard", "--load-dir", f / "text", "--save-dir", f / "tree", "--saver", "megatron"],
        ["train-tokenizer", "--input", f / "a.jsonl", "--output-dir", f / "bpe", "--vocab-size", "280"],
        ["train-tokenizer", "--input", f / "a.jsonl", "--output-dir", f / "word", "--vocab-size", "13",
         "--kind", "sentencepiece", "--model-type", "word"],
    ):  # fmt: skip
        assert main([str(word) for word in words]) == 0, words
    words = ["--tokenizer", "Llama2Tokenizer", "--tokenizer-model", str(f / "word" / "tokenizer.model")]
    for line in (
        ["preprocess", "--input", f / "a.jsonl", "--output-prefix", f / "w", *words],
        [
            "pretrain",
            *SHAPE,
            *STEP,
            *words,
            "--data-path",
            f / "w_text_document",
            "--split",
            "1,0,0",
            *save,
            f / "words",
        ],
    ):
        assert main([str(word) for word in line]) == 0, line


def _made_of_files(place: Place) -> None:
    f = place.folder
    talk = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}
    rows: dict[str, Any] = {
        "sharegpt": {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
        "alpaca": {"instruction": "Who?", "input": "", "output": "Me."},
        "roles": {"messages": [{"role": "human", "content": "Who?"}, {"role": "gpt", "content": "Me."}]},
        "unanswered": {"messages": [{"role": "user", "content": "Who?"}]},
        "pictures": {"messages": [{"role": "user", "content": [{"type": "image"}]}, talk["messages"][1]]},
        "tools": {**talk, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        "long": {"messages": [talk["messages"][0], {"role": "assistant", "content": "Me and you. " * 60}]},
        "spelled": {"text": "<s>[INST] Who? [/INST] Me. </s>"},
    }
    for name, row in rows.items():
        (f / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (f / "array.json").write_text(json.dumps([talk] * 3))
    (f / "pairs.tsv").write_text("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t0\t0\ta b\tc d\t0\n")
    templates = {
        "broken": "{% for m in messages %}",
        "filter": "{% for m in messages %}{{ m.content | shout }}{% endfor %}",
        "constant": "Hello",
        "endless": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "chat": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    }
    for name, source in templates.items():
        (f / f"{name}.jinja").write_text(source)
    (f / "half.model").write_bytes(place.model.read_bytes()[:3000])
    (f / "tok.vocab").write_text("<unk>\t0\n<s>\t0\n")
    (f / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    (f / "race").mkdir()
    article = {
        "article": "A b.",
        "questions": ["Who _ ?"],
        "options": [["a", "b", "c", "d"]],
        "answers": ["A"],
        "id": "1",
    }
    (f / "race" / "1.txt").write_text(json.dumps(article))


def _folders(place: Place) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    f = place.folder

    def copy(name: str, source: str = "hf", **config: Any) -> Path:
        shutil.copytree(f / source, f / name)
        file = f / name / "config.json"
        if config:
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return f / name

    copy("quantised", quantization_config={"quant_method": "gptq"})
    copy("resized", vocab_size=600)
    copy("falcon", model_type="falcon")
    copy("badend", eos_token_id=700)
    generation = f / "badend" / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 700}))
    for path in copy("untold").iterdir():
        if "token" in path.name:
            path.unlink()
    (copy("untold-config") / "model.safetensors").unlink()
    bad = copy("badtemplate")
    (bad / "chat_template.jinja").write_text("{% for m in messages %}")
    wider = copy("wider")
    whole = json.loads((wider / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"].append({"id": 512, "content": "<|im_end|>", "special": True, **plain})
    (wider / "tokenizer.json").write_text(json.dumps(whole))
    nan = copy("nan")
    tensors = load_file(nan / "model.safetensors")
    tensors["model.norm.weight"][1] = torch.nan
    save_file(tensors, nan / "model.safetensors")
    foreign = copy("foreign", "peft")
    for name in ("tokenizer.json", "tokenizer.model"):
        (foreign / name).unlink(missing_ok=True)
    byte_level(foreign)
    (f / "clash").mkdir()
    shutil.copy(place.model, f / "clash" / "tokenizer.model")
    (f / "clash" / "added_tokens.json").write_text('{"<|im_end|>": 5}')
    (f / "badcfg").mkdir()
    shutil.copy(f / "hf" / "tokenizer.json", f / "badcfg")
    (f / "badcfg" / "tokenizer_config.json").write_text("{")
    shutil.copytree(shared("bert_hf_random/config.json").parent, f / "bert")
    assert main(["convert-llama", "--load-dir", str(f / "bert"), "--save-dir", str(f / "bert-run")]) == 0


def prove(name: str, line: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    if name in SERVES:
        return _served(name, line)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    said = err.getvalue() + out.getvalue()
    if name in SAID:
        # `checkpoint diff` ends with 1 where something differs.
        assert code in (0, 1) and SAID[name] in said, f"exit {code}: {said[-400:]}"
    else:
        # What a verb says of the data that it reads may stand before the error.
        assert code == 2, f"exit {code}: {said[-2600:]} | {line}"
        assert err.getvalue().strip().splitlines()[-1].startswith("mega: "), said[-300:]
    return {"line": line, "code": code, "said": err.getvalue().strip()[-200:]}


SERVES = ("serve: a tokenizer",)
"""Mistakes with which a server starts."""


def _served(name: str, line: str) -> dict[str, Any]:
    words, found = [sys.executable, "-m", "mega", *shlex.split(line), "--port", "0"], ""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for each in process.stdout:
            found += each
            if each.startswith("ready: "):
                process.terminate()
    assert process.returncode == 0 and SAID[name] in found, f"exit {process.returncode}: {found[-400:]}"
    return {"line": line, "code": 0, "said": found[-200:]}


@cache
def server(folder: Path) -> tuple[Any, str]:
    words = ["serve", str(folder / "text"), "--adapter", f"lora={folder / 'lora'}", "--port", "0"]
    process = subprocess.Popen([sys.executable, "-m", "mega", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = next(line for line in process.stdout if line.startswith("ready: "))
    return process, ready.split()[-1]


def asked(folder: Path, name: str) -> dict[str, Any]:
    route, body = REQUESTS[name]
    _, url = server(folder)
    method = "PUT" if route == "/api" else "POST"
    request = urllib.request.Request(
        url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if f"request: {name}" in SAID:
        assert status == 200 and SAID[f"request: {name}"] in text, f"{status}: {text[:300]}"
    else:
        assert 400 <= status < 500 and "\n" not in text.strip(), f"{status}: {text[:300]}"
    return {"route": route, "status": status, "said": text[:300]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        with contextlib.redirect_stdout(io.StringIO()):
            place = prepared(Path(folder))
        table = {**preprocessing(place), **training(place), **answering(place), **converting(place)}
        make: Callable[[str, str], Any] = prove
        items = [(name, partial(make, name, line)) for name, line in table.items()]
        items += [(f"request: {name}", partial(asked, place.folder, name)) for name in REQUESTS]
        try:
            run("identity_strangers", items)
        finally:
            if server.cache_info().currsize:
                process, _ = server(place.folder)
                process.terminate()
                process.wait(30)
