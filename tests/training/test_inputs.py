"""A run is checked and resolved once: by the process that the user started. Ranks get the result."""

from __future__ import annotations

import json
import pickle
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mega import cli
from mega.core.config import check, resolve, toml
from mega.core.config.compose import compose
from mega.core.config.run import Options, entries, sections, updated
from mega.core.processes import launch
from mega.core.training.start import inputs
from tests.support.hugging_face import hf_folder

RUN = (
    "pretrain --model tiny-gpt --seq-length 8 --mock-data --tokenizer NullTokenizer --vocab-size 64 --vocab 70 "
    "--micro-batch 1 --lr 1e-3 --steps 2 --eval-iters 0 --log-interval 1 --device cpu --metrics"
).split()
COUNTED = {
    function.__code__: function.__name__
    for function in (check.check, resolve.resolve, inputs.resolve_run, inputs.open_inputs)
}

ONCE = {"check": 1, "resolve": 2, "resolve_run": 1, "open_inputs": 1}
"""`check` resolves too, for rules about derived values, before a tokenizer is opened and the vocabulary is known."""

LOADS = {"use_checkpoint_config": True}

real_launch = launch.launch


class Calls:
    """Counts calls of `COUNTED` in this process by their code, under any name they were imported by."""

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        sys.setprofile(self._seen)
        return self.counts

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in COUNTED:
            self.counts[COUNTED[frame.f_code]] += 1


def counted_rank(place: str, target: Callable[..., int], *arguments: Any) -> int:
    """What a rank runs instead of `target`, to keep its counts."""
    import os

    with Calls() as counts:
        code = target(*arguments)
    Path(place, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(counts))
    return code


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS", "MEGA_DEBUG"):
        monkeypatch.delenv(variable, raising=False)


