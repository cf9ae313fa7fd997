"""BERT's losses read the masked tokens and the first of each row; the last layer and the heads run on these alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mega.core.batch import MaskedBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.data.synthetic import masked_batch
from mega.core.device import Device
from mega.core.model import bert
from mega.core.model.bert import BertStage
from mega.core.model.forward import ForwardContext
from mega.core.model.layer import TransformerLayer
from mega.core.model.residual import ResidualState
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.support.ranks import random

ROWS, LENGTH, MASKED = 3, 24, 4
SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 40, "seq_length": LENGTH, "micro_batch": ROWS, "dtype": "fp64"}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)


def stage_of(**flags: Any) -> BertStage:
    run = resolve(compose("tiny-bert", flags={**SHAPE, **DROPOUT, **flags}), 1)
    (stage,) = build_stages(run, Mesh(0), Device.choose("cpu").torch)
    for number, weight in enumerate(weights(stage)):  # so that no weight, such as that of a norm, is a constant
        weight.data += 0.1 * random(*weight.shape, seed=number)
    return stage  # type: ignore[no-any-return]


def batch_for(stage: BertStage) -> MaskedBatch:
    batch = masked_batch(stage.model, LENGTH, torch.arange(ROWS), seed=1)
    assert batch.predicted is not None and batch.loss_weights.sum() > 3
    return batch


def found(stage: BertStage, batch: MaskedBatch) -> dict[str, torch.Tensor]:
    """Losses and gradients, by name."""
    stage.zero_grad()
    scales = torch.tensor([1.3, 0.7][: len(stage.terms)], dtype=torch.float64)
    terms = stage(batch, scales=scales).terms
    pairs = zip(terms.values(), scales, strict=True)
    roots = [term.total * scale if term.root is None else term.root for term, scale in pairs]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    values = {name: part.detach() for name, term in terms.items() for part in term[:2]}
    return values | {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether all values agree within 1e-12 of the largest element."""
    assert set(ours) == set(theirs) and len(ours) > 10
    return all((ours[name] - x).abs().max() <= 1e-12 * x.abs().max().clamp(min=1e-3) for name, x in theirs.items())


@contextmanager
def tokens_counted(stage: BertStage) -> Iterator[list[int]]:
    """Within the context, list the numbers of tokens that leave each layer, then of those that the word head reads."""
    counts: list[int] = []

    def count(_: nn.Module, inputs: tuple[object, ...], stream: ResidualState) -> None:
        counts.append(len(stream.x))
        assert stream.branch is None or len(stream.branch) == len(stream.x)

    hooks = [layer.register_forward_hook(count) for layer in stage.layers]
    with mock.patch.object(bert, "token_loss", wraps=bert.token_loss) as judged:
        yield counts
    counts += [len(call.args[1]) for call in judged.call_args_list]
    for hook in hooks:
        hook.remove()


EVERY, READ, READ_OF_WORDS = ROWS * LENGTH, ROWS * (MASKED + 1), ROWS * MASKED
RECOMPUTE = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}


@pytest.mark.parametrize("dropout", [DROPOUT, NO_DROPOUT], ids=["dropout", "no dropout"])
@pytest.mark.parametrize(
    ("flags", "last", "read"),
    [
        ({}, READ, READ),
        ({"norm_placement": "post", "activation": "gelu"}, READ, READ),
        ({"post_norm_residual": True}, READ, READ),
        ({"binary_head": False}, READ_OF_WORDS, READ_OF_WORDS),
        ({"position": "rope", "qk_norm": True}, READ, READ),
        ({"recompute": "selective"}, READ, READ),
        (RECOMPUTE, READ, READ),
        ({**RECOMPUTE, "recompute_layers": 2}, READ, READ),
        ({**RECOMPUTE, "recompute_method": "block"}, READ, READ),
        ({"lora_rank": 3, "lora_dropout": 0.25}, READ, READ),
        # The layer runs on all tokens, and the heads alone on those that are read.
        ({"window": 5}, EVERY, READ),
        ({"parallel_branches": "one-norm"}, EVERY, READ),
        ({"norm_placement": "both"}, EVERY, READ),
        # Batches of labelled rows do not list masked tokens, which a model without a head for words does not read.
        ({"head": "classification", "classes": 3}, EVERY, EVERY),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 3])
