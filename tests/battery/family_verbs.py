"""Every family of decoders through the verbs, from a folder as Hugging Face has it: weights, tokenizer, chat template.

    python tests/battery/family_verbs.py [case ...] [--limit 5] [--out FILE] [--summary]

The folder is a small random model of tests/support/hub_families.py in bf16 with a made-up tokenizer of the family's
kind and a template in its style. One item a case:

convert     into a checkpoint, whose logits are transformers' (--verify)
eval        perplexity of a text: the folder as it lies, and the checkpoint: the same figure
pretrain    two steps on random tokens from those weights
finetune    two steps on conversations, the whole model and adapters; the folder that is exported opens in transformers,
            renders a conversation to the ids that mega trains on, and stops where the template ends a turn
adapters    the export for peft over the folder has the logits of the merged export, and is read back bit for bit
generate    20 tokens at temperature 0 from the folder: the text that transformers' own loop gives
serve       a chat answer: the same tokens as transformers' for the same prompt by the template
estimate    memory of the finetuned run
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.cli import main
from mega.core.inference.text_stream import TextStream
from mega.core.text.build import build
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.messages import conversation
from tests.battery.data_ledger import Item, run
from tests.inference.server.test_serve import ask, served
from tests.support import hub_families as hub
from tests.support.chat_templates import CONVERSATIONS, SMALL, untagged

MANNERS: dict[str, tuple[str, str]] = {
    "llama": ("trimming", "llama3"),
    "mistral": ("metaspace", "mistral"),
    "qwen2": ("byte-level", "chatml"),
    "qwen3": ("byte-level", "chatml"),
    "smollm3": ("trimming", "chatml"),
    "granite": ("gpt2", "granite"),
    "olmo2": ("byte-level", "tulu"),
    "olmo3": ("byte-level", "chatml"),
    "olmoe": ("byte-level", "tulu"),
    "mixtral": ("metaspace", "mistral"),
    "gemma": ("metaspace", "gemma"),
    "gemma2": ("metaspace", "gemma"),
    "gemma3": ("metaspace", "gemma"),
    "phi3": ("metaspace", "phi3"),
    "starcoder2": ("gpt2", "alpaca"),
    "stablelm": ("byte-level", "chatml"),
    "pythia": ("byte-level", "tulu"),
    "gpt": ("gpt2", "tulu"),
    "gptj": ("gpt2", "tulu"),
    "gpt2": ("gpt2", "tulu"),
}
"""What a case begins with -> a kind of tokenizer, and a template in the family's style."""

TALKS = ("one", "turns", "lines")
TEXT = "The cat sat on the mat. The dog did not.\n" * 12
ANSWER = 20


