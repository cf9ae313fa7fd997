"""/v1/embeddings against transformers' last states of the same BERT, in both forms, of texts and ids, on two ranks."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mega.cli import main
from mega.core.checkpoint.own.store import CheckpointError
from mega.core.device import Device
from mega.core.hub.upload import pushed_files
from mega.core.inference.embedding import EmbeddingEngine, Pooling, TextVectors
from mega.core.inference.loading.load import open_model
from mega.core.inference.loading.pooling import check_modules, declared_pooling
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request
from mega.core.inference.server import embeddings_api
from mega.core.inference.server.embedding_start import start_embedding_engine
from mega.core.inference.server.limits import ServerLimits
from mega.core.inference.server.options import ServerOptions
from mega.core.parallel.mesh import Groups, Mesh
from tests.conftest import Pool
from tests.inference.server.conftest import Running, serving

transformers: Any = pytest.importorskip("transformers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a dog ran to the park and found ball ##s once upon time".split()
TEXTS = ["a dog ran", "the dog found balls and ran to the park", "", "once", "a " * 30]
WIDTH, POSITIONS = 32, 48
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights with its vocabulary, as transformers writes it."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": POSITIONS, "vocab_size": 32}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return folder


def engine_at(folder: Path, groups: Groups, rank: int, tp: int, pooling: Pooling | None) -> EmbeddingEngine | None:
    opened = open_model(folder)
    mesh, options = Mesh(rank, tp=tp, groups=groups), EngineOptions(max_requests=4)
    cpu, tokenizer = Device.choose("cpu"), opened.tokenizer()
    return start_embedding_engine(opened, mesh, cpu, options, tokenizer, dtype=torch.float32, pooling=pooling)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    engine = engine_at(folder, Groups(), 0, 1, None)
    assert engine is not None
    options = ServerOptions(name="bert", served_model_name=("text-embedding",), vector_width=WIDTH)
    limited = ServerOptions(**{**vars(options), "limits": ServerLimits(max_waiting=2)})
    with serving(engine, open_model(folder).tokenizer(), limited) as running:
        yield running


def ids_of(text: str) -> list[int]:
    """[CLS], the text's words, [SEP]."""
    words = text.replace("balls", "ball ##s").split()
    return [WORDS.index(word) for word in ("[CLS]", *words, "[SEP]")]


def expected(folder: Path, rows: list[list[int]], pooling: str = "mean", *, unit: bool = True) -> NDArray[np.float32]:
    """Pooled last states of transformers' model, one row at a time, so without padding."""
    model = transformers.BertModel.from_pretrained(folder).train(False)
    vectors = []
    for row in rows:
        with torch.no_grad():
            states = model(torch.tensor([row])).last_hidden_state[0]
        inner = states[1:-1] if len(row) > 2 else states
        vector = {"mean": states.mean(0), "cls": states[0], "inner": inner.mean(0)}[pooling]
        vectors.append(vector / vector.norm() if unit else vector)
    return np.asarray(torch.stack(vectors).numpy())


def vectors_of(running: Running, given: Any, **fields: Any) -> NDArray[np.float32]:
    reply = running.ask("POST", "/v1/embeddings", {"input": given, **fields})
    assert reply.status == 200, reply.json
    assert [each["index"] for each in reply.json["data"]] == list(range(len(reply.json["data"])))
    return np.array([each["embedding"] for each in reply.json["data"]], np.float32)


def test_texts_and_ids_are_transformers_states(server: Running, folder: Path) -> None:
    rows = [ids_of(text) for text in TEXTS]
    wanted = expected(folder, rows)
    for given in (TEXTS, rows):
        assert np.abs(vectors_of(server, given) - wanted).max() < TOLERANCE
    for one in (TEXTS[1], rows[1]):
        assert np.abs(vectors_of(server, one) - wanted[1:2]).max() < TOLERANCE
    raw = vectors_of(server, TEXTS, normalize=False)
    assert np.abs(raw - expected(folder, rows, unit=False)).max() < TOLERANCE


