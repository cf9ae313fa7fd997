"""A SentencePiece model that leaves mega gives the same ids in transformers, whatever its kind; or it is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.text.build import build
from tests.cli.test_identity import SHAPE, STEP
from tests.support.shared import shared
from tests.text.test_gpt2 import fuzz

CONTROLS = ("<unk>", "<s>", "</s>")
KINDS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True},
    "unigram-as-it-is": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram-no-blank": {"add_dummy_prefix": False},
    "unigram-symbols": {"user_defined_symbols": ["<sep>", "@@"]},
    "bpe": {"model_type": "bpe"},
    "bpe-bytes": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nfkc"},
    "char": {"model_type": "char"},
    "word": {"model_type": "word"},
    "bpe-symbols": {"model_type": "bpe", "user_defined_symbols": ["<sep>"]},
}
LEFT_OUT = ("word", "bpe-symbols")


def lines(count: int) -> list[str]:
    english = shared("wikitext/wiki.valid.raw").read_text().split("\n")
    chinese = shared("chinese/cmrc2018_trial_contexts.jsonl").read_text().splitlines()
    return [*english[: 4 * count], *(json.loads(line)["text"][:200] for line in chinese[:count])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import sentencepiece

    folder, found = tmp_path_factory.mktemp("models"), dict[str, Path]()
    for name, options in KINDS.items():
        found[name] = folder / name / "tokenizer.model"
        found[name].parent.mkdir()
        with found[name].open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines(60)), model_writer=writer, vocab_size=2000, character_coverage=0.98,
                hard_vocab_limit=False, minloglevel=2, **options,
            )  # fmt: skip
    return found


def texts() -> list[str]:
    """Drawn ones, English and Chinese; without what an export warns of: loose combining marks, names of bytes."""
    drawn = [text for text in fuzz(1500, 8) if not any("\u0300" <= letter < "\u0370" for letter in text)]
    found = [
        *drawn,
        *lines(100),
        "  two  blanks ",
        "a<sep>b @@ c",
        "e\u0301t\u00e9 \u1100\u1161",
        "",
        "a\u2581",
        "b \u2581 ",
    ]
    return [text for text in found if not any(name in text for name in CONTROLS)]


def written(model: Path, folder: Path, kind: str = "GPTSentencePieceTokenizer") -> Path:
    tokenizer = build(tokenizer=kind, tokenizer_model=model)
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", [name for name in KINDS if name not in LEFT_OUT])
def test_transformers_gives_the_same_ids(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(models[name]))
    theirs = transformers.AutoTokenizer.from_pretrained(written(models[name], tmp_path / "out"))
    expected = model.encode(texts())
    assert theirs(texts())["input_ids"] == expected
    assert [theirs.decode(ids) for ids in expected[:50] if 0 not in ids] == [
        model.decode(ids) for ids in expected[:50] if 0 not in ids
    ]
    back = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path / "out")
    spelled = [*texts(), "a<s>b</s> <unk>", "</s>"]
    assert [back.encode(text) for text in spelled] == model.encode(spelled), "control tokens in text are text"
    assert back.encode_special("a</s>")[-1] == model.eos_id()
    llama = written(models[name], tmp_path / "llama", "Llama2Tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(llama)
    assert theirs("a b")["input_ids"] == [model.bos_id(), *model.encode("a b")]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_cannot_be_written_is_left_out(models: dict[str, Path], name: str) -> None:
    tokenizer = build(tokenizer="Llama2Tokenizer", tokenizer_model=models[name])
    assert tokenizer.huggingface_files() == {} and "of SentencePiece" in str(tokenizer.unpublished())


def test_a_unigram_tokenizer_json_of_theirs(models: dict[str, Path], tmp_path: Path) -> None:
    """As transformers writes one: read by mega with the ids of its own call, tokens by name or not."""
    transformers = pytest.importorskip("transformers")
    written(models["unigram"], tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    theirs.save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    ours = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path / "saved")
    for text in [*texts()[:300], "a<|im_end|>b</s> c", "<s>x"]:
        assert ours.encode_special(text) == theirs(text)["input_ids"], text
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert end not in ours.encode("a<|im_end|>b")


def run_with(model: Path, folder: Path, kind: str) -> list[str]:
    """A model trained with a tokenizer, exported; what the command line says of it."""
    (folder / "a.jsonl").write_text('{"text": "Once upon a time there was a model of few words."}\n' * 40)
    tokenizer = ["--tokenizer", kind, "--tokenizer-model", model]
    data = ["--data-path", folder / "a_text_document", "--split", "1,0,0"]
    for words in (
        ["preprocess", "--input", folder / "a.jsonl", "--output-prefix", folder / "a", *tokenizer],
        ["pretrain", *SHAPE, *STEP, *tokenizer, *data, "--save", folder / "run", "--save-interval", 1],
        ["convert-llama", "--load-dir", folder / "run", "--save-dir", folder / "hf"],
    ):
        assert main([str(word) for word in words]) == 0
    return sorted(path.name for path in (folder / "hf").iterdir())


def test_an_export_says_what_is_left_out(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind, said in (
        ("word", "Llama2Tokenizer", "its tokenizer is left out: no tokenizer.json gives the ids of this word model"),
        ("unigram", "SentencePieceTokenizer", "its tokenizer is left out: transformers has none that adds tokens"),
        ("unigram", "Llama2Tokenizer", "transformers cuts a text with accents that form no one character"),
    ):
        folder = tmp_path / f"{name}-{kind}"
        folder.mkdir()
        found = run_with(models[name], folder, kind)
        assert f"mega: {kind}: {said}" in capsys.readouterr().err
        kept = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
        assert kept & set(found) == (kept if "left out" not in said else set()), found
        shutil.rmtree(folder)
