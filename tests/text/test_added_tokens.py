"""Tokens that Hugging Face's small files add to a tokenizer.json, or whose flags they change: ids, texts and variables
of templates as in transformers, and the identity of the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega.core.checkpoint.forms import chat_files
from mega.core.checkpoint.forms.form import SpecialTokens
from mega.core.text.build import build
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.messages import Conversation
from mega.core.text.tokenizer import Tokenizer
from tests.support.chat_judge import opened
from tests.support.chat_templates import SMALL, sentencepiece, untagged
from tests.support.shared import shared

PLAIN = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
TEXTS = ("a <x> b<y>c", "<y><x>", "Hello world <z>", "x<z> y", " <z>", "<|im_start|>user<x>")


def changed(folder: Path, kind: str, added: list[dict[str, Any]] | None = None, **config: Any) -> Path:
    """A small tokenizer, with `added` in its tokenizer.json and `config` in its tokenizer_config.json."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    folder.mkdir(exist_ok=True)
    SMALL[kind](folder)
    library = Library.from_file(str(folder / "tokenizer.json"))
    for token in added or ():
        library.add_tokens([AddedToken(**token)])
    library.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def check_equal(folder: Path) -> tuple[Tokenizer, Any]:
    ours, theirs = opened(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.parse(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
    return ours, theirs


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
def test_tokens_of_the_files_keep_their_order(tmp_path: Path, kind: str) -> None:
    """Two tokens that only added_tokens.json or tokenizer_config.json lists get the ids that these files give."""
    pytest.importorskip("transformers")
    size = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=changed(tmp_path / "bare", kind)).vocab_size
    decoder = {str(size + 1): {**PLAIN, "content": "<x>"}, str(size): {**PLAIN, "content": "<y>", "lstrip": True}}
    ours, _ = check_equal(changed(tmp_path / "decoder", kind, added_tokens_decoder=decoder))
    assert ours.vocabulary_tokens()["<y>"] == size and ours.vocabulary_tokens()["<x>"] == size + 1
    (changed(tmp_path / "older", kind) / "added_tokens.json").write_text(json.dumps({"<x>": size, "<y>": size + 1}))
    ours, _ = check_equal(tmp_path / "older")
    assert ours.encode("<x>")[-1] == size and ours.encode("<y>")[-1] == size + 1
    earlier = ours.identity()._replace(fingerprint=ours._hash(size + 2, "all files"))
    assert not ours.made(earlier), "an earlier version numbered them in the opposite order"


@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({"added_tokens_decoder": {"750": {**PLAIN, "content": "<z>", "lstrip": True}}}, False),
        ({"added_tokens_decoder": {"750": {**PLAIN, "content": "<z>", "rstrip": True}}, "image_token": "<z>"}, True),
        ({"pad_token": "<z>"}, True),
        ({"image_token": "<z>"}, True),
        ({"extra_special_tokens": {"end_of_image": "<z>"}}, True),
        ({"additional_special_tokens": ["<z>", "Hello"]}, False),
        ({"added_tokens_decoder": {}, "image_token": "<z>"}, False),
    ],
)
def test_flags_of_the_files(tmp_path: Path, config: dict[str, Any], special: bool) -> None:
    pytest.importorskip("transformers")
    token = {"content": "<z>", "rstrip": True, "normalized": True}
    ours, theirs = check_equal(changed(tmp_path, "byte-level", [token], **config))
    assert ("<z>" in ours.special_tokens()) is special
    theirs_special = {each.content for each in theirs.added_tokens_decoder.values() if each.special}
    assert set(ours.special_tokens()) == theirs_special


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_space_before_a_text(tmp_path: Path, kind: str, prefixed: bool) -> None:
    """add_prefix_space of tokenizer_config.json counts for raw text too, and for decoded text."""
    pytest.importorskip("transformers")
    bare = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=changed(tmp_path / "bare", kind))
    folder = changed(tmp_path / "other", kind, add_prefix_space=prefixed)
    shutil.copy(tmp_path / "bare" / "tokenizer.json", folder)
    ours, theirs = opened(folder)
    for text in ("hello", "a b", "é"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ours.encode_special(text) == ids == ours.encode_batch([text]).ids.tolist()
        assert ours.decode(ids) == theirs.decode(ids)
    same = (kind == "llama") is prefixed
    assert (ours.identity() == bare.identity()) is same and ours.made(bare.identity()) is same


def test_a_models_own_tokens_are_variables_of_its_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    own: dict[str, Any] = {
        "image_token": "<|im_end|>",
        "extra_special_tokens": {"boi_token": "<|im_start|>", "turn": "<|eot_id|>"},
    }
    ours, theirs = opened(changed(tmp_path, "byte-level", **own))
    source = "{{ boi_token }}{{ turn }}{% for m in messages %}{{ m.content }}{{ image_token }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    found = ChatFormat(source, ours, "--chat-template t.jinja")
    assert found.text(messages) == "<|im_start|><|eot_id|>Hi<|im_end|>"
    tokens = SpecialTokens({}, names=ours.named_tokens(), template=source)
    written = chat_files.tokenizer_config({chat_files.TOKENIZER: tmp_path / chat_files.TOKENIZER}, tokens)
    assert written == json.loads((tmp_path / chat_files.TOKENIZER).read_text()) | {"chat_template": source}
    assert list(found.prompt(messages)) == theirs.apply_chat_template(messages, chat_template=source)["input_ids"]


def test_special_tokens_of_a_unigram_model_shift_no_id_of_raw_text(tmp_path: Path) -> None:
    """Raw text recognises <x>, which follows special tokens in the vocabulary, under its own id."""
    special: dict[str, Any] = {"special": True}
    tokens: list[dict[str, Any]] = [{"content": "<s1>", **special}, {"content": "<x>"}, {"content": "<s2>", **special}]
    folder = changed(tmp_path, "unigram", [*tokens, {"content": "<y>"}])
    ours = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=folder)
    for name in ("<x>", "<y>"):
        assert ours.encode(name) == [ours.control(name)]
        assert ours.encode_batch([name]).ids.tolist() == [ours.control(name)]
    assert not set(ours.encode("<s1> <s2>")) & set(ours.special_tokens().values()) - {ours.control("<unk>")}


