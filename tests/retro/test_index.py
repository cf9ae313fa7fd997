"""Indexes of vectors: what they find of what an exact search finds, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mega.core.data.neighbours import DatabaseManifest
from mega.core.retro.stages import vector_blocks, write_array
from mega.core.text.tokenizer import TokenizerIdentity

CHUNKS, WIDTH, INDEX = 600, 8, "IVF16,Flat"
MANIFEST = DatabaseManifest(
    chunk_length=4,
    block_size=250,
    doc_block_size=10,
    split="80,20,0",
    tokenizer=TokenizerIdentity(*("a",) * len(TokenizerIdentity._fields)),
    eod=0,
    pad_chunks=False,
    embedder="digest 256",
    corpora=((1.0, "a", "digest"),),
)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The vectors of a database."""
    random = np.random.default_rng(1)
    for block, path in vector_blocks(tmp_path, CHUNKS, MANIFEST.block_size):
        write_array(path, random.normal(size=(block.rows, WIDTH)).astype(np.float32))
    return tmp_path


def queries() -> NDArray[np.float32]:
    return np.random.default_rng(2).normal(size=(50, WIDTH)).astype(np.float32)


def test_an_index_finds_what_an_exact_search_does(folder: Path) -> None:
    """All of it where all lists are searched, most of it where some are; built again it is the same file."""
    pytest.importorskip("faiss")
    from mega.core.retro.index import build_index, exact_search, open_search

    lines: list[str] = []
    build_index(folder, MANIFEST, CHUNKS, INDEX, 400, lines.append)
    assert lines[0] == f"index {INDEX}: trained on 400 of 600 vectors" and len(lines) == 4
    exact = exact_search(folder, MANIFEST, CHUNKS, CPU)(queries(), 5)
    whole, some = (open_search(folder, MANIFEST, CHUNKS, CPU, INDEX, probes)(queries(), 5) for probes in (16, 4))
    assert (whole == exact).all()
    shared = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(some.tolist(), exact.tolist(), strict=True)])
    assert 0.5 < shared < 1
    place = folder / "index" / "faiss" / INDEX
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    for name in ("added.faissindex", "index.json"):  # as a kill leaves it
        (place / name).unlink()
    build_index(folder, MANIFEST, CHUNKS, INDEX, 400, lines.append)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == files


def test_what_is_no_index_of_a_database_is_refused(folder: Path) -> None:
    pytest.importorskip("faiss")
    from mega.core.retro.index import build_index, open_search

    def refused(words: str, manifest: DatabaseManifest = MANIFEST, index: str = INDEX) -> None:
        with pytest.raises(ValueError, match=words):
            open_search(folder, manifest, CHUNKS, CPU, index, 4)

    refused("is not whole; mega retro build --index IVF16,Flat makes it")
    refused("must be a description of faiss's", index="../a")
    for index in ("IVF16,Nothing", "IVF9999,Flat"):
        with pytest.raises(ValueError, match=f"--index {index}: "):
            build_index(folder, MANIFEST, CHUNKS, index, 400, print)
    build_index(folder, MANIFEST, CHUNKS, INDEX, 400, lambda line: None)
    refused("is of another database", replace(MANIFEST, embedder="other 256"))
    path = folder / "index" / "faiss" / INDEX / "added.faissindex"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    refused("added.faissindex: cannot be read")
    path.write_bytes((path.parent / "empty.faissindex").read_bytes())
    refused("has 0 vectors of 8 numbers, the database 600 of 8")
