"""GGUF both ways: weights bit for bit, tokenizer and template; blocks of few bits in; what has no place there.

llama.cpp itself judges files in tests/battery/gguf_files.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mega import cli
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.gguf.vocabulary import vocabulary_of
from mega.core.checkpoint.forms.open import open_weights
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.inference.loading.load import chat_template, load_tokenizer, special_tokens
from tests.support.gguf_models import TEXTS, folder_of

gguf = pytest.importorskip("gguf")


def tensors(weights: StoredWeights) -> dict[str, torch.Tensor]:
    pieces = [
        Piece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype))
        for name, (shape, dtype) in weights.tensors.items()
    ]
    weights.read(pieces)
    return {piece.key: piece.tensor for piece in pieces}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def own(folders: Path, case: str) -> Path:
    made = folders / case / "own"
    if not made.exists():
        convert(folder_of(folders / case / "hf", case), made, "mega")
    return made


@pytest.mark.parametrize("case", ["llama2-sentencepiece", "llama3.2-llama-bpe", "tied-smollm", "qwen2-qwen2"])
def test_what_is_written_is_read_as_the_same_model(folders: Path, case: str) -> None:
    """Weights, every option of the model, tokens of odd texts, the template."""
    checkpoint, to = open_weights(str(own(folders, case))), folders / case / "f32"
    report = convert(own(folders, case), to, "gguf", tokens=special_tokens)
    assert not report.losses and [path.name for path in to.iterdir()] == ["model.gguf"]
    read = open_weights(str(to / "model.gguf"))
    assert model_of(read.meta, "") == model_of(checkpoint.meta, "")
    expected = tensors(checkpoint)
    assert expected.keys() == (found := tensors(read)).keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    one, other = load_tokenizer(checkpoint), load_tokenizer(read)
    for text in TEXTS:
        ids = one.encode(text)
        assert ids == other.encode(text)
        words = ids[1:] if ids[0] == one.bos else ids  # as text, the first token of SentencePiece's is nothing
        assert one.decode(words) == other.decode(words)
    assert other.eod == 2 and chat_template(read) == chat_template(checkpoint)
    again = convert(to, folders / case / "again", "mega")  # the folder with the file is the file
    assert again.elements == report.elements


def test_types_out(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = "qwen3-qwen2"
    line = ["convert-llama", "--load-dir", str(own(folders, case)), "--to", "gguf", "--save-dir"]
    expected = tensors(open_weights(str(own(folders, case))))
    for outtype, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", torch.float32)):
        to = folders / case / outtype
        assert cli.main([*line, str(to), "--outtype", outtype]) == 0
        found = tensors(open_weights(str(to / "model.gguf")))
        for name, tensor in expected.items():
            bound = 1 / 127 if outtype == "q8_0" else torch.finfo(dtype).eps
            assert found[name].dtype == (dtype if tensor.dim() > 1 else torch.float32)
            assert (found[name].float() - tensor).abs().max() <= bound * tensor.abs().max()
    capsys.readouterr()
    assert cli.main([*line[:-2], "hf", "--save-dir", str(folders / "x"), "--outtype", "f16"]) == 2
    assert "only GGUF files have a type of their own" in capsys.readouterr().err


def test_blocks_of_few_bits_are_read(folders: Path) -> None:
    """Q4_K and Q6_K, by rectangles, as the package itself reads them whole."""
    from mega.core.checkpoint.forms.gguf.opening import GgufSource
    from mega.core.checkpoint.own.pieces import Box

    path, draw = folders / "blocks.gguf", np.random.RandomState(0)
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"Q4_K": 144, "Q6_K": 210, "Q8_0": 8 * 34}
    for name, size in sizes.items():
        data = draw.randint(0, 255, (6, 2 * size)).astype(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    source = GgufSource(path, reader)
    assert source.in_blocks == sorted(sizes)
    for tensor in reader.tensors:
        assert source.tensors[tensor.name] == ((6, 512), torch.float32)
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = source.read(tensor.name, Box((1, 37), (3, 300)))
        assert np.array_equal(part.numpy(), whole[1:4, 37:337], equal_nan=True)


def test_what_has_no_place_there_is_named(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mega.core.checkpoint.forms.families.decoders import model_from_config
    from mega.core.checkpoint.forms.gguf.families import metadata_of_model, model_of_metadata

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 99}
    gpt = model_from_config({"model_type": "gpt2", **sizes}, "config.json")
    with pytest.raises(CheckpointError, match="is written of llama, mistral, qwen2, qwen3"):
        metadata_of_model(gpt)
    model = model_of(open_weights(str(own(folders, "qwen2-qwen2"))).meta, "")
    _, metadata = metadata_of_model(model)
    shapes = {"token_embd.weight": (model.vocab, model.hidden), "output.weight": (model.vocab, model.hidden)}
    for change, said in (
        ({"general.architecture": "mamba"}, "'mamba' .valid: llama, qwen2, qwen3"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count 8: is not known here"),
        ({"qwen2.rope.scaling.type": "longrope"}, "longrope"),
    ):
        with pytest.raises(CheckpointError, match=said):
            model_of_metadata({**metadata, **change}, shapes, None, "a.gguf")
    with pytest.raises(CheckpointError, match="has no name of llama"):
        vocabulary_of({"model": {"type": "BPE", "vocab": {"a": 0}}, "pre_tokenizer": {"type": "Whitespace"}}, {}, 9)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 30)
    assert cli.main(["convert-llama", "--load-dir", str(broken), "--save-dir", str(tmp_path / "x")]) == 2
    assert "not a GGUF file that is read" in capsys.readouterr().err
