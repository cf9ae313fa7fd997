"""Adam's state in Megatron-LM's legacy trees: there and back bitwise, in torch's own numbering, or refused by name."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron.eras import parameter_place
from mega.core.checkpoint.forms.megatron.state import DISTRIBUTED
from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.sections import ModelConfig
from tests.support import foreign_forms
from tests.support.foreign_forms import FORMS, Files, weights_of

SHAPE: dict[str, Any] = {"layers": 4, "vocab": 53, "vocab_multiple": 8, "positions": 10}
GPT, LLAMA = (dataclasses.replace(model, **SHAPE) for model in (foreign_forms.GPT, foreign_forms.LLAMA))
MODELS = {"gpt": GPT, "llama": LLAMA}
NUMBERS = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
SCHEDULE = {
    "lr": {"peak": 3e-4, "least": 3e-5, "warmup": 8, "decay": 400, "style": "cosine", "initial": 1e-6, "batch": None},
    "weight_decay": {"start": 0.1, "end": 0.1, "total": 400, "style": "constant"},
}
PROGRESS = {"step": 7, "consumed": 28, "consumed_valid": 12, "skipped": 1, "skipped_samples": 4}


def own(directory: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """A checkpoint as a run saves it: step 7 of which one was skipped."""
    generator = torch.Generator().manual_seed(3)
    pieces = []
    for name, master in weights_of(model).items():
        kinds = {"weights": master.to(dtype), "master": master} if dtype != torch.float32 else {"weights": master}
        kinds["moment1"] = torch.randn(master.shape, generator=generator) * 1e-3
        kinds["moment2"] = torch.rand(master.shape, generator=generator) * 1e-6
        pieces += [
            Piece(f"{kind}/{name}", tuple(master.shape), (0,) * master.dim(), tensor) for kind, tensor in kinds.items()
        ]
    meta = {
        "config": {"model": dataclasses.asdict(model), "optimizer": {"optimizer": "adam", "lr": 3e-4, **NUMBERS}},
        "progress": PROGRESS,
        "updates": 6,
        "scaler": {"scale": 4096.0, "clean": 5, "patience": 1} if dtype == torch.float16 else None,
        "schedule": SCHEDULE,
    }
    CheckpointStore(directory).save(7, pieces, meta)
    return directory


def load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def files(tree: Path) -> list[Path]:
    return sorted(tree.glob("iter_*/*/model_optim_rng.pt"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("dtype", "tp", "pp"),
    [
        *((torch.bfloat16, tp, pp) for tp in (1, 2) for pp in (1, 2)),
        (torch.float32, 2, 2),
        (torch.float16, 2, 2),
    ],
)
def test_there_and_back_is_bitwise(tmp_path: Path, model: str, dtype: torch.dtype, tp: int, pp: int) -> None:
    run = own(tmp_path / "run", MODELS[model], dtype)
    style: Any = "megatron" if dtype == torch.bfloat16 else "megatron-23.06"
    written = convert(run, tmp_path / "tree", style, Layout(tp, pp))
    taken = convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(1, 2), vocab=53)
    before, after = locate(run), locate(tmp_path / "back")
    assert len(after.tensors) == (3 if dtype == torch.float32 else 4) * len(weights_of(MODELS[model]))
    assert list(inspect.diff(before, after)) == []
    for key in ("progress", "updates", "scaler", "schedule"):
        assert after.meta[key] == before.meta[key], key
    assert after.meta["config"]["optimizer"] == {"optimizer": "adam", **NUMBERS}
    assert "6 updates written" in written.notes[-1] and "6 updates taken" in taken.notes[-1]


class Branch(torch.nn.Module):
    """A module whose parameters are registered as a tree lists them."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__()
        for key, value in tree.items():
            if isinstance(value, dict):
                self.add_module(key, Branch(value))
            else:
                self.register_parameter(key.replace(".", "/"), torch.nn.Parameter(value.float()))