def test_base64_is_the_same_numbers(server: Running) -> None:
    reply = server.ask("POST", "/v1/embeddings", {"input": "a dog", "encoding_format": "base64", "dimensions": WIDTH})
    coded = np.frombuffer(base64.b64decode(reply.json["data"][0]["embedding"]), "<f4")
    assert (coded == vectors_of(server, "a dog")[0]).all()
    assert reply.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and reply.json["model"] == "bert"


def test_more_texts_than_the_queue_holds(server: Running, folder: Path) -> None:
    """The queue holds 6; as `/tokenize` gives ids, so they are taken."""
    texts = ["a dog " * (number % 9) for number in range(50)]
    found = vectors_of(server, texts)
    assert np.abs(found - expected(folder, [ids_of(text) for text in texts])).max() < TOLERANCE
    ids = server.ask("POST", "/tokenize", {"prompt": "a dog ran"}).json["tokens"]
    assert ids == ids_of("a dog ran")
    bare = server.ask("POST", "/tokenize", {"prompt": "a dog ran", "add_special_tokens": False}).json["tokens"]
    assert bare == ids[1:-1]


def test_large_answers_are_rendered_on_the_text_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, rendered = list[str](), embeddings_api._rendered

    def on_thread(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return rendered(*given)

    monkeypatch.setattr(embeddings_api, "_rendered", on_thread)
    many = vectors_of(server, ["a dog"] * (embeddings_api._MANY // WIDTH + 1))
    assert np.abs(many - vectors_of(server, "a dog")).max() < TOLERANCE
    large, small = threads
    assert large.startswith("text") and not small.startswith("text")


@pytest.mark.parametrize(
    ("body", "status", "field", "message"),
    [
        ({"input": []}, 400, "input", "must not be empty"),
        ({"input": [[]]}, 400, "input", "0 tokens; must be 1 to 48"),
        ({"input": ["a", [5]]}, 400, "input", "must be a string, strings"),
        ({"input": "a " * 60}, 400, "input", "62 tokens; must be 1 to 48"),
        ({"input": [99]}, 400, "input", "from 0 to"),
        ({"input": ["a"] * 2049}, 400, "input", "at most 2048"),
        ({"input": "a", "dimensions": 8}, 400, "dimensions", "valid: 32"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "valid: 'float' or 'base64'"),
        ({"input": "a", "model": "other"}, 404, "model", "valid: bert, text-embedding"),
        ({"input": "a", "temperature": 1}, 400, "temperature", "unknown field"),
        ({}, 400, "input", "Missing"),
    ],
)
def test_refusals_name_the_field(server: Running, body: Any, status: int, field: str, message: str) -> None:
    reply = server.ask("POST", "/v1/embeddings", body)
    assert reply.status == status and reply.json["error"]["param"] == field, reply.json
    assert message in reply.json["error"]["message"]


def test_routes_of_generation_are_refused(server: Running) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = server.ask("POST", path, {"prompt": "a"})
        assert reply.status == 400 and "gives embeddings" in reply.json["error"]["message"]
    reply = server.ask("PUT", "/api", {"prompts": ["a"]})
    assert reply.status == 400 and "POST /v1/embeddings" in reply.json
    paths = server.ask("GET", "/openapi.json").json["paths"]
    assert "/v1/embeddings" in paths and not {"/v1/completions", "/v1/chat/completions", "/api"} & set(paths)
    body = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert body["model"]["enum"] == ["bert", "text-embedding", None] and body["dimensions"]["enum"] == [WIDTH, None]


def test_the_openai_client_reads_it(server: Running, folder: Path) -> None:
    openai: Any = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    reply = client.embeddings.create(model="text-embedding", input=TEXTS)
    found = np.array([each.embedding for each in reply.data])
    assert np.abs(found - expected(folder, [ids_of(text) for text in TEXTS])).max() < TOLERANCE


def pooled_on_ranks(groups: Groups, rank: int, folder: str, tp: int, pooling: Pooling) -> list[list[float]] | None:
    engine = engine_at(Path(folder), groups, rank, tp, pooling)
    if engine is None:
        return None
    for text in TEXTS:
        engine.add(Request(prompt=tuple(ids_of(text)), tokens=0))
    dropped = engine.add(Request(prompt=(5,), tokens=0))
    engine.cancel(dropped)
    events = {}
    while not engine.idle:
        events.update({event.request: event for event in engine.step()})
    engine.close()
    assert events.pop(dropped).finish == "cancelled"
    return [events[number].vector.tolist() for number in sorted(events)]  # type: ignore[union-attr]


@pytest.mark.parametrize("pooling", ["mean", "cls", "inner"])
def test_two_tensor_ranks_give_the_same(pool: Pool, folder: Path, pooling: Pooling) -> None:
    first, second = pool.run(pooled_on_ranks, str(folder), 2, pooling, world=2)
    assert second is None and first is not None
    wanted = expected(folder, [ids_of(text) for text in TEXTS], pooling, unit=False)
    assert np.abs(np.array(first) - wanted).max() < TOLERANCE


def test_a_folder_of_sentence_transformers_says_how_it_pools(tmp_path: Path) -> None:
    assert declared_pooling({}) is None
    config = tmp_path / "1_Pooling" / "config.json"
    config.parent.mkdir()
    files = {"1_Pooling.config.json": config}
    for mode, pooling in (("cls_token", "cls"), ("mean_tokens", "mean")):
        config.write_text(json.dumps({"word_embedding_dimension": 32, f"pooling_mode_{mode}": True}))
        assert declared_pooling(files) == pooling
    for given, pooling in (("mean", "mean"), ("cls", "cls"), (["mean"], "mean")):
        config.write_text(json.dumps({"pooling_mode": given}))
        assert declared_pooling(files) == pooling
    for settings, named in (
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens: must be one of pooling_mode_mean"),
        ({"pooling_mode": "lasttoken"}, "pooling lasttoken: must be one of mean, cls"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling mean and cls: must be one of mean, cls"),
    ):
        config.write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match=named):
            declared_pooling(files)
    kinds = ["Transformer", "Pooling", "Dense"]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="module 'Dense'"):
        check_modules({"modules.json": tmp_path / "modules.json"})


def test_a_module_with_weights_is_refused_whatever_the_pooling(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(CheckpointError, match="module 'Dense'"):
        engine_at(tmp_path, Groups(), 0, 1, "mean")


def test_the_pooling_goes_with_conversions(folder: Path, tmp_path: Path) -> None:
    """To a checkpoint, which is served with it, and back to a folder with the same files."""
    source, own, back = (tmp_path / name for name in ("source", "own", "back"))
    shutil.copytree(folder, source)
    (source / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    for load, save in ((source, own), (own, back)):
        assert main(["convert-llama", "--load-dir", str(load), "--save-dir", str(save)]) == 0
    for place in (source, own, back):
        engine = engine_at(place, Groups(), 0, 1, None)
        assert engine is not None and engine.pooling == "cls", place
    assert {"modules.json", "1_Pooling/config.json"} <= set(pushed_files(back))


def test_vectors_that_are_not_finite_fail_their_requests(
    folder: Path, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both forms of numbers; /health knows until a vector comes."""
    whole, broken = TextVectors.__call__, tuple(ids_of("dog"))

    def with_nan(self: TextVectors, rows: Sequence[Sequence[int]], pooling: Pooling) -> NDArray[np.float32]:
        vectors = whole(self, rows, pooling)
        vectors[[tuple(row) == broken for row in rows], 3] = np.nan
        return vectors

    monkeypatch.setattr(TextVectors, "__call__", with_nan)
    for form in ("float", "base64", "float"):
        reply = server.ask("POST", "/v1/embeddings", {"input": "dog", "encoding_format": form})
        assert reply.status == 500 and "hold a NaN" in reply.json["error"]["message"], reply.json
    assert server.ask("GET", "/health").status == 503
    assert np.abs(vectors_of(server, "once") - expected(folder, [ids_of("once")])).max() < TOLERANCE
    assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0.5"], "--temperature 0.5: does nothing for a BERT"),
        (["--speculate", "ngram"], "--speculate ngram: does nothing for a BERT"),
        (["--retro", "none"], "--retro none: does nothing for a BERT"),
    ],
)
def test_flags_about_text_are_refused(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err