def test_added_tokens_of_llama_decode_without_a_space(tmp_path: Path) -> None:
    """transformers' class for Llama has no normalizer, so that a *normalized* token is decoded as it is written."""
    pytest.importorskip("transformers")
    folder = changed(tmp_path, "llama", [{"content": name, "normalized": True} for name in ("<x>", "<y>", "<z>")])
    ours, _ = check_equal(folder)
    assert ours.decode(ours.parse("a<x>b").ids) == "a<x>b"


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_settings_without_effect_are_no_part_of_an_identity(tmp_path: Path, kind: str) -> None:
    """transformers writes other files next to the same tokenizer.json; the fingerprint that an earlier version noted,
    of all files, is accepted."""
    pytest.importorskip("transformers")
    first, theirs = opened(changed(tmp_path / "first", kind))
    theirs.save_pretrained(tmp_path / "saved")

    def other(name: str, **config: Any) -> Tokenizer:
        shutil.copytree(tmp_path / "first", tmp_path / name)
        path = tmp_path / name / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path / name)

    longer = other("longer", model_max_length=77)
    assert first.identity() == longer.identity()
    if kind == "byte-level":  # transformers rewrites the tokenizer.json of a Llama
        saved = build(tokenizer="HuggingFaceTokenizer", tokenizer_model=tmp_path / "saved")
        assert saved.identity() == first.identity()
    earlier = first.identity()._replace(fingerprint=first._hash(first.vocab_size, "all files"))
    assert earlier != first.identity() and first.made(earlier) and not longer.made(earlier)
    assert other("ends", eos_token="<|im_end|>").identity() != first.identity()


TALK = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello <x>"}]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "llama", "unigram", "tokenizer.model"])
def test_special_tokens_that_are_split_are_text_everywhere(tmp_path: Path, kind: str) -> None:
    """With split_special_tokens, a template's control tokens are text too, so that no stop could be trained."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    if kind == "tokenizer.model":
        sentencepiece(shared("llama2/tokenizer.model"), added=False, split_special_tokens=True)(tmp_path)
    else:
        changed(tmp_path, kind, [{**PLAIN, "content": "<x>", "special": False}], split_special_tokens=True)
    ours, theirs = opened(tmp_path)
    for text in (*TEXTS, "</s><s>", "a<|im_end|>"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.parse(text).ids == ours.parse(text, [(0, 1)]).ids == ids, text
        assert ours.encode_special(text) == [*ours.encode(""), *ids], text
    chat = ChatFormat(untagged("chatml"), ours, "--chat-template t.jinja")
    theirs.chat_template = untagged("chatml")
    expected = theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    assert list(chat.prompt(TALK[:1])) == expected and not chat.ends
    with pytest.raises(ValueError, match="no control token of this tokenizer"):
        chat.labelled(Conversation(TALK))
    plain = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"split_special_tokens": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain))
    path = tmp_path / ("tokenizer.model" if ours.kind == "Llama2Tokenizer" else "tokenizer.json")
    assert not build(tokenizer=ours.kind, tokenizer_model=path).made(ours.identity())
