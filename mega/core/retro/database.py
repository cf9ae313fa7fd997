"""Implement the subcommands of `mega retro`: the checks before each stage, and the sequence of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from mega.core.config.corpora import expand
from mega.core.config.run import Options, RunConfig
from mega.core.data.build import parse_blend
from mega.core.data.chunks import INFOS, ChunkDatabase, sources
from mega.core.data.indexed import IndexedDataset
from mega.core.data.neighbours import (
    DatabaseManifest,
    DocumentedDataset,
    NeighbourDataset,
    corpus_digest,
    md5,
    query_name,
)
from mega.core.data.order import split_shares
from mega.core.device import Device
from mega.core.retro.embed import BertEmbedder, open_embedder_of
from mega.core.retro.index import build_index, index_folder, open_search
from mega.core.retro.options import DatabaseOptions, LookOptions, QueryOptions
from mega.core.retro.stages import Share, begin, build_chunks, build_vectors, check_vectors, find_neighbours
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.kinds.pretraining import datasets, plain_datasets
from mega.core.training.start.inputs import resolve_run

Report = Callable[[str], None]


def build_database(options: DatabaseOptions, tokenizer: Tokenizer, share: Share, report: Report) -> None:
    """Build the chunks of a database, then the vectors. With --shard, vectors are built only after all chunks have been
    merged.

    Errors: ValueError naming flag or file; CheckpointError.
    """
    folder = Path(options.directory)
    if tokenizer.eod is None:
        raise ValueError(
            f"--tokenizer {tokenizer.kind}: has no token that ends a document, with which chunks are filled"
        )
    if options.index is not None:
        index_folder(folder, options.index)  # reject an invalid description before the embedding, which can take hours
    corpora = sources(parse_blend("--data-path", options.data_path), options.split)
    device = Device.choose(options.device).torch
    embedder = BertEmbedder(
        options.embedder,
        batch=options.embed_batch,
        length=options.embed_length,
        device=str(device),
        dtype=options.embed_dtype,
    )
    manifest = DatabaseManifest(
        chunk_length=options.chunk_length,
        block_size=options.block_size,
        doc_block_size=options.doc_block_size,
        split=options.split,
        tokenizer=tokenizer.identity(),
        eod=tokenizer.eod,
        pad_chunks=options.pad_chunks,
        embedder=embedder.digest,
        corpora=tuple((source.ratio, source.prefix, corpus_digest(source.corpus.content())) for source in corpora),
    )
    begin(folder, manifest)
    is_merged = (folder / INFOS).exists()
    if not is_merged:
        build_chunks(folder, manifest, corpora, tokenizer, embedder, share, report)
    if share.whole or is_merged:
        build_vectors(folder, manifest, tokenizer, embedder, share, report)
    if share.whole and options.index is not None:
        chunks = len(ChunkDatabase(folder, manifest.chunk_length, manifest.eod))
        check_vectors(folder, manifest, chunks, embedder.width)
        build_index(folder, manifest, chunks, options.index, options.index_train, report)


def query_run(options: Options, search: QueryOptions, share: Share, report: Report) -> None:
    """Find the neighbours of the training, validation and test samples of a training run. Errors: as for
    `build_database`."""
    run, tokenizer, folder = _opened(options)
    manifest = DatabaseManifest.read(folder)
    _check_run(run, tokenizer, manifest)
    device = Device.choose(run.runtime.device).torch
    embedder = open_embedder_of(folder, manifest, search.embedder, str(device))
    data = plain_datasets(run, tokenizer)
    chunks = len(ChunkDatabase(folder, manifest.chunk_length, manifest.eod))
    check_vectors(folder, manifest, chunks, embedder.width)
    find = open_search(folder, manifest, chunks, device, search.index, search.probes)
    for name, hashes in data.described.items():
        dataset = getattr(data, name)
        if dataset is not None:
            find_neighbours(
                folder,
                manifest,
                query_name(name, [md5(one) for one in hashes]),
                cast(DocumentedDataset, dataset),
                tokenizer,
                embedder,
                find,
                candidates=search.candidates,
                saved=search.saved,
                share=share,
                report=report,
            )


def _opened(options: Options) -> tuple[RunConfig, Tokenizer, Path]:
    """Return a training run with its tokenizer and database folder. Errors: ValueError naming the flag."""
    if options.data.retro is None:
        raise ValueError("--retro is missing: give the folder that mega retro build has made")
    parallel = options.parallel  # here, the layout affects only the number of samples
    resolved = resolve_run(options, options.runtime.nproc or parallel.tp * parallel.cp * parallel.pp)
    if resolved.tokenizer is None:
        raise ValueError("--tokenizer is missing: chunks are embedded as text")
    return resolved.run, resolved.tokenizer, Path(options.data.retro)


def _check_run(run: RunConfig, tokenizer: Tokenizer, manifest: DatabaseManifest) -> None:
    """Check that a training run uses the corpora of the database. Errors: ValueError naming the flag."""
    folder = run.data.retro
    if not tokenizer.made(manifest.tokenizer):
        rule = f"the database of {folder} was made with {manifest.tokenizer}"
        raise ValueError(f"--tokenizer {tokenizer.identity()}: {rule}")
    if run.model.retro_chunk_length != manifest.chunk_length:
        rule = f"the database has chunks of {manifest.chunk_length}"
        raise ValueError(f"--retro-chunk-length {run.model.retro_chunk_length}: {rule}")
    words = expand(run.data.data_path, run.data.corpora)
    if not words:
        raise ValueError("--data-path is missing: neighbours are of the samples of the corpora of the database")
    digests = [corpus_digest(IndexedDataset(prefix).content()) for _, prefix in parse_blend("--data-path", words)]
    if digests != [digest for _, _, digest in manifest.corpora]:
        expected_prefixes = ", ".join(prefix for _, prefix, _ in manifest.corpora)
        raise ValueError(
            f"--data-path {' '.join(words)}: must be the corpora of the database in their order: {expected_prefixes}"
        )
    if split_shares(run.data.split) != split_shares(manifest.split):
        raise ValueError(f"--split {run.data.split}: the database was made with {manifest.split}")


def describe_database(options: Options, selection: LookOptions) -> Iterator[str]:
    """Yield lines that describe a database. Errors: ValueError naming flag or file."""
    run, tokenizer, folder = _opened(options)
    manifest = DatabaseManifest.read(folder)
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    yield f"{folder}: {len(database):,} chunks of {manifest.chunk_length} tokens from {len(database.corpora)} corpora"
    for corpus in database.corpora:
        documents = f"{corpus.n_docs_train:,} of {corpus.n_docs:,} documents"
        yield f"{corpus.prefix}: {documents}, {corpus.n_chunks:,} chunks, {corpus.n_chunks_invalid:,} left out"
    if selection.chunk is not None:
        if selection.chunk >= len(database):
            raise ValueError(f"--chunk {selection.chunk}: must be below {len(database)}")
        yield f"chunk {selection.chunk}: {_text(tokenizer, database.ids(selection.chunk).tolist())}"
    if selection.sample is not None:
        yield from _sample(run, tokenizer, selection.sample, selection.of)


def _sample(run: RunConfig, tokenizer: Tokenizer, number: int, split_name: str) -> Iterator[str]:
    dataset = cast(NeighbourDataset | None, getattr(datasets(run, tokenizer), split_name))
    if dataset is None or number >= len(dataset):
        raise ValueError(f"--sample {number}: must be below {0 if dataset is None else len(dataset)}")
    sample, length = dataset[number], run.model.retro_chunk_length
    for chunk, neighbours in enumerate(sample.neighbours):
        yield f"chunk {chunk}: {_text(tokenizer, sample.tokens[chunk * length : (chunk + 1) * length].tolist())}"
        for rank, (ids, is_found) in enumerate(zip(neighbours.tolist(), sample.found[chunk], strict=True)):
            yield f"  neighbour {rank}: {_text(tokenizer, ids) if is_found else 'none'}"


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr(tokenizer.decode(ids))
