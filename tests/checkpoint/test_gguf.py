"""GGUF both ways: weights bit for bit, tokenizer and template; blocks of few bits in; what has no place there.

llama.cpp itself judges files in tests/battery/gguf_files.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from mega import cli
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.gguf.vocabulary import PREFIX, lost, tokenizer_files, vocabulary_of
from mega.core.checkpoint.forms.open import open_weights
from mega.core.checkpoint.forms.read_back import read_back
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.inference.loading.load import chat_template, load_tokenizer, special_tokens
from mega.core.untrusted import Json, below
from tests.support.gguf_models import TEXTS, folder_of
from tests.support.hugging_face import hf_folder

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")


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
@needs_gguf
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


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama2-sentencepiece", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama2-sentencepiece", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
        ("qwen2-qwen2", {}),
    ],
)
@needs_gguf
def test_tokens_and_settings_of_the_small_files_are_written(
    tmp_path: Path, case: str, config: dict[str, Json], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are next to a tokenizer.model or tokenizer.json, and are the only place of a chat model's later tokens."""
    folder = folder_of(tmp_path / "hf", case)
    first = json.loads((folder / "config.json").read_text())["vocab_size"] - 4
    (folder / "added_tokens.json").write_text(json.dumps({"<|eot|>": first, "<x>": first + 1}))
    older = folder / "tokenizer_config.json"
    known = json.loads(older.read_text()) if older.exists() else {}
    older.write_text(json.dumps({**known, **config, "additional_special_tokens": ["<|eot|>"]}))
    convert(folder, tmp_path / "own", "mega")
    convert(tmp_path / "own", tmp_path / "gguf", "gguf", tokens=special_tokens)
    one, other = (load_tokenizer(open_weights(str(tmp_path / name))) for name in ("own", "gguf"))
    assert one.special_tokens()["<|eot|>"] == other.special_tokens()["<|eot|>"] == first
    assert one.vocabulary_tokens()["<x>"] == other.vocabulary_tokens()["<x>"] == first + 1
    for text in ("Hello world", "a<x>", "東京"):
        assert one.encode(text) == other.encode(text), text


def test_rules_of_added_tokens_that_llama_cpp_lacks_are_told() -> None:
    tokens: list[Json] = [{"content": "<a>", "lstrip": True, "rstrip": True}, {"content": "<b>", "rstrip": False}]
    message = "llama.cpp does not let <a> strip spaces before them; <a> strip spaces after them, as the tokenizer does"
    assert lost({"added_tokens": tokens}) == message and lost({"added_tokens": tokens[1:]}) is None


@pytest.mark.parametrize("case", ["llama2-sentencepiece", "qwen2-qwen2"])
@needs_gguf
def test_settings_without_a_place_in_the_file_are_told(tmp_path: Path, case: str) -> None:
    folder = folder_of(tmp_path / "hf", case)
    small = folder / "tokenizer_config.json"
    known = json.loads(small.read_text()) if small.exists() else {"tokenizer_class": "LlamaTokenizer"}
    small.write_text(json.dumps({**known, "split_special_tokens": True}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "top_k": 20}))
    convert(folder, tmp_path / "own", "mega")
    losses = convert(tmp_path / "own", tmp_path / "gguf", "gguf", tokens=special_tokens).losses
    split, sampling = losses
    assert "lacks split_special_tokens of tokenizer_config.json" in split
    assert sampling == "the export has no place for settings of generation_config.json: temperature 0.6, top_k 20"


def test_a_folder_of_metas_has_no_place_for_ends_and_sampling_either(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "llama2-sentencepiece")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}))
    convert(folder, tmp_path / "own", "mega")
    *_, loss = convert(tmp_path / "own", tmp_path / "meta", "meta", tokens=special_tokens).losses
    assert loss.endswith("settings of generation_config.json: eos_token_id [2, 5], temperature 0.6")


