"""From a base to a finetuned model that converses, to an export: transformers and mega's server answer alike.

TEMPLATE: KIND        a base is finetuned on conversations by TEMPLATE; KIND whole, merged (an adapter in its base) or
                      peft (the adapter alone). Greedy answers of transformers' `generate`, with no more than what lies
                      in the exported folder, and of `mega serve` on it: the same text, ended by the turn's end

The base is a small Llama of Hugging Face's, trained on the same conversations in plain text, whose own ends are others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.text.build import build
from mega.core.text.chat.format import chat_format
from tests.battery.data_ledger import ROOT, Item, run
from tests.support.chat_templates import metaspace, untagged

ASKED = {
    "What is the capital of France?": "Paris.",
    "Say hello to the world": "Hello, world!",
    "1 + 1?": "It is 2.",
    "Wie heißt das auf Englisch?": "That  is naïve.",
    "Name a fruit": "Apple\nor pear",
}
UNSEEN = "Name a city"
TEMPLATES = ("llama2", "llama3", "chatml", "plain", "gemma")
KINDS = ("whole", "merged", "peft")
SHAPE = "--seq-length 64 --global-batch 5 --micro-batch 5 --eval-iters 0 --device cpu --lr-warmup-steps 5"
NEW = 40


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="chat-exports-"))


def mega(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "mega", *map(str, words)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (words, done.stderr[-2000:])


@functools.cache
def talks() -> Path:
    path = folder() / "talks.jsonl"
    lines = [{"prompt": question, "completion": answer} for question, answer in ASKED.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@functools.cache
def base() -> Path:
    """A Hugging Face folder whose generate stops at </s>, trained by transformers on the conversations as text."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place = folder() / "base"
    place.mkdir()
    metaspace(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [f"{question} {answer}" for question, answer in ASKED.items()]
    for _ in range(60):
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place)
    return place


def template_of(name: str) -> str:
    """As --chat-template takes it."""
    if name != "gemma":
        return name
    path = folder() / "gemma.jinja"
    path.write_text(untagged(name))
    return str(path)


@functools.cache
def trained(name: str, adapters: bool) -> Path:
    save = folder() / f"{name}-{'lora' if adapters else 'whole'}"
    how = "--lora-rank 16 --lora-alpha 32 --steps 250 --lr 1e-2" if adapters else "--steps 120 --lr 3e-3"
    chat = ["--chat-data", talks(), "--chat-template", template_of(name)]
    mega("finetune", "--load", base(), "--save", save, "--save-interval", 1000, *chat, *SHAPE.split(), *how.split())
    return save


@functools.cache
def exported(name: str, kind: str) -> Path:
    out = folder() / f"{name}-{kind}-export"
    to = ["--to", "peft", "--base", base()] if kind == "peft" else ["--to", "hf"]
    mega("convert-llama", "--load-dir", trained(name, kind != "whole"), "--save-dir", out, *to)
    return out


def by_transformers(out: Path, kind: str) -> dict[str, tuple[str, bool]]:
    """Question -> the answer, and whether it ended by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if kind == "peft":
        from peft import PeftModel

        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base()), out)
    else:
        model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer, how = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    ends = how.eos_token_id if isinstance(how.eos_token_id, list) else [how.eos_token_id]
    found: dict[str, tuple[str, bool]] = {}
    for question in (*ASKED, UNSEEN):
        asked: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        count = asked["input_ids"].shape[1]
        with torch.no_grad():
            made = model.generate(**asked, generation_config=how, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        ids = made[0].tolist()
        ended = ids[-1] in ends
        whole: Any = tokenizer.decode(ids[: -1 if ended else None], skip_special_tokens=True)
        found[question] = (whole[len(tokenizer.decode(ids[:count], skip_special_tokens=True)) :], ended)
    return found


@contextlib.contextmanager
def server(*words: object) -> Iterator[str]:
    command = [sys.executable, "-m", "mega", "serve", *map(str, words), "--port", "0", "--dtype", "fp32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if ready := re.match(r"ready: (http://\S+)", line):
                yield ready[1]
                break
        else:
            raise AssertionError("".join(said)[-1000:])
    finally:
        process.terminate()
        process.wait(30)


def by_server(out: Path, kind: str) -> dict[str, tuple[str, bool]]:
    words: list[object] = [out]
    if kind == "peft":
        words = [base(), "--adapter", f"a={out}"]
    found = {}
    with server(*words) as url:
        for question in (*ASKED, UNSEEN):
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": NEW, "temperature": 0}
            data = json.dumps(body | ({"model": "a"} if kind == "peft" else {})).encode()
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                choice = json.load(reply)["choices"][0]
            found[question] = (choice["message"]["content"], choice["finish_reason"] == "stop")
    return found


def item(name: str, kind: str) -> dict[str, Any]:
    out = exported(name, kind)
    tokenizer = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=out)
    chat = chat_format(str(out / "chat_template.jinja"), tokenizer)
    theirs, ours = by_transformers(out, kind), by_server(out, kind)
    wrong = {question: (theirs[question], ours[question]) for question in theirs if theirs[question] != ours[question]}
    assert not wrong, wrong
    learned = sum(theirs[question][0].strip() == answer for question, answer in ASKED.items())
    ended = sum(theirs[question][1] for question in ASKED)
    assert learned == ended == len(ASKED), theirs
    return {"answers": len(theirs), "learned": learned, "ended": ended, "ends": list(chat.end_names)}


def items() -> list[Item]:
    return [(f"{name}: {kind}", functools.partial(item, name, kind)) for name in TEMPLATES for kind in KINDS]


if __name__ == "__main__":
    run("chat_exports", items())
