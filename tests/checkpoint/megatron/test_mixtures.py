"""Mixtures of experts that Megatron-core 0.18.2 wrote: read, trained on in any layout, written back; and the Switch
layers of 2023."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mega.core.architecture import architecture, inventory, units
from mega.core.batch import DecoderBatch
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron.eras import common_name, legacy_name
from mega.core.checkpoint.forms.megatron.mixture import mixture_arguments, mixture_flags, mixture_of
from mega.core.checkpoint.forms.megatron.torch_dist import DistributedSource
from mega.core.checkpoint.forms.pickles import read_pickled
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.checkpoint.own.together import alone, together
from mega.core.config.mixture import MixtureOptions
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.model.decoder import DecoderStage
from mega.core.model.experts import ExpertLayer
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.mesh import Groups
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, weights
from mega.core.processes.pool import Pool
from mega.core.training.saves.resume import find_resume_point, restore
from mega.core.training.start.inputs import ResolvedRun, resolve_run
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state
from tests.checkpoint.megatron.test_state import NUMBERS, PROGRESS, SCHEDULE
from tests.support import hub_families as hub
from tests.support.archives import unpack
from tests.support.lines import parsed
from tests.support.ranks import CPU
from tests.support.shared import shared

FORMS = {
    "mixtral": ("torch", "torch_dist"),
    "mixtral_pp2": ("torch", "torch_dist"),
    "mixtral_ep2": ("torch_dist",),
    "sinkhorn": ("torch_dist",),
    "mtp": ("torch_dist",),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded runs, unpacked, and each form converted to ours: NAME-FORM."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name, forms in FORMS.items():
        (folder / name).mkdir()
        with tarfile.open(shared(f"golden/moe_core/{name}.tar.xz")) as archive:
            unpack(archive, folder / name)
        for form in forms:
            convert(folder / name / form, folder / f"{name}-{form}", "mega", Layout())
    return folder


@pytest.mark.parametrize("name", ["mixtral", "mixtral_pp2"])
def test_both_forms_say_the_same(recorded: Path, name: str) -> None:
    one, other = (locate(recorded / f"{name}-{form}") for form in FORMS[name])
    assert list(diff(one, other)) == []
    assert {key.partition("/")[0] for key in one.tensors} == {"weights", "moment1", "moment2"}
    model = one.meta["config"]["model"]
    assert (model["experts"], model["experts_chosen"], model["balance"], model["z_loss"]) == (
        4,
        2,
        ["microbatch"],
        1e-3,
    )


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
Step = tuple[torch.Tensor, torch.Tensor, float]
"""Tokens and labels [samples, seq] of a global batch, and the learning rate."""


def trained(groups: Groups, rank: int, resolved: ResolvedRun, world: int, steps: list[Step]) -> list[dict[str, float]]:
    """One rank's steps from the checkpoint of --load on; losses by name, and the gradient norm."""
    run, device = resolved.run, Device(CPU, "gloo")
    mesh = build_mesh(run, rank, world, groups)
    state = build_state(run, mesh, device)
    exchange = partial(gather_json, axis=mesh.everyone, device=device.torch) if world > 1 else alone
    point = find_resume_point(run, [].append, exchange)
    assert point is not None
    together(partial(restore, state, point), exchange)
    assert state.progress.step == 3
    rows = []
    for number, (tokens, labels, lr) in enumerate(steps):
        own = range(mesh.dp.index, len(tokens), mesh.dp.size)
        samples = [slice(one, one + 1) for one in own]
        batches = [
            DecoderBatch(
                tokens[one], labels[one], torch.ones(1, 64), torch.arange(64)[None], torch.tensor([12 + 4 * number])
            )
            for one in samples
        ]
        found = train_step(state, batches, lr, 0.1)
        rows.append({name: float(value) for name, value in found.means.items()} | {"norm": float(found.grad_norm)})
    return rows


