"""`mega generate --url`: the client of 2023, of our server and of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mega.cli import main
from mega.core.inference.request import Sampling
from mega.core.inference.server.client import ask, converse
from tests.inference.server.conftest import Running
from tests.support.fake_engine import FakeEngine


def test_it_asks_as_megatrons_client_does(
    server: Running, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(f"127.0.0.1:{server.port}", "Once ", 5) == "Once Hello"
    assert ask(f"{server.url}/api", "Once ", 2, top_k=1) == "Once He" and engine.seen[-1].sampling.top_k == 1
    typed: Iterator[str] = iter(["Once ", "5", "x", "many", "y", "100000"])

    def read(question: str) -> str:
        print(question, end="")
        if (found := next(typed, None)) is None:
            raise EOFError
        return found

    converse(server.url, {}, read)
    shown = capsys.readouterr().out
    assert "Enter prompt: Enter number of tokens to generate: Megatron Response: \nOnce Hello\n" in shown
    assert "'many': must be a whole number" in shown
    assert "400: Length of prompt + tokens_to_generate longer than allowed" in shown


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("ftp://a", ValueError, "must be HOST:PORT"),
        ("http://a:x", ValueError, "must be HOST:PORT"),
        ("127.0.0.1:9", OSError, "no answer"),
    ],
)
def test_an_address_that_is_wrong_is_named(url: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ask(url, "a", 1)


def test_mega_generate_asks_a_server(server: Running, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"generate --url 127.0.0.1:{server.port} --prompt x --tokens 3 --temperature 0.5 --top-p 0.9 --seed 4"
    assert main(line.split()) == 0 and capsys.readouterr().out == "xHel\n"
    how = engine.seen[-1].sampling
    assert (how.temperature, how.top_p, how.seed) == (0.5, 0.9, 4)
    said = "--temperature 1 --top-k 0 --top-p 1 --seed 0"  # what is typed counts, also where it is the usual value
    assert main([*line.split()[:-6], *said.split()]) == 0
    assert engine.seen[-1].sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=0)
    excluded = "--load x;--tp 2;--nproc 2;--dtype fp32;--batch-invariant;--no-cuda-graph;--vocab-file x"
    for flags in (*excluded.split(";"), "--tokenizer NullTokenizer", "--device cpu"):
        assert main([*line.split(), *flags.split()]) == 2
        assert f"{flags.split()[0]}: excludes --url" in capsys.readouterr().err