def test_a_launch_checks_and_resolves_once(tmp_path: Path) -> None:
    def launched(nproc: int, target: Callable[..., int], *arguments: Any) -> int:
        return real_launch(nproc, counted_rank, str(tmp_path), target, *arguments)

    with mock.patch.object(launch, "launch", launched), Calls() as counts:
        assert cli.main([*RUN, str(tmp_path / "metrics.jsonl"), "--nproc", "2", "--tp", "2"]) == 0
    assert counts == ONCE
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert ranks == [{"open_inputs": 1}] * 2


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_of_its_own_does_so_too(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and as torchrun starts each of its ranks."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Calls() as counts:
        assert cli.main([*RUN, str(tmp_path / "metrics.jsonl")]) == 0
    assert counts == ONCE


def test_a_model_from_a_checkpoint_is_checked_once(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    assert cli.main([*RUN, str(tmp_path / "metrics.jsonl"), *save]) == 0
    short = [word for word in RUN if word not in ("--model", "tiny-gpt")]
    with Calls() as counts:
        more = ["--load", str(tmp_path), "--use-checkpoint-config", "--dry-run"]
        assert cli.main([*short, str(tmp_path / "metrics.jsonl"), *more]) == 0
    assert counts == ONCE


def run_of_text(text: str) -> Options:
    """The run in a printed configuration, which may also have tables of a verb."""
    tables = [keys for table, keys in tomllib.loads(text).items() if table in sections()]
    values = {name: value for keys in tables for name, value in keys.items()}
    return compose(file={name: toml.converted(entries()[name], value) for name, value in values.items()})


@pytest.mark.parametrize(
    "line",
    ["pretrain --use-checkpoint-config", "finetune", "lr-find", "eval", "memory-estimate --use-checkpoint-config"],
)
def test_a_printed_configuration_has_the_checkpoints_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """As the run uses it, and the file gives the same run."""
    assert (
        cli.main(
            [*RUN, str(tmp_path / "metrics.jsonl"), "--save", str(tmp_path / "run"), "--swiglu", "--norm-eps", "1e-4"]
        )
        == 0
    )
    capsys.readouterr()
    words = [*line.split(), "--load", str(tmp_path / "run"), "--lr", "0.5", "--print-config"]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    options = run_of_text(printed.out)
    used = inputs.with_checkpoint_model(updated(compose(), {"load": options.checkpoint.load, **LOADS}), [])
    assert options.model == used.model and options.model.activation == "swiglu" and options.model.norm_eps == 1e-4
    assert options.checkpoint.use_checkpoint_config == ("--use" in line) and options.optimizer.lr == 0.5
    assert printed.err == ""
    (tmp_path / "printed.toml").write_text(printed.out)
    assert cli.main([words[0], "--config", str(tmp_path / "printed.toml"), "--print-config"]) == 0
    again = capsys.readouterr()
    assert run_of_text(again.out) == options and again.err == ""


def test_a_printed_configuration_without_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may be written for another machine; mega bench measures the model of its flags."""
    assert cli.main(f"pretrain --use-checkpoint-config --load {tmp_path}/run --layers 3 --print-config".split()) == 0
    printed = capsys.readouterr()
    assert run_of_text(printed.out).model.layers == 3 and "does not exist here" in printed.err
    assert cli.main(f"bench --use-checkpoint-config --load {tmp_path}/run --layers 3 --print-config".split()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", ["--serve", "--fit 2xh100 --seq-length 8 --global-batch 8"])
def test_an_estimate_takes_the_checkpoints_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    assert cli.main([*RUN, str(tmp_path / "metrics.jsonl"), "--save", str(tmp_path / "run"), "--family", "llama"]) == 0
    capsys.readouterr()
    line = f"memory-estimate --use-checkpoint-config --load {tmp_path}/run --mock-data --lr 1e-3 --steps 2 {flags}"
    assert cli.main(line.split()) == 0
    shown = capsys.readouterr().out
    assert (
        ("llama, 2 blocks of 64" in shown)
        if flags == "--serve"
        else ("pretrain --" in shown and "--family" not in shown)
    )


def test_what_ranks_get_is_the_result_without_what_is_open() -> None:
    run = compose("tiny-gpt", flags={"tokenizer": "NullTokenizer", "vocab_size": 64, "micro_batch": 1, "dry_run": True})
    resolved = inputs.resolve_run(run, 1)
    received = pickle.loads(pickle.dumps(resolved))  # noqa: S301 - our own bytes
    assert (received.run, received.notes) == (resolved.run, resolved.notes)
    assert resolved.tokenizer is not None and received.tokenizer is None
    opened, own = inputs.open_inputs(received), inputs.open_inputs(resolved)
    assert own.tokenizer is resolved.tokenizer  # built once in a process
    assert opened.fingerprint() == own.fingerprint()
    assert opened.run == resolve.resolve(run, 1, vocab=resolved.tokenizer.vocab_size)


@pytest.mark.parametrize(("device", "dtype", "said"), [("cuda", "fp32", 1), ("cuda", "bf16", 0), ("cpu", "fp32", 0)])
def test_fp32_on_a_gpu_is_said_with_what_bf16_gives(device: str, dtype: str, said: int) -> None:
    from mega.core.training.start.introduce import device_notes

    run = compose("tiny-gpt", flags={"dtype": dtype, "vocab": 64, "micro_batch": 1})
    lines = list(device_notes(resolve.resolve(run, 1), SimpleNamespace(is_cuda=device == "cuda"), 1))  # type: ignore[arg-type]
    assert sum(line.startswith("precision: fp32, ") and "--dtype bf16" in line for line in lines) == said


def test_a_tokenizer_of_another_model_is_told_by_that_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = hf_folder(tmp_path / "theirs", "llama2")
    line = f"finetune --load {theirs} --mock-data --tokenizer NullTokenizer --vocab-size 5000 --seq-length 8"
    assert cli.main([*line.split(), "--micro-batch", "1", "--lr", "1e-3", "--steps", "2", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"--load {theirs}: has a vocabulary of " in said and "NullTokenizer has 5001 tokens: not its" in said, said


def test_a_resumed_run_takes_the_checkpoints_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the refusal of another model advises, for the newest step and for a named one."""
    monkeypatch.chdir(tmp_path)
    short = [word for word in RUN if word not in ("--model", "tiny-gpt")]
    first = ["pretrain", *RUN[1:], "metrics.jsonl", "--save", "run", "--save-interval", "1", "--ffn", "96"]
    assert cli.main(first) == 0
    capsys.readouterr()
    resumed = [*first[: first.index("--ffn")], "--resume", "auto"]
    assert cli.main(resumed) == 2 and "(or give --use-checkpoint-config)" in capsys.readouterr().err
    for resume in ("auto", "step-0000002", "run/step-0000002"):
        line = [*short, "metrics.jsonl", "--save", "run", "--resume", resume, "--use-checkpoint-config"]
        assert cli.main([*line, "--hidden", "128"]) == 0
        printed = "".join(capsys.readouterr())
        assert "--use-checkpoint-config: the checkpoint's model counts, and not --hidden 128\n" in printed
        assert "at step 2\n" in printed
        assert cli.main([*line, "--hidden", "128", "--print-config"]) == 0
        model = run_of_text(capsys.readouterr().out).model
        assert (model.hidden, model.ffn) == (64, 96)


def test_the_checkpoints_model_before_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = [word for word in RUN if word not in ("--model", "tiny-gpt")]
    more = ["metrics.jsonl", "--use-checkpoint-config"]
    resumed = [*more, "--save", "run", "--resume", "auto"]
    begin = "--use-checkpoint-config: there is no checkpoint under run yet"
    assert cli.main([*short, *resumed]) == 2
    assert f"mega: {begin}; the first start needs --model, or --layers" in capsys.readouterr().err
    assert cli.main([*RUN, *resumed, "--dry-run"]) == 0
    assert f"{begin}, so the model is that of the other options\n" in capsys.readouterr().out
    assert cli.main([*RUN, *more]) == 2
    assert "mega: --use-checkpoint-config: needs --load, or --resume with --save\n" in capsys.readouterr().err
