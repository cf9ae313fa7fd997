"""Every flag of the conversions against every pair of kinds: it means something there, or it is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from mega.cli import main
from mega.command_line.options import load
from mega.commands import convert_llama
from mega.core.checkpoint.forms.form import RULES, check_flags, writer_of
from mega.core.checkpoint.forms.options import ConvertOptions
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.options import Layout
from tests.golden.make import HERE

SOURCES = ["mega", "hf", "meta", "llama2.c", "fairseq", "megatron", "torch_dist"]
PLACES = {kind: HERE / kind / "model.bin" if kind == "llama2.c" else HERE / kind for kind in SOURCES}
MEANT = {
    "--tp 2": lambda source, target: target in ("mega", "megatron", "mcore"),
    "--pp 2": lambda source, target: target in ("mega", "megatron", "mcore"),
    "--chunks 2": lambda source, target: target == "mega",
    "--stage-layers 2 0": lambda source, target: target == "mega",
    "--parts 2": lambda source, target: target == "meta",
    "--true-vocab-size 55": lambda source, target: source in ("megatron", "torch_dist"),
    "--vocab-file FILE": lambda source, target: source in ("megatron", "torch_dist"),
    "--num-attention-heads 4": lambda source, target: source == "torch_dist",
    "--use-distributed-optimizer": lambda source, target: target in ("megatron", "mcore"),
    "--tokenizer-type NullTokenizer": lambda source, target: target in ("megatron", "mcore"),
    "--no-load-optim": lambda source, target: source in ("megatron", "torch_dist") or target in ("megatron", "mcore"),
}
EVERYWHERE = {"load_dir", "save_dir", "to", "saver", "verify"}
NOT_NEEDED = {"loader", "model_type", "megatron_path", "tokenizer_model", "max_queue_size", "checking"}
"""Said to be accepted only, in the help."""


def lines(flag: str) -> list[tuple[str, str, str]]:
    """(verb, source, target) of every conversion that there is, of the verbs that have the flag."""
    into = [("convert-llama", kind, "mega") for kind in SOURCES[1:5]]
    out = [("convert-llama", "mega", kind) for kind in ("hf", "meta")]
    anew = [("reshard", *pair) for pair in product(SOURCES, ("mega", "megatron", "mcore"))]
    convert = flag.startswith("--parts")
    other = flag.startswith(("--true", "--vocab", "--num", "--no-load", "--use", "--tok"))
    return (into + out if not other else []) + (anew if not convert else [])


@pytest.mark.parametrize(("flag", "meant"), MEANT.items())
def test_a_flag_means_something_or_is_refused(
    tmp_path: Path, flag: str, meant: Callable[[str, str], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({str(piece): piece for piece in range(55)}))
    refused = 0
    for verb, source, target in lines(flag):
        to = ["--to" if verb == "convert-llama" else "--saver", target]
        places = ["--load-dir", str(PLACES[source]), "--save-dir", str(tmp_path / "out")]
        name, *value = flag.replace("FILE", str(tmp_path / "vocab.json")).split()
        if meant(source, target):
            check_flags(form_at(PLACES[source]), writer_of(target), {name: tuple(value)})
            continue
        assert main([verb, *places, *to, name, *value]) == 2, (verb, source, target)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mega: {' '.join([name, *value])}: means nothing from ") and "leave it out" in line
        assert not (tmp_path / "out").exists()
        refused += 1
    assert refused


@pytest.mark.parametrize("verb", ["convert-llama", "reshard"])
def test_every_flag_is_decided(verb: str) -> None:
    upcycling = {"upcycle", "upcycle_granularity", "upcycle_chosen"}  # its own rules: test_upcycle.py
    names = load(verb).entries.keys() - EVERYWHERE - NOT_NEEDED - upcycling
    spelled = [load(verb).entries[name] for name in names]
    assert spelled
    assert not [each.name for each in spelled if not RULES.keys() & {each.flag, each.off, *each.option.megatron}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("convert-llama --load-dir HERE/hf --tp 0", "--tp 0: must be 1 or more"),
        ("reshard --load-dir HERE/mega --pp -1", "--pp -1: must be 1 or more"),
        ("convert-llama --load-dir HERE/hf --parts 0", "--parts 0: must be 1 or more"),
        ("reshard --load-dir HERE/megatron --true-vocab-size 0", "--true-vocab-size 0: must be 1 or more"),
        ("reshard --load-dir HERE/megatron --true-vocab-size 54 --vocab-file FILE", "vocab.json has 55 pieces"),
        ("reshard --load-dir HERE/torch_dist --num-attention-heads 3", "common.pt says 4"),
        ("reshard --load-dir HERE/mega --saver megatron --pp 3", "--pp 3: must divide layers 2 for Megatron-LM"),
        ("reshard --load-dir HERE/mega --saver mcore --tp 3", "--tp 3: must divide heads 4"),
        ("checkpoint show HERE/mega --tensors --meta", "--tensors: --meta prints the plain state alone"),
        ("convert-llama --load-dir HERE/megatron", "is a tree of Megatron-LM; `mega reshard` reads it"),
        ("convert-llama --load-dir HERE/torch_dist", "is a torch_dist folder of Megatron-LM; `mega reshard` reads it"),
        ("convert-llama --load-dir HERE/hf --to meta", "is a Hugging Face folder; exactly one of the two must be mega"),
        (
            "convert-llama --load-dir HERE/mega --to mega",
            "is a mega checkpoint; exactly one of the two must be mega",
        ),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({str(piece): piece for piece in range(55)}))
    line = line.replace("HERE", str(HERE)).replace("FILE", str(tmp_path / "vocab.json"))
    save = ["--save-dir", str(tmp_path / "out")] if "--load-dir" in line else []
    assert main([*line.split(), *save]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line", ["convert-llama --load-dir HERE/hf", "convert-llama --load-dir HERE/mega", "reshard --load-dir HERE/mega"]
)
def test_no_folder_below_a_file(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        assert main([*line.replace("HERE", str(HERE)).split(), "--save-dir", str(place)]) == 2
        told = f"mega: --save-dir {place}: {file} is not a directory; name another place\n"
        assert capsys.readouterr().err == told


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("source", ["hf", "mega"])
def test_a_proof_that_cannot_run_is_refused_at_once(
    tmp_path: Path, source: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers is not there, or cannot be imported."""
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers") if broken else None)
    with pytest.raises(ValueError, match="--verify: needs transformers"):
        convert_llama.run(ConvertOptions(load_dir=HERE / source, save_dir=tmp_path / "out", verify=True), Layout())
    assert not (tmp_path / "out").exists()