@pytest.mark.parametrize(
    ("name", "form", "world", "more"),
    [
        ("mixtral", "torch", 1, ""),
        ("mixtral_pp2", "torch_dist", 1, "--pipeline-model-parallel-size 1"),
        ("mixtral_ep2", "torch_dist", 2, ""),
        ("mixtral_ep2", "torch_dist", 2, "--expert-model-parallel-size 1 --use-distributed-optimizer"),
        ("sinkhorn", "torch_dist", 2, "--pipeline-model-parallel-size 2"),
        ("mtp", "torch_dist", 1, ""),
        ("mtp", "torch_dist", 2, "--pipeline-model-parallel-size 2"),
        ("mtp", "torch_dist", 2, "--context-parallel-size 2"),
        (
            "mixtral_pp2",
            "torch",
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1",
        ),
    ],
)
def test_megatrons_line_trains_on(
    pool: Pool, recorded: Path, tmp_path: Path, name: str, form: str, world: int, more: str
) -> None:
    """Iterations 4 to 6 of Megatron's own command line, on the batches that it had; balance and z-loss as it logs
    them."""
    record = json.loads((recorded / name / "record.json").read_text())
    data = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
    places = {"bytes_document": data, "cache": str(recorded / "cache"), "unused": str(tmp_path / "run")}
    line = [places.get(Path(word).name, word) if "/" in word else word for word in record["argv"]]
    start_at = str(recorded / f"{name}-{form}")
    run = parsed(shlex.join([*line, *shlex.split(more), "--load", start_at, "--no-mask-padded-vocab"]))
    stored = np.load(recorded / name / "batches.npz")
    tokens, labels = (torch.from_numpy(stored[key]).long().flatten(1, 3) for key in ("tokens", "labels"))
    steps = [(tokens[n], labels[n], record["iterations"][n]["lr"]) for n in (3, 4, 5)]
    found = pool.run(trained, resolve_run(run, world), world, steps, world=world)[0]
    for ours, theirs, terms in zip(found, record["iterations"][3:], record.get("logged", [{}] * 6)[3:], strict=True):
        assert ours["lm"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for term in {"load_balancing_loss", "z_loss", "mtp_1 loss"} & terms.keys():
            assert ours[term.replace(" ", "_")] == pytest.approx(terms[term], abs=1.5e-6)  # printed with six digits


@pytest.mark.parametrize("name", ["mixtral-torch", "sinkhorn-torch_dist", "mtp-torch_dist"])
@pytest.mark.parametrize("to", ["mcore-local", "torch_dist"])
def test_what_is_written_is_what_core_wrote(recorded: Path, tmp_path: Path, name: str, to: str) -> None:
    """All of it comes back; core's own tree has the same names, shapes and numbers, in the same order."""
    source, form = recorded / name, "torch" if to == "mcore-local" else to
    convert(source, tmp_path / "theirs", to, Layout())
    convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())
    assert list(diff(locate(source), locate(tmp_path / "back"))) == []
    original = recorded / name.partition("-")[0] / form
    if not original.exists():
        return
    if to == "torch_dist":
        ours, theirs = (DistributedSource(place / "iter_0000003") for place in (tmp_path / "theirs", original))
        assert ours._shapes == theirs._shapes
        states = {key for key in theirs._objects if "_extra_state" in key}
        assert states <= set(ours._objects)
    else:
        trees = []
        for place in (tmp_path / "theirs", original):
            content = read_pickled(place / "iter_0000003/mp_rank_00/model_optim_rng.pt")
            assert isinstance(content, dict)
            trees.append(content["model"])
        ours, theirs = trees
        held = [key for key, value in theirs.items() if value is not None]
        assert [key for key in ours if "_extra_state" not in key] == held
        assert all(torch.equal(ours[key], theirs[key]) for key in held)


def test_layouts_of_the_tree_are_free(recorded: Path, tmp_path: Path) -> None:
    convert(recorded / "mixtral-torch", tmp_path / "theirs", "mcore-local", Layout(2, 2))
    convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())
    assert list(diff(locate(recorded / "mixtral-torch"), locate(tmp_path / "back"))) == []


