"""The value that every attention takes, against its definition for one query and one key."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega.core.ops import cudnn
from mega.core.ops.mask import CAUSAL, FULL, AttentionMask
from tests.support.masks import dense, draw_mask

CPU = torch.device("cpu")


def visible(mask: AttentionMask, b: int, s: int, t: int) -> torch.Tensor:
    found = mask.visible(s, t, CPU)
    return torch.ones(b, s, t, dtype=torch.bool) if found is None else found.expand(b, 1, s, t)[:, 0]


@given(seed=st.integers(0, 1 << 30), b=st.integers(1, 2), s=st.integers(1, 7), t=st.integers(1, 7))
def test_visible_is_the_definition(seed: int, b: int, s: int, t: int) -> None:
    """And what is concluded without looking at documents is true of all of them."""
    mask = draw_mask(random.Random(seed), b, s, t, 2)
    expected = dense(mask, b, s, t)
    assert torch.equal(visible(mask, b, s, t), expected)
    bare = replace(mask, dropout=None)
    if bare.simple_kind(s, t) is not None:
        assert mask.q_documents is None
        square = torch.ones(s, t, dtype=torch.bool)
        assert torch.equal(expected[0], square.tril() if bare.simple_kind(s, t) == "causal" else square)
    elif mask.q_documents is None:
        assert not expected.all() and not (s == t and torch.equal(expected[0], torch.ones_like(expected[0]).tril()))
    if mask.empty(s, t):
        assert not expected.any()
    elif mask.q_documents is None:
        assert expected.any()
    if not mask.may_hide_all(s, t):
        assert expected.any(-1).all()
    elif mask.q_documents is None:
        assert not expected.any(-1).all()


@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_a_part_of_a_mask_is_the_mask_of_the_part(seed: int, data: st.DataObject) -> None:
    b, s, t, heads = 2, 6, 7, 2
    mask = draw_mask(random.Random(seed), b, s, t, heads)
    queries, keys = (
        slice(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))) for n in (s, t)
    )
    part = mask.cut(queries, keys)
    size = (b, queries.stop - queries.start, keys.stop - keys.start)
    assert torch.equal(visible(part, *size), visible(mask, b, s, t)[:, queries, keys])
    if mask.dropout is not None and part.dropout is not None:
        whole = mask.dropout(torch.ones(b, heads, s, t))
        assert torch.equal(part.dropout(torch.ones(b, heads, *size[1:])), whole[:, :, queries, keys])


def test_a_kernel_needs_no_mask_where_the_kind_suffices() -> None:
    assert CAUSAL.simple_kind(5, 5) == "causal" and FULL.simple_kind(3, 5) == "full"
    assert AttentionMask(window=5).simple_kind(5, 5) == "causal" and AttentionMask(window=4).simple_kind(5, 5) is None
    assert CAUSAL.simple_kind(3, 5) is None and AttentionMask(q_offset=2).simple_kind(3, 5) is None
    assert AttentionMask(q_offset=4).simple_kind(1, 5) == "full"  # one more token after four cached ones
    documents = torch.zeros(1, 5, dtype=torch.int64)
    assert AttentionMask(q_documents=documents, k_documents=documents).simple_kind(5, 5) is None


def test_the_edges_of_a_window() -> None:
    """The last position at which something is seen, and the first at which nothing is."""
    for kind, first, last in (("causal", -4, 7), ("full", -7, 7)):
        for offset in (first - 1, first, last, last + 1):
            mask = AttentionMask(kind, window=4, q_offset=offset)  # type: ignore[arg-type]
            expected = dense(mask, 1, 5, 5)[0]
            assert mask.empty(5, 5) == (not expected.any()) == (not first <= offset <= last), offset
            assert mask.may_hide_all(5, 5) == (not expected.any(-1).all())


def test_documents_may_hide_all_but_from_themselves() -> None:
    numbers = torch.arange(3)[None]
    assert not AttentionMask("full", q_documents=numbers, k_documents=numbers).may_hide_all(3, 3)
    assert AttentionMask("full", q_documents=numbers, k_documents=numbers + 1).may_hide_all(3, 3)
    for offset in range(-3, 4):
        for kind in ("causal", "full"):
            mask = AttentionMask(kind, 2, numbers, numbers, q_offset=offset)  # type: ignore[arg-type]
            assert mask.may_hide_all(3, 3) == (not dense(mask, 1, 3, 3).any(-1).all())


@pytest.mark.parametrize("wrong", [{"window": 0}, {"kind": "causla"}, {"k_documents": torch.zeros(1, 1)}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        AttentionMask(**wrong)  # type: ignore[arg-type]


def test_no_kernel_without_soft_caps_takes_one() -> None:
    """The kernels of CUDA take any other mask of 16-bit numbers; a soft cap goes to the plain form."""
    from mega.core.ops.kernels.attention import applies

    x = torch.empty(1, 8, 2, 16, dtype=torch.bfloat16, device="meta")
    for capped in (AttentionMask(softcap=2.0), AttentionMask(window=2, softcap=2.0)):
        assert capped.simple_kind(8, 8) is None and "a soft cap" in capped.features
        assert applies(x, x, replace(capped, softcap=None)) or capped.window is None
        assert not applies(x, x, capped) and not cudnn.applies(x, x, capped)
