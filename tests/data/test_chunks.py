"""The data of Retro against Megatron-LM 23.06's: every block, merged array, ban, sample and folder name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mega.core.config.sections import DataConfig
from mega.core.data import chunks
from mega.core.data.build import build_datasets, parse_blend
from mega.core.data.chunks import ChunkDatabase, ChunkSource, read_arrays, sources
from mega.core.data.indexed import token_dtype
from mega.core.data.neighbours import DatabaseManifest, NeighbourDataset, NeighbourTable, neighbour_tokens, query_name
from mega.core.data.order import split_boundaries
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.data.recipes import description
from mega.core.retro.index import exact_search
from mega.core.retro.stages import Share, begin, build_chunks, build_vectors, find_neighbours, read_vectors
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from tests.support.shared import shared

NAMES = ("a_text_document", "b_text_document")


@cache
def golden() -> Any:
    return json.loads(shared("golden/retro/retro_data.json").read_text())


@cache
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    vocab, merges = shared("gpt2/gpt2-vocab.json"), shared("gpt2/gpt2-merges.txt")
    bert = shared("bert/bert-base-uncased-vocab.txt")
    return (
        build(tokenizer="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges)),
        build(tokenizer="BertWordPieceLowerCase", vocab_file=str(bert)),
    )


class CountsOfBytes:
    """In place of a BERT, as in the golden file: how many bytes of a text are n modulo 32."""

    digest = "bytes"

    def tokens(self, text: str) -> int:
        return len(tokenizers()[1].encode(text))

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = [np.bincount(np.frombuffer(text.encode(), np.uint8) % 32, minlength=32) for text in texts]
        return np.array(rows, np.float32)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[ChunkSource]:
    folder, (gpt, _) = tmp_path_factory.mktemp("corpora"), tokenizers()
    assert gpt.eod is not None
    texts = golden()["docs"]
    for name, part in zip(NAMES, (texts[:14], texts[14:]), strict=True):
        with IndexedWriter(folder / name, token_dtype(gpt.vocab_size)) as writer:
            for text in part:
                writer.add([[*gpt.encode(text), gpt.eod]])
    return sources(parse_blend("--data-path", blend(folder)), "80,20,0")


def blend(folder: Path) -> list[str]:
    return ["3", str(folder / NAMES[0]), "1", str(folder / NAMES[1])]


def test_training_ends_where_the_run_s_does(tmp_path: Path) -> None:
    """Both other shares of 15 documents round up, so the last of twelve is the validation's."""
    with IndexedWriter(tmp_path / "a", np.dtype(np.uint16)) as writer:
        for document in range(15):
            writer.add([[document]])
    (source,) = sources([(None, str(tmp_path / "a"))], "80/10/10")
    assert source.training == split_boundaries("80/10/10", 15)[1] == 11
    with pytest.raises(ValueError, match="--split 0,50,50: gives no document of "):
        sources([(None, str(tmp_path / "a"))], "0,50,50")


def manifest(**changes: Any) -> DatabaseManifest:
    gpt, _ = tokenizers()
    assert gpt.eod is not None
    values: dict[str, Any] = {
        "chunk_length": 16,
        "block_size": 40,
        "doc_block_size": 5,
        "split": "80,20,0",
        "tokenizer": gpt.identity(),
        "eod": gpt.eod,
        "embedder": "bytes",
        "pad_chunks": True,
        "corpora": (),
    }
    return DatabaseManifest(**{**values, **changes})