class Verbs:
    """The verbs on one folder. folder: of all that they write."""

    def __init__(self, case: str, folder: Path):
        self.case, self.folder, self.hf = case, folder, folder / "hf"
        tokenizer, self.template = next(
            MANNERS[name] for name in sorted(MANNERS, key=len, reverse=True) if case.startswith(name)
        )
        self.hf.mkdir()
        SMALL[tokenizer](self.hf)
        self.tokenizer = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=self.hf)
        said = json.loads((self.hf / "tokenizer_config.json").read_text())
        (self.hf / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": untagged(self.template)}))
        ids = self.tokenizer.special_ids()
        self.ends = {ids["eos_token_id"]}
        hub.saved(self.hf, case, torch.bfloat16, std=0.08, vocab_size=self.tokenizer.vocab_size, **ids)
        self.say("talks.jsonl", *(json.dumps(CONVERSATIONS[name]) for name in TALKS * 8))
        self.say("texts.jsonl", *(json.dumps({"text": TEXT}) for _ in range(4)))

    def say(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def __call__(self, *line: object, code: int = 0) -> str:
        """A command line; all that it prints."""
        words = [str(self.folder / word[1:]) if word.startswith("@") else word for word in map(str, line)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            found = main(words)
        assert found == code, f"mega {' '.join(words)}: exit {found}: {out.getvalue()[-800:]}"
        return out.getvalue()

    def theirs(self, place: Path) -> Any:
        """A folder in transformers, in fp32."""
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_pretrained(place, attn_implementation="eager", dtype=torch.float32).eval()

    # The items

    def convert(self) -> None:
        self("convert-llama", "--load-dir", "@hf", "--save-dir", "@run", "--verify")

    def eval(self) -> float:
        figures = []
        for load in ("@hf", "@run"):
            line = ("eval", "--task", "ppl", "--load", load, "--valid-data", "@texts.jsonl", "--json", "@ppl.json")
            self(*line, "--seq-length", 128, "--device", "cpu")
            figures.append(json.loads((self.folder / "ppl.json").read_text()))
            (self.folder / "ppl.json").unlink()
        first, second = ({one["name"]: one["value"] for one in each["figures"]}["ppl"] for each in figures)
        assert first == second, figures
        return float(first)

    def train(self, verb: str, save: str, *flags: object) -> str:
        line = (verb, "--save", save, "--save-interval", 2, "--steps", 2, "--lr", 1e-2, "--device", "cpu")
        return self(*line, "--seq-length", 256, "--micro-batch", 2, "--global-batch", 2, *flags)

    def pretrain(self) -> None:
        self.train("pretrain", "@more", "--load", "@run", "--finetune", "--use-checkpoint-config", "--mock-data")

    def finetune(self) -> None:
        talks = ("--chat-data", "@talks.jsonl", "--load", "@hf")
        self.train("finetune", "@tuned", *talks)
        self.train("finetune", "@adapted", *talks, "--lora-rank", 4)
        self("convert-llama", "--load-dir", "@tuned", "--save-dir", "@back", "--to", "hf", "--verify")
        self.speaks(self.folder / "back")

    def chat(self) -> ChatFormat:
        return ChatFormat(untagged(self.template), self.tokenizer, "--chat-template")

    def speaks(self, place: Path) -> None:
        """A folder asks and stops in transformers as mega does."""
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(place)
        chat = self.chat()
        for name in TALKS:
            ids = theirs.apply_chat_template(CONVERSATIONS[name]["messages"], return_dict=False)
            assert list(chat.labelled(conversation(CONVERSATIONS[name])).ids) == ids, name
        ends = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        named = {chat.tokens[name] for name in chat.end_names}
        assert named <= set(ends if isinstance(ends, list) else [ends]), (named, ends)

    def adapters(self) -> str:
        import peft

        self("convert-llama", "--load-dir", "@adapted", "--save-dir", "@merged", "--to", "hf", "--verify")
        line = ("convert-llama", "--load-dir", "@adapted", "--save-dir", "@peft", "--to", "peft", "--base", "@hf")
        self(*line)
        ids = torch.arange(3, 43)[None]
        with torch.no_grad():
            over = peft.PeftModel.from_pretrained(self.theirs(self.hf), self.folder / "peft")(ids).logits
            merged = self.theirs(self.folder / "merged")(ids).logits
        off = float((over - merged).abs().max() / merged.abs().max())
        assert off < 0.02, off  # the merged weights are rounded to bf16
        self("convert-llama", "--load-dir", "@peft", "--save-dir", "@adapted-again", "--base", "@hf")
        self("checkpoint", "diff", "@adapted", "@adapted-again", "--weights")
        return f"{off:.2g}"

    def generate(self) -> str:
        prompt = "The cat sat"
        self.say("prompts.jsonl", json.dumps({"prompt": prompt}))
        line = ("generate", "--load", "@hf", "--input", "@prompts.jsonl", "--output", "@said.jsonl")
        self(*line, "--greedy", "--tokens", ANSWER)
        (row,) = (json.loads(line) for line in (self.folder / "said.jsonl").read_text().splitlines())
        expected = self.continued(self.tokenizer.encode(prompt))
        assert row["text"] == expected, (row, expected)
        return expected[:40]

    def continued(self, ids: list[int], *more: int) -> str:
        """What transformers' likeliest tokens say after these. more: tokens that end an answer."""
        model, found = self.theirs(self.hf), torch.tensor([ids])
        begun, ends = found.shape[1], self.ends | set(more)
        for _ in range(ANSWER):
            with torch.no_grad():
                found = torch.cat([found, model(found, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            if int(found[0, -1]) in ends:
                break
        stream = TextStream(self.tokenizer, ids)  # which shows halves of characters as the verbs do
        shown = [stream.push(each) for each in found[0, begun:].tolist() if each not in ends]
        return "".join([*shown, stream.finish()])

    def serve(self) -> str:
        from transformers import AutoTokenizer

        talk = CONVERSATIONS["one"]["messages"][:1]
        ids: Any = AutoTokenizer.from_pretrained(self.hf).apply_chat_template(
            talk, add_generation_prompt=True, return_dict=False
        )
        with served("--max-requests", "2", model=str(self.hf)) as (_, url, _):
            status, answer = ask(url, "/v1/chat/completions", messages=talk, temperature=0, max_tokens=ANSWER)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == len(ids), (answer["usage"], len(ids))
        chat = self.chat()
        expected = self.continued(ids, *(chat.tokens[name] for name in chat.end_names))
        said = answer["choices"][0]["message"]["content"]
        assert said == expected, (said, expected)
        return str(said)[:40]

    def estimate(self) -> str:
        (config,) = (self.folder / "tuned").rglob("run.toml")
        found = json.loads(self("memory-estimate", "--config", config, "--json"))
        return f"{found['parameters']:,} parameters"


VERBS = ("convert", "eval", "pretrain", "finetune", "adapters", "generate", "serve", "estimate")


def item(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"{case}-") as folder:
        verbs, found = Verbs(case, Path(folder)), {}
        for verb in VERBS:
            try:
                found[verb] = getattr(verbs, verb)() or "ok"
            except Exception as error:
                raise RuntimeError(f"{verb}: {type(error).__name__}: {error}") from error
    return found


def items() -> Iterator[Item]:
    for case in hub.CASES:
        yield case, partial(item, case)


if __name__ == "__main__":
    run("family_verbs", list(items()))
