"""Blocks of the model on pipeline stages: every block once, in the order in which a microbatch meets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega.core.plan import stage_layers


def walked(layers: tuple[tuple[range, ...], ...]) -> list[int]:
    """Block numbers in the order of the global stages."""
    return [block for chunk in zip(*layers, strict=True) for rank in chunk for block in rank]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_equal_stages_hold_every_block_once_in_order(stages: int, chunks: int, each: int) -> None:
    layers = stage_layers(stages * chunks * each, stages, chunks)
    assert walked(layers) == list(range(stages * chunks * each))
    assert {len(blocks) for rank in layers for blocks in rank} == {each}


@given(st.integers(1, 6), st.integers(1, 3), st.data())
def test_explicit_stages_have_the_sizes_asked_for(stages: int, chunks: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=stages * chunks, max_size=stages * chunks))
    layers = stage_layers(sum(sizes), stages, chunks, sizes)
    assert walked(layers) == list(range(sum(sizes)))
    assert [len(layers[g % stages][g // stages]) for g in range(stages * chunks)] == sizes


def test_interleaved_offsets_are_megatrons() -> None:
    """Chunk c of rank r starts at c * (layers / chunks) + r * (layers of a chunk)."""
    layers = stage_layers(24, stages=4, chunks=3)
    assert [[blocks.start for blocks in rank] for rank in layers] == [
        [c * 8 + r * 2 for c in range(3)] for r in range(4)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4), "--layers 10: must be a multiple of --pp 4 x --chunks 1 = 4, or give --stage-layers"),
        ((12, 4, 2), "--layers 12: must be a multiple of --pp 4 x --chunks 2 = 8"),
        ((0, 1), "--layers 0"),
        ((8, 0), "--pp 0: must be 1 or more"),
        ((8, 2, -1), "--chunks -1: must be 1 or more"),
        ((8, 2, 1, (4, 3)), "--stage-layers 4 3: adds up to 7, must be --layers 8"),
        ((8, 2, 1, (4, 3, 1)), "--stage-layers 4 3 1: has 3 numbers, must have --pp 2 x --chunks 1 = 2"),
        ((8, 2, 1, (9, -1)), "--stage-layers 9 -1: every number must be 0 or more"),
    ],
)
def test_refusals_name_flag_value_and_rule(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        stage_layers(*arguments)  # type: ignore[arg-type]
