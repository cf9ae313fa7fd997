"""Adapters on disk: trained apart from their base, resumed, merged, exchanged with peft; other bases are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.cli import main
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from mega.core.family import family
from mega.core.inference.loading.load import load_model, open_model

FAMILIES = {
    "llama": "--family llama --norm rmsnorm --activation swiglu --position rope --no-bias --no-tied --ffn 48".split(),
    "gpt": [],
}
MIXTURE = "--experts 4 --expert-ffn 24 --norm-eps 1e-5".split()
SHAPE = "--layers 2 --hidden 32 --heads 4 --vocab 101 --hidden-dropout 0 --attention-dropout 0".split()
RUN = (
    "--seq-length 8 --global-batch 4 --micro-batch 2 --lr 1e-1 --lr-decay constant --eval-iters 0 "
    "--mock-data --device cpu"
).split()
SAVE = "--save-interval 2 --save".split()
LORA = "--lora-rank 3 --lora-alpha 12".split()


@pytest.fixture(scope="module", params=FAMILIES)
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a run of 4 steps that trained adapters of it."""
    root = tmp_path_factory.mktemp(request.param)
    base, tuned = root / "base", root / "tuned"
    assert main(["pretrain", *FAMILIES[request.param], *SHAPE, *RUN, "--steps", "2", *SAVE, str(base)]) == 0
    tune = ["finetune", *RUN, *LORA, "--load", str(base), *SAVE, str(tuned)]
    assert main([*tune, "--steps", "4"]) == 0
    return base, tuned


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(3, 8) * 4
    with torch.no_grad():
        return model(family(model.model).prompt(ids), outputs=True).outputs[..., :101]


def of_run(place: Path) -> torch.Tensor:
    return logits(load_model(locate(place)))


