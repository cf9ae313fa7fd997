"""Names of the Hub in place of directories, against a server of its protocol on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load

import mega
from mega import cli
from mega.core.hub import download
from mega.core.hub.choice import chosen
from mega.core.hub.names import HubName, Kind, hub_name
from mega.core.hub.upload import pushed_files
from tests.support.gguf_models import byte_level
from tests.support.hub import Hub, serving
from tests.support.hugging_face import hf_folder

hub_library = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server, at which the library looks, with a cache of its own and no token."""
    constants = hub_library.constants
    with serving() as server:
        monkeypatch.chdir(tmp_path)
        for module in (constants, hub_library.hf_api, hub_library.file_download):
            for name, value in {
                "ENDPOINT": server.endpoint,
                "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
                "HF_HUB_CACHE": str(tmp_path / "cache"),
                "HF_TOKEN_PATH": str(tmp_path / "token"),
                "HF_HUB_DISABLE_XET": True,
                "HF_HUB_OFFLINE": False,
                "DOWNLOAD_CHUNK_SIZE": 1000,
            }.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(download, "PAUSE", 0.0)
        monkeypatch.setattr(hub_library.file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr(download, "LARGE", 1 << 10)
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = hf_folder(tmp_path_factory.mktemp("model"), "llama2")
    (folder / "tokenizer.model").unlink()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fetch(name: str, *flags: str) -> int:
    return cli.main(["download", name, *flags])


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert hub_name("a/b") == HubName("a/b") and hub_name("a/b@x/y:test") == HubName("a/b", "x/y", "test")
    for path in ("runs/first", "a", "a/b/c", "/a/b", "./a/b", "a/b.jsonl", "run/step-0000010", "s3://a/b"):
        assert hub_name(path) is None, path


def test_which_files_are_fetched() -> None:
    name, files = (
        HubName("a/b"),
        ["config.json", "model.safetensors", "consolidated.safetensors", "x.py", "x.bin", "d/y.json"],
    )
    assert chosen(files, name, "model") == ["config.json", "model.safetensors"]
    pooled = [*files, "1_Pooling/config.json"]
    assert "1_Pooling/config.json" in chosen(pooled, name, "model")
    assert chosen(["tokenizer.json", "config.json", "model.safetensors"], name, "tokenizer") == [
        "config.json",
        "tokenizer.json",
    ]
    rows = ["README.md", "data/train-00000.parquet", "data/test-00000.parquet", "dataset_infos.json"]
    assert chosen(rows, name, "dataset") == ["data/train-00000.parquet"]
    assert chosen(rows, name._replace(part="test"), "dataset") == ["data/test-00000.parquet"]
    for kind, bad, said in (
        ("model", ["config.json", "pytorch_model.bin"], "only safetensors"),
        ("model", ["m-Q8_0.gguf"], "choose a file by a colon"),
        ("tokenizer", ["config.json"], "no tokenizer"),
        ("dataset", ["script.py"], "no rows"),
        ("dataset", ["en/x.parquet", "de/y.parquet"], "de, en"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen(bad, name, kind)  # type: ignore[arg-type]


def test_a_name_is_loaded_and_then_taken_from_the_cache(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["models", "me/toy"] = {**model, "evil.py": b"raise SystemExit", "pytorch_model.bin": b"x" * 2000}
    line = ["convert-llama", "--load-dir", "me/toy@v1", "--save-dir"]
    assert cli.main([*line, "first"]) == 0
    assert "are fetched into" in capsys.readouterr().err
    assert not [path for _, path, _ in hub.asked if path.endswith((".py", ".bin"))]
    hub.asked.clear()
    assert cli.main([*line, "second"]) == 0 and "are fetched into" not in capsys.readouterr().err
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]
    monkeypatch.setattr(hub_library.constants, "HF_HUB_OFFLINE", True)
    assert cli.main([*line, "third"]) == 0 and "HF_HUB_OFFLINE=1" in capsys.readouterr().err
    assert mega.load("me/toy@v1").path.is_dir()
    assert fetch("me/other") == 2
    assert "me/other: no such directory, and it is not in" in capsys.readouterr().err


def test_nothing_is_fetched_for_a_line_that_is_refused(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor for a value of the file above which a flag stands."""
    hub.repositories["models", "me/toy"] = model
    assert (
        cli.main(["convert-llama", "--load-dir", "me/toy"]) == 2 and "--save-dir is missing" in capsys.readouterr().err
    )
    Path("run.toml").write_text('[checkpoint]\nload = "me/toy"\n')
    assert cli.main(["pretrain", "--config", "run.toml", "--load", "./none", "--mock-data"]) == 2
    assert "none" in capsys.readouterr().err and not hub.asked


def test_python_takes_names_too(hub: Hub, model: dict[str, bytes], capfd: pytest.CaptureFixture[str]) -> None:
    hub.repositories["models", "me/toy"] = model
    first = mega.load("me/toy", device="cpu").logits([1, 2, 3])
    mega.convert("me/toy", "own")
    assert mega.load("own", device="cpu").logits([1, 2, 3]).equal(first)
    with pytest.raises(ValueError, match="--micro-batch is missing"):
        mega.finetune(mega.config(load="me/toy", vocab=first.shape[-1]))
    with pytest.raises(ValueError, match="path me/other: no such directory"):
        mega.load("me/other")
    assert capfd.readouterr() == ("", "")


def test_cut_transfers_are_resumed(hub: Hub, model: dict[str, bytes]) -> None:
    """In one call, and in the next one after the first has given up; nothing is fetched twice."""
    hub.repositories["models", "me/toy"] = model
    hub.cut = [5_000, 7_000]
    assert fetch("me/toy") == 0
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == ["", "bytes=5000-", "bytes=12000-"]
    shutil.rmtree("cache")
    hub.asked.clear()
    hub.cut = [5_000, *[0] * 40]
    assert fetch("me/toy") == 1
    hub.asked.clear()
    hub.cut.clear()
    assert fetch("me/toy", "--to", "copy") == 0
    assert Path("copy/model.safetensors").read_bytes() == model["model.safetensors"]
    assert "bytes=5000-" in {asked for _, path, asked in hub.asked if path.endswith("model.safetensors")}


def test_what_came_is_compared_with_its_hash(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["models", "me/toy"] = model
    blobs = Path("cache/models--me--toy/blobs")
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(model["model.safetensors"]).hexdigest()
    (blobs / f"{digest}.mega-part").write_bytes(b"other bytes")
    assert fetch("me/toy") == 1 and "damaged" in capsys.readouterr().err
    assert fetch("me/toy") == 0


def test_refusals_are_one_line(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories |= {("models", "me/toy"): model, ("models", "me/mine"): model, ("models", "me/gated"): model}
    hub.private, hub.gated = {"me/mine"}, {"me/gated"}

    def said(name: str) -> str:
        assert fetch(name) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "has no revision gone: no such branch, tag or commit" in said("me/toy@gone")
    assert "no such repository" in said("me/none") and "needs HF_TOKEN" in said("me/mine")
    assert "access is granted on its page" in said("me/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert "refuses the token (HTTP 401)" in said("me/toy")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert fetch("me/mine") == 0


def test_a_full_disk(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before a byte is written where the disk says so; else what came is kept, and the next call continues."""
    hub.repositories["models", "me/toy"] = model
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda place: usage(10, 10, 0))
        assert fetch("me/toy") == 2 and "do not fit" in capsys.readouterr().err
    assert not list(Path("cache").rglob("*.mega-part"))
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, before[1]))
        code = fetch("me/toy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1 and "needs more room in" in capsys.readouterr().err
    assert 0 < next(Path("cache").rglob("*.mega-part")).stat().st_size <= 8 << 10
    assert fetch("me/toy") == 0
    assert "bytes=" in next(
        asked for _, path, asked in reversed(hub.asked) if path.endswith("model.safetensors") and asked
    )


@pytest.mark.parametrize(("endpoint", "words"), [("http://127.0.0.1:9", "cannot be reached: "), (None, "503 ")])
def test_a_hub_that_gives_no_list(hub: Hub, endpoint: str | None, words: str, tmp_path: Path) -> None:
    """The reason is the one that occurred: no connection, or a server that is overloaded."""
    hub.overloaded = True
    away = {**os.environ, "HF_ENDPOINT": endpoint or hub.endpoint, "HF_HOME": str(tmp_path)}
    line = [sys.executable, "-m", "mega", "download", "me/toy"]
    ended = subprocess.run(line, capture_output=True, text=True, env=away, check=False, timeout=200)
    assert ended.returncode == 2 and "me/toy: no such directory, and it is not in" in ended.stderr
    assert words in ended.stderr and ("cannot be reached" in ended.stderr) == (endpoint is not None), ended.stderr


def test_a_process_that_has_loaded_nothing(tmp_path: Path) -> None:
    """The library loads its parts when they are named, so that another test's import would hide a missing one."""
    line = [sys.executable, "-m", "mega", "download", "nobody/nothing"]
    away = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    made = subprocess.run(line, capture_output=True, text=True, env=away, check=False, timeout=100)
    assert made.returncode == 2 and "it is not in" in made.stderr and "Traceback" not in made.stderr


def test_push(
    hub: Hub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint goes up in Hugging Face's form with a card, and comes down as the same model; the card stays."""
    Path("hf").mkdir()
    for file, data in model.items():
        Path("hf", file).write_bytes(data)
    Path("hf/notes.py").write_text("")
    assert cli.main(["convert-llama", "--load-dir", "hf", "--save-dir", "weights"]) == 0
    line = ["push", "weights", "me/new", "--license", "apache-2.0"]
    assert cli.main(line) == 2 and "needs a token" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    disk = SimpleNamespace(free=64 << 20)
    with monkeypatch.context() as full:
        full.setattr("mega.core.hub.upload.shutil.disk_usage", lambda path: disk)
        hub.asked.clear()
        assert cli.main(line) == 2 and not hub.asked
        assert "do not fit" in (said := capsys.readouterr().err) and "TMPDIR names another place" in said
    assert cli.main(line) == 0 and "/commit/" in capsys.readouterr().out
    files = hub.repositories["models", "me/new"]
    card = files["README.md"].decode()
    assert card.startswith('---\nlicense: "apache-2.0"\n') and "mega generate --load me/new" in card
    assert "pipeline_tag" in card and "| parameters |" in card
    assert json.loads(files["config.json"])["model_type"] == "llama" and "notes.py" not in files
    assert load(files["model.safetensors"]).keys() == load(model["model.safetensors"]).keys()
    for tensor, value in load(model["model.safetensors"]).items():
        assert load(files["model.safetensors"])[tensor].equal(value)
    assert cli.main(["push", "hf", "me/new", "--private"]) == 2
    assert "--private: me/new exists and is public" in capsys.readouterr().err
    Path("hf/secrets.json").write_text("{}")
    assert cli.main(["push", "hf", "me/new"]) == 0 and "keeps the model card" in capsys.readouterr().err
    assert files["README.md"].decode() == card and "secrets.json" not in files
    assert fetch("me/new") == 0
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert cli.main(line) == 2 and "refuses the token" in capsys.readouterr().err


def test_a_dataset_is_read_by_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Its training split, whatever else of it is in the cache, and any other by a colon, as texts and conversations."""
    rows = b'{"text": "1 2 3"}\n'
    hub.repositories["datasets", "me/rows"] = {"README.md": b"", "train.jsonl": rows * 4, "test.jsonl": rows * 3}
    line = ["preprocess", "--tokenizer", "NullTokenizer", "--vocab-size", "9", "--output-prefix"]
    assert cli.main([*line, "a", "--input", "me/rows:test"]) == 0
    assert "3 documents, 9 tokens" in capsys.readouterr().out
    assert cli.main([*line, "b", "--input", "me/rows"]) == 0
    assert "4 documents, 12 tokens" in capsys.readouterr().out
    alpaca = b'{"instruction": "Add.", "input": "1 1", "output": "2"}\n'
    hub.repositories["datasets", "me/talks"] = {"data/train.jsonl": alpaca, "data/validation.jsonl": b"broken"}
    byte_level(Path("."), "gpt-2")
    Path("a.toml").write_text('[samples]\ninput = ["me/talks"]\n')
    shown = ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer.json", "--chat-template", "plain"]
    assert cli.main(["data", "show-sample", *shown, "--config", "a.toml"]) == 0
    assert "'2'                            20  yes" in capsys.readouterr().out
    assert {path.rpartition("/")[2] for _, path, _ in hub.asked if "me/talks/resolve" in path} == {"train.jsonl"}


def test_the_template_for_functions_comes_and_goes_with_a_model(tmp_path: Path) -> None:
    """The one file in a subfolder that transformers reads besides the files at the top."""
    tool_use = "additional_chat_templates/tool_use.jinja"
    files = ["model.safetensors", "tokenizer.json", tool_use, "additional_chat_templates/rag.jinja", "onnx/config.json"]
    kinds: tuple[Kind, ...] = ("model", "tokenizer")
    for kind in kinds:
        fetched = chosen(files, HubName("me/toy"), kind)
        assert tool_use in fetched and not {"additional_chat_templates/rag.jinja", "onnx/config.json"} & set(fetched)
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert pushed_files(tmp_path) == ["model.safetensors", "tokenizer.json", tool_use]
