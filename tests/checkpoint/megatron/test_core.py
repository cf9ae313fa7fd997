"""Checkpoints that Megatron-core wrote are read with their optimizer, in every form, and trained on in any layout."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.training.start.inputs import ResolvedRun, open_inputs, resolve_run
from mega.core.training.start.rank import start
from tests.support import foreign_forms
from tests.support.archives import unpack
from tests.support.foreign_forms import weights_of
from tests.support.lines import parsed
from tests.support.ranks import CPU
from tests.support.shared import shared

# What Megatron-core 0.18.2 wrote ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """One of the recorded runs. loss: how far losses may differ; norm: gradient norms, relatively. In the run
    on GPUs products are short of fp32: fp64 gives our losses and norms."""

    name: str
    forms: tuple[str, ...]
    world: int
    loss: float
    norm: float


RECORDED = {
    each.name: each
    for each in (
        Recorded("gpt_fp32_tp2pp1dp2_plain", ("torch", "torch_dist"), 4, 1e-6, 1e-5),
        Recorded("llama_bf16_tp2pp2dp1_do", ("torch", "torch_dist", "torch_dist_full"), 4, 1e-3, 2e-3),
        Recorded("te_llama_fp32_tp2pp1dp1_plain", ("torch", "torch_dist"), 2, 5e-5, 2e-4),
    )
}


@dataclass
class Imports:
    """The recorded checkpoints, unpacked and converted at most once."""

    folder: Path
    made: dict[tuple[str, str], Path] = field(default_factory=dict)

    def source(self, name: str) -> Path:
        if not (self.folder / name).exists():
            with tarfile.open(shared(f"megatron_core/{name}.tar.xz")) as archive:
                unpack(archive, self.folder)
        return self.folder / name

    def own(self, name: str, form: str) -> Path:
        if (name, form) not in self.made:
            target = self.folder / f"own_{name}_{form}"
            convert(self.source(name) / form, target, "mega", Layout())
            self.made[name, form] = target
        return self.made[name, form]


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> Imports:
    return Imports(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("name", RECORDED)
def test_every_form_of_a_checkpoint_says_the_same(imports: Imports, name: str) -> None:
    first, *others = (locate(imports.own(name, form)) for form in RECORDED[name].forms)
    kinds = {key.partition("/")[0] for key in first.tensors}
    assert kinds == {"weights", "moment1", "moment2", *(["master"] if "bf16" in name else [])}
    assert (first.step, first.meta["updates"], first.meta["progress"]["consumed"]) == (3, 3, 12)
    lr = first.meta["schedule"]["lr"]
    assert (lr["peak"], lr["least"], lr["warmup"], lr["decay"], lr["style"]) == (2e-3, 2e-4, 8, 40, "cosine")
    for other in others:
        assert list(diff(first, other)) == []
        assert {**other.meta, "layout": None} == {**first.meta, "layout": None}


def trained(groups: Groups, rank: int, resolved: ResolvedRun, world: int) -> None:
    with contextlib.ExitStack() as held:
        start(open_inputs(resolved), rank, world, Device(CPU, "gloo"), groups, held).play()


ONE = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
FOUR = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]


@pytest.mark.parametrize("layout", ["as saved", "tp1 pp1", "tp2 pp2 zero1"])
@pytest.mark.parametrize("name", RECORDED)
def test_megatrons_line_trains_on(pool: Pool, imports: Imports, tmp_path: Path, name: str, layout: str) -> None:
    """Iterations 4 to 6 of Megatron's own command line. The losses are those of the padded rows too, which are kept."""
    recorded = RECORDED[name]
    world, more, form = {
        "as saved": (recorded.world, [], recorded.forms[-1]),
        "tp1 pp1": (1, ONE, "torch"),
        "tp2 pp2 zero1": (8, FOUR, "torch_dist"),
    }[layout]
    record = json.loads((imports.source(name) / "record.json").read_text())
    data = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
    places = {"bytes_document": data, "cache": str(imports.folder / "cache"), "unused": str(tmp_path / "run")}
    line = [places[Path(word).name] if word.startswith("/data/") else word for word in record["argv"]]
    run = parsed(shlex.join([*line, *more, "--load", str(imports.own(name, form)), "--no-mask-padded-vocab"]))
    pool.run(trained, resolve_run(run, world), world, world=world)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    found = [row for row in rows if "loss" in row]
    assert [row["step"] for row in found] == [4, 5, 6]
    for ours, theirs in zip(found, record["iterations"][3:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=recorded.loss)
        assert ours["lr"] == theirs["lr"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=recorded.norm)


FOLDERS = [(name, form) for name, recorded in RECORDED.items() for form in recorded.forms]
TUNED = (
    "--finetune --use-checkpoint-config --no-mask-padded-vocab --tokenizer NullTokenizer --vocab-size 256 --split 1,0,0"
)
TUNED += " --steps 2 --lr 1e-3 --lr-decay constant --seq-length 64 --micro-batch 2 --global-batch 4 --eval-iters 0"


def losses_of(pool: Pool, folder: Path, start: Path, tp: int, pp: int, more: str = "") -> list[float]:
    """Of two steps of a finetuning in fp32 whose options are the checkpoint's."""
    data, metrics = (
        str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin"),
        folder / f"tp{tp}-pp{pp}.jsonl",
    )
    line = f"{TUNED} --load {start} --tp {tp} --pp {pp} --dtype fp32 --data-path {data} --metrics {metrics} {more}"
    pool.run(
        trained, resolve_run(parsed(f"{line} --data-cache-path {folder / 'cache'}"), tp * pp), tp * pp, world=tp * pp
    )
    return [row["loss"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row and "lr" in row]


@pytest.mark.parametrize(("name", "form"), FOLDERS)
def test_every_folder_of_core_is_tuned_at_another_layout(
    pool: Pool, imports: Imports, tmp_path: Path, name: str, form: str
) -> None:
    start = imports.own(name, form)
    one, four = (losses_of(pool, tmp_path, start, *layout) for layout in ((1, 1), (2, 2)))
    assert len(one) == 2 and four == pytest.approx(one, rel=1e-6)


def test_rows_that_one_rank_padded_are_kept_at_another_layout(pool: Pool, imports: Imports, tmp_path: Path) -> None:
    """257 tokens are 384 rows at tp 1, and would be 512 at tp 2: the checkpoint's count."""
    first = tmp_path / "first"
    shape = "--layers 4 --hidden 32 --heads 4 --positions 64 --tokenizer NullTokenizer --vocab-size 256 --steps 1"
    shape += f" --save {first} --save-interval 1"
    data = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
    line = f"{shape} --data-path {data} --split 1,0,0 --no-mask-padded-vocab --lr 1e-3 --seq-length 64 --micro-batch 2"
    run = parsed(f"{line} --global-batch 2 --eval-iters 0 --data-cache-path {tmp_path / 'cache'}")
    pool.run(trained, resolve_run(run, 1), 1, world=1)
    assert locate(first).tensors["weights/model.embed_tokens.weight"][0] == (384, 32)
    one, four = (losses_of(pool, tmp_path, first, *layout) for layout in ((1, 1), (2, 2)))
    assert len(one) == 2 and four == pytest.approx(one, rel=1e-6)


# What it would write of odd sizes: flat buffers with gaps, several buckets, tied stages ------------------------------

SHAPE: dict[str, Any] = {"layers": 4, "vocab": 61, "vocab_multiple": 8, "positions": 10}
MODELS = {
    "gpt": dataclasses.replace(foreign_forms.GPT, **SHAPE),
    "llama": dataclasses.replace(foreign_forms.LLAMA, **SHAPE),
}
LAYOUTS = [("gpt", 1, 2), ("gpt", 2, 1), ("llama", 2, 2)]


def own(directory: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """Weights alone, of step 7."""
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(model).items()}
    pieces = [Piece(f"weights/{name}", tuple(t.shape), (0,) * t.dim(), t) for name, t in weights.items()]
    meta = {"config": {"model": dataclasses.asdict(model)}, "progress": {"step": 7, "consumed": 28}, "updates": 7}
    CheckpointStore(directory).save(7, pieces, meta)
    return directory


def in_order(tree: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As core's modules register them: the projection before query, key and value, else as a tree is written."""
    parts = ["embedding.word", "embedding.pos", "decoder.layers", "decoder.final", "output_layer"]
    inner = ["input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "pre_mlp", "mlp.linear_fc1"]

    def place(name: str) -> tuple[int, int, int, int, bool]:
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        inside = next((n for n, start in enumerate(inner) if rest.startswith(start)), len(inner))
        layer = int(number) if number.isdigit() else 0
        outer = next(n for n, start in enumerate(parts) if name.startswith(start))
        return outer, layer, inside, "layer_norm_" not in name, name.endswith("bias")

    return {name: tree[name] for name in sorted(tree, key=place) if isinstance(tree[name], torch.Tensor)}


def vectors(tree: Mapping[str, torch.Tensor], tied: bool, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """The flat buffers of a rank, a bucket at a time: halves of the weights as the first moment, squares as the second.

    Written down apart from the code under test: from the last parameter, each from the next multiple of 64 on.
    """
    bucket = torch.zeros(0)
    alone = ("embedding.word_embeddings.weight", "output_layer.weight") if tied else ()
    for name in reversed(list(tree)):
        bucket = torch.cat([bucket, torch.zeros(-len(bucket) % 64)])
        if name in alone and len(bucket):
            yield kinds_of(bucket)
            bucket = torch.zeros(0)
        bucket = torch.cat([bucket, tree[name].float().flatten()])
        if name in alone or len(bucket) >= limit:
            yield kinds_of(bucket)
            bucket = torch.zeros(0)
    if len(bucket):
        yield kinds_of(bucket)


def kinds_of(bucket: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"param": bucket, "exp_avg": bucket / 2, "exp_avg_sq": bucket**2}


def group(decayed: bool) -> dict[str, Any]:
    plain = {"is_expert_parallel": False, "is_decoupled_lr": False, "lr_mult": 1.0, "betas": (0.9, 0.95), "eps": 1e-8}
    return {**plain, "wd_mult": float(decayed), "step": 6}


def tree_of(run: Path, to: Path, model: ModelConfig, tp: int, pp: int, style: str) -> list[tuple[Path, dict[str, Any]]]:
    """A tree of core's, as it is written without a state, and what its files hold."""
    convert(run, to, style, Layout(tp, pp), optimizer=False)
    files = sorted(to.glob("iter_*/*/model_optim_rng.pt"))
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = [torch.load(file, weights_only=True) for file in files]
    for content in contents:
        content["model"] = in_order(content["model"])
        content["args"].overlap_grad_reduce, content["args"].ddp_bucket_size = True, 1000
        content["args"].transformer_impl = "local" if style == "mcore-local" else "transformer_engine"
    return list(zip(files, contents, strict=True))


def check_halves(path: Path, wide: bool) -> None:
    """Each moment is its own weight's half or square, and each master its weight."""
    found = locate(path)
    source = OwnSource(found, ("weights", "moment1", "moment2", *(() if wide else ("master",))))

    def whole(key: str) -> torch.Tensor:
        shape = source.tensors[key][0]
        return source.read(key, Box((0,) * len(shape), shape)).float()

    names = [key.partition("/")[2] for key in source.tensors if key.startswith("weights/")]
    assert len(source.tensors) == (3 if wide else 4) * len(names)
    for name in names:
        weight = whole(f"weights/{name}")
        assert torch.equal(whole(f"moment1/{name}"), weight / 2), name
        assert torch.equal(whole(f"moment2/{name}"), weight**2), name
        assert wide or torch.equal(whole(f"master/{name}"), weight), name
    assert found.meta["updates"] == 6


@pytest.mark.parametrize(("model", "tp", "pp"), LAYOUTS)
@pytest.mark.parametrize(("style", "dtype"), [("mcore-local", torch.bfloat16), ("mcore", torch.float32)])
def test_flat_buffers_of_a_tree(tmp_path: Path, model: str, tp: int, pp: int, style: str, dtype: torch.dtype) -> None:
    shape = MODELS[model]
    for file, content in tree_of(own(tmp_path / "run", shape, dtype), tmp_path / "tree", shape, tp, pp, style):
        limit = 1000 if file.parent.name.endswith(("00", "01")) and not file.parent.name.endswith("_001") else 1 << 60
        made = list(vectors(content["model"], shape.tied and pp > 1, limit))
        flat = {key: torch.cat([bucket[key] for bucket in made]) for key in made[0]}
        content["optimizer"] = {"optimizer": {"param_groups": [group(True), group(False)]}}
        torch.save(content, file)
        state = {(dtype, torch.float32): {**flat, "numel_unpadded": len(flat["param"])}}
        torch.save({"buckets_coalesced": True, 0: state}, file.with_name("distrib_optim.pt"))
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(2, 1), vocab=61)
    check_halves(tmp_path / "back", dtype == torch.float32)


def write_dist(folder: Path, run: Path, shape: ModelConfig, tp: int, pp: int, dtype: torch.dtype) -> Path:
    """A torch_dist folder whose optimizer's state is the flat buffers of tp x pp ranks, by torch's own writer."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    ((_, whole),) = tree_of(run, folder / "whole", shape, 1, 1, "mcore")
    ranks = tree_of(run, folder / "tree", shape, tp, pp, "mcore-local")
    state: dict[str, Any] = {name: tensor for name, tensor in whole["model"].items() if ".layers." not in name}
    for name in whole["model"]:
        if name.startswith("decoder.layers.0."):
            layers = [whole["model"][name.replace(".0.", f".{n}.", 1)] for n in range(4)]
            state[name.replace(".0.", ".", 1)] = torch.stack(layers)
    for file, content in ranks:
        t, p = int(file.parent.name.split("_")[2]), int(file.parent.name.split("_")[3]) if pp > 1 else 0
        own_part = f"optimizer.distributed.dp_group_idx_{t + tp * p}."
        state[f"{own_part}optimizer/shard_0_1"] = ({"param_groups": [group(True), group(False)]},)
        made = vectors(content["model"], shape.tied and pp > 1, 1 << 60 if p else 1000)
        for number, bucket in enumerate(made):
            buffer = f"{own_part}gbuf_idx_0.dtype_({dtype}, torch.float32).bucket_idx_{number}."
            state |= {buffer + key: vector for key, vector in bucket.items()}
    here = folder / "dist" / "iter_0000007"
    save(state, storage_writer=FileSystemWriter(here), no_dist=True)
    (here / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    arguments = ranks[0][1]["args"]
    arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size = tp, pp
    torch.save({"args": arguments, "iteration": 7, "optimizer": {}}, here / "common.pt")
    return here


@pytest.mark.parametrize(("model", "tp", "pp"), LAYOUTS)
def test_flat_buffers_of_torch_dist(tmp_path: Path, model: str, tp: int, pp: int) -> None:
    dtype = torch.bfloat16 if model == "llama" else torch.float32
    shape = MODELS[model]
    here = write_dist(tmp_path, own(tmp_path / "run", shape, dtype), shape, tp, pp, dtype)
    convert(here, tmp_path / "back", "mega", Layout(1, 2), vocab=61)
    check_halves(tmp_path / "back", dtype == torch.float32)


def taken_twice(state: dict[Any, Any]) -> None:
    next(iter(state[0].values()))["exp_avg"] = torch.zeros(3)


def moved(state: dict[Any, Any]) -> None:
    vectors = next(iter(state[0].values()))
    vectors["param"] = vectors["param"].roll(1)


def narrow(state: dict[Any, Any]) -> None:
    vectors = next(iter(state[0].values()))
    vectors["exp_avg_sq"] = vectors["exp_avg_sq"].half()


def experts(state: dict[Any, Any]) -> None:
    state[1] = state[0]


VECTORS: dict[Callable[[dict[Any, Any]], None], str] = {
    taken_twice: r"exp_avg: has 3 numbers, core's buckets of these parameters \d+",
    moved: "rounded to torch.bfloat16, it is not the weight; give --no-load-optim",
    narrow: "exp_avg_sq: is not an fp32 vector",
    experts: "holds '1', the model has 1 chunks",
}


@pytest.mark.parametrize("change", VECTORS, ids=lambda change: change.__name__)
def test_changed_vectors_are_refused_by_name(imports: Imports, tmp_path: Path, change: Callable[[Any], None]) -> None:
    tree = copied(imports.source("llama_bf16_tp2pp2dp1_do") / "torch", tmp_path)
    file = tree / "iter_0000003" / "mp_rank_01_001" / "distrib_optim.pt"
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)
    refused(tree, VECTORS[change])


def copied(tree: Path, to: Path) -> Path:
    return Path(shutil.copytree(tree, to / "tree"))


def refused(tree: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(tree, tree.with_name("back"), "mega", Layout())
    assert not tree.with_name("back").exists()


INDEX: dict[str, tuple[bytes, bytes, str]] = {
    "another kind": (b".bucket_idx_0.exp_avg_sq", b".bucket_idx_0.other_kind", "the form of this state is not known"),
    "another chunk": (b"idx_3.gbuf_idx_0", b"idx_3.gbuf_idx_1", "4 ranks with 2 model chunks .* args say 2 tensor x 2"),
    "another rank": (b"dp_group_idx_3.gbuf", b"dp_group_idx_7.gbuf", "args say 2 tensor x 2 pipeline ranks"),
}


@pytest.mark.parametrize("change", INDEX)
def test_a_changed_index_is_refused_by_name(imports: Imports, tmp_path: Path, change: str) -> None:
    """Names of the same length, so that the pickle stays whole."""
    tree = copied(imports.source("llama_bf16_tp2pp2dp1_do") / "torch_dist", tmp_path)
    index = tree / "iter_0000003" / ".metadata"
    theirs, ours, words = INDEX[change]
    index.write_bytes(index.read_bytes().replace(theirs, ours))
    refused(tree, words)
