"""What a conversion may read and where it may write: nothing misread in silence, nobody's files touched."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.families.decoders import config_from_model, model_from_config
from mega.core.checkpoint.forms.families.gpt2 import gpt2
from mega.core.checkpoint.forms.families.llama import llama
from mega.core.checkpoint.forms.megatron.arguments import arguments_of
from mega.core.checkpoint.forms.meta import params_from_model
from mega.core.checkpoint.own.folders import LOCK, filled_folder
from mega.core.checkpoint.own.inspect import clean
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.reshard import reshard
from mega.core.checkpoint.own.store import CheckpointStore, Piece, locate
from mega.core.config.sections import ModelConfig
from mega.core.files import url_of
from mega.core.training.saves.resume import sidecar_files
from tests.support import toy_layers
from tests.support.foreign_forms import LLAMA, hf_config, hf_writer, weights_of
from tests.support.hugging_face import hf_folder
from tests.support.nfs import locks_of_nfs
from tests.support.runs import small_run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path / "hf"
    folder.mkdir()
    config = {**hf_config(LLAMA, "llama"), "bos_token_id": 3, "eos_token_id": 5, "dtype": "float32"}
    hf_writer(config)(folder, {"model.safetensors": weights_of(LLAMA)})
    return folder


@pytest.fixture
def run(source: Path) -> Path:
    """The same as a checkpoint of ours."""
    return convert(source, source.parent / "run").path.parent


def test_the_dtype_is_stored_by_its_name_on_the_command_line(run: Path) -> None:
    """A resumed run compares it with --dtype."""
    assert locate(run).meta["config"]["precision"] == {"dtype": "fp32"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "the same for all layers"),
        ({"rope_scaling": {"type": "wave"}, "rope_parameters": {"rope_type": "default"}}, "'wave'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_interpolation"),
        ({"rope_theta": -5.0}, "rope_base"),
        ({"rms_norm_eps": 0.0}, "norm_eps"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_means_another_model_is_refused(source: Path, values: dict[str, Any], words: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(CheckpointError, match=words):
        convert(source, source.parent / "x")
    assert not (source.parent / "x").exists()


DEMANDED = {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("family", "said", "positions", "window"),
    [
        ("mistral", {}, 9000, 4096),  # transformers' own default
        ("mistral", {"sliding_window": None}, 9000, None),
        ("mistral", {"sliding_window": 100}, 9000, 100),
        ("mistral", {"sliding_window": 9000}, 9000, None),
        ("qwen2", {"sliding_window": 100}, 9000, None),  # only where it is asked for
        ("qwen3", {"sliding_window": 100, "use_sliding_window": True}, 9000, None),  # from its 28th layer on
        ("qwen3", DEMANDED, 9000, 100),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 9000, 4096),  # in some layers
        ("llama", {"sliding_window": 100}, 9000, None),  # it has none
        ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 9000, 4096),
        ("qwen3", {**DEMANDED, "layer_types": ["full_attention"] * 2}, 9000, None),  # whatever max_window_layers says
        ("qwen3", {**DEMANDED, "layer_types": ["full_attention", "sliding_attention"]}, 9000, 100),
    ],
)
def test_windows_as_transformers_understands_them(
    family: str, said: dict[str, Any], positions: int, window: int | None
) -> None:
    config = {**hf_config(LLAMA, family), "max_position_embeddings": 9000, **said}
    model = model_from_config(config, "config.json")
    assert (model.positions, model.window) == (positions, window)
    again = model_from_config(config_from_model(model, "float32"), "config.json")
    assert (again.positions, again.window) == (positions, window)


def test_some_layers_have_a_window(tmp_path: Path) -> None:
    """And no position is lost for it. A type that is not known is refused, with those that are."""
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "max_position_embeddings": 64}
    source = hf_folder(tmp_path / "hf", "qwen2", **window)
    config = json.loads((source / "config.json").read_text())
    model = model_from_config(config, "config.json")
    assert (model.positions, model.window, model.window_layers) == (64, 16, (0, 1))
    for kind in ("bloom", None, ["llama"]):
        (source / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        with pytest.raises(CheckpointError, match=r"model_type .*valid: gpt2, llama, mistral, qwen2, qwen3, "):
            convert(source, tmp_path / "x")


def test_a_window_is_not_lost_on_the_way_to_a_form_without() -> None:
    model = model_from_config({**hf_config(LLAMA, "mistral"), "sliding_window": 4}, "config.json")
    for write in (params_from_model, partial(arguments_of, tp=1, pp=1)):
        with pytest.raises(CheckpointError, match="window"):
            write(model)


of_llama, of_gpt2 = (partial(form.config_from_model, dtype="float32") for form in (llama, gpt2))
of_megatron = partial(arguments_of, tp=1, pp=1)


@pytest.mark.parametrize(
    ("write", "family", "changes"),
    [
        (of_llama, "llama", {"norm_placement": "post"}),
        (params_from_model, "llama", {"norm_placement": "post"}),
        (of_gpt2, "gpt", {"position": "none"}),
        (of_megatron, "gpt", {"qkv_bias": False}),
    ],
)
def test_what_would_be_read_back_as_another_model_is_refused(
    write: Callable[[ModelConfig], object], family: str, changes: dict[str, Any]
) -> None:
    """Also an option that the form has never heard of."""
    model = small_run(family, kv_heads=8).model
    assert write(model)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=f"^{name} {value}: .* has only "):
        write(dataclasses.replace(model, **changes))


def test_layers_that_differ_have_no_place_in_forms_of_one_layer() -> None:
    """Each of these forms describes one layer, which all are."""
    toy_layers.register()
    try:
        model = small_run("gpt", family=toy_layers.NAME, layers=4, position="rope").model
        for write in (of_llama, of_gpt2, params_from_model, of_megatron):
            with pytest.raises(CheckpointError):
                write(model)
    finally:
        toy_layers.unregister()


def test_of_two_sets_of_weights_the_one_that_transformers_opens(source: Path) -> None:
    """An index from an earlier save beside the single file."""
    state = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, source / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, source.parent / "run")
    convert(source.parent / "run", source.parent / "back")
    back = load_file(source.parent / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json: an adapter"),
        (lambda folder: os.mkfifo(folder / "tokenizer.model"), "tokenizer.model: not a regular file"),
        (lambda folder: (folder / "tokenizer.json").mkdir(), "tokenizer.json: not a regular file"),
        (shutil.rmtree, "hf: no such file or directory"),
    ],
)
def test_other_things_in_the_folder(source: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(source)
    with pytest.raises(CheckpointError, match=words):
        convert(source, source.parent / "x")
    assert not (source.parent / "x").exists()


def test_a_layout_that_does_not_divide_is_told_at_once(source: Path) -> None:
    for tp, pp, words in ((10**9, 1, "--tp 1000000000"), (1, 3, "--layers 2: must be a multiple of --pp 3")):
        with pytest.raises(ValueError, match=words):
            convert(source, source.parent / "x", layout=Layout(tp, pp))


def test_a_folder_of_the_users_is_never_cleared(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "mine").write_text("work of a week")
    convert(run, tmp_path / "out")
    assert (tmp_path / "out.tmp" / "mine").exists()
    assert not list(tmp_path.glob("out.*.tmp"))


KILLED = """
import os, signal, sys
from pathlib import Path
from mega.core.checkpoint.own import folders

