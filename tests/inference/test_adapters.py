"""Adapters by name: each request goes by its own, as it would alone; what is not an adapter of the model is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from mega import cli
from mega.core.architecture import architecture, inventory
from mega.core.architecture.adapters import adapter_specs
from mega.core.checkpoint.forms.direct import weights_digest
from mega.core.checkpoint.own.base import describe
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointError, CheckpointStore, locate
from mega.core.device import Device
from mega.core.inference.generation.generate import logits
from mega.core.inference.loading.adapters import OpenedAdapter, adapter_paths, open_adapters
from mega.core.inference.loading.load import load_model, open_model, weight_pieces
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, RequestError, Sampling
from mega.core.inference.start import start_engine
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from tests.inference.test_engine import LLAMA, answers, made, prompts, tokens

TUNED = dataclasses.replace(LLAMA, lora_rank=4, lora_alpha=9.0)
SOME = dataclasses.replace(LLAMA, lora_rank=3, lora_alpha=12.0, lora_targets=("v_proj", "down_proj"))


class Places(NamedTuple):
    """A model of ours; a run that trained adapters of it; an adapter of some of its linears in peft's form."""

    base: Path
    tuned: Path
    peft: Path

    def opened(self) -> tuple[OpenedAdapter, ...]:
        return open_adapters({"tuned": self.tuned, "peft": self.peft}, open_model(self.base))