@pytest.fixture(scope="module")
def built(corpora: list[ChunkSource], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, (gpt, _), lines = tmp_path_factory.mktemp("retro"), tokenizers(), list[str]()
    begin(folder, manifest())
    for share in (Share(1, 2), Share(0, 2), Share()):
        build_chunks(folder, manifest(), corpora, gpt, CountsOfBytes(), share, lines.append)
    build_vectors(folder, manifest(), gpt, CountsOfBytes(), Share(), lines.append)
    return folder


def test_the_database(built: Path) -> None:
    for path, arrays in golden()["files"].items():
        if "sampled" in path:
            continue
        names = [name for name in arrays if name != "n_written"]
        found = read_arrays(built / path.replace(".hdf5", ".safetensors"), names)
        for name in names:
            wanted = np.array(arrays[name]).reshape(-1, *found[name].shape[1:])
            assert np.array_equal(found[name], wanted), (path, name)
    infos = json.loads((built / chunks.INFOS).read_text())
    for mine, theirs in zip(infos, golden()["infos"], strict=True):
        assert {name: theirs[name] for name in mine if name != "prefix"} == {
            n: v for n, v in mine.items() if n != "prefix"
        }


def test_neighbours_and_samples(built: Path, corpora: list[ChunkSource]) -> None:
    wanted, (gpt, _) = golden(), tokenizers()
    folder = Path(corpora[0].prefix).parent
    data = DataConfig(data_path=tuple(blend(folder)), split="80,20,0")
    dataset: Any = build_datasets(
        data, seq_length=64, seed=1234, vocab=gpt.vocab_size, samples=(12, 0, 0), tokenizer=gpt
    ).train
    for name, count, described in zip(NAMES, (10, 4), wanted["descs"], strict=True):
        assert description(f"W/{name}", "train", count, 64, 1234, "80,20,0") == described
    assert query_name("train", wanted["desc_hashes"]) == wanted["query_dir"]
    find_neighbours(
        built,
        manifest(),
        "train",
        dataset,
        gpt,
        CountsOfBytes(),
        exact_search(built, manifest(), 208, torch.device("cpu")),
        candidates=6,
        saved=5,
        share=Share(),
        report=lambda line: None,
    )
    assert len(dataset) * 4 == wanted["n_chunks"]
    database = ChunkDatabase(built, 16, gpt.eod or 0)
    table = NeighbourTable(built / "query" / "train", len(dataset) * 4, 40, len(database))
    assert table[slice(0, 56)].tolist() == wanted["neighbors"]
    samples = NeighbourDataset(dataset, database, table, each=2, retrieved=2, crossing=True)
    for each in wanted["samples"]:
        sample = samples[each["sample"]]
        assert sample.tokens.tolist() == each["text"]
        assert sorted(document for _, document in dataset.documents(each["sample"])) == each["doc_ids"]
        tokens = np.array(each["neighbor_tokens"])
        assert np.array_equal(sample.neighbours[sample.found], tokens[sample.found])


def test_files_of_the_original_are_read_in_place(built: Path, corpora: list[ChunkSource], tmp_path: Path) -> None:
    """HDF5 under the original's names, of which nothing is made again."""
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "hdf5"
    shutil.copytree(built, folder)
    for path in [each for each in folder.rglob("*") if each.suffix in (".safetensors", ".npy")]:
        name = "data" if path.parent.name == "blocks" else "neighbors"
        arrays = {name: np.load(path)} if path.suffix == ".npy" else load_file(path)
        with h5py.File(path.with_suffix(".hdf5"), "w") as file:
            for key, array in arrays.items():
                file.create_dataset(key, data=array)
        path.unlink()
    lines: list[str] = []
    gpt = tokenizers()[0]
    build_vectors(folder, manifest(), gpt, CountsOfBytes(), Share(), lines.append)
    assert not lines
    ours, theirs = (ChunkDatabase(each, 16, gpt.eod or 0) for each in (built, folder))
    assert (ours.chunks == theirs.chunks).all()
    found = [list(read_vectors(each, len(ours), 40)) for each in (built, folder)]
    assert all((a[1] == b[1]).all() for a, b in zip(*found, strict=True))


def test_what_follows_a_neighbour_ends_with_its_document(built: Path) -> None:
    gpt = tokenizers()[0]
    database = ChunkDatabase(built, 16, gpt.eod or 0)
    owners = database.chunks[:, :2].tolist()
    last = next(number for number in range(len(owners) - 1) if owners[number] != owners[number + 1])
    whole, cut = (
        neighbour_tokens(database, np.array([[last, 0, -1]]), 2, crossing=crossing)[0] for crossing in (True, False)
    )
    assert whole[0, 16:].tolist() == database.tokens(last + 1).tolist()
    assert set(cut[0, 16:].tolist()) == {gpt.eod} == set(cut[2].tolist())
    assert (whole[1] == cut[1]).all() and (whole[0, :16] == cut[0, :16]).all()


def test_a_corpus_keeps_its_number_where_another_is_left_out(corpora: list[ChunkSource], tmp_path: Path) -> None:
    """The first of two corpora has no document in the validation's part."""
    with IndexedWriter(tmp_path / "one", token_dtype(tokenizers()[0].vocab_size)) as writer:
        writer.add([[1, 2, 3]])
    prefixes = str(tmp_path / "one"), corpora[0].prefix
    data = DataConfig(data_path=prefixes, split="80,20,0")
    dataset: Any = build_datasets(
        data, seq_length=16, seed=1, vocab=tokenizers()[0].vocab_size, samples=(0, 2, 0), tokenizer=tokenizers()[0]
    ).valid
    assert {number for number, _ in dataset.documents(0)} == {1}