def fill(folder):
    (folder / "half").write_bytes(b"a" * 1000)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print(folder, flush=True)
    sys.stdin.readline()
    return 0

folders.filled_folder(Path(sys.argv[1]), fill, 1000)
"""


@pytest.mark.parametrize("sweeper", ["clean", "clean on NFS", "export", "tree"])
def test_what_a_killed_export_left_goes_and_nothing_else(
    source: Path,
    run: Path,
    tmp_path: Path,
    sweeper: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`clean`, or the next export to the same place, of either kind; a living writer's folder stays."""
    if "NFS" in sweeper:
        locks_of_nfs(monkeypatch)
    out, writer = tmp_path / "out", [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    assert subprocess.run([*writer, "killed"]).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("out.*.tmp")
    names = ("out.tmp", "out.0123456789AB.tmp", "out.0123456789ad.tmp", "other.0123456789ab.tmp")
    mine = [tmp_path / name for name in names]
    for folder in mine:
        folder.mkdir()
        (folder / LOCK).touch()
    (tmp_path / "out.0123456789ad.tmp" / LOCK).unlink()
    (tmp_path / "out.0123456789ab.tmp").write_text("a file")
    (tmp_path / "out.0123456789ac.tmp").symlink_to(run)
    with subprocess.Popen([*writer, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None
        filled = Path(living.stdout.readline().strip())
        assert filled.is_dir() and not left.exists(), "the next writer of the name has swept"
        left.mkdir()
        (left / LOCK).touch()
        if "clean" in sweeper:
            assert main(["checkpoint", "clean", "--dry-run", str(out)]) == 0
            assert capsys.readouterr().out == f"would remove {left}\n" and left.exists()
            assert main(["checkpoint", "clean", str(out)]) == 0
            assert main(["checkpoint", "clean", str(out)]) == 2
        elif sweeper == "export":
            convert(run, out)
        else:
            convert(source, out, "megatron", Layout())
        assert not left.exists() and filled.is_dir() and all(folder.is_dir() for folder in mine)
        assert len(list(tmp_path.glob("*.tmp"))) == 7
        living.communicate("\n")
        assert living.returncode == (0 if "clean" in sweeper else 1), "the other was first"
    assert not filled.exists() and out.is_dir() and not (out / LOCK).exists()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks the kernel which files are open")
def test_nothing_in_a_folder_is_open_when_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS would keep it under another name, and its folder."""
    remove, gone = shutil.rmtree, []

    def rmtree(folder: Path, **more: Any) -> None:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        gone.append([path for path in map(os.path.realpath, links) if str(folder) in path])
        remove(folder, **more)

    def fill(folder: Path) -> int:
        raise ValueError

    left = tmp_path / "out.0123456789ab.tmp"
    left.mkdir()
    (left / LOCK).touch()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(ValueError):
        filled_folder(tmp_path / "out", fill, 0)
    assert gone == [[], []] and not list(tmp_path.iterdir())


def test_here_and_links_to_empty_folders_are_filled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert(run, tmp_path / "link")
    assert (tmp_path / "real" / "model.safetensors").exists() and (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(run, Path("."))
    assert (tmp_path / "here" / "model.safetensors").exists()


@pytest.mark.parametrize("to", ["hf", "meta", "megatron"])
def test_a_full_disk_is_told_in_one_line(
    run: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    verb = ["reshard", "--saver", to] if to == "megatron" else ["convert-llama", "--to", to]
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        assert main([*verb, "--load-dir", str(run), "--save-dir", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"out: was not written: File too large \(\d{4,} bytes to write\); \d+ bytes are free$", line), line
    assert not list(tmp_path.glob("out*"))


def test_exports_do_not_go_to_urls(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="s3://bucket/model: only mega checkpoints"):
        convert(run, Path("s3://bucket/model"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_at_a_url_is_called_by_it(source: Path) -> None:
    pytest.importorskip("fsspec")
    made = convert(source, Path(f"memory://{source.parent.name}/run")).path
    assert url_of(made) == f"memory://{source.parent.name}/run/step-0000000"
    assert locate(made).tensors


def test_no_checkpoint_is_replaced_or_hidden(source: Path, run: Path) -> None:
    """The step that is written, or a newer one, is there already."""
    for step in (0, 7):
        store = CheckpointStore(source.parent / f"other{step}")
        store.save(step, [Piece("w", (2,), (0,), torch.ones(2))], {})
        with pytest.raises(CheckpointError, match=f"step {step} is there already"):
            convert(source, store.directory)
        with pytest.raises(CheckpointError, match=f"step {step} is there already"):
            reshard(run, store.directory, Layout(1, 1))
        assert store.steps() == [step] and list(store.open(step).tensors) == ["w"]


@pytest.mark.parametrize("verb", ["convert-llama", "reshard"])
def test_no_checkpoint_goes_beside_the_weights_of_others(
    source: Path, run: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next conversion of that folder would take the other model in silence."""
    theirs = shutil.copytree(source, tmp_path / "theirs")
    before = sorted(theirs.rglob("*"))
    load = source if verb == "convert-llama" else run
    assert main([verb, "--load-dir", str(load), "--save-dir", str(theirs)]) == 2
    assert f"--save-dir {theirs}: holds a Hugging Face folder" in capsys.readouterr().err
    assert sorted(theirs.rglob("*")) == before
    shutil.copytree(run / "step-0000000", theirs / "step-0000000")  # an earlier version, or a hand, put it there
    assert main(["reshard", "--load-dir", str(theirs), "--save-dir", str(tmp_path / "out")]) == 2
    assert "holds a Hugging Face folder and mega checkpoints (steps 0)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("of the user's, and no weights")
    assert main(["reshard", "--load-dir", str(theirs / "step-0000000"), "--save-dir", str(tmp_path / "out")]) == 0


def test_of_two_at_once_in_one_directory_one_is_refused(source: Path) -> None:
    target = source.parent / "run"
    (target / "step-0000000.tmp").mkdir(parents=True)  # of the first
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing into"):
            convert(source, target)
        with pytest.raises(CheckpointError, match="another process is writing into"):
            clean(target, None, None, None, False, print)
        assert (target / "step-0000000.tmp").is_dir()
    finally:
        os.close(descriptor)
    assert convert(source, target).tensors


def test_an_older_step_is_never_taken_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path / "run")
    for step in (1, 2):
        store.save(step, [Piece("w", (2,), (0,), torch.ones(2))], {})
    assert locate(store.directory).step == 2 and not capsys.readouterr().err
    (store.path(2) / "manifest.json").unlink()
    assert locate(store.directory).step == 1
    assert "step 2 is passed over" in capsys.readouterr().err


def test_a_damaged_companion_is_not_copied_on(run: Path, tmp_path: Path) -> None:
    config = run / "step-0000000" / "config.json"
    config.write_text(config.read_text().replace("5", "6"))
    for write in (
        lambda: reshard(run, tmp_path / "out", Layout(1, 1)),
        lambda: convert(run, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=r"config\.json: not the bytes that were saved"):
            write()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["gone", "run/step-0000000", "hf"])
def test_clean_wants_a_run(run: Path, tmp_path: Path, where: str) -> None:
    assert main(["checkpoint", "clean", str(tmp_path / where)]) == 2


def test_verify_of_a_step_that_carries_a_config(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    step = str(run / "step-0000000")
    assert main(["convert-llama", "--load-dir", step, "--save-dir", str(tmp_path / "out"), "--verify"]) == 0


def test_training_takes_along_what_came_with_the_weights(source: Path, tmp_path: Path) -> None:
    (source / "vocab.json").write_text("{}")
    run = convert(source, tmp_path / "run").path
    line = "--use-checkpoint-config --finetune --mock-data --steps 1 --lr 1e-3 --micro-batch 1 --global-batch 1"
    more = "--seq-length 8 --save-interval 1 --device cpu --eval-iters 0"
    places = ["--load", str(run), "--save", str(tmp_path / "on")]
    assert main(["pretrain", *places, *line.split(), *more.split()]) == 0
    assert {"config.json", "vocab.json", "run.toml"} <= locate(tmp_path / "on").attachments.keys()


def test_what_came_with_the_weights_goes_on_with_them(source: Path, run: Path, tmp_path: Path) -> None:
    """A run from converted weights saves; its export has their tokens and says the dtype that it now has."""
    origin = locate(run)
    carried = sidecar_files(origin, None)
    assert sorted(carried) == ["config.json"] and json.loads(carried["config.json"])["eos_token_id"] == 5
    pieces = [
        Piece(name, whole, (0,) * len(whole), torch.zeros(whole, dtype=torch.bfloat16))
        for name, (whole, _) in origin.tensors.items()
    ]
    for number, dropout in enumerate((0.0, 0.1)):  # the same model, and one whose config.json is written anew
        meta = {"config": {"model": {**origin.meta["config"]["model"], "attention_dropout": dropout}}}
        CheckpointStore(tmp_path / f"trained{number}").save(2, pieces, meta, attachments=carried)
        convert(tmp_path / f"trained{number}", tmp_path / f"out{number}")
        config = json.loads((tmp_path / f"out{number}" / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (3, 5)
        assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
