"""The seam to flash-attn and apex, with stand-ins in their place: what is handed over, and what comes back."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec

import pytest
import torch

from mega import cli
from mega.core.config.check import check
from mega.core.device import Device
from mega.core.ops.attention import fused
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import CAUSAL, FULL, AttentionMask
from mega.core.ops.norm import add_norm, layer_norm, rms_norm
from mega.core.ops.packages import apex_add_norm, flash_attention
from mega.core.ops.suite import choose
from mega.core.parallel.mesh import Mesh
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.step import train_step
from mega.core.training.wire import build_state
from tests.support.ranks import random
from tests.support.runs import small_run

COMMON = {"dtype": "bf16", "hidden_dropout": 0.0, "attention_dropout": 0.0, "steps": 1, "mock_data": True}
calls: list[str] = []


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """With flash-attn's signature and layout: [b, s, heads, d], key and value heads may be fewer."""
    calls.append("flash")
    assert q.dim() == 4
    return fused(q, k, v, CAUSAL if causal else FULL)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flash, norms = types.ModuleType("flash_attn"), types.ModuleType("apex.normalization.fused_layer_norm")
    flash.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    norms.fused_rms_norm_affine = (  # type: ignore[attr-defined]
        lambda x, weight, shape, eps: calls.append("rms") or rms_norm(x, weight, eps)
    )
    norms.fused_layer_norm_affine = (  # type: ignore[attr-defined]
        lambda x, weight, bias, shape, eps: calls.append("layer") or layer_norm(x, weight, bias, eps)
    )
    for name, module in {
        "flash_attn": flash,
        "apex": types.ModuleType("apex"),
        "apex.normalization": types.ModuleType("apex.normalization"),
        "apex.normalization.fused_layer_norm": norms,
    }.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    calls.clear()
    yield


def test_flash_attention_takes_what_it_can() -> None:
    q, k, v = (random(2, 8, heads, 16, seed=heads).bfloat16() for heads in (4, 2, 2))
    for mask in (CAUSAL, FULL, AttentionMask(window=8)):
        assert torch.equal(flash_attention(q, k, v, mask), fused(q, k, v, mask))
    assert calls == ["flash"] * 3
    documents = torch.zeros(2, 8, dtype=torch.int64)
    for mask in (AttentionMask(q_documents=documents, k_documents=documents), AttentionMask(window=7)):
        assert torch.equal(flash_attention(q, k, v, mask), fused(q, k, v, mask))
    flash_attention(q.float(), k.float(), v.float(), CAUSAL)
    assert calls == ["flash"] * 3


def _most_kept(work: Callable[[], torch.Tensor]) -> int:
    """Elements of the largest tensor that autograd keeps."""
    sizes = [0]

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        work()
    return max(sizes)


def test_what_it_leaves_to_ours_is_recomputed_where_a_run_asks() -> None:
    """Dropout is ours: under selective recompute its weights must not be saved."""
    drop = AttentionDropout(torch.arange(256).expand(2, 256), 1, 0, (range(256),), 0.1)
    mask = AttentionMask(dropout=drop)
    kept = []
    for recompute in (False, True):
        ops = choose(torch.device("cpu"), torch.bfloat16, recompute=recompute, package="flash-attn")
        q, k, v = (random(2, 256, 4, 16, seed=seed).bfloat16().requires_grad_() for seed in range(3))
        kept.append(_most_kept(lambda ops=ops, q=q, k=k, v=v: ops.attention(q, k, v, mask)))
        assert dict(ops.implementations())["attention"] == "packages.flash_attention"
    assert not calls and kept[0] >= 2 * 4 * 256 * 256 > 4 * kept[1]


def test_a_ring_has_no_place_for_it() -> None:
    """Of each part a ring needs the log-sum-exp too."""
    layout = {**COMMON, "ops": "flash-attn", "cp": 2}
    with pytest.raises(ValueError, match="--ops flash-attn: cannot be used in a ring of context ranks"):
        check(small_run("llama", **layout, cp_comm="ring"), 2)
    check(small_run("llama", **layout, cp_comm="all-to-all"), 2)


def test_norms_of_apex() -> None:
    x, branch, weight, bias = random(4, 16, seed=0), random(4, 16, seed=1), random(16, seed=2), random(16, seed=3)
    for shift in (None, bias):
        for found, expected in zip(
            apex_add_norm(x, branch, bias, None, weight, shift, 1e-5),
            add_norm(x, branch, bias, None, weight, shift, 1e-5),
            strict=True,
        ):
            assert torch.equal(found, expected)
    assert calls == ["rms", "layer"]


@pytest.mark.parametrize("package, called", [("flash-attn", "flash"), ("apex", "rms")])
def test_a_run_by_a_package(package: str, called: str) -> None:
    """RepeatedSignal for by name, it is in every block; the loss is that of our own ops."""
    found = {}
    for ops in ("auto", package):
        run = small_run("llama", **{**COMMON, "ops": ops})
        state = build_state(run, Mesh(0), Device.choose("cpu"))
        batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, 0)]
        found[ops] = float(train_step(state, batches, 1e-3, 0.0).loss)
        assert bool(calls) == (ops == package)
    assert set(calls) == {called} and found[package] == pytest.approx(found["auto"], rel=1e-6)
    check(run, 1)


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn")
    line = "pretrain --model tiny-gpt --vocab 100 --micro-batch 1 --mock-data --steps 1 --lr 1e-3 --ops flash-attn"
    assert cli.main(line.split()) == 2
    assert "--ops flash-attn: the package flash_attn is absent here; valid: auto, reference" in capsys.readouterr().err
