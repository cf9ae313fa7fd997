"""What fixes a WordPiece tokenizer besides its vocabulary: read as transformers reads it, written so that it does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from tests.support.shared import shared

TEXTS = (
    "George WENT to São Paulo",
    "crème brûlée, naïve café",
    "ΟΔΥΣΣΕΥΣ ΣΑΣ",
    "Ångström Übermut straße İstanbul",
    "中文 text 和 English日本",
    "e\u0301\u0327 combining, \u200bzero\u00adwidth \ue000private\u0378none",
    "a" * 99 + " " + "b" * 101 + " " + "ü" * 150,
    "tabs\tand\nlines\x0b\x85x \u2028y \ufeffz\ufffd",
)


def texts(count: int) -> list[str]:
    """Random strings of letters, marks, signs and blanks of many scripts."""
    draws = random.Random(5)
    ranges = (
        (32, 127),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x370, 0x600),
        (0x4E00, 0x4F00),
        (0x1E00, 0x2070),
        (0xE000, 0xE010),
    )
    return [
        "".join(chr(draws.randrange(*draws.choice(ranges))) for _ in range(draws.randint(1, 40))) for _ in range(count)
    ]


def folder(place: Path, cased: bool, settings: dict[str, Any] | None) -> Path:
    place.mkdir(exist_ok=True)
    source = f"bert/bert-base-{'cased' if cased else 'uncased'}-vocab.txt"
    (place / "vocab.txt").write_bytes(shared(source).read_bytes())
    if settings is not None:
        (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    return place


def opened(place: Path, lower: bool) -> Tokenizer:
    return build(tokenizer=f"BertWordPiece{'LowerCase' if lower else 'Case'}", vocab_file=place / "vocab.txt")


SETTINGS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, {"do_lower_case": False}),
    (True, {"do_lower_case": False, "strip_accents": True}),
    (False, {"do_lower_case": True}),
    (False, {}),
    (False, {"do_lower_case": True, "strip_accents": False}),
    (False, {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": False}),
)


@pytest.mark.parametrize(("cased", "settings"), SETTINGS, ids=str)
def test_settings_are_read_as_transformers_does(tmp_path: Path, cased: bool, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    place = folder(tmp_path / "theirs", cased, settings)
    theirs = transformers.BertTokenizer.from_pretrained(place)
    ours = opened(place, settings.get("do_lower_case", True))
    known = {int(number) for number in theirs.all_special_ids}
    for text in (*TEXTS, *texts(400)):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), ascii(text)
    assert {ours.control(name) for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")} == known


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("settings", [None, {"strip_accents": True}, {"tokenize_chinese_chars": False}], ids=str)
def test_what_is_written_is_read_again(tmp_path: Path, lower: bool, settings: dict[str, Any] | None) -> None:
    """By transformers and by mega: a cased tokenizer's texts are not lower-cased."""
    transformers = pytest.importorskip("transformers")
    more = None if settings is None else {"do_lower_case": lower, **settings}
    ours = opened(folder(tmp_path / "ours", not lower, more), lower)
    written = ours.huggingface_files()["tokenizer_config.json"]
    place = folder(tmp_path / "written", not lower, written)
    theirs, again = transformers.AutoTokenizer.from_pretrained(_with_config(place)), opened(place, lower)
    assert again.identity() == ours.identity()
    for text in TEXTS[:5]:
        found = theirs.encode(text, add_special_tokens=False)
        assert found == again.encode(text)
        assert found == ours.encode(text) or "Σ" in text, "which Python, and so Google, lower-cases by its place"


def _with_config(place: Path) -> Path:
    (place / "config.json").write_text('{"model_type": "bert"}')
    return place


def test_settings_decide_which_tokenizer_it_is(tmp_path: Path) -> None:
    """Those that a kind implies anyway do not; nor do others of transformers in the same file."""
    plain = opened(folder(tmp_path / "plain", False, None), True)
    same = opened(folder(tmp_path / "same", False, {"do_lower_case": True, "model_max_length": 512}), True)
    other = opened(folder(tmp_path / "other", False, {"strip_accents": False}), True)
    assert plain.identity() == same.identity() != other.identity()
    assert plain.made(same.identity()) and not plain.made(other.identity())


def test_settings_that_contradict_the_kind_are_refused(tmp_path: Path) -> None:
    place = folder(tmp_path / "cased", True, {"do_lower_case": False})
    with pytest.raises(ValueError, match=r"do_lower_case false; give --tokenizer BertWordPieceCase"):
        opened(place, True)
    folder(tmp_path / "cased", True, {"do_lower_case": "no"})
    with pytest.raises(ValueError, match=r"do_lower_case 'no': must be true or false"):
        opened(place, True)
    folder(tmp_path / "cased", True, {"tokenizer_class": "T5Tokenizer", "do_lower_case": False})
    assert opened(place, True).encode("A") == opened(folder(tmp_path / "no", True, None), True).encode("A")
