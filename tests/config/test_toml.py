"""A run written as TOML reads back equal, and a file with a mistake is refused where the mistake is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.config.compose import compose
from mega.core.config.presets import PRESETS
from mega.core.config.run import Options, entries, sections, updated
from mega.core.config.schema import Entry
from mega.core.config.toml import parse, read, values, write


def _of(entry: Entry) -> st.SearchStrategy[Any]:
    """Any value that an option can hold, in range or not."""
    kinds: dict[type, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.sampled_from(entry.choices) if entry.choices else st.text(min_size=not entry.may_be_empty),
        bool: st.booleans(),
    }
    value = kinds[entry.kind]
    if entry.many:
        value = st.lists(value, max_size=4).map(tuple)
    return st.none() | value if entry.optional else value


@given(st.fixed_dictionaries({}, optional={name: _of(entry) for name, entry in entries().items()}))
@settings(max_examples=40)
def test_a_written_run_reads_back_equal(options: dict[str, Any]) -> None:
    """Each example holds values for half of all options, and how one is written depends on its type alone."""
    run = updated(Options(), options)
    assert parse(write(run)) == run


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_reads_back_equal(preset: str) -> None:
    assert parse(write(compose(preset))) == compose(preset)


@pytest.mark.parametrize(
    "text",
    ['quote " backslash \\', "line\nbreak\ttab", "unicode 中文 \U0001f600", "\x7f\x00\x1f", "'''", '"""', ""],
)
def test_strings_that_need_escapes(text: str) -> None:
    run = updated(Options(), {"save": text or "runs", "sample_prompts": (text, text)})
    assert parse(write(run)) == run


def test_a_number_without_a_point_is_a_float_where_one_is_meant() -> None:
    assert type(values("[optimizer]\nlr = 1", "x")["lr"]) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modl]\nlayers = 2", "x.toml: [modl]: is not a table (nearest: model); valid: model, precision, "),
        ("[layers]", "x.toml: [layers]: is not a table; the option layers belongs under [model]"),
        ("model = 3", "x.toml: model: must be a table, written [model]"),
        ("[model]\nlayer = 2", "x.toml: [model] layer: is not an option (nearest: layers)"),
        ("[model]\nqqqq = 2", "x.toml: [model] qqqq: is not an option"),
        ("[model]\nlr = 2.0", "x.toml: [model] lr: belongs under [optimizer], not here"),
        ("[model]\nlayers = '2'", "x.toml: [model] layers: '2' must be a whole number"),
        ("[model]\nlayers = 2.0", "x.toml: [model] layers: 2.0 must be a whole number"),
        ("[model]\nlayers = true", "x.toml: [model] layers: True must be a whole number"),
        ("[model]\nbias = 1", "x.toml: [model] bias: 1 must be true or false"),
        (
            "[model]\nnorm = 'rms'",
            "x.toml: [model] norm: 'rms' is not a choice (nearest: rmsnorm); valid: layernorm, ",
        ),
        ("[optimizer]\nlr = 'big'", "x.toml: [optimizer] lr: 'big' must be a number"),
        ("[data]\ndata_path = 'a'", "x.toml: [data] data_path: 'a' must be a list, each a string"),
        (
            "[batch]\nrampup = [1, 2.5, 3]",
            "x.toml: [batch] rampup: [1, 2.5, 3] must be a list, each a whole number",
        ),
        ("[checkpoint]\nsave = ''", 'x.toml: [checkpoint] save: "" must not be empty; leave it out'),
        ("[data]\ndata_path = ['a', '']", 'x.toml: [data] data_path: "" must not be empty; leave it out'),
        ("[model]\nlayers = 2\nlayers = 3", "x.toml: is not TOML: "),
        ("[model\n", "x.toml: is not TOML: "),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        values(text, "x.toml")
    assert str(caught.value).startswith(message)


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        values("[model]\nlayer = 2\nbias = 1\n[nothing]", "x")
    assert len(str(caught.value).splitlines()) == 3


def test_files_that_cannot_be_read(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read(str(tmp_path / "absent.toml"))
    (tmp_path / "latin.toml").write_bytes(b"[model]\n# \xe9")
    with pytest.raises(ValueError, match="must be UTF-8 text; byte 10 is not"):
        read(str(tmp_path / "latin.toml"))


def test_a_byte_order_mark_is_skipped(tmp_path: Any) -> None:
    (tmp_path / "notepad.toml").write_bytes("\ufeff[model]\r\nlayers = 2\r\n".encode())
    assert read(str(tmp_path / "notepad.toml")) == {"layers": 2}


def test_every_option_has_a_section_a_help_and_one_name() -> None:
    assert {entry.section for entry in entries().values()} == set(sections())
    for entry in entries().values():
        assert entry.option.help and not entry.option.help.endswith(".")


def test_a_megatron_spelling_of_several_options_sets_them_in_one_section() -> None:
    owners: dict[str, set[str]] = {}
    for entry in entries().values():
        for spelling in entry.option.megatron:
            owners.setdefault(spelling, set()).add(entry.section)
    assert all(len(sections) == 1 for sections in owners.values())
