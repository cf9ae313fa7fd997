"""lm-eval's tasks on our engine: every request answered as the harness's own backend does on the exported model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mega import cli
from mega.core.architecture import units
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import GivenOptions
from mega.core.config.run import Options, updated
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.family import family
from mega.core.inference.loading.load import OpenedModel, open_model, special_tokens, weight_pieces
from mega.core.inference.worker import Worker
from mega.core.parallel.mesh import Groups
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from mega.core.processes.pool import Pool
from mega.core.tasks import harness
from mega.core.tasks.chat import ChatTexts
from mega.core.tasks.harness import HarnessOptions, HarnessRun
from mega.core.text.chat.format import chat_format
from mega.core.text.train import train_bpe

WORDS = "the cat sat on a mat and the dog ran to the house where a girl read her old book . ".split()
TASKS = ("local_choice", "local_answer", "local_rolling")
LENGTH = 48


def sentence(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + number * (seed % 5 + 1)) % len(WORDS)] for number in range(words))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with a model of large random weights and its tokenizer."""
    directory = tmp_path_factory.mktemp("harness")
    files = train_bpe([sentence(seed, 200) for seed in range(9)], 300, directory / "tokenizer")
    values = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": 300}
    shape = ModelConfig(**values, positions=LENGTH, qkv_bias=True)
    factory = ParameterFactory({}, torch.float32, torch.device("cpu"))
    stage = family(shape).stage(shape, units(shape), factory, ALONE)
    pieces = list(weight_pieces(stage))  # which zeroes them
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            weight.mul_(8.0)
    meta = {
        "config": {"model": dataclasses.asdict(shape), "tokenizer": {"tokenizer": "GPT2BPETokenizer"}},
        "progress": {"step": 1, "consumed": 1},
    }
    CheckpointStore(directory / "run").save(1, pieces, meta, attachments={path.name: path for path in files})
    return directory / "run"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files of three kinds, and their data; nothing of the net is asked."""
    folder = tmp_path_factory.mktemp("tasks")
    os.environ.update(HF_HOME=str(folder / "cache"), HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    pytest.importorskip("lm_eval")
    choice = [
        {
            "text": sentence(seed, 5 + 12 * (seed % 4)),
            "choices": [WORDS[seed], "a house where", "dog"],
            "label": seed % 3,
        }
        for seed in range(7)
    ]
    write(folder, "local_choice", choice, "output_type: multiple_choice\ndoc_to_text: text\ndoc_to_choice: choices\n")
    answer = [{"text": sentence(seed, 4 + 9 * seed), "label": "the"} for seed in range(5)]
    until = 'generation_kwargs: {until: [" a", "."], max_gen_toks: 12}\n'
    write(folder, "local_answer", answer, f"output_type: generate_until\ndoc_to_text: text\n{until}", "exact_match")
    rolling = [{"text": sentence(seed, 11), "label": sentence(seed, 3 + 40 * seed)} for seed in range(3)]
    write(folder, "local_rolling", rolling, 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n', "byte_perplexity")
    return folder


def write(folder: Path, name: str, rows: list[dict[str, Any]], kind: str, metric: str = "acc") -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        f"{kind}doc_to_target: label\nmetric_list: [{{metric: {metric}}}]\n"
    )


def asked(model: Path, tasks: Path, out: Path, world: int = 1, chat: bool = False, **values: Any) -> HarnessRun:
    given = {"load": str(model), "device": "cpu", "micro_batch": 2, **values}
    options = HarnessOptions(tasks=TASKS, include_path=str(tasks), log_samples=True, apply_chat_template=chat)
    return harness.prepare(updated(Options(), given), GivenOptions(None, given), options, str(out), world)


def answers(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Task -> the model's answer to each request, in order."""
    return {name: [sample["resps"] for sample in found["samples"][name]] for name in TASKS}


@pytest.fixture(scope="module")
def backend(model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness's own, of transformers, on the exported model."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("exported") / "hf"
    convert(model, folder, "hf", tokens=special_tokens)
    return HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        max_length=LENGTH,
        batch_size=1,
        device="cpu",
    )


def answered(backend: Any, tasks: Path, **values: Any) -> dict[str, list[Any]]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return answers(
        simple_evaluate(model=backend, tasks=list(TASKS), task_manager=manager, bootstrap_iters=10, **values)
    )


@pytest.fixture(scope="module")
def theirs(backend: Any, tasks: Path) -> dict[str, list[Any]]:
    return answered(backend, tasks)


def job(groups: Groups, rank: int, run: HarnessRun, world: int) -> dict[str, list[Any]] | None:
    found = harness.run_here(run, rank, world, Device.choose("cpu", rank), groups)
    return None if found is None else answers(found)


def close(ours: Any, theirs: Any) -> bool:
    """Whether two answers agree: log-likelihoods to 1e-3, all else exactly."""
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(ours, float):
        return abs(ours - float(theirs)) <= 1e-3 * max(1.0, abs(ours))
    return bool(ours == theirs)