@needs_gguf
def test_two_tokens_of_the_same_text_are_refused(tmp_path: Path) -> None:
    """A tokenizer.json has one id for a text, so that the other id would have none."""
    from gguf import GGUFReader, GGUFWriter

    path = tmp_path / "tokens.gguf"
    for kinds, expected in (([1, 1, 3, 1], None), ([1, 5, 5, 1], None), ([1, 1, 5, 3], 0), ([5, 1, 1, 1], 2)):
        writer = GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "a", "</s>"] if expected is not None else ["a", "b", "</s>", "a"])
        writer.add_token_types(kinds)
        writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        metadata = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
        if expected is None:
            with pytest.raises(
                CheckpointError, match=r"tokens\.gguf: tokenizer\.ggml\.tokens: 'a' has the ids 0 and 3"
            ):
                tokenizer_files(metadata, str(path))
        else:  # an unused row of the embedding takes the text from no other token
            model = below(tokenizer_files(metadata, str(path))["tokenizer.json"], "model")
            assert below(model, "vocab")["a"] == expected


@needs_gguf
def test_types_out(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = "qwen3-qwen2"
    line = ["convert-llama", "--load-dir", str(own(folders, case)), "--to", "gguf", "--save-dir"]
    expected = tensors(open_weights(str(own(folders, case))))
    for outtype, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", torch.float32)):
        to = folders / case / outtype
        assert cli.main([*line, str(to), "--outtype", outtype, "--verify"]) == 0
        assert "of them rounded to the file's types" in capsys.readouterr().out
        found = tensors(open_weights(str(to / "model.gguf")))
        for name, tensor in expected.items():
            bound = 1 / 127 if outtype == "q8_0" else torch.finfo(dtype).eps
            assert found[name].dtype == (dtype if tensor.dim() > 1 else torch.float32)
            assert (found[name].float() - tensor).abs().max() <= bound * tensor.abs().max()
    with (to / "model.gguf").open("r+b") as file:  # a number of the last tensor; at most 31 bytes pad it
        file.seek(-40, 2)
        file.write(b"\x31\x41")
    with pytest.raises(CheckpointError, match=r"--verify: .*: is not what"):
        read_back(own(folders, case), to)
    assert cli.main([*line[:-2], "hf", "--save-dir", str(folders / "x"), "--outtype", "f16"]) == 2
    assert "--outtype f16: a Hugging Face folder has the dtype" in capsys.readouterr().err


@needs_gguf
def test_blocks_of_few_bits_are_read(folders: Path) -> None:
    """Q4_K and Q6_K, by rectangles, as the package itself reads them whole."""
    import gguf

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
    with pytest.raises(CheckpointError, match="is written only for llama, mistral, qwen2, qwen3"):
        metadata_of_model(gpt)
    model = model_of(open_weights(str(own(folders, "qwen2-qwen2"))).meta, "")
    _, metadata = metadata_of_model(model)
    shapes = {"token_embd.weight": (model.vocab, model.hidden), "output.weight": (model.vocab, model.hidden)}
    stretched = replace(model, rope_scaling="yarn", rope_scaling_factor=2.0, rope_beta_fast=16.0)
    with pytest.raises(CheckpointError, match=r"rope_beta_fast 16\.0: GGUF's qwen2 has only 32\.0"):
        metadata_of_model(stretched)
    for change, said in (
        ({"general.architecture": "mamba"}, "'mamba' .valid: llama, qwen2, qwen3"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count 8: is not known here"),
        ({"qwen2.rope.scaling.type": "longrope"}, "longrope"),
    ):
        with pytest.raises(CheckpointError, match=said):
            model_of_metadata({**metadata, **change}, shapes, None, "a.gguf")
    with pytest.raises(CheckpointError, match="has no known name in llama"):
        vocabulary_of({"model": {"type": "BPE", "vocab": {"a": 0}}, "pre_tokenizer": {"type": "Whitespace"}}, {}, 9)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 30)
    assert cli.main(["convert-llama", "--load-dir", str(broken), "--save-dir", str(tmp_path / "x")]) == 2
    assert "not a GGUF file that is read: metadata: announces" in capsys.readouterr().err


@needs_gguf
def test_bf16_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Norms are fp32 there; llama.cpp wants to be told that there is no tokenizer. fp16 ends before bf16 does."""
    import gguf

    (hf_folder(tmp_path / "hf", "llama2", torch.bfloat16) / "tokenizer.model").unlink()
    convert(tmp_path / "hf", tmp_path / "own", "mega")
    line = ["convert-llama", "--load-dir", str(tmp_path / "own"), "--to", "gguf", "--save-dir", str(tmp_path / "to")]
    assert cli.main([*line, "--verify"]) == 0
    said = capsys.readouterr()
    assert "5 of them rounded" in said.out and "the file has no tokenizer" in said.err
    reader = gguf.GGUFReader(tmp_path / "to" / "model.gguf")
    assert reader.fields["tokenizer.ggml.model"].contents() == "none"


QWEN: dict[str, Json] = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 2,
    "qwen2.context_length": 64,
    "qwen2.embedding_length": 32,
    "qwen2.feed_forward_length": 48,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
}
SHAPES = {"token_embd.weight": (99, 32), "output.weight": (99, 32)}
SCALING = "qwen2.rope.scaling."


@pytest.mark.parametrize(
    ("change", "factors", "said"),
    [
        ({f"{SCALING}attn_factor": 2.0}, None, "rope.scaling.attn_factor 2.0: is not known"),
        (
            {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}yarn_ext_factor": 0.0},
            None,
            "yarn_ext_factor",
        ),
        ({f"{SCALING}yarn_beta_fast": 16.0}, None, "yarn_beta_fast 16.0: is not known"),
        ({f"{SCALING}type": "yarn"}, None, "scaling.factor None: must be a positive number"),
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 2.0}, [1.0] * 4, "linear: together with rope_freqs"),
        ({"qwen2.attention.causal": False}, None, "attention.causal False"),
        ({"qwen2.attention.head_count": [4, 4]}, None, "head_count .4, 4.: must be a positive whole number"),
        ({"qwen2.attention.head_count": None}, None, "head_count None"),
        ({"qwen2.attention.head_count": 0}, None, "head_count 0"),
        ({"qwen2.block_count": 1 << 30}, None, "block_count 1073741824: it has 2 tensors"),
        ({"qwen2.attention.layer_norm_rms_epsilon": float("nan")}, None, "epsilon nan: must be a positive number"),
        ({"qwen2.attention.layer_norm_rms_epsilon": 1e300}, None, "epsilon 1e.300: must be"),
        ({"qwen2.attention.layer_norm_rms_epsilon": None}, None, "epsilon None"),
        ({"qwen2.rope.freq_base": float("inf")}, None, "freq_base inf"),
        ({}, [], "rope_freqs.weight: must hold positive numbers"),
        ({}, [float("nan")] * 4, "rope_freqs.weight: must hold positive numbers"),
    ],
)
def test_metadata_that_is_another_model_or_none(
    change: Mapping[str, Json], factors: list[float] | None, said: str
) -> None:
    from mega.core.checkpoint.forms.gguf.families import model_of_metadata

    metadata = {key: value for key, value in {**QWEN, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=said):
        model_of_metadata(metadata, SHAPES, factors, "a.gguf")


def test_positions_that_are_said() -> None:
    from mega.core.checkpoint.forms.gguf.families import model_of_metadata

    _, plain, _ = model_of_metadata({**QWEN, "qwen2.attention.causal": True}, SHAPES, None, "a.gguf")
    assert plain.rope_base == 10000.0 and plain.rope_scaling == "none" and plain.head_dim == 8
    _, linear, _ = model_of_metadata({**QWEN, f"{SCALING}factor": 4.0}, SHAPES, None, "a.gguf")
    assert linear.rope_interpolation == 4.0
    yarn: dict[str, Json] = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "original_context_length": 16}
    _, found, _ = model_of_metadata({**QWEN, **{SCALING + k: v for k, v in yarn.items()}}, SHAPES, None, "a.gguf")
    assert (found.rope_scaling, found.rope_beta_fast, found.rope_original_positions) == ("yarn", 16.0, 16)


VOCABULARY: dict[str, Json] = {"model": "gpt2", "tokens": ["<s>", "</s>", "a", "b", "ab"], "merges": ["a b"]}


def read(**change: Json) -> dict[str, dict[str, Json]]:
    kinds: list[Json] = [3, 3, 1, 1, 1]
    found = {**VOCABULARY, "token_type": kinds, "bos_token_id": 0, "eos_token_id": 1, **change}
    return tokenizer_files({PREFIX + key: value for key, value in found.items() if value is not None}, "a.gguf")


def test_a_rule_without_a_name_is_refused() -> None:
    for pre in ("default", None):
        with pytest.raises(CheckpointError, match=r"tokenizer.ggml.pre .* \(valid: gpt-2"):
            read(pre=pre)


def test_tokens_that_are_added_to_every_text() -> None:
    """As llama.cpp adds them where nothing is said; and written as they were."""
    from tokenizers import Tokenizer

    for said, ids in (
        ({"pre": "llama-v3"}, [0, 4]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [4]),
        ({"pre": "gpt-2"}, [4]),
        ({"pre": "gpt-2", "add_eos_token": True}, [4, 1]),
        ({"pre": "llama3", "add_eos_token": True}, [0, 4, 1]),
    ):
        whole = read(**said)["tokenizer.json"]
        assert Tokenizer.from_str(json.dumps(whole)).encode("ab").ids == ids
        written = vocabulary_of(whole, {"bos_token_id": 0, "eos_token_id": [1]}, 5)
        assert written[f"{PREFIX}add_bos_token"] is (ids[0] == 0)
        assert written[f"{PREFIX}add_eos_token"] is (ids[-1] == 1)
    with pytest.raises(CheckpointError, match="eos_token_id: is none of its tokens"):
        read(pre="gpt-2", add_eos_token=True, eos_token_id=9)
    with pytest.raises(CheckpointError, match=r"adds the token 0; bos_token_id .2"):
        vocabulary_of(whole, {"bos_token_id": 2}, 5)
    written = vocabulary_of(read(pre="gpt-2")["tokenizer.json"], {"eos_token_id": [], "pad_token_id": -1}, 5)
    assert not {f"{PREFIX}eos_token_id", f"{PREFIX}padding_token_id"} & written.keys()


def test_only_what_llama_cpp_does_to_a_text_is_written() -> None:
    pieces: Json = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "\u2581a": 1}, "merges": []}
    blanks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    lead: Json = {"type": "Prepend", "prepend": "\u2581"}
    space: dict[str, Json] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False}

    def written(normalizers: list[Json], before: Json) -> Json:
        normalizer: Json = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
        whole = {"model": pieces, "normalizer": normalizer, "pre_tokenizer": before}
        return vocabulary_of(whole, {}, 9)[f"{PREFIX}add_space_prefix"]

    assert written([lead, blanks], None) is True and written([blanks], None) is False
    assert written([], space) is False and written([], {**space, "prepend_scheme": "first"}) is True
    digits: Json = {"type": "Digits", "individual_digits": True}
    refused: list[tuple[list[Json], Json]] = [
        ([{"type": "Lowercase"}, blanks], None),
        ([{"type": "NFKC"}, lead, blanks], None),
        ([lead, blanks], digits),
        ([], None),
    ]
    for normalizers, before in refused:
        with pytest.raises(CheckpointError, match="has byte_fallback"):
            written(normalizers, before)
    whole = read(pre="gpt-2")["tokenizer.json"]
    with pytest.raises(CheckpointError, match="has no known name in llama"):
        vocabulary_of({**whole, "model": {**whole["model"], "ignore_merges": True}}, {}, 9)  # type: ignore[dict-item]


def test_a_header_that_announces_what_is_not_there(tmp_path: Path) -> None:
    """Refused before anything is made of it, in no time."""
    from mega.core.checkpoint.forms.gguf.header import check_header

    def key(kind: int, rest: bytes) -> bytes:
        return struct.pack("<QQQ1sI", 0, 1, 1, b"a", kind) + rest

    def array(item: int, count: int) -> bytes:
        return key(9, struct.pack("<IQ", item, count)) + bytes(64)

    (path := tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + key(4, bytes(4)))
    check_header(path)
    for rest, said in (
        (array(4, 1 << 40), "a: announces 1099511627776 items"),
        (array(8, 1 << 40), "a: announces 1099511627776 items"),
        (array(9, 1), "a: is an array of type 9"),
        (key(8, struct.pack("<Q", 1 << 60)), "it ends within its header"),
        (key(99, b""), "a: has the type 99"),
        (struct.pack("<QQ", 0, 1 << 50), "metadata: announces"),
        (struct.pack("<QQ", 1 << 50, 0), "tensors: announces"),
        (struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 1 << 40, 1 << 40, 0, 0), "t: has the shape"),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + rest)
        with pytest.raises(CheckpointError, match=f"not a GGUF file that is read: {said}"):
            check_header(path)
