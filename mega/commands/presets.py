"""`mega presets`: the models that --model knows by name: their shapes, parameters and memory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mega.core.config.presets import PRESETS

WEIGHTS, TRAINING = 2, 18
"""Bytes a parameter: of bf16 weights; with fp32 gradients, masters and Adam's two moments."""

HEAD = ["preset", "family", "layers", "hidden", "heads", "seq", "vocab", "size", "weights", "training"]

SMALL_VOCABULARY = 1024
"""Of a preset that takes its tokenizer's."""


def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="only these, or all like them")] = None,
) -> int:
    """List the presets of --model: what they are, how many parameters they have, and what these take.

    Weights are in bf16; training adds fp32 gradients, masters and moments, shared out by --tp, --pp and --zero; both in
    GiB. Activations come on top: mega memory-estimate --model NAME counts everything.
    """
    from mega.core.config.compose import nearest

    chosen = [name for name in PRESETS if not names or any(name.startswith(word) for word in names)]
    for word in names or ():
        if not any(name.startswith(word) for name in PRESETS):
            raise ValueError(f"NAME {word}: no preset begins so{nearest(word, PRESETS)}; mega presets lists all")
    rows = [HEAD, *(_row(name) for name in chosen)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, family, *numbers in rows:
        right = (number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True))
        print(name.ljust(widths[0]), family.ljust(widths[1]), *right)
    print("GiB: weights in bf16; training with fp32 gradients, masters and moments too", file=sys.stderr)
    return 0


def _row(name: str) -> list[str]:
    """A preset's cells."""
    from mega.core.architecture import architecture, parameters
    from mega.core.config.compose import compose
    from mega.core.config.resolve import model_alone
    from mega.core.words import count_words

    run = compose(name)
    vocab, options = run.model.vocab, model_alone(run, SMALL_VOCABULARY)
    model, count = architecture(options), parameters(options)
    attention = model.block.attention
    grouped = attention.kv_heads != attention.heads
    heads = f"{attention.heads}/{attention.kv_heads}" if grouped else str(attention.heads)
    layers = "+".join(str(len(stack.layers)) for stack in model.stacks)
    sizes = [layers, str(model.hidden), heads, str(run.batch.seq_length), str(vocab or "any")]
    return [name, model.family, *sizes, count_words(count), *(_gib(count * each) for each in (WEIGHTS, TRAINING))]


def _gib(count: int) -> str:
    """
    >>> _gib(2**31), _gib(10**6), _gib(18 * 10**12)
    ('2.0', '0.001', '16764')
    """
    size = count / 2**30
    return f"{size:.3f}" if size < 0.1 else f"{size:.1f}" if size < 1000 else f"{size:.0f}"
