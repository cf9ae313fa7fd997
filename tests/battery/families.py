"""Every family of decoders that Hugging Face's transformers has and mega opens, against transformers itself.

python tests/battery/families.py --out rows.jsonl [case ...]     a JSON line an item; items that are there are kept

logits      fp64, over 96 and 700 tokens: the largest difference
gradients   of one step over 96 tokens, against transformers' autograd: the largest difference, as a part of the
            largest gradient of its tensor
layout      at tp 2 x pp 2: loss, gradients and weights of two steps against one process; the folder opened in place
            by four ranks, whose logits in fp64 are those of `logits`
files       bf16 -> a checkpoint of mega cut for tp 2 x pp 2 -> a folder again: tensors that differ in a bit
greedy      50 tokens after 40, in fp64, through the engine and its cache: tokens that differ
drawn       six models of other sizes: odd numbers of heads, layers and words, tied or not, in shards, without an index,
            in three dtypes; fp64 logits over 96 tokens, and the way back: tensors that differ in a bit
mutated     eight configurations, of which a key is renamed, a type unknown, or a size off: refused, equal to what
            transformers makes of them, or silent
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mega.core.architecture import units
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.layout import Layout
from mega.core.device import Device
from mega.core.inference.loading.load import load_stages, open_model
from mega.core.inference.request import Request, Sampling
from mega.core.model.decoder import DecoderStage
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, weights
from mega.core.plan import plan
from mega.core.processes.pool import Pool
from mega.core.proof.parity import compare, snapshots, within
from tests.inference.test_engine import answers, engine_of, tokens
from tests.support import hub_families as hub
from tests.support.runs import small_run

CPU = torch.device("cpu")
POOL = Pool(4)
PROMPT, ANSWER = 140, 50
MUTATIONS = 8
DRAWN = 6

Row = dict[str, Any]


def stage_of(folder: Path, *, answers_only: bool = False) -> Any:
    opened = hub.opened(folder)
    ops = choose(CPU, torch.float64)
    ops = forward_only(ops) if answers_only else ops
    factory = ParameterFactory({}, torch.float64, CPU, ops)
    stage = DecoderStage(opened.model, units(opened.model), factory, ALONE)
    wholes = hub.wholes(opened)
    with torch.no_grad():
        for weight in weights(stage):
            weight.zero_()
            for segment in weight.segments:
                segment.real(weight).copy_(wholes[segment.shard.name])
    return stage


def logits(case: str, folder: Path) -> Row:
    theirs, stage, found = hub.saved(folder, case), None, {}
    stage = stage_of(folder)
    for length in (96, 700):
        batch = hub.batch_of(length)
        with torch.no_grad(), hub.wide():
            expected = theirs(batch.tokens, use_cache=False).logits
            ours = stage(batch, outputs=True).outputs[..., : hub.VOCAB]
        found[str(length)] = float((ours - expected).abs().max())
    return {**found, "passed": max(found.values()) < 1e-5}


def gradients(case: str, folder: Path) -> Row:
    theirs, batch = hub.saved(folder, case), hub.batch_of(96)
    stage, opened = stage_of(folder), hub.opened(folder)
    with hub.wide():
        nll = F.cross_entropy(theirs(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        torch.autograd.backward((nll * batch.loss_weights.flatten()).sum() / batch.loss_weights.double().sum())
    scales = (1 / batch.loss_weights.double().sum()).expand(len(stage.terms))
    root = stage(batch, scales=scales).terms["lm"].root
    assert root is not None
    torch.autograd.backward(root, torch.empty_like(root))
    expected, worst = hub.gradients(opened, theirs), 0.0
    least = 1e-6 * max(float(one.norm()) for one in expected.values())  # GPT-2's key bias has none in theory
    for weight in weights(stage):
        assert weight.grad is not None
        for segment in weight.segments:
            one = expected[segment.shard.name]
            off = (segment.real(weight.grad) - one).abs().max() / one.abs().max().clamp(min=least)
            worst = max(worst, float(off))
    return {"worst": worst, "passed": worst <= 1e-6}


def layout(case: str, folder: Path) -> Row:
    model = hub.opened_config(hub.theirs(case))
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    values |= {"vocab_multiple": 2, "hidden_dropout": 0.1, "seq_length": 96}
    runs = [small_run("gpt", world, **values, tp=side, pp=side) for world, side in ((1, 1), (4, 2))]
    one, four = (snapshots(POOL, run, world, (1, 2)) for run, world in zip(runs, (1, 4), strict=True))
    worst = [str(each) for each in compare("fp64", (1, 2), one, four) if not within("fp64", each)]
    theirs, found = hub.saved(folder, case), {}
    for length in (96, 700):
        with torch.no_grad(), hub.wide():
            expected = theirs(hub.batch_of(length).tokens, use_cache=False).logits
        ours = [each for each in POOL.run(opened_by_ranks, folder, length, world=4) if each is not None]
        found[str(length)] = float((torch.cat(ours, -1)[..., : hub.VOCAB] - expected).abs().max())
    return {"differ": worst[:3], **found, "passed": not worst and max(found.values()) < 1e-5}


def opened_by_ranks(groups: Groups, rank: int, folder: Path, length: int) -> torch.Tensor | None:
    """A rank of four: the logits of its ids, on those of the last stage."""
    mesh, device = Mesh(rank, groups=groups, tp=2, pp=2), Device(CPU, "gloo")
    stages = load_stages(open_model(folder), mesh, device, dtype=torch.float64)
    with torch.no_grad():
        found = Pipeline(stages, mesh, CPU).outputs(plan("forward", 2, 1, 1), [hub.batch_of(length)])
    return found[0] if found else None


def files(case: str, folder: Path) -> Row:
    hub.saved(folder / "hf", case, torch.bfloat16)
    convert(folder / "hf", folder / "run", layout=Layout(2, 2))
    convert(folder / "run", folder / "back")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "back"))
    odd = set(before) ^ set(after) | {
        name for name in set(before) & set(after) if not torch.equal(before[name], after[name])
    }
    return {"differ": len(odd), "tensors": len(before), "passed": not odd}


def greedy(case: str, folder: Path) -> Row:
    theirs = hub.saved(folder, case)
    prompt = torch.randint(3, hub.VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(7))
    text = prompt[None]
    with torch.no_grad(), hub.wide():
        for _ in range(ANSWER):  # without a cache, so that it cannot be at fault
            text = torch.cat([text, theirs(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    stage = stage_of(folder, answers_only=True).eval()
    asked = Request(prompt=tuple(prompt.tolist()), tokens=ANSWER, sampling=Sampling(temperature=0.0))
    found = tokens(answers(engine_of(stage, block=16), [asked])[0])
    differ = sum(a != b for a, b in zip(found, text[0, PROMPT:].tolist(), strict=True))
    return {"differ": differ, "distinct": len(set(found)), "passed": not differ}


def mutated(case: str, folder: Path) -> Row:
    """Sizes, types and names of a real config.json, changed one at a time."""
    import transformers

    hub.saved(folder, case)
    config = json.loads((folder / "config.json").read_text())
    draw, counts, silent = random.Random(case), dict.fromkeys(("refused", "equal", "unjudged", "silent"), 0), []
    for number in range(MUTATIONS):
        changed, words = mutation(config, draw, number)
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            stage = stage_of(folder)
        except ValueError:
            counts["refused"] += 1
            continue
        batch = hub.batch_of(96)
        with torch.no_grad():
            try:  # with its own fp32 tables: what it initialises while it loads must not be changed
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
                expected = model.double()(batch.tokens, use_cache=False).logits
            except Exception:  # what transformers itself does not take cannot be judged
                counts["unjudged"] += 1
                continue
            ours = stage(batch, outputs=True).outputs[..., : hub.VOCAB]
        same = expected.shape == ours.shape and float((ours - expected).abs().max()) < 1e-4
        counts["equal" if same else "silent"] += 1
        silent += [] if same else [words]
    return {**counts, "which": silent, "passed": not silent}


def drawn(case: str, folder: Path) -> Row:
    draw, worst, differ = random.Random(f"drawn {case}"), 0.0, []
    for number in range(DRAWN):
        here, values = folder / str(number), sizes(case, draw)
        dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32))
        shards = {"max_shard_size": "8KB"} if draw.random() < 0.7 else {}
        theirs = hub.theirs(case, **values)
        deepcopy(theirs).to(dtype).save_pretrained(here / "hf", **shards)
        with torch.no_grad():
            for parameter in theirs.parameters():  # the rounded weights, but not rounded tables of positions
                parameter.copy_(parameter.to(dtype))
        if shards and draw.random() < 0.5:
            (here / "hf" / "model.safetensors.index.json").unlink(missing_ok=True)
        stage, batch = stage_of(here / "hf"), hub.batch_of(96, vocab=values["vocab_size"])
        with torch.no_grad(), hub.wide():
            expected = theirs(batch.tokens, use_cache=False).logits
            ours = stage(batch, outputs=True).outputs[..., : values["vocab_size"]]
        worst = max(worst, float((ours - expected).abs().max()))
        convert(here / "hf", here / "run", layout=Layout(1, 1 + (theirs.config.num_hidden_layers % 2 == 0)))
        convert(here / "run", here / "back")
        before, after = (held(here / name) for name in ("hf", "back"))
        odd = before.keys() != after.keys() or any(not torch.equal(before[name], after[name]) for name in before)
        differ += [str(values)] if odd else []
    return {"worst": worst, "differ": differ, "passed": worst < 1e-5 and not differ}


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def sizes(case: str, draw: random.Random) -> Row:
    """Of another model of a case, by the keys of its configuration."""
    _, given = hub.CASES[case]
    gpt = "n_embd" in given
    heads, width, layers = draw.choice((1, 3, 5)), draw.choice((8, 16)), draw.choice((1, 2, 3, 5))
    named = ("n_embd", "n_head", "n_layer", "n_inner") if gpt else HUB_SIZES
    numbers = (heads * width, heads, layers, draw.choice((13, 37, 40)))
    found: Row = {**dict(zip(named, numbers, strict=True)), "vocab_size": draw.choice((89, 97, 128))}
    if "head_dim" in given:
        found |= {"head_dim": width, "hidden_size": heads * draw.choice((6, 10))}
    if "num_key_value_heads" in given:
        found["num_key_value_heads"] = draw.choice((1, heads))
    if case.startswith("phi3") and "rope_parameters" in given and "short_factor" in given["rope_parameters"]:
        found |= {"hidden_size": heads * 8}
    if "layer_types" in given:
        found["layer_types"] = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    found["tie_word_embeddings"] = draw.random() < 0.5
    return found


HUB_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
NOT_READ = ("architectures", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "use_cache")


def mutation(config: Row, draw: random.Random, number: int) -> tuple[Row, str]:
    keys = sorted(key for key in config if key not in NOT_READ)
    key = draw.choice(keys)
    kind = ("renamed", "size", "type", "renamed", "size", "dropped", "nested", "size")[number % MUTATIONS]
    value = config[key]
    if kind == "renamed":
        return {**{name: each for name, each in config.items() if name != key}, f"{key}_": value}, f"{key} renamed"
    if kind == "dropped":
        return {name: each for name, each in config.items() if name != key}, f"{key} dropped"
    if kind == "type":
        return {**config, "model_type": config["model_type"] + "9"}, "model_type unknown"
    if kind == "nested" and isinstance(config.get("rope_parameters"), dict):
        rope = dict(config["rope_parameters"])
        name = draw.choice(sorted(rope))
        rope[f"{name}_"] = rope.pop(name)
        return {**config, "rope_parameters": rope}, f"rope_parameters.{name} renamed"
    numbers = [name for name in keys if type(config[name]) in (int, float)]
    key = draw.choice(numbers)
    return {**config, key: config[key] + draw.choice((1, -1, 3))}, f"{key} off"


ITEMS: dict[str, Callable[[str, Path], Row]] = {
    "logits": logits,
    "gradients": gradients,
    "files": files,
    "greedy": greedy,
    "drawn": drawn,
    "mutated": mutated,
    "layout": layout,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", nargs="+", default=list(ITEMS), choices=ITEMS)
    given = parser.parse_args()
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["case"], row["item"]) for row in known}
    failed = sum(not row["passed"] for row in known)
    for case in given.cases or hub.CASES:
        for item in given.items:
            if (case, item) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = ITEMS[item](case, Path(folder))
                except Exception as error:  # one item's fault is a line of it
                    row = {"error": f"{type(error).__name__}: {str(error)[:300]}", "passed": False}
            failed += not row["passed"]
            with given.out.open("a") as out:
                out.write(json.dumps({"case": case, "item": item, **row}) + "\n")
    POOL.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