def drawn(model: Any, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {each.name: torch.randn(each.shape, generator=draw) / 2 for each in inventory(model) if each.trainable}


def saved(place: Path, model: Any, tensors: Iterator[Piece], **meta: Any) -> None:
    tokenizer = {"tokenizer": "NullTokenizer", "vocab_size": 60}
    config = {"model": dataclasses.asdict(model), "tokenizer": tokenizer}
    told = {"config": config, "progress": {"step": 1}, **meta}
    CheckpointStore(place).save(1, list(tensors), told)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    found = Places(*(tmp_path_factory.mktemp("adapters") / name for name in Places._fields))
    stage = made(LLAMA)
    values = {name: value.clone() for name, value in stage.state_dict().items()}
    pieces = list(weight_pieces(stage))  # which empties the weights
    stage.load_state_dict(values)
    saved(found.base, LLAMA, iter(pieces))
    own = drawn(TUNED, 1)
    parts = (Piece(f"weights/{name}", tuple(each.shape), (0, 0), each) for name, each in own.items())
    saved(found.tuned, TUNED, parts, base=describe(locate(found.base)))
    found.peft.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": list(SOME.lora_targets), "bias": "none"}
    (found.peft / "adapter_config.json").write_text(json.dumps(config))
    theirs = {f"base_model.model.{name}": each for name, each in drawn(SOME, 2).items()}
    save_file(theirs, found.peft / "adapter_model.safetensors")
    return found


def merged(base: Path, model: Any, seed: int) -> Any:
    """The model with an adapter's products added to its weights."""
    stage, halves = load_model(locate(base)), drawn(model, seed)
    specs = adapter_specs(architecture(model).adapters, inventory(model))
    with torch.no_grad():
        for weight in stage.parameters():
            for segment in weight.segments:
                if (spec := specs.get(segment.shard.name)) is not None:
                    product = halves[spec.up.name] @ halves[spec.down.name]
                    segment.real(weight).add_(product, alpha=spec.scale)
    return stage


def asked(adapters: tuple[str | None, ...] = (None, "tuned", "peft")) -> list[Request]:
    """Every prompt by every adapter; they begin alike, so that blocks would be shared."""
    greedy = Sampling(temperature=0.0)
    return [
        Request(prompt=(*range(9), *prompt[:4]), tokens=4, sampling=greedy, logprobs=1, adapter=name)
        for prompt in prompts(2)
        for name in adapters
    ]


def said_at(
    groups: Groups, rank: int, places: Places, tp: int, pp: int, invariant: bool, speculate: str | None = None
) -> Any:
    """Log-probabilities of all requests together, and the ids."""
    options = EngineOptions(
        max_requests=6, prefill_chunk=16, cache_tokens=512, block=4, batch_invariant=invariant, tile=8
    )
    options = replace(options, speculate=speculate)
    mesh = Mesh(rank, tp=tp, pp=pp, groups=groups)
    opened = open_model(places.base)
    engine = start_engine(opened, mesh, Device.choose("cpu"), options, adapters=places.opened())
    if engine is None:
        return None
    alone = [answers(engine, [request])[0] for request in asked()] if tp * pp == 1 else []
    together = answers(engine, asked())
    engine.close()
    if invariant:
        assert [[(e.token, e.logprob) for e in each] for each in together] == [
            [(e.token, e.logprob) for e in each] for each in alone
        ]
    return [(tokens(each), [event.logprob for event in each]) for each in together]


@pytest.fixture(scope="module")
def expected(places: Places) -> list[Any]:
    models = {None: load_model(locate(places.base)), "tuned": merged(places.base, TUNED, 1)}
    models["peft"] = merged(places.base, SOME, 2)
    found = []
    for request in asked():
        ids, scored = list(request.prompt), []
        for _ in range(request.tokens):
            after = logits(models[request.adapter], torch.tensor([ids]))[0, -1].log_softmax(-1)
            ids.append(int(after.argmax()))
            scored.append(float(after.max()))
        found.append((ids[len(request.prompt) :], scored))
    return found


@pytest.mark.parametrize("invariant", [False, True], ids=["ragged", "invariant"])
def test_each_request_goes_by_its_adapter(places: Places, expected: list[Any], invariant: bool) -> None:
    found, right = said_at(Groups(), 0, places, 1, 1, invariant), expected
    assert [ids for ids, _ in found] == [ids for ids, _ in right]
    for (_, ours), (_, theirs) in zip(found, right, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert len({tuple(ids) for ids, _ in right[:3]}) == 3


@pytest.mark.parametrize("tp", [1, 2])
def test_guesses_of_the_model_without_adapters_change_nothing(
    places: Places, expected: list[Any], pool: Pool, tp: int
) -> None:
    """Its guesses are right for requests without an adapter, and mostly wrong for others."""
    found, *_ = pool.run(said_at, places, tp, 1, False, str(places.base), world=tp)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


def test_at_another_layout(places: Places, expected: list[Any], pool: Pool) -> None:
    found = pool.run(said_at, places, 2, 1, False, world=2)
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in expected] and found[1:] == [None]


def test_what_is_no_adapter_of_the_model_is_refused(places: Places, tmp_path: Path) -> None:
    model = open_model(places.base)
    other = tmp_path / "other"
    stage = made(dataclasses.replace(LLAMA, vocab=62))
    saved(other, stage.model, weight_pieces(stage))
    damaged = tmp_path / "damaged"
    shutil.copytree(places.peft, damaged)
    (damaged / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 5, "lora_alpha": 1}')

    def refused(text: str, place: Path, opened: Any = model) -> None:
        with pytest.raises(CheckpointError) as caught:
            open_adapters({"x": place}, opened)
        assert str(caught.value).startswith(f"--adapter x={place}: ") and text in str(caught.value)

    refused("no such file", tmp_path / "nowhere")
    refused("is a whole model", places.base)
    refused("is another model", places.tuned, open_model(other))
    sampled = weights_digest(locate(places.base))  # as of a base that lies in others' files: by numbers, not by files
    for known, told in ((sampled, ""), (sampled[:-1] + "x", "digest of its numbers")):
        place, parts = tmp_path / known, drawn(TUNED, 1).items()
        pieces = (Piece(f"weights/{name}", tuple(each.shape), (0, 0), each) for name, each in parts)
        saved(place, TUNED, pieces, base={"path": "theirs", "digest": known})
        if told:
            refused(told, place)
        else:
            open_adapters({"x": place}, model)
    refused("holds adapters itself", places.peft, open_model(places.tuned))
    refused("has shape (3, 32), that model's is (5, 32)", damaged)
    for bad in ("x", "=y", "x=", "x" * 65 + "=y"):
        with pytest.raises(ValueError, match="must be NAME=DIR"):
            adapter_paths([bad])
    with pytest.raises(ValueError, match="x is y already"):
        adapter_paths(["x=y", "x=z"])


def test_a_base_of_another_name_is_told(places: Places, tmp_path: Path) -> None:
    """Equal shapes prove nothing, so both names stand in a line; without a name there is nothing to tell."""
    theirs = Path(shutil.copytree(places.peft, tmp_path / "theirs"))
    config = json.loads((theirs / "adapter_config.json").read_text())
    (theirs / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/Base-7B"}))
    opened = open_model(places.base)
    first, second = open_adapters({"peft": places.peft, "theirs": theirs}, opened)
    assert first.notes == () and second.notes == (f"{theirs}: was trained on some/Base-7B; here on {opened.path}",)


def test_values_that_are_not_finite_are_refused(places: Places, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(places.peft, bad)
    theirs = {f"base_model.model.{name}": each for name, each in drawn(SOME, 2).items()}
    next(iter(theirs.values()))[1, 1] = torch.inf
    save_file(theirs, bad / "adapter_model.safetensors")
    opened = open_model(places.base)
    with pytest.raises(CheckpointError, match=r"--adapter x=.*layers.0.*lora_A.weight holds what is not finite"):
        start_engine(opened, Mesh.at(0), Device.choose("cpu"), adapters=open_adapters({"x": bad}, opened))


def test_unknown_names_are_refused(places: Places) -> None:
    options = EngineOptions(cache_tokens=64)
    engine = start_engine(open_model(places.base), Mesh.at(0), Device.choose("cpu"), options, adapters=places.opened())
    assert engine is not None
    with pytest.raises(RequestError, match="adapter poet: is not loaded; valid: tuned, peft"):
        engine.add(Request(prompt=(1,), tokens=1, adapter="poet"))


def test_generate_by_rows(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1 2 3"}, {"prompt": "1 2 3", "adapter": None}, {"prompt": "1 2 3", "adapter": "peft"}]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = f"generate --load {places.base} --device cpu --greedy --tokens 6 --input {file}"
    given = [*line.split(), "--output", str(out), "--adapter", f"tuned={places.tuned}"]
    given += ["--adapter", f"peft={places.peft}"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(given) == 0, capsys.readouterr().err
    said = [json.loads(row) for row in out.read_text().splitlines()]
    assert [row["adapter"] for row in said] == ["tuned", None, "peft"] and len({row["text"] for row in said}) == 3
    file.write_text('{"prompt": "1", "adapter": "poet"}')
    assert cli.main(given) == 2
    assert "in.jsonl:1: adapter 'poet' is not loaded; valid: tuned, peft" in capsys.readouterr().err