@pytest.mark.parametrize("name", ["mixtral-torch", "mixtral_ep2-torch_dist", "sinkhorn-torch_dist"])
@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(2, 2, ep=4)], ids=["ep2", "tp2-pp2-ep4"])
def test_a_tree_whose_ranks_share_the_experts(recorded: Path, tmp_path: Path, name: str, layout: Layout) -> None:
    """All of it comes back. Each file has the names and numbers of core's own tree, with its experts counted from 0."""
    convert(recorded / name, tmp_path / "theirs", "mcore-local", layout)
    convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())
    assert list(diff(locate(recorded / name), locate(tmp_path / "back"))) == []
    places = sorted(path.name for path in (tmp_path / "theirs" / "iter_0000003").iterdir())
    assert len(places) == layout.tp * layout.pp * layout.ep and places[1] == (
        "mp_rank_00_001" if layout.pp == 1 else "mp_rank_00_000_001"
    )
    if name != "mixtral-torch" or layout.tp > 1:
        return
    whole: Any = read_pickled(recorded / "mixtral/torch/iter_0000003/mp_rank_00/model_optim_rng.pt")
    for rank, place in enumerate(places):
        content: Any = read_pickled(tmp_path / "theirs" / "iter_0000003" / place / "model_optim_rng.pt")
        values = content["args"].values
        assert (values["rank"], values["world_size"], values["expert_model_parallel_size"]) == (rank, 2, 2)
        for key, tensor in content["model"].items():
            layer, local, rest = key.partition(".local_experts.")
            number = int(rest.partition(".")[0] or 0) + 2 * rank
            own = key if not local else f"{layer}{local}{number}.{rest.partition('.')[2]}"
            assert tensor is None or torch.equal(tensor, whole["model"][own]), key
        dense, experts = content["optimizer"]
        assert [each["is_expert_parallel"] for each in dense["param_groups"]] == [False, False]
        assert [each["is_expert_parallel"] for each in experts["param_groups"]] == [True]
        assert len(experts["state"]) == 2 * 2 * 2 and len(dense["state"]) + 2 * 8 == len(whole["optimizer"]["state"])


def shared_tree(recorded: Path, tmp_path: Path) -> Path:
    convert(recorded / "mixtral-torch", tmp_path / "theirs", "mcore-local", Layout(ep=2))
    return tmp_path / "theirs" / "iter_0000003"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", r"holds no mp_rank_XX of \(tensor, pipeline, expert\) rank \[\(0, 0, 1\)\]"),
        ("copied", "holds the same experts as the expert rank before it"),
        ("router", "router.weight: differs from that of the expert ranks before it"),
        ("moment", "moment1/0.0.0/.*: differs from that of the expert ranks before it"),
        ("doubled", r"local_experts.2.*: its args give 2 experts to each rank"),
        ("three", "args.expert_model_parallel_size 3: must be a number that divides args.num_experts 4"),
        ("tensor", "args.expert_tensor_parallel_size 2: must be args.tensor_model_parallel_size 1"),
        ("one", "mp_rank_00_001: has 1 optimizers, its experts need 2"),
        ("distributed", "distrib_optim.pt: is not read where ranks share the experts"),
    ],
)
def test_what_is_no_tree_of_shared_experts_is_refused(recorded: Path, tmp_path: Path, fault: str, words: str) -> None:
    place = shared_tree(recorded, tmp_path)
    files = [place / f"mp_rank_00_00{rank}" / "model_optim_rng.pt" for rank in (0, 1)]
    contents = [torch.load(file, weights_only=False) for file in files]
    first, second = contents
    layer = "decoder.layers.0.mlp"
    if fault == "missing":
        shutil.rmtree(files[1].parent)
        del contents[1]
    elif fault == "copied":
        contents[1] = first
    elif fault == "router":
        second["model"][f"{layer}.router.weight"] += 1
    elif fault == "moment":
        second["optimizer"][0]["state"][0]["exp_avg"] += 1
    elif fault == "doubled":
        weights = second["model"]
        weights[f"{layer}.experts.local_experts.2.linear_fc1.weight"] = weights.pop(
            f"{layer}.experts.local_experts.1.linear_fc1.weight"
        )
    elif fault == "three":
        first["args"].expert_model_parallel_size = 3
    elif fault == "tensor":
        first["args"].expert_tensor_parallel_size = 2
    elif fault == "one":
        second["optimizer"] = second["optimizer"][0]
    else:
        torch.save({}, files[1].with_name("distrib_optim.pt"))
    for file, content in zip(files, contents, strict=False):
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())