def in_order(tree: dict[str, Any]) -> dict[str, Any]:
    """A legacy tree in the order of the table of the format: what modules register first stands first."""
    language = tree["language_model"]
    order = ["embedding", "encoder", "output_layer"]
    inner = ["input_norm", "self_attention.query", "self_attention.dense", "post_att", "mlp.dense_h", "mlp.dense_4h"]

    def place(key: str) -> tuple[int, int, bool]:
        if key.startswith("final_norm"):
            return 1 << 30, 0, key.endswith("bias")
        _, number, rest = key.split(".", 2)
        return int(number), next(n for n, start in enumerate(inner) if rest.startswith(start)), key.endswith("bias")

    encoder = {key: language["encoder"][key] for key in sorted(language["encoder"], key=place)}
    sorted_tree = {key: encoder if key == "encoder" else language[key] for key in order if key in language}
    return {"language_model": sorted_tree, **{key: tree[key] for key in tree if key != "language_model"}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_torch_puts_each_moment_to_its_parameter(tmp_path: Path, model: str, tp: int, pp: int) -> None:
    """Adam of torch over modules of that tree takes the written state, and each parameter has its own moments."""
    convert(own(tmp_path / "run", MODELS[model], torch.bfloat16), tmp_path / "tree", "megatron", Layout(tp, pp))
    CheckpointStore(tmp_path / "moments").save(
        7, as_weights(tmp_path / "run", "moment1"), locate(tmp_path / "run").meta
    )
    convert(tmp_path / "moments", tmp_path / "expected", "megatron", Layout(tp, pp))
    for file, moments in zip(files(tmp_path / "tree"), files(tmp_path / "expected"), strict=True):
        content = load(file)
        tree, expected = Branch(in_order(content["model"])), Branch(in_order(load(moments)["model"]))
        parameters = list(tree.parameters())
        apart = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]]
        state = content["optimizer"]["optimizer"]
        for masters, group in zip(content["optimizer"]["fp32_from_fp16_params"], apart, strict=True):
            for master, parameter in zip(masters, group, strict=True):
                assert torch.equal(master.bfloat16().float(), parameter)
        for own_state in state["state"].values():
            own_state["step"] = torch.tensor(6.0)  # torch's Adam counts for each parameter, apex's for each group
        assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
        adam = torch.optim.AdamW([{"params": group} for group in apart])
        adam.load_state_dict(state)
        for parameter, moment in zip(parameters, expected.parameters(), strict=True):
            assert torch.equal(adam.state[parameter]["exp_avg"], moment)
        scheduler = content["opt_param_scheduler"]
        assert (scheduler["max_lr"], scheduler["num_steps"], scheduler["lr_decay_style"]) == (3e-4, 24, "cosine")


def as_weights(run: Path, kind: str) -> list[Piece]:
    source = OwnSource(locate(run), (kind,))
    return [
        Piece(name.replace(kind, "weights"), shape, (0,) * len(shape), source.read(name, Box((0,) * len(shape), shape)))
        for name, (shape, _) in source.tensors.items()
    ]


def flattened(file: Path, bucket: int | None) -> None:
    """Make one rank's state the distributed optimizer's: 23.06's padded vectors, or buckets of so many numbers."""
    content = load(file)
    optimizer = content["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    tree = Branch(in_order(content["model"]))
    parameters = list(tree.parameters())
    place = {id(p): n for n, p in enumerate(sorted(parameters, key=lambda p: p.dim() == 1))}  # sorting is stable
    masters = [master for group in optimizer.get("fp32_from_fp16_params", []) for master in group]
    masters = masters or [p.data for p in sorted(parameters, key=lambda p: p.dim() == 1)]
    vectors: dict[str, Any] = {}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        own_tensors = [
            masters[place[id(p)]] if kind == "param" else inner["state"][place[id(p)]][kind] for p in parameters
        ]
        flat = torch.cat([tensor.flatten() for tensor in reversed(own_tensors)])
        vectors[kind] = list(flat.split(bucket)) if bucket else torch.cat([flat, torch.zeros(5)])
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    content["optimizer"] = {"optimizer": {"param_groups": groups}}
    torch.save(content, file)
    torch.save(
        {0: {torch.float32: vectors}, **({"bucket_sizes": [bucket]} if bucket else {})}, file.with_name(DISTRIBUTED)
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [None, 1000])
def test_the_distributed_optimizer_is_read(tmp_path: Path, model: str, dtype: torch.dtype, bucket: int | None) -> None:
    convert(own(tmp_path / "run", MODELS[model], dtype), tmp_path / "tree", "megatron", Layout(2, 2))
    for file in files(tmp_path / "tree"):
        flattened(file, bucket)
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(2, 1), vocab=53)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []
    assert locate(tmp_path / "back").meta["updates"] == 6


