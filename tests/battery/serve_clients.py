"""Clients as they are published against a server of a real model on two ranks: OpenAI's, curl as the README has it, and
lm-eval's `local-completions`, whose log-likelihoods are those of transformers.

    LM_EVAL=venv/bin/lm_eval python tests/battery/serve_clients.py     lm-eval[api] in an environment of its own

On stories260K of the shared data. Needs the extra `serve`, openai, transformers and curl.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import ROOT, Item, run
from tests.battery.serve_fuzz import Target
from tests.battery.serve_load import ask, served
from tests.support.shared import shared

MODEL = "stories260K_hf"
TASK = """task: tales
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
TALES = [
    ("Once upon a time, there was a little girl named", ["Lily.", "Zebra.", "tractor."]),
    ("Tom had a red", ["ball.", "because.", "when."]),
    ("They played in the park all day. They were very", ["happy.", "sentence.", "above."]),
    ("The dog was sad because he lost his", ["toy.", "however.", "seven."]),
]


def openai_client(target: Target) -> dict[str, Any]:
    """Completions, chat, streams, stop strings, log-probabilities, seeds, a schema, and an error of its own kind."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{target.port}/v1", api_key="none", max_retries=0)
    case = json.loads((shared(MODEL) / "expected.json").read_text())["cases"][0]
    count = len(case["greedy_ids"])
    body: dict[str, Any] = {"ignore_eos": True}
    greedy: dict[str, Any] = {"model": MODEL, "prompt": case["prompt"], "max_tokens": count, "temperature": 0}
    whole = client.completions.create(**greedy, extra_body=body, logprobs=2)
    expected = ask(target, "/detokenize", tokens=[*case["prompt_ids"], *case["greedy_ids"]])[1]["prompt"]
    text = whole.choices[0].text
    assert case["prompt"] + text == expected and len(whole.choices[0].logprobs.token_logprobs) == count
    parts = client.completions.create(**greedy, extra_body=body, stream=True)
    assert "".join(part.choices[0].text for part in parts) == text
    stop = text.split(".")[0]
    cut = client.completions.create(**greedy, extra_body=body, stop=["."]).choices[0]
    assert (cut.text, cut.finish_reason) == (stop, "stop")
    drawn = [client.completions.create(model=MODEL, prompt="Once", max_tokens=20, seed=7, n=2) for _ in range(2)]
    assert [[each.text for each in one.choices] for one in drawn] == [[each.text for each in drawn[0].choices]] * 2
    talk: Any = [{"role": "user", "content": "Tell me a story"}]
    schema: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    ages = []
    for seed in range(10):
        made = client.chat.completions.create(
            model=MODEL, messages=talk, response_format=form, max_tokens=60, seed=seed, logprobs=True, top_logprobs=2
        )
        ages.append(json.loads(made.choices[0].message.content or "")["age"])
        assert made.choices[0].finish_reason == "stop" and 1 <= ages[-1] <= 9
    chunks = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=9, temperature=0, stream=True)
    same = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=9, temperature=0)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == same.choices[0].message.content
    try:
        client.completions.create(model="gpt-4", prompt="a")
    except openai.NotFoundError as error:
        assert "is not served here" in str(error)
    return {"openai": openai.__version__, "tokens": count, "ages": ages}


def readme_curl(target: Target) -> dict[str, Any]:
    """Every curl of the README, with the server's port in the place of the one that it names."""
    lines = re.findall(r"^curl (?:.*\\\n)*.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert lines
    answers = []
    for line in lines:
        command = line.replace("localhost:5000", f"localhost:{target.port}")
        made = subprocess.run(["bash", "-c", f"{command} --silent --fail"], capture_output=True, text=True, check=True)
        answers.append(json.loads(made.stdout))
    assert answers[0]["text"][0].startswith("Hello world"), answers
    return {"commands": len(lines), "text": answers[0]["text"]}


def lm_eval(target: Target) -> dict[str, Any]:
    """Log-likelihoods of choices, by lm-eval through the server, and by transformers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"context": context, "choices": choices, "answer": 0} for context, choices in TALES]
        (folder / "tales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "tales.yaml").write_text(TASK.format(file=folder / "tales.jsonl"))
        url = f"http://127.0.0.1:{target.port}/v1/completions"
        settings = f"model={MODEL},base_url={url},num_concurrent=4,max_retries=1,tokenizer_backend=remote"
        command = [os.environ.get("LM_EVAL", "lm_eval"), "--model", "local-completions", "--model_args", settings]
        command += ["--tasks", "tales", "--include_path", name, "--output_path", f"{name}/out", "--log_samples"]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{name}/home"}
        made = subprocess.run(command, capture_output=True, text=True, env=offline, timeout=1800, check=False)
        assert made.returncode == 0, made.stderr[-600:]
        samples = [json.loads(line) for line in next(folder.glob("out/**/samples_*.jsonl")).read_text().splitlines()]
        result = json.loads(next(folder.glob("out/**/results_*.json")).read_text())["results"]["tales"]
    worst = max(_differences(target, samples))
    assert worst < 1e-3, worst
    return {"accuracy": result["acc,none"], "choices": sum(len(each["resps"]) for each in samples), "worst": worst}


def _differences(target: Target, samples: list[Any]) -> Iterator[float]:
    """Of each choice's log-likelihood, the distance from what transformers computes."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(shared(MODEL), dtype=torch.float32)
    for sample in samples:
        for answer, request in zip(sample["resps"], sample["arguments"].values(), strict=True):
            context, rest = request["arg_0"], request["arg_1"]
            texts = (context, context + rest)  # as lm-eval asks for them: without what begins a document
            before, ids = (ask(target, "/tokenize", prompt=one, add_special_tokens=False)[1]["tokens"] for one in texts)
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(scores[at - 1, ids[at]]) for at in range(len(before), len(ids)))
            yield abs(expected - float(answer[0][0]))


def on_two_ranks(work: Callable[[Target], dict[str, Any]]) -> dict[str, Any]:
    with served("--tp", "2") as target:
        return work(target)


def items() -> Iterator[Item]:
    """Name and work of every item."""
    for name, work in {"openai": openai_client, "curl": readme_curl, "lm-eval": lm_eval}.items():
        yield name, partial(on_two_ranks, work)


if __name__ == "__main__":
    run("serve_clients", items())
