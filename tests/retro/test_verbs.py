"""`mega retro` and a run that reads what it has made: blocks, resuming, what is shown, what is refused."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from mega.cli import main
from mega.core.batch import NeighbourBatch
from mega.core.data.indexed import IndexedDataset, token_dtype
from mega.core.data.neighbours import DatabaseManifest
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.device import Device
from mega.core.inference.loading.load import load_model, load_tokenizer, open_model
from mega.core.inference.options import EngineOptions, RetrievalOptions
from mega.core.inference.start import start_engine
from mega.core.parallel.mesh import Mesh
from mega.core.retro.embed import BertEmbedder, open_embedder_of
from mega.core.retro.retrieve import open_retriever
from mega.core.text.build import build
from tests.support.shared import shared

SIZES = "--layers 2 --hidden 16 --heads 2 --micro-batch 2 --global-batch 2 --lr 1e-3 --device cpu"
QUERY = "--candidates 40 --saved 4"


MERGES = 5000
"""The first ones of GPT-2's: every command line reads them, and all 50,000 take half a second each time."""
VOCAB = 256 + MERGES + 1
CHUNKS = 247
"""Of the training documents."""


def gpt(folder: Path) -> list[str]:
    words = f"--tokenizer GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    return words.split()


def write_tokenizer(folder: Path) -> None:
    ids = json.loads(shared("gpt2/gpt2-vocab.json").read_text())
    ids = {piece: number for piece, number in ids.items() if number < VOCAB - 1} | {"<|endoftext|>": VOCAB - 1}
    (folder / "vocab.json").write_text(json.dumps(ids))
    lines = shared("gpt2/gpt2-merges.txt").read_text().splitlines()[: 1 + MERGES]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def write_corpora(folder: Path, texts: Sequence[str]) -> None:
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    words = build(tokenizer="GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    assert words.eod is not None
    for name, part in (("a", texts[:14]), ("b", texts[14:])):
        with IndexedWriter(folder / name, token_dtype(words.vocab_size)) as writer:
            for text in part:
                writer.add([[*words.encode(text), words.eod]])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, a BERT that two steps have trained, a database, and the neighbours of a run's samples."""
    folder = tmp_path_factory.mktemp("retro")
    write_tokenizer(folder)
    write_corpora(folder, json.loads(shared("golden/retro/retro_data.json").read_text())["docs"])
    bert = f"--tokenizer BertWordPieceLowerCase --vocab-file {shared('bert/bert-base-uncased-vocab.txt')}"
    train = f"pretrain --family bert --mock-data {SIZES} --seq-length 64 --steps 1 --eval-iters 0 {bert}"
    assert main([*train.split(), "--save", str(folder / "bert"), "--save-interval", "1"]) == 0
    assert main(building(folder)) == 0
    assert main(querying(folder)) == 0
    return folder


def building(folder: Path, *more: str) -> list[str]:
    words = f"retro build --directory {folder / 'db'} --embedder {folder / 'bert'} --split 80,20,0 --chunk-length 16"
    blend = ["--data-path", "3", str(folder / "a"), "1", str(folder / "b")]
    return [
        *words.split(),
        "--block-size",
        "90",
        "--doc-block-size",
        "8",
        "--device",
        "cpu",
        *blend,
        *gpt(folder),
        *more,
    ]


def running(folder: Path, *more: str) -> list[str]:
    words = f"--retriever --retro {folder / 'db'} --retro-layers 1 --retro-chunk-length 16 --seq-length 32 {SIZES}"
    blend = ["--data-path", "3", str(folder / "a"), "1", str(folder / "b"), "--split", "80,20,0"]
    return [*words.split(), "--steps", "3", "--eval-interval", "3", "--eval-iters", "1", *blend, *gpt(folder), *more]


def querying(folder: Path, *more: str) -> list[str]:
    return ["retro", "query", *running(folder), *QUERY.split(), "--embedder", str(folder / "bert"), *more]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_is_judged_with_and_without_neighbours(place: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert main(["pretrain", *running(place, "--metrics", str(metrics))]) == 0
    found = {name: value for line in metrics.read_text().splitlines() for name, value in json.loads(line).items()}
    assert found["valid_loss"] != found["valid-without-neighbours_loss"]


def test_what_is_lost_is_made_again_by_any_number_of_processes(place: Path) -> None:
    whole = files(place / "db")
    again = place / "db"
    lost = [path for path in again.rglob("*") if path.suffix in (".npy", ".safetensors")]
    for path in lost:
        path.unlink()
    os.remove(again / "db" / "indexed_dataset_infos.json")
    for share in ("2/2", "1/2"):
        assert main(building(place, "--shard", share)) == 0
    assert main(building(place)) == 0
    for share in ("2/2", "1/2"):
        assert main(querying(place, "--shard", share)) == 0
    assert files(again) == whole


def test_vectors_in_bf16_are_those_of_fp32_rounded(place: Path, tmp_path: Path) -> None:
    """The database records the dtype, so that queries are embedded in the same one."""
    (tmp_path / "db").mkdir()
    words = [word.replace(str(place / "db"), str(tmp_path / "db")) for word in building(place)]
    assert main([*words, "--embed-dtype", "bf16"]) == 0
    block = "db/index/train_emb/blocks/0000-0090.npy"
    exact, rounded = np.load(place / block), np.load(tmp_path / block)
    assert rounded.dtype == np.float32 and 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
    queries = [word.replace(str(place / "db"), str(tmp_path / "db")) for word in querying(place)]
    assert main(queries) == 0
    manifest = DatabaseManifest.read(tmp_path / "db")
    embedder = open_embedder_of(tmp_path / "db", manifest, str(place / "bert"), "cpu")
    assert embedder.digest == manifest.embedder and " bf16 " in manifest.embedder
    assert main(words) == 2, "vectors of two dtypes in one database"


def test_a_plain_model_gets_a_retriever(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are kept: with the gate shut the first step has the plain model's loss."""
    both, undropped = running(place), ["--attention-dropout", "0", "--hidden-dropout", "0"]
    plain = both[both.index("--seq-length") :]
    load = ["--load", str(tmp_path / "plain"), "--finetune", *undropped]
    assert main(["pretrain", *plain, "--save", str(tmp_path / "plain"), "--save-interval", "3"]) == 0
    losses: list[float] = []
    for words in ([*plain, *load], [*both, *load, "--retro-gate", "0"]):
        metrics = tmp_path / f"{len(losses)}.jsonl"
        capsys.readouterr()
        assert main(["pretrain", *words, "--metrics", str(metrics)]) == 0
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses.append(next(row["loss"] for row in rows if "loss" in row))
    assert losses[0] == losses[1]
    assert "initial values: model.layers.1.inter_attn_layernorm.weight" in "".join(capsys.readouterr())


def test_what_is_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["retro", "inspect", *running(place), "--chunk", "3", "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    assert f"{CHUNKS} chunks of 16 tokens from 2 corpora" in shown
    assert (
        "chunk 3: 'waite Manor to live with her uncle everybody said she was" in shown
        and shown.count("  neighbour ") == 4
    )


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_database_of_other_settings_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(place / "db")
    assert "chunk length 16, not 8" in refused(building(place, "--chunk-length", "8"), capsys)
    assert "was made with split" in refused(building(place, "--split", "50,50,0"), capsys)
    assert "--retro-chunk-length 8: " in refused(querying(place, "--retro-chunk-length", "8"), capsys)
    assert "--split 50,50,0: the database was made with" in refused(querying(place, "--split", "50,50,0"), capsys)
    places = {str(place / "a"): str(place / "b"), str(place / "b"): str(place / "a")}
    swapped = [places.get(word, word) for word in querying(place)]
    assert "must be the corpora of the database" in refused(swapped, capsys)
    assert files(place / "db") == before


def test_a_run_of_other_samples_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, before = {"--steps": "2", "--seed": "7", "--split": "70,30,0"}, files(place)
    for flag, value in other.items():
        assert "has no neighbours of this run's train samples" in refused(
            ["pretrain", *running(place, flag, value)], capsys
        )
    assert files(place) == before, "an index of samples that no run reads was written"
    assert "--retro-neighbours 5: " in refused(["pretrain", *running(place, "--retro-neighbours", "5")], capsys)
    assert "--saved 6: " in refused(querying(place, "--saved", "6"), capsys)
    assert "is not a database" in refused(["pretrain", *running(place, "--retro", str(place))], capsys)


def test_a_dry_run_of_data_needs_neighbours_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["pretrain", *running(place)]
    without = [word for word in given if word not in ("--retro", str(place / "db"))]
    for words in (without, [*without, "--dry-run"]):
        assert "--retriever: needs --retro" in refused(words, capsys).replace(" True", "")


def test_a_corpus_that_has_changed_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Its samples have the same numbers as before."""
    tokens = place / "a.bin"
    whole = tokens.read_bytes()
    request.addfinalizer(lambda: tokens.write_bytes(whole))
    tokens.write_bytes(whole[2:4] + whole[:2] + whole[4:])
    assert f"--data-path {place / 'a'}: is none of the corpora" in refused(["pretrain", *running(place)], capsys)


@pytest.mark.parametrize("fault", ["missing", "torn", "beyond", "width"])
def test_a_damaged_block_is_named(
    place: Path, fault: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    folder = place / "db" / ("index" if fault == "width" else "query")
    path = next(iter(sorted(folder.rglob("*.npy"))))
    whole = path.read_bytes()
    request.addfinalizer(lambda: path.write_bytes(whole))
    array = np.load(path)
    if fault == "missing":
        path.unlink()
    elif fault == "torn":
        path.write_bytes(whole[:200])
    elif fault == "beyond":
        np.save(path, np.where(array == array.max(), CHUNKS, array))
    else:
        np.save(path, array[:, :8])
        lost = next(iter((place / "db" / "query").rglob("*.npy")))
        kept = lost.read_bytes()
        request.addfinalizer(lambda: lost.write_bytes(kept))
        lost.unlink()
    words = querying(place) if fault == "width" else ["pretrain", *running(place)]
    error = refused(words, capsys)
    assert str(path.parent) in error and "Traceback" not in error


class Plain:
    """What reads a text plainly, of a run and of what `place` has."""

    def __init__(self, place: Path, run: Path):
        self.words, self.model = load_tokenizer(open_model(run)), load_model(open_model(run))
        self.embed = BertEmbedder(str(place / "bert"), batch=1, length=256, device="cpu")


plain = functools.lru_cache(maxsize=1)(Plain)


def read_plainly(place: Path, run: Path, ids: Sequence[int], *, reads: bool) -> torch.Tensor:
    """Logits [tokens, vocab] of a text, whose neighbours are the nearest of all vectors, read from their documents."""
    reader, documents = plain(place, run), [IndexedDataset(str(place / name)) for name in "ab"]
    chunks = load_file(place / "db" / "db" / "merged" / "train.safetensors")["chunks"].astype(np.int64)
    blocks = sorted((place / "db" / "index" / "train_emb" / "blocks").glob("*.npy"))
    vectors = np.concatenate([np.load(block) for block in blocks]).astype(np.float64)
    columns = -(-len(ids) // 16)
    tokens = np.zeros((columns, 16), np.int64)
    tokens.reshape(-1)[: len(ids)] = ids
    neighbours = np.full((columns, 2, 32), reader.words.eod, np.int64)
    for chunk in range(len(ids) // 16):
        (query,) = reader.embed([reader.words.decode(tokens[chunk].tolist())])
        for rank, number in enumerate(np.square(vectors - query).sum(1).argsort(kind="stable")[:2]):
            corpus, document, first, _, _ = chunks[number].tolist()
            text = documents[corpus].get(document)[:-1][first : first + 32]
            neighbours[chunk, rank, : len(text)] = text
    row = torch.from_numpy(tokens.reshape(1, -1))
    batch = NeighbourBatch(
        *(row, row, torch.ones(row.shape), torch.arange(row.shape[1])[None], torch.zeros(1, dtype=torch.int64)),
        neighbours=torch.from_numpy(neighbours)[None],
        found=torch.full((1, columns, 2), reads),
    )
    with torch.no_grad():
        logits: torch.Tensor = reader.model(batch, outputs=True).outputs
    return logits[0, : len(ids)]


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run of three steps."""
    folder = place / "run"
    assert main(["pretrain", *running(place, "--save", str(folder), "--save-interval", "3", "--lr", "0.02")]) == 0
    return folder


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_lambada_is_scored_as_one_text_at_a_time(
    place: Path, run: Path, tmp_path: Path, reads: bool, strict: bool
) -> None:
    """Passages whose last words depend on 0 to 2 chunks; every second one ends with the model's own choice."""
    words, result, passages = load_tokenizer(open_model(run)), tmp_path / "result.json", tmp_path / "passages.jsonl"
    docs = json.loads(shared("golden/retro/retro_data.json").read_text())["docs"][20:]
    spoken, texts, right, nll = " ".join(docs).split(), list[str](), 0, 0.0
    for number, length in enumerate((8, 15, 16, 17, 22, 30, 14, 30)):
        begin = spoken[25 * number : 25 * number + length]
        while len(words.encode(" ".join(begin))) > length:
            begin.pop()
        context = words.encode(" ".join([*begin, "the"]))
        if number % 2:
            context.append(int(read_plainly(place, run, context, reads=reads)[-1].argmax()))
        texts.append(words.decode(context))
        whole = words.encode(texts[-1])
        judged = len(words.encode(texts[-1].rsplit(" ", 1)[0])) if strict else len(whole) - 1
        scores = read_plainly(place, run, whole[:-1], reads=reads)[judged - 1 :].double().log_softmax(-1)
        labels = torch.tensor(whole[judged:])
        right += bool((scores.argmax(-1) == labels).all())
        nll -= float(scores.gather(1, labels[:, None]).sum())
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--retro", str(place / "db"), "--embedder", str(place / "bert")] if reads else ["--retro", "none"]
    line = f"eval --load {run} --task lambada --valid-data {passages} --json {result} --micro-batch 3 --device cpu"
    assert main([*line.split(), *given, *["--strict-lambada"] * strict]) == 0
    figures = {each["name"]: each["value"] for each in json.loads(result.read_text())["figures"]}
    assert (figures["number correct"], figures["total examples"]) == (right, 8) and 0 < right < 8
    assert math.log(figures["ppl"]) == pytest.approx(nll / 8, rel=1e-6)


def test_memory_of_a_search_is_counted(place: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """memory-estimate gives the bytes of the engine: embedder, two blocks of vectors, and what sequences keep."""
    database, bert = str(place / "db"), str(place / "bert")
    opened, cpu = open_model(run), Device.choose("cpu")
    retriever = open_retriever(RetrievalOptions(retro=database, embedder=bert), opened.model, opened.tokenizer(), "cpu")
    weights = sum(weight.numel() * 4 for weight in load_model(open_model(bert)).parameters())
    blocks = sorted((place / "db" / "index" / "train_emb" / "blocks").glob("*.npy"))
    assert retriever.device_bytes == weights + 2 * max(np.load(block).nbytes for block in blocks)
    engine = start_engine(opened, Mesh.at(0), cpu, EngineOptions(cache_tokens=64), retriever=retriever)
    assert engine is not None and engine.neighbour_bytes > retriever.device_bytes
    sizes = ["memory-estimate", "--serve", "--json", *running(place, "--vocab", str(VOCAB), "--cache-tokens", "64")]
    given = [*sizes, "--embedder", bert]
    capsys.readouterr()
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["neighbours"] == engine.neighbour_bytes and "to find and keep neighbours" in found["lines"][2]
    assert "--embedder is missing: " in refused(sizes, capsys)
    assert "--embedder x: needs --serve" in refused(["memory-estimate", *running(place), "--embedder", "x"], capsys)
    plain = ["memory-estimate", "--serve", "--model", "gpt2-345m", "--retro", database, "--embedder", bert]
    assert f"--retro {database}: needs --retriever" in refused(plain, capsys)


def read_by_generation(place: Path, run: Path) -> list[str]:
    words = f"generate --load {run} --prompt once --tokens 1 --device cpu --retro {place / 'db'}"
    return [*words.split(), "--embedder", str(place / "bert")]


@pytest.mark.parametrize("verb", ["query", "generate", "build"])
def test_vectors_of_another_width_than_the_embedders_are_refused(
    place: Path, run: Path, verb: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """All blocks have the same width, so none differs from the others."""
    for path in (place / "db" / "index").rglob("*.npy"):
        request.addfinalizer(partial(path.write_bytes, path.read_bytes()))
        np.save(path, np.load(path)[:, :8])
    verbs = {"query": querying(place), "generate": read_by_generation(place, run)}
    words = verbs.get(verb) or building(place, "--index", "Flat")
    assert "must be float32 [90, 16]; delete it and build it again" in refused(words, capsys)


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_a_corpus_that_is_not_the_databases_gives_no_neighbours(
    place: Path, run: Path, fault: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    tokens = place / "b.bin"
    whole = tokens.read_bytes()
    request.addfinalizer(lambda: tokens.write_bytes(whole))
    if fault == "missing":
        tokens.unlink()
    else:
        tokens.write_bytes(whole[2:4] + whole[:2] + whole[4:])
    assert str(place / "b") in refused(read_by_generation(place, run), capsys)


def test_texts_are_continued_and_judged_with_neighbours(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was read is cited; with nothing to read the score is another one; what is missing is named."""
    run, text = str(tmp_path / "run"), "once upon a time there was a little girl " * 2
    assert main(["pretrain", *running(place, "--save", run, "--save-interval", "3", "--steps", "3")]) == 0
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"text": text}) + "\n")
    given = ["--retro", str(place / "db"), "--embedder", str(place / "bert"), "--device", "cpu"]
    out = tmp_path / "answers.jsonl"
    words = ["generate", "--load", run, "--input", str(asked), "--tokens", "4", "--greedy"]
    assert main([*words, "--output", str(out), *given]) == 0
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["chunk"] for each in row["neighbours"]] == [0, 0]
    assert all(each["text"] and each["corpus"] in (str(place / "a"), str(place / "b")) for each in row["neighbours"])
    losses = list[float]()
    for reads in (given, ["--retro", "none", "--device", "cpu"]):
        result = tmp_path / f"{len(losses)}.json"
        judged = ["eval", "--load", run, "--task", "ppl", "--valid-data", str(asked), "--json", str(result)]
        assert main([*judged, *reads]) == 0
        losses.append(json.loads(result.read_text())["figures"][0]["value"])
    assert losses[0] != losses[1]
    assert "--retro is missing: " in refused(words, capsys)
    assert "--embedder is missing: " in refused([*words, "--retro", str(place / "db")], capsys)
    assert "--speculate ngram: excludes" in refused([*words, *given, "--speculate", "ngram"], capsys)
