"""Texts that a model with a retriever continues: what its own whole rows say, token by token, in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mega.core.architecture import architecture
from mega.core.batch import NeighbourBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.capacity import GIB, SHARES, cache_bytes, expected, neighbour_bytes
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.generation.generate import generate
from mega.core.inference.options import DecodingLayout, EngineOptions
from mega.core.inference.request import Citation, Request, RequestError, Sampling
from mega.core.inference.retrieval import NoNeighbours, Retrieved, check_decoding, check_retrieval
from mega.core.inference.start import engine_on
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import initialise
from mega.core.training.wire import build_stages
from tests.inference.test_engine import answers, tokens
from tests.support.ranks import CPU

CHUNK, EACH, WIDTH, VOCAB = 4, 2, 8, 40
SIZES: dict[str, Any] = {
    "retriever": True,
    "retro_chunk_length": CHUNK,
    "retro_layers": (1, 3),
    "layers": 4,
    "hidden": 16,
    "heads": 2,
    "ffn": 32,
    "vocab": VOCAB,
    "vocab_multiple": 1,
    "seq_length": 48,
    "micro_batch": 1,
    "dtype": "fp64",
    "device": "cpu",
}
FAMILIES = {"gpt": {}, "llama": {"family": "llama", "kv_heads": 1, "retro_gate": 0.5}}


class Made:
    """Neighbours that are a function of a chunk; every third chunk has one only, every fifth none."""

    def __init__(self, device_bytes: int = 0) -> None:
        self.device_bytes = device_bytes

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        keys = chunks @ (7 ** np.arange(CHUNK))
        steps = np.arange(1, EACH * WIDTH + 1).reshape(EACH, WIDTH)
        found = np.stack([keys % 5 > 0, (keys % 5 > 0) & (keys % 3 > 0)], 1)
        cited = [[Citation(0, int(key), "corpus", 1, "text")] for key in keys]
        return Retrieved((keys[:, None, None] * steps) % VOCAB, found, cited)


@cache
def stage_of(name: str) -> tuple[ModelConfig, Any]:
    run = resolve(compose(flags={**SIZES, **FAMILIES[name]}), 1)
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    initialise(stage, 3)
    torch.manual_seed(0)
    for weight in stage.parameters():  # larger than at the beginning: what is read decides
        weight.data += 0.3 * torch.randn(weight.shape, dtype=weight.dtype)
    return run.model, stage.eval()


def engine(name: str, chunk: int = 7) -> BatchingEngine:
    options = EngineOptions(cache_tokens=512, prefill_chunk=chunk, max_requests=4)
    found = engine_on(stage_of(name)[1], Mesh.at(0), Device.choose("cpu"), options, retriever=Made())
    assert found is not None
    return found


@torch.no_grad()
def logits(name: str, ids: Sequence[int]) -> torch.Tensor:
    """Of whole rows, as in training: padded to whole chunks, which no token before reads."""
    columns = -(-len(ids) // CHUNK) * CHUNK
    row = torch.zeros(1, columns, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    near = Made()(row.view(-1, CHUNK).numpy())
    batch = NeighbourBatch(
        row,
        row,
        torch.ones(1, columns),
        torch.arange(columns)[None],
        torch.zeros(1, dtype=torch.int64),
        neighbours=torch.from_numpy(near.neighbours)[None],
        found=torch.from_numpy(near.found)[None],
    )
    found: torch.Tensor = stage_of(name)[1](batch, outputs=True).outputs
    return found[0, : len(ids), :VOCAB]


def prompts() -> list[tuple[int, ...]]:
    random = np.random.default_rng(5)
    return [tuple(random.integers(0, VOCAB, length).tolist()) for length in (1, 4, 11, 3, 20, 8, 11)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_is_what_whole_rows_say(name: str) -> None:
    """Prompts of several lengths in steps of 7 tokens, four at a time; one comes twice."""
    short = Request(prompt=(1,), tokens=2, sampling=Sampling(temperature=0.0))
    assert len(tokens(answers(engine(name), [short])[0])) == 2  # in whose steps nothing is read
    asked = [Request(prompt=each, tokens=13, sampling=Sampling(temperature=0.0), logprobs=0) for each in prompts()]
    asked.append(asked[4])
    found = answers(engine(name), asked)
    assert tokens(found[-1]) == tokens(found[4])
    for request, events in zip(asked, found, strict=True):
        ids = [*request.prompt, *tokens(events)]
        scores = logits(name, ids[:-1]).log_softmax(-1)[len(request.prompt) - 1 :]
        assert scores.argmax(-1).tolist() == tokens(events)
        given = torch.tensor([event.logprob for event in events], dtype=torch.float64)
        assert torch.allclose(scores.max(-1).values, given, atol=1e-6)
        cited = [each for event in events for each in event.cited]
        # The last token is drawn, and not read.
        assert [each.chunk for each in cited] == list(range((len(ids) - 1) // CHUNK))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_sequences_keep_is_counted(name: str) -> None:
    """The most: twice as many sequences as requests in flight, each with three states of its current chunk."""
    running, model = engine(name), stage_of(name)[0]
    answers(running, [Request(prompt=(1,) * 7, tokens=1, sampling=Sampling(temperature=0.0))] * 10)
    sequences = running._worker.reader._sequences.values()  # type: ignore[union-attr]
    tensors = [each.text for each in sequences] + [
        part for each in sequences for pair in each.pairs.values() for part in pair
    ]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    assert kept == running.neighbour_bytes == neighbour_bytes(architecture(model), 8, 4) > 0
    assert neighbour_bytes(architecture(dataclasses.replace(model, retriever=False, retro_layers=())), 8, 4) == 0


def test_the_cache_leaves_room_for_neighbours() -> None:
    """As memory-estimate says: 10 blocks of the cache fit besides what the retriever needs."""
    model, stage = stage_of("gpt")
    room, options = Device.choose("cpu").room(), EngineOptions(max_requests=4)
    token = cache_bytes(architecture(model), 8)
    taken = room - neighbour_bytes(architecture(model), 8, 4) - int(10.5 * options.block * token / SHARES["cpu"])
    found = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options, retriever=Made(taken))
    assert found is not None and found.limits.cache == 10 * options.block
    estimate = partial(expected, model, 8, room, "cpu", tp=1, pp=1, requests=4)
    estimated = estimate(retriever=taken)
    assert (estimated.limits.cache, estimated.neighbours) == (found.limits.cache, found.neighbour_bytes)
    assert estimated.lines()[2] == f"to find and keep neighbours it needs {found.neighbour_bytes / GIB:.2f} GiB more"
    assert estimate().neighbours == found.neighbour_bytes - taken


@pytest.mark.parametrize("prompt_length", [5, 70])
def test_citations_name_the_chunks_of_the_whole_text(prompt_length: int) -> None:
    """Of a text that outgrows the 48 positions more than once: by the key of its tokens, each chunk is cited once."""
    cited: list[Citation] = []
    prompt = np.random.default_rng(6).integers(0, VOCAB, prompt_length).tolist()
    new = list(generate(engine("gpt"), prompt, 90, Sampling(temperature=0.0), cite=cited.extend))
    text = [*prompt, *new]
    keys = {each.chunk: each.number for each in cited}
    expected = {
        chunk: int(np.array(text[chunk * CHUNK : (chunk + 1) * CHUNK]) @ (7 ** np.arange(CHUNK)))
        for chunk in range(0 if prompt_length < 48 else 12, (len(text) - 1) // CHUNK)
    }
    assert keys == expected and len(cited) == len(keys)


def test_a_prompt_is_scored() -> None:
    prompt = prompts()[4]
    asked = Request(prompt=prompt, tokens=0, logprobs=0, prompt_logprobs=True)
    ((event,),) = answers(engine("gpt"), [asked])
    assert event.prompt_logprobs is not None
    scores = logits("gpt", prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert torch.allclose(scores, torch.tensor(event.prompt_logprobs[1:], dtype=torch.float64), atol=1e-6)


def test_what_is_read_decides() -> None:
    prompt = prompts()[4]
    model, stage = stage_of("gpt")
    asked = [Request(prompt=prompt, tokens=0, logprobs=0, prompt_logprobs=True)]
    options = EngineOptions(cache_tokens=512, max_requests=4)
    alone = engine_on(stage, Mesh.at(0), Device.choose("cpu"), options, retriever=NoNeighbours(model))
    assert alone is not None
    ((without,),), ((read,),) = answers(alone, asked), answers(engine("gpt"), asked)
    assert without.prompt_logprobs is not None and read.prompt_logprobs is not None
    same = [first == second for first, second in zip(without.prompt_logprobs, read.prompt_logprobs, strict=True)]
    assert all(same[:CHUNK]) and not any(same[CHUNK + 3 :])


def test_beams_are_refused() -> None:
    with pytest.raises(RequestError, match="beams 2: a model with a retriever"):
        engine("gpt").add(Request(prompt=(1,), tokens=2, beams=2))


@pytest.mark.parametrize(
    ("engine_options", "layout", "adapter", "beams", "words"),
    [
        ({"speculate": "ngram"}, {}, (), 0, "--speculate ngram: excludes"),
        ({"batch_invariant": True}, {}, (), 0, "--batch-invariant: "),
        ({"cuda_graph": True}, {}, (), 0, "--cuda-graph: "),
        ({"fp8_weights": True}, {}, (), 0, "--fp8-weights: "),
        ({}, {"tp": 2}, (), 0, "--tp 2: "),
        ({}, {"pp": 2}, (), 0, "--pp 2: "),
        ({}, {}, ("a=b",), 0, "--adapter a=b: "),
        ({}, {}, (), 3, "--beams 3: "),
    ],
)
def test_what_does_not_go_with_neighbours(
    engine_options: dict[str, Any], layout: dict[str, Any], adapter: tuple[str, ...], beams: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_decoding(EngineOptions(**engine_options), DecodingLayout(**layout), adapter, beams)


def test_a_database_and_what_reads_it_belong_together() -> None:
    model, _ = stage_of("gpt")
    check_retrieval(model, "none", "runs/a")
    with pytest.raises(ValueError, match=r"--retro is missing: the model runs/a reads neighbours"):
        check_retrieval(model, None, "runs/a")
    with pytest.raises(ValueError, match=r"--retro db: the model runs/a has no retriever"):
        check_retrieval(
            resolve(compose(flags={**SIZES, "retriever": False, "retro_layers": ()}), 1).model, "db", "runs/a"
        )