def test_interleaved_chunks(tmp_path: Path) -> None:
    """pp 2 x 2 chunks from pp 4; a rank's groups go through its first chunk, then its second."""
    convert(own(tmp_path / "run", LLAMA, torch.bfloat16), tmp_path / "tree", "megatron", Layout(1, 4))
    stages = [load(file) for file in files(tmp_path / "tree")]
    for rank in range(2):
        pair = (stages[rank], stages[rank + 2])
        content = {**pair[0], "model0": pair[0]["model"], "model1": pair[1]["model"]}
        del content["model"]
        states, groups, masters = {}, [], []
        for number in range(2):
            indices: list[int] = []
            both: list[torch.Tensor] = []
            for each in pair:
                inner = each["optimizer"]["optimizer"]
                for index, master in zip(
                    inner["param_groups"][number]["params"],
                    each["optimizer"]["fp32_from_fp16_params"][number],
                    strict=True,
                ):
                    indices.append(len(states))
                    states[len(states)] = inner["state"][index]
                    both.append(master)
            groups.append({**pair[0]["optimizer"]["optimizer"]["param_groups"][number], "params": indices})
            masters.append(both)
        content["optimizer"] = {
            "optimizer": {"state": states, "param_groups": groups},
            "fp32_from_fp16_params": masters,
        }
        folder = tmp_path / "interleaved" / "iter_0000007" / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        torch.save(content, folder / "model_optim_rng.pt")
    convert(tmp_path / "interleaved" / "iter_0000007", tmp_path / "back", "mega", Layout(), vocab=53)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []


def drop_moment(content: dict[str, Any]) -> None:
    del content["optimizer"]["optimizer"]["state"][2]["exp_avg_sq"]


def drop_parameter(content: dict[str, Any]) -> None:
    del content["optimizer"]["optimizer"]["state"][0]


def reshape(content: dict[str, Any]) -> None:
    state = content["optimizer"]["optimizer"]["state"]
    state[1]["exp_avg"] = state[1]["exp_avg"][:-1].clone()


def retype(content: dict[str, Any]) -> None:
    state = content["optimizer"]["optimizer"]["state"]
    state[1]["exp_avg"] = state[1]["exp_avg"].half()


def swap(content: dict[str, Any]) -> None:
    masters = content["optimizer"]["fp32_from_fp16_params"][1]
    masters[0], masters[1] = masters[1], masters[0]


def no_masters(content: dict[str, Any]) -> None:
    del content["optimizer"]["fp32_from_fp16_params"]


def one_group(content: dict[str, Any]) -> None:
    content["optimizer"]["optimizer"]["param_groups"].pop()


def turned_groups(content: dict[str, Any]) -> None:
    content["optimizer"]["optimizer"]["param_groups"].reverse()


def other_step(content: dict[str, Any]) -> None:
    content["optimizer"]["optimizer"]["param_groups"][0]["step"] = 5


def no_form(content: dict[str, Any]) -> None:
    content["optimizer"] = {"loss_scaler": None, "groups": 3}


def none_here(content: dict[str, Any]) -> None:
    del content["optimizer"]


