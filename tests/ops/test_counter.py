"""Random numbers by counter: good statistics, and no dependence on how the work is cut."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.ops.counter import (
    OLD_RULE,
    draw,
    keep_mask,
    kept_share,
    key,
    normal_,
    row_keys,
    site_key,
    threshold,
    token_keys,
)
from mega.core.ops.dropout import Dropout, joined

GOLDEN_KEYS = [[-3980738999822071988, 472686883623050346], [-9010243436046604129, 7899383698642119621]]
GOLDEN_NORMALS = [[0.9668075430312354, 1.3766736004865756], [1.4532439085768298, 0.048222391455156166]]
SAMPLES, COLUMNS = torch.arange(64), torch.arange(128)


def mask(probability: float, *, seed: int = 1, layer: int = 0, site: str = "x", width: int = 32) -> torch.Tensor:
    """bool [samples, columns, width]"""
    keys = row_keys(token_keys(seed, SAMPLES, COLUMNS), site_key(layer, site))
    return keep_mask(keys[..., None], torch.arange(width), probability)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_share_of_dropped(probability: float) -> None:
    """Within five standard errors, over all and over each of samples, columns and elements."""
    dropped = ~mask(probability)
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = math.prod(dropped.shape[dim] for dim in dims)
        error = math.sqrt(probability * (1 - probability) / count)
        assert float((dropped.double().mean(dims) - probability).abs().max()) < 5 * error


def test_masks_of_other_keys_are_independent() -> None:
    """Neighbours along every coordinate of the key agree as often as two coins do."""
    first = mask(0.5)
    others = {
        "seed": mask(0.5, seed=2),
        "layer": mask(0.5, layer=1),
        "site": mask(0.5, site="y"),
        "sample": first.roll(1, 0),
        "column": first.roll(1, 1),
        "element": first.roll(1, 2),
        "diagonal": first.roll((1, -1), (0, 1)),
    }
    error = math.sqrt(0.25 / first.numel())
    for name, other in others.items():
        agreement = float((first == other).double().mean())
        assert abs(agreement - 0.5) < 5 * error, name


def test_draws_are_uniform_and_unrelated() -> None:
    """The generator itself, over 2 million draws: every one of its 2^16 values as often as the others; decisions of
    neighbours, of the two halves of a draw, of three and of eight in a row as independent ones would be."""
    rows = row_keys(token_keys(5, torch.arange(16), torch.arange(128)), 1).flatten()[:, None]
    elements = torch.arange(1024)
    draws = draw(rows, elements)
    for bits in (8, 12, 16):
        counts = torch.bincount((draws >> (16 - bits)).flatten(), minlength=1 << bits).double()
        expected = draws.numel() / (1 << bits)
        free = (1 << bits) - 1
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - free) < 5 * math.sqrt(2 * free)
    for probability in (0.1, 0.5):
        dropped = (draws < threshold(probability)).double()
        share = threshold(probability) / (1 << 16)
        assert torch.equal(dropped == 0, keep_mask(rows, elements, probability))
        centred = dropped - share
        for lag in (1, 2, 7, 8, 9, 16, 64, 512):
            other = (centred[:, lag:] * centred[:, :-lag]).sum() / (share * (1 - share))
            assert abs(float(other)) < 5 * math.sqrt(centred[:, lag:].numel()), lag
        three = (centred[:, 2:] * centred[:, 1:-1] * centred[:, :-2]).sum() / (share * (1 - share)) ** 1.5
        assert abs(float(three)) < 5 * math.sqrt(centred[:, 2:].numel())
        eight = dropped.unflatten(1, (-1, 8)).sum(-1).long().flatten()
        counts = torch.bincount(eight, minlength=9).double()
        binomial = [math.comb(8, n) * share**n * (1 - share) ** (8 - n) * eight.numel() for n in range(9)]
        found = [(float(one) - many) ** 2 / many for one, many in zip(counts, binomial, strict=True) if many > 10]
        assert sum(found) < len(found) + 5 * math.sqrt(2 * len(found))


@pytest.mark.parametrize("probability", [1e-9, 0.1, 0.3, 0.99999])
def test_the_realised_share_is_what_scales(probability: float) -> None:
    assert 0 < threshold(probability) < 1 << 16 and kept_share(0.0) == 1
    assert kept_share(probability) == 1 - threshold(probability) / (1 << 16)
    assert abs(kept_share(probability) - (1 - probability)) < 2**-16
    assert kept_share(probability, OLD_RULE) == 1 - probability


def test_columns_in_runs() -> None:
    assert joined([range(0)]) == (range(0),) and joined([range(3, 3), range(5, 6)]) == (range(5, 6),)


def test_a_mask_is_a_function_of_sample_and_column_alone() -> None:
    """Any rows, any columns, any elements of the logical mask can be computed alone."""
    whole = mask(0.3)
    keys = token_keys(1, torch.tensor([41, 7]), torch.arange(100, 110))
    part = keep_mask(row_keys(keys, site_key(0, "x"))[..., None], torch.arange(8, 16), 0.3)
    assert torch.equal(part, whole[[41, 7], 100:110, 8:16])


def test_dropout_keeps_the_mean() -> None:
    x = torch.ones(64 * 128, 32, dtype=torch.float64)
    out = Dropout(token_keys(1, SAMPLES, COLUMNS).flatten(), site_key(0, "x"), 0.25)(x)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert float(out.mean()) == pytest.approx(1.0, abs=5e-3)


def test_keys_are_those_of_every_machine() -> None:
    """Golden values: a change here silently changes every run that is resumed."""
    assert key(1234, "init", "model.norm.weight") == key(1234, "init", "model.norm.weight") != key(1234, "init", "a")
    assert key("a", "bc") != key("ab", "c")
    keys = token_keys(1234, torch.tensor([0, 5]), torch.tensor([0, 9]))
    assert keys.tolist() == GOLDEN_KEYS
    found = torch.empty(2, 2, dtype=torch.float64)
    normal_(found, key(1234, "init", "w"), (0, 0), (2, 2), 1.0)
    torch.testing.assert_close(found, torch.tensor(GOLDEN_NORMALS, dtype=torch.float64), rtol=1e-14, atol=1e-15)


def test_initial_values_do_not_depend_on_the_cut() -> None:
    whole = torch.empty(300, 70)
    normal_(whole, key(1, "w"), (0, 0), (300, 70), 0.02)
    part = torch.empty(45, 13)
    normal_(part, key(1, "w"), (200, 50), (300, 70), 0.02)
    assert torch.equal(part, whole[200:245, 50:63])
    vector = torch.empty(500)
    normal_(vector, key(1, "v"), (0,), (500,), 1.0)
    tail = torch.empty(100)
    normal_(tail, key(1, "v"), (400,), (500,), 1.0)
    assert torch.equal(tail, vector[400:])


def test_initial_values_are_normal() -> None:
    values = torch.empty(1000, 1000, dtype=torch.float64)
    normal_(values, key(3, "w"), (0, 0), (1000, 1000), 0.02)
    scaled = values / 0.02
    assert float(scaled.mean()) == pytest.approx(0.0, abs=5e-3)
    assert float(scaled.var()) == pytest.approx(1.0, abs=1e-2)
    assert float(scaled.pow(4).mean()) == pytest.approx(3.0, abs=0.05)
    inside = [float((scaled.abs() < limit).double().mean()) for limit in (1.0, 2.0, 3.0)]
    assert inside == pytest.approx([math.erf(limit / math.sqrt(2)) for limit in (1.0, 2.0, 3.0)], abs=3e-3)
    assert abs(float((scaled[:, 1:] * scaled[:, :-1]).mean())) < 5e-3  # neighbours
    assert abs(float((scaled[1:] * scaled[:-1]).mean())) < 5e-3
    assert torch.isfinite(values).all()