def test_only_adapters_are_kept_and_it_resumes(places: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = places
    stored = _stored(tuned)
    assert stored and all(".lora_" in name for name in stored)
    assert locate(tuned).meta["base"]["digest"] == locate(base).digest
    # a run that was stopped half-way ends with the same bits, its base found where it was and where it is now
    half = tmp_path / "half"
    shutil.copytree(tuned, half, ignore=shutil.ignore_patterns("step-0000004", "latest*"))
    resume = ["finetune", *RUN, *LORA, "--load", str(base), *SAVE, str(half), "--resume", "auto", "--steps", "4"]
    assert main(resume) == 0
    assert _stored(half) == stored


def test_merged_into_its_base(places: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = places
    with_adapters, without = of_run(tuned), of_run(base)
    assert float((with_adapters - without).abs().max()) > 1e-2
    folder, back = tmp_path / "merged", tmp_path / "back"
    assert main(["convert-llama", "--load-dir", str(tuned), "--save-dir", str(folder), "--to", "hf"]) == 0
    assert main(["convert-llama", "--load-dir", str(folder), "--save-dir", str(back)]) == 0
    torch.testing.assert_close(of_run(back), with_adapters, rtol=1e-5, atol=1e-5)


def test_exports_are_read_back(places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Merged weights in other forms, which have no place for the adapters' moments, and adapters in peft's."""
    base, tuned = places

    def verified(verb: str, load: Path, save: str, *flags: str) -> None:
        assert main([verb, "--load-dir", str(load), "--save-dir", str(tmp_path / save), *flags, "--verify"]) == 0
        assert "read back: all" in capsys.readouterr().out

    verified("reshard", tuned, "megatron", "--saver", "megatron")
    verified("reshard", tmp_path / "megatron", "back")
    torch.testing.assert_close(of_run(tmp_path / "back"), of_run(tuned), rtol=1e-5, atol=1e-5)
    if base.parent.name.startswith("llama"):
        verified("convert-llama", tuned, "meta", "--to", "meta")
    verified("convert-llama", tuned, "peft", "--to", "peft", "--base", str(base))
    verified("convert-llama", tmp_path / "peft", "again", "--base", str(base))


def test_both_moved_elsewhere(tmp_path: Path) -> None:
    """As copied from a cluster: the base's path is no more, but it lies to the adapters as it did."""
    runs, copies = tmp_path / "cluster" / "runs", tmp_path / "laptop"
    line = ["pretrain", *FAMILIES["llama"], *SHAPE, *RUN, "--steps", "2", *SAVE, str(runs / "base")]
    assert main(line) == 0
    assert (
        main(["finetune", *RUN, *LORA, "--load", str(runs / "base"), *SAVE, str(runs / "tuned"), "--steps", "2"]) == 0
    )
    wanted = of_run(runs / "tuned")
    shutil.move(runs.parent, copies)
    assert torch.equal(of_run(copies / "runs" / "tuned"), wanted)
    # what lies there under its name is not taken for it
    step = copies / "runs" / "base" / "step-0000002"
    shutil.rmtree(step)
    shutil.copytree(copies / "runs" / "tuned" / step.name, step)
    with pytest.raises(CheckpointError, match=r"holds adapters of .*/cluster/runs/base/step-0000002"):
        of_run(copies / "runs" / "tuned")


def test_on_others_weights_where_they_lie(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = places
    cluster, laptop = tmp_path / "cluster", tmp_path / "laptop"
    folder, over, half = cluster / "hf", cluster / "over", tmp_path / "half"
    assert main(["convert-llama", "--load-dir", str(base), "--save-dir", str(folder)]) == 0
    tune = ["finetune", *RUN, *LORA, "--load"]
    assert main([*tune, str(folder), *SAVE, str(over), "--steps", "4"]) == 0
    assert _stored(over) == _stored(tuned)
    assert torch.equal(of_run(over), of_run(tuned))
    assert main([*tune, str(folder), *SAVE, str(folder), "--resume", "auto", "--steps", "4"]) == 2
    assert f"{folder}: holds a Hugging Face folder, so that no run is saved there" in capsys.readouterr().err
    # the same weights in another form are that base, and so is the folder with more files in it
    (folder / "notes.txt").write_text("mine")
    shutil.copytree(over, half, ignore=shutil.ignore_patterns("step-0000004", "latest*"))
    for place, steps in ((base, "4"), (folder, "6")):
        assert main([*tune, str(place), *SAVE, str(half), "--resume", "auto", "--steps", steps]) == 0
    assert _stored(half) == _stored(tuned)
    # peft's form of it, and back over the same folder
    adapter, back = tmp_path / "adapter", tmp_path / "back"
    to_peft(over, adapter, folder)
    assert main(["convert-llama", "--load-dir", str(adapter), "--save-dir", str(back), "--base", str(folder)]) == 0
    assert torch.equal(of_run(back), of_run(tuned))
    # both moved, another model in its old place; read through a link; then the last row of the vocabulary changes
    shutil.move(cluster, laptop)
    shutil.copytree(laptop / "hf", folder)
    _with_other_words(folder)
    assert torch.equal(of_run(laptop / "over"), of_run(tuned))
    (tmp_path / "link").symlink_to(laptop / "over")
    assert torch.equal(of_run(tmp_path / "link"), of_run(tuned))
    _with_other_words(laptop / "hf")
    with pytest.raises(
        CheckpointError, match=r"holds adapters of .*/hf: is not it \(digest of its numbers: .*; must be "
    ):
        of_run(laptop / "over")


def _with_other_words(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "wte.weight", "transformer.wte.weight"):
        if name in weights:
            weights[name][-1] += 1
    save_file(weights, folder / "model.safetensors")


def _stored(run: Path) -> dict[str, bytes]:
    found = load_file(run / "step-0000004" / "rank-00000.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def test_cut_for_other_ranks(places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut"
    assert main(["reshard", "--load-dir", str(places[1]), "--save-dir", str(cut), "--tp", "2", "--pp", "2"]) == 0
    assert torch.equal(of_run(cut), of_run(places[1]))
    capsys.readouterr()
    assert main(["checkpoint", "show", str(cut), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "lora_A" in said and f"adapters of: {places[0] / 'step-0000002'}\n" in said


def to_peft(tuned: Path, folder: Path, base: Path) -> None:
    command = ["convert-llama", "--load-dir", str(tuned), "--save-dir", str(folder), "--to", "peft"]
    assert main([*command, "--base", str(base)]) == 0


def test_peft_form_and_back(places: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = places
    folder, back = tmp_path / "adapter", tmp_path / "back"
    to_peft(tuned, folder, base)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    read = ["convert-llama", "--load-dir", str(folder), "--save-dir", str(back), "--base", str(base)]
    assert main(read) == 0
    assert torch.equal(of_run(back), of_run(tuned))


def test_an_adapter_of_peft_speaks_with_the_tokenizer_of_its_base(tmp_path: Path) -> None:
    base, tuned, folder, back = (tmp_path / name for name in ("base", "tuned", "adapter", "back"))
    words = ["--tokenizer", "NullTokenizer", "--vocab-size", "100"]
    assert main(["pretrain", *FAMILIES["llama"], *SHAPE, *RUN, *words, "--steps", "2", *SAVE, str(base)]) == 0
    assert main(["finetune", *RUN, *LORA, "--load", str(base), *SAVE, str(tuned), "--steps", "2"]) == 0
    to_peft(tuned, folder, base)
    assert main(["convert-llama", "--load-dir", str(folder), "--save-dir", str(back), "--base", str(base)]) == 0
    assert open_model(back).tokenizer().fingerprint() == open_model(base).tokenizer().fingerprint()


def test_peft_computes_the_same(places: tuple[Path, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is absent: pip install '.[peft]' in a clone")
    transformers = pytest.importorskip("transformers")
    base, tuned = places
    folder, adapter, theirs, back = (tmp_path / name for name in ("hf", "adapter", "theirs", "back"))
    assert main(["convert-llama", "--load-dir", str(base), "--save-dir", str(folder)]) == 0
    to_peft(tuned, adapter, folder)
    ids = torch.arange(24).view(3, 8) * 4
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(whole, str(adapter)).eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, of_run(tuned), rtol=1e-4, atol=1e-4)
    # and one that peft made
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gpt = whole.config.model_type == "gpt2"
    targets = ["c_attn", "c_fc", "mlp.c_proj"] if gpt else ["q_proj", "v_proj", "gate_proj", "down_proj"]
    options = peft.LoraConfig(r=5, lora_alpha=20, target_modules=targets, fan_in_fan_out=gpt, init_lora_weights=False)
    made = peft.get_peft_model(whole, options).eval()
    made.save_pretrained(theirs)
    assert main(["convert-llama", "--load-dir", str(theirs), "--save-dir", str(back), "--base", str(base)]) == 0
    with torch.no_grad():
        torch.testing.assert_close(of_run(back), made(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained where ranks hold other experts, resumed, merged, in peft's form, and served without their run."""
    base, tuned, half = (tmp_path / name for name in ("base", "tuned", "half"))
    line = ["pretrain", *FAMILIES["llama"], *MIXTURE, *SHAPE, *RUN, "--steps", "2", *SAVE, str(base)]
    assert main(line) == 0
    tune = ["finetune", *RUN, *LORA, "--nproc", "2", "--ep", "2", "--load", str(base), *SAVE]
    assert main([*tune, str(tuned), "--steps", "4"]) == 0
    shutil.copytree(tuned, half, ignore=shutil.ignore_patterns("step-0000004", "latest*"))
    assert main([*tune, str(half), "--resume", "auto", "--steps", "4"]) == 0
    experts = [name for name in locate(tuned).tensors if name.startswith("weights/") and ".experts." in name]
    assert len(experts) == 2 * 4 * 3 * 2 and not list(diff(locate(half), locate(tuned)))
    wanted, folder, adapter = of_run(tuned), tmp_path / "merged", tmp_path / "adapter"
    assert float((wanted - of_run(base)).abs().max()) > 1e-2
    assert main(["convert-llama", "--load-dir", str(tuned), "--save-dir", str(folder), "--to", "hf"]) == 0
    assert main(["convert-llama", "--load-dir", str(folder), "--save-dir", str(tmp_path / "whole")]) == 0
    torch.testing.assert_close(of_run(tmp_path / "whole"), wanted, rtol=2e-5, atol=2e-5)
    _peft_of_experts(base, tuned, adapter, wanted)
    capsys.readouterr()
    words = ["generate", "--load", str(base), "--device", "cpu", "--adapter", f"it={adapter}", "--prompt", "1 2"]
    assert main(words) == 2 and "is of an expert; serve the run itself" in capsys.readouterr().err
    dropping = ["finetune", *RUN, *LORA, "--load", str(base), "--lora-dropout", "0.1", *SAVE, str(tmp_path / "no")]
    assert main(dropping) == 2 and "--lora-dropout 0.1: must be 0 where experts have" in capsys.readouterr().err


def test_what_peft_does_not_load_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """peft takes the linears of a shared expert for those of experts, which transformers 5 stacks."""
    base, tuned, folder, adapter = (tmp_path / name for name in ("base", "tuned", "hf", "adapter"))
    shared = ["--shared-ffn", "16", "--shared-gate"]
    assert (
        main(["pretrain", *FAMILIES["llama"], *MIXTURE, *shared, *SHAPE, *RUN, "--steps", "2", *SAVE, str(base)]) == 0
    )
    assert main(["finetune", *RUN, *LORA, "--load", str(base), *SAVE, str(tuned), "--steps", "4"]) == 0
    assert main(["convert-llama", "--load-dir", str(base), "--save-dir", str(folder)]) == 0
    capsys.readouterr()
    to_peft(tuned, adapter, folder)
    assert "6 adapters outside the experts, such as that of model.layers.0.mlp.shared_" in capsys.readouterr().err
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(whole, str(adapter)).eval()
    with torch.no_grad():
        different = (opened(torch.arange(24).view(3, 8) * 4).logits - of_run(tuned)).abs().max()
    assert different > 1e-3  # else the report is no longer needed


def _peft_of_experts(base: Path, tuned: Path, adapter: Path, wanted: torch.Tensor) -> None:
    """There and back; and what peft makes of it over transformers, which stacks experts."""
    folder, back = base.parent / "hf", base.parent / "back"
    assert main(["convert-llama", "--load-dir", str(base), "--save-dir", str(folder)]) == 0
    to_peft(tuned, adapter, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert {"experts.w1", "w1"} & set(config["target_modules"]) and not config["rank_pattern"]
    read = ["convert-llama", "--load-dir", str(adapter), "--save-dir", str(back), "--base", str(base)]
    assert main(read) == 0 and torch.equal(of_run(back), wanted)
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(whole, str(adapter)).eval()
    with torch.no_grad():
        ids = torch.arange(24).view(3, 8) * 4
        torch.testing.assert_close(opened(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("places", ["llama"], indirect=True)
def test_what_peft_would_compute_otherwise_is_refused(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A linear's own scale, and beginnings that change the base; not the same scale spelt out."""
    to_peft(places[1], tmp_path / "adapter", places[0])
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    read = ["convert-llama", "--load-dir", str(file.parent), "--base", str(places[0]), "--save-dir"]
    for change, words in (
        ({"alpha_pattern": {"q_proj": 24}}, "q_proj has a scale of 8, others 4"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"use_mora": True}, "use_mora True: is not a known key"),
        ({"velora_config": {"rank": 1}}, "velora_config {'rank': 1} (valid: None)"),
    ):
        file.write_text(json.dumps(config | change))
        assert main([*read, str(tmp_path / "x")]) == 2
        assert words in capsys.readouterr().err
    same = {"alpha_pattern": {"q_proj": 12}, "init_lora_weights": "gaussian", "use_mora": False}
    file.write_text(json.dumps(config | same | {"exclude_modules": ["embed_tokens"]}))
    assert main([*read, str(tmp_path / "back")]) == 0


def test_other_bases_are_refused(places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = places
    other, folder = tmp_path / "other", tmp_path / "adapter"
    shape = [*SHAPE, "--hidden", "16", *FAMILIES["llama" if base.parent.name.startswith("llama") else "gpt"]]
    assert main(["pretrain", *shape, *RUN, "--steps", "2", *SAVE, str(other)]) == 0
    to_peft(tuned, folder, base)
    capsys.readouterr()

    def said(*command: str) -> str:
        assert main(list(command)) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    save = ("--save-dir", str(tmp_path / "x"))
    assert "is not an adapter of --base" in said(
        "convert-llama", "--load-dir", str(folder), *save, "--base", str(other)
    )
    assert "--base is missing" in said("convert-llama", "--load-dir", str(folder), *save)
    assert "holds no adapters" in said("convert-llama", "--load-dir", str(base), *save, "--to", "peft")
    resumed = ["finetune", *RUN, *LORA, *SAVE, str(tuned), "--resume", "auto", "--steps", "6"]
    assert f"--load {other}: is not it (sha256 of its manifest: " in said(*resumed, "--load", str(other))
    unknown = said("finetune", *RUN, *LORA, "--load", str(base), "--steps", "1", "--lora-targets", "q_porj")
    assert unknown.startswith("mega: --lora-targets q_porj: is not a linear of the blocks; valid: q_proj, k_proj")


@pytest.mark.parametrize("places", ["llama"], indirect=True)
def test_adapters_do_not_take_the_place_of_their_base(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    shutil.copytree(places[0], here)
    whole = [*FAMILIES["llama"], *SHAPE, *RUN, *LORA, "--steps", "4", *SAVE, str(here)]
    for command in (["pretrain", *whole, "--resume", "auto"], ["finetune", *whole, "--load", str(here)]):
        assert main(command) == 2
        assert f"--lora-rank 3: {here / 'step-0000002'} holds a whole model; adapters begin" in capsys.readouterr().err
    assert locate(here).digest == locate(places[0]).digest


@pytest.mark.parametrize("more", [["--resume", "auto"], []], ids=["resume", "mock"])
def test_adapters_of_random_weights_are_not_saved(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["pretrain", *SHAPE, *RUN, *LORA, "--steps", "1", *SAVE, str(tmp_path / "new"), *more]
    assert main(line) == 2
    assert "--lora-rank 3: needs --load, the weights that adapters are added to" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("places", ["llama"], indirect=True)
def test_a_chain_of_finetunings_has_one_base(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, tuned = places
    chain = ["finetune", *RUN, *LORA, "--load", str(tuned), *SAVE, str(tmp_path), "--resume", "auto", "--steps", "4"]
    assert main([*chain, "--exit-interval", "2"]) == 0
    assert locate(tmp_path).meta["base"] == locate(tuned).meta["base"]
    assert main(chain) == 0
    assert locate(tmp_path).meta["progress"]["step"] == 4