def replica(content: dict[str, Any]) -> None:
    content["optimizer"]["optimizer"]["state"][9]["exp_avg"] += 1  # a norm's, equal on all tensor ranks


CHANGES: dict[Callable[[dict[str, Any]], None], str] = {
    drop_moment: "moment2/1.0.0/encoder.layers.0.self_attention.dense.weight: is missing",
    drop_parameter: r"optimizer.state has 12 entries, the model has 13 parameters",
    reshape: r"moment1/1.0.0/encoder.layers.0.self_attention.query_key_value.weight: is torch.float32 \(\d+, 16\)",
    retype: "moment1/1.0.0/encoder.layers.0.self_attention.query_key_value.weight: is torch.float16",
    swap: "master/1.0.0/encoder.layers.0.input_norm.weight: rounded to torch.bfloat16, it is not the weight",
    no_masters: "master/1.0.0/embedding.word_embeddings.weight: is missing",
    one_group: "optimizer has 1 param_groups, the model makes 2",
    turned_groups: "wd_mult 0.0: must be 1, since it begins with 1.0.0/embedding.word_embeddings.weight",
    other_step: r"optimizer: step \['5', '6'\]: must be one number",
    no_form: "holds no param_groups, so its form is not known; give --no-load-optim",
    none_here: "2 of 4 ranks hold the optimizer's state; give --no-load-optim",
    replica: "moment1/1.0.0/encoder.layers.0.input_norm.weight: differs from moment1/0.0.0/",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_state_is_refused_by_name(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    convert(own(tmp_path / "run", LLAMA, torch.bfloat16), tmp_path / "tree", "megatron", Layout(2, 2))
    for file in files(tmp_path / "tree"):
        if "mp_rank_01" in file.parent.name and (change is none_here or file.parent.name.endswith("000")):
            content = load(file)
            change(content)
            torch.save(content, file)
    with pytest.raises(CheckpointError, match=CHANGES[change]):
        convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
    assert not (tmp_path / "back").exists()
    convert(tmp_path / "tree", tmp_path / "weights", "mega", Layout(), vocab=53, optimizer=False)
    weights = OwnSource(locate(tmp_path / "run")).tensors
    assert dict(locate(tmp_path / "weights").tensors) == weights


def test_what_has_no_known_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = own(tmp_path / "run", LLAMA, torch.bfloat16)
    for flag in ("--no-load-optim", "--use-distributed-optimizer"):
        command = ["reshard", "--load-dir", str(run), "--save-dir", str(tmp_path / "mega"), "--saver", "mega"]
        assert main([*command, flag]) == 2 and "means nothing from" in capsys.readouterr().err
        assert not (tmp_path / "mega").exists()
    command = ["reshard", "--load-dir", str(run), "--save-dir", str(tmp_path / "mcore"), "--saver", "mcore"]
    assert main([*command, "--no-load-optim"]) == 0 and "left out" in capsys.readouterr().out
    convert(run, tmp_path / "tree", "megatron", Layout())
    torch.save({0: {}, "buckets_coalesced": True}, files(tmp_path / "tree")[0].with_name(DISTRIBUTED))
    with pytest.raises(CheckpointError, match="holds no vectors of model chunk 0"):
        convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
    with pytest.raises(CheckpointError, match=r"q_layernorm\.weight: its place"):
        parameter_place("encoder.layers.0.self_attention.q_layernorm.weight")


def test_state_of_a_distributed_checkpoint_is_never_dropped_in_silence(tmp_path: Path) -> None:
    def change(files: Files) -> None:
        files["iter_0000010/__0_0.distcp"]["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(16)

    load = FORMS["torch_dist"].make(tmp_path / "source", change)
    with pytest.raises(
        CheckpointError, match="optimizer holds no param_groups, so its form is not known; give --no-load-optim"
    ):
        convert(load, tmp_path / "run", "mega", Layout(), vocab=56)
    assert not (tmp_path / "run").exists()
    convert(load, tmp_path / "run", "mega", Layout(), vocab=56, optimizer=False)