@pytest.mark.parametrize(
    ("to", "layout", "more", "words"),
    [
        ("torch_dist", Layout(ep=2), {}, "needs --saver mcore-local, and a model with experts"),
        ("mcore-local", Layout(ep=3), {}, "must divide the model's 4 experts"),
        ("mcore-local", Layout(ep=2), {"distributed": True}, "excludes --use-distributed-optimizer"),
    ],
)
def test_what_cannot_be_written_for_shared_experts(
    recorded: Path, tmp_path: Path, to: str, layout: Layout, more: dict[str, bool], words: str
) -> None:
    with pytest.raises(ValueError, match=f"--ep {layout.ep}: {words}"):
        convert(recorded / "mixtral-torch", tmp_path / "theirs", to, layout, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["megatron", "mcore"])
def test_trees_without_mixtures_are_refused(recorded: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(CheckpointError, match=f"--saver {to}: has no mixture of experts; valid: mcore-local, torch_di"):
        convert(recorded / "mixtral-torch", tmp_path / "theirs", to, Layout())


def test_tokens_after_the_next_one_in_a_tree_of_stages(recorded: Path, tmp_path: Path) -> None:
    """The last stage has the table of tokens too; trees of 2023 have no such layers."""
    source = recorded / "mtp-torch_dist"
    convert(source, tmp_path / "theirs", "mcore", Layout(2, 2))
    convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())
    assert list(diff(locate(source), locate(tmp_path / "back"))) == []
    last = read_pickled(tmp_path / "theirs/iter_0000003/mp_rank_01_001/model_optim_rng.pt")
    assert isinstance(last, dict) and "embedding.word_embeddings.weight" in last["model"]
    with pytest.raises(CheckpointError, match="--mtp-layers 1: --saver megatron has none; valid: mcore, torch_dist"):
        convert(source, tmp_path / "legacy", "megatron", Layout())


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_other_forms_have_the_model_without_them(tmp_path: Path, to: str) -> None:
    """Layers that predict further tokens are training's: what is left out is said, all else comes back."""
    if to == "gguf":
        pytest.importorskip("gguf")
    names = {each.name for each in dataclasses.fields(MixtureOptions)}
    values = {name: value for name, value in DEEPSEEK.items() if name not in names}
    plain = ModelConfig(**{**values, "vocab_multiple": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    own = saved(tmp_path / "own", dataclasses.replace(plain, mtp_layers=1, mtp_loss=0.3), torch.float32)
    report = convert(own, tmp_path / to, to, Layout())
    assert report.losses[0].startswith("mtp_layers 1: ")
    assert report.tensors == len(list(inventory(plain)))
    convert(tmp_path / to, tmp_path / "back", "mega", Layout())
    back = locate(tmp_path / "back")
    assert architecture(model_of(back.meta, "back")) == architecture(plain)
    differing = {each.key for each in diff(locate(own), back, "weights/")}
    assert differing and all(key.startswith("weights/mtp.") for key in differing)


# Switch layers of 2023 -------------------------------------------------------------------------------------------

SWITCH = {"23.06": ("switch_mlp_23.06", "experts"), "late 2023": ("switch_mlp_llama2_fork", "local_experts")}
ARGUMENTS = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 32,
    "max_position_embeddings": 12,
    "padded_vocab_size": 8,
    "num_experts": 4,
    "bias_gelu_fusion": False,
}


def switch_tree(folder: Path, which: str) -> dict[str, torch.Tensor]:
    """A tree of one layer whose mixture is the golden one; the golden tensors."""
    name, _ = SWITCH[which]
    golden = load_file(shared(f"golden/moe/{name}.safetensors"))
    draw = torch.Generator().manual_seed(0)
    shapes = {"self_attention.query_key_value": (48, 16), "self_attention.dense": (16, 16)}
    encoder = {
        f"layers.0.mlp.{key.removeprefix('weight.')}": each for key, each in golden.items() if key.startswith("weight.")
    }
    for module, shape in shapes.items():
        encoder[f"layers.0.{module}.weight"] = torch.randn(shape, generator=draw)
        encoder[f"layers.0.{module}.bias"] = torch.randn(shape[0], generator=draw)
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "final_layernorm"):
        encoder |= {f"{norm}.weight": torch.ones(16), f"{norm}.bias": torch.zeros(16)}
    embedding = {
        "word_embeddings": {"weight": torch.randn(8, 16, generator=draw)},
        "position_embeddings": {"weight": torch.randn(12, 16, generator=draw)},
    }
    late = {"expert_parallel": True} if which == "late 2023" else {}
    content = {
        "args": argparse.Namespace(**ARGUMENTS, **late),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "model": {"language_model": {"embedding": embedding, "encoder": encoder}},
    }
    rank = folder / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save(content, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return golden


@pytest.mark.parametrize("way", ["train", "eval"])
@pytest.mark.parametrize("which", SWITCH)
def test_switch_layers_of_2023(tmp_path: Path, which: str, way: str) -> None:
    """Outputs, chosen experts and all gradients of a tree's mixture are those of the original functions."""
    golden = switch_tree(tmp_path / "tree", which)
    opened = hub.opened(tmp_path / "tree")
    stage = DecoderStage(opened.model, units(opened.model), ParameterFactory({}, torch.float64, CPU), ALONE)
    wholes = hub.wholes(opened)
    with torch.no_grad():
        for one in weights(stage):
            one.zero_()
            for segment in one.segments:
                segment.real(one).copy_(wholes[segment.shard.name])
    layer = next(module for module in stage.modules() if isinstance(module, ExpertLayer)).train(way == "train")
    x = golden["input"].flatten(0, 1).double().requires_grad_()
    context = stage.context(hub.batch_of(12, rows=2, vocab=8))
    y = layer(x, context)
    torch.testing.assert_close(y.float(), golden[f"{way}.output"].flatten(0, 1), rtol=1e-5, atol=1e-5)
    torch.autograd.backward(y, golden["grad_of_output"].flatten(0, 1).double())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), golden[f"{way}.grad_input"].flatten(0, 1), rtol=1e-5, atol=1e-5)
    for one in weights(layer):
        for segment in one.segments:
            name = segment.shard.name.partition(".mlp.")[2].replace("gate.", "router.", 1)
            name = name.replace("up_proj", "dense_h_to_4h").replace("down_proj", "dense_4h_to_h")
            name = name.replace("experts", SWITCH[which][1], 1)
            expected = golden[f"{way}.grad.{name}"]
            found = torch.zeros_like(expected) if one.grad is None else segment.real(one.grad).float()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


