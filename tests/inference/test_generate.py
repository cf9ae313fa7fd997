"""A whole model out of a checkpoint: what it generates, and how it scores a text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from mega import cli
from mega.api.training import from_weights, with_stored_options
from mega.core.architecture import units
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, locate
from mega.core.config.run import Options, updated
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.inference.generation.generate import generate, logits, losses
from mega.core.inference.loading.load import MOST_ENDS, load_model, load_tokenizer, open_model, weight_pieces
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Engine, Sampling
from mega.core.inference.start import engine_on
from mega.core.model.decoder import DecoderStage
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from mega.core.text.train import train_bpe
from tests.support.hugging_face import hf_folder
from tests.support.shared import shared

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, DecoderStage]:
    """A model of random weights, and a checkpoint of it with a tokenizer."""
    directory = tmp_path_factory.mktemp("saved")
    files = train_bpe(["ab abc ab " * 20], 260, directory / "tokenizer")
    model = ModelConfig(
        layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=260, positions=8, qkv_bias=True
    )
    stage = DecoderStage(model, units(model), ParameterFactory({}, torch.float32, torch.device("cpu")), ALONE)
    initialise(stage, 5)
    with torch.no_grad():
        for weight in stage.parameters():
            weight.mul_(8.0)  # far from uniform
    meta = {"config": {"model": dataclasses.asdict(model), "tokenizer": {"tokenizer": "GPT2BPETokenizer"}}}
    before = [(piece, piece.tensor.clone()) for piece in _pieces_without_change(stage)]
    pieces = [dataclasses.replace(piece, tensor=tensor) for piece, tensor in before]
    CheckpointStore(directory / "run").save(7, pieces, meta, attachments={path.name: path for path in files})
    return locate(directory / "run"), stage.eval()


def _pieces_without_change(stage: DecoderStage) -> list:  # type: ignore[type-arg]
    """`weight_pieces` prepares a stage for reading and zeroes it; here its weights are to be kept."""
    kept = [weight.data.clone() for weight in stage.parameters()]
    pieces = list(weight_pieces(stage))
    for weight, data in zip(stage.parameters(), kept, strict=True):
        weight.data.copy_(data)
    return pieces


def test_the_loaded_model_is_the_saved_one(saved: tuple[Checkpoint, DecoderStage]) -> None:
    checkpoint, stage = saved
    ids = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    found = logits(load_model(checkpoint), ids)
    assert found.shape == (2, 4, 260)
    torch.testing.assert_close(found, logits(stage, ids), rtol=1e-4, atol=1e-4)
    assert found.std() > 0.1


def _engine(stage: DecoderStage, vocab: int | None = None) -> Engine:
    found = engine_on(stage, Mesh.at(0), Device.choose("cpu"), EngineOptions(max_requests=1, vocab=vocab))
    assert found is not None
    return found


def test_a_text_that_is_stopped_leaves_the_engine_as_it_was(saved: tuple[Checkpoint, DecoderStage]) -> None:
    """As Ctrl-C stops an answer at a terminal."""
    engine = _engine(saved[1])
    made = generate(engine, [1, 2], 5, GREEDY)
    first = next(made)
    made.close()
    assert engine.idle and next(generate(engine, [1, 2], 5, GREEDY)) == first


def test_greedy_text_is_the_likeliest_at_every_place(saved: tuple[Checkpoint, DecoderStage]) -> None:
    _, stage = saved
    said = list(generate(_engine(stage), [1, 2], 6, GREEDY))
    best = logits(stage, torch.tensor([[1, 2, *said]]))[0].argmax(-1).tolist()
    assert said == best[1:-1]


def test_a_text_that_outgrows_the_positions_is_seen_from_its_end(saved: tuple[Checkpoint, DecoderStage]) -> None:
    _, stage = saved
    engine, long = _engine(stage), list(range(30, 50))
    assert list(generate(engine, long, 4, GREEDY)) == list(generate(engine, long[-4:], 4, GREEDY))
    said = list(generate(engine, [1, 2], 11, GREEDY))
    assert said[6:10] == list(generate(engine, said[2:6], 4, GREEDY))
    assert said[10:] == list(generate(engine, said[6:10], 1, GREEDY))
    assert len(list(generate(engine, [1, 2], 11, Sampling(seed=2**64 - 1)))) == 11


def test_the_end_token_ends_the_text(saved: tuple[Checkpoint, DecoderStage]) -> None:
    _, stage = saved
    engine = _engine(stage)
    said = list(generate(engine, [1, 2], 5, GREEDY))
    ended = list(generate(engine, [1, 2], 5, GREEDY, stop_ids=frozenset({said[2]})))
    assert ended == said[: said.index(said[2]) + 1]
    assert max(said) > 2 >= max(generate(_engine(stage, vocab=3), [1, 2], 5, GREEDY))
    with pytest.raises(ValueError, match="prompt"):
        list(generate(engine, [], 5, GREEDY))


def test_losses_are_those_of_each_window(saved: tuple[Checkpoint, DecoderStage]) -> None:
    _, stage = saved
    ids = [(7 * i) % 200 for i in range(20)]  # windows of 8, 8 and 3
    found = losses(stage, ids)
    assert len(found) == 19
    for start, stop in ((0, 8), (8, 16), (16, 19)):
        rows = logits(stage, torch.tensor([ids[start:stop]]))[0].log_softmax(-1)
        expected = [-float(rows[i, ids[start + i + 1]]) for i in range(stop - start)]
        torch.testing.assert_close(found[start:stop], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_the_verb_generates_the_same_text_for_the_same_seed(
    saved: tuple[Checkpoint, DecoderStage], capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = saved
    printed = []
    for seed in ("1", "1", "2"):
        line = ["generate", "--load", str(checkpoint.path), "--prompt", "ab", "--tokens", "9", "--seed", seed]
        assert cli.main([*line, "--device", "cpu"]) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert printed[0].startswith("ab")


def test_a_seed_that_no_generator_takes(
    saved: tuple[Checkpoint, DecoderStage], capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", "--load", str(saved[0].path), "--prompt", "ab", "--tokens", "1", "--device", "cpu", "--seed"]
    for seed in (-(2**63), 2**64 - 1):
        assert cli.main([*line, str(seed)]) == 0
    capfd.readouterr()
    for seed in (-(2**63) - 1, 2**64):
        assert cli.main([*line, str(seed)]) == 2
        printed = capfd.readouterr()
        assert printed.out == "" and printed.err.startswith(f"mega: --seed {seed}: must be a whole number from -92")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Once", "Once upon a time, there was"),
        ("Lily and", "Lily and Tom were playing"),
        ("", "Once upon a time, there"),
    ],
)
def test_the_blank_after_the_prompt_is_reported(
    tmp_path: Path, prompt: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """SentencePiece's decoder drops the blank of a first piece, and the first new piece is not the text's first."""
    convert(shared("stories260K_hf/config.json").parent, tmp_path)
    line = ["generate", "--load", str(tmp_path), "--prompt", prompt, "--tokens", "6", "--temperature", "0"]
    assert cli.main([*line, "--device", "cpu"]) == 0
    assert capfd.readouterr().out == f"{text}\n"


def test_a_file_of_prompts_is_answered_in_order_as_each_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(shared("stories260K_hf/config.json").parent)
    asked = ["Once upon", "Lily and", "Tom"]
    lines = [json.dumps(asked[0]), "", json.dumps({"prompt": asked[1]}), json.dumps({"text": asked[2]})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    line = ["generate", "--load", model, "--tokens", "6", "--greedy", "--device", "cpu"]
    assert cli.main([*line, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]) == 0
    rows = [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]
    capfd.readouterr()
    for prompt, row in zip(asked, rows, strict=True):
        assert cli.main([*line, "--prompt", prompt]) == 0
        assert capfd.readouterr().out == f"{prompt}{row['text']}\n" and row["prompt"] == prompt
        assert (row["finish"], row["tokens"]) == ("length", 6)
    (tmp_path / "in.txt").write_bytes("\ufeffOnce\u2028upon\x0ca\x85time\r\nTom\n".encode())
    beams = [
        "generate",
        "--load",
        model,
        "--tokens",
        "1",
        "--beams",
        "65",
        "--device",
        "cpu",
    ]  # more than rows of draws
    assert cli.main([*beams, "--input", str(tmp_path / "in.txt")]) == 0
    texts = [json.loads(row)["prompt"] for row in capfd.readouterr().out.removesuffix("\n").split("\n")]
    assert texts == ["Once\u2028upon\x0ca\x85time", "Tom"]
    assert cli.main(line) == 0
    from_nothing = capfd.readouterr()
    assert from_nothing.out and "no terminal to ask at: one text from an empty prompt" in from_nothing.err
    (tmp_path / "in.jsonl").write_text('{"prompt": "\\ud83d"}\n')
    assert cli.main([*line, "--input", str(tmp_path / "in.jsonl")]) == 2
    assert "in.jsonl:1: is not JSON" in capfd.readouterr().err
    plain = ["generate", "--load", model, "--tokens", "60", "--device", "cpu", "--num-samples", "2"]
    assert cli.main(plain) == 0
    samples = [json.loads(row) for row in capfd.readouterr().out.splitlines()]
    assert len(samples) == 2 and samples[0]["text"] != samples[1]["text"] and samples[0]["prompt"] == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompt a --num-samples 2", "--prompt: excludes --num-samples"),
        ("--prompt a --output x", "--output x: needs --input or --num-samples"),
        ("--prompt a --tp 3", "--tp 3: must divide the model's 4 key/value heads (valid: 1, 2, 4)"),
        ("--prompt a --pp 6", "--pp 6: must be at most the model's 5 blocks"),
        ("--prompt a --tp 2 --nproc 4", "--tp x --pp = 2: must be the number of ranks, 4"),
        ("--prompt a --vocab-file v", "--vocab-file v: no such file"),
        ("--prompt a --min-p 2", "--min-p 2.0: must be from 0 to 1"),
        ("--prompt a --beams 2 --top-k 5", "--top-k: has no effect with --beams 2"),
        ("--prompt a --beams 2 --greedy", "--greedy: has no effect with --beams 2"),
        ("--prompt a --length-penalty 1", "--length-penalty 1.0: needs --beams"),
        ("--prompt a --beams 2 --length-penalty 400", "--length-penalty 400.0: must be a number from -20 to 20"),
        ("--prompt a --cuda-graph --batch-invariant", "--cuda-graph: excludes --batch-invariant"),
        ("--prompt a --cuda-graph --device cpu", "--cuda-graph: excludes --device cpu"),
        ("--input missing.txt", "--input missing.txt: no such file"),
        ("--input /dev/stdin", "--input /dev/stdin: must be a file, no pipe or folder"),
        ("--prompt \udcff", "--prompt: is not UTF-8"),
    ],
)
def test_what_generate_refuses(flags: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--load", str(shared("stories260K_hf/config.json").parent), "--device", "cpu", *flags.split()]
    assert cli.main(line) == 2
    assert capfd.readouterr().err.startswith(f"mega: {message}")


def test_a_checkpoint_without_a_tokenizer_is_reported(saved: tuple[Checkpoint, DecoderStage], tmp_path: Path) -> None:
    checkpoint, stage = saved
    meta = {"config": {"model": checkpoint.meta["config"]["model"], "tokenizer": {"tokenizer": None}}}
    CheckpointStore(tmp_path).save(1, _pieces_without_change(stage), meta)
    with pytest.raises(ValueError, match="carries no tokenizer"):
        load_tokenizer(locate(tmp_path))


def test_a_text_ends_at_any_of_the_ends_that_a_hugging_face_model_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in transformers, also where it was converted to ours, and from ours back."""
    transformers = pytest.importorskip("transformers")
    theirs, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    hf_folder(theirs, "llama3", vocab_size=260, eos_token_id=256)
    (theirs / "tokenizer.model").unlink()
    for path in train_bpe(["ab abc ab " * 20], 260, tmp_path / "tokenizer"):
        path.rename(theirs / path.name)
    tokenizer, model = open_model(theirs).tokenizer(), transformers.AutoModelForCausalLM.from_pretrained(theirs)
    prompt = torch.tensor([tokenizer.encode("ab")])
    free = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
    ends = [free[-5], free[-2]]
    assert tokenizer.eod not in free and ends[0] != ends[1]
    (theirs / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    stopped = transformers.AutoModelForCausalLM.from_pretrained(theirs).generate(
        prompt, max_new_tokens=8, do_sample=False
    )
    convert(theirs, ours)
    convert(ours, back, "hf")
    (tmp_path / "in.txt").write_text("ab\n")
    for place in (theirs, ours, back):
        line = ["generate", "--load", str(place), "--input", str(tmp_path / "in.txt"), "--tokens", "8", "--greedy"]
        assert cli.main([*line, "--device", "cpu"]) == 0
        row = json.loads(capfd.readouterr().out)
        new = stopped[0].tolist()[prompt.shape[1] :]
        assert (row["finish"], row["tokens"]) == ("stop", len(new)) and len(new) < 8
        assert row["text"] == tokenizer.decode(new[:-1])
        assert open_model(place).stop_ids() == set(ends)
    (theirs / "generation_config.json").write_text("{}")
    assert open_model(theirs).stop_ids() == {256}, "of config.json"


@pytest.mark.parametrize("value", [512, -1, True, "2", 2.0, [2, 512], [[2]], {}, [2] * (MOST_ENDS + 1)], ids=str)
def test_ends_that_the_model_cannot_have_are_refused(
    tmp_path: Path, value: object, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shared("stories260K_hf/config.json").parent, tmp_path / "hf", copy_function=shutil.copyfile)
    file = tmp_path / "hf" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": value}))
    for verb in (["generate", "--prompt", "a", "--load"], ["serve", "--port", "0"]):
        assert cli.main([*verb, str(tmp_path / "hf"), "--device", "cpu"]) == 2
        error = capfd.readouterr().err
        assert error.startswith(f"mega: {file}: eos_token_id {repr(value)[:60]}: must be a token from 0 to 511")


def test_a_training_takes_the_tokenizer_that_comes_with_its_weights(saved: tuple[Checkpoint, DecoderStage]) -> None:
    place = str(saved[0].path)
    for begins in ({"load": place}, {"load": place, "save": place}, {"resume": place}):
        found = with_stored_options(from_weights(updated(Options(), begins))).tokenizer
        assert found.tokenizer == "GPT2BPETokenizer" and found.vocab_file and found.vocab_file.startswith(place)
        assert with_stored_options(updated(Options(), begins)).tokenizer == found