def test_the_tokens_that_losses_read_are_enough(
    flags: dict[str, Any], last: int, read: int, dropout: dict[str, float], zero: int
) -> None:
    """Rows are of several lengths, so some of the listed columns are padding."""
    stage = stage_of(**flags, **dropout)
    if zero == 3:
        stage.with_full_params = lambda unit, run, x: run(x)
    batch = batch_for(stage)
    with tokens_counted(stage) as counts:
        ours = found(stage, batch)
    assert (counts[0], counts[1], counts[-1]) == (EVERY, last, read)
    with tokens_counted(stage) as counts:
        theirs = found(stage, replace(batch, predicted=None))
    assert set(counts) == {EVERY}
    assert same(ours, theirs)
    assert dropout is NO_DROPOUT or not same(theirs, found(stage.eval(), replace(batch, predicted=None)))


def test_a_first_token_that_is_masked_counts_once() -> None:
    """The first token is in `predicted` too, as a masked token of one row and as a filler of another."""
    stage = stage_of()
    batch = batch_for(stage)
    assert batch.predicted is not None
    batch.predicted[:2, 0] = 0
    batch.loss_weights.zero_().scatter_(1, batch.predicted[:, 1:], 1.0)
    batch.loss_weights[0, 0] = 1.0
    read = batch.read(first=True)
    assert read.loss_weights.sum() == batch.loss_weights.sum() == 3 * ROWS + 1
    assert same(found(stage, batch), found(stage, replace(batch, predicted=None)))


def test_fp8_gemms_keep_their_number_of_tokens() -> None:
    """15 tokens are no multiple of 16, which a weight gradient in fp8 sums over."""
    sizes = {"hidden": 32, "seq_length": 32, "micro_batch": ROWS, "dtype": "bf16", "ops": "reference"}
    stage = stage_of(**sizes, fp8=True)
    with tokens_counted(stage) as counts:
        stage(batch_for(stage), scales=torch.ones(2, dtype=torch.float64))
    assert counts[-1] == READ and set(counts[:-1]) == {EVERY}


def test_outputs_are_those_of_all_tokens() -> None:
    stage = stage_of()
    batch = batch_for(stage)
    logits = [stage(each, outputs=True).outputs for each in (batch, replace(batch, predicted=None))]
    assert torch.equal(*logits) and logits[0].shape[:2] == batch.tokens.shape


COLUMNS = torch.tensor([[0, 3, 0, 20, 23], [0, 9, 1, 11, 22], [0, 7, 23, 5, 2]])


def last_layer_of(stage: BertStage, read: Callable[[ForwardContext], ForwardContext]) -> tuple[torch.Tensor, ...]:
    """The output of the last layer, and the gradient of its input, for a context that `read` changes."""
    x = random(ROWS * LENGTH, 16, seed=2).requires_grad_()
    batch = replace(batch_for(stage), lengths=torch.tensor([LENGTH, 12, 23]), predicted=None)
    context = read(stage.context(batch))
    out = stage.layers[-1](ResidualState(x), context).sum(stage.ops).unflatten(0, (ROWS, -1))
    out = out if context.reads is not None else out.gather(1, COLUMNS[..., None].expand(-1, -1, 16))
    (grad,) = torch.autograd.grad(out, [x], random(*out.shape, seed=3))
    return out.detach(), grad


def reading(context: ForwardContext, **changes: Any) -> ForwardContext:
    """The context of a last layer of which COLUMNS are read. changes: fields of the context of these tokens."""
    context = context.reading(1, COLUMNS)
    assert context.reads is not None
    return replace(context, reads=replace(context.reads, context=replace(context.reads.context, **changes)))


@pytest.mark.parametrize("padding", ["masked", "uniform", "zero"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_layer_computes_only_the_tokens_that_are_read(placement: str, padding: str) -> None:
    """Also where padding is read, and a token twice. Documents and dropout keys of other tokens show."""
    stage = stage_of(norm_placement=placement)
    layer = stage.layers[-1]
    assert isinstance(layer, TransformerLayer)
    attention = layer.branches[0].mixer
    attention.value = replace(attention.value, padding=padding)
    whole = last_layer_of(stage, lambda context: context)
    read = last_layer_of(stage, reading)
    for ours, theirs in zip(read, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    wrong: dict[str, Callable[[ForwardContext], torch.Tensor | None]] = {
        "documents": lambda context: context.documents[:, : COLUMNS.shape[1]],
        "row_keys": lambda context: context.row_keys[:, : COLUMNS.shape[1]],
        "keys": lambda context: context.row_keys[:, : COLUMNS.shape[1]].flatten(),
    }
    for name, of_others in wrong.items():
        out, _ = last_layer_of(stage, lambda context: reading(context, **{name: of_others(context)}))  # noqa: B023
        assert not torch.allclose(out, whole[0]), name