# What the recorded runs do not have --------------------------------------------------------------------------------

DEEPSEEK: dict[str, Any] = {
    **{"family": "llama", "layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 56},
    **{"vocab_multiple": 8, "positions": 12, "position": "rope", "norm": "rmsnorm", "activation": "swiglu"},
    **{"bias": False, "qkv_bias": False, "tied": False, "experts": 8, "experts_chosen": 4, "expert_ffn": 8},
    **{"dense_layers": (0,), "shared_ffn": 12, "shared_gate": True, "router_score": "sigmoid", "router_scale": 2.5},
    **{"router_groups": 4, "router_groups_chosen": 2, "balance_bias": True, "balance": ("sequence", "global")},
    **{"balance_loss": (1e-3, 1e-4), "router_dtype": "fp32"},
}


def saved(directory: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """A checkpoint as a run saves it: what balances experts has no moments."""
    draw, pieces = torch.Generator().manual_seed(3), []
    for tensor in inventory(model):
        master = torch.randn(tensor.shape, generator=draw)
        kinds = {"weights": master.to(dtype)} | ({} if dtype == torch.float32 else {"master": master})
        kinds |= {"moment1": torch.randn(master.shape, generator=draw), "moment2": torch.rand(master.shape)}
        kinds = kinds if tensor.learned else {"weights": master.to(dtype)}
        at = (0,) * master.dim()
        pieces += [Piece(f"{kind}/{tensor.name}", tuple(master.shape), at, one) for kind, one in kinds.items()]
    config = {"model": dataclasses.asdict(model), "optimizer": {"optimizer": "adam", "lr": 3e-4, **NUMBERS}}
    progress = {**PROGRESS, "step": 7, "consumed": 28}
    meta = {"config": config, "progress": progress, "updates": 6, "scaler": None, "schedule": SCHEDULE}
    CheckpointStore(directory).save(7, pieces, meta)
    return directory


@pytest.mark.parametrize("to", ["mcore-local", "torch_dist"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_as_deepseek_has_it(tmp_path: Path, dtype: torch.dtype, to: str) -> None:
    """A dense layer, a shared expert, a bias of the choice and groups, with masters and moments."""
    model = ModelConfig(**DEEPSEEK)
    own = saved(tmp_path / "own", model, dtype)
    convert(own, tmp_path / "theirs", to, Layout(2, 1, ep=4) if to == "mcore-local" else Layout())
    convert(tmp_path / "theirs", tmp_path / "back", "mega", Layout())
    assert list(diff(locate(own), locate(tmp_path / "back"))) == []
    assert architecture(model_of(locate(tmp_path / "back").meta, "back")) == architecture(model)
    if to == "torch_dist":
        names = set(DistributedSource(tmp_path / "theirs" / "iter_0000007")._shapes)
        assert {
            "decoder.layers.0.mlp.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
            "decoder.layers.2.mlp.router.expert_bias",
            "decoder.layers.1.mlp.shared_experts.gate_weight",
        } <= names
        assert not [name for name in names if "optimizer" in name and "expert_bias" in name]


def test_thresholds_of_quantiles_have_cores_name(tmp_path: Path) -> None:
    """Core 0.19 calls them router.qb_beta; they and the share that a step keeps come back."""
    plain = {"shared_ffn": None, "shared_gate": False, "router_groups": None, "router_groups_chosen": None}
    of_bias = {"router_score": "softmax", "balance_bias": False, "balance": ("microbatch",), "balance_loss": (0.0,)}
    by_quantile = {"router_choice": "quantile", "router_quantile_ema": 0.25, "mtp_layers": 1}
    model = ModelConfig(**{**DEEPSEEK, **plain, **of_bias, **by_quantile})
    own = saved(tmp_path / "own", model, torch.bfloat16)
    for to in ("mcore-local", "torch_dist"):
        convert(own, tmp_path / to, to, Layout())
        convert(tmp_path / to, tmp_path / f"{to}-back", "mega", Layout())
        assert list(diff(locate(own), locate(tmp_path / f"{to}-back"))) == []
        back = model_of(locate(tmp_path / f"{to}-back").meta, "back")
        assert (back.router_choice, back.router_quantile_ema) == ("quantile", 0.25)
    names = set(DistributedSource(tmp_path / "torch_dist" / "iter_0000007")._shapes)
    ends = {name.rpartition(".")[2] for name in names if ".mlp.router." in name and "optimizer" not in name}
    assert ends == {"weight", "qb_beta"}
    assert not [name for name in names if "optimizer" in name and "qb_beta" in name]
    assert "--moe-router-quantile-balancing-ema 0.25" in mixture_flags(mixture_arguments(model))


def test_arguments_and_flags_of_a_mixture() -> None:
    model = ModelConfig(**DEEPSEEK)
    said = mixture_arguments(model)
    assert said["moe_layer_freq"] == [0, 1, 1]
    assert architecture(dataclasses.replace(model, **mixture_of(said, 3, "args"))) == architecture(model)
    flags = mixture_flags(said)
    assert "--moe-layer-freq [0,1,1]" in flags
    assert "--moe-router-load-balancing-type seq_aux_loss global_aux_loss" in flags
    assert "--moe-router-enable-expert-bias" in flags


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_experts": -1}, "num_experts -1"),
        ({"moe_layer_freq": [0, 1]}, r"moe_layer_freq \[0, 1\]"),
        ({"moe_router_score_function": "tanh"}, "moe_router_score_function 'tanh'"),
        ({"moe_router_load_balancing_type": "even"}, "load_balancing_type 'even'"),
        ({"moe_router_topk": "2"}, "moe_router_topk '2'"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input True"),
        ({"moe_latent_size": 8}, "moe_latent_size 8"),
        (
            {
                "moe_router_load_balancing_type": "quantile_balancing",
                "moe_router_quantile_balancing_ema": 1,
            },
            "quantile_balancing_ema 1",
        ),
    ],
)
def test_arguments_that_are_not_understood(said: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        mixture_of({"num_experts": 4, **said}, 3, "args")


def test_names_of_grouped_products() -> None:
    """Transformer Engine's, with the number of an expert at the end."""
    assert common_name("decoder.layers.1.mlp.experts.linear_fc2.weight11") == legacy_name(
        "model.layers.1.mlp.experts.11.down_proj.weight", 1
    )
