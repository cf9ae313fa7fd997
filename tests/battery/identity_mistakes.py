"""A hundred mistakes around tokenizers, templates and exports, each typed as a newcomer types it: none is silent.

    PYTHONPATH=. python tests/battery/identity_mistakes.py ["finetune: ..." ...] [--summary]

A mistake ends with exit code 2 and one line on stderr, before anything is written; or, where the table below says so,
with exit code 0 and a line that holds what is quoted there.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.cli import main
from tests.battery.data_ledger import run
from tests.cli.test_identity import NULL, SHAPE, STEP, Place
from tests.support.shared import shared

SAID = {
    "no --append-eod": "documents have no end",
    "a template of another": "has another of its own",
    "no template": "plain is taken",
    "a rate of 3": "--lr 3: is far above",
    "a rate of 1e6": "--lr 1e+06: is far above",
    "a conversation continued": "was trained on conversations",
    "another's result by name": "is the result of another model",
    "other tokens, allowed": "was made with",
    "another tokenizer, allowed": "has a tokenizer of its own",
    "merged though others": "no tokenizer is noted for the result",
    "decoded by another": "are decoded with another one",
    "others' by another kind of it": "is of a file that came with",
}
"""Mistake -> what a user reads, where it is no error."""


def table(place: Place) -> dict[str, str]:
    """Verb: mistake -> the line."""
    words: dict[str, str] = {}
    f, same, null = place.folder, shlex.join(map(str, place.same)), shlex.join(NULL)
    step, tokens, others = shlex.join(STEP), place.tokens, place.others
    gpt2 = f"--tokenizer GPT2BPETokenizer --vocab-file {shared('gpt2/gpt2-vocab.json')}"
    merges, bert = f"--merge-file {shared('gpt2/gpt2-merges.txt')}", shared("bert/bert-base-cased-vocab.txt")
    llama2, shape = shared("llama2/tokenizer.model"), shlex.join(SHAPE)

    def preprocess(mistake: str, tokenizer: str, source: str = "a.jsonl", more: str = "") -> None:
        words[f"preprocess: {mistake}"] = f"preprocess --input {f}/{source} --output-prefix {f}/x {tokenizer} {more}"

    for mistake, tokenizer in {
        "no tokenizer": "",
        "a kind that is none": "--tokenizer LlamaTokenizer",
        "a kind in small letters": "--tokenizer gpt2bpetokenizer",
        "no merges": gpt2,
        "no vocabulary": f"--tokenizer GPT2BPETokenizer {merges}",
        "merges for vocabulary": f"--tokenizer GPT2BPETokenizer --vocab-file {shared('gpt2/gpt2-merges.txt')} {merges}",
        "vocabulary for merges": f"{gpt2} --merge-file {shared('gpt2/gpt2-vocab.json')}",
        "no model": "--tokenizer Llama2Tokenizer",
        "a model that is not there": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}/no.model",
        "a vocabulary for a model": f"--tokenizer Llama2Tokenizer --tokenizer-model {bert}",
        "a folder for a model": f"--tokenizer Llama2Tokenizer --tokenizer-model {f}",
        "a model for tokenizer.json": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {llama2}",
        "JSON that is no tokenizer": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/a.jsonl",
        "a folder without tokenizer.json": f"--tokenizer HuggingFaceTokenizer --tokenizer-model {f}/text",
        "a model for vocab.txt": f"--tokenizer BertWordPieceCase --vocab-file {llama2}",
        "JSON for vocab.txt": f"--tokenizer BertWordPieceCase --vocab-file {shared('gpt2/gpt2-vocab.json')}",
        "Llama 3 of Llama 2": f"--tokenizer Llama3Tokenizer --tokenizer-model {llama2}",
        "Null without a size": "--tokenizer NullTokenizer",
        "Null of nothing": "--tokenizer NullTokenizer --vocab-size 0",
        "Null with words": null,
        "sentinels of GPT-2": f"{gpt2} {merges} --vocab-extra-ids 100",
        "too many sentinels": f"--tokenizer BertWordPieceCase --vocab-file {bert} --vocab-extra-ids 9999999",
        "an empty vocabulary": f"--tokenizer BertWordPieceCase --vocab-file {f}/empty",
        "a cased folder, lower-cased": f"--tokenizer BertWordPieceLowerCase --vocab-file {f}/bert/vocab.txt",
        "settings that are no JSON": f"--tokenizer BertWordPieceCase --vocab-file {f}/broken/vocab.txt",
        "settings that are no switch": f"--tokenizer BertWordPieceCase --vocab-file {f}/odd/vocab.txt",
    }.items():
        preprocess(mistake, tokenizer)
    preprocess("ends that BERT has not", f"--tokenizer BertWordPieceCase --vocab-file {bert}", more="--append-eod")
    preprocess("gzip named .jsonl", same, "packed.jsonl")
    preprocess("UTF-16", same, "wide.jsonl")
    preprocess("UTF-16 text", same, "wide.txt")
    preprocess("no such text", same, "b.jsonl")
    preprocess("another key", same, more="--json-keys content")
    preprocess("an empty text", same, "empty")
    preprocess("no --append-eod", same, more="--overwrite")
    words["preprocess: a place of the kernel's"] = f"preprocess --input {f}/a.jsonl --output-prefix /proc/x/y {same}"
    words["preprocess: a file for a folder"] = f"preprocess --input {f}/a.jsonl --output-prefix {f}/a.jsonl/y {same}"

    def trains(mistake: str, line: str, verb: str = "finetune") -> None:
        words[f"{verb}: {mistake}"] = f"{verb} {step} {line} --metrics {f}/metrics"

    text, chat = f"--load {f}/text", f"--load {f}/chat"
    data, talks = f"--data-path {tokens} --split 1,0,0", f"--chat-data {f}/talks.jsonl"
    strangers = {
        "Null": null,
        "GPT-2": f"{gpt2} {merges}",
        "Llama 2": f"--tokenizer Llama2Tokenizer --tokenizer-model {llama2}",
        "BERT": f"--tokenizer BertWordPieceCase --vocab-file {bert}",
        "another kind of it": f"--tokenizer GPTSentencePieceTokenizer --tokenizer-model {place.model}",
    }
    for name, flags in strangers.items():
        trains(f"text by {name}", f"{text} {data} {flags}")
        trains(f"talks by {name}", f"{text} {talks} {flags}")
        trains(f"others' weights by {name}", f"--load {f}/hf {data} {flags}")
        words[f"generate: by {name}"] = f"generate --load {f}/text --prompt a --tokens 1 {flags}"
        words[f"generate: others' by {name}"] = f"generate --load {f}/hf --prompt a --tokens 1 {flags}"
        scored = f"eval --task ppl --valid-data {f}/a.jsonl --device cpu --json {f}/s.json"
        words[f"eval: by {name}"] = f"{scored} --load {f}/text {flags}"
        words[f"eval: others' by {name}"] = f"{scored} --load {f}/hf {flags}"
    trains("no weights", f"{shape} {same} {data}")
    trains("no weights, talks", f"{shape} {same} {talks}")
    trains("no weights, resumed", f"{shape} {same} {data} --resume auto --save {f}/none --save-interval 1")
    trains("weights that are not there", f"--load {f}/txt {data}")
    trains("a tokenizer for weights", f"--load {place.model} {data}")
    trains("other tokens", f"{text} --data-path {others} --split 1,0,0")
    trains("other tokens, allowed", f"{text} --data-path {others} --split 1,0,0 --allow-tokenizer-mismatch")
    trains("another tokenizer, allowed", f"{text} --data-path {others} --split 1,0,0 {null} --allow-tokenizer-mismatch")
    trains("a template that is none", f"{text} {talks} --chat-template llama4")
    trains("a template that is not there", f"{text} {talks} --chat-template {f}/no.jinja")
    trains("its template, of none", f"{text} {talks} --chat-template model")
    trains("tokens the model lacks", f"{text} {talks} --chat-template chatml")
    trains("Llama 3's marks", f"{text} {talks} --chat-template llama3")
    trains("a template of another", f"{chat} {talks} --chat-template plain")
    trains("no template", f"{text} {talks}")
    trains("a template for text", f"{text} {data} --chat-template llama2")
    trains("text for talks", f"{text} --chat-data {f}/a.jsonl")
    trains("token files for talks", f"{text} --chat-data {tokens}")
    trains("talks for token files", f"{text} --data-path {f}/talks.jsonl --split 1,0,0")
    trains("a rate of 3", f"{text} {data} --lr 3")
    trains("a rate of 1e6", f"{text} {data} --lr 1e6")
    trains("other tokens", f"{shape} {same} --data-path {others} --split 1,0,0", "pretrain")
    trains("another vocabulary", f"{text} --use-checkpoint-config --finetune {data} {strangers['GPT-2']}", "pretrain")
    trains("its own template of none", f"{shape} {same} {talks} --chat-template model", "pretrain")
    trains("a tree to continue and to save", f"--load {f}/tree --save {f}/tree --save-interval 1 {data}", "pretrain")
    words["generate: a conversation continued"] = f"generate --load {f}/chat --prompt a --tokens 1"
    words["generate: a template"] = f"generate --load {f}/chat --prompt a --chat-template llama2"
    words["generate: a size alone"] = f"generate --load {f}/text --prompt a --vocab-size 500"
    words["generate: files without a kind"] = f"generate --load {f}/text --prompt a --tokenizer-model {place.model}"
    words["generate: NaN"] = f"generate --load {f}/nan --prompt a"
    words["eval: other tokens"] = (
        f"eval --task ppl --valid-data {others} --load {f}/text --device cpu --json {f}/s.json"
    )
    words["eval: NaN"] = f"eval --task ppl --valid-data {f}/a.jsonl --load {f}/nan --device cpu --json {f}/s.json"
    words["eval: another's result by name"] = f"{scored} --load {f}/chat".replace("s.json", "text.json")
    words["convert-llama: NaN"] = f"convert-llama --load-dir {f}/nan --save-dir {f}/c1"
    words["convert-llama: over a folder"] = f"convert-llama --load-dir {f}/text --save-dir {f}/hf"
    words["convert-llama: an adapter of none"] = f"convert-llama --load-dir {f}/text --save-dir {f}/c2 --to peft"
    words["convert-llama: into itself"] = f"convert-llama --load-dir {f}/hf --save-dir {f}/hf"
    words["convert-llama: a form that is none"] = f"convert-llama --load-dir {f}/text --save-dir {f}/c3 --to gguf"
    words["convert-llama: a tokenizer"] = f"convert-llama --load-dir {place.model} --save-dir {f}/c4"
    words["data: merged of two"] = f"data merge {tokens} {others} --output-prefix {f}/m"
    words["data: merged though others"] = (
        f"data merge {tokens} {others} --output-prefix {f}/m2 --allow-tokenizer-mismatch"
    )
    words["data: noted by another"] = f"data note {tokens} {null}"
    return words


def prepared(folder: Path) -> Place:
    place = Place(folder)
    (folder / "empty").write_text("")
    (folder / "packed.jsonl").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    for name in ("wide.jsonl", "wide.txt"):
        (folder / name).write_text((folder / "a.jsonl").read_text(), encoding="utf-16")
    settings = {"bert": '{"do_lower_case": false}', "broken": "{", "odd": '{"strip_accents": "some"}'}
    for name, content in settings.items():
        (folder / name).mkdir()
        (folder / name / "vocab.txt").write_bytes(shared("bert/bert-base-cased-vocab.txt").read_bytes())
        (folder / name / "tokenizer_config.json").write_text(content)
    import torch
    from safetensors.torch import load_file, save_file

    (folder / "nan").mkdir()
    for path in (folder / "hf").iterdir():
        (folder / "nan" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "hf" / "model.safetensors")
    tensors["model.norm.weight"][1] = torch.nan
    save_file(tensors, folder / "nan" / "model.safetensors")
    score = ["eval", "--task", "ppl", "--valid-data", place.tokens, "--load", folder / "text", "--device", "cpu"]
    assert main([*map(str, score), "--json", str(folder / "text.json")]) == 0
    assert (
        main(["reshard", "--load-dir", str(folder / "text"), "--save-dir", str(folder / "tree"), "--saver", "megatron"])
        == 0
    )
    return place


def prove(name: str, line: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    said, mistake = err.getvalue() + out.getvalue(), name.partition(": ")[2]
    if mistake in SAID:
        assert code == 0 and SAID[mistake] in said, f"exit {code}: {said[-300:]}"
    else:
        # What a verb says of the data that it reads may stand before the error.
        assert code == 2, f"exit {code}: {said[-300:]} | {line}"
        assert err.getvalue().strip().splitlines()[-1].startswith("mega: "), said[-300:]
    return {"line": line, "code": code, "said": err.getvalue().strip()[-200:]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        with contextlib.redirect_stdout(io.StringIO()):
            place = prepared(Path(folder))
        make: Callable[[str, str], Any] = prove
        run("identity_mistakes", [(name, partial(make, name, line)) for name, line in table(place).items()])