def test_every_request_is_answered_as_by_transformers(
    model: Path, tasks: Path, theirs: dict[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    ours = answers(harness.run_here(asked(model, tasks, out), 0, 1, Device.choose("cpu")))
    for name in TASKS:
        assert close(ours[name], theirs[name]), (name, ours[name], theirs[name])
    assert len({str(each) for each in ours["local_answer"]}) > 1, "some text is generated"
    kept = json.loads(out.read_text())
    assert set(kept["results"]) == set(TASKS) == set(kept["samples"]) and kept["settings"]["seq_length"] == LENGTH
    assert "local_rolling" in capsys.readouterr().out


def test_every_layout_answers_alike(
    pool: Pool, model: Path, tasks: Path, theirs: dict[str, list[Any]], tmp_path: Path
) -> None:
    for world, layout in ((2, {"tp": 2, "sequence_parallel": True}), (2, {"pp": 2}), (2, {})):
        run = asked(model, tasks, tmp_path / "layout.json", world, **layout)
        found = pool.run(job, run, world, world=world)[0]
        for name in TASKS:
            assert close(found[name], theirs[name]), (layout, name)


def test_what_was_killed_goes_on_and_nothing_is_computed_again(
    model: Path, tasks: Path, theirs: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its generation task: what was scored is kept. An answer is made token by token, from a cache."""
    out, device, fed = tmp_path / "result.json", Device.choose("cpu"), list[int]()
    made, launch, seen = harness.NativeModel._scored, Worker.launch, list[set[str]]()

    def scored(own: Any, pairs: Any) -> Any:
        seen[-1].update(map(json.dumps, pairs))
        return made(own, pairs)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.NativeModel, "_scored", scored)
    monkeypatch.setattr(Worker, "launch", lambda own, step: (fed.append(len(step.tokens)), launch(own, step))[1])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(harness.NativeModel, "continuations", killed)
        seen.append(set())
        harness.run_here(asked(model, tasks, out), 0, 1, device)
    partial = Path(f"{out}.partial")
    with partial.open("a") as file:
        file.write('["half a')
    seen.append(set())
    ours = answers(harness.run_here(asked(model, tasks, out), 0, 1, device))
    assert all(close(ours[name], theirs[name]) for name in TASKS) and not partial.exists()
    assert seen[0] and seen[1] and not seen[0] & seen[1], "nothing is scored twice"
    assert 0 < sum(fed) <= 5 * LENGTH, "no prompt is computed twice"


PLAIN = (
    "{% for each in messages %}{{ each.role | capitalize }}: {{ each.content | trim }}"
    "{{ '<|endoftext|>' if each.role == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def test_questions_take_the_form_of_conversations(
    model: Path, tasks: Path, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"--apply-chat-template: nothing at .* says what its conversations look like"):
        asked(model, tasks, tmp_path / "chat.json", chat=True)
    monkeypatch.setattr(OpenedModel, "chat_template", lambda own: "plain")
    monkeypatch.setattr(backend.tokenizer, "chat_template", PLAIN)
    run = asked(model, tasks, tmp_path / "chat.json", chat=True)
    ours = answers(harness.run_here(run, 0, 1, Device.choose("cpu")))
    expected = answered(backend, tasks, apply_chat_template=True)
    for name in TASKS:
        assert close(ours[name], expected[name]), name
    tokenizer = open_model(model).tokenizer()
    history = [("user", "the cat"), ("assistant", "sat"), ("user", "a dog")]
    texts, messages = ChatTexts("plain", tokenizer), [{"role": role, "content": text} for role, text in history]
    text = texts.text(messages, reply=True)
    assert text == "User: the cat\n\nAssistant: sat<|endoftext|>User: a dog\n\nAssistant:"
    assert tuple(texts.encode(text, [])) == chat_format("plain", tokenizer).prompt(messages)
    assert text.startswith(texts.text(messages[:2], reply=False))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "absent"], "--tasks absent: is not a task of lm-eval or of --include-path"),
        (["--tasks", "local_choice", "--include-path", "absent"], "--include-path absent: no such directory"),
        (["--tasks", "local_choice", "--valid-data", "a"], "--tasks local_choice: excludes --task and --valid-data"),
        (["--task", "ppl", "--num-fewshot", "2"], "--num-fewshot: needs --tasks"),
        (["--task", "ppl", "--apply-chat-template"], "--apply-chat-template: needs --tasks"),
    ],
)
def test_what_is_refused(
    model: Path, tasks: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert cli.main(["eval", *flags, "--load", str(model), "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_absent(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert cli.main(["eval", "--tasks", "hellaswag", "--load", str(model), "--device", "cpu"]) == 2
    assert "--tasks: needs lm-eval (pip install '.[lm-eval]' in a clone)" in capsys.readouterr().err
